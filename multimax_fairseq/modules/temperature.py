"""The temperature of softmax."""

import math

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.checks import is_finite
from multimax_fairseq.functional.mapping import Option, yes_or_no

OPTIONS = (
    Option(
        "temperature",
        1.0,
        float,
        must="a finite number above 0",
        is_right=lambda temperature: is_finite(temperature) and temperature > 0,
        help="temperature of softmax attention, or its start",
        remark="1 is softmax",
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
    """Divides scores by a temperature, fixed or learned: softmax of it is softmax at it.

    Args:
        temperature: above zero; where it is learned, its start.
        learned: its logarithm is the parameter `log_temperature`, a scalar; else there is none.

    Raises:
        ValueError: the temperature is no finite number above zero; `learned` is no bool.
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
