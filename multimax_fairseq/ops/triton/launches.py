"""Selects block sizes for the attention kernels, and launches all Triton kernels.

Register and instruction counts do not predict which of two similar launches is faster on a given
GPU, so `run_fastest` times them once for each kind of call. `run_kernel` caches compiled kernels,
which avoids most of the launch overhead of Triton.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable
from operator import itemgetter
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources, PTXASError

from multimax_fairseq.ops.backend import interpreted

Result = TypeVar("Result")


class Launch(NamedTuple):
    """Block sizes in queries and keys, warps per program, and stages of the software pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def arguments(self) -> dict[str, int]:
        """Return the kernel arguments. A single stage disables pipelining."""
        return {
            "BLOCK_T": self.queries,
            "BLOCK_S": self.keys,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Call(NamedTuple):
    """The properties of a call that determine its candidate launches."""

    kernel: str
    dtype: torch.dtype
    # The head size, padded to a power of two.
    width: int
    # See the function `is_heavy`.
    is_heavy: bool


def is_heavy(MASKING: int = 0, DROPOUT: bool = False, COLUMNS: int = 0, **_: object) -> bool:
    """Return whether these constants of a kernel cause high register pressure.

    The causes are dropout, a monotone modulator, a float mask, and a mask with a row per query.
    """
    return MASKING > 1 or DROPOUT or COLUMNS > 8


# The keys are (float32, padded head size of at least 32); float32 products do not use tensor cores.
# No candidate spills registers in its loop on sm_80 and sm_90. The first candidate lets two thread
# blocks share a multiprocessor; among such launches it has the fewest instructions.
_CANDIDATES: dict[str, dict[tuple[bool, int], list[Launch]]] = {
    "forward_kernel": {
        (False, 32): [Launch(64, 32, 4, 2)],
        (False, 64): [Launch(64, 64, 4, 2)],
        (False, 128): [Launch(64, 32, 4, 2)],
        (True, 32): [Launch(16, 16, 4, 2)],
        (True, 64): [Launch(32, 32, 8, 1)],
        (True, 128): [Launch(32, 16, 8, 2)],
    },
    "mean_kernel": {
        # In float32 it needs the same blocks as query_kernel: others would round differently.
        (False, 32): [Launch(64, 32, 4, 2)],
        (False, 64): [Launch(64, 32, 4, 2)],
        (False, 128): [Launch(64, 32, 4, 2)],
        (True, 32): [Launch(32, 16, 4, 2)],
        (True, 64): [Launch(32, 16, 4, 2)],
        (True, 128): [Launch(16, 16, 8, 2)],
    },
    "query_kernel": {
        (False, 32): [Launch(64, 16, 4, 2)],
        (False, 64): [Launch(64, 16, 4, 2), Launch(128, 16, 8, 2)],
        (False, 128): [Launch(128, 16, 8, 2)],
        (True, 32): [Launch(32, 16, 4, 2)],
        (True, 64): [Launch(32, 16, 4, 2)],
        (True, 128): [Launch(16, 16, 4, 2)],
    },
    "key_kernel": {
        (False, 32): [Launch(32, 64, 4, 1)],
        (False, 64): [Launch(32, 64, 4, 1), Launch(32, 128, 8, 1)],
        (False, 128): [Launch(32, 32, 4, 2), Launch(64, 32, 8, 1)],
        (True, 32): [Launch(16, 16, 4, 2)],
        (True, 64): [Launch(32, 32, 8, 1)],
        (True, 128): [Launch(32, 16, 8, 1)],
    },
}
# Half precision on GPUs with large shared memory, by kernel and padded head size. Of about 15
# launches per kernel, these were the fastest on an H100 without register spills. _LARGE_HEAVY has
# the launches for heavy calls where they differ.
_LARGE: dict[tuple[str, int], Launch] = {
    ("forward_kernel", 64): Launch(64, 64, 4, 3),
    ("forward_kernel", 128): Launch(64, 64, 4, 3),
    ("query_kernel", 64): Launch(64, 16, 4, 3),
    ("query_kernel", 128): Launch(64, 32, 4, 1),
    ("key_kernel", 64): Launch(32, 64, 4, 2),
    ("key_kernel", 128): Launch(32, 64, 4, 1),
}
_LARGE_HEAVY: dict[tuple[str, int], Launch] = {
    ("query_kernel", 128): Launch(64, 16, 4, 3),
    ("key_kernel", 64): Launch(16, 64, 4, 2),
    ("key_kernel", 128): Launch(16, 64, 4, 1),
}
_MIN_SHARED_MEMORY = 99 * 1024  # bytes
# The results of autotuning in this process.
_fastest: dict[Hashable, Launch] = {}


def shared_memory(capability: int) -> int:
    """Return the shared memory of a program in bytes, for a compute capability of at least 80."""
    return 227 * 1024 if capability // 10 in (9, 10) else _MIN_SHARED_MEMORY


@functools.cache
def candidates(call: Call, capability: int) -> list[Launch]:
    """Return the candidate launches of a call, for a compute capability (90 for 9.0).

    The first candidate is the default.
    """
    is_exact, place = call.dtype == torch.float32, (call.kernel, call.width)
    if not is_exact and place in _LARGE and shared_memory(capability) > _MIN_SHARED_MEMORY:
        return [_LARGE_HEAVY.get(place, _LARGE[place]) if call.is_heavy else _LARGE[place]]
    return _CANDIDATES[call.kernel][is_exact, max(call.width, 32)]


def _milliseconds(run: Callable[[], object], repetitions: int = 5) -> float:
    """Return the minimum run time on the GPU, after one run that compiles."""
    run()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def run_fastest(
    choice: list[Launch],
    call: Hashable,
    run: Callable[[Launch], Result],
    timer: Callable[[Callable[[], object]], float] = _milliseconds,
) -> Result:
    """Run a kernel with the fastest launch, and return the result of that run.

    The first call with each key times all candidates. The first candidate runs without autotuning
    if it is the only one, if deterministic algorithms are enabled, in Triton's interpreter, or
    while a CUDA graph is captured.

    Args:
        choice: the launches from `candidates`.
        call: the autotuning key, which must contain the kernel.
        run: runs the kernel. It runs repeatedly, so it must overwrite its outputs, not add to them.
        timer: returns the run time of a function.
    """
    if len(choice) == 1 or interpreted() or torch.are_deterministic_algorithms_enabled():
        return run(choice[0])
    if call not in _fastest:
        if torch.cuda.is_current_stream_capturing():
            return run(choice[0])
        _fastest[call] = _autotune(choice, run, timer)
    return run(_fastest[call])


def _autotune(
    choice: list[Launch],
    run: Callable[[Launch], object],
    timer: Callable[[Callable[[], object]], float],
) -> Launch:
    """Return the fastest launch; the first if none can run, so that the caller gets its error."""
    times = {}
    for launch in choice:
        with contextlib.suppress(OutOfResources, PTXASError):  # too large for this GPU
            times[launch] = timer(functools.partial(run, launch))
    return min(times, key=times.__getitem__, default=choice[0])


_Getter = Callable[[dict[str, Any]], tuple[Any, ...]]


class _Parameters(NamedTuple):
    """Functions that select some of a kernel's arguments from a dictionary."""

    all: _Getter  # in the order of the kernel's signature
    tensors: _Getter
    numbers: _Getter
    specialized: _Getter  # numbers that Triton specialises on: 1, multiples of 16
    constants: _Getter


_parameters: dict[Callable[..., Any], _Parameters] = {}
# Compiled kernels. The key contains all properties that Triton specialises on.
_compiled: dict[Hashable, CompiledKernel] = {}


def run_kernel(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Run a kernel on the current device, with all arguments by name.

    Equivalent to `kernel[(programs,)](**arguments)` with a faster lookup of the compiled kernel:
    Triton's own lookup takes longer than many kernels run.
    """
    if interpreted():
        kernel[(programs,)](**arguments)
        return
    parameters = _parameters.get(kernel.fn) or _parameters_of(kernel, arguments)
    call = (
        kernel.fn,
        driver.active.get_current_device(),
        parameters.constants(arguments),
        *[t if t is None else (t.dtype, t.data_ptr() % 16) for t in parameters.tensors(arguments)],
        *[n if n == 1 else 16 if n % 16 == 0 else 0 for n in parameters.specialized(arguments)],
    )
    compiled = _compiled.get(call)
    # Triton compiles larger numbers as int64.
    fits = max(parameters.numbers(arguments), default=0) < 2**31
    if compiled is not None and fits:
        compiled[programs, 1, 1](*parameters.all(arguments))
        return
    compiled = kernel[(programs,)](**arguments)
    if fits and isinstance(compiled, CompiledKernel):
        _compiled[call] = compiled


def _getter(names: list[str]) -> _Getter:
    """Return a function that selects these arguments as a tuple.

    `itemgetter` returns a tuple only for two or more names.
    """
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple(arguments[name] for name in names)


def _parameters_of(kernel: Any, arguments: dict[str, Any]) -> _Parameters:
    constants = [p.name for p in kernel.params if p.is_constexpr]
    constants += sorted(arguments.keys() - set(kernel.arg_names))  # compiler options
    others = [p for p in kernel.params if not p.is_constexpr]
    tensors = [p for p in others if isinstance(arguments[p.name], (Tensor, NoneType))]
    numbers = [p for p in others if p not in tensors]
    parameters = _Parameters(
        all=_getter(kernel.arg_names),
        tensors=_getter([p.name for p in tensors]),
        numbers=_getter([p.name for p in numbers]),
        specialized=_getter([p.name for p in numbers if not p.do_not_specialize]),
        constants=_getter(constants),
    )
    _parameters[kernel.fn] = parameters
    return parameters
