"""Continuous attention equals numerical integration and has the right limits."""

import itertools
import math

import numpy as np
import pytest
import reference
import torch
from scipy import integrate

from multimax_fairseq import (
    continuous_softmax,
    continuous_softmax_nd,
    continuous_sparsemax,
    continuous_sparsemax_2d,
    normalize,
)
from multimax_fairseq.continuous.densities import (
    BIWEIGHT,
    LAPLACE,
    TRIANGULAR,
    TRIWEIGHT,
    TRUNCATED_PARABOLA,
)
from multimax_fairseq.continuous.expectation import MIN_VARIANCE, NARROW, gaussian_basis
from multimax_fairseq.continuous.value_function import positions, ridge_regression

ONE_DIMENSION = {
    "softmax": (continuous_softmax, reference.normal_density),
    "sparsemax": (continuous_sparsemax, reference.truncated_parabola),
}
DENSITIES = [TRUNCATED_PARABOLA, BIWEIGHT, TRIWEIGHT, TRIANGULAR, LAPLACE]
CLOSE = {"rtol": 1e-8, "atol": 1e-8}


def double(*values):
    return [torch.tensor(value, dtype=torch.float64) for value in values]


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


def covariances(count, scale, seed=0):
    """Return covariances, (count, 2, 2), with standard deviations of about `scale`."""
    root = drawn(count, 2, 2, seed=seed) - 0.5
    return scale**2 * (root @ root.mT + 0.3 * torch.eye(2, dtype=torch.float64))


# --- one dimension ----------------------------------------------------------------------------


@pytest.mark.parametrize("width", [0.01, 0.03, 0.3, 2.0])
@pytest.mark.parametrize("name", ONE_DIMENSION)
def test_continuous_attention_equals_numerical_integration(name, width):
    function, density = ONE_DIMENSION[name]
    for mean, variance, center in itertools.product(
        (-0.4, 0.25), (1e-6, 0.003, 0.05, 20.0), (0.0, 0.5)
    ):
        inputs = [t.requires_grad_() for t in double(mean, variance)]
        found = function(*inputs, *double([center], [width]))
        ours = [found.item(), *(g.item() for g in torch.autograd.grad(found, inputs))]
        exact = reference.continuous_attention(*density(mean, variance), center, width)
        # Relative to the largest possible size, since cancellation loses digits.
        largest = [1 / width, 1 / width**2, 1 / width**3]
        errors = [abs(a - b) / s for a, b, s in zip(ours, exact, largest, strict=True)]
        assert max(errors) < 1e-8, (mean, variance, center, ours, exact)


@pytest.mark.parametrize("name", ONE_DIMENSION)
def test_continuous_attention_passes_first_and_second_gradcheck(name):
    function, _ = ONE_DIMENSION[name]
    mean, variance = 1.5 * drawn(3, 4) - 0.2, drawn(4, seed=1) ** 3 + 1e-3
    bases = double([0.0, 0.4, 1.0, 1.0], [0.05, 0.1, 0.3, 2.0])
    inputs = [t.requires_grad_() for t in (mean, variance)]
    assert torch.autograd.gradcheck(lambda *t: function(*t, *bases), inputs)
    assert torch.autograd.gradgradcheck(lambda *t: function(*t, *bases), inputs)


@pytest.mark.parametrize("function", [continuous_softmax, continuous_sparsemax])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_continuous_attention_is_finite_at_extreme_inputs(function, dtype):
    mean = torch.tensor([-3.0, 0.0, 0.5, 1.0, 6e4], dtype=dtype)[:, None].requires_grad_()
    values = [0.0, 1e-7, MIN_VARIANCE, 1e-3, 1.0, 6e4]
    variance = torch.tensor(values, dtype=dtype).requires_grad_()
    centers, widths = torch.linspace(0, 1, 3).to(dtype), torch.tensor([0.03, 0.1, 10.0]).to(dtype)
    found = function(mean, variance, centers, widths)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and found.shape == (5, 6, 3)
    assert found.isfinite().all() and (found >= 0).all()
    for gradient, tensor in zip(
        torch.autograd.grad(found.sum(), (mean, variance)), (mean, variance), strict=True
    ):
        assert gradient.dtype == dtype and gradient.shape == tensor.shape
        assert gradient.isfinite().all()
    # With zero variance, both densities are a point mass.
    point = gaussian_basis(mean[:, 0].detach(), centers, widths)
    torch.testing.assert_close(found[:, 0], point, rtol=1e-5, atol=1e-6)
    if dtype.itemsize >= 4:
        far = torch.tensor([-1e30, 1e30], dtype=dtype)[:, None].requires_grad_()
        nothing = function(far, variance.clamp(max=1), centers, widths)
        assert (nothing == 0).all() and (torch.autograd.grad(nothing.sum(), far)[0] == 0).all()
    # The sums are accurate to the inputs' precision.
    wide = function(mean.double(), variance.double(), centers.double(), widths.double())
    torch.testing.assert_close(found.double(), wide, rtol=1e-6, atol=1e-6)


