"""Continuous attention over a plane or a space: expectations of multivariate Gaussian functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.continuous.expectation import (
    NODES,
    REACH,
    WEIGHTS,
    check_constant,
    check_floating,
    check_values,
    looks,
    moments_on_support,
    narrowed,
    result_dtype,
)
from multimax_fairseq.ops.registration import differentiable_once

# How far a covariance may be from symmetric and from semi-definite, by its largest entry: what
# half precision leaves of one.
ROUNDING = 1e-3


def continuous_softmax_nd(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> Tensor:
    """Return the expectations of Gaussian basis functions under a Gaussian density in D dimensions.

        r_j = E[N(t; center_j, covariance_j)], t ~ N(mean, covariance)
            = N(mean; center_j, covariance + covariance_j)     (Eq. 46, Martins et al. 2020)
    Equivalent to: torch.distributions.MultivariateNormal(centers, covariance + covariances)
    .log_prob(mean).exp(), with mean and covariance of one dimension more

    Args:
        mean: (..., D), floating.
        covariance: (..., D, D), symmetric, leading dimensions broadcastable with mean's; positive
            semi-definite: zeros are the density of one point.
        centers: (N, D), of the basis functions; constants, which get no gradient.
        covariances: (N, D, D), theirs, positive definite.

    Returns:
        (..., N), in float32 or wider. Its gradients are covariances under the density (Eq. 18), and
        symmetric by the covariance.

    Raises:
        TypeError: something that is no tensor.
        ValueError: shapes, dtypes or devices that do not fit; a basis that asks for a gradient; on
            the CPU, a covariance that is not symmetric or not positive definite.
    """
    inputs = _checked(mean, covariance, centers, covariances, singular=True)
    return _Gaussian.apply(*inputs).to(result_dtype(mean, covariance))


def continuous_sparsemax_2d(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> Tensor:
    """Return the expectations of Gaussian basis functions under a truncated paraboloid on a plane.

        p(t) = [-lambda - (t - mean)^T covariance^-1 (t - mean) / 2]_+
        r_j = integral of p(t) N(t; center_j, covariance_j)    (Eq. 11 and App. G.3, Martins et al.)

    On the unit disk that the ellipse of the support is mapped to, each basis function is turned to
    its axes. The integral along the longer one is then known in closed form, that along the shorter
    one is Gauss and Legendre's quadrature over what the function reaches. (The paper turns to polar
    coordinates about the ellipse's centre instead, where a narrow function far from it is a sharp
    peak in the angle.)

    Args:
        mean: (..., 2), floating.
        covariance: (..., 2, 2), symmetric and positive definite: of the score function, as in the
            paper; the density's own covariance is it times (pi^2 det(covariance))^(-1/4) / 3.
        centers: (N, 2), of the basis functions; constants, which get no gradient.
        covariances: (N, 2, 2), theirs, positive definite.

    Returns, Raises: as `continuous_softmax_nd`.
    """
    inputs = _checked(mean, covariance, centers, covariances, size=2)
    return _Paraboloid.apply(*inputs).to(result_dtype(mean, covariance))


class _Gaussian(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor) -> Tensor:
        return _Gaussian.terms(mean, covariance, centers, covariances)[0]

    @staticmethod
    def terms(
        mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The expectations, the factors of the total covariances, and the way to the centres in
        units of them, (..., N, D, 1)."""
        mean, covariance, centers, covariances = (
            t.double() for t in (mean, covariance, centers, covariances)
        )
        factor = torch.linalg.cholesky(covariance[..., None, :, :] + covariances)
        way = (centers - mean[..., None, :])[..., None]
        way = torch.linalg.solve_triangular(factor, way, upper=False)
        size = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + way.square().sum((-2, -1)) / 2
        return torch.exp(-size - mean.shape[-1] / 2 * math.log(2 * math.pi)), factor, way

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, factor, way = _Gaussian.terms(*ctx.saved_tensors)
        pull = torch.linalg.solve_triangular(factor.mT, way, upper=True)
        share = (grad * value)[..., None]
        by_mean = (share * pull.squeeze(-1)).sum(-2)
        by_covariance = share[..., None] / 2 * (pull @ pull.mT - torch.cholesky_inverse(factor))
        by_covariance = by_covariance.sum(-3)
        return *map(narrowed, (by_mean, by_covariance), ctx.saved_tensors), None, None


