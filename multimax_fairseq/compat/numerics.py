"""Numbers that are not finite: training ends in one sentence that says where they begin, and a
validation is not compared; and losses that one of the words is missing from."""

import logging
import math

import torch

from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import UsageError

logger = logging.getLogger(__name__)


def not_finite():
    """Where a loss or gradient is not finite, fairseq ends in a traceback that names no cause.

    Its own search for it ends in a StopIteration: hooks on the gradients of modules look for a
    tensor in what a module returns, and an encoder returns lists of them. So these hooks are left
    out, and a model that knows `why_not_finite` is asked, on the same batches, with the same
    dropout. Can go when fairseq finds the cause.
    """
    from fairseq.nan_detector import NanDetector
    from fairseq.trainer import Trainer

    def make_init(original):
        def __init__(self, model, forward=True, backward=True):
            original(self, model, forward, backward=False)

        return __init__

    def make(original):
        def train_step(self, samples, *args, **kwargs):
            try:
                return original(self, samples, *args, **kwargs)
            except FloatingPointError as error:
                model, criterion = self.get_model(), self.get_criterion()
                if not hasattr(model, "why_not_finite"):
                    raise

                def forward():
                    self._set_seed()
                    for sample in samples:
                        criterion(model, self._prepare_sample(sample)[0])

                raise UsageError(
                    f"update {self.get_num_updates() + 1} is not finite ({_reason(error)}): "
                    f"{model.why_not_finite(forward)}; lower --lr, clip the gradient "
                    "(--clip-norm), or warm up for longer (--warmup-updates), and go on from a "
                    "checkpoint of before."
                ) from error

        return train_step

    wrap(NanDetector, "__init__", make_init)
    wrap(Trainer, "train_step", make)


def not_finite_validation():
    """A validation of NaN becomes the best so far, to which nothing later compares as better.

    So fairseq would miss the next best checkpoint, and then write a worse one over the best of
    before; with --keep-best-checkpoints it ends in a traceback. Here the checkpoint is saved, and
    is in no comparison. Can go when fairseq compares finite numbers only.
    """
    from fairseq import checkpoint_utils

    def make_compare(original):
        def save_checkpoint(cfg, trainer, epoch_itr, val_loss):
            if val_loss is not None and not math.isfinite(val_loss):
                logger.warning(
                    f"{cfg.best_checkpoint_metric} of the validation at update "
                    f"{trainer.get_num_updates()} is {float(val_loss)}: not compared with the best."
                )
                val_loss = None
            return original(cfg, trainer, epoch_itr, val_loss)

        return save_checkpoint

    wrap(checkpoint_utils, "save_checkpoint", make_compare)


def adaptive_tails():
    """An adaptive softmax's loss takes a word of each tail for padding, by its place in the tail:
    it is neither trained there nor counted, and validation tells another loss than fairseq-eval-lm.

    Padding is in the head alone. A class of probability 0 takes its place in the tails. Can go when
    fairseq looks for padding in the head.
    """
    from fairseq.criterions.adaptive_loss import AdaptiveLoss

    def make(original):
        def forward(self, model, sample, reduce=True):
            def moved(module, inputs, found):
                logits, targets = found
                both = zip(logits[1:], targets[1:], strict=True)
                tails = [_past(self.padding_idx, *tail) for tail in both]
                return [logits[0], *(t[0] for t in tails)], [targets[0], *(t[1] for t in tails)]

            handle = model.decoder.adaptive_softmax.register_forward_hook(moved)
            try:
                return original(self, model, sample, reduce)
            finally:
                handle.remove()

        return forward

    wrap(AdaptiveLoss, "forward", make)


def _past(index, logits, target):
    """Logits with a class of probability 0 at this place, and targets that know of it."""
    if target is None:
        return logits, target
    nothing = logits.new_full((len(logits), 1), -math.inf)
    logits = torch.cat([logits[:, :index], nothing, logits[:, index:]], 1)
    return logits, target + target.ge(index)


def _reason(error):
    """fairseq's own word of it, without its table of the workers' gradients."""
    return str(error).splitlines()[0].rstrip(".")
