"""What an argument is, by its type; TorchScript, which knows the types, skips it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


@torch.jit.unused
def check_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError for what is no tensor, ValueError for one that is not dense."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {tensor!r}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a dense tensor, got {kind}: make it dense first")


@torch.jit.unused
def check_number(name: str, value: Any) -> None:
    """Raise TypeError for what is no number, ValueError for nan and what no float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not abs(value) <= sys.float_info.max:
        raise ValueError(f"{name} must be finite, got {value}")


@torch.jit.unused
def check_integer(name: str, value: Any) -> None:
    """Raise TypeError for what is no int, ValueError for one that int64 does not hold."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be within int64, got {value}")


@torch.jit.unused
def check_flag(name: str, value: Any) -> None:
    """Raise TypeError for what is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
