"""The modulator as other toolkits store it: `ts` and `ranges`, with four numbers each.

    sigma(x) = x + ts[0] max(ranges[0] - x, 0)   + ts[1] max(x - ranges[1], 0)
                 + ts[2] max(ranges[2] - x, 0)^2 + ts[3] max(x - ranges[3], 0)^2

`ts` are our coefficients (offsets from the identity) and `ranges` our thresholds; low and high ones
alternate. A term that our modulator lacks (`order` 1, `terms` low or high) is zero there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from multimax_fairseq.errors import UsageError

Vectors = tuple[Tensor, Tensor]
KINDS = ("coefficient", "threshold")  # ts, ranges
SIDES = ("low", "high")


def names(terms: str) -> list[str]:
    """Return the parameter names of a Modulator."""
    sides = SIDES if terms == "both" else (terms,)
    return [f"{side}_{kind}" for side in sides for kind in KINDS]


def join(parameters: Mapping[str, Tensor]) -> Vectors:
    """Return (ts, ranges) of a Modulator's parameters {name: (order,)}."""
    first = next(iter(parameters.values()))
    ts, ranges = (
        _interleaved([parameters.get(f"{side}_{kind}") for side in SIDES], first) for kind in KINDS
    )
    return ts, ranges


def _interleaved(sides: list[Tensor | None], like: Tensor) -> Tensor:
    vector = torch.zeros(4, dtype=like.dtype)
    for start, value in enumerate(sides):
        if value is not None:
            vector[start : 2 * len(value) : 2] = value
    return vector


def split(vectors: Vectors, order: int, terms: str) -> dict[str, Tensor]:
    """Return a Modulator's parameters {name: (order,)}; the inverse of `join`."""
    return {
        f"{side}_{kind}": vector[start : 2 * order : 2].clone()
        for start, side in enumerate(SIDES)
        for kind, vector in zip(KINDS, vectors, strict=True)
        if terms in ("both", side)
    }


def can_represent(vectors: Vectors, order: int, terms: str) -> bool:
    """Whether a Modulator with this order and these terms can represent the vectors."""
    again = join(split(vectors, order, terms))
    return all(torch.equal(one, other) for one, other in zip(again, vectors, strict=True))


def check(vectors: Vectors, at: str) -> Vectors:
    """Return the vectors. Raise UsageError if they are not four finite numbers each."""
    for name, vector in zip(("ts", "ranges"), vectors, strict=True):
        if vector.shape != (4,) or not vector.is_floating_point() or not vector.isfinite().all():
            raise UsageError(
                f"{name} of {at} must be four finite numbers, got {vector.dtype} of shape "
                f"{list(vector.shape)}: get the file again"
            )
    return vectors
