"""Softmax of soft-capped scores, c tanh(x / c)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.masking import check_arguments
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.mappings.table import Mapping, Option, register
from multimax_fairseq.ops.checks import is_finite
from multimax_fairseq.ops.modulator import soft_capped


def softcap(
    scores: Tensor, dim: int = -1, mask: Tensor | None = None, *, cap: float = 50.0
) -> Tensor:
    """Return softmax probabilities of scores that a soft-cap keeps between -cap and cap.

        p = softmax(c tanh(x / c)), c = cap                        (Gemma 2, Riviere et al. 2024)

    Args:
        scores, dim: as `softmax`.
        mask: as `softmax`; a float mask is added to the capped scores.
        cap: above 0; the larger, the closer to softmax.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError, ValueError: as `softmax`; a cap that is not a finite number above 0.
    """
    check_arguments(scores, dim, mask)
    return softmax(SoftCap(cap)(scores), dim, mask)


def _option(default: float, help: str, setting: str) -> Option:
    return Option(
        "cap",
        default,
        float,
        requirement="a finite number above 0",
        is_valid=lambda cap: is_finite(cap) and cap > 0,
        help=help,
        setting=setting,
    )


CAP = _option(50.0, "soft-cap of attention scores", "softcap")


class SoftCap(nn.Module):
    """Soft-cap scores: `SoftCap(cap)(x)` is cap tanh(x / cap), in float32 or wider.

    Scores of inf and -inf stay as they are.

    Raises:
        ValueError: the cap is not a finite number above 0.
    """

    def __init__(self, cap: float = CAP.default) -> None:
        super().__init__()
        CAP.check(cap)
        self.soft_cap = float(cap)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the capped scores."""
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return soft_capped(wide, self.soft_cap)

    def extra_repr(self) -> str:
        return f"{self.soft_cap}"


def _build(num_heads: int | None, cap: float) -> dict[str, Any]:
    return {"modulator": SoftCap(cap)}


def _kernel(cap: float = CAP.default, modulator: SoftCap | None = None) -> dict[str, Any]:
    return {"modulator": modulator or SoftCap(cap)}


register(
    Mapping(
        name="softcap",
        label="soft-capped softmax",
        function=softcap,
        options=(CAP,),
        build=_build,
        modulated=True,
        kernel=_kernel,
        output_options=(_option(30.0, "soft-cap of the logits", "output_softcap"),),
    )
)
