"""Softmax at a fixed or learned temperature."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.masking import masked
from multimax_fairseq.mappings.registry import Mapping, Option, register, yes_or_no
from multimax_fairseq.ops.checks import check_number, is_finite


def softmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Return softmax probabilities over the scores that are not excluded.

        p_i = exp(x_i / temperature) / sum_k exp(x_k / temperature)
    Equivalent to: torch.softmax(scores.masked_fill(mask, -inf) / temperature, dim)

    Args:
        scores: any shape and floating dtype.
        dim: the dimension that sums to one.
        mask: broadcastable to scores. Bool: True excludes. Float: added to the scores after the
            temperature, -inf excludes; it gets its gradient. Excluded scores have probability and
            gradient 0, and so has a fully masked row.
        temperature: above zero.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: scores or mask is not a tensor, dim not an integer, temperature not a number.
        ValueError: scores are not floating; a dim out of range; a mask of a wrong dtype or shape; a
            temperature that is not above zero.
    """
    check_number("temperature", temperature)
    if not (temperature > 0 and temperature < float("inf")):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    wide, excluded = masked(scores, dim, mask, temperature)
    probs = wide.softmax(dim)
    return probs if excluded is None else probs.masked_fill(excluded, 0.0)


OPTIONS = (
    Option(
        "temperature",
        1.0,
        float,
        requirement="a finite number above 0",
        is_valid=lambda temperature: is_finite(temperature) and temperature > 0,
        help="temperature of softmax attention, or its start",
        remark="1 is softmax",
        setting="softmax_temperature",
    ),
    Option(
        "learn_temperature",
        False,
        help="learn the temperature of softmax, one per layer",
        setting="learn_temperature",
        **yes_or_no(),
    ),
)


class Temperature(nn.Module):
    """Divide scores by a fixed or learned temperature.

    Args:
        temperature: above zero; the initial value if it is learned.
        learned: learn its logarithm.

    Parameter: `log_temperature`, a scalar, or None if it is fixed.

    Raises:
        ValueError: the temperature is not finite and above zero; `learned` is not a bool.
    """

    log_temperature: Tensor | None

    def __init__(self, temperature: float = 1.0, learned: bool = False) -> None:
        super().__init__()
        for option, value in zip(OPTIONS, (temperature, learned), strict=True):
            option.check(value)
        self.temperature = temperature
        start = torch.tensor(math.log(temperature))
        self.register_parameter("log_temperature", nn.Parameter(start) if learned else None)

    def forward(self, scores: Tensor) -> Tensor:
        """Return scores / temperature, in float32 or wider."""
        wide = torch.promote_types(scores.dtype, torch.float32)
        log_temperature = self.log_temperature
        if log_temperature is None:
            return scores.to(wide) / self.temperature
        return scores.to(wide) * (-log_temperature.to(wide)).exp()

    def extra_repr(self) -> str:
        return "learned" if self.log_temperature is not None else f"{self.temperature}"


def _build(num_heads: int | None, temperature: float, learn_temperature: bool) -> dict[str, Any]:
    divisor = Temperature(temperature, learn_temperature)
    is_softmax = divisor.temperature == 1 and divisor.log_temperature is None
    return {} if is_softmax else {"modulator": divisor}


def _kernel(modulator: Any = None) -> dict[str, Any]:
    return {"modulator": modulator}


register(
    Mapping(
        name="softmax",
        label="softmax",
        function=softmax,
        options=OPTIONS,
        build=_build,
        modulated=True,
        kernel=_kernel,
        output_options=(),
    )
)
