"""Softmax of soft-capped scores, c tanh((x + shift) / width)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from multimax_fairseq.mappings.masking import at_least_float32, check_arguments
from multimax_fairseq.mappings.registry import Mapping, Option, register
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.ops.checks import is_finite
from multimax_fairseq.ops.modulator import soft_capped


def softcap(
    scores: Tensor,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    cap: float = 50.0,
    shift: float = 0.0,
    width: float | None = None,
) -> Tensor:
    """Return softmax probabilities of scores that a soft-cap keeps between -cap and cap.

        p = softmax(c tanh((x + shift) / width)), c = cap          (Gemma 2, Riviere et al. 2024)

    The logits 23 sigmoid((x + 5) / 7.5) of modded-nanogpt give the same probabilities as cap=11.5,
    shift=5, width=15: they differ by a constant, which softmax ignores.

    Args:
        scores, dim: as `softmax`.
        mask: as `softmax`; a float mask is added to the capped scores.
        cap: above 0; the larger, the closer to softmax.
        shift: added to the scores; above 0, high scores are capped earlier than low ones.
        width: above 0; default cap, so that small scores stay as they are.

    Returns:
        The shape of scores, in float32 or wider.

    Raises:
        TypeError, ValueError: as `softmax`; as `SoftCap`.
    """
    check_arguments(scores, dim, mask)
    return softmax(SoftCap(cap, shift, width)(scores), dim, mask)


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
SHIFT = Option(
    "shift",
    0.0,
    float,
    requirement="a finite number",
    is_valid=is_finite,
    help="shift b of the soft-cap c tanh((x + b) / w), for attention and for the output layer",
)
WIDTH = Option(
    "width",
    None,
    float,
    requirement="a finite number above 0, or None for the cap",
    is_valid=lambda width: width is None or (is_finite(width) and width > 0),
    help="width w of the soft-cap c tanh((x + b) / w); by default the cap c",
)


class SoftCap(nn.Module):
    """Soft-cap scores: the module returns cap tanh((x + shift) / width), in float32 or wider.

    Scores of inf and -inf stay as they are. The default width is the cap.

    Raises:
        ValueError: cap or width is not a finite number above 0, or shift is not finite.
    """

    def __init__(
        self, cap: float = CAP.default, shift: float = 0.0, width: float | None = None
    ) -> None:
        super().__init__()
        for option, value in ((CAP, cap), (SHIFT, shift), (WIDTH, width)):
            option.check(value)
        self.soft_cap = float(cap), float(shift), float(cap if width is None else width)

    def forward(self, scores: Tensor) -> Tensor:
        """Return the capped scores."""
        return soft_capped(at_least_float32(scores), *self.soft_cap)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.soft_cap))


def _build(num_heads: int | None, **options: Any) -> dict[str, Any]:
    return {"modulator": SoftCap(**options)}


def _kernel(
    cap: float = CAP.default,
    shift: float = 0.0,
    width: float | None = None,
    modulator: SoftCap | None = None,
) -> dict[str, Any]:
    return {"modulator": modulator or SoftCap(cap, shift, width)}


register(
    Mapping(
        name="softcap",
        label="soft-capped softmax",
        function=softcap,
        options=(CAP, SHIFT, WIDTH),
        build=_build,
        modulated=True,
        kernel=_kernel,
        output_options=(
            _option(30.0, "soft-cap of the logits", "output_softcap"),
            SHIFT,
            WIDTH,
        ),
    )
)
