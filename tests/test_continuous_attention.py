"""The ContinuousAttention module: its formula, its masks and its use in models."""

import math

import pytest
import torch
import torch.nn.functional as F
from examples import EXAMPLES
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from random_inputs import drawn

from multimax_fairseq import NORMALIZERS, Normalizer, continuous_softmax, continuous_sparsemax
from multimax_fairseq.continuous.value_function import positions, ridge_regression
from multimax_fairseq.modules import ContinuousAttention, continuous_attention
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.dropout import dropout

B, H, T, S, D = 3, 2, 4, 7, 8
LENGTHS = (7, 4, 1)
DENSITIES = {"softmax": continuous_softmax, "sparsemax": continuous_sparsemax}
CENTERS = torch.linspace(0, 1, 4, dtype=torch.float64).repeat(3)
WIDTHS = torch.tensor([0.05, 0.1, 0.3], dtype=torch.float64).repeat_interleave(4)
SIZES = {"num_bases": 12, "widths": (0.05, 0.1, 0.3)}


def inputs(dtype=torch.float32):
    """(query, key, value, padding), padded on the left."""
    padding = torch.arange(S) < S - torch.tensor(LENGTHS)[:, None]
    shapes = ((B, H, T, D), (B, H, S, D), (B, H, S, D))
    tensors = [drawn(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    return *tensors, padding[:, None, None]


HIDDEN = drawn(B, 1, T, 5, seed=6)


def build(name="softmax", num_heads=None, **options):
    torch.manual_seed(0)
    normalizer = Normalizer(name, num_heads, **EXAMPLES[name].needed)
    return ContinuousAttention(normalizer, **SIZES, **options).eval()


@pytest.mark.parametrize("density", DENSITIES)
def test_attend_backpropagates_after_inference_mode(density):
    continuous_attention._bases.cache_clear()
    module, (query, key, value, padding) = build(density=density), inputs()
    with torch.inference_mode():
        module.attend(query, key, value, padding)
    query.requires_grad_()
    module.attend(query, key, value, padding)[0].sum().backward()
    assert query.grad.isfinite().all() and query.grad.any()


def plain(module, query, key, value, padding):
    """Return (context, probabilities) by the paper's formula in float64, one sentence at a time."""
    query, key, value = (t.detach().double() for t in (query, key, value))
    scores = query @ key.mT / math.sqrt(D)
    probs = module.normalizer(scores, -1, padding, HIDDEN).double()
    contexts = []
    for b in range(len(query)):
        tokens = ~padding[b, 0, 0]
        time = torch.arange(1, tokens.sum() + 1).double() / tokens.sum()
        p = probs[b][..., tokens]
        mass = p.sum(-1, keepdim=True)
        p = p / torch.where(mass > 0, mass, 1.0)
        mean = (p * time).sum(-1)
        variance = ((p * time**2).sum(-1) - mean**2).clamp(min=1e-6)
        weights = DENSITIES[module.density](mean, variance, CENTERS, WIDTHS)
        basis = torch.stack(
            [torch.distributions.Normal(CENTERS, WIDTHS).log_prob(t).exp() for t in time], -1
        )
        square = basis @ basis.T + module.ridge * torch.eye(len(CENTERS))
        coefficients = value[b][:, tokens].mT @ torch.linalg.solve(square, basis).T
        contexts.append(weights @ coefficients.mT)
    continuous = torch.stack(contexts)
    return continuous + (probs @ value if module.context == "combined" else 0), probs


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.parametrize(
    "context, density", zip(["combined", "continuous"], DENSITIES, strict=True)
)
def test_attend_equals_the_papers_formula(name, context, density):
    module = build(name, density=density, context=context)
    *tensors, padding = inputs()
    expected, probs = plain(module, *tensors, padding)
    for need_probs in (False, True):
        found, weights = module.attend(*tensors, padding, need_probs=need_probs, hidden=HIDDEN)
        torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)
        assert (weights is None) != need_probs
    torch.testing.assert_close(weights.double(), probs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("density", DENSITIES)
def test_attend_passes_gradcheck(density):
    module = build("multimax", 2, density=density).double()
    *tensors, padding = inputs(torch.float64)
    tensors = [t.requires_grad_() for t in tensors]

    def context(*given):
        return module.attend(*given[:3], padding)[0]

    assert torch.autograd.gradcheck(context, [*tensors, *module.parameters()], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attend_is_accurate_in_half_precision(dtype):
    module = build("multimax")
    *tensors, padding = inputs(dtype)
    found, _ = module.attend(*tensors, padding)
    exact, _ = plain(module, *tensors, padding)
    error = (found.double() - exact).norm() / exact.norm()
    assert found.dtype == dtype and error < 4 * torch.finfo(dtype).eps
    *wide, _ = inputs()
    with torch.autocast("cpu", dtype):
        cast, _ = module.attend(*wide, padding)
    error = (cast.double() - plain(module, *wide, padding)[0]).norm() / exact.norm()
    assert error < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attend_by_scores_keeps_moments_with_half_values(dtype):
    module, moments = build(), []
    module.expectation.register_forward_hook(lambda _, given, __: moments.append(given))
    scores, value = drawn(B, H, T, S), drawn(B, H, S, D, seed=2)
    for given in (value, value.to(dtype)):
        module.attend_by_scores(scores, given)
    torch.testing.assert_close(*moments, rtol=1e-6, atol=1e-7)


def test_attend_applies_given_scale():
    module = build()
    query, key, value, padding = inputs()
    found, _ = module.attend(query, key, value, padding, scale=1.0)
    expected, _ = module.attend(query * math.sqrt(D), key, value, padding)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_attend_accepts_scalar_mask():
    module = build()
    *tensors, _ = inputs()
    found, _ = module.attend(*tensors, torch.tensor(False))
    torch.testing.assert_close(found, module.attend(*tensors)[0])


@pytest.mark.parametrize("name", ["multimax", "sparsemax"])
def test_attend_keeps_float32_moments_under_autocast(name):
    *tensors, padding = inputs()
    moments = []
    for module in (build(name), build(name, query_size=D)):
        module.expectation.register_forward_hook(lambda _, given, __: moments.append(given))
        for need_probs in (False, True):
            module.attend(*tensors, padding, need_probs=need_probs)
            with torch.autocast("cpu", torch.bfloat16):
                module.attend(*tensors, padding, need_probs=need_probs)
    assert all(m.dtype == torch.float32 for given in moments for m in given)
    for exact, cast in zip(moments[:4:2], moments[1:4:2], strict=True):
        torch.testing.assert_close(cast, exact, rtol=1e-6, atol=1e-7)


def test_attend_keeps_keys_with_finite_bias():
    module = build(context="continuous")
    *tensors, padding = inputs()
    expected, _ = module.attend(*tensors, padding)
    added = torch.full(padding.shape, -0.5).masked_fill(padding, -math.inf)
    torch.testing.assert_close(module.attend(*tensors, added)[0], expected)


def test_attend_ignores_padding():
    module = build("multimax")
    query, key, value, padding = inputs()
    found, _ = module.attend(query, key, value, padding)
    for b, length in enumerate(LENGTHS):
        alone, _ = module.attend(
            query[b : b + 1], key[b : b + 1, :, -length:], value[b : b + 1, :, -length:]
        )
        torch.testing.assert_close(found[b : b + 1], alone, rtol=1e-3, atol=1e-4)
    for number in (-math.inf, -1e9, -1e4):
        added = torch.zeros(padding.shape).masked_fill(padding, number)
        torch.testing.assert_close(module.attend(query, key, value, added)[0], found)


def test_attend_returns_zeros_for_a_fully_padded_sentence():
    query, key, value, padding = inputs()
    padding = padding.clone()
    padding[1] = True
    tensors = [t.requires_grad_() for t in (query, key, value)]
    for module in (build(), build(query_size=D)):
        found, _ = module.attend(*tensors, padding)
        assert (found[1] == 0).all() and found.isfinite().all()
        assert all(
            g.isfinite().all() for g in torch.autograd.grad(found.sum(), tensors[:1] + tensors[2:])
        )


def test_attend_to_one_token_returns_the_value_function():
    module = build(context="continuous")
    query, key, value, padding = inputs()
    sharp = 1e4 * F.one_hot(torch.tensor([3, 5, 6]), S)[:, None, None, :].float()
    scores = sharp.expand(B, H, T, S)
    found, _ = module.attend(scores, torch.eye(S).expand(B, H, S, S), value, padding, scale=1.0)
    tokens = ~padding[:, 0, 0]
    regression = ridge_regression(tokens, CENTERS, WIDTHS, module.ridge)
    for b, at in enumerate((3, 5, 6)):
        time = positions(tokens)[b, at]
        basis = torch.distributions.Normal(CENTERS, WIDTHS).log_prob(time).exp()
        expected = (regression[b] @ basis) @ value[b].double()
        torch.testing.assert_close(found[b, :, 0].double(), expected, rtol=0.02, atol=0.02)


def test_attend_uses_predicted_moments():
    module = build(density="softmax", context="continuous", query_size=D)
    query, key, value, padding = inputs()
    found, probs = module.attend(query, key, value, padding)
    assert probs is None
    mean, variance = module.predicted(query).unbind(-1)
    weights = continuous_softmax(mean.sigmoid(), F.softplus(variance), CENTERS, WIDTHS)
    regression = ridge_regression(~padding[:, 0, 0], CENTERS, WIDTHS, module.ridge)[:, None]
    expected = weights @ (regression.mT.float() @ value)
    torch.testing.assert_close(found, expected)
    assert module.attend(query, key, value, padding, need_probs=True)[1].shape == (B, H, T, S)
    both, _ = build(density="softmax", query_size=D).attend(query, key, value, padding)
    torch.testing.assert_close(
        both, expected + module.normalizer.attend(query, key, value, padding)[0]
    )


def test_attend_uses_the_kernel_for_other_value_sizes(monkeypatch):
    """The kernel computes the moments as extra columns of the values."""
    from multimax_fairseq.ops import attention

    sizes = []
    fused = attention.attention

    def seen(query, key, value, *rest):
        sizes.append((key.shape[-1], value.shape[-1]))
        return fused(query, key, value, *rest)

    monkeypatch.setattr(attention, "attention", seen)
    *tensors, padding = inputs()
    build("multimax").attend(*tensors, padding)
    assert sizes == [(D + 3, D + 3)]
    normalizer = Normalizer("multimax")
    for size in (3, 20):
        value = drawn(B, H, S, size).requires_grad_()
        found, _ = normalizer.attend(*tensors[:2], value, padding)
        expected, _ = normalizer.attend(*tensors[:2], value, padding, need_probs=True)
        torch.testing.assert_close(found, expected)
        outer = drawn(*found.shape, seed=5)
        for ours, theirs in zip(
            torch.autograd.grad(found, (value, *normalizer.parameters()), outer),
            torch.autograd.grad(expected, (value, *normalizer.parameters()), outer),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs)
    assert len(sizes) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attend_applies_one_dropout_mask_to_both_contexts(dtype, monkeypatch):
    """Mean and variance are those of the positions under the probabilities that dropout keeps."""
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")  # the kernels drop other entries
    *tensors, padding = inputs(dtype)
    combined = build("sparsemax").train()
    alone = build("sparsemax", context="continuous").train()
    for need_probs in (False, True):
        torch.manual_seed(0)
        both, _ = combined.attend(*tensors, padding, dropout_p=0.5, need_probs=need_probs)
        torch.manual_seed(0)
        continuous, _ = alone.attend(*tensors, padding, dropout_p=0.5, need_probs=need_probs)
        torch.manual_seed(0)
        scores = tensors[0] @ tensors[1].mT / math.sqrt(D)
        probs = dropout(alone.normalizer(scores, -1, padding), 0.5)
        left = probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)
        time = positions(~padding[:, 0, 0])[:, None, None]
        mean = (left * time).sum(-1)
        variance = ((left * time**2).sum(-1) - mean**2).clamp(min=1e-6)
        regression = ridge_regression(~padding[:, 0, 0], CENTERS, WIDTHS, alone.ridge)[:, None]
        weights = continuous_sparsemax(mean, variance, CENTERS, WIDTHS)
        expected = weights.float() @ (regression.mT.float() @ tensors[2].float())
        close = (
            {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
        )
        torch.testing.assert_close(continuous.float(), expected, **close)
        discrete = probs.float() @ tensors[2].float()
        torch.testing.assert_close((both - continuous).float(), discrete, **close)
    assert combined.attend(*tensors, padding, dropout_p=1.0)[0].isfinite().all()


@pytest.mark.parametrize(
    "mask, is_causal",
    [
        (torch.zeros(T, S, dtype=torch.bool), False),
        (torch.zeros(1, H, 1, S), False),
        (None, True),
    ],
)
def test_attend_refuses_masks_that_differ_between_queries(mask, is_causal):
    query, key, value, _ = inputs()
    with pytest.raises(ValueError, match="needs all keys of a sentence from the start"):
        build().attend(query, key, value, mask, is_causal=is_causal)


def test_attend_refuses_values_of_another_length():
    query, key, value, padding = inputs()
    with pytest.raises(ValueError, match=r"value must have 7 rows as the keys, or 19 of static"):
        build().attend(query, key, value[:, :, :5], padding)


@pytest.mark.parametrize(
    "options, told",
    [
        ({"density": "gauss"}, "unknown density 'gauss': choose one of softmax, sparsemax"),
        ({"context": "discrete"}, "unknown context 'discrete': choose one of combined, continuous"),
        ({"num_bases": 31}, "num_bases must be a multiple of the number of widths, 3, got 31"),
        ({"num_bases": 0}, "got 0"),
        ({"widths": ()}, "one at least, got ()"),
        ({"widths": (0.1, -0.1)}, "widths must be finite and above 0"),
        ({"ridge": 0.0}, "ridge must be above 0, got 0.0"),
    ],
)
def test_continuous_attention_refuses_wrong_arguments(options, told):
    with pytest.raises(ValueError) as refusal:
        ContinuousAttention(Normalizer("softmax"), **options)
    assert told in str(refusal.value)


def test_keep_heads_selects_modulator_rows():
    module = build("multimax", 4)
    module.keep_heads([0, 2])
    assert module.normalizer.modulator.low_coefficient.shape[0] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", ["combined", "continuous"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_attend_by_scores_equals_attend(context, dropout_p, dtype):
    module = build("sparsemax", context=context)
    query, key, value, padding = inputs(dtype)
    scores = query @ key.mT / math.sqrt(D)
    kept = module.static_values(value, padding)
    assert kept.shape == (B, H, S + SIZES["num_bases"], D)
    results = []
    for attend in (
        lambda: module.attend(query, key, value, padding, dropout_p=dropout_p, need_probs=True),
        lambda: module.attend_by_scores(scores, value, padding, dropout_p, need_probs=True),
        lambda: module.attend_by_scores(scores, kept, padding, dropout_p),
    ):
        torch.manual_seed(0)
        results.append(attend())
    (expected, probs), (found, same), (also, none) = results
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(same, probs, **close)
    torch.testing.assert_close(also, found, **close)
    assert none is None and found.dtype == dtype
    with pytest.raises(ValueError, match="from the query: use attend"):
        build(query_size=D).attend_by_scores(scores, value)


@pytest.mark.parametrize("density", DENSITIES)
def test_multihead_attention_steps_equal_full_sequence(density):
    size = H * D
    stock = SoftmaxMultiheadAttention(size, H, kdim=size, vdim=size, encoder_decoder_attention=True)
    layer = MultiheadAttention(stock, build("multimax", H, density=density)).eval()
    query, encoded = drawn(T, B, size), drawn(S, B, size, seed=1)
    padding = inputs()[3][:, 0, 0]
    shared = {"key_padding_mask": padding, "static_kv": True}
    with torch.no_grad():
        whole, probs = layer(query, encoded, encoded, **shared)
        alone, none = layer(query, encoded, encoded, need_weights=False, **shared)
        state = {}
        steps = [
            layer(step[None], encoded, encoded, incremental_state=state, **shared)[0]
            for step in query
        ]
    assert none is None and probs.shape == (B, T, S)
    torch.testing.assert_close(alone, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(steps), whole, rtol=1e-4, atol=1e-5)
