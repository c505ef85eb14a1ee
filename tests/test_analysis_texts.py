"""Text in figures: formulas, labels, buckets."""

import io
import json
import shutil

import pandas as pd
import pytest
import synthetic_collection
from commands import PLUGIN, run
from matplotlib.cbook import is_math_text
from toy_collection import gather

from multimax_fairseq.analysis import collection, figures, report, training_log
from multimax_fairseq.analysis.figures import densities, output, sparsity, trajectories, weights
from multimax_fairseq.errors import UsageError

TEXTS = ["$", r"$\frac{$", "_a$b$", "US$ 3 and $4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("collections") / "found"
    sizes = {"layers": 1, "heads": 2, "updates": (10,)}
    return synthetic_collection.write(found, "multimax", continuous={"encoder": "softmax"}, **sizes)


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def legend(figure):
    figure.savefig(io.BytesIO(), format="svg")  # parses the formulas
    shown = [text.get_text() for found in figure.legends for text in found.texts]
    assert not any(map(is_math_text, shown))
    return [text.strip().replace(r"\$", "$") for text in shown]


def test_report_parameters_name_their_layers(folder):
    found = collection.read(folder)
    (table,) = (t for t in report.tables(found) if t.title == "Learned parameters")
    expected = {
        (collection.KINDS[row.kind], str(row.layer + 1), report.number(row.value))
        for row in found.parameters.itertuples()
        if row.name == table.head[2].replace(" ", "_")
    }
    assert {tuple(row[:3]) for row in table.rows} == expected


def test_figures_draw_tokens_as_plain_text(copied):
    (example, *_) = json.loads((copied / "examples.json").read_text())
    tokens = example["source"]["tokens"]
    tokens[: len(TEXTS)] = TEXTS
    (copied / "examples.json").write_text(json.dumps([example]))
    figure = densities.source_densities(collection.read(copied), "encoder")
    figure.savefig(io.BytesIO(), format="svg")
    shown = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [text.strip().replace(r"\$", "$") for text in shown] == tokens
    assert not any(map(is_math_text, shown))


@pytest.mark.parametrize(
    "subset, why", [("half", "has no target side"), ("valid.de-en", "no subset 'valid.de-en'")]
)
def test_collect_names_the_missing_side_of_a_subset(data, checkpoint, tmp_path, subset, why):
    path = checkpoint("transformer_multimax")
    folder = shutil.copytree(data / "mt", tmp_path / "mt")
    for end in ("bin", "idx"):
        shutil.copy(folder / f"valid.de-en.de.{end}", folder / f"half.de-en.de.{end}")
    with pytest.raises(UsageError, match=why) as caught:
        gather(tmp_path / "out", path, data=folder, subset=subset)
    assert "make room" not in str(caught.value)


def test_collect_counts_tokens_like_eval_lm(data, checkpoint, tmp_path):
    path = checkpoint("transformer_lm_multimax", "--add-bos-token")
    folder = gather(tmp_path / "out", path, data=data / "lm")
    counted = pd.read_csv(folder / "output.csv")["tokens"].sum()
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", path, "--gen-subset", "valid")
    output = run(tmp_path, *words, "--sample-break-mode", "eos", "--tokens-per-sample", "64")
    assert f"Evaluated {counted:,} tokens" in output


@pytest.mark.parametrize("name", ["pareto", "histograms", "output"])
def test_figures_draw_labels_as_plain_text(folder, name):
    found = collection.read_all([folder] * len(TEXTS))
    for entry, label in zip(found, TEXTS, strict=True):
        entry.label = label
    figure = {
        "pareto": sparsity.pareto,
        "histograms": lambda c: weights.weight_histograms(c, "encoder"),
        "output": output.output_layer,
    }[name](found)
    assert legend(figure)[: len(TEXTS)] == TEXTS
    found[0].label = TEXTS[1]
    drawn = next(iter(figures.draw(found[:1])))
    drawn.figure.savefig(io.BytesIO(), format="svg")  # including the label above it


def test_trajectories_name_runs_by_their_files(tmp_path):
    lines = [{"num_updates": n, "monitor/updates": n, "monitor/encoder.0/$new_{": n} for n in "24"]
    files = [tmp_path / f"{text.replace(' ', '')}.log" for text in (r"$\frac{$", "_a", "b")]
    for file in files:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    logs = training_log.read_all(files)
    (drawn,) = trajectories.draw(logs)
    assert legend(drawn.figure) == [r"$\frac{$", "_a", "b"]
    (drawn,) = trajectories.draw(logs[:1])
    drawn.figure.savefig(io.BytesIO(), format="svg")


def test_output_layer_sorts_buckets_by_rank(folder, copied):
    """The second collection has other buckets in another order."""
    frame = pd.read_csv(copied / "output.csv")
    frame = frame.iloc[[3, 0, 1]].assign(bucket=["1001-", "1-50", "51-200"])
    frame.to_csv(copied / "output.csv", index=False)
    figure = output.output_layer(collection.read_all([copied, folder]))
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert ticks == ["1-50", "51-200", "201-1000", "1001-4000", "1001-", "4001-"]
    for axis, name in zip(figure.axes, ("entropy", "sparsity", "nll", "probability"), strict=True):
        lines = [line for line in axis.get_lines() if line.get_linestyle() != ":"]
        drawn = dict(zip(*lines[0].get_data(), strict=True))
        assert drawn == dict(zip([4, 0, 1], frame[name], strict=True))
        assert list(lines[1].get_xdata()) == [0, 1, 2, 3, 5]
