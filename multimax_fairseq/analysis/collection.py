"""Reads the folder that `multimax-analyze collect` writes; needs no fairseq and no checkpoint."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from multimax_fairseq.analysis import ADDED, COLUMNS
from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.table import NORMALIZERS

ATTENTIONS = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}
PLACES = {**ATTENTIONS, "output": "output layer"}
KEYS = {
    "heads": ["updates", "place", "layer", "head"],
    "parameters": ["updates", "place", "layer", "head", "name"],
}
RANKS = "[0-9]{1,9}-[0-9]{0,9}"
TEXT = {"place", "name", "quantity", "bucket"}
MOST = 10_000  # layers, and heads


@dataclass
class Collection:
    """The tables of one collection, one attribute per file, and what it says of itself.

    Attributes:
        signed: collection.json.
        examples: examples.json, one dict per sentence (pair): `source` and `target`, each with
            `tokens` (subwords) and `words` (word, start, end: the range of its subwords);
            `attention` {place: [layer][head][query][key]} and
            `rollout` {place: [layer][query][key]};
            `densities` {place: [layer]} of continuous attention, missing in older collections. Of
            a layer: `kind`, "softmax" (a Gaussian) or "sparsemax" (a truncated parabola);
            `positions` of the keys, l / L; `mean` and `variance` of the score function, [head]
            [query]; `values` of the density at the keys' positions, [head][query][key]; `support`
            [head][query], (start, end): the range of the keys where it is above 0.
        label: what legends call it.
    """

    folder: Path
    signed: dict[str, Any]
    parameters: pd.DataFrame
    heads: pd.DataFrame
    layers: pd.DataFrame
    histograms: pd.DataFrame
    temperatures: pd.DataFrame
    output: pd.DataFrame
    examples: list[dict[str, Any]]
    label: str = field(init=False)

    def __post_init__(self) -> None:
        names = [*self.normalizers().values()]
        names += [f"continuous {kind}" for kind in self.checkpoint().get("densities", {}).values()]
        self.label = " / ".join(dict.fromkeys(names)) or self.folder.name

    def normalizers(self) -> dict[str, str]:
        """{place: name for people} of the last checkpoint."""
        checkpoint = self.checkpoint()
        labels = {name: mapping.label for name, mapping in NORMALIZERS.items()}
        labels |= checkpoint.get("labels", {})
        found = checkpoint.get("normalizer", {})
        return {place: labels.get(name, name) for place, name in found.items() if name}

    def checkpoint(self) -> dict[str, Any]:
        """What collection.json says of the last checkpoint."""
        return max(
            self.signed.get("checkpoints") or [{}], key=lambda found: found.get("updates", 0)
        )

    def places(self) -> list[str]:
        """The attentions there are, in the papers' order."""
        return [place for place in ATTENTIONS if (self.layers["place"] == place).any()]

    def updates(self) -> list[int]:
        return sorted(self.layers["updates"].unique().tolist())


def read(folder: Path) -> Collection:
    """Return the collection in a folder.

    Raises:
        UsageError: no such folder, a file is missing or is not of the agreed form.
    """
    if not folder.is_dir():
        raise UsageError(
            f"'{folder}' is not a folder: give one that `multimax-analyze collect` has written"
        )
    signed = _json(folder / "collection.json", dict)
    tables = {name: _table(folder / f"{name}.csv", words) for name, words in COLUMNS.items()}
    examples = _json(folder / "examples.json", list)
    if not all(_is_example(example) for example in examples):
        raise _damaged(folder / "examples.json", "each example is to have a source and a target")
    for name, keys in KEYS.items():
        if tables[name].duplicated(keys).any():
            raise _damaged(folder / f"{name}.csv", f"two rows have the same {', '.join(keys)}")
    if tables["layers"].empty:
        raise _damaged(folder / "layers.csv", "it has no rows")
    try:
        for checkpoint in signed.get("checkpoints") or []:
            if not isinstance(checkpoint.get("settings", {}), dict):
                raise TypeError("a checkpoint's settings are no dict")
        return Collection(folder, signed, **tables, examples=examples)
    except (AttributeError, TypeError, ValueError) as error:  # where it looks for its label
        raise _damaged(folder / "collection.json", str(error)) from None


