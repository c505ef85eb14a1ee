"""The figures of a collection, or of several beside each other, from their files only.

A figure a function; its docstring is the caption that the report prints below it. A function
returns None where a collection has nothing to show.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from multimax_fairseq.analysis.canvas import (
    COLOURS,
    Series,
    empty,
    grid,
    heatmaps,
    kinds_of,
    layers_of,
    legend_below,
    line_a_series,
    ordered_style,
    series,
    style,
    updates_axis,
    wrapped,
)
from multimax_fairseq.analysis.collection import KINDS, PLACES, Collection, latest
from multimax_fairseq.compat import UsageError
from multimax_fairseq.functional import normalize
from multimax_fairseq.modules import Modulator

PALE, WARNING = "#BBBBBB", "#D55E00"

SYMBOLS = ["t_b1", "t_b2", "t_d1", "t_d2", "b1", "b2", "d1", "d2"]
IDENTITY = {symbol: float(symbol.startswith("t_")) for symbol in SYMBOLS} | {"temperature": 1.0}

# Where logarithmic axes show weights of exactly zero, and where the last bin above it ends.
ZERO, SMALLEST = 1e-10, 1e-9

# Learned parameters of Zhou et al. 2024, as (t_b, t_d, b, d): a hidden layer of its Table 7
# (Deit-small, ImageNet; layer 8) and the first of Table 8 (WikiText-103).
PAPER = {
    "MultiMax (paper, Table 7, layer 8)": (
        (0.64486825, 2.5263662),
        (0.79173684, 0.968745),
        (3.0230901, 1.6307493),
        (0.62191963, 1.6259384),
    ),
    "MultiMax (paper, Table 8, layer 1)": (
        (0.6467285, 0.98324585),
        (0.7980957, 0.9649048),
        (0.7475586, 0.3395996),
        (-0.87939453, -0.14501953),
    ),
}
# The scores of the simplex pictures: two that matter, one that does not.
EXAMPLE = (2.0, 1.5, 0.0)
SECOND = np.linspace(0.0, 2.0, 7)  # what the second score runs through


@dataclass
class Picture:
    """A figure of the catalogue: `draw` takes a list of collections if several can be compared,
    else one; then a place if there is a figure for each of `places`."""

    name: str
    title: str
    draw: Callable[..., Figure | None]
    comparable: bool
    places: tuple[str, ...]

    @property
    def caption(self) -> str:
        return " ".join((self.draw.__doc__ or "").split())


@dataclass
class Drawn:
    name: str
    title: str
    caption: str
    figure: Figure


CATALOGUE: list[Picture] = []


def picture(
    title: str, comparable: bool = False, places: tuple[str, ...] = ()
) -> Callable[[Callable[..., Figure | None]], Callable[..., Figure | None]]:
    """Enter a function into the catalogue, in the order of this file."""

    def enter(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
        name = draw.__name__.replace("_", "-")
        CATALOGUE.append(Picture(name, title, draw, comparable, places))
        return draw

    return enter


def figures(collections: list[Collection]) -> Iterator[Drawn]:
    """Draw, one after the other, every figure that one collection, or several, has data for."""
    several = len(collections) > 1
    for entry in CATALOGUE:
        if several and not entry.comparable:
            continue
        what: Any = collections if entry.comparable else collections[0]
        for place in entry.places or (None,):
            figure = entry.draw(what) if place is None else entry.draw(what, place)
            if figure is None:
                continue
            title = entry.title if place is None else f"{entry.title}: {PLACES[place]}"
            heading = title if several else f"{title} ({collections[0].label})"
            size = min(12, 110 * figure.get_figwidth() / len(heading))  # a long one still fits
            figure.suptitle(heading[0].upper() + heading[1:], fontsize=size, fontweight="bold")
            name = entry.name if place is None else f"{entry.name}-{place}"
            yield Drawn(name, title[0].upper() + title[1:], entry.caption, figure)


def plot(collection: Collection, out: Path) -> Iterator[str]:
    """Write every figure of a collection; yield its name once it is there.

    Raises:
        UsageError: the folder cannot be written.
    """
    for drawn in figures([collection]):
        write(drawn, out)
        yield drawn.name


def write(drawn: Drawn, out: Path) -> list[Path]:
    """Write PNG and SVG, whole or not at all.

    Raises:
        UsageError: the folder cannot be written.
    """
    files = [out / f"{drawn.name}.{form}" for form in ("png", "svg")]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            aside = file.with_name(f"{file.name}.{os.getpid()}.part")
            # Text stays text in SVG, and nothing random or dated: the same files each time.
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name}):
                dated = {"Date": None} if file.suffix == ".svg" else None
                drawn.figure.savefig(aside, format=file.suffix[1:], dpi=150, metadata=dated)
            aside.replace(file)
            # Laid out for the first format; the second need not wait for it again.
            drawn.figure.set_layout_engine("none")
    except OSError as error:
        raise UsageError(cannot_write(out, error)) from None
    return files


def cannot_write(out: Path, error: OSError) -> str:
    return (
        f"cannot write in '{out}' ({error.strerror}): give a folder that can be written with --out"
    )


# --- modulators --------------------------------------------------------------------------------


def modulators_of(
    collection: Collection, place: str, updates: int | None = None
) -> dict[int, list[Modulator]]:
    """{layer: modulators, one or one a head}; the output layer's is under 0."""
    frame = collection.parameters
    frame = frame[(frame["place"] == place) & frame["name"].isin(SYMBOLS)]
    if frame.empty:
        return {}
    frame = frame[frame["updates"] == (frame["updates"].max() if updates is None else updates)]
    frame = frame.assign(layer=frame["layer"].fillna(0).astype(int), head=frame["head"].fillna(-1))
    found: dict[int, list[Modulator]] = {}
    for (layer, _), rows in frame.groupby(["layer", "head"]):
        values = dict(zip(rows["name"], rows["value"], strict=True))
        terms = {
            symbol: [values[f"{symbol}{n}"] for n in (1, 2) if f"{symbol}{n}" in values] or None
            for symbol in ("t_b", "t_d", "b", "d")
        }
        found.setdefault(layer, []).append(Modulator.from_values(**terms))
    return found


