"""Moment matching: a density has the mean and covariance of a discrete distribution."""

import math

import numpy as np
import pytest
import torch

from multimax_fairseq.continuous import (
    continuous_softmax,
    continuous_softmax_nd,
    continuous_sparsemax,
    continuous_sparsemax_2d,
    match_covariance,
    match_variance,
)
from multimax_fairseq.continuous.value_function import positions

TOLERANCE = 1e-8  # of quadrature in float64
NODES, WEIGHTS = (torch.from_numpy(x) for x in np.polynomial.legendre.leggauss(64))


def discrete(dimensions):
    """Return points in the unit cube, (S, D), and probabilities, (S,)."""
    generator = torch.Generator().manual_seed(dimensions)
    if dimensions == 1:
        points = positions(torch.ones(20, dtype=torch.bool))[:, None]
    else:
        steps = (torch.arange(14, dtype=torch.float64) + 0.5) / 14
        points = torch.cartesian_prod(steps, steps)
    scores = torch.randn(len(points), generator=generator, dtype=torch.float64)
    return points, (3 * scores).softmax(0)


def moments(points, weights):
    """Return the mean, (D,), and the covariance, (D, D), of weighted points."""
    mean = weights @ points
    off = points - mean
    return mean, (weights[:, None] * off).mT @ off


def parabola(mean, scale):
    """Return points and weights of a quadrature of [-lambda - (t - mean)^2 / (2 scale)]_+."""
    half = (3 / 2 * scale) ** (1 / 3)
    time = mean + half * NODES
    height = (half**2 - (time - mean) ** 2) / (2 * scale)
    return time[:, None], half * WEIGHTS * height


def paraboloid(mean, scale):
    """The same for [-lambda - (t - mean)^T scale^-1 (t - mean) / 2]_+, in polar coordinates."""
    factor = torch.linalg.cholesky(scale)
    size = factor.det()
    reach = (4 / (math.pi * size)) ** 0.25
    radius, angle = reach * (1 + NODES) / 2, torch.arange(64) * (2 * math.pi / 64)
    radius, angle = (x.flatten() for x in torch.meshgrid(radius, angle.double(), indexing="ij"))
    unit = torch.stack([radius * angle.cos(), radius * angle.sin()], -1)
    weight = (reach / 2 * WEIGHTS * 2 * math.pi / 64).repeat_interleave(64)
    return mean + unit @ factor.mT, weight * radius * size * (reach**2 - radius**2) / 2


def gaussian(mean, covariance):
    """The same for a normal density, over ten standard deviations."""
    factor = torch.linalg.cholesky(covariance)
    axis = 10 * NODES.double()
    unit = torch.cartesian_prod(*[axis] * len(mean)).reshape(-1, len(mean))
    weight = torch.cartesian_prod(*[10 * WEIGHTS] * len(mean)).reshape(-1, len(mean)).prod(-1)
    height = torch.exp(-unit.square().sum(-1) / 2) / (2 * math.pi) ** (len(mean) / 2)
    return mean + unit @ factor.mT, weight * height


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("density", ["softmax", "sparsemax"])
def test_match_covariance_reproduces_the_discrete_moments(dimensions, density):
    mean, covariance = moments(*discrete(dimensions))

    if density == "softmax":
        points, weights = gaussian(mean, covariance)
    elif dimensions == 1:
        points, weights = parabola(mean, match_variance(covariance.squeeze()))
    else:
        points, weights = paraboloid(mean, match_covariance(covariance))

    assert weights.sum().item() == pytest.approx(1, abs=TOLERANCE)
    found = moments(points, weights)
    torch.testing.assert_close(found[0], mean, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(found[1], covariance, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("density", ["softmax", "sparsemax"])
def test_continuous_attention_equals_quadrature(dimensions, density):
    mean, covariance = moments(*discrete(dimensions))
    centers = torch.tensor([[0.2] * dimensions, [0.5, 0.7][:dimensions]]).double()
    spread = 0.3
    scale = covariance
    if density == "sparsemax":
        scale = match_covariance(scale) if dimensions == 2 else match_variance(scale)
    by = {
        ("softmax", 1): gaussian,
        ("softmax", 2): gaussian,
        ("sparsemax", 1): lambda mean, scale: parabola(mean, scale.squeeze()),
        ("sparsemax", 2): paraboloid,
    }
    points, weights = by[density, dimensions](mean, scale)
    distance = (points[:, None] - centers).square().sum(-1) / spread**2
    basis = torch.exp(-distance / 2) / (math.sqrt(2 * math.pi) * spread) ** dimensions

    if dimensions == 1:
        function = continuous_softmax if density == "softmax" else continuous_sparsemax
        found = function(
            mean[0], scale[0, 0], centers[:, 0], torch.full((2,), spread, dtype=torch.float64)
        )
    else:
        function = continuous_softmax_nd if density == "softmax" else continuous_sparsemax_2d
        found = function(mean, scale, centers, spread**2 * torch.eye(2).double().expand(2, 2, 2))

    # continuous_sparsemax_2d has a quadrature of its own.
    torch.testing.assert_close(found, weights @ basis, rtol=0, atol=5 * TOLERANCE)


def test_match_covariance_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"covariance must be \(..., 2, 2\), got \[3, 3\]"):
        match_covariance(torch.eye(3))
