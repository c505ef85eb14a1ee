"""Softmax of soft-capped scores, c tanh((x + shift) / width)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.masking import at_least_float32, check_arguments
from multimax_fairseq.mappings.registry import Mapping, Option, register, yes_or_no
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
LEARN = Option(
    "learn_softcap",
    False,
    help="learn c, b and w of the soft-cap c tanh((x + b) / w), one of each per layer",
    setting="learn_softcap",
    **yes_or_no(),
)


class SoftCap(nn.Module):
    """Soft-cap scores: the module returns cap tanh((x + shift) / width), in float32 or wider.

    Scores of inf and -inf stay as they are. The default width is the cap.

    Args:
        cap, shift, width: the initial values if they are learned.
        learned: learn all three.

    Parameters: `log_cap`, `shift` and `log_width`, scalars, or None if they are fixed.

    Raises:
        ValueError: cap or width is not a finite number above 0, or shift is not finite; `learned`
            is not a bool.
    """

    log_cap: Tensor | None
    shift: Tensor | None
    log_width: Tensor | None

    def __init__(
        self,
        cap: float = CAP.default,
        shift: float = 0.0,
        width: float | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__()
        for option, value in ((CAP, cap), (SHIFT, shift), (WIDTH, width), (LEARN, learned)):
            option.check(value)
        self.start = float(cap), float(shift), float(cap if width is None else width)
        cap, shift, width = self.start
        numbers = {"log_cap": math.log(cap), "shift": shift, "log_width": math.log(width)}
        for name, number in numbers.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(number)) if learned else None)

    @property
    def soft_cap(self) -> tuple[float | Tensor, float | Tensor, float | Tensor]:
        """Cap, shift and width."""
        if self.log_cap is None or self.shift is None or self.log_width is None:
            return self.start
        return self.log_cap.exp(), self.shift, self.log_width.exp()

    def forward(self, scores: Tensor) -> Tensor:
        """Return the capped scores."""
        wide = at_least_float32(scores)
        if self.log_cap is None:
            return soft_capped(wide, *self.start)
        return soft_capped(wide, *(torch.as_tensor(x).to(wide) for x in self.soft_cap))

    def extra_repr(self) -> str:
        return "learned" if self.log_cap is not None else ", ".join(map(str, self.start))


def _build(num_heads: int | None, learn_softcap: bool = False, **options: Any) -> dict[str, Any]:
    return {"modulator": SoftCap(**options, learned=learn_softcap)}


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
        options=(CAP, SHIFT, WIDTH, LEARN),
        build=_build,
        modulated=True,
        kernel=_kernel,
        output_options=(
            _option(30.0, "soft-cap of the logits", "output_softcap"),
            SHIFT,
            WIDTH,
            LEARN,
        ),
    )
)
