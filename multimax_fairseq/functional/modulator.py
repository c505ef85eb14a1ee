"""The MultiMax modulator: a learnable piecewise polynomial put in front of softmax.

The paper's symbols (Zhou et al. 2024, Eq. 6) appear in this file only, and here is what they are
called everywhere else. An entry each order n = 1..N (n is the power of the term):

    b[n]        low_threshold       scores below it are modulated by the low term
    1 - t_b[n]  low_coefficient     negative pushes low scores further down (sparser)
    d[n]        high_threshold      scores above it are modulated by the high term
    t_d[n] - 1  high_coefficient    negative pulls high scores together (more multi-modal)

The coefficients are offsets from the identity: all zero is exactly softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A distance to a threshold is capped here, far beyond any score of a live model, so that its
# square stays finite in float32: an excluded score of -inf then maps to -inf instead of NaN.
MAX_DISTANCE = 1e18


def modulate(
    x: Tensor,
    low_coefficient: Tensor | None = None,
    low_threshold: Tensor | None = None,
    high_coefficient: Tensor | None = None,
    high_threshold: Tensor | None = None,
) -> Tensor:
    """Return the modulated scores.

        sigma(x) = x + sum_n (1 - t_b[n]) max(b[n] - x, 0)^n + (t_d[n] - 1) max(x - d[n], 0)^n
                                                                 (Eq. 6, Zhou et al. 2024)
    Equivalent to: x + sum(c * (b - x).relu() ** n) + sum(k * (x - d).relu() ** n)

    Args:
        x: scores, any shape; with parameters a head, the heads are dimension -3.
        low_coefficient, low_threshold: (order,) or (heads, order); both or neither (no low term).
        high_coefficient, high_threshold: the same for the high term.

    Returns:
        The shape of x, in float32 or wider. Scores of -inf and +inf are kept.

    Raises:
        ValueError: one of a pair is missing, shapes differ, or x has no dimension for the heads.
    """
    for side, coefficient, threshold in (
        ("low", low_coefficient, low_threshold),
        ("high", high_coefficient, high_threshold),
    ):
        if coefficient is None and threshold is None:
            continue
        if coefficient is None or threshold is None:
            raise ValueError(f"{side}_coefficient and {side}_threshold come together: give both")
        if coefficient.shape != threshold.shape or coefficient.dim() not in (1, 2):
            raise ValueError(
                f"{side}_coefficient {tuple(coefficient.shape)} and {side}_threshold "
                f"{tuple(threshold.shape)} must both be (order,) or (heads, order)"
            )
        if coefficient.dim() == 2 and (x.dim() < 3 or x.shape[-3] != coefficient.shape[0]):
            raise ValueError(
                f"parameters for {coefficient.shape[0]} heads need scores with that size in "
                f"dimension -3, got scores of shape {tuple(x.shape)}"
            )
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    parameters = (low_coefficient, low_threshold, high_coefficient, high_threshold)
    if all(p is None for p in parameters):
        return x
    return _Modulate.apply(x, *(None if p is None else p.to(wide) for p in parameters))


def _entries(parameter: Tensor) -> list[Tensor]:
    """The parameter's entry of each order, shaped to broadcast over scores (..., heads, T, S)."""
    if parameter.dim() == 1:
        return list(parameter.unbind(0))
    return [entry[:, None, None] for entry in parameter.unbind(1)]


def _total(product: Tensor, entry: Tensor) -> Tensor:
    """Sum a product over all that the parameter's entry was broadcast over: () or (heads,)."""
    return product.sum() if entry.dim() == 0 else product.sum_to_size(entry.shape).view(-1)


def _distance(x: Tensor, threshold: Tensor, sign: int) -> Tensor:
    """How far x lies beyond the threshold: below it for sign -1, above it for sign 1, else 0."""
    distance = x - threshold if sign > 0 else threshold - x
    return distance.clamp_(0, MAX_DISTANCE)


class _Modulate(torch.autograd.Function):
    """Keeps only the scores for the backward pass: the distances are cheap to form again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        low_coefficient: Tensor | None,
        low_threshold: Tensor | None,
        high_coefficient: Tensor | None,
        high_threshold: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x, low_coefficient, low_threshold, high_coefficient, high_threshold)
        out = x.clone()
        for coefficient, threshold, sign in (
            (low_coefficient, low_threshold, -1),
            (high_coefficient, high_threshold, 1),
        ):
            if coefficient is None or threshold is None:
                continue
            orders = zip(_entries(coefficient), _entries(threshold), strict=True)
            for n, (c, t) in enumerate(orders, start=1):
                distance = _distance(x, t, sign)
                out.addcmul_(distance if n == 1 else distance.pow_(n), c)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return modulate_backward(grad, *ctx.saved_tensors)


def modulate_backward(
    grad: Tensor,
    x: Tensor,
    low_coefficient: Tensor | None,
    low_threshold: Tensor | None,
    high_coefficient: Tensor | None,
    high_threshold: Tensor | None,
) -> tuple[Tensor, *tuple[Tensor | None, ...]]:
    """Return the gradients of `modulate` by its five arguments, given that by its result.

    At a threshold the derivative of the distance is taken as zero.
    """
    grad_x = grad.clone()
    grads: list[Tensor | None] = []
    for coefficient, threshold, sign in (
        (low_coefficient, low_threshold, -1),
        (high_coefficient, high_threshold, 1),
    ):
        if coefficient is None or threshold is None:
            grads += [None, None]
            continue
        grad_c, grad_t = [], []
        orders = zip(_entries(coefficient), _entries(threshold), strict=True)
        for n, (c, t) in enumerate(orders, start=1):
            distance = _distance(x, t, sign)
            # The derivative of distance^n by the distance, times the incoming gradient.
            slope = distance.sign() if n == 1 else distance.pow(n - 1).mul_(n)
            slope.mul_(grad)
            grad_x.addcmul_(slope, c, value=sign)
            grad_t.append(_total(slope, t) * coefficient[..., n - 1] * -sign)
            grad_c.append(_total(slope.mul_(distance), c) / n)
        grads += [torch.stack(grad_c, -1), torch.stack(grad_t, -1)]
    return grad_x, *grads
