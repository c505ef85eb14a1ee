"""Tensors in, tensors out. Needs torch and entmax, and nothing else."""

from multimax_fairseq.functional.attention import scaled_dot_product_attention
from multimax_fairseq.functional.continuous import continuous_softmax, continuous_sparsemax
from multimax_fairseq.functional.continuous_nd import (
    continuous_softmax_nd,
    continuous_sparsemax_2d,
)
from multimax_fairseq.functional.cross_entropy import linear_cross_entropy
from multimax_fairseq.functional.mapping import NORMALIZERS, Mapping, Option, normalize, register
from multimax_fairseq.functional.modulator import modulate
from multimax_fairseq.functional.normalizers import log_multimax, multimax
from multimax_fairseq.functional.symmetric_divergence import symmetric_divergence

__all__ = [
    "NORMALIZERS",
    "Mapping",
    "Option",
    "continuous_softmax",
    "continuous_softmax_nd",
    "continuous_sparsemax",
    "continuous_sparsemax_2d",
    "linear_cross_entropy",
    "log_multimax",
    "modulate",
    "multimax",
    "normalize",
    "register",
    "scaled_dot_product_attention",
    "symmetric_divergence",
]
