"""Calls the compiled C++ kernels. `library()` is None where there are none.

Most kernels take one structure, with the fields of the structure of the same name in `cpp/`.
Callers have checked all arguments.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.ops import build

_Fields = list[tuple[str, Any]]


def _fields(names: str, kind: Any) -> _Fields:
    return [(name, kind) for name in names.split()]


class _Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


class Mask(ctypes.Structure):
    _fields_ = [
        *_fields("data", ctypes.c_void_p),
        *_fields("is_float", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 4),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *_fields("batch heads queries keys size threads", ctypes.c_int64),
        *_fields("columns head_stride is_causal", ctypes.c_int64),
        *_fields("scale dropout", ctypes.c_float),
        *_fields("seed", ctypes.c_uint64),
        *_fields("function", ctypes.c_int64),
        *_fields("starts ends parameters factor sink row_parameter statistics", ctypes.c_void_p),
        *_fields("grad_parameters grad_factor grad_sink grad_row_parameter", ctypes.c_void_p),
        *_fields("mask", Mask),
        *_fields("query key value output", _Tensor4),
        *_fields("grad_output grad_query grad_key grad_value", _Tensor4),
        *_fields("ancestors", ctypes.c_void_p),
        *_fields("rows", ctypes.c_int64),
    ]


class OutputLoss(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size chunk threads columns ignore_index entropy", ctypes.c_int64),
        *_fields("smooth_weight nll_weight z_weight max_weight", ctypes.c_float),
        *_fields("features weight bias parameters target factors nll loss", ctypes.c_void_p),
        *_fields("grad_features grad_weight grad_bias grad_parameters", ctypes.c_void_p),
    ]


class Projection(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size threads columns", ctypes.c_int64),
        *_fields("features weight bias parameters out", ctypes.c_void_p),
    ]


class Best(ctypes.Structure):
    _fields_ = [
        *_fields("rows classes count threads", ctypes.c_int64),
        *_fields("scores values indices totals", ctypes.c_void_p),
    ]


class BestOutputs(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size count apart threads columns", ctypes.c_int64),
        *_fields("features weight bias parameters apart_classes", ctypes.c_void_p),
        *_fields("values indices totals apart_scores", ctypes.c_void_p),
    ]


class Drop(ctypes.Structure):
    _fields_ = [
        *_fields("count threads", ctypes.c_int64),
        *_fields("probability", ctypes.c_float),
        *_fields("seed", ctypes.c_uint64),
        *_fields("entries out", ctypes.c_void_p),
    ]


class Modulation(ctypes.Structure):
    _fields_ = [
        *_fields("count inner heads threads columns", ctypes.c_int64),
        *_fields("parameters scores grad out grad_parameters", ctypes.c_void_p),
    ]


class Tails(ctypes.Structure):
    _fields_ = [
        *_fields("rows", ctypes.c_int64),
        *_fields("parameters out jacobian", ctypes.c_void_p),
    ]


# In the order of `structure_sizes` in cpp/cpu.cpp.
STRUCTURES = (Mask, Attention, OutputLoss, Projection, Best, BestOutputs, Drop, Modulation, Tails)
_WITH_STRIDES = {name for name, kind, *_ in Attention._fields_ if kind is _Tensor4}


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None where there are none.

    Raises:
        RuntimeError: a structure has another size here than in C++.
    """
    kernels = build.library()
    if kernels is not None:
        sizes = (ctypes.c_int64 * len(STRUCTURES)).in_dll(kernels, "structure_sizes")
        for structure, size in zip(STRUCTURES, sizes, strict=True):
            if ctypes.sizeof(structure) != size:
                raise RuntimeError(
                    f"{structure.__name__} has {ctypes.sizeof(structure)} bytes in ops/native.py "
                    f"and {size} in C++: make their fields equal"
                )
    return kernels


def row_library(header: str | None, function: str) -> ctypes.CDLL | None:
    """Return the library with a row function; None, with the reason logged, where there is none.

    Args:
        header, function: the header and the name of a `RowFunction`.
    """
    return library() if header is None else build.row_library(header, function)


def call(
    name: str,
    structure: type[ctypes.Structure],
    kernels: ctypes.CDLL | None = None,
    **values: Any,
) -> int:
    """Call a kernel and return its status, which is never 0.

    Args:
        name: of the C++ function.
        structure: its argument.
        kernels: the library of the function; None for that of the package.
        values: the structure's fields: numbers and tensors; None is a null pointer.

    Raises:
        ValueError: a tensor without memory.
        MemoryError: the kernel cannot allocate its buffers.
    """
    argument = structure()
    for field, value in values.items():
        if isinstance(value, Tensor):
            address = value.data_ptr()
            if not address and value.numel():
                raise ValueError(
                    f"{field} has no memory: it was freed, as FSDP frees parameters outside of the "
                    "forward pass of their module"
                )
            value = (address, value.stride()[:3]) if field in _WITH_STRIDES else address
        if value is not None:
            setattr(argument, field, value)
    kernels = kernels or library()
    assert kernels is not None
    status = int(getattr(kernels, name)(ctypes.byref(argument)))
    if status == 0:
        raise MemoryError(f"{name}: not enough memory for its buffers: use smaller batches")
    return status


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, in which the kernels compute, with a dense last dimension."""
    tensor = cast(tensor, torch.float32)
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in this dtype. `Tensor.to` is slow for small tensors even as a no-op."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def in_float32(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return tensors in float32; None stays None."""
    return tuple(None if t is None else t.float() for t in tensors)


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an empty tensor with the same order of dimensions in memory and a dense last one."""
    out = torch.empty_like(tensor, dtype=dtype)
    return out if out.stride(-1) == 1 else out.new_empty(out.shape)


def linear_layer(
    features: Tensor, weight: Tensor, bias: Tensor | None, parameters: Tensor | None
) -> dict[str, Any]:
    """Return the fields of a linear layer, (N, D) @ (V, D)^T, and its modulator; in float32."""
    return {
        "tokens": len(features),
        "classes": len(weight),
        "size": weight.shape[1],
        "threads": torch.get_num_threads(),
        "columns": 0 if parameters is None else parameters.shape[1],
        "features": features.contiguous(),
        "weight": weight.contiguous(),
        "bias": None if bias is None else bias.contiguous(),
        "parameters": None if parameters is None else parameters.contiguous(),
    }


def find_windows(
    mask: Mask, batch: int, queries: int, keys: int, is_causal: bool, starts: Tensor, ends: Tensor
) -> bool:
    """Fill in the window of each query in a mask; return whether they describe it."""
    kernels = library()
    assert kernels is not None
    return bool(
        kernels.find_windows(
            ctypes.byref(mask),
            *(ctypes.c_int64(n) for n in (batch, queries, keys, is_causal)),
            ctypes.c_void_p(starts.data_ptr()),
            ctypes.c_void_p(ends.data_ptr()),
        )
    )
