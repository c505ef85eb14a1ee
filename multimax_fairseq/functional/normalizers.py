"""The mappings from scores to probabilities, and the sinks that take a part of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

import entmax
import torch
from torch import Tensor

from multimax_fairseq.functional.checks import (
    check_flag,
    check_integer,
    check_number,
    check_tensor,
)
from multimax_fairseq.kernels.operators import check_device, traced

# What EvSoftmax leaves of a score below the mean in training, so that its gradient does not vanish.
EV_TRAINING_FACTOR = 1e-6

# Other libraries exclude a key by adding a large negative number: -1e4, or one further down.
# `replace_softmax` counts up to 1024 of it as the score, so the bound lies above the rest.
EXCLUDES = -5e3

# Scores to modulated scores; in practice a `Modulator`.
ScoreFunction = Callable[[Tensor], Tensor]


def softmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """Return softmax probabilities over the scores that are not excluded.

        p_i = exp(x_i / temperature) / sum_k exp(x_k / temperature)
    Equivalent to: torch.softmax(scores.masked_fill(mask, -inf) / temperature, dim)

    Args:
        scores: any shape and floating dtype.
        dim: the dimension that sums to one.
        mask: broadcastable to scores. Bool: True excludes. Float: added to the scores, after the
            temperature, -inf excludes; it gets its gradient. What is excluded has probability and
            gradient 0, and so has all of a row of which nothing is left.
        temperature: above zero.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: scores or a mask that are no tensor, a dim that is no integer, a temperature that
            is no number.
        ValueError: scores that are not floating, a dim that they do not have, a mask of another
            dtype or shape, a temperature that is not above zero.
    """
    check_number("temperature", temperature)
    if not (temperature > 0 and temperature < float("inf")):
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    wide, excluded = masked(scores, dim, mask, temperature)
    probs = wide.softmax(dim)
    return probs if excluded is None else probs.masked_fill(excluded, 0.0)


def multimax(
    x: Tensor,
    modulator: ScoreFunction,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    sink: float | Tensor | None = None,
) -> Tensor:
    """Return MultiMax probabilities: softmax of the modulated scores.

        p_i = exp(sigma(x_i)) / sum_k exp(sigma(x_k))          (Eq. 4 and 6, Zhou et al. 2024)
    Equivalent to: torch.softmax(modulator(x).masked_fill(mask, -inf), dim)

    Args:
        x: scores, any shape and floating dtype.
        modulator: a `Modulator`, or any function from scores to scores of the same shape.
        dim: the dimension that sums to one.
        mask: as `softmax`; a float mask is added to the modulated scores.
        sink: as `softmax_with_sink`, beside the modulated scores; None for none.

    Returns:
        The shape of x, in float32 or wider.

    Raises:
        TypeError: the modulator cannot be called; as `softmax_with_sink`.
        ValueError: as `softmax`; as `softmax_with_sink`.
    """
    # The mask comes after the modulator: a modulated -inf need not be -inf.
    modulated = _modulated(x, modulator)
    if sink is None:
        return softmax(modulated, dim, mask)
    return softmax_with_sink(modulated, dim, mask, sink=sink)


def _modulated(x: Tensor, modulator: ScoreFunction) -> Tensor:
    if not callable(modulator):
        raise TypeError(
            f"modulator must be a Modulator or a function of the scores, got {modulator!r}"
        )
    _check_scores(x)
    modulated = modulator(x)
    if not isinstance(modulated, Tensor) or modulated.shape != x.shape:
        given = list(modulated.shape) if isinstance(modulated, Tensor) else modulated
        raise ValueError(f"modulator must keep the shape {list(x.shape)} of scores, gave {given}")
    return modulated


def log_multimax(
    x: Tensor, modulator: ScoreFunction, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Return the logarithm of `multimax`, with -inf where the mask excludes.

    Equivalent to: torch.log_softmax(modulator(x).masked_fill(mask, -inf), dim)

    Args, Raises: as `multimax`, without a sink.

    Returns:
        The shape of x, in float32 or wider; a row that is wholly excluded is -inf.
    """
    wide, excluded = masked(_modulated(x, modulator), dim, mask)
    log_probs = wide.log_softmax(dim)
    return log_probs if excluded is None else log_probs.masked_fill(excluded, -torch.inf)


