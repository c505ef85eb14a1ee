"""fairseq's multi-head attention with another normalizer, in training and decoding."""

from typing import Any

import torch
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from torch import Tensor, nn

from multimax_fairseq.errors import UsageError
from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.modules.continuous_attention import ContinuousAttention
from multimax_fairseq.ops.attention import AttentionInputs
from multimax_fairseq.ops.backend import is_autocast
from multimax_fairseq.ops.decoding import KVCache
from multimax_fairseq.ops.masks import attention_mask


class MultiheadAttention(SoftmaxMultiheadAttention):
    """fairseq's multi-head attention with a `Normalizer` in place of softmax.

    If a kernel supports it, `_decoding_step` computes a decoding step. All other calls use the
    normalizer's `attention`. Both give the same result.

    Args:
        softmax_attention: the layer built by fairseq. This layer takes over its projections and
            options; do not use the old one afterwards.
        normalizer: a `Normalizer` or another `AttentionModule`.

    Raises:
        UsageError: the layer computes its own softmax (xFormers), or has extra keys together with
            continuous attention, for which they have no position.
    """

    def __init__(
        self,
        softmax_attention: SoftmaxMultiheadAttention,
        normalizer: AttentionModule,
    ) -> None:
        stock = softmax_attention
        if stock.use_xformers:
            raise UsageError(
                "xFormers computes its own softmax, so no attention normalizer can act in it: "
                "leave out the xFormers option"
            )
        has_extra_keys = stock.bias_k is not None or stock.add_zero_attn
        if has_extra_keys and any(isinstance(m, ContinuousAttention) for m in normalizer.modules()):
            raise UsageError(
                "continuous attention has no place for the extra keys of add_bias_kv and "
                "add_zero_attn: leave them out"
            )
        with torch.device("meta"):  # no random initialisation: the stock layer's weights follow
            super().__init__(
                stock.embed_dim,
                stock.num_heads,
                stock.kdim,
                stock.vdim,
                add_bias_kv=stock.bias_k is not None,
                add_zero_attn=stock.add_zero_attn,
                self_attention=stock.self_attention,
                encoder_decoder_attention=stock.encoder_decoder_attention,
            )
        for name in ("q_proj", "k_proj", "v_proj", "out_proj", "bias_k", "bias_v"):
            setattr(self, name, getattr(stock, name))
        self.dropout_module = stock.dropout_module
        self.has_extra_keys = has_extra_keys
        self.normalizer = normalizer
        self.train(stock.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output, and the probabilities if they are needed.

        Args:
            query: (T, B, C).
            key, value: (S, B, C); with static_kv, the cached ones replace them.
            key_padding_mask: (B, S), non-zero excludes.
            incremental_state: fairseq's decoding state; self-attention appends to its cache.
            need_weights: return the probabilities, averaged over the heads.
            static_kv: the keys are the same at every step.
            attn_mask: (T, S). Bool or uint8: non-zero excludes. Float: added to the scores, by
                MultiMax after the modulator; it gets its gradient, and -inf excludes.
            before_softmax: must be False.
            need_head_weights: return the probabilities of each head.

        Returns:
            ((T, B, C), None or (B, T, S) or (heads, B, T, S)).
        """
        if before_softmax:
            raise ValueError("before_softmax=True is not supported: leave it out")
        query_length, batch, _ = query.shape
        if incremental_state is not None:
            needs_more = need_weights or need_head_weights or attn_mask is not None
            if not needs_more and key_padding_mask is None:
                output = self._decoding_step(query, incremental_state)
                if output is not None:
                    return output, None
        q = self._split_heads(self.q_proj(query))
        hidden = query.transpose(0, 1).unsqueeze(1)
        k, v, key_padding_mask = self._keys_and_values(
            query, key, value, key_padding_mask, incremental_state, static_kv
        )
        # Hypotheses that share their keys become queries of one attention.
        beam = batch // k.shape[0]
        if beam > 1:
            q, hidden = self._join_beams(q, beam), self._join_beams(hidden, beam)
            attn_mask = attn_mask if attn_mask is None else attn_mask.repeat(beam, 1)
        is_causal = self._is_causal(attn_mask)
        mask = attention_mask(None if is_causal else attn_mask, key_padding_mask)
        k, v, mask = self._with_extra_keys(k, v, mask)
        dropout = self.dropout_module
        drops = dropout.training or dropout.apply_during_inference
        dropout_p = dropout.p if drops else 0.0
        inputs = AttentionInputs(q, k, v, mask, is_causal, dropout_p, self.scaling, hidden)
        context, probs = self.normalizer.attention(inputs, need_weights or need_head_weights)
        output = self._project(context, beam)
        if probs is None:
            return output, None
        if beam > 1:
            probs = self._split_beams(probs, beam)
        if need_head_weights:
            return output, probs.transpose(0, 1)
        return output, probs.mean(1)

    def reorder_incremental_state(
        self,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        new_order: Tensor,
    ) -> dict[str, dict[str, Tensor | None]] | None:
        """Reorder the cache. Self-attention stores the order; its next step applies it."""
        if not self.self_attention:
            return super().reorder_incremental_state(incremental_state, new_order)
        buffer = self._get_input_buffer(incremental_state)
        if len(buffer) > 0:
            order = buffer.get("order")
            buffer["order"] = new_order if order is None else order.index_select(0, new_order)
            self._set_input_buffer(incremental_state, buffer)
        return incremental_state

    def _decoding_step(
        self, query: Tensor, incremental_state: dict[str, dict[str, Tensor | None]]
    ) -> Tensor | None:
        """Return the output for one new word of each hypothesis; None if no kernel can compute it.

        A `KVCache` stores each key and value once; reordering the hypotheses does not copy it.
        """
        is_step = self.self_attention and query.shape[0] == 1 and not self.has_extra_keys
        buffer: dict[str, Any] = self._get_input_buffer(incremental_state)
        if not is_step or "prev_key" in buffer or torch.is_grad_enabled():
            return None
        if is_autocast(query.device.type):  # the projections are not float32
            return None
        batch, heads, size = query.shape[1], self.num_heads, self.head_dim
        dropout = self.dropout_module
        if dropout.p > 0 and (dropout.training or dropout.apply_during_inference):
            return None
        attend = buffer.get("attend")  # parameters do not change during a search
        if attend is None:
            attend = self.normalizer.decoding_attention(query, heads, size)
        if attend is None:
            return None
        q, k, v = (
            projection(query).view(batch, heads, size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cache = buffer.get("cache")
        if cache is None:
            ancestors = torch.empty(batch, 0, dtype=torch.int64, device=k.device)
            cache = KVCache(k[:0], v[:0], ancestors)
        cache = cache.append(k, v, buffer.get("order"))
        context = attend(q, cache, self.scaling, query.transpose(0, 1)[:, None])
        self._set_input_buffer(incremental_state, {"cache": cache, "attend": attend})
        return self.out_proj(context.reshape(1, batch, heads * size))

    def _expand_cache(self, incremental_state: dict[str, dict[str, Tensor | None]]) -> None:
        """Replace a `KVCache` by fairseq's cache, which has a copy for each hypothesis."""
        buffer = self._get_input_buffer(incremental_state)
        cache: Any = buffer.get("cache")
        if cache is None:
            return
        ancestors = cache.ancestors_in(buffer.get("order"))
        expanded: dict[str, Tensor | None] = {"prev_key_padding_mask": None}
        for name, rows in (("prev_key", cache.keys), ("prev_value", cache.values)):
            expanded[name] = rows[ancestors].transpose(1, 2)
        self._set_input_buffer(incremental_state, expanded)

    def _static_values(self, v: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        return self.normalizer.static_values(v, attention_mask(None, key_padding_mask))

    def _is_causal(self, attn_mask: Tensor | None) -> bool:
        """Whether this is the causal mask that the decoder marks, without extra keys."""
        return not self.has_extra_keys and getattr(attn_mask, "is_future_mask", False)

    def _project(self, context: Tensor, beam: int) -> Tensor:
        """(B, heads, beam T, head size) to the layer's output (T, B beam, C)."""
        if beam > 1:
            context = self._split_beams(context, beam)
        return self.out_proj(context.permute(2, 0, 1, 3).flatten(2))

    def _adaptive_prune_heads(self, reserve_head_index: list[tuple[int, int]]) -> None:
        heads = [start // self.head_dim for start, _ in reserve_head_index]
        super()._adaptive_prune_heads(reserve_head_index)
        self.normalizer.keep_heads(heads)

    def _join_beams(self, x: Tensor, beam: int) -> Tensor:
        """(B beam, heads, T, ...) to (B, heads, beam T, ...)."""
        return x.unflatten(0, (-1, beam)).transpose(1, 2).flatten(2, 3)

    def _split_beams(self, x: Tensor, beam: int) -> Tensor:
        """(B, heads, beam T, ...) to (B beam, heads, T, ...)."""
        return x.unflatten(2, [beam, -1]).transpose(1, 2).flatten(0, 1)

    def _split_heads(self, x: Tensor) -> Tensor:
        """(T, B, C) to (B, heads, T, head size)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).permute(1, 2, 0, 3)

    def _keys_and_values(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None,
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values, (B, heads, S, head size), and their padding; update the cache."""
        if incremental_state is None:
            return self._project_keys(query, key, value, key_padding_mask, {}, static_kv)
        self._expand_cache(incremental_state)
        buffer = self._get_input_buffer(incremental_state)
        # Beam search repeats a sentence for each hypothesis, in adjacent rows.
        beam = self.beam_size
        if static_kv and beam > 1 and key is not None and key.shape[1] == query.shape[1]:
            key = key[:, ::beam]
            value = key
            if key_padding_mask is not None:
                key_padding_mask = key_padding_mask[::beam]
        is_new = static_kv and buffer.get("prev_key") is None
        k, v, padding = self._project_keys(query, key, value, key_padding_mask, buffer, static_kv)
        if is_new:
            v = self._static_values(v, padding)
        cache = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding}
        self._set_input_buffer(incremental_state, cache)
        return k, v, padding

    def _project_keys(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None,
        buffer: dict[str, Tensor | None],
        static_kv: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Project the keys and values, and join them with the cached ones."""
        prev_k, prev_v = buffer.get("prev_key"), buffer.get("prev_value")
        prev_padding, order = buffer.get("prev_key_padding_mask"), buffer.get("order")
        if order is not None and prev_padding is not None:
            prev_padding = prev_padding.index_select(0, order)
        if static_kv and prev_k is not None and prev_v is not None:
            return prev_k, prev_v, prev_padding
        if self.self_attention:
            key, value = query, query
        elif self.encoder_decoder_attention:
            value = key
        assert key is not None and value is not None
        k, v = self._split_heads(self.k_proj(key)), self._split_heads(self.v_proj(value))
        if prev_k is not None and prev_v is not None:
            k, v = self._append(prev_k, k, order), self._append(prev_v, v, order)
            key_padding_mask = self._append_prev_key_padding_mask(
                key_padding_mask, prev_padding, k.shape[0], k.shape[2], static_kv
            )
        return k, v, key_padding_mask

    def _append(self, cache: Tensor, new: Tensor, order: Tensor | None) -> Tensor:
        """Return the cached keys or values, reordered, followed by the new ones."""
        if order is None:
            return torch.cat([cache, new], 2)
        if torch.is_grad_enabled():  # `out=` has no gradient
            return torch.cat([cache.index_select(0, order), new], 2)
        # Stored as (T, B, heads, head size), so that each copied block is dense.
        cache, new = cache.permute(2, 0, 1, 3), new.permute(2, 0, 1, 3)
        length = cache.shape[0]
        steps, batch, heads, size = new.shape
        grown = new.new_empty([length + steps, batch, heads, size])
        torch.index_select(cache.flatten(2), 1, order, out=grown[:length].flatten(2))
        grown[length:] = new
        return grown.permute(1, 2, 0, 3)

    def _with_extra_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned key and the zero key, which no mask excludes; they are not cached."""
        keys, values = [k], [v]
        shape = (k.shape[0], self.num_heads, 1, self.head_dim)
        if self.bias_k is not None:
            keys.append(self._split_heads(self.bias_k).expand(shape))
            values.append(self._split_heads(self.bias_v).expand(shape))
        if self.add_zero_attn:
            keys.append(k.new_zeros(shape))
            values.append(v.new_zeros(shape))
        extra = len(keys) - 1
        if extra > 0:
            k, v = torch.cat(keys, 2), torch.cat(values, 2)
            mask = None if mask is None else nn.functional.pad(mask, [0, extra])
        return k, v, mask
