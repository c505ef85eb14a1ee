"""The operator of fused softmax attention, with MultiMax's modulator and a sink.

    O = dropout(softmax(sigma(scale * Q K^T) + mask)) V

The (T, S) probabilities are not stored. `ops.attention.fused_attention` calls `attention`.
"""

from __future__ import annotations

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
        mask: (B or 1, H or 1, T or 1, S or 1). Bool: True excludes. float32: added to the modulated
            scores, -inf excludes. A query with no key left gets zeros.
        seed: scalar int64 on the CPU, for dropout; its lower 31 bits count.
        is_causal: query t attends to keys up to t; with a mask, both hold.
        dropout_p: probability of dropping an attention probability, below 1.
        scale: finite.
        low, high: orders of the modulator's sides, 0 to 2; the Triton kernels compile for them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor | None
    sink: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    low: int
    high: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields that autograd saves."""
        return self[:7]

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The fields after the tensors."""
        return self[7:]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key."""
        return self.query.numel() == 0 or self.key.numel() == 0


# --- torch.ops.multimax_fairseq.attention ------------------------------------------------------

_ARGUMENTS = schema_of(AttentionCall)


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


def check_per_head(name: str, value: Tensor, query: Tensor, what: str) -> None:
    """Raise ValueError unless the value is float32 (H,), on query's device."""
    heads = query.shape[1]
    if tuple(value.shape) != (heads,) or value.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 ({heads},), one {what} per head, got {value.dtype} "
            f"{list(value.shape)}"
        )
    check_device(name, value, query, "query")


def check_scalars(query: Tensor, table: Tensor | None, sink: Tensor | None, scale: float) -> None:
    """Raise ValueError for a table, sink or scale that the kernels cannot take."""
    heads = query.shape[1]
    if table is not None:
        check_table(table, heads, query, "query")
    if sink is not None:
        check_per_head("sink", sink, query, "score")
    if not -torch.inf < scale < torch.inf:
        raise ValueError(f"scale must be finite, got {scale}")