class _Paraboloid(torch.autograd.Function):
    """With t = mean + reach L u, covariance = L L^T, the density of u is 2/pi (1 - |u|^2) on the
    unit disk."""

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor) -> Tensor:
        # The area of the ellipse relative to the disk, and the integrals over the disk.
        _, area, mass, _, square = _disk_moments(mean, covariance, centers, covariances)
        trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 2 / math.pi * (mass - trace) / area[..., None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        way, _, mass, first, square = _disk_moments(*ctx.saved_tensors)
        by_mean = (grad[..., None] * first).sum(-2, keepdim=True).mT
        # u u^T less its mean over the disk, which is a quarter of the identity.
        spread = square - mass[..., None, None] * _one_like(mass) / 4
        by_covariance = (grad[..., None, None] * spread).sum(-3)
        by_covariance = way.mT @ by_covariance @ way / 2
        by_mean = (way.mT @ by_mean).squeeze(-1)
        return *map(narrowed, (by_mean, by_covariance), ctx.saved_tensors), None, None


def _one_like(tensor: Tensor) -> Tensor:
    """The identity of the plane."""
    return torch.eye(2, dtype=tensor.dtype, device=tensor.device)


def _disk_moments(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return reach L^-1, (..., 2, 2), the area of the support by that of the disk, (...), and the
    integrals of 1, u and u u^T under each basis function over the disk, (..., N), (..., N, 2) and
    (..., N, 2, 2)."""
    mean, covariance, centers, covariances = (
        t.double() for t in (mean, covariance, centers, covariances)
    )
    factor = torch.linalg.cholesky(covariance)
    size = factor.diagonal(dim1=-2, dim2=-1).prod(-1)  # the root of the determinant
    reach = (2 / (math.pi * size).sqrt()).sqrt()  # -2 lambda is its square
    inverse = torch.linalg.solve_triangular(factor, _one_like(factor), upper=False)
    inverse = inverse / reach[..., None, None]
    narrow = inverse[..., None, :, :]
    spreads, axes = torch.linalg.eigh(narrow @ covariances @ narrow.mT)
    center = axes.mT @ (narrow @ (centers - mean[..., None, :])[..., None])
    (x0, y0), (dx, dy) = center.squeeze(-1).unbind(-1), spreads.sqrt().unbind(-1)
    # x = sin(angle) along the shorter axis: the ends of the other, +- cos(angle), are then smooth.
    low, high = (torch.asin((x0 + side * REACH * dx).clamp(-1, 1)) for side in (-1, 1))
    node, weight = NODES.to(dx.device), WEIGHTS.to(dx.device)
    angle = ((low + high)[..., None] + (high - low)[..., None] * node) / 2
    x, end = angle.sin(), angle.cos()
    along = torch.exp(-(((x - x0[..., None]) / dx[..., None]) ** 2) / 2)
    weight = weight * (high - low)[..., None] / 2 * end * along
    weight = weight / (math.sqrt(2 * math.pi) * dx[..., None])
    mass, first, spread = moments_on_support(end / dy[..., None], (y0 / dy)[..., None])
    mass, first, spread = (end / dy[..., None] * t for t in (mass, first, spread))
    second = end**2 * (spread + mass / 3)
    across = end * first

    def total(values: Tensor) -> Tensor:
        return (weight * values).sum(-1)

    vector = axes @ torch.stack([total(x * mass), total(across)], -1)[..., None]
    cross = total(x * across)
    rows = [total(x * x * mass), cross, cross, total(second)]
    square = axes @ torch.stack(rows, -1).unflatten(-1, (2, 2)) @ axes.mT
    first = vector.squeeze(-1)
    return inverse * reach[..., None, None] ** 2, reach**2 * size, total(mass), first, square


def _checked(
    mean: Tensor,
    covariance: Tensor,
    centers: Tensor,
    covariances: Tensor,
    size: int | None = None,
    singular: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of an expectation on a plane or in a space, checked; the covariance may
    be singular if so told."""
    check_floating(mean=mean, covariance=covariance, centers=centers, covariances=covariances)
    if mean.dim() < 1 or size not in (None, mean.shape[-1]):
        raise ValueError(f"mean must be (..., {size or 'D'}), got {list(mean.shape)}")
    size = mean.shape[-1]
    if centers.dim() != 2 or centers.shape[1] != size:
        raise ValueError(f"centers must be (N, {size}), got {list(centers.shape)}")
    for name, tensor, shape in (
        ("covariance", covariance, tuple(covariance.shape[:-2])),
        ("covariances", covariances, (len(centers),)),
    ):
        if tuple(tensor.shape) != (*shape, size, size):
            raise ValueError(f"{name} must be {[*shape, size, size]}, got {list(tensor.shape)}")
    try:
        torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2])
    except RuntimeError:
        raise ValueError(
            "the leading dimensions of mean and covariance must be broadcastable, got "
            f"{list(mean.shape)} and {list(covariance.shape)}"
        ) from None
    for name, tensor in (("centers", centers), ("covariances", covariances)):
        check_constant(name, tensor)
    for name, tensor, flat in (
        ("covariance", covariance, singular),
        ("covariances", covariances, False),
    ):
        rounding = ROUNDING * tensor.abs().amax((-2, -1))
        uneven = (tensor - tensor.mT).abs().amax((-2, -1)) > rounding
        check_values(name, tensor, uneven, "symmetric")
        if looks(tensor):
            least = torch.linalg.eigvalsh(tensor.double()).amin(-1)
            bent = least < -rounding if flat else least <= 0
            check_values(name, tensor, bent, f"positive {'semi-' * flat}definite")
    return mean, covariance, centers, covariances
