"""Reads losses and the lines of `--monitor-interval` in logs of fairseq-train, without fairseq."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from multimax_fairseq.analysis.collection import distinct
from multimax_fairseq.compat.patch import MONITOR
from multimax_fairseq.errors import UsageError, no_file

EPOCH = "train_"  # prefix of the names in the line that ends an epoch
# {name of a curve: names in fairseq's lines, the first that is there}; losses in bits per token
CURVES = {
    "training_loss": ("nll_loss", "loss"),
    "validation_loss": ("valid_nll_loss", "valid_loss"),
    "learning_rate": ("lr",),
}


@dataclass
class TrainingLog:
    """Losses and the monitor's values of one run.

    Attributes:
        label: the run's name in legends.
        values: one row per value: `updates`, `kind` (training, encoder, decoder, cross, output),
            `layer` (NaN for training and output), `name`, `value`. A value per head has one row
            per head.
    """

    label: str
    values: pd.DataFrame


def read(file: Path) -> TrainingLog:
    """Return a run's values, from --log-file or from the command's output.

    If an update occurs twice, as after a crash, the later line counts.

    Raises:
        UsageError: no such file, or no values in it.
    """
    if not file.is_file():
        raise no_file("log", file)
    logged: dict[tuple[int, str], float] = {}
    for line in _lines(file):
        names = {name.removeprefix(EPOCH): value for name, value in line.items()}
        values = {n.removeprefix(MONITOR): v for n, v in names.items() if n.startswith(MONITOR)}
        updates = values.pop("updates", None)
        if updates is not None:
            logged |= {(int(float(updates)), n): float(v) for n, v in values.items()}
        updates = line.get("num_updates", line.get("valid_num_updates"))
        for curve, keys in CURVES.items():
            key = next((key for key in keys if key in line), None)
            if updates is not None and key is not None:
                logged[int(float(updates)), f"training/{curve}"] = float(line[key])
    if not logged:
        raise UsageError(
            f"log '{file}' has no lines in JSON: train with --monitor-interval 100 "
            "--log-format json --log-file FILE, and pass that file"
        )
    rows = []
    for (updates, key), value in logged.items():  # encoder.0/sparsity, decoder.1/alpha.3
        at, _, name = key.partition("/")
        kind, _, layer = at.partition(".")
        symbol, _, head = name.rpartition(".")
        rows.append((updates, kind, layer or None, symbol if head.isdigit() else name, value))
    frame = pd.DataFrame(rows, columns="updates kind layer name value".split())
    frame["layer"] = pd.to_numeric(frame["layer"])
    return TrainingLog(file.stem, frame.sort_values("updates", kind="stable"))


def read_all(files: list[Path]) -> list[TrainingLog]:
    """Return the values of several runs with distinct labels."""
    logs = [read(file) for file in files]
    labels = [log.label for log in logs]
    longer = [f"{file.resolve().parent.name}/{file.stem}" for file in files]
    for log, label in zip(logs, distinct(labels, longer), strict=True):
        log.label = label
    return logs


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object at the end of each line; skip lines that a crash has cut off."""
    with file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            start = line.find("{")
            if start < 0 or "num_updates" not in line:
                continue
            with contextlib.suppress(ValueError):
                yield json.loads(line[start:])
