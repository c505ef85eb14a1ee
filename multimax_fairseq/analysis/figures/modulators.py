"""The learned modulators and their parameters."""

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from multimax_fairseq.analysis.canvas import (
    COLOURS,
    PALE,
    layers_of,
    legend_below,
    ordered_style,
    style,
    updates_axis,
    wrapped,
)
from multimax_fairseq.analysis.collection import KINDS, Collection, bins, latest
from multimax_fairseq.analysis.figures.catalogue import picture
from multimax_fairseq.mappings.multimax import Modulator

WARNING = "#D55E00"

SYMBOLS = ["t_b1", "t_b2", "t_d1", "t_d2", "b1", "b2", "d1", "d2"]
IDENTITY = {symbol: float(symbol.startswith("t_")) for symbol in SYMBOLS} | {"temperature": 1.0}


def modulators_of(
    collection: Collection, kind: str, updates: int | None = None
) -> dict[int, list[Modulator]]:
    """Return {layer: [modulator], or one modulator per head}; the output layer has the key 0."""
    frame = collection.parameters
    frame = frame[(frame["kind"] == kind) & frame["name"].isin(SYMBOLS)]
    if frame.empty:
        return {}
    frame = frame[frame["updates"] == (frame["updates"].max() if updates is None else updates)]
    frame = frame.assign(layer=frame["layer"].fillna(0).astype(int), head=frame["head"].fillna(-1))
    monotone = bool(collection.checkpoint().get("settings", {}).get("multimax_monotone"))
    modulators: dict[int, list[Modulator]] = {}
    for (layer, _), rows in frame.groupby(["layer", "head"]):
        values = dict(zip(rows["name"], rows["value"], strict=True))
        terms = {
            symbol: [values[f"{symbol}{n}"] for n in (1, 2) if f"{symbol}{n}" in values] or None
            for symbol in ("t_b", "t_d", "b", "d")
        }
        modulator = Modulator.from_values(**terms)
        modulator.monotone = monotone
        modulators.setdefault(layer, []).append(modulator)
    return modulators


