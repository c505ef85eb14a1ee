"""Beam search that finds fairseq's hypotheses in less time."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerDecoder, TransformerDecoderBase
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.search import BeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from multimax_fairseq.compat.patch import command, wrap
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.output_layer import plain_output
from multimax_fairseq.models.search_layers import faster_layers
from multimax_fairseq.models.transformer_multimax import MultimaxDecoder
from multimax_fairseq.ops.best_outputs import best_outputs, best_scores

# Of scores that are formed at a time.
MAX_SCORES = 2**21
DECODERS = (TransformerDecoder, TransformerDecoderBase, MultimaxDecoder)


class BeamGenerator(SequenceGenerator):
    """fairseq's generator for Transformers, in which a sentence is read once for all its beams.

    Keys and values of cross-attention are kept once a sentence, the first step has one row a
    sentence, and of the log-probabilities only those are formed that can be chosen. Whatever needs
    more than that (a prefix, constraints, another search, a language model beside, another kind of
    decoder) is left to fairseq's own loop. A hypothesis computes its attention weights when they
    are read.
    """

    @property
    def apart(self) -> tuple[int, ...]:
        """Symbols that are not chosen as words are: an end, an unknown word; never a padding."""
        return self.eos, self.unk, self.pad

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None):
        net_input = sample["net_input"]
        longest = self._longest(net_input)
        if prefix_tokens is not None or constraints is not None or longest is None:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        try:
            return self._search(net_input, longest, self.eos if bos_token is None else bos_token)
        finally:
            self._share_keys(1)  # else fairseq's attention would take a training batch for beams

    def _longest(self, net_input: dict[str, Tensor]) -> int | None:
        """Return the most words of a translation; None where fairseq's own loop is needed."""
        is_plain = (
            "src_tokens" in net_input
            and type(self.search) is BeamSearch
            and type(self.model) is EnsembleModel
            and "forward_decoder" not in vars(self.model)
            and all(map(_is_known, self.model.models))
            and self.lm_model is None
            and self.repeat_ngram_blocker is None
            and self.token_indices_to_suppress is None
            and not self.match_source_len
            and 2 * self.beam_size + len(self.apart) <= self.vocab_size
        )
        if not is_plain:
            return None
        length = self.max_len_a * net_input["src_tokens"].shape[1] + self.max_len_b
        longest = min(int(length), self.max_len - 1)
        return longest if max(self.min_len, 1) <= longest else None

    def _share_keys(self, beam: int) -> None:
        """Tell cross-attention how many rows of a batch, side by side, are of one sentence."""
        for model in self.model.models:
            for layer in model.decoder.layers:
                if layer.encoder_attn is not None:
                    layer.encoder_attn.set_beam_size(beam)

    def _search(
        self, net_input: dict[str, Tensor], longest: int, first: int
    ) -> list[list["Hypothesis"]]:
        source, beam = net_input["src_tokens"], self.beam_size
        encoded = self.model.forward_encoder(net_input)
        states: list[dict[str, Any]] = [{} for _ in self.model.models]
        found: list[list[Hypothesis]] = [[] for _ in source]
        live = torch.arange(len(source), device=source.device)  # the sentences still at work
        # The hypotheses, those of a sentence side by side: their words and scores up to each.
        tokens = source.new_full((len(source), 1), first)
        scores = torch.zeros(len(source), 0, device=source.device)
        rows = live
        caches = [_caches(model.decoder) for model in self.model.models]
        self._share_keys(1)
        for step in range(longest + 1):
            if step == 1:
                self._share_keys(beam)
            if step > 0:
                for state, modules in zip(states, caches, strict=True):
                    for module in modules:
                        module.reorder_incremental_state(state, rows)
            values, words = self._best(tokens, encoded, states, step, longest)
            if step > 0:
                values = values + scores[:, -1:]
            per_sentence, choices = len(tokens) // len(live), values.shape[1]
            values, index = values.view(len(live), -1).topk(min(2 * beam, per_sentence * choices))
            words = words.view(len(live), -1).gather(1, index)
            places = torch.arange(len(live), device=source.device)[:, None]
            rows = places * per_sentence + index.div(choices, rounding_mode="floor")
            ends = words.eq(self.eos) & values.gt(-math.inf)
            chosen = ends[:, :beam]
            if chosen.any():
                self._finish(
                    found,
                    live[:, None].expand_as(chosen)[chosen].tolist(),
                    tokens[rows[:, :beam][chosen]],
                    scores[rows[:, :beam][chosen]],
                    values[:, :beam][chosen],
                )
                open_ = [len(found[sentence]) < beam for sentence in live.tolist()]
                if not any(open_):
                    break
                if not all(open_):
                    kept = torch.tensor(open_, device=source.device)
                    live, ends, rows = live[kept], ends[kept], rows[kept]
                    words, values = words[kept], values[kept]
            if step == longest:
                break
            # Those that go on: the best that do not end. There are as many, as each hypothesis has
            # but one end.
            going = ends.byte().sort(dim=1, stable=True).indices[:, :beam]
            rows, words, values = (x.gather(1, going).view(-1) for x in (rows, words, values))
            tokens = torch.cat([tokens[rows], words[:, None]], 1)
            scores = torch.cat([scores[rows], values[:, None]], 1)
        if not all(found):
            raise UsageError(
                "a sentence has no translation, as the model's scores are not finite: train with a "
                "lower learning rate, or give an earlier checkpoint"
            )
        hypotheses = [one for each in found for one in each]
        sentences = [sentence for sentence, each in enumerate(found) for _ in each]
        weights = functools.cache(  # the first read computes those of the batch
            functools.partial(
                self._attention, net_input, first, sentences, [one["tokens"] for one in hypotheses]
            )
        )
        for row, one in enumerate(hypotheses):
            one.weights, one.row = weights, row
        return [sorted(each, key=lambda one: -float(one["score"])) for each in found]

    @torch.no_grad()
    def _attention(
        self, net_input: dict[str, Tensor], first: int, sentences: list[int], tokens: list[Tensor]
    ) -> list[Tensor]:
        """Return the attention weights of hypotheses, each (S, T), by teacher forcing: the mean
        over the models."""
        previous = collate_tokens(tokens, self.pad).roll(1, 1)
        previous[:, 0] = first
        encoded = self.model.forward_encoder(net_input)
        encoded = self.model.reorder_encoder_out(encoded, previous.new_tensor(sentences))
        weights = [
            model.decoder(
                previous,
                encoder_out=encoder_out,
                features_only=True,
                alignment_layer=model.decoder.num_layers - 1,
            )[1]["attn"][0]
            for model, encoder_out in zip(self.model.models, encoded, strict=True)
        ]
        weights = [each for each in weights if each is not None]
        if not weights:  # no cross-attention
            return [torch.empty(0)] * len(tokens)
        mean = sum(weights).float() / len(self.model.models)
        return [each[: len(words)].T for each, words in zip(mean, tokens, strict=True)]

    def _best(
        self,
        tokens: Tensor,
        encoded: list[dict[str, list[Tensor]]],
        states: list[dict[str, Any]],
        step: int,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and words, (rows, choices): the best of each hypothesis, more
        than can be chosen; at the greatest length its end alone."""
        features = [
            model.decoder(
                tokens,
                encoder_out=encoder_out,
                incremental_state=state,
                features_only=True,
                alignment_layer=model.decoder.num_layers,  # there is none: no attention weights
            )[0][:, -1:]
            for model, encoder_out, state in zip(self.model.models, encoded, states, strict=True)
        ]
        found = self._best_outputs(features)
        if found is None:
            # In parts that memory which is at hand can hold: fresh memory costs more than its
            # numbers.
            most = max(64, MAX_SCORES // self.vocab_size)
            parts = [
                self._best_scores(self._scores(part))
                for part in zip(*(each.split(most) for each in features), strict=True)
            ]
            found = tuple(torch.cat(each) for each in zip(*parts, strict=True))
        values, words, total, apart = found
        ends, unknown = apart[:, :1], apart[:, 1:2] - self.unk_penalty
        if step < self.min_len:
            ends = torch.full_like(ends, -math.inf)
        apart_words = _on(words.device, self.apart[:2]).expand(len(words), 2)
        if step == longest:
            values, words = ends, apart_words[:, :1]
        else:
            values = torch.cat([values, ends, unknown], 1)
            words = torch.cat([words, apart_words], 1)
        values = values - total[:, None]
        return values.masked_fill(values.isnan(), -math.inf), words

    def _best_outputs(self, features: list[Tensor]) -> tuple[Tensor, ...] | None:
        """Return what `_best_scores` does without forming all scores; None where no kernel can."""
        output = plain_output(self.model.models[0].decoder)
        if len(features) > 1 or self.temperature != 1 or output is None:
            return None
        return best_outputs(features[0][:, 0], *output, 2 * self.beam_size, self.apart)

    def _best_scores(self, scores: Tensor) -> tuple[Tensor, ...]:
        """Return the best scores, (rows, choices), of words that are not apart, the words, each
        row's log-sum-exp, and the scores of those apart."""
        values, words, total = best_scores(scores, 2 * self.beam_size + len(self.apart))
        those = _on(scores.device, self.apart)
        values = values.masked_fill(torch.isin(words, those), -math.inf)
        return values, words, total, scores.index_select(1, those)

    def _scores(self, features: tuple[Tensor, ...]) -> Tensor:
        """Return what is log-probabilities but for a summand a row, (rows, V) in float32."""
        found = []
        for model, each in zip(self.model.models, features, strict=True):
            logits = model.decoder.output_layer(each)[:, 0].float()
            found.append(logits if self.temperature == 1 else logits / self.temperature)
        if len(found) == 1:
            return found[0]
        return torch.stack([logits.log_softmax(1) for logits in found]).logsumexp(0)

    def _finish(
        self,
        found: list[list["Hypothesis"]],
        sentences: list[int],
        tokens: Tensor,
        scores: Tensor,
        values: Tensor,
    ) -> None:
        """Append hypotheses that end, the better ones first, to those of their sentences."""
        tokens = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], self.eos)], 1)
        each = torch.cat([scores, values[:, None]], 1)
        each[:, 1:] = each[:, 1:] - each[:, :-1]
        if self.normalize_scores:
            values = values / tokens.shape[1] ** self.len_penalty
        nothing = torch.empty(0)
        for sentence, words, score, steps in zip(sentences, tokens, values, each, strict=True):
            if len(found[sentence]) < self.beam_size:
                found[sentence].append(
                    Hypothesis(
                        tokens=words, score=score, alignment=nothing, positional_scores=steps
                    )
                )


