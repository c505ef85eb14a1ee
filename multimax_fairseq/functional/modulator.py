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

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimax_fairseq.functional.backend import choose
from multimax_fairseq.kernels import cpu

# A distance to a threshold is capped here, far beyond any score of a live model, so that its
# square stays finite in float32: an excluded score of -inf then maps to -inf instead of NaN.
MAX_DISTANCE = 1e18


def modulate(
    x: Tensor,
    low_coefficient: Tensor | None = None,
    low_threshold: Tensor | None = None,
    high_coefficient: Tensor | None = None,
    high_threshold: Tensor | None = None,
    monotone: bool = False,
) -> Tensor:
    """Return the modulated scores.

        sigma(x) = x + sum_n (1 - t_b[n]) max(b[n] - x, 0)^n + (t_d[n] - 1) max(x - d[n], 0)^n
                                                                 (Eq. 6, Zhou et al. 2024)
    Equivalent to: x + sum(c * (b - x).relu() ** n) + sum(k * (x - d).relu() ** n)

    Args:
        x: scores, any shape; with parameters a head, the heads are dimension -3.
        low_coefficient, low_threshold: (order,) or (heads, order); both or neither (no low term).
        high_coefficient, high_threshold: the same for the high term.
        monotone: where sigma would fall with rising x, keep it level: the integral, from x = 0,
            of max(sigma', 0). Equal to sigma as long as that rises all the way from 0 to x.

    Returns:
        The shape of x, in float32 or wider. Scores of -inf and +inf are kept.

    Raises:
        ValueError: one of a pair is missing, shapes differ, or x has no dimension for the heads.
    """
    low = _check("low", x, low_coefficient, low_threshold)
    high = _check("high", x, high_coefficient, high_threshold)
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    if not (low or high):
        return x
    lc = None if low_coefficient is None else low_coefficient.to(wide)
    lt = None if low_threshold is None else low_threshold.to(wide)
    hc = None if high_coefficient is None else high_coefficient.to(wide)
    ht = None if high_threshold is None else high_threshold.to(wide)
    if monotone:
        return _monotone(x, lc, lt, hc, ht)
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        return _Modulate.apply(x, lc, lt, hc, ht)
    # TorchScript knows no autograd function of ours, and differentiates the plain form.
    return _modulated(x, lc, lt, hc, ht)


def _check(side: str, x: Tensor, coefficient: Tensor | None, threshold: Tensor | None) -> bool:
    """Whether this side has a term; ValueError if its parameters do not fit."""
    if coefficient is None and threshold is None:
        return False
    if coefficient is None or threshold is None:
        raise ValueError(f"{side}_coefficient and {side}_threshold come together: give both")
    if coefficient.shape != threshold.shape or coefficient.dim() not in (1, 2):
        raise ValueError(
            f"{side}_coefficient {list(coefficient.shape)} and {side}_threshold "
            f"{list(threshold.shape)} must both be (order,) or (heads, order)"
        )
    if coefficient.dim() == 2 and (x.dim() < 3 or x.shape[-3] != coefficient.shape[0]):
        raise ValueError(
            f"parameters for {coefficient.shape[0]} heads need scores with that size in "
            f"dimension -3, got scores of shape {list(x.shape)}"
        )
    return True


def _entry(parameter: Tensor, order: int) -> Tensor:
    """The parameter's entry of an order, shaped to broadcast over scores (..., heads, T, S)."""
    entry = parameter[..., order - 1]
    return entry if entry.dim() == 0 else entry[:, None, None]


def _total(product: Tensor, entry: Tensor) -> Tensor:
    """Sum a product over all that the parameter's entry was broadcast over: () or (heads,)."""
    return product.sum() if entry.dim() == 0 else product.sum_to_size(entry.shape).view(-1)


def _distance(x: Tensor, threshold: Tensor, sign: int, cap: float = MAX_DISTANCE) -> Tensor:
    """How far x lies beyond the threshold: below it for sign -1, above it for sign 1, else 0."""
    distance = x - threshold if sign > 0 else threshold - x
    return distance.clamp_(0, cap)


def _add_term(out: Tensor, x: Tensor, coefficient: Tensor, threshold: Tensor, sign: int) -> None:
    for n in range(1, coefficient.shape[-1] + 1):
        distance = _distance(x, _entry(threshold, n), sign)
        out.addcmul_(distance if n == 1 else distance.pow(n), _entry(coefficient, n))


def _modulated(
    x: Tensor,
    low_coefficient: Tensor | None,
    low_threshold: Tensor | None,
    high_coefficient: Tensor | None,
    high_threshold: Tensor | None,
) -> Tensor:
    out = x.clone()
    if low_coefficient is not None and low_threshold is not None:
        _add_term(out, x, low_coefficient, low_threshold, -1)
    if high_coefficient is not None and high_threshold is not None:
        _add_term(out, x, high_coefficient, high_threshold, 1)
    return out


