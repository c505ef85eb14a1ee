"""The loss of sparse output layers."""

import math
from dataclasses import dataclass

import torch
from fairseq import metrics
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from omegaconf import II

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import NORMALIZERS


@dataclass
class EntmaxLossConfig(FairseqDataclass):
    sentence_avg: bool = II("optimization.sentence_avg")


@register_criterion("entmax_loss", dataclass=EntmaxLossConfig)
class EntmaxLossCriterion(FairseqCriterion):
    """The Fenchel-Young loss of the decoder's sparse output mapping.

        loss = (p - onehot(y)) . z + sum_k (p_k - p_k^alpha) / (alpha (alpha - 1)),  p = entmax(z)
                                                                          (Peters et al. 2019)

    Its gradient with respect to the scores z is p - onehot(y), so words of probability 0 get a
    gradient as well. The loss is not a negative log-likelihood, so the log does not convert it to
    bits. The log shows the mean per token, or per sentence with --sentence-avg. It also shows
    `zero`, the share of targets with probability 0.

    The loss is computed in float32 or wider. It needs the decoder's `output_normalizer`.
    """

    def __init__(self, task, sentence_avg):
        super().__init__(task)
        self.sentence_avg = sentence_avg

    def check_model(self, model):
        """Raise UsageError if the criterion cannot train the model."""
        self._normalizer(model)

    def _normalizer(self, model):
        normalizer = getattr(getattr(model, "decoder", None), "output_normalizer", None)
        if normalizer is None:
            sparse = [name for name, mapping in NORMALIZERS.items() if mapping.output_loss]
            raise UsageError(
                "--criterion entmax_loss is for sparse output layers: add --output-normalizer with "
                f"one of {', '.join(sparse)}, or choose multimax_cross_entropy"
            )
        return normalizer

    def forward(self, model, sample, reduce=True):
        """Return (loss, sample size, logged fields) of a batch."""
        normalizer = self._normalizer(model)
        net_output = model(**sample["net_input"])
        target = model.get_targets(sample, net_output)
        counted = target.ne(self.padding_idx)
        logits, classes = net_output[0][counted], target[counted]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss_of = NORMALIZERS[normalizer.name].output_loss
        assert loss_of is not None  # register() ensures it
        # The package entmax computes indices from the logits, which are out of range for NaN. Such
        # rows get the sum of their logits as loss, so the loss is not finite either.
        is_invalid = ~(logits < math.inf).all(-1, keepdim=True)
        losses = loss_of(logits.masked_fill(is_invalid, 0.0), classes, **normalizer.fixed)
        losses = losses + logits.masked_fill(~is_invalid, 0.0).sum(-1)
        with torch.no_grad():
            probs = normalizer(logits).gather(-1, classes.unsqueeze(-1))
        loss = (
            losses.sum()
            if reduce
            else losses.new_zeros(target.shape).masked_scatter(counted, losses)
        )
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logged = {
            "loss": loss.data,
            "zero": probs.eq(0).sum().data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["target"].size(0),
            "sample_size": sample_size,
        }
        return loss, sample_size, logged

    @staticmethod
    def reduce_metrics(logging_outputs):
        """Aggregate the logged fields of the workers."""
        total = {
            name: sum(float(log.get(name, 0)) for log in logging_outputs)
            for name in ("loss", "zero", "ntokens", "sample_size")
        }
        size, tokens = max(total["sample_size"], 1), max(total["ntokens"], 1)
        metrics.log_scalar("loss", total["loss"] / size, size, round=3)
        metrics.log_scalar("zero", total["zero"] / tokens, tokens, round=4)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
