"""Attention to intervals of a sentence, by a density over time."""

import functools
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from multimax_fairseq.continuous.expectation import continuous_softmax, continuous_sparsemax
from multimax_fairseq.continuous.value_function import positions, ridge_regression
from multimax_fairseq.mappings.masking import at_least_float32
from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.ops.attention import AttentionInputs, weighted_values
from multimax_fairseq.ops.backend import is_autocast, traced
from multimax_fairseq.ops.checks import check_number, check_whole, is_finite, is_whole
from multimax_fairseq.ops.dropout import dropout
from multimax_fairseq.ops.masks import excluded_keys

DENSITIES = {"softmax": continuous_softmax, "sparsemax": continuous_sparsemax}
CONTEXTS = ("combined", "continuous")

ALL_KEYS = "continuous attention needs all keys of a sentence from the start"

# Narrower than any basis function can resolve. At 0 the gradient is unbounded.
MIN_VARIANCE = 1e-6


class ContinuousAttention(AttentionModule):
    """Attention whose context is the expectation of a function of time.

        context = [dropout(p) V +] E_{t ~ density(mean, variance)}[V(t)], p = normalizer(scores)
    (Martins et al. 2020, Section 3.) V(t) is the ridge regression of the values on Gaussian basis
    functions, with token l of L at time l / L. Mean and variance are those of the positions under
    dropout(p), divided by its sum, or a linear layer predicts them from the query. For a Gaussian,
    `variance` is its variance. For a truncated parabola it is a scale, as in the paper: the
    variance of that density is (3/2 variance)^(2/3) / 5 (see `match_variance`).

    Args:
        normalizer: the discrete attention. Its probabilities need not sum to 1.
        density: "softmax", a Gaussian, or "sparsemax", a truncated parabola.
        context: "combined", the sum of the discrete and the continuous context, as in the paper's
            translation models, or "continuous" alone.
        query_size: size of a query, from which a linear layer, shared by the heads, predicts the
            density: mean = sigmoid and variance = softplus of its outputs. With None,
            mean = E[l / L] and variance = E[(l / L)^2] - mean^2 under dropout(p) / sum.
        num_bases: number of basis functions, a multiple of the number of widths.
        widths: their standard deviations. Each width has the same number of centres, evenly spaced
            on [0, 1].
        ridge: penalty of the regression, above 0.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        normalizer: Normalizer,
        density: str = "sparsemax",
        context: str = "combined",
        query_size: int | None = None,
        num_bases: int = 30,
        widths: tuple[float, ...] = (0.03, 0.1, 0.3),
        ridge: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value, known in (
            ("density", density, tuple(DENSITIES)),
            ("context", context, CONTEXTS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}: choose one of {', '.join(known)}")
        listed = isinstance(widths, (tuple, list)) and len(widths) > 0
        if not listed or not all(is_finite(width) and width > 0 for width in widths):
            raise ValueError(f"widths must be finite and above 0, and one at least, got {widths!r}")
        if not is_whole(num_bases) or num_bases % len(widths):
            raise ValueError(
                f"num_bases must be a multiple of the number of widths, {len(widths)}, got "
                f"{num_bases!r}"
            )
        if query_size is not None:
            check_whole("query_size", query_size)
        check_number("ridge", ridge)
        if not ridge > 0:
            raise ValueError(f"ridge must be above 0, got {ridge}")
        self.normalizer, self.density, self.context = normalizer, density, context
        self.num_bases, self.widths, self.ridge = num_bases, tuple(widths), ridge
        self.expectation = Expectation(density, num_bases, tuple(widths))
        self.predicted = None if query_size is None else nn.Linear(query_size, 2)

    def attention(
        self, inputs: AttentionInputs, need_probs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context of each query, and the discrete probabilities.

        Args, Returns: as `AttentionModule.attention`, but every query sees the same keys: the mask
            is (B, 1, 1, S), bool or a float that excludes, and is_causal is False. The values may
            be those of `static_values`.

        Raises:
            ValueError: the mask differs between queries or heads; is_causal is True; the values
                have another length.
        """
        if inputs.is_causal:
            raise ValueError(f"{ALL_KEYS}: leave is_causal out")
        value, coefficients, tokens = self._split_values(
            inputs.value, inputs.key.shape[2], inputs.mask
        )
        discrete: Tensor | None = None
        probs: Tensor | None = None
        if self.predicted is not None:
            mean, variance = at_least_float32(self.predicted(inputs.query)).unbind(-1)
            mean, variance = mean.sigmoid(), nn.functional.softplus(variance)
            if self.context == "combined" or need_probs:
                discrete, probs = self.normalizer.attention(
                    inputs._replace(value=value), need_probs
                )
        else:
            extended = _with_times(value, positions(tokens)[:, None])
            device = value.device.type
            with torch.autocast(device, enabled=False) if is_autocast(device) else nullcontext():
                contexts, probs = self.normalizer.attention(
                    inputs._replace(value=extended), need_probs
                )
            discrete = contexts[..., :-3].to(value.dtype)
            mean, variance = _mean_and_variance(*contexts[..., -3:].unbind(-1))
        return self._context(mean, variance, coefficients, discrete), probs

    def attend_by_scores(
        self,
        scores: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the result of `attention` for given scores.

        Args, Returns: as `AttentionModule.attend_by_scores`.

        Raises:
            ValueError: as `attention`, or the density is predicted from the query.
        """
        if self.predicted is not None:
            raise ValueError("query_size predicts a density from the query: use attend")
        value, coefficients, tokens = self._split_values(value, scores.shape[-1], mask)
        probs = self.normalizer(scores, -1, mask, hidden)
        dropped = dropout(probs, dropout_p)
        # Not `_with_times`: a recurrent model calls this at each step and would copy the values.
        time = positions(tokens)[:, None, None].to(dropped.dtype)
        first = dropped * time
        mean, variance = _mean_and_variance(dropped.sum(-1), first.sum(-1), (first * time).sum(-1))
        discrete = weighted_values(dropped, value, 0.0) if self.context == "combined" else None
        return self._context(mean, variance, coefficients, discrete), probs if need_probs else None

    def _split_values(
        self, value: Tensor, length: int, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the values, their coefficients, and which keys the mask allows, (B, S)."""
        tokens = _tokens(value, length, mask)
        if value.shape[2] == length:
            return value, self._coefficients(value, tokens), tokens
        if value.shape[2] != length + self.num_bases:
            raise ValueError(
                f"value must have {length} rows as the keys, or {length + self.num_bases} of "
                f"static_values, got {list(value.shape)}"
            )
        # `split`, because the gradient of each slice would be as large as the whole.
        value, coefficients = value.split([length, self.num_bases], 2)
        return value, coefficients, tokens

    def _context(
        self, mean: Tensor, variance: Tensor, coefficients: Tensor, discrete: Tensor | None
    ) -> Tensor:
        """Return the expectation under the density, plus the discrete context if combined."""
        weights = self.expectation(mean, variance.clamp(min=MIN_VARIANCE))
        context = weights.to(coefficients.dtype) @ coefficients
        if self.context == "combined":
            assert discrete is not None
            context = discrete + context.to(discrete.dtype)
        return context

    def static_values(self, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the values followed by the coefficients of their value function.

        Decoding caches them, so that the regression of a sentence is solved once.

        Args:
            value, mask: as `AttentionInputs`.

        Returns:
            (B, H, S + num_bases, size of a value), in value's dtype.
        """
        return torch.cat(
            [value, self._coefficients(value, _tokens(value, value.shape[2], mask))], 2
        )

    def _coefficients(self, value: Tensor, tokens: Tensor) -> Tensor:
        """Return the coefficients of the basis functions, (B, H, num_bases, size of a value)."""
        centers, widths = self.expectation.bases(value.device)
        regression = ridge_regression(tokens, centers, widths, self.ridge).mT[:, None]
        return regression.to(value.dtype) @ value

    def keep_heads(self, heads: list[int]) -> None:
        """Keep only these heads' parameters, if each head has its own."""
        self.normalizer.keep_heads(heads)

    def extra_repr(self) -> str:
        return f"{self.density!r}, {self.context!r}, num_bases={self.num_bases}"


class Expectation(nn.Module):
    """Expectation of the basis functions; a module, so that a forward hook sees the moments."""

    def __init__(self, density: str, num_bases: int, widths: tuple[float, ...]) -> None:
        super().__init__()
        self.density, self.num_bases, self.widths = density, num_bases, widths

    def forward(self, mean: Tensor, variance: Tensor) -> Tensor:
        """Return (..., num_bases)."""
        return DENSITIES[self.density](mean, variance, *self.bases(mean.device))

    def bases(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the centres and the widths of the basis functions, (num_bases,), float64."""
        bases = _bases.__wrapped__ if traced() else _bases  # no cache in a graph
        return bases(self.num_bases, self.widths, device)


def _tokens(value: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """Return which keys the mask allows, (B, S)."""
    batch = value.shape[0]
    if mask is None:
        return value.new_ones([batch, length], dtype=torch.bool)
    if max([1, *mask.shape[-3:-1]]) > 1:
        raise ValueError(
            f"{ALL_KEYS}: no mask may differ between queries or heads, got {list(mask.shape)}"
        )
    allowed = ~excluded_keys(mask)
    length_of_mask = allowed.shape[-1] if allowed.dim() > 0 else 1
    return allowed.reshape(-1, length_of_mask).expand(batch, length)


def _with_times(value: Tensor, time: Tensor) -> Tensor:
    """Append the columns 1, t and t^2 to the values.

    Their contexts are the sums of p, p t and p t^2 under the same dropout. The result is float32 or
    wider, because half precision has too few digits for times.
    """
    columns = torch.stack([torch.ones_like(time), time, time**2], -1)
    columns = columns.expand(-1, value.shape[1], -1, -1)
    dtype = torch.promote_types(value.dtype, torch.float32)
    return torch.cat([value.to(dtype), columns.to(dtype)], -1)


def _mean_and_variance(mass: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of t from the sums of p, p t and p t^2; 0 if all p are 0."""
    mass = torch.where(mass > 0, mass, 1.0)
    mean = first / mass
    return mean, second / mass - mean**2


@functools.lru_cache(maxsize=16)
def _bases(count: int, widths: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    per_width = count // len(widths)
    with torch.inference_mode(False):  # training may use the cached tensors later
        centers = torch.linspace(0, 1, per_width, dtype=torch.float64, device=device)
        deviations = torch.tensor(widths, dtype=torch.float64, device=device)
        return centers.repeat(len(widths)), deviations.repeat_interleave(per_width)
