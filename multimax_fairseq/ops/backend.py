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

from multimax_fairseq.errors import UsageError
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
        raise UsageError(f"unknown {source} {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "cpp" and not _has("cpp"):
        raise UsageError(f"{source} 'cpp' needs a C++ compiler and an x86 processor with AVX2")
    if backend == "triton" and not _has("triton"):
        raise UsageError(f"{source} 'triton' needs the package triton: pip install triton")
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
    *tensors: Tensor | None,
    unsupported: str = "",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> str:
    """Return the backend of `select`. Log it once, with the condition that excludes a kernel.

    Args:
        operation: its name in the log.
        backend, tensors, unsupported, dtypes: as `select`.
    """
    is_traced = traced()
    choice, reason = _select(is_traced, backend, tensors, unsupported, dtypes)
    if not is_traced:
        _log(operation, choice, reason)
    return choice


def select(
    backend: str,
    *tensors: Tensor | None,
    unsupported: str = "",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> tuple[str, str]:
    """Return "plain", "cpp" or "triton" for an operation on these tensors, and why it is "plain".

    A kernel takes tensors of one device and one dtype out of `dtypes`, to which autocast casts. In
    all other cases the backend is "plain", even if another one is requested: also under torch.func,
    forward-mode differentiation and torch.jit.trace, and for tensors that wrap others, such as
    DTensor.

    Args:
        backend: as `requested`.
        tensors: the first one is not None.
        unsupported: why the kernel does not support the other arguments; "" if it does.
        dtypes: those that the kernel supports.
    """
    return _select(traced(), backend, tensors, unsupported, dtypes)


def _select(
    is_traced: bool,
    backend: str,
    tensors: tuple[Tensor | None, ...],
    unsupported: str,
    dtypes: tuple[torch.dtype, ...],
) -> tuple[str, str]:
    first = tensors[0]
    assert first is not None
    choice, reason = _kernel(backend, str(first.device))
    reason = reason or unsupported
    if not reason and is_traced and transformed():
        reason = "torch.func, forward mode or torch.jit.trace transforms the calls"
    reason = reason or _unsupported_tensors(choice, first, tensors, dtypes)
    return ("plain", reason) if reason else (choice, "")


def _unsupported_tensors(
    choice: str, first: Tensor, tensors: tuple[Tensor | None, ...], dtypes: tuple[torch.dtype, ...]
) -> str:
    """Return why a kernel does not take these tensors; "" if it does."""
    device, is_cast = first.device, is_autocast(first.device.type)
    allowed = DTYPES if is_cast else dtypes
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in allowed or not is_cast and tensor.dtype != first.dtype:
            return "the kernel does not support these dtypes"
        if tensor.device != device:
            return "the tensors are on several devices"
        if type(tensor) is not Tensor and is_wrapper(tensor):
            return "a tensor wraps others"
    if choice == "triton" and device.type == "cpu":
        dtype = torch.get_autocast_dtype("cpu") if is_cast else first.dtype
        if dtype not in INTERPRETED:
            return "Triton's interpreter does not support this dtype"
    return ""


@_constant
def _kernel(backend: str, device: str) -> tuple[str, str]:
    """Return the backend for tensors on this device, and why it is "plain"."""
    wanted = requested(backend)
    kind = device.partition(":")[0]
    kernel = "triton" if kind == "cuda" or kind == "cpu" and interpreted() else "cpp"
    if wanted not in ("auto", kernel):
        return "plain", f"{wanted!r} is requested and {kind} tensors have {kernel!r}"
    if kind not in ("cpu", "cuda"):
        return "plain", f"{kind} has no kernels"
    if not _has(kernel):
        missing = "triton is not installed" if kernel == "triton" else "no compiled kernels"
        return "plain", missing
    if kind == "cuda" and capability(device) < 80:
        return "plain", "the GPU's compute capability is below 8.0"  # too little shared memory
    return kernel, ""


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
def _log(operation: str, choice: str, reason: str) -> None:
    logger.info(f"{operation}: {choice} backend" + (f", because {reason}" if reason else ""))


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
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or transformed()
    )


def transformed() -> bool:
    """Whether torch.func, forward-mode differentiation or torch.jit.trace is active.

    Operators support none of them. Under torch.jit.trace, sizes are tensors, which crash a kernel.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def needs_plain_operations(*tensors: Tensor | None) -> bool:
    """Whether to use plain operations because torch traces them, or a tensor wraps others."""
    return traced() or any(t is not None and is_wrapper(t) for t in tensors)
