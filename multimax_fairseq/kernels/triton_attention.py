"""Attention over modulated scores and its gradients, on a GPU: how its kernels are launched.

The forward pass keeps the logarithm of each row's sum; the backward pass forms the scores again,
once by rows of queries (their gradient and the modulator's) and once by rows of keys.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.kernels.cpu import dense_like
from multimax_fairseq.kernels.launches import (
    Call,
    Launch,
    Result,
    candidates,
    is_heavy,
    run_fastest,
    run_kernel,
)
from multimax_fairseq.kernels.operators.definition import capability
from multimax_fairseq.kernels.triton_attention_kernels import (
    forward_kernel,
    key_kernel,
    mean_kernel,
    query_kernel,
)
from multimax_fairseq.kernels.triton_modulator import CAP_BOTH, CAP_NONE, MONOTONE_COLUMNS

# What decides, besides the lengths, which launch is fastest.
_FLAGS = ("LOW", "HIGH", "MONOTONE", "MASKING", "CAUSAL", "DROPOUT")
_RANDOM = 2**16
_LOG2_E = math.log2(math.e)
_CAPS = {True: CAP_NONE.value, False: CAP_BOTH.value}


def launches(capability: int) -> Iterator[tuple[Call, dict[str, int]]]:
    """Yield every launch that may be chosen on a GPU of this compute capability, as 90 for 9.0: the
    kind of call, and the arguments that are the launch's own."""
    names = (k.__name__ for k in (forward_kernel, mean_kernel, query_kernel, key_kernel))
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    for kind in itertools.product(names, dtypes, (16, 32, 64, 128), (False, True)):
        call = Call(*kind)
        for launch in candidates(call, capability):
            yield call, launch.arguments()


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor]:
    """Return attention over modulated scores, and what its backward pass needs of each row's sum.

        O = dropout(softmax(sigma(scale * Q K^T) + mask)) V, beside a sink if there is one

    Args:
        query: (B, H, T, D), D up to 128, float16, bfloat16 or float32, any strides.
        key, value: (B, H, S, D), of the same dtype. None of the sizes is 0.
        table: (H or 1, 8 or 12) float32, as in `triton_modulator`; None is softmax.
        sink: (H,) float32, a score for each head; None for none.
        mask: None, or four dimensions that are each 1 or that of (B, H, T, S), of any strides.
            Bool: True excludes. float32: added, and -inf excludes. A query with nothing left gets
            zeros.
        seed: of dropout; its lower 31 bits count.
        is_causal: query t attends to keys up to t; together with mask, both hold.
        dropout_p: probability of dropping an attention probability.
        scale: any finite number.
        low, high: orders of the modulator's sides, 0 to 2; 0 leaves its columns unread.

    Returns:
        (B, H, T, D), in the dtype of query, with query's order of dimensions in memory;
        (B, H, 1, T) float32.
    """
    out = dense_like(query)
    query, scale = _with_positive_scale(query, scale)
    query, key, value = (_with_unit_last_stride(t) for t in (query, key, value))
    total = query.new_empty((*query.shape[:2], 1, query.shape[2]), dtype=torch.float32)
    arguments = _arguments(
        query, key, value, table, mask, seed, is_causal, dropout_p, scale, low, high
    )

    def run(launch: Launch) -> None:
        programs = -(-query.shape[2] // launch.queries) * out.shape[0] * out.shape[1]
        own = {"OUT": out, "TOTAL": total, **_sink(sink), **_strides("o", out)}
        run_kernel(forward_kernel, programs, own | arguments | launch.arguments())

    _run_fastest("forward_kernel", arguments, run)
    return out, total


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    total: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `attention_forward` by query, key, value, table and sink.

    Args:
        grad: the gradient by its output. The others: what it was given and what it returned.
    """
    grad_query, grad_key, grad_value = map(dense_like, (query, key, value))
    scaled, positive = _with_positive_scale(query, scale)
    scaled, key, value, output, grad = (
        _with_unit_last_stride(t) for t in (scaled, key, value, output, grad)
    )
    batch, heads, length, _ = query.shape
    arguments = _arguments(
        scaled, key, value, table, mask, seed, is_causal, dropout_p, positive, low, high
    )
    is_exact, is_added = query.dtype == torch.float32, arguments["MASKING"] > 2
    delta, norm = torch.empty_like(total), None
    arguments |= {"TOTAL": total, "GRAD": grad, "DELTA": delta, **_strides("g", grad)}
    by_query = {"OUT": output, **_strides("o", output)}
    grad_table, grad_sink = None, None
    means = None if sink is None else torch.empty_like(total)

    def run_means(launch: Launch) -> None:
        programs = -(-length // launch.queries) * batch * heads
        own = {"EXACT": is_exact, **_sink(sink), **by_query}
        run_kernel(mean_kernel, programs, own | arguments | launch.arguments())

    def run_queries(launch: Launch) -> Tensor | None:
        blocks, sums = -(-length // launch.queries), None
        if table is not None:
            sums = total.new_empty(batch, heads, blocks, table.shape[1])
        own = {
            "GRAD_Q": grad_query, "SUMS": sums, "SUMMED": sums is not None, "MEANS": means,
            "SINKS": means is not None, **_strides("gq", grad_query), **by_query,
        }  # fmt: skip
        run_kernel(query_kernel, blocks * batch * heads, own | arguments | launch.arguments())
        return sums

    def run_keys(launch: Launch) -> None:
        programs = -(-key.shape[2] // launch.keys) * batch * heads
        own = {
            "GRAD_K": grad_key, "GRAD_V": grad_value,
            **_strides("gk", grad_key), **_strides("gv", grad_value),
        }  # fmt: skip
        run_kernel(key_kernel, programs, own | arguments | launch.arguments())

    if is_exact or is_added:
        arguments["NORM"] = norm = torch.empty_like(total)
        _run_fastest("mean_kernel", arguments, run_means)
    arguments |= {"NORM": norm, "NORMED": norm is not None}
    sums = _run_fastest("query_kernel", arguments, run_queries)
    _run_fastest("key_kernel", arguments, run_keys)
    if scale <= 0:
        grad_query.neg_() if scale < 0 else grad_query.zero_()
    if table is not None and sums is not None:
        grad_table = sums.sum((0, 2)) if len(table) > 1 else sums.sum((0, 1, 2)).unsqueeze(0)
    if sink is not None and means is not None:
        # The sink's own value is zero: less the mean is all that its gradient has.
        score = sink[:, None, None]
        share = (score - total).exp() if is_added else (score * _LOG2_E - total).exp2()
        share = share if norm is None else share * norm
        grad_sink = -(share * means).sum((0, 2, 3))
    return grad_query, grad_key, grad_value, grad_table, grad_sink


def _run_fastest(kernel: str, arguments: dict[str, Any], run: Callable[[Launch], Result]) -> Result:
    """`run_fastest` for a call with these arguments: their lengths count as powers of two."""
    query = arguments["Q"]
    kind = Call(kernel, query.dtype, arguments["WIDTH"], is_heavy(**arguments))
    choice = candidates(kind, capability(query.device))
    with torch.cuda.device_of(query):
        if len(choice) == 1:
            return run(choice[0])
        lengths = (arguments[name].bit_length() for name in "TS")
        flags = (arguments[name] for name in _FLAGS)
        return run_fastest(choice, (kind, query.device, *lengths, *flags), run)


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> dict[str, Any]:
    """What all of the kernels are given."""
    batch, heads, length, size = query.shape
    masking, mask_strides = 0, (0, 0, 0, 0)
    if mask is not None:
        masking = (3 if mask.dtype == torch.float32 else 1) + (mask.shape[2] != 1)
        mask = mask.expand(batch, heads, length, key.shape[2])
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask_strides = mask.stride()
    table = None if table is None else table.contiguous()
    # Of so many random numbers; what is kept is scaled by the share that this makes of them.
    threshold = round(dropout_p * _RANDOM)
    return {
        **_strides("q", query),
        **_strides("k", key),
        **_strides("v", value),
        "Q": query,
        "K": key,
        "V": value,
        "TABLE": table,
        "MASK": mask,
        "m_b": mask_strides[0],
        "m_h": mask_strides[1],
        "m_t": mask_strides[2],
        "m_s": mask_strides[3],
        "t_h": 0 if table is None or len(table) == 1 else table.stride(0),
        "heads": heads,
        "T": length,
        "S": key.shape[2],
        "scale": float(scale),  # of an integer, Triton makes another kernel
        "seed": seed & (2**31 - 1),
        "threshold": threshold,
        "keep_scale": _RANDOM / (_RANDOM - threshold) if threshold < _RANDOM else 0.0,
        "D": size,
        "WIDTH": max(16, 1 << (size - 1).bit_length()),
        "LOW": 0 if table is None else low,
        "HIGH": 0 if table is None else high,
        "MONOTONE": table is not None and table.shape[1] == MONOTONE_COLUMNS,
        # No product of two float16 rows comes near the cap.
        "CAP": _CAPS[query.dtype == torch.float16],
        "MASKING": masking,
        "CAUSAL": is_causal,
        "DROPOUT": dropout_p > 0,
        # The coefficients are folded so that a term is one fused multiplication and addition.
        "enable_fp_fusion": True,
    }


def _sink(sink: Tensor | None) -> dict[str, Any]:
    """What the kernels that sum over a row are given."""
    return {"SINK": None if sink is None else sink.contiguous(), "SINKS": sink is not None}


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The thresholds are divided by it: queries and a scale above 0 that give the same scores."""
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)


def _with_unit_last_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


@functools.cache
def _names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for axis in "bhn")


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Of the three dimensions before the last, under the names that the kernels have for them."""
    return dict(zip(_names(name), tensor.stride(), strict=False))
