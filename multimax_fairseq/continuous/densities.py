"""Location-scale families of densities over time: alpha-entmax of a score function."""

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

# The quadrature of an infinite support ends here, where exp(-x) is negligible in double precision.
TAIL = 40.0


@dataclass(frozen=True)
class Density:
    """A density of a location-scale family: p(t) = profile(|t - mean| / unit) / unit.

    It is the alpha-entmax of a score function f that falls off from the mean,
    p(t) = [(alpha - 1) (f(t) - lambda)]_+^(1 / (alpha - 1))      (Eq. 7, Martins et al. 2020)
    and for alpha = 1, softmax, p(t) = exp(f(t) - lambda).

    Args:
        name: in words.
        alpha: of alpha-entmax.
        degree, constant: the unit is (constant * scale)^(1 / degree). f is
            -(t - mean)^2 / (2 scale); for the triangular and Laplace densities -|t - mean| / scale.
        profile: density of (t - mean) / unit on [0, end]; the other half is its mirror image.
        end: half the width of the support in units.
    """

    name: str
    alpha: float
    degree: float
    constant: float
    profile: Callable[[Tensor], Tensor]
    end: float = 1.0

    def unit(self, scale: Tensor) -> Tensor:
        """Return the unit of the profile's argument, the shape of scale."""
        return (self.constant * scale) ** (1 / self.degree)

    def support(self, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of the support, each of the broadcast shape."""
        half = self.end * self.unit(scale)
        return mean - half, mean + half

    def __call__(self, time: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Return the density at times; the arguments broadcast."""
        unit = self.unit(scale)
        return self.profile(((time - mean).abs() / unit).clamp(max=self.end)) / unit

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
        unit, end = self.unit(scale), min(self.end, TAIL)
        node, weight = NODES.to(mean.device), WEIGHTS.to(mean.device)
        total = torch.zeros((), dtype=torch.float64, device=mean.device)
        for side in (-1, 1):
            # In (time - mean) / unit the ends of the support are fixed, so no derivative has a
            # boundary term.
            with torch.no_grad():
                limits = sorted((0, side * end))
                low, high = (
                    ((at + sign * REACH * width - mean) / unit).clamp(*limits) for sign in (-1, 1)
                )
                span = (high - low) / 2
                points = low + span * (1 + node)
                measure = span * weight * self.profile(points.abs())
            distance = (mean + unit * points - at) / width
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
LAPLACE = Density(
    "Laplace", alpha=1, degree=1, constant=1, profile=lambda x: torch.exp(-x) / 2, end=math.inf
)
