"""Writes the files of a collection, which `analysis/collect.py` describes."""

import contextlib
import csv
import json
import math
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from multimax_fairseq.analysis import COLUMNS
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.learned_scalars import symbols
from multimax_fairseq.statistics.sums import AttentionSums

SIGNATURE, EXAMPLE_FILE = "collection.json", "examples.json"
FILES = {SIGNATURE, EXAMPLE_FILE, *(f"{name}.csv" for name in COLUMNS)}

Tables = dict[str, list[dict[str, Any]]]


# --- the tables -----------------------------------------------------------------------------------


def empty_tables() -> Tables:
    return {name: [] for name in COLUMNS}


def add_attention(tables: Tables, updates: int, kind: str, layer: int, sums: AttentionSums) -> None:
    """Add the rows of one layer's attention."""
    at = {"updates": updates, "kind": kind, "layer": layer}
    tables["parameters"] += parameter_rows(updates, kind, layer, sums.normalizer)
    tables["heads"] += [{**at, **row} for row in sums.head_rows()]
    tables["layers"].append({**at, **sums.layer_row()})
    tables["histograms"] += [{**at, **row} for row in sums.histogram_rows()]
    tables["temperatures"] += [{**at, **row} for row in sums.temperature_rows()]


def parameter_rows(
    updates: int, kind: str, layer: int | None, module: torch.nn.Module
) -> list[dict[str, Any]]:
    at = {"updates": updates, "kind": kind, "layer": layer}
    return [
        {**at, "head": head if len(values) > 1 else None, "name": name, "value": float(value)}
        for parameter, tensor in module.named_parameters()
        for name, values in symbols(f"normalizer.{parameter}", tensor.detach()).items()
        for head, value in enumerate(values)
    ]


def _write_table(file: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        # The files call the kind of an attention its place.
        writer.writerow({name: "place" if name == "kind" else name for name in columns})
        for row in rows:
            writer.writerow({key: _cell(value) for key, value in row.items()})


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.9g}"
    return value


def _write_json(file: Path, value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False) + "\n"
    # Escape the bytes of a path that are not UTF-8.
    text = re.sub("[\udc80-\udcff]", lambda byte: f"\\\\x{ord(byte[0]) & 0xFF:02x}", text)
    file.write_text(text, encoding="utf-8")


# --- the folder -----------------------------------------------------------------------------------


def write(
    out: Path, folder: Path, tables: Tables, examples: list[Any], metadata: dict[str, Any]
) -> None:
    """Write all files to a folder of `temporary_folder`, which then becomes `out`."""
    with _explain_write_error(out):
        for name, columns in COLUMNS.items():
            rows = sorted(tables[name], key=lambda row: row["updates"])
            _write_table(folder / f"{name}.csv", columns.split(), rows)
        _write_json(folder / EXAMPLE_FILE, examples)
        _write_json(folder / SIGNATURE, metadata)
        _replace_collection(out.resolve(), folder)


@contextlib.contextmanager
def temporary_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, and delete it on exit unless `write` has renamed it.

    Raises:
        UsageError: a collection cannot be written to `out`.
    """
    target = out.resolve()
    working_folder = Path.cwd().resolve()
    if target in (working_folder, *working_folder.parents):
        raise UsageError(f"--out '{out}' holds the current folder: pass a folder below it")
    is_empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not is_empty and not (target / SIGNATURE).is_file():
        raise UsageError(
            f"'{out}' is there and is not a collection: pass another --out, or remove it"
        )
    # A random name, because another container may have the same process ID.
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with _explain_write_error(out):
        folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _explain_write_error(out: Path) -> Iterator[None]:
    """Convert an OSError to a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write to '{out}' ({error.strerror}): make room there, or pass another --out"
        ) from None


def _replace_collection(out: Path, new: Path) -> None:
    """Replace `out` by `new`; keep files in `out` that are not part of a collection."""
    old = new.with_suffix(".old")
    if out.exists():
        out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    if old.exists():
        for entry in list(old.iterdir()):
            if entry.name not in FILES:
                entry.rename(out / entry.name)
        shutil.rmtree(old, ignore_errors=True)
