"""Checks of arguments, masks and shifts of scores that the mappings share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multimax_fairseq.ops.checks import check_device, check_integer, check_number, check_tensor
from multimax_fairseq.ops.masks import excluded_keys


def check_arguments(scores: Tensor, dim: int, mask: Tensor | None) -> None:
    """Raise TypeError or ValueError for arguments that no mapping takes."""
    check_scores(scores)
    _check_dim(scores, dim)
    if mask is None:
        return
    check_tensor("mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask must be bool (True excludes) or floating-point (added), got {mask.dtype}"
        )
    if not _broadcasts(list(mask.shape), list(scores.shape)):
        raise ValueError(
            f"mask must be broadcastable to the scores {list(scores.shape)}, got {list(mask.shape)}"
        )
    check_device("mask", mask, scores, "scores")


def check_scores(scores: Tensor) -> None:
    check_tensor("scores", scores)
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating-point, got {scores.dtype}")


def _check_dim(scores: Tensor, dim: int) -> None:
    check_integer("dim", dim)
    ndim = max(scores.dim(), 1)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be in [{-ndim}, {ndim - 1}], got {dim}")


def _broadcasts(shape: list[int], to: list[int]) -> bool:
    """Whether a shape can be broadcast to another one, which stays as it is."""
    if len(shape) > len(to):
        return False
    for i in range(len(shape)):
        if shape[i] != 1 and shape[i] != to[len(to) - len(shape) + i]:
            return False
    return True


def check_row_values(name: str, values: Tensor, scores: Tensor, dim: int) -> None:
    """Raise TypeError or ValueError unless `values` has a floating-point number for each row."""
    check_tensor(name, values)
    check_scores(scores)
    _check_dim(scores, dim)
    shape = list(scores.shape)
    if shape:
        shape[dim] = 1
    if not values.is_floating_point() or not _broadcasts(list(values.shape), shape):
        raise ValueError(
            f"{name} must be floating-point and broadcastable to {shape}, got {values.dtype} "
            f"{list(values.shape)}"
        )
    check_device(name, values, scores, "scores")


def check_value(name: str, value: float | Tensor, scores: Tensor, dim: int) -> None:
    if isinstance(value, Tensor):
        check_row_values(name, value, scores, dim)
    else:
        check_number(name, value)


def masked(
    scores: Tensor, dim: int, mask: Tensor | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores at a temperature, in float32 or wider, and which are excluded.

    Excluded scores are -inf. A fully masked row is 0 instead, which avoids NaN in the forward and
    the backward pass. The caller sets its probabilities to 0 after normalising.
    """
    check_arguments(scores, dim, mask)
    wide = at_least_float32(scores)
    if mask is None:
        return _divide(wide, temperature, dim), None
    if mask.dtype != torch.bool:
        mask = mask.to(wide.dtype)  # a large float64 becomes infinite
    excluded = mask if mask.dtype == torch.bool else mask == -float("inf")
    dim = dim - wide.dim() if dim >= 0 else dim
    # A mask without this dimension excludes whole rows.
    empty = excluded.all(dim, keepdim=True) if mask.dim() >= -dim else excluded
    wide = wide.masked_fill(excluded, -float("inf")).masked_fill(empty, 0.0)
    wide = _divide(wide, temperature, dim)
    if mask.dtype != torch.bool:
        # Zero the mask where it is -inf, so that excluded entries get no gradient.
        wide = wide + mask.masked_fill(excluded, 0.0)
    return wide, excluded


def _divide(wide: Tensor, temperature: float, dim: int) -> Tensor:
    """Return (scores - maximum) / temperature; the scores themselves at temperature 1."""
    if temperature == 1 or wide.numel() == 0:
        return wide
    return subtract_max(wide, dim) / temperature


def apply_masked(
    mapping: Callable[[Tensor], Tensor], scores: Tensor, dim: int, mask: Tensor | None
) -> Tensor:
    """Return the probabilities of a mapping, 0 where the mask excludes.

    Args:
        mapping: maps scores to probabilities, and -inf to 0.
    """
    wide, excluded = masked(scores, dim, mask)
    if wide.numel() == 0:
        return wide
    probs = mapping(wide) if wide.dim() > 0 else mapping(wide.unsqueeze(0)).squeeze(0)
    return probs if excluded is None else probs.masked_fill(excluded, 0.0)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def subtract_max(scores: Tensor, dim: int) -> Tensor:
    """Return scores - maximum, for mappings that are invariant to a shift.

    A product with a positive factor can then overflow only to -inf. The maximum becomes 0, so the
    start of entmax's bisection, maximum - 1, has no rounding error.
    """
    return scores - scores.detach().amax(dim, keepdim=True)


def shift_and_scale(scores: Tensor, factor: Tensor, dim: int, mask: Tensor | None) -> Tensor:
    """Return (scores - maximum) * factor, in float32 or wider; the maximum is that of the row.

    Mappings that are invariant to a shift, such as softmax, return the same probabilities as for
    scores * factor. If the factor is not negative, the product can overflow only to -inf.
    """
    wide = at_least_float32(scores)
    if wide.numel() == 0:
        return wide
    infinite, excluded = _infinite_and_excluded(wide, mask)
    top = wide.detach().masked_fill(excluded, -torch.inf).amax(dim, keepdim=True)
    return _scale_allowed(wide - top, factor, infinite, excluded)


def scale_scores(scores: Tensor, factor: Tensor, mask: Tensor | None) -> Tensor:
    """Return scores * factor, in float32 or wider; -inf stays, other excluded scores become 0."""
    wide = at_least_float32(scores)
    return _scale_allowed(wide, factor, *_infinite_and_excluded(wide, mask))


def _infinite_and_excluded(wide: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return two bool masks: scores of -inf, and scores that are -inf or excluded by the mask."""
    infinite = wide.detach() == -torch.inf
    return infinite, infinite if mask is None else infinite | excluded_keys(mask)


def _scale_allowed(scores: Tensor, factor: Tensor, infinite: Tensor, excluded: Tensor) -> Tensor:
    # Excluded scores must not contribute to the gradient of the factor.
    return (scores.masked_fill(excluded, 0.0) * factor).masked_fill(infinite, -torch.inf)
