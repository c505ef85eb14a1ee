"""Sinks: an entry without a key that takes its share of a softmax."""

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.checks import check_whole
from multimax_fairseq.functional.mapping import Option, chosen_from

SINKS = ("none", "zero", "learned")

OPTION = Option(
    "sink",
    "none",
    help="let an entry without a key take a share of attention: of score 0, or of a learned one",
    **chosen_from(SINKS),
)

# Beside any score of a live model its share is below what float32 adds, and its gradient is still a
# number that Adam can make a step of.
START_OF_SOFTMAX = -20.0


class Sink(nn.Module):
    """Learned score of the sink of each head; `sink()` is it, (num_heads, 1, 1).

    Args:
        num_heads: how many; 1 shares one among all heads.

    Parameter: `score`, (num_heads,), drawn from a normal distribution of standard deviation 0.02.

    Raises:
        ValueError: num_heads is no whole number of at least 1.
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        check_whole("the sink's number of heads", num_heads)
        self.score = nn.Parameter(torch.randn(num_heads) * 0.02)

    def forward(self) -> Tensor:
        """Return the scores, (num_heads, 1, 1), in float32 or wider."""
        return self.score.to(torch.promote_types(self.score.dtype, torch.float32))[:, None, None]

    def softmax_state(self) -> dict[str, Tensor]:
        """Return the state dict at which the sink takes next to nothing."""
        return {"score": torch.full_like(self.score, START_OF_SOFTMAX)}

    def extra_repr(self) -> str:
        return f"num_heads={len(self.score)}"
