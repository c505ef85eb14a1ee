"""The experiment scripts end to end, from a tiny archive to the table, with a kill in between."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from commands import ROOT, programs_first, run
from corpus import ENGLISH, GERMAN
from prep_archives import pack, xml

pytestmark = pytest.mark.long

LAYER = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
TINY = {
    "iwslt14": f"{LAYER.format('encoder')} {LAYER.format('decoder')} --max-tokens 400",
    "wikitext103": f"{LAYER.format('decoder')} --decoder-input-dim 16 --decoder-output-dim 16 "
    "--tokens-per-sample 32 --max-tokens 128 --update-freq 1 "
    "--save-interval-updates 1 --keep-interval-updates 2",
    "iwslt17": "--encoder-embed-dim 16 --encoder-hidden-size 16 --decoder-embed-dim 16 "
    "--decoder-hidden-size 16 --batch-size 20",
}
# {experiment: (a row beside softmax, seeds, the paper's figure for softmax)}. The rows differ in
# options alone, which test_experiments.py checks.
KNOWN = {
    "iwslt14": ("multimax", (1,), "34.4 ± 0.07"),
    "wikitext103": ("multimax", (1,), "29.4"),
    "iwslt17": ("continuous_sparsemax", (1, 2), "23.92"),
}
KILLED = "iwslt17"
TRAIN = "--lr 0.005 --warmup-updates 2 --log-interval 1 --num-workers 0"


def in_folder(files: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"de-en/{name}", text) for name, text in files.items()]


def archive(experiment: str, folder: Path) -> Path:
    """Write an archive in the official layout; return its path."""
    if experiment == "wikitext103":
        for split, lines in (("train", ENGLISH * 4), ("valid", ENGLISH), ("test", ENGLISH)):
            (folder / f"wiki.{split}.tokens").write_text(" \n = Rights = \n" + lines)
        return folder
    files = {}
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        lines = text.splitlines()
        head = "<url>http://example.org</url>\n<title>Title</title>\n"
        train = "".join(f"{line} {n}\n" for n in range(4) for line in lines)
        files[f"train.tags.de-en.{language}"] = head + train
        if experiment == "iwslt14":
            names = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
            for number, name in enumerate(names):
                files[f"IWSLT14.{name}.de-en.{language}.xml"] = xml(lines[number::5])
        else:
            for number, name in enumerate(("dev2010", *(f"tst201{year}" for year in range(6)))):
                files[f"IWSLT17.TED.{name}.de-en.{language}.xml"] = xml(lines[number::7])
            source, other = ("de", "en") if language == "de" else ("en", "de")
            tests = {
                f"IWSLT17.TED.tst201{year}.{source}-{other}.{source}.xml": xml(lines[year::9])
                for year in (6, 7)
            }
            path = f"2017-01-ted-test/texts/{source}/{other}/{source}-{other}.tgz"
            pack(folder / path, in_folder(tests))
    if experiment == "iwslt14":
        return pack(folder / "de-en.tgz", in_folder(files))
    pack(folder / "2017-01-trnted/texts/de/en/de-en.tgz", in_folder(files))
    return folder


def start(command: list[str], folder: Path) -> subprocess.Popen:
    """Start the script in its own process group, to kill it with all its children."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=programs_first(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.1)


