"""Fused attention on a CPU by row functions: mappings that need all scores of a query.

    O = dropout(f(scale * Q K^T + mask)) V

The (T, S) weights are not stored. `ops.attention.fused_attention` calls `row_attention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax_fairseq.ops import attention, native
from multimax_fairseq.ops.attention import AttentionCall
from multimax_fairseq.ops.backend import traced
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    differentiable_once,
    needs_gradient,
    schema_of,
    without_gradient,
)

# In the order of `dispatch_row` in cpp/row_attention.h.
FUNCTIONS = ("topk", "evsoftmax", "sparsemax", "entmax15", "alpha_entmax", "sigmoid", "softpick")
WITH_PARAMETER = ("topk", "evsoftmax", "alpha_entmax", "sigmoid")


@dataclass(frozen=True)
class RowFunction:
    """A mapping as the kernel computes it.

    Attributes:
        name: of FUNCTIONS.
        parameter: k (topk); the factor of low scores (evsoftmax); alpha in (1, 2] (alpha_entmax),
            which gets its gradient; the bias (sigmoid), NaN for minus the logarithm of the number
            of keys. A number, or a tensor with one number for all heads or for each.
        counts_keys: whether the weights depend on the number of keys. A float mask must then be 0
            or -inf everywhere.
    """

    name: str
    parameter: float | Tensor | None = None
    counts_keys: bool = False

    def supports(self, mask: Tensor | None) -> bool:
        """Return whether the kernel supports a mask, bool or float."""
        if not self.counts_keys or mask is None or mask.dtype == torch.bool:
            return True
        if traced():  # the numbers in the mask are unknown
            return False
        return bool(((mask == 0) | (mask == -math.inf)).all())


class RowAttentionCall(NamedTuple):
    """The arguments of one attention.

    query, key, value, mask, seed, is_causal, dropout_p, scale: as `AttentionCall`, on the CPU.
    parameter: (H,) float32, or None.
    function: index in FUNCTIONS.
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
    function: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that autograd saves."""
        return self[:6]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The fields after the tensors."""
        return self[6:]

    @property
    def without_function(self) -> AttentionCall:
        """The call of softmax with the same arguments."""
        query, key, value, _, mask, seed, is_causal, dropout_p, scale, _ = self
        return AttentionCall(
            query, key, value, None, None, mask, seed, is_causal, dropout_p, scale, 2, 2
        )

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `native.RowAttention` that the forward and the backward pass share."""
        parameter = None if self.parameter is None else self.parameter.contiguous()
        fields = attention.fields_of(self.without_function)
        return {**fields, "function": self.function, "parameter": parameter}


_ARGUMENTS = schema_of(RowAttentionCall)


def _check(call: RowAttentionCall) -> None:
    attention.check_call(call.without_function)
    if call.query.device.type == "cuda":
        raise ValueError("row functions have no kernel on a GPU: use the mapping's own function")
    if call.parameter is not None:
        attention.check_per_head("parameter", call.parameter, call.query, "number")
    if not 0 <= call.function < len(FUNCTIONS):
        raise ValueError(
            f"function must be an index in {', '.join(FUNCTIONS)}, got {call.function}"
        )
    name = FUNCTIONS[call.function]
    if call.parameter is None and name in WITH_PARAMETER:
        raise ValueError(f"the row function {name} needs a parameter: give one number per head")


# --- torch.ops.multimax_fairseq.row_attention --------------------------------------------------


def _row_attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if the last input is True, what the gradient needs of each row."""
    *arguments, keep = inputs
    call = RowAttentionCall(*arguments)
    query = call.query
    found = query.new_empty(_found_shape(query, keep), dtype=torch.float32)
    if call.without_function.is_empty:
        return native.dense_like(query).zero_(), found.zero_()
    output = native.dense_like(query, torch.float32)
    native.call(
        "row_attention_forward",
        native.RowAttention,
        output=output,
        found=found if keep else None,
        **call.fields,
    )
    return native.cast(output, query.dtype), found


def _found_shape(query: Tensor, keep: bool) -> tuple[int, ...]:
    batch, heads, queries, _ = query.shape
    return (batch, heads, 3, queries) if keep else (0,)


