"""The entries of `NORMALIZERS`, one per mapping: everything else about it is read off here."""

from __future__ import annotations

from typing import Any

import entmax

from multimax_fairseq.functional import normalizers as functions
from multimax_fairseq.functional.checks import is_finite, is_whole
from multimax_fairseq.functional.mapping import Mapping, Option, heads_option, register
from multimax_fairseq.modules import modulator, temperature
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.temperature import Temperature


def _temperature(num_heads: int | None, **options: Any) -> dict[str, Any]:
    divisor = Temperature(options["temperature"], options["learn_temperature"])
    is_softmax = divisor.temperature == 1 and divisor.log_temperature is None
    return {} if is_softmax else {"modulator": divisor}


def _modulator(num_heads: int | None, **options: Any) -> dict[str, Any]:
    return {"modulator": Modulator(num_heads=num_heads, **options)}


def _alpha(num_heads: int | None, alpha: float | None) -> dict[str, Any]:
    return {"alpha": EntmaxAlpha(num_heads or 1) if alpha is None else alpha}


register(
    Mapping(
        name="softmax",
        label="softmax",
        function=functions.softmax,
        options=temperature.OPTIONS,
        build=_temperature,
        modulated=True,
        kernel=True,
        output_options=(),
    )
)
register(
    Mapping(
        name="multimax",
        label="MultiMax",
        function=functions.multimax,
        options=modulator.OPTIONS,
        heads=heads_option("shared", "one modulator per layer, or per head"),
        build=_modulator,
        modulated=True,
        kernel=True,
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
