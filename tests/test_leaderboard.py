"""scripts/leaderboard.sh: its synthetic tasks, and the command."""

import importlib
import json
import math
import sys

import pytest
import torch
from commands import ROOT, run

from multimax_fairseq.models.config import build_normalizer, translation_config

SCRIPT = ROOT / "scripts" / "leaderboard.sh"


@pytest.fixture(scope="module")
def tasks():
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("leaderboards.tasks")
    sys.path.remove(str(ROOT / "scripts"))


def draw(seed=1):
    return torch.Generator().manual_seed(seed)


def test_multi_key_target_is_the_mean_of_the_relevant_values(tasks):
    query, items, target = tasks.multi_key(32, 64, draw())
    for row in range(32):
        relevant = [x[32:] for x in items[row] if x[:32].equal(query[row])]
        assert 1 <= len(relevant) <= 8
        torch.testing.assert_close(target[row], torch.stack(relevant).mean(0))


@pytest.mark.parametrize("fewest, most, classes", [(1, 8, 16), (8, 8, 4)])
def test_noisy_target_is_the_mean_over_keys_near_the_query(tasks, fewest, most, classes):
    query, items, target = tasks.noisy_copies(
        lambda length: (fewest, most), 0.1, 64, 64, draw(), classes
    )
    near = (items[..., :32] - query[:, None]).square().mean(-1) < 0.01
    counts = near.sum(-1)
    assert fewest <= counts.min() and counts.max() <= most
    mean = (items[..., 32:] * near[..., None]).sum(1) / counts[:, None]
    torch.testing.assert_close(target, mean)
    assert (target > 0).sum(-1).max() <= classes


def test_maximum_target_is_the_class_of_the_largest_number(tasks):
    _, items, target = tasks.maximum(32, 16, draw())
    for row in range(32):
        assert max(items[row].tolist())[1:] == target[row].tolist()


def test_multi_query_asks_once_for_each_key_what_its_value_is(tasks):
    tokens, positions, target = tasks.multi_query(16, 64, draw())
    for row in range(16):
        pairs = dict(tokens[row, :32].view(16, 2).tolist())
        asked = tokens[row, positions[row]].tolist()
        assert len(pairs) == 16 and sorted(asked) == sorted(pairs)
        assert [pairs[key] for key in asked] == target[row].argmax(-1).tolist()
        assert not set(pairs) & set(pairs.values())


@pytest.mark.parametrize("name", ["retrieval", "noisy", "needle", "share", "recall", "maximum"])
def test_score_is_best_for_the_target_and_data_follow_the_seed(tasks, name):
    task = tasks.TASKS[name]
    *inputs, target = task.batch(16, task.test[0], draw())
    perfect = float(task.score(target.clamp_min(1e-30).log(), target))
    uniform = torch.full_like(target, -math.log(target.shape[-1]))
    other = float(task.score(uniform, target))
    assert perfect == pytest.approx(0 if task.is_error else 100, abs=1e-6)
    assert other > perfect + 0.1 if task.is_error else other < perfect - 10
    assert all(map(torch.equal, inputs, task.batch(16, task.test[0], draw())))
    assert not torch.equal(target, task.batch(16, task.test[0], draw(2))[-1])


def test_entries_learn_the_parameters_that_the_flags_give(tasks):
    entries = importlib.import_module("leaderboards.entries").entries()
    defaults = translation_config()()
    for entry in entries.values():
        if not (entry.options or entry.separate_heads or entry.user_dir):
            found = entry.normalizer().state_dict()
            built = build_normalizer(defaults, entry.mapping, tasks.HEADS, tasks.SIZE)
            shapes = {name: value.shape for name, value in built.state_dict().items()}
            assert {name: value.shape for name, value in found.items()} == shapes


@pytest.mark.long
def test_leaderboard_runs_resumes_and_refuses_other_runs(tmp_path):
    command = ["bash", SCRIPT, "--quick", "--seeds", "1", "--out", "out"]
    command += ["--tasks", "noisy,recall,maximum"]
    run(tmp_path, *command)
    files = sorted(tmp_path.glob("out/*/seed-*/result.json"))
    assert len(files) == 3 * 2
    for line in (json.loads(file.read_text()) for file in files):
        assert len(line["scores"]) >= 4 and line["attention"]["largest_score"] > 0
        assert line["attention"]["entropy"] > 0 and line["peak_memory"] > 1e8
    times = [file.stat().st_mtime_ns for file in files]
    (tmp_path / "out/maximum-softmax/seed-1/result.json").unlink()
    first = json.loads(files[0].read_text())
    output = run(tmp_path, *command)
    assert "(1 of 1)" in output
    (note,) = {x for x in output.splitlines() if "not results" in x and "1,000" in x}
    assert note == "These scores are not results: --quick trains for only 50 of 1,000 updates."
    assert (
        sum(file.stat().st_mtime_ns != time for file, time in zip(files, times, strict=True)) == 1
    )
    again = first["command"].split()[1:] + ["--out", "again"]
    run(tmp_path, "bash", SCRIPT, *again)
    (line,) = map(json.loads, (tmp_path / "again/results.jsonl").read_text().splitlines())
    assert line["scores"] == first["scores"] and line["attention"] == first["attention"]

    line = json.loads((tmp_path / "out/noisy-multimax/seed-1/result.json").read_text())
    assert sorted(map(len, line["learned"].values())) == [2, 2, 2, 2]

    plugin = ["--tasks", "maximum", "--user-dir"]
    output = run(tmp_path, *command, *plugin, ROOT / "user_dir/added_mapping")
    assert "(1 of 1)" in output and "| sharpened softmax | 1 |" in output
    output = run(
        *(tmp_path, *command, *plugin[:2], "--entries", "multimax_of_ssmax,affine_multimax")
    )
    assert "| MultiMax of s log(n) x | 1 |" in output and "| MultiMax of t x + b" in output
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "__init__.py").touch()
    output = run(tmp_path, *command, *plugin, "empty", code=1)
    assert "--user-dir 'empty' registers no mapping: pass the folder" in output
    output = run(tmp_path, *command, "--tasks", "sorting", code=1)
    assert "unknown 'sorting' in --tasks: choose from retrieval" in output
    output = run(tmp_path, *(word for word in command if word != "--quick"), code=1)
    assert "trained with another command" in output and "Traceback" not in output
