"""Attention and its mask, as the interfaces of transformers call them."""

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

try:
    from transformers.utils.output_capturing import _active_collector
except ImportError:  # a version of transformers that tells the layers themselves
    _active_collector = None

IMPLEMENTATION = "multimax"

# What a layer may ask of attention beyond a mask. It is named, for what is not read is lost.
REFUSED = {
    "softcap": "soft-capping of the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "indices": "a choice of keys by another module",
    "block_indices": "a choice of keys by another module",
    "cache": "a paged cache (continuous batching)",
}

# Gives a layer that is called for the first time its normalizer, while `attach` looks for layers.
equip: ContextVar[Callable[[nn.Module, int], None] | None] = ContextVar("equip", default=None)


def register() -> None:
    """Make "multimax" an attention implementation of transformers, with a mask of its own.

    `attach` and `load` do so too. A model that was unpickled, or whose config asks for it, needs
    the call before its forward.
    """
    AttentionInterface.register(IMPLEMENTATION, attention)
    # Without a mask function of its own an implementation is given no mask at all.
    AttentionMaskInterface.register(IMPLEMENTATION, attention_mask)


def attention_mask(**arguments: Any) -> Tensor | None:
    """Return which keys each query may attend to, (B, 1, T, S), True where it may.

    Equivalent to: sdpa's mask, but that a causal one is always there. sdpa leaves it out where the
    flag is_causal says the same; who reads the mask alone would look into the future.

    Returns:
        bool; None where every query attends to every key.
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
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the context of each query by the layer's normalizer, and the probabilities if asked.

    Equivalent to: transformers' sdpa_attention_forward with another softmax

    Args:
        module: the attention layer, which `attach` gave a `normalizer`.
        query: (B, H, T, D).
        key, value: (B, H, S, D), or of fewer heads, each for a group of the query's.
        attention_mask: broadcastable to (B, H, T, S). Bool: True may attend. Float: added after
            the modulator. None: as is_causal says.
        dropout, scaling: of the probabilities, and of the scores; None is 1 / sqrt(D).
        is_causal: without a mask, query t attends to keys up to t; None asks the layer.
        arguments: output_attentions asks for the probabilities; those of `REFUSED` are refused.

    Returns:
        ((B, T, H, D), contiguous; (B, H, T, S) or None).

    Raises:
        UsageError: the layer has no normalizer, or its attention does what has no place here.
    """
    layer = type(module).__name__
    for name, what in REFUSED.items():
        if arguments.get(name) is not None:
            raise UsageError(
                f"{layer} uses {what} ({name}), which attention by a normalizer does not have: "
                "leave this model's attention as it is"
            )
    normalizer: Any = getattr(module, "normalizer", None)
    if not hasattr(normalizer, "attend"):  # of a wrapper too, as PEFT's
        normalizer = _first_call(module, query.shape[1])
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mask = attention_mask
    if mask is None:
        # The rule of sdpa_attention_forward, for layers that are given no mask.
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        is_causal = bool(causal) and query.shape[2] > 1
    elif mask.dtype == torch.bool:
        mask, is_causal = ~mask, False
    elif mask.is_floating_point():
        is_causal = False
    else:
        raise UsageError(
            f"{layer} was given an attention mask of {mask.dtype}: a mask of four dimensions must "
            "be bool (True may attend) or floating-point (added)"
        )
    context, probs = normalizer.attend(
        *(query, key, value, mask, is_causal, dropout, scaling),
        need_probs=bool(arguments.get("output_attentions")) or _are_collected(module),
    )
    return context.transpose(1, 2).contiguous(), probs


def _are_collected(module: Any) -> bool:
    """Whether transformers collects the probabilities by hooks, of which layers are not told."""
    # torch.compile cannot read a ContextVar.
    if _active_collector is None or torch.compiler.is_compiling():
        return False
    if torch._C._current_graph_task_id() != -1:
        # A backward pass: what gradient checkpointing repeats there has to be as it was.
        return getattr(module, "attentions_collected", False)
    names = _active_collector.get() or ()
    module.attentions_collected = any(name.endswith("attentions") for name in names)
    return module.attentions_collected


def _equipped(module: Any, num_heads: int) -> Normalizer:
    give = equip.get()
    if give is None:
        raise UsageError(
            f"this {type(module).__name__} has no normalizer: call "
            "multimax_fairseq.transformers.attach(model, inputs=...) with inputs that reach every "
            "attention layer"
        )
    give(module, num_heads)
    return module.normalizer


# torch.compile cannot read a ContextVar.
_first_call = torch.compiler.disable(_equipped)
