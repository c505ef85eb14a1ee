"""Fused attention by row functions: mappings that need all scores of a query.

    O = dropout(f(scale * Q K^T + mask)) V

The (T, S) weights are not stored. `ops.attention.fused_attention` calls `row_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import on_triton
from multimax_fairseq.ops.checks import check_device
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    differentiable_once,
    needs_gradient,
    schema_of,
    without_gradient,
)
from multimax_fairseq.ops.row_function import (
    FUNCTIONS,
    LEARNED,
    ON_TRITON,
    WITHOUT_GRADIENT,
    check_function,
)
from multimax_fairseq.ops.softmax_attention import (
    AttentionCall,
    check_call,
    check_per_head,
    fields_of,
    to_autocast,
)


class RowAttentionCall(NamedTuple):
    """The arguments of one attention.

    query, key, value, mask, seed, is_causal, dropout_p, scale: as `AttentionCall`.
    parameter: (H,) float32, or None.
    function, header: the name and the header of a `RowFunction`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    parameter: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    function: str
    header: str | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that autograd saves."""
        return self[:6]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The fields after the tensors."""
        return self[6:]

    @property
    def as_softmax_call(self) -> AttentionCall:
        """The call of softmax with the same arguments."""
        query, key, value, _, mask, seed, is_causal, dropout_p, scale, _, _ = self
        return AttentionCall(
            query, key, value, None, None, mask, seed, is_causal, dropout_p, scale, 2, 2
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `native.RowAttention` that the forward and the backward pass share."""
        return {
            **fields_of(self.as_softmax_call),
            **row_fields(self.function, self.header, self.parameter),
        }


def row_fields(function: str, header: str | None, parameter: Tensor | None) -> dict[str, Any]:
    """Return the library with a row function, and its fields of `native.RowAttention`."""
    return {
        "kernels": native.row_library(header, function),
        "function": FUNCTIONS.index(function) if header is None else 0,
        "parameter": None if parameter is None else parameter.contiguous(),
    }


def _has_learned_parameter(call: RowAttentionCall) -> bool:
    """Whether the parameter needs a gradient. ValueError if the function gives it none."""
    if call.parameter is None or not call.parameter.requires_grad:
        return False
    if call.header is None:
        learns = call.function in LEARNED
    else:
        kernels = native.row_library(call.header, call.function)
        learns = kernels is not None and bool(kernels.row_learns())
    if not learns:
        remedy = "detach it"
        if call.header is not None:
            remedy += f", or define learns and parameter_gradient in {call.header}"
        raise ValueError(f"the parameter of {call.function} has no gradient: {remedy}")
    return True


_ARGUMENTS = schema_of(RowAttentionCall)


def check_row_function(
    function: str, header: str | None, parameter: Tensor | None, query: Tensor
) -> None:
    """Raise ValueError for a row function that the kernel cannot compute."""
    check_function(function, header, parameter is not None)
    if parameter is not None:
        check_per_head("parameter", parameter, query, "number")
    if on_triton(query.device):
        if header is not None or function not in ON_TRITON:
            raise ValueError(f"{function} has no kernel on a GPU: use the mapping's own function")
    elif native.row_library(header, function) is None:
        raise ValueError(f"there is no compiled row function {function}: the log says why")


def _check(call: RowAttentionCall) -> None:
    check_call(call.as_softmax_call)
    check_row_function(call.function, call.header, call.parameter, call.query)


# --- torch.ops.multimax_fairseq.row_attention --------------------------------------------------


def _row_attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if the last input is True, the row statistics for the gradient."""
    *arguments, keep = inputs
    call = RowAttentionCall(*arguments)
    query = call.query
    statistics = query.new_empty(_statistics_shape(query, keep), dtype=torch.float32)
    if call.as_softmax_call.is_empty:
        return native.dense_like(query).zero_(), statistics.zero_()
    if on_triton(query.device):
        from multimax_fairseq.ops.triton.row_attention import row_attention_forward

        output, statistics = row_attention_forward(call)
        return output, statistics if keep else statistics.new_empty(0)
    output = native.dense_like(query, torch.float32)
    native.call(
        "row_attention_forward",
        native.RowAttention,
        output=output,
        statistics=statistics if keep else None,
        **call.fields,
    )
    return native.cast(output, query.dtype), statistics


def _statistics_shape(query: Tensor, keep: bool) -> tuple[int, ...]:
    batch, heads, queries, _ = query.shape
    return (batch, heads, 3, queries) if keep else (0,)


def _row_attention_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    query, keep = inputs[0], inputs[-1]
    return native.dense_like(query), query.new_empty(
        _statistics_shape(query, keep), dtype=torch.float32
    )


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        call = RowAttentionCall(*inputs)
        output, statistics = below(*call, True)
        ctx.save_for_backward(statistics, *call.tensors)
        ctx.numbers = call.numbers
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)
        return output, statistics

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (1 + len(RowAttentionCall._fields))
        statistics, *tensors = ctx.saved_tensors
        call = RowAttentionCall(*tensors, *ctx.numbers)
        *by_inputs, by_parameter = row_attention_backward(grad, statistics, *call)
        by_parameter = by_parameter if _has_learned_parameter(call) else None
        # None for `below`, the mask, the seed and the numbers.
        return (None, *by_inputs, by_parameter, None, None, *(None for _ in call.numbers))


