"""Single heads: learned alphas, densities and roles."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from multimax_fairseq.analysis.canvas import (
    COLOURS,
    grid,
    heatmaps,
    kinds_of,
    layers_of,
    legend_below,
    ordered_style,
    plot_by_layer,
    series,
    style,
    updates_axis,
)
from multimax_fairseq.analysis.collection import ATTENTIONS, Collection, bins, latest
from multimax_fairseq.analysis.figures.catalogue import picture


@picture("Learned alpha over training")
def alpha_trajectories(collection: Collection) -> Figure | None:
    """The learned alpha of every head over the updates (Correia et al. 2019), with a colour and
    marker per layer. Alpha 1 is softmax, 2 is sparsemax."""
    frame = collection.parameters[collection.parameters["name"] == "alpha"]
    if frame["updates"].nunique() < 2:
        return None
    kinds = [kind for kind in ATTENTIONS if (frame["kind"] == kind).any()]
    layers = layers_of(frame)
    figure, axes = grid(1, len(kinds), 3.8, 3.4)
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = frame[frame["kind"] == kind].assign(head=frame["head"].fillna(0))
        for (layer, head), line in own.groupby(["layer", "head"]):
            index = layers.index(int(layer))
            axis.plot(
                line["updates"],
                line["value"],
                label=f"layer {int(layer) + 1}" if head == own["head"].min() else None,
                **{**ordered_style(index, len(layers)), "linewidth": 1, "markersize": 4},
            )
        alpha_guides(axis.axhline)
        axis.set(ylabel="α", ylim=(0.97, 2.03))
        axis.set_title(ATTENTIONS[kind], fontsize=10)
        updates_axis(axis)
    legend_below(figure, columns=6)
    return figure


def alpha_guides(line: Callable[..., Any]) -> None:
    for alpha in (1, 1.5, 2):
        line(alpha, color="black", linestyle=":", linewidth=0.8)


@picture("Distribution of the learned alpha")
def alpha_distribution(collection: Collection) -> Figure | None:
    """The alphas of the last checkpoint (Correia et al. 2019): one per head, or one per layer if
    its heads share it. Dotted lines: 1 is softmax, 1.5 is 1.5-entmax, 2 is sparsemax."""
    frame = latest(collection.parameters)
    frame = frame[frame["name"] == "alpha"]
    kinds = [kind for kind in ATTENTIONS if (frame["kind"] == kind).any()]
    if not kinds:
        return None
    figure, axes = grid(1, len(kinds), 3.6, 2.9)
    for index, (axis, kind) in enumerate(zip(axes[0], kinds, strict=True)):
        own = frame[frame["kind"] == kind]
        values, unit = own["value"], "layers" if own["head"].isna().all() else "heads"
        counts, _, _ = axis.hist(
            values,
            bins=np.linspace(1, 2, 21),
            color=COLOURS[index],
            edgecolor="black",
            linewidth=0.5,
            label=f"{unit}: {len(values)}, mean {values.mean():.2f}",
        )
        alpha_guides(axis.axvline)
        # Leave space for the legend above the bars.
        axis.set(xlabel="α", ylabel=unit, xlim=(0.97, 2.03), ylim=(0, 1.3 * max(counts)))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_title(ATTENTIONS[kind], fontsize=10)
        axis.legend(fontsize=8)
    return figure


@picture("Distribution of the density of attention", comparable=True)
def density_distribution(collections: list[Collection]) -> Figure | None:
    """The share of heads and sentences by their density, the share of non-zero attention weights
    averaged over a sentence's queries (Correia et al. 2019). One panel per kind of attention, over
    all layers."""
    panels: dict[str, list[tuple[Any, str, dict[str, Any]]]] = {}
    for kind, (index, entry) in itertools.product(
        kinds_of(collections), enumerate(series(collections))
    ):
        counts = entry.of("histograms", kind=kind, quantity="density")
        if not counts.empty:
            counts = counts.groupby(["left", "right"], as_index=False)["count"].sum()
            panels.setdefault(kind, []).append((bins(counts), entry.label, style(index)))
    if not any(share[:-1].any() for own in panels.values() for (_, _, share), _, _ in own):
        return None  # no weight is 0
    figure, axes = grid(1, len(panels))
    for axis, (kind, own) in zip(axes[0], panels.items(), strict=True):
        for (left, right, share), label, look in own:
            sides = np.stack([left, right], -1).ravel()
            axis.plot(sides, np.repeat(share, 2), label=label, **{**look, "marker": ""})
        axis.set(xlabel="density", ylabel="share of heads and sentences", xlim=(0, 1))
        axis.set_title(ATTENTIONS[kind], fontsize=10)
    legend_below(figure)
    return figure


@picture("Density of attention", comparable=True)
def density(collections: list[Collection]) -> Figure | None:
    """The share of non-zero attention weights among the keys that a query may attend to. Lines are
    the mean over the heads, pale markers the heads."""
    figure = plot_by_layer(collections, "heads", "density", "density (share of non-zeros)")
    if figure is None:
        return None
    kinds = [
        k for k in kinds_of(collections) if ATTENTIONS[k] in {a.get_title() for a in figure.axes}
    ]
    drawn = series(collections)
    for axis, kind in zip(figure.axes, kinds, strict=True):
        for index, entry in enumerate(drawn):
            heads = entry.of("heads", kind=kind)
            # Shifted, so that one series does not hide the next.
            shift = 0.12 * (index - (len(drawn) - 1) / 2)
            look = style(index)
            axis.plot(
                heads["layer"] + shift,
                heads["density"],
                marker=look["marker"],
                color=look["color"],
                linestyle="",
                alpha=0.35,
                markersize=4,
            )
        axis.set_ylim(-0.03, 1.05)
    return figure


@picture("Diversity of heads", comparable=True)
def head_diversity(collections: list[Collection]) -> Figure | None:
    """The generalised Jensen-Shannon divergence of the attention of a layer's heads (Correia et al.
    2019). The base of the logarithm is the number of keys. With 0 all heads agree, with 1 every
    head attends to another key."""
    label = "Jensen-Shannon divergence (0 to 1)"
    return plot_by_layer(collections, "layers", "head_diversity", label)


@picture("Positional heads")
def positional_heads(collection: Collection) -> Figure | None:
    """The number in a cell is the relative position that a head attends to most often (-1: the
    token before the query). The colour is its mean weight there, the confidence. It is high for a
    positional head (Correia et al. 2019)."""
    label = "confidence (mean weight, 0 to 1)"
    return heatmaps(collection, {"confidence": label}, written="offset")


@picture("Subword-merging heads")
def bpe_merging_heads(collection: Collection) -> Figure | None:
    """The largest weight of any token of a word on the word's other tokens (Correia et al. 2019).
    It is the mean over words of several subwords and hyphenated words. It is high for a head that
    merges them."""
    return heatmaps(collection, {"bpe_merging": "weight on the own word (0 to 1)"})


@picture("Interrogation heads")
def interrogation_heads(collection: Collection) -> Figure | None:
    """The mean weight of interrogative words on a final question mark (Correia et al. 2019), in
    German, English, Spanish, French, Japanese or Romanian."""
    return heatmaps(collection, {"interrogation": "weight on the question mark (0 to 1)"})
