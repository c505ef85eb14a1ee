"""What Scalable-Softmax and Adaptive-Scalable Entmax learn of how scores grow with the keys."""

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.checks import check_whole, is_finite
from multimax_fairseq.functional.mapping import Option

START = Option(
    "start",
    0.3,
    float,
    must="a finite number",
    is_right=is_finite,
    help="scale of ssmax at the start; 1 / log(n) is softmax over n keys, and 0.3 that over 28",
)


class LengthScale(nn.Module):
    """Learned scale of each head; `scale()` is it, (num_heads, 1, 1).

    Args:
        num_heads: how many; 1 shares one among all heads.
        start: its value at the start.

    Parameter: `scale`, (num_heads,).

    Raises:
        ValueError: num_heads is no whole number of at least 1, start no finite number.
    """

    def __init__(self, num_heads: int = 1, start: float = START.default) -> None:
        super().__init__()
        check_whole("the scale's number of heads", num_heads)
        START.check(start)
        self.scale = nn.Parameter(torch.full((num_heads,), float(start)))

    def forward(self) -> Tensor:
        """Return the scales, (num_heads, 1, 1), in float32 or wider."""
        return self.scale.to(torch.promote_types(self.scale.dtype, torch.float32))[:, None, None]

    def extra_repr(self) -> str:
        return f"num_heads={len(self.scale)}"


class HiddenScale(nn.Module):
    """A number of each query and head, from the hidden state that the query is a projection of.

        beta = softplus(W h), gamma = 2 tanh(W h)                     (Vasylenko et al. 2026)

    Args:
        name: "beta", above 0, or "gamma", between -2 and 2.
        hidden_size: of h.
        num_heads: rows of W; 1 gives all heads the same.

    Parameter: `weight`, W, (num_heads, hidden_size), drawn from a normal distribution of standard
        deviation 0.02.

    Raises:
        ValueError: an unknown name; a size that is no whole number of at least 1.
    """

    def __init__(self, name: str, hidden_size: int, num_heads: int = 1) -> None:
        super().__init__()
        if name not in ("beta", "gamma"):
            raise ValueError(f"unknown name {name!r}: choose beta or gamma")
        check_whole("hidden_size", hidden_size)
        check_whole("num_heads", num_heads)
        self.name = name
        self.weight = nn.Parameter(torch.randn(num_heads, hidden_size) * 0.02)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (B, num_heads, T, 1), in float32 or wider, of hidden states (B, 1, T, C)."""
        projected = nn.functional.linear(hidden, self.weight).transpose(1, 3)
        projected = projected.to(torch.promote_types(projected.dtype, torch.float32))
        return nn.functional.softplus(projected) if self.name == "beta" else 2 * projected.tanh()

    def extra_repr(self) -> str:
        num_heads, hidden_size = self.weight.shape
        return f"{self.name!r}, hidden_size={hidden_size}, num_heads={num_heads}"
