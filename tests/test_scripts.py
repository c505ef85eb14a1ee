"""The shell scripts' setup, signals and errors, in a checkout with stand-ins for training."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from commands import ROOT, alive, refused, run
from prep_scripts import files_up_to

EXPERIMENT = r"""import signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(" ".join(["experiment", *sys.argv[1:]]) + "\n", end="", flush=True)
if sys.argv[1] in {hangs}:
    child = subprocess.Popen(["sleep", "60"])
    open({started!r} + sys.argv[1], "w").close()
    try:
        child.wait()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        child.terminate()
        print(f"ended {{sys.argv[1]}}\n", end="", flush=True)
"""


def program(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def python(more=""):
    return f'#!/bin/sh\n{more}exec {shlex.quote(sys.executable)} "$@"\n'


@pytest.fixture
def checkout(tmp_path):
    """checkout(*hangs) -> a checkout with the real scripts and stand-ins for trainings.

    The named experiments do not end.
    """

    def make(*hangs):
        root = tmp_path / "checkout"
        shutil.copytree(ROOT / "scripts", root / "scripts", ignore=shutil.ignore_patterns("*.py"))
        experiment = EXPERIMENT.format(hangs=hangs, started=f"{tmp_path}/started-")
        program(root / "scripts" / "experiment.py", experiment)
        program(root / "scripts" / "quickstart_report.py", "print('report')")
        program(root / "scripts" / "setup.sh", "#!/bin/sh\necho set up\n")
        program(root / "data-prep" / "demo.py", "")
        program(root / "bin" / "fairseq-train", "")
        # Its real import in environment.sh takes seconds and has its own test.
        program(root / "bin" / "python", python('[ "$1" != -c ] || exit 0\n'))
        return root

    return make


def environment(root, **more):
    return {**os.environ, "PATH": f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}", **more}


def quickstart(root, *options, **more):
    command = ["bash", "scripts/quickstart.sh", *options]
    variables = environment(root, **more)
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True)


def experiments(done):
    """Return the arguments of each call of experiment.py."""
    assert done.returncode == 0, done.stdout + done.stderr
    words = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("experiment")]
    return sorted(words)


def after(flag, words):
    return words[words.index(flag) + 1]


def test_quickstart_freezes_scalars_for_a_third_of_the_updates(checkout):
    found = experiments(quickstart(checkout(), "--compare", "--updates", "300"))
    rows = [(words[0], after("--rows", words)) for words in found]
    translation = ("quickstart_translation", "multimax,softmax")
    assert rows == [("quickstart_lm", "multimax"), ("quickstart_lm", "softmax"), translation]
    for words in found:
        assert after("--max-update", words) == "300"
        assert "--save-interval-updates" in words[words.index("--") :]
        assert ("--scalar-freeze-updates" in words) == (words is found[0])
    assert after("--scalar-freeze-updates", found[0]) == "100"


def test_quickstart_uses_the_configs(checkout):
    root = checkout()
    for options, rows in (((), "multimax"), (("--compare",), "multimax,softmax")):
        lm, translation = experiments(quickstart(root, *options))
        assert after("--rows", lm) == after("--rows", translation) == rows
        assert "--" not in lm + translation
    config = (ROOT / "configs" / "rows" / "quickstart_lm.yaml").read_text()
    updates = re.search("max_update: ([0-9]+)", (ROOT / "configs/quickstart_lm.yaml").read_text())
    assert f"scalar_freeze_updates: {int(updates[1]) // 3}}}" in config


@pytest.mark.parametrize("out", ["", "taken", "taken/deeper"])
def test_quickstart_refuses_an_unusable_folder(checkout, out):
    root = checkout()
    (root / "taken").touch()
    done = quickstart(root, "--out", out)
    assert done.returncode == 1 and not done.stdout
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("quickstart.sh: --out ") and f"{out}'" in sentence
    assert sentence.endswith(" folder.") or "needs the name of a folder" in sentence
    assert not (root / "quickstart").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="lists processes by /proc")
@pytest.mark.parametrize(
    "number, status", [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)]
)
def test_quickstart_passes_signals_on(checkout, tmp_path, number, status):
    """Ctrl-Z stops all trainings until the quickstart continues."""
    names = ("quickstart_lm", "quickstart_translation")
    root = checkout(*names)
    process = subprocess.Popen(
        ["bash", "scripts/quickstart.sh"],
        cwd=root,
        env=environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def until(reached):
        deadline = time.monotonic() + 30
        while not reached():
            assert time.monotonic() < deadline and process.poll() is None, alive(process.pid)
            time.sleep(0.02)

    try:
        until(lambda: all((tmp_path / f"started-{name}").exists() for name in names))
        os.kill(process.pid, signal.SIGTSTP)
        until(lambda: {state for _, state in alive(process.pid)} == {"T"})
        os.kill(process.pid, signal.SIGCONT)
        until(lambda: "T" not in {state for _, state in alive(process.pid)})
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == status
        assert {f"ended {name}" for name in names} <= set(out.splitlines()) and not err
        assert not alive(process.pid)
    finally:
        for pid, _ in alive(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_quickstart_reports_a_failed_training(checkout):
    root = checkout()
    program(root / "scripts" / "experiment.py", "import sys; sys.exit('lm' in sys.argv[1])")
    done = quickstart(root)
    assert done.returncode == 1 and "a model is missing" in done.stderr


@pytest.mark.parametrize("script", ["quickstart", "setup", "test", "gpu_check"])
def test_scripts_ignore_cdpath(script, tmp_path):
    """cd prints the folder if it finds it in CDPATH."""
    (line,) = re.findall("^root=.*", (ROOT / "scripts" / f"{script}.sh").read_text(), re.MULTILINE)
    program(tmp_path / "here" / "scripts" / "s.sh", f'{line}\nprintf %s "$root"\n')
    (tmp_path / "elsewhere" / "scripts").mkdir(parents=True)
    for path in (tmp_path / "here", tmp_path / "elsewhere", "."):
        found = subprocess.run(
            ["bash", "scripts/s.sh"],
            cwd=tmp_path / "here",
            env={**os.environ, "CDPATH": str(path)},
            capture_output=True,
            text=True,
        )
        assert found.stdout == str(tmp_path / "here")


@pytest.mark.parametrize("lacks", [None, "pyarrow", "the package", "its own copy"])
def test_environment_falls_back_to_setup(checkout, tmp_path, lacks):
    root, site = checkout(), tmp_path / "site"
    names = "entmax fairseq_cli pyarrow sacrebleu sacremoses sentencepiece subword_nmt unearth"
    for name in names.split():
        if name != lacks:
            program(site / f"{name}.py", "")
    program(root / "multimax_fairseq" / "__init__.py", "")
    if lacks == "its own copy":
        program(site / "multimax_fairseq" / "__init__.py", "")
    elif lacks != "the package":
        (site / "multimax_fairseq").symlink_to(root / "multimax_fairseq")
    # Without the packages of the current environment.
    more = f'export PYTHONPATH={shlex.quote(str(site))}\nset -- -S "$@"\n'
    program(root / "bin" / "python", python(more))
    done = subprocess.run(
        ["bash", "-euc", "source scripts/environment.sh; command -v python"],
        cwd=root,  # the package is in this folder but is not installed
        env=environment(root, CDPATH=str(root)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ("set up" in done.stdout) == (lacks is not None)


# A stand-in for an environment's python, in which pip only records its arguments.
RECORDS = """case "$*" in
*"pip install"*) echo "$*" >>"$ROOT/installs"; exit ;;
*fairseq*) exit ;;
esac
export PYTHONPATH="$ROOT/versions"
"""


@pytest.fixture
def setup(tmp_path):
    """setup(**variables) -> the result of scripts/setup.sh in a checkout, and its pip commands."""
    venv = tmp_path / ".venv"
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    program(venv / "bin" / "python", python(RECORDS))
    program(venv / "bin" / "fairseq-score", "")
    program(venv / "bin" / "activate", str(venv))
    for line in (ROOT / "scripts" / "requirements.txt").read_text().splitlines():
        if "==" in line:
            pretend_installed(tmp_path, *line.split("=="))

    def run_setup(**more):
        (tmp_path / "installs").write_text("")
        defaults = {"ROOT": str(tmp_path), "CXX": "true", "PYTHON": "", "MULTIMAX_TORCH": ""}
        done = subprocess.run(
            ["bash", tmp_path / "scripts" / "setup.sh"],
            env={**os.environ, **defaults, **more},
            capture_output=True,
            text=True,
        )
        return done, (tmp_path / "installs").read_text()

    return run_setup


def pretend_installed(root, name, version):
    program(
        root / "versions" / f"{name.replace('-', '_')}.dist-info" / "METADATA",
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
    )


@pytest.mark.parametrize("package", ["torch", "numpy"])
def test_setup_installs_replaced_packages_again(package, setup, tmp_path):
    first, _ = setup()
    assert first.returncode == 0, first.stdout + first.stderr
    again, nothing = setup()
    assert "Nothing to do" in again.stdout and nothing == ""
    pretend_installed(tmp_path, package, "99")
    done, installs = setup()
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"torch==[\d.]+$", installs, re.MULTILINE)


def test_setup_leaves_a_linked_environment_as_it_is(setup, tmp_path):
    own, other = tmp_path / ".venv", tmp_path / "other"
    shutil.copytree(own, tmp_path / "new")
    own.rename(other)
    own.symlink_to(other)
    (other / "bin" / "activate").write_text(str(other))
    (other / "setup.stamp").write_text("finished")
    program(tmp_path / "base", python('[ "$2" != venv ] || exec cp -R "$ROOT/new" "$3"\n'))

    done, installs = setup(PYTHON=str(tmp_path / "base"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert (other / "setup.stamp").read_text() == "finished"
    assert installs and not own.is_symlink() and (own / "setup.stamp").exists()


def test_setup_names_an_index_that_does_not_answer(setup, tmp_path):
    real = f'case "$*" in *127.0.0.1*) exec {shlex.quote(sys.executable)} "$@" ;; esac\n'
    program(tmp_path / ".venv" / "bin" / "python", python(real + RECORDS))
    torch = "no-such-package==1 --index-url http://127.0.0.1:9/simple"
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_RETRIES": "0"}

    done, _ = setup(MULTIMAX_TORCH=torch, **offline)

    assert done.returncode == 1 and "No matching distribution found" in done.stderr
    assert "the package index http://127.0.0.1:9/simple/ did not answer: check" in done.stderr


@pytest.mark.parametrize(
    ("header", "package"),
    [("vector", r"g\+\+"), ("Python.h", rf"python3\.{sys.version_info.minor}-dev")],
)
def test_setup_checks_compiler_and_headers_before_downloads(header, package, setup, tmp_path):
    program(tmp_path / "c++", f"#!/bin/sh\n! grep -q {header}\n")
    done, installs = setup(CXX=str(tmp_path / "c++"))
    assert done.returncode == 1 and done.stdout == installs == ""
    assert re.fullmatch(rf"setup\.sh: fairseq needs .* \(Debian: {package}\)\.\n", done.stderr)


@pytest.mark.parametrize("folder", ["a folder", "long" * 60])
def test_fairseq_commands_start_from_any_path(folder, tmp_path):
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    (loop,) = re.findall(r'^for script in "\$venv".*?^done$', setup, re.MULTILINE | re.DOTALL)
    venv = tmp_path / folder / ".venv"
    program(venv / "bin" / "python", python())
    program(venv / "bin" / "fairseq-train", "")
    subprocess.run(["bash", "-euc", loop], env={**os.environ, "venv": str(venv)}, check=True)
    stand_in = "def run(name):\n    import sys\n    print(name, sys.argv[1:])\n"
    program(tmp_path / "multimax_fairseq" / "__main__.py", stand_in)
    program(tmp_path / "multimax_fairseq" / "__init__.py", "")
    done = subprocess.run(
        [venv / "bin" / "fairseq-train", "a b", "$c"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "fairseq-train ['a b', '$c']\n"


def test_average_reports_a_full_disk(checkpoint, tmp_path):
    path = checkpoint("transformer_multimax")
    (folder := tmp_path / "out").mkdir()
    words = ("multimax-average", path, path, "--output", "new.pt")
    said = refused(folder, *words, **files_up_to(1024, tmp_path))
    assert said.startswith("'new.pt' could not be written (File too large): make room there")
    assert not list(folder.iterdir())


def test_average_drops_ema_and_optimizer_state(checkpoint, tmp_path):
    for number in (1, 2):
        state = torch.load(checkpoint("transformer_multimax", seed=number), weights_only=False)
        state["extra_state"]["ema"] = state["model"]
        state["last_optimizer_state"] = {"state": {}, "param_groups": []}
        torch.save(state, tmp_path / f"{number}.pt")
    words = ("multimax-average", "1.pt", "2.pt")
    run(tmp_path, *words, "--output", "new.pt")
    found = torch.load(tmp_path / "new.pt", weights_only=False)
    assert "ema" not in found["extra_state"] and "last_optimizer_state" not in found
    assert found["extra_state"].keys() == state["extra_state"].keys() - {"ema"}


@pytest.mark.parametrize("updates, is_told", [((2, 4, 8), True), ((4, 6, 8), False)])
def test_average_warns_of_uneven_spacing(checkpoint, tmp_path, updates, is_told):
    for update in updates:
        shutil.copy(checkpoint("transformer_multimax"), tmp_path / f"checkpoint_1_{update}.pt")
    said = run(tmp_path, "multimax-average", ".", "--last", "3", "--output", "new.pt")
    assert ("2, 4, 8 of '.' are not evenly spaced" in said) == is_told
    assert ("warning" in said) == is_told


def test_average_refuses_different_mappings(checkpoint, tmp_path):
    flags = [("--attention-normalizer", name) for name in ("sparsemax", "entmax15")]
    files = [checkpoint("transformer_multimax", *words) for words in flags]
    words = ("multimax-average", *files, "--output", "new.pt")
    said = run(tmp_path, *words, code=1)
    assert f"error: '{files[1]}' has other mappings than '{files[0]}'" in said
    assert not (tmp_path / "new.pt").exists()


@pytest.mark.parametrize("inputs", [["models"], ["a.pt", "models"]])
def test_average_refuses_a_folder_without_last(inputs, tmp_path):
    (tmp_path / "models").mkdir()
    words = ("multimax-average", *inputs, "--output", "new.pt")
    error = "'models' is a folder: add --last N to average its N newest checkpoints"
    assert refused(tmp_path, *words) == error
