"""The operators of fused attention.

    O = dropout(f(scale * Q K^T + mask)) V

f is softmax, with MultiMax's modulator and a sink, or a row function such as entmax. The (T, S)
weights are not stored. `ops.attention.fused_attention` calls `attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import on_triton
from multimax_fairseq.ops.checks import (
    DTYPES,
    check_device,
    check_dropout,
    check_float,
    check_tensor,
)
from multimax_fairseq.ops.modulator import check_table
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

# The largest head size on a GPU, where a tile must fit into shared memory.
MAX_HEAD_SIZE = 128


class AttentionCall(NamedTuple):
    """The arguments of one attention, from the public function to the kernels.

    Attributes:
        query: (B, H, T, D), float32, float16 or bfloat16, any strides.
        key, value: (B, H, S, D), of the same dtype.
        table: (1 or H, 8 or 12), or (1, 3) for a soft-cap; float32, of `ops.modulator.table_of`.
            None is softmax.
        sink: (H,) float32, the score of an entry without a key; None for no sink.
        parameter: (H,) float32, of the row function, or None.
        mask: (B or 1, H or 1, T or 1, S or 1). Bool: True excludes. float32: added to the modulated
            scores, -inf excludes. A query with no key left gets zeros.
        seed: scalar int64 on the CPU, for dropout; its lower 31 bits count.
        is_causal: query t attends to keys up to t; with a mask, both hold.
        dropout_p: probability of dropping an attention weight, below 1.
        scale: finite.
        low, high: orders of the modulator's sides, 0 to 2; the Triton kernels compile for them.
        function, header: the name and the header of a `RowFunction`, which takes neither table nor
            sink; None is softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    sink: Tensor | None
    parameter: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    low: int
    high: int
    function: str | None
    header: str | None

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key."""
        return self.query.numel() == 0 or self.key.numel() == 0


# The tensors that get a gradient, and all tensors.
_DIFFERENTIABLE = ("query", "key", "value", "table", "sink", "parameter")
_TENSORS = (*_DIFFERENTIABLE, "mask", "seed")
_differentiable = operator.attrgetter(*_DIFFERENTIABLE)
_tensors = operator.attrgetter(*_TENSORS)
_ARGUMENTS = schema_of(AttentionCall)


# --- checks ------------------------------------------------------------------------------------


def supports_head_size(device: torch.device, size: int) -> bool:
    return size <= MAX_HEAD_SIZE or not on_triton(device)


def check_mask(name: str, mask: Tensor, full: tuple[int, ...], query: Tensor) -> None:
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        kinds = "True may attend" if name == "attn_mask" else "True excludes"
        raise ValueError(
            f"{name} must be bool ({kinds}) or floating-point (added), got {mask.dtype}"
        )
    check_device(name, mask, query, "query")
    fits = mask.dim() <= len(full) and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must be broadcastable to {list(full)}, got {list(mask.shape)}")


def check_call(call: AttentionCall) -> None:
    """Raise ValueError for a call that the kernels cannot take."""
    query = call.query
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, H, length, D), got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    batch, heads, queries, size = query.shape
    keys = call.key.shape[2]
    if call.key.shape != (batch, heads, keys, size) or call.value.shape != call.key.shape:
        raise ValueError(
            f"key and value must be ({batch}, {heads}, S, {size}), as query, got "
            f"{list(call.key.shape)} and {list(call.value.shape)}"
        )
    if not supports_head_size(query.device, size):
        raise ValueError(f"head sizes above {MAX_HEAD_SIZE} are not supported on a GPU, got {size}")
    check_scalars(query, call.table, call.sink, call.scale)
    check_row_function(call.function, call.header, call.parameter, call.table, call.sink, query)
    if call.mask is not None:
        full = (batch, heads, queries, keys)
        if call.mask.dim() != 4:
            raise ValueError(
                f"mask must be 4-dimensional and broadcastable to {list(full)}, got "
                f"{list(call.mask.shape)}"
            )
        check_mask("mask", call.mask, full, query)
        if call.mask.dtype not in (torch.bool, torch.float32):
            raise ValueError(
                f"mask must be bool (True excludes) or float32 (added), got {call.mask.dtype}"
            )
    if keys >= 2**31:
        raise ValueError(f"key must have fewer than 2**31 rows, got {keys}")
    check_dropout("dropout_p", call.dropout_p, call.seed)
    if call.low not in (0, 1, 2) or call.high not in (0, 1, 2):
        raise ValueError(
            f"the orders low and high must be 0, 1 or 2, got {call.low} and {call.high}"
        )


def check_scalars(query: Tensor, table: Tensor | None, sink: Tensor | None, scale: float) -> None:
    """Raise ValueError for a table, sink or scale that the kernels cannot take."""
    heads = query.shape[1]
    if table is not None:
        check_table(table, heads, query, "query")
    if sink is not None:
        _check_per_head("sink", sink, query, "score")
    if not -torch.inf < scale < torch.inf:
        raise ValueError(f"scale must be finite, got {scale}")


def check_row_function(
    function: str | None,
    header: str | None,
    parameter: Tensor | None,
    table: Tensor | None,
    sink: Tensor | None,
    query: Tensor,
) -> None:
    """Raise ValueError for a row function that the kernels cannot compute."""
    if function is None:
        if parameter is not None or header is not None:
            raise ValueError("parameter and header belong to a function: pass its name too")
        return
    if table is not None or sink is not None:
        raise ValueError(f"the row function {function} takes neither table nor sink: pass None")
    check_function(function, header, parameter is not None)
    if parameter is not None:
        _check_per_head("parameter", parameter, query, "number")
    if on_triton(query.device):
        if header is not None or function not in ON_TRITON:
            raise ValueError(f"{function} has no kernel on a GPU: use the mapping's own function")
    elif native.row_library(header, function) is None:
        raise ValueError(f"there is no compiled row function {function}: the log says why")


def _check_per_head(name: str, value: Tensor, query: Tensor, what: str) -> None:
    """Raise ValueError unless the value is float32 (H,), on query's device."""
    heads = query.shape[1]
    if tuple(value.shape) != (heads,) or value.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 ({heads},), one {what} per head, got {value.dtype} "
            f"{list(value.shape)}"
        )
    check_device(name, value, query, "query")


