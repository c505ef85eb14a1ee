"""The mappings from scores to probabilities, one entry each, over one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import entmax
import torch
from torch import Tensor

# What EvSoftmax leaves of a score below the mean in training, so that its gradient does not vanish.
EV_TRAINING_FACTOR = 1e-6

# Scores to modulated scores; in practice a `Modulator`.
ScoreFunction = Callable[[Tensor], Tensor]


def softmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Return softmax probabilities over the scores that are not excluded.

        p_i = exp(x_i / temperature) / sum_k exp(x_k / temperature)
    Equivalent to: torch.softmax(scores.masked_fill(mask, -inf) / temperature, dim)

    Args:
        scores: any shape and floating dtype.
        dim: the dimension that sums to one.
        mask: bool, broadcastable to scores; True excludes. A row that is wholly excluded is zero.
        temperature: above zero.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: the temperature is not above zero; the mask is not bool.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature must be above 0, got {temperature}")
    wide = _wide(scores)
    if mask is not None:
        wide = _exclude(wide, dim, mask)
    if temperature != 1 and wide.numel() > 0:
        wide = _below_top(wide, dim) / temperature
    probs = wide.softmax(dim)
    return probs if mask is None else probs.masked_fill(mask, 0.0)


def multimax(
    x: Tensor, modulator: ScoreFunction, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Return MultiMax probabilities: softmax of the modulated scores.

        p_i = exp(sigma(x_i)) / sum_k exp(sigma(x_k))          (Eq. 4 and 6, Zhou et al. 2024)
    Equivalent to: torch.softmax(modulator(x).masked_fill(mask, -inf), dim)

    Args:
        x: scores, any shape and floating dtype.
        modulator: a `Modulator`, or any function from scores to scores of the same shape.
        dim: the dimension that sums to one.
        mask: bool, broadcastable to x; True excludes: probability and gradient are exactly 0
            there. A row that is wholly excluded is zero.

    Returns:
        The shape of x, in float32 or wider.

    Raises:
        ValueError: the mask is not bool.
    """
    # The mask comes after the modulator: a modulated -inf need not be -inf.
    return softmax(modulator(x), dim, mask)