def softmax_with_sink(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, sink: float | Tensor
) -> Tensor:
    """Return softmax probabilities beside a sink, an entry without a key that takes its share.

        p_i = exp(x_i) / (exp(sink) + sum_k exp(x_k))                  (gpt-oss, OpenAI 2025)
    Equivalent to: torch.cat([scores.masked_fill(mask, -inf), sink], -1).softmax(-1)[..., :-1]

    Args:
        scores, dim, mask: as `softmax`, but that a row sums to less than one.
        sink: the score of the sink; -inf is softmax. A tensor, which gets its gradient, is
            broadcastable to scores and has size 1 in `dim`.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: the sink is neither a number nor a tensor.
        ValueError: a sink that is nan or +inf, or a tensor of another dtype, shape or device; as
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

    return over_allowed(mapping, scores, dim, mask)


def softmax1(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return softmax probabilities beside a sink of score 0.

        p_i = exp(x_i) / (1 + sum_k exp(x_k))                                (Miller 2023)
    Equivalent to: softmax_with_sink(scores, dim, mask, sink=0.0)

    Args, Returns, Raises: as `softmax`, but that a row sums to less than one.
    """
    return softmax_with_sink(scores, dim, mask, sink=0.0)


def topk(scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, k: int) -> Tensor:
    """Return softmax probabilities over the k largest scores, zero elsewhere.

        p_i = [x_i >= x_(k)] exp(x_i) / sum_j [x_j >= x_(k)] exp(x_j)    (Gupta et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.topk(k)[0][..., -1:], -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; k counts what is not excluded.
        k: at least 1. Scores equal to the k-th largest are kept with it.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: k is no integer.
        ValueError: k is below 1; as `softmax`.
    """
    check_integer("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")

    def mapping(wide: Tensor) -> Tensor:
        length = wide.shape[dim]
        if k >= length:
            return wide.softmax(dim)
        least = wide.detach().topk(k, dim, sorted=True).values.narrow(dim, k - 1, 1)
        return wide.masked_fill(wide < least, -torch.inf).softmax(dim)

    return over_allowed(mapping, scores, dim, mask)


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return the point of the probability simplex that is nearest to the scores.

        p_i = max(x_i - tau, 0), tau such that they sum to one     (Martins and Astudillo 2016)
    Equivalent to: entmax.sparsemax(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return over_allowed(lambda wide: _sorted(wide, 2.0, dim), scores, dim, mask)


def entmax15(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return 1.5-entmax probabilities, between softmax and sparsemax.

        p_i = max(x_i / 2 - tau, 0)^2, tau such that they sum to one      (Peters et al. 2019)
    Equivalent to: entmax.entmax15(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return over_allowed(lambda wide: _sorted(wide, 1.5, dim), scores, dim, mask)


class _Entmax(torch.autograd.Function):
    """The library's mappings, whose own gradients have wrong ones: those by the scores are nan
    beside a probability of 0, and of those by alpha a part is missing.

        dp / dx = diag(s) - s s^T / sum(s),  s = p^(2 - alpha), 0 where p is
        dp / dalpha = (p - q) / (alpha - 1)^2 + (h - q sum(h)) / (alpha - 1),
            q = s / sum(s),  h = -p log p                                (Correia et al. 2019)
    """

    @staticmethod
    def forward(wide: Tensor, alpha: float | Tensor, dim: int, steps: int) -> Tensor:
        if steps > 0:
            # Of a number the library makes a tensor on the CPU first, for which a GPU would wait.
            given = alpha if isinstance(alpha, Tensor) else wide.new_full((), alpha)
            return entmax.entmax_bisect(wide, given, dim, steps)
        return entmax.sparsemax(wide, dim) if alpha == 2 else entmax.entmax15(wide, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, alpha, ctx.dim, _ = inputs
        ctx.alpha, learned = (None, alpha) if isinstance(alpha, Tensor) else (alpha, None)
        ctx.save_for_backward(output, learned)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        probs, learned = ctx.saved_tensors
        alpha = ctx.alpha if learned is None else learned
        inside = probs > 0
        positive = torch.where(inside, probs, 1.0)
        weights = positive ** (2 - alpha) * inside
        shares = weights / weights.sum(ctx.dim, keepdim=True)
        by_scores = weights * (grad - (grad * shares).sum(ctx.dim, keepdim=True))
        if not ctx.needs_input_grad[1]:
            return by_scores, None, None, None
        entropy = -probs * positive.log()
        by_alpha = (probs - shares) / (alpha - 1) ** 2
        by_alpha = by_alpha + (entropy - shares * entropy.sum(ctx.dim, keepdim=True)) / (alpha - 1)
        return by_scores, (grad * by_alpha).sum_to_size(alpha.shape), None, None


def _sorted(wide: Tensor, alpha: float, dim: int) -> Tensor:
    """Return the exact mapping, of alpha 1.5 or 2; nan for a row whose largest score is nan or
    infinite.

    Of such a row they would look up the score at index -1, which on a GPU ends the process.
    """
    top = wide.detach().amax(dim, keepdim=True)
    wrong = top - top != 0
    # Where looking at it is cheap, and no graph has to hold for other scores too.
    if wrong.device.type == "cpu" and not traced() and not wrong.any():
        return _Entmax.apply(wide, alpha, dim, 0)
    exact = _Entmax.apply(wide.masked_fill(wrong, 0.0), alpha, dim, 0)
    return exact.masked_fill(wrong, torch.nan)


def alpha_entmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, alpha: float | Tensor
) -> Tensor:
    """Return alpha-entmax probabilities.

        p_i = max((alpha - 1) x_i - tau, 0)^(1 / (alpha - 1)), tau such that they sum to one
                                                                      (Correia et al. 2019)
    Equivalent to: entmax.entmax_bisect(scores.masked_fill(mask, -inf), alpha, dim)

    Args:
        scores, dim, mask: as `softmax`.
        alpha: at least 1; 1 is softmax, 2 is sparsemax. A tensor, which gets its gradient, is
            broadcastable to scores, has size 1 in `dim`, and lies well above 1: its gradient is a
            difference over (alpha - 1)^2.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: alpha is neither a number nor a tensor.
        ValueError: alpha is a number below 1 or not finite, or a tensor of another dtype or shape;
            as `softmax`.
    """
    if isinstance(alpha, Tensor):
        _check_alpha(alpha, scores, dim)
        wide_alpha = alpha
        return over_allowed(lambda wide: _bisect(wide, wide_alpha, dim), scores, dim, mask)
    if not isinstance(alpha, Real) or isinstance(alpha, bool):
        raise TypeError(f"alpha must be a number or a tensor, got {alpha!r}")
    if not 1 <= alpha <= sys.float_info.max:
        raise ValueError(f"alpha must be at least 1 and finite, got {alpha}")
    alpha = float(alpha)
    if alpha == 1:
        return softmax(scores, dim, mask)
    if alpha == 1.5:
        return entmax15(scores, dim, mask)
    if alpha == 2:
        return sparsemax(scores, dim, mask)
    return over_allowed(lambda wide: _bisect(wide, alpha, dim), scores, dim, mask)


def _check_alpha(alpha: Tensor, scores: Tensor, dim: int) -> None:
    check_row_values("alpha", alpha, scores, dim)
    # On a GPU, to look at the numbers would be to wait for them.
    if alpha.device.type == "cpu" and not traced():
        rounded = alpha.detach().to(torch.promote_types(scores.dtype, torch.float32))
        wrong = rounded[~((rounded > 1) & (rounded < torch.inf))]
        if len(wrong) > 0:
            raise ValueError(
                f"alpha must be above 1 and finite where it is a tensor, got {wrong[0].item()}"
            )


def _bisect(wide: Tensor, alpha: float | Tensor, dim: int) -> Tensor:
    limits = torch.finfo(wide.dtype)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(wide.dtype)
    elif alpha - 1 < 0.1 and wide.dtype == torch.float32:
        # Probabilities are powers of 1 / (alpha - 1), which rounding would show in.
        return _bisect(wide.double(), alpha, dim).float()
    elif alpha - 1 < limits.eps**0.5:
        return wide.softmax(dim)  # from which it is nearer than its rounding
    else:
        alpha = min(alpha, limits.max)
    # Each step halves an interval of length one at most: past the mantissa it changes nothing.
    steps = 30 if wide.dtype == torch.float32 else 60
    return _Entmax.apply(_below_top(wide, dim), alpha, dim, steps)


def evsoftmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, training: bool = False
) -> Tensor:
    """Return softmax probabilities over the scores that are not below their mean.

        p_i = w_i exp(x_i) / sum_k w_k exp(x_k), w_i = [x_i >= mean(x)]     (Chen et al. 2021)
    Equivalent to: torch.softmax(scores.masked_fill(scores < scores.mean(-1, True), -inf), -1)

    Args:
        scores, dim, mask: as `softmax`; the mean is over the keys that `hidden_keys` leaves.
        training: w_i is 1 + 1e-6 and 1e-6, so that low scores get gradients.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: training is no bool; as `softmax`.
        ValueError: as `softmax`.
    """
    check_flag("training", training)

    def mapping(wide: Tensor) -> Tensor:
        fixed = wide.detach()
        allowed = fixed > -torch.inf
        if mask is not None:
            counted = allowed & ~hidden_keys(mask)
            allowed = torch.where(counted.any(dim, keepdim=True), counted, allowed)
        # A power of two rounds nothing and keeps the sum of the largest scores finite.
        scaled = fixed.double() * 2.0**-32
        total = scaled.masked_fill(~allowed, 0.0).sum(dim, keepdim=True)
        mean = total / allowed.sum(dim, keepdim=True).clamp(min=1)
        # Rounding may put the mean of equal scores above all of them.
        kept = scaled >= torch.minimum(mean, scaled.amax(dim, keepdim=True))
        if not training:
            return wide.masked_fill(~kept, -torch.inf).softmax(dim)
        factor = kept.to(wide.dtype) + EV_TRAINING_FACTOR
        return (wide + factor.log()).softmax(dim)

    return over_allowed(mapping, scores, dim, mask)


def hidden_keys(mask: Tensor) -> Tensor:
    """Return which keys a mask (bool: True excludes; or added) lets nobody attend to, bool."""
    return mask if mask.dtype == torch.bool else mask <= EXCLUDES


def check_row_values(name: str, values: Tensor, scores: Tensor, dim: int) -> None:
    """Raise ValueError for what is no floating-point number for each row of the scores."""
    check_tensor(name, values)
    _check_scores(scores)
    _check_dim(scores, dim)
    shape = list(scores.shape)
    if shape:
        shape[dim] = 1
    if not values.is_floating_point() or not _broadcasts(list(values.shape), shape):
        raise ValueError(
            f"{name} must be floating-point and broadcastable to {shape}, got {values.dtype} "
            f"{list(values.shape)}"
        )
    check_device(name, values, scores, "scores")


def widened(scores: Tensor) -> Tensor:
    """Return scores in float32 or wider."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def _below_top(scores: Tensor, dim: int) -> Tensor:
    """The scores less the largest, for mappings that a shift does not change: so that a factor
    overflows to -inf alone, and a threshold that lies one below the top is not rounded to it."""
    return scores - scores.detach().amax(dim, keepdim=True)


def over_allowed(
    mapping: Callable[[Tensor], Tensor], scores: Tensor, dim: int, mask: Tensor | None
) -> Tensor:
    """Apply a mapping that gives -inf the probability 0 to the scores that are not excluded."""
    wide, excluded = masked(scores, dim, mask)
    if wide.numel() == 0:
        return wide
    probs = mapping(wide) if wide.dim() > 0 else mapping(wide.unsqueeze(0)).squeeze(0)
    return probs if excluded is None else probs.masked_fill(excluded, 0.0)


def _check_scores(scores: Tensor) -> None:
    check_tensor("scores", scores)
    if not scores.is_floating_point():
        raise ValueError(f"scores must be floating-point, got {scores.dtype}")


def _check_dim(scores: Tensor, dim: int) -> None:
    check_integer("dim", dim)
    ndim = max(scores.dim(), 1)
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim must be in [{-ndim}, {ndim - 1}], got {dim}")


def _broadcasts(shape: list[int], to: list[int]) -> bool:
    """Whether a shape can be broadcast to another without enlarging that."""
    if len(shape) > len(to):
        return False
    for i in range(len(shape)):
        if shape[i] != 1 and shape[i] != to[len(to) - len(shape) + i]:
            return False
    return True


def check_arguments(scores: Tensor, dim: int, mask: Tensor | None) -> None:
    """Raise ValueError for scores, dim and mask that no mapping takes; TypeError for no tensors."""
    _check_scores(scores)
    _check_dim(scores, dim)
    if mask is None:
        return
    check_tensor("mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"mask must be bool (True excludes) or floating-point (added), got {mask.dtype}"
        )
    if not _broadcasts(list(mask.shape), list(scores.shape)):
        raise ValueError(
            f"mask must be broadcastable to the scores {list(scores.shape)}, got {list(mask.shape)}"
        )
    check_device("mask", mask, scores, "scores")


def masked(
    scores: Tensor, dim: int, mask: Tensor | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """Return the scores at a temperature, in float32 or wider, with what a float mask adds and -inf
    where the mask excludes; and where it does.

    Rows where nothing would be left are 0 throughout, whatever their scores are: they are blanked
    after normalising, so that no NaN ever arises, not even in the backward pass.
    """
    check_arguments(scores, dim, mask)
    wide = widened(scores)
    if mask is None:
        return _at(temperature, wide, dim), None
    if mask.dtype != torch.bool:
        mask = mask.to(wide.dtype)  # in which a number may be infinite that was not
    excluded = mask if mask.dtype == torch.bool else mask == -float("inf")
    dim = dim - wide.dim() if dim >= 0 else dim
    # A mask without this dimension excludes whole rows or none of a row.
    empty = excluded.all(dim, keepdim=True) if mask.dim() >= -dim else excluded
    wide = wide.masked_fill(excluded, -float("inf")).masked_fill(empty, 0.0)
    wide = _at(temperature, wide, dim)
    if mask.dtype != torch.bool:
        # Not -inf itself, whose sum with a score has a gradient.
        wide = wide + mask.masked_fill(excluded, 0.0)
    return wide, excluded


def _at(temperature: float, wide: Tensor, dim: int) -> Tensor:
    if temperature == 1 or wide.numel() == 0:
        return wide
    return _below_top(wide, dim) / temperature
