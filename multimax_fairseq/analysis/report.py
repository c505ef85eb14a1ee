"""Self-contained HTML pages: the report of one collection, or a comparison of several."""

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from multimax_fairseq.analysis import COLUMNS, figures
from multimax_fairseq.analysis.canvas import kinds_of
from multimax_fairseq.analysis.collection import KINDS, Collection, latest
from multimax_fairseq.analysis.figures.catalogue import Drawn
from multimax_fairseq.analysis.findings import findings, mean_over_tokens, perplexity
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import write

TEMPLATES = Path(__file__).parent / "templates"
MEANS = {
    "heads": [
        "sparsity",
        "multi_modality",
        "entropy",
        "density",
        "mass",
        "past_turning_point",
        "support_tokens",
        "position_variance",
    ],
    "layers": [
        "head_diversity",
        "patch_similarity",
        "mean_average_distance",
        "rollout_similarity",
    ],
}
# Keys of collection.json in which comparable collections agree.
MEASURED = {
    "data": "data",
    "subset": "subset",
    "sentences": "number of sentences",
    "epsilon": "epsilon of the metrics",
    "reference": "reference of the sparsity metric",
}


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]
    settings: bool = False


@dataclass
class Inlined:
    name: str
    title: str
    caption: str
    png: str


def report(collection: Collection, out: Path) -> Iterator[str]:
    """Write report.html into a folder and yield the name of each figure that is drawn."""
    drawn = []
    for figure in figures.draw([collection]):
        buffer = io.BytesIO()
        figure.figure.savefig(buffer, format="png", dpi=110)
        drawn.append(inline(figure, buffer.getvalue()))
        yield figure.name
    metadata = {k: v for k, v in collection.metadata.items() if k != "checkpoints"}
    updates = collection.updates()
    about = collection.checkpoint()
    layers = latest(collection.layers).groupby("kind", sort=False).size()
    kinds = ", ".join(f"{KINDS[kind]} ({layers[kind]} layers)" for kind in collection.kinds())
    examples = [example for example in collection.examples if example.get("attention")]
    page = render(
        "report.html.j2",
        title=f"{collection.label}: what the model has learned",
        summary=f"A {about.get('architecture', 'model')} with {kinds}, after {updates[-1]:,} "
        f"updates. The data are {metadata.get('sentences', 0):,} sentences or blocks of the subset "
        f"{metadata.get('subset', '')}, {metadata.get('tokens', 0):,} tokens.",
        findings=findings(collection),
        settings=settings(collection),
        signature=Table("Signature", ["", "value"], [[k, v] for k, v in flat(metadata)]),
        tables=tables(collection),
        examples=examples,
        continuous=any(example.get("densities") for example in examples),
        drawn=drawn,
    )
    out.mkdir(parents=True, exist_ok=True)
    write(out / "report.html", page)


def compare(collections: list[Collection], out: Path) -> Iterator[str]:
    """Write the figures and compare.html into a folder; yield the name of each figure.

    Raises:
        UsageError: there is only one collection.
    """
    if len(collections) < 2:
        raise UsageError("compare takes two collections or more: use `report` for one")
    drawn = []
    for figure in figures.draw(collections):
        png, _ = figures.write(figure, out)
        drawn.append(inline(figure, png.read_bytes()))
        yield figure.name
    page = render(
        "compare.html.j2",
        title=" and ".join(collection.label for collection in collections),
        notes=differences(collections),
        tables=comparison(collections),
        drawn=drawn,
    )
    out.mkdir(parents=True, exist_ok=True)
    write(out / "compare.html", page)


def differences(collections: list[Collection]) -> list[str]:
    """Return a sentence for each difference in the way that the collections were measured."""
    return [
        f"The collections differ in their {words}, so their numbers are not comparable."
        for key, words in MEASURED.items()
        if len({json.dumps(_measured(c.metadata.get(key))) for c in collections}) > 1
    ]


def _measured(value: Any) -> Any:
    """Return the checksum of data, so that its path does not matter, or the value itself."""
    return value.get("sha256") if isinstance(value, dict) else value


