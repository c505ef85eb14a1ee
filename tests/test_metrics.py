"""The metrics equal values computed by hand and loops over entries; the paper's propositions."""

import math

import numpy as np
import pytest
import reference
import torch

from multimax_fairseq import Modulator, multimax
from multimax_fairseq.ops.modulator import modulate
from multimax_fairseq.statistics import metrics

NAN = math.nan


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, tensor(expected), rtol=1e-9, atol=1e-12, equal_nan=True)


def random_rows(rows=200, seed=0):
    """Return scores, a mask that leaves an entry in each row, and softmax."""
    generator = np.random.default_rng(seed)
    scores = generator.normal(scale=2.0, size=(rows, 12))
    excluded = generator.random((rows, 12)) < 0.3
    excluded[:, 0] = False
    return scores, excluded, reference.softmax(scores, excluded)


# --- by hand ------------------------------------------------------------------------------------


def test_multi_modality_equals_hand_computation():
    scores, probs = tensor([3.0, 2.0, 1.0, -1.0]), tensor([0.5, 0.3, 0.2, 0.0])
    close(metrics.multi_modality(scores, probs, 0.0), 1 - (0.2 + 0.3) / 2)
    close(metrics.multi_modality(scores, probs, 1.5), 1 - 0.2)
    close(metrics.multi_modality(scores, probs, 2.5), NAN)
    close(metrics.multi_modality(scores, probs, 2.0), NAN)  # scores above epsilon are relevant
    without = torch.tensor([False, True, False, False])
    close(metrics.multi_modality(scores, probs, 0.0, without), 1 - 0.3)


def test_sparsity_equals_hand_computation():
    scores, probs = tensor([3.0, 0.0, -1.0, -2.0]), tensor([0.7, 0.2, 0.1, 0.0])
    close(metrics.sparsity(scores, probs, 1.0, 0.1), (math.exp(-2) + math.exp(-1) + 1) / 3)
    close(metrics.sparsity(scores, probs, -1.5, 0.1), 1.0)
    close(metrics.sparsity(scores, probs, -2.0, 0.1), NAN)
    without = torch.tensor([False, False, False, True])
    close(metrics.sparsity(scores, probs, 1.0, 0.1, without), (math.exp(-2) + math.exp(-1)) / 2)


def test_sparsity_falls_as_a_low_probability_rises():
    """Lemma 3.4 of Zhou et al. 2024 states the opposite."""
    scores = tensor([1.0, -1.0])
    low = torch.linspace(0, 0.5, 20, dtype=torch.float64)
    probs = torch.stack([1 - low, low], -1)
    found = metrics.sparsity(scores.expand_as(probs), probs, 0.0, 0.1)
    assert (found.diff() < 0).all()


