"""The modulator in Triton: inside other kernels, and element by element where nothing is fused.

A score costs few instructions: with u = min(s, edge), a term c max(edge - s, 0)^2 is
c u^2 - 2 c edge u plus a constant, and the factor of the scores, the unit of the result and all
constants are folded into the coefficients beforehand, once a program.

A row of a table has COLUMNS float32 entries: low_coefficient[1..2], low_threshold[1..2], then the
same of the high side. A monotone modulator has four more: low_turn, high_turn, low_offset and
high_level. It is x + low_offset below the one turn and high_level above the other.

LOW and HIGH are the orders of the two sides; 0 leaves a side out of the program. CAP says which
scores need their distances capped: CAP_NONE none, CAP_LOW those of -inf, CAP_BOTH any whose square
may overflow. Everything is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 8
MONOTONE_COLUMNS = 12

# That of functional/modulator.py, which this room does not import.
MAX_DISTANCE = tl.constexpr(1e18)
CAP_NONE, CAP_LOW, CAP_BOTH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

# Elements that a program of the element-by-element kernels takes, and how many at a time.
PIECE, BLOCK, WARPS = 8192, 1024, 4
# A new shape is no reason to compile anew.
_VARYING = ["pieces", "heads", "t_h"]


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
def fold(
    TABLE, first, scale, unit, LOW: tl.constexpr, HIGH: tl.constexpr, MONOTONE: tl.constexpr
):  # fmt: skip
    """The row of the table that starts at `first`, for the functions below: scores are scale * s,
    results unit * sigma. scale is above 0.

    Returns (the factor of s; the constants of sigma and of sigma'; the cap in the unit of s; the
    sides; the turns in the unit of s, and what `sigma` adds to its line and its offset there).
    """
    low, high, turns = 0.0, 0.0, 0.0
    constant, level = 0.0, 1.0
    if LOW > 0:
        low = _fold_side(TABLE + first, scale, unit, -1, LOW)
        constant += low[5]
        level += low[8]
    if HIGH > 0:
        high = _fold_side(TABLE + first + 4, scale, unit, 1, HIGH)
        constant += high[5]
        level += high[8]
    if MONOTONE:
        row = TABLE + first + 8
        low_offset = tl.load(row + 2) * unit - constant
        high_level = tl.load(row + 3) * unit - constant
        turns = (tl.load(row) / scale, tl.load(row + 1) / scale, low_offset, high_level)
    return scale * unit, constant, level, MAX_DISTANCE / scale, low, high, turns


@triton.jit
def _up_to(s, edge, SIGN: tl.constexpr):
    """The score where it lies beyond the edge (below it for SIGN -1, above it for 1), else that."""
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
def sigma(
    s, offset, folded, LOW: tl.constexpr, HIGH: tl.constexpr, MONOTONE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return unit * sigma(scale * s) + offset - folded[1].

    The constant folded[1] is for the caller to give, so that what it adds next costs nothing.
    """
    slope, _, _, cap, low, high, turns = folded
    line = s * slope + offset
    z = line
    if LOW > 0:
        z = _add_side(z, s, cap, low, -1, LOW, CAP)
    if HIGH > 0:
        z = _add_side(z, s, cap, high, 1, HIGH, CAP)
    if MONOTONE:
        low_turn, high_turn, low_offset, high_level = turns
        z = tl.where(s < low_turn, line + low_offset, z)
        # A score of inf stays what it is, so that an overflow is not hidden.
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
        slope += bend * _up_to(s, edge_2, SIGN)
    if STEPS:
        slope = tl.where(_is_beyond(s, edge, SIGN), slope + step, slope)
    return slope


@triton.jit
def _slope(
    s, folded, LOW: tl.constexpr, HIGH: tl.constexpr, CAP: tl.constexpr, STEPS: tl.constexpr
):
    """The derivative between the turns, with or without the steps that it makes at an edge."""
    _, _, level, cap, low, high, _ = folded
    slope = level
    if LOW > 0:
        slope = _side_slope(slope, s, cap, low, -1, LOW, CAP, STEPS)
    if HIGH > 0:
        slope = _side_slope(slope, s, cap, high, 1, HIGH, CAP, STEPS)
    return slope


