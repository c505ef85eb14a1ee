"""Start child processes that end with this process."""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

PATIENCE = 10  # seconds from SIGTERM to SIGKILL
PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
# libgomp's threads wait for each other by spinning, which takes the processor from the thread that
# they wait for if other processes run. They sleep after this number of rounds (measured in
# docs/speed.md). libgomp reads it once, when torch is loaded.
SPINCOUNT = {"GOMP_SPINCOUNT": "1000"}


@contextlib.contextmanager
def child(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a command and wait for it at the end of the body.

    An exception in the body ends the command, and so does the end of this process by any signal.

    Args:
        options: as of subprocess.Popen.
    """
    end = functools.partial(end_with_parent, os.getpid())
    env = ({} if "OMP_WAIT_POLICY" in os.environ else SPINCOUNT) | dict(os.environ)
    with subprocess.Popen(command, preexec_fn=end, env=env, **options) as process:
        try:
            yield process
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    process.kill()


def end_with_parent(parent: int | None = None) -> None:
    """Have Linux send SIGTERM to this process when the thread that started it ends.

    Args:
        parent: the process that started it, which can have ended before this call.
    """
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Exit on SIGTERM and SIGHUP as after Ctrl-C: children end, temporary files are removed."""

    def leave(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    both = (signal.SIGTERM, signal.SIGHUP)  # nohup ignores SIGHUP, which stays so
    changed = [number for number in both if signal.getsignal(number) == signal.SIG_DFL]
    for number in changed:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)