def _row_attention_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    query, keep = inputs[0], inputs[-1]
    return native.dense_like(query), query.new_empty(_found_shape(query, keep), dtype=torch.float32)


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        call = RowAttentionCall(*inputs)
        output, found = below(*call, True)
        ctx.save_for_backward(found, *call.tensors)
        ctx.numbers = call.numbers
        ctx.mark_non_differentiable(found)
        ctx.set_materialize_grads(False)
        return output, found

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (1 + len(RowAttentionCall._fields))
        found, *tensors = ctx.saved_tensors
        call = RowAttentionCall(*tensors, *ctx.numbers)
        *by_inputs, by_parameter = row_attention_backward(grad, found, *call)
        is_learned = call.parameter is not None and call.parameter.requires_grad
        # None for `below`, the mask, the seed and the numbers.
        return (
            None,
            *by_inputs,
            by_parameter if is_learned else None,
            *(None, None),
            *(None for _ in call.numbers),
        )


def _row_attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    call = RowAttentionCall(*inputs[:-1])
    if not needs_gradient(*call.tensors):
        return below(*inputs)
    is_learned = call.parameter is not None and call.parameter.requires_grad
    if is_learned and FUNCTIONS[call.function] != "alpha_entmax":
        raise ValueError("only alpha_entmax has a gradient by its parameter: detach the parameter")
    return _RowAttention.apply(below, *call)


row_attention: Operator = define(
    f"row_attention({_ARGUMENTS}, bool keep) -> (Tensor, Tensor)",
    check=lambda *inputs: _check(RowAttentionCall(*inputs[:-1])),
    kernel=_row_attention,
    fake=_row_attention_fake,
    autograd=_row_attention_autograd,
    autocast=attention.to_autocast,
)


# --- torch.ops.multimax_fairseq.row_attention_backward -----------------------------------------


def _check_backward(grad: Tensor, found: Tensor, *inputs: Any) -> None:
    call = RowAttentionCall(*inputs)
    _check(call)
    if grad.shape != call.query.shape or grad.dtype != call.query.dtype:
        raise ValueError(
            f"grad must be {call.query.dtype} {list(call.query.shape)}, got {grad.dtype} "
            f"{list(grad.shape)}"
        )
    shape = _found_shape(call.query, True)
    if tuple(found.shape) != shape or found.dtype != torch.float32 or not found.is_contiguous():
        raise ValueError(
            f"found must be contiguous float32 {list(shape)}, of a call with keep=True, got "
            f"{found.dtype} {list(found.shape)}"
        )


def _row_attention_backward(grad: Tensor, found: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Return the gradients by query, key, value and parameter; empty for None."""
    call = RowAttentionCall(*inputs)
    by_parameter = torch.zeros_like(
        call.query.new_empty(0, dtype=torch.float32) if call.parameter is None else call.parameter,
        memory_format=torch.contiguous_format,
    )
    if call.without_function.is_empty:
        return *(native.dense_like(t).zero_() for t in call[:3]), by_parameter
    by_query, by_key, by_value = (native.dense_like(t, torch.float32) for t in call[:3])
    native.call(
        "row_attention_backward",
        native.RowAttention,
        **call.fields,
        found=found,
        grad_output=native.wide(grad),
        grad_query=by_query,
        grad_key=by_key,
        grad_value=by_value,
        grad_parameter=None if call.parameter is None else by_parameter,
    )
    by_inputs = (native.cast(t, call.query.dtype) for t in (by_query, by_key, by_value))
    return *by_inputs, by_parameter


def _row_attention_backward_fake(grad: Tensor, found: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    call = RowAttentionCall(*inputs)
    shape = (0,) if call.parameter is None else call.parameter.shape
    by_parameter = call.query.new_empty(shape, dtype=torch.float32)
    return *(native.dense_like(t) for t in call[:3]), by_parameter


row_attention_backward: Operator = define(
    f"row_attention_backward(Tensor grad, Tensor found, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    kernel=_row_attention_backward,
    fake=_row_attention_backward_fake,
    autograd=without_gradient("row_attention_backward"),
)
