"""Continuous attention: expectations of Gaussian basis functions under a density over positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.ops.backend import traced
from multimax_fairseq.ops.checks import check_device, check_tensor

# For supports narrower than NARROW widths of a basis function, the closed form cancels. There,
# SERIES_TERMS terms of a Taylor series are exact to double precision.
NARROW = 0.2
SERIES_TERMS = 11

# Distances in widths of a Gaussian: beyond REACH it is negligible next to its peak in double
# precision, beyond FAR it underflows to 0.
REACH = 9.0
FAR = 40.0

ROOT_HALF = math.sqrt(0.5)

# Rows computed at a time on a CPU, so that intermediate results stay in the cache.
CACHED_ROWS = 1024

# The parabola's gradient with respect to its variance is unbounded at 0: the variance is clamped at
# this value.
MIN_VARIANCE = 1e-9


def continuous_softmax(mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    """Return the expectations of Gaussian basis functions under a Gaussian density over time.

        r_j = E[N(t; center_j, width_j^2)], t ~ N(mean, variance)
            = N(mean; center_j, variance + width_j^2)          (Eq. 46, Martins et al. 2020)
    Equivalent to: torch.distributions.Normal(centers, (variance[..., None] + widths**2).sqrt())
    .log_prob(mean[..., None]).exp()

    Args:
        mean: (...,), floating; any number.
        variance: broadcastable with mean; 0 is a point mass at the mean.
        centers: (N,), of the basis functions; constants, which get no gradient.
        widths: (N,), their standard deviations; above 0.

    Returns:
        (..., N), in float32 or wider. Its gradients are covariances under the density (Eq. 18).

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not match; the basis requires a gradient; on the
            CPU, a variance is below 0 or a width is not above 0.
    """
    return _expectation(_gaussian, _gaussian_slopes, (mean, variance, centers, widths))


def continuous_sparsemax(mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    """Return the expectations of Gaussian basis functions under a truncated parabola over time.

        p(t) = [-lambda - (t - mean)^2 / (2 variance)]_+ , zero beyond mean +- (3/2 variance)^(1/3)
        r_j = integral of p(t) N(t; center_j, width_j^2)       (Eq. 10 and 49, Martins et al. 2020)
    Equivalent to: densities.TRUNCATED_PARABOLA.expectation(mean, variance, centers, widths)

    `variance` is the scale of the score function, as in the paper, not the density's own variance,
    which is (3/2 variance)^(2/3) / 5.

    Args, Returns, Raises: as `continuous_softmax`. The gradient with respect to the variance is
        unbounded at 0; below `MIN_VARIANCE` it is that at `MIN_VARIANCE`.
    """
    # In float32 the closed form would lose most digits to cancellation.
    inputs = (mean, variance, centers, widths)
    return _expectation(_parabola, _parabola_slopes, inputs, torch.float64)


def gaussian_basis(positions: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    """Return the basis functions at positions: N(t; center_j, width_j^2), (..., N).

    Args:
        positions: (...,), floating.
        centers, widths: (N,), as `continuous_softmax`.
    """
    check_tensor("positions", positions)
    return continuous_softmax(positions, torch.zeros_like(positions), centers, widths)


def _gauss_legendre(count: int) -> tuple[Tensor, Tensor]:
    # Newton's method in plain Python. Tensor operations at import would start torch's threads, and
    # a process that is forked later would wait for them forever.
    nodes, weights = [], []
    for number in range(count):
        node = -math.cos(math.pi * (number + 0.75) / (count + 0.5))
        for _ in range(5):
            before, value = 1.0, node  # Legendre polynomials of two degrees
            for n in range(2, count + 1):
                before, value = value, ((2 * n - 1) * node * value - (n - 1) * before) / n
            slope = count * (before - node * value) / (1 - node**2)
            node -= value / slope
        nodes.append(node)
        weights.append(2 / ((1 - node**2) * slope**2))
    table = torch.tensor([nodes, weights], dtype=torch.float64, device="cpu")
    return table[0], table[1]


# Nodes and weights of the quadrature on [-1, 1]: 14 digits for a Gaussian within REACH.
NODES, WEIGHTS = _gauss_legendre(64)


# --- one dimension ----------------------------------------------------------------------------

# core(mean (..., 1), variance (..., 1), centers (N,), widths (N,)) -> expectations (..., N);
# slopes(the same) -> derivatives with respect to mean and variance.
Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Slopes = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def _gaussian(mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    total = variance + widths**2
    return torch.exp(-((mean - centers) ** 2) / (2 * total)) / (2 * math.pi * total).sqrt()


def _gaussian_slopes(
    mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor]:
    total = variance + widths**2
    # Where the square would overflow, the value is 0; clamp to avoid 0 * inf.
    limit = torch.finfo(total.dtype).max ** 0.5
    slope = ((centers - mean) / total).clamp(-limit, limit)  # of the logarithm
    value = _gaussian(mean, variance, centers, widths)
    return value * slope, value * (slope**2 - 1 / total) / 2


def _parabola(mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
    # With x = (t - mean) / half, the density of x is 3/4 (1 - x^2) on [-1, 1].
    half, inverse = (1.5 * variance) ** (1 / 3), 1 / widths
    mass, _, spread = moments_on_support(half * inverse, (centers - mean) * inverse)
    return (0.5 * mass - 0.75 * spread) * inverse


def _parabola_slopes(
    mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor]:
    half, inverse = (1.5 * variance.clamp(min=MIN_VARIANCE)) ** (1 / 3), 1 / widths
    _, first, spread = moments_on_support(half * inverse, (centers - mean) * inverse)
    return first * (1.5 / half * inverse), spread * (1.125 / half**3 * inverse)


def moments_on_support(half: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the moments of a Gaussian on an interval, the second one minus I_0 / 3.

        I_n = integral over [-1, 1] of x^n N(half x; offset, 1) dx

    Args:
        half: float64, at least 0: the interval's half-width in standard deviations of the Gaussian.
        offset: float64, broadcastable with half: the Gaussian's centre minus the interval's.

    Returns:
        (I_0, I_1, I_2 - I_0 / 3), each of the broadcast shape.
    """
    half, offset = torch.broadcast_tensors(half, offset)
    # Farther away all moments are 0, and powers of the offset would overflow.
    offset = offset.clamp(-half - FAR, half + FAR)
    narrow = half < NARROW
    closed = _closed_moments(half.clamp(min=NARROW), offset)
    if not can_read_values(half):
        series = _series_moments(half.clamp(max=NARROW), offset)
        mass, first, spread = (
            torch.where(narrow, a, b) for a, b in zip(series, closed, strict=True)
        )
        return mass, first, spread
    if narrow.any():
        series = _series_moments(half[narrow], offset[narrow])
        mass, first, spread = (
            whole.masked_scatter(narrow, part) for whole, part in zip(closed, series, strict=True)
        )
        return mass, first, spread
    return closed


