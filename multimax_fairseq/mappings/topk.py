"""Top-k softmax: softmax over the k largest scores (Gupta et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.mappings.masking import apply_masked
from multimax_fairseq.mappings.registry import Mapping, Option, register
from multimax_fairseq.ops.checks import check_integer, is_whole
from multimax_fairseq.ops.row_function import RowFunction


def topk(scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, k: int) -> Tensor:
    """Return softmax probabilities over the k largest scores, zero elsewhere.

        p_i = [x_i >= x_(k)] exp(x_i) / sum_j [x_j >= x_(k)] exp(x_j)    (Gupta et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.topk(k)[0][..., -1:], -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; k counts what is not excluded.
        k: at least 1. Scores equal to the k-th largest are kept too.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: k is not an integer.
        ValueError: k is below 1; as `softmax`.
    """
    check_integer("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")

    def mapping(wide: Tensor) -> Tensor:
        length = wide.shape[dim]
        if k >= length:
            return wide.softmax(dim)
        kth = wide.detach().topk(k, dim, sorted=True).values.narrow(dim, k - 1, 1)
        return wide.masked_fill(wide < kth, -torch.inf).softmax(dim)

    return apply_masked(mapping, scores, dim, mask)


def _kernel(k: int) -> dict[str, Any] | None:
    # The kernel counts in float32.
    return {"row": RowFunction("topk", float(k))} if is_whole(k) and k < 2**24 else None


register(
    Mapping(
        name="topk",
        label="top-k",
        function=topk,
        kernel=_kernel,
        options=(
            Option(
                "k",
                None,
                int,
                requirement="a whole number of at least 1",
                is_valid=is_whole,
                help="number of scores that topk keeps",
                setting="topk",
            ),
        ),
    )
)
