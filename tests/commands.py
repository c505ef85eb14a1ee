"""Runs commands in subprocesses, as a user does."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import fork_server

ROOT = Path(__file__).resolve().parent.parent
BIN = fork_server.programs()
TRACEBACK = "(MULTIMAX_TRACEBACK=1 prints the traceback.)"
PLUGIN = ("--user-dir", str(ROOT / "multimax_fairseq"))


def programs_first():
    """Return the environment variables, with this environment's programs first in PATH."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def run(folder, *command, code=0, stdin=None, **environment):
    """Run a command and return its output, both streams; it must exit with this status."""
    program = BIN / command[0]
    done = subprocess.run(
        [str(program if program.exists() else command[0]), *map(str, command[1:])],
        cwd=folder,
        env=programs_first() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        input=stdin,
        text=True,
        timeout=1800,  # generous, since a shared machine may be slow
    )
    assert done.returncode == code, done.stdout[-3000:]
    return done.stdout


def kill_after(text, folder, *command, **environment):
    """Start a command, and kill its processes when it prints a line with this text."""
    started = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=programs_first() | environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in started.stdout:
        if text in line:
            os.killpg(started.pid, signal.SIGKILL)
            break
    started.wait()


def refused(folder, *command, code=1, **environment):
    """Return the one-sentence error of a command that must fail."""
    output = run(folder, *command, code=code, **environment)
    assert "Traceback" not in output
    last, start = output.splitlines()[-1], f"{command[0]}: error: "
    assert last.startswith(start), output[-2000:]
    return last.removeprefix(start)


def alive(session):
    """Return (id, state) of a session's processes, without zombies."""
    found = []
    for folder in os.listdir("/proc"):
        with contextlib.suppress(ValueError, OSError):
            if os.getsid(int(folder)) == session:
                state = open(f"/proc/{folder}/stat").read().rpartition(")")[2].split()[0]
                if state != "Z":
                    found.append((int(folder), state))
    return found
