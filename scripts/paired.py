"""Runs contestants against each other: what scripts/benchmark.py measures with, and reports.

All contestants take their turn in every round, each round begun by another one, and a ratio is the
median over the rounds of the ratio within a round: what slows the machine for a while slows both.
"""

import contextlib
import gc
import json
import logging
import math
import os
import shlex
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
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import whole
from multimax_fairseq.signature import processor, signature

BEST = "best baseline"
PLAIN, AUTO = "MultiMax (plain)", "MultiMax (auto)"
MARKERS = "os^DvP*X<>"  # of the contestants in a figure
# On a GPU, launching and waiting would count too much in the time of one step.
STEPS_ON_GPU = 20
# The most that two ways of computing the same may differ, as a share of the largest entry.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class Ready(NamedTuple):
    """A contestant with its inputs: `step(round)` does the work and returns what it counted.

    `result()` is what all of its family must agree on: named tensors, or lists of tokens;
    `gradients` is how many bytes of gradients the work leaves.
    """

    step: Callable[[int], dict[str, int]]
    result: Callable[[], Any]
    gradients: int = 0


class Contestant(NamedTuple):
    make: Callable[[], Ready]
    family: str
    backend: str = "auto"


class Case(NamedTuple):
    """What is compared: `x` is its place in a sweep, `references` are what ratios are to.

    BEST among them is whichever of the `baselines` has the best median of the first quantity.
    Where it `settles`, a turn begins with an untimed step, which lets the previous contestant's
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
    """Silence what fairseq and hydra say of their own age."""
    # Importing fairseq may leave DEBUG, at which torch follows every node of a backward pass.
    logging.getLogger().setLevel(logging.WARNING)
    warnings.simplefilter("ignore")


def within(contestant: Contestant) -> contextlib.AbstractContextManager[None]:
    return mock.patch.dict(os.environ, MULTIMAX_BACKEND=contestant.backend)


def built(contestant: Contestant) -> Ready:
    with within(contestant):
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
    """How far two results are apart, as a number and in words."""
    if isinstance(ours, list):
        count = sum(a != b for a, b in zip(ours, theirs, strict=True))
        return count, f"{count:,} of {len(ours):,} hypotheses differ"
    found = []
    for name, their in theirs.items():
        their = their.float()
        # Where both are zero, so is the quotient.
        scale = their.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        found.append((((ours[name].float() - their).abs().max() / scale).item(), name))
    worst, name = max(found, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return worst, f"they differ by {worst:.2g} at most, in the {name}"


def compare(case: Case, ready: dict[str, Ready], dtype: torch.dtype) -> dict[str, Any]:
    """How far each contestant is from the first of its family; UsageError if it is too far."""
    agreement: dict[str, Any] = {}
    for family in dict.fromkeys(c.family for c in case.contestants.values()):
        first, *others = [name for name, c in case.contestants.items() if c.family == family]
        theirs = None
        for name in others:
            if theirs is None:
                with within(case.contestants[first]):
                    theirs = ready[first].result()
            with within(case.contestants[name]):
                ours = ready[name].result()
            error, words = difference(ours, theirs)
            if not error <= (0 if isinstance(ours, list) else TOLERANCE[dtype]):
                raise UsageError(
                    f"{name} against {first}: {words}; nothing was timed, and "
                    "MULTIMAX_BACKEND=plain does without the fast paths"
                )
            agreement[name] = {"with": first, "difference": error, "words": words}
    return agreement


# --- memory ------------------------------------------------------------------------------------


def status(field: str) -> int:
    """A field of this process's memory as the kernel counts it, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{field}:")[1].split()[0]) * 1024


def peak_of_process(
    cases: Callable[[Any], list[Case]], args: Any, index: int, name: str
) -> dict[str, int]:
    """What a step takes at most, in a process that does nothing else."""
    quiet()
    contestant = cases(args)[index].contestants[name]
    with within(contestant):
        ready = contestant.make()
        start = status("VmRSS")
        ready.step(0)
        gc.collect()
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
        ready.step(1)
    # What the first step left behind, libraries and workspaces, is no part of the second's peak.
    return {"peak_memory": status("VmHWM") - before, "kept_memory": before - start}


