"""Sparsemax, 1.5-entmax and alpha-entmax, whose alpha may be learned."""

from __future__ import annotations

import sys
from numbers import Real
from typing import Any

import entmax
import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.masking import (
    apply_masked,
    at_least_float32,
    check_row_values,
    subtract_max,
)
from multimax_fairseq.mappings.registry import Mapping, Option, heads_option, register
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.ops.backend import traced
from multimax_fairseq.ops.checks import check_whole, is_finite
from multimax_fairseq.ops.row_function import RowFunction

# Closer to 1, the power 1 / (alpha - 1) would amplify rounding errors of float32.
MIN_ALPHA = 1.01


def sparsemax(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return the point of the probability simplex that is nearest to the scores.

        p_i = max(x_i - tau, 0), tau such that they sum to one     (Martins and Astudillo 2016)
    Equivalent to: entmax.sparsemax(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return apply_masked(lambda wide: _sorted(wide, 2.0, dim), scores, dim, mask)


def entmax15(scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
    """Return 1.5-entmax probabilities, between softmax and sparsemax.

        p_i = max(x_i / 2 - tau, 0)^2, tau such that they sum to one      (Peters et al. 2019)
    Equivalent to: entmax.entmax15(scores.masked_fill(mask, -inf), dim)

    Args, Returns, Raises: as `softmax`.
    """
    return apply_masked(lambda wide: _sorted(wide, 1.5, dim), scores, dim, mask)


def alpha_entmax(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, alpha: float | Tensor
) -> Tensor:
    """Return alpha-entmax probabilities.

        p_i = max((alpha - 1) x_i - tau, 0)^(1 / (alpha - 1)), tau such that they sum to one
                                                                      (Correia et al. 2019)
    Equivalent to: entmax.entmax_bisect(scores.masked_fill(mask, -inf), alpha, dim)

    Args:
        scores, dim, mask: as `softmax`.
        alpha: at least 1; 1 is softmax, 2 is sparsemax. A tensor must be broadcastable to scores,
            with size 1 in `dim`; it can require grad. In float32 its values should be at least
            1.01, because the power 1 / (alpha - 1) amplifies rounding errors.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: alpha is neither a number nor a tensor.
        ValueError: alpha is a number below 1 or not finite, or a tensor of another dtype or shape;
            as `softmax`.
    """
    if isinstance(alpha, Tensor):
        _check_alpha(alpha, scores, dim)
        tensor = alpha
        return apply_masked(lambda wide: _bisect(wide, tensor, dim), scores, dim, mask)
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
    return apply_masked(lambda wide: _bisect(wide, alpha, dim), scores, dim, mask)


def _check_alpha(alpha: Tensor, scores: Tensor, dim: int) -> None:
    check_row_values("alpha", alpha, scores, dim)
    # On a GPU, reading the numbers would synchronise.
    if alpha.device.type == "cpu" and not traced():
        rounded = alpha.detach().to(torch.promote_types(scores.dtype, torch.float32))
        wrong = rounded[~((rounded > 1) & (rounded < torch.inf))]
        if len(wrong) > 0:
            raise ValueError(
                f"alpha must be above 1 and finite where it is a tensor, got {wrong[0].item()}"
            )


class _Entmax(torch.autograd.Function):
    """The library's mappings with correct gradients.

    The library's gradient with respect to the scores is NaN next to a probability of 0, and the one
    with respect to alpha lacks a term.
    """

    @staticmethod
    def forward(wide: Tensor, alpha: float | Tensor, dim: int, steps: int) -> Tensor:
        if steps > 0:
            # entmax would create a CPU tensor from a Python number and force a synchronisation.
            alpha_tensor = alpha if isinstance(alpha, Tensor) else wide.new_full((), alpha)
            return entmax.entmax_bisect(wide, alpha_tensor, dim, steps)
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
        grad_scores = _jacobian_product(probs, alpha, ctx.dim, grad)  # the Jacobian is symmetric
        if not ctx.needs_input_grad[1]:
            return grad_scores, None, None, None
        slope = _slope_of_alpha(probs, alpha, ctx.dim)
        return grad_scores, (grad * slope).sum_to_size(alpha.shape), None, None


class _TransformedEntmax(_Entmax):
    """`_Entmax` for torch.func and forward mode; torch.compile does not trace a class with jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Entmax.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*ctx.to_save)

    @staticmethod
    def jvp(
        ctx: Any, scores_tangent: Tensor | None, alpha_tangent: Tensor | None, *_: None
    ) -> Tensor:
        probs, learned = ctx.saved_tensors
        alpha = ctx.alpha if learned is None else learned
        tangent = torch.zeros_like(probs)
        if scores_tangent is not None:
            tangent = tangent + _jacobian_product(probs, alpha, ctx.dim, scores_tangent)
        if alpha_tangent is not None:
            tangent = tangent + alpha_tangent * _slope_of_alpha(probs, alpha, ctx.dim)
        return tangent

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], wide: Tensor, alpha: float | Tensor, *rest: int
    ) -> tuple[Tensor, int]:
        wide_dim, alpha_dim, *_ = in_dims
        wide = wide[None] if wide_dim is None else wide.movedim(wide_dim, 0)
        if isinstance(alpha, Tensor) and alpha_dim is not None:
            alpha = alpha.movedim(alpha_dim, 0)
            alpha = alpha.reshape(-1, *(1,) * (wide.dim() - alpha.dim()), *alpha.shape[1:])
        wide = wide.expand(info.batch_size, *wide.shape[1:])
        return _TransformedEntmax.apply(wide, alpha, *rest), 0


def _entmax(wide: Tensor, alpha: float | Tensor, dim: int, steps: int) -> Tensor:
    dim = dim - wide.dim() if dim >= 0 else dim  # negative, since vmap adds a dimension in front
    function = _Entmax if torch.compiler.is_compiling() else _TransformedEntmax
    probs: Tensor = function.apply(wide, alpha, dim, steps)
    return probs


def _jacobian_product(probs: Tensor, alpha: float | Tensor, dim: int, vector: Tensor) -> Tensor:
    """Return the product of dp / dx and a vector.

    dp / dx = diag(s) - s s^T / sum(s),  s = p^(2 - alpha), and s = 0 where p = 0
                                                                      (Correia et al. 2019)
    """
    inside = probs > 0
    weights = torch.where(inside, probs, 1.0) ** (2 - alpha) * inside
    shares = weights / weights.sum(dim, keepdim=True)
    return weights * (vector - (vector * shares).sum(dim, keepdim=True))


def _slope_of_alpha(probs: Tensor, alpha: Tensor, dim: int) -> Tensor:
    """Return dp / dalpha, accurate also for alpha near 1.

    Correia et al. (2019), with e = alpha - 1, s as above and h = -p log p:
        dp / dalpha = (p - q) / e^2 + (h - q sum(h)) / e,  q = s / sum(s)
    These terms cancel near alpha = 1. With l = -log p and v = (exp(e l) - 1 - e l) / e^2 they are
        p (sum(p v) (1 + e l) - v (1 + e sum(h))) / sum(s)
    """
    excess = alpha - 1
    logs = -torch.where(probs > 0, probs, 1.0).log()
    growth = (excess * logs).expm1()  # s = p (1 + growth)
    second = (growth - excess * logs) / excess**2
    entropy, mean, total = ((probs * x).sum(dim, keepdim=True) for x in (logs, second, 1 + growth))
    return probs * (mean * (1 + excess * logs) - second * (1 + excess * entropy)) / total


def _sorted(wide: Tensor, alpha: float, dim: int) -> Tensor:
    """Return the exact mapping for alpha 1.5 or 2; NaN for a row whose largest score is not finite.

    For such a row the library would read index -1, which crashes the process on a GPU.
    """
    top = wide.detach().amax(dim, keepdim=True)
    wrong = top - top != 0
    # Branch on values only on a CPU, where it is cheap, and not in a recorded graph.
    if wrong.device.type == "cpu" and not traced() and not wrong.any():
        return _entmax(wide, alpha, dim, 0)
    exact = _entmax(wide.masked_fill(wrong, 0.0), alpha, dim, 0)
    return exact.masked_fill(wrong, torch.nan)


def _bisect(wide: Tensor, alpha: float | Tensor, dim: int) -> Tensor:
    limits = torch.finfo(wide.dtype)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(wide.dtype)
    elif alpha - 1 < 0.1 and wide.dtype == torch.float32:
        # The large power 1 / (alpha - 1) would amplify rounding errors.
        return _bisect(wide.double(), alpha, dim).float()
    elif alpha - 1 < limits.eps**0.5:
        return wide.softmax(dim)  # the difference is below the rounding error
    else:
        alpha = min(alpha, limits.max)
    # Each step halves an interval of length one. More steps than mantissa bits change nothing.
    steps = 30 if wide.dtype == torch.float32 else 60
    return _entmax(subtract_max(wide, dim), alpha, dim, steps)


def alpha_of(logit: Tensor) -> Tensor:
    """Return 1 + sigmoid(logit), 1.01 or more, in float32 or wider.

    The clamp passes gradients, so that an alpha can leave the bound again.
    """
    alpha = 1 + at_least_float32(logit).sigmoid()
    return alpha + (alpha.clamp(min=MIN_ALPHA) - alpha).detach()


class EntmaxAlpha(nn.Module):
    """Learned alpha of each head; `alpha()` is `alpha_of(logit)`, (num_heads, 1, 1).

    Args:
        num_heads: how many alphas; 1 shares one among all heads.

    Parameter: `logit`, (num_heads,), drawn from the standard normal distribution.

    Raises:
        ValueError: num_heads is not a whole number of at least 1.
    """

    def __init__(self, num_heads: int = 1) -> None:
        super().__init__()
        check_whole("alpha's number of heads", num_heads)
        self.logit = nn.Parameter(torch.randn(num_heads))

    def forward(self) -> Tensor:
        """Return alpha, (num_heads, 1, 1), in float32 or wider."""
        return alpha_of(self.logit)[:, None, None]

    def extra_repr(self) -> str:
        return f"num_heads={len(self.logit)}"


def _build(num_heads: int | None, alpha: float | None) -> dict[str, Any]:
    return {"alpha": EntmaxAlpha(num_heads or 1) if alpha is None else alpha}


def _kernel(alpha: float | Tensor) -> dict[str, Any] | None:
    if isinstance(alpha, Tensor):
        if traced():
            return None  # the kernel needs alpha in (1, 2], but its values are unknown
        # On a GPU, reading the values would synchronise.
        if alpha.device.type == "cpu" and not ((alpha >= MIN_ALPHA) & (alpha <= 2)).all():
            return None
        return {"row": RowFunction("alpha_entmax", alpha)}
    if not is_finite(alpha):
        return None
    if alpha == 1:
        return {}  # softmax
    if alpha in (1.5, 2):
        return {"row": RowFunction("entmax15" if alpha == 1.5 else "sparsemax")}
    # Below 1.1 the plain form computes in double.
    return {"row": RowFunction("alpha_entmax", float(alpha))} if 1.1 <= alpha <= 2 else None


register(
    Mapping(
        name="sparsemax",
        label="sparsemax",
        function=sparsemax,
        kernel=lambda: {"row": RowFunction("sparsemax")},
        output_options=(),
        output_loss=lambda logits, target: entmax.sparsemax_loss(logits, target),
    )
)
register(
    Mapping(
        name="entmax15",
        label="1.5-entmax",
        function=entmax15,
        kernel=lambda: {"row": RowFunction("entmax15")},
        output_options=(),
        output_loss=lambda logits, target: entmax.entmax15_loss(logits, target),
    )
)
register(
    Mapping(
        name="alpha_entmax",
        label="α-entmax",
        function=alpha_entmax,
        options=(
            Option(
                "alpha",
                None,
                float,
                requirement="a finite number of at least 1",
                is_valid=lambda alpha: alpha is None or is_finite(alpha) and alpha >= 1,
                help="fixed alpha of alpha_entmax; by default it is learned",
                remark="1 is softmax, 2 sparsemax",
                setting="entmax_alpha",
            ),
        ),
        heads=heads_option(
            "separate",
            "learn one alpha per head (separate) or per layer (shared)",
            setting="entmax_heads",
        ),
        build=_build,
        kernel=_kernel,
        output_options=(
            Option(
                "alpha",
                1.5,
                float,
                requirement="a finite number above 1",
                is_valid=lambda alpha: is_finite(alpha) and alpha > 1,
                help="alpha of the output mapping alpha_entmax",
                remark="for 1, softmax, pass --output-normalizer softmax",
                setting="output_entmax_alpha",
            ),
        ),
        output_loss=lambda logits, target, alpha: entmax.entmax_bisect_loss(logits, target, alpha),
    )
)
