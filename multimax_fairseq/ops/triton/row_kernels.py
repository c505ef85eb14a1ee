"""Triton kernels of attention by row functions, the mappings that need all scores of a query.

As in AdaSplash (Goncalves et al. 2025), each program makes several passes over the keys and
recomputes the scores in each, so no (T, S) tensor exists. Arguments as in `attention_kernels.py`,
and:

    FUNCTION: the index in `ops.row_function.FUNCTIONS`.
    PARAMETER: (H,), as `RowFunction.parameter`, or None.
    STATISTICS: (B, H, 3, T): top, threshold and factor of each row, as in cpp/row_functions.h.
    MEAN: (B, H, T): subtracted from the gradient of each weight.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multimax_fairseq.ops.row_function import FUNCTIONS
from multimax_fairseq.ops.triton.attention_kernels import (
    dropout_mask,
    exclude,
    key_range,
    load_tile,
    query_block,
    store_tile,
)

_UNSPECIALIZED = ["heads", "T", "S", "seed", "threshold"]
_TOPK = tl.constexpr(FUNCTIONS.index("topk"))
_EVSOFTMAX = tl.constexpr(FUNCTIONS.index("evsoftmax"))
_SPARSEMAX = tl.constexpr(FUNCTIONS.index("sparsemax"))
_ENTMAX15 = tl.constexpr(FUNCTIONS.index("entmax15"))
_ALPHA_ENTMAX = tl.constexpr(FUNCTIONS.index("alpha_entmax"))
_SIGMOID = tl.constexpr(FUNCTIONS.index("sigmoid"))
_SOFTPICK = tl.constexpr(FUNCTIONS.index("softpick"))
# The quantities of `_sum_rows`.
_EXTREMES, _REACHING, _WEIGHTS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_MAX_STEPS = tl.constexpr(60)


@triton.constexpr_function
def _is_entmax(function):
    return FUNCTIONS[function] in ("sparsemax", "entmax15", "alpha_entmax")


@triton.jit
def _parameter(PARAMETER, h, FUNCTION: tl.constexpr):
    """Return the step alpha - 1, the factor of low scores, k, or the bias."""
    if FUNCTION == _SPARSEMAX:
        return 1.0
    elif FUNCTION == _ENTMAX15:
        return 0.5
    elif FUNCTION == _SOFTPICK:
        return 0.0
    elif FUNCTION == _ALPHA_ENTMAX:
        alpha = tl.load(PARAMETER + h)
        return tl.where((alpha > 1) & (alpha <= 2), alpha - 1, float("nan"))
    else:
        return tl.load(PARAMETER + h)


@triton.jit
def _ordered(x):
    """Map the bits of floats to integers of the same order; it is its own inverse."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def _expm1(x):
    """Return exp(x) - 1 for x up to 1: the Taylor series where the difference would cancel."""
    y = x * 0.0 + 1 / 5040
    y = y * x + 1 / 720
    y = y * x + 1 / 120
    y = y * x + 1 / 24
    y = y * x + 1 / 6
    y = y * x + 0.5
    y = y * x + 1.0
    return tl.where(tl.abs(x) < 0.35, x * y, tl.exp(x) - 1)


@triton.jit
def _excess(x, top, shrink):
    """Return (exp(x) - 1) exp(-top), where shrink is exp(-top); 0 for an excluded key."""
    excess = tl.where(x < 1, _expm1(tl.where(x < 1, x, 1.0)) * shrink, tl.exp(x - top) - shrink)
    return tl.where(x == -float("inf"), 0.0, excess)


@triton.jit
def _distance(x, top, threshold, step):
    """Return v of entmax, at least -1: a weight is proportional to (1 + v)^(1 / step)."""
    v = step * (x - top) - threshold
    return tl.where(v <= -1, -1.0, v)  # keeps NaN


