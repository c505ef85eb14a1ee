"""The decoders' output layer: logits, probabilities, and its parts for the fused loss."""

from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.models.config import build_normalizer
from multimax_fairseq.ops.best_outputs import fused_scores
from multimax_fairseq.ops.modulator import has_parameters


def plain_output(decoder: Any) -> tuple[Tensor, Tensor | None, Any] | None:
    """Return the output layer's (weight, bias, modulator).

    Return None if the layer is quantised, has hooks, or has a modulator of another type.
    """
    projection, modulator = decoder.output_projection, getattr(decoder, "output_modulator", None)
    if type(projection) is not nn.Linear or not (modulator is None or has_parameters(modulator)):
        return None
    if projection._forward_hooks or projection._forward_pre_hooks:
        return None
    return projection.weight, projection.bias, modulator


class NormalizedOutput:
    """Mixin that adds a mapping to the output layer of a decoder with an `output_projection`.

    MultiMax modulates the logits; softmax of the modulated logits is MultiMax, so the rest of
    fairseq needs no change. A sparse mapping is stored as `output_normalizer`. It gives most
    words the probability 0, whose logarithm is -inf.
    """

    def set_output_normalizer(self, args: Any) -> None:
        """Build the mapping that the flags select. The decoder's constructor calls this last."""
        normalizer = build_normalizer(args, args.output_normalizer, of_output=True)
        self.output_modulator: Any = normalizer.modulator
        self.output_normalizer = None if normalizer.modulated else normalizer

    def _show_output_parameters(self, extra: dict[str, list[Tensor | None]]):
        """Add the output layer's parameters to the model's output.

        The fused loss uses them outside the model. Without this, DDP with
        --find-unused-parameters treats them as unused.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            modules = filter(None, (self.output_projection, self.output_modulator))
            parameters = [p for module in modules for p in module.parameters()]
            extra["output_parameters"] = [p.flatten()[:1] for p in parameters]

    def output_layer(self, features: Tensor) -> Tensor:
        """Return the modulated logits, (B, T, V), whose softmax is the model's distribution.

        With an adaptive softmax, return the features.
        """
        if self.adaptive_softmax is not None:
            return features
        if not torch.is_grad_enabled():
            output = plain_output(self)
            scores = None if output is None else fused_scores(features, *output)
            if scores is not None:
                return scores
        logits = self.output_projection(features)
        return logits if self.output_modulator is None else self.output_modulator(logits)

    def linear_output(self) -> tuple[Tensor, Tensor | None, Modulator | None] | None:
        """Return `plain_output` of this decoder, for the fused loss.

        Raises:
            UsageError: the output layer is sparse.
        """
        self._refuse_sparse_output()
        return plain_output(self)

    def get_normalized_probs(
        self,
        net_output: tuple[Tensor, dict[str, list[Tensor | None]] | None],
        log_probs: bool,
        sample: dict[str, Tensor] | None = None,
    ):
        """Return probabilities or log-probabilities, (B, T, V).

        Raises:
            UsageError: a model with a sparse output layer is trained on them.
        """
        if self.output_normalizer is not None:
            if self.training:
                self._refuse_sparse_output()
            probs = self.output_normalizer(net_output[0])
            return probs.log() if log_probs else probs
        return self.get_normalized_probs_scriptable(net_output, log_probs, sample)

    def _refuse_sparse_output(self):
        """Raise UsageError for a sparse output layer, whose logarithms are -inf."""
        if self.output_normalizer is not None:
            raise UsageError(
                f"--output-normalizer {self.output_normalizer.name} gives some words the "
                "probability 0, which cross-entropy, with or without label smoothing, cannot train "
                "on: use --criterion entmax_loss"
            )
