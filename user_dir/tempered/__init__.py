"""Mappings made of the package's own: softmax at a learned temperature, also for the output layer,
and forms of MultiMax that scale the scores first.

    fairseq-train DATA --user-dir user_dir/tempered --arch transformer_lm_multimax \
        --attention-normalizer tempered_multimax --output-normalizer tempered_softmax ...
"""

import torch
from torch import nn

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq import NORMALIZERS, Mapping, Modulator, register
from multimax_fairseq.mappings.length_scale import LengthScale
from multimax_fairseq.mappings.masking import at_least_float32, scale_scores
from multimax_fairseq.mappings.softmax import Temperature
from multimax_fairseq.ops.attention import length_factor
from multimax_fairseq.ops.masks import key_counts


class Affine(nn.Module):
    """t x + b of the scores with learned scalars, 1 and 0 at the start."""

    def __init__(self):
        super().__init__()
        self.slope, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        x = at_least_float32(x)
        return torch.addcmul(self.shift.to(x.dtype), self.slope.to(x.dtype), x)


def tempered(num_heads):
    return {"modulator": Temperature(learned=True)}


def tempered_multimax(num_heads):
    return {"modulator": nn.Sequential(Temperature(learned=True), Modulator(num_heads=num_heads))}


def affine_multimax(num_heads):
    return {"modulator": nn.Sequential(Affine(), Modulator(1, num_heads=num_heads))}


def inner_scale(num_heads):
    return {"modulator": Modulator(num_heads=num_heads), "length_scale": LengthScale(1)}


def multimax_of_ssmax(scores, dim=-1, mask=None, *, modulator, length_scale):
    """Return MultiMax of the scores of Scalable-Softmax, softmax(sigma(s log(n) x))."""
    factor = length_factor(key_counts(scores, dim, mask), length_scale)
    scaled = scale_scores(scores, factor, mask)
    return NORMALIZERS["multimax"].function(scaled, modulator, dim, mask)


SOFTMAX, MULTIMAX = NORMALIZERS["softmax"].function, NORMALIZERS["multimax"].function
for mapping in (
    Mapping(
        "tempered_softmax",
        "softmax at a learned temperature",
        SOFTMAX,
        build=tempered,
        modulated=True,
        output_options=(),
    ),
    Mapping(
        "tempered_multimax",
        "MultiMax at a learned temperature",
        MULTIMAX,
        build=tempered_multimax,
        modulated=True,
    ),
    Mapping(
        "affine_multimax",
        "MultiMax of t x + b, order 1",
        MULTIMAX,
        build=affine_multimax,
        modulated=True,
    ),
    Mapping("multimax_of_ssmax", "MultiMax of s log(n) x", multimax_of_ssmax, build=inner_scale),
):
    register(mapping)
