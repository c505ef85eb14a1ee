"""fairseq's two cross-entropy criteria, with the output layer fused into the loss.

The same losses, logged fields and units as the stock criteria of the same model. A criterion asks
the decoder for `linear_output() -> (weight, bias, modulator)`; where a decoder does not offer it,
the stock computation over all logits is used, and the log says so once.
"""

import logging

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor

from multimax_fairseq.functional import linear_cross_entropy

logger = logging.getLogger(__name__)


class FusedOutput:
    """What the two criteria share: features instead of logits, and the loss over them."""

    ignore_prefix_size = 0
    label_smoothing = 0.0
    _warned = False

    def fused_output(self, model):
        """Return the decoder's `linear_output`, or None where the fused loss cannot stand in."""
        decoder = getattr(model, "decoder", None)
        if getattr(decoder, "adaptive_softmax", None) is not None:
            return None
        linear_output = getattr(decoder, "linear_output", None)
        if linear_output is None and not self._warned:
            type(self)._warned = True
            logger.info(
                f"{type(decoder).__name__} has no linear_output(): the loss holds all logits, as "
                "the stock criterion does"
            )
        return linear_output

    def fused_loss(self, model, sample, linear_output, reduce):
        """Return (loss, nll_loss, features, target), in nats; losses per token unless reduce."""
        net_output = model(**sample["net_input"], features_only=True)
        features, target = net_output[0], model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            features = features[:, self.ignore_prefix_size :]
            target = target[:, self.ignore_prefix_size :]
        weight, bias, modulator = linear_output()
        loss, nll_loss = linear_cross_entropy(
            features,
            weight,
            target,
            bias=bias,
            modulator=modulator,
            label_smoothing=self.label_smoothing,
            ignore_index=self.padding_idx,
            reduction="sum" if reduce else "none",
        )
        return loss, nll_loss, features, target

    def logging_output(self, sample, loss):
        """Return the fields that both criteria log."""
        nsentences = sample["target"].size(0)
        return {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": nsentences,
            "sample_size": nsentences if self.sentence_avg else sample["ntokens"],
        }


@register_criterion("multimax_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class MultimaxCrossEntropyCriterion(FusedOutput, CrossEntropyCriterion):
    """Equivalent to: fairseq's `cross_entropy` on the same model."""

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logged fields) of a batch."""
        linear_output = self.fused_output(model)
        if linear_output is None:
            return super().forward(model, sample, reduce)
        loss, *_ = self.fused_loss(model, sample, linear_output, reduce)
        if not reduce:
            loss = loss.view(-1)
        logged = self.logging_output(sample, loss)
        return loss, logged["sample_size"], logged


@register_criterion(
    "label_smoothed_multimax_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig
)
class LabelSmoothedMultimaxCrossEntropyCriterion(FusedOutput, LabelSmoothedCrossEntropyCriterion):
    """Equivalent to: fairseq's `label_smoothed_cross_entropy` on the same model."""

    @property
    def label_smoothing(self):
        return self.eps

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logged fields) of a batch."""
        linear_output = self.fused_output(model)
        if linear_output is None:
            return super().forward(model, sample, reduce)
        loss, nll_loss, features, target = self.fused_loss(model, sample, linear_output, reduce)
        if not reduce:
            # The stock criterion's shape for losses that are not summed.
            loss, nll_loss = loss.view(-1, 1), nll_loss.view(-1, 1)
        logged = self.logging_output(sample, loss)
        logged["nll_loss"] = nll_loss.data
        if self.report_accuracy:
            counted = target.ne(self.padding_idx)
            logged["total"] = counted.sum()
            logged["n_correct"] = self._correct(model, features, target, counted)
        return loss, logged["sample_size"], logged

    @staticmethod
    @torch.no_grad()
    def _correct(model, features: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        """Count the targets that are the model's first choice, some rows of logits at a time."""
        rows = zip(*(t.flatten(0, 1).split(256) for t in (features, target, counted)), strict=True)
        return sum(
            (model.decoder.output_layer(part).argmax(-1).eq(wanted) & counts).sum()
            for part, wanted, counts in rows
        )
