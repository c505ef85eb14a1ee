"""The scalars that mappings learn: their names, gradients and initial values."""

import functools
import logging
import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.entmax import alpha_of
from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.models.config import mapping_settings
from multimax_fairseq.modules import GatedAttention, Normalizer

logger = logging.getLogger(__name__)

# Matches the parameters of `learned_modules` in a state dict.
LEARNED = r"\.(normalizer|gate|output_modulator)\."


def learned_modules(model: Any, *, matrices: bool = True) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of each learned module that stock fairseq models do not have.

    Args:
        model: the model.
        matrices: include modules that learn matrices: gates, and normalizers that read hidden
            states.
    """
    modules = []
    for name, module in model.named_modules():
        if isinstance(module, Normalizer):
            if mapping_named(module.name).hidden and not matrices:
                continue
            modules += [(f"{name}.{part}", learned) for part, learned in module.named_children()]
        elif isinstance(module, GatedAttention) and matrices:
            modules.append((f"{name}.gate", module.gate))
        elif name.endswith("output_modulator"):
            modules.append((name, module))
    return modules


def symbols(parameter: str, value: Tensor) -> dict[str, Tensor]:
    """Return {symbol: (heads,) in float64} of a mapping's parameter; {} for any other.

    Symbols: t_b1 t_b2 b1 b2 t_d1 t_d2 d1 d2 (modulators, Eq. 6 of Zhou et al. 2024), alpha,
    temperature. For any other mapping the symbol is the parameter's name.

    Args:
        parameter: its name in a state dict. Prefixes before the normalizer or output modulator may
            be missing.
        value: its value in the state dict.
    """
    owner, _, name = parameter.rpartition(".")
    value = value.double()
    if match := re.fullmatch(r"(low|high)_(coefficient|threshold)", name):
        letter = "b" if match[1] == "low" else "d"
        if match[2] == "coefficient":  # stored as the offset from the identity
            value = 1 - value if match[1] == "low" else 1 + value
            letter = f"t_{letter}"
        orders = range(value.shape[-1])
        return {f"{letter}{order + 1}": value[..., order].reshape(-1) for order in orders}
    if owner.rpartition(".")[2] == "alpha" and name == "logit":
        return {"alpha": alpha_of(value).detach().flatten()}
    if name in ("log_temperature", "log_cap", "log_width"):
        return {name.removeprefix("log_"): value.exp().reshape(1)}
    added = re.search(
        r"(?:^|\.)(?:(?:normalizer\.)+|output_modulator\.)(?:modulator\.)?(.+)", parameter
    )
    return {added[1]: value.reshape(-1)} if added and value.dim() < 2 else {}


def prepare_scalars(model: Any, args: Any) -> None:
    """Mark the scalars for `--optimizer multimax_adam`, scale their gradients, freeze the rest.

    The settings decide whether to scale and to freeze. The gradients of the output layer's scalars
    are also divided by sqrt(V), because they are sums over V words per token. Adam is invariant to
    the scale, but without it gradient clipping would slow down the whole model.
    """
    scalars = learned_modules(model, matrices=False)
    if args.train_scalars_only:
        if not any(list(module.parameters()) for _, module in scalars):
            raise UsageError(
                "--train-scalars-only trains nothing: this model learns no scalars; leave it out, "
                "or pass --attention-normalizer multimax or --output-normalizer multimax"
            )
        model.requires_grad_(False)
        for _, module in scalars:
            module.requires_grad_(True)
    for name, module in scalars:
        scale = args.scalar_gradient_scale
        if scale is not None and name.endswith("output_modulator"):
            scale /= math.sqrt(len(model.decoder.dictionary))
        for parameter in module.parameters():
            parameter.learned_scalar = True
            if scale is not None:
                parameter.register_hook(functools.partial(torch.mul, other=scale))


class LoadsSoftmaxCheckpoints:
    """Mixin of a model that loads checkpoints of softmax models.

    The parameters that a softmax model lacks keep their initial values, but modulators start at the
    identity and sinks at a negligible weight. A resumed run must keep its mappings.
    """

    @staticmethod
    def check_resumed(settings, before):
        """Raise UsageError if a resumed run has other mappings than before."""
        now, then = mapping_settings(settings), mapping_settings(before)
        for name, value in now.items():
            if name in then and value != then[name]:
                raise UsageError(
                    f"--{name.replace('_', '-')} is {value}, but was {then[name]} in the run to "
                    "resume: pass that value, or another --save-dir"
                )

    def upgrade_state_dict_named(self, state_dict, name):
        super().upgrade_state_dict_named(state_dict, name)
        prefix = f"{name}." if name else ""
        initial = {
            f"{prefix}{path}.{parameter}": value.detach().clone()
            for path, module in learned_modules(self)
            for parameter, value in getattr(module, "softmax_state", module.state_dict)().items()
        }
        # A checkpoint of another mapping is refused when it is loaded.
        if initial and not any(re.search(LEARNED, key) for key in state_dict):
            logger.info(
                "the checkpoint has no parameters of a mapping: modulators start at the identity "
                "(softmax), sinks at a negligible weight, all else as in a new model"
            )
            state_dict.update(initial)
