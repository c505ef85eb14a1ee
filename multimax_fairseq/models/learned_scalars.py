"""What is special about the few scalars that normalizers learn."""

import functools
import logging
import math
from typing import Any

import torch
from torch import nn

from multimax_fairseq.modules import Normalizer

logger = logging.getLogger(__name__)


def learned_scalars(model: Any) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each module of learned scalars, in the model's order: what lies in
    its normalizers, and the modulator of its output layer."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Normalizer):
            found += [(f"{name}.{part}", learned) for part, learned in module.named_children()]
        elif name.endswith("output_modulator"):
            found.append((name, module))
    return found


def prepare_scalars(model: Any, args: Any) -> None:
    """Mark the scalars for `--optimizer multimax_adam`, and scale their gradients as asked.

    Those of the output layer, whose gradient sums over V words for each token, get another
    1 / sqrt(V): Adam does not care, but gradient clipping would slow all of the model for them.
    """
    for name, module in learned_scalars(model):
        scale = args.scalar_gradient_scale
        if scale is not None and name.endswith("output_modulator"):
            scale /= math.sqrt(len(model.decoder.dictionary))
        for parameter in module.parameters():
            parameter.learned_scalar = True
            if scale is not None:
                parameter.register_hook(functools.partial(torch.mul, other=scale))


class LoadsSoftmaxCheckpoints:
    """Mixin of a model: a checkpoint without any normalizer's parameters loads; modulators start at
    the identity, alphas and temperatures as in a new model."""

    def upgrade_state_dict_named(self, state_dict, name):
        super().upgrade_state_dict_named(state_dict, name)
        start = {
            f"{name}.{parameter}": value.detach().clone()
            for name, module in learned_scalars(self)
            for parameter, value in getattr(module, "softmax_state", module.state_dict)().items()
        }
        if start and not any(key in state_dict for key in start):
            logger.info("the checkpoint has no modulator: all of them start at identity (softmax)")
            state_dict.update(start)
