"""The optimizer that treats the learned scalars separately."""

from multimax_fairseq.optim import adam  # noqa: F401