def _check_learned_parameter(call: AttentionCall) -> None:
    """Raise ValueError if the parameter needs a gradient that the row function does not give."""
    if call.parameter is None or not call.parameter.requires_grad:
        return
    assert call.function is not None
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


# --- torch.ops.multimax_fairseq.attention ------------------------------------------------------


def _attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if the last input is True, the row statistics for the gradient."""
    *arguments, keep = inputs
    call = AttentionCall(*arguments)
    query = call.query
    if on_triton(query.device) and not call.is_empty:
        from multimax_fairseq.ops.triton import attention, row_attention

        forward = (
            attention.attention_forward
            if call.function is None
            else row_attention.row_attention_forward
        )
        output, statistics = forward(call)
        return output, statistics if keep else statistics.new_empty(0)
    statistics = query.new_empty(_statistics_shape(call, keep), dtype=torch.float32)
    if call.is_empty:
        return native.dense_like(query).zero_(), statistics.zero_()
    output = native.dense_like(query, torch.float32)
    native.call(
        kernel_name("attention_forward", call.function),
        native.Attention,
        output=output,
        statistics=statistics if keep else None,
        **_fields_of(call),
    )
    return native.cast(output, query.dtype), statistics


def _statistics_shape(call: AttentionCall, keep: bool) -> tuple[int, ...]:
    """Return the shape of the row statistics.

    Of softmax, C++ stores the maximum score and 1 / sum of each row, Triton the log-sum-exp. A row
    function has three, as in cpp/rows.h.
    """
    if not keep:
        return (0,)
    batch, heads, queries, _ = call.query.shape
    count = 3 if call.function is not None else 1 if on_triton(call.query.device) else 2
    return batch, heads, count, queries


def _attention_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    *arguments, keep = inputs
    call = AttentionCall(*arguments)
    shape = _statistics_shape(call, keep)
    return native.dense_like(call.query), call.query.new_empty(shape, dtype=torch.float32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*inputs)
        output, statistics = below(*call, True)
        kept = output if _needs_output(call) else None
        ctx.save_for_backward(kept, statistics, *_tensors(call))
        ctx.numbers = call._replace(**dict.fromkeys(_TENSORS))  # type: ignore[arg-type]
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # the gradient of the statistics is not read
        return output, statistics

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (1 + len(AttentionCall._fields))
        # Read once: under activation checkpointing, each access computes them again.
        output, statistics, *tensors = ctx.saved_tensors
        call = ctx.numbers._replace(**dict(zip(_TENSORS, tensors, strict=True)))
        found = attention_backward(grad, output, statistics, *call)
        grads = {
            name: None if x is None else gradient
            for name, x, gradient in zip(_DIFFERENTIABLE, tensors, found, strict=False)
        }
        # None for `below`.
        return (None, *map(grads.get, AttentionCall._fields))


def _needs_output(call: AttentionCall) -> bool:
    """Whether the backward pass reads the output: Triton's does, for softmax."""
    return call.function is None and on_triton(call.query.device)