def log_multimax(
    x: Tensor, modulator: ScoreFunction, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Return the logarithm of `multimax`, with -inf where the mask excludes.

    Equivalent to: torch.log_softmax(modulator(x).masked_fill(mask, -inf), dim)

    Args, Raises: as `multimax`.

    Returns:
        The shape of x, in float32 or wider; a row that is wholly excluded is -inf.
    """
    wide = _wide(modulator(x))
    if mask is None:
        return wide.log_softmax(dim)
    return _exclude(wide, dim, mask).log_softmax(dim).masked_fill(mask, -torch.inf)


def topk(scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, k: int) -> Tensor:
    """Return softmax probabilities over the k largest scores, zero elsewhere.

        p_i = [x_i >= x_(k)] exp(x_i) / sum_j [x_j >= x_(k)] exp(x_j)    (Gupta et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.topk(k)[0][..., -1:], -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; k counts what is not excluded.
        k: at least 1. Scores equal to the k-th largest are kept with it.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: k is below 1; the mask is not bool.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")

    def mapping(wide: Tensor) -> Tensor:
        length = wide.shape[dim]
        if k >= length:
            return wide.softmax(dim)
        least = wide.detach().topk(k, dim, sorted=True).values.narrow(dim, k - 1, 1)
        return wide.masked_fill(wide < least, -torch.inf).softmax(dim)

    return _over_allowed(mapping, scores, dim, mask)


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return the point of the probability simplex that is nearest to the scores.

        p_i = max(x_i - tau, 0), tau such that they sum to one     (Martins and Astudillo 2016)
    Equivalent to: entmax.sparsemax(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return _over_allowed(lambda wide: entmax.sparsemax(wide, dim), scores, dim, mask)


def entmax15(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return 1.5-entmax probabilities, between softmax and sparsemax.

        p_i = max(x_i / 2 - tau, 0)^2, tau such that they sum to one      (Peters et al. 2019)
    Equivalent to: entmax.entmax15(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return _over_allowed(lambda wide: entmax.entmax15(wide, dim), scores, dim, mask)


def alpha_entmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, alpha: float | Tensor
) -> Tensor:
    """Return alpha-entmax probabilities.

        p_i = max((alpha - 1) x_i - tau, 0)^(1 / (alpha - 1)), tau such that they sum to one
                                                                      (Correia et al. 2019)
    Equivalent to: entmax.entmax_bisect(scores.masked_fill(mask, -inf), alpha, dim)

    Args:
        scores, dim, mask: as `softmax`.
        alpha: at least 1; 1 is softmax, 2 is sparsemax. A tensor, which gets its gradient, is
            broadcastable to scores, has size 1 in `dim`, and lies well above 1: its gradient is a
            difference over (alpha - 1)^2.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: alpha is a number below 1; the mask is not bool.
    """
    if isinstance(alpha, Tensor):
        wide_alpha = alpha
        return _over_allowed(lambda wide: _bisect(wide, wide_alpha, dim), scores, dim, mask)
    if not alpha >= 1:
        raise ValueError(f"alpha must be at least 1, got {alpha}")
    if alpha == 1:
        return softmax(scores, dim, mask)
    if alpha == 1.5:
        return entmax15(scores, dim, mask)
    if alpha == 2:
        return sparsemax(scores, dim, mask)
    return _over_allowed(lambda wide: _bisect(wide, alpha, dim), scores, dim, mask)


def _bisect(wide: Tensor, alpha: float | Tensor, dim: int) -> Tensor:
    if isinstance(alpha, Tensor):
        alpha = alpha.to(wide.dtype)
    # Each step halves an interval of length one at most: past the mantissa it changes nothing.
    steps = 30 if wide.dtype == torch.float32 else 60
    return entmax.entmax_bisect(_below_top(wide, dim), alpha, dim, steps)


def evsoftmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, training: bool = False
) -> Tensor:
    """Return softmax probabilities over the scores that are not below their mean.

        p_i = w_i exp(x_i) / sum_k w_k exp(x_k), w_i = [x_i >= mean(x)]     (Chen et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.mean(-1, True), -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; the mean is over what is not excluded.
        training: w_i is 1 + 1e-6 and 1e-6, so that low scores get gradients.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: the mask is not bool.
    """

    def mapping(wide: Tensor) -> Tensor:
        fixed = wide.detach()
        allowed = fixed > -torch.inf
        # Divided before they are added: a sum of the largest scores would overflow.
        share = fixed / allowed.sum(dim, keepdim=True).clamp(min=1)
        mean = share.masked_fill(~allowed, 0.0).sum(dim, keepdim=True)
        # Rounding may put the mean of equal scores above all of them.
        kept = fixed >= torch.minimum(mean, fixed.amax(dim, keepdim=True))
        if not training:
            return wide.masked_fill(~kept, -torch.inf).softmax(dim)
        factor = kept.to(wide.dtype) + EV_TRAINING_FACTOR
        return (wide + factor.log()).softmax(dim)

    return _over_allowed(mapping, scores, dim, mask)


def _wide(scores: Tensor) -> Tensor:
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _below_top(scores: Tensor, dim: int) -> Tensor:
    """The scores less the largest, for mappings that a shift does not change: so that a factor
    overflows to -inf alone, and a threshold that lies one below the top is not rounded to it."""
    return scores - scores.detach().amax(dim, keepdim=True)


def _over_allowed(
    mapping: Callable[[Tensor], Tensor], scores: Tensor, dim: int, mask: Tensor | None
) -> Tensor:
    """Apply a mapping that gives -inf the probability 0 to the scores that are not excluded."""
    wide = _wide(scores)
    if wide.numel() == 0:
        return wide
    if mask is None:
        return mapping(wide)
    return mapping(_exclude(wide, dim, mask)).masked_fill(mask, 0.0)


def _exclude(scores: Tensor, dim: int, mask: Tensor) -> Tensor:
    """Put -inf where the mask excludes, except in rows where nothing would be left.

    Those rows are blanked after normalising instead, so that no NaN ever arises, not even in the
    backward pass.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool (True excludes), got {mask.dtype}")
    dim = dim - scores.dim() if dim >= 0 else dim
    # A mask without this dimension excludes whole rows or none of a row.
    empty = mask.all(dim, keepdim=True) if mask.dim() >= -dim else mask
    return scores.masked_fill(mask & ~empty, -torch.inf)


# name -> function(scores, dim, mask, **options)
NORMALIZERS: dict[str, Callable[..., Tensor]] = {
    "softmax": softmax,
    "multimax": multimax,
    "topk": topk,
    "sparsemax": sparsemax,
    "entmax15": entmax15,
    "alpha_entmax": alpha_entmax,
    "evsoftmax": evsoftmax,
}


def normalize(
    name: str, scores: Tensor, dim: int = -1, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the probabilities of a named mapping.

    Equivalent to: NORMALIZERS[name](scores, dim=dim, mask=mask, **options)

    Args:
        name: a key of `NORMALIZERS`.
        scores, dim, mask: as `multimax`.
        options: what the mapping takes: `temperature` (softmax), `modulator` (multimax),
            `k` (topk), `alpha` (alpha_entmax), `training` (evsoftmax).

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        ValueError: an unknown name.
        TypeError: an option that the mapping does not take, or lacks.
    """
    return normalizer(name)(scores, dim=dim, mask=mask, **options)


def normalizer(name: str) -> Callable[..., Tensor]:
    """Return the function of a named mapping; ValueError names the known ones."""
    if name not in NORMALIZERS:
        raise ValueError(f"unknown normalizer {name!r}: choose one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]