@pytest.fixture(scope="module", params=list(TINY))
def experiment(request, tmp_path_factory):
    """(experiment, its command, its folder, the runs finished before a kill, all output)."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    row, seeds, _ = KNOWN[name]
    command = [
        *(str(ROOT / "scripts" / f"{name}.sh"), "--archive", str(archive(name, folder))),
        *("--data-bin", str(folder / "data" / "data-bin"), "--out", str(folder / "out")),
        *("--seeds", ",".join(map(str, seeds)), "--rows", f"softmax,{row}", "--max-update", "3"),
        *("--", *TINY[name].split(), *TRAIN.split()),
    ]
    if name != KILLED:
        return name, command, folder, {}, [run(folder, *command)]
    process = start(command, folder)
    wait_for(lambda: list(folder.glob("out/*/seed-1/result.json")), process)
    known = set(folder.glob("out/*/seed-*/train.log"))
    wait_for(
        lambda: any(
            " num_updates=" in file.read_text() and file.parent.parent.name != "softmax"
            for file in folder.glob("out/*/seed-*/train.log")
        ),
        process,
    )
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert known
    finished = {f: f.stat().st_mtime_ns for f in folder.glob("out/*/seed-*/result.json")}
    # Two scripts at once share the runs.
    processes = [start(command, folder) for _ in range(2)]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    return name, command, folder, finished, outputs


# The runner's behaviour that does not depend on the experiment.
in_one_experiment = pytest.mark.parametrize("experiment", [KILLED], indirect=True)


def results(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / "results.jsonl").open()]


def test_experiment_tabulates_all_rows_and_seeds(experiment):
    name, _, folder, _, outputs = experiment
    row, seeds, paper = KNOWN[name]
    rows = {(r["row"], r["seed"]): r for r in results(folder)}
    assert rows.keys() == set(itertools.product(("softmax", row), seeds))
    table = (folder / "out" / "table.md").read_text()
    assert any(table in output for output in outputs)
    best = folder / "out" / row / f"seed-{seeds[-1]}" / "checkpoint_best.pt"
    assert all(f"multimax-analyze collect {best} {folder}" in output for output in outputs)
    lines = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == 2
    expected = set()
    for each in ("softmax", row):
        values = [rows[each, seed]["value"] for seed in seeds]
        spread = f" ± {statistics.stdev(values):.2f}" if len(seeds) > 1 else ""
        expected.add(f"{statistics.mean(values):.2f}{spread}")
    assert {line[1] for line in lines} == expected
    assert lines[0][0].endswith("softmax") and lines[0][-1].startswith(paper)


def test_experiment_records_how_to_reproduce_a_result(experiment):
    name, _, folder, _, _ = experiment
    unknown = sum(result["peak_memory"] is None for result in results(folder))
    assert unknown <= (name == KILLED)
    for result in results(folder):
        command = shlex.split(result["command"])
        assert Path(command[0]).name == "fairseq-train"
        assert command[command.index("--seed") + 1] == str(result["seed"])
        written = folder / "out" / result["row"] / f"seed-{result['seed']}" / "command"
        there = written.read_text().replace(f"{ROOT}/", "").split(" ", 1)
        assert [Path(there[0]).name, there[1].strip()] == result["command"].split(" ", 1)
        assert str(ROOT) not in json.dumps(result)
        assert result["versions"]["torch"] and result["signature"] and result["hardware"]
        assert len(result["data"]) == 64
        assert result["parameters"] > 1000 and result["updates"] == 3
        assert result["tokens_per_second"] > 0
        # Unknown if the only process was killed.
        assert result["peak_memory"] is None or result["peak_memory"] > 1e8
        assert result["seconds"] >= 0
        if name != "wikitext103":
            longest = ["0", "80"] if name == "iwslt17" else ["1.2", "10"]
            words = result["evaluation"]
            assert [words[words.index(f"--max-len-{x}") + 1] for x in "ab"] == longest
            assert "case:lc" in result["signature"] and "raw text" in result["protocol"]
            assert 0 <= result["tokenized_bleu"] <= 100 and 0 <= result["chrf"] <= 100
            assert len(result["hypotheses"]) == 64 and 0 <= result["validation"] <= 100
        else:
            assert result["value"] > 1 and "context window 25" in result["signature"]


@in_one_experiment
def test_experiment_skips_finished_runs(experiment):
    name, command, folder, finished, _ = experiment
    runs = 2 * len(KNOWN[name][1])
    assert 1 <= len(finished) < runs
    assert all(file.stat().st_mtime_ns == time for file, time in finished.items())
    before = (folder / "out" / "table.md").read_text()
    output = run(folder, *command)
    assert output.count("Nothing to do") >= runs and before in output
    logs = itertools.chain.from_iterable(
        file.read_text().splitlines() for file in folder.glob("out/*/seed-*/train.log")
    )
    starts = sum(line.startswith("=== fairseq-train starts") for line in logs)
    assert starts in (runs, runs + 1)  # the killed run resumed, unless it was complete


@in_one_experiment
def test_experiment_does_not_train_past_the_last_checkpoint(experiment):
    name, command, folder, _, _ = experiment
    run_folder = folder / "out" / KNOWN[name][0] / "seed-2"
    before = json.loads((run_folder / "result.json").read_text())
    for name in ("trained", "result.json"):
        (run_folder / name).unlink()
    run(folder, *command)
    after = json.loads((run_folder / "result.json").read_text())
    assert (after["updates"], after["value"]) == (3, before["value"])


@in_one_experiment
def test_experiment_refuses_another_command(experiment):
    _, command, folder, _, _ = experiment
    output = run(folder, *command, "--dropout", "0.7", code=1)
    assert re.search(r"error: '.*seed-1' was trained with another command", output)
    assert "Traceback" not in output


def test_evaluate_prints_the_score_of_the_run(experiment, tmp_path):
    name, _, folder, _, _ = experiment
    row = KNOWN[name][0]
    result = next(r for r in results(folder) if r["row"] == row)
    checkpoint = folder / "out" / row / f"seed-{result['seed']}" / "checkpoint_best.pt"
    evaluate = ("multimax-evaluate", checkpoint)
    data = folder / "data" / "data-bin"
    output = run(folder, *evaluate, data, "--json", tmp_path / "found.json")
    assert f"{result['metric']} {result['value']:.2f}" in output and result["signature"] in output
    assert json.loads((tmp_path / "found.json").read_text())["value"] == result["value"]
    if name == "wikitext103":
        missing = ["multimax-evaluate", checkpoint.parent / "missing.pt", data, "--average", "2"]
        assert "missing.pt' does not exist" in run(folder, *missing, code=1)
        output = run(folder, *evaluate, data, "--average", "2", "--subset", "valid")
        assert "perplexity" in output and (checkpoint.parent / "average2.pt").exists()
    if name != KILLED:
        return
    # data-prep/ writes this if the numbers of sentence pairs differ from the expected ones.
    near = shutil.copytree(data, tmp_path / "near")
    described = json.loads((near / "evaluation.json").read_text())
    described["differing_counts"] = {"train": {"expected": 10_000, "found": 9_997}}
    (near / "evaluation.json").write_text(json.dumps(described))
    output = run(folder, *evaluate, near, "--json", tmp_path / "near.json")
    found = json.loads((tmp_path / "near.json").read_text())
    for kind in ("signature", "tokenized_signature"):
        assert found[kind] == f"{result[kind]}|pairs:train 9,997 (expected 10,000)"
        assert found[kind] in output
    output = run(folder, *evaluate, data / "none", code=1)
    assert "does not exist" in output and "Traceback" not in output
    tabulate, found = str(ROOT / "scripts" / "tabulate"), folder / "out" / "results.jsonl"
    table = run(folder, tabulate, f"with all=it={found}")
    assert re.search(rf"\| with all=it \| .* \| {len(results(folder))} \|", table)
    (tmp_path / "none.jsonl").write_text('{"no": "result"}\n')
    output = run(folder, tabulate, tmp_path / "none.jsonl", code=1)
    assert (
        output.startswith("tabulate: error: ")
        and "KeyError: 'experiment'" in output
        and "Traceback" not in output
    )
