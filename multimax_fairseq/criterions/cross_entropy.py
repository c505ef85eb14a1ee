"""fairseq's two cross-entropy criteria with the output layer fused into the loss.

Losses, logged fields and units are those of the stock criteria. The fused loss needs the decoder's
`linear_output() -> (weight, bias, modulator)`. If a decoder has no such method, or it returns None,
the criterion computes all logits as the stock one does, and logs this once. Both criteria can
train with R-Drop, a z-loss and max suppression.
"""

import functools
import logging
import math
from dataclasses import dataclass, field

import torch
from fairseq import metrics
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
    label_smoothed_nll_loss,
)
from fairseq.dataclass import FairseqDataclass
from torch import Tensor

from multimax_fairseq.errors import UsageError
from multimax_fairseq.ops.checks import is_finite
from multimax_fairseq.ops.cross_entropy import linear_cross_entropy
from multimax_fairseq.ops.symmetric_divergence import symmetric_divergence

logger = logging.getLogger(__name__)


@dataclass
class FusedOutputConfig(FairseqDataclass):
    rdrop_alpha: float = field(
        default=0.0,
        metadata={
            "help": "weight of the R-Drop loss, the divergence of two passes with different "
            "dropout; 0 turns it off"
        },
    )
    z_loss: float = field(
        default=0.0,
        metadata={
            "help": "weight of the z-loss, the square of the log-sum-exp of the logits, which "
            "keeps them from growing; 0 turns it off"
        },
    )
    maxsup: float = field(
        default=0.0,
        metadata={
            "help": "weight of max suppression, the largest logit minus their mean, in place of "
            "--label-smoothing; 0 turns it off"
        },
    )


@dataclass
class MultimaxCrossEntropyConfig(CrossEntropyCriterionConfig, FusedOutputConfig):
    pass


@dataclass
class LabelSmoothedMultimaxCrossEntropyConfig(
    LabelSmoothedCrossEntropyCriterionConfig, FusedOutputConfig
):
    pass