def render(template: str, **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template(template).render(**values)


def inline(drawn: Drawn, png: bytes) -> Inlined:
    encoded = base64.b64encode(png).decode("ascii")
    return Inlined(drawn.name, drawn.title, drawn.caption, encoded)


# --- tables ------------------------------------------------------------------------------------


def number(value: Any) -> str:
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return ""
    if float(value).is_integer():
        return f"{int(value):,}"
    return f"{value:.4g}" if abs(value) < 1e-3 else f"{value:,.4f}"


def flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) for each of the nested settings."""
    for key, value in values.items():
        name = f"{before}{key}".replace("_", " ")
        if isinstance(value, dict):
            yield from flat(value, f"{name}: ")
        elif isinstance(value, list):
            yield name, " ".join(map(str, value))
        else:
            yield name, "" if value is None else str(value)


def settings(collection: Collection) -> Table:
    """Return the table of settings, with one column per checkpoint."""
    columns = [dict(flat(checkpoint)) for checkpoint in collection.metadata.get("checkpoints", [])]
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return Table("Settings", ["", *(f"checkpoint {n + 1}" for n in range(len(columns)))], rows)


def tables(collection: Collection) -> list[Table]:
    """Return the non-empty tables of the last checkpoint; layers and heads count from 1."""
    titles = {
        "parameters": "Learned parameters",
        "layers": "Layers",
        "heads": "Heads",
        "output": "Output layer by dictionary rank of the correct word",
    }
    result = []
    for name, title in titles.items():
        frame = latest(getattr(collection, name))
        if name == "parameters" and len(frame):
            frame = frame.assign(layer=frame["layer"].fillna(-1), head=frame["head"].fillna(-1))
            order = list(dict.fromkeys(frame["name"]))
            frame = frame.pivot(index=["kind", "layer", "head"], columns="name", values="value")
            frame = frame[order].reset_index().replace({"layer": {-1: None}, "head": {-1: None}})
        else:
            frame = frame[COLUMNS[name].split()[1:]]
        frame = frame.dropna(axis="columns", how="all")
        if frame.empty:
            continue
        if "kind" in frame:
            frame = frame.assign(kind=frame["kind"].map(KINDS))
        for column in ("layer", "head"):
            if column in frame:
                frame = frame.assign(**{column: pd.to_numeric(frame[column]) + 1})
        rows = [[number(cell) for cell in row] for row in frame.itertuples(index=False)]
        result.append(Table(title, [column.replace("_", " ") for column in frame.columns], rows))
    return [*result, *positional_heads(collection)]


def positional_heads(collection: Collection) -> list[Table]:
    """Return the number and confidence of heads per relative position (Correia et al. 2019)."""
    heads = latest(collection.heads).dropna(subset=["offset", "confidence"])
    rows = [
        [KINDS[kind], f"{offset:+.0f}", str(len(own)), number(own["confidence"].median())]
        for (kind, offset), own in heads.groupby(["kind", "offset"], sort=False)
    ]
    rows.sort(key=lambda row: (row[0], -int(row[2])))
    columns = ["kind", "relative position", "heads", "median confidence"]
    return [Table("Positional heads", columns, rows)] if rows else []


def comparison(collections: list[Collection]) -> list[Table]:
    """Return the tables of quality, of settings that differ, of means, and of the output layers."""
    labels = [collection.label for collection in collections]
    about = [dict(flat(collection.checkpoint())) for collection in collections]
    names = list(dict.fromkeys(name for column in about for name in column))
    rows = [[name, *(column.get(name, "") for column in about)] for name in names]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    result = [Table("Settings that differ", ["", *labels], rows, settings=True)]
    qualities = [perplexity(collection) for collection in collections]
    if any(value is not None for value in qualities):
        cells = ["" if value is None else f"{value:.2f}" for value in qualities]
        result.insert(0, Table("Quality", ["", *labels], [["perplexity per token", *cells]]))
    for kind in kinds_of(collections):
        rows = []
        for table, columns in MEANS.items():
            for column in columns:
                cells = []
                for collection in collections:
                    frame = latest(getattr(collection, table))
                    cells.append(number(frame[frame["kind"] == kind][column].mean()))
                if any(cells):
                    rows.append([column.replace("_", " "), *cells])
        title = f"{KINDS[kind]}: mean over layers and heads"
        result.append(Table(title[0].upper() + title[1:], ["", *labels], rows))
    rows = []
    for column in ("entropy", "sparsity", "nll", "probability"):
        cells = []
        for collection in collections:
            mean = mean_over_tokens(collection, column)
            cells.append("" if mean is None else number(mean))
        if any(cells):
            rows.append([column, *cells])
    if rows:
        result.append(Table("Output layer: mean over tokens", ["", *labels], rows))
    return result
