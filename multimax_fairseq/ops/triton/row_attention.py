"""Launches the kernels of attention by row functions on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multimax_fairseq.ops.backend import capability
from multimax_fairseq.ops.native import dense_like
from multimax_fairseq.ops.row_function import FUNCTIONS
from multimax_fairseq.ops.triton.attention import (
    attention_arguments,
    strides,
    with_unit_last_stride,
)
from multimax_fairseq.ops.triton.launches import Call, Launch, candidates, run_kernel
from multimax_fairseq.ops.triton.row_kernels import (
    row_forward_kernel,
    row_key_kernel,
    row_query_kernel,
)

if TYPE_CHECKING:  # ops/attention.py imports this file when it needs a kernel
    from multimax_fairseq.ops.attention import AttentionCall


def row_attention_forward(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, T, D), and the row statistics (B, H, 3, T), float32.

    Args:
        call: D is at most 128; no dimension is 0.
    """
    out, arguments = dense_like(call.query), _arguments(call)
    batch, heads, queries, _ = call.query.shape
    statistics = out.new_empty(batch, heads, 3, queries, dtype=torch.float32)
    outputs = {"OUT": out, "STATISTICS": statistics, **strides("o", out)}
    _run(row_forward_kernel, arguments, outputs, "queries")
    return out, statistics


def row_attention_backward(
    grad: Tensor, statistics: Tensor, call: AttentionCall
) -> dict[str, Tensor]:
    """Return the gradients of `row_attention_forward`, by the names of the tensors."""
    grad_query, grad_key, grad_value = map(dense_like, (call.query, call.key, call.value))
    grad = with_unit_last_stride(grad)
    batch, heads, queries, _ = call.query.shape
    mean = statistics.new_empty(batch, heads, queries)
    grad_alpha = mean  # of each row
    if call.function == "alpha_entmax":
        grad_alpha = statistics.new_empty(batch, heads, queries)
    arguments = _arguments(call)
    arguments |= {"STATISTICS": statistics, "GRAD": grad, "MEAN": mean, **strides("g", grad)}
    outputs = {"GRAD_QUERY": grad_query, "GRAD_PARAMETER": grad_alpha, **strides("gq", grad_query)}
    _run(row_query_kernel, arguments, outputs, "queries")
    outputs = {"GRAD_KEY": grad_key, "GRAD_VALUE": grad_value}
    outputs |= {**strides("gk", grad_key), **strides("gv", grad_value)}
    _run(row_key_kernel, arguments, outputs, "keys")
    grads = {"query": grad_query, "key": grad_key, "value": grad_value}
    if call.function == "alpha_entmax":
        grads["row_parameter"] = grad_alpha.sum((0, 2))
    return grads


def _arguments(call: AttentionCall) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    query, key, value = (with_unit_last_stride(t) for t in (call.query, call.key, call.value))
    arguments = attention_arguments(call._replace(query=query, key=key, value=value))
    parameter = None if call.row_parameter is None else call.row_parameter.contiguous()
    return arguments | {"PARAMETER": parameter, "FUNCTION": FUNCTIONS.index(call.function)}


def launch_of(dtype: torch.dtype, width: int, capability: int) -> Launch:
    """Return the launch of all kernels.

    All kernels use the same blocks: the backward kernels compare recomputed scores with the
    threshold of the forward kernel, so the rounding must be equal.
    """
    return candidates(Call("query_kernel", dtype, width, True), capability)[0]


def _run(kernel: Any, arguments: dict[str, Any], outputs: dict[str, Any], by: str) -> None:
    query, key = arguments["Q"], arguments["K"]
    launch = launch_of(query.dtype, arguments["WIDTH"], capability(query.device))
    length, block = (
        (query.shape[2], launch.queries) if by == "queries" else (key.shape[2], launch.keys)
    )
    programs = -(-length // block) * query.shape[0] * query.shape[1]
    given = arguments | outputs | launch.arguments()
    names = {*kernel.arg_names, "num_warps", "num_stages", "enable_fp_fusion"}
    with torch.cuda.device_of(query):
        run_kernel(kernel, programs, {n: value for n, value in given.items() if n in names})
