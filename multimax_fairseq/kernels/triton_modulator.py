"""The modulator inside Triton kernels: sigma, its derivative, its partial derivatives.

A score costs few instructions: with u = min(s, edge), a term c max(edge - s, 0)^2 is
c u^2 - 2 c edge u plus a constant, and the factor of the scores, the unit of the result and all
constants are folded into the coefficients beforehand, once a program.

LOW and HIGH are the orders of the two sides; 0 leaves a side out of the program. CAP may be False
where scores cannot come near the cap on distances. Everything is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A row of a table: low_coefficient[1..2], low_threshold[1..2], then the same of the high side.
COLUMNS = 8

# That of functional/modulator.py, which this room does not import.
MAX_DISTANCE = tl.constexpr(1e18)


@triton.jit
def _fold_side(row, scale, unit, SIGN: tl.constexpr, ORDER: tl.constexpr):
    """A side's terms of order n in u_n, the score where it lies beyond threshold n, else that.

    Returns (threshold 1 and 2 in the unit of s; the factors in sigma of u_1, u_2^2, u_2 and 1;
    those in sigma' of [s lies beyond threshold 1], u_2 and 1).
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
def fold(TABLE, row, scale, unit, LOW: tl.constexpr, HIGH: tl.constexpr):
    """A row of the table for the functions below: scores are scale * s, results unit * sigma.

    Returns (the factor of s; the constants of sigma and of sigma'; the cap in the unit of s; the
    sides). scale is above 0.
    """
    low, high = 0.0, 0.0
    constant, level = 0.0, 1.0
    if LOW > 0:
        low = _fold_side(TABLE + row * 8, scale, unit, -1, LOW)
        constant += low[5]
        level += low[8]
    if HIGH > 0:
        high = _fold_side(TABLE + row * 8 + 4, scale, unit, 1, HIGH)
        constant += high[5]
        level += high[8]
    return scale * unit, constant, level, MAX_DISTANCE / scale, low, high


@triton.jit
def _up_to(s, edge, SIGN: tl.constexpr):
    """The score where it lies beyond the edge (below it for SIGN -1, above it for 1), else that."""
    if SIGN < 0:
        return tl.minimum(s, edge)
    else:
        return tl.maximum(s, edge)


@triton.jit
def _capped(s, cap, SIGN: tl.constexpr, CAP: tl.constexpr):
    if CAP:
        s = _up_to(s, SIGN * cap, -SIGN)
    return s


@triton.jit
def _add_side(z, s, cap, side, SIGN: tl.constexpr, ORDER: tl.constexpr, CAP: tl.constexpr):
    edge, edge_2, line, curve, tilt, _, _, _, _ = side
    s = _capped(s, cap, SIGN, CAP)
    z += line * _up_to(s, edge, SIGN)
    if ORDER == 2:
        u = _up_to(s, edge_2, SIGN)
        z += (curve * u + tilt) * u
    return z


@triton.jit
def sigma(s, offset, folded, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr):
    """Return unit * sigma(scale * s) + offset - folded[1].

    The constant folded[1] is for the caller to give, so that what it adds next costs nothing.
    """
    slope, _, _, cap, low, high = folded
    z = s * slope + offset
    if LOW > 0:
        z = _add_side(z, s, cap, low, -1, LOW, CAP)
    if HIGH > 0:
        z = _add_side(z, s, cap, high, 1, HIGH, CAP)
    return z


@triton.jit
def _side_slope(
    slope, s, cap, side, SIGN: tl.constexpr, ORDER: tl.constexpr, CAP: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    edge, edge_2, _, _, _, _, step, bend, _ = side
    s = _capped(s, cap, SIGN, CAP)
    if ORDER == 2:
        slope += bend * _up_to(s, edge_2, SIGN)
    if STEPS:
        slope = tl.where(_is_beyond(s, edge, SIGN), slope + step, slope)
    return slope


@triton.jit
def _is_beyond(s, edge, SIGN: tl.constexpr):
    if SIGN < 0:
        return s < edge
    else:
        return s > edge


@triton.jit
def _sum_side(
    grad_s, sums, s, grad, cap, side, AXIS: tl.constexpr, SIGN: tl.constexpr,
    ORDER: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    edge, edge_2, _, _, _, _, step, _, _ = side
    line, square, beyond, slope = sums
    s = _capped(s, cap, SIGN, CAP)
    part = tl.where(_is_beyond(s, edge, SIGN), grad, 0.0)
    grad_s += step * part
    beyond += _summed(part, AXIS)
    line += _summed(part * s, AXIS)
    if ORDER == 2:
        distance = _up_to(s, edge_2, SIGN) - edge_2
        product = grad * distance
        slope += _summed(product, AXIS)
        square += _summed(product * distance, AXIS)
    return grad_s, (line, square, beyond, slope)


@triton.jit
def _summed(product, AXIS: tl.constexpr):
    if AXIS is None:
        return product
    else:
        return tl.sum(product, AXIS)


@triton.jit
def _slope(
    s, folded, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr, STEPS: tl.constexpr
):
    _, _, level, cap, low, high = folded
    slope = level
    if LOW > 0:
        slope = _side_slope(slope, s, cap, low, -1, LOW, CAP, STEPS)
    if HIGH > 0:
        slope = _side_slope(slope, s, cap, high, 1, HIGH, CAP, STEPS)
    return slope


@triton.jit
def sigma_backward(s, grad, folded, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr):
    """Return grad * sigma'(scale * s)."""
    return grad * _slope(s, folded, LOW, HIGH, CAP, True)


@triton.jit
def sigma_backward_and_sums(
    s, grad, sums, folded, AXIS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return (grad * sigma'(scale * s), sums with what these scores contribute to them).

    The sums are the eight that `table_gradients` takes, zero at first: over AXIS, or element by
    element where that is None.
    """
    _, _, _, cap, low, high = folded
    grad_s = grad * _slope(s, folded, LOW, HIGH, CAP, False)
    of_low, of_high = sums[:4], sums[4:]
    if LOW > 0:
        grad_s, of_low = _sum_side(grad_s, of_low, s, grad, cap, low, AXIS, -1, LOW, CAP)
    if HIGH > 0:
        grad_s, of_high = _sum_side(grad_s, of_high, s, grad, cap, high, AXIS, 1, HIGH, CAP)
    return grad_s, of_low + of_high


@triton.jit
def table_gradients(sums, folded, scale, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Return the eight gradients by a row of the table, shaped as the sums."""
    _, _, _, _, low, high = folded
    of_low, of_high = sums[:4], sums[4:]
    if LOW > 0:
        of_low = _side_gradients(of_low, low, scale, -1)
    if HIGH > 0:
        of_high = _side_gradients(of_high, high, scale, 1)
    return of_low + of_high


@triton.jit
def _side_gradients(sums, side, scale, SIGN: tl.constexpr):
    line, square, beyond, slope = sums
    edge, _, _, _, _, _, step, bend, _ = side
    distance = SIGN * (line - edge * beyond)
    return distance * scale, square * scale * scale, -step * beyond, -bend * slope
