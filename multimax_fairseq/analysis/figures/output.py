"""The output layer by word frequency."""

import math

from matplotlib.figure import Figure

from multimax_fairseq.analysis.canvas import empty, grid, legend_below, series, style
from multimax_fairseq.analysis.collection import Collection, latest
from multimax_fairseq.analysis.figures.catalogue import picture


@picture("Output layer by word frequency", comparable=True)
def output_layer(collections: list[Collection]) -> Figure | None:
    """The predicted distribution by the frequency of the correct word (rank in the dictionary,
    frequent words on the left). A model with an output modulator also has hollow markers: the same
    model without it, which shows the modulator's effect on frequent and rare words."""
    quantities = {
        "entropy": "entropy (nats)",
        "sparsity": "sparsity (0 to 1)",
        "nll": "negative log-likelihood (nats)",
        "probability": "probability of the right word",
    }
    if all(empty(latest(c.output), *quantities) for c in collections):
        return None
    drawn = series(collections)
    found = {bucket for entry in drawn for bucket in entry.of("output")["bucket"]}
    buckets = sorted(found, key=ranks)
    figure, axes = grid(2, 2, 4.2, 2.9)
    for axis, (quantity, label) in zip(axes.flat, quantities.items(), strict=True):
        for index, entry in enumerate(drawn):
            frame = entry.of("output")
            x = frame["bucket"].map(buckets.index)
            axis.plot(x, frame[quantity], label=entry.label, **style(index))
            bare = f"{quantity}_without_modulator"
            if bare in frame and frame[bare].notna().any():
                look = {**style(index), "linestyle": ":", "markerfacecolor": "white"}
                axis.plot(x, frame[bare], label=f"{entry.label}, without modulator", **look)
        axis.set_xticks(range(len(buckets)), buckets)
        axis.set(xlabel="dictionary rank of the right word", ylabel=label)
        axis.tick_params(axis="x", labelsize=8)
    legend_below(figure, columns=3)
    return figure


def ranks(bucket: str) -> tuple[int, float]:
    """Return the first and last rank of a bucket, such as "51-200" or "201-"."""
    first, _, last = bucket.partition("-")
    return int(first), int(last) if last else math.inf
