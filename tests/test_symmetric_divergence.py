"""symmetric_divergence equals its formula in each dtype and layout, within its memory limit."""

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from random_inputs import far_modulator, random_scores
from torch.autograd import gradcheck

from multimax_fairseq import Modulator, symmetric_divergence

pytestmark = pytest.mark.long

MASK = torch.tensor([False, True, False, False, True, False, False])


def inputs(dtype=torch.float64, apart=1.0):
    features = random_scores(7, 6, spread=1.0)
    other = features + random_scores(7, 6, seed=3, spread=1.0) * apart
    weight, bias = random_scores(13, 6, seed=1, spread=1.0), random_scores(13, seed=2)
    return [t.to(dtype).requires_grad_() for t in (features, other, weight, bias)]


def divergence(features, other, weight, bias, **options):
    return symmetric_divergence(features, other, weight, bias=bias, **options)


def wide(scores):
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def written_out(features, other, weight, bias, modulator=None):
    """Return the divergence by the docstring's formula, without a mask."""
    log_p, log_q = (
        (modulator or wide)(F.linear(h, weight, bias)).log_softmax(-1) for h in (features, other)
    )
    options = {"log_target": True, "reduction": "sum"}
    return (F.kl_div(log_q, log_p, **options) + F.kl_div(log_p, log_q, **options)) / 2


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
@pytest.mark.parametrize("modulated", [False, True])
def test_symmetric_divergence_equals_reference(chunk_size, modulated):
    features, other, weight, bias = inputs()
    module = far_modulator() if modulated else None
    logits = [h @ weight.T + bias for h in (features, other)]
    logits = [(module(x) if modulated else x).detach().numpy() for x in logits]
    expected = reference.symmetric_divergence(*logits)
    options = {"modulator": module, "chunk_size": chunk_size}
    given = (features, other, weight, bias)
    each = divergence(*given, reduction="none", **options)
    np.testing.assert_allclose(each.detach(), expected, rtol=1e-12)
    kept = expected[~MASK.numpy()]
    for reduction, total in (("sum", kept.sum()), ("mean", kept.mean())):
        ours = divergence(*given, mask=MASK, reduction=reduction, **options)
        np.testing.assert_allclose(ours.item(), total, rtol=1e-12)
        with torch.no_grad():  # takes another path
            again = divergence(*given, mask=MASK, reduction=reduction, **options)
        torch.testing.assert_close(again, ours.detach())
    shaped = divergence(
        *(t.unflatten(0, (7, 1)) for t in given[:2]), *given[2:], reduction="none", **options
    )
    torch.testing.assert_close(shaped, each[:, None])


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("modulated", [False, True])
def test_symmetric_divergence_gradients_pass_gradcheck(reduction, modulated):
    module = far_modulator() if modulated else None
    learned = list(module.parameters()) if modulated else []
    options = {"mask": MASK, "modulator": module, "reduction": reduction, "chunk_size": 3}
    assert gradcheck(lambda *t: divergence(*t[:4], **options), (*inputs(), *learned))


@pytest.mark.parametrize("modulated", [False, True])
def test_symmetric_divergence_equals_plain_with_gradients(modulated):
    given, module = inputs(), far_modulator() if modulated else None
    wanted = [*given, *(module.parameters() if modulated else [])]
    plain, ours = written_out(*given, module), divergence(*given, modulator=module)
    torch.testing.assert_close(ours, plain)
    for retain in (True, False):
        pair = (torch.autograd.grad(x * 3, wanted, retain_graph=retain) for x in (ours, plain))
        torch.testing.assert_close(*pair)


@pytest.mark.parametrize("modulated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_symmetric_divergence_is_as_accurate_as_plain(dtype, modulated):
    module = far_modulator() if modulated else None

    def found(function, given, **options):
        value = function(*given, modulator=module, **options)
        learned = list(module.parameters()) if modulated else []
        return [value, *torch.autograd.grad(value, (*given, *learned))]

    exact = inputs()
    truth = found(written_out, exact)
    low = [t.detach().to(dtype).requires_grad_() for t in exact]
    results = found(divergence, low, chunk_size=3), found(written_out, low), truth
    for ours, plain, true in zip(*results, strict=True):
        scale = true.abs().max() * torch.finfo(dtype).eps
        error, plain_error = ((t.double() - true).abs().max() for t in (ours, plain))
        assert error <= 2 * plain_error + 4 * scale


def test_symmetric_divergence_accepts_mixed_dtypes_in_autocast():
    features, other, weight, bias = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = divergence(features, other.bfloat16(), weight, bias)
    exact = divergence(features, other, weight, bias)
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0)


def test_symmetric_divergence_is_zero_for_equal_inputs():
    """Also for nearly equal inputs, where a difference of two sums would be rounding noise."""
    features, _, weight, bias = inputs(torch.float32)
    same = divergence(features, features, weight, bias)
    assert same == 0
    assert all((g == 0).all() for g in torch.autograd.grad(same, (features, weight, bias)))
    for apart in (1e-6, 1e-4, 1e-2):
        near = inputs(torch.float32, apart)
        ours = divergence(*near, reduction="none")
        true = divergence(*(t.double() for t in near), reduction="none")
        assert (ours >= 0).all()
        torch.testing.assert_close(ours.double(), true, rtol=1e-6 / apart, atol=0)


def test_symmetric_divergence_ignores_masked_rows():
    features, other, weight, bias = inputs()
    kept = divergence(features[~MASK], other[~MASK], weight, bias)
    with torch.no_grad():
        other[MASK] = 100
    ours = divergence(features, other, weight, bias, mask=MASK)
    torch.testing.assert_close(ours, kept)
    by_features, by_other = torch.autograd.grad(ours, (features, other))
    for gradient in (by_features, by_other):
        assert (gradient[MASK] == 0).all() and (gradient[~MASK] != 0).all()
    none = divergence(features, other, weight, bias, mask=torch.ones_like(MASK))
    none.backward()
    assert none == 0 and all((t.grad == 0).all() for t in (features, other, weight, bias))
    assert divergence(features[:0], other[:0], weight, bias) == 0


def test_symmetric_divergence_is_finite_for_distant_inputs():
    """Words that are likely in one distribution and have probability 0 in the other."""
    features, other = torch.tensor([[200.0]]), torch.tensor([[-200.0]])
    weight = torch.tensor([[1.0], [-1.0]]).requires_grad_()
    ours = symmetric_divergence(features, other, weight)
    # Each has one certain word and gives the other's word exp(-400).
    assert ours.item() == pytest.approx(400)
    ours.backward()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("modulated", [False, True])
def test_symmetric_divergence_never_holds_all_logits(modulated):
    count, classes = 1024, 2000
    features, other, weight = (
        torch.randn(n, 8, requires_grad=True) for n in (count, count, classes)
    )
    module = Modulator() if modulated else None
    options = {"chunk_size": 16, "modulator": module}

    def peak(function):
        """Return the peak memory in bytes of forward and backward pass."""
        with torch.profiler.profile(profile_memory=True) as profiler:
            function().backward()
        events = profiler.profiler.kineto_results.events()
        events = sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns())
        return np.cumsum([e.nbytes() for e in events]).max()

    one = 4 * count * classes
    assert peak(lambda: written_out(features, other, weight, None, module)) > 2 * one
    assert peak(lambda: symmetric_divergence(features, other, weight, **options)) < one / 4
