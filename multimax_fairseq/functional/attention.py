"""Attention over any of the normalizers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.backend import choose
from multimax_fairseq.functional.modulator import (
    ModulatorParameters,
    parameter_table,
    parameters_of,
)
from multimax_fairseq.functional.normalizers import ScoreFunction, normalize
from multimax_fairseq.kernels import cpu


def attention_scores(
    query: Tensor, key: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return attention scores, (B, H, T, S): scale * Q K^T + bias.

    Equivalent to: scale * query @ key.mT + bias

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D).
        bias: broadcastable to the scores; None adds nothing.
        scale: default 1 / sqrt(D).
    """
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    # The product of a half-precision pair is rounded once, as in the framework's own attention.
    scores = (query * scale) @ key.transpose(-2, -1)
    return scores if bias is None else scores + bias


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str = "multimax",
    modulator: ScoreFunction | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """Return attention outputs, with the arguments of torch's function of the same name.

        O = dropout(normalize(scale * Q K^T + mask)) V
    Equivalent to: torch.nn.functional.scaled_dot_product_attention with another normaliser

    Args:
        query: (B, H, T, D).
        key, value: (B, H, S, D).
        normalizer: a key of `NORMALIZERS`.
        modulator: for multimax.
        attn_mask: broadcastable to (B, H, T, S). Bool: True may attend. Float: added to the
            scores, and -inf excludes. A query that may attend to nothing gets zeros.
        is_causal: query t attends to keys up to t; together with attn_mask, both hold.
        dropout_p: probability of dropping an attention probability.
        scale: default 1 / sqrt(D).
        backend: "cpp" and "triton" never hold the (T, S) probabilities; they serve multimax and
            softmax, and masks that are 0 or -inf. "plain" holds them, and serves all. "auto"
            takes what MULTIMAX_BACKEND says, else the fastest that can do it.
        options: what else the normalizer takes, as `normalize`.

    Returns:
        (B, H, T, D), in the dtype of value.

    Raises:
        ValueError: an unknown normalizer or backend; multimax without a modulator.
    """
    if modulator is None and normalizer == "multimax":
        raise ValueError("normalizer 'multimax' needs a modulator: pass modulator=Modulator()")
    if normalizer in ("multimax", "softmax") and not options:
        masks = [] if attn_mask is None else [(attn_mask, True)]
        fused = fused_attention(
            query, key, value, modulator, masks, -math.inf, is_causal, dropout_p, scale, backend
        )
        if fused is not None:
            return fused
    excluded, bias = None, None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        excluded = ~attn_mask
    elif attn_mask is not None:
        excluded, bias = split_float_mask(attn_mask, -math.inf)
    if is_causal:
        future = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).triu(1)
        excluded = future if excluded is None else excluded | future
    if modulator is not None:
        options["modulator"] = modulator
    scores = attention_scores(query, key, bias, scale)
    probs = normalize(normalizer, scores, mask=excluded, **options)
    return F.dropout(probs, dropout_p).to(value.dtype) @ value


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modulator: ScoreFunction | None,
    masks: Sequence[tuple[Tensor, bool]],
    threshold: float,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    backend: str = "auto",
) -> Tensor | None:
    """Return attention outputs that no probabilities were kept for, or None where that cannot be.

    Args:
        query, key, value, is_causal, dropout_p, scale: as `scaled_dot_product_attention`.
        modulator: None is softmax.
        masks: each broadcastable to (B, H, T, S), bool or float, and whether True means that a
            key may be attended to; all hold.
        threshold: a float in a mask at or below it excludes; any other must be 0.
    """
    alike = query.dim() == 4 and key.shape == value.shape and query.numel() * key.numel() > 0
    # What is not known to be a modulator of ours, or is a monotone one, is computed as it comes.
    known = not getattr(modulator, "monotone", modulator is not None)
    choice = choose("attention", backend, query, key, value, able=alike and known)
    if choice == "plain":
        return None
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    table = None
    parameters = parameters_of(cast(ModulatorParameters | None, modulator))
    if modulator is not None:
        table = parameter_table(*parameters).float()
    fits = key.shape == (batch, heads, keys, size) and (table is None or len(table) in (1, heads))
    if not fits or not 0 <= dropout_p < 1:
        return None
    table = None if table is None else table.expand(heads, 8)
    scale = 1 / math.sqrt(size) if scale is None else scale
    if choice == "triton":
        from multimax_fairseq.kernels import triton_attention

        excluded: Tensor | None = None
        for mask, allows in masks:
            if mask.is_floating_point():
                mask, bias = split_float_mask(mask, threshold)
                if bias is not None:
                    return None
            elif allows:
                mask = ~mask
            excluded = mask if excluded is None else excluded | mask
        return triton_attention.attention(
            query,
            key,
            value,
            table,
            mask=excluded,
            is_causal=is_causal,
            dropout_p=dropout_p,
            scale=scale,
            order=max((p.shape[-1] for p in parameters if p is not None), default=2),
            terms="low" if parameters[2] is None else "high" if parameters[0] is None else "both",
        )
    rows = []
    for mask, allows in masks:
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.shape[1] != 1 or mask.dtype not in (torch.bool, torch.float32):
            return None
        rows.append((mask[:, 0].expand(batch, queries, keys), allows))
    found = cpu.windows(batch, queries, keys, rows, threshold, is_causal)
    if found is None:
        return None
    return cpu.attention(query, key, value, table, *found, scale, dropout_p)


def split_float_mask(mask: Tensor, threshold: float) -> tuple[Tensor, Tensor | None]:
    """Read an additive mask: (what it excludes, the finite bias that is left or None).

    Entries at or below the threshold exclude. The two are separated because exclusion has to
    come after the modulator, and a bias before it.
    """
    excluded = mask <= threshold
    bias = mask.masked_fill(excluded, 0.0)
    return excluded, bias if bias.any() else None
