"""How Triton's kernels are launched: with which block sizes those of attention, of which some are
tried here, and without Triton's own look at every argument of every call.

What the compiler says of a kernel does not tell how two kernels that it likes alike compare on a
given GPU, so that each is tried there, once for each kind of call.
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

from multimax_fairseq.ops.registration import interpreted

Result = TypeVar("Result")


class Launch(NamedTuple):
    """Block sizes in queries and keys, warps a program, and stages of the loop's pipeline."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int

    def arguments(self) -> dict[str, int]:
        """As a kernel takes them. With one stage, nothing is carried from one block to the next."""
        return {
            "BLOCK_T": self.queries,
            "BLOCK_S": self.keys,
            "STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


class Call(NamedTuple):
    """What of a call decides which launches it may have."""

    kernel: str
    dtype: torch.dtype
    # The head size, padded to a power of two.
    width: int
    # As `is_heavy` tells.
    is_heavy: bool


def is_heavy(MASKING: int = 0, DROPOUT: bool = False, MONOTONE: bool = False, **_: object) -> bool:
    """Whether registers are short, by a kernel's constants: for dropout, a monotone modulator, or a
    mask that is added or has a row for each query."""
    return MASKING > 1 or DROPOUT or MONOTONE


# By whether the products are float32, without tensor cores, and the padded head size, from 32. No
# candidate spills registers in its loop on sm_80 and sm_90. The first candidate leaves room for a
# second thread block on a multiprocessor; among such launches it has the fewest instructions.
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
        # In float32 it rounds as query_kernel does only with the same blocks.
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
# Half precision where a program may have much shared memory: of some fifteen a kernel, the fastest
# on an H100 that spill nothing there. By kernel and padded head size, and what heavy calls have
# instead.
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
_LEAST_MEMORY = 99 * 1024
# What was fastest, for the life of the process.
_fastest: dict[Hashable, Launch] = {}


def shared_memory(capability: int) -> int:
    """Bytes that every GPU of such a compute capability, 80 or more, offers a program."""
    return 227 * 1024 if capability // 10 in (9, 10) else _LEAST_MEMORY


@functools.cache
def candidates(call: Call, capability: int) -> list[Launch]:
    """The launches of such a call, the best by the compiler first, on a GPU of this compute
    capability, as 90 for 9.0."""
    is_exact, place = call.dtype == torch.float32, (call.kernel, call.width)
    if not is_exact and place in _LARGE and shared_memory(capability) > _LEAST_MEMORY:
        return [_LARGE_HEAVY.get(place, _LARGE[place]) if call.is_heavy else _LARGE[place]]
    return _CANDIDATES[call.kernel][is_exact, max(call.width, 32)]


def _milliseconds(run: Callable[[], object], repetitions: int = 5) -> float:
    """The shortest of some runs on the GPU, after one that compiles."""
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
    """Run a kernel with the launch that is fastest here, and return what that run returns.

    Args:
        choice: of `candidates`.
        call: what decides which is fastest, the kernel included: for calls that are equal in it,
            they are tried once in the life of the process.
        run: runs the kernel. Its outputs are written, not added to: it may run again and again.
        timer: gives the time of a call.

    Nothing is tried where there is no choice, where runs must not differ from one process to the
    next, in the interpreter, and while a CUDA graph is recorded: the first candidate runs then.
    """
    if len(choice) == 1 or interpreted() or torch.are_deterministic_algorithms_enabled():
        return run(choice[0])
    if call not in _fastest:
        if torch.cuda.is_current_stream_capturing():
            return run(choice[0])
        _fastest[call] = _try(choice, run, timer)
    return run(_fastest[call])


def _try(
    choice: list[Launch],
    run: Callable[[Launch], object],
    timer: Callable[[Callable[[], object]], float],
) -> Launch:
    """The fastest of these; the first if none of them can be launched, which then says why."""
    times = {}
    for launch in choice:
        with contextlib.suppress(OutOfResources, PTXASError):  # more than this GPU has
            times[launch] = timer(functools.partial(run, launch))
    return min(times, key=times.__getitem__, default=choice[0])


# --- a launch ----------------------------------------------------------------------------------

_Picked = Callable[[dict[str, Any]], tuple[Any, ...]]


class _Parameters(NamedTuple):
    """Functions that pick from a kernel's arguments by name: all, in the kernel's order; the
    tensors; the numbers; the numbers that Triton specialises on (1, multiples of 16); the
    constants."""

    all: _Picked
    tensors: _Picked
    numbers: _Picked
    specialized: _Picked
    constants: _Picked


_parameters: dict[Callable[..., Any], _Parameters] = {}
# What Triton compiled, by all that it compiles for.
_compiled: dict[Hashable, CompiledKernel] = {}


def run_kernel(kernel: Any, programs: int, arguments: dict[str, Any]) -> None:
    """Run a kernel on the current device, all arguments by name.

    Equivalent to: kernel[(programs,)](**arguments), which needs longer than many a kernel to find
    what it has compiled for such arguments
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
    # A larger one is of another type.
    fits = max(parameters.numbers(arguments), default=0) < 2**31
    if compiled is not None and fits:
        compiled[programs, 1, 1](*parameters.all(arguments))
        return
    compiled = kernel[(programs,)](**arguments)
    if fits and isinstance(compiled, CompiledKernel):
        _compiled[call] = compiled


def _picked(names: list[str]) -> _Picked:
    """Return a function that picks these arguments as a tuple.

    `itemgetter` gives a tuple for two names or more only.
    """
    if len(names) > 1:
        return itemgetter(*names)
    return lambda arguments: tuple(arguments[name] for name in names)


def _parameters_of(kernel: Any, arguments: dict[str, Any]) -> _Parameters:
    constants = [p.name for p in kernel.params if p.is_constexpr]
    constants += sorted(arguments.keys() - set(kernel.arg_names))  # for the compiler
    others = [p for p in kernel.params if not p.is_constexpr]
    tensors = [p for p in others if isinstance(arguments[p.name], (Tensor, NoneType))]
    numbers = [p for p in others if p not in tensors]
    found = _Parameters(
        all=_picked(kernel.arg_names),
        tensors=_picked([p.name for p in tensors]),
        numbers=_picked([p.name for p in numbers]),
        specialized=_picked([p.name for p in numbers if not p.do_not_specialize]),
        constants=_picked(constants),
    )
    _parameters[kernel.fn] = found
    return found