class FusedOutput:
    """Mixin of the two criteria: the fused loss, R-Drop, the z-loss and max suppression.

        loss = loss_1 + loss_2 + alpha (KL(p|q) + KL(q|p)) / 2              (Liang et al. 2021)

    loss_1 and loss_2 are the criterion's losses of two passes of a batch with different dropout, p
    and q their output distributions. Tokens and sentences are counted once. In evaluation there is
    one pass and no divergence.

    The two passes run as one pass over a batch with every sentence twice, because dropout differs
    from row to row. The matrix products are larger, and distributed training works unchanged, as it
    expects one forward pass per update. --decoder-layerdrop drops the same layers in both.

    In training, loss_1 and loss_2 contain two more terms: --z-loss times the squared log-sum-exp of
    the logits (Chowdhery et al. 2022), and --maxsup times the difference of their maximum and mean
    (Zhou et al. 2025). The logged loss contains them too. The losses of an evaluation do not.
    """

    ignore_prefix_size = 0
    label_smoothing = 0.0
    rdrop_alpha = 0.0
    z_loss = 0.0
    maxsup = 0.0
    unreduced: tuple[int, ...] = (-1,)  # shape of the stock criterion's losses without reduction

    def set_weights(self, rdrop_alpha, z_loss, maxsup):
        """Set the weights of the losses. Raise UsageError if one is not finite or below 0."""
        if not (is_finite(rdrop_alpha) and rdrop_alpha >= 0):
            raise UsageError(
                f"--rdrop-alpha {rdrop_alpha} must be a finite number, at least 0: 0 is off, 5 is "
                "the published setting for IWSLT14"
            )
        for flag, weight, example in (("z-loss", z_loss, "1e-4"), ("maxsup", maxsup, "0.1")):
            if not (is_finite(weight) and weight >= 0):
                raise UsageError(
                    f"--{flag} {weight} must be a finite number, at least 0: 0 is off; pass one "
                    f"such as {example}"
                )
        self.rdrop_alpha, self.z_loss, self.maxsup = rdrop_alpha, z_loss, maxsup

    def check_model(self, model):
        """Raise UsageError if the criterion cannot train the model."""
        self.fused_output(model)

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logged fields) of a batch."""
        linear_output = self.fused_output(model)
        twice = self.rdrop_alpha > 0 and model.training
        if linear_output is not None:
            losses = self.fused_losses(model, sample, linear_output, reduce, twice)
        elif twice:
            losses = self.stock_losses(model, sample, reduce)
        else:
            return super().forward(model, sample, reduce)
        loss, nll_loss, divergence, output, target = losses
        if not reduce:
            loss, nll_loss = (
                (t.unflatten(0, (-1, 2)).sum(1) if twice else t).view(self.unreduced)
                for t in (loss, nll_loss)
            )
        nsentences = sample["target"].size(0)
        # The logged loss is the mean of the two passes, so that it compares with a run without
        # R-Drop. Training minimises 2 loss + alpha rdrop.
        logged = {
            "loss": loss.data / 2 if twice else loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": nsentences,
            "sample_size": nsentences if self.sentence_avg else sample["ntokens"],
        }
        nll_loss = nll_loss / 2 if twice else nll_loss
        logged |= self.more_logged(model, nll_loss, output, target, linear_output is not None)
        if twice:
            if not reduce:
                divergence = divergence.view(self.unreduced)
            logged["rdrop"] = divergence.data
            loss = loss + self.rdrop_alpha * divergence
        return loss, logged["sample_size"], logged

    def more_logged(self, model, nll_loss, output, target, is_fused):
        """Return the criterion's own logged fields.

        `output` is features if is_fused, otherwise log-probabilities.
        """
        return {}

    @classmethod
    def reduce_metrics(cls, logging_outputs):
        """Aggregate the logged fields of the workers. rdrop is in bits per token, like nll_loss."""
        super().reduce_metrics(logging_outputs)
        if any("rdrop" in log for log in logging_outputs):
            total, tokens = (
                sum(log.get(name, 0) for log in logging_outputs) for name in ("rdrop", "ntokens")
            )
            metrics.log_scalar("rdrop", total / tokens / math.log(2), tokens, round=3)

    def fused_output(self, model):
        """Return the decoder's `linear_output`, or None if the fused loss is not possible."""
        decoder = getattr(model, "decoder", None)
        linear_output = getattr(decoder, "linear_output", None)
        if linear_output is not None and linear_output() is not None:
            return linear_output
        if self.z_loss > 0 or self.maxsup > 0:
            raise UsageError(
                "--z-loss and --maxsup need an output layer of one weight with softmax or "
                "MultiMax: leave them out, or use --output-normalizer multimax and no "
                "--adaptive-softmax-cutoff"
            )
        _log_all_logits(type(decoder).__name__)
        return None

    def fused_losses(self, model, sample, linear_output, reduce, twice):
        """Return (loss, nll_loss, divergence, features, target), in nats.

        The losses are sums with `reduce`, otherwise one per token. With `twice` they cover both
        passes; without it the divergence is None. Features and target are of the first pass.
        """
        inputs = doubled(sample["net_input"]) if twice else sample["net_input"]
        net_output = model(**inputs, features_only=True)
        features, target = net_output[0], model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            features = features[:, self.ignore_prefix_size :]
            target = target[:, self.ignore_prefix_size :]
        weight, bias, modulator = linear_output()
        reduction = "sum" if reduce else "none"
        loss, nll_loss = linear_cross_entropy(
            features,
            weight,
            target.repeat_interleave(2, 0) if twice else target,
            bias=bias,
            modulator=modulator,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss if model.training else 0.0,
            maxsup=self.maxsup if model.training else 0.0,
            ignore_index=self.padding_idx,
            reduction=reduction,
        )
        if not twice:
            return loss, nll_loss, None, features, target
        divergence = symmetric_divergence(
            features[::2],
            features[1::2],
            weight,
            bias=bias,
            modulator=modulator,
            mask=target.eq(self.padding_idx),
            reduction=reduction,
        )
        return loss, nll_loss, divergence, features[::2], target

    def stock_losses(self, model, sample, reduce):
        """Do what `fused_losses` does for two passes, without the fused loss.

        Log-probabilities replace the features.
        """
        net_output = model(**doubled(sample["net_input"]))
        log_probs = model.get_normalized_probs(net_output, log_probs=True)
        log_probs = log_probs[:, self.ignore_prefix_size :]
        target = model.get_targets(sample, net_output)[:, self.ignore_prefix_size :]
        doubled_target = target.repeat_interleave(2, 0).unsqueeze(-1)
        loss, nll_loss = label_smoothed_nll_loss(
            log_probs, doubled_target, self.label_smoothing, self.padding_idx, reduce
        )
        if not reduce:
            loss, nll_loss = loss.squeeze(-1), nll_loss.squeeze(-1)
        log_p, log_q = log_probs[::2], log_probs[1::2]
        divergence = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
        divergence = divergence.masked_fill(target.eq(self.padding_idx), 0.0)
        return loss, nll_loss, divergence.sum() if reduce else divergence, log_p, target


