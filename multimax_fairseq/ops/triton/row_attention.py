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

if TYPE_CHECKING:  # row_attention imports this module lazily
    from multimax_fairseq.ops.row_attention import RowAttentionCall


def row_attention_forward(call: RowAttentionCall) -> tuple[Tensor, Tensor]:
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
    grad: Tensor, statistics: Tensor, call: RowAttentionCall
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and parameter, which is empty for None."""
    grad_query, grad_key, grad_value = map(dense_like, call[:3])
    grad = with_unit_last_stride(grad)
    batch, heads, queries, _ = call.query.shape
    mean = statistics.new_empty(batch, heads, queries)
    by_row = mean  # the gradient of alpha of each row
    if call.function == "alpha_entmax":
        by_row = statistics.new_empty(batch, heads, queries)
    arguments = _arguments(call)
    arguments |= {"STATISTICS": statistics, "GRAD": grad, "MEAN": mean, **strides("g", grad)}
    outputs = {"GRAD_Q": grad_query, "GRAD_PARAMETER": by_row, **strides("gq", grad_query)}
    _run(row_query_kernel, arguments, outputs, "queries")
    outputs = {"GRAD_K": grad_key, "GRAD_V": grad_value}
    outputs |= {**strides("gk", grad_key), **strides("gv", grad_value)}
    _run(row_key_kernel, arguments, outputs, "keys")
    if call.parameter is None:
        grad_parameter = mean.new_empty(0)
    elif call.function == "alpha_entmax":
        grad_parameter = by_row.sum((0, 2))
    else:
        grad_parameter = torch.zeros_like(call.parameter)
    return grad_query, grad_key, grad_value, grad_parameter


def _arguments(call: RowAttentionCall) -> dict[str, Any]:
    """Return the arguments that all kernels share."""
    query, key, value = (with_unit_last_stride(t) for t in call[:3])
    softmax = call._replace(query=query, key=key, value=value).as_softmax_call
    arguments = attention_arguments(softmax)
    parameter = None if call.parameter is None else call.parameter.contiguous()
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
