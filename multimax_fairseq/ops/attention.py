"""Fused attention, without storing the (T, S) probabilities, and attention in plain PyTorch.

    O = dropout(f(scale * Q K^T + mask)) V

The public function is `scaled_dot_product_attention` of `multimax_fairseq.mappings`. It calls
`fused_attention`, or, in plain PyTorch, `attention_scores`, a mapping and `weighted_values`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops.attention_operator import (
    AttentionCall,
    attention,
    check_mask,
    supports_head_size,
)
from multimax_fairseq.ops.backend import (
    choose,
    has_row_library,
    is_autocast,
    is_triton_requested,
    on_triton,
    select,
)
from multimax_fairseq.ops.checks import (
    MAX_DROPOUT,
    check_device,
    check_flag,
    check_number,
    check_tensor,
    is_finite,
)
from multimax_fairseq.ops.dropout import draw_seed, dropout
from multimax_fairseq.ops.masks import attention_key_counts
from multimax_fairseq.ops.modulator import fits_device, fits_heads, has_parameters, table_of
from multimax_fairseq.ops.registration import needs_gradient
from multimax_fairseq.ops.row_function import ON_TRITON, WITHOUT_GRADIENT, RowFunction


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
        check_mask(mask_name, mask, (*batch, query.shape[-2], key.shape[-2]), query)
    check_flag("is_causal", is_causal)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if scale is not None:
        check_number("scale", scale)


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
        row: a row function in place of softmax.
    """
    # The kernels need equal sizes of key and value. Zero padding changes no score.
    size, value_size = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    unsupported = _unsupported_call(query, key, value, mask, dropout_p, size, growth, row)
    table: Tensor | None = None
    low = high = 0
    if not unsupported:
        heads = query.shape[1]
        unsupported = unsupported_mapping(query, heads, backend, modulator, sink, length_scale, row)
        if not unsupported and modulator is not None:
            table, low, high = table_of(modulator, query.device)
            unsupported = unsupported_table(modulator, table, heads, query.device)
    if choose("attention", backend, query, key, value, unsupported=unsupported) == "plain":
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
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        table=None if table is None else table.float(),
        sink=per_head(sink, query),
        parameter=None if row is None else per_head(row.parameter, query),
        mask=mask,
        seed=seed,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        low=low,
        high=high,
        function=None if row is None else row.name,
        header=None if row is None else row.header,
    )
    output, _ = attention(*call, False)
    return output if value_size == size else output[..., :value_size]


def _unsupported_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    size: int,
    growth: tuple[float | Tensor, float | Tensor] | None,
    row: RowFunction | None,
) -> str:
    """Return why no kernel supports these arguments of `fused_attention`; "" if one may."""
    if query.dim() != 4 or key.shape[:-1] != value.shape[:-1] or key.shape[:2] != query.shape[:2]:
        return "query, key and value must be (B, H, length, size)"
    if key.shape[2] >= 2**31 or not supports_head_size(query.device, size):
        return "there are too many keys, or the head size is too large"
    if dropout_p > MAX_DROPOUT:
        return f"dropout_p is above {MAX_DROPOUT}"
    if growth is not None and not _fits_each_query(query, *growth):
        return "beta or gamma does not broadcast to the queries"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the mask needs a gradient"
    if row is not None:
        if not row.supports_mask(mask):
            return f"{row.name} supports only masks that exclude keys"
        if row.name in WITHOUT_GRADIENT and needs_gradient(query, key, value):
            return f"{row.name} has no kernel for its gradient"
    return ""


def unsupported_mapping(
    like: Tensor,
    heads: int,
    backend: str,
    modulator: Any,
    sink: float | Tensor | None,
    length_scale: float | Tensor | None,
    row: RowFunction | None,
) -> str:
    """Return why no kernel supports these arguments of `fused_attention`; "" if one does."""
    if not fits_each_head(like, heads, sink, length_scale):
        return "sink and length_scale must be one number, or one per head"
    if row is not None:
        if modulator is not None or sink is not None:
            return f"{row.name} replaces softmax, its modulator and its sink"
        return _unsupported_row(row, like, heads, backend)
    if modulator is not None and not has_parameters(modulator):
        return "the modulator is a function without parameters"
    return ""


def unsupported_table(modulator: Any, table: Tensor, heads: int, device: torch.device) -> str:
    """Return why no kernel supports the table of a modulator; "" if one does."""
    if fits_heads(modulator, heads) and fits_device(table, device):
        return ""
    return "the modulator is for other heads or another device"


def _unsupported_row(row: RowFunction, query: Tensor, heads: int, backend: str) -> str:
    if not (isinstance(row.parameter, float) or fits_each_head(query, heads, row.parameter, None)):
        return f"the parameter of {row.name} must be one number, or one per head"
    if on_triton(query.device):
        # Not by default: their speed on a GPU is unknown.
        if row.name in ON_TRITON and row.header is None and is_triton_requested(backend):
            return ""
        return f"{row.name} has a Triton kernel only if it is requested by name"
    # Compile a header only if the kernel would run.
    if row.header is not None and select(backend, query)[0] == "cpp":
        if not has_row_library(row.header, row.name, backend):
            return f"{row.header} did not compile"
    return ""


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
