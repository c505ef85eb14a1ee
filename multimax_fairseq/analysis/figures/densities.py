"""Continuous attention: densities over positions next to the discrete weights."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from multimax_fairseq.analysis.canvas import COLOURS, grid, legend_below, plain
from multimax_fairseq.analysis.collection import Collection
from multimax_fairseq.analysis.figures.catalogue import picture

INCH_PER_TOKEN = 0.21
MARK = COLOURS[1]


@picture("Attention weights and density over the source", kinds=("encoder", "cross"))
def source_densities(collection: Collection, kind: str) -> Figure | None:
    """The attention weights of the tokens (left) and the density of their mean and variance (right)
    at the tokens' positions, for the first stored sentence (Figs. 1 and 2 of Martins et al. 2020).
    For a truncated parabola the variance is a scale. Crosses mark the means. Boxes mark the tokens
    in the support of a truncated parabola. The figure shows the head whose means vary most from
    query to query, relative to its variances."""
    for example in collection.examples:
        if layers := example.get("densities", {}).get(kind):
            return draw_densities(example, kind, layers)
    return None


def draw_densities(example: dict[str, Any], kind: str, layers: list[dict[str, Any]]) -> Figure:
    layer, head = most_moving(layers)
    density = layers[layer]
    keys = [plain(token) for token in example["source"]["tokens"]]
    queried = example["source" if kind == "encoder" else "target"]["tokens"]
    queries = [plain(token) for token in queried]
    width, height = INCH_PER_TOKEN * len(keys) + 1.6, INCH_PER_TOKEN * len(queries) + 1.2
    figure, axes = grid(1, 2, width, height)
    for axis, values, title, label in (
        (axes[0, 0], example["attention"][kind][layer][head], "discrete", "weight"),
        (axes[0, 1], density["values"][head], f"continuous {density['kind']}", "density"),
    ):
        image = axis.imshow(values, cmap="cividis", vmin=0, aspect="auto")
        axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=7)
        axis.set_yticks(range(len(queries)), queries, fontsize=7)
        axis.set(xlabel="key", ylabel="query")
        axis.set_title(f"{title}: layer {layer + 1}, head {head + 1}", fontsize=10)
        figure.colorbar(image, ax=axis, label=label, shrink=0.9)
    mark(axes[0, 1], density, head)
    handles: list[Any] = [Line2D([], [], color=MARK, marker="x", linestyle="", label="mean")]
    if density["kind"] == "sparsemax":
        handles.append(Patch(edgecolor=MARK, fill=False, label="tokens in the support"))
    legend_below(figure, handles)
    return figure


def most_moving(layers: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the layer and head whose means vary most, relative to the variances."""
    moves = [
        [np.var(mean) / np.mean(variance) for mean, variance in zip(*moments, strict=True)]
        for moments in ((layer["mean"], layer["variance"]) for layer in layers)
    ]
    layer, head = np.unravel_index(np.argmax(moves), np.shape(moves))
    return int(layer), int(head)


def mark(axis: Axes, density: dict[str, Any], head: int) -> None:
    """Draw the mean of each row, and a box around its support."""
    # Token l of L has the position l / L and the pixel l - 1.
    means = np.array(density["mean"][head]) / density["positions"][0] - 1
    limits = axis.get_xlim()
    axis.plot(means, range(len(means)), color=MARK, marker="x", markersize=4, linestyle="")
    axis.set_xlim(limits)
    if density["kind"] != "sparsemax":
        return
    for query, (start, end) in enumerate(density["support"][head]):
        if start < end:
            box = Rectangle((start - 0.5, query - 0.5), end - start, 1)
            box.set(fill=False, edgecolor=MARK, linewidth=1.2)
            axis.add_patch(box)
