"""Builds malicious files; checks that a reader refuses them in bounded time and memory."""

import contextlib
import io
import resource
import signal
import tarfile
import zipfile

import pytest
from commands import TRACEBACK

from multimax_fairseq import compat

SECONDS, MEMORY = 20, 1 << 30
CODE = "__import__('os').system('touch ran')"


@contextlib.contextmanager
def bounded():
    """Raise an error that compat does not explain beyond SECONDS or MEMORY bytes."""

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
    """Check that a reader's error names the file and a remedy, and that no file was written."""
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
        assert ":" in text or ";" in text, text  # a remedy follows
        assert len(text) < 800 and sorted(path.parent.rglob("*")) == before


def zipped(*members, compression=zipfile.ZIP_DEFLATED, change=lambda data: data):
    """Return the bytes of a zip archive of (name, content) pairs."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return change(stream.getvalue())


class Called:
    """Unpickling calls the function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def header(name="a.txt", size=0, kind=tarfile.REGTYPE, data=b""):
    """Return a tar header and its data."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT) + data + b"\0" * (-len(data) % 512)


# The end of a tar archive
END = b"\0" * 1024
# The files of WikiText-103
WIKI = [(f"wiki.{split}.tokens", f"{split} text\n" * 99) for split in ("train", "valid", "test")]
