"""Tensors in, tensors out. Needs torch and entmax, and nothing else."""

from multimax_fairseq.functional.attention import scaled_dot_product_attention
from multimax_fairseq.functional.cross_entropy import linear_cross_entropy
from multimax_fairseq.functional.mapping import NORMALIZERS, Mapping, Option, normalize, register
from multimax_fairseq.functional.modulator import modulate
from multimax_fairseq.functional.normalizers import log_multimax, multimax

__all__ = [
    "NORMALIZERS",
    "Mapping",
    "Option",
    "linear_cross_entropy",
    "log_multimax",
    "modulate",
    "multimax",
    "normalize",
    "register",
    "scaled_dot_product_attention",
]
