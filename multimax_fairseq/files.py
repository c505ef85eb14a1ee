"""Read text files, and write files atomically."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from multimax_fairseq.errors import UsageError


def check_output_file(flag: str, file: Path) -> None:
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


def write(file: Path, text: str) -> None:
    """Write a text file atomically."""
    with whole(file) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    """Write a value as one line of JSON, atomically."""
    write(file, json.dumps(value, ensure_ascii=False) + "\n")


def read_lines(file: Path) -> list[str]:
    """Return the lines of a text file; only a line feed ends a line."""
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            return [line.removesuffix("\n") for line in lines]
    except UnicodeDecodeError as error:
        raise UsageError(f"'{file}' is not UTF-8 ({error}): prepare the data again") from None
