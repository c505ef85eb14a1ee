"""What a user can cause, and is told in one sentence."""

import difflib
from collections.abc import Iterable
from pathlib import Path


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one sentence with the remedy."""

    user_error = True  # the commands print the message alone: see explain()


class CheckpointError(UsageError):
    """A checkpoint file that is refused, damaged, or not fairseq's."""


def no_file(what: str, path: Path) -> UsageError:
    """What is wrong with a path that names no file."""
    why = "is a folder, not a file" if path.is_dir() else "does not exist"
    return UsageError(f"{what} '{path}' {why}: check its path")


def remedy_for(name: str, known: Iterable[str]) -> str:
    """What to do about a name that is none of those known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else "leave it out"


def first_line(error: BaseException) -> str:
    """An error's kind, and the first line of what it says."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"