def _attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    call = AttentionCall(*inputs[:-1])
    if not needs_gradient(*_tensors(call)):
        return below(*inputs)
    if call.mask is not None and call.mask.requires_grad:
        raise ValueError("mask gets no gradient here: scaled_dot_product_attention gives it one")
    if call.function in WITHOUT_GRADIENT and call.header is None:
        raise ValueError(f"{call.function} has no gradient here: use the mapping's own function")
    _check_learned_parameter(call)
    return _Attention.apply(below, *call)


def _to_autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Cast as torch does for its own attention; other tensors stay float32."""
    dtype = torch.get_autocast_dtype(query.device.type)
    parts = (t.to(dtype) if t.dtype in DTYPES else t for t in (query, key, value))
    return *parts, *rest


attention: Operator = define(
    f"attention({_ARGUMENTS}, bool keep) -> (Tensor, Tensor)",
    check=lambda *inputs: check_call(AttentionCall(*inputs[:-1])),
    kernel=_attention,
    fake=_attention_fake,
    autograd=_attention_autograd,
    autocast=_to_autocast,
)


# --- torch.ops.multimax_fairseq.attention_backward ---------------------------------------------


def _check_backward(grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any) -> None:
    call = AttentionCall(*inputs)
    check_call(call)
    query = call.query
    if output is None and _needs_output(call):
        raise ValueError("output is None: pass that of the forward pass")
    for name, tensor in (("grad", grad), ("output", output)):
        if tensor is None:
            continue
        if tensor.shape != query.shape:
            raise ValueError(f"{name} must be {list(query.shape)}, got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    shape = _statistics_shape(call, True)
    if tuple(statistics.shape) != shape or statistics.dtype != torch.float32:
        raise ValueError(
            f"statistics must be float32 {list(shape)}, of a call with keep=True, got "
            f"{statistics.dtype} {list(statistics.shape)}"
        )
    check_device("statistics", statistics, query, "query")
    if not statistics.is_contiguous():
        raise ValueError("statistics must be contiguous, as the forward pass gave them")


def _attention_backward(
    grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, table, sink and parameter; empty for None."""
    call = AttentionCall(*inputs)
    wanted = dict(zip(_DIFFERENTIABLE, _differentiable(call), strict=True))
    if call.is_empty:
        grads = {name: native.dense_like(x).zero_() for name, x in wanted.items() if x is not None}
    elif on_triton(call.query.device):
        from multimax_fairseq.ops.triton import attention, row_attention

        if call.function is None:
            grads = attention.attention_backward(grad, output, statistics, call)
        else:
            grads = row_attention.row_attention_backward(grad, statistics, call)
    else:
        grads = {
            name: native.dense_like(x, torch.float32) for name, x in wanted.items() if x is not None
        }
        fields: dict[str, Any] = {f"grad_{name}": x for name, x in grads.items()}
        native.call(
            kernel_name("attention_backward", call.function),
            native.Attention,
            **_fields_of(call),
            statistics=statistics,
            grad_output=native.wide(grad),
            **fields,
        )
        for name in ("query", "key", "value"):
            grads[name] = native.cast(grads[name], call.query.dtype)
    # Outputs of an operator must not share memory: one empty tensor for each None.
    return tuple(
        grads[name]
        if name in grads
        else call.query.new_zeros(0 if x is None else x.shape, dtype=torch.float32)
        for name, x in wanted.items()
    )


