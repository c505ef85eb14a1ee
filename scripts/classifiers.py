"""Shared code of the experiments that train without fairseq: options, runs, results.

An experiment has rows, {name: row}, whose attributes are label, paper (its score) and epochs.
"""

import argparse
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lib
import torch
from lib import ROOT

from multimax_fairseq.commands.runs import Run, work
from multimax_fairseq.commands.stock import portable
from multimax_fairseq.commands.tables import Column, Line, summary
from multimax_fairseq.files import whole
from multimax_fairseq.signature import processor_and_threads


def options(name: str, doc: str, rows: dict[str, Any], chosen: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all of these experiments have."""
    parser = argparse.ArgumentParser(
        prog=f"{name}.sh", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "all" if chosen == ",".join(rows) else chosen
    parser.add_argument(
        "--rows",
        type=lambda names: _known(names.split(","), rows),
        default=chosen,
        metavar="ROW,...",
        help=f"of {', '.join(rows)}; default {default}",
    )
    parser.add_argument("--seeds", type=lib.numbers, default=[1], metavar="N,...", help="default 1")
    parser.add_argument("--epochs", type=lib.positive, metavar="N", help="default: the paper's")
    out = ROOT / "results" / name
    parser.add_argument(
        "--out", type=Path, default=out, metavar="DIR", help=f"default results/{name}"
    )
    return parser


def _known(names: list[str], rows: dict[str, Any]) -> list[str]:
    if unknown := [name for name in names if name not in rows]:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]!r}: choose from {', '.join(rows)}")
    return names


def run_all(
    name: str,
    rows: dict[str, Any],
    args: argparse.Namespace,
    settings: list[str],
    data: str,
    train: Callable[[str, int, int, Path], Line],
    columns: dict[str, Column],
) -> None:
    """Train the chosen rows and seeds, and print the table of all results in args.out.

    Args:
        settings: the command's other options that change the result.
        data: a hash of the data.
        train: train(row, seed, epochs, folder) returns the metrics.
        columns: of the table, before that of the paper's score.
    """

    def result_of(row: str, seed: int, epochs: int, run: Run, _: int) -> Line:
        known = {"experiment": name, "row": row, "seed": seed}
        return {**known, **train(row, seed, epochs, run.folder), "hardware": _hardware(args)}

    runs = []
    for seed, row in itertools.product(args.seeds, args.rows):
        epochs = args.epochs or rows[row].epochs
        words = [f"scripts/{name}.sh", *settings, "--rows", row]
        words += ["--seeds", str(seed), "--epochs", str(epochs)]
        label, folder = f"{name} {row}, seed {seed}", args.out / row / f"seed-{seed}"
        make_result = functools.partial(result_of, row, seed, epochs)
        runs.append(Run(label, folder, portable(words), data, make_result))
    work(runs)

    def table(results: list[Line]) -> str:
        blocks = [[r for r in results if r["row"] == row] for row in rows]
        paper = {"paper": lambda block: rows[block[0]["row"]].paper}
        return summary(blocks, columns | paper)

    print(f"\n{lib.collect(args.out, table)}\nResults: {args.out}")


def save(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint atomically."""
    with whole(file) as aside:
        torch.save(state, aside)


def _hardware(args: argparse.Namespace) -> str:
    if torch.cuda.is_available():
        return f"{getattr(args, 'gpus', 1)} x {torch.cuda.get_device_name()}"
    return processor_and_threads(torch.get_num_threads())
