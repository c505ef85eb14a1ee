"""The MultiMax modulator: a learnable piecewise polynomial in front of softmax.

The symbols of the paper (Zhou et al. 2024, Eq. 6) and our names. There is one entry for each order
n = 1..N, the power of the term:

    b[n]        low_threshold       the low term acts on scores below it
    1 - t_b[n]  low_coefficient     negative pushes low scores further down (sparser)
    d[n]        high_threshold      the high term acts on scores above it
    t_d[n] - 1  high_coefficient    negative pulls high scores together (more multi-modal)

The coefficients are offsets from the identity: if all are zero, MultiMax is softmax.

The kernels read these scalars as *parameters*, the (1 or heads, 8 or 12) float32 tensor of `pack`.
The parameters of a soft-cap are (1, 3): cap, shift and width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import choose, on_triton, select, traced
from multimax_fairseq.ops.checks import (
    check_device,
    check_flag,
    check_float,
    check_tensor,
)
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    differentiable_once,
    needs_gradient,
    without_gradient,
)

# Distances to a threshold are capped, far beyond any real score, so that their squares stay finite
# in float32: a score of -inf then maps to -inf instead of NaN.
MAX_DISTANCE = 1e18
CAP_COLUMNS = 3  # of a soft-cap's parameters
# Scores per task of a thread in the C++ kernel, if all heads share one modulator.
PIECE = 2**15


class ModulatorParameters(Protocol):
    """The attributes of a modulator that the operators read; `Modulator` has them."""

    low_coefficient: Tensor | None
    low_threshold: Tensor | None
    high_coefficient: Tensor | None
    high_threshold: Tensor | None
    monotone: bool


class SoftCapParameters(Protocol):
    """The attribute of a soft-cap that the operators read; `SoftCap` has it."""

    soft_cap: tuple[float | Tensor, float | Tensor, float | Tensor]  # cap, shift, width


AnyModulator: TypeAlias = ModulatorParameters | SoftCapParameters


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
        x: scores, any shape and floating dtype; with parameters per head, heads are dimension -3.
        low_coefficient, low_threshold: (order,) or (heads, order); both or neither (no low term).
            The order is 1 or 2.
        high_coefficient, high_threshold: the same for the high term.
        monotone: keep sigma from turning on either side of x = 0. Below the first point where it
            would fall with rising x it continues with slope one; above the first such point on the
            other side it is constant. Between the two points it is sigma.

    Returns:
        The shape of x, in float32 or wider. Scores of -inf and +inf are kept.

    Raises:
        TypeError: scores or a parameter is not a tensor; monotone is not a bool.
        ValueError: x is not floating; one of a pair is missing, shapes differ, an order is neither
            1 nor 2, x has no dimension for the heads, or is on another device.
    """
    check_tensor("scores", x)
    check_flag("monotone", monotone)
    if not x.is_floating_point():
        raise ValueError(f"scores must be floating-point, got {x.dtype}")
    low = _order("low", low_coefficient, low_threshold)
    high = _order("high", high_coefficient, high_threshold)
    _check_fits(x, low_coefficient)
    _check_fits(x, high_coefficient)
    wide = torch.promote_types(x.dtype, torch.float32)
    if low == 0 and high == 0:
        return x.to(wide)
    parameters = pack(low_coefficient, low_threshold, high_coefficient, high_threshold, monotone)
    unsupported = "" if parameters.device == x.device else "it is on another device than the scores"
    if torch.compiler.is_compiling():
        unsupported = "torch.compile fuses it"
    if choose("modulator", "auto", x, unsupported=unsupported) != "plain":
        return modulate_operator(x, parameters.float())
    x, parameters = x.to(wide), parameters.to(wide)
    if traced():
        return modulated(x, parameters, low, high)
    return _PlainModulate.apply(x, parameters, low, high)