@triton.jit
def sigma_backward(
    s, grad, folded, LOW: tl.constexpr, HIGH: tl.constexpr, MONOTONE: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return grad * sigma'(scale * s)."""
    slope = _slope(s, folded, LOW, HIGH, CAP, True)
    if MONOTONE:
        low_turn, high_turn, _, _ = folded[6]
        slope = tl.where(s < low_turn, 1.0, tl.where(s > high_turn, 0.0, slope))
    return grad * slope


@triton.jit
def summed(product):
    """Sums of what a thread has of each row, or of all: none waits for what another has."""
    if len(product.shape) == 1:
        return tl.sum(tl.reshape(product, (product.shape[0] // 4, 4)), 1)
    else:
        # The layout of a matrix product's result: two neighbours of every eight.
        rows: tl.constexpr = product.shape[0]
        parts = tl.reshape(product, (rows, product.shape[1] // 8, 4, 2))
        return tl.sum(tl.sum(parts, 3), 1)


@triton.jit
def no_sums(zero, MONOTONE: tl.constexpr):
    """What `sigma_backward_and_sums` starts from, given zeros in the shape of the scores."""
    zero = summed(zero)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    if MONOTONE:
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
    beyond += summed(part)
    # Not s itself: beyond the other side, that may be infinite.
    line += summed(part * _up_to(s, edge, SIGN))
    if ORDER == 2:
        distance = _up_to(s, edge_2, SIGN) - edge_2
        product = grad * distance
        slope += summed(product)
        square += summed(product * distance)
    return grad_s, (line, square, beyond, slope)


@triton.jit
def sigma_backward_and_sums(
    s, grad, sums, folded, LOW: tl.constexpr, HIGH: tl.constexpr,
    MONOTONE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return (grad * sigma'(scale * s), sums with what these scores contribute to them).

    The sums are those that `store_table_gradients` takes.
    """
    _, _, _, cap, low, high, turns = folded
    of_low, of_high, of_turns = sums[:4], sums[4:8], sums[8:]
    if MONOTONE:
        low_turn, high_turn, _, _ = turns
        below = tl.where(s < low_turn, grad, 0.0)
        above = tl.where(s > high_turn, grad, 0.0)
        of_turns = (of_turns[0] + summed(below), of_turns[1] + summed(above))
        grad = tl.where((s < low_turn) | (s > high_turn), 0.0, grad)
    grad_s = grad * _slope(s, folded, LOW, HIGH, CAP, False)
    if LOW > 0:
        grad_s, of_low = _sum_side(grad_s, of_low, s, grad, cap, low, -1, LOW, CAP)
    if HIGH > 0:
        grad_s, of_high = _sum_side(grad_s, of_high, s, grad, cap, high, 1, HIGH, CAP)
    if MONOTONE:
        grad_s += below
    return grad_s, of_low + of_high + of_turns


@triton.jit
def _side_gradients(sums, side, scale, SIGN: tl.constexpr):
    line, square, beyond, slope = sums
    edge, _, _, _, _, _, step, bend, _ = side
    distance = SIGN * (line - edge * beyond)
    return distance * scale, square * scale * scale, -step * beyond, -bend * slope


@triton.jit
def _table_gradients(
    sums, folded, scale, LOW: tl.constexpr, HIGH: tl.constexpr, MONOTONE: tl.constexpr
):
    """The gradients by a row of the table, one a column, shaped as the sums."""
    _, _, _, _, low, high, _ = folded
    of_low, of_high = sums[:4], sums[4:8]
    if LOW > 0:
        of_low = _side_gradients(of_low, low, scale, -1)
    if HIGH > 0:
        of_high = _side_gradients(of_high, high, scale, 1)
    grads = of_low + of_high
    if MONOTONE:  # where the pieces meet, they agree: a turn that moves changes nothing
        zero = tl.zeros_like(sums[8])
        grads = grads + (zero, zero) + sums[8:]
    return grads


@triton.jit
def store_table_gradients(
    SUMS, row, sums, folded, scale, LOW: tl.constexpr, HIGH: tl.constexpr, MONOTONE: tl.constexpr
):  # fmt: skip
    """Store the gradients by a row of the table, from a program's sums, as a row of SUMS."""
    grads = _table_gradients(sums, folded, scale, LOW, HIGH, MONOTONE)
    columns: tl.constexpr = 12 if MONOTONE else 8
    for column in tl.static_range(columns):
        tl.store(SUMS + row.to(tl.int64) * columns + column, tl.sum(grads[column]))


@triton.jit
def load_scores(start, index, limit, EDGE: tl.constexpr):
    """Scores as float32, 0 beyond the limit. Without bounds, many are loaded at once."""
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


@triton.jit(do_not_specialize=_VARYING)
def modulate_kernel(
    SCORES, TABLE, OUT, count, pieces, heads, t_h,
    MONOTONE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a piece of the `count` scores that follow each other under one row of the table."""
    slab = (tl.program_id(0) // pieces).to(tl.int64)
    begin = (tl.program_id(0) % pieces).to(tl.int64) * PIECE
    first, left = slab * count + begin, tl.minimum(count - begin, PIECE).to(tl.int32)
    folded = fold(TABLE, slab % heads * t_h, 1.0, 1.0, 2, 2, MONOTONE)
    whole = left // BLOCK * BLOCK
    for phase in tl.static_range(2):
        for start in range(whole if phase == 1 else 0, left if phase == 1 else whole, BLOCK):
            index = start + tl.arange(0, BLOCK)
            s = load_scores(SCORES + first, index, left, phase == 1)
            # Capped whatever the type: a score of -inf or inf is kept.
            z = sigma(s, folded[1], folded, 2, 2, MONOTONE, CAP_BOTH)
            store(OUT + first, index, left, z, phase == 1)


@triton.jit(do_not_specialize=_VARYING)
def modulate_backward_kernel(
    GRAD, SCORES, TABLE, OUT, SUMS, count, pieces, heads, t_h,
    MONOTONE: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `modulate_kernel`, with a row of SUMS a program."""
    slab = (tl.program_id(0) // pieces).to(tl.int64)
    begin = (tl.program_id(0) % pieces).to(tl.int64) * PIECE
    first, left = slab * count + begin, tl.minimum(count - begin, PIECE).to(tl.int32)
    folded = fold(TABLE, slab % heads * t_h, 1.0, 1.0, 2, 2, MONOTONE)
    sums = no_sums(tl.zeros([BLOCK], tl.float32), MONOTONE)
    whole = left // BLOCK * BLOCK
    for phase in tl.static_range(2):
        for start in range(whole if phase == 1 else 0, left if phase == 1 else whole, BLOCK):
            index = start + tl.arange(0, BLOCK)
            s = load_scores(SCORES + first, index, left, phase == 1)
            grad = load_scores(GRAD + first, index, left, phase == 1)
            grad_s, sums = sigma_backward_and_sums(s, grad, sums, folded, 2, 2, MONOTONE, CAP_BOTH)
            store(OUT + first, index, left, grad_s, phase == 1)
    store_table_gradients(SUMS, tl.program_id(0), sums, folded, 1.0, 2, 2, MONOTONE)


def modulate(scores: Tensor, table: Tensor) -> Tensor:
    """Return sigma(scores).

    Args:
        scores: float16, bfloat16 or float32; (..., heads, T, S) where the table has rows for heads.
        table: (1 or heads, 8 or 12) float32, as above.

    Returns:
        The shape of scores, float32, contiguous.
    """
    scores = scores.contiguous()
    out = torch.empty_like(scores, dtype=torch.float32)
    if scores.numel() > 0:
        programs, arguments = _pieces(scores, table)
        with torch.cuda.device_of(scores):
            modulate_kernel[(programs,)](SCORES=scores, OUT=out, **arguments)
    return out


def modulate_backward(grad: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `modulate` by scores, in their dtype, and by table, float32."""
    grad, scores = grad.contiguous(), scores.contiguous()
    out = torch.empty_like(scores)
    if scores.numel() == 0:
        return out, torch.zeros_like(table)
    programs, arguments = _pieces(scores, table)
    sums = table.new_empty(programs // arguments["pieces"], arguments["pieces"], table.shape[1])
    with torch.cuda.device_of(scores):
        modulate_backward_kernel[(programs,)](
            GRAD=grad, SCORES=scores, OUT=out, SUMS=sums, **arguments
        )
    return out, sums.sum(1).view(-1, *table.shape).sum(0)


def _pieces(scores: Tensor, table: Tensor) -> tuple[int, dict[str, Any]]:
    """The number of programs, and the arguments that both kernels take."""
    table = table.contiguous()
    heads, columns = table.shape
    count = scores.numel() if heads == 1 else scores.shape[-1] * scores.shape[-2]
    pieces = triton.cdiv(count, PIECE)
    return scores.numel() // count * pieces, {
        "TABLE": table, "count": count, "pieces": pieces, "heads": heads, "t_h": columns,
        "MONOTONE": columns == MONOTONE_COLUMNS,
        "PIECE": PIECE, "BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True,
    }  # fmt: skip
