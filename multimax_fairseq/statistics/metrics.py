"""Metrics of attention, computed from scores and probabilities.

The dimensions are (..., heads, queries, keys). A mask is bool and broadcastable; True excludes, and
an excluded entry has probability 0. A metric that is not defined, as for a single key, is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from multimax_fairseq.continuous.densities import TRUNCATED_PARABOLA
from multimax_fairseq.ops.modulator import (
    ModulatorParameters,
    modulated_gradients,
    packed_parameters,
)


def of_queries(scores: Tensor, probs: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Return the metrics of each query by name, (...) each.

    They are `sparsity`, `multi_modality`, `entropy`, `density`, and `mass`, the sum of the
    probabilities. Epsilon is the query's mean score; the reference is 1 / its number of keys.

    Args:
        scores, probs, mask: as `multi_modality`.
    """
    epsilon, reference = mean_score(scores, mask), uniform_probability(scores, mask)
    return {
        "sparsity": sparsity(scores, probs, epsilon, reference, mask),
        "multi_modality": multi_modality(scores, probs, epsilon, mask),
        "entropy": entropy(probs),
        "density": density(probs, mask),
        "mass": probs.sum(-1),
    }


def shares(probs: Tensor) -> Tensor:
    """Return the probabilities divided by their sum; NaN if the sum is 0."""
    return probs / probs.sum(-1, keepdim=True)


