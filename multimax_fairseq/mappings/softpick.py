"""Softpick: rectified softmax, whose weights need not sum to 1 (Zuhri et al. 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from multimax_fairseq.mappings.masking import masked
from multimax_fairseq.mappings.registry import Mapping, register
from multimax_fairseq.ops.masks import excluded_keys
from multimax_fairseq.ops.row_function import RowFunction

# Avoids a division by 0 for a row of zeros.
EPSILON = 1e-6


def softpick(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return rectified softmax weights: exactly zero for negative scores.

        p_i = max(exp(x_i) - 1, 0) / (sum_k |exp(x_k) - 1| + 1e-6)          (Zuhri et al. 2025)
    Equivalent to: scores.expm1().relu() / (scores.expm1().abs().sum(dim, True) + 1e-6)

    Negative scores count in the denominator, so that a row sums to less than one. A row with only
    negative scores is zero, and so is its gradient.

    Args:
        scores, dim, mask: as `softmax`. Adding -5000 or less excludes; else it would count as a
            negative score.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: as `softmax`.
    """
    wide, _ = masked(scores, dim, mask)
    if wide.numel() == 0:
        return wide
    if mask is not None:
        wide = wide.masked_fill(excluded_keys(mask), 0.0)  # no NaN gradient
    # Divide all terms by exp(base), so that none overflows.
    base = wide.detach().amax(dim, keepdim=True).clamp(min=0.0)
    shrink = (-base).exp()
    # For small scores, the difference of exponentials would cancel.
    excess = torch.where(
        wide < 1, wide.clamp(max=1.0).expm1() * shrink, (wide - base).exp() - shrink
    )
    return excess.relu() / (excess.abs().sum(dim, keepdim=True) + EPSILON * shrink)


register(
    Mapping(
        name="softpick",
        label="softpick",
        function=softpick,
        sums_to_one=False,
        kernel=lambda: {"row": RowFunction("softpick", needs_exclusion_mask=True)},
    )
)
