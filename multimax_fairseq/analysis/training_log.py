"""Reads what `--monitor-interval` has left in the logs of fairseq-train; needs no fairseq."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from multimax_fairseq.analysis.collection import MOST
from multimax_fairseq.compat.patch import MONITOR
from multimax_fairseq.errors import UsageError, no_file

EPOCH = "train_"  # begins the names in an epoch's own line


@dataclass
class TrainingLog:
    """The monitor's figures of a run.

    Attributes:
        label: what legends call it.
        figures: a row a figure: `updates`, `place` (encoder, decoder, cross, output), `layer` (NaN
            for the output), `name`, `value`; what each head has is a row each.
    """

    label: str
    figures: pd.DataFrame


def read(file: Path) -> TrainingLog:
    """Return a run's figures, from --log-file or from what the command printed; of an update that
    is there twice, as after a crash, the later ones.

    Raises:
        UsageError: no such file, or no figures of the monitor in it.
    """
    if not file.is_file():
        raise no_file("log", file)
    found: dict[tuple[int, str], float] = {}
    for line in _lines(file):
        names = {name.removeprefix(EPOCH): value for name, value in line.items()}
        figures = {n.removeprefix(MONITOR): v for n, v in names.items() if n.startswith(MONITOR)}
        updates = figures.pop("updates", None)
        if updates is not None:
            try:
                found |= {(int(float(updates)), n): float(v) for n, v in figures.items()}
            except (TypeError, ValueError, OverflowError) as error:
                raise _damaged(file, error) from None
    if not found:
        raise UsageError(
            f"log '{file}' has no line of the monitor: train with --monitor-interval 100 "
            "--log-format json --log-file FILE, and give that file"
        )
    rows = []
    for (updates, key), value in found.items():
        at, _, name = key.partition("/")
        place, _, layer = at.partition(".")
        symbol, _, head = name.rpartition(".")
        rows.append((updates, place, layer or None, symbol if head.isdigit() else name, value))
    frame = pd.DataFrame(rows, columns="updates place layer name value".split())
    try:
        frame["layer"] = pd.to_numeric(frame["layer"])
        if not frame["layer"].dropna().isin(range(MOST)).all():
            raise ValueError("layers that do not count from 0")
    except ValueError as error:
        raise _damaged(file, error) from None
    return TrainingLog(file.stem, frame.sort_values("updates", kind="stable"))


def _damaged(file: Path, why: Exception) -> UsageError:
    return UsageError(
        f"log '{file}' has a line that --monitor-interval has not written ({why}): remove that line"
    )


def read_all(files: list[Path]) -> list[TrainingLog]:
    """Return the figures of several runs, with labels that tell them apart."""
    found = [read(file) for file in files]
    labels = [log.label for log in found]
    for index, (log, file) in enumerate(zip(found, files, strict=True)):
        if labels.count(labels[index]) > 1:
            log.label = f"{file.resolve().parent.name}/{log.label}"
    labels = [log.label for log in found]
    for index, log in enumerate(found):
        if labels.count(labels[index]) > 1:
            log.label += f" {index + 1}"
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of JSON at the ends of a log's lines, but what a crash has cut off."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            start = line.find("{")
            if start < 0 or MONITOR not in line:
                continue
            try:
                found = json.loads(line[start:])
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found
