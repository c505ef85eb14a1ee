"""The fused output loss on a GPU.

`linear_loss.through_chunks` computes the matrix products. Between them, only this kernel reads and
writes the scores: once for the loss and once more for the gradients. One program processes one row,
so results are reproducible to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from multimax_fairseq.ops.linear_loss import LossCall, through_chunks
from multimax_fairseq.ops.triton.launches import run_kernel
from multimax_fairseq.ops.triton.modulator import (
    CAP_BOTH,
    CAP_LOW,
    fold,
    load_scores,
    partial_sums,
    sigma,
    sigma_backward,
    sigma_backward_and_sums,
    store,
    store_parameter_gradients,
    zero_sums,
)

# Classes per iteration, and warps per program.
BLOCK = 2048
WARPS = 8

_LOG2_E = tl.constexpr(math.log2(math.e))
_LN_2 = tl.constexpr(math.log(2))
# A lower bound for log2 p, at which p is 0: the product p log p of an excluded class is 0, not NaN.
_LEAST_LOG = tl.constexpr(-1000.0)


@triton.jit
def _finite(top):
    """Return top, or 0 for -inf: a finite base for exp2, because -inf - (-inf) is NaN."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit(do_not_specialize=["classes"])
def loss_kernel(
    SCORES, PARAMETERS, TARGET, FACTORS, NLL, LOSS, PARAMETERS_GRAD,
    scores_n, classes, smooth_weight, nll_weight, z_weight,
    ORDER: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr,
    GRADIENT: tl.constexpr, SUMMED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute NLL and LOSS (N,) of a `LossCall` from the scores (N, V); one program per row.

    Both are 0 if the target is negative.

    ENTROPY: LOSS is the entropy, and FACTORS (N, 2) has a column for NLL and one for LOSS.
    GRADIENT: overwrite the scores with the gradient of FACTORS * LOSS. If the factors are 0 or the
        target is negative, the gradient is 0, even for scores of NaN or inf.
    SUMMED: store the gradient of each row by the parameters in PARAMETERS_GRAD (N, columns).
    """
    row = tl.program_id(0)
    scores = SCORES + row.to(tl.int64) * scores_n
    # Logarithms use base 2, because exp2 saves one instruction per score.
    folded = fold(PARAMETERS, 0, 1.0, _LOG2_E, ORDER, ORDER, COLUMNS)
    target = tl.load(TARGET + row)
    counts = target >= 0
    # Load the target's score before the reductions, which synchronise the warps. After them,
    # another warp may overwrite the score with a gradient. An invalid target gives a loss of NaN.
    score = tl.load(scores + target, mask=counts & (target < classes), other=float("nan"))
    target_z = sigma(score.to(tl.float32), folded[1], folded, ORDER, ORDER, COLUMNS, CAP)

    # Each group of four neighbouring classes has its own running maximum and sums, so the threads
    # do not communicate within the loop.
    lanes: tl.constexpr = BLOCK // 4
    tops = tl.full([lanes], -float("inf"), tl.float32)
    totals, plain = tl.zeros([lanes], tl.float32), tl.zeros([lanes], tl.float32)
    products = tl.zeros([lanes], tl.float32)  # sums of log2(q) q, q = exp2(z - tops)
    seen = tl.where(counts, classes, 0)
    whole = seen // BLOCK * BLOCK
    for phase in tl.static_range(2):
        for start in range(whole if phase == 1 else 0, seen if phase == 1 else whole, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            s = load_scores(scores, columns, classes, phase == 1)
            z = sigma(s, folded[1], folded, ORDER, ORDER, COLUMNS, CAP)
            if phase == 1:
                plain += partial_sums(tl.where(columns < classes, z, 0.0))
                z = tl.where(columns < classes, z, -float("inf"))
            else:
                plain += partial_sums(z)
            z = tl.reshape(z, (lanes, 4))
            previous = tops
            tops = tl.maximum(tops, tl.max(z, 1))
            base = _finite(tops)
            if ENTROPY:
                shift = tl.maximum(previous - base, _LEAST_LOG)
                products = (products + shift * totals) * tl.exp2(shift)
                log_q = z - base[:, None]
                products += tl.sum(tl.exp2(log_q) * tl.maximum(log_q, _LEAST_LOG), 1)
            totals = totals * tl.exp2(previous - base) + tl.sum(tl.exp2(z - base[:, None]), 1)
    top = tl.max(tops, 0)
    shift = tops - _finite(top)
    sum_of_exp = tl.sum(totals * tl.exp2(shift), 0)
    total = top + tl.log2(sum_of_exp)
    nll, smooth = (total - target_z) * _LN_2, (classes * total - tl.sum(plain, 0)) * _LN_2
    squared = total * total * (_LN_2 * _LN_2)
    loss = nll_weight * nll
    # Without the checks, 0 * inf would be NaN.
    loss = tl.where(smooth_weight == 0, loss, loss + smooth_weight * smooth)
    loss = tl.where(z_weight == 0, loss, loss + z_weight * squared)
    if ENTROPY:
        shift = tl.maximum(shift, _LEAST_LOG)
        product = tl.sum((products + shift * totals) * tl.exp2(shift), 0)
        entropy = tl.log2(sum_of_exp) - product / sum_of_exp  # in bits
        loss = entropy * _LN_2
    tl.store(NLL + row, tl.where(counts, nll, 0.0))
    tl.store(LOSS + row, tl.where(counts, loss, 0.0))

    if GRADIENT:
        columns_of_factors: tl.constexpr = 2 if ENTROPY else 1
        factor = tl.where(counts, tl.load(FACTORS + row * columns_of_factors), 0.0)
        factor = tl.where(target < classes, factor, float("nan"))  # NaN, like the loss
        has_gradient = factor != 0
        if ENTROPY:
            of_entropy = tl.where(counts, tl.load(FACTORS + row * 2 + 1), 0.0)
            has_gradient = has_gradient | (of_entropy != 0)
        factor_of_p = factor * tl.where(z_weight == 0, 1.0, 1 + 2 * z_weight * total * _LN_2)
        sums = zero_sums(tl.zeros([BLOCK], tl.float32), COLUMNS)
        whole = classes // BLOCK * BLOCK
        if has_gradient:
            for phase in tl.static_range(2):
                begin, end = whole if phase == 1 else 0, classes if phase == 1 else whole
                for start in range(begin, end, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    s = load_scores(scores, columns, classes, phase == 1)
                    z = sigma(s, folded[1] - total, folded, ORDER, ORDER, COLUMNS, CAP)
                    grad = tl.exp2(z) * factor_of_p - smooth_weight * factor
                    if ENTROPY:
                        surprise = tl.maximum(z, _LEAST_LOG) + entropy
                        grad -= tl.exp2(z) * surprise * (of_entropy * _LN_2)
                    grad = tl.where(columns == target, grad - nll_weight * factor, grad)
                    if phase == 1:
                        grad = tl.where(columns < classes, grad, 0.0)
                    if SUMMED:
                        grad, sums = sigma_backward_and_sums(
                            s, grad, sums, folded, ORDER, ORDER, COLUMNS, CAP
                        )
                    else:
                        grad = sigma_backward(s, grad, folded, ORDER, ORDER, COLUMNS, CAP)
                    store(scores, columns, classes, grad, phase == 1)
        else:
            for start in range(0, classes, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                store(scores, columns, classes, tl.zeros([BLOCK], tl.float32), True)
        if SUMMED:
            store_parameter_gradients(
                PARAMETERS_GRAD, row, sums, folded, 1.0, ORDER, ORDER, COLUMNS
            )


def output_loss(
    call: LossCall, factors: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return nll and loss, (N,) float32, 0 if ignored, and the gradients of `through_chunks`.

    Args:
        factors: float32, of the call's `factor_shape`; None for no gradients.
        needed: which of features, weight, bias and parameters need gradients.
    """
    one_chunk = partial(
        _one_chunk,
        weights=(call.smooth_weight, call.nll_weight, call.z_weight),
        entropy=call.entropy,
        needs_parameters=needed[3],
    )
    # The kernel ignores negative targets and returns NaN for targets that are too large.
    target = torch.where(call.target < 0, call.weight.shape[0], call.target)
    target = target.masked_fill(call.target == call.ignore_index, -1).contiguous()
    parameters = None if call.parameters is None else call.parameters.contiguous()
    factors = None if factors is None else factors.contiguous()
    return through_chunks(
        one_chunk, call._replace(parameters=parameters, target=target), factors, needed
    )


def _one_chunk(
    scores: Tensor,
    parameters: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    weights: tuple[float, float, float],
    entropy: bool,
    needs_parameters: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute one chunk, see `OneChunk`. The gradients overwrite the scores."""
    rows, classes = scores.shape
    nll, loss = (scores.new_empty(rows, dtype=torch.float32) for _ in range(2))
    smooth_weight, nll_weight, z_weight = map(float, weights)
    parameters_grad = None
    if factors is not None and parameters is not None and needs_parameters:
        parameters_grad = parameters.new_empty(rows, parameters.shape[1])
    arguments = {
        "SCORES": scores, "PARAMETERS": parameters, "TARGET": target, "FACTORS": factors,
        "NLL": nll, "LOSS": loss, "PARAMETERS_GRAD": parameters_grad,
        "scores_n": scores.stride(0), "classes": classes,
        "smooth_weight": smooth_weight, "nll_weight": nll_weight, "z_weight": z_weight,
        "ORDER": 0 if parameters is None else 2,
        "COLUMNS": 0 if parameters is None else parameters.shape[1],
        # The square of a finite float16 does not overflow in float32, but a score may be -inf.
        "CAP": (CAP_LOW if scores.dtype == torch.float16 else CAP_BOTH).value,
        "ENTROPY": entropy, "GRADIENT": factors is not None, "SUMMED": parameters_grad is not None,
        "BLOCK": BLOCK, "num_warps": WARPS, "enable_fp_fusion": True,
    }  # fmt: skip
    with torch.cuda.device_of(scores):
        run_kernel(loss_kernel, rows, arguments)
    if factors is None:
        return nll, loss, None, None
    return (
        nll,
        loss,
        scores,
        None if parameters_grad is None else parameters_grad.sum(0, keepdim=True),
    )