def test_sparsity_of_softmax_falls_with_temperature():
    scores = torch.randn(200, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    epsilon = metrics.mean_score(scores)
    temperatures = (0.5, 1.0, 2.0, 4.0)
    found = [metrics.sparsity(scores, (scores / t).softmax(-1), epsilon, 0.1) for t in temperatures]
    assert (torch.stack(found).diff(dim=0) < 0).all()


def test_mean_score_and_uniform_probability_ignore_masked():
    scores = tensor([[1.0, 2.0, 30.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[False, False, True], [False, False, False]])
    close(metrics.mean_score(scores, mask), [[1.5], [5.0]])
    close(metrics.mean_score(scores), [[11.0], [5.0]])
    close(metrics.uniform_probability(scores, mask), [[0.5], [1 / 3]])
    close(metrics.uniform_probability(scores), [[1 / 3], [1 / 3]])


def test_entropy_and_density_equal_hand_computation():
    probs = tensor([[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.25] * 4])
    close(metrics.entropy(probs), [math.log(2), 0.0, math.log(4)])
    close(metrics.density(probs), [0.5, 0.25, 1.0])
    mask = torch.tensor([[False, False, False, True]] * 2 + [[False] * 4])
    close(metrics.density(probs, mask), [2 / 3, 1 / 3, 1.0])


def test_head_diversity_equals_hand_computation():
    apart = tensor([[[1.0, 0.0, 0.0]], [[0.0, 1.0, 0.0]], [[0.0, 0.0, 1.0]]])
    close(metrics.head_diversity(apart), [1.0])
    close(metrics.head_diversity(apart[:1].expand(3, 1, 3)), [0.0])
    close(metrics.head_diversity(apart[:1]), [0.0])
    # H(3/4, 1/4) - (0 + log 2) / 2 in bits
    half = tensor([[[1.0, 0.0]], [[0.5, 0.5]]])
    mixed = -0.75 * math.log2(0.75) + 0.25 * 2
    close(metrics.head_diversity(half), [mixed - 0.5])
    # Computed from normalized shares, whatever the sum of a head's probabilities.
    close(metrics.head_diversity(half * tensor([[[0.1]], [[3.0]]])), [mixed - 0.5])
    # Logarithm to the base of the number of unmasked keys, not of heads.
    close(metrics.head_diversity(apart[:2]), [math.log(2, 3)])
    mask = torch.tensor([[[False, False, True]]])
    close(metrics.head_diversity(apart[:2], mask), [1.0])
    close(metrics.head_diversity(apart[:2], ~mask), [NAN])


def test_top_offset_equals_hand_computation():
    offsets = metrics.relative_positions(torch.arange(2), torch.arange(3))
    assert offsets.tolist() == [[0, 1, 2], [-1, 0, 1]]
    probs = tensor([[[0.1, 0.7, 0.2], [0.6, 0.1, 0.3]]])
    assert metrics.top_offset(probs, offsets).tolist() == [[1, -1]]


def test_largest_of_words_equals_hand_computation():
    values = tensor([[[0.2, 0.5, 0.3, NAN, NAN]], [[0.1, NAN, 0.4, 0.6, 0.0]]])
    words = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])
    found = metrics.largest_of_words(values, words)
    close(found, [[[0.5, 0.3, NAN]], [[0.1, 0.6, NAN]]])


def test_weight_on_sums_the_chosen_keys():
    probs = tensor([[0.1, 0.7, 0.2], [0.6, 0.1, 0.3]])
    chosen = torch.tensor([[True, False, True], [False, False, False]])
    close(metrics.weight_on(probs, chosen), [0.3, NAN])


def test_patch_similarity_equals_the_mean_absolute_cosine():
    features = tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 3.0]])
    close(metrics.patch_similarity(features), (0 + math.sqrt(0.5) * 2) / 3)
    close(metrics.mean_average_distance(features), 1.0)
    close(metrics.patch_similarity(features[:1]), NAN)
    close(metrics.mean_average_distance(features[:1]), NAN)
    many = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(7) >= torch.tensor([[7], [4]])
    similarity = metrics.patch_similarity(many, mask)
    distance = metrics.mean_average_distance(many, mask)
    for index, (row, length) in enumerate(zip(many, (7, 4), strict=True)):
        pairs = [
            float(torch.cosine_similarity(row[i], row[j], 0))
            for i in range(length)
            for j in range(length)
            if i != j
        ]
        assert float(similarity[index]) == pytest.approx(np.mean(np.abs(pairs)))
        assert float(distance[index]) == pytest.approx(1 - np.mean(pairs))


def test_rollout_equals_hand_computation():
    first, second = tensor([[1.0, 0.0], [0.5, 0.5]]), tensor([[0.0, 1.0], [1.0, 0.0]])
    below = metrics.rollout(first)
    close(below, [[1.0, 0.0], [0.25, 0.75]])
    # (A + I) / 2 of the second is 0.5 everywhere
    close(metrics.rollout(second, below), [[0.625, 0.375], [0.625, 0.375]])
    random = torch.rand(3, 4, 6, 6, dtype=torch.float64).softmax(-1)
    mixed = torch.eye(6, dtype=torch.float64)
    found = None
    for layer in random:
        mixed = ((layer + torch.eye(6)) / 2) @ mixed
        found = metrics.rollout(layer, found)
    torch.testing.assert_close(found, mixed)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


