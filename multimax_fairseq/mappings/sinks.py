"""Sinks: an entry without a key takes a share of softmax, so that a row sums to less than 1."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.masking import (
    apply_masked,
    at_least_float32,
    check_arguments,
    check_row_values,
)
from multimax_fairseq.mappings.registry import (
    SEPARATE_HEADS,
    Mapping,
    Option,
    chosen_from,
    register,
)
from multimax_fairseq.ops.checks import check_number, check_whole

SINKS = ("none", "zero", "learned")

SINK = Option(
    "sink",
    "none",
    help="add an entry without a key, which takes a share of attention; its score is 0 (zero) or "
    "learned",
    setting="multimax_sink",
    **chosen_from(SINKS),
)

# Beside a score of 0 this sink has the weight exp(-20) = 2e-9; its gradient is still large enough
# for Adam.
NEGLIGIBLE_SINK = -20.0


def softmax_with_sink(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, sink: float | Tensor
) -> Tensor:
    """Return softmax probabilities next to a sink, an entry without a key that takes a share.

        p_i = exp(x_i) / (exp(sink) + sum_k exp(x_k))                  (gpt-oss, OpenAI 2025)
    Equivalent to: torch.cat([scores.masked_fill(mask, -inf), sink], -1).softmax(-1)[..., :-1]

    Args:
        scores, dim, mask: as `softmax`, but a row sums to less than one.
        sink: the score of the sink; -inf is softmax. A tensor must be broadcastable to
            scores, with size 1 in `dim`; it can require grad.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: the sink is neither a number nor a tensor.
        ValueError: a sink that is NaN or +inf, or a tensor of another dtype, shape or device; as
            `softmax`.
    """
    check_arguments(scores, dim, mask)
    if isinstance(sink, Tensor):
        check_row_values("sink", sink, scores, dim)
    elif not (isinstance(sink, Real) and sink == -torch.inf):
        check_number("sink", sink)

    def mapping(wide: Tensor) -> Tensor:
        shape = list(wide.shape)
        shape[dim] = 1
        if isinstance(sink, Tensor):
            last = sink.to(wide.dtype).expand(shape)
        else:
            last = torch.full(shape, float(sink), dtype=wide.dtype, device=wide.device)
        joined = torch.cat([wide, last], dim)
        return joined.softmax(dim).narrow(dim, 0, wide.shape[dim])

    return apply_masked(mapping, scores, dim, mask)


def softmax1(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return softmax probabilities next to a sink of score 0.

        p_i = exp(x_i) / (1 + sum_k exp(x_k))                                (Miller 2023)
    Equivalent to: softmax_with_sink(scores, dim, mask, sink=0.0)

    Args, Returns, Raises: as `softmax`, but a row sums to less than one.
    """
    return softmax_with_sink(scores, dim, mask, sink=0.0)


class Sink(nn.Module):
    """Learned score of each head's sink; `sink()` returns it, (num_heads, 1, 1).

    Args:
        num_heads: how many; 1 shares one among all heads.

    Parameter: `score`, (num_heads,), drawn from a normal distribution of standard deviation 0.02.

    Raises:
        ValueError: num_heads is not a whole number of at least 1.
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        check_whole("the sink's number of heads", num_heads)
        self.score = nn.Parameter(torch.randn(num_heads) * 0.02)

    def forward(self) -> Tensor:
        """Return the scores, (num_heads, 1, 1), in float32 or wider."""
        return at_least_float32(self.score)[:, None, None]

    def softmax_state(self) -> dict[str, Tensor]:
        """Return the state dict at which the sink takes almost no share."""
        return {"score": torch.full_like(self.score, NEGLIGIBLE_SINK)}

    def extra_repr(self) -> str:
        return f"num_heads={len(self.score)}"


register(
    Mapping(
        name="softmax1",
        label="softmax-1",
        function=softmax1,
        sums_to_one=False,
        kernel=lambda: {"sink": 0.0},
    )
)
register(
    Mapping(
        name="sink",
        label="softmax with learned sinks",
        function=softmax_with_sink,
        heads=SEPARATE_HEADS,
        build=lambda num_heads: {"sink": Sink(num_heads or 1)},
        sums_to_one=False,
        kernel=lambda sink: {"sink": sink},
    )
)