@triton.jit
def _log1p(v):
    """Return log(1 + v) without the rounding error of 1 + v."""
    u = 1 + v
    return tl.where(u == 1, v, tl.log(u) * (v / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def _entry(x, top, threshold, factor, parameter, FUNCTION: tl.constexpr):
    """Return the weight of a score and its slope; statistics broadcast to the shape of x."""
    if FUNCTION == _TOPK or FUNCTION == _EVSOFTMAX:
        rest = 0.0 if FUNCTION == _TOPK else parameter
        p = tl.exp(x - top) * factor
        weight = tl.where(x >= threshold, p + rest * p, rest * p)
        return weight, weight
    elif _is_entmax(FUNCTION):
        v = _distance(x, top, threshold, parameter)
        if FUNCTION == _SPARSEMAX:
            slope = tl.where(v > -1, 1.0, v + 1)
        elif FUNCTION == _ENTMAX15:
            slope = v + 1
        else:
            power = tl.exp((1 - parameter) / parameter * _log1p(tl.where(v > -1, v, 0.0)))
            slope = tl.where(v > -1, power, v + 1)
        return slope * (v + 1) * factor, slope
    elif FUNCTION == _SIGMOID:
        z = x + threshold
        p = 1 / (1 + tl.exp(-z))
        q = 1 / (1 + tl.exp(z))
        return p, p * q
    else:
        excess = _excess(x, top, threshold)
        slope = (excess + threshold) * factor
        slope = tl.where(excess < 0, -slope, tl.where(excess == 0, 0.0, slope))
        return tl.where(excess < 0, 0.0, excess * factor), slope


@triton.jit
def _gradient(slope, grad, mean, FUNCTION: tl.constexpr):
    """Return the gradient of a score, given that of its weight."""
    if FUNCTION == _SIGMOID:
        return slope * grad
    elif FUNCTION == _SOFTPICK:
        return slope * (tl.where(slope < 0, 0.0, grad) - mean)
    else:
        return slope * (grad - mean)


@triton.jit
def _scores(
    q, k, columns, rows, mask, m_t, m_s, T, S, scale,
    MASKING: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return the masked scores of a block of queries and a block of keys."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    x = exclude(x, rows[:, None], columns[None, :], mask, m_t, m_s, T, S, MASKING, CAUSAL, EDGE)
    return x


@triton.jit
def _sum_rows(
    q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, threshold, parameter, bound,
    D: tl.constexpr, WIDTH: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, FUNCTION: tl.constexpr,
    QUANTITY: tl.constexpr,
):  # fmt: skip
    """Go over all keys once; return two statistics of each row, and the number of keys.

    QUANTITY is _EXTREMES: the largest and the smallest score (evsoftmax: the sum of the scores in
    float64), and the number of keys. _REACHING: the number of scores of at least `bound`, an
    ordered integer. _WEIGHTS: the sums of the weights and of the slopes.
    """
    first = tl.zeros([BLOCK_T], tl.float32)
    second = tl.zeros([BLOCK_T], tl.float64 if FUNCTION == _EVSOFTMAX else tl.float32)
    count = tl.zeros([BLOCK_T], tl.float32)
    if QUANTITY == _EXTREMES:
        first = first - float("inf")
        if FUNCTION != _EVSOFTMAX:
            second = second + float("inf")
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    for phase in tl.static_range(2):
        begin, stop = inner if phase == 1 else 0, end if phase == 1 else inner
        for s0 in range(begin, stop, BLOCK_S):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(K, columns, k_n, S, phase == 1, D, WIDTH)
            x = _scores(
                q, k, columns, rows, mask, m_t, m_s, T, S, scale, MASKING, CAUSAL, phase == 1
            )
            if QUANTITY == _EXTREMES:
                allowed = x != -float("inf")
                has_nan = tl.max((x != x).to(tl.int32), 1) > 0
                count += tl.sum(allowed.to(tl.float32), 1)
                count = tl.where(has_nan, float("nan"), count)  # a maximum may drop it
                first = tl.maximum(first, tl.max(x, 1))
                if FUNCTION == _EVSOFTMAX:
                    second += tl.sum(tl.where(allowed, x, 0.0).to(tl.float64), 1)
                else:
                    second = tl.minimum(second, tl.min(tl.where(allowed, x, float("inf")), 1))
            elif QUANTITY == _REACHING:
                reaches = _ordered(x.to(tl.int32, bitcast=True)) >= bound[:, None]
                first += tl.sum(reaches.to(tl.float32), 1)
            elif FUNCTION == _SOFTPICK:
                first += tl.sum(tl.abs(_excess(x, top[:, None], threshold[:, None])), 1)
            else:
                weight, slope = _entry(
                    x, top[:, None], threshold[:, None], 1.0, parameter, FUNCTION
                )
                first += tl.sum(weight, 1)
                second += tl.sum(slope, 1)
    return first, second, count


@triton.jit
def _largest(
    q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, smallest, count, k,
    D: tl.constexpr, WIDTH: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Find by bisection a threshold that selects the k largest scores of each row, and ties."""
    low = _ordered(smallest.to(tl.int32, bitcast=True))
    high = _ordered(top.to(tl.int32, bitcast=True))
    reached, _, _ = _sum_rows(
        q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, top, k, high,
        D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, _TOPK, _REACHING,
    )  # fmt: skip
    low = tl.where(reached >= k, high, low)
    reached = tl.where(reached >= k, reached, count)
    high = tl.where(count <= k, low, high)
    step, is_open = 0, 1
    while (step < 32) & (is_open > 0):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        between = (middle > low) & (middle < high) & (reached != k)
        more, _, _ = _sum_rows(
            q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, top, k, middle,
            D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, _TOPK, _REACHING,
        )  # fmt: skip
        low = tl.where(between & (more >= k), middle, low)
        reached = tl.where(between & (more >= k), more, reached)
        high = tl.where(between & (more < k), middle, high)
        is_open = tl.max(between.to(tl.int32), 0)
        step += 1
    found = _ordered(low).to(tl.float32, bitcast=True)
    return tl.where(count <= k, -float("inf"), found)


@triton.jit
def _reduce(
    q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, parameter,
    D: tl.constexpr, WIDTH: tl.constexpr, MASKING: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, FUNCTION: tl.constexpr,
):  # fmt: skip
    """Return top, threshold and factor of each row."""
    zero = tl.zeros([BLOCK_T], tl.float32)
    no_bound = tl.zeros([BLOCK_T], tl.int32)
    top, other, count = _sum_rows(
        q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, zero, zero, parameter, no_bound,
        D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, FUNCTION, _EXTREMES,
    )  # fmt: skip
    top = tl.where(count != count, float("nan"), tl.where(top == -float("inf"), 0.0, top))
    if FUNCTION == _SIGMOID:
        bias = zero + parameter
        return zero, tl.where(bias != bias, -tl.log(tl.maximum(count, 1.0)), bias), zero
    threshold = zero
    if FUNCTION == _TOPK:
        threshold = _largest(
            q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, other, count, parameter,
            D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S,
        )  # fmt: skip
    elif FUNCTION == _EVSOFTMAX:
        # The smallest float that is not below the mean: a score is at least both or neither.
        mean = other / tl.maximum(count, 1.0).to(tl.float64)
        threshold = mean.to(tl.float32)
        above = _ordered(_ordered(threshold.to(tl.int32, bitcast=True)) + 1)
        is_below = threshold.to(tl.float64) < mean
        threshold = tl.where(is_below, above.to(tl.float32, bitcast=True), threshold)
        # Rounding may put the mean of equal scores above all of them.
        threshold = tl.minimum(threshold, top)
    elif FUNCTION == _SOFTPICK:
        top = tl.where(top < 0, 0.0, top)
        threshold = tl.exp(-top)
    total, slope, _ = _sum_rows(
        q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, threshold, parameter, no_bound,
        D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, FUNCTION, _WEIGHTS,
    )  # fmt: skip
    if _is_entmax(FUNCTION):
        # Newton's method for |u| = 1 with the norm of order 1 / (alpha - 1), as in row_functions.h.
        step, rises = 0, 1
        while (step < _MAX_STEPS) & (rises > 0):
            if FUNCTION == _SPARSEMAX:
                of_sum = zero + 1
            else:
                of_sum = tl.exp((1 - parameter) * tl.log(total))
            following = threshold + (total - of_sum) / slope
            is_above = following > threshold
            threshold = tl.where(is_above, following, threshold)
            rises = tl.max(is_above.to(tl.int32), 0)
            if rises > 0:
                total, slope, _ = _sum_rows(
                    q, K, rows, k_n, mask, m_t, m_s, T, S, scale, t0, top, threshold, parameter,
                    no_bound, D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, FUNCTION, _WEIGHTS,
                )  # fmt: skip
            step += 1
    elif FUNCTION == _SOFTPICK:
        total += 1e-6 * threshold
    return top, threshold, tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def row_forward_kernel(
    Q, K, V, OUT, STATISTICS, PARAMETER, MASK,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, m_b, m_h, m_t, m_s,
    heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, FUNCTION: tl.constexpr, MASKING: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute OUT and STATISTICS; one program per query block."""
    block, blocks, bh, b, h = query_block(T, heads, CAUSAL, BLOCK_T)
    parameter = _parameter(PARAMETER, h, FUNCTION)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    keys = K + b * k_b + h * k_h
    q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
    top, row_threshold, factor = _reduce(
        q, keys, rows, k_n, mask, m_t, m_s, T, S, scale, t0, parameter,
        D, WIDTH, MASKING, CAUSAL, BLOCK_T, BLOCK_S, FUNCTION,
    )  # fmt: skip
    out = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    for phase in tl.static_range(2):
        begin, stop = inner if phase == 1 else 0, end if phase == 1 else inner
        for s0 in range(begin, stop, BLOCK_S):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(keys, columns, k_n, S, phase == 1, D, WIDTH)
            x = _scores(
                q, k, columns, rows, mask, m_t, m_s, T, S, scale, MASKING, CAUSAL, phase == 1
            )
            weight, slope = _entry(
                x, top[:, None], row_threshold[:, None], factor[:, None], parameter, FUNCTION
            )
            if DROPOUT:
                kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                weight = tl.where(kept, weight * keep_scale, 0.0)
            v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, phase == 1, D, WIDTH)
            out = tl.dot(weight.to(v.dtype), v, out, input_precision="ieee")
    store_tile(OUT + b * o_b + h * o_h, rows, o_n, T, out, D, WIDTH)
    row = bh.to(tl.int64) * 3 * T + rows
    tl.store(STATISTICS + row, top, mask=rows < T)
    tl.store(STATISTICS + row + T, row_threshold, mask=rows < T)
    tl.store(STATISTICS + row + 2 * T, factor, mask=rows < T)


@triton.jit
def _load_statistics(STATISTICS, bh, rows, T):
    """Return top, threshold and factor; those of rows beyond T give weights and slopes of 0."""
    row, inside = bh.to(tl.int64) * 3 * T + rows, rows < T
    top = tl.load(STATISTICS + row, mask=inside, other=float("inf"))
    threshold = tl.load(STATISTICS + row + T, mask=inside, other=0.0)
    factor = tl.load(STATISTICS + row + 2 * T, mask=inside, other=0.0)
    return top, threshold, factor


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def row_query_kernel(
    Q, K, V, STATISTICS, PARAMETER, MASK, GRAD, MEAN, GRAD_QUERY, GRAD_PARAMETER,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gq_b, gq_h, gq_n, heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, FUNCTION: tl.constexpr, MASKING: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_QUERY, MEAN and, for alpha_entmax, GRAD_PARAMETER (B, H, T), by query blocks."""
    block, blocks, bh, b, h = query_block(T, heads, CAUSAL, BLOCK_T)
    parameter = _parameter(PARAMETER, h, FUNCTION)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    t0 = block * BLOCK_T
    rows = t0 + tl.arange(0, BLOCK_T)
    keys = K + b * k_b + h * k_h
    q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
    grad = load_tile(GRAD + b * g_b + h * g_h, rows, g_n, T, True, D, WIDTH)
    top, row_threshold, factor = _load_statistics(STATISTICS, bh, rows, T)

    grad_query = tl.zeros([BLOCK_T, WIDTH], tl.float32)
    weighted = tl.zeros([BLOCK_T], tl.float32)
    slopes = tl.zeros([BLOCK_T], tl.float32)
    entropy = tl.zeros([BLOCK_T], tl.float32)
    distance = tl.zeros([BLOCK_T], tl.float32)
    grad_parameter = tl.zeros([BLOCK_T], tl.float32)
    mean = tl.zeros([BLOCK_T], tl.float32)
    inner, end = key_range(t0, S, CAUSAL, BLOCK_T, BLOCK_S)
    # Two passes over the keys: the mean, then the gradients.
    for phase in tl.static_range(4):
        begin, stop = inner if phase % 2 == 1 else 0, end if phase % 2 == 1 else inner
        if phase == 2:
            if FUNCTION == _SIGMOID:
                mean = tl.zeros([BLOCK_T], tl.float32)
            elif _is_entmax(FUNCTION):
                mean = tl.where(slopes == 0, 0.0, weighted / tl.where(slopes == 0, 1.0, slopes))
            else:
                mean = weighted
        for s0 in range(begin, stop, BLOCK_S):
            columns = s0 + tl.arange(0, BLOCK_S)
            k = load_tile(keys, columns, k_n, S, phase % 2 == 1, D, WIDTH)
            x = _scores(
                q, k, columns, rows, mask, m_t, m_s, T, S, scale, MASKING, CAUSAL, phase % 2 == 1
            )
            v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, phase % 2 == 1, D, WIDTH)
            grad_weight = tl.dot(grad, tl.trans(v), input_precision="ieee")
            if DROPOUT:
                kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
                grad_weight = tl.where(kept, grad_weight * keep_scale, 0.0)
            weight, slope = _entry(
                x, top[:, None], row_threshold[:, None], factor[:, None], parameter, FUNCTION
            )
            if phase < 2:
                if _is_entmax(FUNCTION):
                    weighted += tl.sum(slope * grad_weight, 1)
                    slopes += tl.sum(slope, 1)
                else:
                    weighted += tl.sum(weight * grad_weight, 1)
                if FUNCTION == _ALPHA_ENTMAX:
                    v = _distance(x, top[:, None], row_threshold[:, None], parameter)
                    entropy += tl.sum(_entropy(weight), 1)
                    distance += tl.sum(slope * v, 1)
            else:
                grad_x = _gradient(slope, grad_weight, mean[:, None], FUNCTION)
                grad_query = tl.dot(grad_x.to(k.dtype), k, grad_query, input_precision="ieee")
                if FUNCTION == _ALPHA_ENTMAX:
                    # Proposition 1 of Correia et al. 2019, as in row_functions.h.
                    divisor = tl.where(slopes == 0, 1.0, slopes)
                    v = _distance(x, top[:, None], row_threshold[:, None], parameter)
                    v = (v - (distance / divisor)[:, None]) * factor[:, None]
                    share = slope / divisor[:, None]
                    change = slope * v / parameter + _entropy(weight) - share * entropy[:, None]
                    change = change / parameter
                    grad_parameter += tl.sum((grad_weight - mean[:, None]) * change, 1)
    store_tile(GRAD_QUERY + b * gq_b + h * gq_h, rows, gq_n, T, grad_query * scale, D, WIDTH)
    row = bh.to(tl.int64) * T + rows
    tl.store(MEAN + row, mean, mask=rows < T)
    if FUNCTION == _ALPHA_ENTMAX:
        tl.store(GRAD_PARAMETER + row, grad_parameter, mask=rows < T)


@triton.jit
def _entropy(p):
    return tl.where(p > 0, -p * tl.log(tl.where(p > 0, p, 1.0)), p)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def row_key_kernel(
    Q, K, V, STATISTICS, PARAMETER, MASK, GRAD, MEAN, GRAD_KEY, GRAD_VALUE,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, m_b, m_h, m_t, m_s,
    g_b, g_h, g_n, gk_b, gk_h, gk_n, gv_b, gv_h, gv_n,
    heads, T, S, scale, seed, threshold, keep_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, FUNCTION: tl.constexpr, MASKING: tl.constexpr,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Compute GRAD_KEY and GRAD_VALUE; one program per key block."""
    blocks = tl.cdiv(S, BLOCK_S)
    s0 = tl.program_id(0) % blocks * BLOCK_S
    bh = tl.program_id(0) // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    parameter = _parameter(PARAMETER, h, FUNCTION)
    mask = 0
    if MASKING > 0:
        mask = MASK + b * m_b + h * m_h
    columns = s0 + tl.arange(0, BLOCK_S)
    k = load_tile(K + b * k_b + h * k_h, columns, k_n, S, True, D, WIDTH)
    v = load_tile(V + b * v_b + h * v_h, columns, v_n, S, True, D, WIDTH)
    grad_key = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    grad_value = tl.zeros([BLOCK_S, WIDTH], tl.float32)
    first = s0 // BLOCK_T * BLOCK_T if CAUSAL else 0
    for t0 in range(first, T, BLOCK_T):
        rows = t0 + tl.arange(0, BLOCK_T)
        q = load_tile(Q + b * q_b + h * q_h, rows, q_n, T, True, D, WIDTH)
        grad = load_tile(GRAD + b * g_b + h * g_h, rows, g_n, T, True, D, WIDTH)
        top, row_threshold, factor = _load_statistics(STATISTICS, bh, rows, T)
        mean = tl.load(MEAN + bh.to(tl.int64) * T + rows, mask=rows < T, other=0.0)
        x = _scores(q, k, columns, rows, mask, m_t, m_s, T, S, scale, MASKING, CAUSAL, True)
        x = tl.where(rows[:, None] < T, x, -float("inf"))
        weight, slope = _entry(
            x, top[:, None], row_threshold[:, None], factor[:, None], parameter, FUNCTION
        )
        grad_weight = tl.dot(grad, tl.trans(v), input_precision="ieee")
        dropped = weight
        if DROPOUT:
            kept = dropout_mask(seed, threshold, bh, t0, s0, BLOCK_T, BLOCK_S)
            grad_weight = tl.where(kept, grad_weight * keep_scale, 0.0)
            dropped = tl.where(kept, weight * keep_scale, 0.0)
        grad_value = tl.dot(
            tl.trans(dropped).to(grad.dtype), grad, grad_value, input_precision="ieee"
        )
        grad_x = _gradient(slope, grad_weight, mean[:, None], FUNCTION)
        grad_key = tl.dot(tl.trans(grad_x).to(q.dtype), q, grad_key, input_precision="ieee")
    store_tile(GRAD_KEY + b * gk_b + h * gk_h, columns, gk_n, S, grad_key * scale, D, WIDTH)
    store_tile(GRAD_VALUE + b * gv_b + h * gv_h, columns, gv_n, S, grad_value, D, WIDTH)
