"""What the tests of hostile files share: limits, refusals, and code that must not be run."""

import contextlib
import io
import resource
import runpy
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from commands import TRACEBACK

from multimax_fairseq import compat

SECONDS, MEMORY = 20, 1 << 30
CODE = "__import__('os').system('touch ran')"


@contextlib.contextmanager
def bounded():
    """What takes more memory, or more time, ends in an error that no sentence explains."""

    def late(*_):
        raise SystemError(f"more than {SECONDS} seconds")

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def refuses(read, path, words):
    """Check that a reader's sentence names the file, and that nothing else has come of it."""
    compat.apply()
    with contextlib.chdir(path.parent):
        before = sorted(path.parent.rglob("*"))
        with bounded(), pytest.raises((ValueError, SystemExit)) as caught:
            read(path)
        text = " ".join(str(caught.value).splitlines()).removeprefix(f"{TRACEBACK} ")
        if not isinstance(caught.value, SystemExit):
            text = compat.explain(caught.value)
            assert text, repr(caught.value)
        assert words in text and str(path) in text, text
        assert ":" in text or ";" in text, text  # what to do
        assert len(text) < 800 and sorted(path.parent.rglob("*")) == before


def zipped(*members, compression=zipfile.ZIP_DEFLATED, change=lambda data: data):
    """The bytes of an archive of (name, content)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return change(stream.getvalue())


class Called:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def main(command, *words):
    """A command of ours, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, words)])
        if callable(command):
            command()
            return
        patch.syspath_prepend(str(Path(command).parent))  # as Python does
        runpy.run_path(command, run_name="__main__")