def _monotone(
    x: Tensor,
    low_coefficient: Tensor | None,
    low_threshold: Tensor | None,
    high_coefficient: Tensor | None,
    high_threshold: Tensor | None,
    limit: float = MAX_DISTANCE,
) -> Tensor:
    """sigma at 0, and from there the integral of what of its derivative is positive."""
    terms: list[tuple[Tensor, Tensor, int, int]] = []  # coefficient, threshold, order, sign
    if low_coefficient is not None and low_threshold is not None:
        for n in range(1, low_coefficient.shape[-1] + 1):
            terms.append((_entry(low_coefficient, n), _entry(low_threshold, n), n, -1))
    if high_coefficient is not None and high_threshold is not None:
        for n in range(1, high_coefficient.shape[-1] + 1):
            terms.append((_entry(high_coefficient, n), _entry(high_threshold, n), n, 1))
    # Between two neighbouring thresholds the derivative is a straight line.
    thresholds = torch.stack([threshold for _, threshold, _, _ in terms])
    edges = torch.cat(
        [
            torch.full_like(thresholds[:1], -limit),
            thresholds.sort(0).values,
            torch.full_like(thresholds[:1], limit),
        ]
    )
    zero = torch.zeros_like(edges[0])
    at_zero = _modulated(zero, low_coefficient, low_threshold, high_coefficient, high_threshold)
    out = at_zero.expand_as(x)
    for i in range(edges.shape[0] - 1):
        left, right = edges[i], edges[i + 1]
        level, slope = zero + 1, zero
        for coefficient, threshold, n, sign in terms:
            active = right <= threshold if sign < 0 else left >= threshold
            share = torch.where(active, coefficient, zero)
            if n == 1:
                level = level + sign * share
            else:
                level = level - 2 * share * threshold
                slope = slope + 2 * share
        flat = slope == 0
        root = (-level / torch.where(flat, torch.ones_like(slope), slope)).clamp(left, right)
        rising = torch.where(flat, torch.where(level > 0, left, right), root)
        start = torch.where(slope < 0, left, rising)
        end = torch.where(slope < 0, root, right)
        here, origin = x.clamp(start, end), zero.clamp(start, end)
        out = out + (here - origin) * (level + slope * (here + origin) / 2)
    return torch.where(x.isinf(), x, out)


class ModulatorParameters(Protocol):
    """What the fused operations read of a modulator; `Modulator` has it."""

    low_coefficient: Tensor | None
    low_threshold: Tensor | None
    high_coefficient: Tensor | None
    high_threshold: Tensor | None
    monotone: bool


FourParameters = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def parameters_of(modulator: ModulatorParameters | None) -> FourParameters:
    """Return the four parameters in the order of `modulate`."""
    if modulator is None:
        return None, None, None, None
    low = (modulator.low_coefficient, modulator.low_threshold)
    return (*low, modulator.high_coefficient, modulator.high_threshold)


def parameter_table(
    low_coefficient: Tensor | None,
    low_threshold: Tensor | None,
    high_coefficient: Tensor | None,
    high_threshold: Tensor | None,
) -> Tensor:
    """Return a modulator's parameters in the layout that the kernels read, (1, 8) or (heads, 8).

    The four in the order of the arguments, each for the orders 1 and 2; a term that is not there
    has the coefficient 0.
    """
    given = (low_coefficient, low_threshold, high_coefficient, high_threshold)
    present = [p for p in given if p is not None]
    heads = max(p.shape[0] if p.dim() == 2 else 1 for p in present)
    columns = []
    for p in given:
        p = present[0].new_zeros(2) if p is None else p
        p = p if p.shape[-1] == 2 else F.pad(p, (0, 1))
        columns.append(p.expand(heads, 2))
    return torch.cat(columns, -1)


def table_columns(table: Tensor, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Take a gradient by `parameter_table` apart into those by its arguments."""
    return [
        None if p is None else columns[:, : p.shape[-1]].sum_to_size(p.shape)
        for columns, p in zip(table.split(2, -1), parameters, strict=True)
    ]


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
        parameters = (low_coefficient, low_threshold, high_coefficient, high_threshold)
        ctx.save_for_backward(x, *parameters)
        if choose("modulator", "auto", x) == "cpp":
            return cpu.modulate(x, parameter_table(*parameters).float())
        return _modulated(x, *parameters)

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
    parameters = (low_coefficient, low_threshold, high_coefficient, high_threshold)
    if choose("modulator", "auto", grad, x) == "cpp":
        grad_x, table = cpu.modulate_backward(grad, x, parameter_table(*parameters).float())
        return grad_x, *table_columns(table, parameters)
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
        for n in range(1, coefficient.shape[-1] + 1):
            c, t = _entry(coefficient, n), _entry(threshold, n)
            distance = _distance(x, t, sign)
            # The derivative of distance^n by the distance, times the incoming gradient.
            slope = distance.sign() if n == 1 else distance.pow(n - 1).mul_(n)
            slope.mul_(grad)
            grad_x.addcmul_(slope, c, value=sign)
            grad_t.append(_total(slope, t) * coefficient[..., n - 1] * -sign)
            grad_c.append(_total(slope.mul_(distance), c) / n)
        grads += [torch.stack(grad_c, -1), torch.stack(grad_t, -1)]
    return grad_x, *grads
