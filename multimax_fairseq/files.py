"""Files that are there whole or not at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Give a path beside a file to write to, which takes the file's place if nothing goes wrong.

    Several processes may write the same file: the last one's stays.
    """
    aside = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        yield aside
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
