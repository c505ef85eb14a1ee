"""EvSoftmax: softmax over the scores that are not below their mean (Chen et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.mappings.masking import apply_masked
from multimax_fairseq.mappings.registry import Mapping, register
from multimax_fairseq.ops.checks import check_flag
from multimax_fairseq.ops.masks import excluded_keys
from multimax_fairseq.ops.row_function import RowFunction

# The weight of a score below the mean in training, so that its gradient does not vanish.
EV_TRAINING_FACTOR = 1e-6


def evsoftmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, training: bool = False
) -> Tensor:
    """Return softmax probabilities over the scores that are not below their mean.

        p_i = w_i exp(x_i) / sum_k w_k exp(x_k), w_i = [x_i >= mean(x)]     (Chen et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.mean(-1, True), -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; the mean is over the keys that the mask does not exclude.
        training: w_i is 1 + 1e-6 and 1e-6, so that low scores get gradients.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: training is not a bool; as `softmax`.
        ValueError: as `softmax`.
    """
    check_flag("training", training)

    def mapping(wide: Tensor) -> Tensor:
        fixed = wide.detach()
        allowed = fixed > -torch.inf
        if mask is not None:
            counted = allowed & ~excluded_keys(mask)
            allowed = torch.where(counted.any(dim, keepdim=True), counted, allowed)
        # A power of two adds no rounding and keeps the sum of the largest scores finite.
        scaled = fixed.double() * 2.0**-32
        total = scaled.masked_fill(~allowed, 0.0).sum(dim, keepdim=True)
        mean = total / allowed.sum(dim, keepdim=True).clamp(min=1)
        # Rounding may put the mean of equal scores above all of them.
        selected = scaled >= torch.minimum(mean, scaled.amax(dim, keepdim=True))
        if not training:
            return wide.masked_fill(~selected, -torch.inf).softmax(dim)
        factor = selected.to(wide.dtype) + EV_TRAINING_FACTOR
        return (wide + factor.log()).softmax(dim)

    return apply_masked(mapping, scores, dim, mask)


def _kernel(training: bool = False) -> dict[str, Any] | None:
    if not isinstance(training, bool):
        return None
    factor = EV_TRAINING_FACTOR if training else 0.0
    return {"row": RowFunction("evsoftmax", factor, needs_exclusion_mask=True)}


register(
    Mapping(name="evsoftmax", label="EvSoftmax", function=evsoftmax, training=True, kernel=_kernel)
)
