"""Runs the scripts of data-prep/, kills them and compares what they wrote."""

import signal
import subprocess
import sys
import time

from commands import BIN, ROOT, programs_first

PREP = ROOT / "data-prep"


def environment():
    """Return an environment that finds the programs of the fork server and uses no proxy."""
    return programs_first() | {"no_proxy": "*"}


def script(name, *arguments, cpus=1):
    """Return the command of a script that sees this number of CPUs."""
    code = (
        f"import os, runpy, sys; os.cpu_count = lambda: {cpus}; sys.path[0] = {str(PREP)!r};"
        f"sys.executable = {str(BIN / 'python')!r};"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return [sys.executable, "-c", code, str(PREP / name), *map(str, arguments)]


def run(command, cwd, code=0, **variables):
    environ = environment() | variables
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def refused(command, cwd, **variables):
    """Return the one-sentence error of a command that must fail."""
    done = run(command, cwd, code=1, **variables)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def kill_at(wanted, command, cwd):
    """Kill the script, but not its children, once a file exists."""
    process = subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL)
    while not wanted.exists():
        assert process.poll() is None, f"it ended before there was {wanted}"
        time.sleep(0.004)
    process.kill()
    assert process.wait() == -signal.SIGKILL


def contents(folder):
    """Return {relative path: bytes} of all files."""
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def stamps(folder):
    """Return the modification time of each file."""
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*")}


def files_up_to(size, folder):
    """Return variables that limit the size of files; writing then fails as on a full disk."""
    limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    # Python would leave truncated bytecode for the next process.
    lines = ["import resource", "import sys", "", "sys.dont_write_bytecode = True", limit, ""]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {"PYTHONPATH": str(folder)}
