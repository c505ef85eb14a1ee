"""The temperature of softmax."""

import math

import torch
from torch import Tensor, nn

from multimax_fairseq.modules.arguments import is_finite


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
        if not is_finite(temperature) or temperature <= 0:
            raise ValueError(
                f"the temperature must be a finite number above 0, got {temperature!r}"
            )
        if not isinstance(learned, bool):
            raise ValueError(f"a temperature is learned or not: give a bool, got {learned!r}")
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
