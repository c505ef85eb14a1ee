"""Sigmoid attention: weights that are not normalised (Ramapuram et al. 2025)."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from multimax_fairseq.mappings.masking import masked
from multimax_fairseq.mappings.registry import Mapping, Option, register
from multimax_fairseq.ops.checks import check_number, is_finite
from multimax_fairseq.ops.masks import key_counts
from multimax_fairseq.ops.row_function import RowFunction


def sigmoid(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, bias: float | None = None
) -> Tensor:
    """Return sigmoid weights; the weight of a key does not depend on the other keys.

        p_i = 1 / (1 + exp(-x_i - b)), b = -log(n), n keys             (Ramapuram et al. 2025)
    Equivalent to: torch.sigmoid(scores - math.log(n)).masked_fill(mask, 0)

    Args:
        scores, dim, mask: as `softmax`; n counts what is not excluded, as `key_counts`.
        bias: b; None is -log(n), at which scores of 0 give a row that sums to about one.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: the bias is not a number.
        ValueError: it is not finite; as `softmax`.
    """
    if bias is not None:
        check_number("bias", bias)
    wide, excluded = masked(scores, dim, mask)
    added = -key_counts(scores, dim, mask).log() if bias is None else bias
    weights = (wide + added).sigmoid()
    return weights if excluded is None else weights.masked_fill(excluded, 0.0)


def _kernel(bias: float | None = None) -> dict[str, Any] | None:
    if bias is not None and not is_finite(bias):
        return None
    parameter = math.nan if bias is None else float(bias)
    return {"row": RowFunction("sigmoid", parameter, needs_exclusion_mask=True)}


register(
    Mapping(
        name="sigmoid",
        label="sigmoid",
        function=sigmoid,
        options=(
            Option(
                "bias",
                None,
                float,
                requirement="a finite number",
                is_valid=lambda bias: bias is None or is_finite(bias),
                help="fixed bias of sigmoid; by default minus the logarithm of the number of keys",
                setting="sigmoid_bias",
            ),
        ),
        sums_to_one=False,
        kernel=_kernel,
    )
)
