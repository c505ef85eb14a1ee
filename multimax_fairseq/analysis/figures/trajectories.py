"""Losses and the monitor's values during training, of one run or several."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from multimax_fairseq.analysis import figures
from multimax_fairseq.analysis.canvas import (
    layers_of,
    legend_below,
    ordered_style,
    plain,
    style,
    updates_axis,
    wrapped,
)
from multimax_fairseq.analysis.collection import KINDS
from multimax_fairseq.analysis.figures.catalogue import Drawn
from multimax_fairseq.analysis.figures.modulators import IDENTITY, symbol_text
from multimax_fairseq.analysis.training_log import TrainingLog

THEMES = {"training": "loss and learning rate", **KINDS}
LABELS = {
    "training_loss": "training loss (bits per token)",
    "validation_loss": "validation loss (bits per token)",
    "learning_rate": "learning rate",
    "sparsity": "sparsity (0 to 1)",
    "multi_modality": "multi-modality",
    "entropy": "entropy (nats)",
    "zeros": "share of exact zeros",
    "mass": "sum of a row",
    "past_turning_point": "share past the turning point",
    "largest_score": "largest modulated score",
    "top1": "probability of the likeliest word",
    "top10": "probability of the ten likeliest",
}
MARKED = 20  # markers per line


def trajectories(logs: list[TrainingLog], kind: str) -> Figure | None:
    """Losses, or the monitor's values, over the updates: one panel per value that changes, averaged
    over the heads. A single run has one line per layer. Several runs have one line each, the mean
    over the layers. Losses are negative log-likelihoods. The dotted line is the value at which the
    modulator is the identity."""
    tables = [log.values[log.values["kind"] == kind] for log in logs]
    known = [*LABELS, *IDENTITY]
    together = pd.concat(tables)
    there = {name for name, own in together.groupby("name") if own["value"].nunique() > 1}
    names = [name for name in known if name in there] + sorted(there.difference(known))
    if not names:
        return None
    figure, panels = wrapped(len(names), 2.9, 2.4)
    for axis, name in zip(panels, names, strict=True):
        if name in IDENTITY:
            axis.axhline(IDENTITY[name], color="black", linestyle=":", linewidth=1)
        for label, look, line in lines(logs, tables, name):
            every = max(1, len(line) // MARKED)
            axis.plot(line.index, line, label=label, markevery=every, **{**look, "markersize": 3})
        label = symbol_text(name) if name in IDENTITY else plain(LABELS.get(name, name))
        axis.set_ylabel(label, size=9)
        updates_axis(axis)
    legend_below(figure, columns=6 if len(logs) == 1 else 3)
    return figure


def lines(
    logs: list[TrainingLog], tables: list[pd.DataFrame], name: str
) -> Iterator[tuple[str, dict[str, Any], pd.Series]]:
    """Yield (label, style, values by update) for each line of a panel."""
    if len(logs) > 1:
        for index, (log, table) in enumerate(zip(logs, tables, strict=True)):
            own = table[table["name"] == name]
            if not own.empty:
                yield plain(log.label), style(index), own.groupby("updates")["value"].mean()
        return
    (table,) = tables
    layers = layers_of(table)
    table = table[table["name"] == name]
    if not layers:
        yield plain(logs[0].label), style(0), table.groupby("updates")["value"].mean()
    for index, layer in enumerate(layers):
        own = table[table["layer"] == layer]
        if not own.empty:
            look = ordered_style(index, len(layers))
            yield f"layer {layer + 1}", look, own.groupby("updates")["value"].mean()


def draw(logs: list[TrainingLog]) -> Iterator[Drawn]:
    """Yield a figure for each kind that a run has values for."""
    for kind, words in THEMES.items():
        figure = trajectories(logs, kind)
        if figure is None:
            continue
        runs = plain(logs[0].label) if len(logs) == 1 else f"{len(logs)} runs"
        title = f"Training, {words}"
        figure.suptitle(f"{title} ({runs})", fontsize=12, fontweight="bold")
        caption = " ".join((trajectories.__doc__ or "").split())
        yield Drawn(f"trajectories-{kind}", title, caption, figure)


def plot(logs: list[TrainingLog], out: Path) -> Iterator[str]:
    """Write these figures and yield their names."""
    for drawn in draw(logs):
        figures.write(drawn, out)
        yield drawn.name
