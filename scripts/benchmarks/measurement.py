"""Measures contestants against each other.

Every contestant runs once in each round, and a different one starts each round. A ratio is the
median over the rounds of the ratio within a round, so a temporary slow-down affects both sides.
"""

import contextlib
import gc
import logging
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from multimax_fairseq.children import end_with_parent
from multimax_fairseq.errors import UsageError

BEST = "best baseline"
PLAIN, AUTO = "MultiMax (plain)", "MultiMax (auto)"
# On a GPU, launch and synchronisation would dominate the time of a single step.
STEPS_ON_GPU = 20
# Largest difference between equivalent contestants, relative to the largest entry.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Ready(NamedTuple):
    """A contestant with its inputs.

    `step(round)` does the work and returns counts, such as tokens. `result()` returns named tensors
    or lists of tokens, which must agree within a family. `gradients` is their size in bytes.
    `zeros` is the share of zero weights among the keys that are not excluded, `flops` the number
    of operations for one image.
    """

    step: Callable[[int], dict[str, int]]
    result: Callable[[], Any]
    gradients: int = 0
    zeros: float | None = None
    flops: float | None = None


class Contestant(NamedTuple):
    make: Callable[[], Ready]
    family: str
    backend: str = "auto"


class Case(NamedTuple):
    """One comparison: `x` is its position in a sweep; ratios are relative to the `references`.

    The reference BEST is the one of the `baselines` with the best median of the first quantity.
    If it `settles`, a turn begins with an untimed step, which lets the previous contestant's
    memory return to the system. On a GPU the turn then times STEPS_ON_GPU steps.
    """

    label: str
    x: int
    contestants: dict[str, Contestant]
    references: list[str]
    quantities: list[str]
    baselines: Sequence[str] = ()
    settles: bool = False


def quiet() -> None:
    """Silence the deprecation warnings of fairseq and hydra."""
    # Importing fairseq may leave the level DEBUG, at which autograd traces every node.
    logging.getLogger().setLevel(logging.WARNING)
    warnings.simplefilter("ignore")


def using_backend(contestant: Contestant) -> contextlib.AbstractContextManager[None]:
    """Set MULTIMAX_BACKEND to the contestant's backend inside the `with` block."""
    return mock.patch.dict(os.environ, MULTIMAX_BACKEND=contestant.backend)


def prepare(contestant: Contestant) -> Ready:
    with using_backend(contestant):
        return contestant.make()


