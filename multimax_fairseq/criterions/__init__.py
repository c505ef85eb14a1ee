"""The criteria that train output layers with MultiMax or a sparse mapping."""

from multimax_fairseq.criterions import cross_entropy, entmax_loss  # noqa: F401
