"""A sentence as a function of time: positions of its tokens and the regression through them."""

from __future__ import annotations

import torch
from torch import Tensor

from multimax_fairseq.continuous.expectation import check_floating, gaussian_basis
from multimax_fairseq.ops.checks import check_number, check_tensor


def positions(tokens: Tensor) -> Tensor:
    """Return the positions of tokens in [0, 1]: token l of L is at l / L; padding does not count.

    Args:
        tokens: (..., S), bool: True is a token.

    Returns:
        (..., S), float64; padding before the first token gets 0, after the last one 1.

    Raises:
        TypeError: tokens is not a tensor.
        ValueError: tokens is not bool, or has no dimension.
    """
    check_tensor("tokens", tokens)
    if tokens.dim() < 1 or tokens.dtype != torch.bool:
        raise ValueError(
            f"tokens must be bool (..., S), True for a token, got {tokens.dtype} "
            f"{list(tokens.shape)}"
        )
    count = tokens.cumsum(-1)
    return count.double() / tokens.sum(-1, keepdim=True).clamp(min=1)


def ridge_regression(tokens: Tensor, centers: Tensor, widths: Tensor, ridge: float) -> Tensor:
    """Return the linear map from tokens to the coefficients of basis functions.

        G = F^T (F F^T + ridge I)^-1, F_jl = N(t_l; center_j, width_j^2)    (Eq. 16, Martins et al.)
    The value function of values V, (..., S, D), is then t -> (G^T V)^T psi(t). All sentences are
    solved at once in float64; the result depends only on their lengths.

    Args:
        tokens: (..., S), bool: True is a token; `positions` gives its time.
        centers, widths: (N,), of the basis functions, as `continuous_softmax`.
        ridge: above 0.

    Returns:
        (..., S, N), float64, 0 for padding.

    Raises:
        TypeError: an argument is not a tensor, or the ridge not a number.
        ValueError: shapes, dtypes or devices do not match; the ridge is not above 0.
    """
    check_number("ridge", ridge)
    if not ridge > 0:
        raise ValueError(f"ridge must be above 0, got {ridge}")
    check_floating(centers=centers, widths=widths)
    basis = gaussian_basis(positions(tokens), centers.double(), widths.double())
    basis = basis * tokens[..., None]
    square = basis.mT @ basis
    square.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor, _ = torch.linalg.cholesky_ex(square)  # does not wait for a GPU's error code
    return torch.cholesky_solve(basis.mT, factor).mT
