"""Mappings made of the package's own: softmax at a learned temperature, also for the output layer,
and MultiMax of scores that a learned temperature divides first.

    fairseq-train DATA --user-dir user_dir/tempered --arch transformer_lm_multimax \
        --attention-normalizer tempered_multimax --output-normalizer tempered_softmax ...
"""

from torch import nn

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq import NORMALIZERS, Mapping, Modulator, register
from multimax_fairseq.mappings.softmax import Temperature


def tempered(num_heads):
    return {"modulator": Temperature(learned=True)}


def tempered_multimax(num_heads):
    return {"modulator": nn.Sequential(Temperature(learned=True), Modulator(num_heads=num_heads))}


register(
    Mapping(
        name="tempered_softmax",
        label="softmax at a learned temperature",
        function=NORMALIZERS["softmax"].function,
        build=tempered,
        modulated=True,
        output_options=(),
    )
)
register(
    Mapping(
        name="tempered_multimax",
        label="MultiMax at a learned temperature",
        function=NORMALIZERS["multimax"].function,
        build=tempered_multimax,
        modulated=True,
    )
)
