"""Running sums over forward passes, in memory that does not grow with the data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.statistics import metrics

TEMPERATURES = (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0)
SCORE_STEP, BINS_PER_DECADE = 0.5, 8
SCORE_EDGES = np.arange(-40, 40 + SCORE_STEP / 2, SCORE_STEP)
PROBABILITY_EDGES = np.concatenate([[0.0], np.logspace(-8, 0, 8 * BINS_PER_DECADE + 1)])
DENSITY_EDGES = np.linspace(0, 1, 21)
# Positional heads attend to nearby tokens; larger offsets are ignored.
LARGEST_OFFSET = 32
# Ends of the buckets of word ranks, finer for frequent words.
BUCKET_RANKS = (50, 200, 1000, 4000, 20000)
LOGITS_AT_ONCE = 1 << 22


class RunningMean:
    """One running mean per row, over the values that are not NaN."""

    def __init__(self, rows: int = 1) -> None:
        self.total = torch.zeros(rows, dtype=torch.float64)
        self.count = torch.zeros(rows, dtype=torch.float64)

    def add(self, values: Tensor) -> None:
        """Add values, (rows, ...)."""
        valid = ~values.isnan()
        self.total += values.double().where(valid, 0.0).flatten(1).sum(1)
        self.count += valid.flatten(1).sum(1)

    def __getitem__(self, row: int) -> float:
        return float(self.total[row] / self.count[row])

    def overall(self) -> float:
        return float(self.total.sum() / self.count.sum())


@dataclass
class QueriesAndKeys:
    """The queries and keys of an attention in one batch."""

    query_padding: Tensor  # (B, T)
    key_padding: Tensor  # (B, S)
    offsets: Tensor  # (B, 1, T, S)
    same: bool  # queries and keys are the same tokens
    words: Tensor  # (B, S), the index of the word that a key belongs to
    questions: Tensor  # (B, 1, 1, S), True at a final question mark
    interrogatives: Tensor  # (B, T), True at an interrogative word


class AttentionSums:
    """The running sums of one layer's attention."""

    def __init__(self, normalizer: Normalizer, heads: int) -> None:
        self.normalizer, self.size = normalizer, heads
        names = ("sparsity", "multi_modality", "entropy", "density", "mass", "bpe_merging")
        self.heads = {
            name: RunningMean(heads) for name in (*names, "interrogation", "past_turning_point")
        }
        # Only for continuous attention.
        self.heads |= {name: RunningMean(heads) for name in ("support_tokens", "position_variance")}
        self.queries = 0
        self.layer = {
            "head_diversity": RunningMean(),
            "patch_similarity": RunningMean(),
            "mean_average_distance": RunningMean(),
            "rollout_similarity": RunningMean(),
        }
        self.temperatures = {t: (RunningMean(), RunningMean()) for t in TEMPERATURES}
        offsets = 2 * LARGEST_OFFSET + 1
        self.top_offsets = torch.zeros(heads, offsets, dtype=torch.long)
        self.at_offsets = torch.zeros(heads, offsets, dtype=torch.float64)
        self.offset_pairs = torch.zeros(offsets, dtype=torch.long)
        self.scores = torch.zeros(len(SCORE_EDGES) + 1, dtype=torch.long)
        self.probs = torch.zeros(len(PROBABILITY_EDGES), dtype=torch.long)
        self.densities = torch.zeros(len(DENSITY_EDGES) - 1, dtype=torch.long)

    def add(self, scores: Tensor, probs: Tensor, excluded: Tensor, pair: QueriesAndKeys) -> None:
        """Add a batch: scores, probs and excluded, (B, heads, T, S)."""
        padding = pair.query_padding[:, None]
        self.queries += int((~padding).sum())
        results = metrics.of_queries(scores, probs, excluded)
        others = ~excluded & (pair.offsets != 0) if pair.same else ~excluded
        asked = others & pair.questions & pair.interrogatives[:, None, :, None]
        results["interrogation"] = metrics.weight_on(probs, asked)
        if pair.same:
            in_word = pair.words[:, :, None] == pair.words[:, None, :]
            results["bpe_merging"] = metrics.weight_on(probs, others & in_word[:, None])
        results = {name: values.masked_fill(padding, torch.nan) for name, values in results.items()}
        if pair.same:
            results["bpe_merging"] = metrics.largest_of_words(results["bpe_merging"], pair.words)
        for name, values in results.items():
            self.heads[name].add(values.transpose(0, 1))
        valid = (~excluded & ~padding[..., None]).expand(scores.shape)
        self._turns(scores, valid)
        self._positions(probs, valid, padding, pair.offsets)
        self.scores += _score_counts(scores, valid)
        self.probs += _prob_counts(probs, valid)
        self.densities += _density_counts(results["density"])
        epsilon = metrics.mean_score(scores, excluded)
        reference = metrics.uniform_probability(scores, excluded)
        softmaxes = metrics.over_temperatures(scores, TEMPERATURES, epsilon, reference, excluded)
        for means, pair_of_values in zip(self.temperatures.values(), softmaxes, strict=True):
            for mean, value in zip(means, pair_of_values, strict=True):
                mean.add(value.masked_fill(padding, torch.nan)[None])
        diversity = metrics.head_diversity(probs, excluded)
        self.layer["head_diversity"].add(diversity.masked_fill(padding[:, 0], torch.nan)[None])

    def add_density(
        self, kind: str, variance: Tensor, inside: Tensor, pair: QueriesAndKeys
    ) -> None:
        """Add a batch of densities: variance (B, heads, T, 1), inside (B, heads, T, S)."""
        padding = pair.query_padding[:, None]
        results = {"position_variance": variance[..., 0]}
        if kind == "sparsemax":  # the support of a Gaussian holds every key
            results["support_tokens"] = inside.sum(-1).double()
        for name, values in results.items():
            self.heads[name].add(values.masked_fill(padding, torch.nan).transpose(0, 1))

    def _turns(self, scores: Tensor, valid: Tensor) -> None:
        modulator = self.normalizer.modulator
        if not isinstance(modulator, Modulator):
            return
        share = self.heads["past_turning_point"]
        share.count += valid.sum((0, 2, 3))
        share.total += (metrics.past_turning_point(scores, modulator) & valid).sum((0, 2, 3))

    def _positions(self, probs: Tensor, valid: Tensor, padding: Tensor, offsets: Tensor) -> None:
        width = self.top_offsets.shape[1]
        head = torch.arange(self.size)
        top = metrics.top_offset(probs, offsets)
        # A query may have no weights at all, as with softpick.
        near = (top.abs() <= LARGEST_OFFSET) & ~padding & (probs > 0).any(-1)
        index = head[:, None] * width + LARGEST_OFFSET + top
        counts = torch.bincount(index[near], minlength=self.top_offsets.numel())
        self.top_offsets += counts.view_as(self.top_offsets)
        # Only nearby pairs, because a long text has too many others.
        near = valid[:, 0] & (offsets[:, 0].abs() <= LARGEST_OFFSET)
        row, query, key = near.nonzero(as_tuple=True)
        column = offsets[row, 0, query, key] + LARGEST_OFFSET
        self.at_offsets.index_add_(1, column, probs[row, :, query, key].T.double())
        self.offset_pairs += torch.bincount(column, minlength=width)

    def head_rows(self) -> list[dict[str, Any]]:
        """Return the rows of heads.csv."""
        rows = []
        for head in range(self.size):
            row: dict[str, Any] = {"head": head, "queries": self.queries}
            row |= {name: mean[head] for name, mean in self.heads.items()}
            if self.top_offsets[head].any():
                best = int(self.top_offsets[head].argmax())
                row["offset"] = best - LARGEST_OFFSET
                row["confidence"] = float(self.at_offsets[head, best] / self.offset_pairs[best])
            rows.append(row)
        return rows

    def layer_row(self) -> dict[str, Any]:
        return {name: mean[0] for name, mean in self.layer.items()}

    def histogram_rows(self) -> list[dict[str, Any]]:
        edges: dict[str, Sequence[float]] = {
            "score": [-np.inf, *SCORE_EDGES, np.inf],
            "probability": [0.0, *PROBABILITY_EDGES],  # the first bin is exactly 0
            "density": [*DENSITY_EDGES],
        }
        counted = {"score": self.scores, "probability": self.probs, "density": self.densities}
        return [
            {"quantity": quantity, "left": left, "right": right, "count": int(count)}
            for quantity, counts in counted.items()
            for (left, right), count in zip(pairwise(edges[quantity]), counts, strict=True)
        ]

    def temperature_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"temperature": t, "sparsity": sparse[0], "multi_modality": modal[0]}
            for t, (sparse, modal) in self.temperatures.items()
        ]
        own = {name: self.heads[name].overall() for name in ("sparsity", "multi_modality")}
        return [*rows, {"temperature": None, **own}]


