"""Checks of arguments: numbers, flags and tensors."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def is_whole(value: object, least: int = 1) -> bool:
    """Whether a value is an integer, at least `least`, that int64 holds; neither True nor 2.0
    is one."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return least <= int(value) < 2**63


def check_whole(name: str, value: object) -> None:
    """Raise ValueError for what is no whole number of at least 1."""
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold, and neither NaN nor infinite; True is
    none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        # Not math.isfinite, which torch.compile cannot record of a number that may vary.
        return -math.inf < float(value) < math.inf
    except OverflowError:  # an integer past any float
        return False


def check_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError for what is no tensor, ValueError for one that is not dense."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {tensor!r}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a dense tensor, got {kind}: make it dense first")


def check_number(name: str, value: Any) -> None:
    """Raise TypeError for what is no number, ValueError for nan and what no float holds."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not is_finite(value):
        raise ValueError(f"{name} must be finite, got {value}")


def check_integer(name: str, value: Any) -> None:
    """Raise TypeError for what is no integer, ValueError for one that int64 does not hold."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not is_whole(value, least=-(2**63)):
        raise ValueError(f"{name} must be within int64, got {value}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError for what is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
