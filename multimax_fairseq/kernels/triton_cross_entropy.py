"""Row kernels of the fused output loss, over a tile of the classes at a time.

What is between them, the matrix products and the loop over tiles, is in `functional`. A row has
one program, so that two runs agree to the bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from multimax_fairseq.kernels.triton_modulator import (
    fold,
    sigma,
    sigma_backward,
    sigma_backward_and_sums,
    table_gradients,
)

# Classes that a program takes at a time, and its warps: eight sums an element are kept.
BLOCK = 2048
WARPS = 8


@triton.jit(do_not_specialize=["first"])
def statistics_kernel(
    SCORES, TABLE, TARGET, STATE, scores_n, state_n, first, classes,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores = SCORES + row * scores_n
    state = STATE + row * state_n
    folded = fold(TABLE, 0, 1.0, 1.0, ORDER, ORDER)
    top, total, plain = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < classes
        s = tl.load(scores + columns, mask=inside, other=0.0).to(tl.float32)
        z = sigma(s, folded[1], folded, ORDER, ORDER, True)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, -float("inf"))
        previous = top
        top = tl.maximum(top, tl.max(z, 0))
        base = tl.where(top == -float("inf"), 0.0, top)
        total = total * tl.exp(previous - base) + tl.sum(tl.exp(z - base), 0)
    tl.store(state, top)
    tl.store(state + 1, total)
    tl.store(state + 2, plain)
    hit = tl.load(TARGET + row) - first
    if (hit >= 0) & (hit < classes):
        s = tl.load(scores + hit).to(tl.float32)
        tl.store(state + 3, sigma(s, folded[1], folded, ORDER, ORDER, True))


@triton.jit(do_not_specialize=["first"])
def gradient_kernel(
    SCORES, TABLE, TARGET, TOTAL, ROW_SCALE, OUT, TABLE_GRAD,
    scores_n, out_n, grad_n, first, classes, share, hit,
    ORDER: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores, out = SCORES + row * scores_n, OUT + row * out_n
    factor = tl.load(ROW_SCALE + row)
    if factor == 0:
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(out + columns, 0.0, mask=columns < classes)
    else:
        folded = fold(TABLE, 0, 1.0, 1.0, ORDER, ORDER)
        total = tl.load(TOTAL + row)
        target = tl.load(TARGET + row) - first
        zero = tl.zeros([BLOCK], tl.float32)
        sums = (zero, zero, zero, zero, zero, zero, zero, zero)
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < classes
            s = tl.load(scores + columns, mask=inside, other=0.0).to(tl.float32)
            z = sigma(s, folded[1], folded, ORDER, ORDER, True)
            grad = tl.exp(z - total) - share - tl.where(columns == target, hit, 0.0)
            grad = tl.where(inside, grad * factor, 0.0)
            if SUMMED:
                grad_s, sums = sigma_backward_and_sums(
                    s, grad, sums, folded, None, ORDER, ORDER, True
                )
            else:
                grad_s = sigma_backward(s, grad, folded, ORDER, ORDER, True)
            tl.store(out + columns, grad_s.to(OUT.dtype.element_ty), mask=inside)
        if SUMMED:
            grads = table_gradients(sums, folded, 1.0, ORDER, ORDER)
            for column in tl.static_range(8):
                pointer = TABLE_GRAD + row * grad_n + column
                tl.store(pointer, tl.load(pointer) + tl.sum(grads[column], 0))


def statistics(
    scores: Tensor, table: Tensor | None, target: Tensor, first: int, state: Tensor
) -> None:
    """Add a tile of the classes to each row's running statistics, with z = sigma(scores).

    Equivalent to, once every tile is in: state = (m, (z - m).exp().sum(-1), z.sum(-1),
    z.gather(-1, target)) with m = z.max(-1)

    Args:
        scores: (R, v), floating, with unit last stride: the classes first..first + v - 1.
        table: (8,) float32, contiguous, as a row of the attention's; None leaves the scores as
            they are.
        target: (R,) int64, contiguous; one that lies outside the tile changes nothing.
        first: the tile's first class.
        state: (R, 4) float32, (-inf, 0, 0, 0) before the first tile; updated in place.
    """
    rows, classes = scores.shape
    if rows == 0 or classes == 0:
        return
    with torch.cuda.device_of(scores):
        statistics_kernel[(rows,)](
            scores, table, target, state, scores.stride(0), state.stride(0), first, classes,
            ORDER=0 if table is None else 2,
            BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip


def gradient(
    scores: Tensor,
    table: Tensor | None,
    target: Tensor,
    first: int,
    log_total: Tensor,
    row_scale: Tensor,
    share: float,
    hit: float,
    out: Tensor,
    table_grad: Tensor | None,
) -> None:
    """Store a tile of the loss's gradient by the scores, and add that by the table, row by row.

        grad_z = row_scale (exp(z - log_total) - share - hit [class = target]),   z = sigma(score)
    Equivalent to: out = grad_z * sigma'(scores); table_grad += grad_z * (d z / d table), a row each

    Args:
        scores, table, target, first: as in `statistics`.
        log_total: (R,) float32, contiguous, the logarithm of the sum of exp(z) over all classes.
        row_scale: (R,) float32, contiguous; a row of 0 gets zeros, whatever its scores are.
        share, hit: what is subtracted from each probability, and besides from the target's.
        out: (R, v), floating, with unit last stride; may be scores.
        table_grad: (R, 8) float32, or None where it is not needed.
    """
    rows, classes = scores.shape
    if rows == 0 or classes == 0:
        return
    summed = table is not None and table_grad is not None
    with torch.cuda.device_of(scores):
        gradient_kernel[(rows,)](
            scores, table, target, log_total, row_scale, out, table_grad,
            scores.stride(0), out.stride(0), 0 if table_grad is None else table_grad.stride(0),
            first, classes, share, hit,
            ORDER=0 if table is None else 2, SUMMED=summed,
            BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip
