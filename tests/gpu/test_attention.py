"""The attention kernels against the plain formula in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from plain import (
    DEVICE,
    assert_as_accurate,
    attend,
    attention_inputs,
    by_parameter,
    doubled,
    far_parameters,
    make_mask,
    monotone_parameters,
    plain_attend,
    plain_attention,
    soft_cap,
)

CASES = [
    # type, (B, H, T, S, D), mask, causal, parameters (or orders of its sides)
    ("float32", (1, 2, 33, 50, 32), None, False, "separate"),
    ("float32", (2, 1, 33, 45, 64), "padding", False, "monotone"),
    ("float32", (2, 1, 40, 33, 32), "full", True, "no low turn"),
    ("float32", (2, 1, 33, 33, 16), "padding", True, "no high turn"),
    ("float32", (1, 2, 33, 40, 32), "added", False, "shared"),
    ("float32", (2, 1, 33, 40, 16), "added padding", True, None),
    ("float32", (1, 2, 33, 40, 16), "bias", False, "shared"),
    ("float32", (1, 2, 33, 33, 16), "key bias", True, (1, 1)),
    ("float32", (2, 1, 9, 33, 16), "row bias", False, "monotone"),
    ("float32", (1, 1, 37, 37, 128), None, True, (2, 0)),
    ("float32", (1, 1, 17, 40, 24), None, False, (0, 2)),
    ("float32", (1, 2, 1, 9, 80), None, False, (0, 1)),
    ("float32", (1, 2, 33, 45, 32), "padding", True, "soft-cap"),
    ("bfloat16", (1, 2, 70, 90, 64), "added", False, "soft-cap"),
    ("float16", (1, 2, 150, 150, 64), None, True, "separate"),
    ("float16", (2, 1, 70, 90, 80), "padding", False, "shared"),
    ("float16", (2, 1, 130, 70, 128), "full", False, (1, 0)),
    ("bfloat16", (1, 2, 70, 90, 64), "added", False, "monotone"),
    ("bfloat16", (2, 1, 90, 140, 32), "added padding", True, None),
    ("bfloat16", (1, 2, 70, 130, 64), "bias", True, "shared"),
]


@pytest.mark.parametrize("dtype, shape, masking, causal, kind", CASES)
def test_attention_equals_plain_formula_and_gradients(dtype, shape, masking, causal, kind):
    *inputs, grad = attention_inputs(*shape, getattr(torch, dtype))
    heads, orders = shape[1], (2, 2)
    if isinstance(kind, tuple):
        orders, parameters = kind, far_parameters(heads, *kind)
    elif kind is None:
        parameters = None
    elif kind == "soft-cap":
        parameters = soft_cap()
    elif "turn" in kind:
        turns = (-math.inf, 1.5) if kind == "no low turn" else (-2.0, math.inf)
        parameters = monotone_parameters(heads, *turns)
    else:
        rows = 1 if kind == "shared" else heads
        parameters = monotone_parameters(rows) if kind == "monotone" else far_parameters(rows)
    options = {"mask": make_mask(masking, *shape[:4]), "causal": causal}
    plain = plain_attend(inputs, grad, parameters, **options)
    exact = plain_attend(*doubled(inputs, grad, parameters), **options)
    # One order too many reads the parameters' zeros, which changes nothing.
    for given in {orders, tuple(2 if order == 1 else order for order in orders)}:
        ours = attend(inputs, grad, parameters, orders=given, **options)
        found = [[*run[:4], *by_parameter(run[4:], orders)] for run in (ours, plain, exact)]
        if dtype != "float32" and parameters is not None:
            # Rounding one output affects every column, so compare all columns together.
            found = [[*run[:4], torch.cat(run[4:], -1)] for run in found]
        assert_as_accurate(*found)


@pytest.mark.parametrize(
    "dtype, masking, modulated",
    [
        ("float32", "none", False),
        ("float32", "full", True),
        ("bfloat16", "padding", True),
        ("bfloat16", "added", False),
    ],
)
def test_attention_with_sinks_equals_plain_formula(dtype, masking, modulated):
    shape = (1, 6, 40, 45, 32)  # with fewer heads the error of a sink's gradient is noisy
    *inputs, grad = attention_inputs(*shape, getattr(torch, dtype))
    parameters = far_parameters(6) if modulated else None
    options = {"mask": make_mask(masking, *shape[:4]), "causal": masking in ("none", "full")}
    sink = torch.tensor([1.5, 0.0, -1.0, 4.0, -20.0, -math.inf], device=DEVICE)
    ours = attend(inputs, grad, parameters, sink=sink, **options)
    plain = plain_attend(inputs, grad, parameters, sink=sink, **options)
    exact = plain_attend(*doubled(inputs, grad, parameters), sink=sink.double(), **options)
    found = [[*run[:4], *by_parameter(run[4:-1]), run[-1]] for run in (ours, plain, exact)]
    if dtype != "float32" and parameters is not None:
        found = [[*run[:4], torch.cat(run[4:-1], -1), run[-1]] for run in found]
    assert_as_accurate(*found)
    assert attend(inputs, grad, parameters, sink=sink * math.nan)[0].isnan().all()


@pytest.mark.parametrize("dtype, form", [(torch.float32, "bool"), (torch.bfloat16, "float")])
def test_attention_ignores_excluded_keys(dtype, form):
    *inputs, grad = attention_inputs(2, 1, 40, 70, 32, dtype)
    parameters = far_parameters(1)
    mask = make_mask("full", 2, 1, 40, 70) | make_mask("padding", 2, 1, 40, 70)
    everything = torch.ones_like(mask)
    if form == "float":
        mask, everything = (torch.where(m, -math.inf, 0.0) for m in (mask, everything))
    out, *grads = attend(inputs, grad, parameters, mask)
    assert all(t.isfinite().all() for t in (out, *grads))
    assert (out[0, :, 20] == 0).all() and (grads[0][0, :, 20] == 0).all()
    assert all((t[1, :, 35:] == 0).all() for t in grads[1:3])
    assert all((t == 0).all() for t in attend(inputs, grad, parameters, everything))


@pytest.mark.parametrize(
    "dtype, number", [(torch.float32, -1e9), (torch.float16, torch.finfo(torch.float32).min)]
)
def test_attention_keeps_keys_with_finite_mask(dtype, number):
    # Adding the number absorbs the scores: all keys get equal weight, as in the plain formula.
    *inputs, grad = attention_inputs(1, 2, 40, 70, 32, dtype)
    mask = torch.full((1, 1, 40, 70), number, device=DEVICE)
    ours = attend(inputs, grad, far_parameters(2), mask)
    torch.testing.assert_close(ours[0], inputs[2].mean(2, keepdim=True).expand_as(ours[0]))
    plain = plain_attend(inputs, grad, far_parameters(2), mask=mask)
    exact = plain_attend([t.float() for t in inputs], grad, far_parameters(2), mask=mask)
    assert_as_accurate(ours, plain, exact)


def test_attention_with_zero_parameters_equals_torch():
    *inputs, grad = attention_inputs(1, 2, 50, 50, 32)
    parameters = torch.zeros(2, 8, device=DEVICE)
    torch.testing.assert_close(
        attend(inputs, grad, parameters, causal=True)[0],
        F.scaled_dot_product_attention(*inputs, is_causal=True),
    )


def test_attention_applies_scale():
    *inputs, grad = attention_inputs(1, 2, 20, 20, 16)
    steep = monotone_parameters(2, -0.4, 0.5)
    for scale, parameters in ((0.3, far_parameters(2)), (-0.2, steep), (0.0, far_parameters(2))):
        ours = attend(inputs, grad, parameters, scale=scale)
        plain = plain_attend(inputs, grad, parameters, scale=scale)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_attention_negative_scale_equals_negated_query():
    *inputs, grad = attention_inputs(1, 2, 20, 30, 64, torch.float16)
    found = attend(inputs, grad, monotone_parameters(2), scale=-0.1)
    expected = attend([-inputs[0], *inputs[1:]], grad, monotone_parameters(2), scale=0.1)
    expected[1] = -expected[1]
    assert all(map(torch.equal, found, expected))


def test_attention_accepts_strided_inputs():
    *inputs, grad = attention_inputs(2, 2, 12, 12, 16)
    parameters = far_parameters(2)
    mask = torch.rand(1, 1, 12, 12, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.3
    expected = attend(inputs, grad, parameters, mask.expand(2, 2, 12, 12).contiguous())
    # (B, T, H, D) in memory, as projections leave it, and a last dimension that is strided.
    query = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    key = inputs[1].transpose(2, 3).contiguous().transpose(2, 3)
    turned = mask.mT.contiguous().mT
    ours = attend([query, key, inputs[2]], grad, parameters, turned)
    torch.testing.assert_close(ours, expected)
    assert ours[0].stride() == query.stride()
    # A gradient without strides, as of a sum.
    ones = torch.ones((), device=DEVICE).expand(2, 2, 12, 16)
    found = attend(inputs, ones, parameters)
    torch.testing.assert_close(found, attend(inputs, ones.clone(), parameters))
    # One row for all heads is the same row a head, and its gradient the sum of theirs.
    shared = attend(inputs, grad, parameters[:1], mask)
    repeated = attend(inputs, grad, parameters[:1].repeat(2, 1), mask)
    torch.testing.assert_close(shared[:4], repeated[:4])
    torch.testing.assert_close(shared[4], repeated[4].sum(0, keepdim=True))
    row = mask[:, :, :1]
    expanded = attend(inputs, grad, parameters, row.expand(1, 1, 12, 12))
    torch.testing.assert_close(attend(inputs, grad, parameters, row), expanded)


def test_attention_of_huge_scores_equals_plain_formula():
    *inputs, grad = attention_inputs(1, 1, 8, 8, 16)
    huge = [inputs[0] * 1e10, inputs[1] * 1e10, inputs[2]]
    for parameters in (
        far_parameters(1),
        monotone_parameters(1),
        monotone_parameters(1, -math.inf, math.inf),
    ):
        ours, plain = attend(huge, grad, parameters), plain_attend(huge, grad, parameters)
        torch.testing.assert_close(ours[0], plain[0])
        # A GPU's backward pass may round modulated scores otherwise than its forward pass, which
        # shows from scores of some 1e9 on: there are NaN in the gradients.
        assert DEVICE == "cuda" or all(t.isfinite().all() for t in ours)


def test_attention_is_deterministic():
    *inputs, grad = attention_inputs(1, 2, 70, 70, 32, torch.float16)
    runs = [
        attend(inputs, grad, far_parameters(2), causal=True, drop=(seed, 0.1)) for seed in (7, 7, 8)
    ]
    assert all(map(torch.equal, *runs[:2])) and not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("causal, masking", [(True, None), (False, "bias")])
def test_attention_dropout_matches_masked_probabilities(causal, masking):
    keys, share, seed = 64, 0.3125, 2**40 + 5
    query, key, _, grad = attention_inputs(2, 2, 40, keys, keys)
    parameters, mask = far_parameters(2), make_mask(masking, 2, 2, 40, keys)
    # With the identity as the values, the outputs are the probabilities.
    value = torch.eye(keys, device=DEVICE).expand(2, 2, keys, keys).contiguous()
    ours = attend((query, key, value), grad, parameters, mask, causal, drop=(seed, share))
    assert (attend((query, key, value), grad, parameters, drop=(0, 1.0))[0] == 0).all()
    query, key, variable, parameters = learned = [
        t.clone().requires_grad_() for t in (query, key, value, parameters)
    ]
    probs = plain_attention(query, key, value, parameters, mask, causal)
    seen = probs > 1e-30
    kept = (ours[0] != 0) & seen
    count = seen.sum().item()
    assert abs(kept.sum().item() / count - (1 - share)) < 4 * (share * (1 - share) / count) ** 0.5
    dense = probs * kept / (1 - share)
    torch.testing.assert_close(ours[0], dense)
    # Rows, keys, heads and batches draw each for themselves.
    flat = torch.where(seen, kept.float() - (1 - share), 0.0)
    for shift, dim in ((1, -1), (4, -1), (1, -2), (32, -2), (1, 1), (1, 0)):
        together = (flat * flat.roll(shift, dim)).sum() / count
        assert together.abs() < 4 * share * (1 - share) / count**0.5
    theirs = torch.autograd.grad(dense @ variable, learned, grad)
    torch.testing.assert_close(ours[1:4], list(theirs[:3]))
    torch.testing.assert_close(ours[4], theirs[3], rtol=1e-4, atol=1e-4)
