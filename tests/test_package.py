"""Import rules of the package: which folder may import which."""

import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib

import pytest
from commands import ROOT, alive

from multimax_fairseq import supported

pytestmark = pytest.mark.long

PACKAGE = ROOT / "multimax_fairseq"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Each folder or module may import itself and what stands in the lines before its own.
ORDER = """
children errors signature supported
bleu files
compat ops
mappings continuous
modules criterions optim
statistics
models
analysis integrations trained
commands api
__main__
"""
LINES = [line.split() for line in ORDER.strip().splitlines()]
WITHOUT_FAIRSEQ = ("ops", "mappings", "continuous", "statistics")


def modules():
    """Return {dotted name: file} for the whole package."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file):
    """Yield the dotted names that a file imports, also in functions, except for type checkers."""
    waiting = [ast.parse(file.read_text(encoding="utf-8"))]
    for node in waiting:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        is_typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        waiting += node.orelse if is_typing else ast.iter_child_nodes(node)


MODULES = modules()
# {module: modules of this package that it imports}
GRAPH = {
    name: {found if found in MODULES else found.rpartition(".")[0] for found in imports(file)}
    & MODULES.keys()
    for name, file in MODULES.items()
}


def folder_of(name):
    """Return the folder of a module of the package, or the module itself if it is in none."""
    return name.split(".")[1] if "." in name else "__main__"


@pytest.mark.parametrize("number", range(len(LINES)), ids=map(" ".join, LINES))
def test_no_folder_imports_from_one_above_it(number):
    below = {each for line in LINES[:number] for each in line}
    for name in LINES[number]:
        files = [module for module in MODULES if folder_of(module) == name]
        assert files, name
        for file in files:
            above = {each for each in GRAPH[file] if folder_of(each) not in {*below, name}}
            assert not above, f"{file} imports {above}"


def test_order_names_every_folder_and_module():
    assert sorted(ORDER.split()) == sorted({folder_of(name) for name in MODULES})


def test_no_two_files_import_each_other():
    list(graphlib.TopologicalSorter(GRAPH).static_order())  # raises CycleError


@pytest.mark.parametrize("folder", WITHOUT_FAIRSEQ)
def test_folder_needs_no_fairseq(folder):
    """Neither a file of the folder nor a file that it imports imports fairseq."""
    waiting = {name for name in MODULES if folder_of(name) == folder}
    seen = set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        assert not [each for each in imports(MODULES[name]) if each.startswith("fairseq")], name
        # Python runs the __init__ of each folder above.
        parent = {name.rpartition(".")[0]} & MODULES.keys()
        waiting |= (GRAPH[name] | parent) - seen


def test_only_integrations_import_transformers():
    users = {
        folder_of(name)
        for name, file in MODULES.items()
        if any(each.partition(".")[0] == "transformers" for each in imports(file))
    }
    assert users == {"integrations"}


@pytest.mark.parametrize("command", PROJECT["scripts"].values(), ids=list(PROJECT["scripts"]))
def test_help_of_every_command_imports_no_slow_package(command):
    module, function = command.split(":")
    program = f"""if True:
        import atexit, sys
        slow = {{"torch", "fairseq", "sacrebleu", "numpy"}}
        atexit.register(lambda: print("imported:", slow & sys.modules.keys()))
        sys.argv[1:] = ["--help"]
        from {module} import {function}
        {function}()
        """
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0 and "show this help message" in done.stdout
    assert done.stdout.endswith("imported: set()\n")


# --- children -------------------------------------------------------------------------------------


def test_children_are_started_in_one_place():
    """Elsewhere a child could outlive the command. Exempt: git, and the compiler's own group."""
    exempt = {"multimax_fairseq/signature.py", "multimax_fairseq/ops/build.py"}
    starts = re.compile(r"subprocess\.(Popen|run|call|check_\w+)\(|os\.(system|popen|spawn\w+)\(")
    pools = re.compile(r"\b(ProcessPoolExecutor|multiprocessing\.Pool)\(")
    found, without = set(), set()
    for folder in ("multimax_fairseq", "scripts", "data-prep"):
        for file in (ROOT / folder).rglob("*.py"):
            text, name = file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))
            found |= {name} if starts.search(text) else set()
            without |= {name} if pools.search(text) and "end_with_parent" not in text else set()
    assert found - exempt == {"multimax_fairseq/children.py"} and not without


