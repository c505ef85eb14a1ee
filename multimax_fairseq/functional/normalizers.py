"""The mappings from scores to probabilities, one entry each, over one table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if temperature != 1:
        wide = wide / temperature
    if mask is None:
        return wide.softmax(dim)
    return _exclude(wide, dim, mask).softmax(dim).masked_fill(mask, 0.0)


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
    wide = modulator(x)
    wide = wide.to(torch.promote_types(wide.dtype, torch.float32))
    if mask is None:
        return wide.log_softmax(dim)
    return _exclude(wide, dim, mask).log_softmax(dim).masked_fill(mask, -torch.inf)


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
NORMALIZERS: dict[str, Callable[..., Tensor]] = {"softmax": softmax, "multimax": multimax}


def normalize(
    name: str, scores: Tensor, dim: int = -1, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Return the probabilities of a named mapping.

    Equivalent to: NORMALIZERS[name](scores, dim=dim, mask=mask, **options)

    Args:
        name: a key of `NORMALIZERS`.
        scores, dim, mask: as `multimax`.
        options: what the mapping takes: `temperature` (softmax), `modulator` (multimax).

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
