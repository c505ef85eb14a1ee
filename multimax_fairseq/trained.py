"""Use a trained model from Python: translate, sample, score, and look at its attention.

model = load("checkpoints/checkpoint_best.pt", "data-bin")
model.translate(["Guten Morgen ."])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq import compat

compat.apply()  # first, since it keeps fairseq from changing the setup of logging

from fairseq import hub_utils, utils  # noqa: E402
from fairseq.data import LanguagePairDataset  # noqa: E402

import multimax_fairseq.models  # noqa: E402, F401  registers the architectures
from multimax_fairseq.analysis.observer import Attention, AttentionListener, Observer  # noqa: E402
from multimax_fairseq.compat.text import symbols_as_unknown  # noqa: E402
from multimax_fairseq.errors import UsageError  # noqa: E402
from multimax_fairseq.models.loading import load as load_checkpoint  # noqa: E402


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

    fairseq's interface provides `translate`, `sample`, `generate`, `encode` and `decode`. This is
    an nn.Module: `.cuda()`, `.half()` and `.to(device)` work as usual.
    """

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
            UsageError: the sentences are no list, or the number of targets does not fit.
        """
        if isinstance(sentences, str) or isinstance(targets, str):
            raise UsageError("score takes lists of sentences: put a single one in brackets")
        expected = len(sentences) if self._is_translation else 0
        if len(targets or ()) != expected:
            raise UsageError(
                f"{len(sentences)} sentences have {len(targets or ())} targets, not {expected}: "
                "give each source its translation, and a language model no targets"
            )
        samples = self._encode(sentences, targets)
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
            place: [torch.cat(probs, dim=1) for _, probs in sorted(found.items())]
            for place, found in listener.layers.items()
        }
        source, read = inputs["src_tokens"], inputs.get("prev_output_tokens")
        return AttentionWeights(
            [] if read is None else self._words(source, self.src_dict),
            self._words(source if read is None else read, self.tgt_dict),
            **layers,
        )

    def binarize(self, sentence: str) -> Tensor:
        """Return the token indices of a sentence of subwords; fairseq's method reads symbols."""
        return _token_indices(sentence, self.src_dict)

    # --- samples ---

    @property
    def _is_translation(self) -> bool:
        return hasattr(self.models[0], "encoder")

    def _encode(self, sentences: Sequence[str], targets: Sequence[str] | None = None) -> list[Any]:
        """Return token indices, or (source, target) pairs of them."""
        sources = [self.encode(sentence) for sentence in sentences]
        if targets is None:
            return sources
        words = [self.apply_bpe(self.tokenize(target)) for target in targets]
        encoded = [_token_indices(line, self.tgt_dict) for line in words]
        return list(zip(sources, encoded, strict=True))

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
        layers = self.layers[attention.place]
        layers.setdefault(attention.layer, []).append(attention.probs[0])


def load(
    checkpoint: str | Path, data_bin: str | Path, *others: str | Path, **settings: Any
) -> TrainedModel:
    """Load a model of fairseq-train, of this package or of fairseq itself.

    Args:
        checkpoint: the file.
        data_bin: the folder of fairseq-preprocess that the model was trained on.
        *others: further checkpoints for an ensemble.
        **settings: flags of fairseq-interactive for the text, such as `bpe="sentencepiece",
            sentencepiece_model="text/pieces.model"`. Without them, sentences are tokens with
            spaces between them.

    Raises:
        UsageError: a file or setting does not exist, the dictionaries do not match, or the task is
            neither translation nor language modelling.
    """
    models = []
    for path in (checkpoint, *others):
        model, task, cfg = load_checkpoint(Path(path), Path(data_bin), **settings)
        models.append(model)
    return TrainedModel(cfg, task, models)
