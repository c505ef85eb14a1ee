"""Triton kernels of attention with modulated scores.

The kernels compute the scores tile by tile, so no (T, S) tensor exists. Exactly one program writes
each result, without atomics, so results are reproducible to the last bit. Common arguments:

    Q, GRAD: (B, H, T, D). K, V: (B, H, S, D).
    PARAMETERS: one row per head, with the row stride t_h.
    MASK: (B, H, T, S), with the strides m_*.
    SINK: (H,), the score of an extra entry without a key; -inf means no sink.
    scale: positive.
    threshold: dropout keeps a probability if its random number is at least the threshold.
    D, WIDTH: the head size, and the head size padded to a power of two.
    COLUMNS, LOW, HIGH, CAP: as in `modulator.py`.
    MASKING: 0 no mask; 1 or 2 a mask whose nonzero entries exclude; 3 or 4 a float mask that is
        added to the modulated scores; -inf excludes. With 1 and 3, all queries share one row.

Modulated scores and logarithms use base 2, because exp2 saves one instruction per score. With a
float mask they use base e: multiplying the mask by log2(e) could overflow its most negative value.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from multimax_fairseq.ops.triton.modulator import (
    fold,
    sigma,
    sigma_backward,
    sigma_backward_and_sums,
    store_parameter_gradients,
    zero_sums,
)

_LOG2_E = tl.constexpr(math.log2(math.e))
# Triton must not compile a kernel again for a new length or seed.
_UNSPECIALIZED = ["heads", "T", "S", "t_h", "seed", "threshold"]
# Rounds of Philox: the smallest number that passes the usual statistical tests.
_ROUNDS = tl.constexpr(7)
# Above this value, the rounding error of a total is visible in half-precision probabilities.
_LARGE_TOTAL = tl.constexpr(1024.0)


@triton.jit
def load_tile(
    start, rows, stride, limit, BOUNDED: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr
):
    """Load rows of a (limit, D) matrix as (rows, WIDTH), zero-padded. BOUNDED checks the rows."""
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
def store_tile(start, rows, stride, limit, tile, D: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    pointers = start + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows[:, None] < limit) & (columns[None, :] < D)
    tl.store(pointers, tile.to(start.dtype.element_ty), mask=inside)


@triton.jit
def _unit(MASKING: tl.constexpr):
    """Return the factor of modulated scores and logarithms: 1 for base e, log2(e) for base 2."""
    if MASKING > 2:
        return 1.0
    else:
        return _LOG2_E


@triton.jit
def _power(z, MASKING: tl.constexpr):
    if MASKING > 2:
        return tl.exp(z)
    else:
        return tl.exp2(z)


@triton.jit
def _logarithm(total, MASKING: tl.constexpr):
    if MASKING > 2:
        return tl.log(total)
    else:
        return tl.log2(total)


@triton.jit
def _sink(SINK, h, MASKING: tl.constexpr, SINKS: tl.constexpr):
    """Return the score of the sink in the unit of modulated scores."""
    if SINKS:
        return tl.load(SINK + h) * _unit(MASKING)
    else:
        return -float("inf")


@triton.jit
def exclude(
    z, rows, columns, mask, m_t, m_s, T, S, MASKING: tl.constexpr, CAUSAL: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Return z plus a float mask, and -inf for excluded keys.

    rows, columns: the indices of queries and keys, which broadcast to the shape of z. EDGE: some
    keys are beyond S or, if CAUSAL, after a query.
    """
    if MASKING > 0:
        # Clamp the indices: out-of-range queries and keys read the last entry. It has no effect.
        seen = tl.minimum(columns, S - 1) if EDGE else columns
        pointers = mask + seen.to(tl.int64) * m_s
        if MASKING % 2 == 0:
            pointers = pointers + tl.minimum(rows, T - 1).to(tl.int64) * m_t
        if MASKING <= 2:
            z = tl.where(tl.load(pointers) != 0, -float("inf"), z)
        else:
            z = z + tl.load(pointers)
    if EDGE:
        allowed = columns < S
        if CAUSAL:
            allowed = allowed & (columns <= rows)
        z = tl.where(allowed, z, -float("inf"))
    return z


