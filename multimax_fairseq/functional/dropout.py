"""Dropout that costs no more than reading and writing its tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.backend import choose
from multimax_fairseq.kernels import operators


def draw_seed() -> Tensor:
    """Return a seed of torch's generator; drawn on the CPU, so that no device is waited for."""
    return torch.randint(2**31 - 1, (), device="cpu")


def dropout(input: Tensor, p: float, backend: str = "auto") -> Tensor:
    """Return a tensor with each entry dropped, set to 0, with probability p, or divided by 1 - p.

    On a CPU torch spends nine tenths of its dropout on drawing random numbers. The kernel's are a
    hash of a seed, drawn by torch's generator, and of where an entry stands.
    Equivalent to: torch.nn.functional.dropout(input, p), with other random numbers

    Args:
        input: any shape; p: in [0, 1], both checked by the caller.
        backend: "auto", or "plain" for torch's own; what the kernel cannot take is always plain.
    """
    if p == 0:
        return input
    if choose("dropout", backend, input, able=p <= operators.MAX_DROPOUT) == "cpp":
        return operators.dropout(input, draw_seed(), p)
    return F.dropout(input, p)
