"""Collections and logs as they can be: texts that look like formulas, buckets, damaged files."""

import io
import json
import shutil

import collection as made_up
import pandas as pd
import pytest
from commands import PLUGIN, run
from matplotlib.cbook import is_math_text

from multimax_fairseq.analysis import collection, figures, report, training_log
from multimax_fairseq.analysis.figures import densities, output, sparsity, trajectories, weights
from multimax_fairseq.errors import UsageError

TEXTS = ["$", r"$\frac{$", "_a$b$", "US$ 3 and $4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("collections") / "found"
    sizes = {"layers": 1, "heads": 2, "updates": (10,)}
    return made_up.write(found, "multimax", continuous={"encoder": "softmax"}, **sizes)


@pytest.fixture
def copied(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copied")


def legend(figure):
    figure.savefig(io.BytesIO(), format="svg")  # where a formula is read
    shown = [text.get_text() for found in figure.legends for text in found.texts]
    assert not any(map(is_math_text, shown))
    return [text.strip().replace(r"\$", "$") for text in shown]


def test_report_parameters_name_their_layers(folder):
    found = collection.read(folder)
    (table,) = (t for t in report.tables(found) if t.title == "Learned parameters")
    expected = {
        (collection.PLACES[row.place], str(row.layer + 1), report.number(row.value))
        for row in found.parameters.itertuples()
        if row.name == table.head[2].replace(" ", "_")
    }
    assert {tuple(row[:3]) for row in table.rows} == expected


def test_tokens_are_no_formulas(copied):
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
    "subset, why", [("half", "has no target side"), ("valid.de-en", "no split 'valid.de-en'")]
)
def test_a_subset_that_lacks_a_side_is_no_full_disk(data, checkpoint, tmp_path, subset, why):
    path = checkpoint("transformer_multimax")
    folder = shutil.copytree(data / "mt", tmp_path / "mt")
    for end in ("bin", "idx"):
        shutil.copy(folder / f"valid.de-en.de.{end}", folder / f"half.de-en.de.{end}")
    words = ("collect", path, folder, "--subset", subset, "--out", tmp_path / "out")
    said = run(tmp_path, "python", "-m", "multimax_fairseq.analysis", *words, code=1)
    assert why in said and "make room" not in said and "Traceback" not in said


def test_a_beginning_of_a_block_is_no_word(data, checkpoint, tmp_path):
    path = checkpoint("transformer_lm_multimax", "--add-bos-token")
    words = ("collect", path, data / "lm", "--subset", "valid", "--out", tmp_path / "out")
    run(tmp_path, "python", "-m", "multimax_fairseq.analysis", *words)
    counted = pd.read_csv(tmp_path / "out/output.csv")["tokens"].sum()
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", path, "--gen-subset", "valid")
    output = run(tmp_path, *words, "--sample-break-mode", "eos", "--tokens-per-sample", "64")
    assert f"Evaluated {counted:,} tokens" in output


@pytest.mark.parametrize("name", ["pareto", "histograms", "output", "density"])
def test_labels_are_no_formulas_and_are_in_the_legend(folder, name):
    found = collection.read_all([folder] * len(TEXTS))
    for entry, label in zip(found, TEXTS, strict=True):
        entry.label = label
    figure = {
        "pareto": sparsity.pareto,
        "histograms": lambda c: weights.weight_histograms(c, "encoder"),
        "output": output.output_layer,
        "density": figures.heads.density,
    }[name](found)
    assert legend(figure) == TEXTS
    found[0].label = TEXTS[1]
    drawn = next(iter(figures.draw(found[:1])))
    drawn.figure.savefig(io.BytesIO(), format="svg")  # with the label above it


def test_logs_are_named_by_their_files(tmp_path):
    figures_of_one = {"monitor/updates": "2", "monitor/encoder.0/$new_{": "1"}
    files = [tmp_path / f"{text.replace(' ', '')}.log" for text in (r"$\frac{$", "_a", "b")]
    for file in files:
        file.write_text(json.dumps(figures_of_one) + "\n")
    logs = training_log.read_all(files)
    (drawn,) = trajectories.draw(logs)
    assert legend(drawn.figure) == [r"$\frac{$", "_a", "b"]
    (drawn,) = trajectories.draw(logs[:1])
    drawn.figure.savefig(io.BytesIO(), format="svg")


def test_a_log_of_which_nothing_is_drawn_is_refused(tmp_path):
    file = tmp_path / "train.log"
    file.write_text('{"monitor/updates": "2", "monitor/elsewhere.0/entropy": "1"}\n')
    with pytest.raises(UsageError, match="of 'train' are of no place .*encoder.*: give another"):
        list(trajectories.plot([training_log.read(file)], tmp_path / "out"))
    with pytest.raises(UsageError, match="is a folder, not a file: check its path"):
        training_log.read(tmp_path)


def test_buckets_are_drawn_by_their_ranks(folder, copied):
    """Of one model the frequent words alone, in another order and of a smaller dictionary."""
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


def rows(text, change):
    head, *rest = text.splitlines(keepends=True)
    return head + "".join(change(rest))


def without(key, *at):
    def change(text):
        value = found = json.loads(text)
        for name in at:
            found = found[name]
        if key == "settings":
            found[key] = None
        else:
            del found[key]
        return json.dumps(value)

    return change


@pytest.mark.parametrize(
    ("file", "damage", "why"),
    [
        ("heads.csv", lambda text: text[:-20], "its last line has no end"),
        ("output.csv", lambda text: text[:-1], "its last line has no end"),
        ("layers.csv", lambda text: rows(text, lambda r: []), "it has no rows"),
        ("heads.csv", lambda text: rows(text, lambda r: [*r, r[0]]), "two rows have the same"),
        ("parameters.csv", lambda text: rows(text, lambda r: [*r, r[-1]]), "two rows have"),
        ("output.csv", lambda text: text.replace("51-200", "rare"), "bucket names no ranks"),
        ("examples.json", without("source", 0), "a source and a target"),
        ("examples.json", without("tokens", 0, "target"), "a source and a target"),
        ("collection.json", without("settings", "checkpoints", 0), "settings are no dict"),
    ],
)
def test_damaged_collections_are_refused(copied, file, damage, why):
    path = copied / file
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match=rf"{file}' is not what .*{why}.*: collect again") as found:
        collection.read(copied)
    assert "\n" not in str(found.value)