class Hypothesis(dict[str, Tensor]):
    """fairseq's hypothesis, whose "attention", (S, T), is computed at the first read.

    Until then `items` and `keys` lack it, and the hypothesis keeps its batch and the models alive.
    """

    weights: Callable[[], list[Tensor]]
    row: int

    def __missing__(self, key: str) -> Tensor:
        if key != "attention":
            raise KeyError(key)
        self[key] = self.weights()[self.row]
        return self[key]

    def __contains__(self, key: object) -> bool:
        return key == "attention" or super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has the weights instead of the models
        return dict, ({**self, "attention": self["attention"]},)


@functools.lru_cache(maxsize=16)
def _on(device: torch.device, words: tuple[int, ...]) -> Tensor:
    """The words as a tensor, for which a GPU waits once and not at each step."""
    with torch.inference_mode(False):
        return torch.tensor(words, device=device)


def _caches(decoder: nn.Module) -> list[Any]:
    """The modules that keep something from step to step."""
    return [m for m in decoder.modules() if hasattr(m, "reorder_incremental_state")]


def _is_known(model: Any) -> bool:
    """Whether a model's decoder can be called with one encoder row for several of its own, and its
    distribution is softmax of its logits."""
    decoder = getattr(model, "decoder", None)
    return (
        type(decoder) in DECODERS
        and decoder.adaptive_softmax is None
        and getattr(decoder, "output_normalizer", None) is None
        and not decoder.cfg.cross_self_attention
        and all(isinstance(layer, TransformerDecoderLayerBase) for layer in decoder.layers)
    )


def faster_generation() -> None:
    """Have every task build `BeamGenerator` where it would build fairseq's plain generator."""

    def make(original):
        @functools.wraps(original)
        def build_generator(self, models, args, seq_gen_cls=None, *rest, **kwargs):
            if seq_gen_cls is None and not getattr(args, "print_alignment", False):
                seq_gen_cls = BeamGenerator
            generator = original(self, models, args, seq_gen_cls, *rest, **kwargs)
            is_fast = isinstance(generator, BeamGenerator)
            if is_fast and command() in ("fairseq-generate", "fairseq-interactive"):
                faster_layers(models)
            return generator

        return build_generator

    wrap(FairseqTask, "build_generator", make)
