"""Reads the learned scalars of a checkpoint."""

import re
from pathlib import Path

from fairseq import checkpoint_utils
from torch import Tensor

from multimax_fairseq.compat.untrusted import unwrapped
from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.models.learned_scalars import symbols

ATTENTIONS = {"self_attn": "self-attention", "encoder_attn": "cross-attention"}


def read(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return {layer: {symbol: (heads,) in float64}}, in the model's order.

    The symbols are those of `models.learned_scalars.symbols`. A parameter that the heads share has
    one value.

    Raises:
        UsageError: there is no such checkpoint, or it has no learned scalars.
    """
    if not checkpoint.is_file():
        raise no_file("checkpoint", checkpoint)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["model"]
    parameters: dict[str, dict[str, Tensor]] = {}
    for name, value in unwrapped(state).items():
        if learned := symbols(name, value):
            parameters.setdefault(display_name(name.rpartition(".")[0]), {}).update(learned)
    if not parameters and any(name.endswith(".ts") for name in state):
        raise UsageError(
            f"checkpoint '{checkpoint}' is of the authors' code: convert it first with "
            "multimax-convert from-authors"
        )
    if not parameters:
        raise UsageError(
            f"checkpoint '{checkpoint}' has no learned scalars: pass one of a model with MultiMax "
            "or another mapping that learns"
        )
    return parameters


def display_name(module: str) -> str:
    """Return a display name for a module of learned scalars."""
    if "output_modulator" in module:
        return "output layer"
    if module.startswith("decoder.attention."):  # recurrent model
        return ATTENTIONS["encoder_attn"]
    match = re.match(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)\.", module)
    if match is None:
        return module
    return f"{match[1]} layer {int(match[2]) + 1}, {ATTENTIONS.get(match[3], match[3])}"


def table(parameters: dict[str, dict[str, Tensor]]) -> str:
    """Return an aligned text table, with one line per head if parameters are per head."""
    papers = ("t_b1", "t_b2", "b1", "b2", "t_d1", "t_d2", "d1", "d2", "alpha", "temperature")
    learned = dict.fromkeys(symbol for values in parameters.values() for symbol in values)
    symbols = [s for s in papers if s in learned] + [s for s in learned if s not in papers]
    lines = [["", *symbols]]
    for name, values in parameters.items():
        heads = max(len(value) for value in values.values())
        for head in range(heads):
            cells = [f"{values[s][head]:.4f}" if s in values else "" for s in symbols]
            lines.append([name if heads == 1 else f"{name}, head {head + 1}", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() + "\n"
        for line in lines
    )
