"""Mappings, modulator and attention equal the float64 reference and have the right limits."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from examples import EXAMPLES
from random_inputs import FAR, far_modulator, random_scores
from torch.autograd import gradcheck
from torch.func import jacfwd, jacrev, vmap

import multimax_fairseq
from multimax_fairseq import (
    NORMALIZERS,
    Modulator,
    linear_cross_entropy,
    log_multimax,
    multimax,
    normalize,
    scaled_dot_product_attention,
)
from multimax_fairseq.mappings.entmax import EntmaxAlpha
from multimax_fairseq.mappings.softmax import Temperature
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.ops.modulator import modulate

TABLES = reference.TABLE_7 + reference.TABLE_8


# --- modulator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("values", TABLES)
def test_modulator_equals_reference_with_the_papers_parameters(values):
    x = np.linspace(-25, 25, 501)
    ours = Modulator.from_values(*values)(torch.tensor(x))
    np.testing.assert_allclose(ours.detach(), reference.sigma(x, *values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("terms", ["both", "low", "high"])
def test_modulator_of_each_order_and_term_equals_reference(order, terms):
    t_b, t_d, b, d = (values[:order] for values in FAR)
    low, high = (t_b, b) if terms != "high" else (None, None), (t_d, d)
    high = high if terms != "low" else (None, None)
    module = Modulator.from_values(low[0], high[0], low[1], high[1])
    assert (module.order, module.terms) == (order, terms)
    x = random_scores(50)
    ones = [1.0] * order
    expected = reference.sigma(
        x, ones if terms == "high" else t_b, ones if terms == "low" else t_d, b, d
    )
    np.testing.assert_allclose(module(x).detach(), expected, rtol=1e-12)


def test_modulator_per_head_acts_on_its_own_head():
    module = far_modulator(heads=3)
    x = random_scores(2, 3, 4, 5)
    for head in range(3):
        values = [[v + 0.05 * head for v in values] for values in FAR]
        np.testing.assert_allclose(
            module(x)[:, head].detach(), reference.sigma(x[:, head], *values), rtol=1e-12
        )


def test_modulator_with_zero_offsets_is_the_identity():
    x = random_scores(4, 7)
    assert torch.equal(Modulator(init_std=0.0)(x), x)
    assert torch.equal(modulate(x), x)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("terms", ["both", "low", "high"])
def test_modulator_gradients_pass_gradcheck(heads, terms):
    module = far_modulator(heads, terms)
    x = random_scores(2, 3, 2, 3).requires_grad_()
    parameters = list(module.parameters())
    assert len(parameters) == (4 if terms == "both" else 2)
    assert gradcheck(lambda x, *_: module(x), (x, *parameters))


# Turning points on both sides; at a threshold; at 0; already passed at 0.
TURNING = [
    ([0.7, 0.9], [1.2, 0.8], [0.3, -0.2], [0.5, 0.6]),
    ([-0.5], [-0.3], [-1.0], [2.0]),
    ([2.5], [1.0], [4.0], [1.0]),
    ([-0.5, 0.9], [1.5, 0.7], [2.0, 1.0], [-3.0, -1.0]),
]


@pytest.mark.parametrize("values", [*TABLES, FAR, *TURNING])
def test_monotone_modulator_is_linear_below_and_constant_above(values):
    x = torch.linspace(-60, 60, 120001, dtype=torch.float64)
    middle = 60000
    module = Modulator.from_values(*values)
    plain = module(x).detach()
    module.monotone = True
    ours = module(x).detach()
    assert (ours.diff() >= -1e-12).all()
    # The first points left and right of 0 where the curve decreases; the ends if it never does.
    falls = plain.diff() < -1e-12
    below, above = falls[:middle].nonzero(), falls[middle:].nonzero()
    low = int(below[-1]) + 1 if len(below) else 0
    high = middle + int(above[0]) if len(above) else 120000
    # The turning point lies between two grid points.
    between = slice(low + 1 if low else 0, high)
    torch.testing.assert_close(ours[between], plain[between], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[:low], plain[low] + x[:low] - x[low], rtol=0, atol=4e-3)
    assert (ours[high:] - plain[high]).abs().max() <= 4e-3 or high == 120000
    infinite = torch.tensor([-torch.inf, torch.inf])
    assert torch.equal(module(infinite).detach(), infinite)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("terms", ["both", "low", "high"])
def test_monotone_modulator_gradients_pass_gradcheck(heads, terms):
    module = far_modulator(heads, terms)
    module.monotone = True
    x = random_scores(2, 3, 2, 3, spread=20.0).requires_grad_()
    assert gradcheck(lambda x, *_: module(x), (x, *module.parameters()))


@pytest.mark.parametrize("values", TURNING)
def test_monotone_modulator_gradients_pass_gradcheck_at_each_turn(values):
    x = random_scores(40, spread=20.0).requires_grad_()
    turning = Modulator.from_values(*values)
    turning.monotone = True
    assert gradcheck(lambda x, *_: turning(x), (x, *turning.parameters()))
    identity = Modulator(init_std=0.0, monotone=True)
    assert torch.equal(identity(x), x)


def test_fused_modulator_backward_equals_plain_pytorch():
    module = far_modulator()
    x = random_scores(6, 9).requires_grad_()
    weight = random_scores(6, 9, seed=1)
    p = dict(module.named_parameters())
    plain = x
    for n in range(2):
        plain = plain + p["low_coefficient"][n] * (p["low_threshold"][n] - x).relu() ** (n + 1)
        plain = plain + p["high_coefficient"][n] * (x - p["high_threshold"][n]).relu() ** (n + 1)
    inputs = (x, *p.values())
    for ours, theirs in zip(
        torch.autograd.grad((module(x) * weight).sum(), inputs),
        torch.autograd.grad((plain * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_modulator_init_is_a_truncated_normal():
    torch.manual_seed(0)
    values = torch.cat([p.flatten() for p in Modulator(num_heads=500).parameters()]).detach()
    assert values.abs().max() <= 0.04
    # A normal distribution cut at two deviations has a standard deviation of 0.88 of the uncut.
    assert 0.85 < values.std() / 0.02 < 0.91


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_modulator_handles_extreme_and_infinite_scores(dtype):
    limit = 1e4 if dtype == torch.float32 else torch.finfo(dtype).max
    x = torch.tensor([-torch.inf, -limit, -1.0, 0.0, 1.0, limit], dtype=dtype, requires_grad=True)
    module = Modulator(init_std=0.0).to(dtype)
    out = module(x)
    assert out.dtype == torch.float32
    assert out[0] == -torch.inf and out[1:].isfinite().all()
    probs = multimax(x, far_modulator().to(dtype))
    assert probs.isfinite().all() and probs[0] == 0
    probs[3].backward()
    assert x.grad.isfinite().all()


def test_modulator_refuses_incomplete_terms_and_missing_heads():
    with pytest.raises(ValueError, match="low term needs both"):
        Modulator.from_values([1.0], [1.0], None, [0.0])
    with pytest.raises(ValueError, match="one shape"):
        Modulator.from_values([1.0], [1.0, 1.0], [0.0], [0.0, 0.0])
    with pytest.raises(ValueError, match="both"):
        modulate(torch.zeros(3), low_coefficient=torch.zeros(1))
    with pytest.raises(ValueError, match="4 heads"):
        Modulator(num_heads=4)(torch.zeros(2, 3, 5, 5))


# --- multimax ----------------------------------------------------------------------------------


@pytest.mark.parametrize("values", TABLES)
def test_multimax_equals_reference(values):
    x = random_scores(5, 11)
    mask = torch.rand(5, 11, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[2] = True
    expected = reference.softmax(reference.sigma(x, *values), mask.numpy())
    module = Modulator.from_values(*values)
    np.testing.assert_allclose(multimax(x, module, mask=mask).detach(), expected, atol=1e-13)
    with np.errstate(divide="ignore"):
        logs = np.log(expected)
    np.testing.assert_allclose(log_multimax(x, module, mask=mask).detach(), logs, atol=1e-11)


def test_multimax_with_identity_modulator_equals_softmax():
    x = random_scores(5, 11)
    assert torch.equal(multimax(x, Modulator(init_std=0.0)), x.softmax(-1))
    assert torch.equal(log_multimax(x, Modulator(init_std=0.0)), x.log_softmax(-1))


def battery():
    """Return differentiable arguments for each mapping."""

    def argument(value):
        whole = isinstance(value, int)
        return value if whole else torch.tensor(value, dtype=torch.float64, requires_grad=True)

    found = {
        name: {key: argument(value) for key, value in example.arguments.items()}
        for name, example in EXAMPLES.items()
    }
    for name in ("softmax", "softcap"):  # the temperature and the cap are numbers
        found[name] = EXAMPLES[name].arguments
    found["multimax"] = {"modulator": far_modulator()}
    return found


def learned_by(options):
    """Return the parameters that a normalizer's options learn."""
    if "modulator" in options:
        return list(options["modulator"].parameters())
    return [value for value in options.values() if isinstance(value, torch.Tensor)]