def _row_attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    call = RowAttentionCall(*inputs[:-1])
    if not needs_gradient(*call.tensors):
        return below(*inputs)
    if call.function in WITHOUT_GRADIENT and call.header is None:
        raise ValueError(f"{call.function} has no gradient here: use the mapping's own function")
    _has_learned_parameter(call)  # raises ValueError before the forward pass
    return _RowAttention.apply(below, *call)


row_attention: Operator = define(
    f"row_attention({_ARGUMENTS}, bool keep) -> (Tensor, Tensor)",
    check=lambda *inputs: _check(RowAttentionCall(*inputs[:-1])),
    kernel=_row_attention,
    fake=_row_attention_fake,
    autograd=_row_attention_autograd,
    autocast=to_autocast,
)


# --- torch.ops.multimax_fairseq.row_attention_backward -----------------------------------------


def _check_backward(grad: Tensor, statistics: Tensor, *inputs: Any) -> None:
    call = RowAttentionCall(*inputs)
    _check(call)
    if grad.shape != call.query.shape or grad.dtype != call.query.dtype:
        raise ValueError(
            f"grad must be {call.query.dtype} {list(call.query.shape)}, got {grad.dtype} "
            f"{list(grad.shape)}"
        )
    shape = _statistics_shape(call.query, True)
    fits = tuple(statistics.shape) == shape and statistics.dtype == torch.float32
    if not fits or not statistics.is_contiguous():
        raise ValueError(
            f"statistics must be contiguous float32 {list(shape)}, of a call with keep=True, got "
            f"{statistics.dtype} {list(statistics.shape)}"
        )
    for name, tensor in (("grad", grad), ("statistics", statistics)):
        check_device(name, tensor, call.query, "query")


def _row_attention_backward(grad: Tensor, statistics: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value and parameter; empty for None."""
    call = RowAttentionCall(*inputs)
    by_parameter = torch.zeros_like(
        call.query.new_empty(0, dtype=torch.float32) if call.parameter is None else call.parameter,
        memory_format=torch.contiguous_format,
    )
    if call.as_softmax_call.is_empty:
        return *(native.dense_like(t).zero_() for t in call[:3]), by_parameter
    if on_triton(call.query.device):
        from multimax_fairseq.ops.triton.row_attention import row_attention_backward

        return row_attention_backward(grad, statistics, call)
    by_query, by_key, by_value = (native.dense_like(t, torch.float32) for t in call[:3])
    native.call(
        "row_attention_backward",
        native.RowAttention,
        **call.fields,
        statistics=statistics,
        grad_output=native.wide(grad),
        grad_query=by_query,
        grad_key=by_key,
        grad_value=by_value,
        grad_parameter=None if call.parameter is None else by_parameter,
    )
    by_inputs = (native.cast(t, call.query.dtype) for t in (by_query, by_key, by_value))
    return *by_inputs, by_parameter


def _row_attention_backward_fake(
    grad: Tensor, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    call = RowAttentionCall(*inputs)
    shape = (0,) if call.parameter is None else call.parameter.shape
    by_parameter = call.query.new_empty(shape, dtype=torch.float32)
    return *(native.dense_like(t) for t in call[:3]), by_parameter


row_attention_backward: Operator = define(
    f"row_attention_backward(Tensor grad, Tensor statistics, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    kernel=_row_attention_backward,
    fake=_row_attention_backward_fake,
    autograd=without_gradient("row_attention_backward"),
)
