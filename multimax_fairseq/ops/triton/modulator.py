"""The modulator in Triton: functions for fused kernels, and elementwise kernels.

`fold` prepares the coefficients once per program, so that a score costs few instructions. With
u = min(s, edge), the term c max(edge - s, 0)^2 becomes c u^2 - 2 c edge u plus a constant. The
coefficients absorb the scale of the scores, the unit of the result and all constants.

A row of a modulator's parameters has 8 float32 entries: low_coefficient[1..2], low_threshold[1..2],
then the same for the high side. A monotone modulator has four more: low_turn, high_turn, low_offset
and high_level. Its value is x + low_offset below low_turn and high_level above high_turn.

The parameters of a soft-cap, cap tanh((x + shift) / width), are CAP_COLUMNS entries: cap, shift and
width.

Compile-time constants of the kernels:

    COLUMNS: of the parameters; 0 without any.
    LOW, HIGH: the orders of a modulator's sides; 0 removes a side from the program.
    CAP: which distances to a threshold are capped: CAP_NONE none; CAP_LOW those of scores of -inf;
        CAP_BOTH all whose square may overflow.

All computations use float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from multimax_fairseq.ops.triton.launches import run_kernel

_MONOTONE_COLUMNS = tl.constexpr(12)
# As in ops/modulator.py.
CAP_COLUMNS = tl.constexpr(3)
MAX_DISTANCE = tl.constexpr(1e18)
CAP_NONE, CAP_LOW, CAP_BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

_LOG2_E = tl.constexpr(math.log2(math.e))

# Elementwise kernels: elements per program, elements per iteration, warps per program.
PIECE, BLOCK, WARPS = 8192, 1024, 4
# Triton must not compile a kernel again for a new shape.
_UNSPECIALIZED = ["pieces", "heads", "t_h"]


@triton.jit
def _fold_side(row, scale, unit, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """Return the folded coefficients of one side.

    u_n is s if s is beyond threshold n, otherwise threshold n. Returns thresholds 1 and 2 in the
    unit of s; the coefficients of u_1, u_2^2, u_2 and 1 in sigma; and the coefficients of
    [s is beyond threshold 1], u_2 and 1 in sigma'.
    """
    edge_2, curve, tilt, bend, level = 0.0, 0.0, 0.0, 0.0, 0.0
    coefficient = tl.load(row)
    threshold = tl.load(row + 2)
    constant = -SIGN * coefficient * threshold * unit
    if ORDER == 2:
        coefficient_2 = tl.load(row + 1)
        threshold_2 = tl.load(row + 3)
        edge_2 = threshold_2 / scale
        curve = coefficient_2 * scale * scale * unit
        tilt = -2 * coefficient_2 * threshold_2 * scale * unit
        constant += coefficient_2 * threshold_2 * threshold_2 * unit
        bend = 2 * coefficient_2 * scale
        level = -2 * coefficient_2 * threshold_2
    line = SIGN * coefficient * scale * unit
    return threshold / scale, edge_2, line, curve, tilt, constant, SIGN * coefficient, bend, level


@triton.jit
def fold(
    PARAMETERS, first, scale, unit, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Fold the row of parameters at offset `first` for the functions below.

    These take s, where a score is scale * s with scale > 0, and return unit * sigma. Returns the
    slope of s; the constants of sigma and sigma'; the cap in the unit of s; both sides (see
    `_fold_side`); and (low_turn, high_turn in the unit of s; low_offset, high_level in the unit of
    the result, minus the constant of sigma). The last entry of a soft-cap is the factor of tanh,
    the slope and the offset of its argument, and the factor of sigma'.
    """
    if COLUMNS == CAP_COLUMNS:
        row = PARAMETERS + first
        cap, shift, width = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        numbers = (cap * unit, scale / width, shift / width, cap / width)
        return scale * unit, 0.0, 0.0, 0.0, 0.0, 0.0, numbers
    else:
        low, high, turns = 0.0, 0.0, 0.0
        constant, level = 0.0, 1.0
        if LOW > 0:
            low = _fold_side(PARAMETERS + first, scale, unit, -1, LOW)
            constant += low[5]
            level += low[8]
        if HIGH > 0:
            high = _fold_side(PARAMETERS + first + 4, scale, unit, 1, HIGH)
            constant += high[5]
            level += high[8]
        if COLUMNS == _MONOTONE_COLUMNS:
            row = PARAMETERS + first + 8
            low_offset = tl.load(row + 2) * unit - constant
            high_level = tl.load(row + 3) * unit - constant
            turns = (tl.load(row) / scale, tl.load(row + 1) / scale, low_offset, high_level)
        return scale * unit, constant, level, MAX_DISTANCE / scale, low, high, turns


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    # The second formula would lose the digits of small numbers.
    square = x * x
    series = square * (-17 / 315 + square * (62 / 2835))
    series = x + x * square * (-1 / 3 + square * (2 / 15 + series))
    large = 1 - 2 / (tl.exp2(size * (2 * _LOG2_E)) + 1)
    return tl.where(size < 0.25, series, tl.where(x < 0, -large, large))