def peak_of_gpu(contestant: Contestant, ready: Ready) -> dict[str, int]:
    with within(contestant):
        ready.step(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        # fairseq's trainer would forget the peak at the end of its step.
        with mock.patch.object(torch.cuda, "reset_peak_memory_stats"):
            ready.step(1)
        torch.cuda.synchronize()
    return {"peak_memory": torch.cuda.max_memory_allocated() - before}


def peak_elsewhere(*task: Any) -> dict[str, int]:
    """`peak_of_process` in a new process, whose freed memory goes back to the system at once."""
    # Forked off a server that has imported the packages, and has computed nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload(["fairseq.trainer", "multimax_fairseq.models"])
    at_once = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    with (
        mock.patch.dict(os.environ, at_once),
        ProcessPoolExecutor(1, mp_context=context) as pool,
    ):
        try:
            return pool.submit(peak_of_process, *task).result()
        except BrokenProcessPool:
            raise UsageError(
                "a process that measured memory was killed, for lack of it as a rule: give "
                "smaller sizes, or --no-memory"
            ) from None


# --- measurement -------------------------------------------------------------------------------


def measure(cases: Callable[[Any], list[Case]], args: Any) -> list[dict[str, Any]]:
    """Run all cases, in rounds, and return what there is to know of each."""
    found = []
    with_peaks = args.memory and (args.device == "cuda" or Path("/proc/self/clear_refs").exists())
    with Progress(console=Console(stderr=True), transient=True) as progress:
        # Built anew for every case, so that the inputs of one are gone before the next.
        for index in range(len(cases(args))):
            case = cases(args)[index]
            names, label = list(case.contestants), case.label
            turns = len(names) * (args.warmup + args.rounds + with_peaks)
            task = progress.add_task(f"{label}: agreement", total=turns)

            def tell(what: str, done: int, task: TaskID = task, label: str = label) -> None:
                progress.update(task, description=f"{label}: {what}", advance=done)

            ready = {name: built(contestant) for name, contestant in case.contestants.items()}
            agreement = compare(case, ready, getattr(torch, args.dtype))
            rounds = run_rounds(case, ready, args, tell)
            peaks = {name: {"gradients": ready[name].gradients} for name in names}
            for name in names if with_peaks and args.device == "cuda" else ():
                peaks[name] |= peak_of_gpu(case.contestants[name], ready[name])
            # For the next case, or for the process that is about to need as much.
            ready.clear()
            case = case._replace(contestants={})
            gc.collect()
            for name in names if with_peaks and args.device == "cpu" else ():
                tell(f"memory of {name}", 1)
                peaks[name] |= peak_elsewhere(cases, args, index, name)
            progress.remove_task(task)
            found.append(summary(case, rounds, peaks, agreement))
    return found


def run_rounds(
    case: Case, ready: dict[str, Ready], args: Any, tell: Callable[[str, int], None]
) -> dict[str, list[dict[str, float]]]:
    """Each contestant's turns, without those of the warm-up."""
    names = list(ready)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(args.warmup + args.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            tell(f"round {number + 1}", 1)
            with within(case.contestants[name]):
                if case.settles:
                    ready[name].step(number)
                times = STEPS_ON_GPU if case.settles and args.device == "cuda" else 1
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
    peaks: dict[str, dict[str, int]],
    agreement: dict[str, Any],
) -> dict[str, Any]:
    """Medians, quartiles and ratios of a case: seconds, or what was counted a second."""

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


# --- the report --------------------------------------------------------------------------------


def conditions(args: Any) -> dict[str, Any]:
    """All that it takes to measure again."""
    if args.device == "cuda":
        device = torch.cuda.get_device_name()
    else:
        device = processor()
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "device": device,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "rounds": args.rounds,
        **signature(),
    }


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def spread(value: dict[str, float], unit: float = 1) -> str:
    """The median, and the quartiles in brackets."""
    median, lower, upper = (number(value[key] * unit) for key in ("median", "lower", "upper"))
    return f"{median} ({lower}-{upper})"


def table(case: dict[str, Any]) -> Table:
    best = f"; {BEST}: {case[BEST]}" if case[BEST] else ""
    found = Table(title=case["case"] + best, title_justify="left")
    found.add_column("")
    with_peaks = any("peak_memory" in entry for entry in case["contestants"].values())
    with_gradients = any(entry.get("gradients") for entry in case["contestants"].values())
    for quantity in case["quantities"]:
        found.add_column("ms" if quantity == "seconds" else quantity, justify="right")
        for other in case["references"]:
            found.add_column(f"x {other}", justify="right")
    if with_peaks:
        found.add_column("peak MB", justify="right")
        if with_gradients:
            found.add_column("less gradients", justify="right")
    for name, entry in case["contestants"].items():
        cells = [name]
        for quantity in case["quantities"]:
            cells.append(spread(entry[quantity], 1e3 if quantity == "seconds" else 1))
            for other in case["references"]:
                cells.append(f"{entry[quantity]['ratios'][other]['median']:.2f}")
        if with_peaks:
            cells.append(number(entry["peak_memory"] / 1e6))
            if with_gradients:
                cells.append(number(max(entry["peak_memory"] - entry["gradients"], 0) / 1e6))
        found.add_row(*cells)
    return found


