"""MultiMax for fairseq: learnable modulated softmax in attention and in the output layer.

This module holds the mathematics, and needs torch and entmax; `multimax_fairseq.models`, which
fairseq imports by itself under `--user-dir`, registers the architectures and the criteria.
"""

from multimax_fairseq import supported  # noqa: F401  first: refuses old versions of Python and torch

# isort: split
from multimax_fairseq.continuous import (
    continuous_softmax,
    continuous_softmax_nd,
    continuous_sparsemax,
    continuous_sparsemax_2d,
)
from multimax_fairseq.integrations.replace_softmax import replace_softmax
from multimax_fairseq.mappings import (
    NORMALIZERS,
    Mapping,
    Modulator,
    Option,
    log_multimax,
    multimax,
    normalize,
    register,
    scaled_dot_product_attention,
)
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.ops.cross_entropy import linear_cross_entropy
from multimax_fairseq.ops.row_function import RowFunction
from multimax_fairseq.ops.symmetric_divergence import symmetric_divergence

__version__ = "0.2.0"

__all__ = [
    "NORMALIZERS",
    "Mapping",
    "Modulator",
    "Normalizer",
    "Option",
    "RowFunction",
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