def _score_counts(scores: Tensor, valid: Tensor) -> Tensor:
    """Count scores in the bins (-inf, first edge], (first, second], ..., (last edge, inf)."""
    last = len(SCORE_EDGES)
    bins = ((scores - SCORE_EDGES[0]) / SCORE_STEP).ceil_().clamp_(0, last)
    return _bin_counts(bins, valid, last + 1)


def _density_counts(densities: Tensor) -> Tensor:
    """Count heads and sentences by their mean density over the queries, (B, heads, T)."""
    means, last = densities.nanmean(-1), len(DENSITY_EDGES) - 1
    bins = (means * last).ceil_().sub_(1).clamp_(0, last - 1)
    return _bin_counts(bins, ~means.isnan(), last)


def _prob_counts(probs: Tensor, valid: Tensor) -> Tensor:
    """Count probabilities in the bins 0, (0, 1e-8], ..., (last edge but one, 1]."""
    last = len(PROBABILITY_EDGES) - 1
    steps = (probs.log10() - math.log10(PROBABILITY_EDGES[1])) * BINS_PER_DECADE
    bins = steps.ceil_().add_(1).clamp_(1, last).masked_fill_(probs == 0, 0)
    return _bin_counts(bins, valid, last + 1)


def _bin_counts(bins: Tensor, valid: Tensor, size: int) -> Tensor:
    """Count bin indices, given as floats. Excluded entries go into an extra bin, then dropped."""
    bins = bins.masked_fill(~valid, size).flatten()
    return torch.bincount(bins.int(), minlength=size + 1)[:size]