def test_examples_cover_every_normalizer():
    assert EXAMPLES.keys() == NORMALIZERS.keys(), "tests/examples.py"


@pytest.mark.parametrize("name", NORMALIZERS)
class TestEveryNormalizer:
    def test_normalize_returns_a_distribution_over_unmasked_entries(self, name):
        x = random_scores(3, 4, 6)
        mask = torch.zeros(3, 1, 6, dtype=torch.bool)
        mask[0, :, 2:] = mask[1] = True
        probs = normalize(name, x, mask=mask, **battery()[name])
        assert (probs.masked_select(mask.expand_as(probs)) == 0).all()
        assert (probs >= 0).all()
        some = (~mask.all(-1)).double().expand(3, 4)
        if NORMALIZERS[name].sums_to_one:
            torch.testing.assert_close(probs.sum(-1), some, rtol=0, atol=1e-12)
        else:
            assert ((probs.sum(-1) - some).abs() > 1e-6)[some > 0].any()
            assert (probs.sum(-1)[some == 0] == 0).all()

    def test_normalize_gradients_are_zero_where_masked(self, name):
        x = random_scores(3, 5, spread=1.0).requires_grad_()
        mask = torch.tensor([[0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [1, 1, 1, 1, 1]]).bool()
        options = battery()[name]
        learned = learned_by(options)
        with torch.autograd.detect_anomaly(check_nan=True):
            assert gradcheck(lambda x, *_: normalize(name, x, mask=mask, **options), (x, *learned))
        grad = torch.autograd.grad(normalize(name, x, mask=mask, **options)[:, 0].sum(), x)[0]
        assert (grad[mask] == 0).all() and (grad[~mask] != 0).any()

    def test_normalize_ignores_masked_rows_of_infinite_scores(self, name):
        """Same as with scores that are masked already."""
        x = random_scores(2, 5)
        x[1] = -torch.inf
        mask = torch.tensor([[False] * 5, [True] * 5])
        options = battery()[name]
        over = [x.requires_grad_(), *learned_by(options)]
        with torch.autograd.detect_anomaly(check_nan=True):
            probs = normalize(name, x, mask=mask, **options)
            found = torch.autograd.grad(probs.square().sum(), over)
        expected = torch.autograd.grad(normalize(name, x[:1], **options).square().sum(), over)
        assert (probs[1] == 0).all()
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)

    @pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
    def test_normalize_excludes_entries_of_large_negative_masks(self, name, number):
        x, options = random_scores(3, 6), battery()[name]
        mask = torch.tensor([False, True, False, False, False, True])
        added = torch.zeros(6, dtype=x.dtype).masked_fill(mask, number)
        torch.testing.assert_close(
            normalize(name, x, mask=added, **options), normalize(name, x, mask=mask, **options)
        )

    def test_normalize_is_permutation_equivariant_along_dim(self, name):
        x = random_scores(4, 6, 3)
        order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
        probs = normalize(name, x, dim=1, **battery()[name])
        torch.testing.assert_close(
            normalize(name, x[:, order], dim=1, **battery()[name]), probs[:, order]
        )
        torch.testing.assert_close(
            normalize(name, x.transpose(1, 2), **battery()[name]), probs.transpose(1, 2)
        )

    def test_normalize_broadcasts_masks_along_dim(self, name):
        x = random_scores(4, 3)
        for mask, dim in ((torch.tensor([True, False, False]), 0), (torch.tensor([[True]]), 1)):
            probs = normalize(name, x, dim=dim, mask=mask, **battery()[name])
            expected = normalize(name, x, dim=dim, mask=mask.expand(4, 3), **battery()[name])
            torch.testing.assert_close(probs, expected)
            assert (probs.masked_select(mask.expand(4, 3)) == 0).all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_normalize_handles_empty_strided_and_extreme_inputs(self, name, dtype):
        options = battery()[name]
        wide = torch.promote_types(dtype, torch.float32)
        assert normalize(name, torch.zeros(2, 0, dtype=dtype), **options).shape == (2, 0)
        assert normalize(name, torch.zeros(0, 3, dtype=dtype), **options).shape == (0, 3)
        x = random_scores(5, 4).to(dtype)
        probs = normalize(name, x.T, **options)
        assert probs.dtype in (wide, torch.float64)
        torch.testing.assert_close(probs, normalize(name, x.T.contiguous(), **options))
        limits = [1e4] if dtype in (torch.float32, torch.float64) else [1e4, torch.finfo(dtype).max]
        for limit in limits:
            for row in ([limit, -limit, 0.0], [limit, limit, -limit], [-limit, -limit, -limit]):
                extreme = torch.tensor([row], dtype=dtype, requires_grad=True)
                probs = normalize(name, extreme, **options)
                if NORMALIZERS[name].sums_to_one:
                    torch.testing.assert_close(probs.sum(-1).float(), torch.ones(1))
                probs[:, 0].sum().backward()
                assert probs.isfinite().all() and extreme.grad.isfinite().all()


