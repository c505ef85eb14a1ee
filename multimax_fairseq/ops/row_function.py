"""Describes row functions, mappings that need all scores of a query, for the fused kernels."""

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
ON_TRITON = tuple(name for name in FUNCTIONS if name != "adaptive_temperature")


@dataclass(frozen=True)
class RowFunction:
    """A mapping as the kernels compute it.

    Attributes:
        name: one of FUNCTIONS; with a header, the name of its struct.
        parameter: a number, or a tensor with one element or (H, 1, 1). topk: k. evsoftmax: the
            factor of low scores. alpha_entmax: alpha, which gets its gradient; outside of (1, 2]
            the result is NaN. sigmoid: the bias; NaN stands for -log(n).
        needs_exclusion_mask: whether a float mask must be 0 or -inf everywhere, because the
            function multiplies the scores or counts the keys, and so cannot just add the mask.
            With other masks the mapping is computed in plain PyTorch.
        header: the path of a C++ header that defines the struct `name`, as cpp/rows.h describes,
            for the CPU. It is compiled when it is first used. After a change to a header in its
            folder, the next process compiles it again.

    Raises:
        ValueError: an unknown name without a header; no parameter for a function that needs one.
    """

    name: str
    parameter: float | Tensor | None = None
    needs_exclusion_mask: bool = False
    header: str | None = None

    def __post_init__(self) -> None:
        check_row_name(self.name, self.header, self.parameter is not None)

    def supports_mask(self, mask: Tensor | None) -> bool:
        """Return whether the kernels support a mask, bool or float."""
        if not self.needs_exclusion_mask or mask is None or mask.dtype == torch.bool:
            return True
        if traced() or mask.device.type != "cpu":  # unknown, or known only by synchronising
            return False
        return bool(((mask == 0) | (mask == -math.inf)).all())


def check_row_name(name: str, header: str | None, has_parameter: bool) -> None:
    """Raise ValueError for a row function that does not exist or lacks its parameter."""
    if header is not None:
        return
    if name not in FUNCTIONS:
        names = ", ".join(FUNCTIONS)
        raise ValueError(f"unknown row function {name!r}: choose one of {names}, or pass a header")
    if not has_parameter and name in WITH_PARAMETER:
        raise ValueError(f"the row function {name} needs a parameter: pass one number per head")
