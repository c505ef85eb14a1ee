"""Launches the attention kernels on a GPU.

The forward pass stores the log-sum-exp of each row. The backward pass recomputes the scores twice:
by blocks of queries for the gradients of query and modulator, and by blocks of keys for the
gradients of key and value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multimax_fairseq.ops.backend import capability
from multimax_fairseq.ops.native import dense_like
from multimax_fairseq.ops.triton.attention_kernels import (
    forward_kernel,
    key_kernel,
    mean_kernel,
    query_kernel,
)
from multimax_fairseq.ops.triton.launches import (
    Call,
    Launch,
    Result,
    candidates,
    is_heavy,
    run_fastest,
    run_kernel,
)
from multimax_fairseq.ops.triton.modulator import CAP_BOTH, CAP_NONE

if TYPE_CHECKING:  # ops/attention.py imports this file when it needs a kernel
    from multimax_fairseq.ops.attention import AttentionCall

# The autotuning key contains these kernel constants besides the lengths.
_FLAGS = ("LOW", "HIGH", "COLUMNS", "MASKING", "CAUSAL", "DROPOUT")
_RANDOM = 2**16  # dropout uses 16 random bits
_LOG2_E = math.log2(math.e)
_CAPS = {True: CAP_NONE.value, False: CAP_BOTH.value}


def attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the attention output, and the log-sum-exp of each row for the backward pass.

    Args:
        call: D is at most 128; no dimension is 0.

    Returns:
        The output (B, H, T, D), with the dtype and memory layout of query; the log-sum-exp
        (B, H, 1, T), float32.
    """
    out, sink = dense_like(call.query), call.sink
    call = _with_positive_scale(call)
    query = call.query
    total = query.new_empty((*query.shape[:2], 1, query.shape[2]), dtype=torch.float32)
    arguments = attention_arguments(call)

    def run(launch: Launch) -> None:
        programs = -(-query.shape[2] // launch.queries) * out.shape[0] * out.shape[1]
        own = {"OUT": out, "TOTAL": total, **_sink(sink), **strides("o", out)}
        run_kernel(forward_kernel, programs, own | arguments | launch.arguments())

    _run_fastest("forward_kernel", arguments, run)
    return out, total


def attention_backward(
    grad: Tensor, output: Tensor, total: Tensor, call: AttentionCall
) -> dict[str, Tensor]:
    """Return the gradients of `attention_forward`, by the names of the tensors.

    Args:
        grad: (B, H, T, D), the gradient with respect to the output.
        output, total: the results of `attention_forward(call)`.
    """
    grad_query, grad_key, grad_value = map(dense_like, (call.query, call.key, call.value))
    parameters, sink, scale = call.parameters, call.sink, call.scale
    call = _with_positive_scale(call)
    output, grad = with_unit_last_stride(output), with_unit_last_stride(grad)
    query, key = call.query, call.key
    batch, heads, length, _ = query.shape
    arguments = attention_arguments(call)
    is_exact, is_added = query.dtype == torch.float32, arguments["MASKING"] > 2
    delta, norm = torch.empty_like(total), None
    arguments |= {"TOTAL": total, "GRAD": grad, "DELTA": delta, **strides("g", grad)}
    of_output = {"OUT": output, **strides("o", output)}
    grads = {"query": grad_query, "key": grad_key, "value": grad_value}
    means = None if sink is None else torch.empty_like(total)

    def run_means(launch: Launch) -> None:
        programs = -(-length // launch.queries) * batch * heads
        own = {"EXACT": is_exact, **_sink(sink), **of_output}
        run_kernel(mean_kernel, programs, own | arguments | launch.arguments())

    def run_queries(launch: Launch) -> Tensor | None:
        blocks, sums = -(-length // launch.queries), None
        if parameters is not None:
            sums = total.new_empty(batch, heads, blocks, parameters.shape[1])
        own = {
            "GRAD_QUERY": grad_query, "SUMS": sums, "SUMMED": sums is not None, "MEANS": means,
            "SINKS": means is not None, **strides("gq", grad_query), **of_output,
        }  # fmt: skip
        run_kernel(query_kernel, blocks * batch * heads, own | arguments | launch.arguments())
        return sums

    def run_keys(launch: Launch) -> None:
        programs = -(-key.shape[2] // launch.keys) * batch * heads
        own = {
            "GRAD_KEY": grad_key, "GRAD_VALUE": grad_value,
            **strides("gk", grad_key), **strides("gv", grad_value),
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
    if parameters is not None and sums is not None:
        grads["parameters"] = (
            sums.sum((0, 2)) if len(parameters) > 1 else sums.sum((0, 1, 2)).unsqueeze(0)
        )
    if sink is not None and means is not None:
        # The sink's value vector is 0, so its gradient is -p_sink * mean for each row.
        score = sink[:, None, None]
        share = (score - total).exp() if is_added else (score * _LOG2_E - total).exp2()
        share = share if norm is None else share * norm
        grads["sink"] = -(share * means).sum((0, 2, 3))
    return grads


def _run_fastest(kernel: str, arguments: dict[str, Any], run: Callable[[Launch], Result]) -> Result:
    """Call `run_fastest`. The autotuning key rounds the lengths T and S to powers of two."""
    query = arguments["Q"]
    kind = Call(kernel, query.dtype, arguments["WIDTH"], is_heavy(**arguments))
    choice = candidates(kind, capability(query.device))
    with torch.cuda.device_of(query):
        if len(choice) == 1:
            return run(choice[0])
        lengths = (arguments[name].bit_length() for name in "TS")
        flags = (arguments[name] for name in _FLAGS)
        return run_fastest(choice, (kind, query.device, *lengths, *flags), run)


def attention_arguments(call: AttentionCall) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    query, key, parameters, mask = call.query, call.key, call.parameters, call.mask
    batch, heads, length, size = query.shape
    masking, mask_strides = 0, (0, 0, 0, 0)
    if mask is not None:
        masking = (3 if mask.dtype == torch.float32 else 1) + (mask.shape[2] != 1)
        mask = mask.expand(batch, heads, length, key.shape[2])
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        mask_strides = mask.stride()
    parameters = None if parameters is None else parameters.contiguous()
    # Dropout compares 16 random bits with the threshold. keep_scale uses the rounded probability.
    threshold = round(call.dropout_p * _RANDOM)
    return {
        **strides("q", query),
        **strides("k", key),
        **strides("v", call.value),
        "Q": query,
        "K": key,
        "V": call.value,
        "PARAMETERS": parameters,
        "MASK": mask,
        "m_b": mask_strides[0],
        "m_h": mask_strides[1],
        "m_t": mask_strides[2],
        "m_s": mask_strides[3],
        "t_h": 0 if parameters is None or len(parameters) == 1 else parameters.stride(0),
        "heads": heads,
        "T": length,
        "S": key.shape[2],
        "scale": float(call.scale),  # an int would make Triton compile another kernel
        "seed": 0 if call.seed is None else int(call.seed) & (2**31 - 1),
        "threshold": threshold,
        "keep_scale": _RANDOM / (_RANDOM - threshold) if threshold < _RANDOM else 0.0,
        "D": size,
        "WIDTH": max(16, 1 << (size - 1).bit_length()),
        "LOW": 0 if parameters is None else call.low,
        "HIGH": 0 if parameters is None else call.high,
        "COLUMNS": 0 if parameters is None else parameters.shape[1],
        # A dot product of two float16 rows stays far below the cap.
        "CAP": _CAPS[query.dtype == torch.float16],
        "MASKING": masking,
        "CAUSAL": call.is_causal,
        "DROPOUT": call.dropout_p > 0,
        # The coefficients are folded so that one fused multiply-add computes a term.
        "enable_fp_fusion": True,
    }


def _sink(sink: Tensor | None) -> dict[str, Any]:
    """Return the sink arguments of the kernels that compute row sums."""
    return {"SINK": None if sink is None else sink.contiguous(), "SINKS": sink is not None}


def _with_positive_scale(call: AttentionCall) -> AttentionCall:
    """Return a call with the same scores, a positive scale and dense last dimensions.

    The kernels divide the thresholds by the scale.
    """
    query, scale = call.query, call.scale
    if scale <= 0:
        query, scale = (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)
    query, key, value = (with_unit_last_stride(t) for t in (query, call.key, call.value))
    return call._replace(query=query, key=key, value=value, scale=scale)


def with_unit_last_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


@functools.cache
def _names(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{axis}" for axis in "bhn")


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the first three strides, named as the kernels' arguments."""
    return dict(zip(_names(name), tensor.stride(), strict=False))
