"""Tensors in, tensors out. Needs torch and entmax, and nothing else."""

from multimax_fairseq.functional.attention import scaled_dot_product_attention
from multimax_fairseq.functional.cross_entropy import linear_cross_entropy
from multimax_fairseq.functional.modulator import modulate
from multimax_fairseq.functional.normalizers import (
    NORMALIZERS,
    log_multimax,
    multimax,
    normalize,
)

__all__ = [
    "NORMALIZERS",
    "linear_cross_entropy",
    "log_multimax",
    "modulate",
    "multimax",
    "normalize",
    "scaled_dot_product_attention",
]
