"""Records the forward passes of a trained model for `collect`."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from torch import Tensor, nn

from multimax_fairseq.analysis.words import WordBoundaries
from multimax_fairseq.continuous.value_function import positions
from multimax_fairseq.errors import UsageError
from multimax_fairseq.modules import (
    AdditiveAttention,
    ContinuousAttention,
    Normalizer,
    normalizer_chain,
)
from multimax_fairseq.modules.continuous_attention import Expectation
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.backend import plain_backend
from multimax_fairseq.statistics import metrics
from multimax_fairseq.statistics.observer import Attention, AttentionListener, Observer
from multimax_fairseq.statistics.sums import AttentionSums, OutputSums, QueriesAndKeys


class Recorder(AttentionListener):
    """Collects statistics and examples from a model's forward passes.

    The recorder replaces fairseq's own attention layers by ours with softmax, the same function.

    Args:
        model: changed in place; a Transformer of fairseq, or a model of this package.
        source: words of the source; None for a language model.
        target: words of the target.
        example_ids: indices of the sentences to keep as examples.
        max_tokens: number of tokens to keep of an example.

    Raises:
        UsageError: another architecture.
    """

    def __init__(
        self,
        model: Any,
        source: WordBoundaries | None,
        target: WordBoundaries,
        example_ids: set[int],
        max_tokens: int = 32,
    ) -> None:
        self.model, self.source, self.target = model, source, target
        self.example_ids, self.max_tokens = example_ids, max_tokens
        self.sums: dict[tuple[str, int], AttentionSums] = {}
        self.densities: dict[str, str] = {}
        self.examples: dict[int, dict[str, Any]] = {}
        self.output = OutputSums(target.dictionary)
        modules: list[tuple[nn.Module, str, int]] = []
        attention: Any = getattr(getattr(model, "decoder", None), "attention", None)
        if isinstance(attention, AdditiveAttention):  # the only one of a recurrent model
            modules += self._add_sums("cross", 0, attention.normalizer, 1)
        else:
            for side, number, layer in _layers(model, source is not None):
                modules.append((layer, side, number))
                for kind, attention in _self_and_cross_attention(side, number, layer):
                    modules += self._add_sums(
                        kind, number, attention.normalizer, attention.num_heads
                    )
        if not _takes_features_only(model):
            raise _unknown(f"a {type(model).__name__} has no forward for the features only")
        self.observer = Observer(model, self)
        for module, kind, number in modules:
            if self.observer.follow(module, kind, number):
                is_density = isinstance(module, Expectation)
                module.register_forward_hook(self._on_density if is_density else self._on_features)

    def _add_sums(
        self, kind: str, number: int, module: nn.Module, heads: int
    ) -> Iterator[tuple[nn.Module, str, int]]:
        """Make the sums of an attention; yield the module that computes its densities."""
        for part in normalizer_chain(module):
            if isinstance(part, ContinuousAttention):
                self.densities[kind] = part.density
                yield part.expectation, kind, number
            elif isinstance(part, Normalizer):
                self.sums[kind, number] = AttentionSums(part, heads)
        if (kind, number) not in self.sums:
            raise _unknown(f"its attention is by a {type(module).__name__}")

    def run(self, sample: dict[str, Any]) -> None:
        """Run the model on a batch and record it."""
        inputs = sample["net_input"]
        decoded = inputs["src_tokens" if self.source is None else "prev_output_tokens"]
        tokens = {"decoder": (self.target, decoded)}
        if self.source is not None:
            tokens["encoder"] = (self.source, inputs["src_tokens"])
        self.pairs = {kind: _pair(*given, *given) for kind, given in tokens.items()}
        if self.source is not None:
            self.pairs["cross"] = _pair(*tokens["decoder"], *tokens["encoder"])
        self.rollouts: dict[str, Tensor] = {}
        self.observer.reset()
        self.steps: dict[nn.Module, list[tuple[Tensor, ...]]] = {m: [] for m in self.observer.calls}
        self.ids = sample["id"].tolist()
        for row, number in enumerate(self.ids):
            if number in self.example_ids:
                texts = {
                    side: words.display(
                        batch[row][batch[row] != words.dictionary.pad()][: self.max_tokens]
                    )
                    for side, (words, batch) in tokens.items()
                }
                self.examples[number] = {
                    "source": texts.get("encoder", {"tokens": [], "words": []}),
                    "target": texts["decoder"],
                    "attention": {},
                    "rollout": {},
                    "densities": {},
                }
        words = self.target.dictionary
        # fairseq-eval-lm does not count the BOS token that --add-bos-token makes a target.
        counted = (sample["target"] != words.pad()) & (sample["target"] != words.bos())
        with plain_backend(), torch.no_grad():  # a collection must not depend on the kernels
            features = self.model(**inputs, features_only=True)[0]
            self.output.add(self.model.decoder, features[counted], sample["target"][counted])
        is_complete = all(self.observer.calls.values()) and not any(self.steps.values())
        assert is_complete, "the observer missed an attention"

    def _all_queries(self, module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return the tensors, (B, heads, queries, ...), for all queries of a call.

        A recurrent decoder attends with one query at a time: return None before the last query.
        """
        kind, _ = self.observer.layer_of(module)
        steps = self.steps[module]
        steps.append(tensors)
        if sum(step[0].shape[2] for step in steps) < self.pairs[kind].query_padding.shape[1]:
            return None
        if len(steps) > 1:
            tensors = tuple(torch.cat(parts, 2) for parts in zip(*steps, strict=True))
        steps.clear()
        return tensors

    def on_attention(self, attention: Attention) -> None:
        kind, number = attention.kind, attention.layer
        pair, sums = self.pairs[kind], self.sums[kind, number]
        excluded = pair.key_padding[:, None, None].expand(-1, 1, attention.scores.shape[-2], -1)
        if attention.excluded is not None:
            excluded = excluded | attention.excluded
        tensors = self._all_queries(attention.module, attention.scores, attention.probs, excluded)
        if tensors is None:
            return
        scores, probs, excluded = tensors
        if (~scores.isfinite() & ~excluded & ~pair.query_padding[:, None, :, None]).any():
            raise UsageError(
                f"the scores in layer {number + 1} of {kind} attention are not finite, as after a "
                "training that diverged: pass an earlier checkpoint"
            )
        sums.add(scores, probs, excluded, pair)
        self._keep("attention", kind, pair, probs)
        self._roll_out(kind, pair, sums, probs.mean(1), excluded)

    def _roll_out(
        self,
        kind: str,
        pair: QueriesAndKeys,
        sums: AttentionSums,
        mean: Tensor,
        excluded: Tensor,
    ) -> None:
        if kind != "cross":
            mixed = metrics.rollout(mean, self.rollouts.get(kind))
            self.rollouts[kind] = mixed
        elif "encoder" in self.rollouts:
            mixed = mean @ self.rollouts["encoder"]
        else:  # an encoder without attention has no rollout
            return
        ignored = excluded[:, 0] | pair.query_padding[..., None]
        if pair.same:  # the diagonal contains the residual connection
            ignored = ignored | (pair.offsets[:, 0] == 0)
        sums.layer["rollout_similarity"].add(metrics.correlation(mixed, mean, ignored)[None])
        self._keep("rollout", kind, pair, mixed)

    def _on_density(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        kind, number = self.observer.layer_of(module)
        pair = self.pairs[kind]
        moments = self._all_queries(module, *(moment[..., None] for moment in inputs))
        self.observer.advance(module, inputs[0].shape[2])
        if moments is None:
            return
        mean, variance = moments
        density: Any = module.density
        time = positions(~pair.key_padding)
        values, inside = metrics.density_at(density, time[:, None, None], mean, variance)
        inside = inside & ~pair.key_padding[:, None, None]
        self.sums[kind, number].add_density(density, variance, inside, pair)
        for row, queries, keys, example in self._examples(pair):
            support = inside[row][:, queries][..., keys]
            # The support is one interval of tokens.
            first = support.long().argmax(-1)
            ends = torch.stack([first, first + support.sum(-1)], -1)
            layer = {
                "kind": density,
                "positions": _numbers(time[row, keys], 6),
                "mean": _numbers(mean[row][:, queries, 0], 6),
                "variance": _numbers(variance[row][:, queries, 0], 8),
                "values": _numbers(values[row][:, queries][..., keys], 4),
                "support": ends.tolist(),
            }
            example["densities"].setdefault(kind, []).append(layer)

    def _keep(self, name: str, kind: str, pair: QueriesAndKeys, values: Tensor) -> None:
        """Keep the weights, (B, ..., T, S), of this batch's examples."""
        for row, queries, keys, example in self._examples(pair):
            weights = _numbers(values[row][..., queries, :][..., keys], 4)
            example[name].setdefault(kind, []).append(weights)

    def _examples(
        self, pair: QueriesAndKeys
    ) -> Iterator[tuple[int, Tensor, Tensor, dict[str, Any]]]:
        """Yield the rows of this batch that are examples, and their first queries and keys."""
        for row, number in enumerate(self.ids):
            if number in self.example_ids:
                queries, keys = (
                    (~padding[row]).nonzero()[: self.max_tokens, 0]
                    for padding in (pair.query_padding, pair.key_padding)
                )
                yield row, queries, keys, self.examples[number]

    def _on_features(self, module: nn.Module, inputs: Any, output: Any) -> None:
        kind, number = self.observer.layer_of(module)
        self.observer.advance(module, self.pairs[kind].query_padding.shape[1])
        features = output[0] if isinstance(output, tuple) else output
        features, padding = features.transpose(0, 1), self.pairs[kind].query_padding
        layer = self.sums[kind, number].layer
        layer["patch_similarity"].add(metrics.patch_similarity(features, padding)[None])
        layer["mean_average_distance"].add(metrics.mean_average_distance(features, padding)[None])


def _layers(model: Any, has_source: bool) -> Iterator[tuple[str, int, Any]]:
    """Yield (side, number, layer) of a Transformer."""
    for side in ("encoder", "decoder"):
        layers = getattr(getattr(model, side, None), "layers", None)
        if layers is None:
            if side == "encoder" and not has_source:
                continue
            raise _unknown(f"it has no {side} layers")
        for number, layer in enumerate(layers):
            if getattr(layer, "cross_self_attention", False):
                raise _unknown("--cross-self-attention joins its two attentions")
            yield side, number, layer


def _self_and_cross_attention(side: str, number: int, layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, attention) of a layer; put fairseq's own attention into ours."""
    for name, kind in (("self_attn", side), ("encoder_attn", "cross")):
        attention = getattr(layer, name, None)
        if attention is None:
            if name == "self_attn":
                raise _unknown(f"layer {number + 1} of its {side} has no self-attention")
            continue
        if type(attention) is SoftmaxMultiheadAttention:
            try:
                attention = MultiheadAttention(attention, Normalizer("softmax")).eval()
            except ValueError as error:
                raise _unknown(str(error)) from None
            setattr(layer, name, attention)
        if not isinstance(attention, MultiheadAttention):
            raise _unknown(f"its attention is a {type(attention).__name__}")
        yield kind, attention


def _numbers(values: Tensor, digits: int) -> list[Any]:
    """Return nested lists of rounded numbers."""
    return values.double().numpy().round(digits).tolist()


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
    asking = queries.interrogatives(query_tokens)
    return QueriesAndKeys(query_padding, key_padding, offsets, same, words, questions, asking)


def _takes_features_only(model: nn.Module) -> bool:
    arguments = inspect.signature(model.forward).parameters
    any_name = (argument.kind == argument.VAR_KEYWORD for argument in arguments.values())
    return "features_only" in arguments or any(any_name)


def _unknown(why: str) -> UsageError:
    return UsageError(
        f"the checkpoint's architecture cannot be analysed ({why}): pass one of a transformer, "
        "transformer_lm, their multimax variants or rnn_multimax"
    )
