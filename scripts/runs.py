"""Shared code of the experiments that train without fairseq: options, runs, results.

An experiment has rows, {name: row}, whose attributes are label, paper (its score) and epochs.
"""

import argparse
import itertools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lib
import torch
from lib import ROOT

from multimax_fairseq.commands.stock import portable
from multimax_fairseq.commands.tables import Column, Line, summary
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import whole, write, write_json
from multimax_fairseq.signature import processor_and_threads, signature


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
    for seed, row in itertools.product(args.seeds, args.rows):
        folder = args.out / row / f"seed-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        epochs = args.epochs or rows[row].epochs
        words = [f"{name}.sh", *settings, "--rows", row]
        words += ["--seeds", str(seed), "--epochs", str(epochs)]
        command = f"scripts/{shlex.join(portable(words))}"
        _check_same(folder, data, command)
        if (folder / "result.json").exists():
            print(f"Nothing to do: {name} {row}, seed {seed} is finished.")
            continue
        made_with = signature("timm")  # before the checkout can change
        line = {
            "experiment": name,
            "row": row,
            "seed": seed,
            **train(row, seed, epochs, folder),
            "data": data,
            "command": command,
            "hardware": _hardware(args),
            **made_with,
        }
        write_json(folder / "result.json", line)

    def table(results: list[Line]) -> str:
        blocks = [[r for r in results if r["row"] == row] for row in rows]
        paper = {"paper": lambda block: rows[block[0]["row"]].paper}
        return summary(blocks, columns | paper)

    print(f"\n{lib.collect(args.out, table)}\nResults: {args.out}")


def save(state: dict[str, Any], file: Path) -> None:
    """Write a checkpoint atomically."""
    with whole(file) as aside:
        torch.save(state, aside)


def _check_same(folder: Path, data: str, command: str) -> None:
    """Write the folder's command and the hash of the data.

    Raise UsageError if the folder holds a run of another command, or a run of the same table used
    other data.
    """
    remedy = "give another --out, or remove that folder"
    file, text = folder / "command", f"{data}\n{command}\n"
    for other in folder.parent.parent.glob("*/seed-*/command"):
        before = other.read_text(encoding="utf-8")
        if before.partition("\n")[0] != data:
            raise UsageError(f"'{other.parent}' was trained on other data: {remedy}")
        if other == file and before != text:
            raise UsageError(f"'{folder}' was trained with another command: {remedy}")
    write(file, text)


def _hardware(args: argparse.Namespace) -> str:
    if torch.cuda.is_available():
        return f"{getattr(args, 'gpus', 1)} x {torch.cuda.get_device_name()}"
    return processor_and_threads(torch.get_num_threads())