class _PlainModulate(torch.autograd.Function):
    """Saves only the scores; the backward pass computes the distances again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameters: Tensor, low: int, high: int) -> Tensor:
        ctx.save_for_backward(x, parameters)
        ctx.orders = low, high
        return modulated(x, parameters, low, high)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (*modulated_gradients(grad, *ctx.saved_tensors, *ctx.orders), None, None)


def _order(side: str, coefficient: Tensor | None, threshold: Tensor | None) -> int:
    """Return the order of this side, 0 without terms; ValueError if its parameters do not match."""
    if coefficient is None and threshold is None:
        return 0
    if coefficient is None or threshold is None:
        raise ValueError(f"{side}_coefficient and {side}_threshold come together: pass both")
    check_tensor(f"{side}_coefficient", coefficient)
    check_tensor(f"{side}_threshold", threshold)
    order = coefficient.shape[-1] if coefficient.dim() > 0 else 0
    if coefficient.shape != threshold.shape or coefficient.dim() not in (1, 2):
        raise ValueError(
            f"{side}_coefficient {list(coefficient.shape)} and {side}_threshold "
            f"{list(threshold.shape)} must both be (order,) or (heads, order)"
        )
    if order not in (1, 2):
        raise ValueError(f"the order of {side}_coefficient must be 1 or 2, got {order}")
    if not (coefficient.is_floating_point() and threshold.is_floating_point()):
        raise ValueError(
            f"{side}_coefficient and {side}_threshold must be floating-point, got "
            f"{coefficient.dtype} and {threshold.dtype}"
        )
    if coefficient.shape[0] == 0:
        raise ValueError(f"{side}_coefficient must be for one head or more, got none")
    return order


def _check_fits(x: Tensor, coefficient: Tensor | None) -> None:
    if coefficient is None:
        return
    check_device("the modulator", coefficient, x, "scores")
    if coefficient.dim() == 2 and (x.dim() < 3 or x.shape[-3] != coefficient.shape[0]):
        raise ValueError(
            f"parameters for {coefficient.shape[0]} heads need scores with that size in "
            f"dimension -3, got scores of shape {list(x.shape)}"
        )


def modulated(x: Tensor, parameters: Tensor, low: int, high: int) -> Tensor:
    """Return sigma(x) in plain PyTorch.

    Args:
        x: scores, any shape.
        parameters: of `packed_parameters`, in the dtype of x.
        low, high: the order of each side; higher orders in the parameters are not read.
    """
    if parameters.shape[1] == CAP_COLUMNS:
        return soft_capped(x, *parameters[0])
    columns = _unpack(parameters)
    terms = [(columns[n], columns[2 + n], -1, n + 1) for n in range(low)]
    terms += [(columns[4 + n], columns[6 + n], 1, n + 1) for n in range(high)]
    out = x
    for i, (coefficient, threshold, sign, power) in enumerate(terms):
        distance = _distance(x - threshold if sign > 0 else threshold - x, power)
        if i == 0:
            out = torch.addcmul(x, coefficient, distance)
        else:  # in place: only this function holds `out`
            out = out.addcmul_(coefficient, distance)
    if parameters.shape[1] > 8:
        out = torch.where(x < columns[8], x + columns[10], out)
        # A score of inf stays inf, so that an overflow is not hidden.
        out = torch.where((x > columns[9]) & (x < float("inf")), columns[11], out)
    return out


def soft_capped(
    x: Tensor, cap: float | Tensor, shift: float | Tensor, width: float | Tensor
) -> Tensor:
    """Return cap tanh((x + shift) / width); inf, -inf and NaN stay, as in `modulated`."""
    finite = x.isfinite()
    # In the unselected branch, the gradient of the width would be 0 * inf = NaN.
    inner = (torch.where(finite, x, 0.0) + shift) / width
    return torch.where(finite, cap * inner.tanh(), x)


def modulated_gradients(
    grad: Tensor, x: Tensor, parameters: Tensor, low: int, high: int
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to x and parameters, given that of the output.

    The turning points get none: sigma is continuous there.
    """
    if parameters.shape[1] == CAP_COLUMNS:
        cap, shift, width = parameters[0]
        inner = torch.where(x.isfinite(), (x + shift) / width, 0.0)
        level = inner.tanh()
        grad_x = (grad * (cap / width * (1 - level.square()))).masked_fill(~x.isfinite(), 0.0)
        of_cap = ((grad * level).sum(), grad_x.sum(), -(grad_x * inner).sum())
        return grad_x, torch.stack(of_cap)[None]
    columns = _unpack(parameters)
    heads = [dim for dim in range(x.dim()) if dim != x.dim() - 3]

    def total(product: Tensor) -> Tensor:
        return product.sum().unsqueeze(0) if parameters.shape[0] == 1 else product.sum(heads)

    sums = [parameters.new_zeros(parameters.shape[0])] * parameters.shape[1]
    if parameters.shape[1] > 8:
        below, above = x < columns[8], (x > columns[9]) & (x < float("inf"))
        sums[10] = total(grad.masked_fill(~below, 0.0))
        sums[11] = total(grad.masked_fill(~above, 0.0))
        grad_x, grad = grad.masked_fill(above, 0.0), grad.masked_fill(below | above, 0.0)
    else:
        grad_x = grad.clone()
    for side, sign, order in ((0, -1, low), (4, 1, high)):
        for n in range(order):
            coefficient, threshold = columns[side + n], columns[side + 2 + n]
            distance = _distance(x - threshold if sign > 0 else threshold - x, 1)
            part = (distance.sign() if n == 0 else distance) * grad
            grad_x.addcmul_(coefficient, part, value=sign * (n + 1))
            sums[side + 2 + n] = -sign * (n + 1) * parameters[:, side + n] * total(part)
            sums[side + n] = total(part.mul_(distance))
    return grad_x, torch.stack(sums, -1)