def modulated(modulator: Modulator, scores: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return modulator(torch.from_numpy(np.asarray(scores, dtype=np.float64))).numpy()


@picture("Modulators", kinds=tuple(KINDS))
def modulators(collection: Collection, kind: str) -> Figure | None:
    """The learned modulator sigma of each layer, with one line per head if the heads have their own
    (after Figs. 3 and 10 of Zhou et al. 2024). The dashed line is the identity, which is softmax.
    Grey is the distribution of the scores. In the hatched range, past the turning point, sigma
    decreases; the label is the share of scores there."""
    by_layer = modulators_of(collection, kind)
    parameters = collection.parameters[collection.parameters["kind"] == kind]
    if (
        not by_layer or (parameters["name"] == "temperature").any()
    ):  # sigma then acts on scaled scores
        return None
    figure, panels = wrapped(len(by_layer), 3.5, 2.9)
    with_scores = falls = False
    for axis, (layer, heads) in zip(panels, by_layer.items(), strict=True):
        frame = latest(collection.histograms)
        frame = frame[(frame["kind"] == kind) & (frame["quantity"] == "score")]
        left, right, share = bins(frame[frame["layer"] == layer])
        low, high = score_range(left, right, share)
        x = np.linspace(low, high, 500)
        if share.sum() > 0:
            with_scores = True
            under = axis.twinx()
            under.set_yticks([])
            finite = np.isfinite(right - left)
            widths = (right - left)[finite]
            density = share[finite] / widths
            under.bar(left[finite], density, widths, align="edge", color=PALE, linewidth=0)
            under.set_ylim(0, 3.2 * density.max())
            # matplotlib would draw the bars, whose axes are newer, above the curves.
            axis.set_zorder(under.get_zorder() + 1)
            axis.patch.set_visible(False)
        axis.plot(x, x, "--", color="black", linewidth=1)
        for index, modulator in enumerate(heads):
            look = style(0) if len(heads) == 1 else ordered_style(index, len(heads))
            y = modulated(modulator, x)
            axis.plot(
                x,
                y,
                **{**look, "marker": look["marker"] if len(heads) > 1 else None},
                markevery=(20 + 17 * index, 120),
            )
            falling = np.diff(y, append=y[-1]) < 0
            for start, end in runs(falling):
                falls = True
                axis.axvspan(
                    x[start], x[end], facecolor="none", edgecolor=WARNING, hatch="///", alpha=0.5
                )
        share_past = past_turning_point(collection, kind, layer)
        words = "" if share_past is None else f"past the turning point: {percent(share_past)}"
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
        axis.text(0.03, 0.97, words, transform=axis.transAxes, va="top", fontsize=8, bbox=box)
        axis.set_title("output" if kind == "output" else f"layer {layer + 1}", fontsize=10)
        axis.set(xlabel="score x", ylabel="modulated score σ(x)", xlim=(low, high))
    handles: list[Any] = [
        Line2D([], [], color="black", linestyle="--", label="identity (softmax)"),
        Line2D(
            [],
            [],
            color=COLOURS[0],
            label="σ" if all(len(o) == 1 for o in by_layer.values()) else "σ, one line per head",
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
    """Format a share; only an exact 0 becomes 0 %."""
    if share == 0:
        return "0 %"
    if share < 1e-5:
        return f"{100 * share:.0e} %"
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def runs(marked: np.ndarray) -> list[tuple[int, int]]:
    """Return the first and last index of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], marked.astype(int), [0]])))
    return [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def score_range(left: np.ndarray, right: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """Return a range that contains nearly all scores, and -6 to 6."""
    low, high = -6.0, 6.0
    inner = np.isfinite(left) & np.isfinite(right)
    if share[inner].sum() > 0:
        reached = np.cumsum(share[inner]) / share[inner].sum()
        low = min(low, left[inner][np.searchsorted(reached, 1e-4)] - 1)
        high = max(high, right[inner][np.searchsorted(reached, 1 - 1e-4)] + 1)
    return low, high


@picture("Learned parameters")
def parameters(collection: Collection) -> Figure | None:
    """The learned parameters of the last checkpoint in the paper's symbols (Eq. 6, Tables 7 and 8
    of Zhou et al. 2024). A row is a layer, with the mean over the heads if they have their own. The
    colour is the difference from the identity (t = 1, b = d = 0), which is softmax."""
    frame = latest(collection.parameters)
    frame = frame[frame["name"].isin(IDENTITY)].assign(layer=lambda f: f["layer"].fillna(0))
    kinds = [kind for kind in KINDS if (frame["kind"] == kind).any()]
    if not kinds:
        return None
    symbols = [name for name in IDENTITY if (frame["name"] == name).any()]
    tables = [
        frame[frame["kind"] == kind]
        .pivot_table(index="layer", columns="name", values="value", aggfunc="mean")
        .reindex(columns=symbols)
        for kind in kinds
    ]
    heights = [len(table) + 1.5 for table in tables]
    figure = Figure(
        figsize=(max(5.5, 0.95 * len(symbols) + 2.2), 0.36 * sum(heights) + 1.2),
        layout="constrained",
    )
    axes = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=heights)[:, 0]
    identity = np.array([IDENTITY[name] for name in symbols])
    extent = max(1e-3, *(np.nanmax(np.abs(t.to_numpy() - identity)) for t in tables))
    for axis, kind, table in zip(axes, kinds, tables, strict=True):
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
        axis.set_title(KINDS[kind], fontsize=10)
        axis.set_xticks(range(len(symbols)), [symbol_text(name) for name in symbols])
        axis.set(xlabel="parameter", ylabel="layer")
        axis.set_yticks(
            range(len(table)), ["" if kind == "output" else str(int(i) + 1) for i in table.index]
        )
    figure.colorbar(image, ax=list(axes), label="value − value of the identity", shrink=0.8)
    return figure


def symbol_text(name: str) -> str:
    """Return a symbol in TeX: t_b1 becomes $t_{b_1}$."""
    if name == "temperature":
        return name
    side, order = name.removeprefix("t_")[0], name[-1]
    return f"$t_{{{side}_{order}}}$" if name.startswith("t_") else f"${side}_{order}$"


@picture("Parameters over training", kinds=tuple(KINDS))
def parameter_trajectories(collection: Collection, kind: str) -> Figure | None:
    """The learned parameters over the updates. A line is a layer, with the mean over the heads if
    they have their own. The dotted line is the identity, which is softmax."""
    frame = collection.parameters
    frame = frame[(frame["kind"] == kind) & frame["name"].isin(IDENTITY)]
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
            label = "output layer" if kind == "output" else f"layer {layer + 1}"
            axis.plot(means.index, means, label=label, **ordered_style(index, len(layers)))
        axis.set_title(symbol_text(name), fontsize=11)
        axis.set_ylabel("value")
        updates_axis(axis)
    legend_below(figure, columns=6)
    return figure
