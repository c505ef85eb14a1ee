"""MultiMax: softmax of modulated scores (Zhou et al. 2024)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from multimax_fairseq.mappings.length_scale import LengthScale
from multimax_fairseq.mappings.masking import (
    check_arguments,
    check_scores,
    check_value,
    masked,
    scale_scores,
)
from multimax_fairseq.mappings.registry import (
    Mapping,
    Option,
    chosen_from,
    heads_option,
    register,
    yes_or_no,
)
from multimax_fairseq.mappings.sinks import SINK, Sink, softmax_with_sink
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.ops.attention import length_factor
from multimax_fairseq.ops.checks import is_finite, is_whole
from multimax_fairseq.ops.masks import key_counts
from multimax_fairseq.ops.modulator import modulate

# Scores to modulated scores; in practice a `Modulator`.
ScoreFunction = Callable[[Tensor], Tensor]


def multimax(
    x: Tensor,
    modulator: ScoreFunction,
    dim: int = -1,
    mask: Tensor | None = None,
    *,
    sink: float | Tensor | None = None,
    outer_scale: float | Tensor | None = None,
) -> Tensor:
    """Return MultiMax probabilities: softmax of the modulated scores.

        p_i = exp(sigma(x_i)) / sum_k exp(sigma(x_k))          (Eq. 4 and 6, Zhou et al. 2024)
    Equivalent to: torch.softmax(modulator(x).masked_fill(mask, -inf), dim)

    With an outer scale s, the scores are s log(n) sigma(x) for n keys: `ssmax` of sigma(x).

    Args:
        x: scores, any shape and floating dtype.
        modulator: a `Modulator`, or any function from scores to scores of the same shape.
        dim: the dimension that sums to one.
        mask: as `softmax`; a float mask is added to the modulated scores.
        sink: as `softmax_with_sink`, for the modulated scores; None for no sink.
        outer_scale: as the length_scale of `ssmax`; None for no scale.

    Returns:
        The shape of x, in float32 or wider.

    Raises:
        TypeError: the modulator is not callable; as `softmax_with_sink` and `ssmax`.
        ValueError: as `softmax`; as `softmax_with_sink` and `ssmax`.
    """
    # Mask after the modulator: sigma(-inf) need not be -inf.
    modulated = _modulated(x, modulator)
    if outer_scale is not None:
        check_arguments(x, dim, mask)
        check_value("outer_scale", outer_scale, x, dim)
        factor = length_factor(key_counts(x, dim, mask), outer_scale)
        modulated = scale_scores(modulated, factor, mask)
    if sink is None:
        return softmax(modulated, dim, mask)
    return softmax_with_sink(modulated, dim, mask, sink=sink)


def log_multimax(
    x: Tensor, modulator: ScoreFunction, dim: int = -1, mask: Tensor | None = None
) -> Tensor:
    """Return the logarithm of `multimax`, with -inf where the mask excludes.

    Equivalent to: torch.log_softmax(modulator(x).masked_fill(mask, -inf), dim)

    Args, Raises: as `multimax`, but no sink and no outer scale.

    Returns:
        The shape of x, in float32 or wider; a fully masked row is -inf.
    """
    wide, excluded = masked(_modulated(x, modulator), dim, mask)
    log_probs = wide.log_softmax(dim)
    return log_probs if excluded is None else log_probs.masked_fill(excluded, -torch.inf)


def _modulated(x: Tensor, modulator: ScoreFunction) -> Tensor:
    if not callable(modulator):
        raise TypeError(
            f"modulator must be a Modulator or a function of the scores, got {modulator!r}"
        )
    check_scores(x)
    modulated = modulator(x)
    if not isinstance(modulated, Tensor) or modulated.shape != x.shape:
        got = list(modulated.shape) if isinstance(modulated, Tensor) else modulated
        raise ValueError(f"modulator must keep the shape {list(x.shape)} of scores, gave {got}")
    return modulated


OPTIONS = (
    Option(
        "order",
        2,
        int,
        requirement="1 or 2",
        is_valid=lambda order: is_whole(order) and order <= 2,
        help="polynomial order of the modulators: 1 or 2",
        setting="multimax_order",
    ),
    Option(
        "terms",
        "both",
        help="modulate low scores, high scores, or both",
        setting="multimax_terms",
        **chosen_from(("both", "low", "high")),
    ),
    Option(
        "init_std",
        0.02,
        float,
        requirement="a finite number, 0 or more",
        is_valid=lambda std: is_finite(std) and std >= 0,
        help="standard deviation of the modulators at the start; 0 is softmax",
        remark="0 is softmax",
        setting="multimax_init_std",
    ),
    Option(
        "monotone",
        False,
        help="make the modulators non-decreasing: slope one below the lower turning point, "
        "constant above the upper one",
        setting="multimax_monotone",
        **yes_or_no(),
    ),
)
LENGTH_SCALE = Option(
    "length_scale",
    False,
    help="multiply the modulated scores by s log(n); s is learned and starts at 0.3, n is the "
    "number of keys",
    setting="multimax_length_scale",
    **yes_or_no(),
)


class Modulator(nn.Module):
    """Learnable modulator of scores: `modulator(x)` is sigma(x) of `ops.modulator.modulate`.

    The parameters are offsets from the identity, drawn from a normal distribution truncated at
    two standard deviations. At zero the mapping is softmax, and weight decay pulls towards it.

    Args:
        order: number of polynomial terms on each side, 1 or 2.
        terms: "both", or only the "low" or only the "high" term.
        num_heads: None shares the parameters; else each head has its own, and scores carry the
            heads in dimension -3.
        init_std: standard deviation at the start; 0 is exactly softmax.
        monotone: continue sigma with slope one below its lower turning point, and as a constant
            above its upper one; see `modulate`.

    Parameters: `low_coefficient`, `low_threshold`, `high_coefficient`, `high_threshold`, each
    (order,) or (num_heads, order), or None if `terms` leaves that side out.

    Raises:
        ValueError: an argument out of its range.
    """

    low_coefficient: Tensor | None
    low_threshold: Tensor | None
    high_coefficient: Tensor | None
    high_threshold: Tensor | None

    def __init__(
        self,
        order: int = 2,
        terms: str = "both",
        num_heads: int | None = None,
        init_std: float = 0.02,
        monotone: bool = False,
    ) -> None:
        super().__init__()
        if num_heads is not None and not is_whole(num_heads):
            raise ValueError(
                "the modulator's number of heads must be a whole number of at least 1, or None "
                f"to share the scalars among all heads, got {num_heads!r}"
            )
        for option, value in zip(OPTIONS, (order, terms, init_std, monotone), strict=True):
            option.check(value, f"the modulator's {option.name}")
        self.order, self.terms, self.num_heads, self.init_std = order, terms, num_heads, init_std
        self.monotone = monotone
        shape = (order,) if num_heads is None else (num_heads, order)
        for side in ("low", "high"):
            for name in (f"{side}_coefficient", f"{side}_threshold"):
                value = nn.Parameter(torch.empty(shape)) if terms in ("both", side) else None
                self.register_parameter(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new parameters."""
        for parameter in self.parameters():
            if self.init_std == 0:
                nn.init.zeros_(parameter)
            else:
                bound = 2 * self.init_std
                nn.init.trunc_normal_(parameter, std=self.init_std, a=-bound, b=bound)

    def softmax_state(self) -> dict[str, Tensor]:
        """Return the state dict at which sigma is the identity, so that MultiMax is softmax."""
        return {name: torch.zeros_like(value) for name, value in self.state_dict().items()}

    @classmethod
    def from_values(
        cls,
        t_b: Sequence[float] | None,
        t_d: Sequence[float] | None,
        b: Sequence[float] | None,
        d: Sequence[float] | None,
    ) -> Self:
        """Return a modulator with the paper's parameters, as in its Tables 7 and 8.

        Args:
            t_b, b: inverse temperature and threshold of the low term, one entry per order, or
                (heads, order); None for both leaves the term out.
            t_d, d: the same for the high term.

        Returns:
            A float64 module.

        Raises:
            ValueError: one of a pair is missing, shapes differ, no terms, or numbers that are not
                finite.
        """
        values: dict[str, Tensor] = {}
        for side, temperature, threshold in (("low", t_b, b), ("high", t_d, d)):
            if (temperature is None) != (threshold is None):
                raise ValueError(f"the {side} term needs both its temperature and its threshold")
            if temperature is not None and threshold is not None:
                offset = _numbers(f"the {side} term's temperature", temperature) - 1
                values[f"{side}_coefficient"] = -offset if side == "low" else offset
                values[f"{side}_threshold"] = _numbers(f"the {side} term's threshold", threshold)
        shapes = {tuple(value.shape) for value in values.values()}
        if len(shapes) != 1 or len(shape := shapes.pop()) not in (1, 2):
            raise ValueError(
                "the parameters must share one shape, (order,) or (heads, order), got "
                f"{[tuple(value.shape) for value in values.values()]}"
            )
        terms = "both" if len(values) == 4 else next(iter(values)).split("_")[0]
        module = cls(shape[-1], terms, shape[0] if len(shape) == 2 else None, init_std=0.0)
        module.double().load_state_dict(values)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """Return sigma(x), the shape of x, in float32 or wider."""
        return modulate(
            x,
            self.low_coefficient,
            self.low_threshold,
            self.high_coefficient,
            self.high_threshold,
            self.monotone,
        )

    def extra_repr(self) -> str:
        heads = "" if self.num_heads is None else f", num_heads={self.num_heads}"
        monotone = ", monotone=True" if self.monotone else ""
        return f"order={self.order}, terms={self.terms!r}{heads}{monotone}"


