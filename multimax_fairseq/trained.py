"""Use a trained model from Python: translate, sample, score, and look at its attention.

model = load("checkpoints")
model.translate(["Guten Morgen ."])
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq import compat

compat.apply()  # first, since it keeps fairseq from changing the setup of logging

from fairseq import hub_utils, utils  # noqa: E402
from fairseq.data import LanguagePairDataset  # noqa: E402
from fairseq.data.data_utils import collate_tokens  # noqa: E402
from fairseq.token_generation_constraints import pack_constraints  # noqa: E402

import multimax_fairseq.models  # noqa: E402, F401  registers the architectures
from multimax_fairseq.compat.text import symbols_as_unknown  # noqa: E402
from multimax_fairseq.errors import UsageError, remedy_for  # noqa: E402
from multimax_fairseq.models.loading import SEARCH  # noqa: E402
from multimax_fairseq.models.loading import load as load_checkpoint  # noqa: E402
from multimax_fairseq.statistics.observer import Attention, AttentionListener, Observer  # noqa: E402

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionWeights:
    """Attention probabilities for one sentence and its translation, or for one text.

    `encoder`, `decoder` and `cross` have one tensor per layer, (H, T, S). The rows are queries and
    sum to 1, except for mappings whose `Mapping.sums_to_one` is False, or with a sink.
    """

    source: list[str]  # the encoder's input; empty for a language model
    target: list[str]  # the decoder's input, which starts with the end-of-sentence symbol
    encoder: list[Tensor]
    decoder: list[Tensor]
    cross: list[Tensor]


class TrainedModel(hub_utils.GeneratorHubInterface):
    """The model of a checkpoint, or an ensemble, with its dictionaries and subwords.

    fairseq's interface provides `translate`, `encode` and `decode`. This is an nn.Module:
    `.cuda()`, `.half()` and `.to(device)` work as usual.
    """

    def sample(self, sentences: Any, beam: int = 1, verbose: bool = False, **arguments: Any) -> Any:
        """Return a translation or continuation of each sentence; "" if it is skipped."""
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **arguments)[0]
        samples = [self.encode(sentence) for sentence in sentences]
        found = self.generate(samples, beam, verbose, **arguments)
        return [self.decode(each[0]["tokens"]) if each else "" for each in found]

    def generate(
        self,
        tokenized_sentences: Any,
        beam: int = 5,
        verbose: bool = False,
        skip_invalid_size_inputs: bool = False,
        inference_step_args: dict[str, Any] | None = None,
        prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
        **flags: Any,
    ) -> Any:
        """Return the hypotheses of each sentence, the best first.

        Replaces fairseq's method, which passes all rows of `inference_step_args` to each batch,
        shifts the results after a skipped sentence, and ignores unknown flags.

        Args:
            tokenized_sentences: token indices, (T,) each, or of one sentence.
            verbose: log sentences and hypotheses.
            skip_invalid_size_inputs: return no hypotheses for sentences that are too long.
            inference_step_args: `prefix_tokens` and `constraints`, with one row for each sentence.
            prefix_allowed_tokens_fn: maps the number of a sentence, and the tokens of a
                hypothesis, to the tokens that may follow.
            **flags: flags of fairseq-generate that the search reads.

        Raises:
            UsageError: there is no such flag, or the number of rows does not match.
        """
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            arguments = skip_invalid_size_inputs, inference_step_args, prefix_allowed_tokens_fn
            return self.generate([tokenized_sentences], beam, verbose, *arguments, **flags)[0]
        for name in flags:
            if name not in SEARCH:
                raise UsageError(f"the search has no flag {name!r}: {remedy_for(name, SEARCH)}")
        if not isinstance(beam, int) or beam < 1:
            raise UsageError(f"beam must be a whole number of at least 1, got {beam!r}")
        if (kind := flags.get("constraints")) not in (None, "ordered", "unordered"):
            raise UsageError(f"constraints must be 'ordered' or 'unordered', got {kind!r}")
        sentences = list(tokenized_sentences)
        if not sentences:
            return []
        rows = self._rows(inference_step_args or {}, len(sentences))
        settings = copy.deepcopy(self.cfg.generation)
        settings.update({"beam": beam, **flags})
        generator = self.task.build_generator(
            self.models, settings, prefix_allowed_tokens_fn=prefix_allowed_tokens_fn
        )
        found: list[Any] = [[] for _ in sentences]
        for batch in self._build_batches(sentences, skip_invalid_size_inputs):
            batch = utils.apply_to_sample(lambda x: x.to(self.device), batch)
            own = {name: each[batch["id"].cpu()].to(self.device) for name, each in rows.items()}
            hypotheses = self.task.inference_step(generator, self.models, batch, **own)
            for number, each in zip(batch["id"].tolist(), hypotheses, strict=True):
                found[number] = each
        if verbose:
            for tokens, hypotheses in zip(sentences, found, strict=True):
                logger.info(f"S\t{self.src_dict.string(tokens)}")
                for each in hypotheses:
                    logger.info(f"H\t{each['score']}\t{self.decode(each['tokens'])}")
        return found

    def score(
        self, sentences: Sequence[str], targets: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return log-probabilities of given translations, or of text under a language model.

        Args:
            sentences: the sources, or the text.
            targets: one translation for each source.

        Returns:
            One dict for each sentence: `tokens`, (T,); `positional_scores`, (T,), the logarithm of
            each token's probability; `score`, their mean. The end-of-sentence token counts in a
            translation, and not in text.

        Raises:
            UsageError: the sentences are no list; a text has no tokens; the number of targets does
                not match.
        """
        if isinstance(sentences, str) or isinstance(targets, str):
            raise UsageError("score takes lists of sentences: put a single one in brackets")
        expected = len(sentences) if self._is_translation else 0
        if len(targets or ()) != expected:
            raise UsageError(
                f"{len(sentences)} sentences have {len(targets or ())} targets, not {expected}: "
                "pass one translation per source, and no targets for a language model"
            )
        samples = self._encode(sentences, targets)
        if targets is None and (empty := [i for i, each in enumerate(samples) if len(each) < 2]):
            raise UsageError(f"sentence {empty[0]} has no tokens, so no score: leave it out")
        return [scored[0] for scored in self.generate(samples, score_reference=True)]

    @torch.no_grad()
    def features(self, sentence: str) -> Tensor:
        """Return the output of the encoder, or of a language model's last layer, (T, C)."""
        model, inputs = self.models[0], self._inputs(self._encode([sentence]))
        if not self._is_translation:
            features: Tensor = model(inputs["src_tokens"], features_only=True)[0]  # (1, T, C)
            return features[0]
        output = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
        encoded: Tensor = output["encoder_out"][0]  # (T, 1, C), or (1, T, C) if recurrent
        return encoded.flatten(0, 1)

    @torch.no_grad()
    def attention(self, sentence: str, target: str | None = None) -> AttentionWeights:
        """Return the attention probabilities of the first model, also of a stock one.

        Args:
            sentence: the source, or the text of a language model.
            target: its translation; by default the one that the model finds with a beam of 5.

        Raises:
            UsageError: a language model gets a target.
        """
        if target is not None and not self._is_translation:
            raise UsageError("a language model has no target: leave it out")
        if self._is_translation and target is None:
            target = self.translate([sentence])[0]
        targets = None if target is None else [target]
        inputs = self._inputs(self._encode([sentence], targets))
        listener = _Probabilities()
        observer = Observer(self.models[0], listener)
        try:
            self.models[0](**inputs)
        finally:
            observer.stop()
        layers = {
            kind: [torch.cat(probs, dim=1) for _, probs in sorted(found.items())]
            for kind, found in listener.layers.items()
        }
        source, read = inputs["src_tokens"], inputs.get("prev_output_tokens")
        return AttentionWeights(
            [] if read is None else self._words(source, self.src_dict),
            self._words(source if read is None else read, self.tgt_dict),
            **layers,
        )

    def binarize(self, sentence: str) -> Tensor:
        """Return the token indices of a sentence of subwords; symbols are unknown words."""
        return _token_indices(sentence, self.src_dict)

    # --- samples ---

    @property
    def _is_translation(self) -> bool:
        return hasattr(self.models[0], "encoder")

    def _encode(self, sentences: Sequence[str], targets: Sequence[str] | None = None) -> list[Any]:
        """Return token indices, or (source, target) pairs of them."""
        for text in (*sentences, *(targets or ())):
            if not isinstance(text, str):
                raise UsageError(f"a sentence must be a string, got {text!r}")
        sources = [self.encode(sentence) for sentence in sentences]
        if targets is None:
            return sources
        words = [self.apply_bpe(self.tokenize(target)) for target in targets]
        encoded = [_token_indices(line, self.tgt_dict) for line in words]
        return list(zip(sources, encoded, strict=True))

    def _rows(self, arguments: dict[str, Any], count: int) -> dict[str, Tensor]:
        """Return the arguments of `inference_step` as tensors of `count` rows."""
        rows: dict[str, Tensor] = {}
        for name, value in arguments.items():
            if value is None:
                continue
            if len(value) != count:
                raise UsageError(
                    f"{name} has {len(value)} rows for {count} sentences: pass one for each"
                )
            if any(isinstance(row, str) for row in value):
                raise UsageError(
                    f"{name} must be token indices, such as those of model.tgt_dict, got {value!r}"
                )
            if torch.is_tensor(value):
                rows[name] = value.cpu()
            elif name == "constraints":
                rows[name] = pack_constraints([[*map(torch.as_tensor, each)] for each in value])
            else:
                words = [torch.as_tensor(row, dtype=torch.long) for row in value]
                rows[name] = collate_tokens(words, self.tgt_dict.pad())
        return rows

    def _dataset(self, samples: list[Any]) -> Any:
        if torch.is_tensor(samples[0]):
            lengths = torch.tensor([len(tokens) for tokens in samples])
            return self.task.build_dataset_for_inference(samples, lengths)
        sources, targets = zip(*samples, strict=True)
        return LanguagePairDataset(
            *(sources, [len(tokens) for tokens in sources], self.src_dict),
            *(targets, [len(tokens) for tokens in targets], self.tgt_dict),
        )

    def _build_batches(self, tokens: list[Any], skip_invalid_size_inputs: bool) -> Any:
        """Return batches for `generate`; overrides fairseq's method, which takes no targets."""
        return self.task.get_batch_iterator(
            self._dataset(tokens),
            max_tokens=self.cfg.dataset.max_tokens,
            max_sentences=self.cfg.dataset.batch_size,
            max_positions=self.max_positions,
            ignore_invalid_inputs=skip_invalid_size_inputs,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)

    def _inputs(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return the model's arguments for one sample."""
        dataset = self._dataset(samples)
        batch = dataset.collater([dataset[0]])["net_input"]
        inputs: dict[str, Tensor] = utils.apply_to_sample(lambda x: x.to(self.device), batch)
        return inputs

    def _words(self, tokens: Tensor, dictionary: Any) -> list[str]:
        return [dictionary[index] for index in tokens[0].tolist()]


def _token_indices(line: str, dictionary: Any) -> Tensor:
    tokens = dictionary.encode_line(line, add_if_not_exist=False).long()
    indices: Tensor = symbols_as_unknown(tokens, dictionary)
    return indices


class _Probabilities(AttentionListener):
    """Keeps each layer's probabilities, (H, T, S); recurrent decoders attend with T = 1."""

    def __init__(self) -> None:
        self.layers: dict[str, dict[int, list[Tensor]]]
        self.layers = {"encoder": {}, "decoder": {}, "cross": {}}

    def on_attention(self, attention: Attention) -> None:
        layers = self.layers[attention.kind]
        layers.setdefault(attention.layer, []).append(attention.probs[0])


def load(
    checkpoint: str | Path,
    data_bin: str | Path | None = None,
    *others: str | Path,
    **settings: Any,
) -> TrainedModel:
    """Load a model of fairseq-train, of this package or of fairseq itself.

    Args:
        checkpoint: the file, or the folder of a run: its checkpoint_best.pt, or checkpoint_last.pt
            if there is no best one.
        data_bin: the folder of fairseq-preprocess that the model was trained on; by default the one
            that the checkpoint names.
        *others: further checkpoints or folders for an ensemble.
        **settings: flags of fairseq-interactive for the text, such as `bpe="sentencepiece",
            sentencepiece_model="text/pieces.model"`. Without them, sentences are tokens with
            spaces between them.

    Raises:
        UsageError: a file or setting does not exist, the dictionaries do not match, or the task is
            neither translation nor language modelling.
    """
    models, data = [], None if data_bin is None else Path(data_bin)
    for path in (checkpoint, *others):
        model, task, cfg = load_checkpoint(Path(path), data, **settings)
        models.append(model)
    return TrainedModel(cfg, task, models)
