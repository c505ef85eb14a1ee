"""Describes row functions, mappings that need all scores of a query, for the CPU kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from multimax_fairseq.ops.backend import traced

# The structs in cpp/row_functions.h, in the order of `dispatch_row`.
FUNCTIONS = (
    "topk",
    "evsoftmax",
    "sparsemax",
    "entmax15",
    "alpha_entmax",
    "sigmoid",
    "softpick",
    "adaptive_temperature",
)
WITH_PARAMETER = ("topk", "evsoftmax", "alpha_entmax", "sigmoid")
LEARNED = ("alpha_entmax",)
WITHOUT_GRADIENT = ("adaptive_temperature",)
ON_TRITON = FUNCTIONS[: FUNCTIONS.index("adaptive_temperature")]


@dataclass(frozen=True)
class RowFunction:
    """A mapping as the kernel computes it.

    Attributes:
        name: one of FUNCTIONS; with a header, the name of its struct.
        parameter: a number, or a tensor with one number for all heads or for each. topk: k.
            evsoftmax: the factor of low scores. alpha_entmax: alpha, which gets its gradient;
            outside of (1, 2] the result is NaN. sigmoid: the bias; NaN is minus the logarithm of
            the number of keys.
        counts_keys: whether the weights are not a function of the scores plus a float mask alone:
            they depend on the number of keys, or multiply the scores only. Such a mask must then
            be 0 or -inf everywhere; otherwise the mapping is computed in plain PyTorch.
        header: the path of a C++ header that defines the struct `name`, as cpp/rows.h describes. It
            is compiled when it is first used, and again when its text changes.
    """

    name: str
    parameter: float | Tensor | None = None
    counts_keys: bool = False
    header: str | None = None

    def supports_mask(self, mask: Tensor | None) -> bool:
        """Return whether the kernel supports a mask, bool or float."""
        if not self.counts_keys or mask is None or mask.dtype == torch.bool:
            return True
        if traced():  # the numbers in the mask are unknown
            return False
        return bool(((mask == 0) | (mask == -math.inf)).all())
