"""What a collection shows, in sentences: the opening of the report."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from multimax_fairseq.analysis.collection import PLACES, Collection, latest
from multimax_fairseq.analysis.figures.modulators import modulated, modulators_of

POSITIONAL = 0.5  # mean weight from which a head counts as positional
RANGE = np.linspace(-30, 30, 60001)  # scores on which a turning point of sigma is sought


def findings(collection: Collection) -> list[str]:
    """Return three to five sentences about the last checkpoint."""
    parts = (quality, sparse_heads, multi_modality, turning_points, positional_heads)
    return [sentence for part in parts for sentence in part(collection)]


def perplexity(collection: Collection, column: str = "nll") -> float | None:
    """Return the perplexity per token; None if the collection has none."""
    frame = latest(collection.output).dropna(subset=[column, "tokens"])
    if frame.empty:
        return None
    return float(np.exp((frame[column] * frame["tokens"]).sum() / frame["tokens"].sum()))


def quality(collection: Collection) -> Iterator[str]:
    if (own := perplexity(collection)) is None:
        return
    text = f"The model has a perplexity of {own:.2f} per token on this data"
    bare = perplexity(collection, "nll_without_modulator")
    if bare is not None:
        text += f"; without sigma in its output layer it would have {bare:.2f}"
    yield f"{text}."


def sparse_heads(collection: Collection) -> Iterator[str]:
    heads = latest(collection.heads).dropna(subset=["sparsity"])
    if len(heads) < 2:
        return
    most = heads.loc[heads["sparsity"].idxmax()]
    least = heads.loc[heads["sparsity"].idxmin()]
    text = (
        f"Of {len(heads)} heads, {named(most)} is the sparsest (sparsity {most['sparsity']:.2f}) "
        f"and {named(least)} the least sparse ({least['sparsity']:.2f})"
    )
    zeros = 1 - heads["density"].mean()
    if zeros > 0:
        text += f"; {zeros:.0%} of all weights are exactly 0"
    yield f"{text}."


def multi_modality(collection: Collection) -> Iterator[str]:
    """Compare each layer with softmax at the temperature that gives the same sparsity."""
    better = count = 0
    for _, frame in latest(collection.temperatures).groupby(["place", "layer"]):
        softmax = frame[frame["temperature"].notna()].sort_values("sparsity")
        own = frame[frame["temperature"].isna()]
        if own.empty or len(softmax) < 2:
            continue
        sparsity, modes = own[["sparsity", "multi_modality"]].iloc[0]
        equal = np.interp(sparsity, softmax["sparsity"], softmax["multi_modality"])
        count += 1
        better += bool(modes > equal + 1e-3)
    if count:
        yield (
            f"In {better} of {count} attention layers, relevant keys share the attention more "
            "evenly than under softmax at the temperature with the same sparsity (higher "
            "multi-modality)."
        )


def turning_points(collection: Collection) -> Iterator[str]:
    """Say where sigma stops to increase, and how many scores lie there."""
    shares = latest(collection.heads).groupby(["place", "layer"])["past_turning_point"].mean()
    shares = shares.dropna()
    if shares.empty:
        return
    if shares.max() == 0:
        yield "Sigma increases on all attention scores of this data."
        return
    place, layer = shares.idxmax()
    modulator = modulators_of(collection, place)[int(layer)][0]
    slopes = np.diff(modulated(modulator, RANGE)) < 0
    middle = len(slopes) // 2
    above = np.flatnonzero(slopes[middle:])
    below = np.flatnonzero(slopes[:middle])
    where = [f"above {RANGE[middle + above[0]]:.1f}"] if len(above) else []
    where += [f"below {RANGE[below[-1] + 1]:.1f}"] if len(below) else []
    yield (
        f"Sigma decreases most often in layer {int(layer) + 1} of the {PLACES[place]}: on scores "
        f"{' and '.join(where)}, which are {shares.max():.1%} of the scores there."
    )


def positional_heads(collection: Collection) -> Iterator[str]:
    heads = latest(collection.heads).dropna(subset=["offset", "confidence"])
    found = heads[heads["confidence"] > POSITIONAL]
    if len(found):
        offset = found["offset"].mode().iloc[0]
        yield (
            f"{len(found)} of {len(heads)} heads give most of their weight to one relative "
            f"position, most often {offset:+.0f}."
        )


def named(head: pd.Series) -> str:
    return (
        f"head {head['head'] + 1:.0f} of layer {head['layer'] + 1:.0f} in {PLACES[head['place']]}"
    )
