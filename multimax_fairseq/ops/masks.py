"""Masks of attention: which keys a query may attend to, and how many."""

from __future__ import annotations

import torch
from torch import Tensor

# Other libraries exclude a key by adding -1e4 or less to its score. `replace_softmax` sees only the
# sum. It takes max(sum, -1024) as the score and the remainder as the mask, so an exclusion by -1e4
# leaves a mask of about -9000.
EXCLUDES = -5e3


def excluded_keys(mask: Tensor) -> Tensor:
    """Return which keys a mask excludes, bool: True, or -5000 and less in a float mask."""
    return mask if mask.dtype == torch.bool else mask <= EXCLUDES


def combine_masks(mask: Tensor | None, other: Tensor) -> Tensor:
    """Return one mask with the effect of both. Bool: True excludes. Float: added to the scores."""
    if mask is None:
        return other
    if mask.dtype == torch.bool:
        mask, other = other, mask
    if other.dtype != torch.bool:
        return mask + other
    return mask | other if mask.dtype == torch.bool else mask.masked_fill(other, -float("inf"))


def causal_mask(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask, (..., T, S), that excludes later keys, and what `mask` excludes or adds."""
    later = torch.ones([queries, keys], dtype=torch.bool, device=device).triu(1)
    return combine_masks(mask, later)


def attention_mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None) -> Tensor | None:
    """Return fairseq's two masks as one, broadcastable to (B, H, T, S), bool or float.

    Args:
        attn_mask: (T, S). Bool or uint8: non-zero excludes. Float: added to the scores.
        key_padding_mask: (B, S), non-zero excludes.
    """
    if attn_mask is not None and not attn_mask.is_floating_point():
        attn_mask = attn_mask.to(torch.bool)
    if key_padding_mask is None:
        return attn_mask
    return combine_masks(attn_mask, key_padding_mask.to(torch.bool)[:, None, None])


def key_counts(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return how many keys each query may attend to, at least 1.

    Equivalent to: (~mask).expand(scores.shape).sum(dim, keepdim=True).clamp(min=1)

    Args:
        scores: any shape and floating dtype.
        dim: the dimension of the keys.
        mask: broadcastable to scores. Bool: True excludes. Float: -5000 or less excludes.

    Returns:
        Broadcastable to scores, with size 1 in `dim`; in float32 or wider.
    """
    wide = torch.promote_types(scores.dtype, torch.float32)
    length = scores.shape[dim] if scores.dim() > 0 else 1
    if mask is None or mask.dim() == 0:
        return torch.full([1] * scores.dim(), max(length, 1), dtype=wide, device=scores.device)
    allowed = ~excluded_keys(mask)
    behind = dim - scores.dim() if dim >= 0 else dim
    if mask.dim() < -behind:  # all keys or none
        allowed = allowed[(None,) * (-behind - mask.dim())]
    each = length if allowed.shape[behind] == 1 else 1
    return (allowed.sum(behind, keepdim=True) * each).clamp(min=1).to(wide)


def attention_key_counts(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool
) -> Tensor:
    """Return `key_counts` of query (..., T, D) and key (..., S, D), without the (T, S) mask."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is not None and (mask.dim() == 0 or queries == 0 or keys == 0):
        mask = None  # all keys or none, or no query: the counts are not read
    if is_causal and mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask, is_causal = causal_mask(mask, queries, keys, query.device), False
    if not is_causal:
        return key_counts(query.new_empty(()).expand(*query.shape[:-1], keys), -1, mask)
    last = torch.arange(queries, device=query.device).clamp(max=keys - 1)
    if mask is None:
        return (last + 1).clamp(min=1).float()[:, None]
    allowed = (~excluded_keys(mask)).expand(*mask.shape[:-1], keys)
    counts = allowed.cumsum(-1).index_select(-1, last).clamp(min=1).float()
    return counts.unsqueeze(-1) if mask.dim() == 1 else counts.mT
