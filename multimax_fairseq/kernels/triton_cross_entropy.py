"""The fused output loss on a GPU: a program goes through a row of scores, twice for gradients.

Between the matrix products, which are in `chunks`, nothing of the size of the scores is read or
written but here. A row has one program, so that two runs agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from multimax_fairseq.kernels.chunks import through_chunks
from multimax_fairseq.kernels.triton_modulator import (
    CAP_BOTH,
    CAP_LOW,
    MONOTONE_COLUMNS,
    fold,
    no_sums,
    sigma,
    sigma_backward,
    sigma_backward_and_sums,
    store_table_gradients,
)

# Classes that a program takes at a time, and its warps: eight sums an element are kept.
BLOCK = 2048
WARPS = 8


@triton.jit(do_not_specialize=["classes"])
def loss_kernel(
    SCORES, TABLE, TARGET, FACTORS, NLL, SMOOTH, TABLE_GRAD, scores_n, classes, share, hit,
    ORDER: tl.constexpr, MONOTONE: tl.constexpr, CAP: tl.constexpr, GRADIENT: tl.constexpr,
    SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program a row of scores (N, V): NLL and SMOOTH (N,), 0 where the target is negative.

    If GRADIENT, the gradient of FACTORS * (share * SMOOTH + hit * NLL) takes the place of the
    scores; a row whose factor is 0 or whose target is negative gets zeros, whatever it holds.
    If SUMMED, TABLE_GRAD (N, columns) has the rows' gradients by the table.
    """
    row = tl.program_id(0)
    scores = SCORES + row.to(tl.int64) * scores_n
    folded = fold(TABLE, 0, 1.0, 1.0, ORDER, ORDER, MONOTONE)
    target = tl.load(TARGET + row)
    counts = target >= 0
    # Before the sums that all warps wait for, hence before the first gradient is stored over it.
    # A target that is not one of the classes shows as a loss of NaN.
    score = tl.load(scores + target, mask=counts & (target < classes), other=float("nan"))
    of_target = sigma(score.to(tl.float32), folded[1], folded, ORDER, ORDER, MONOTONE, CAP)

    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, tl.where(counts, classes, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < classes
        s = tl.load(scores + columns, mask=inside, other=0.0).to(tl.float32)
        z = sigma(s, folded[1], folded, ORDER, ORDER, MONOTONE, CAP)
        plain += tl.sum(tl.where(inside, z, 0.0), 0)
        z = tl.where(inside, z, -float("inf"))
        previous = top
        top = tl.maximum(top, tl.max(z, 0))
        # Nothing but -inf so far: any finite base keeps -inf - -inf from being NaN.
        base = tl.where(top == -float("inf"), 0.0, top)
        total = total * tl.exp(previous - base) + tl.sum(tl.exp(z - base), 0)
    total = top + tl.log(total)
    tl.store(NLL + row, tl.where(counts, total - of_target, 0.0))
    tl.store(SMOOTH + row, tl.where(counts, classes * total - plain, 0.0))

    if GRADIENT:
        factor = tl.where(counts, tl.load(FACTORS + row), 0.0)
        sums = no_sums(tl.zeros([BLOCK], tl.float32), MONOTONE)
        if factor == 0:
            for start in range(0, classes, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                tl.store(scores + columns, 0.0, mask=columns < classes)
        else:
            for start in range(0, classes, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                inside = columns < classes
                s = tl.load(scores + columns, mask=inside, other=0.0).to(tl.float32)
                z = sigma(s, folded[1], folded, ORDER, ORDER, MONOTONE, CAP)
                grad = tl.exp(z - total) - share - tl.where(columns == target, hit, 0.0)
                grad = tl.where(inside, grad * factor, 0.0)
                if SUMMED:
                    grad, sums = sigma_backward_and_sums(
                        s, grad, sums, folded, None, ORDER, ORDER, MONOTONE, CAP
                    )
                else:
                    grad = sigma_backward(s, grad, folded, ORDER, ORDER, MONOTONE, CAP)
                tl.store(scores + columns, grad.to(SCORES.dtype.element_ty), mask=inside)
        if SUMMED:
            store_table_gradients(TABLE_GRAD, row, sums, folded, 1.0, ORDER, ORDER, MONOTONE)


def output_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    share: float,
    hit: float,
    needed: Sequence[bool],
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the sums that a loss over a linear layer is made of, and its gradients.

        nll = log sum_k exp(z_k) - z_y,  smooth = sum_k (log sum_j exp(z_j) - z_k),
        z = sigma(W h + b)

    Args:
        features: (N, D), float16, bfloat16 or float32. weight: (V, D). bias: (V,) or None.
        table: (1, 8 or 12) float32, as in `triton_modulator`, or None, which is softmax.
        target: (N,) int64; a negative one is ignored.
        factors: (N,) float32, the gradient by each token's loss; None for no gradients.
        share, hit: the loss is share * smooth + hit * nll; both terms together weigh each p_k
            once, so share * V + hit = 1.
        needed: whether features, weight, bias and table need gradients.
        chunk_size: tokens taken at a time; None chooses.

    Returns:
        nll and smooth, (N,) float32, 0 where ignored; the gradients by features, weight, bias and
        table, as of `through_chunks`.
    """
    one_chunk = partial(_one_chunk, share=share, hit=hit, needs_table=needed[3])
    table = None if table is None else table.contiguous()
    factors = None if factors is None else factors.contiguous()
    target = target.contiguous()
    return through_chunks(
        one_chunk, target, factors, features, weight, bias, table, needed, chunk_size
    )


def _one_chunk(
    scores: Tensor,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    share: float,
    hit: float,
    needs_table: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `through_chunks` wants it; the gradients take the place of the scores."""
    rows, classes = scores.shape
    nll, smooth = scores.new_empty(2, rows, dtype=torch.float32)
    table_grad = None
    if factors is not None and table is not None and needs_table:
        table_grad = table.new_empty(rows, table.shape[1])
    with torch.cuda.device_of(scores):
        loss_kernel[(rows,)](
            scores, table, target, factors, nll, smooth, table_grad,
            scores.stride(0), classes, share, hit,
            ORDER=0 if table is None else 2,
            MONOTONE=table is not None and table.shape[1] == MONOTONE_COLUMNS,
            # No square of a float16 overflows, but one of them is -inf.
            CAP=(CAP_LOW if scores.dtype == torch.float16 else CAP_BOTH).value,
            GRADIENT=factors is not None, SUMMED=table_grad is not None,
            BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    if factors is None:
        return nll, smooth, None, None
    return nll, smooth, scores, None if table_grad is None else table_grad.sum(0, keepdim=True)
