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
    can_read_values,
    cast_gradient,
    check_constant,
    check_floating,
    check_values,
    moments_on_support,
    result_dtype,
)
from multimax_fairseq.ops.registration import differentiable_once

# Tolerance for a covariance that half precision has rounded: its distance from a symmetric and
# positive semi-definite matrix, relative to its largest entry.
ROUNDING = 1e-3


def continuous_softmax_nd(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> Tensor:
    """Return the expectations of Gaussian basis functions under a Gaussian density in D dimensions.

        r_j = E[N(t; center_j, covariance_j)], t ~ N(mean, covariance)
            = N(mean; center_j, covariance + covariance_j)     (Eq. 46, Martins et al. 2020)
    Equivalent to: torch.distributions.MultivariateNormal(centers, covariance[..., None, :, :] +
    covariances).log_prob(mean[..., None, :]).exp()

    Args:
        mean: (..., D), floating.
        covariance: (..., D, D), symmetric and positive semi-definite, leading dimensions
            broadcastable with mean's. Zeros give the density of one point.
        centers: (N, D), of the basis functions; constants, which get no gradient.
        covariances: (N, D, D), of the basis functions, positive definite.

    Returns:
        (..., N), in float32 or wider. Its gradients are covariances under the density (Eq. 18). The
        gradient with respect to the covariance is symmetric.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: shapes, dtypes or devices do not match; the basis requires a gradient; on the
            CPU, a covariance is not symmetric or not positive definite.
    """
    inputs = _checked(mean, covariance, centers, covariances, singular=True)
    return _Gaussian.apply(*inputs).to(result_dtype(mean, covariance))


def continuous_sparsemax_2d(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> Tensor:
    """Return the expectations of Gaussian basis functions under a truncated paraboloid on a plane.

        p(t) = [-lambda - (t - mean)^T covariance^-1 (t - mean) / 2]_+
        r_j = integral of p(t) N(t; center_j, covariance_j)    (Eq. 11 and App. G.3, Martins et al.)

    The support is an ellipse, which a linear map takes to the unit disk. There each basis function
    is rotated to its principal axes. The integral along the longer axis has a closed form. The one
    along the shorter axis is Gauss-Legendre quadrature where the function is not negligible. (The
    paper uses polar coordinates around the centre of the ellipse. There a narrow function far from
    the centre is a sharp peak in the angle.)

    Args:
        mean: (..., 2), floating.
        covariance: (..., 2, 2), symmetric and positive definite. It belongs to the score function,
            as in the paper; that of the density is covariance (pi^2 det(covariance))^(-1/4) / 3,
            see `match_covariance`.
        centers: (N, 2), of the basis functions; constants, which get no gradient.
        covariances: (N, 2, 2), of the basis functions, positive definite.

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
        """Return the expectations and, for the gradient, two factors of the exponent.

        These are the Cholesky factors L of the total covariances, (..., N, D, D), and
        L^-1 (center - mean), (..., N, D, 1).
        """
        mean, covariance, centers, covariances = (
            t.double() for t in (mean, covariance, centers, covariances)
        )
        factor = torch.linalg.cholesky(covariance[..., None, :, :] + covariances)
        offset = (centers - mean[..., None, :])[..., None]
        offset = torch.linalg.solve_triangular(factor, offset, upper=False)
        exponent = (
            factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + offset.square().sum((-2, -1)) / 2
        )
        return torch.exp(-exponent - mean.shape[-1] / 2 * math.log(2 * math.pi)), factor, offset

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, factor, offset = _Gaussian.terms(*ctx.saved_tensors)
        slope = torch.linalg.solve_triangular(factor.mT, offset, upper=True)
        grad_log = (grad * value)[..., None]
        grad_mean = (grad_log * slope.squeeze(-1)).sum(-2)
        curvature = slope @ slope.mT - torch.cholesky_inverse(factor)
        grad_covariance = (grad_log[..., None] / 2 * curvature).sum(-3)
        return *map(cast_gradient, (grad_mean, grad_covariance), ctx.saved_tensors), None, None


class _Paraboloid(torch.autograd.Function):
    """Expectations on the unit disk.

    With covariance = L L^T and t = mean + radius L u, the density of u is 2/pi (1 - |u|^2) there.
    """

    @staticmethod
    def forward(mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor) -> Tensor:
        _, area, mass, _, square = _disk_moments(mean, covariance, centers, covariances)
        trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)
        return 2 / math.pi * (mass - trace) / area[..., None]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled, _, mass, first, square = _disk_moments(*ctx.saved_tensors)
        grad_mean = (grad[..., None] * first).sum(-2, keepdim=True).mT
        # u u^T minus its mean over the disk, which is a quarter of the identity.
        centered = square - mass[..., None, None] * _identity_like(mass) / 4
        grad_covariance = (grad[..., None, None] * centered).sum(-3)
        grad_covariance = scaled.mT @ grad_covariance @ scaled / 2
        grad_mean = (scaled.mT @ grad_mean).squeeze(-1)
        return *map(cast_gradient, (grad_mean, grad_covariance), ctx.saved_tensors), None, None


def _identity_like(tensor: Tensor) -> Tensor:
    """Return the 2 x 2 identity in the dtype and on the device of a tensor."""
    return torch.eye(2, dtype=tensor.dtype, device=tensor.device)


def _disk_moments(
    mean: Tensor, covariance: Tensor, centers: Tensor, covariances: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the moments of each basis function over the disk.

    Returns:
        radius L^-1, (..., 2, 2); the area of the support relative to that of the disk, (...); the
        integrals of 1, u and u u^T times each basis function, (..., N), (..., N, 2) and
        (..., N, 2, 2).
    """
    mean, covariance, centers, covariances = (
        t.double() for t in (mean, covariance, centers, covariances)
    )
    factor = torch.linalg.cholesky(covariance)
    root = factor.diagonal(dim1=-2, dim2=-1).prod(-1)  # square root of the determinant
    radius = (2 / (math.pi * root).sqrt()).sqrt()  # its square is -2 lambda
    inverse = torch.linalg.solve_triangular(factor, _identity_like(factor), upper=False)
    inverse = inverse / radius[..., None, None]
    to_disk = inverse[..., None, :, :]
    variances, axes = torch.linalg.eigh(to_disk @ covariances @ to_disk.mT)
    center = axes.mT @ (to_disk @ (centers - mean[..., None, :])[..., None])
    (x0, y0), (dx, dy) = center.squeeze(-1).unbind(-1), variances.sqrt().unbind(-1)
    # x = sin(angle) along the shorter axis, so the bounds of y, +- cos(angle), are smooth.
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
    return inverse * radius[..., None, None] ** 2, radius**2 * root, total(mass), first, square


def _checked(
    mean: Tensor,
    covariance: Tensor,
    centers: Tensor,
    covariances: Tensor,
    size: int | None = None,
    singular: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the arguments of an expectation in several dimensions after checking them.

    `size` is the number of dimensions, if it is fixed; `singular` allows a singular covariance.
    """
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
    for name, tensor, may_be_singular in (
        ("covariance", covariance, singular),
        ("covariances", covariances, False),
    ):
        rounding = ROUNDING * tensor.abs().amax((-2, -1))
        is_asymmetric = (tensor - tensor.mT).abs().amax((-2, -1)) > rounding
        check_values(name, tensor, is_asymmetric, "symmetric")
        if can_read_values(tensor):
            smallest = torch.linalg.eigvalsh(tensor.double()).amin(-1)
            is_indefinite = smallest < -rounding if may_be_singular else smallest <= 0
            definite = f"positive {'semi-' * may_be_singular}definite"
            check_values(name, tensor, is_indefinite, definite)
    return mean, covariance, centers, covariances
