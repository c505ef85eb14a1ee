"""MultiMax for fairseq: learnable modulated softmax in attention and in the output layer.

This module holds the mathematics, and needs torch and entmax; `multimax_fairseq.models`, which
fairseq imports by itself under `--user-dir`, registers the architectures and the criteria.
"""

from multimax_fairseq import supported  # noqa: F401  comes first, for it says what is too old

# isort: split
from multimax_fairseq.functional import (
    NORMALIZERS,
    Mapping,
    Option,
    continuous_softmax,
    continuous_softmax_nd,
    continuous_sparsemax,
    continuous_sparsemax_2d,
    linear_cross_entropy,
    log_multimax,
    multimax,
    normalize,
    register,
    scaled_dot_product_attention,
    symmetric_divergence,
)
from multimax_fairseq.modules import Modulator, Normalizer, replace_softmax

__version__ = "0.1.0"

__all__ = [
    "NORMALIZERS",
    "Mapping",
    "Modulator",
    "Normalizer",
    "Option",
    "continuous_softmax",
    "continuous_softmax_nd",
    "continuous_sparsemax",
    "continuous_sparsemax_2d",
    "linear_cross_entropy",
    "log_multimax",
    "multimax",
    "normalize",
    "register",
    "replace_softmax",
    "scaled_dot_product_attention",
    "symmetric_divergence",
]