class OutputSums:
    """Running sums over target words, by buckets of the words' rank in the dictionary."""

    def __init__(self, dictionary: Any) -> None:
        self.special = dictionary.nspecial
        words = len(dictionary) - self.special
        self.ranks = torch.tensor([rank for rank in BUCKET_RANKS if rank < words], dtype=torch.long)
        names = ("entropy", "sparsity", "nll", "nll_without_modulator", "probability")
        self.means = {
            name: RunningMean(len(self.ranks) + 1)
            for name in (*names, "probability_without_modulator")
        }
        self.tokens = torch.zeros(len(self.ranks) + 1, dtype=torch.long)

    def add(self, decoder: Any, features: Tensor, targets: Tensor) -> None:
        """Add features, (N, C), and their target words, (N,)."""
        at_once = max(1, LOGITS_AT_ONCE // len(decoder.dictionary))
        unmodulated: list[Tensor] = []
        modulator = getattr(decoder, "output_modulator", None)
        handle = None
        if modulator is not None:
            handle = modulator.register_forward_hook(
                lambda module, inputs, output: unmodulated.append(inputs[0])
            )
        for rows, words in zip(features.split(at_once), targets.split(at_once), strict=True):
            unmodulated.clear()
            output = decoder.output_layer(rows[None])
            log_probs = decoder.get_normalized_probs((output, None), log_probs=True)[0]
            # The adaptive softmax has no logits; log-probabilities equal them up to a constant.
            scores = output[0] if output.shape[-1] == log_probs.shape[-1] else log_probs
            if unmodulated:
                scores = unmodulated[0][0]
            self._add(scores, log_probs, words, bool(unmodulated))
        if handle is not None:
            handle.remove()

    def _add(self, scores: Tensor, log_probs: Tensor, targets: Tensor, modulated: bool) -> None:
        # log_probs, because a probability may underflow to 0 in float32.
        chosen, probs = log_probs.gather(-1, targets[:, None])[:, 0], log_probs.exp()
        results = {
            "entropy": metrics.entropy(probs),
            "sparsity": metrics.sparsity(
                scores, probs, metrics.mean_score(scores), 1 / probs.shape[-1]
            ),
            "nll": -chosen,
            "probability": chosen.exp(),
        }
        if modulated:
            chosen = scores.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            results["nll_without_modulator"] = -chosen
            results["probability_without_modulator"] = chosen.exp()
        # Special symbols come before the words; they count as the most frequent ones.
        bucket = torch.bucketize(targets - self.special + 1, self.ranks)
        for number in range(len(self.tokens)):
            inside = bucket == number
            self.tokens[number] += inside.sum()
            for name, values in results.items():
                mean = self.means[name]
                mean.total[number] += values[inside].double().sum()
                mean.count[number] += inside.sum()

    def rows(self) -> list[dict[str, Any]]:
        ends = [*self.ranks.tolist(), None]
        names = [
            f"{first + 1}-{last or ''}" for first, last in zip([0, *ends[:-1]], ends, strict=True)
        ]
        return [
            {
                "bucket": name,
                "tokens": int(self.tokens[number]),
                **{key: mean[number] for key, mean in self.means.items()},
            }
            for number, name in enumerate(names)
            if self.tokens[number] > 0
        ]