def test_correlation_equals_numpy():
    x, y = torch.rand(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = torch.zeros(3, 4, 5, dtype=torch.bool)
    mask[1, 2:] = True
    found = metrics.correlation(x, y, mask)
    for row in range(3):
        kept = ~mask[row]
        expected = np.corrcoef(x[row][kept], y[row][kept])[0, 1]
        assert float(found[row]) == pytest.approx(expected)
    close(metrics.correlation(x, -x), [-1.0] * 3)
    assert metrics.correlation(x, torch.full_like(x, 0.1)).isnan().all()
    rounded = torch.full_like(x, 0.1) + 3e-9 * y.sign() * (y > 0.5)  # as float32 may leave it
    assert metrics.correlation(x, rounded).isnan().all()


def test_correlation_of_float32_accumulates_in_float64():
    x, y = 1000 + torch.rand(2, 4, 5, generator=torch.Generator().manual_seed(2))
    expected = metrics.correlation(x.double(), y.double())
    torch.testing.assert_close(metrics.correlation(x, y), expected, rtol=1e-9, atol=0)
    assert metrics.correlation(x, torch.full_like(x, 0.1)).isnan()


@pytest.mark.parametrize("shape", [(2, 1, 1, 7), (5, 7), (7,), (5, 1), (2, 1, 5, 7)])
def test_metrics_broadcast_their_masks(shape):
    scores, other = torch.randn(2, 2, 3, 5, 7, dtype=torch.float64)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[..., :1] = False
    full = mask.expand(scores.shape)
    probs = scores.masked_fill(full, -torch.inf).softmax(-1)
    for call in (
        lambda mask: metrics.mean_score(scores, mask),
        lambda mask: metrics.uniform_probability(scores, mask),
        lambda mask: metrics.density(probs, mask),
        lambda mask: metrics.head_diversity(probs, mask),
        lambda mask: metrics.correlation(scores, other, mask),
        lambda mask: metrics.multi_modality(scores, probs, 0.0, mask),
        lambda mask: metrics.sparsity(scores, probs, 0.0, 0.1, mask),
    ):
        torch.testing.assert_close(call(mask), call(full), equal_nan=True)


# --- against loops over entries -----------------------------------------------------------------


def test_sparsity_and_multi_modality_equal_reference():
    scores, excluded, probs = random_rows()
    given = tensor(scores), tensor(probs)
    mask = torch.tensor(excluded)
    checked = [0, 0]
    for epsilon in (-1.0, 0.0, 0.5):
        found = metrics.multi_modality(*given, epsilon, mask).tolist()
        sparse = metrics.sparsity(*given, epsilon, 0.05, mask).tolist()
        for row in range(len(scores)):
            x, p = scores[row][~excluded[row]], probs[row][~excluded[row]]
            if ((x > epsilon) & (x < x.max())).any():
                checked[0] += 1
                expected = reference.multi_modality(x, p, epsilon)
                assert found[row] == pytest.approx(expected)
            else:
                assert math.isnan(found[row])
            if (x < epsilon).any():
                checked[1] += 1
                assert sparse[row] == pytest.approx(reference.sparsity(x, p, epsilon, 0.05))
            else:
                assert math.isnan(sparse[row])
    assert min(checked) > 300


def test_head_diversity_equals_mean_divergence_from_the_mean():
    """JS as the mean of the heads' Kullback-Leibler divergences from their mean."""
    probs = torch.rand(3, 4, 5, 7, dtype=torch.float64).mul(3).softmax(-1)
    mean = probs.mean(1, keepdim=True)
    divergence = (probs * (probs / mean).log()).sum(-1).mean(1) / math.log(7)
    torch.testing.assert_close(metrics.head_diversity(probs), divergence)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("terms", ["both", "low", "high"])
def test_modulator_slope_equals_the_gradient(terms, heads):
    torch.manual_seed(4)
    module = Modulator(2, terms, heads, init_std=0.3).double()
    for coefficient, sign in ((module.low_coefficient, 1), (module.high_coefficient, -1)):
        if coefficient is not None:
            coefficient.data.add_(3 * sign)  # so that sigma falls
    x = (torch.randn(2, 3, 4, 5, dtype=torch.float64) * 4).requires_grad_()
    parameters = (
        module.low_coefficient,
        module.low_threshold,
        module.high_coefficient,
        module.high_threshold,
    )
    (expected,) = torch.autograd.grad(modulate(x, *parameters).sum(), x)
    slope = metrics.modulator_slope(x.detach(), module)
    torch.testing.assert_close(slope.detach(), expected)
    assert (slope < 0).any()
    assert torch.equal(metrics.past_turning_point(x.detach(), module), slope < 0)
    module.monotone = True
    assert not metrics.past_turning_point(x.detach(), module).any()


# --- the paper's propositions -------------------------------------------------------------------


def test_proposition_3_5_softmax_trades_sparsity_for_modality():
    scores, excluded, _ = random_rows(seed=1)
    scores, mask = tensor(scores), torch.tensor(excluded)
    epsilon = metrics.mean_score(scores, mask)
    uniform = metrics.uniform_probability(scores, mask)
    modality, sparse = [], []
    for temperature in (0.25, 0.5, 1.0, 2.0, 4.0):
        probs = (scores / temperature).masked_fill(mask, -torch.inf).softmax(-1)
        modality.append(metrics.multi_modality(scores, probs, epsilon, mask))
        sparse.append(metrics.sparsity(scores, probs, epsilon, uniform, mask))
        (at_once,) = metrics.over_temperatures(scores, [temperature], epsilon, uniform, mask)
        torch.testing.assert_close(at_once, (sparse[-1], modality[-1]), equal_nan=True)
    for rising in (torch.stack(modality), -torch.stack(sparse)):
        defined = rising[:, ~rising[0].isnan()]
        assert defined.shape[1] > 100
        assert (defined.diff(dim=0) >= 0).all() and (defined[-1] > defined[0]).all()


def modulated(seed=2):
    """Return scores, thresholds and both mappings, with the signs that 4.2 and 4.3 require."""
    generator = np.random.default_rng(seed)
    for _ in range(200):
        x = tensor(generator.normal(scale=2.0, size=int(generator.integers(8, 40))))
        b, d = (float(x.quantile(q)) + 1e-3 for q in (0.6, 0.75))
        t_b, t_d = float(generator.uniform(1.05, 3.0)), float(generator.uniform(0.1, 0.95))
        low, both = (
            multimax(x, Modulator.from_values([t_b], [high], [b], [d])).detach()
            for high in (1.0, t_d)
        )
        mean = x[x < b].mean() - math.log((x < b).sum()) / (x < b).sum()
        bound = min(float(mean), b - (1 - t_d) / (t_b - 1) * (float(x.max()) - d))
        yield x, (b, float(mean), bound), (x.softmax(-1), low, both)


def test_propositions_4_2_and_4_3_terms_are_sparser_than_softmax():
    """The low term alone, and both terms, are sparser than softmax."""
    checked = [0, 0]
    for x, (_, mean, bound), (softmax, low, both) in modulated():
        for index, (threshold, ours) in enumerate(((mean, low), (bound, both))):
            if (x < threshold).any():
                checked[index] += 1
                least = float(softmax.min())
                ours, theirs = (metrics.sparsity(x, p, threshold, least) for p in (ours, softmax))
                assert ours > theirs
    assert checked[0] > 100 and checked[1] > 30


def test_proposition_4_3_high_term_raises_multi_modality():
    """The high term increases multi-modality; 4.2 is false about it (see test_functional.py)."""
    for x, (b, *_), (_, low, both) in modulated():
        assert metrics.multi_modality(x, both, b) > metrics.multi_modality(x, low, b)