def _unpack(parameters: Tensor) -> list[Tensor]:
    """The parameters' columns, shaped to broadcast over scores (..., heads, T, S)."""
    return [c[0] if parameters.shape[0] == 1 else c[:, None, None] for c in parameters.unbind(-1)]


def _distance(x: Tensor, power: int) -> Tensor:
    """Return max(x, 0) ** power, in place. The derivative at zero is 0."""
    distance = F.hardtanh(x, 0.0, MAX_DISTANCE, inplace=True)
    return distance if power == 1 else distance * distance


def pack(
    low_coefficient: Tensor | None,
    low_threshold: Tensor | None,
    high_coefficient: Tensor | None,
    high_threshold: Tensor | None,
    monotone: bool = False,
) -> Tensor:
    """Return a modulator's parameters as the kernels read them.

    Args:
        low_coefficient, low_threshold, high_coefficient, high_threshold: as `modulate`; at least
            one pair.
        monotone: append `tails`.

    Returns:
        (1, 8) or (heads, 8), in float32 or wider: the four arguments in their order, each with its
        orders 1 and 2; absent terms have the coefficient 0. (..., 12) if monotone.
    """
    like = low_coefficient if low_coefficient is not None else high_coefficient
    assert like is not None
    heads = max(_heads(low_coefficient), _heads(high_coefficient))
    columns = [
        _columns(p, like, heads)
        for p in (low_coefficient, low_threshold, high_coefficient, high_threshold)
    ]
    parameters = torch.cat(columns, -1)
    wide = torch.promote_types(parameters.dtype, torch.float32)
    parameters = native.cast(parameters, wide)
    parameters = parameters.unsqueeze(0) if heads == 0 else parameters
    if not monotone:
        return parameters
    return torch.cat([parameters, _fused_tails(parameters)], -1)


def _heads(parameter: Tensor | None) -> int:
    """Return for how many heads a parameter is, 0 if they share it."""
    return 0 if parameter is None or parameter.dim() == 1 else parameter.shape[0]


