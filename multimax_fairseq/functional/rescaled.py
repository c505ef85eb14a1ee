"""Mappings that first multiply a query's scores: by how many keys it has, or by their entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from multimax_fairseq.functional.checks import check_flag, check_number
from multimax_fairseq.functional.normalizers import (
    check_arguments,
    check_row_values,
    entmax15,
    hidden_keys,
    softmax,
    widened,
)

# 1 / temperature by the entropy, highest power first: Figure 5 of Velickovic et al. 2024.
TEMPERATURE_FIT = (-0.037, 0.481, -2.3, 4.917, -1.791)


def key_counts(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return how many keys each query may attend to, 1 at least.

    Equivalent to: (~mask).expand(scores.shape).sum(dim, keepdim=True).clamp(min=1)

    Args:
        scores: any shape and floating dtype.
        dim: that of the keys.
        mask: broadcastable to scores. Bool: True excludes. Float: what adds -5000 or less does.

    Returns:
        Broadcastable to scores, with size 1 in `dim`; in float32 or wider.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    length = scores.shape[dim] if scores.dim() > 0 else 1
    if mask is None or mask.dim() == 0:
        return torch.full((), max(length, 1), dtype=wide, device=scores.device)
    kept = ~hidden_keys(mask)
    behind = dim - scores.dim() if dim >= 0 else dim
    if mask.dim() < -behind:  # all keys or none
        kept = kept[(None,) * (-behind - mask.dim())]
    each = length if kept.shape[behind] == 1 else 1
    return (kept.sum(behind, keepdim=True) * each).clamp(min=1).to(wide)


def ssmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, length_scale: float | Tensor
) -> Tensor:
    """Return Scalable-Softmax probabilities, which do not flatten as keys become more.

        p_i = n^(s x_i) / sum_k n^(s x_k), n keys                             (Nakanishi 2025)
    Equivalent to: torch.softmax((s * math.log(n) * scores).masked_fill(mask, -inf), dim)

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`.
        length_scale: s. A tensor, which gets its gradient, is broadcastable to scores and has size
            1 in `dim`.

    Returns:
        The shape of scores, in float32 or wider; of a single key, 1.

    Raises:
        TypeError: length_scale is neither a number nor a tensor.
        ValueError: length_scale is nan or infinite, or a tensor of another dtype, shape or device;
            as `softmax`.
    """
    check_arguments(scores, dim, mask)
    _check("length_scale", length_scale, scores, dim)
    factor = ssmax_scale(key_counts(scores, dim, mask), length_scale)
    return softmax(shift_and_scale(scores, factor, dim, mask), dim, mask)


def ssmax_scale(counts: Tensor, length_scale: float | Tensor) -> Tensor:
    """Return what `ssmax` multiplies scores by, for these `key_counts`."""
    return length_scale * counts.log()


def asentmax(
    scores: Tensor,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    beta: float | Tensor,
    gamma: float | Tensor,
) -> Tensor:
    """Return Adaptive-Scalable Entmax probabilities.

        p = 1.5-entmax((1 + beta log(n + 1)^gamma) x), n keys            (Vasylenko et al. 2026)
    Equivalent to: entmax.entmax15((1 + beta * math.log(n + 1) ** gamma) * scores, dim)

    Theirs is a logarithm of n, which is 0 for a single key and has no negative power.

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`. What a
            float mask adds is not multiplied.
        beta, gamma: tensors, which get their gradients, are broadcastable to scores and have size 1
            in `dim`.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: beta or gamma is neither a number nor a tensor.
        ValueError: one of them is nan or infinite, or a tensor of another dtype, shape or device;
            as `softmax`.
    """
    check_arguments(scores, dim, mask)
    _check("beta", beta, scores, dim)
    _check("gamma", gamma, scores, dim)
    growth = (key_counts(scores, dim, mask) + 1).log() ** gamma
    return entmax15(shift_and_scale(scores, 1 + beta * growth, dim, mask), dim, mask)


def adaptive_temperature(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, training: bool = False
) -> Tensor:
    """Return softmax probabilities at a temperature that is lower where softmax is spread out.

        p = softmax(beta x), beta = max(P(H), 1), H the entropy of softmax(x)
                                                                       (Velickovic et al. 2024)
    P is their polynomial, -0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791, below 1 where they do
    not use it, up to H = 0.5. It is for models that were trained with softmax.

    Args:
        scores, dim, mask: as `softmax`; what a float mask adds counts for H and is not multiplied.
        training: softmax.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: training is no bool; as `softmax`.
        ValueError: as `softmax`.
    """
    check_flag("training", training)
    probs = softmax(scores, dim, mask)
    if training:
        return probs
    entropy = -(probs * torch.where(probs > 0, probs, 1.0).log()).sum(dim, keepdim=True)
    fitted = torch.zeros_like(entropy)
    for coefficient in TEMPERATURE_FIT:
        fitted = fitted * entropy + coefficient
    return softmax(shift_and_scale(scores, fitted.clamp(min=1.0), dim, mask), dim, mask)


def shift_and_scale(scores: Tensor, factor: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Return (scores - largest) * factor, in float32 or wider, where largest is a row's maximum.

    Softmax and other mappings that ignore a shift give the same probabilities as for scores *
    factor. For a factor of at least 0 the product can overflow only to -inf. Excluded scores
    contribute no gradient to the factor.
    """
    wide = widened(scores)
    if wide.numel() == 0:
        return wide
    lowest = wide.detach() == -torch.inf
    excluded = lowest if mask is None else lowest | hidden_keys(mask)
    top = wide.detach().masked_fill(excluded, -torch.inf).amax(dim, keepdim=True)
    # What an excluded score is, no gradient of a factor may see.
    product = (wide - top).masked_fill(excluded, 0.0) * factor
    return product.masked_fill(lowest, -torch.inf)


def _check(name: str, value: float | Tensor, scores: Tensor, dim: int) -> None:
    if isinstance(value, Tensor):
        check_row_values(name, value, scores, dim)
    else:
        check_number(name, value)