@triton.jit
def _level(s, folded):
    """Return (scale * s + shift) / width of a soft-cap, 0 for scores of inf and NaN; its tanh."""
    _, by_width, offset, _ = folded[6]
    inner = tl.where(tl.abs(s) < float("inf"), s * by_width + offset, 0.0)
    return inner, _tanh(inner)


@triton.jit
def _clip_to_side(s, edge, SIGN: tl.constexpr):
    """Return min(s, edge) for SIGN -1 (the low side), max(s, edge) for SIGN 1 (the high side)."""
    if SIGN < 0:
        return tl.minimum(s, edge)
    else:
        return tl.maximum(s, edge)


@triton.jit
def _is_beyond(s, edge, SIGN: tl.constexpr):
    if SIGN < 0:
        return s < edge
    else:
        return s > edge


@triton.jit
def _capped(s, cap, SIGN: tl.constexpr, CAP: tl.constexpr):
    if CAP == CAP_BOTH or (CAP == CAP_LOW and SIGN < 0):
        s = _clip_to_side(s, SIGN * cap, -SIGN)
    return s


@triton.jit
def _add_side(z, s, cap, side, SIGN: tl.constexpr, ORDER: tl.constexpr, CAP: tl.constexpr):
    edge, edge_2, line, curve, tilt, _, _, _, _ = side
    s = _capped(s, cap, SIGN, CAP)
    z += line * _clip_to_side(s, edge, SIGN)
    if ORDER == 2:
        u = _clip_to_side(s, edge_2, SIGN)
        z += (curve * u + tilt) * u
    return z