def test_continuous_sparsemax_series_meets_the_closed_form():
    width = 0.5
    half = width * NARROW * torch.tensor([1 - 1e-9, 1 + 1e-9], dtype=torch.float64)
    variance = (half**3 / 1.5).requires_grad_()
    mean = drawn(20, 1) - 0.2
    found = continuous_sparsemax(mean, variance, *double([0.3], [width]))[..., 0]
    torch.testing.assert_close(found[:, 0], found[:, 1], rtol=1e-8, atol=0)
    slopes = torch.autograd.functional.jacobian(
        lambda v: continuous_sparsemax(mean, v, *double([0.3], [width]))[..., 0], variance
    )
    torch.testing.assert_close(slopes[:, 0, 0], slopes[:, 1, 1], rtol=1e-6, atol=1e-9)


def test_normalize_jacobians_equal_the_escort_covariance():
    # Prop. 3.2 with the counting measure and unit vectors as statistics is Eq. 14.
    scores = 2 * drawn(7)
    for name, power in (("softmax", 1), ("sparsemax", 0)):
        probs = normalize(name, scores)
        assert name == "softmax" or 1 < (probs > 0).sum() < 7
        escort = torch.where(probs > 0, probs**power, 0.0)
        covariance = escort.diag() - escort.outer(escort) / escort.sum()
        jacobian = torch.autograd.functional.jacobian(lambda x, n=name: normalize(n, x), scores)
        torch.testing.assert_close(jacobian, covariance)


def test_paper_equation_52_is_wrong_and_64_is_right():
    mean, variance, center, width = 0.3, 0.02, 0.45, 0.2
    half = (1.5 * variance) ** (1 / 3)
    # The last line of Eq. 52 has the difference of two error functions where the line before it
    # has the integral of a normal density, which is half of it.
    low, high = (mean - center - half) / width, (mean - center + half) / width
    errors = math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))
    ends = [reference.gaussian(t, 0, 1) for t in (high, low)]
    rest = -width * (mean + center + half) * ends[0] + width * (mean + center - half) * ends[1]
    factor = center**2 - mean**2 + width**2 - half**2 / 3

    def covariance(t):
        return (t**2 - mean**2 - half**2 / 3) * reference.gaussian(t, center, width)

    exact = integrate.quad(covariance, mean - half, mean + half)[0]
    assert factor * errors / 2 + rest == pytest.approx(exact, rel=1e-10)
    assert factor * errors + rest != pytest.approx(exact, rel=0.1)
    # Eq. 64 looks like a slip, an area beneath a covariance, but is right: the paraboloid's level
    # makes the mean of t t^T on the ellipse, Sigma * level / 2 about its centre, Sigma / area.
    spread = covariances(1, 0.3)[0].numpy()
    level = (2 / math.sqrt(np.linalg.det(2 * math.pi * spread))) ** 0.5
    area = math.pi * 2 * level * math.sqrt(np.linalg.det(spread))
    assert level / 2 == pytest.approx(1 / area)


# --- the other densities ------------------------------------------------------------------------


@pytest.mark.parametrize("density", DENSITIES, ids=lambda density: density.name)
def test_density_is_the_entmax_of_its_scores(density):
    for mean, scale in ((0.2, 0.003), (0.7, 0.4)):
        inputs = double(mean, scale)
        low, high = (end.item() for end in density.support(*inputs))

        def at(t, inputs=inputs):
            return density(*double(t), *inputs).item()

        halves = integrate.quad(at, low, mean)[0], integrate.quad(at, mean, high)[0]
        assert halves == pytest.approx((0.5, 0.5), rel=1e-8)
        reach = 9 * scale if density is LAPLACE else high - mean
        t = np.linspace(mean - reach, mean + reach, 9)[1:-1]
        function = -abs(t - mean) if density in (TRIANGULAR, LAPLACE) else -((t - mean) ** 2) / 2
        values = np.array([at(x) for x in t])
        if density is LAPLACE:  # of softmax, the limit of alpha-entmax at alpha = 1
            level = np.log(values) - function / scale
        else:
            assert at(low - 1e-9) == at(high + 1e-9) == 0 < at(low + 1e-3 * (high - low))
            # p^(alpha - 1) is (alpha - 1) times the function of scores, but for a constant.
            power = density.alpha - 1
            level = values**power - power * function / scale
        np.testing.assert_allclose(level, level[0], rtol=1e-9)