def _columns(parameter: Tensor | None, like: Tensor, heads: int) -> Tensor:
    """Return the parameter's two columns, (2,) or (heads, 2)."""
    if parameter is None:
        parameter = torch.zeros([2], dtype=like.dtype, device=like.device)
    if parameter.shape[-1] == 1:
        parameter = torch.cat([parameter, torch.zeros_like(parameter)], -1)
    return parameter if heads == 0 or parameter.dim() == 2 else parameter.expand(heads, 2)


def _fused_tails(parameters: Tensor) -> Tensor:
    # In plain PyTorch, these many small operations take longer than one attention.
    if traced() or select("auto", parameters)[0] == "plain":
        return tails(parameters)
    return tails_operator(parameters)[0]


def tails(parameters: Tensor) -> Tensor:
    """Return the tails of a monotone modulator: low_turn, high_turn, low_offset, high_level.

    Below low_turn it is x + low_offset, above high_turn it is high_level. low_turn is the largest
    point up to 0 below which sigma falls with rising x, -inf if there is none; high_turn is the
    smallest such point from 0 on, or inf.

    Args:
        parameters: (heads, 8), of `pack`.

    Returns:
        (heads, 4).
    """
    # The high side of sigma(x) is the low side of -sigma(-x).
    mirrored = -torch.cat([parameters[:, 4:], parameters[:, :4]], -1)
    turn, value = _low_turn(torch.cat([parameters, mirrored]))
    heads = parameters.shape[0]
    low_turn, low_value = turn[:heads], value[:heads]
    offset = torch.where(low_turn.isinf(), low_value, low_value - low_turn)
    return torch.cat([low_turn, -turn[heads:], offset, -value[heads:]], -1)


