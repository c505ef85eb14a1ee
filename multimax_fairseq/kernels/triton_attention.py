"""Attention whose scores are modulated before the softmax, in tiles: no (T, S) tensor exists.

The forward pass keeps the logarithm of each row's sum; the backward pass forms the scores again,
once by rows of queries (their gradient and the modulator's) and once by rows of keys. Every
result has one owner, so that two runs agree to the bit.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimax_fairseq.kernels.triton_modulator import (
    COLUMNS,
    fold,
    sigma,
    sigma_backward,
    sigma_backward_and_sums,
    table_gradients,
)

MAX_HEAD_SIZE = 128

_LOG2_E = tl.constexpr(math.log2(math.e))
# A new length or seed is no reason to compile anew.
_VARYING = ["heads", "T", "S", "seed", "threshold"]
# The fewest rounds of Philox that pass the usual statistical tests.
_ROUNDS = tl.constexpr(7)


@triton.jit
def _tile(start, rows, stride, limit, BOUNDED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of a (rows, D) matrix, as (rows, WIDTH) with zeros beyond its limits."""
    columns = tl.arange(0, WIDTH)
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if BOUNDED and D < WIDTH:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (columns[None, :] < D), other=0.0)
    elif BOUNDED:
        return tl.load(pointers, mask=rows[:, None] < limit, other=0.0)
    elif D < WIDTH:
        return tl.load(pointers, mask=columns[None, :] < D, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_tile(start, rows, stride, limit, tile, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    tl.store(pointers, tile.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _excluded(start, rows, columns, stride_t, stride_s, T, S, BY_QUERY: tl.constexpr):
    """The mask's tile for these queries (a column) and keys (a row), or the transpose."""
    if BY_QUERY:
        pointers = start + rows.to(tl.int64) * stride_t + columns * stride_s
        return tl.load(pointers, mask=(rows < T) & (columns < S), other=1) != 0
    else:
        return tl.load(start + columns * stride_s, mask=columns < S, other=1) != 0


@triton.jit
def _kept(seed, threshold, bh, t0, s0, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """What dropout keeps of a (BLOCK_T, BLOCK_S) tile: a function of the seed and (b, h, t, s)."""
    # One call makes the random numbers of four neighbouring keys.
    zero = tl.zeros([BLOCK_T, BLOCK_S // 4], tl.int32)
    t = zero + (t0 + tl.arange(0, BLOCK_T))[:, None]
    s = zero + (s0 // 4 + tl.arange(0, BLOCK_S // 4))[None, :]
    a, b, c, d = tl.philox(seed, s, t, zero + bh, zero, _ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d)).reshape(BLOCK_T, BLOCK_S)
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    Q, K, V, OUT, TOTAL, TABLE, MASK,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CAP: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program a block of queries: OUT and TOTAL (B, H, T), each row's log-sum-exp in base 2."""
    blocks = tl.cdiv(T, BLOCK_T)
    block = tl.program_id(0) % blocks
    if CAUSAL:  # the longest rows first
        block = blocks - 1 - block
    bh = tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    folded = fold(TABLE, h, scale, _LOG2_E, LOW, HIGH)
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    q = _tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)

    top = tl.full([BLOCK_T], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    out = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    # Whole blocks of keys that every query here may attend to, then the edge.
    end, inner = S, S // BLOCK_S * BLOCK_S
    if CAUSAL:
        end = tl.minimum(S, t0 + BLOCK_T)
        inner = tl.minimum(S, t0 + 1) // BLOCK_S * BLOCK_S
    for phase in tl.static_range(2):
        for s0 in range(inner if phase == 1 else 0, end if phase == 1 else inner, BLOCK_S):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = _tile(K + b * k_b + h * k_h, columns, k_n, S, phase == 1, D, WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            z = sigma(scores, folded[1], folded, LOW, HIGH, CAP)
            if MASKING > 0:
                mask = MASK + b * m_b + h * m_h
                excluded = _excluded(
                    mask, rows[:, None], columns[None, :], m_t, m_s, T, S, MASKING == 2
                )
                z = tl.where(excluded, -float("inf"), z)
            if phase == 1:
                allowed = columns[None, :] < S
                if CAUSAL:
                    allowed = allowed & (columns[None, :] <= rows[:, None])
                z = tl.where(allowed, z, -float("inf"))
            previous = top
            top = tl.maximum(top, tl.max(z, 1))
            # Nothing so far: any finite base keeps -inf - -inf from being NaN.
            base = tl.where(top == -float("inf"), 0.0, top)
            probs = tl.exp2(z - base[:, None])
            shrink = tl.exp2(previous - base)
            total = total * shrink + tl.sum(probs, 1)
            if DROPOUT:
                kept = _kept(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                probs = tl.where(kept, probs, 0.0)
            v = _tile(V + b * v_b + h * v_h, columns, v_n, S, phase == 1, D, WIDTH)
            out = tl.dot(probs.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    # A row with nothing left is zeros; its total of -inf has no effect where all is excluded.
    factor = keep_scale / tl.where(total == 0, 1.0, total)
    _store_tile(OUT + b * o_b + h * o_h, rows, o_n, T, out * factor[:, None], D, WIDTH)
    tl.store(TOTAL + bh.to(tl.int64) * T + rows, top + tl.log2(total), mask=rows < T)


@triton.jit(do_not_specialize=_VARYING)
def query_kernel(
    Q, K, V, OUT, TOTAL, TABLE, MASK, GRAD, DELTA, GRAD_Q, SUMS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gq_b, gq_h, gq_n,
    heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CAP: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    EXACT: tl.constexpr, SUMMED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program a block of queries: GRAD_Q, DELTA (B, H, T) and, if SUMMED, a row of SUMS.

    DELTA is the mean of the probabilities' gradients, which is the product of OUT and its gradient.
    EXACT forms the mean itself, from the very numbers it is taken from later: float32 is chosen
    for its accuracy, which the rounding of OUT would spoil.
    """
    blocks = tl.cdiv(T, BLOCK_T)
    block = tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    bh = tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    folded = fold(TABLE, h, scale, _LOG2_E, LOW, HIGH)
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    q = _tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
    grad = _tile(GRAD + b * g_b + h * g_h, rows, g_n, T, True, D, WIDTH)
    out = _tile(OUT + b * o_b + h * o_h, rows, o_n, T, True, D, WIDTH)
    delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    row = bh.to(tl.int64) * T + rows
    total = tl.load(TOTAL + row, mask=rows < T, other=float("inf"))

    grad_q = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    zero = tl.zeros([BLOCK_T], tl.float32)
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    end, inner = S, S // BLOCK_S * BLOCK_S
    if CAUSAL:
        end = tl.minimum(S, t0 + BLOCK_T)
        inner = tl.minimum(S, t0 + 1) // BLOCK_S * BLOCK_S
    weight, weighted = zero, zero
    for phase in tl.static_range(0 if EXACT else 2, 4):
        if EXACT and phase == 2:
            delta = weighted / tl.where(weight == 0, 1.0, weight)
        for s0 in range(inner if phase % 2 == 1 else 0, end if phase % 2 == 1 else inner, BLOCK_S):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = _tile(K + b * k_b + h * k_h, columns, k_n, S, phase % 2 == 1, D, WIDTH)
            v = _tile(V + b * v_b + h * v_h, columns, v_n, S, phase % 2 == 1, D, WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            z = sigma(scores, folded[1] - total[:, None], folded, LOW, HIGH, CAP)
            if MASKING > 0:
                mask = MASK + b * m_b + h * m_h
                excluded = _excluded(
                    mask, rows[:, None], columns[None, :], m_t, m_s, T, S, MASKING == 2
                )
                z = tl.where(excluded, -float("inf"), z)
            if phase % 2 == 1:
                allowed = columns[None, :] < S
                if CAUSAL:
                    allowed = allowed & (columns[None, :] <= rows[:, None])
                z = tl.where(allowed, z, -float("inf"))
            probs = tl.exp2(z)
            grad_probs = tl.dot(grad, tl.trans(v), input_precision="ieee")
            if DROPOUT:
                kept = _kept(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                grad_probs = tl.where(kept, grad_probs * keep_scale, 0.0)
            if phase < 2:
                weight += tl.sum(probs, 1)
                weighted += tl.sum(probs * grad_probs, 1)
            else:
                grad_z = probs * (grad_probs - delta[:, None])
                if SUMMED:
                    grad_scores, sums = sigma_backward_and_sums(
                        scores, grad_z, sums, folded, 1, LOW, HIGH, CAP
                    )
                else:
                    grad_scores = sigma_backward(scores, grad_z, folded, LOW, HIGH, CAP)
                grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision="ieee")
    tl.store(DELTA + row, delta, mask=rows < T)
    _store_tile(GRAD_Q + b * gq_b + h * gq_h, rows, gq_n, T, grad_q * scale, D, WIDTH)
    if SUMMED:
        grads = table_gradients(sums, folded, scale, LOW, HIGH)
        first = SUMS + (bh * blocks + block).to(tl.int64) * 8
        for column in tl.static_range(8):
            tl.store(first + column, tl.sum(grads[column], 0))


@triton.jit(do_not_specialize=_VARYING)
def key_kernel(
    Q, K, V, TOTAL, TABLE, MASK, GRAD, DELTA, GRAD_K, GRAD_V,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n,
    heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    CAP: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """A program a block of keys: GRAD_K and GRAD_V. Tiles are transposed: (keys, queries)."""
    blocks = tl.cdiv(S, BLOCK_S)
    s0 = tl.program_id(0) % blocks * BLOCK_S
    bh = tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    folded = fold(TABLE, h, scale, _LOG2_E, LOW, HIGH)
    columns = s0 + tl.arange(0, BLOCK_S)
    k = _tile(K + b * k_b + h * k_h, columns, k_n, S, True, D, WIDTH)
    v = _tile(V + b * v_b + h * v_h, columns, v_n, S, True, D, WIDTH)

    grad_k = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    grad_v = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    # Queries of which only some may attend to these keys, then whole blocks, then the edge.
    first, inner = 0, 0
    if CAUSAL:
        first = s0 // BLOCK_T * BLOCK_T
        inner = tl.minimum(tl.cdiv(s0 + BLOCK_S, BLOCK_T) * BLOCK_T, tl.cdiv(T, BLOCK_T) * BLOCK_T)
    outer = tl.maximum(inner, T // BLOCK_T * BLOCK_T)
    for phase in tl.static_range(0 if CAUSAL else 1, 3):
        begin = first if phase == 0 else inner if phase == 1 else outer
        end = inner if phase == 0 else outer if phase == 1 else T
        for t0 in range(begin, end, BLOCK_T):
            rows = t0 + tl.arange(0, BLOCK_T)
            q = _tile(Q + b * q_b + h * q_h, rows, q_n, T, phase != 1, D, WIDTH)
            grad = _tile(GRAD + b * g_b + h * g_h, rows, g_n, T, phase != 1, D, WIDTH)
            row = bh.to(tl.int64) * T + rows
            if phase != 1:  # a total of inf gives queries beyond the last one probabilities of zero
                total = tl.load(TOTAL + row, mask=rows < T, other=float("inf"))
                delta = tl.load(DELTA + row, mask=rows < T, other=0.0)
            else:
                total = tl.load(TOTAL + row)
                delta = tl.load(DELTA + row)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            z = sigma(scores, folded[1] - total[None, :], folded, LOW, HIGH, CAP)
            if MASKING > 0:
                mask = MASK + b * m_b + h * m_h
                excluded = _excluded(
                    mask, rows[None, :], columns[:, None], m_t, m_s, T, S, MASKING == 2
                )
                z = tl.where(excluded, -float("inf"), z)
            if phase == 0:
                z = tl.where(columns[:, None] <= rows[None, :], z, -float("inf"))
            probs = tl.exp2(z)
            grad_probs = tl.dot(v, tl.trans(grad), input_precision="ieee")
            dropped = probs
            if DROPOUT:
                kept = tl.trans(_kept(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S))
                grad_probs = tl.where(kept, grad_probs * keep_scale, 0.0)
                dropped = tl.where(kept, probs * keep_scale, 0.0)
            grad_v = tl.dot(dropped.to(grad.dtype), grad, grad_v, input_precision="ieee")
            grad_z = probs * (grad_probs - delta[None, :])
            grad_scores = sigma_backward(scores, grad_z, folded, LOW, HIGH, CAP)
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision="ieee")
    _store_tile(GRAD_K + b * gk_b + h * gk_h, columns, gk_n, S, grad_k * scale, D, WIDTH)
    _store_tile(GRAD_V + b * gv_b + h * gv_h, columns, gv_n, S, grad_v, D, WIDTH)


class _Launch(NamedTuple):
    """Block sizes in queries and keys, warps a program, and stages of the loop's pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By the padded head size. Chosen from the compiler's report for sm_90 (registers, spills and
# instructions a score): small blocks, of which several share a processor, so that one's arithmetic
# on scores overlaps another's matrix products.
FORWARD = {64: _Launch(64, 64, 4, 2), 128: _Launch(64, 64, 4, 2)}
QUERIES = {64: _Launch(64, 64, 4, 2), 128: _Launch(64, 32, 4, 2)}
KEYS = {64: _Launch(64, 64, 4, 2), 128: _Launch(32, 64, 4, 2)}
# Its products use no tensor cores.
FLOAT32 = {64: _Launch(32, 32, 4, 2), 128: _Launch(32, 32, 8, 2)}


def launch(table: dict[int, _Launch], dtype: torch.dtype, width: int) -> dict[str, int]:
    """The keyword arguments of a kernel that depend on the element type and head size alone."""
    chosen = (FLOAT32 if dtype == torch.float32 else table)[max(width, 64)]
    return {
        "BLOCK_T": chosen.queries,
        "BLOCK_S": chosen.keys,
        "num_warps": chosen.num_warps,
        "num_stages": chosen.num_stages,
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    order: int = 2,
    terms: str = "both",
) -> Tensor:
    """Return attention over modulated scores, in tiles.

        O = dropout(softmax(sigma(scale * Q K^T), where not mask)) V
    Equivalent to: scaled_dot_product_attention(query, key, value, modulator=..., attn_mask=~mask)

    Args:
        query: (B, H, T, D), float16, bfloat16 or float32, D up to 128, any strides.
        key, value: (B, H, S, D), of the same dtype.
        table: (H, 8) float32, low_coefficient[1..2], low_threshold[1..2], high_coefficient[1..2],
            high_threshold[1..2] a head; None is softmax.
        mask: bool, broadcastable to (B, H, T, S), never expanded; True excludes. A query with
            nothing left gets zeros.
        is_causal: query t attends to keys up to t; together with mask, both hold.
        dropout_p: probability of dropping an attention probability, drawn from torch's CPU
            generator.
        scale: default 1 / sqrt(D).
        order, terms: as in `Modulator`; columns that they leave out of the table are not read.

    Returns:
        (B, H, T, D), in the dtype of query, with query's order of dimensions in memory.
        Differentiable once, in query, key, value and table.

    Raises:
        ValueError: a head size above 128; dtypes that differ or are not served; a mask that is
            not bool; a table of another shape or dtype.
    """
    _check(query, key, value, table, mask)
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    elif scale <= 0:  # the thresholds are divided by it
        query, scale = query * scale, 1.0
    low = order if table is not None and terms != "high" else 0
    high = order if table is not None and terms != "low" else 0
    options = _Options(is_causal, dropout_p, scale, low, high)
    return _Attention.apply(query, key, value, table, mask, options)


def _check(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor | None, mask: Tensor | None
) -> None:
    if query.shape[-1] > MAX_HEAD_SIZE:
        raise ValueError(
            f"the kernel serves head sizes up to {MAX_HEAD_SIZE}, got {query.shape[-1]}"
        )
    dtypes = {query.dtype, key.dtype, value.dtype}
    if len(dtypes) != 1 or not dtypes <= {torch.float16, torch.bfloat16, torch.float32}:
        raise ValueError(
            "query, key and value must share float16, bfloat16 or float32, got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"the mask must be bool (True excludes), got {mask.dtype}")
    if table is not None:
        expected = (query.shape[1], COLUMNS)
        if tuple(table.shape) != expected or table.dtype != torch.float32:
            raise ValueError(
                f"the table must be float32 of shape {expected}, got {table.dtype} of shape "
                f"{tuple(table.shape)}"
            )


class _Options(NamedTuple):
    is_causal: bool
    dropout_p: float
    scale: float
    low: int
    high: int


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        mask: Tensor | None,
        options: _Options,
    ) -> Tensor:
        query, key, value = (_with_unit_last_stride(t) for t in (query, key, value))
        batch, heads, length, size = query.shape
        table = None if table is None else table.contiguous()
        masking = 0
        if mask is not None:
            # The same for all queries: read as a vector.
            masking = 1 if mask.dim() < 2 or mask.shape[-2] == 1 else 2
            mask = mask.expand(batch, heads, length, key.shape[2]).view(torch.uint8)
        m_b, m_h, m_t, m_s = (0, 0, 0, 0) if mask is None else mask.stride()
        dropout_p = options.dropout_p
        arguments = _strides(q=query, k=key, v=value) | {
            "m_b": m_b,
            "m_h": m_h,
            "m_t": m_t,
            "m_s": m_s,
            "heads": heads,
            "T": length,
            "S": key.shape[2],
            "scale": options.scale,
            # From the CPU's generator, so that a seed reproduces it and no device is waited for.
            "seed": int(torch.randint(2**31 - 1, ())) if dropout_p > 0 else 0,
            "threshold": min(round(dropout_p * 2**31), 2**31 - 1),
            "keep_scale": 1 / (1 - dropout_p) if dropout_p < 1 else 0.0,
            "D": size,
            "WIDTH": max(16, triton.next_power_of_2(size)),
            "LOW": options.low,
            "HIGH": options.high,
            # No product of two float16 rows comes near the cap.
            "CAP": query.dtype != torch.float16,
            "MASKING": masking,
            "CAUSAL": options.is_causal,
            "DROPOUT": dropout_p > 0,
            # The coefficients are folded so that a term is one fused multiplication and addition.
            "enable_fp_fusion": True,
        }
        out = _empty_like(query)
        total = query.new_empty((batch, heads, length), dtype=torch.float32)
        if out.numel() > 0:
            chosen = launch(FORWARD, query.dtype, arguments["WIDTH"])
            programs = triton.cdiv(length, chosen["BLOCK_T"]) * batch * heads
            with torch.cuda.device_of(query):
                forward_kernel[(programs,)](
                    Q=query, K=key, V=value, OUT=out, TOTAL=total, TABLE=table, MASK=mask,
                    **_strides(o=out), **arguments, **chosen,
                )  # fmt: skip
        ctx.save_for_backward(query, key, value, table, mask, out, total)
        ctx.arguments = arguments
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, table, mask, out, total = ctx.saved_tensors
        if out.numel() == 0:
            inputs = (query, key, value, table)
            return (*(None if t is None else torch.zeros_like(t) for t in inputs), None, None)
        grad = _with_unit_last_stride(grad)
        batch, heads, length, _ = query.shape
        width = ctx.arguments["WIDTH"]
        delta = torch.empty_like(total)
        shared = _strides(g=grad) | ctx.arguments
        shared |= {"Q": query, "K": key, "V": value, "TOTAL": total, "TABLE": table, "MASK": mask}
        shared |= {"GRAD": grad, "DELTA": delta}
        grad_query, grad_key, grad_value = (_empty_like(t) for t in (query, key, value))
        sums = None
        with torch.cuda.device_of(query):
            chosen = launch(QUERIES, query.dtype, width)
            blocks = triton.cdiv(length, chosen["BLOCK_T"])
            if ctx.needs_input_grad[3]:
                sums = total.new_empty((batch, heads, blocks, COLUMNS))
            query_kernel[(blocks * batch * heads,)](
                OUT=out, GRAD_Q=grad_query, SUMS=sums, SUMMED=sums is not None,
                EXACT=query.dtype == torch.float32,
                **_strides(o=out, gq=grad_query), **shared, **chosen,
            )  # fmt: skip
            if (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]) and key.numel() > 0:
                chosen = launch(KEYS, query.dtype, width)
                blocks = triton.cdiv(key.shape[2], chosen["BLOCK_S"])
                key_kernel[(blocks * batch * heads,)](
                    GRAD_K=grad_key, GRAD_V=grad_value,
                    **_strides(gk=grad_key, gv=grad_value), **shared, **chosen,
                )  # fmt: skip
        grad_table = None if sums is None else sums.sum((0, 2))
        return grad_query, grad_key, grad_value, grad_table, None, None


def _with_unit_last_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _empty_like(t: Tensor) -> Tensor:
    """Uninitialised, in t's order of dimensions, with unit last stride."""
    out = torch.empty_like(t)
    return out if out.stride(-1) == 1 else out.new_empty(t.shape)


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {
        f"{name}_{axis}": stride
        for name, tensor in tensors.items()
        for axis, stride in zip("bhn", tensor.stride(), strict=False)
    }
