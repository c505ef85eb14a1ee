"""The output-layer criteria."""

from multimax_fairseq.criterions import cross_entropy  # noqa: F401
