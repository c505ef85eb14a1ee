"""Watches the forward passes of a model that was trained."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from torch import Tensor, nn

from multimax_fairseq.analysis import metrics
from multimax_fairseq.analysis.sums import AttentionSums, OutputSums, QueriesAndKeys
from multimax_fairseq.analysis.words import WordBoundaries
from multimax_fairseq.errors import UsageError
from multimax_fairseq.functional.backend import VARIABLE
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.modules.multihead_attention import MultiheadAttention


class Recorder:
    """Watches a model's own forward passes, from hooks on its normalizers and layers.

    fairseq's own attention layers are put into ours with softmax as the normalizer: the same
    function, in which scores and probabilities can be seen.

    Args:
        model: changed in place; a Transformer of fairseq or of this package.
        source: the source's words; None for a language model.
        target: the target's words.
        wanted: the numbers of the sentences to keep as examples.
        longest: of longer ones, so many first tokens are kept.

    Raises:
        UsageError: a model of another build.
    """

    def __init__(
        self,
        model: Any,
        source: WordBoundaries | None,
        target: WordBoundaries,
        wanted: set[int],
        longest: int = 32,
    ) -> None:
        self.model, self.source, self.target = model, source, target
        self.wanted, self.longest = wanted, longest
        self.sums: dict[tuple[str, int], AttentionSums] = {}
        self.examples: dict[int, dict[str, Any]] = {}
        self.output = OutputSums(target.dictionary)
        # Where layers share a module, its calls come in the order of the layers.
        self.places: dict[nn.Module, list[tuple[str, int]]] = {}
        for side in ("encoder", "decoder"):
            layers = getattr(getattr(model, side, None), "layers", None)
            if layers is None:
                if side == "encoder" and source is None:
                    continue
                raise _unknown(f"it has no {side} layers")
            for number, layer in enumerate(layers):
                self._watch_layer(side, number, layer)
        for module in self.places:
            hook = self._on_scores if isinstance(module, Normalizer) else self._on_features
            module.register_forward_hook(hook)

    def _watch_layer(self, side: str, number: int, layer: nn.Module) -> None:
        if getattr(layer, "cross_self_attention", False):
            raise _unknown("--cross-self-attention joins its two attentions")
        self.places.setdefault(layer, []).append((side, number))
        for name, place in (("self_attn", side), ("encoder_attn", "cross")):
            attention = getattr(layer, name, None)
            if attention is None:
                continue
            if type(attention) is SoftmaxMultiheadAttention:
                try:
                    attention = MultiheadAttention(attention, Normalizer("softmax")).eval()
                except ValueError as error:
                    raise _unknown(str(error)) from None
                setattr(layer, name, attention)
            if not isinstance(attention, MultiheadAttention):
                raise _unknown(f"its attention is a {type(attention).__name__}")
            normalizer: Any = attention.normalizer
            self.places.setdefault(normalizer, []).append((place, number))
            self.sums[place, number] = AttentionSums(normalizer, attention.num_heads)

    def run(self, sample: dict[str, Any]) -> None:
        """Run the model on a batch and take in what it shows."""
        inputs = sample["net_input"]
        decoded = inputs["src_tokens" if self.source is None else "prev_output_tokens"]
        tokens = {"decoder": (self.target, decoded)}
        if self.source is not None:
            tokens["encoder"] = (self.source, inputs["src_tokens"])
        self.pairs = {place: _pair(*given, *given) for place, given in tokens.items()}
        if self.source is not None:
            self.pairs["cross"] = _pair(*tokens["decoder"], *tokens["encoder"])
        self.rollouts: dict[str, Tensor] = {}
        self.calls = dict.fromkeys(self.places, 0)
        self.ids = sample["id"].tolist()
        for row, number in enumerate(self.ids):
            if number in self.wanted:
                shown = {
                    side: words.display(
                        found[row][found[row] != words.dictionary.pad()][: self.longest]
                    )
                    for side, (words, found) in tokens.items()
                }
                self.examples[number] = {
                    "source": shown.get("encoder", {"tokens": [], "words": []}),
                    "target": shown["decoder"],
                    "attention": {place: [] for place in self.pairs},
                    "rollout": {place: [] for place in self.pairs},
                }
        counted = sample["target"] != self.target.dictionary.pad()
        with _plain_backend(), torch.no_grad():
            features = self.model(**inputs, features_only=True)[0]
            self.output.add(self.model.decoder, features[counted], sample["target"][counted])
        assert all(self.calls.values()), "an attention was computed that could not be seen"

    def _place(self, module: nn.Module) -> tuple[str, int]:
        places = self.places[module]
        self.calls[module] += 1
        return places[(self.calls[module] - 1) % len(places)]

    def _on_scores(self, module: nn.Module, inputs: Any, probs: Tensor) -> None:
        scores, _, mask = inputs
        place, number = self._place(module)
        pair, sums = self.pairs[place], self.sums[place, number]
        excluded = pair.key_padding[:, None, None].expand(-1, 1, scores.shape[-2], -1)
        if mask is not None:
            excluded = excluded | (mask if mask.dtype == torch.bool else mask == -torch.inf)
        sums.add(scores, probs, excluded, pair)
        mean = probs.mean(1)
        if place == "cross":
            mixed = mean @ self.rollouts["encoder"]
        else:
            mixed = metrics.rollout(mean, self.rollouts.get(place))
            self.rollouts[place] = mixed
        unseen = excluded[:, 0] | pair.query_padding[..., None]
        if pair.same:  # what the residual connection adds is no attention
            unseen = unseen | (pair.offsets[:, 0] == 0)
        sums.layer["rollout_similarity"].add(metrics.correlation(mixed, mean, unseen)[None])
        for row, example in enumerate(self.ids):
            if example in self.wanted:
                queries, keys = (
                    (~padding[row]).nonzero()[: self.longest, 0]
                    for padding in (pair.query_padding, pair.key_padding)
                )
                for name, values in (("attention", probs[row]), ("rollout", mixed[row])):
                    shown = values[..., queries, :][..., keys].double().numpy().round(4)
                    self.examples[example][name][place].append(shown.tolist())

    def _on_features(self, module: nn.Module, inputs: Any, output: Any) -> None:
        place, number = self._place(module)
        features = output[0] if isinstance(output, tuple) else output
        similarity = metrics.token_similarity(
            features.transpose(0, 1), self.pairs[place].query_padding
        )
        self.sums[place, number].layer["token_similarity"].add(similarity[None])


def _pair(
    queries: WordBoundaries, query_tokens: Tensor, keys: WordBoundaries, key_tokens: Tensor
) -> QueriesAndKeys:
    query_padding = query_tokens == queries.dictionary.pad()
    key_padding = key_tokens == keys.dictionary.pad()
    # Padding on the left must not move a sentence.
    positions = ((~padding).cumsum(1) - 1 for padding in (query_padding, key_padding))
    offsets = metrics.relative_positions(*positions)[:, None]
    words, questions = keys.numbers(key_tokens), keys.questions(key_tokens)[:, None, None]
    same = query_tokens is key_tokens
    return QueriesAndKeys(query_padding, key_padding, offsets, same, words, questions)


def _unknown(why: str) -> UsageError:
    return UsageError(
        f"the checkpoint's architecture cannot be analysed ({why}): give one of a transformer, "
        "transformer_lm or their multimax variants"
    )


@contextlib.contextmanager
def _plain_backend() -> Iterator[None]:
    """The kernels hold no probabilities: only plain PyTorch has what there is to see."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "plain"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
