"""scripts/results.py and scripts/tabulate: docs/results.md is generated from docs/results."""

import importlib
import json
import statistics
import sys

import pytest
from commands import ROOT, run
from scipy import stats

from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

# The fields that are needed to reproduce a result.
SIGNATURE = "experiment row seed metric value signature protocol evaluation validation parameters"
SIGNATURE += " updates hardware data command versions commit date"


@pytest.fixture(scope="module")
def results():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("results")
    sys.path.remove(str(ROOT / "scripts"))


def test_page_equals_the_committed_file(results):
    for file, make in ((results.PAGE, results.page), (results.README, results.front_page)):
        text = file.read_text(encoding="utf-8")
        assert make(text) == text
    with pytest.raises(UsageError, match="has 0 tables that begin with attention and seeds"):
        results.front_page("nothing")
    with pytest.raises(UsageError, match="has no line '<!-- Below"):
        results.page("nothing")


@pytest.mark.parametrize("experiment", ["multi30k", "speeches"])
def test_lines_of_have_all_reproduction_fields(results, experiment):
    lines = results.lines_of(experiment)
    known = results.Experiment.read(experiment).changes
    assert len({results.key(line) for line in lines}) == len(lines) > 0
    for line in lines:
        assert set(SIGNATURE.split()) <= line.keys() and line["experiment"] == experiment
        assert line["row"] in known and len(line["data"]) == 64
        assert line["commit"] and not line["commit"].endswith("-dirty")
        assert line["command"].startswith(f"fairseq-train data/{experiment}")
        assert not any(word.startswith("/") for word in line["command"].split())
        words = line["command"].split()
        assert words[words.index("--seed") + 1] == str(line["seed"])
        if experiment == "multi30k":
            assert len(line["hypotheses"]) == 64
            assert ("bootstrap" in line) == (line["row"] != "softmax")
        else:
            assert line["word_perplexity"] > line["value"] > 1
    assert len({line["data"] for line in lines}) == 1  # all rows have the same data


def test_flags_name_architecture_and_optimizer(results):
    changes = {"model": {"_name": "lm"}, "optimizer": {"_name": "adam"}, "common": {"fp16": True}}
    changes["optimization"] = {"lr": [0.001]}
    assert results.flags(changes) == "`--arch lm --optimizer adam --fp16 --lr 0.001`"


def run_of(folder, row, seed, value, texts):
    run = folder / row / f"seed-{seed}"
    run.mkdir(parents=True)
    output = "".join(f"H-{n}\t-0.5\t{text}\n" for n, text in enumerate(texts))
    (run / "evaluate.log").write_text(output)
    line = {"experiment": "multi30k", "row": row, "seed": seed, "value": value, "chrf": 50.0}
    line |= {"tokenized_bleu": value, "validation": value, "hypotheses": "0" * 64, "date": "now"}
    line |= {"evaluation": ["fairseq-generate", "data-bin"], "signature": "s", "protocol": "p"}
    line |= {"data": "1", "hardware": "h", "versions": {"torch": "2"}, "commit": "c"}
    line |= {"updates": 9, "command": f"fairseq-train data --lr 1 --seed {seed} --save-dir {run}"}
    (run / "result.json").write_text(json.dumps(line) + "\n")