def mean_score(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean score of each query, (..., 1), the epsilon of the metrics here.

    It is the largest epsilon for which the proof of Proposition 3.5 (Zhou et al. 2024) holds. The
    paper writes ||x||_1 / K, which is the mean only if no score is negative.
    """
    if mask is None:
        return scores.mean(-1, keepdim=True)
    return scores.masked_fill(mask, 0.0).sum(-1, keepdim=True) / _keys(scores, mask)[..., None]


def uniform_probability(scores: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return 1 / the number of keys of each query, (..., 1): a reference for `sparsity`."""
    if mask is None:
        return torch.full_like(scores[..., :1], 1 / scores.shape[-1])
    return _keys(scores, mask)[..., None].to(scores.dtype).reciprocal()


def _keys(like: Tensor, mask: Tensor) -> Tensor:
    """Return the number of keys that the mask allows each query, (...)."""
    return (~mask).expand(like.shape).sum(-1)


def multi_modality(
    scores: Tensor, probs: Tensor, epsilon: float | Tensor, mask: Tensor | None = None
) -> Tensor:
    """Return how close the probabilities of relevant entries are to that of the largest entry.

        M(x) = 1 - mean of (p_max - p_n) over eps < x_n < x_max   (Definition 3.2, Zhou et al. 2024)

    Args:
        scores: (..., K), before the mapping.
        probs: (..., K), after it; p_max is the probability of the largest score.
        epsilon: entries above it are relevant; a tensor is broadcastable to scores.
        mask: as in the module's docstring.

    Returns:
        (...); NaN if only the largest entry is relevant.
    """
    relevant, top = _relevant(scores, epsilon, mask)
    mean = (probs * relevant).sum(-1) / relevant.sum(-1)
    return 1 - (probs.gather(-1, top).squeeze(-1) - mean)


def _relevant(
    scores: Tensor, epsilon: float | Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return which entries lie between epsilon and the largest, and its index, (..., 1)."""
    if mask is not None:
        scores = scores.masked_fill(mask, -torch.inf)
    top = scores.argmax(-1, keepdim=True)
    return (scores > epsilon) & (scores < scores.gather(-1, top)), top


def sparsity(
    scores: Tensor,
    probs: Tensor,
    epsilon: float | Tensor,
    reference: float | Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Return how close to zero the probabilities of irrelevant entries are, between 0 and 1.

        S(x) = mean of exp((s - p_l) / s - 1) over x_l < eps      (Definition 3.3, Zhou et al. 2024)

    Args:
        scores, probs, mask: as `multi_modality`.
        epsilon: entries below it are irrelevant.
        reference: s, the probability at which an entry counts 1 / e; above 0.

    Returns:
        (...); NaN if no entry is irrelevant.
    """
    low = _irrelevant(scores, epsilon, mask)
    return ((-probs / reference).exp() * low).sum(-1) / low.sum(-1)


def _irrelevant(scores: Tensor, epsilon: float | Tensor, mask: Tensor | None) -> Tensor:
    low = scores < epsilon
    return low if mask is None else low & ~mask


def over_temperatures(
    scores: Tensor,
    temperatures: Sequence[float],
    epsilon: float | Tensor,
    reference: float | Tensor,
    mask: Tensor | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Return (sparsity, multi-modality) of softmax at each temperature.

    Equivalent to: sparsity and multi_modality of softmax(scores, mask=mask, temperature=t)

    Args:
        scores, epsilon, reference, mask: as `sparsity`.
        temperatures: above zero.
    """
    low = _irrelevant(scores, epsilon, mask)
    relevant, top = _relevant(scores, epsilon, mask)
    counts = low.sum(-1), relevant.sum(-1)
    low, relevant = low.to(scores.dtype), relevant.to(scores.dtype)  # once for all products
    below = scores - scores.gather(-1, top)
    if mask is not None:
        below = below.masked_fill(mask, -torch.inf)
    results = []
    for temperature in temperatures:
        weights = (below / temperature).exp_()
        total = weights.sum(-1, keepdim=True)
        probs = weights.div_(total)
        mean = (probs * relevant).sum(-1) / counts[1]
        modal = 1 - (1 / total.squeeze(-1) - mean)  # the largest weight is 1
        results.append((probs.div_(-reference).exp_().mul_(low).sum(-1) / counts[0], modal))
    return results


def entropy(probs: Tensor) -> Tensor:
    """Return the Shannon entropy of the `shares` in nats, (...)."""
    return torch.special.entr(shares(probs)).sum(-1)


def density(probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the share of keys whose probability is not zero, (...)."""
    keys = probs.shape[-1] if mask is None else _keys(probs, mask)
    return (probs > 0).sum(-1).to(probs.dtype) / keys


def head_diversity(probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the generalised Jensen-Shannon divergence between heads' `shares`, from 0 to 1.

        JS = H(mean_j p_j) - mean_j H(p_j), logarithm to the base of the number of keys
                                                                          (Correia et al. 2019)

    Args:
        probs: (..., heads, queries, keys).
        mask: the same for all heads.

    Returns:
        (..., queries); NaN for a single key.
    """
    if mask is None:
        mask = torch.zeros_like(probs[..., :1, :, :], dtype=torch.bool)
    keys = _keys(probs, mask)[..., 0, :]
    probs = shares(probs)
    divergence = entropy(probs.mean(-3)) - entropy(probs).mean(-2)
    return (divergence / keys.to(probs.dtype).log()).masked_fill(keys < 2, torch.nan)


def relative_positions(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Return key position minus query position, (..., queries, keys)."""
    return key_positions[..., None, :] - query_positions[..., :, None]


def top_offset(probs: Tensor, offsets: Tensor) -> Tensor:
    """Return the relative position of the key with the largest weight, (...); of ties, the first.

    Args:
        probs: (..., queries, keys).
        offsets: as `relative_positions`, broadcastable to probs.
    """
    return offsets.expand(probs.shape).gather(-1, probs.argmax(-1, keepdim=True)).squeeze(-1)


def weight_on(probs: Tensor, chosen: Tensor) -> Tensor:
    """Return the weight of each query on chosen keys, (..., queries).

    Args:
        probs: (..., queries, keys).
        chosen: bool, broadcastable to probs.

    Returns:
        NaN for a query without a chosen key.
    """
    return (probs * chosen).sum(-1).masked_fill(~chosen.any(-1), torch.nan)


def largest_of_words(values: Tensor, words: Tensor) -> Tensor:
    """Return the largest value in each word, (B, heads, most words).

    Args:
        values: (B, heads, T); NaN does not count.
        words: (B, T), the index of each token's word, from 0.

    Returns:
        NaN for a word without values.
    """
    batch, heads, _ = values.shape
    largest = values.new_full((batch, heads, int(words.max()) + 1), -torch.inf)
    index = words[:, None].expand(values.shape)
    largest.scatter_reduce_(-1, index, values.nan_to_num(nan=-torch.inf), "amax")
    return largest.masked_fill_(largest == -torch.inf, torch.nan)


def patch_similarity(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean absolute cosine similarity between the features of different tokens, (...).

    Source: Gong et al. 2021, for the patches of an image.

    Args:
        features: (..., tokens, C).
        mask: (..., tokens), bool; True excludes a token.

    Returns:
        NaN for fewer than two tokens.
    """
    cosines, pairs = _cosines(features, mask)
    return cosines.abs().sum((-1, -2)) / pairs


def mean_average_distance(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return one minus the mean cosine similarity between different tokens, (...).

    Source: Chen et al. 2020, over all pairs of tokens. Arguments: as `patch_similarity`.
    """
    cosines, pairs = _cosines(features, mask)
    return 1 - cosines.sum((-1, -2)) / pairs


def _cosines(features: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the cosines, (..., tokens, tokens), with a zero diagonal, and the number of pairs."""
    unit = torch.nn.functional.normalize(features, dim=-1)
    if mask is None:
        mask = torch.zeros(features.shape[:-1], dtype=torch.bool, device=features.device)
    unit = unit.masked_fill(mask[..., None], 0.0)
    same = torch.eye(features.shape[-2], dtype=torch.bool, device=features.device)
    count = (~mask).sum(-1)
    return (unit @ unit.mT).masked_fill(same, 0.0), count * (count - 1)


def rollout(attention: Tensor, previous: Tensor | None = None) -> Tensor:
    """Return the attention roll-out after one more layer, (..., tokens, tokens).

        R_l = (A_l + I) / 2 R_(l-1), R_0 = I                       (Abnar and Zuidema 2020)

    Args:
        attention: (..., tokens, tokens), the mean over heads.
        previous: the roll-out of the layers below; None for the lowest.
    """
    if previous is None:
        previous = torch.eye(attention.shape[-1], dtype=attention.dtype, device=attention.device)
    return (attention @ previous + previous) / 2


def correlation(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return Pearson's correlation over the last two dimensions, (...); NaN for constants."""
    if mask is None:
        mask = torch.zeros_like(x, dtype=torch.bool)
    count = (~mask).expand(x.shape).sum((-1, -2), keepdim=True)
    product, lengths = torch.ones_like(x, dtype=torch.float64), []
    for values in (x.double(), y.double()):
        values = values.masked_fill(mask, 0.0)
        centred = (values - values.sum((-1, -2), keepdim=True) / count).masked_fill(mask, 0.0)
        length = centred.square().sum((-1, -2))
        # For a constant, only float32 rounding errors remain.
        constant = length <= 1e-13 * values.square().sum((-1, -2))
        lengths.append(length.masked_fill(constant, torch.nan))
        product = product * centred
    return product.sum((-1, -2)) / (lengths[0] * lengths[1]).sqrt()


def density_at(kind: str, time: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a density over time at some times, and whether these lie in its support.

    Args:
        kind: of `ContinuousAttention`: "softmax", a Gaussian, or "sparsemax", a truncated parabola.
        time: float64.
        mean, variance: of the score function, broadcastable with time; the variance above 0.

    Returns:
        (...) float64 and bool. The support of a Gaussian is the whole line.
    """
    mean, variance = mean.double(), variance.double()
    if kind == "sparsemax":
        low, high = TRUNCATED_PARABOLA.support(mean, variance)
        return TRUNCATED_PARABOLA(time, mean, variance), (low < time) & (time < high)
    values = (-((time - mean) ** 2) / (2 * variance)).exp() / (2 * math.pi * variance).sqrt()
    return values, torch.ones_like(values, dtype=torch.bool)


def modulator_slope(x: Tensor, modulator: ModulatorParameters) -> Tensor:
    """Return the derivative of `ops.modulator.modulate` by the scores, (...): negative past a turn.

    Args:
        x: scores; with parameters per head, the heads are dimension -3.
        modulator: a `Modulator`.
    """
    parameters, low, high = packed_parameters(modulator)
    return modulated_gradients(torch.ones_like(x), x, parameters.detach().to(x.dtype), low, high)[0]


def past_turning_point(x: Tensor, modulator: ModulatorParameters) -> Tensor:
    """Return whether the modulator falls at these scores, bool (...).

    There, the lower of two scores gets the larger weight.

    Args:
        x, modulator: as `modulator_slope`.
    """
    if modulator.monotone:
        return torch.zeros_like(x, dtype=torch.bool)
    return modulator_slope(x, modulator) < 0
