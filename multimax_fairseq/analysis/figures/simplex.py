"""Mappings of two and three scores."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from multimax_fairseq.analysis.canvas import PALE, legend_below, ordered_style, style, wrapped
from multimax_fairseq.analysis.collection import ATTENTIONS, Collection, latest
from multimax_fairseq.analysis.figures.catalogue import picture
from multimax_fairseq.analysis.figures.modulators import SYMBOLS, modulators_of
from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.mappings.registry import NORMALIZERS, normalize

# Learned parameters of Zhou et al. 2024, as (t_b, t_d, b, d): layer 8 of Table 7 (Deit-small,
# ImageNet) and layer 1 of Table 8 (WikiText-103).
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
EXAMPLE = (2.0, 1.5, 0.0)  # two relevant scores and an irrelevant one
SECOND = np.linspace(0.0, 2.0, 7)  # values of the second score

Mapping = Callable[[np.ndarray], np.ndarray]


def mapping(name: str, **options: Any) -> Mapping:
    def apply(scores: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            values = torch.from_numpy(np.asarray(scores, dtype=np.float64))
            return normalize(name, values, **options).numpy()

    return apply


def known_mappings() -> dict[str, Mapping]:
    return {
        **{
            NORMALIZERS[name].label: mapping(name)
            for name in ("softmax", "entmax15", "sparsemax", "evsoftmax")
        },
        **{
            label: mapping("multimax", modulator=Modulator.from_values(*values))
            for label, values in PAPER.items()
        },
    }


def learned_mappings(collection: Collection, kind: str) -> dict[int, Mapping]:
    """Return {layer: the learned mapping of the last checkpoint, averaged over the heads}.

    It is empty if a layer learns anything else, such as a sink, or a temperature and a modulator.
    """
    frame = latest(collection.parameters)
    frame = frame[frame["kind"] == kind]
    if not any(set(frame["name"]) <= own for own in ({*SYMBOLS}, {"alpha"}, {"temperature"})):
        return {}
    mappings: dict[int, list[Mapping]] = {
        layer: [mapping("multimax", modulator=modulator) for modulator in own]
        for layer, own in modulators_of(collection, kind).items()
    }
    for name, normalizer in (("alpha", "alpha_entmax"), ("temperature", "softmax")):
        for row in frame[frame["name"] == name].itertuples():
            options = {name: float(row.value)}
            mappings.setdefault(int(row.layer), []).append(mapping(normalizer, **options))
    return {layer: mean_of(own) for layer, own in sorted(mappings.items())}


def mean_of(mappings: list[Mapping]) -> Mapping:
    return lambda scores: np.mean([apply(scores) for apply in mappings], axis=0)


def learned_kinds(collection: Collection) -> dict[str, dict[int, Mapping]]:
    by_kind = {kind: learned_mappings(collection, kind) for kind in collection.kinds()}
    return {kind: mappings for kind, mappings in by_kind.items() if mappings}


@picture("Mappings of two scores")
def simplex_2d(collection: Collection) -> Figure | None:
    """The weight of a score x as a function of x, if the only other score is -2 or 2 (Fig. 2 of
    Zhou et al. 2024). Softmax is a shifted logistic function. The first panels have known mappings,
    and MultiMax with the paper's parameters. The other panels have softmax and the learned mappings
    of this model, one line per layer (the mean over its heads)."""
    kinds = learned_kinds(collection)
    figure, panels = wrapped(2 * (1 + len(kinds)), 4.2, 3.8)
    x = np.linspace(-4, 4, 401)
    groups = {"known mappings": known_mappings()} | {
        f"learned: {ATTENTIONS[kind]}": {f"layer {n + 1}": apply for n, apply in found.items()}
        for kind, found in kinds.items()
    }
    axes = iter(panels)
    for title, mappings in groups.items():
        is_known = title == "known mappings"
        for other in (-2.0, 2.0):
            axis, scores = next(axes), np.stack([x, np.full_like(x, other)], -1)
            if not is_known:
                axis.plot(x, mapping("softmax")(scores)[:, 0], "k--", linewidth=1, label="softmax")
            for index, (label, apply) in enumerate(mappings.items()):
                look = style(index) if is_known else ordered_style(index, len(mappings))
                look = {**look, "markevery": (index * 9 % 60, 60)}
                axis.plot(x, apply(scores)[:, 0], label=label, **look)
            axis.set_title(title, fontsize=10)
            axis.set(xlabel=f"score x (the other is {other:.0f})", ylabel="weight of x")
            # Leave space for the legend above the curves.
            axis.set_ylim(-0.03, 1.45)
            axis.legend(fontsize=7, loc="upper left", ncols=2)
    return figure


@picture("Mappings on the simplex of three weights")
def simplex_3d(collection: Collection) -> Figure | None:
    """The weights of three scores under different mappings (Fig. 1 of Zhou et al. 2024). At a
    corner of the triangle one score has all the weight. On an edge the third score has none. The
    first panel has the scores 2, 1.5 and 0; its band is softmax at different temperatures. In the
    second panel the second score runs from 0 to 2. The learned mappings of this model are means
    over layers and heads."""
    figure = Figure(figsize=(8.4, 5.4), layout="constrained")
    axes = [figure.add_subplot(1, 2, i + 1, projection="3d") for i in range(2)]
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
    axes[1].set_title("scores 2, 0 to 2, 0", fontsize=10)
    first, _, third = EXAMPLE
    sweep = np.stack([np.full_like(SECOND, first), SECOND, np.full_like(SECOND, third)], -1)
    learned = {
        f"this model, {ATTENTIONS[kind]}": mean_of(list(mappings.values()))
        for kind, mappings in learned_kinds(collection).items()
    }
    for index, (label, apply) in enumerate((known_mappings() | learned).items()):
        look = style(index)
        point = apply(np.array(EXAMPLE))[:, None]
        only = {**look, "linestyle": "", "markersize": 8, "markeredgecolor": "white"}
        axes[0].plot(*point, **only, zorder=10)
        axes[1].plot(*apply(sweep).T, **look, label=label)
    legend_below(figure, columns=3)
    return figure


def triangle(axis: Any) -> None:
    """Draw the simplex, viewed at a right angle."""
    corners = np.eye(3)
    axis.plot_trisurf(*corners.T, color=PALE, alpha=0.15)
    axis.plot(*np.vstack([corners, corners[:1]]).T, color="black", linewidth=0.8)
    # Without the last ticks, the labels of the x and y axes would overlap where the axes meet.
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