@pytest.mark.parametrize("density", DENSITIES, ids=lambda density: density.name)
def test_density_expectation_equals_numerical_integration(density):
    mean, scale = drawn(3) * 1.4 - 0.2, drawn(3, seed=1) * 0.1 + 0.01
    centers, widths = double([0.0, 0.5, 1.0], [0.02, 0.1, 3.0])
    found = density.expectation(mean, scale, centers, widths)
    for row, m, s in zip(found.tolist(), mean, scale, strict=True):
        low, high = (end.item() for end in density.support(m, s))
        for ours, c, w in zip(row, centers.tolist(), widths.tolist(), strict=True):

            def product(t, m=m, s=s, c=c, w=w):
                return density(*double(t), m, s).item() * reference.gaussian(t, c, w)

            halves = ((low, m.item()), (m.item(), high))
            exact = sum(reference.integral(product, *ends, c, w) for ends in halves)
            assert ours == pytest.approx(exact, rel=1e-8, abs=1e-9)
    inputs = [t.requires_grad_() for t in (mean, scale)]
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda *t: density.expectation(*t, centers, widths), inputs)
    assert density.expectation(mean.half(), scale.half(), centers, widths).dtype == torch.float32


def test_continuous_sparsemax_equals_parabola_quadrature():
    inputs = [t.requires_grad_() for t in (1.4 * drawn(9) - 0.2, drawn(9, seed=1) ** 4 + 1e-5)]
    bases = double([0.0, 0.5, 0.5, 1.0], [0.01, 0.1, 0.5, 3.0])
    outer = drawn(9, 4, seed=2)
    closed = continuous_sparsemax(*inputs, *bases)
    other = TRUNCATED_PARABOLA.expectation(*inputs, *bases)
    torch.testing.assert_close(closed, other, rtol=1e-10, atol=1e-10)
    for a, b in zip(*(torch.autograd.grad(t, inputs, outer) for t in (closed, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


# --- more dimensions ----------------------------------------------------------------------------


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_continuous_softmax_nd_equals_torch_multivariate_normal(dimensions):
    root = drawn(4, dimensions, dimensions)
    unit = torch.eye(dimensions, dtype=torch.float64)
    covariance = 0.1 * (root @ root.mT) + 0.01 * unit
    centers, spread = drawn(5, dimensions, seed=1), 0.02 * unit.expand(5, -1, -1)
    mean = drawn(4, dimensions, seed=2)
    found = continuous_softmax_nd(mean, covariance, centers, spread)
    normal = torch.distributions.MultivariateNormal(centers, covariance[:, None] + spread)
    torch.testing.assert_close(found, normal.log_prob(mean[:, None]).exp())
    if dimensions == 1:
        line = continuous_softmax(
            mean[:, 0], covariance[:, 0, 0], centers[:, 0], spread[:, 0, 0].sqrt()
        )
        torch.testing.assert_close(found, line)
    point = continuous_softmax_nd(mean, torch.zeros_like(covariance), centers, spread)
    normal = torch.distributions.MultivariateNormal(centers, spread)
    torch.testing.assert_close(point, normal.log_prob(mean[:, None]).exp())


@pytest.mark.parametrize("scale", [0.03, 0.2, 2.0])
def test_continuous_sparsemax_2d_equals_numerical_integration(scale):
    for number, width in enumerate((0.02, 0.1, 1.0)):
        mean, center = drawn(2, seed=number), drawn(2, seed=9 + number)
        [covariance], [spread] = (covariances(1, s, seed=number) for s in (scale, width))
        inputs = [t.requires_grad_() for t in (mean, covariance)]
        found = continuous_sparsemax_2d(*inputs, center[None], spread[None])
        by_mean, by_covariance = torch.autograd.grad(found, inputs)
        exact = reference.paraboloid_expectation(
            *(t.detach().numpy() for t in (mean, covariance, center, spread))
        )
        sizes = [width**-2, width**-3, width**-4]
        for ours, theirs, size in zip(
            (found[0], by_mean, by_covariance), exact, sizes, strict=True
        ):
            assert abs(ours.detach().numpy() - theirs).max() / size < 1e-8


@pytest.mark.parametrize("function", [continuous_softmax_nd, continuous_sparsemax_2d])
def test_continuous_attention_2d_passes_gradcheck(function):
    unit = torch.eye(2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (drawn(3, 2), drawn(3, 2, 2, seed=1) - 0.5)]
    bases = drawn(4, 2, seed=2), covariances(4, 0.3, seed=3)

    def of_a_root(mean, root):
        return function(mean, root @ root.mT + 0.1 * unit, *bases)

    assert torch.autograd.gradcheck(of_a_root, inputs)
    if function is continuous_softmax_nd:
        assert torch.autograd.gradgradcheck(of_a_root, inputs)


@pytest.mark.parametrize("function", [continuous_softmax_nd, continuous_sparsemax_2d])
def test_continuous_attention_2d_is_rotation_invariant(function):
    turn = torch.linalg.qr(drawn(2, 2)).Q
    mean, covariance = drawn(3, 2, seed=1), covariances(3, 0.2)
    centers, spread = drawn(4, 2, seed=2), covariances(4, 0.1, seed=3)
    found = function(mean, covariance, centers, spread)
    turned = function(
        mean @ turn.T + 5, turn @ covariance @ turn.T, centers @ turn.T + 5, turn @ spread @ turn.T
    )
    torch.testing.assert_close(found, turned, **CLOSE)
    half = function(mean.half(), covariance.float(), centers, spread)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), found, rtol=0.05, atol=0.05)


# --- a sentence as a function of time -----------------------------------------------------------


def test_positions_count_only_unmasked_tokens():
    tokens = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 0, 1], [0] * 5]).bool()
    for row in positions(tokens[:3])[tokens[:3]].view(3, 3):
        torch.testing.assert_close(row, torch.tensor([1 / 3, 2 / 3, 1]).double())
    assert (positions(tokens)[3] == 0).all()