def timed(
    step: Callable[[int], dict[str, int]], number: int, device: str, times: int = 1
) -> dict[str, float]:
    """Run `times` steps; return the counts of the last step and the mean seconds of a step."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        counts = step(number)
    synchronize()
    return {"seconds": (time.perf_counter() - start) / times, **counts}


# --- agreement ---------------------------------------------------------------------------------


def difference(ours: Any, theirs: Any) -> tuple[float, str]:
    """The difference of two results, as a number and in words."""
    if isinstance(ours, list):
        count = sum(a != b for a, b in zip(ours, theirs, strict=True))
        return count, f"{count:,} of {len(ours):,} hypotheses differ"
    errors = []
    for name, their in theirs.items():
        their = their.float()
        # tiny avoids 0 / 0 if both are zero.
        scale = their.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        errors.append((((ours[name].float() - their).abs().max() / scale).item(), name))
    worst, name = max(errors, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return worst, f"they differ by {worst:.2g} at most, in the {name}"


def compare(case: Case, ready: dict[str, Ready], dtype: torch.dtype) -> dict[str, Any]:
    """The difference of each contestant to the first of its family; UsageError if too large."""
    agreement: dict[str, Any] = {}
    for family in dict.fromkeys(c.family for c in case.contestants.values()):
        first, *others = [name for name, c in case.contestants.items() if c.family == family]
        theirs = None
        for name in others:
            if theirs is None:
                with using_backend(case.contestants[first]):
                    theirs = ready[first].result()
            with using_backend(case.contestants[name]):
                ours = ready[name].result()
            error, words = difference(ours, theirs)
            if not error <= (0 if isinstance(ours, list) else TOLERANCE[dtype]):
                raise UsageError(
                    f"{name} against {first}: {words}; nothing was timed, and "
                    "MULTIMAX_BACKEND=plain disables the fast paths"
                )
            agreement[name] = {"with": first, "difference": error, "words": words}
    return agreement


# --- memory ------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A memory field of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def peak_of_process(
    cases: Callable[[Any], list[Case]], args: Any, index: int, name: str
) -> dict[str, int]:
    """The peak memory of a step, in a process that does nothing else."""
    quiet()
    contestant = cases(args)[index].contestants[name]
    with using_backend(contestant):
        ready = contestant.make()
        start = status("VmRSS")
        ready.step(0)
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
        ready.step(1)
    # Libraries and workspaces that the first step loaded are not part of the second's peak.
    return {"peak_memory": status("VmHWM") - before, "kept_memory": before - start}


def peak_of_gpu(contestant: Contestant, ready: Ready) -> dict[str, int]:
    with using_backend(contestant):
        ready.step(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # fairseq's trainer resets the peak at the end of its step.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            ready.step(1)
        torch.cuda.synchronize()
    return {"peak_memory": torch.cuda.max_memory_allocated() - before}


def peak_elsewhere(*task: Any) -> dict[str, int]:
    """`peak_of_process` in a new process that returns freed memory to the system at once."""
    # The server has imported the packages but has computed nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload(["fairseq.trainer", "multimax_fairseq.models"])
    at_once = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    with (
        mock.patch.dict(os.environ, at_once),
        ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent) as pool,
    ):
        try:
            return pool.submit(peak_of_process, *task).result()
        except BrokenProcessPool:
            raise UsageError(
                "the process that measured memory was killed, probably for lack of memory: pass "
                "smaller sizes, or --no-memory"
            ) from None


# --- measurement -------------------------------------------------------------------------------


def measure(cases: Callable[[Any], list[Case]], args: Any) -> list[dict[str, Any]]:
    """Run all cases and return their `summary`."""
    results = []
    with_peaks = args.memory and (args.device == "cuda" or Path("/proc/self/clear_refs").exists())
    # The cases are built again for every index, so that only one case's inputs exist at a time.
    for index in range(len(cases(args))):
        case = cases(args)[index]
        print(f"{case.label}: {len(case.contestants)} contestants", file=sys.stderr)
        ready = {name: prepare(contestant) for name, contestant in case.contestants.items()}
        agreement = compare(case, ready, getattr(torch, args.dtype))
        rounds = run_rounds(case, ready, args)
        peaks: dict[str, dict[str, Any]] = {
            name: {"gradients": each.gradients, "zeros": each.zeros, "flops": each.flops}
            for name, each in ready.items()
        }
        for name in rounds if with_peaks and args.device == "cuda" else ():
            peaks[name] |= peak_of_gpu(case.contestants[name], ready[name])
        # Frees the memory for the next case, or for the process that measures memory.
        ready.clear()
        case = case._replace(contestants={})
        gc.collect()
        for name in rounds if with_peaks and args.device == "cpu" else ():
            peaks[name] |= peak_elsewhere(cases, args, index, name)
        results.append(summary(case, rounds, peaks, agreement))
    return results


def run_rounds(case: Case, ready: dict[str, Ready], args: Any) -> dict[str, list[dict[str, float]]]:
    """{contestant: its turns}, without the warm-up."""
    names = list(ready)
    times = STEPS_ON_GPU if case.settles and args.device == "cuda" else 1
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(args.warmup + args.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            with using_backend(case.contestants[name]):
                if case.settles:
                    ready[name].step(number)
                turn = timed(ready[name].step, number, args.device, times)
            if number >= args.warmup:
                rounds[name].append(turn)
    return rounds


def quartiles(values: list[float]) -> dict[str, float]:
    lower, median, upper = np.percentile(values, [25, 50, 75])
    return {"median": float(median), "lower": float(lower), "upper": float(upper)}


def summary(
    case: Case,
    rounds: dict[str, list[dict[str, float]]],
    peaks: dict[str, dict[str, Any]],
    agreement: dict[str, Any],
) -> dict[str, Any]:
    """Medians, quartiles and ratios of a case, in seconds or in counts per second."""

    def values(name: str, quantity: str) -> list[float]:
        if quantity == "seconds":
            return [turn["seconds"] for turn in rounds[name]]
        return [turn[quantity.removesuffix("/s")] / turn["seconds"] for turn in rounds[name]]

    quantity = case.quantities[0]
    medians = {name: statistics.median(values(name, quantity)) for name in case.baselines}
    choose = min if quantity == "seconds" else max
    best = choose(medians, key=medians.__getitem__) if medians else None
    theirs = {
        quantity: {n: values(best if n == BEST else n, quantity) for n in case.references}
        for quantity in case.quantities
    }
    contestants = {}
    for name in rounds:
        entry: dict[str, Any] = {"rounds": rounds[name], **peaks[name]}
        for quantity in case.quantities:
            ours = values(name, quantity)
            entry[quantity] = quartiles(ours) | {
                "ratios": {
                    other: quartiles([a / b for a, b in zip(ours, their, strict=True)])
                    for other, their in theirs[quantity].items()
                }
            }
        contestants[name] = entry
    return {
        **{"case": case.label, "x": case.x, "references": case.references, BEST: best},
        **{"quantities": case.quantities, "agreement": agreement, "contestants": contestants},
    }
