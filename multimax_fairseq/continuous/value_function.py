"""A sentence as a function of time: where its tokens lie, and the regression through them."""

from __future__ import annotations

import torch
from torch import Tensor

from multimax_fairseq.continuous.expectation import check_floating, gaussian_basis
from multimax_fairseq.ops.checks import check_number, check_tensor


def positions(tokens: Tensor) -> Tensor:
    """Return where tokens lie in [0, 1]: the l-th of L at l / L, whatever is padded and where.

    Args:
        tokens: (..., S), bool: True is a token.

    Returns:
        (..., S), float64; 0 in front of the first token.

    Raises:
        TypeError: tokens that are no tensor.
        ValueError: tokens that are not bool, or have no dimension.
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
    The value function of values V, (..., S, D), is then t -> (G^T V)^T psi(t). It is solved in
    float64 for all sentences at once; it depends on their lengths alone.

    Args:
        tokens: (..., S), bool: True is a token, at the time that `positions` says.
        centers, widths: (N,), of the basis functions, as `continuous_softmax`.
        ridge: above 0.

    Returns:
        (..., S, N), float64, 0 for what is no token.

    Raises:
        TypeError: something that is no tensor; a ridge that is no number.
        ValueError: shapes, dtypes or devices that do not fit; a ridge that is not above 0.
    """
    check_number("ridge", ridge)
    if not ridge > 0:
        raise ValueError(f"ridge must be above 0, got {ridge}")
    check_floating(centers=centers, widths=widths)
    basis = gaussian_basis(positions(tokens), centers.double(), widths.double())
    basis = basis * tokens[..., None]
    square = basis.mT @ basis
    square.diagonal(dim1=-2, dim2=-1).add_(ridge)
    factor, _ = torch.linalg.cholesky_ex(square)  # without a wait for a GPU to say that it could
    return torch.cholesky_solve(basis.mT, factor).mT