def test_ridge_regression_ignores_padding_on_either_side():
    centers, widths = torch.linspace(0, 1, 5).repeat(2).double(), double([0.1] * 5 + [0.3] * 5)[0]
    length, ridge = 6, 0.1
    times = np.arange(1, length + 1) / length
    basis = np.array(
        [
            [reference.gaussian(t, c, w) for t in times]
            for c, w in zip(centers.tolist(), widths.tolist(), strict=True)
        ]
    )
    exact = np.linalg.solve(basis @ basis.T + ridge * np.eye(10), basis).T
    for before, after in ((0, 0), (3, 0), (0, 2)):
        tokens = torch.tensor([[False] * before + [True] * length + [False] * after])
        found = ridge_regression(tokens, centers, widths, ridge)[0]
        np.testing.assert_allclose(found[tokens[0]], exact, rtol=1e-9, atol=1e-12)
        assert (found[~tokens[0]] == 0).all()
    # The value function goes through the tokens' values where the ridge is small.
    values = drawn(length, 3)
    small = ridge_regression(tokens, centers, widths, 1e-7)[0][tokens[0]]
    fitted = gaussian_basis(torch.from_numpy(times), centers, widths) @ (small.T @ values)
    torch.testing.assert_close(fitted, values, rtol=0, atol=1e-3)


def test_ridge_regression_handles_one_token_and_none():
    tokens = torch.tensor([[True, False], [False, False]])
    one, none = ridge_regression(tokens, *double([0.0, 1.0], [0.1, 0.1]), 0.5)
    assert one.isfinite().all() and one[0, 1] > 0 and (none == 0).all()


# --- other calls, and errors --------------------------------------------------------------------


@pytest.mark.parametrize("function", [continuous_softmax, continuous_sparsemax])
def test_continuous_attention_supports_vmap_and_compile(function):
    mean, variance = drawn(3, 2), drawn(3, 2, seed=1) * 0.1 + 1e-3
    bases = double([0.0, 0.5, 1.0], [0.1, 0.3, 3.0])
    expected = function(mean, variance, *bases)
    by_row = torch.func.vmap(lambda m, v: function(m, v, *bases))(mean, variance)
    torch.testing.assert_close(by_row, expected)
    forward = torch.func.jacrev(lambda v: function(mean[0], v, *bases))(variance[0])
    inner = torch.autograd.functional.jacobian(lambda v: function(mean[0], v, *bases), variance[0])
    torch.testing.assert_close(forward, inner)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(mean, variance, *bases), expected)


