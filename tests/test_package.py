"""Import rules of the package: which subpackage may import which."""

import ast
import graphlib
import os
import re
import shutil
import signal
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
GROUND = ("children", "bleu", "errors", "files", "signature", "supported")
MATHEMATICS = {"ops", "mappings", "continuous"}
# The subpackages that each one may import, besides itself and GROUND.
BELOW = {
    "": {*MATHEMATICS, "modules", "integrations", "compat"},  # the package itself, and `python -m`
    "ops": set(),
    "mappings": {"ops"},
    "continuous": {"ops"},
    "modules": MATHEMATICS,
    "models": {*MATHEMATICS, "modules", "compat", "criterions", "optim", "analysis"},
    "criterions": MATHEMATICS,
    "optim": MATHEMATICS,
    "compat": set(),
    "analysis": {*MATHEMATICS, "modules", "models", "compat"},
    "integrations": {*MATHEMATICS, "modules", "models", "compat"},
    "trained": {"models", "analysis", "compat"},
    "commands": {"models", "compat", "integrations"},
    **{name: set() for name in GROUND},
}
# Packages that a subpackage must work without.
BARRED = {name: {"fairseq"} for name in MATHEMATICS}


def modules():
    """Return {dotted name: file} for the whole package."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file, at_start=False):
    """Return the names that a file imports; optionally only at module level."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = tree.body if at_start else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def subpackage(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else ""


@pytest.mark.parametrize("name", BELOW)
def test_subpackage_imports_only_from_below(name):
    allowed = BELOW[name] | {*GROUND, name}
    files = [file for module, file in modules().items() if subpackage(module) == name]
    assert files
    for file in files:
        for imported in imports(file):
            top, _, rest = imported.partition(".")
            assert top not in BARRED.get(name, ()), f"{file} imports {imported}"
            assert top != "transformers" or name == "integrations", f"{file} imports {imported}"
            if top == "multimax_fairseq" and rest.split(".")[0] in BELOW:
                assert rest.split(".")[0] in allowed, f"{file} imports {imported}"


def test_package_imports_have_no_cycle():
    known = modules()
    graph = {
        name: {
            found
            for imported in imports(file, at_start=True)
            for found in (imported, imported.rpartition(".")[0])
            # Modules of one package may import each other; the package itself is being imported.
            if found in known and not f"{name}.".startswith(f"{found}.")
        }
        for name, file in known.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError


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


def test_public_names_are_found_at_their_first_use():
    program = """if True:
        import multimax_fairseq
        assert {"multimax", "Modulator"} <= set(dir(multimax_fairseq))
        from multimax_fairseq import *
        assert replace_softmax is multimax_fairseq.replace_softmax and multimax_fairseq.ops
        assert not hasattr(multimax_fairseq, "no_such_name")
        """
    subprocess.run([sys.executable, "-c", program], check=True)


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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
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
        for file in ("pyproject.toml", "README.md", "LICENSE"):
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


def test_import_of_models_is_fork_safe():
    """The import must start no threads: a forked child would wait for them forever."""
    program = """if True:
        import os
        import signal
        import multimax_fairseq.models
        import torch
        child = os.fork()
        if not child:
            signal.alarm(30)
            torch.ones(1 << 20).mul_(2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        check=True,
    )
