"""Mappings that multiply the scores by a function of the number of keys: SSMax and ASEntmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.entmax import entmax15
from multimax_fairseq.mappings.masking import (
    at_least_float32,
    check_arguments,
    check_value,
    shift_and_scale,
)
from multimax_fairseq.mappings.registry import SEPARATE_HEADS, Mapping, Option, register
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.ops.attention import growth_factor, length_factor
from multimax_fairseq.ops.checks import check_whole, is_finite
from multimax_fairseq.ops.masks import key_counts
from multimax_fairseq.ops.row_function import RowFunction

START = Option(
    "start",
    0.3,
    float,
    requirement="a finite number",
    is_valid=is_finite,
    help="initial scale of ssmax; 1 / log(n) equals softmax for n keys, so 0.3 for 28 keys",
    setting="ssmax_start",
)


def ssmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, length_scale: float | Tensor
) -> Tensor:
    """Return Scalable-Softmax probabilities, which do not flatten as the number of keys grows.

        p_i = n^(s x_i) / sum_k n^(s x_k), n keys                             (Nakanishi 2025)
    Equivalent to: torch.softmax((s * math.log(n) * scores).masked_fill(mask, -inf), dim)

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`.
        length_scale: s. A tensor must be broadcastable to scores, with size 1 in `dim`; it can
            require grad.

    Returns:
        The shape of scores, in float32 or wider; a single key gets 1.

    Raises:
        TypeError: length_scale is neither a number nor a tensor.
        ValueError: length_scale is NaN or infinite, or a tensor of another dtype, shape or device;
            as `softmax`.
    """
    check_arguments(scores, dim, mask)
    check_value("length_scale", length_scale, scores, dim)
    factor = length_factor(key_counts(scores, dim, mask), length_scale)
    return softmax(shift_and_scale(scores, factor, dim, mask), dim, mask)


def asentmax(
    scores: Tensor,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    beta: float | Tensor,
    gamma: float | Tensor,
) -> Tensor:
    """Return Adaptive-Scalable Entmax probabilities.

        p = 1.5-entmax((1 + beta log(n + 1)^gamma) x), n keys            (Vasylenko et al. 2026)
    Equivalent to: entmax.entmax15((1 + beta * math.log(n + 1) ** gamma) * scores, dim)

    The paper uses log(n). For a single key it is 0, and 0 to a negative gamma is infinite.

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`. The
            factor does not multiply a float mask.
        beta, gamma: tensors must be broadcastable to scores, with size 1 in `dim`; they can
            require grad.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: beta or gamma is neither a number nor a tensor.
        ValueError: one of them is NaN or infinite, or a tensor of another dtype, shape or device;
            as `softmax`.
    """
    check_arguments(scores, dim, mask)
    check_value("beta", beta, scores, dim)
    check_value("gamma", gamma, scores, dim)
    factor = growth_factor(key_counts(scores, dim, mask), beta, gamma)
    return entmax15(shift_and_scale(scores, factor, dim, mask), dim, mask)


class LengthScale(nn.Module):
    """Learned length scale of each head; `scale()` returns it, (num_heads, 1, 1).

    Args:
        num_heads: number of scales; 1 shares one among all heads.
        start: the initial value.

    Parameter: `scale`, (num_heads,).

    Raises:
        ValueError: num_heads is not a whole number of at least 1; start is not finite.
    """

    def __init__(self, num_heads: int = 1, start: float = START.default) -> None:
        super().__init__()
        check_whole("the scale's number of heads", num_heads)
        START.check(start)
        self.scale = nn.Parameter(torch.full((num_heads,), float(start)))

    def forward(self) -> Tensor:
        """Return the scales, (num_heads, 1, 1), in float32 or wider."""
        return at_least_float32(self.scale)[:, None, None]

    def extra_repr(self) -> str:
        return f"num_heads={len(self.scale)}"


class HiddenScale(nn.Module):
    """One number for each query and head, from the query's hidden state.

        beta = softplus(W h), gamma = 2 tanh(W h)                     (Vasylenko et al. 2026)

    Args:
        name: "beta", above 0, or "gamma", between -2 and 2.
        hidden_size: size of h.
        num_heads: rows of W; 1 shares the number among all heads.

    Parameter: `weight`, W, (num_heads, hidden_size), drawn from a normal distribution of standard
        deviation 0.02.

    Raises:
        ValueError: an unknown name; a size that is not a whole number of at least 1.
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
        """Return (B, num_heads, T, 1), in float32 or wider, for hidden states (B, 1, T, C)."""
        projected = nn.functional.linear(hidden, self.weight).transpose(1, 3)
        projected = at_least_float32(projected)
        return nn.functional.softplus(projected) if self.name == "beta" else 2 * projected.tanh()

    def extra_repr(self) -> str:
        num_heads, hidden_size = self.weight.shape
        return f"{self.name!r}, hidden_size={hidden_size}, num_heads={num_heads}"


def _build_hidden(num_heads: int | None, hidden_size: int) -> dict[str, Any]:
    return {name: HiddenScale(name, hidden_size, num_heads or 1) for name in ("beta", "gamma")}


def _kernel(beta: float | Tensor, gamma: float | Tensor) -> dict[str, Any]:
    return {"growth": (beta, gamma), "row": RowFunction("entmax15", needs_exclusion_mask=True)}


register(
    Mapping(
        name="ssmax",
        label="Scalable-Softmax",
        function=ssmax,
        options=(START,),
        heads=SEPARATE_HEADS,
        build=lambda num_heads, start: {"length_scale": LengthScale(num_heads or 1, start)},
        kernel=lambda length_scale: {"length_scale": length_scale},
    )
)
register(
    Mapping(
        name="asentmax",
        label="ASEntmax",
        function=asentmax,
        heads=SEPARATE_HEADS,
        build=_build_hidden,
        hidden=True,
        kernel=_kernel,
    )
)
