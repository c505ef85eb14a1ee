"""Mappings whose weights need not sum to one: each key's weight is its own, or may be refused."""

from __future__ import annotations

import torch
from torch import Tensor

from multimax_fairseq.functional.checks import check_number
from multimax_fairseq.functional.normalizers import hidden_keys, masked
from multimax_fairseq.functional.rescaled import key_counts

# Keeps a row of scores that are all 0 from being divided by 0.
SOFTPICK_EPSILON = 1e-6


def softpick(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return rectified softmax weights: exactly zero for negative scores.

        p_i = max(exp(x_i) - 1, 0) / (sum_k |exp(x_k) - 1| + 1e-6)          (Zuhri et al. 2025)
    Equivalent to: scores.expm1().relu() / (scores.expm1().abs().sum(dim, True) + 1e-6)

    Negative scores take from the others as much as they would have got, so that a row sums to less
    than one; a row of negative scores alone is zero, and so is its gradient.

    Args:
        scores, dim, mask: as `softmax`. What adds -5000 or less excludes: it would count as a
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
        wide = wide.masked_fill(hidden_keys(mask), 0.0)  # no gradient is nan
    # All over exp(base), which overflows for none of them.
    base = wide.detach().amax(dim, keepdim=True).clamp(min=0.0)
    shrink = (-base).exp()
    # A small score's own digits would be lost in a difference of exponentials.
    excess = torch.where(
        wide < 1, wide.clamp(max=1.0).expm1() * shrink, (wide - base).exp() - shrink
    )
    return excess.relu() / (excess.abs().sum(dim, keepdim=True) + SOFTPICK_EPSILON * shrink)


def sigmoid(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, bias: float | None = None
) -> Tensor:
    """Return sigmoid weights, each key's by itself.

        p_i = 1 / (1 + exp(-x_i - b)), b = -log(n), n keys             (Ramapuram et al. 2025)
    Equivalent to: torch.sigmoid(scores - math.log(n)).masked_fill(mask, 0)

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`.
        bias: b; None is -log(n), at which scores of 0 give a row that sums to about one.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: the bias is no number.
        ValueError: it is not finite; as `softmax`.
    """
    if bias is not None:
        check_number("bias", bias)
    wide, excluded = masked(scores, dim, mask)
    added = -key_counts(scores, dim, mask).log() if bias is None else bias
    weights = (wide + added).sigmoid()
    return weights if excluded is None else weights.masked_fill(excluded, 0.0)