@triton.jit
def sigma(
    s, offset, folded, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return unit * sigma(scale * s) + offset - folded[1].

    The caller adds the constant folded[1] to the offset. It can include other terms at no cost.
    """
    slope, _, _, cap, low, high, turns = folded
    line = s * slope + offset
    if COLUMNS == CAP_COLUMNS:
        # Scores of inf, -inf and NaN stay, so that an overflow remains visible.
        _, level = _level(s, folded)
        return tl.where(tl.abs(s) < float("inf"), turns[0] * level + offset, line)
    else:
        z = line
        if LOW > 0:
            z = _add_side(z, s, cap, low, -1, LOW, CAP)
        if HIGH > 0:
            z = _add_side(z, s, cap, high, 1, HIGH, CAP)
        if COLUMNS == _MONOTONE_COLUMNS:
            low_turn, high_turn, low_offset, high_level = turns
            z = tl.where(s < low_turn, line + low_offset, z)
            # A score of inf stays inf, so that an overflow remains visible.
            level = tl.where(s < float("inf"), offset + high_level, line)
            z = tl.where(s > high_turn, level, z)
        return z


@triton.jit
def _side_slope(
    slope, s, cap, side, SIGN: tl.constexpr, ORDER: tl.constexpr, CAP: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    edge, edge_2, _, _, _, _, step, bend, _ = side
    s = _capped(s, cap, SIGN, CAP)
    if ORDER == 2:
        slope += bend * _clip_to_side(s, edge_2, SIGN)
    if STEPS:
        slope = tl.where(_is_beyond(s, edge, SIGN), slope + step, slope)
    return slope


@triton.jit
def _slope(
    s, folded, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr, STEPS: tl.constexpr
):
    """Return sigma'(scale * s) between the turns; STEPS includes the jumps of the order-1 terms."""
    _, _, level, cap, low, high, _ = folded
    slope = level
    if LOW > 0:
        slope = _side_slope(slope, s, cap, low, -1, LOW, CAP, STEPS)
    if HIGH > 0:
        slope = _side_slope(slope, s, cap, high, 1, HIGH, CAP, STEPS)
    return slope


@triton.jit
def _soft_cap_backward(s, grad, folded):
    """Return grad * sigma'(scale * s), and `_level`."""
    inner, level = _level(s, folded)
    grad_s = grad * folded[6][3] * (1 - level * level)
    return tl.where(tl.abs(s) < float("inf"), grad_s, 0.0), inner, level


@triton.jit
def sigma_backward(
    s, grad, folded, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return grad * sigma'(scale * s)."""
    if COLUMNS == CAP_COLUMNS:
        return _soft_cap_backward(s, grad, folded)[0]
    else:
        slope = _slope(s, folded, LOW, HIGH, CAP, True)
        if COLUMNS == _MONOTONE_COLUMNS:
            low_turn, high_turn, _, _ = folded[6]
            slope = tl.where(s < low_turn, 1.0, tl.where(s > high_turn, 0.0, slope))
        return grad * slope


@triton.jit
def partial_sums(product):
    """Sum the elements that one thread holds, within each row, without communication of threads."""
    if len(product.shape) == 1:
        return tl.sum(tl.reshape(product, (product.shape[0] // 4, 4)), 1)
    else:
        # In the layout of a matrix product, a thread holds two neighbours of every eight columns.
        rows: tl.constexpr = product.shape[0]
        groups = tl.reshape(product, (rows, product.shape[1] // 8, 4, 2))
        return tl.sum(tl.sum(groups, 3), 1)


@triton.jit
def zero_sums(zero, COLUMNS: tl.constexpr):
    """Return the initial sums of `sigma_backward_and_sums`; zero has the shape of the scores."""
    zero = partial_sums(zero)
    if COLUMNS == CAP_COLUMNS:
        return zero, zero, zero
    else:
        sums = (zero, zero, zero, zero, zero, zero, zero, zero)
        if COLUMNS == _MONOTONE_COLUMNS:
            sums = sums + (zero, zero)
        return sums


@triton.jit
def _sum_side(
    grad_s, sums, s, grad, cap, side, SIGN: tl.constexpr,
    ORDER: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    edge, edge_2, _, _, _, _, step, _, _ = side
    line, square, beyond, slope = sums
    s = _capped(s, cap, SIGN, CAP)
    part = tl.where(_is_beyond(s, edge, SIGN), grad, 0.0)
    grad_s += step * part
    beyond += partial_sums(part)
    # Use the clipped score: s may be infinite on the other side.
    line += partial_sums(part * _clip_to_side(s, edge, SIGN))
    if ORDER == 2:
        distance = _clip_to_side(s, edge_2, SIGN) - edge_2
        product = grad * distance
        slope += partial_sums(product)
        square += partial_sums(product * distance)
    return grad_s, (line, square, beyond, slope)


@triton.jit
def sigma_backward_and_sums(
    s, grad, sums, folded, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return grad * sigma'(scale * s), and `sums` plus the contribution of these scores.

    `store_parameter_gradients` turns the sums into gradients.
    """
    if COLUMNS == CAP_COLUMNS:
        grad_s, inner, level = _soft_cap_backward(s, grad, folded)
        of_cap, of_shift, of_width = sums
        of_cap += partial_sums(grad * level)
        of_shift += partial_sums(grad_s)
        of_width -= partial_sums(grad_s * inner)
        return grad_s, (of_cap, of_shift, of_width)
    else:
        _, _, _, cap, low, high, turns = folded
        low_sums, high_sums, turn_sums = sums[:4], sums[4:8], sums[8:]
        if COLUMNS == _MONOTONE_COLUMNS:
            low_turn, high_turn, _, _ = turns
            below = tl.where(s < low_turn, grad, 0.0)
            above = tl.where(s > high_turn, grad, 0.0)
            turn_sums = (turn_sums[0] + partial_sums(below), turn_sums[1] + partial_sums(above))
            grad = tl.where((s < low_turn) | (s > high_turn), 0.0, grad)
        grad_s = grad * _slope(s, folded, LOW, HIGH, CAP, False)
        if LOW > 0:
            grad_s, low_sums = _sum_side(grad_s, low_sums, s, grad, cap, low, -1, LOW, CAP)
        if HIGH > 0:
            grad_s, high_sums = _sum_side(grad_s, high_sums, s, grad, cap, high, 1, HIGH, CAP)
        if COLUMNS == _MONOTONE_COLUMNS:
            grad_s += below
        return grad_s, low_sums + high_sums + turn_sums


@triton.jit
def _side_gradients(sums, side, scale, SIGN: tl.constexpr):
    line, square, beyond, slope = sums
    edge, _, _, _, _, _, step, bend, _ = side
    distance = SIGN * (line - edge * beyond)
    return distance * scale, square * scale * scale, -step * beyond, -bend * slope


@triton.jit
def _parameter_gradients(
    sums, folded, scale, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the gradients of a row of parameters: one tensor per column, shaped as the sums."""
    if COLUMNS == CAP_COLUMNS:
        return sums
    else:
        _, _, _, _, low, high, _ = folded
        low_sums, high_sums = sums[:4], sums[4:8]
        if LOW > 0:
            low_sums = _side_gradients(low_sums, low, scale, -1)
        if HIGH > 0:
            high_sums = _side_gradients(high_sums, high, scale, 1)
        grads = low_sums + high_sums
        if COLUMNS == _MONOTONE_COLUMNS:
            # sigma is continuous at the turns, so the gradients of the turns are 0.
            zero = tl.zeros_like(sums[8])
            grads = grads + (zero, zero) + sums[8:]
        return grads


@triton.jit
def store_parameter_gradients(
    SUMS, row, sums, folded, scale, LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Compute a program's gradients of a row of parameters and store them in SUMS."""
    grads = _parameter_gradients(sums, folded, scale, LOW, HIGH, COLUMNS)
    for column in tl.static_range(COLUMNS):
        tl.store(SUMS + row.to(tl.int64) * COLUMNS + column, tl.sum(grads[column]))


@triton.jit
def load_scores(start, index, limit, EDGE: tl.constexpr):
    """Load scores as float32, 0 beyond the limit. Without EDGE, the loads are vectorised."""
    if EDGE:
        return tl.load(start + index, mask=index < limit, other=0.0).to(tl.float32)
    else:
        return tl.load(start + index).to(tl.float32)


@triton.jit
def store(start, index, limit, values, EDGE: tl.constexpr):
    values = values.to(start.dtype.element_ty)
    if EDGE:
        tl.store(start + index, values, mask=index < limit)
    else:
        tl.store(start + index, values)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def modulate_kernel(
    SCORES, PARAMETERS, OUT, count, pieces, heads, t_h,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute OUT = sigma(SCORES).

    `count` consecutive scores share a row of the parameters. They are split into `pieces` of PIECE
    scores, one per program.
    """
    slab = (tl.program_id(0) // pieces).to(tl.int64)
    begin = (tl.program_id(0) % pieces).to(tl.int64) * PIECE
    first, left = slab * count + begin, tl.minimum(count - begin, PIECE).to(tl.int32)
    folded = fold(PARAMETERS, slab % heads * t_h, 1.0, 1.0, 2, 2, COLUMNS)
    whole = left // BLOCK * BLOCK
    for phase in tl.static_range(2):
        for start in range(whole if phase == 1 else 0, left if phase == 1 else whole, BLOCK):
            index = start + tl.arange(0, BLOCK)
            s = load_scores(SCORES + first, index, left, phase == 1)
            # Cap both sides for every dtype: scores may be -inf or inf.
            z = sigma(s, folded[1], folded, 2, 2, COLUMNS, CAP_BOTH)
            store(OUT + first, index, left, z, phase == 1)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def modulate_backward_kernel(
    GRAD, SCORES, PARAMETERS, OUT, SUMS, count, pieces, heads, t_h,
    COLUMNS: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute OUT, the gradient of SCORES, and a row of SUMS per program. See `modulate_kernel`."""
    slab = (tl.program_id(0) // pieces).to(tl.int64)
    begin = (tl.program_id(0) % pieces).to(tl.int64) * PIECE
    first, left = slab * count + begin, tl.minimum(count - begin, PIECE).to(tl.int32)
    folded = fold(PARAMETERS, slab % heads * t_h, 1.0, 1.0, 2, 2, COLUMNS)
    sums = zero_sums(tl.zeros([BLOCK], tl.float32), COLUMNS)
    whole = left // BLOCK * BLOCK
    for phase in tl.static_range(2):
        for start in range(whole if phase == 1 else 0, left if phase == 1 else whole, BLOCK):
            index = start + tl.arange(0, BLOCK)
            s = load_scores(SCORES + first, index, left, phase == 1)
            grad = load_scores(GRAD + first, index, left, phase == 1)
            grad_s, sums = sigma_backward_and_sums(s, grad, sums, folded, 2, 2, COLUMNS, CAP_BOTH)
            store(OUT + first, index, left, grad_s, phase == 1)
    store_parameter_gradients(SUMS, tl.program_id(0), sums, folded, 1.0, 2, 2, COLUMNS)


@triton.jit
def _low_turn(c1, c2, t1, t2, k1, k2, d1, d2):
    """Find the low turn: the largest x <= 0 such that sigma decreases just below x.

    Arguments: low coefficients c, low thresholds t, high coefficients k, high thresholds d. Returns
    the turn, or -inf if there is none; sigma and sigma' there; the derivatives of the turn by the
    parameters; and those of sigma for a fixed x.
    """
    first, second = tl.minimum(t1, t2), tl.minimum(d1, d2)
    third, fourth = tl.maximum(t1, t2), tl.maximum(d1, d2)
    low, high = tl.maximum(first, second), tl.minimum(third, fourth)
    first, fourth = tl.minimum(first, second), tl.maximum(third, fourth)
    second, third = tl.minimum(low, high), tl.maximum(low, high)
    far = tl.full([], MAX_DISTANCE, tl.float32)
    edges = (-far, first, second, third, fourth, far)
    at, level, slope, edge = -float("inf"), 0.0, 0.0, 0.0
    has_t1, has_t2, has_d1, has_d2 = 0.0, 0.0, 0.0, 0.0
    is_root = False
    # Scan the pieces between neighbouring thresholds upwards; the last piece in which sigma
    # decreases is the nearest to 0. Within a piece, sigma'(x) = level + slope * x.
    for piece in tl.static_range(5):
        left, right = edges[piece], edges[piece + 1]
        end = tl.minimum(right, 0.0)
        below_1, below_2 = tl.where(right <= t1, 1.0, 0.0), tl.where(right <= t2, 1.0, 0.0)
        above_1, above_2 = tl.where(left >= d1, 1.0, 0.0), tl.where(left >= d2, 1.0, 0.0)
        a = 1 - below_1 * c1 - 2 * below_2 * c2 * t2 + above_1 * k1 - 2 * above_2 * k2 * d2
        b = 2 * (below_2 * c2 + above_2 * k2)
        falls_at_end = a + b * end < 0
        falls = (left < end) & (falls_at_end | (a + b * left < 0))
        root = tl.minimum(tl.maximum(-a / tl.where(b == 0, 1.0, b), left), end)
        at = tl.where(falls, tl.where(falls_at_end, end, root), at)
        level, slope = tl.where(falls, a, level), tl.where(falls, b, slope)
        edge, is_root = tl.where(falls, right, edge), tl.where(falls, ~falls_at_end, is_root)
        has_t1, has_t2 = tl.where(falls, below_1, has_t1), tl.where(falls, below_2, has_t2)
        has_d1, has_d2 = tl.where(falls, above_1, has_d1), tl.where(falls, above_2, has_d2)
    x = tl.where(at > -float("inf"), at, 0.0)
    below_1, below_2 = has_t1 * (t1 - x), has_t2 * (t2 - x)
    above_1, above_2 = has_d1 * (x - d1), has_d2 * (x - d2)
    value = x + c1 * below_1 + c2 * below_2 * below_2 + k1 * above_1 + k2 * above_2 * above_2
    # A root of sigma' depends on all parameters of its piece, an edge only on its threshold.
    by = tl.where(is_root, 1 / tl.where(slope == 0, 1.0, slope), 0.0)
    free = (at > -float("inf")) & (edge <= 0) & ~is_root
    on_t1 = tl.where(free & (t1 == at), 1.0, 0.0)
    on_t2 = tl.where(free & (t2 == at), 1 - on_t1, 0.0)
    on_d1 = tl.where(free & (d1 == at), 1 - on_t1 - on_t2, 0.0)
    on_d2 = tl.where(free, 1 - on_t1 - on_t2 - on_d1, 0.0)
    at_by = (
        has_t1 * by, 2 * below_2 * by, on_t1, 2 * has_t2 * c2 * by + on_t2,
        -has_d1 * by, -2 * above_2 * by, on_d1, 2 * has_d2 * k2 * by + on_d2,
    )  # fmt: skip
    fixed = (
        below_1, below_2 * below_2, has_t1 * c1, 2 * c2 * below_2,
        above_1, above_2 * above_2, -has_d1 * k1, -2 * k2 * above_2,
    )  # fmt: skip
    return at, value, level + slope * x, at_by, fixed


@triton.jit
def tails_kernel(PARAMETERS, OUT, JACOBIAN):
    """Compute one side of a row per program: see `tails`."""
    row, side = tl.program_id(0).to(tl.int64) // 2, tl.program_id(0) % 2
    # The high side of sigma(x) is the low side of -sigma(-x).
    sign = 1.0 - 2.0 * side
    own, other = PARAMETERS + row * 8 + 4 * side, PARAMETERS + row * 8 + 4 - 4 * side
    at, value, derivative, at_by, fixed = _low_turn(
        sign * tl.load(own), sign * tl.load(own + 1),
        sign * tl.load(own + 2), sign * tl.load(own + 3),
        sign * tl.load(other), sign * tl.load(other + 1),
        sign * tl.load(other + 2), sign * tl.load(other + 3),
    )  # fmt: skip
    turns = at > -float("inf")
    # The low side stores the offset sigma(x) - x, the high side sigma(x).
    is_low = tl.where(side == 0, 1.0, 0.0)
    out = OUT + row * 4 + side
    tl.store(out, sign * at)
    tl.store(out + 2, sign * (value - is_low * tl.where(turns, at, 0.0)))
    for i in tl.static_range(8):
        by = JACOBIAN + row * 32 + side * 8 + (i + 4 * side) % 8
        tl.store(by, at_by[i])
        tl.store(by + 16, tl.where(turns, fixed[i] + (derivative - is_low) * at_by[i], 0.0))


def tails(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the last four columns of a monotone modulator's parameters, and their derivatives.

    Args:
        parameters: (rows, 8) float32, the first eight columns.

    Returns:
        (rows, 4); (rows, 4, 8), the derivatives.
    """
    out, jacobian = (
        parameters.new_empty(len(parameters), 4),
        parameters.new_empty(len(parameters), 4, 8),
    )
    with torch.cuda.device_of(parameters):
        arguments = {
            "PARAMETERS": parameters.contiguous(),
            "OUT": out,
            "JACOBIAN": jacobian,
            "num_warps": 1,
        }
        run_kernel(tails_kernel, 2 * len(parameters), arguments)
    return out, jacobian


def modulate(scores: Tensor, parameters: Tensor) -> Tensor:
    """Return sigma(scores).

    Args:
        scores: float16, bfloat16 or float32; (..., heads, T, S) if each head has a row.
        parameters: (1 or heads, columns) float32, see the top of this file.

    Returns:
        The shape of scores, float32, contiguous.
    """
    scores = scores.contiguous()
    out = torch.empty_like(scores, dtype=torch.float32)
    if scores.numel() > 0:
        programs, arguments = _pieces(scores, parameters)
        with torch.cuda.device_of(scores):
            run_kernel(modulate_kernel, programs, {"SCORES": scores, "OUT": out, **arguments})
    return out


def modulate_backward(grad: Tensor, scores: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of scores, in their dtype, and of parameters, in float32."""
    grad, scores = grad.contiguous(), scores.contiguous()
    out = torch.empty_like(scores)
    if scores.numel() == 0:
        return out, torch.zeros_like(parameters)
    programs, arguments = _pieces(scores, parameters)
    sums = parameters.new_empty(
        programs // arguments["pieces"], arguments["pieces"], parameters.shape[1]
    )
    arguments |= {"GRAD": grad, "SCORES": scores, "OUT": out, "SUMS": sums}
    with torch.cuda.device_of(scores):
        run_kernel(modulate_backward_kernel, programs, arguments)
    return out, sums.sum(1).view(-1, *parameters.shape).sum(0)


def _pieces(scores: Tensor, parameters: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the number of programs, and the arguments that both kernels share."""
    parameters = parameters.contiguous()
    heads, columns = parameters.shape
    count = scores.numel() if heads == 1 else scores.shape[-1] * scores.shape[-2]
    pieces = triton.cdiv(count, PIECE)
    return scores.numel() // count * pieces, {
        "PARAMETERS": parameters, "count": count, "pieces": pieces, "heads": heads, "t_h": columns,
        "COLUMNS": columns,
        "PIECE": PIECE, "BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True,
    }  # fmt: skip
