"""FSMT's attention with a normalizer. FSMT does not use transformers' AttentionInterface."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import EncoderDecoderCache
from transformers.models.fsmt.modeling_fsmt import Attention, PretrainedFSMTModel

from multimax_fairseq.integrations.transformers import interface
from multimax_fairseq.ops.masks import combine_masks


def adapt(model: nn.Module) -> None:
    """Let each attention layer of an FSMT model take a normalizer; other models stay unchanged."""
    if isinstance(model, PretrainedFSMTModel):
        for module in list(model.modules()):
            for name, layer in list(module.named_children()):
                if type(layer) is Attention:
                    setattr(module, name, FSMTAttention(layer))


class FSMTAttention(Attention):
    """FSMT's attention with the parameters of `layer`; without a normalizer it is FSMT's own."""

    def __init__(self, layer: Any) -> None:
        nn.Module.__init__(self)
        for name in (
            *("q_proj", "k_proj", "v_proj", "out_proj", "embed_dim", "num_heads", "head_dim"),
            *("scaling", "dropout", "layer_idx", "encoder_decoder_attention", "cache_key"),
        ):
            setattr(self, name, getattr(layer, name))
        self.train(layer.training)

    def forward(
        self,
        query: Tensor,  # (T, B, C)
        key: Tensor,  # (S, B, C)
        key_padding_mask: Tensor | None = None,  # (B, S), True excludes
        layer_state: Any = None,
        attn_mask: Tensor | None = None,  # (T, S), 0 or the lowest number
        output_attentions: bool | None = False,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if not hasattr(self, "normalizer") and interface.equip.get() is None:
            return super().forward(
                query, key, key_padding_mask, layer_state, attn_mask, output_attentions
            )
        keys, values = self._keys_and_values(query, key, layer_state)  # (B, H, S, D)
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None]
        if attn_mask is not None:
            mask = combine_masks(mask, attn_mask < 0)
        context, probs = interface.attention(
            *(self, self._heads(self.q_proj(query)), keys, values, None if mask is None else ~mask),
            dropout=self.dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
            output_attentions=output_attentions,
        )
        return self.out_proj(context.flatten(2).transpose(0, 1)), probs  # (T, B, C)

    def _heads(self, x: Tensor) -> Tensor:
        """Split (length, B, C) into (B, H, length, D)."""
        return x.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def _keys_and_values(self, query: Tensor, key: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Project keys and values, or read them from the cache of earlier decoding steps."""
        is_cross = self.encoder_decoder_attention
        both = cache if isinstance(cache, EncoderDecoderCache) else None
        if both is not None:
            cache = both.cross_attention_cache if is_cross else both.self_attention_cache
        if both is not None and is_cross and both.is_updated.get(self.layer_idx):
            stored = cache.layers[self.layer_idx]
            return stored.keys, stored.values
        source = key if is_cross else query
        keys, values = self._heads(self.k_proj(source)), self._heads(self.v_proj(source))
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_idx)
            if both is not None and is_cross:
                both.is_updated[self.layer_idx] = True
        return keys, values
