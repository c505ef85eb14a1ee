"""Softmax that sharpens at evaluation if it is spread out (Velickovic et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.mappings.masking import shift_and_scale
from multimax_fairseq.mappings.registry import Mapping, register
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.ops.checks import check_flag
from multimax_fairseq.ops.row_function import RowFunction

# Coefficients of P, which gives 1 / temperature from the entropy; highest power first. Figure 5 of
# Velickovic et al. 2024.
TEMPERATURE_FIT = (-0.037, 0.481, -2.3, 4.917, -1.791)


def adaptive_temperature(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, training: bool = False
) -> Tensor:
    """Return softmax probabilities at a temperature that falls with the entropy of softmax.

        p = softmax(beta x), beta = max(P(H), 1), H the entropy of softmax(x)
                                                                       (Velickovic et al. 2024)
    P is the paper's polynomial, -0.037 H^4 + 0.481 H^3 - 2.3 H^2 + 4.917 H - 1.791. For
    H <= 0.5 the paper keeps temperature 1; P(H) is below 1 there, so the maximum has the
    same effect. The mapping is for models that were trained with softmax.

    Args:
        scores, dim, mask: as `softmax`; a float mask counts for H and is not multiplied.
        training: True is softmax.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError: training is not a bool; as `softmax`.
        ValueError: as `softmax`.
    """
    check_flag("training", training)
    probs = softmax(scores, dim, mask)
    if training:
        return probs
    entropy = -(probs * torch.where(probs > 0, probs, 1.0).log()).sum(dim, keepdim=True)
    fitted = torch.zeros_like(entropy)
    for coefficient in TEMPERATURE_FIT:
        fitted = fitted * entropy + coefficient
    return softmax(shift_and_scale(scores, fitted.clamp(min=1.0), dim, mask), dim, mask)


def _kernel(training: bool = False) -> dict[str, Any] | None:
    if not isinstance(training, bool):
        return None
    if training:
        return {}  # softmax
    return {"row": RowFunction("adaptive_temperature", needs_exclusion_mask=True)}


register(
    Mapping(
        name="adaptive_temperature",
        label="softmax at an adaptive temperature",
        function=adaptive_temperature,
        training=True,
        kernel=_kernel,
    )
)
