"""The optimiser that knows the learned scalars."""

from multimax_fairseq.optim import adam  # noqa: F401