def _numbers(name: str, given: Any) -> Tensor:
    """Return the numbers as float64; ValueError, with the name, unless all are finite."""
    # torch raises these for ragged lists, text, and integers that no float can hold.
    with contextlib.suppress(ValueError, TypeError, RuntimeError, OverflowError):
        values = torch.as_tensor(given, dtype=torch.float64)
        if values.isfinite().all():
            return values
    raise ValueError(
        f"{name} must be finite numbers, one per order or (heads, order), got {given!r}"
    )


def _build(
    num_heads: int | None, sink: str = "none", length_scale: bool = False, **options: Any
) -> dict[str, Any]:
    arguments: dict[str, Any] = {"modulator": Modulator(num_heads=num_heads, **options)}
    if length_scale:
        arguments["outer_scale"] = LengthScale(num_heads or 1)
    if sink != "none":
        arguments["sink"] = Sink(num_heads or 1) if sink == "learned" else 0.0
    return arguments


def _kernel(
    modulator: ScoreFunction,
    sink: float | Tensor | None = None,
    outer_scale: float | Tensor | None = None,
) -> dict[str, Any]:
    return {"modulator": modulator, "sink": sink, "length_scale": outer_scale}


register(
    Mapping(
        name="multimax",
        label="MultiMax",
        function=multimax,
        options=(*OPTIONS, SINK, LENGTH_SCALE),
        heads=heads_option(
            "shared",
            "share the modulator, the learned sink and the length scale among the heads of a "
            "layer, or learn them per head",
            setting="multimax_heads",
        ),
        build=_build,
        modulated=True,
        kernel=_kernel,
        output_options=OPTIONS,
    )
)