PARENT = """if True:
    import sys, time
    from multimax_fairseq.children import child, exit_on_signals
    policy = "import os; print(os.environ.get('GOMP_SPINCOUNT'), flush=True); "
    with exit_on_signals(), child([sys.executable, "-c", policy + sys.argv[1]]):
        time.sleep(1000)
    """
SLEEP = "import time; time.sleep(1000)"
IGNORE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


@pytest.mark.parametrize("number, body", [(n, SLEEP) for n in (1, 2, 3, 9, 15)] + [(15, IGNORE)])
def test_child_ends_with_its_parent(number, body):
    """By SIGHUP, SIGINT, SIGQUIT, SIGKILL and SIGTERM, also if the child ignores SIGTERM."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, body],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert parent.stdout.readline() == "1000\n"
    time.sleep(0.5)  # until a child ignores SIGTERM
    parent.send_signal(number)
    parent.wait(timeout=60)
    for _ in range(100):
        if not alive(parent.pid):
            return
        time.sleep(0.1)
    raise AssertionError(alive(parent.pid))


@pytest.mark.parametrize(
    "own, found", [({"OMP_WAIT_POLICY": "ACTIVE"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_child_keeps_the_users_openmp_settings(own, found):
    program = PARENT.replace("time.sleep(1000)", "pass")
    done = subprocess.run(
        [sys.executable, "-c", program, ""],
        env={**os.environ, **own},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout == f"{found}\n"


def test_requirements_lock_has_hashes_for_every_package():
    scripts = ROOT / "scripts"
    asked = re.findall(r"^\S+==\S+", (scripts / "requirements.txt").read_text(), re.M)
    locked = (scripts / "requirements.lock").read_text()
    blocks = dict(re.findall(r"^(\S+==\S+)((?: \\\n +--hash=sha256:[0-9a-f]{64})+)$", locked, re.M))
    assert {line for line in asked if not line.startswith("torch==")} == blocks.keys()
    found = subprocess.run(
        ["bash", "-c", "root=$1; source scripts/locked.sh; locked", "bash", str(ROOT)],
        input="numpy==9\nscipy==1.17.1\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"scipy==1.17.1{blocks['scipy==1.17.1']}\n"


def test_wheel_build_is_reproducible(tmp_path):
    wheels = []
    for name in ("once", "again"):
        copy = shutil.copytree(ROOT / "multimax_fairseq", tmp_path / name / "multimax_fairseq")
        for file in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / file, tmp_path / name / file)
        os.utime(copy / "__init__.py", (time.time(), 1e9 * len(wheels)))
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
            cwd=tmp_path / name,
            check=True,
            capture_output=True,
        )
        wheels.append(next(tmp_path.glob("*.whl")).read_bytes())
    assert wheels[0] == wheels[1]


def test_supported_check_names_old_versions():
    assert PROJECT["requires-python"] == ">={}.{}".format(*supported.PYTHON)
    assert "torch>={}.{}".format(*supported.TORCH) in PROJECT["dependencies"]
    supported.check((3, 11, 0), "2.10.0+cpu")
    for python, torch, named in (((3, 10, 13), "2.13.0", "3.10"), ((3, 12, 1), "2.9.1", "2.9.1")):
        with pytest.raises(ImportError, match=f"3.11 and torch 2.10 or newer.* {named}"):
            supported.check(python, torch)


def test_import_prints_nothing_and_starts_no_threads():
    """A forked child would wait for the threads forever."""
    program = """if True:
        import multimax_fairseq
        assert {"multimax", "Modulator"} <= set(dir(multimax_fairseq))
        from multimax_fairseq import *
        assert replace_softmax is multimax_fairseq.replace_softmax and multimax_fairseq.ops
        assert not hasattr(multimax_fairseq, "no_such_name")
        import logging, os, signal
        import multimax_fairseq.models, multimax_fairseq.trained
        import torch
        assert (logging.root.level, logging.root.handlers) == (logging.WARNING, [])
        child = os.fork()
        if not child:
            signal.alarm(30)
            torch.ones(1 << 20).mul_(2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-W", "ignore::FutureWarning", "-c", program]  # of newer torch
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert (done.stdout, done.stderr) == (b"", b"")