GOOD = {
    continuous_softmax: (drawn(2), drawn(2), drawn(3), drawn(3) + 0.1),
    continuous_sparsemax: (drawn(2), drawn(2), drawn(3), drawn(3) + 0.1),
    continuous_softmax_nd: (drawn(2, 2), covariances(2, 1), drawn(3, 2), covariances(3, 1)),
    continuous_sparsemax_2d: (drawn(2, 2), covariances(2, 1), drawn(3, 2), covariances(3, 1)),
    ridge_regression: (torch.ones(2, 4, dtype=torch.bool), drawn(3), drawn(3) + 0.1, 0.1),
}


@pytest.mark.parametrize(
    "function, index, wrong, told",
    [
        *(
            (function, *case)
            for function in (continuous_softmax, continuous_sparsemax)
            for case in (
                (0, [0.1], "mean must be a tensor"),
                (
                    0,
                    torch.ones(2, dtype=torch.int64),
                    "mean must be floating-point, got torch.int64",
                ),
                (1, drawn(3), "broadcastable, got [2] and [3]"),
                (1, -drawn(2), "variance must be at least 0, got -0."),
                (2, drawn(4), "one entry per basis function, got [4] and [3]"),
                (3, torch.zeros(3), "widths must be above 0 and finite, got 0.0"),
                (3, drawn(3).to("meta"), "widths is on meta, but mean on cpu"),
                (2, drawn(3).requires_grad_(), "centers are constants"),
            )
        ),
        *(
            (function, *case)
            for function in (continuous_softmax_nd, continuous_sparsemax_2d)
            for case in (
                (0, drawn(3, 3), "must be"),
                (1, drawn(2, 2, 3), "covariance must be [2, 2, 2]"),
                (1, covariances(3, 1), "broadcastable"),
                (1, drawn(2, 2, 2), "covariance must be symmetric"),
                (1, -covariances(2, 10), "covariance must be positive"),
                (2, drawn(3), "centers must be (N, 2), got [3]"),
                (3, covariances(4, 1), "covariances must be [3, 2, 2]"),
                (3, 0 * covariances(3, 1), "covariances must be positive definite"),
                (3, covariances(3, 1).requires_grad_(), "covariances are constants"),
            )
        ),
        (ridge_regression, 0, torch.ones(2, 4), "tokens must be bool (..., S)"),
        (ridge_regression, 1, drawn(2), "one entry per basis function"),
        (ridge_regression, 3, 0.0, "ridge must be above 0, got 0.0"),
        (ridge_regression, 3, math.nan, "ridge must be finite"),
    ],
)
def test_continuous_functions_refuse_invalid_arguments(function, index, wrong, told):
    arguments = list(GOOD[function])
    function(*arguments)
    arguments[index] = wrong
    with pytest.raises((ValueError, TypeError)) as refusal:
        function(*arguments)
    assert told in str(refusal.value)


def test_continuous_sparsemax_2d_refuses_second_derivatives():
    """The gradient's graph also depends on the mean through another path."""
    mean, spread = drawn(2).double().requires_grad_(), torch.eye(2).double()
    for function, covers in ((continuous_softmax_nd, True), (continuous_sparsemax_2d, False)):
        found = function(mean, spread, drawn(3, 2).double(), spread.expand(3, 2, 2)).sum()
        (slope,) = torch.autograd.grad(found * mean.sum(), mean, create_graph=True)
        if covers:
            assert torch.autograd.grad(slope[0], mean)[0].isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match="no derivative of its own"):
                torch.autograd.grad(slope[0], mean)


@pytest.mark.parametrize("function", [continuous_softmax, continuous_sparsemax])
@pytest.mark.parametrize("far", [1e10, 1e20, -1e36, 3e38])
@pytest.mark.parametrize("variance", [0.0, 1e-6, 1.0])
def test_continuous_attention_is_zero_far_from_all_bases(function, far, variance):
    mean, spread = (torch.tensor(x, requires_grad=True) for x in (far, variance))
    found = function(mean, spread, torch.tensor([0.5]), torch.tensor([0.03]))
    grads = torch.autograd.grad(found.sum(), (mean, spread))
    assert float(found) == 0 and [float(g) for g in grads] == [0, 0]