def test_add_runs_compares_runs_once(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "DATA", tmp_path / "kept")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    right = [f"this is sentence number {n} of a text that is long enough" for n in range(40)]
    wrong = [text.replace("this is", "that was") if n % 2 else text for n, text in enumerate(right)]
    (tmp_path / "data-bin").mkdir()
    (tmp_path / "data-bin" / "test.reference.en").write_text("\n".join(right) + "\n")
    out = tmp_path / "out"
    values = {"softmax": (30.0, 31.0, 32.0), "multimax": (30.5, 31.7, 32.3), "sparsemax": (9, 9, 9)}
    values["temperature"] = (30.0, 31.0)  # too few seeds to compare
    for row, scores in values.items():
        for seed, value in enumerate(scores, 1):
            texts = right if row == "multimax" and seed < 3 else wrong
            run_of(out, row, seed, float(value), texts)
    results.add_runs(out)
    lines = results.lines_of("multi30k")
    order = [("softmax", 1), ("softmax", 2), ("softmax", 3), ("sparsemax", 1)]
    assert [results.key(line) for line in lines][:4] == order and len(lines) == 11
    found = {results.key(line): line.get("bootstrap") for line in lines}
    assert found["softmax", 1] is None and found["multimax", 1]["difference"] > 5
    assert found["multimax", 1]["p"] < 0.05
    assert found["multimax", 3] == {"difference": 0, "p": 1}
    before = (results.DATA / "multi30k.jsonl").read_text()
    monkeypatch.setattr(results, "paired_bootstrap", None)  # must not run again
    results.add_runs(out)
    assert (results.DATA / "multi30k.jsonl").read_text() == before

    page = results.page(f"head\n{results.MARK}old\n")
    assert page.startswith(f"head\n{results.MARK}\n## Translation") and "old" not in page
    row = next(line for line in page.splitlines() if line.startswith("| multimax |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    differences = [0.5, 0.7, 0.3]
    test = stats.ttest_1samp(differences, 0)
    low, high = test.confidence_interval(0.95)
    assert cells[1:7] == [
        *("the default", "1, 2, 3", f"31.50 ± {statistics.stdev(values['multimax']):.2f}"),
        # The larger of two p values: Holm's correction leaves it as it is.
        *("+0.50 ± 0.20", f"{low:+.2f} to {high:+.2f}", f"{test.pvalue:.3f}"),
    ]
    assert cells[7] == "2, 0 of 3" and cells[-1] == "34.7 ± 0.07"
    sparsemax = next(line for line in page.splitlines() if line.startswith("| sparsemax |"))
    p = stats.ttest_1samp([-21.0, -22.0, -23.0], 0).pvalue * 2
    assert f"| -22.00 ± 1.00 | -24.48 to -19.52 | {p:.3f} |" in sparsemax
    assert "| temperature |" in page and "minus temperature" not in page
    run_of(out, "softmax", results.NEW_SEEDS, 1.0, wrong)
    results.add_runs(out)
    before, _, new = results.page(results.MARK).partition("### New seeds")
    assert row in before and "| 6 | 1.00 |" in new and "| 6 |" not in before
    monkeypatch.setattr(results, "paired_bootstrap", lambda *_: {"difference": 0, "p": 1})
    differences = {"multimax": (0.5, 0.7, 0.3), "self_attention": (1.0, 2.0, 4.0)}
    for seed in (17, 18, 19):
        run_of(out, "softmax", seed, 2.0, wrong)
        for name, own in differences.items():
            run_of(out, name, seed, 2.0 + own[seed - 17], wrong)
    results.add_runs(out)
    new, _, rest = results.page(results.MARK).partition("### Seeds fixed in advance")
    assert "2.00 |" not in new.partition("### New seeds")[2]
    fixed, _, others = rest.partition("### Other rows with these seeds")
    for part, name in ((fixed, "multimax"), (others, "self_attention")):
        found = next(line for line in part.splitlines() if line.startswith(f"| {name} |"))
        p = stats.ttest_1samp(differences[name], 0).pvalue  # uncorrected
        assert f"| 17, 18, 19 | {2 + statistics.mean(differences[name]):.2f} ±" in found
        assert f" | {p:.3f} |" in found and "| softmax |" in part
    assert "self_attention" not in fixed and "| multimax |" not in others
    text = results.front_page("a\n| attention | seeds | of | old |\n| --- |\n| b |\n\nc\n")
    assert text.startswith("a\n| attention | seeds | SacreBLEU |") and text.endswith(" |\n\nc\n")
    assert f"| MultiMax | 3 | {' | '.join(cells[3:7])} | 34.7 ± 0.07 |\n" in text


def test_rates_selects_the_lowest_validation_over_common_seeds(results):
    experiment = results.Experiment.read("reviews")
    # {row: {seed: (validation, test)}}; the lowest test score is at a rate that is not selected.
    known = {
        "softmax": {1: (80, 100), 2: (82, 101), 3: (81, 102)},
        "softmax_lr_0.001": {1: (90, 50)},
        "softmax_lr_0.006": {1: (85, 60)},
        "attention": {1: (80, 99), 2: (70, 99)},
        "attention_lr_0.001": {1: (90, 50)},
        "attention_lr_0.006": {1: (79, 98), 2: (79, 97), 3: (79, 99)},
        "temperature": {1: (80, 100)},  # without runs at the other rates
    }
    lines = [
        {"row": row, "seed": seed, "validation": validation, "word_perplexity": test}
        for row, of_row in known.items()
        for seed, (validation, test) in of_row.items()
    ]
    assert results.rates(experiment, lines).splitlines()[2:] == [
        "| softmax | 90.00 | 80.00 | 85.00 | 1 | 0.003 |",
        "| attention | 90.00 | 80.00 | 79.00 | 1 | 0.006 |",
    ]
    assert results.rates(experiment, lines[-1:]) == ""
    # The rows of other learning rates have no comparison.
    assert (
        not {"attention_lr_0.006", "softmax_lr_0.001"} & results.compare(experiment, lines).keys()
    )


def test_compare_uses_the_softmax_of_the_group(results):
    experiment = results.Experiment.read("reviews")
    lines = [
        {"row": row, "seed": seed, "word_perplexity": score + seed * seed % 3}
        for row, score in (("softmax", 9.0), ("deep_softmax", 5.0), ("deep_attention", 7.0))
        for seed in (1, 2, 3)
    ]
    found = results.compare(experiment, lines)
    assert set(found) == {"deep_attention"} and found["deep_attention"].mean == 2.0


def test_by_layer_has_the_mean_of_each_layer(results):
    lines = [
        {"row": "a", "layers": [{"sparsity": 0.1, "kurtosis": k}, {"sparsity": 0.5, "kurtosis": 3}]}
        for k in (3, 5)
    ]
    assert results.by_layer([*lines, {"row": "b"}], ["a", "b"]).splitlines() == [
        "| row | statistic | 1 | 2 |",
        "| --- | --- | --- | --- |",
        "| a | sparsity | 0.10 | 0.50 |",
        "| a | kurtosis of the input | 4.00 | 3.00 |",
    ]


@pytest.mark.parametrize(
    "before, after, said",
    [
        ('"data": "1"', '"data": "2"', "has other data than the lines of docs/results"),
        ('"updates": 9', '"updates": 3', "has other updates than the lines"),
        ("--lr 1", "--lr 2", "was not trained as row softmax of docs/results (--lr)"),
        ("--lr 1", "--lr 1 --fp16", "was not trained as row softmax of docs/results (--fp16)"),
    ],
)
def test_add_runs_refuses_other_data_or_settings(
    results, tmp_path, monkeypatch, before, after, said
):
    monkeypatch.setattr(results, "DATA", tmp_path / "kept")
    run_of(tmp_path / "first", "softmax", 1, 30.0, [])
    results.add_runs(tmp_path / "first")
    kept = (results.DATA / "multi30k.jsonl").read_text()
    run_of(tmp_path / "second", "softmax", 2, 30.0, [])
    file = tmp_path / "second" / "softmax" / "seed-2" / "result.json"
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(UsageError) as error:
        results.add_runs(tmp_path / "second")
    assert said in str(error.value) and (results.DATA / "multi30k.jsonl").read_text() == kept


def test_add_runs_keeps_the_newest(results, tmp_path, monkeypatch):
    monkeypatch.setattr(results, "DATA", tmp_path / "kept")
    for out, score, date in (("new", 2.0, "2026"), ("old", 1.0, "2025")):
        run_of(tmp_path / out, "softmax", 1, score, [])
        file = tmp_path / out / "softmax" / "seed-1" / "result.json"
        file.write_text(file.read_text().replace('"now"', f'"{date}"'))
        results.add_runs(tmp_path / out)
    assert [line["value"] for line in results.lines_of("multi30k")] == [2.0]


def test_add_runs_refuses_other_experiments(results, tmp_path):
    with pytest.raises(UsageError, match="has no finished run"):
        results.add_runs(tmp_path)
    run_of(tmp_path, "softmax", 1, 1.0, [])
    file = tmp_path / "softmax" / "seed-1" / "result.json"
    file.write_text(file.read_text().replace("multi30k", "iwslt14"))
    with pytest.raises(
        UsageError, match="is of iwslt14: only multi30k, speeches, tatoeba, reviews are"
    ):
        results.add_runs(tmp_path)


def test_tabulate_shows_differing_updates(results, tmp_path):
    line = results.lines_of("multi30k")[0]
    file = tmp_path / "lr=1" / "results.jsonl"
    file.parent.mkdir()
    file.write_text("".join(json.dumps(line | {"updates": n}) + "\n" for n in (2500, 1000)))
    tabulate = str(ROOT / "scripts" / "tabulate")
    table = run(tmp_path, tabulate, str(file))
    assert "| 1,000, 2,500 |" in table and table.count(f"| {line['parameters']:,} |") == 1
    assert "scripts/tabulate [LABEL=]RESULTS.jsonl" in run(tmp_path, tabulate, code=2)
