"""Shared parts of the figures: colours, panels, axes, series."""

from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multimax_fairseq.analysis.collection import ATTENTIONS, Collection, latest

# Okabe and Ito's palette for colour-blind readers, without yellow, which is too light for print.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00"]
PALE = "#BBBBBB"
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1))]


def plain(text: str) -> str:
    """Escape text for matplotlib: $ starts a formula, and a leading _ hides a legend entry."""
    return f"{' ' * text.startswith('_')}{text}".replace("$", r"\$")


def style(index: int) -> dict[str, Any]:
    """Return colour, marker and line style of a series; each is distinct on its own."""
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": LINES[index % len(LINES)],
        "markersize": 5,
        "linewidth": 1.5,
    }


def ordered_style(index: int, count: int) -> dict[str, Any]:
    """Return a style for an ordered series, such as layers, from light to dark."""
    shade = 0.85 * (1 - index / max(count - 1, 1))
    return {**style(index), "color": matplotlib.colormaps["viridis"](shade)}


def grid(rows: int, columns: int, width: float = 3.6, height: float = 2.9) -> tuple[Figure, Any]:
    figure = Figure(figsize=(max(width * columns, 5.5), height * rows + 0.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def wrapped(count: int, width: float = 3.4, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels in rows that fit a page."""
    columns = 2 if count == 4 else min(count, 3 if count <= 12 else 4)
    rows = -(-count // columns)
    figure, axes = grid(rows, columns, width, height)
    panels = list(axes.flat)
    for axis in panels[count:]:
        figure.delaxes(axis)
    return figure, panels[:count]


def legend_below(figure: Figure, handles: list[Any] | None = None, columns: int = 4) -> None:
    """Add one legend for all panels below them."""
    if handles is None:
        by_label: dict[str, Any] = {}
        for axis in figure.axes:
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
                by_label.setdefault(label, handle)
        handles, labels = list(by_label.values()), list(by_label)
    else:
        labels = [handle.get_label() for handle in handles]
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(handles)),
        fontsize="small",
        frameon=False,
    )


def layer_axis(axis: Axes, layers: Any) -> None:
    layers = np.asarray(layers, dtype=int)
    axis.set_xlabel("layer")
    step = -(-len(layers) // 12)
    axis.set_xticks(layers[::step], labels=[str(layer + 1) for layer in layers[::step]])


def updates_axis(axis: Axes) -> None:
    axis.set_xlabel("updates")
    axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")


def kinds_of(collections: list[Collection]) -> list[str]:
    return [kind for kind in ATTENTIONS if any(kind in c.kinds() for c in collections)]


def layers_of(frame: pd.DataFrame) -> list[int]:
    return sorted(frame["layer"].dropna().astype(int).unique().tolist())


@dataclass
class Series:
    label: str
    collection: Collection
    updates: int

    def of(self, table: str, **columns: Any) -> pd.DataFrame:
        frame: pd.DataFrame = getattr(self.collection, table)
        frame = frame[frame["updates"] == self.updates]
        for column, value in columns.items():
            frame = frame[frame[column] == value]
        return frame


def series(collections: list[Collection], all_updates: bool = False) -> list[Series]:
    """Return the last checkpoint of each collection; of a single one also the first, or all."""
    if len(collections) > 1:
        return [Series(plain(c.label), c, c.updates()[-1]) for c in collections]
    (collection,) = collections
    updates = collection.updates()
    if all_updates and len(updates) > 8:
        updates = [updates[i] for i in np.linspace(0, len(updates) - 1, 8).round().astype(int)]
    chosen = updates if all_updates else sorted({updates[0], updates[-1]})
    return [Series(f"{update:,} updates", collection, update) for update in chosen]


def empty(frame: pd.DataFrame, *columns: str) -> bool:
    return not frame[list(columns)].notna().any(axis=None)


def plot_by_layer(
    collections: list[Collection],
    table: str,
    quantity: str,
    label: str,
    all_updates: bool = False,
) -> Figure | None:
    """Draw a quantity by layer, with one column per kind of attention and one line per series.

    The columns share their scale, which includes 0. Return None if the quantity is constant.
    """
    tables = [latest(getattr(c, table)) for c in collections]
    kinds = [
        kind
        for kind in kinds_of(collections)
        if not all(empty(frame[frame["kind"] == kind], quantity) for frame in tables)
    ]
    if not kinds:
        return None
    drawn = series(collections, all_updates)
    values = pd.concat(entry.of(table)[quantity] for entry in drawn).dropna()
    if values.nunique() == 1:
        return None
    figure, axes = grid(1, len(kinds))
    for axis, kind in zip(axes[0], kinds, strict=True):
        layers: set[int] = set()
        for index, entry in enumerate(drawn):
            means = entry.of(table, kind=kind).groupby("layer")[quantity].mean().dropna()
            if means.empty:
                continue
            layers.update(means.index.astype(int))
            look = ordered_style(index, len(drawn)) if all_updates else style(index)
            axis.plot(means.index, means, label=entry.label, **look)
        layer_axis(axis, sorted(layers))
        axis.set_ylim(min(0, 1.05 * values.min()), 1.05 * values.max())
        axis.set_ylabel(label)
        axis.set_title(ATTENTIONS[kind], fontsize=10)
    legend_below(figure)
    return figure


def heatmaps(
    collection: Collection, quantities: dict[str, str], written: str | None = None
) -> Figure | None:
    """Draw layers by heads, with one row per quantity and one column per kind of attention.

    The cells show the values of `written`, or of the quantity itself.
    """
    heads = latest(collection.heads)
    kinds = [
        kind for kind in collection.kinds() if not empty(heads[heads["kind"] == kind], *quantities)
    ]
    if not kinds:
        return None
    layers, count = len(layers_of(heads)), int(heads["head"].max()) + 1
    width, height = max(3.2, 0.45 * count + 1), max(2.6, 0.3 * layers + 1)
    figure, axes = grid(len(quantities), len(kinds), width, height)
    for row, (quantity, label) in enumerate(quantities.items()):
        values = heads[heads["kind"].isin(kinds)][quantity]
        low, high = values.min(), values.max()
        if low == high:
            low, high = low - 0.5, high + 0.5
        for axis, kind in zip(axes[row], kinds, strict=True):
            rows = heads[heads["kind"] == kind]
            table = rows.pivot(index="layer", columns="head", values=quantity)
            image = axis.imshow(
                table, cmap="cividis", vmin=low, vmax=high, aspect="auto", origin="upper"
            )
            axis.set(xlabel="head", ylabel="layer")
            axis.set_title(ATTENTIONS[kind], fontsize=10)
            axis.set_xticks(range(len(table.columns)), [str(int(h) + 1) for h in table.columns])
            axis.set_yticks(range(len(table.index)), [str(int(i) + 1) for i in table.index])
            if count > 16:
                axis.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            texts = rows.pivot(index="layer", columns="head", values=written or quantity)
            for (i, j), value in np.ndenumerate(texts.to_numpy(dtype=float)):
                if np.isfinite(value) and count <= 16:
                    bright = (table.iloc[i, j] - low) / (high - low) > 0.55
                    axis.text(
                        j,
                        i,
                        f"{value:+.0f}"
                        if written and value
                        else "0"
                        if written
                        else f"{value:.2f}",
                        ha="center",
                        va="center",
                        fontsize=8 if count <= 8 else 6,
                        color="black" if bright else "white",
                    )
        figure.colorbar(image, ax=axes[row], label=label, shrink=0.9)
    return figure
