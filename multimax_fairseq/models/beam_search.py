"""A faster beam search that finds the same hypotheses as fairseq's."""

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from fairseq.data.data_utils import collate_tokens
from fairseq.models.transformer import TransformerDecoder, TransformerDecoderBase
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor, nn

from multimax_fairseq.compat import command
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.output_layer import plain_output
from multimax_fairseq.models.search_layers import faster_layers
from multimax_fairseq.models.transformer_multimax import MultimaxDecoder
from multimax_fairseq.ops.best_outputs import best_outputs, best_scores

logger = logging.getLogger(__name__)

# Limit of the scores computed at a time. Reusing a small buffer is faster than a large one.
MAX_SCORES = 2**21
DECODERS = (TransformerDecoder, TransformerDecoderBase, MultimaxDecoder)


class BeamGenerator(SequenceGenerator):
    """fairseq's generator with a faster beam search for Transformers; the hypotheses are the same.

    The search is faster because

    * the keys and values of cross-attention are stored once per sentence, not once per beam;
    * the first step has one row per sentence;
    * only the log-probabilities of candidates are computed;
    * attention weights are computed when the caller reads them.

    fairseq's own search runs if a feature is not supported: a prefix, constraints, another search
    strategy, a language model for shallow fusion, another decoder. The log names the reason.
    """

    @property
    def special(self) -> tuple[int, ...]:
        """The symbols with search rules of their own: end of sentence, unknown word, padding."""
        return self.eos, self.unk, self.pad

    def _generate(self, sample, prefix_tokens=None, constraints=None, bos_token=None):
        net_input = sample["net_input"]
        reason = self._unsupported(net_input, prefix_tokens, constraints)
        log_search(reason)
        if reason is not None:
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        try:
            return self._search(net_input, self.eos if bos_token is None else bos_token)
        finally:
            self._share_keys(1)  # fairseq's attention would read a training batch as beams

    def _unsupported(
        self, net_input: dict[str, Tensor], prefix_tokens: Any, constraints: Any
    ) -> str | None:
        """Return why fairseq's search has to run, or None."""
        if "src_tokens" not in net_input:
            return "the source is not text"
        cases = {
            "the first words of the targets are given": prefix_tokens is not None,
            "constraints are given": constraints is not None,
            f"the search strategy is {type(self.search).__name__}": (
                type(self.search) is not BeamSearch
            ),
            "a language model scores the hypotheses": self.lm_model is not None,
            "--no-repeat-ngram-size is given": self.repeat_ngram_blocker is not None,
            "some words are suppressed": self.token_indices_to_suppress is not None,
            "--match-source-len is given": self.match_source_len,
            "the beam is too large for the vocabulary": (
                2 * self.beam_size + len(self.special) > self.vocab_size
            ),
            "--min-len is above the greatest length": (
                max(self.min_len, 1) > self._longest(net_input)
            ),
        }
        reasons = [reason for reason, applies in cases.items() if applies]
        reasons += filter(None, map(_unsupported_model, self.model.models))
        return reasons[0] if reasons else None

    def _longest(self, net_input: dict[str, Tensor]) -> int:
        """Return the greatest number of words of a translation."""
        length = self.max_len_a * net_input["src_tokens"].shape[1] + self.max_len_b
        return min(int(length), self.max_len - 1)

    def _share_keys(self, beam: int) -> None:
        """Set how many adjacent rows of a batch share a source sentence, for cross-attention."""
        for model in self.model.models:
            for layer in model.decoder.layers:
                if layer.encoder_attn is not None:
                    layer.encoder_attn.set_beam_size(beam)

    def _search(self, net_input: dict[str, Tensor], first: int) -> list[list["Hypothesis"]]:
        """Return the finished hypotheses of each sentence, the best first.

        Rows are hypotheses; those of one sentence are adjacent.
        """
        source, beam, longest = net_input["src_tokens"], self.beam_size, self._longest(net_input)
        encoded = self.model.forward_encoder(net_input)
        states: list[dict[str, Any]] = [{} for _ in self.model.models]
        finished: list[list[Hypothesis]] = [[] for _ in source]
        active = torch.arange(len(source), device=source.device)  # indices of unfinished sentences
        tokens = source.new_full((len(source), 1), first)  # (rows, step + 1)
        scores = torch.zeros(len(source), 0, device=source.device)  # (rows, step), cumulative
        rows = active
        caches = [_caches(model.decoder) for model in self.model.models]
        self._share_keys(1)
        for step in range(longest + 1):
            if step == 1:
                self._share_keys(beam)
            if step > 0:
                for state, modules in zip(states, caches, strict=True):
                    for module in modules:
                        module.reorder_incremental_state(state, rows)
            values, words = self._candidates(tokens, encoded, states, step, longest)
            if step > 0:
                values = values + scores[:, -1:]
            per_sentence, choices = len(tokens) // len(active), values.shape[1]
            values, index = values.view(len(active), -1).topk(min(2 * beam, per_sentence * choices))
            words = words.view(len(active), -1).gather(1, index)  # (sentences, 2 * beam)
            sentences = torch.arange(len(active), device=source.device)[:, None]
            rows = sentences * per_sentence + index.div(choices, rounding_mode="floor")
            ends = words.eq(self.eos) & values.gt(-math.inf)
            best_ends = ends[:, :beam]
            if best_ends.any():
                self._finish(
                    finished,
                    active[:, None].expand_as(best_ends)[best_ends].tolist(),
                    tokens[rows[:, :beam][best_ends]],
                    scores[rows[:, :beam][best_ends]],
                    values[:, :beam][best_ends],
                )
                is_active = [len(finished[sentence]) < beam for sentence in active.tolist()]
                if not any(is_active):
                    break
                if not all(is_active):
                    mask = torch.tensor(is_active, device=source.device)
                    active, ends, rows = active[mask], ends[mask], rows[mask]
                    words, values = words[mask], values[mask]
            if step == longest:
                break
            # At most `beam` of the 2 * beam candidates are EOS, one per hypothesis. They go last.
            order = ends.byte().sort(dim=1, stable=True).indices[:, :beam]
            rows, words, values = (x.gather(1, order).view(-1) for x in (rows, words, values))
            tokens = torch.cat([tokens[rows], words[:, None]], 1)
            scores = torch.cat([scores[rows], values[:, None]], 1)
        if not all(finished):
            raise UsageError(
                "a sentence has no translation because the model's scores are not finite: train "
                "with a lower learning rate, or use an earlier checkpoint"
            )
        self._attach_attention(finished, net_input, first)
        return [
            sorted(each, key=lambda hypothesis: -hypothesis["score"].item()) for each in finished
        ]

    def _attach_attention(
        self, finished: list[list["Hypothesis"]], net_input: dict[str, Tensor], first: int
    ) -> None:
        """Let the first read of a hypothesis's attention compute that of the whole batch."""
        hypotheses = [hypothesis for each in finished for hypothesis in each]
        sentences = [sentence for sentence, each in enumerate(finished) for _ in each]
        tokens = [hypothesis["tokens"] for hypothesis in hypotheses]
        weights = functools.cache(
            functools.partial(self._attention, net_input, first, sentences, tokens)
        )
        for row, hypothesis in enumerate(hypotheses):
            hypothesis.weights, hypothesis.row = weights, row

    @torch.no_grad()
    def _attention(
        self, net_input: dict[str, Tensor], first: int, sentences: list[int], tokens: list[Tensor]
    ) -> list[Tensor]:
        """Return the attention weights of each hypothesis, (S, T), by teacher forcing.

        They are the mean over the models.
        """
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

    def _candidates(
        self,
        tokens: Tensor,
        encoded: list[dict[str, list[Tensor]]],
        states: list[dict[str, Any]],
        step: int,
        longest: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the best continuations of each row: log-probabilities and words, (rows, choices).

        Enough for any choice of 2 * beam. At the maximum length the only candidate is EOS.
        """
        features = [
            model.decoder(
                tokens,
                encoder_out=encoder_out,
                incremental_state=state,
                features_only=True,
                alignment_layer=model.decoder.num_layers,  # past the last layer: no weights
            )[0][:, -1:]
            for model, encoder_out, state in zip(self.model.models, encoded, states, strict=True)
        ]
        values, words, total, special = self._fused_best(features) or self._best(features)
        ends, unknown = special[:, :1], special[:, 1:2] - self.unk_penalty
        if step < self.min_len:
            ends = torch.full_like(ends, -math.inf)
        special_words = _as_tensor(words.device, self.special[:2]).expand(len(words), 2)
        if step == longest:
            values, words = ends, special_words[:, :1]
        else:
            values = torch.cat([values, ends, unknown], 1)
            words = torch.cat([words, special_words], 1)
        values = values - total[:, None]
        return values.masked_fill(values.isnan(), -math.inf), words

    def _fused_best(self, features: list[Tensor]) -> tuple[Tensor, ...] | None:
        """Do what `_best` does without computing all scores, or return None if no kernel can."""
        output = plain_output(self.model.models[0].decoder)
        if len(features) > 1 or self.temperature != 1 or output is None:
            return None
        return best_outputs(features[0][:, 0], *output, 2 * self.beam_size, self.special)

    def _best(self, features: list[Tensor]) -> tuple[Tensor, ...]:
        """Return (scores, words, log-sum-exp, special scores) of each row.

        The scores are those of the best words that are not special, (rows, choices).
        """
        count = 2 * self.beam_size + len(self.special)
        special = _as_tensor(features[0].device, self.special)
        rows = max(64, MAX_SCORES // self.vocab_size)
        parts = []
        for part in zip(*(each.split(rows) for each in features), strict=True):
            scores = self._scores(part)
            values, words, total = best_scores(scores, count)
            values = values.masked_fill(torch.isin(words, special), -math.inf)
            parts.append((values, words, total, scores.index_select(1, special)))
        return tuple(torch.cat(each) for each in zip(*parts, strict=True))

    def _scores(self, features: tuple[Tensor, ...]) -> Tensor:
        """Return log-probabilities up to a constant per row, (rows, V) in float32."""
        outputs = []
        for model, each in zip(self.model.models, features, strict=True):
            logits = model.decoder.output_layer(each)[:, 0].float()
            outputs.append(logits if self.temperature == 1 else logits / self.temperature)
        if len(outputs) == 1:
            return outputs[0]
        return torch.stack([logits.log_softmax(1) for logits in outputs]).logsumexp(0)

    def _finish(
        self,
        finished: list[list["Hypothesis"]],
        sentences: list[int],
        tokens: Tensor,
        scores: Tensor,
        values: Tensor,
    ) -> None:
        """Add hypotheses, sorted by score, to the finished ones of their sentences."""
        tokens = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], self.eos)], 1)
        positional = torch.cat([scores, values[:, None]], 1)  # cumulative
        positional[:, 1:] = positional[:, 1:] - positional[:, :-1]
        if self.normalize_scores:
            values = values / tokens.shape[1] ** self.len_penalty
        alignment = torch.empty(0)
        for sentence, words, score, steps in zip(
            sentences, tokens, values, positional, strict=True
        ):
            if len(finished[sentence]) < self.beam_size:
                finished[sentence].append(
                    Hypothesis(
                        tokens=words, score=score, alignment=alignment, positional_scores=steps
                    )
                )


class Hypothesis(dict[str, Tensor]):
    """fairseq's hypothesis. Its "attention", (S, T), is computed when it is first read.

    Until then `items` and `keys` lack it, and the hypothesis holds references to its batch and to
    the models.
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

    def __reduce__(self) -> tuple[Any, ...]:  # a copy holds the weights, not the models
        return dict, ({**self, "attention": self["attention"]},)


@functools.lru_cache(maxsize=16)
def _as_tensor(device: torch.device, words: tuple[int, ...]) -> Tensor:
    """Return the words as a tensor, cached so that a GPU synchronises once, not at each step."""
    with torch.inference_mode(False):
        return torch.tensor(words, device=device)


def _caches(decoder: nn.Module) -> list[Any]:
    """Return the modules that store an incremental state."""
    return [m for m in decoder.modules() if hasattr(m, "reorder_incremental_state")]


def _unsupported_model(model: Any) -> str | None:
    """Return why the fast search cannot decode with a model, or None.

    The decoder must accept one encoder row for several of its own rows. Its distribution must be
    the softmax of its logits.
    """
    decoder = getattr(model, "decoder", None)
    if type(decoder) not in DECODERS:
        return f"the fast one does not support {type(decoder).__name__}"
    if not all(isinstance(layer, TransformerDecoderLayerBase) for layer in decoder.layers):
        return "the decoder has other layers than fairseq's Transformer"
    if decoder.adaptive_softmax is not None:
        return "the model has an adaptive softmax"
    if getattr(decoder, "output_normalizer", None) is not None:
        return f"the output layer uses {decoder.output_normalizer.name}"
    if decoder.cfg.cross_self_attention:
        return "the model was trained with --cross-self-attention"
    return None


@functools.cache
def log_search(reason: str | None) -> None:
    """Log once which beam search runs; `reason` is why the fast one does not."""
    search = "multimax_fairseq's fast one" if reason is None else f"fairseq's own, because {reason}"
    logger.info(f"beam search: {search}")


def build_generator(original, task, models, args, seq_gen_cls=None, *rest, **kwargs):
    """Build a `BeamGenerator` where a task would build fairseq's plain generator."""
    if seq_gen_cls is None and not getattr(args, "print_alignment", False):
        seq_gen_cls = BeamGenerator
    generator = original(task, models, args, seq_gen_cls, *rest, **kwargs)
    if isinstance(generator, SequenceGeneratorWithAlignment):
        log_search("--print-alignment is given")
    is_fast = isinstance(generator, BeamGenerator)
    if is_fast and command() in ("fairseq-generate", "fairseq-interactive"):
        faster_layers(models)
    return generator