@triton.jit
def _modulated(
    scores, total, rows, columns, folded, mask, m_t, m_s, T, S,
    LOW: tl.constexpr, HIGH: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr,
    MASKING: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return the modulated and masked scores minus total; arguments as in `exclude`.

    scores: (queries, keys) or transposed.
    """
    if MASKING <= 2:
        z = sigma(scores, folded[1] - total, folded, LOW, HIGH, COLUMNS, CAP)
        return exclude(z, rows, columns, mask, m_t, m_s, T, S, MASKING, CAUSAL, EDGE)
    else:
        # Add the mask before subtracting total, so that -1e9 rounds z alike in every pass.
        z = sigma(scores, folded[1], folded, LOW, HIGH, COLUMNS, CAP)
        return exclude(z, rows, columns, mask, m_t, m_s, T, S, MASKING, CAUSAL, EDGE) - total


@triton.jit
def dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return which entries dropout keeps, (BLOCK_T, BLOCK_S): a hash of seed and (b, h, t, s)."""
    # One call of Philox makes 16-bit random numbers for eight neighbouring keys.
    zero = tl.zeros([BLOCK_T, BLOCK_S // 8], tl.int32)
    t = zero + (t0 + tl.arange(0, BLOCK_T))[:, None]
    s = zero + (s0 // 8 + tl.arange(0, BLOCK_S // 8))[None, :]
    a, b, c, d = tl.philox(seed, s, t, zero + bh, zero, _ROUNDS)
    bits = tl.join(tl.join(a, c), tl.join(b, d))
    bits = tl.join(bits & 0xFFFF, bits >> 16).reshape(BLOCK_T, BLOCK_S)
    return bits.to(tl.int32) >= threshold


@triton.jit
def query_block(T, heads, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the program's block of queries, the number of blocks, b * H + h, b and h."""
    blocks = tl.cdiv(T, BLOCK_T)
    block = tl.program_id(0) % blocks
    if CAUSAL:  # start the longest rows first
        block = blocks - 1 - block
    bh = tl.program_id(0) // blocks
    return block, blocks, bh, (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)


@triton.jit
def key_range(t0, S, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):
    """Return the end of the key blocks that need no bounds or causal check, and of all keys."""
    if CAUSAL:
        return tl.minimum(S, t0 + 1) // BLOCK_S * BLOCK_S, tl.minimum(S, t0 + BLOCK_T)
    else:
        return S // BLOCK_S * BLOCK_S, S


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def forward_kernel(
    Q, K, V, OUT, TOTAL, PARAMETERS, SINK, MASK,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    t_h, heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, MASKING: tl.constexpr, SINKS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute OUT and TOTAL (B, H, T), the log-sum-exp of each row; one program per query block.

    The output of a row without allowed keys is 0. Its total is inf, so all probabilities are 0.
    """
    block, _, bh, b, h = query_block(T, heads, CAUSAL, BLOCK_T)
    folded = fold(PARAMETERS, h * t_h, scale, _unit(MASKING), LOW, HIGH, COLUMNS)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)

    sink = _sink(SINK, h, MASKING, SINKS)
    top = tl.zeros([BLOCK_T], tl.float32) + sink
    total = tl.where(top == -float("inf"), 0.0, 1.0)
    out = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    for phase in tl.static_range(2):
        begin, stop = inner if phase == 1 else 0, end if phase == 1 else inner
        for s0 in tl.range(begin, stop, BLOCK_S, num_stages=STAGES, disable_licm=STAGES == 1):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(K + b * k_b + h * k_h, columns, k_n, S, phase == 1, D, WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            z = _modulated(
                scores, 0.0, rows[:, None], columns[None, :], folded, mask, m_t, m_s, T, S,
                LOW, HIGH, COLUMNS, CAP, MASKING, CAUSAL, phase == 1,
            )  # fmt: skip
            previous = top
            top = tl.maximum(top, tl.max(z, 1))
            # If all scores so far are -inf, a finite base avoids -inf - (-inf) = NaN.
            base = tl.where(top == -float("inf"), 0.0, top)
            probs = _power(z - base[:, None], MASKING)
            shrink = _power(previous - base, MASKING)
            total = total * shrink + tl.sum(probs, 1)
            if DROPOUT:
                kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                probs = tl.where(kept, probs, 0.0)
            v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, phase == 1, D, WIDTH)
            out = tl.dot(probs.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    empty = total == 0
    factor = keep_scale / tl.where(empty, 1.0, total)
    if SINKS:
        factor = tl.where(sink < float("inf"), factor, float("nan"))
    store_tile(OUT + b * o_b + h * o_h, rows, o_n, T, out * factor[:, None], D, WIDTH)
    total = tl.where(empty, float("inf"), top + _logarithm(total, MASKING))
    if SINKS:  # a sink of NaN or inf gives NaN
        total = tl.where(sink < float("inf"), total, float("nan"))
    tl.store(TOTAL + bh.to(tl.int64) * T + rows, total, mask=rows < T)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def mean_kernel(
    Q, K, V, OUT, TOTAL, PARAMETERS, SINK, MASK, GRAD, DELTA, NORM,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, t_h, heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, MASKING: tl.constexpr, SINKS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, EXACT: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute accurate DELTA and NORM (B, H, T); one program per query block.

    It runs for float32, which sets EXACT, and for float masks, which need NORM.

    EXACT: DELTA is sum p * grad_probs, computed from the same numbers that it is later subtracted
        from. Otherwise it is the product of OUT and its gradient, which contains the rounding error
        of OUT.
    NORM: the factor that makes the probabilities of a row, including the sink's, sum to 1. If a
        mask adds -1e9 to a whole row, rounding removes the logarithm of the sum from its total.
    """
    block, _, bh, b, h = query_block(T, heads, CAUSAL, BLOCK_T)
    folded = fold(PARAMETERS, h * t_h, scale, _unit(MASKING), LOW, HIGH, COLUMNS)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    row = bh.to(tl.int64) * T + rows
    q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
    grad = load_tile(GRAD + b * g_b + h * g_h, rows, g_n, T, True, D, WIDTH)
    total = tl.load(TOTAL + row, mask=rows < T, other=float("inf"))

    weight = _power(_sink(SINK, h, MASKING, SINKS) - total, MASKING)
    weighted = tl.zeros([BLOCK_T], tl.float32)
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    if not EXACT:
        size = tl.where(total < float("inf"), tl.abs(total), 0.0)
        is_large = tl.max(size, 0) > _LARGE_TOTAL
        inner, end = tl.where(is_large, inner, 0), tl.where(is_large, end, 0)
        weight = tl.where(is_large, weight, 0.0)
    for phase in tl.static_range(2):
        begin, stop = inner if phase == 1 else 0, end if phase == 1 else inner
        for s0 in tl.range(begin, stop, BLOCK_S, num_stages=STAGES, disable_licm=STAGES == 1):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(K + b * k_b + h * k_h, columns, k_n, S, phase == 1, D, WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            z = _modulated(
                scores, total[:, None], rows[:, None], columns[None, :], folded, mask, m_t, m_s,
                T, S, LOW, HIGH, COLUMNS, CAP, MASKING, CAUSAL, phase == 1,
            )  # fmt: skip
            probs = _power(z, MASKING)
            weight += tl.sum(probs, 1)
            if EXACT:
                v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, phase == 1, D, WIDTH)
                grad_probs = tl.dot(grad, tl.trans(v), input_precision="ieee")
                if DROPOUT:
                    kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                    grad_probs = tl.where(kept, grad_probs * keep_scale, 0.0)
                weighted += tl.sum(probs * grad_probs, 1)
    norm = 1 / tl.where(weight == 0, 1.0, weight)
    if EXACT:
        delta = weighted * norm
    else:
        out = load_tile(OUT + b * o_b + h * o_h, rows, o_n, T, True, D, WIDTH)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(DELTA + row, delta, mask=rows < T)
    tl.store(NORM + row, norm, mask=rows < T)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def query_kernel(
    Q, K, V, OUT, TOTAL, PARAMETERS, MASK, GRAD, DELTA, NORM, GRAD_QUERY, SUMS, MEANS,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gq_b, gq_h, gq_n, t_h, heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, MASKING: tl.constexpr, SINKS: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, NORMED: tl.constexpr, SUMMED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_QUERY and, if SUMMED, a row of SUMS; one program per query block.

    DELTA (B, H, T) is sum p * grad_probs, the mean of the probabilities' gradients. If NORMED, it
    comes from `mean_kernel`; otherwise this kernel computes it as the product of OUT and its
    gradient. If SINKS, MEANS (B, H, T) is the same mean without the rounding of OUT, because the
    gradient of the sink is a sum over MEANS alone.
    """
    block, blocks, bh, b, h = query_block(T, heads, CAUSAL, BLOCK_T)
    folded = fold(PARAMETERS, h * t_h, scale, _unit(MASKING), LOW, HIGH, COLUMNS)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    row = bh.to(tl.int64) * T + rows
    q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
    grad = load_tile(GRAD + b * g_b + h * g_h, rows, g_n, T, True, D, WIDTH)
    total = tl.load(TOTAL + row, mask=rows < T, other=float("inf"))
    if NORMED:
        delta = tl.load(DELTA + row, mask=rows < T, other=0.0)
        norm = tl.load(NORM + row, mask=rows < T, other=0.0)
    else:
        out = load_tile(OUT + b * o_b + h * o_h, rows, o_n, T, True, D, WIDTH)
        delta = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        tl.store(DELTA + row, delta, mask=rows < T)
        norm = 1.0

    # Accumulate a tile: a row sum in each iteration would need more registers than are available.
    weighted = tl.zeros([BLOCK_T, BLOCK_S], tl.float32)
    grad_query = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    sums = zero_sums(tl.zeros([BLOCK_T, BLOCK_S], tl.float32), COLUMNS)
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    for phase in tl.static_range(2):
        begin, stop = inner if phase == 1 else 0, end if phase == 1 else inner
        for s0 in tl.range(begin, stop, BLOCK_S, num_stages=STAGES, disable_licm=STAGES == 1):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(K + b * k_b + h * k_h, columns, k_n, S, phase == 1, D, WIDTH)
            v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, phase == 1, D, WIDTH)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            z = _modulated(
                scores, total[:, None], rows[:, None], columns[None, :], folded, mask, m_t, m_s,
                T, S, LOW, HIGH, COLUMNS, CAP, MASKING, CAUSAL, phase == 1,
            )  # fmt: skip
            probs = _power(z, MASKING)
            grad_probs = tl.dot(grad, tl.trans(v), input_precision="ieee")
            if DROPOUT:
                kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                grad_probs = tl.where(kept, grad_probs * keep_scale, 0.0)
            if SINKS:
                weighted += probs * grad_probs
            grad_z = probs * (grad_probs - delta[:, None])
            if NORMED:
                grad_z *= norm[:, None]
            if SUMMED:
                grad_scores, sums = sigma_backward_and_sums(
                    scores, grad_z, sums, folded, LOW, HIGH, COLUMNS, CAP
                )
            else:
                grad_scores = sigma_backward(scores, grad_z, folded, LOW, HIGH, COLUMNS, CAP)
            grad_query = tl.dot(grad_scores.to(k.dtype), k, grad_query, input_precision="ieee")
    if SINKS:
        tl.store(MEANS + row, tl.sum(weighted, 1) * norm, mask=rows < T)
    store_tile(GRAD_QUERY + b * gq_b + h * gq_h, rows, gq_n, T, grad_query * scale, D, WIDTH)
    if SUMMED:
        store_parameter_gradients(
            SUMS, bh * blocks + block, sums, folded, scale, LOW, HIGH, COLUMNS
        )


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def key_kernel(
    Q, K, V, TOTAL, PARAMETERS, MASK, GRAD, DELTA, NORM, GRAD_KEY, GRAD_VALUE,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n,
    t_h, heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    COLUMNS: tl.constexpr, CAP: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr,
    DROPOUT: tl.constexpr, NORMED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_KEY and GRAD_VALUE; one program per key block. Tiles are (keys, queries)."""
    blocks = tl.cdiv(S, BLOCK_S)
    s0 = tl.program_id(0) % blocks * BLOCK_S
    bh = tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    folded = fold(PARAMETERS, h * t_h, scale, _unit(MASKING), LOW, HIGH, COLUMNS)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    columns = s0 + tl.arange(0, BLOCK_S)
    k = load_tile(K + b * k_b + h * k_h, columns, k_n, S, True, D, WIDTH)
    v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, True, D, WIDTH)
    # Keys beyond the last one read the last one's mask; their gradients are not stored.
    seen = tl.minimum(columns, S - 1)

    grad_key = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    grad_value = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    # Phase 0: query blocks on the causal diagonal. Phase 1: full blocks. Phase 2: the rest.
    first, inner = 0, 0
    if CAUSAL:
        first = s0 // BLOCK_T * BLOCK_T
        inner = tl.minimum(tl.cdiv(s0 + BLOCK_S, BLOCK_T) * BLOCK_T, tl.cdiv(T, BLOCK_T) * BLOCK_T)
    outer = tl.maximum(inner, T // BLOCK_T * BLOCK_T)
    for phase in tl.static_range(0 if CAUSAL else 1, 3):
        begin = first if phase == 0 else inner if phase == 1 else outer
        end = inner if phase == 0 else outer if phase == 1 else T
        for t0 in tl.range(begin, end, BLOCK_T, num_stages=STAGES, disable_licm=STAGES == 1):
            rows = t0 + tl.arange(0, BLOCK_T)
            q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, phase != 1, D, WIDTH)
            grad = load_tile(GRAD + b * g_b + h * g_h, rows, g_n, T, phase != 1, D, WIDTH)
            row = bh.to(tl.int64) * T + rows
            if phase != 1:  # out-of-range queries: a total of inf makes their probabilities 0
                total = tl.load(TOTAL + row, mask=rows < T, other=float("inf"))
                delta = tl.load(DELTA + row, mask=rows < T, other=0.0)
            else:
                total = tl.load(TOTAL + row)
                delta = tl.load(DELTA + row)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            z = _modulated(
                scores, total[None, :], rows[None, :], seen[:, None], folded, mask, m_t, m_s,
                T, S, LOW, HIGH, COLUMNS, CAP, MASKING, CAUSAL, phase == 0,
            )  # fmt: skip
            probs = _power(z, MASKING)
            if NORMED:
                probs *= tl.load(NORM + row, mask=rows < T, other=0.0)[None, :]
            grad_probs = tl.dot(v, tl.trans(grad), input_precision="ieee")
            dropped = probs
            if DROPOUT:
                kept = tl.trans(dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S))
                grad_probs = tl.where(kept, grad_probs * keep_scale, 0.0)
                dropped = tl.where(kept, probs * keep_scale, 0.0)
            grad_value = tl.dot(dropped.to(grad.dtype), grad, grad_value, input_precision="ieee")
            grad_z = probs * (grad_probs - delta[None, :])
            grad_scores = sigma_backward(scores, grad_z, folded, LOW, HIGH, COLUMNS, CAP)
            grad_key = tl.dot(grad_scores.to(q.dtype), q, grad_key, input_precision="ieee")
    store_tile(GRAD_KEY + b * gk_b + h * gk_h, columns, gk_n, S, grad_key * scale, D, WIDTH)
    store_tile(GRAD_VALUE + b * gv_b + h * gv_h, columns, gv_n, S, grad_value, D, WIDTH)
