"""What a user can cause, and is told in one sentence."""


class UsageError(ValueError):
    """What the user asked for cannot be done; the message is one sentence with the remedy."""

    user_error = True  # the commands print the message alone: see explain()


class CheckpointError(UsageError):
    """A checkpoint file that is refused, damaged, or not fairseq's."""
