"""Chooses the implementation of an operator: plain PyTorch, compiled C++ or Triton."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from multimax_fairseq.ops import native
from multimax_fairseq.ops.checks import DTYPES

logger = logging.getLogger(__name__)

is_wrapper = is_traceable_wrapper_subclass
KERNELS = ("cpp", "triton")
BACKENDS = ("auto", "plain", *KERNELS)
VARIABLE = "MULTIMAX_BACKEND"
# Triton reads this variable when it is imported.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter multiplies bfloat16 numbers as integers.
INTERPRETED = (torch.float32, torch.float16)
Function = TypeVar("Function", bound=Callable[..., Any])


def _constant(function: Function) -> Function:
    """Apply torch.compiler.assume_constant_result, without its slow import of the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def requested(backend: str = "auto") -> str:
    """Return the requested backend: the argument, or else the variable MULTIMAX_BACKEND.

    Raises:
        ValueError: an unknown name; a backend that this machine does not have.
    """
    source = "backend"
    if backend == "auto":
        source, backend = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"unknown {source} {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "cpp" and not _has("cpp"):
        raise ValueError(f"{source} 'cpp' needs a C++ compiler and an x86 processor with AVX2")
    if backend == "triton" and not _has("triton"):
        raise ValueError(f"{source} 'triton' needs the package triton: pip install triton")
    return backend


@contextlib.contextmanager
def plain_backend() -> Iterator[None]:
    """Run all operations in plain PyTorch; MULTIMAX_BACKEND has no effect inside."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "plain"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def choose(
    operation: str,
    backend: str,
    first: Tensor,
    *others: Tensor | None,
    is_supported: bool = True,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> str:
    """Return "plain", "cpp" or "triton" for an operation on these tensors.

    A kernel takes tensors of one device and one dtype out of `dtypes`, to which autocast casts. In
    all other cases the backend is "plain", even if another one is requested: also under
    torch.jit.trace, torch.func and forward-mode differentiation, and for tensors that wrap others,
    such as DTensor.

    Args:
        operation: its name in the log, written once; "" for none.
        backend: as `requested`.
        first, others: the tensors.
        is_supported: whether the kernel supports the other arguments.
        dtypes: those that the kernel supports.
    """
    device, dtype = first.device, first.dtype
    choice = _kernel(backend, str(device))
    is_cast = is_autocast(device.type)
    if choice == "triton" and device.type == "cpu":
        kernel_dtype = torch.get_autocast_dtype("cpu") if is_cast else dtype
        is_supported = is_supported and kernel_dtype in INTERPRETED
    allowed = DTYPES if is_cast else dtypes
    is_supported = is_supported and dtype in allowed and not is_wrapper(first)
    for other in others:
        if other is not None:
            fits = other.dtype in allowed if is_cast else other.dtype == dtype
            fits = fits and other.device == device and not is_wrapper(other)
            is_supported = is_supported and fits
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if not is_supported or tracing or transformed():
        choice = "plain"
    if operation and not traced():
        _log(operation, choice)
    return choice


@_constant
def _kernel(backend: str, device: str) -> str:
    """Return the backend for tensors on this device."""
    wanted = requested(backend)
    kind = device.partition(":")[0]
    if kind == "cpu" and interpreted():
        return "triton" if wanted in ("auto", "triton") and _has_triton() else "plain"
    if kind == "cpu" and wanted in ("auto", "cpp") and native.library() is not None:
        return "cpp"
    if kind == "cuda" and wanted in ("auto", "triton") and _has_triton():
        # Older GPUs have too little shared memory for the kernels.
        return "triton" if capability(device) >= 80 else "plain"
    return "plain"


def is_autocast(device: str) -> bool:
    """Whether autocast is on for this device type; False for types without autocast, as meta."""
    return _knows_autocast(device) and torch.is_autocast_enabled(device)


@_constant
def _knows_autocast(device: str) -> bool:
    # torch.compile of torch 2.10 cannot trace this call.
    return torch.amp.autocast_mode.is_autocast_available(device)


@_constant
def _has(backend: str) -> bool:
    return native.library() is not None if backend == "cpp" else _has_triton()


@_constant
def is_triton_requested(backend: str) -> bool:
    """Whether Triton's kernels are requested by name."""
    return requested(backend) == "triton"


@_constant
def has_row_library(header: str, function: str, backend: str) -> bool:
    """Whether the row function of a header is compiled.

    Raises:
        ValueError: it is not, but C++ is requested by name.
    """
    if native.row_library(header, function) is not None:
        return True
    if requested(backend) == "cpp":
        raise ValueError(
            f"the row function {function} of {header} did not compile, but the backend 'cpp' is "
            "requested: correct the header (the log has the compiler's error), or use 'auto'"
        )
    return False


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _log(operation: str, choice: str) -> None:
    logger.info(f"{operation}: {choice} backend")


# --- devices ------------------------------------------------------------------------------------


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on CPU tensors."""
    return _INTERPRETED


def on_triton(device: torch.device) -> bool:
    """Whether operators on this device run Triton kernels, not C++."""
    return device.type == "cuda" or interpreted()


@functools.cache
def capability(device: torch.device | str) -> int:
    """Return a GPU's compute capability, 90 for 9.0; 0 for any other device."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# --- tracing ------------------------------------------------------------------------------------


def traced() -> bool:
    """Whether torch records or transforms the calls instead of only running them."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or transformed()
    )


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is active; operators support neither."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_plain_operations(*tensors: Tensor | None) -> bool:
    """Whether to use plain operations because torch traces them, or a tensor wraps others."""
    return traced() or any(t is not None and is_wrapper(t) for t in tensors)
