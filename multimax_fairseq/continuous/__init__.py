"""Attention to a density over positions: expectations, their gradients, and value functions."""

from multimax_fairseq.continuous.expectation import continuous_softmax, continuous_sparsemax
from multimax_fairseq.continuous.many_dimensions import (
    continuous_softmax_nd,
    continuous_sparsemax_2d,
)
from multimax_fairseq.continuous.moments import match_covariance, match_variance

__all__ = [
    "continuous_softmax",
    "continuous_softmax_nd",
    "continuous_sparsemax",
    "continuous_sparsemax_2d",
    "match_covariance",
    "match_variance",
]
