"""scripts/gpu_check.sh without a GPU: that it runs to its end, and that what fails is seen."""

import importlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import textwrap

import pytest
from commands import ROOT, run

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

COMMAND = ROOT / "scripts" / "gpu_check.sh"
QUICK = "heads of 256 are plain, float32"
# All that may be left out where there is no GPU.
REASONS = {"needs a GPU", "Triton's interpreter multiplies and rounds bfloat16 wrongly"}


@pytest.fixture(scope="module")
def modules():
    """(gpu_check, gpu_reference)."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield importlib.import_module("gpu_check"), importlib.import_module("gpu_reference")
    sys.path.remove(str(ROOT / "scripts"))


def gpu_check(folder, *words, **environment):
    """(its exit status, what it printed, its JSON), run as where there is no GPU."""
    done = subprocess.run(
        [str(COMMAND), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stderr == "", done.stderr[-2000:]
    assert [file.name for file in folder.glob("gpu_check*")] == ["gpu_check.json"]
    found = json.loads((folder / "gpu_check.json").read_text(encoding="utf-8"))
    return done.returncode, done.stdout, found


def test_runs_to_its_end_without_a_gpu(tmp_path):
    code, printed, found = gpu_check(tmp_path)
    assert printed.startswith("No GPU here")
    checks = found["checks"]
    by_status = {
        status: [check for check in checks if check["status"] == status]
        for status in ("passed", "failed", "left out")
    }
    assert sum(map(len, by_status.values())) == len(checks)
    assert code == 0 and by_status["failed"] == []
    assert {check["note"] for check in by_status["left out"]} == REASONS
    assert f"LEFT OUT, {len(by_status['left out'])} of {len(checks)} checks" in printed
    ran = [check for check in checks if check["status"] != "left out"]
    for word in ("attention", "output loss", "modulator", "output scores", "dropout", "two runs"):
        assert any(word in check["name"] for check in ran)
    for check in ran:
        row = [line for line in printed.splitlines() if line.startswith(f"{check['name']}  ")]
        assert len(row) == 1 and check["status"] in row[0] and check["note"] in row[0]
    for capability in (80, 90):
        kernels = [c["name"].split()[1] for c in ran if c["name"].startswith(f"sm_{capability}")]
        assert {"forward", "query", "key", "loss", "modulate", "modulate_backward"} == set(kernels)
        assert f"Compiled for sm_{capability}: instructions of the inner loop" in printed
        assert f"Compiled for sm_{capability}: the modulator by itself" in printed
    tables = [check["table"] for check in ran if check["section"] == "compiler"]
    for title, heads, [row] in tables:
        if "by itself" in title:
            assert int(row[heads.index("registers")]) > 0 and float(row[heads.index("a score")]) > 0
            continue
        # The last column of the two is that without the modulator.
        assert float(row[heads.index("a score")]) > float(row[-1]) > 0
        row = dict(zip(heads, row, strict=True))
        # Products are on tensor cores, and the modulator costs something.
        assert int(row["registers"]) > 0 and int(row["ex2/lg2"]) > 0
        assert int(row["MMA"]) > 0 or row["kernel"].startswith("loss")
    assert found["versions"]["torch"] and found["device"] == "no GPU"
    assert bool(found["commit"]) == (ROOT / ".git").exists()
    assert found["command"] == "scripts/gpu_check.sh"


def test_needs_neither_fairseq_nor_entmax(tmp_path):
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in ("entmax", "fairseq"):
        text = f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
        (blocked / f"{name}.py").write_text(text)
    code, printed, found = gpu_check(tmp_path, "--only", QUICK, PYTHONPATH=str(blocked))
    assert code == 0 and "1 passed, 0 failed, 0 left out" in printed
    assert [check["name"] for check in found["checks"]] == [QUICK]


def test_plain_pytorch_in_place_of_a_kernel_fails(tmp_path):
    code, printed, found = gpu_check(tmp_path, "--only", QUICK, MULTIMAX_BACKEND="plain")
    assert code == 1 and "0 passed, 1 failed, 0 left out" in printed
    assert "ran through plain PyTorch" in found["checks"][0]["note"]


def test_nothing_checked_is_no_success(tmp_path):
    code, printed, _ = gpu_check(tmp_path, "--only", "timing")
    assert code == 1 and "No check was made" in printed


@pytest.mark.parametrize(
    "words, told",
    [
        (["--minutes", "soon"], "'soon' must be a number of minutes above 0"),
        (["--only", "nonsense"], "--only nonsense: no check has this in its name"),
        (["--out", "nowhere/file.json"], "must be a file in a folder that there is"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_option_is_one_sentence(tmp_path, words, told):
    printed = run(tmp_path, COMMAND, *words, code=2)
    assert "Traceback" not in printed
    last = printed.strip().splitlines()[-1]
    assert last.startswith("gpu_check.py: error: ") and told in last
    assert not list(tmp_path.iterdir())


def test_help(tmp_path):
    assert "--minutes" in run(tmp_path, COMMAND, "--help")


def test_verdicts(modules):
    check, reference = modules
    finding = reference.Finding

    def outcome(*found):
        return check.outcome(lambda: finding(*found), reference.LeftOut)

    def raising(error):
        def run():
            raise error

        return check.outcome(run, reference.LeftOut)

    assert outcome(1.0, 1.0, "")["status"] == "passed"
    assert outcome(1.1, 1.0, "")["status"] == "failed"
    assert outcome(math.nan, 1.0, "")["status"] == "failed"
    assert outcome(7.0, None, "")["status"] == "passed"
    assert raising(reference.LeftOut("why")) == {"status": "left out", "note": "why"}
    failed = raising(ValueError("one\n  two"))
    assert failed == {"status": "failed", "note": "ValueError: one two"}


def test_errors_are_judged_against_plain_pytorch(modules):
    import torch

    _, reference = modules
    exact = {"output": torch.ones(4, dtype=torch.float64)}
    plain = {"output": torch.ones(4) + 1e-3}
    for off, share in ((1e-3, 0.5), (4e-3, 2.0)):
        found = reference.error({"output": torch.ones(4) + off}, plain, exact, "here")
        assert abs(found.share - share) < 0.02 and found.where == "here: output"
    wrong = reference.error({"output": torch.full((4,), math.nan)}, plain, exact, "here")
    assert wrong.share == math.inf
    assert reference.worst([wrong]).figure == math.inf


def test_a_contestant_that_cannot_run_has_the_reason_in_its_row(modules, monkeypatch):
    import torch

    timing = importlib.import_module("gpu_timing")
    monkeypatch.setattr(timing, "TURN", 1e-6)

    def refuses():
        raise NotImplementedError("not on this device")

    def contest(ours):
        contestants = {"torch's": lambda: torch.ones(9), timing.OURS: ours, "third": refuses}
        return timing.contest(modules[1].Place("cpu"), "title", contestants, "torch's")

    found = contest(lambda: torch.ones(9))
    title, heads, rows = found.table
    assert [row[0] for row in rows] == ["torch's", timing.OURS, "third"]
    assert found.limit is None and found.figure > 0 and rows[0][3] == "1.00"
    assert all(len(row) == len(heads) for row in rows)
    assert rows[2][-1] == "NotImplementedError: not on this device"
    with pytest.raises(NotImplementedError):
        contest(refuses)


def test_a_process_that_dies_or_hangs_costs_one_check(modules, monkeypatch, tmp_path, capsys):
    check, _ = modules
    worker = tmp_path / "worker.py"
    worker.write_text(
        textwrap.dedent(
            """
            import json, os, sys, time
            section, names, device, full, end, pipe = json.loads(sys.argv[2])
            for name in names:
                if name == "dies":
                    print("illegal access", flush=True)
                    os.abort()
                if name == "hangs":
                    time.sleep(100)
                found = {"section": section, "name": name, "status": "passed", "note": ""}
                os.write(pipe, (json.dumps(found) + chr(10)).encode())
                if name == "breaks":
                    os._exit(75)
            """
        )
    )
    monkeypatch.setattr(check, "__file__", str(worker))
    monkeypatch.setattr(check, "LONGEST", 5)
    monkeypatch.setattr(check, "GRACE", 0)
    names = ["one", "dies", "breaks", "hangs", "last"]
    found = check.Run("cpu", False, 10, len(names))
    found.side_by_side([("correctness", names)])
    assert [(entry["name"], entry["status"]) for entry in found.found] == [
        ("one", "passed"),
        ("dies", "failed"),
        ("breaks", "passed"),
        ("hangs", "failed"),
        ("last", "passed"),
    ]
    assert "illegal access" in found.found[1]["note"]
    assert "took more than 5 seconds" in found.found[3]["note"]
    assert "[5/5] last: passed" in capsys.readouterr().out
    # When the time is up, what is left is left out.
    late = check.Run("cpu", False, 1e-9, 1)
    late.side_by_side([("correctness", ["hangs"])])
    assert late.found[0]["status"] == "left out"
