"""What is special about the few scalars that normalizers learn."""

import functools
import logging
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.entmax import EntmaxAlpha
from multimax_fairseq.mappings.table import mapping_named
from multimax_fairseq.models.config import mapping_settings
from multimax_fairseq.modules import GatedAttention, Normalizer

logger = logging.getLogger(__name__)


# What `learned_modules` finds, in the names of a state dict.
LEARNED = r"\.(normalizer|gate|output_modulator)\."


def learned_scalars(model: Any) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each module of learned scalars, in the model's order: what lies in
    its normalizers, and the modulator of its output layer."""
    return learned_modules(model, matrices=False)


def learned_modules(model: Any, *, matrices: bool = True) -> list[tuple[str, nn.Module]]:
    """Return those of `learned_scalars` and, with matrices, what else stock models do not have: of
    normalizers that read hidden states, and of gates."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, Normalizer):
            if mapping_named(module.name).hidden and not matrices:
                continue
            found += [(f"{name}.{part}", learned) for part, learned in module.named_children()]
        elif isinstance(module, GatedAttention) and matrices:
            found.append((f"{name}.gate", module.gate))
        elif name.endswith("output_modulator"):
            found.append((name, module))
    return found


def symbols(parameter: str, value: Tensor) -> dict[str, Tensor]:
    """Return {symbol: (heads,) in float64} of a normalizer's parameter; {} for any other.

    Symbols: t_b1 t_b2 b1 b2 t_d1 t_d2 d1 d2 (modulators, Eq. 6 of Zhou et al. 2024), alpha,
    temperature; of any other mapping, the parameter's name.

    Args:
        parameter: its name in a state dict, from its normalizer or output modulator on at least.
        value: its value there.
    """
    owner, _, name = parameter.rpartition(".")
    value = value.double()
    if match := re.fullmatch(r"(low|high)_(coefficient|threshold)", name):
        letter = "b" if match[1] == "low" else "d"
        if match[2] == "coefficient":  # kept as the offset from the identity
            value = 1 - value if match[1] == "low" else 1 + value
            letter = f"t_{letter}"
        orders = range(value.shape[-1])
        return {f"{letter}{order + 1}": value[..., order].reshape(-1) for order in orders}
    if owner.rpartition(".")[2] == "alpha" and name == "logit":
        with torch.random.fork_rng(devices=[]):  # what it starts from is nobody's random number
            alpha = EntmaxAlpha(len(value)).double()
        alpha.load_state_dict({name: value})
        return {"alpha": alpha().detach().flatten()}
    if name == "log_temperature":
        return {"temperature": value.exp().reshape(1)}
    added = re.search(r"(?:^|\.)(?:normalizer\.)+(.+)", parameter)
    return {added[1]: value.reshape(-1)} if added and value.dim() < 2 else {}


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
    the identity, sinks where they take nothing, all else as in a new model. A run goes on with the
    mappings that it began with."""

    @staticmethod
    def check_resumed(settings, before):
        """Raise UsageError where the settings of a run are of other mappings than before."""
        now, then = mapping_settings(settings), mapping_settings(before)
        for name, value in now.items():
            if name in then and value != then[name]:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}, but was {then[name]} in the run that "
                    "is to go on: give that, or another --save-dir"
                )

    def upgrade_state_dict_named(self, state_dict, name):
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        start = {
            f"{prefix}{place}.{parameter}": value.detach().clone()
            for place, module in learned_modules(self)
            for parameter, value in getattr(module, "softmax_state", module.state_dict)().items()
        }
        # Those of another normalizer are for loading to refuse.
        if start and not any(re.search(LEARNED, key) for key in state_dict):
            logger.info(
                "the checkpoint has nothing that normalizers learn: modulators start at identity "
                "(softmax), sinks at next to nothing, all else as in a new model"
            )
            state_dict.update(start)
