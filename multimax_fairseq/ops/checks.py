"""Checks of arguments: numbers, flags, tensors."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

# The dtypes that the kernels take.
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest float32 below 1.
MAX_DROPOUT = 1 - 2**-24


def is_whole(value: object, minimum: int = 1) -> bool:
    """Whether a value is an int64 of at least `minimum`. True and 2.0 are not."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        return False
    return minimum <= int(value) < 2**63


def check_whole(name: str, value: object) -> None:
    """Raise ValueError unless the value is a whole number of at least 1."""
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold, not NaN or infinite. True is not."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        # torch.compile cannot trace math.isfinite for a symbolic number.
        return -math.inf < float(value) < math.inf
    except OverflowError:
        return False


def check_number(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a number, ValueError unless it is finite."""
    if is_finite(value):
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    raise ValueError(f"{name} must be finite, got {value}")


def check_integer(name: str, value: Any) -> None:
    """Raise TypeError unless the value is an integer, ValueError unless it fits int64."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not is_whole(value, minimum=-(2**63)):
        raise ValueError(f"{name} must be within int64, got {value}")


def check_flag(name: str, value: Any) -> None:
    """Raise TypeError unless the value is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_tensor(name: str, tensor: Any) -> None:
    """Raise TypeError unless the value is a tensor, ValueError unless it is dense."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {tensor!r}")
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise ValueError(f"{name} must be a dense tensor, got {kind}: make it dense first")


def check_device(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    """Raise ValueError if two tensors are on different devices."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but {like_name} on {like.device}: move one of them"
        )


def check_cpu(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is on the CPU, or on the meta device."""
    if tensor.device.type not in ("cpu", "meta"):
        raise ValueError(f"{name} is on {tensor.device}: this operator is for the CPU")


def check_float(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    """Raise ValueError unless the kernels support the dtype, and dtype and device are `like`'s."""
    if tensor.dtype not in DTYPES or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} must be float32, float16 or bfloat16, and of the dtype of {like_name} "
            f"({like.dtype}), got {tensor.dtype}"
        )
    check_device(name, tensor, like, like_name)


def check_dropout(name: str, p: float, seed: Tensor | None) -> None:
    """Raise ValueError unless a kernel can drop with this probability and seed."""
    if not 0 <= p <= MAX_DROPOUT:
        raise ValueError(f"{name} must be in [0, 1) as a float32, got {p}")
    if p > 0 and seed is None:
        raise ValueError("dropout needs a seed: pass a scalar of int64 on the CPU, got None")
    if seed is not None and (seed.dim(), seed.dtype, seed.device.type) != (0, torch.int64, "cpu"):
        raise ValueError(
            f"seed must be a scalar of int64 on the CPU, got {list(seed.shape)}, {seed.dtype} on "
            f"{seed.device}"
        )