def _is_example(example: Any) -> bool:
    return isinstance(example, dict) and all(
        isinstance(side, dict)
        and isinstance(side.get("words"), list)
        and isinstance(side.get("tokens"), list)
        and all(isinstance(token, str) for token in side["tokens"])
        for side in (example.get("source"), example.get("target"))
    )


def read_all(folders: list[Path]) -> list[Collection]:
    """Return several collections, with labels that tell them apart."""
    found = [read(folder) for folder in folders]
    labels = [collection.label for collection in found]
    for index, collection in enumerate(found):
        if labels.count(labels[index]) > 1:
            collection.label += f" ({collection.folder.resolve().name})"
    labels = [collection.label for collection in found]
    for index, collection in enumerate(found):
        if labels.count(labels[index]) > 1:
            collection.label += f" {index + 1}"
    return found


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last checkpoint."""
    return frame[frame["updates"] == frame["updates"].max()]


def _present(file: Path) -> None:
    if not file.is_file():
        raise UsageError(
            f"'{file.parent}' has no {file.name}: give a folder that `multimax-analyze collect` "
            "has written"
        )


def _json(file: Path, form: type) -> Any:
    _present(file)
    try:
        found = json.loads(file.read_text(encoding="utf-8"), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from None
    if not isinstance(found, form):
        raise _damaged(file, f"a {form.__name__} is expected, not a {type(found).__name__}")
    return found


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _table(file: Path, words: str) -> pd.DataFrame:
    _present(file)
    try:
        frame = pd.read_csv(file, encoding="utf-8", dtype=dict.fromkeys(TEXT, str))
    except ValueError as error:
        raise _damaged(file, str(error).strip().splitlines()[0]) from None
    with file.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read() != b"\n":
            raise _damaged(file, "its last line has no end")
    frame = frame.rename(columns={"kind": "place"})  # its name in older collections
    for column in ADDED.get(file.stem, "").split():
        if column not in frame:
            frame[column] = np.nan
    if missing := [column for column in words.split() if column not in frame]:
        raise _damaged(file, f"there is no column {missing[0]}")
    for column in set(words.split()) - TEXT:
        try:
            frame[column] = pd.to_numeric(frame[column])
            if frame[column].dtype == object:
                raise ValueError("numbers that no column holds")
        except ValueError as error:
            raise _damaged(file, f"column {column}: {error}") from None
    for column in frame.columns.intersection(["layer", "head"]):
        known = frame[column].dropna()
        if not (known.isin(range(MOST))).all():
            raise _damaged(file, f"column {column} does not count from 0")
    if not np.isfinite(frame["updates"]).all():
        raise _damaged(file, "column updates is not finite")
    if "place" in frame and not frame["place"].isin([*PLACES]).all():
        raise _damaged(file, "column place names no attention and no output layer")
    if "bucket" in frame and not frame["bucket"].str.fullmatch(RANKS, na=False).all():
        raise _damaged(file, "column bucket names no ranks")
    return frame


def _damaged(file: Path, why: str) -> UsageError:
    return UsageError(
        f"'{file}' is not what `multimax-analyze collect` writes ({why}): collect again"
    )


def bins(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left and right edge and share of a histogram's bins; an open end is infinite."""
    frame = frame.sort_values(["left", "right"])
    left = frame["left"].fillna(-np.inf).to_numpy(dtype=float)
    right = frame["right"].fillna(np.inf).to_numpy(dtype=float)
    count = frame["count"].to_numpy(dtype=float)
    order = np.lexsort((right, left))
    return left[order], right[order], count[order] / max(count.sum(), 1)
