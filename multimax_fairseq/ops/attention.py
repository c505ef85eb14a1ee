"""Fused attention, without storing the (T, S) probabilities: softmax, MultiMax, sinks, SSMax.

    O = dropout(softmax(sigma(scale * Q K^T) + mask)) V

The public function is `scaled_dot_product_attention` of `multimax_fairseq.mappings`. It calls
`fused_attention`, or, in plain PyTorch, `attention_scores`, a mapping and `weighted_values`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import choose, interpreted, is_autocast, on_triton
from multimax_fairseq.ops.checks import (
    DTYPES,
    MAX_DROPOUT,
    check_device,
    check_dropout,
    check_flag,
    check_float,
    check_number,
    check_table,
    check_tensor,
    is_finite,
)
from multimax_fairseq.ops.dropout import draw_seed, dropout
from multimax_fairseq.ops.masks import attention_key_counts
from multimax_fairseq.ops.modulator import fits_heads, has_parameters, table_of
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    differentiable_once,
    needs_gradient,
    schema_of,
    without_gradient,
)

if TYPE_CHECKING:
    from multimax_fairseq.ops.row_attention import RowFunction

# The largest head size on a GPU, where a tile must fit into shared memory.
MAX_HEAD_SIZE = 128


class AttentionCall(NamedTuple):
    """The arguments of one attention, from the public function to the kernels.

    Attributes:
        query: (B, H, T, D), float32, float16 or bfloat16, any strides.
        key, value: (B, H, S, D), of the same dtype.
        table: (1 or H, 8 or 12) float32, of `ops.modulator.pack`; None is softmax.
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


def check_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    mask_name: str = "mask",
) -> None:
    """Raise TypeError or ValueError for invalid arguments, in any backend."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() < 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating-point (..., length, size), got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        check_device(name, tensor, query, "query")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            "query and key must agree in their last dimension, and key and value in their length, "
            f"got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        )
    if query.dtype != key.dtype and not is_autocast(query.device.type):
        raise ValueError(f"query is {query.dtype}, but key {key.dtype}: cast one of them")
    batch = query.shape[:-2]
    if key.shape[:-2] != batch or value.shape[:-2] != batch:
        try:
            batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])
        except RuntimeError:
            raise ValueError(
                "the leading dimensions of query, key and value must be broadcastable, got "
                f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            ) from None
    if mask is not None:
        _check_mask(mask_name, mask, (*batch, query.shape[-2], key.shape[-2]), query)
    check_flag("is_causal", is_causal)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if scale is not None:
        check_number("scale", scale)


def _check_mask(name: str, mask: Tensor, full: tuple[int, ...], query: Tensor) -> None:
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


# --- plain PyTorch -----------------------------------------------------------------------------


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return attention scores, (B, H, T, S): scale * Q K^T.

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D).
        scale: default 1 / sqrt(D).
    """
    if scale is None:
        scale = _default_scale(query)
    # Scaling the query rounds half-precision scores once, as torch's own attention does.
    return (query * scale) @ key.transpose(-2, -1)


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1], 1))


def weighted_values(
    probs: Tensor, value: Tensor, dropout_p: float, backend: str = "auto"
) -> Tensor:
    """Return dropout(probs, dropout_p) @ value, in the dtype of value."""
    return dropout(probs.to(value.dtype), dropout_p, backend) @ value


