"""Over-smoothing and attention roll-out."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from multimax_fairseq.analysis.canvas import (
    grid,
    layers_of,
    legend_below,
    ordered_style,
    plain,
    plot_by_layer,
    updates_axis,
)
from multimax_fairseq.analysis.collection import ATTENTIONS, Collection
from multimax_fairseq.analysis.figures.catalogue import picture

SIMILARITY = "patch similarity (absolute cosine)"
INCH_PER_TOKEN = 0.13
# {kind: the sides of its queries and keys}
SIDES = {
    "encoder": ("source", "source"),
    "decoder": ("target", "target"),
    "cross": ("target", "source"),
}


@picture("Over-smoothing over the layers", comparable=True)
def over_smoothing(collections: list[Collection]) -> Figure | None:
    """Patch similarity: the mean absolute cosine between a layer's outputs for two tokens of a
    sentence (Gong et al. 2021). It is near 1 for over-smoothing (Fig. 4 of Zhou et al. 2024). A
    single model has one line per checkpoint, darker for later ones."""
    alone = len(collections) == 1
    return plot_by_layer(collections, "layers", "patch_similarity", SIMILARITY, alone)


@picture("Over-smoothing over training")
def over_smoothing_updates(collection: Collection) -> Figure | None:
    """Patch similarity over the updates, one line per layer."""
    frame = collection.layers.dropna(subset="patch_similarity")
    if frame["updates"].nunique() < 2:
        return None
    kinds = [kind for kind in ATTENTIONS if (frame["kind"] == kind).any()]
    figure, axes = grid(1, len(kinds))
    layers = layers_of(frame)
    for axis, kind in zip(axes[0], kinds, strict=True):
        own = frame[frame["kind"] == kind]
        for index, layer in enumerate(layers):
            line = own[own["layer"] == layer].sort_values("updates")
            axis.plot(
                line["updates"],
                line["patch_similarity"],
                label=f"layer {layer + 1}",
                **ordered_style(index, len(layers)),
            )
        axis.set_ylabel(SIMILARITY)
        axis.set_title(ATTENTIONS[kind], fontsize=10)
        updates_axis(axis)
    legend_below(figure, columns=6)
    return figure


@picture("Roll-out against single-layer attention", comparable=True)
def rollout(collections: list[Collection]) -> Figure | None:
    """The correlation of each layer's attention with the roll-out up to this layer (Fig. 9 of Zhou
    et al. 2024). The roll-out is the product of the attentions of all layers below (Abnar and
    Zuidema 2020). A low correlation means that a layer's attention alone does not show where
    information comes from."""
    return plot_by_layer(collections, "layers", "rollout_similarity", "correlation with roll-out")


@picture("Roll-out of an example")
def rollout_example(collection: Collection) -> Figure | None:
    """The attention of single layers (mean over the heads; top) and the roll-out up to them
    (bottom) for the first stored sentence. Queries are rows, keys are columns. Each image has its
    own scale, from zero to its largest weight."""
    for example in collection.examples:
        for kind in ATTENTIONS:
            if rolled := example.get("rollout", {}).get(kind):
                return draw_rollout(example, rolled, kind)
    return None


def draw_rollout(example: dict[str, Any], rolled: list[Any], kind: str) -> Figure:
    attention = example["attention"][kind]
    queries, keys = ([plain(token) for token in example[side]["tokens"]] for side in SIDES[kind])
    chosen = sorted({int(i) for i in np.linspace(0, len(rolled) - 1, 4).round()})
    size = INCH_PER_TOKEN * len(keys) + 0.8, INCH_PER_TOKEN * len(queries) + 0.8
    figure, axes = grid(2, len(chosen), *size)
    for column, layer in enumerate(chosen):
        axes[0, column].sharex(axes[1, column])
        for row, values in enumerate((np.mean(attention[layer], axis=0), np.array(rolled[layer]))):
            axis = axes[row, column]
            image = axis.imshow(values, cmap="cividis", vmin=0)
            axis.set_title(
                f"{'layer' if row == 0 else 'roll-out to layer'} {layer + 1}", fontsize=9
            )
            axis.set(xlabel="key" if row else "", ylabel="query")
            axis.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6)
            axis.tick_params(labelbottom=row == 1)
            axis.set_yticks(range(len(queries)), [] if column else queries, fontsize=6)
    figure.colorbar(
        image, ax=axes, label="weight (0 to each picture's largest)", ticks=[], shrink=0.6
    )
    axes[0, 0].set_title(f"{ATTENTIONS[kind]}\n{axes[0, 0].get_title()}", fontsize=9)
    return figure
