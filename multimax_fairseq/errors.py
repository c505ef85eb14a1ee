"""What a user can cause, and is told in one sentence."""


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one sentence with the remedy."""

    user_error = True  # the commands print the message alone: see explain()


class CheckpointError(UsageError):
    """A checkpoint file that is refused, damaged, or not fairseq's."""


def first_line(error: BaseException) -> str:
    """An error's kind, and the first line of what it says."""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text[:300]}"