def _attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if the last input is True, the row statistics for the gradient."""
    *arguments, keep = inputs
    call = AttentionCall(*arguments)
    query = call.query
    if call.is_empty:
        output = native.dense_like(query).zero_()
        statistics = query.new_zeros(_statistics_shape(query), dtype=torch.float32)
    elif on_triton(query.device):
        from multimax_fairseq.ops.triton.attention import attention_forward

        output, statistics = attention_forward(call)
    else:
        output = native.dense_like(query, torch.float32)
        shape = _statistics_shape(query) if keep else (0,)
        statistics = output.new_empty(shape)
        native.call(
            "attention_forward",
            native.Attention,
            output=output,
            statistics=statistics if keep else None,
            **fields_of(call),
        )
        output = native.cast(output, query.dtype)
    return output, statistics if keep else statistics.new_empty(0)


def _statistics_shape(query: Tensor) -> tuple[int, ...]:
    """Return the shape of the row statistics.

    C++ stores the maximum score and 1 / sum of each row, Triton the log-sum-exp.
    """
    batch, heads, queries, _ = query.shape
    return batch, heads, 1 if on_triton(query.device) else 2, queries


def _attention_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    query, keep = inputs[0], inputs[-1]
    shape = _statistics_shape(query) if keep else (0,)
    return native.dense_like(query), torch.empty(shape, dtype=torch.float32, device=query.device)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*inputs)
        output, statistics = below(*call, True)
        ctx.save_for_backward(output, statistics, *call.tensors)
        ctx.numbers = call.numbers
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
        call = AttentionCall(*tensors, *ctx.numbers)
        *by_inputs, by_table, by_sink = attention_backward(grad, output, statistics, *call)
        by_table = None if call.table is None else by_table
        by_sink = None if call.sink is None else by_sink
        # None for `below`, the mask, the seed and the numbers.
        return (None, *by_inputs, by_table, by_sink, None, None, *(None for _ in call.numbers))


def _attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    call = AttentionCall(*inputs[:-1])
    if not needs_gradient(*call.tensors):
        return below(*inputs)
    if call.mask is not None and call.mask.requires_grad:
        raise ValueError("mask gets no gradient here: scaled_dot_product_attention gives it one")
    return _Attention.apply(below, *call)


def to_autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
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
    autocast=to_autocast,
)


# --- torch.ops.multimax_fairseq.attention_backward ---------------------------------------------


def _check_backward(grad: Tensor, output: Tensor, statistics: Tensor, *inputs: Any) -> None:
    call = AttentionCall(*inputs)
    check_call(call)
    query = call.query
    for name, tensor in (("grad", grad), ("output", output)):
        if tensor.shape != query.shape:
            raise ValueError(f"{name} must be {list(query.shape)}, got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    shape = _statistics_shape(query)
    if tuple(statistics.shape) != shape or statistics.dtype != torch.float32:
        raise ValueError(
            f"statistics must be float32 {list(shape)}, of a call with keep=True, got "
            f"{statistics.dtype} {list(statistics.shape)}"
        )
    check_device("statistics", statistics, query, "query")
    if not statistics.is_contiguous():
        raise ValueError("statistics must be contiguous, as the forward pass gave them")


def _attention_backward(
    grad: Tensor, output: Tensor, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    """Return the gradients by query, key, value, table and sink; empty for None."""
    call = AttentionCall(*inputs)
    query, key, value = call[:3]
    grads: tuple[Tensor | None, ...]
    if call.is_empty:
        by_inputs = (native.dense_like(t).zero_() for t in (query, key, value))
        by_scalars = (None if t is None else torch.zeros_like(t) for t in (call.table, call.sink))
        grads = (*by_inputs, *by_scalars)
    elif on_triton(query.device):
        from multimax_fairseq.ops.triton.attention import attention_backward

        grads = attention_backward(grad, output, statistics, call)
    else:
        by_query, by_key, by_value = (
            native.dense_like(t, torch.float32) for t in (query, key, value)
        )
        by_table, by_sink = (
            None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
            for t in (call.table, call.sink)
        )
        native.call(
            "attention_backward",
            native.Attention,
            **fields_of(call),
            statistics=statistics,
            grad_output=native.wide(grad),
            grad_query=by_query,
            grad_key=by_key,
            grad_value=by_value,
            grad_table=by_table,
            grad_sink=by_sink,
        )
        by_inputs = (native.cast(t, query.dtype) for t in (by_query, by_key, by_value))
        grads = (*by_inputs, by_table, by_sink)
    # Outputs of an operator must not share memory: one empty tensor for each None.
    return tuple(query.new_empty(0, dtype=torch.float32) if g is None else g for g in grads)


def _attention_backward_fake(
    grad: Tensor, output: Tensor, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    call = AttentionCall(*inputs)
    by_scalars = (
        call.query.new_empty((0,) if t is None else t.shape, dtype=torch.float32)
        for t in (call.table, call.sink)
    )
    return *(native.dense_like(t) for t in call[:3]), *by_scalars


attention_backward: Operator = define(
    f"attention_backward(Tensor grad, Tensor output, Tensor statistics, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    kernel=_attention_backward,
    fake=_attention_backward_fake,
    autograd=without_gradient("attention_backward"),
)


# --- C++ ---------------------------------------------------------------------------------------


def fields_of(call: AttentionCall) -> dict[str, Any]:
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
        "sink": None if call.sink is None else call.sink.contiguous(),
        "seed": 0 if call.seed is None else int(call.seed),
        "starts": starts,
        "ends": ends,
        "is_causal": call.is_causal,
        "dropout": call.dropout_p,
        "scale": call.scale,
        **table_fields(call.table),
    }
    if needs_mask and call.mask is not None:
        fields["mask"] = _mask_of(call.mask)
    return fields


def table_fields(table: Tensor | None) -> dict[str, Any]:
    """Return the fields of `native.Attention` for the modulator."""
    if table is None:
        return {}
    columns = table.shape[1]
    row = columns if len(table) > 1 else 0
    return {"table": table.contiguous(), "columns": columns, "table_row": row}


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
