"""Errors that a user can cause; each message is one sentence with the remedy."""

import difflib
from collections.abc import Iterable
from pathlib import Path

STOPPED = "Stopped; the same command resumes."  # after Ctrl-C
# The longest list of names that an error prints in full.
MAX_LISTED = 20


class UsageError(ValueError):
    """A mistake of the user. The message names the fact, the reason and the remedy."""

    user_error = True  # the commands print the message without a traceback


class CheckpointError(UsageError):
    """A checkpoint file that is unsafe, damaged, or not written by fairseq."""


def no_file(what: str, path: Path) -> UsageError:
    """Return the error for a path that is not a file."""
    why = "is a folder, not a file" if path.is_dir() else "does not exist"
    return UsageError(f"{what} '{path}' {why}: check its path")


def remedy_for(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: the closest known one, a short list, or to drop it."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"choose from {', '.join(known)}" if len(known) <= MAX_LISTED else "leave it out"


def first_line(error: BaseException) -> str:
    """Return the class name of an error and the first line of its message."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"
