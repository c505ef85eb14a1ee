"""Sentences about a collection, for the start of the report."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from multimax_fairseq.analysis.collection import KINDS, Collection, latest
from multimax_fairseq.analysis.figures.modulators import modulated, modulators_of, runs
from multimax_fairseq.mappings.multimax import Modulator

POSITIONAL = 0.5  # mean weight from which a head counts as positional
RANGE = np.linspace(-30, 30, 60001)  # scores on which a turning point of sigma is sought


def findings(collection: Collection) -> list[str]:
    """Return up to five sentences about the last checkpoint."""
    parts = (quality, sparse_heads, multi_modality, turning_points, positional_heads)
    return [sentence for part in parts for sentence in part(collection)]


def perplexity(collection: Collection, column: str = "nll") -> float | None:
    """Return the perplexity per token; None if the collection has none."""
    mean = mean_over_tokens(collection, column)
    return None if mean is None else float(np.exp(mean))


def mean_over_tokens(collection: Collection, column: str) -> float | None:
    """Return the mean of a column of the output layer's table; None if the column is empty."""
    frame = latest(collection.output).dropna(subset=[column, "tokens"])
    if frame.empty:
        return None
    return float((frame[column] * frame["tokens"]).sum() / frame["tokens"].sum())


def quality(collection: Collection) -> Iterator[str]:
    if (own := perplexity(collection)) is None:
        return
    text = f"The model has a perplexity of {own:.2f} per token on this data"
    bare = perplexity(collection, "nll_without_modulator")
    if bare is not None:
        text += f"; with sigma removed from its output layer, {bare:.2f}"
    yield f"{text}."


def sparse_heads(collection: Collection) -> Iterator[str]:
    heads = latest(collection.heads).dropna(subset=["sparsity"])
    if len(heads) < 2:
        return
    most = heads.loc[heads["sparsity"].idxmax()]
    least = heads.loc[heads["sparsity"].idxmin()]
    text = (
        f"The sparsest of {len(heads)} heads is {named(most)} (sparsity {most['sparsity']:.2f}), "
        f"the least sparse is {named(least)} ({least['sparsity']:.2f})"
    )
    zeros = 1 - heads["density"].mean()
    if zeros >= 0.005:  # fewer are rounding
        text += f"; on average {zeros:.0%} of a head's weights are exactly 0"
    yield f"{text}."


def multi_modality(collection: Collection) -> Iterator[str]:
    """Compare each layer with softmax at the temperature that gives the same sparsity."""
    better = count = 0
    mappings = collection.checkpoint().get("normalizer", {})
    for (kind, _), frame in latest(collection.temperatures).groupby(["kind", "layer"]):
        softmax = frame[frame["temperature"].notna()].sort_values("sparsity")
        own = frame[frame["temperature"].isna()]
        if mappings.get(kind) == "softmax" or own.empty or softmax.empty:
            continue
        sparsity, modes = own[["sparsity", "multi_modality"]].iloc[0]
        if not softmax["sparsity"].min() <= sparsity <= softmax["sparsity"].max():
            continue  # no measured temperature is as sparse
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
    """Say where sigma decreases, and how many scores lie there."""
    heads = latest(collection.heads).dropna(subset=["past_turning_point"])
    if heads.empty:
        return
    head = heads.loc[heads["past_turning_point"].idxmax()]
    share, kind, layer = head["past_turning_point"], head["kind"], int(head["layer"])
    if share == 0:
        yield "Sigma increases on all attention scores of this data."
        return
    modulators = modulators_of(collection, kind)[layer]
    falling = intervals(modulators[int(head["head"]) if len(modulators) > 1 else 0])
    percent = f"{share:.1%}" if share >= 0.0005 else "less than 0.1%"
    where = f"on scores {' and '.join(falling)}, which are" if falling else "on"
    yield f"Sigma decreases most often for {named(head)}: {where} {percent} of its scores."


def intervals(modulator: Modulator) -> list[str]:
    """Return the intervals of scores on which sigma decreases, in words."""
    falls = np.diff(modulated(modulator, RANGE)) < 0
    found = []
    for start, last in runs(falls):
        end = last + 1
        if start == 0:
            found.append(f"below {RANGE[end]:.1f}")
        elif end == len(falls):
            found.append(f"above {RANGE[start]:.1f}")
        else:
            found.append(f"from {RANGE[start]:.1f} to {RANGE[end]:.1f}")
    return found


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
    return f"head {head['head'] + 1:.0f} of layer {head['layer'] + 1:.0f} in {KINDS[head['kind']]}"
