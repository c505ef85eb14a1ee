"""The attention and mask functions that transformers calls."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from multimax_fairseq.errors import UsageError
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.ops.masks import combine_masks

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # older versions pass output_attentions to the layers
    _active_collector = None

IMPLEMENTATION = "multimax"

# Arguments that a normalizer would ignore.
UNSUPPORTED = {
    "softcap": "soft-capping of the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a selection of keys",
    "block_indices": "a selection of keys",
    "cache": "a paged cache (continuous batching)",
}

# Set by `attach`: a function that adds the normalizer to a layer at its first call.
equip: ContextVar[Callable[[nn.Module, int], None] | None] = ContextVar("equip", default=None)


def register() -> None:
    """Register "multimax" as an attention implementation of transformers.

    `attach` and `load` call it. Call it before the forward pass of an unpickled model, or of a
    model whose config names the implementation.
    """
    AttentionInterface.register(IMPLEMENTATION, attention)
    # Without a mask function, transformers passes no mask.
    AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)


def attention_mask(**arguments: Any) -> Tensor | None:
    """Return the bool mask, (B, 1, T, S), True where a query may attend to a key.

    It is sdpa's mask, but a causal mask is never left out in favour of the flag is_causal.

    Returns:
        The mask, or None if every query attends to every key.
    """
    return sdpa_mask(**{**arguments, "allow_is_causal_skip": False})


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output with the layer's normalizer.

    It has the signature of transformers' sdpa_attention_forward.

    Args:
        module: the attention layer, with a `normalizer` from `attach`.
        query: (B, H, T, D).
        key, value: (B, H, S, D), or fewer heads (grouped-query attention).
        attention_mask: broadcastable to (B, H, T, S). Bool: True may attend. Float: added after
            the modulator. None: see is_causal.
        dropout: probability of dropping an attention weight.
        scaling: factor on the scores. Default: 1 / sqrt(D).
        is_causal: without a mask, query t attends to keys up to t. None reads `module.is_causal`.
        position_bias: broadcastable to (B, H, T, S), as that of T5. Added after the modulator.
        arguments: output_attentions requests the probabilities. cu_seq_lens_q and cu_seq_lens_k,
            (documents + 1,), are the boundaries of documents packed into the batch; a query attends
            to keys of its document alone. Those in `UNSUPPORTED` raise an error.

    Returns:
        (output (B, T, H, D), contiguous; probabilities (B, H, T, S), or None).

    Raises:
        UsageError: the layer has no normalizer, or an argument is not supported.
    """
    layer = type(module).__name__
    for name, what in UNSUPPORTED.items():
        if arguments.get(name) is not None:
            raise UsageError(
                f"{layer} uses {what} ({name}), which normalizers do not support: keep the "
                "model's own attention"
            )
    normalizer: Any = getattr(module, "normalizer", None)
    if not hasattr(normalizer, "attend"):  # a wrapper, such as PEFT's, has it too
        normalizer = _first_call(module, query.shape[1])
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = attention_mask
    if mask is None:
        # The rule of sdpa_attention_forward without a mask.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(causal) and query.shape[2] > 1
    elif mask.dtype == torch.bool:
        mask, is_causal = ~mask, False
    elif mask.is_floating_point():
        is_causal = False
    else:
        raise UsageError(
            f"{layer} got an attention mask of {mask.dtype}: a four-dimensional mask must be bool "
            "(True may attend) or floating-point (added)"
        )
    if arguments.get("cu_seq_lens_q") is not None:
        query_documents = _documents(query, arguments["cu_seq_lens_q"])[:, None, :, None]
        key_documents = _documents(key, arguments["cu_seq_lens_k"])[:, None, None]
        mask = combine_masks(mask, query_documents != key_documents)
    need_probs = bool(arguments.get("output_attentions")) or _are_collected(module)
    if position_bias is not None:
        mask = combine_masks(mask, position_bias)
        # Plain PyTorch, as in the pass with gradients of a learned bias: a kernel would draw other
        # dropout in the first pass of reentrant gradient checkpointing, which has no gradients.
        need_probs = need_probs or dropout > 0
    context, probs = normalizer.attend(
        *(query, key, value, mask),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=scaling,
        need_probs=need_probs,
    )
    return context.transpose(1, 2).contiguous(), probs


def _documents(states: Tensor, boundaries: Tensor) -> Tensor:
    """Return the index of each position's document, (B, length), for states (B, H, length, D)."""
    batch, _, length, _ = states.shape
    positions = torch.arange(batch * length, device=states.device)
    return torch.bucketize(positions, boundaries[1:].to(positions), right=True).view(batch, length)


def _are_collected(module: Any) -> bool:
    """Whether transformers collects the probabilities with hooks, without telling the layers."""
    # torch.compile cannot read a ContextVar.
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    if torch._C._current_graph_task_id() != -1:
        # In a backward pass, gradient checkpointing must repeat the forward pass exactly.
        return getattr(module, "attentions_collected", False)
    names = _active_collector.get() or ()
    module.attentions_collected = any(name.endswith("attentions") for name in names)
    return module.attentions_collected


def _equipped(module: Any, num_heads: int) -> Normalizer:
    equip_layer = equip.get()
    if equip_layer is None:
        raise UsageError(
            f"this {type(module).__name__} has no normalizer: call "
            "attach(model, inputs=...) with inputs that reach every attention layer"
        )
    equip_layer(module, num_heads)
    return module.normalizer


# torch.compile cannot read a ContextVar.
_first_call = torch.compiler.disable(_equipped)
