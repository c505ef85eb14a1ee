"""Attention of one decoding step, over a KV cache that the hypotheses of a beam share.

Each key and value is stored once, so beam search reorders its hypotheses without copying the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.attention import (
    check_mapping,
    check_per_head,
    check_takes_factor,
    kernel_name,
    mapping_fields,
    per_head,
    row_factor,
    unsupported_mapping,
    unsupported_parameters,
)
from multimax_fairseq.ops.backend import choose, is_autocast, on_triton
from multimax_fairseq.ops.checks import check_device
from multimax_fairseq.ops.modulator import packed_parameters
from multimax_fairseq.ops.registration import Operator, define, schema_of, without_gradient
from multimax_fairseq.ops.row_function import RowFunction

# The head size must be a multiple of the kernel's widest vector, in floats.
HEAD_SIZE_MULTIPLE = 16


class KVCache(NamedTuple):
    """The cached keys and values of all hypotheses.

    keys, values: (N, H, D), the first rows of `buffer` if there is one.
    ancestors: (R, L) int64, the rows of keys and values for each of R hypotheses of length L.
    buffer: memory in which the cache can grow.
    """

    keys: Tensor
    values: Tensor
    ancestors: Tensor
    buffer: Buffer | None = None

    def ancestors_in(self, order: Tensor | None) -> Tensor:
        """Return the ancestors of the hypotheses `order`, (R',) int64; None for all."""
        return self.ancestors if order is None else self.ancestors.index_select(0, order)

    def append(self, key: Tensor, value: Tensor, order: Tensor | None) -> KVCache:
        """Return a cache with one more step; this cache does not change.

        Args:
            key, value: (R', H, D), of the new step.
            order: (R',) int64, the hypothesis that each row continues; None for all in order.
        """
        count, added = len(self.keys), len(key)
        rows = torch.arange(count, count + added, device=key.device)[:, None]
        buffer = self.buffer
        if buffer is None or not buffer.can_append(count, added):
            buffer = Buffer(self.keys, self.values, added)
        keys, values = buffer.append(key, value)
        return KVCache(keys, values, torch.cat([self.ancestors_in(order), rows], 1), buffer)


class Buffer:
    """Growable buffer for cached keys and values, (N, H, D).

    Args:
        keys, values: the rows so far.
        added: rows of the next step. The capacity is twice the rows so far plus 16 such steps.
    """

    STEPS = 16

    def __init__(self, keys: Tensor, values: Tensor, added: int) -> None:
        self.used = len(keys)
        size = 2 * self.used + self.STEPS * added
        self.tensors = [x.new_empty(size, *x.shape[1:]) for x in (keys, values)]
        for tensor, first in zip(self.tensors, (keys, values), strict=True):
            tensor[: self.used] = first

    def can_append(self, count: int, added: int) -> bool:
        """Whether `added` rows fit after the first `count`, and no other cache uses these rows."""
        memory = self.tensors[0]
        is_writable = torch.is_inference_mode_enabled() or not memory.is_inference()
        return self.used == count and count + added <= len(memory) and is_writable

    def append(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Write one step's rows; return all keys and all values."""
        first, self.used = self.used, self.used + len(key)
        for tensor, new in zip(self.tensors, (key, value), strict=True):
            tensor[first : self.used] = new
        return [tensor[: self.used] for tensor in self.tensors]


# attend(query (R, H, D), cache, scale, hidden states (R, 1, 1, size) or None) -> (R, H, D)
DecodingAttention: TypeAlias = Callable[[Tensor, KVCache, float, Tensor | None], Tensor]


def decoding_attention(
    like: Tensor,
    heads: int,
    size: int,
    *,
    modulator: Any = None,
    sink: float | Tensor | None = None,
    length_scale: float | Tensor | None = None,
    growth: tuple[float | Tensor, float | Tensor] | None = None,
    row: RowFunction | None = None,
) -> DecodingAttention | None:
    """Return `attend(query, cache, scale, hidden)`, the attention of one step, without gradients.

    Query and output are (R, H, D). `hidden`, (R, 1, 1, any size), is not read here; gates and
    mappings of hidden states read it. The modulator's parameters are read once, here.

    Equivalent to: fused_attention(AttentionInputs(query[:, :, None], *(
        x[cache.ancestors].transpose(1, 2) for x in (cache.keys, cache.values)), scale=scale),
        ...)[:, :, 0]

    Args:
        like: a tensor of the dtype and on the device of the query.
        heads, size: H and D.
        modulator, sink, length_scale, growth, row: as `fused_attention`.

    Returns:
        None if no kernel can compute it.
    """
    if on_triton(like.device):
        unsupported = "Triton has no kernel for decoding steps"
    elif size % HEAD_SIZE_MULTIPLE:
        unsupported = f"the head size is no multiple of {HEAD_SIZE_MULTIPLE}"
    elif like.numel() == 0:
        unsupported = "there are no hypotheses"
    elif is_autocast(like.device.type):
        unsupported = "autocast does not keep the projections in float32"
    else:
        unsupported = unsupported_mapping(like, heads, "auto", modulator, sink, length_scale, row)
    parameters: Tensor | None = None
    if not unsupported and modulator is not None:
        parameters = packed_parameters(modulator, like.device)[0].detach().float()
        unsupported = unsupported_parameters(
            modulator, parameters, length_scale, heads, like.device
        )
    dtypes = (torch.float32,)
    backend = choose("attention of a step", "auto", like, unsupported=unsupported, dtypes=dtypes)
    if backend != "cpp":
        return None

    outer_scale = None if parameters is None else per_head(length_scale, like.new_empty(1, heads))

    @torch.no_grad()
    def attend(query: Tensor, cache: KVCache, scale: float, hidden: Tensor | None = None) -> Tensor:
        if outer_scale is None and (length_scale is not None or growth is not None):
            counts = query.new_full((1, 1), cache.ancestors.shape[1])
            query = query * row_factor(counts, length_scale, growth)[..., 0]
        call = StepCall(
            query=query,
            keys=cache.keys,
            values=cache.values,
            ancestors=cache.ancestors,
            parameters=parameters,
            length_scale=outer_scale,
            sink=per_head(sink, query),
            scale=scale,
            row_parameter=None if row is None else per_head(row.parameter, query),
            function=None if row is None else row.name,
            header=None if row is None else row.header,
        )
        return attention_step(*call)

    return attend


# --- torch.ops.multimax_fairseq.attention_step -------------------------------------------------


class StepCall(NamedTuple):
    """The arguments of one decoding step's attention.

    query: (R, H, D) float32 on the CPU, D a multiple of 16.
    keys, values, ancestors: as `KVCache`.
    length_scale: (H,) float32, s of the factor s log(L) of the modulated scores.
    parameters, sink, scale, row_parameter, function, header: as `AttentionCall`.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    ancestors: Tensor
    parameters: Tensor | None
    length_scale: Tensor | None
    sink: Tensor | None
    scale: float
    row_parameter: Tensor | None = None
    function: str | None = None
    header: str | None = None


def _check(*inputs: Any) -> None:
    call = StepCall(*inputs)
    query, keys, values, ancestors = call.query, call.keys, call.values, call.ancestors
    if query.dim() != 3 or query.shape[2] % HEAD_SIZE_MULTIPLE:
        raise ValueError(
            f"query must be (R, H, D), D a multiple of {HEAD_SIZE_MULTIPLE}, got "
            f"{list(query.shape)}"
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
    check_mapping(call)
    if call.length_scale is not None:
        check_takes_factor("length_scale", call)
        check_per_head("length_scale", call.length_scale, query, "number")


def _kernel(*inputs: Any) -> Tensor:
    """Return the output, (R, H, D). ValueError for an ancestor that is not one of the N rows."""
    call = StepCall(*inputs)
    keys, values = call.keys, call.values
    if call.query.numel() == 0 or call.ancestors.numel() == 0:
        return call.query.new_zeros(call.query.shape)
    query, ancestors = call.query.contiguous(), call.ancestors.contiguous()
    hypotheses, heads, size = query.shape
    output = torch.empty_like(query)
    status = native.call(
        kernel_name("attention_step", call.function),
        native.Attention,
        batch=hypotheses,
        heads=heads,
        queries=1,
        keys=ancestors.shape[1],
        size=size,
        threads=torch.get_num_threads(),
        scale=call.scale,
        query=query.unsqueeze(2),
        key=keys.contiguous().transpose(0, 1).unsqueeze(0),
        value=values.contiguous().transpose(0, 1).unsqueeze(0),
        output=output.unsqueeze(2),
        ancestors=ancestors,
        rows=len(keys),
        **mapping_fields(call),
        factor=None if call.length_scale is None else call.length_scale.contiguous(),
    )
    if status < 0:
        raise ValueError(
            f"ancestors must be rows of keys and values, 0 to {len(keys) - 1}, got "
            f"{int(ancestors.min())} to {int(ancestors.max())}"
        )
    return output


def _fake(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


attention_step: Operator = define(
    f"attention_step({schema_of(StepCall)}) -> Tensor",
    check=_check,
    kernel=_kernel,
    fake=_fake,
    autograd=without_gradient("attention_step"),
)
