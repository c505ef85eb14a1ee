"""Which implementation a fused operation runs on: plain PyTorch, compiled C++ or Triton."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

import torch
from torch import Tensor

from multimax_fairseq.kernels import cpu

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "plain", "cpp", "triton")
VARIABLE = "MULTIMAX_BACKEND"


def requested(backend: str = "auto") -> str:
    """Return the backend that was asked for: the argument, else the variable MULTIMAX_BACKEND.

    Raises:
        ValueError: an unknown name; a backend that this machine does not have.
    """
    source = "backend"
    if backend == "auto":
        source, backend = VARIABLE, os.environ.get(VARIABLE) or "auto"
    if backend not in BACKENDS:
        raise ValueError(f"unknown {source} {backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "cpp" and cpu.library() is None:
        raise ValueError(f"{source} 'cpp' needs a C++ compiler and an x86 processor with AVX2")
    if backend == "triton" and not _has_triton():
        raise ValueError(f"{source} 'triton' needs the package triton: pip install triton")
    return backend


def choose(operation: str, backend: str, *tensors: Tensor | None, able: bool = True) -> str:
    """Return "plain", "cpp" or "triton" for an operation on these tensors, and log it once.

    The compiled kernels take float32 on the CPU, the Triton ones half precision and float32 on a
    GPU with the memory they need on its chip (compute capability 8.0). What they cannot take, as
    the caller may know (not `able`), is plain, whatever is asked for; so is what torch.compile
    traces.
    """
    wanted = requested(backend)
    choice = "plain"
    given = [t for t in tensors if t is not None]
    device, dtypes = given[0].device.type, {t.dtype for t in given}
    if not able or wanted == "plain" or torch.compiler.is_compiling() or is_autocast(device):
        pass
    elif device == "cpu" and wanted != "triton":
        if dtypes == {torch.float32} and cpu.library() is not None:
            choice = "cpp"
    elif wanted != "cpp" and torch.float64 not in dtypes and _has_triton():
        # Triton's interpreter works on tensors anywhere.
        able = device == "cuda" and torch.cuda.get_device_capability(given[0].device) >= (8, 0)
        if able or os.environ.get("TRITON_INTERPRET") == "1":
            choice = "triton"
    _log(operation, choice)
    return choice


def is_autocast(device: str) -> bool:
    """Whether autocast is on for this type of device; never for those that know none, as meta."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _log(operation: str, choice: str) -> None:
    logger.info(f"{operation}: {choice} backend")
