"""Moment matching: densities of compact support with a given variance or covariance."""

from __future__ import annotations

import math

from torch import Tensor

from multimax_fairseq.continuous.expectation import check_floating


def match_variance(variance: Tensor) -> Tensor:
    """Return the `variance` to pass to `continuous_sparsemax` for a density of this variance.

        2/3 (5 variance)^(3/2)

    A truncated parabola with the argument s has the variance (3/2 s)^(2/3) / 5.

    Args:
        variance: floating, above 0.

    Returns:
        The shape and dtype of variance.

    Raises:
        TypeError: variance is not a tensor.
        ValueError: variance is not floating.
    """
    check_floating(variance=variance)
    return 2 / 3 * (5 * variance) ** 1.5


def match_covariance(covariance: Tensor) -> Tensor:
    """Return the `covariance` to pass to `continuous_sparsemax_2d` for a density of this one.

        9 pi det(covariance)^(1/2) covariance

    A truncated paraboloid with the argument S has the covariance (pi^2 det(S))^(-1/4) / 3 S.

    Args:
        covariance: (..., 2, 2), floating, symmetric and positive definite.

    Returns:
        The shape and dtype of covariance.

    Raises:
        TypeError: covariance is not a tensor.
        ValueError: covariance is not floating, or of another shape.
    """
    check_floating(covariance=covariance)
    if tuple(covariance.shape[-2:]) != (2, 2):
        raise ValueError(f"covariance must be (..., 2, 2), got {list(covariance.shape)}")
    (a, b), (c, d) = (row.unbind(-1) for row in covariance.unbind(-2))
    return 9 * math.pi * (a * d - b * c).sqrt()[..., None, None] * covariance
