"""The output-layer criteria."""

from multimax_fairseq.criterions import cross_entropy, entmax_loss  # noqa: F401