def _low_turn(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return low_turn and sigma there, (rows, 1) each; -inf and 0 if there is none."""
    c1, c2, t1, t2, k1, k2, d1, d2 = [c.unsqueeze(-1) for c in parameters.unbind(-1)]
    # Between two neighbouring thresholds sigma is constant + level * x + slope / 2 * x^2.
    edges = torch.cat([t1, t2, d1, d2], -1).sort(-1)[0]
    far = torch.full_like(t1, MAX_DISTANCE)
    left, right = torch.cat([-far, edges], -1), torch.cat([edges, far], -1)
    c1, c2 = c1 * (right <= t1), c2 * (right <= t2)
    k1, k2 = k1 * (left >= d1), k2 * (left >= d2)
    level = 1 - c1 - 2 * c2 * t2 + k1 - 2 * k2 * d2
    slope = 2 * (c2 + k2)
    constant = c1 * t1 + c2 * t2 * t2 - k1 * d1 + k2 * d2 * d2

    # In each piece: the end nearer to 0, or the point where the derivative is 0.
    right = right.clamp(max=0)
    falls_right = level + slope * right < 0
    falls = (left < right) & (falls_right | (level + slope * left < 0))
    root = -level / torch.where(slope == 0, torch.ones_like(slope), slope)
    turn = torch.where(falls_right, right, torch.minimum(torch.maximum(root, left), right))
    turn, piece = turn.masked_fill(~falls, -torch.inf).max(-1, keepdim=True)
    at = turn.masked_fill(turn.isinf(), 0)
    value = level.gather(-1, piece) + slope.gather(-1, piece) * at / 2
    value = constant.gather(-1, piece) + at * value
    return turn, value.masked_fill(turn.isinf(), 0)


def has_parameters(modulator: Any) -> bool:
    """Whether a modulator has the parameters that kernels read; else it is any function."""
    if hasattr(modulator, "soft_cap"):
        return True
    return hasattr(modulator, "low_coefficient") and hasattr(modulator, "monotone")


def packed_parameters(
    modulator: AnyModulator, device: torch.device | None = None
) -> tuple[Tensor, int, int]:
    """Return the parameters of a modulator, and the orders of its low and high side.

    Args:
        device: of a soft-cap's parameters, (1, 3). Others are on the modulator's device.

    Raises:
        ValueError: as `modulate`; a modulator without terms.
    """
    if hasattr(modulator, "soft_cap"):
        numbers = [
            torch.as_tensor(x, dtype=torch.float64, device=device) for x in modulator.soft_cap
        ]
        return torch.stack(numbers)[None], 0, 0
    low, low_threshold = modulator.low_coefficient, modulator.low_threshold
    high, high_threshold = modulator.high_coefficient, modulator.high_threshold
    orders = _order("low", low, low_threshold), _order("high", high, high_threshold)
    if orders == (0, 0):
        raise ValueError("modulator has neither a low nor a high term: leave it out for softmax")
    return pack(low, low_threshold, high, high_threshold, modulator.monotone), *orders


def check_parameters(parameters: Tensor, heads: int | None, like: Tensor, like_name: str) -> None:
    """Raise ValueError unless the kernels can read parameters, for all heads or each head."""
    rows = (1, heads) if heads else (1,)
    widths = (CAP_COLUMNS, 8, 12)
    if (
        parameters.dim() != 2
        or parameters.shape[0] not in rows
        or parameters.shape[1] not in widths
    ):
        wanted = " or ".join(map(str, dict.fromkeys(rows)))
        columns = " or ".join(map(str, widths))
        raise ValueError(f"parameters must be ({wanted}, {columns}), got {list(parameters.shape)}")
    if parameters.dtype != torch.float32:
        raise ValueError(f"parameters must be float32, got {parameters.dtype}")
    check_device("parameters", parameters, like, like_name)


def fits_heads(modulator: AnyModulator, heads: int) -> bool:
    """Whether all heads share a modulator, or it has parameters for this many heads."""
    if hasattr(modulator, "soft_cap"):
        return True
    parameters = (modulator.low_coefficient, modulator.high_coefficient)
    return all(p is None or p.dim() == 1 or p.shape[0] == heads for p in parameters)


# --- torch.ops.multimax_fairseq.modulate -------------------------------------------------------


def _check_modulate(scores: Tensor, parameters: Tensor) -> None:
    check_float("scores", scores, scores, "scores")
    heads = scores.shape[-3] if scores.dim() >= 3 else None
    check_parameters(parameters, heads, scores, "scores")


def _modulate(scores: Tensor, parameters: Tensor) -> Tensor:
    if on_triton(scores.device):
        from multimax_fairseq.ops.triton import modulator

        return modulator.modulate(scores, parameters)
    return _modulate_in_cpp(scores, parameters)


def _modulate_fake(scores: Tensor, parameters: Tensor) -> Tensor:
    return scores.new_empty(scores.shape, dtype=torch.float32)


class _Modulate(torch.autograd.Function):
    """Saves the scores only; the backward pass computes the distances again."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], scores: Tensor, parameters: Tensor) -> Tensor:
        ctx.save_for_backward(scores, parameters)
        return below(scores, parameters)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, *modulate_backward(grad, *ctx.saved_tensors)


def _modulate_autograd(below: Callable[..., Any], scores: Tensor, parameters: Tensor) -> Any:
    if needs_gradient(scores, parameters):
        return _Modulate.apply(below, scores, parameters)
    return below(scores, parameters)


modulate_operator: Operator = define(
    "modulate(Tensor scores, Tensor parameters) -> Tensor",
    check=_check_modulate,
    kernel=_modulate,
    fake=_modulate_fake,
    autograd=_modulate_autograd,
)


def _check_modulate_backward(grad: Tensor, scores: Tensor, parameters: Tensor) -> None:
    if grad.shape != scores.shape:
        raise ValueError(f"grad must be {list(scores.shape)}, got {list(grad.shape)}")
    check_float("grad", grad, grad, "grad")
    check_device("grad", grad, scores, "the output")
    _check_modulate(scores, parameters)


def _modulate_backward(grad: Tensor, scores: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    if on_triton(scores.device):
        from multimax_fairseq.ops.triton import modulator

        return modulator.modulate_backward(grad, scores, parameters)
    grad_parameters = torch.zeros_like(parameters, memory_format=torch.contiguous_format)
    grad_scores = _modulate_in_cpp(scores, parameters, grad.float().contiguous(), grad_parameters)
    return grad_scores.to(scores.dtype), grad_parameters


def _modulate_backward_fake(
    grad: Tensor, scores: Tensor, parameters: Tensor
) -> tuple[Tensor, Tensor]:
    return scores.new_empty(scores.shape), parameters.new_empty(parameters.shape)


modulate_backward: Operator = define(
    "modulate_backward(Tensor grad, Tensor scores, Tensor parameters) -> (Tensor, Tensor)",
    check=_check_modulate_backward,
    kernel=_modulate_backward,
    fake=_modulate_backward_fake,
    autograd=without_gradient("modulate_backward"),
)


def _modulate_in_cpp(
    scores: Tensor,
    parameters: Tensor,
    grad: Tensor | None = None,
    grad_parameters: Tensor | None = None,
) -> Tensor:
    """Return the modulated scores, or, given `grad`, their gradient, in float32."""
    scores = scores.float().contiguous()
    out = torch.empty_like(scores)
    if scores.numel() > 0:
        native.call(
            "modulation",
            native.Modulation,
            count=scores.numel(),
            inner=PIECE if len(parameters) == 1 else scores.shape[-1] * scores.shape[-2],
            heads=len(parameters),
            threads=torch.get_num_threads(),
            columns=parameters.shape[1],
            parameters=parameters.contiguous(),
            scores=scores,
            grad=grad,
            out=out,
            grad_parameters=grad_parameters,
        )
    return out


# --- torch.ops.multimax_fairseq.tails ----------------------------------------------------------


def _check_tails(parameters: Tensor) -> None:
    if parameters.dim() != 2 or parameters.shape[0] == 0 or parameters.shape[1] != 8:
        raise ValueError(f"parameters must be (1 or more, 8), got {list(parameters.shape)}")
    if parameters.dtype != torch.float32:
        raise ValueError(f"parameters must be float32, got {parameters.dtype}")


def _tails(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return `tails`, (rows, 4), and their derivatives, (rows, 4, 8)."""
    if on_triton(parameters.device):
        from multimax_fairseq.ops.triton import modulator

        return modulator.tails(parameters)
    return _tails_in_cpp(parameters)


def _tails_in_cpp(parameters: Tensor) -> tuple[Tensor, Tensor]:
    out, jacobian = (
        parameters.new_empty(len(parameters), 4),
        parameters.new_empty(len(parameters), 4, 8),
    )
    native.call(
        "tails",
        native.Tails,
        rows=len(parameters),
        parameters=parameters.contiguous(),
        out=out,
        jacobian=jacobian,
    )
    return out, jacobian


def _tails_fake(parameters: Tensor) -> tuple[Tensor, Tensor]:
    return parameters.new_empty(len(parameters), 4), parameters.new_empty(len(parameters), 4, 8)


class _Tails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], parameters: Tensor) -> tuple[Tensor, Tensor]:
        out, jacobian = below(parameters)
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(jacobian)
        return out, jacobian

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[None, Tensor]:
        (jacobian,) = ctx.saved_tensors
        # Not a matrix product, which autocast or a GPU may round.
        return None, (grad.unsqueeze(-1) * jacobian).sum(1)


def _tails_autograd(below: Callable[..., Any], parameters: Tensor) -> Any:
    return _Tails.apply(below, parameters) if needs_gradient(parameters) else below(parameters)


tails_operator: Operator = define(
    "tails(Tensor parameters) -> (Tensor, Tensor)",
    check=_check_tails,
    kernel=_tails,
    fake=_tails_fake,
    autograd=_tails_autograd,
)
