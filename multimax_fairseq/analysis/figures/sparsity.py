"""Sparsity and multi-modality."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multimax_fairseq.analysis.canvas import (
    empty,
    grid,
    heatmaps,
    kinds_of,
    layers_of,
    legend_below,
    ordered_style,
    plain,
    style,
)
from multimax_fairseq.analysis.collection import ATTENTIONS, Collection, latest
from multimax_fairseq.analysis.figures.catalogue import picture


@picture("Sparsity and multi-modality of each head")
def sparsity_multi_modality(collection: Collection) -> Figure | None:
    """Sparsity and multi-modality of the last checkpoint, one cell per head (Definitions 3.3 and
    3.2 of Zhou et al. 2024). Sparsity is high if small scores have weights near zero.
    Multi-modality is high if relevant scores have weights near the largest one."""
    return heatmaps(
        collection, {"sparsity": "sparsity (0 to 1)", "multi_modality": "multi-modality (0 to 1)"}
    )


@picture("Sparsity against multi-modality", comparable=True)
def pareto(collections: list[Collection]) -> Figure | None:
    """Sparsity and multi-modality on the same scores. Lines are softmax at different temperatures,
    which trades one for the other (Proposition 3.5 of Zhou et al. 2024). Large markers are the
    model's own mapping. If a marker is above and to the right of its line, softmax at none of
    these temperatures is both as sparse and as multi-modal. One model has one line per layer;
    several have the mean over the layers."""
    kinds = kinds_of(collections)
    if all(empty(c.temperatures, "sparsity", "multi_modality") for c in collections) or not kinds:
        return None
    figure, axes = grid(1, len(kinds), 4.3, 3.6)
    for axis, kind in zip(axes[0], kinds, strict=True):
        for number, collection in enumerate(collections):
            frame = latest(collection.temperatures)
            frame = frame[frame["kind"] == kind]
            if frame.empty:
                continue
            if len(collections) > 1:
                mean = frame.groupby("temperature", dropna=False).mean(numeric_only=True)
                trade(
                    axis,
                    mean.reset_index(),
                    style(number),
                    plain(collection.label),
                    words=number == 0,
                )
                continue
            layers = layers_of(frame)
            for index, layer in enumerate(layers):
                look = ordered_style(index, len(layers))
                trade(
                    axis,
                    frame[frame["layer"] == layer],
                    look,
                    f"layer {layer + 1}",
                    words=index == 0,
                )
        axis.set(xlabel="sparsity (0 to 1)", ylabel="multi-modality (0 to 1)")
        axis.set_title(ATTENTIONS[kind], fontsize=10)
        axis.margins(0.12)
    line, own = axes[0, 0].plot([], [], "k.-", [], [], "ko", linewidth=1, markersize=3)
    own.set_markersize(9)
    temperatures = pd.concat(c.temperatures["temperature"] for c in collections).dropna()
    line.set_label(f"softmax, T = {temperatures.min():g} to {temperatures.max():g}")
    own.set_label("the model's own mapping")
    legend_below(figure, columns=6)
    return figure


def trade(
    axis: Axes, frame: pd.DataFrame, look: dict[str, Any], label: str, words: bool = True
) -> None:
    """Draw softmax over temperatures as a line, and the model's own mapping as a marker."""
    line = frame[frame["temperature"].notna()].sort_values("temperature")
    axis.plot(
        line["sparsity"],
        line["multi_modality"],
        color=look["color"],
        linewidth=1,
        linestyle=look["linestyle"],
        marker=".",
        markersize=3,
    )
    if words:
        ends = zip(line.iloc[[0, -1]].iterrows(), (-5, 4), ("right", "left"), strict=True)
        for (_, end), shift, side in ends:
            axis.annotate(
                f"T = {end['temperature']:g}",
                (end["sparsity"], end["multi_modality"]),
                xytext=(shift, 4),
                textcoords="offset points",
                horizontalalignment=side,
                fontsize=7,
            )
    own = frame[frame["temperature"].isna()]
    axis.plot(
        own["sparsity"],
        own["multi_modality"],
        color=look["color"],
        marker=look["marker"],
        markersize=9,
        markeredgecolor="black",
        linestyle="",
        label=label,
    )
