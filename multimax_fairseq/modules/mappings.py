"""The entries of `NORMALIZERS`, one per mapping: everything else about it is read off here."""

from __future__ import annotations

from typing import Any

import entmax

from multimax_fairseq.functional import normalizers as functions
from multimax_fairseq.functional import rescaled, unnormalized
from multimax_fairseq.functional.checks import is_finite, is_whole
from multimax_fairseq.functional.mapping import (
    SEPARATE,
    Mapping,
    Option,
    heads_option,
    register,
)
from multimax_fairseq.modules import length_scale, modulator, sink, temperature
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.length_scale import HiddenScale, LengthScale
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.sink import Sink
from multimax_fairseq.modules.temperature import Temperature


def _temperature(num_heads: int | None, **options: Any) -> dict[str, Any]:
    divisor = Temperature(options["temperature"], options["learn_temperature"])
    is_softmax = divisor.temperature == 1 and divisor.log_temperature is None
    return {} if is_softmax else {"modulator": divisor}


def _softmax_kernel(modulator: Any = None) -> dict[str, Any]:
    return {"modulator": modulator}


def _modulator(num_heads: int | None, sink: str = "none", **options: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"modulator": Modulator(num_heads=num_heads, **options)}
    if sink != "none":
        arguments["sink"] = Sink(num_heads or 1) if sink == "learned" else 0.0
    return arguments


def _alpha(num_heads: int | None, alpha: float | None) -> dict[str, Any]:
    return {"alpha": EntmaxAlpha(num_heads or 1) if alpha is None else alpha}


def _hidden(num_heads: int | None, hidden_size: int) -> dict[str, Any]:
    return {name: HiddenScale(name, hidden_size, num_heads or 1) for name in ("beta", "gamma")}


register(
    Mapping(
        name="softmax",
        label="softmax",
        function=functions.softmax,
        options=temperature.OPTIONS,
        build=_temperature,
        modulated=True,
        kernel=_softmax_kernel,
        output_options=(),
    )
)
register(
    Mapping(
        name="multimax",
        label="MultiMax",
        function=functions.multimax,
        options=(*modulator.OPTIONS, sink.OPTION),
        heads=heads_option("shared", "one modulator per layer, or per head; and one learned sink"),
        build=_modulator,
        modulated=True,
        kernel=lambda modulator, sink=None: {"modulator": modulator, "sink": sink},
        output_options=modulator.OPTIONS,
    )
)
register(
    Mapping(
        name="topk",
        label="top-k",
        function=functions.topk,
        options=(
            Option(
                "k",
                None,
                int,
                must="a whole number of at least 1",
                is_right=is_whole,
                help="how many scores the normalizer topk keeps",
                setting="topk",
            ),
        ),
    )
)
register(
    Mapping(
        name="sparsemax",
        label="sparsemax",
        function=functions.sparsemax,
        output_options=(),
        output_loss=lambda logits, target: entmax.sparsemax_loss(logits, target),
    )
)
register(
    Mapping(
        name="entmax15",
        label="1.5-entmax",
        function=functions.entmax15,
        output_options=(),
        output_loss=lambda logits, target: entmax.entmax15_loss(logits, target),
    )
)
register(
    Mapping(
        name="alpha_entmax",
        label="α-entmax",
        function=functions.alpha_entmax,
        options=(
            Option(
                "alpha",
                None,
                float,
                must="a finite number of at least 1",
                is_right=lambda alpha: alpha is None or is_finite(alpha) and alpha >= 1,
                help="fixed alpha of alpha_entmax; by default it is learned",
                remark="1 is softmax, 2 sparsemax",
                setting="entmax_alpha",
            ),
        ),
        heads=heads_option(
            "separate",
            "a learned alpha per head, or per layer",
            remark="whose alpha is learned",
            setting="entmax_heads",
        ),
        build=_alpha,
        output_options=(
            Option(
                "alpha",
                1.5,
                float,
                must="a finite number above 1",
                is_right=lambda alpha: is_finite(alpha) and alpha > 1,
                help="alpha of the output normalizer alpha_entmax",
                remark="for 1, softmax, give --output-normalizer softmax",
                setting="output_entmax_alpha",
            ),
        ),
        output_loss=lambda logits, target, alpha: entmax.entmax_bisect_loss(logits, target, alpha),
    )
)
register(
    Mapping(
        name="evsoftmax",
        label="EvSoftmax",
        function=functions.evsoftmax,
        training=True,
    )
)
register(
    Mapping(
        name="ssmax",
        label="Scalable-Softmax",
        function=rescaled.ssmax,
        options=(length_scale.START,),
        heads=SEPARATE,
        build=lambda num_heads, start: {"length_scale": LengthScale(num_heads or 1, start)},
        kernel=lambda length_scale: {"length_scale": length_scale},
    )
)
register(
    Mapping(
        name="softmax1",
        label="softmax-1",
        function=functions.softmax1,
        sums_to_one=False,
        kernel=lambda: {"sink": 0.0},
    )
)
register(
    Mapping(
        name="sink",
        label="softmax with learned sinks",
        function=functions.softmax_with_sink,
        heads=SEPARATE,
        build=lambda num_heads: {"sink": Sink(num_heads or 1)},
        sums_to_one=False,
        kernel=lambda sink: {"sink": sink},
    )
)
register(
    Mapping(
        name="softpick",
        label="softpick",
        function=unnormalized.softpick,
        sums_to_one=False,
    )
)
register(
    Mapping(
        name="sigmoid",
        label="sigmoid",
        function=unnormalized.sigmoid,
        options=(
            Option(
                "bias",
                None,
                float,
                must="a finite number",
                is_right=lambda bias: bias is None or is_finite(bias),
                help="fixed bias of sigmoid; by default minus the logarithm of the number of keys",
            ),
        ),
        sums_to_one=False,
    )
)
register(
    Mapping(
        name="asentmax",
        label="ASEntmax",
        function=rescaled.asentmax,
        heads=SEPARATE,
        build=_hidden,
        hidden=True,
    )
)
register(
    Mapping(
        name="adaptive_temperature",
        label="softmax at an adaptive temperature",
        function=rescaled.adaptive_temperature,
        training=True,
    )
)
