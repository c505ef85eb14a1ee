"""Atomic writing of files."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from multimax_fairseq.errors import UsageError


def check_place(flag: str, file: Path) -> None:
    """Raise UsageError if a file cannot be written. Call it before the work, not after."""
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UsageError(f"{flag} '{file}' must be a file in a folder that can be written to")


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield a temporary path next to `file`, which is renamed to it if no error occurs.

    Several processes may write the same file; the last one wins.
    """
    aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    try:
        yield aside
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
