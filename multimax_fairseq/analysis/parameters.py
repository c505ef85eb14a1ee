"""The learned scalars of a checkpoint, in the papers' symbols."""

import re
from pathlib import Path

from fairseq import checkpoint_utils
from torch import Tensor

from multimax_fairseq.errors import UsageError
from multimax_fairseq.modules import EntmaxAlpha

ATTENTIONS = {"self_attn": "self-attention", "encoder_attn": "cross-attention"}


def read(checkpoint: Path) -> dict[str, dict[str, Tensor]]:
    """Return {place: {symbol: (heads,) in float64}}, in the model's order.

    Symbols: t_b1 t_b2 b1 b2 t_d1 t_d2 d1 d2 (modulators, Eq. 6 of Zhou et al. 2024), alpha,
    temperature; of a mapping that was added, the parameter's name. Where heads share a parameter
    there is one.

    Raises:
        UsageError: no such checkpoint, or nothing learned in it.
    """
    if not checkpoint.is_file():
        raise UsageError(f"checkpoint '{checkpoint}' does not exist: check its path")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["model"]
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in state.items():
        if learned := symbols(name, value):
            found.setdefault(place(name.rpartition(".")[0]), {}).update(learned)
    if not found:
        raise UsageError(
            f"checkpoint '{checkpoint}' has no learned modulator, alpha or temperature: it is of "
            "a model without any"
        )
    return found


def symbols(parameter: str, value: Tensor) -> dict[str, Tensor]:
    """Return {symbol: (heads,) in float64} of a normalizer's parameter; {} for any other.

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
        alpha = EntmaxAlpha(len(value)).double()
        alpha.load_state_dict({name: value})
        return {"alpha": alpha().detach().flatten()}
    if name == "log_temperature":
        return {"temperature": value.exp().reshape(1)}
    added = re.search(r"(?:^|\.)(?:normalizer\.)+(.+)", parameter)
    return {added[1]: value.reshape(-1)} if added and value.dim() < 2 else {}


def place(module: str) -> str:
    """Name a module of learned scalars as people would."""
    if "output_modulator" in module:
        return "output layer"
    if module.startswith("decoder.attention."):  # of the recurrent model
        return ATTENTIONS["encoder_attn"]
    match = re.match(r"(encoder|decoder)\.layers\.(\d+)\.(\w+)\.", module)
    if match is None:
        return module
    return f"{match[1]} layer {int(match[2]) + 1}, {ATTENTIONS.get(match[3], match[3])}"


def table(found: dict[str, dict[str, Tensor]]) -> str:
    """Return an aligned text table, a line for each head that has parameters of its own."""
    papers = ("t_b1", "t_b2", "b1", "b2", "t_d1", "t_d2", "d1", "d2", "alpha", "temperature")
    there = dict.fromkeys(symbol for values in found.values() for symbol in values)
    symbols = [s for s in papers if s in there] + [s for s in there if s not in papers]
    lines = [["", *symbols]]
    for name, values in found.items():
        heads = max(len(value) for value in values.values())
        for head in range(heads):
            cells = [f"{values[s][head]:.4f}" if s in values else "" for s in symbols]
            lines.append([name if heads == 1 else f"{name}, head {head + 1}", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() + "\n"
        for line in lines
    )
