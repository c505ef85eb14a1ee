"""Passes the attention in a model's forward passes to a listener.

The observer changes neither parameters, outputs nor random numbers. A fused kernel does not return
scores, so the observer computes them again from query and key.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.modules import AdditiveAttention, Normalizer, normalizer_chain
from multimax_fairseq.ops.attention import AttentionInputs, attention_scores
from multimax_fairseq.ops.masks import attention_mask, causal_mask, excluded_keys

# Bounds the memory of scores that are computed again: a few tens of MB.
SCORES_AT_ONCE = 1 << 22
# By name, because `statistics` works without fairseq. Its subclasses may compute something else.
SOFTMAX_ATTENTION = "fairseq.modules.multihead_attention.MultiheadAttention"


@dataclass
class Attention:
    """Scores and probabilities of one attention, for some rows and queries of a batch."""

    kind: str  # encoder, decoder or cross
    layer: int  # from 0
    module: nn.Module  # the Normalizer, or fairseq's attention layer
    scores: Tensor  # (B, H, T, S), as a modulator receives them
    probs: Tensor  # (B, H, T, S)
    excluded: Tensor | None  # bool, broadcastable to (B, H, T, S)
    padding: Tensor  # (B, T), True for queries that are padding

    @property
    def normalizer(self) -> Normalizer | None:
        """The normalizer; None for fairseq's own softmax attention."""
        return self.module if isinstance(self.module, Normalizer) else None

    @property
    def modulator(self) -> Any:
        return getattr(self.normalizer, "modulator", None)

    @property
    def valid(self) -> Tensor:
        """(B, H, T, S): True where the query is not padding and the key is not excluded."""
        valid = ~self.padding[:, None, :, None]
        if self.excluded is not None:
            valid = valid & ~self.excluded
        return valid.expand(self.scores.shape)

    def parts(self) -> Iterator["Attention"]:
        """Split the rows so that each part fits in memory; convert to float32 or wider."""
        for rows in _parts(self.scores, self.scores.mT):
            yield Attention(
                self.kind,
                self.layer,
                self.module,
                wide(self.scores[rows]),
                wide(self.probs[rows]),
                _of_rows(self.excluded, rows),
                self.padding[rows],
            )


class AttentionListener:
    """Receives attentions and outputs from an `Observer`; subclasses override what they need."""

    def on_attention(self, attention: Attention) -> None:
        """Receive one attention."""

    def on_output(self, decoder: Any, output: Tensor, is_logits: bool) -> None:
        """Receive the decoder's output, (N, C), logits or features, without padding."""


