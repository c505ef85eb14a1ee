"""Distributions of attention weights."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multimax_fairseq.analysis.canvas import Series, layers_of, legend_below, series, style, wrapped
from multimax_fairseq.analysis.collection import ATTENTIONS, Collection, bins
from multimax_fairseq.analysis.figures.catalogue import picture

# On logarithmic axes: the position of weights that are exactly zero, and the smallest other one.
ZERO, SMALLEST = 1e-10, 1e-9


def probability_panels(
    collections: list[Collection], kind: str
) -> tuple[Figure, list[tuple[Axes, str, dict[str, Any], Any]]] | None:
    """Return a figure and, for each layer and series, its axis, label, style and bins."""
    histograms = []
    for entry in series(collections):
        frame = entry.of("histograms", kind=kind, quantity="probability")
        histograms += [
            (layer, entry, bins(frame[frame["layer"] == layer])) for layer in layers_of(frame)
        ]
    layers = sorted({layer for layer, _, _ in histograms})
    if not layers:
        return None
    figure, panels = wrapped(len(layers))
    axes = dict(zip(layers, panels, strict=True))
    lowest = min(left[share > 0].min(initial=1) for _, _, (left, _, share) in histograms)
    for layer, axis in axes.items():
        axis.set_title(f"layer {layer + 1}", fontsize=10)
        axis.set_xscale("log")
        axis.set_xlabel("attention weight")
        if lowest < SMALLEST:
            axis.set_xlim(ZERO / 2, 1.5)
            axis.set_xticks([ZERO, 1e-8, 1e-4, 1], ["0", "$10^{-8}$", "$10^{-4}$", "1"])
            axis.minorticks_off()
        else:
            axis.set_xlim(lowest / 2, 1.5)
    return figure, [
        (axes[layer], entry.label, look_of(collections, entry), histogram)
        for layer, entry, histogram in histograms
    ]


def look_of(collections: list[Collection], entry: Series) -> dict[str, Any]:
    if len(collections) > 1:
        return style([c is entry.collection for c in collections].index(True))
    return style([s.updates for s in series(collections)].index(entry.updates))


@picture("Histograms of attention weights", comparable=True, kinds=tuple(ATTENTIONS))
def weight_histograms(collections: list[Collection], kind: str) -> Figure | None:
    """The distribution of attention weights on logarithmic axes, one panel per layer (Fig. 5 of
    Zhou et al. 2024, which calls them attention scores). A marker on the left is the share of
    weights that are exactly zero. The first step has all others below 1e-8."""
    figure_and_panels = probability_panels(collections, kind)
    if figure_and_panels is None:
        return None
    figure, panels = figure_and_panels
    for axis, label, look, (left, right, share) in panels:
        positive = right > 0
        sides = np.maximum(np.stack([left[positive], right[positive]], -1), SMALLEST)
        heights = np.where(share > 0, share, np.nan)[positive] / np.diff(np.log10(sides))[:, 0]
        axis.plot(
            sides.ravel(),
            np.repeat(heights, 2),
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=1.5,
            label=label,
        )
        if zero := share[right == 0].sum():
            only = {**look, "linestyle": "", "label": f"exactly 0: {label}"}
            axis.plot([ZERO], [zero], clip_on=False, **only)
        axis.set_yscale("log")
        axis.set_ylabel("share of weights per decade")
    legend_below(figure)
    return figure


@picture("Cumulative distributions of attention weights", comparable=True, kinds=tuple(ATTENTIONS))
def weight_distributions(collections: list[Collection], kind: str) -> Figure | None:
    """The cumulative distribution of attention weights, one panel per layer (Fig. 8 of Zhou et al.
    2024). A line starts at the share of weights that are exactly zero."""
    figure_and_panels = probability_panels(collections, kind)
    if figure_and_panels is None:
        return None
    figure, panels = figure_and_panels
    for axis, label, look, (_, right, share) in panels:
        axis.plot(
            np.maximum(right, ZERO),
            np.cumsum(share),
            label=label,
            **{**look, "markersize": 4},
            markevery=12,
        )
        axis.set(ylabel="cumulative share of weights", ylim=(-0.03, 1.03))
    legend_below(figure)
    return figure
