"""Prints and writes the results of benchmarks."""

import itertools
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.measurement import BEST
from multimax_fairseq.commands.tables import markdown
from multimax_fairseq.files import whole, write_json
from multimax_fairseq.signature import processor, signature

MARKERS = "os^DvP*X<>"


def conditions(args: Any) -> dict[str, Any]:
    """Everything that is needed to repeat the measurement."""
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


def table(case: dict[str, Any]) -> str:
    entries = case["contestants"]
    with_peaks = any("peak_memory" in entry for entry in entries.values())
    with_gradients = any(entry.get("gradients") for entry in entries.values())
    with_zeros = any(entry.get("zeros") is not None for entry in entries.values())
    with_flops = any(entry.get("flops") is not None for entry in entries.values())
    head = ["contestant"]
    for quantity in case["quantities"]:
        head += ["ms" if quantity == "seconds" else quantity]
        head += [f"x {other}" for other in case["references"]]
    head += ["zeros"] * with_zeros + ["GFLOPs per image"] * with_flops
    head += ["peak MB"] * with_peaks + ["less gradients"] * (with_peaks and with_gradients)
    rows = []
    for name, entry in entries.items():
        cells = [name]
        for quantity in case["quantities"]:
            cells.append(spread(entry[quantity], 1e3 if quantity == "seconds" else 1))
            ratios = entry[quantity]["ratios"]
            cells += [f"{ratios[other]['median']:.2f}" for other in case["references"]]
        if with_zeros:
            cells.append("" if entry["zeros"] is None else f"{entry['zeros']:.0%}")
        if with_flops:
            cells.append(f"{entry['flops'] / 1e9:.3f}")
        if with_peaks:
            cells.append(number(entry["peak_memory"] / 1e6))
            if with_gradients:
                cells.append(number(max(entry["peak_memory"] - entry["gradients"], 0) / 1e6))
        rows.append(cells)
    best = f"; {BEST}: {case[BEST]}" if case[BEST] else ""
    return f"{case['case']}{best}\n{markdown(head, rows, align=True)}"


def show(cases: list[dict[str, Any]], metadata: dict[str, Any]) -> None:
    """Print the tables and the conditions."""
    for case in cases:
        print(table(case))
        for name, agreed in case["agreement"].items():
            print(f"{name} against {agreed['with']}: {agreed['words']}")
        print()
    versions = ", ".join(f"{name} {version}" for name, version in metadata["versions"].items())
    print(
        f"Medians and quartiles of {metadata['rounds']} rounds, in {metadata['dtype']}, on "
        f"{metadata['device']}, {metadata['threads']} threads.\n{versions}, "
        f"commit {metadata['commit']}"
    )


def plot(cases: list[dict[str, Any]], sweep: str, title: str, files: list[Path]) -> None:
    """Draw time and peak memory over the values of a sweep."""
    import matplotlib
    from matplotlib import style
    from matplotlib.figure import Figure

    # A palette for colour-blind readers; text stays text in SVG.
    style.use("tableau-colorblind10")
    matplotlib.rcParams["svg.fonttype"] = "none"
    x = [case["x"] for case in cases]
    names = list(cases[0]["contestants"])
    with_peaks = "peak_memory" in cases[0]["contestants"][names[0]]
    figure = Figure(figsize=(6 * (1 + with_peaks), 4.5), layout="constrained")
    figure.suptitle(title, fontsize=9)
    axes = figure.subplots(1, 1 + with_peaks, squeeze=False)[0]
    for marker, name in zip(itertools.cycle(MARKERS), names, strict=False):
        entries = [case["contestants"][name] for case in cases]
        times = {
            key: [entry["seconds"][key] * 1e3 for entry in entries]
            for key in ("median", "lower", "upper")
        }
        axes[0].plot(x, times["median"], marker=marker, label=name)
        axes[0].fill_between(x, times["lower"], times["upper"], alpha=0.2)
        if with_peaks:
            axes[1].plot(x, [entry["peak_memory"] / 1e6 for entry in entries], marker=marker)
    for axis, label in zip(axes, ("ms", "peak memory, MB"), strict=False):
        axis.set(xscale="log", yscale="log", xlabel=sweep, ylabel=label)
        axis.set_xticks(x, labels=[f"{value:,}" for value in x])
        axis.minorticks_off()
    axes[0].legend(fontsize="small")
    for file in files:
        with whole(file) as aside:
            figure.savefig(aside, format=file.suffix[1:], dpi=150)


def report(cases: list[dict[str, Any]], metadata: dict[str, Any], args: Any) -> None:
    """Print the tables; with --out, write the data, and the figure of a sweep."""
    show(cases, metadata)
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    base = args.out / f"benchmark-{args.command}"
    write_json(base.with_suffix(".json"), {**metadata, "cases": cases})
    if getattr(args, "sweep", None):
        x = {"attention": "length", "output": "vocabulary"}[args.command]
        files = [base.with_suffix(ending) for ending in (".png", ".svg")]
        plot(cases, x, metadata["command"], files)
    print(f"Written to {args.out}")