class Observer:
    """Passes each attention of a model, and its decoder's output, to a listener.

    Args:
        model: a Transformer of fairseq, or a model of this package.
        listener: receives the attentions and the output.
        once: stop after one forward pass.
    """

    def __init__(self, model: Any, listener: AttentionListener, once: bool = False) -> None:
        self.listener, self.once = listener, once
        self.hooks = contextlib.ExitStack()
        self.padding: dict[str, Tensor] = {}
        # Layers that share a module call it in the order of the layers.
        self.layers: dict[nn.Module, list[tuple[str, int]]] = {}
        self.calls: dict[nn.Module, int] = {}
        self.queries: dict[nn.Module, int] = {}  # seen so far in this call
        for kind, layer, module in _attentions(model):
            if self.follow(module, kind, layer):
                self._observe(module)
        if hasattr(model, "encoder"):
            self._hook(model.encoder.register_forward_pre_hook(self._on_source))
        self._hook(model.decoder.register_forward_pre_hook(self._on_target))
        self._hook(model.decoder.register_forward_hook(self._on_output, with_kwargs=True))

    def stop(self) -> None:
        """Remove all hooks from the model."""
        self.hooks.close()

    def reset(self) -> None:
        """Forget the calls of earlier passes."""
        self.calls = dict.fromkeys(self.layers, 0)
        self.queries = dict.fromkeys(self.layers, 0)

    # --- which layer calls a module ---

    def follow(self, module: nn.Module, kind: str, layer: int) -> bool:
        """Record that a layer calls this module; return whether it is the module's first layer."""
        is_first = module not in self.layers
        if is_first:
            self.layers[module] = []
            self.calls[module] = self.queries[module] = 0
        self.layers[module].append((kind, layer))
        return is_first

    def layer_of(self, module: nn.Module) -> tuple[str, int]:
        """Return the kind and the number of the layer that makes the module's current call."""
        layers = self.layers[module]
        return layers[self.calls[module] % len(layers)]

    def advance(self, module: nn.Module, queries: int) -> None:
        """Count the queries of a call: a recurrent decoder attends with one query at a time."""
        kind, _ = self.layer_of(module)
        self.queries[module] += queries
        if self.queries[module] >= self.padding[kind].shape[1]:
            self.queries[module] = 0
            self.calls[module] += 1

    # --- hooks ---

    def _hook(self, handle: Any) -> None:
        self.hooks.callback(handle.remove)

    def _observe(self, module: Any) -> None:
        if isinstance(module, Normalizer):
            self._hook(module.register_forward_hook(self._on_scores, with_kwargs=True))
            module.kernel_hooks.append(self._on_kernel)
            self.hooks.callback(module.kernel_hooks.remove, self._on_kernel)
        else:
            self._hook(module.register_forward_hook(self._on_softmax, with_kwargs=True))

    def _on_source(self, encoder: Any, args: Any) -> None:
        self.padding["encoder"] = args[0] == encoder.dictionary.pad()

    def _on_target(self, decoder: Any, args: Any) -> None:
        self.padding["decoder"] = self.padding["cross"] = args[0] == decoder.dictionary.pad()

    @torch.no_grad()
    def _on_output(self, decoder: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self.once:
            self.stop()
        tokens = output[0].detach()[~self.padding["decoder"]]
        self.listener.on_output(decoder, tokens, not kwargs.get("features_only", False))

    @torch.no_grad()
    def _on_scores(self, module: Any, args: Any, kwargs: Any, probs: Tensor) -> None:
        """Receive the scores and probabilities of a normalizer in plain PyTorch."""
        scores, _, mask, *_ = args
        if module.training and mapping_named(module.name).training:
            # In training, some of these probabilities are not exactly 0.
            with evaluated(module):
                probs = module.forward(*args, **kwargs)
        self._notify(module, scores, probs, mask)
        self.advance(module, scores.shape[-2])

    def _on_kernel(self, module: Any, inputs: AttentionInputs) -> None:
        """Receive the inputs of a fused kernel."""

        def normalize(scores: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
            with _as_evaluated(module):
                hidden = None if inputs.hidden is None else inputs.hidden[rows]
                return module.forward(scores, -1, mask, hidden)

        query, key, _, mask, is_causal, _, scale, _ = inputs
        self._compute_scores(module, normalize, query, key, mask, is_causal, scale)

    @torch.no_grad()
    def _on_softmax(self, module: Any, args: Any, kwargs: Any, _: Any) -> None:
        """Receive the inputs of fairseq's own attention."""
        inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        key = inputs["query"] if module.self_attention else inputs["key"]
        query, key = (
            F.linear(x, projection.weight, projection.bias)
            .unflatten(-1, (module.num_heads, -1))
            .permute(1, 2, 0, 3)  # (T, B, H D) to (B, H, T, D)
            for x, projection in ((inputs["query"], module.q_proj), (key, module.k_proj))
        )
        mask = attention_mask(inputs.get("attn_mask"), inputs.get("key_padding_mask"))

        def normalize(scores: Tensor, mask: Tensor | None, rows: slice) -> Tensor:
            return softmax(scores, -1, mask)

        self._compute_scores(module, normalize, query, key, mask, False, module.scaling)

    @torch.no_grad()
    def _compute_scores(
        self,
        module: Any,
        normalize: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        scale: float | None,
    ) -> None:
        """Compute the scores again, for a part of the batch at a time to bound memory."""
        queries, keys = query.shape[2], key.shape[2]
        with torch.autocast(query.device.type, enabled=False):
            for rows in _parts(query, key):
                part = _of_rows(mask, rows)
                if is_causal:
                    part = causal_mask(part, queries, keys, query.device)
                scores = attention_scores(wide(query[rows]), wide(key[rows]), scale)
                self._notify(module, scores, normalize(scores, part, rows), part, rows)
        self.advance(module, queries)

    def _notify(
        self,
        module: nn.Module,
        scores: Tensor,
        probs: Tensor,
        mask: Tensor | None,
        rows: slice = slice(None),
    ) -> None:
        """Pass the attention of these rows of the batch to the listener."""
        kind, layer = self.layer_of(module)
        first = self.queries[module]
        padding = self.padding[kind][rows, first : first + scores.shape[-2]]
        excluded = None if mask is None else excluded_keys(mask)
        self.listener.on_attention(
            Attention(kind, layer, module, scores.detach(), probs.detach(), excluded, padding)
        )


def _attentions(model: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield (kind, layer, module) of each normalizer and of each attention of fairseq's own."""
    recurrent = getattr(model.decoder, "attention", None)
    if isinstance(recurrent, AdditiveAttention):
        yield from (("cross", 0, part) for part in _normalizers(recurrent.normalizer))
    for side in ("encoder", "decoder"):
        layers = getattr(getattr(model, side, None), "layers", ())
        for number in range(len(layers)):  # iterating under LayerDrop would draw random numbers
            for name, kind in (("self_attn", side), ("encoder_attn", "cross")):
                attention = getattr(layers[number], name, None)
                for part in _normalizers(attention):
                    yield kind, number, part
                own = type(attention)
                if f"{own.__module__}.{own.__qualname__}" == SOFTMAX_ATTENTION:
                    yield kind, number, attention


def _normalizers(module: Any) -> Iterator[Normalizer]:
    return (part for part in normalizer_chain(module) if isinstance(part, Normalizer))


@contextlib.contextmanager
def evaluated(module: nn.Module | None) -> Iterator[None]:
    """Put a module into evaluation mode inside the `with` block."""
    if module is None:
        yield
        return
    before = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(before)


def _as_evaluated(module: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context without the mapping's own form in training, whose zeros are not exact."""
    return evaluated(module if mapping_named(module.name).training else None)


def wide(x: Tensor) -> Tensor:
    """Return the tensor in float32 or wider, without gradient."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _parts(query: Tensor, key: Tensor) -> list[slice]:
    """Split the rows of a batch, (B, H, T, any) and (B, H, S, any), to bound memory."""
    batch, heads, queries, _ = query.shape
    size = max(1, SCORES_AT_ONCE // max(1, heads * queries * key.shape[2]))
    return [slice(first, first + size) for first in range(0, batch, size)]


def _of_rows(mask: Tensor | None, rows: slice) -> Tensor | None:
    """Return these rows of a mask, unless all rows share it."""
    return mask[rows] if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 else mask
