"""scripts/leaderboard_page.py: comparisons, and the page from lines."""

import importlib
import itertools
import json
import sys

import numpy as np
import pytest
from commands import ROOT
from scipy import stats

from multimax_fairseq.errors import UsageError


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("leaderboard_page")
    for name, file in (
        ("LINES", "lines.jsonl"),
        ("PAGE", "page.md"),
        ("FIGURE", "figure.svg"),
        ("NOISY_FIGURE", "noisy.svg"),
        ("TRANSLATIONS", "none"),
    ):
        monkeypatch.setattr(module, name, tmp_path / file)
    (tmp_path / "none").touch()
    (tmp_path / "page.md").write_text(f"# Title\n\nWords.\n\n{module.MARK}old\n", encoding="utf-8")
    yield module
    for name in ("leaderboard_page", "leaderboards", "leaderboards.entries", "leaderboards.tasks"):
        sys.modules.pop(name, None)


def line_of(row, seed, score, **changes):
    return {
        **{"experiment": "leaderboard", "task": "maximum", "row": row, "seed": seed},
        "scores": {str(n): score for n in (16, 64, 256, 1024, 4096)},
        **{"command": "scripts/leaderboard.sh", "hardware": "a processor", "versions": {}},
        **{"commit": "abc", "date": "2026-01-01", **changes},
    }


def write(out, lines):
    for line in lines:
        folder = out / f"{line['task']}-{line['row']}" / f"seed-{line['seed']}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(json.dumps(line), encoding="utf-8")


def test_holm_multiplies_the_smallest_p_most_and_never_falls(script):
    found = script.tables.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.5})
    assert found == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.5})


def test_compare_pairs_seeds_and_counts_less_error_as_gain(script):
    base = {1: 3.0, 2: 2.0, 3: 4.0, 4: 9.0}
    other = {1: 2.5, 2: 1.8, 3: 3.1, 5: 0.0}
    column = script.Column("", {"softmax": base, "one": other, "two": {1: 1.0}}, 1, True)
    (found,) = script.compare(column, "softmax").values()
    gains = np.array([0.5, 0.2, 0.9])
    assert found.mean == pytest.approx(gains.mean())
    assert found.deviation == pytest.approx(gains.std(ddof=1))
    test = stats.ttest_rel([3, 2, 4], [2.5, 1.8, 3.1])
    assert found.p == pytest.approx(test.pvalue) and found.verdict == 0
    assert found.interval == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert found._replace(mean=-1.0, p=0.01).verdict == -1


def test_page_marks_what_differs_and_keeps_the_words(script, tmp_path):
    lines = [line_of("softmax", seed, 50.0 + seed) for seed in range(1, 6)]
    lines += [line_of("multimax", seed, 60.0 + seed + 0.1 * (seed % 2)) for seed in range(1, 6)]
    lines += [line_of("sink", seed, 50.0 + seed + (-1) ** seed) for seed in range(1, 6)]
    write(tmp_path / "out", lines)
    script.add_runs(tmp_path / "out")
    text = script.page(script.PAGE.read_text(encoding="utf-8"))
    assert text.startswith("# Title\n\nWords.\n") and "old" not in text
    rows = [row.split(" | ") for row in text.split("## ")[1].splitlines() if row.startswith("| ")]
    cells = {row[0].strip("| "): [cell for cell in row[1:] if cell.strip()] for row in rows[2:]}
    assert cells["MultiMax"][0] == "63.1 ± 1.6 +"
    label = script.entries()["sink"].label
    assert not cells[label][0].endswith("+") and cells["softmax"][0] == "53.0 ± 1.6"
    assert "p < 0.001" in text


