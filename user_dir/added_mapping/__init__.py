"""A mapping in a plugin: softmax of scores that a learned factor scales (see docs/mappings.md)."""

from pathlib import Path

import torch
from torch import nn

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq import Mapping, Option, RowFunction, normalize, register
from multimax_fairseq.mappings.masking import shift_and_scale


class Sharpness(nn.Module):
    def __init__(self, num_heads, start):
        super().__init__()
        self.factor = nn.Parameter(torch.full((num_heads or 1,), start))

    def forward(self):
        return self.factor[:, None, None]


def sharpened(scores, dim=-1, mask=None, *, sharpness):
    product = shift_and_scale(scores, sharpness, dim, mask)  # does not overflow in half precision
    return normalize("softmax", product, dim, mask)


def build(num_heads, start):
    return {"sharpness": Sharpness(num_heads, start)}


HEADER = str(Path(__file__).with_name("sharpened.h"))


def kernel(sharpness):
    return {"row": RowFunction("Sharpened", sharpness, needs_exclusion_mask=True, header=HEADER)}


start = Option("start", 1.0, float, "above 0", lambda x: x > 0, help="factor at the start")
register(Mapping("sharpened", "sharpened softmax", sharpened, (start,), build=build, kernel=kernel))
