"""Runs the commands as a user does, in processes of their own."""

import os
import subprocess
from pathlib import Path

import fork_server

ROOT = Path(__file__).resolve().parent.parent
BIN = fork_server.programs()
TRACEBACK = "(MULTIMAX_TRACEBACK=1 prints the traceback.)"
PLUGIN = ("--user-dir", str(ROOT / "multimax_fairseq"))


def programs_first():
    """The environment, in which this environment's programs are found first."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(folder, *command, code=0, stdin=None, **environment):
    """What a command printed, on both streams; it must end with this exit status."""
    program = BIN / command[0]
    done = subprocess.run(
        [str(program if program.exists() else command[0]), *map(str, command[1:])],
        cwd=folder,
        env=programs_first() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        input=stdin,
        text=True,
        timeout=1800,  # of a hang: a shared machine may be slow
    )
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def refused(folder, *command, code=1, **environment):
    """The one sentence in which a command that a user got wrong ends."""
    output = run(folder, *command, code=code, **environment)
    assert "Traceback" not in output
    last, start = output.splitlines()[-1], f"{command[0]}: error: "
    assert last.startswith(start), output[-2000:]
    return last.removeprefix(start)