def test_figure_shows_sizes_and_separate_column_heads(script, monkeypatch):
    kept = []
    monkeypatch.setattr(script.plt, "close", kept.append)
    scores = {"softmax": {1: 50.0, 2: 51.0, 3: 52.0}, "better": {1: 60.0, 2: 61.1, 3: 62.0}}
    scores |= {"same": {1: 51.0, 2: 50.0, 3: 52.0}, "worse": {1: 40.0, 2: 41.1, 3: 42.0}}
    titles = [column.title for column in script.columns([], script.entries())]
    found = [script.Column(title, scores, 1, False) for title in titles]

    script.draw(found, {name: name for name in scores})

    (figure,) = kept
    axis, bar = figure.axes
    first = [text.get_text() for text in axis.texts[:3]]
    compared = script.compare(found[0], "softmax")
    assert first == [f"{compared['better'].size:+.1f}*", "+0.0", f"{compared['worse'].size:+.1f}*"]
    assert "effect size d against softmax" in bar.get_ylabel()
    assert "p < 0.05" in axis.get_xlabel() and "White" in axis.get_xlabel()
    heads = [label.get_window_extent() for label in axis.get_xticklabels()]
    assert all(one.x1 < other.x0 for one, other in itertools.pairwise(heads))


def test_orders_table_counts_less_error_as_better(script):
    lines = [
        line_of(row, seed, score * seed, task=task)
        for row, score in (("multimax_length_scale", 1.0), ("multimax_of_ssmax", 2.0))
        for seed in (1, 2, 3)
        for task in ("noisy", "maximum")
    ]
    rows = [row.split(" | ") for row in script.orders_table(lines).splitlines()[2:]]
    differences = {row[0].strip("| "): row[3] for row in rows}
    assert len(rows) == 6  # multi-key retrieval has no lines
    assert differences["noisy retrieval, 64 (KL, nats)"] == "+2.000 ± 1.000"
    assert differences["max retrieval, 4,096 (accuracy, %)"] == "-2.0 ± 1.0"


def test_noisy_figure_has_the_gain_at_each_noise(script, monkeypatch):
    kept = []
    monkeypatch.setattr(script.plt, "close", kept.append)
    lines = [
        line_of(row, seed, score + 0.01 * seed * (row == "multimax"), task=task)
        for number, task in enumerate(script.NOISES)
        for row, score in (("softmax", 0.5), ("multimax", 0.5 - 0.1 * number))
        for seed in (1, 2, 3)
    ]

    script.draw_noisy(lines, {name: name for name in script.COMPARED})

    (figure,) = kept
    by_noise, by_length = figure.axes  # the counts of relevant keys are not all known
    assert [tick.get_text() for tick in by_noise.get_xticklabels()] == [
        str(noise) for noise in script.NOISES.values()
    ]
    (bars,) = (each for each in by_noise.containers if each.get_label() == "multimax")
    gains = 0.1 * np.arange(5) - 0.02
    np.testing.assert_allclose(np.array(bars[0].get_ydata(), float), gains, atol=1e-12)
    low, high = stats.ttest_1samp([-0.01, -0.02, -0.03], 0).confidence_interval(0.95)
    ends = np.array([segment[:, 1] for segment in bars[2][0].get_segments()])
    np.testing.assert_allclose(ends, [(g + 0.02 + low, g + 0.02 + high) for g in gains], atol=1e-12)
    assert len(by_length.get_xticklabels()) == len(script.TASKS["noisy"].test)


def test_add_runs_keeps_the_newest_and_refuses_what_is_no_result(script, tmp_path):
    write(tmp_path / "one", [line_of("softmax", 1, 50.0)])
    write(tmp_path / "two", [line_of("softmax", 1, 51.0, date="2026-01-02")])
    for out in ("two", "one"):
        script.add_runs(tmp_path / out)
    (line,) = script.stored()
    assert line["scores"]["16"] == 51.0
    for changes in ({"command": "leaderboard.sh --quick"}, {"commit": "abc-dirty"}):
        write(tmp_path / "bad", [line_of("softmax", 1, 1.0, **changes)])
        with pytest.raises(UsageError, match="repeat it without --quick"):
            script.add_runs(tmp_path / "bad")
    write(tmp_path / "other task", [line_of("softmax", 1, 50.0, task="recall", updates=5)])
    script.add_runs(tmp_path / "other task")
    write(tmp_path / "other", [line_of("softmax", 2, 50.0, updates=5)])
    with pytest.raises(UsageError, match="has other updates than the lines"):
        script.add_runs(tmp_path / "other")
    with pytest.raises(UsageError, match="no finished run"):
        script.add_runs(tmp_path / "none")
