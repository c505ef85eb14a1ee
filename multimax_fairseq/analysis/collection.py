"""Reads the folder that `multimax-analyze collect` writes, without fairseq or a checkpoint."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from multimax_fairseq.analysis import ADDED, COLUMNS
from multimax_fairseq.errors import UsageError, first_line
from multimax_fairseq.mappings.registry import NORMALIZERS

ATTENTIONS = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "cross-attention",
}
KINDS = {**ATTENTIONS, "output": "output layer"}
TEXT = {"kind", "name", "quantity", "bucket"}  # the columns that are not numbers


@dataclass
class Collection:
    """The files of one collection: one table per CSV file, and two JSON files.

    Attributes:
        metadata: collection.json: versions, data, and the settings of each checkpoint.
        examples: examples.json, one dict per sentence or pair of sentences:
            `source`, `target`: `tokens` (subwords) and `words` (word, start, end of its subwords);
            `attention`: {kind: [layer][head][query][key]};
            `rollout`: {kind: [layer][query][key]};
            `densities`: {kind: [layer]} for continuous attention, each with
                `kind`: "softmax" (a Gaussian) or "sparsemax" (a truncated parabola);
                `positions`: of the keys, l / L;
                `mean`, `variance`: of the score function, [head][query];
                `values`: the density at the positions, [head][query][key];
                `support`: [head][query], (start, end) of the keys with a density above 0.
        label: the collection's name in legends.
    """

    folder: Path
    metadata: dict[str, Any]
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
        """Return {kind: display name} for the last checkpoint."""
        checkpoint = self.checkpoint()
        labels = {name: mapping.label for name, mapping in NORMALIZERS.items()}
        labels |= checkpoint.get("labels", {})
        names = checkpoint.get("normalizer", {})
        return {kind: labels.get(name, name) for kind, name in names.items() if name}

    def checkpoint(self) -> dict[str, Any]:
        """Return the last checkpoint's entry in collection.json."""
        return max(
            self.metadata.get("checkpoints") or [{}], key=lambda entry: entry.get("updates", 0)
        )

    def kinds(self) -> list[str]:
        """Return the model's attentions in the order of the figures."""
        return [kind for kind in ATTENTIONS if (self.layers["kind"] == kind).any()]

    def updates(self) -> list[int]:
        return sorted(self.layers["updates"].unique().tolist())


def read(folder: Path) -> Collection:
    """Return the collection in a folder.

    Raises:
        UsageError: the folder is not a collection.
    """
    try:
        return Collection(
            folder,
            metadata=_json(folder / "collection.json"),
            examples=_json(folder / "examples.json"),
            **{name: _table(folder / f"{name}.csv", words) for name, words in COLUMNS.items()},
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"'{error.filename}' does not exist: pass a folder that `multimax-analyze collect` "
            "has written"
        ) from None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(file, error) from None


def _table(file: Path, words: str) -> pd.DataFrame:
    """Read a table and check its columns; add the ones that older collections lack."""
    try:
        frame = pd.read_csv(file, encoding="utf-8", dtype=dict.fromkeys(TEXT, str))
        frame = frame.rename(columns={"place": "kind"})  # its name in the files
        for column in ADDED.get(file.stem, "").split():
            if column not in frame:
                frame[column] = np.nan
        return frame[words.split()]
    except (KeyError, ValueError) as error:
        raise _damaged(file, error) from None


def _damaged(file: Path, error: Exception) -> UsageError:
    return UsageError(
        f"'{file}' is not what `multimax-analyze collect` writes ({first_line(error)}): collect "
        "again"
    )


def read_all(folders: list[Path]) -> list[Collection]:
    """Return several collections with distinct labels."""
    collections = [read(folder) for folder in folders]
    labels = [each.label for each in collections]
    longer = [f"{each.label} ({each.folder.resolve().name})" for each in collections]
    for collection, label in zip(collections, distinct(labels, longer), strict=True):
        collection.label = label
    return collections


def distinct(labels: list[str], longer: list[str]) -> list[str]:
    """Return the labels; repeated ones in their longer form, with a number if needed."""
    found = [
        long if labels.count(short) > 1 else short
        for short, long in zip(labels, longer, strict=True)
    ]
    return [
        f"{label} {number}" if found.count(label) > 1 else label
        for number, label in enumerate(found, 1)
    ]


def latest(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last checkpoint."""
    return frame[frame["updates"] == frame["updates"].max()]


def bins(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the left edges, right edges and shares of a histogram's bins; open ends are inf."""
    left = frame["left"].fillna(-np.inf).to_numpy(dtype=float)
    right = frame["right"].fillna(np.inf).to_numpy(dtype=float)
    count = frame["count"].to_numpy(dtype=float)
    order = np.lexsort((right, left))
    return left[order], right[order], count[order] / max(count.sum(), 1)