# --- the kernels -------------------------------------------------------------------------------


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    backend: str = "auto",
    *,
    modulator: Any = None,
    sink: float | Tensor | None = None,
    length_scale: float | Tensor | None = None,
    growth: tuple[float | Tensor, float | Tensor] | None = None,
    row: RowFunction | None = None,
) -> Tensor | None:
    """Return the attention output from a kernel, or None if no kernel can compute it.

    Args:
        query, key, value, is_causal, dropout_p, scale: as `scaled_dot_product_attention`; the
            caller has run `check_attention`.
        mask: broadcastable to (B, H, T, S) or None. Bool: True excludes. Float: added to the
            modulated scores.
        modulator: None is softmax.
        sink: the score of an entry without a key, for all heads or per head.
        length_scale: as `ssmax`.
        growth: beta and gamma of `asentmax`.
        row: a row function in place of softmax, on a CPU.
    """
    # The kernels need equal sizes of key and value. Zero padding changes no score.
    size, value_size = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    is_supported = (
        query.dim() == 4
        and key.shape[:-1] == value.shape[:-1]
        and key.shape[:2] == query.shape[:2]
        and key.shape[2] < 2**31
        and dropout_p <= MAX_DROPOUT
        and supports_head_size(query.device, size)
        and (modulator is None or has_parameters(modulator))
        and fits_each_head(query, query.shape[1], sink, length_scale)
        and (growth is None or _fits_each_query(query, *growth))
        and (row is None or _supports_row(row, query, mask))
        # Kernels compute no gradient of a mask.
        and not (mask is not None and mask.requires_grad and torch.is_grad_enabled())
    )
    table: Tensor | None = None
    low = high = 2
    if is_supported and modulator is not None:
        table, low, high = table_of(modulator)
        is_supported = fits_heads(modulator, query.shape[1]) and table.device == query.device
    if choose("attention", backend, query, key, value, is_supported=is_supported) == "plain":
        return None
    if length_scale is not None or growth is not None:
        counts = attention_key_counts(query, key, mask, is_causal)
        if length_scale is not None:
            query = (query * length_factor(counts, length_scale)).to(query.dtype)
        if growth is not None:
            query = (query * growth_factor(counts, *growth)).to(query.dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.dtype == torch.bool else mask.detach().float()
    scale = _default_scale(query) if scale is None else scale
    query, key, value = (_padded(tensor, size) for tensor in (query, key, value))
    seed = draw_seed() if dropout_p > 0 else None
    if row is not None:
        from multimax_fairseq.ops.row_attention import FUNCTIONS, row_attention

        parameter, number = per_head(row.parameter, query), FUNCTIONS.index(row.name)
        output, _ = row_attention(
            *(query, key, value, parameter, mask, seed, is_causal, dropout_p, scale, number), False
        )
        return output if value_size == size else output[..., :value_size]
    call = AttentionCall(
        query,
        key,
        value,
        None if table is None else table.float(),
        per_head(sink, query),
        mask,
        seed,
        is_causal,
        dropout_p,
        scale,
        low,
        high,
    )
    output, _ = attention(*call, False)
    return output if value_size == size else output[..., :value_size]


def _supports_row(row: RowFunction, query: Tensor, mask: Tensor | None) -> bool:
    return (
        query.device.type == "cpu"
        and not interpreted()
        and (
            isinstance(row.parameter, float)
            or fits_each_head(query, query.shape[1], row.parameter, None)
        )
        and row.supports(mask)
    )


def supports_head_size(device: torch.device, size: int) -> bool:
    return size <= MAX_HEAD_SIZE or not on_triton(device)


def length_factor(counts: Tensor, length_scale: float | Tensor) -> Tensor:
    """Return the factor s log(n) by which `ssmax` multiplies the scores of n keys."""
    return length_scale * counts.log()


def growth_factor(counts: Tensor, beta: float | Tensor, gamma: float | Tensor) -> Tensor:
    """Return the factor 1 + beta log(n + 1)^gamma by which `asentmax` multiplies n scores."""
    return 1 + beta * (counts + 1).log() ** gamma


def _fits_each_query(query: Tensor, *values: float | Tensor) -> bool:
    """Whether each value is a number or broadcastable to (B, H, T, 1), on query's device."""
    shape = (*query.shape[:-1], 1)
    for value in values:
        if isinstance(value, Tensor):
            sizes = zip(reversed(value.shape), reversed(shape), strict=False)
            fits = value.dim() <= 4 and all(n in (1, m) for n, m in sizes)
            if not fits or not value.is_floating_point() or value.device != query.device:
                return False
        elif not is_finite(value):
            return False
    return True


def fits_each_head(
    like: Tensor, heads: int, sink: float | Tensor | None, length_scale: float | Tensor | None
) -> bool:
    """Whether sink and length_scale are each None, one number, or one per head, on like's device.

    Plain PyTorch supports, or rejects, all other values. A sink of -inf has no effect.
    """
    for value, infinite in ((sink, -torch.inf), (length_scale, None)):
        if isinstance(value, Tensor):
            count = value.shape[-3] if value.dim() > 2 else 1
            fits = count in (1, heads) and value.numel() == count
            if not fits or not value.is_floating_point() or value.device != like.device:
                return False
        elif value is not None and not is_finite(value) and value != infinite:
            return False
    return True


def per_head(value: float | Tensor | None, query: Tensor) -> Tensor | None:
    """Return the value of each head, (H,) float32."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return query.new_full(query.shape[1:2], float(value), dtype=torch.float32)
    return value.float().reshape(-1).expand(query.shape[1])


def _padded(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))


# --- torch.ops.multimax_fairseq.attention ------------------------------------------------------

_ARGUMENTS = schema_of(AttentionCall)


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
        _check_mask("mask", call.mask, full, query)
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