def modulated(modulator: Modulator, scores: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return modulator(torch.from_numpy(np.asarray(scores, dtype=np.float64))).numpy()


@picture("Modulators", places=tuple(PLACES))
def modulators(collection: Collection, place: str) -> Figure | None:
    """The learned modulator sigma of each layer (a line a head where heads have their own) against
    the identity, which is softmax. Below it the distribution of the real scores. Hatched: where
    sigma falls with a rising score (past the turning point), and the share of scores there. After
    Figs. 3 and 10 of Zhou et al. 2024."""
    found = modulators_of(collection, place)
    if not found:
        return None
    figure, panels = wrapped(len(found), 3.5, 2.9)
    with_scores = falls = False
    for axis, (layer, own) in zip(panels, found.items(), strict=True):
        frame = latest(collection.histograms)
        frame = frame[(frame["kind"] == place) & (frame["quantity"] == "score")]
        left, right, share = bins(frame[frame["layer"] == layer])
        low, high = score_range(left, right, share)
        x = np.linspace(low, high, 500)
        if share.sum() > 0:
            with_scores = True
            under = axis.twinx()
            under.set_yticks([])
            shown = np.isfinite(right - left)
            widths = (right - left)[shown]
            density = share[shown] / widths
            under.bar(left[shown], density, widths, align="edge", color=PALE, linewidth=0)
            under.set_ylim(0, 3.2 * density.max())
            # The curves go above the bars, which belong to the axes made later.
            axis.set_zorder(under.get_zorder() + 1)
            axis.patch.set_visible(False)
        axis.plot(x, x, "--", color="black", linewidth=1)
        for index, modulator in enumerate(own):
            look = style(0) if len(own) == 1 else ordered_style(index, len(own))
            y = modulated(modulator, x)
            axis.plot(
                x,
                y,
                **{**look, "marker": look["marker"] if len(own) > 1 else None},
                markevery=(20 + 17 * index, 120),
            )
            falling = np.diff(y, append=y[-1]) < 0
            for start, end in runs(falling):
                falls = True
                axis.axvspan(
                    x[start], x[end], facecolor="none", edgecolor=WARNING, hatch="///", alpha=0.5
                )
        share_past = past_turning_point(collection, place, layer)
        words = "" if share_past is None else f"past the turning point: {percent(share_past)}"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
        axis.text(0.03, 0.97, words, transform=axis.transAxes, va="top", fontsize=8, bbox=box)
        axis.set_title("output" if place == "output" else f"layer {layer + 1}", fontsize=10)
        axis.set(xlabel="score x", ylabel="modulated score σ(x)", xlim=(low, high))
    handles: list[Any] = [
        Line2D([], [], color="black", linestyle="--", label="identity (softmax)"),
        Line2D(
            [],
            [],
            color=COLOURS[0],
            label="σ" if all(len(o) == 1 for o in found.values()) else "σ, a line a head",
        ),
    ]
    if with_scores:
        handles.append(Patch(color=PALE, label="distribution of the scores (no scale)"))
    if falls:
        handles.append(Patch(facecolor="none", edgecolor=WARNING, hatch="///", label="σ falls"))
    legend_below(figure, handles)
    return figure


def past_turning_point(collection: Collection, kind: str, layer: int) -> float | None:
    heads = latest(collection.heads)
    values = heads[(heads["kind"] == kind) & (heads["layer"] == layer)]["past_turning_point"]
    return None if values.isna().all() else float(values.mean())


def percent(share: float) -> str:
    """A share as people read it: never 0 % for what is not 0."""
    if share == 0:
        return "0 %"
    return f"{100 * share:.2g} %" if share >= 1e-5 else f"{100 * share:.0e} %"


def runs(marked: np.ndarray) -> list[tuple[int, int]]:
    """First and last index of every stretch of marked entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked.astype(int), [0]])))
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def bins(frame: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Left and right edge and share of a histogram's bins; an open end is infinite."""
    frame = frame.sort_values(["left", "right"])
    left = frame["left"].fillna(-np.inf).to_numpy(dtype=float)
    right = frame["right"].fillna(np.inf).to_numpy(dtype=float)
    count = frame["count"].to_numpy(dtype=float)
    order = np.lexsort((right, left))
    return left[order], right[order], count[order] / max(count.sum(), 1)


def score_range(left: np.ndarray, right: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """Where nearly all scores lie, and zero with its neighbourhood."""
    low, high = -6.0, 6.0
    inner = np.isfinite(left) & np.isfinite(right)
    if share[inner].sum() > 0:
        reached = np.cumsum(share[inner]) / share[inner].sum()
        low = min(low, left[inner][np.searchsorted(reached, 1e-4)] - 1)
        high = max(high, right[inner][np.searchsorted(reached, 1 - 1e-4)] + 1)
    return low, high


@picture("Learned parameters")
def parameters(collection: Collection) -> Figure | None:
    """The learned parameters of the last checkpoint in the paper's symbols (Eq. 6; Tables 7 and 8
    of Zhou et al. 2024), a line a layer, the mean over the heads where they have their own. The
    colour is the distance from the identity (t = 1, b = d = 0), which is softmax."""
    frame = latest(collection.parameters)
    frame = frame[frame["name"].isin(IDENTITY)].assign(layer=lambda f: f["layer"].fillna(0))
    places = [place for place in PLACES if (frame["place"] == place).any()]
    if not places:
        return None
    symbols = [name for name in IDENTITY if (frame["name"] == name).any()]
    tables = [
        frame[frame["place"] == place]
        .pivot_table(index="layer", columns="name", values="value", aggfunc="mean")
        .reindex(columns=symbols)
        for place in places
    ]
    heights = [len(table) + 1.5 for table in tables]
    figure = Figure(
        figsize=(max(5.5, 0.95 * len(symbols) + 2.2), 0.36 * sum(heights) + 1.2),
        layout="constrained",
    )
    axes = figure.subplots(len(places), 1, squeeze=False, height_ratios=heights)[:, 0]
    identity = np.array([IDENTITY[name] for name in symbols])
    extent = max(1e-3, *(np.nanmax(np.abs(t.to_numpy() - identity)) for t in tables))
    for axis, place, table in zip(axes, places, tables, strict=True):
        away = table.to_numpy() - identity
        image = axis.imshow(away, cmap="PuOr", vmin=-extent, vmax=extent, aspect="auto")
        for (i, j), value in np.ndenumerate(table.to_numpy()):
            if np.isfinite(value):
                dark = abs(away[i, j]) > 0.65 * extent
                axis.text(
                    j,
                    i,
                    f"{value:.3f}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="white" if dark else "black",
                )
        axis.set_title(PLACES[place], fontsize=10)
        axis.set_xticks(range(len(symbols)), [symbol_text(name) for name in symbols])
        axis.set(xlabel="parameter", ylabel="layer")
        axis.set_yticks(
            range(len(table)), ["" if place == "output" else str(int(i) + 1) for i in table.index]
        )
    figure.colorbar(image, ax=list(axes), label="value − value of the identity", shrink=0.8)
    return figure


def symbol_text(name: str) -> str:
    """t_b1 as the paper sets it."""
    if name == "temperature":
        return name
    side, order = name.removeprefix("t_")[0], name[-1]
    return f"$t_{{{side}_{order}}}$" if name.startswith("t_") else f"${side}_{order}$"


@picture("Parameters over training", places=tuple(PLACES))
def parameter_trajectories(collection: Collection, place: str) -> Figure | None:
    """How the learned parameters moved over the updates, a line a layer (the mean over the heads
    where they have their own). Dotted: the identity, which is softmax."""
    frame = collection.parameters
    frame = frame[(frame["place"] == place) & frame["name"].isin(IDENTITY)]
    frame = frame.assign(layer=frame["layer"].fillna(0))
    if frame["updates"].nunique() < 2:
        return None
    symbols = [name for name in IDENTITY if (frame["name"] == name).any()]
    layers = layers_of(frame)
    figure, panels = wrapped(len(symbols), 2.9, 2.4)
    for axis, name in zip(panels, symbols, strict=True):
        axis.axhline(IDENTITY[name], color="black", linestyle=":", linewidth=1)
        for index, layer in enumerate(layers):
            own = frame[(frame["name"] == name) & (frame["layer"] == layer)]
            means = own.groupby("updates")["value"].mean()
            label = "output layer" if place == "output" else f"layer {layer + 1}"
            axis.plot(means.index, means, label=label, **ordered_style(index, len(layers)))
        axis.set_title(symbol_text(name), fontsize=11)
        axis.set_ylabel("value")
        updates_axis(axis)
    legend_below(figure, columns=6)
    return figure


# --- sparsity and multi-modality ---------------------------------------------------------------


@picture("Sparsity and multi-modality of each head")
def sparsity_multi_modality(collection: Collection) -> Figure | None:
    """Sparsity (Definition 3.3 of Zhou et al. 2024: how near to zero the small scores' weights
    are) and multi-modality (Definition 3.2: how near to the largest the relevant scores' weights
    are), a cell a head; of the last checkpoint."""
    return heatmaps(
        collection, {"sparsity": "sparsity (0 to 1)", "multi_modality": "multi-modality (0 to 1)"}
    )


@picture("Sparsity against multi-modality", comparable=True)
def pareto(collections: list[Collection]) -> Figure | None:
    """Sparsity and multi-modality on the same scores: softmax at temperatures (lines, along which
    one is given up for the other; Proposition 3.5 of Zhou et al. 2024) and the model's own mapping
    (large markers). Above and to the right of a line is better than softmax at any temperature.
    For one model a line a layer; for several the mean over the layers."""
    kinds = kinds_of(collections)
    if all(empty(c.temperatures, "sparsity", "multi_modality") for c in collections) or not kinds:
        return None
    figure, axes = grid(1, len(kinds), 4.3, 3.6)
    for axis, kind in zip(axes[0], kinds, strict=True):
        for place, collection in enumerate(collections):
            frame = latest(collection.temperatures)
            frame = frame[frame["kind"] == kind]
            if frame.empty:
                continue
            if len(collections) > 1:
                mean = frame.groupby("temperature", dropna=False).mean(numeric_only=True)
                trade(axis, mean.reset_index(), style(place), collection.label, words=place == 0)
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
        axis.set_title(KINDS[kind], fontsize=10)
        axis.margins(0.12)
    legend_below(figure, columns=6)
    return figure


def trade(
    axis: Axes, frame: pd.DataFrame, look: dict[str, Any], label: str, words: bool = True
) -> None:
    """Softmax over temperatures as a line, its ends named, and the model's own mapping."""
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
        for (_, end), shift in zip(line.iloc[[0, -1]].iterrows(), (-32, 4), strict=True):
            axis.annotate(
                f"T = {end['temperature']:g}",
                (end["sparsity"], end["multi_modality"]),
                xytext=(shift, 4),
                textcoords="offset points",
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


# --- distributions of the attention weights ----------------------------------------------------


def probability_panels(
    collections: list[Collection], kind: str
) -> tuple[Figure, list[tuple[Axes, int, Series, Any]]] | None:
    """The figure, and for each layer and series its axis and the bins of its probabilities."""
    wanted = []
    for entry in series(collections):
        frame = entry.of("histograms", kind=kind, quantity="probability")
        wanted += [
            (layer, entry, bins(frame[frame["layer"] == layer])) for layer in layers_of(frame)
        ]
    layers = sorted({layer for layer, _, _ in wanted})
    if not layers:
        return None
    figure, panels = wrapped(len(layers))
    axes = dict(zip(layers, panels, strict=True))
    lowest = min(left[share > 0].min(initial=1) for _, _, (left, _, share) in wanted)
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
    return figure, [(axes[layer], layer, entry, found) for layer, entry, found in wanted]


def look_of(collections: list[Collection], entry: Series) -> dict[str, Any]:
    if len(collections) > 1:
        return style([c.label for c in collections].index(entry.label))
    return style([s.updates for s in series(collections)].index(entry.updates))


@picture("Histograms of attention weights", comparable=True, places=tuple(KINDS))
def weight_histograms(collections: list[Collection], kind: str) -> Figure | None:
    """How many of the attention weights have which size, both axes logarithmic, a panel a layer
    (Fig. 5 of Zhou et al. 2024, where they are called attention scores). The marker at the left:
    weights that are exactly zero; the first step: all others below 1e-8."""
    found = probability_panels(collections, kind)
    if found is None:
        return None
    figure, panels = found
    for axis, _, entry, (left, right, share) in panels:
        look = look_of(collections, entry)
        shown = right > 0
        sides = np.maximum(np.stack([left[shown], right[shown]], -1), SMALLEST)
        heights = np.where(share > 0, share, np.nan)[shown] / np.diff(np.log10(sides))[:, 0]
        axis.plot(
            sides.ravel(),
            np.repeat(heights, 2),
            color=look["color"],
            linestyle=look["linestyle"],
            linewidth=1.5,
            label=entry.label,
        )
        if zero := share[right == 0].sum():
            look = {**look, "linestyle": "", "label": f"exactly 0: {entry.label}"}
            axis.plot([ZERO], [zero], clip_on=False, **look)
        axis.set_yscale("log")
        axis.set_ylabel("share of weights a decade")
    legend_below(figure)
    return figure


@picture("Cumulative distributions of attention weights", comparable=True, places=tuple(KINDS))
def weight_distributions(collections: list[Collection], kind: str) -> Figure | None:
    """The share of attention weights that are at most as large as a threshold, a panel a layer
    (Fig. 8 of Zhou et al. 2024). Where a line starts above zero, that share is exactly zero."""
    found = probability_panels(collections, kind)
    if found is None:
        return None
    figure, panels = found
    for axis, _, entry, (_, right, share) in panels:
        look = look_of(collections, entry)
        axis.plot(
            np.maximum(right, ZERO),
            np.cumsum(share),
            label=entry.label,
            **{**look, "markersize": 4},
            markevery=12,
        )
        axis.set(ylabel="share of weights up to it", ylim=(-0.03, 1.03))
    legend_below(figure)
    return figure


# --- over-smoothing ----------------------------------------------------------------------------

SIMILARITY = "token similarity (cosine)"


def distance_axis(figure: Figure) -> None:
    """The same curves as mean average distances, at the right."""
    for axis in figure.axes:
        opposite = (lambda value: 1 - value,) * 2
        axis.secondary_yaxis("right", functions=opposite).set_ylabel("mean average distance")


@picture("Over-smoothing over the layers", comparable=True)
def over_smoothing(collections: list[Collection]) -> Figure | None:
    """How alike the outputs of a layer are for the tokens of a sentence: their mean cosine
    similarity, near one in over-smoothing (Fig. 4 of Zhou et al. 2024). One minus it is the mean
    average distance (Chen et al. 2020). For one model a line a checkpoint, darker for later
    ones."""
    alone = len(collections) == 1
    figure = line_a_series(collections, "layers", "token_similarity", SIMILARITY, alone)
    if figure is not None:
        distance_axis(figure)
    return figure


@picture("Over-smoothing over training")
def over_smoothing_updates(collection: Collection) -> Figure | None:
    """The same over the updates, a line a layer."""
    frame = collection.layers.dropna(subset="token_similarity")
    if frame["updates"].nunique() < 2:
        return None
    kinds = [kind for kind in KINDS if (frame["kind"] == kind).any()]
    figure, axes = grid(1, len(kinds))
    layers = layers_of(frame)
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = frame[frame["kind"] == kind]
        for index, layer in enumerate(layers):
            line = own[own["layer"] == layer].sort_values("updates")
            axis.plot(
                line["updates"],
                line["token_similarity"],
                label=f"layer {layer + 1}",
                **ordered_style(index, len(layers)),
            )
        axis.set_ylabel(SIMILARITY)
        axis.set_title(KINDS[kind], fontsize=10)
        updates_axis(axis)
    distance_axis(figure)
    legend_below(figure, columns=6)
    return figure


@picture("Roll-out against single-layer attention", comparable=True)
def rollout(collections: list[Collection]) -> Figure | None:
    """The correlation of each layer's own attention with the roll-out up to it, which multiplies
    the attentions of all layers below (Abnar and Zuidema 2020; Fig. 9 of Zhou et al. 2024). The
    lower, the less a layer's attention says where its information comes from."""
    return line_a_series(collections, "layers", "rollout_similarity", "correlation with roll-out")


@picture("Roll-out of an example")
def rollout_example(collection: Collection) -> Figure | None:
    """Attention of single layers (mean over the heads; above) beside the roll-out up to them
    (below) for the first stored sentence: queries down, keys across. Each picture has its own
    scale, from zero to its largest weight."""
    for example in collection.examples:
        for kind in KINDS:
            if rolled := example.get("rollout", {}).get(kind):
                return draw_rollout(example["attention"][kind], rolled, kind)
    return None


def draw_rollout(attention: list[Any], rolled: list[Any], kind: str) -> Figure:
    chosen = sorted({int(i) for i in np.linspace(0, len(rolled) - 1, 6).round()})
    figure, axes = grid(2, len(chosen), 2.2, 2.3)
    for column, layer in enumerate(chosen):
        for row, values in enumerate((np.mean(attention[layer], axis=0), np.array(rolled[layer]))):
            axis = axes[row, column]
            image = axis.imshow(values, cmap="cividis", vmin=0)
            axis.set_title(
                f"{'layer' if row == 0 else 'roll-out to layer'} {layer + 1}", fontsize=9
            )
            axis.set(xlabel="key position", ylabel="query position")
            for ticks in (axis.xaxis, axis.yaxis):
                ticks.set_major_locator(MaxNLocator(4, integer=True))
    figure.colorbar(
        image, ax=axes, label="weight (0 to each picture's largest)", ticks=[], shrink=0.6
    )
    axes[0, 0].annotate(KINDS[kind], (0, 1.2), xycoords="axes fraction", fontsize=9)
    return figure


# --- simplex pictures --------------------------------------------------------------------------

Mapping = Callable[[np.ndarray], np.ndarray]


def mapping(name: str, **options: Any) -> Mapping:
    def apply(scores: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            given = torch.from_numpy(np.asarray(scores, dtype=np.float64))
            return normalize(name, given, **options).numpy()

    return apply


def known_mappings() -> dict[str, Mapping]:
    return {
        "softmax": mapping("softmax"),
        "1.5-entmax": mapping("entmax15"),
        "sparsemax": mapping("sparsemax"),
        "EvSoftmax": mapping("evsoftmax"),
        **{
            label: mapping("multimax", modulator=Modulator.from_values(*values))
            for label, values in PAPER.items()
        },
    }


def learned_mappings(collection: Collection, kind: str) -> dict[int, Mapping]:
    """{layer: the mapping that the last checkpoint has learned there, the mean over its heads}."""
    found: dict[int, list[Mapping]] = {
        layer: [mapping("multimax", modulator=modulator) for modulator in own]
        for layer, own in modulators_of(collection, kind).items()
    }
    frame = latest(collection.parameters)
    frame = frame[frame["place"] == kind]
    for name, normalizer in (("alpha", "alpha_entmax"), ("temperature", "softmax")):
        for row in frame[frame["name"] == name].itertuples():
            options = {name: float(row.value)}
            found.setdefault(int(row.layer), []).append(mapping(normalizer, **options))
    return {layer: mean_of(own) for layer, own in sorted(found.items())}


def mean_of(mappings: list[Mapping]) -> Mapping:
    return lambda scores: np.mean([apply(scores) for apply in mappings], axis=0)


def learned_places(collection: Collection) -> dict[str, dict[int, Mapping]]:
    found = {kind: learned_mappings(collection, kind) for kind in collection.kinds()}
    return {kind: mappings for kind, mappings in found.items() if mappings}


@picture("Mappings of two scores")
def simplex_2d(collection: Collection) -> Figure | None:
    """The weight of the first of two scores, x and 0, by x (Fig. 2 of Zhou et al. 2024; softmax is
    the logistic function there). First panel: known mappings, and MultiMax with the paper's
    parameters; then what this model has learned, a line a layer (the mean over its heads), against
    softmax."""
    places = learned_places(collection)
    figure, panels = wrapped(1 + len(places), 4.2, 3.8)
    x = np.linspace(-4, 4, 401)
    scores = np.stack([x, np.zeros_like(x)], -1)
    for index, (label, apply) in enumerate(known_mappings().items()):
        every = (index * 9, 60)
        panels[0].plot(x, apply(scores)[:, 0], label=label, markevery=every, **style(index))
    panels[0].set_title("known mappings", fontsize=10)
    for axis, (kind, found) in zip(panels[1:], places.items(), strict=True):
        axis.plot(x, mapping("softmax")(scores)[:, 0], "k--", linewidth=1, label="softmax")
        for index, (layer, apply) in enumerate(found.items()):
            look = {**ordered_style(index, len(found)), "markevery": (index * 9 % 60, 60)}
            axis.plot(x, apply(scores)[:, 0], label=f"layer {layer + 1}", **look)
        axis.set_title(f"learned: {KINDS[kind]}", fontsize=10)
    for axis in panels:
        axis.set(xlabel="score x (the other is 0)", ylabel="weight of x", ylim=(-0.03, 1.03))
        axis.legend(fontsize=7, loc="lower right" if axis is not panels[0] else "upper left")
    # Room for the long names above the curves.
    panels[0].set_ylim(-0.03, 1.45)
    return figure


@picture("Mappings on the simplex of three weights")
def simplex_3d(collection: Collection) -> Figure | None:
    """The weights that mappings give three scores (Fig. 1 of Zhou et al. 2024). A corner of the
    triangle is all weight on one, an edge is two modes with the third ignored. First panel: the
    scores 2, 1.5 and 0; the band is softmax over temperatures. Then the second score runs from
    0 to 2, with the paper's parameters, and with what this model has learned (a line a layer, the
    mean over its heads)."""
    places = learned_places(collection)
    count = 2 + len(places)
    columns = 2 if count in (2, 4) else 3
    rows = -(-count // columns)
    figure = Figure(figsize=(4.2 * columns, 4.6 * rows + 0.8), layout="constrained")
    axes = [figure.add_subplot(rows, columns, i + 1, projection="3d") for i in range(count)]
    for axis in axes:
        triangle(axis)
    temperatures = np.geomspace(0.1, 10, 80)
    line = np.stack([mapping("softmax", temperature=t)(np.array(EXAMPLE)) for t in temperatures])
    shades = np.log10(temperatures)
    image = axes[0].scatter(*line.T, c=shades, cmap="cividis", s=14, depthshade=False)
    bar = figure.colorbar(image, ax=axes[0], location="bottom", shrink=0.6, pad=0.08)
    bar.set_label("softmax temperature")
    bar.set_ticks([-1, 0, 1], labels=["0.1", "1", "10"])
    axes[0].set_title("scores 2, 1.5, 0", fontsize=10)
    first, _, third = EXAMPLE
    sweep = np.stack([np.full_like(SECOND, first), SECOND, np.full_like(SECOND, third)], -1)
    for index, (label, apply) in enumerate(known_mappings().items()):
        look = style(index)
        point = apply(np.array(EXAMPLE))[:, None]
        only = {**look, "linestyle": "", "markersize": 8, "markeredgecolor": "white"}
        axes[0].plot(*point, **only, zorder=10)
        axes[1].plot(*apply(sweep).T, **look, label=label)
    axes[1].set_title("scores 2, 0 to 2, 0", fontsize=10)
    for axis, (kind, found) in zip(axes[2:], places.items(), strict=True):
        axis.plot(*mapping("softmax")(sweep).T, "k--", linewidth=1.2, label="softmax, T = 1")
        for index, (layer, apply) in enumerate(found.items()):
            look = ordered_style(index, len(found))
            axis.plot(*apply(sweep).T, **look, label=f"layer {layer + 1}")
        axis.set_title(f"learned: {KINDS[kind]}", fontsize=10)
    legend_below(figure, columns=3)
    return figure


def triangle(axis: Any) -> None:
    """The simplex itself, and a view at right angles to it."""
    corners = np.eye(3)
    axis.plot_trisurf(*corners.T, color=PALE, alpha=0.15)
    axis.plot(*np.vstack([corners, corners[:1]]).T, color="black", linewidth=0.8)
    # Where the x and the y axis meet, their ends would be written over each other.
    axis.set(xticks=[0, 0.5], yticks=[0, 0.5], zticks=[0, 0.5, 1])
    axis.set(xlim=(0, 1), ylim=(0, 1), zlim=(0, 1))
    axis.set_xlabel("weight of score 1", fontsize=8)
    axis.set_ylabel("weight of score 2", fontsize=8)
    axis.set_zlabel("weight of score 3", fontsize=8)
    axis.tick_params(labelsize=7, pad=0)
    for side in (axis.xaxis, axis.yaxis, axis.zaxis):
        side.pane.set_visible(False)
    axis.set_proj_type("ortho")
    axis.view_init(elev=np.degrees(np.arctan(0.5**0.5)), azim=45)
    axis.set_box_aspect((1, 1, 1), zoom=0.85)


# --- adaptively sparse heads -------------------------------------------------------------------


@picture("Learned alpha over training")
def alpha_trajectories(collection: Collection) -> Figure | None:
    """The learned alpha of every head over the updates, coloured and marked by layer (Correia et
    al. 2019). 1 is softmax, 2 is sparsemax."""
    frame = collection.parameters[collection.parameters["name"] == "alpha"]
    if frame["updates"].nunique() < 2:
        return None
    kinds = [kind for kind in KINDS if (frame["place"] == kind).any()]
    layers = layers_of(frame)
    figure, axes = grid(1, len(kinds), 3.8, 3.4)
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = frame[frame["place"] == kind].assign(head=frame["head"].fillna(0))
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
        axis.set_title(KINDS[kind], fontsize=10)
        updates_axis(axis)
    legend_below(figure, columns=6)
    return figure


def alpha_guides(line: Callable[..., Any]) -> None:
    for alpha in (1, 1.5, 2):
        line(alpha, color="black", linestyle=":", linewidth=0.8)


@picture("Distribution of the learned alpha")
def alpha_distribution(collection: Collection) -> Figure | None:
    """The alphas of all heads of the last checkpoint (Correia et al. 2019): 1 is softmax, 1.5 is
    1.5-entmax, 2 is sparsemax (dotted)."""
    frame = latest(collection.parameters)
    frame = frame[frame["name"] == "alpha"]
    kinds = [kind for kind in KINDS if (frame["place"] == kind).any()]
    if not kinds:
        return None
    figure, axes = grid(1, len(kinds), 3.6, 2.9)
    for index, (axis, kind) in enumerate(zip(axes[0], kinds, strict=True)):
        values = frame[frame["place"] == kind]["value"]
        counts, _, _ = axis.hist(
            values,
            bins=np.linspace(1, 2, 21),
            color=COLOURS[index],
            edgecolor="black",
            linewidth=0.5,
            label=f"{len(values)} heads, mean {values.mean():.2f}",
        )
        alpha_guides(axis.axvline)
        # Room for the legend above the bars.
        axis.set(xlabel="α", ylabel="heads", xlim=(0.97, 2.03), ylim=(0, 1.3 * max(counts)))
        axis.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axis.set_title(KINDS[kind], fontsize=10)
        axis.legend(fontsize=8)
    return figure


@picture("Density of attention", comparable=True)
def density(collections: list[Collection]) -> Figure | None:
    """The share of attention weights that are not exactly zero, of the keys that a query may look
    at: the mean over the heads (lines) and every head (pale markers)."""
    figure = line_a_series(collections, "heads", "density", "density (share of non-zeros)")
    if figure is None:
        return None
    kinds = [k for k in kinds_of(collections) if KINDS[k] in {a.get_title() for a in figure.axes}]
    drawn = series(collections)
    for axis, kind in zip(figure.axes, kinds, strict=True):
        for index, entry in enumerate(drawn):
            heads = entry.of("heads", kind=kind)
            # Beside each other, so that one series does not hide the next.
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
    """How much the heads of a layer differ: generalised Jensen-Shannon divergence of their
    attention, with the logarithm to the base of the number of keys (Correia et al. 2019). 0: all
    heads alike; 1: each key has a head of its own."""
    label = "Jensen-Shannon divergence (0 to 1)"
    return line_a_series(collections, "layers", "head_diversity", label)


@picture("Positional heads")
def positional_heads(collection: Collection) -> Figure | None:
    """The number in a cell is the relative position that a head looks at most often (-1: the token
    before the query); the colour is its mean weight there (confidence), high for a positional
    head (Correia et al. 2019)."""
    label = "confidence (mean weight, 0 to 1)"
    return heatmaps(collection, {"confidence": label}, written="offset")


@picture("Subword-merging heads")
def bpe_merging_heads(collection: Collection) -> Figure | None:
    """High for a head that puts words together: the largest weight that any subword of a word
    gives to the word's other subwords, the mean over the words (Correia et al. 2019)."""
    return heatmaps(collection, {"bpe_merging": "weight on the own word (0 to 1)"})


@picture("Interrogation heads")
def interrogation_heads(collection: Collection) -> Figure | None:
    """The mean weight that a head gives to a final question mark (Correia et al. 2019); over the
    sentences that end with one."""
    return heatmaps(collection, {"interrogation": "weight on the question mark (0 to 1)"})


# --- output layer ------------------------------------------------------------------------------


@picture("Output layer by word frequency", comparable=True)
def output_layer(collections: list[Collection]) -> Figure | None:
    """The predicted distribution by the frequency of the right word (rank in the dictionary,
    frequent words left). Hollow markers: the same model with its output modulator left out, which
    shows what the modulator does to frequent and rare words."""
    quantities = {
        "entropy": "entropy (nats)",
        "sparsity": "sparsity (0 to 1)",
        "nll": "negative log-likelihood (nats)",
        "probability": "probability of the right word",
    }
    if all(empty(latest(c.output), *quantities) for c in collections):
        return None
    figure, axes = grid(2, 2, 4.2, 2.9)
    for axis, (quantity, label) in zip(axes.flat, quantities.items(), strict=True):
        for index, entry in enumerate(series(collections)):
            frame = entry.of("output")
            axis.plot(frame["bucket"], frame[quantity], label=entry.label, **style(index))
            bare = f"{quantity}_without_modulator"
            if bare in frame and frame[bare].notna().any():
                look = {**style(index), "linestyle": ":", "markerfacecolor": "white"}
                axis.plot(
                    frame["bucket"], frame[bare], label=f"{entry.label}, without modulator", **look
                )
        axis.set(xlabel="dictionary rank of the right word", ylabel=label)
        axis.tick_params(axis="x", labelsize=8)
    legend_below(figure, columns=3)
    return figure
