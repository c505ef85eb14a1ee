"""Densities of compact support over time: alpha-entmax of a score function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multimax_fairseq.continuous.expectation import (
    NODES,
    REACH,
    WEIGHTS,
    checked_bases,
    result_dtype,
)


@dataclass(frozen=True)
class Density:
    """A density of a location-scale family: p(t) = profile(|t - mean| / half) / half.

    It is the alpha-entmax of a score function f that falls off from the mean,
    p(t) = [(alpha - 1) (f(t) - lambda)]_+^(1 / (alpha - 1))      (Eq. 7, Martins et al. 2020)

    Args:
        name: in words.
        alpha: of alpha-entmax.
        degree, constant: half the width of the support is (constant * scale)^(1 / degree). f is
            -(t - mean)^2 / (2 scale); for the triangular density -|t - mean| / scale.
        profile: density of (t - mean) / half on [0, 1]; on [-1, 0] it is the mirror image.
    """

    name: str
    alpha: float
    degree: float
    constant: float
    profile: Callable[[Tensor], Tensor]

    def half_width(self, scale: Tensor) -> Tensor:
        """Return half the width of the support, the shape of scale."""
        return (self.constant * scale) ** (1 / self.degree)

    def support(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the support, each of the broadcast shape."""
        half = self.half_width(scale)
        return mean - half, mean + half

    def __call__(self, time: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the density at times; the arguments broadcast."""
        half = self.half_width(scale)
        return self.profile(((time - mean).abs() / half).clamp(max=1)) / half

    def expectation(self, mean: Tensor, scale: Tensor, centers: Tensor, widths: Tensor) -> Tensor:
        """Return the expectations of Gaussian basis functions, (..., N).

        Gauss-Legendre quadrature on each half of the support, where a basis function is not
        negligible. The gradients are the generalised covariances of Eq. 18; second-order gradients
        are right too.

        Args, Raises: as `continuous_sparsemax`, with the scale as its variance; above 0.
        """
        mean, scale, centers, widths = checked_bases(mean, scale, centers, widths)
        dtype = result_dtype(mean, scale)
        mean, scale = (t.double()[..., None, None] for t in (mean, scale))
        at, width = (t.double()[:, None] for t in (centers, widths))
        half = self.half_width(scale)
        node, weight = NODES.to(mean.device), WEIGHTS.to(mean.device)
        total = torch.zeros((), dtype=torch.float64, device=mean.device)
        for side in (-1, 1):
            # In (time - mean) / half the ends of the support are fixed, so no derivative has a
            # boundary term.
            with torch.no_grad():
                low, high = (
                    ((at + end * REACH * width - mean) / half).clamp(min(side, 0), max(side, 0))
                    for end in (-1, 1)
                )
                span = (high - low) / 2
                points = low + span * (1 + node)
                measure = span * weight * self.profile(points.abs())
            distance = (mean + half * points - at) / width
            basis = torch.exp(-(distance**2) / 2) / (math.sqrt(2 * math.pi) * width)
            total = total + (measure * basis).sum(-1)
        return total.to(dtype)


def _truncated_power(name: str, power: int) -> Density:
    """Return the density (1 - x^2)^power, for which alpha = 1 + 1 / power."""
    mass = math.sqrt(math.pi) * math.gamma(power + 1) / math.gamma(power + 1.5)
    return Density(
        name,
        alpha=1 + 1 / power,
        degree=2 + 1 / power,
        constant=2 * power / mass ** (1 / power),
        profile=lambda x: (1 - x**2) ** power / mass,
    )


TRUNCATED_PARABOLA = _truncated_power("truncated parabola", 1)
BIWEIGHT = _truncated_power("biweight", 2)
TRIWEIGHT = _truncated_power("triweight", 3)
TRIANGULAR = Density("triangular", alpha=2, degree=2, constant=1, profile=lambda x: 1 - x)