def show(cases: list[dict[str, Any]], signed: dict[str, Any]) -> None:
    """Print the tables and what they were measured on."""
    # Where nobody looks at a terminal, lines are as long as the tables need.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for case in cases:
        console.print(table(case))
        for name, agreed in case["agreement"].items():
            console.print(f"{name} against {agreed['with']}: {agreed['words']}")
    versions = ", ".join(f"{name} {version}" for name, version in signed["versions"].items())
    console.print(
        f"Medians and quartiles of {signed['rounds']} rounds, in {signed['dtype']}, on "
        f"{signed['device']}, {signed['threads']} threads.\n{versions}, commit {signed['commit']}"
    )


def plot(cases: list[dict[str, Any]], sweep: str | None, title: str, files: list[Path]) -> None:
    """Draw the ratios to the reference, or, of a sweep, what grows with what; and memory."""
    import matplotlib
    from matplotlib import style
    from matplotlib.figure import Figure

    # For the colour-blind; and text stays text in SVG.
    style.use("tableau-colorblind10")
    matplotlib.rcParams["svg.fonttype"] = "none"
    quantity, reference = cases[0]["quantities"][0], cases[0]["references"][0]
    names = list(cases[0]["contestants"])
    entries = {name: [case["contestants"][name] for case in cases] for name in names}
    with_peaks = all("peak_memory" in entry for entry in entries[names[0]])
    figure = Figure(figsize=(6 * (1 + with_peaks), 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(1, 1 + with_peaks, squeeze=False)
    unit, ratio_of = ("ms", "time") if quantity == "seconds" else (quantity, quantity)
    factor = 1e3 if quantity == "seconds" else 1
    for index, name in enumerate(names):
        if sweep is not None:
            x = [case["x"] for case in cases]
            times = [entry[quantity] for entry in entries[name]]
            curves = [
                [time[key] * factor for time in times] for key in ("median", "lower", "upper")
            ]
            axes[0, 0].plot(x, curves[0], marker=MARKERS[index], label=name)
            axes[0, 0].fill_between(x, curves[1], curves[2], alpha=0.2)
            heights = [entry.get("peak_memory", 0) / 1e6 for entry in entries[name]]
            if with_peaks:
                axes[0, 1].plot(x, heights, marker=MARKERS[index], label=name)
            continue
        width = 0.8 / len(names)
        x = [place + index * width for place in range(len(cases))]
        ratios = [entry[quantity]["ratios"][reference] for entry in entries[name]]
        middle = [ratio["median"] for ratio in ratios]
        below = [ratio["median"] - ratio["lower"] for ratio in ratios]
        above = [ratio["upper"] - ratio["median"] for ratio in ratios]
        axes[0, 0].bar(x, middle, width, yerr=[below, above], capsize=2, label=name)
        if with_peaks:
            axes[0, 1].bar(x, [e["peak_memory"] / 1e6 for e in entries[name]], width, label=name)
    for axis in axes[0]:
        if sweep is None:
            middle_bar = 0.4 * (len(names) - 1) / len(names)
            axis.set_xticks([place + middle_bar for place in range(len(cases))])
            axis.set_xticklabels([case["case"] for case in cases])
        else:
            axis.set(xscale="log", yscale="log", xlabel=sweep)
            axis.set_xticks(x, labels=[f"{value:,}" for value in x])
            axis.minorticks_off()
    axes[0, 0].set_ylabel(unit if sweep is not None else f"{ratio_of}, ratio to {reference}")
    axes[0, 0].legend(fontsize="small")
    if with_peaks:
        axes[0, 1].set_ylabel("peak memory, MB")
    for file in files:
        with whole(file) as aside:
            figure.savefig(aside, format=file.suffix[1:], dpi=150)


def report(cases: list[dict[str, Any]], signed: dict[str, Any], args: Any) -> None:
    """Print the tables; write the data and the figure where they are asked for."""
    show(cases, signed)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        base = args.out / f"benchmark-{args.command}"
        with whole(base.with_suffix(".json")) as aside:
            aside.write_text(json.dumps({**signed, "cases": cases}) + "\n", encoding="utf-8")
        files = [base.with_suffix(ending) for ending in (".png", ".svg")]
        plot(cases, getattr(args, "swept", None), signed["command"], files)
        print(f"Data and figures: {base}.json, .png, .svg")
