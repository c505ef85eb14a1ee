"""The public names of the package. This module imports torch."""

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
from multimax_fairseq.ops.cross_entropy import linear_cross_entropy, linear_log_probs
from multimax_fairseq.ops.row_function import RowFunction
from multimax_fairseq.ops.symmetric_divergence import symmetric_divergence

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
    "linear_log_probs",
    "log_multimax",
    "multimax",
    "normalize",
    "register",
    "replace_softmax",
    "scaled_dot_product_attention",
    "symmetric_divergence",
]