@functools.cache
def _log_all_logits(decoder: str) -> None:
    logger.info(
        f"the loss computes all logits, as the stock criterion does: {decoder} has no "
        "linear_output(), or its output layer is not weight, bias and MultiMax"
    )


def doubled(net_input):
    """Return a batch's input with every sentence twice.

    The copies are adjacent, so that sentences sorted by length stay sorted.
    """
    return {
        name: value.repeat_interleave(2, 0) if isinstance(value, Tensor) else value
        for name, value in net_input.items()
    }


@register_criterion("multimax_cross_entropy", dataclass=MultimaxCrossEntropyConfig)
class MultimaxCrossEntropyCriterion(FusedOutput, CrossEntropyCriterion):
    """fairseq's `cross_entropy` with a fused output layer."""

    def __init__(self, task, sentence_avg, rdrop_alpha=0.0, z_loss=0.0, maxsup=0.0):
        super().__init__(task, sentence_avg)
        self.set_weights(rdrop_alpha, z_loss, maxsup)


@register_criterion(
    "label_smoothed_multimax_cross_entropy", dataclass=LabelSmoothedMultimaxCrossEntropyConfig
)
class LabelSmoothedMultimaxCrossEntropyCriterion(FusedOutput, LabelSmoothedCrossEntropyCriterion):
    """fairseq's `label_smoothed_cross_entropy` with a fused output layer."""

    unreduced = (-1, 1)

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        ignore_prefix_size=0,
        report_accuracy=False,
        rdrop_alpha=0.0,
        z_loss=0.0,
        maxsup=0.0,
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.set_weights(rdrop_alpha, z_loss, maxsup)

    @property
    def label_smoothing(self):
        return self.eps

    def more_logged(self, model, nll_loss, output, target, is_fused):
        """Return nll_loss and, with --report-accuracy, the counts of the first pass."""
        logged = {"nll_loss": nll_loss.data}
        if self.report_accuracy:
            counted = target.ne(self.padding_idx)
            logged["total"] = counted.sum()
            scores_of = model.decoder.output_layer if is_fused else (lambda log_probs: log_probs)
            logged["n_correct"] = self._correct(scores_of, output, target, counted)
        return logged

    @staticmethod
    @torch.no_grad()
    def _correct(scores_of, output: Tensor, target: Tensor, counted: Tensor) -> Tensor:
        """Return the number of correct predictions; 256 rows of scores at a time save memory."""
        rows = zip(*(t.flatten(0, 1).split(256) for t in (output, target, counted)), strict=True)
        return sum(
            (scores_of(part).argmax(-1).eq(words) & counts).sum() for part, words, counts in rows
        )
