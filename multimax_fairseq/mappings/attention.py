"""Attention by any of the mappings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.mappings.multimax import ScoreFunction, multimax
from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.ops.attention import AttentionInputs, check_attention, compute_attention


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
    """Return the attention output, with the arguments of torch's function of the same name.

        O = dropout(normalize(scale * Q K^T + mask)) V

    Args:
        query: (B, H, T, D), floating.
        key: (B, H, S, D), of query's dtype.
        value: (B, H, S, D) or of another last dimension.
        normalizer: a key of `NORMALIZERS`.
        modulator: for multimax, and other mappings whose function has this parameter.
        attn_mask: broadcastable to (B, H, T, S). Bool: True may attend. Float: added to the scores,
            -inf excludes; MultiMax adds it to the modulated scores. It gets its gradient. A query
            that may attend to no key gets zeros.
        is_causal: query t attends to keys up to t; with attn_mask, both hold.
        dropout_p: probability of dropping an attention probability.
        scale: default 1 / sqrt(D).
        backend: "cpp" and "triton" do not store the (T, S) probabilities. They support all mappings
            except softmax with a temperature. "triton" does not support multimax with an
            outer_scale, and supports adaptive_temperature only in training. alpha_entmax needs
            alpha up to 2; on a GPU the output is NaN for a tensor outside of (1, 2]. "plain" stores
            the probabilities. It supports all mappings, twice differentiable outside of the
            modulator. "auto" takes the environment variable MULTIMAX_BACKEND, or else the fastest
            backend that supports the call. On a GPU this is "triton" for softmax, multimax,
            softcap, ssmax, softmax1 and sink only, because the others are not timed yet.
        options: other options of the mapping, as in `normalize`.

    Returns:
        (B, H, T, D of value), in the dtype of value, or of autocast.

    Raises:
        TypeError: an argument of a wrong type; an option that the mapping does not take.
        ValueError: an unknown mapping or backend; a backend without a kernel for this call;
            multimax without a modulator, or a mapping with one that it does not take; shapes,
            dtypes or devices that do not match; a dropout_p outside of [0, 1]; a scale that is not
            finite.

    Example:
        >>> query, key, value = torch.randn(3, 2, 8, 10, 64)
        >>> scaled_dot_product_attention(query, key, value, modulator=Modulator()).shape
        torch.Size([2, 8, 10, 64])
    """
    inputs = AttentionInputs(query, key, value, attn_mask, is_causal, dropout_p, scale)
    check_attention(inputs, "attn_mask")
    mapping = mapping_named(normalizer)
    if modulator is None and mapping.function is multimax:
        raise ValueError(f"mapping {normalizer!r} needs a modulator: pass modulator=Modulator()")
    if modulator is not None:
        if "modulator" not in mapping.parameters:
            raise ValueError(
                f"mapping {normalizer!r} takes no modulator, got {modulator!r}: leave it out, "
                "or pass normalizer='multimax'"
            )
        if not callable(modulator):
            raise TypeError(
                f"modulator must be a Modulator or a function of the scores, got {modulator!r}"
            )
        options["modulator"] = modulator
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        inputs = inputs._replace(mask=~attn_mask)

    def normalize(scores: Tensor, mask: Tensor | None) -> Tensor:
        # `dim` by name, so that the options cannot contain another one.
        return mapping.function(scores, dim=-1, mask=mask, **options)

    context, _ = compute_attention(
        inputs, normalizer, normalize, mapping.for_kernel(**options), backend
    )
    return context