def _closed_moments(half: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    above, below = half - offset, half + offset
    high, low = _normal(above), _normal(below)
    # Measured from the nearer end, so that the tails do not cancel.
    far, reach = ROOT_HALF * offset.abs(), ROOT_HALF * half
    inside = 0.5 * (torch.erfc(far - reach) - torch.erfc(far + reach))
    spread = (1 + offset * offset - half * half / 3) * inside - above * low - below * high
    inverse = 1 / half
    square = inverse * inverse
    return inside * inverse, (low - high + offset * inside) * square, spread * (square * inverse)


def _series_moments(half: Tensor, offset: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # N(half x; offset, 1) = N(offset; 0, 1) * sum of He_n(offset) (half x)^n / n!, with the Hermite
    # polynomials He_(n+1) = offset He_n - n He_(n-1).
    mass = first = spread = torch.zeros_like(half)
    before, hermite, power = mass, torch.ones_like(half), torch.ones_like(half)
    for n in range(SERIES_TERMS):
        term = hermite * power
        if n % 2:
            first = first + 2 / (n + 2) * term
        else:
            mass = mass + 2 / (n + 1) * term
            spread = spread + 4 * n / (3 * (n + 1) * (n + 3)) * term
        before, hermite = hermite, offset * hermite - n * before
        power = power * half / (n + 1)
    scale = _normal(offset)
    return scale * mass, scale * first, scale * spread


def _normal(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (ROOT_HALF / math.sqrt(math.pi))


class _Expectation(torch.autograd.Function):
    """Saves the inputs; the backward pass computes the derivatives."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        core: Core, slopes: Slopes, mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor
    ) -> Tensor:
        rows = _in_parts(centers.dtype, mean, variance)
        values = torch.cat([core(at, spread, centers, widths) for at, spread in rows])
        return values.view(*torch.broadcast_shapes(mean.shape, variance.shape)[:-1], len(centers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.slopes, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, variance, centers, widths = ctx.saved_tensors
        totals = []
        for at, spread, grads in _in_parts(centers.dtype, mean, variance, grad):
            slopes = ctx.slopes(at, spread, centers, widths)
            totals.append([(grads * slope).sum(-1, keepdim=True) for slope in slopes])
        grad_mean, grad_variance = (
            cast_gradient(torch.cat(total).view(*grad.shape[:-1], 1), like)
            for total, like in zip(zip(*totals, strict=True), (mean, variance), strict=True)
        )
        return None, None, grad_mean, grad_variance, None, None


def _in_parts(dtype: torch.dtype, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Split tensors into parts of CACHED_ROWS rows."""
    shape = torch.broadcast_shapes(*(tensor.shape[:-1] for tensor in tensors))
    matrices = [
        tensor.to(dtype).expand(*shape, -1).reshape(shape.numel(), tensor.shape[-1])
        for tensor in tensors
    ]
    rows = CACHED_ROWS if can_read_values(matrices[0]) else max(shape.numel(), 1)
    return list(zip(*(matrix.split(rows) for matrix in matrices), strict=True))


def cast_gradient(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the shape and dtype of `like`, clamped to finite numbers."""
    limit = torch.finfo(like.dtype).max
    return gradient.sum_to_size(like.shape).clamp(-limit, limit).to(like.dtype)


def _expectation(
    core: Core, slopes: Slopes, inputs: tuple[Tensor, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """Return the expectations, computed in `dtype`; None computes in the dtype of the result."""
    mean, variance, centers, widths = checked_bases(*inputs)
    result = result_dtype(mean, variance)
    dtype = dtype or result
    values = _Expectation.apply(
        core, slopes, mean[..., None], variance[..., None], centers.to(dtype), widths.to(dtype)
    )
    return values.to(result)


def checked_bases(
    mean: Tensor, variance: Tensor, centers: Tensor, widths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the arguments of an expectation in one dimension, and return them."""
    check_floating(mean=mean, variance=variance, centers=centers, widths=widths)
    if centers.dim() != 1 or centers.shape != widths.shape:
        raise ValueError(
            "centers and widths must be (N,), one entry per basis function, got "
            f"{list(centers.shape)} and {list(widths.shape)}"
        )
    for name, tensor in (("centers", centers), ("widths", widths)):
        check_constant(name, tensor)
    try:
        torch.broadcast_shapes(mean.shape, variance.shape)
    except RuntimeError:
        raise ValueError(
            "mean and variance must be broadcastable, got "
            f"{list(mean.shape)} and {list(variance.shape)}"
        ) from None
    check_values("variance", variance, variance < 0, "at least 0")
    check_values("widths", widths, ~(widths > 0) | widths.isinf(), "above 0 and finite")
    return mean, variance, centers, widths


def check_floating(**tensors: Tensor) -> None:
    """Raise TypeError or ValueError unless all are floating-point tensors on one device."""
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {tensor.dtype}")
        check_device(name, tensor, tensors[first], first)


def check_constant(name: str, tensor: Tensor) -> None:
    """Raise ValueError if a basis requires a gradient: it has none."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} are constants, which get no gradient: pass {name}.detach()")


def result_dtype(first: Tensor, second: Tensor) -> torch.dtype:
    """Return the wider dtype of the two, at least float32."""
    return torch.promote_types(torch.promote_types(first.dtype, second.dtype), torch.float32)


def can_read_values(tensor: Tensor) -> bool:
    """Whether reading values is cheap: not on a GPU, and not under tracing or transforms."""
    return tensor.device.type == "cpu" and not traced()


def check_values(name: str, tensor: Tensor, invalid: Tensor, requirement: str) -> None:
    """Raise ValueError for the first invalid entry, if reading values is cheap."""
    if can_read_values(tensor) and invalid.any():
        raise ValueError(f"{name} must be {requirement}, got {tensor[invalid][0].tolist()}")
