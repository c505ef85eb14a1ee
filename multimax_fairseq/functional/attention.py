"""Attention over any of the normalizers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.normalizers import ScoreFunction, normalize


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
        options: what else the normalizer takes, as `normalize`.

    Returns:
        (B, H, T, D), in the dtype of value.

    Raises:
        ValueError: an unknown normalizer; multimax without a modulator.
    """
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
    elif normalizer == "multimax":
        raise ValueError("normalizer 'multimax' needs a modulator: pass modulator=Modulator()")
    scores = attention_scores(query, key, bias, scale)
    probs = normalize(normalizer, scores, mask=excluded, **options)
    return F.dropout(probs, dropout_p).to(value.dtype) @ value


def split_float_mask(mask: Tensor, threshold: float) -> tuple[Tensor, Tensor | None]:
    """Read an additive mask: (what it excludes, the finite bias that is left or None).

    Entries at or below the threshold exclude. The two are separated because exclusion has to
    come after the modulator, and a bias before it.
    """
    excluded = mask <= threshold
    bias = mask.masked_fill(excluded, 0.0)
    return excluded, bias if bias.any() else None