def _attention_backward_fake(
    grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    call = AttentionCall(*inputs)
    of_scalars = (
        call.query.new_empty((0,) if x is None else x.shape, dtype=torch.float32)
        for x in (call.table, call.sink, call.parameter)
    )
    return *(native.dense_like(x) for x in (call.query, call.key, call.value)), *of_scalars


attention_backward: Operator = define(
    f"attention_backward(Tensor grad, Tensor? output, Tensor statistics, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    kernel=_attention_backward,
    fake=_attention_backward_fake,
    autograd=without_gradient("attention_backward"),
)


# --- C++ ---------------------------------------------------------------------------------------


def kernel_name(name: str, function: str | None) -> str:
    """Return the name of the C++ function of softmax, or of row functions."""
    return name if function is None else f"row_{name}"


def _fields_of(call: AttentionCall) -> dict[str, Any]:
    """Return the fields of `native.Attention` that the forward and the backward pass share."""
    batch, heads, queries, size = call.query.shape
    keys = call.key.shape[2]
    starts, ends, needs_mask = windows(batch, queries, keys, call.mask, call.is_causal)
    fields: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "size": size,
        "threads": torch.get_num_threads(),
        "query": native.wide(call.query),
        "key": native.wide(call.key),
        "value": native.wide(call.value),
        "seed": 0 if call.seed is None else int(call.seed),
        "starts": starts,
        "ends": ends,
        "is_causal": call.is_causal,
        "dropout": call.dropout_p,
        "scale": call.scale,
        **mapping_fields(call.table, call.sink, call.parameter, call.function, call.header),
    }
    if needs_mask and call.mask is not None:
        fields["mask"] = _mask_of(call.mask)
    return fields


def mapping_fields(
    table: Tensor | None,
    sink: Tensor | None,
    parameter: Tensor | None,
    function: str | None,
    header: str | None,
) -> dict[str, Any]:
    """Return the fields of `native.Attention` for the mapping, and the library that computes it."""
    fields: dict[str, Any] = {}
    if table is not None:
        columns = table.shape[1]
        row = columns if len(table) > 1 else 0
        fields = {"table": table.contiguous(), "columns": columns, "table_row": row}
    if sink is not None:
        fields["sink"] = sink.contiguous()
    if parameter is not None:
        fields["parameter"] = parameter.contiguous()
    if function is not None:
        fields["kernels"] = native.row_library(header, function)
        fields["function"] = FUNCTIONS.index(function) if header is None else 0
    return fields


def _mask_of(mask: Tensor) -> native.Mask:
    strides = [0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True)]
    return native.Mask(mask.data_ptr(), mask.dtype == torch.float32, tuple(strides))


def windows(
    batch: int, queries: int, keys: int, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return which keys each query may attend to, as starts <= s < ends.

    Args:
        mask, is_causal: as in `AttentionCall`.

    Returns:
        starts and ends, (batch, queries) int32, or None for all keys that `is_causal` allows; and
        whether the kernel must read the mask too, because windows do not describe it.
    """
    if mask is None or mask.shape[1] > 1:
        return None, None, mask is not None
    starts, ends = torch.empty(2, batch, queries, dtype=torch.int32, device="cpu")
    is_whole = native.find_windows(_mask_of(mask), batch, queries, keys, is_causal, starts, ends)
    return starts, ends, not is_whole
