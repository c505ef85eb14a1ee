"""The operators attention, attention_backward and attention_step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.kernels import cpu
from multimax_fairseq.kernels.operators.definition import (
    DTYPES,
    Operator,
    check_device,
    check_dropout,
    check_float,
    check_table,
    define,
    differentiable_once,
    needs_gradient,
    no_autocast,
    on_triton,
    without_gradient,
)

# On a GPU, as far as a tile of it fits on the chip.
MAX_HEAD_SIZE = 128


def serves(device: torch.device, size: int) -> bool:
    """Whether an attention of this head size has a kernel."""
    return size <= MAX_HEAD_SIZE or not on_triton(device)


# Of `attention_step`: a head's size is a multiple of it, which all vectors of a processor divide.
STEP_SIZES = 16


# What an attention is asked for besides its tensors.
_NUMBERS = "bool is_causal, float dropout_p, float scale, int low, int high"


def _check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, H, length, D), got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    if key.shape != (batch, heads, keys, size) or value.shape != key.shape:
        raise ValueError(
            f"key and value must be ({batch}, {heads}, S, {size}), as query, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    if not serves(query.device, query.shape[-1]):
        raise ValueError(f"head sizes above {MAX_HEAD_SIZE} are not served on a GPU, got {size}")
    _check_scalars(query, heads, table, sink, scale)
    if mask is not None:
        full = (batch, heads, queries, keys)
        fits = mask.dim() == 4 and all(
            n == 1 or n == m for n, m in zip(mask.shape, full, strict=True)
        )
        if not fits:
            raise ValueError(
                f"mask must be 4-dimensional and broadcastable to {list(full)}, got "
                f"{list(mask.shape)}"
            )
        if mask.dtype not in (torch.bool, torch.float32):
            raise ValueError(
                f"mask must be bool (True excludes) or float32 (added), got {mask.dtype}"
            )
        check_device("mask", mask, query, "query")
    if keys >= 2**31:
        raise ValueError(f"key must have fewer than 2**31 rows, got {keys}")
    check_dropout("dropout_p", dropout_p, seed)
    if low not in (0, 1, 2) or high not in (0, 1, 2):
        raise ValueError(f"the orders low and high must be 0, 1 or 2, got {low} and {high}")


def _check_scalars(
    query: Tensor, heads: int, table: Tensor | None, sink: Tensor | None, scale: float
) -> None:
    if table is not None:
        check_table(table, heads, query, "query")
    if sink is not None:
        if tuple(sink.shape) != (heads,) or sink.dtype != torch.float32:
            raise ValueError(
                f"sink must be float32 ({heads},), one score per head, got {sink.dtype} "
                f"{list(sink.shape)}"
            )
        check_device("sink", sink, query, "query")
    if not -torch.inf < scale < torch.inf:
        raise ValueError(f"scale must be finite, got {scale}")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    _check_attention(query, key, value, table, sink, mask, seed, dropout_p, scale, low, high)
    drawn = 0 if seed is None else int(seed)
    statistics: Tensor | None
    if query.numel() == 0 or key.numel() == 0:
        output = cpu.dense_like(query).zero_()
        statistics = query.new_zeros(_statistics_shape(query), dtype=torch.float32)
    elif on_triton(query.device):
        from multimax_fairseq.kernels import triton_attention

        output, statistics = triton_attention.attention_forward(
            query, key, value, table, sink, mask, drawn, is_causal, dropout_p, scale, low, high
        )
    else:
        output, statistics = cpu.attention_forward(
            query, key, value, table, sink, mask, drawn, is_causal, dropout_p, scale, keep
        )
    if not keep or statistics is None:
        statistics = torch.empty(0, dtype=torch.float32, device=query.device)
    return output, statistics


def _statistics_shape(query: Tensor) -> tuple[int, ...]:
    """Of a row: the largest score and one over the sum; on a GPU the logarithm of the sum."""
    batch, heads, queries, _ = query.shape
    return batch, heads, 1 if on_triton(query.device) else 2, queries


def _attention_fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    _check_attention(query, key, value, table, sink, mask, seed, dropout_p, scale, low, high)
    shape = _statistics_shape(query) if keep else (0,)
    return cpu.dense_like(query), torch.empty(shape, dtype=torch.float32, device=query.device)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        below: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        sink: Tensor | None,
        mask: Tensor | None,
        seed: Tensor | None,
        *numbers: Any,
    ) -> tuple[Tensor, Tensor]:
        output, statistics = below(query, key, value, table, sink, mask, seed, *numbers, True)
        ctx.save_for_backward(query, key, value, output, statistics, table, sink, mask, seed)
        ctx.numbers = numbers
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # those of the statistics, nobody would read
        return output, statistics

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 13
        saved = ctx.saved_tensors  # to be asked for once: checkpointing computes them for it
        grads = attention_backward(grad, *saved, *ctx.numbers)
        by_table = grads[3] if saved[5] is not None else None
        by_sink = grads[4] if saved[6] is not None else None
        return (None, *grads[:3], by_table, by_sink, *(None,) * 7)


def _attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    if not needs_gradient(*inputs[:6]):
        return below(*inputs)
    if inputs[5] is not None and inputs[5].requires_grad:
        raise ValueError("mask gets no gradient here: scaled_dot_product_attention gives it one")
    return _Attend.apply(below, *inputs[:-1])


def _attention_autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    # As torch casts the inputs of its own attention. Table, sink and mask stay float32.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device)
    parts = (t.to(dtype) if t.dtype in DTYPES else t for t in (query, key, value))
    return no_autocast(device, attention, *parts, *rest)


attention: Operator = define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? table, Tensor? sink, Tensor? mask, "
    f"Tensor? seed, {_NUMBERS}, bool keep) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
    _attention_autograd,
    _attention_autocast,
)


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    statistics: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_attention_backward(
        *(grad, query, key, value, output, statistics, table, sink, mask, seed),
        *(dropout_p, scale, low, high),
    )
    drawn = 0 if seed is None else int(seed)
    grads: Sequence[Tensor | None]
    if query.numel() == 0 or key.numel() == 0:
        grads = [cpu.dense_like(t).zero_() for t in (query, key, value)]
        grads += [None if t is None else torch.zeros_like(t) for t in (table, sink)]
    elif on_triton(query.device):
        from multimax_fairseq.kernels import triton_attention

        grads = triton_attention.attention_backward(
            *(grad, query, key, value, output, statistics, table, sink, mask, drawn),
            *(is_causal, dropout_p, scale, low, high),
        )
    else:
        grads = cpu.attention_backward(
            *(grad, query, key, value, statistics, table, sink, mask, drawn),
            *(is_causal, dropout_p, scale),
        )
    by_query, by_key, by_value, *by_scalars = grads
    assert by_query is not None and by_key is not None and by_value is not None
    by_table, by_sink = (
        query.new_empty(0, dtype=torch.float32) if grad is None else grad for grad in by_scalars
    )
    return by_query, by_key, by_value, by_table, by_sink


def _check_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    statistics: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> None:
    _check_attention(query, key, value, table, sink, mask, seed, dropout_p, scale, low, high)
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


def _attention_backward_fake(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    statistics: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    low: int,
    high: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_attention_backward(
        *(grad, query, key, value, output, statistics, table, sink, mask, seed),
        *(dropout_p, scale, low, high),
    )
    by_table, by_sink = (
        query.new_empty((0,) if t is None else t.shape, dtype=torch.float32) for t in (table, sink)
    )
    return cpu.dense_like(query), cpu.dense_like(key), cpu.dense_like(value), by_table, by_sink


attention_backward: Operator = define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, Tensor "
    f"statistics, Tensor? table, Tensor? sink, Tensor? mask, Tensor? seed, {_NUMBERS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _attention_backward,
    _attention_backward_fake,
    without_gradient("attention_backward"),
    lambda grad, *rest: no_autocast(grad.device.type, attention_backward, grad, *rest),
)


def _check_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    scale: float,
) -> None:
    if query.dim() != 3 or query.shape[2] % STEP_SIZES:
        raise ValueError(
            f"query must be (R, H, D), D a multiple of {STEP_SIZES}, got {list(query.shape)}"
        )
    for name, tensor in (("query", query), ("keys", keys), ("values", values)):
        if tensor.dtype != torch.float32 or tensor.device.type not in ("cpu", "meta"):
            raise ValueError(
                f"{name} must be float32 on the CPU, got {tensor.dtype} on {tensor.device}"
            )
    if keys.dim() != 3 or keys.shape[1:] != query.shape[1:] or values.shape != keys.shape:
        raise ValueError(
            f"keys and values must be (N, {query.shape[1]}, {query.shape[2]}), got "
            f"{list(keys.shape)} and {list(values.shape)}"
        )
    if ancestors.dim() != 2 or len(ancestors) != len(query) or ancestors.dtype != torch.int64:
        raise ValueError(
            f"ancestors must be int64 ({len(query)}, L), got {ancestors.dtype} "
            f"{list(ancestors.shape)}"
        )
    check_device("ancestors", ancestors, query, "query")
    _check_scalars(query, query.shape[1], table, sink, scale)


def _attention_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    scale: float,
) -> Tensor:
    _check_step(query, keys, values, ancestors, table, sink, scale)
    if query.numel() == 0 or ancestors.numel() == 0:
        return query.new_zeros(query.shape)
    return cpu.attention_step(query, keys, values, ancestors, table, sink, scale)


def _attention_step_fake(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    scale: float,
) -> Tensor:
    _check_step(query, keys, values, ancestors, table, sink, scale)
    return query.new_empty(query.shape)


attention_step: Operator = define(
    "attention_step(Tensor query, Tensor keys, Tensor values, Tensor ancestors, Tensor? table, "
    "Tensor? sink, float scale) -> Tensor",
    _attention_step,
    _attention_step_fake,
    without_gradient("attention_step"),
    lambda query, *rest: no_autocast(query.device.type, attention_step, query, *rest),
)
