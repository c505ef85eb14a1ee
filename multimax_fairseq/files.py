"""Files that are there whole or not at all."""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from multimax_fairseq.errors import UsageError


def check_place(flag: str, file: Path) -> None:
    """Raise UsageError, before the work that it is for, where a file cannot be written."""
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise UsageError(f"{flag} '{file}' must be a file in a folder that can be written to")


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Give a path beside a file to write to, which takes the file's place if nothing goes wrong.

    Several may write the same file, from whatever thread, process or machine: the last one's stays.
    """
    aside = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    try:
        yield aside
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