@pytest.mark.parametrize(
    "name, options, expected",
    [
        ("topk", {"k": 3}, lambda x, mask: reference.topk(x, mask, 3)),
        ("sparsemax", {}, lambda x, mask: reference.entmax(x, mask, 2)),
        ("entmax15", {}, lambda x, mask: reference.entmax(x, mask, 1.5)),
        ("alpha_entmax", {"alpha": 1.2}, lambda x, mask: reference.entmax(x, mask, 1.2)),
        ("alpha_entmax", {"alpha": 3.0}, lambda x, mask: reference.entmax(x, mask, 3)),
        ("evsoftmax", {}, reference.evsoftmax),
        ("evsoftmax", {"training": True}, lambda x, mask: reference.evsoftmax(x, mask, True)),
        ("ssmax", {"length_scale": 0.6}, lambda x, mask: reference.ssmax(x, mask, 0.6)),
        ("ssmax", {"length_scale": -0.2}, lambda x, mask: reference.ssmax(x, mask, -0.2)),
        ("softmax1", {}, lambda x, mask: reference.softmax_with_sink(x, mask, 0)),
        ("sink", {"sink": 1.3}, lambda x, mask: reference.softmax_with_sink(x, mask, 1.3)),
        ("sink", {"sink": -math.inf}, lambda x, mask: reference.softmax(x, mask)),
        ("softpick", {}, reference.softpick),
        ("sigmoid", {}, reference.sigmoid),
        (
            "softcap",
            {"cap": 0.8},
            lambda x, mask: reference.softmax(0.8 * np.tanh(x / 0.8), mask),
        ),
        (  # the form of modded-nanogpt
            "softcap",
            {"cap": 11.5, "shift": 5, "width": 15},
            lambda x, mask: reference.softmax(23 / (1 + np.exp(-(x + 5) / 7.5)), mask),
        ),
        ("sigmoid", {"bias": -1.5}, lambda x, mask: reference.sigmoid(x, mask, -1.5)),
        (
            "asentmax",
            {"beta": 0.7, "gamma": -1.2},
            lambda x, mask: reference.asentmax(x, mask, 0.7, -1.2),
        ),
        ("adaptive_temperature", {}, reference.adaptive_temperature),
        ("adaptive_temperature", {"training": True}, lambda x, mask: reference.softmax(x, mask)),
    ],
)
def test_normalize_equals_the_reference_of_each_mapping(name, options, expected):
    x = random_scores(6, 9)
    mask = torch.rand(6, 9, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[2] = True
    probs = normalize(name, x, mask=mask, **options)
    np.testing.assert_allclose(probs, expected(x.numpy(), mask.numpy()), atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_evsoftmax_keeps_scores_equal_to_the_mean(dtype, training):
    levels = torch.arange(-4, 5, dtype=dtype)
    scores = torch.cartesian_prod(levels, levels, levels)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    exclude_last = torch.tensor([False, False, True])
    hide_last = torch.tensor([0.0, 0.0, -math.inf], dtype=dtype)
    for mask in (None, exclude_last, hide_last):
        x = (scores if mask is None else scores[:, :2]).double()
        kept = (x * x.size(1) >= x.sum(-1, keepdim=True)).double()  # exact: x are integers
        expected = (kept + (1e-6 if training else 0.0)) * x.exp()
        expected = F.pad(expected / expected.sum(-1, keepdim=True), (0, 3 - x.size(1)))
        probs = normalize("evsoftmax", scores, mask=mask, training=training)
        torch.testing.assert_close(probs.double(), expected, rtol=0, atol=tolerance)
    probs = normalize("evsoftmax", torch.tensor([-2.0, -3.0, -1.0], dtype=dtype))
    expected = torch.tensor([0.2689, 0.0, 0.7311]).to(probs.dtype)
    torch.testing.assert_close(probs, expected, rtol=0, atol=1e-4)


def test_normalize_limit_cases_equal_known_mappings():
    x = random_scores(4, 7)
    torch.testing.assert_close(normalize("topk", x, k=7), x.softmax(-1))
    assert torch.equal(normalize("topk", x, k=1), F.one_hot(x.argmax(-1), 7).double())
    equal = torch.full((1, 3), 0.1)  # rounding puts their mean above each
    for name, options in battery().items():
        probs = normalize(name, equal, **options).double()
        share = 1 / 3 if NORMALIZERS[name].sums_to_one else probs[0, 0].item()
        torch.testing.assert_close(probs, torch.full((1, 3), share).double())
    for alpha, name in ((1, "softmax"), (1.5, "entmax15"), (2, "sparsemax")):
        assert torch.equal(normalize("alpha_entmax", x, alpha=alpha), normalize(name, x))
    for alpha, name in ((1.5, "entmax15"), (2.0, "sparsemax")):
        learned = normalize("alpha_entmax", x, alpha=torch.tensor(alpha).double())
        torch.testing.assert_close(learned, normalize(name, x), rtol=0, atol=1e-9)
    nearly = normalize("alpha_entmax", x, alpha=1 + 1e-7)
    torch.testing.assert_close(nearly, x.softmax(-1), rtol=0, atol=1e-5)
    for name, option in (("topk", {"k": 0}), ("alpha_entmax", {"alpha": 0.5})):
        with pytest.raises(ValueError, match=str(*option.values())):
            normalize(name, x, **option)


def test_linear_cross_entropy_with_monotone_equals_plain():
    module = far_modulator()
    module.monotone = True
    features, weight = (random_scores(5, 3), random_scores(7, 3, seed=1))
    target = torch.tensor([0, 3, -100, 6, 2])
    loss, nll_loss = linear_cross_entropy(features, weight, target, modulator=module)
    expected = F.cross_entropy(module(F.linear(features, weight)), target, reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(nll_loss, expected.detach())


@pytest.mark.parametrize("above", [1e-9, 1e-7, 5e-7, 1e-6, 1e-4, 1e-2, 0.09])
def test_alpha_entmax_accepts_alpha_just_above_one(above):
    x = random_scores(20, 50, spread=2.0)
    found = normalize("alpha_entmax", x.float(), alpha=1 + above)
    assert found.dtype == torch.float32
    # The distance from softmax is proportional to alpha - 1.
    assert (found - x.softmax(-1)).abs().max() < 3 * above + 2e-7
    if above > 1e-3:
        excluded = np.zeros(x.shape, dtype=bool)
        exact = torch.tensor(reference.entmax(x.numpy(), excluded, 1 + above))
        assert (found - exact).abs().max() < 3e-7


def test_normalize_excludes_mask_values_that_overflow():
    lowest = torch.finfo(torch.float64).min
    mask = torch.tensor([[lowest, 0.0, lowest], [lowest] * 3], dtype=torch.float64)
    scores = random_scores(2, 3).abs().float().requires_grad_()
    for name, options in battery().items():
        probs = normalize(name, scores, mask=mask, **options)
        (grad,) = torch.autograd.grad(probs[:, 1].sum(), scores)
        assert (probs[1] == 0).all() and probs[0, 1] > 0 and grad.isfinite().all(), name


def test_alpha_gradient_in_float32_is_accurate_near_one():
    x, weights = random_scores(20, 300, spread=2.0), random_scores(20, 300)
    for alpha in (1.01, 1.05, 1.2, 1.5, 2.0):
        exact, found = (
            jacrev(lambda a: (normalize("alpha_entmax", x.to(a.dtype), alpha=a) * weights).sum(-1))(
                torch.tensor(alpha).to(dtype)
            )
            for dtype in (torch.float64, torch.float32)
        )
        error = (found - exact).abs().max() / exact.abs().max()
        assert error < 5e-5, alpha  # bisection in float32 at the power 1 / (alpha - 1)


@pytest.mark.parametrize("name", EXAMPLES)
def test_normalize_supports_vmap_and_forward_mode(name):
    x, options = random_scores(3, 6, spread=2.0), battery()[name]
    learned = {
        key: value.detach() + 0.1 * torch.arange(3).double()  # one value per row
        for key, value in options.items()
        if isinstance(value, torch.Tensor)
    }
    fixed = {key: options[key] for key in options.keys() - learned.keys()}
    rows = [(x[i], {key: value[i] for key, value in learned.items()}) for i in range(3)]

    def mapping(x, learned):
        return normalize(name, x, **fixed, **learned)

    def row_of(results, index):
        return torch.utils._pytree.tree_map(lambda t: t[index], results)

    forward, reverse = (transform(mapping, (0, 1)) for transform in (jacfwd, jacrev))
    for row in rows:
        torch.testing.assert_close(forward(*row), reverse(*row))
    for function in (mapping, forward, reverse):
        found = vmap(function)(x, learned)
        for index, row in enumerate(rows):
            torch.testing.assert_close(row_of(found, index), function(*row))
    if learned:
        shared = vmap(mapping, (None, 0), 1)(x, learned)
        for index, (_, values) in enumerate(rows):
            torch.testing.assert_close(shared[:, index], mapping(x, values))


def test_entmax_alpha_per_head_acts_on_its_own_head():
    x = random_scores(2, 3, 4, 5)
    alpha = EntmaxAlpha(3).double()
    with torch.no_grad():
        alpha.logit.copy_(torch.tensor([-1.0, 0.0, 2.0]))
    probs = normalize("alpha_entmax", x, alpha=alpha())
    excluded = np.zeros((2, 4, 5), bool)
    for head, logit in enumerate([-1.0, 0.0, 2.0]):
        expected = reference.entmax(x[:, head].numpy(), excluded, 1 + 1 / (1 + math.exp(-logit)))
        np.testing.assert_allclose(probs[:, head].detach(), expected, atol=1e-12)
    assert gradcheck(lambda x, _: normalize("alpha_entmax", x, alpha=alpha()), (x, alpha.logit))


def test_entmax_alpha_stays_above_one_and_keeps_a_gradient():
    alpha = EntmaxAlpha(2)
    with torch.no_grad():
        alpha.logit.copy_(torch.tensor([-40.0, -6.0]))
    assert torch.equal(alpha().flatten().detach(), torch.tensor([1.01, 1.01]))
    probs = normalize("alpha_entmax", random_scores(1, 2, 3, 4).float(), alpha=alpha())
    probs[..., 0].sum().backward()
    assert alpha.logit.grad.isfinite().all() and alpha.logit.grad[1] != 0


def test_temperature_module_equals_softmax_temperature():
    x = random_scores(4, 7)
    for learned in (False, True):
        module = Temperature(0.3, learned).double()
        torch.testing.assert_close(
            multimax(x, module), normalize("softmax", x, temperature=0.3), rtol=1e-6, atol=1e-7
        )
        assert len(list(module.parameters())) == learned
    assert gradcheck(lambda x, _: multimax(x, module), (x.requires_grad_(), module.log_temperature))


def test_normalize_refuses_invalid_arguments():
    with pytest.raises(ValueError, match="'sofmax'.*softmax, multimax"):
        normalize("sofmax", torch.zeros(2))
    with pytest.raises(ValueError, match="-1"):
        normalize("softmax", torch.zeros(2), temperature=-1)
    with pytest.raises(ValueError, match="bool"):
        normalize("softmax", torch.zeros(2), mask=torch.zeros(2, dtype=torch.int64))


def test_normalize_adds_float_masks_after_the_modulator():
    scores = random_scores(2, 3, 5)
    mask = random_scores(3, 1, seed=2).expand(3, 5).clone()
    mask += random_scores(3, 5, seed=3)
    mask[0, 2:] = -torch.inf
    mask[1] = -torch.inf
    module = far_modulator()
    parts = {
        "softmax": ({}, lambda x: x),
        "multimax": ({"modulator": module}, module),
    }
    tempered = Normalizer("softmax", temperature=3.0)
    found = [(normalize(name, scores, mask=mask, **o), f(scores)) for name, (o, f) in parts.items()]
    found.append((normalize("softmax", scores, mask=mask, temperature=3.0), scores / 3))
    found.append((tempered(scores, -1, mask), scores / 3))
    for ours, modulated in found:
        expected = (modulated + mask).softmax(-1)
        expected[:, 1] = 0.0
        torch.testing.assert_close(ours, expected)
    for name, options in (*((n, o) for n, (o, _) in parts.items()), ("topk", {"k": 3})):
        finite = mask.clamp(min=-5.0).requires_grad_()
        assert gradcheck(lambda m, n=name, o=options: normalize(n, scores, mask=m, **o), finite)


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_attention_broadcasts_leading_dimensions(backend):
    leading = [(4, 4), (4, 1), (1, 4), (4,), ()]  # a kernel could take (4, S, D) for (B, H, S, D)
    for shapes in itertools.product(leading, repeat=3):
        query, key, value = (
            random_scores(*shape, length, 8, seed=seed)
            for seed, (shape, length) in enumerate(zip(shapes, (3, 4, 4), strict=True))
        )
        batch = torch.broadcast_shapes(*shapes)
        expected = F.scaled_dot_product_attention(
            *(x.expand(*batch, *x.shape[-2:]) for x in (query, key, value))
        )
        arguments = (x.float() for x in (query, key, value))
        found = scaled_dot_product_attention(*arguments, normalizer="softmax", backend=backend)
        torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


# --- the paper's propositions ------------------------------------------------------------------


def proposition_inputs():
    """Scores, thresholds and temperatures with entries in all three ranges."""
    generator = np.random.default_rng(0)
    for _ in range(300):
        x = generator.normal(scale=2.0, size=int(generator.integers(8, 40)))
        b, d = np.quantile(x, [0.6, 0.75]) + 1e-3
        yield x, float(generator.uniform(1.05, 3.0)), float(generator.uniform(0.1, 0.95)), b, d


def probabilities(x, t_b, t_d, b, d):
    return multimax(torch.tensor(x), Modulator.from_values([t_b], [t_d], [b], [d])).detach().numpy()


def test_proposition_4_2_low_term_is_sparser_than_softmax():
    checked = 0
    for x, t_b, _, b, d in proposition_inputs():
        low = x[x < b]
        threshold = low.mean() - np.log(len(low)) / len(low)
        softmax, ours = reference.softmax(x), probabilities(x, t_b, 1.0, b, d)
        assert (ours[x < threshold] < softmax[x < threshold]).all()
        s = softmax.min()
        if (x < threshold).any():
            checked += 1
            assert reference.sparsity(x, ours, threshold, s) > reference.sparsity(
                x, softmax, threshold, s
            )
    assert checked > 200


def test_proposition_4_2_low_term_keeps_ratios_of_high_scores():
    """The second statement of 4.2 (multi-modality above softmax's) cannot hold as printed.

    Its proof applies Lemma A.2, which is for scores below the threshold, to the maximum. What is
    true: among scores above b all ratios are softmax's, and the mass taken from the low scores
    scales them, and so their differences, by one factor of at least 1.
    """
    for x, t_b, _, b, d in proposition_inputs():
        softmax, ours = reference.softmax(x), probabilities(x, t_b, 1.0, b, d)
        factors = ours[x > b] / softmax[x > b]
        np.testing.assert_allclose(factors, factors[0], rtol=1e-9)
        assert factors[0] > 1
        gap = 1 - reference.multi_modality(x, ours, b)
        assert gap == pytest.approx(factors[0] * (1 - reference.multi_modality(x, softmax, b)))


def test_proposition_4_3_both_terms_are_sparser_than_softmax():
    checked = 0
    for x, t_b, t_d, b, d in proposition_inputs():
        low = x[x < b]
        threshold = min(
            low.mean() - np.log(len(low)) / len(low),
            b - (1 - t_d) / (t_b - 1) * (x.max() - d),
        )
        chosen = x < threshold
        checked += chosen.any()
        assert (probabilities(x, t_b, t_d, b, d)[chosen] < reference.softmax(x)[chosen]).all()
    assert checked > 50


def test_proposition_4_3_high_term_adds_multi_modality():
    for x, t_b, t_d, b, d in proposition_inputs():
        for threshold in (b, np.sort(x)[-3] - 1e-6):
            both = reference.multi_modality(x, probabilities(x, t_b, t_d, b, d), threshold)
            low = reference.multi_modality(x, probabilities(x, t_b, 1.0, b, d), threshold)
            assert both > low


# --- attention ---------------------------------------------------------------------------------


def attention_inputs(dtype=torch.float64):
    return [random_scores(2, 3, length, 8, seed=s).to(dtype) for s, length in enumerate((5, 7, 7))]


@pytest.mark.parametrize("masking", ["none", "bool", "float", "causal", "both"])
@pytest.mark.parametrize("heads", [None, 3])
def test_attention_equals_reference(masking, heads):
    query, key, value = attention_inputs()
    allowed = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed[0, 0, 1] = False
    excluded = np.zeros((2, 1, 5, 7), bool)
    options = {}
    bias = 0.0
    if masking in ("bool", "both"):
        options["attn_mask"] = allowed
        excluded = excluded | ~allowed.numpy()
    if masking == "float":
        bias = random_scores(5, 7, seed=9, spread=0.5)
        options["attn_mask"] = bias.masked_fill(~allowed, -torch.inf)
        excluded = excluded | ~allowed.numpy()
    if masking in ("causal", "both"):
        options["is_causal"] = True
        excluded = excluded | np.triu(np.ones((5, 7), bool), 1)
    module = far_modulator(heads)

    def map_scores(scores):
        return module(torch.tensor(scores)).detach().numpy() + np.asarray(bias)

    ours = scaled_dot_product_attention(query, key, value, modulator=module, **options)
    expected = reference.attention(
        query.numpy(),
        key.numpy(),
        value.numpy(),
        map_scores,
        np.broadcast_to(excluded, (2, 3, 5, 7)),
    )
    np.testing.assert_allclose(ours.detach(), expected, atol=1e-12)


def test_softmax_attention_equals_torch():
    query, key, value = attention_inputs()
    allowed = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.7
    allowed[:, 0] = True
    for options in ({}, {"attn_mask": allowed}, {"is_causal": True}, {"scale": 0.3}):
        torch.testing.assert_close(
            scaled_dot_product_attention(query, key, value, normalizer="softmax", **options),
            F.scaled_dot_product_attention(query, key, value, **options),
        )


def test_attention_gradients_reach_inputs_and_modulator():
    inputs = [t[:1, :2, :4, :3].clone().requires_grad_() for t in attention_inputs()]
    module = far_modulator()
    assert gradcheck(
        lambda q, k, v, *_: scaled_dot_product_attention(q, k, v, modulator=module, is_causal=True),
        (*inputs, *module.parameters()),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_in_half_precision_is_as_accurate_as_softmax(dtype):
    query, key, value = attention_inputs()
    module = far_modulator()
    errors = []
    for options in ({"modulator": module}, {"normalizer": "softmax"}):
        exact = scaled_dot_product_attention(query, key, value, **options)
        low = [t.to(dtype) for t in (query, key, value)]
        ours = scaled_dot_product_attention(*low, **options)
        assert ours.dtype == dtype
        errors.append((ours.double() - exact).abs().max().item())
    # The far modulator has a slope of up to 1.9, which amplifies the scores' rounding.
    assert errors[0] <= 2 * 1.9 * errors[1]


def test_attention_applies_dropout_and_needs_a_modulator():
    query, key, value = attention_inputs()
    torch.manual_seed(0)
    dropped = scaled_dot_product_attention(
        query, key, value, modulator=far_modulator(), dropout_p=1.0
    )
    assert (dropped == 0).all()
    with pytest.raises(ValueError, match="modulator"):
        scaled_dot_product_attention(query, key, value)


class Nothing(torch.autograd.Function):
    """Returns 1 and has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.new_ones(())

    @staticmethod
    def backward(ctx, grad):
        return None


def test_attention_backward_accepts_an_undefined_gradient():
    query, key, value = (t.float().requires_grad_() for t in attention_inputs())
    context = scaled_dot_product_attention(query, key, value, modulator=far_modulator())
    (Nothing.apply(context) + 2 * query.sum()).backward()
    assert (query.grad == 2).all() and key.grad is None and value.grad is None


# --- the package -------------------------------------------------------------------------------


def test_import_loads_neither_fairseq_nor_dynamo():
    code = (
        "import sys, torch; sys.modules['fairseq'] = None; known = set(sys.modules); "
        "import multimax_fairseq as m; assert set(m.__all__) <= set(dir(m)); "
        "print(*{name.split('.')[0] for name in set(sys.modules) - known}); "
        "print(*(name for name in sys.modules if name.startswith('torch._dynamo')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages, compiler = out.stdout.split("\n")[:2]
    assert "multimax_fairseq" in packages and not compiler
    assert not {"omegaconf", "scipy", "sympy"} & set(packages.split())
    assert multimax_fairseq.__version__
