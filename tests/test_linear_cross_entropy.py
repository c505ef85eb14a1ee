"""linear_cross_entropy equals its formulas in each dtype and layout, within its memory limit."""

from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from random_inputs import far_modulator, random_scores
from torch.autograd import gradcheck
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from multimax_fairseq import (
    Modulator,
    linear_cross_entropy,
    linear_log_probs,
    scaled_dot_product_attention,
    symmetric_divergence,
)
from multimax_fairseq.mappings.softcap import SoftCap
from multimax_fairseq.ops import build, native
from multimax_fairseq.ops.best_outputs import best_scores


def loss_inputs(dtype=torch.float64, bias=True):
    features, weight = random_scores(7, 6, spread=1.0), random_scores(13, 6, seed=1, spread=1.0)
    target = torch.tensor([0, 12, 5, 1, 5, 1, 3])
    offsets = random_scores(13, seed=2) if bias else None
    return (
        features.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        target,
        offsets if offsets is None else offsets.to(dtype).requires_grad_(),
    )


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("modulated", [False, True])
def test_linear_cross_entropy_equals_reference(chunk_size, label_smoothing, modulated):
    features, weight, target, bias = loss_inputs()
    module = far_modulator() if modulated else None
    logits = (features @ weight.T + bias).detach()
    logits = module(logits).detach() if modulated else logits
    expected = reference.cross_entropy(logits.numpy(), target.numpy(), label_smoothing, 1)
    ours = linear_cross_entropy(
        features,
        weight,
        target,
        bias=bias,
        modulator=module,
        label_smoothing=label_smoothing,
        ignore_index=1,
        chunk_size=chunk_size,
    )
    np.testing.assert_allclose([t.item() for t in ours], expected, rtol=1e-12)


@pytest.mark.parametrize("reduction, modulated", [("sum", True), ("mean", False), ("none", True)])
def test_linear_cross_entropy_passes_gradcheck(reduction, modulated):
    features, weight, target, bias = loss_inputs()
    module = far_modulator() if modulated else None
    learned = list(module.parameters()) if modulated else []

    def loss(features, weight, bias, *_):
        return linear_cross_entropy(
            features,
            weight,
            target,
            bias=bias,
            modulator=module,
            label_smoothing=0.1,
            z_loss=0.2,
            maxsup=0.3,
            ignore_index=1,
            reduction=reduction,
            chunk_size=3,
        )[0]

    assert gradcheck(loss, (features, weight, bias, *learned))


def test_linear_cross_entropy_equals_torch_with_scaled_gradients():
    features, weight, target, _ = loss_inputs()
    plain = F.cross_entropy(features @ weight.T, target, reduction="mean", ignore_index=1)
    fused = linear_cross_entropy(features, weight, target, reduction="mean", ignore_index=1)[0]
    torch.testing.assert_close(fused, plain)
    for retain in (True, False):
        ours = torch.autograd.grad(fused * 3, (features, weight), retain_graph=retain)
        theirs = torch.autograd.grad(plain * 3, (features, weight), retain_graph=retain)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap, shift, width", [(0.7, 0, 0.7), (1.5, 0.6, 2.5)])
def test_linear_cross_entropy_of_a_soft_cap_equals_torch(dtype, cap, shift, width):
    features, weight, target, bias = loss_inputs(dtype)
    modulator = SoftCap(cap, shift, width, learned=True).to(dtype)
    loss, _ = linear_cross_entropy(
        features, weight, target, bias=bias, modulator=modulator, ignore_index=1
    )
    fixed, _ = linear_cross_entropy(
        features, weight, target, bias=bias, modulator=SoftCap(cap, shift, width), ignore_index=1
    )
    torch.testing.assert_close(fixed, loss, rtol=1e-6, atol=1e-6)
    inputs = (features, weight, bias, *modulator.parameters())
    found = [loss, *torch.autograd.grad(loss, inputs)]
    wide = [part.detach().double().requires_grad_() for part in inputs]
    *layer, log_cap, shift, log_width = wide
    logits = log_cap.exp() * ((F.linear(*layer) + shift) / log_width.exp()).tanh()
    loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=1)
    for ours, exact in zip(found, [loss, *torch.autograd.grad(loss, wide)], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


MODULATORS = {
    "softmax": lambda: None,
    "multimax": far_modulator,
    "soft-cap": lambda: SoftCap(0.7, 0.2, 1.5),
    "learned soft-cap": lambda: SoftCap(0.7, 0.2, 1.5, learned=True),
}


def log_probs_and_gradients(log_probs, inputs, modulator):
    """Return log-probabilities, entropy and the gradients of a sum weighted per row."""
    learned = [*inputs, *(modulator.parameters() if modulator else [])]
    outputs = log_probs(*inputs)
    factors = torch.linspace(-1, 2, len(outputs[0])).to(outputs[0].dtype)
    weighted = (outputs[0] * factors).sum() + (outputs[1] * factors.flip(0)).sum()
    return [*(t.detach() for t in outputs), *torch.autograd.grad(weighted, learned)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_size", [3, None])
@pytest.mark.parametrize("kind", MODULATORS)
def test_linear_log_probs_equals_torch(kind, chunk_size, dtype):
    features, weight, target, bias = loss_inputs()
    modulator = MODULATORS[kind]()

    def ours(features, weight, bias):
        options = {"bias": bias, "modulator": modulator, "ignore_index": 1}
        return linear_log_probs(features, weight, target, chunk_size=chunk_size, **options)

    def plain(features, weight, bias):
        logits = F.linear(features, weight, bias)
        log_probs = (modulator(logits) if modulator else logits).log_softmax(-1)
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
        log_probs = log_probs.gather(-1, target[:, None])[:, 0]
        return [t.masked_fill(target == 1, 0.0) for t in (log_probs, entropy)]

    narrow = [t.detach().to(dtype).requires_grad_() for t in (features, weight, bias)]
    found = log_probs_and_gradients(ours, narrow, modulator)
    wide = [t.detach().double().requires_grad_() for t in narrow]
    expected = log_probs_and_gradients(plain, wide, modulator)
    assert found[0].dtype == found[1].dtype == torch.promote_types(dtype, torch.float32)
    # bfloat16 rounds the logits, whose size is about 3.
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            *(one.double(), other.double()), rtol=tolerance, atol=tolerance * other.abs().max()
        )


def test_learned_soft_cap_has_finite_gradients_for_infinite_scores():
    modulator = SoftCap(0.7, 0.2, 1.5, learned=True)
    scores = torch.tensor([-torch.inf, 0.5, 2.0])
    modulator(scores).exp().sum().backward()
    found = [parameter.grad for parameter in modulator.parameters()]
    modulator.zero_grad()
    modulator(scores[1:]).exp().sum().backward()
    torch.testing.assert_close(found, [parameter.grad for parameter in modulator.parameters()])


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_linear_log_probs_ignores_excluded_classes(backend, monkeypatch):
    monkeypatch.setenv("MULTIMAX_BACKEND", backend)
    features, weight = random_scores(20, 16, spread=1.0), random_scores(400, 16, seed=1, spread=1.0)
    bias = random_scores(400, seed=2)
    bias[:256] = -torch.inf  # two tiles of classes
    target = torch.arange(380, 400)
    inputs = [t.float().requires_grad_() for t in (features, weight, bias)]
    found = log_probs_and_gradients(
        lambda features, weight, bias: linear_log_probs(features, weight, target, bias=bias),
        inputs,
        None,
    )
    kept = [t.detach().requires_grad_() for t in (features.float(), weight[256:].float())]
    expected = log_probs_and_gradients(
        lambda features, weight: linear_log_probs(
            features, weight, target - 256, bias=bias[256:].float()
        ),
        kept,
        None,
    )
    torch.testing.assert_close(found[:3], expected[:3], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[3][256:], expected[3], rtol=1e-4, atol=1e-5)
    assert (found[3][:256] == 0).all() and (found[4][:256] == 0).all()


@pytest.mark.parametrize("modulated", [False, True])
def test_linear_log_probs_passes_gradcheck(modulated):
    features, weight, target, bias = loss_inputs()
    module = far_modulator() if modulated else None
    learned = list(module.parameters()) if modulated else []

    def log_probs(features, weight, bias, *_):
        options = {"bias": bias, "modulator": module, "ignore_index": 1, "chunk_size": 3}
        return linear_log_probs(features, weight, target, **options)

    assert gradcheck(log_probs, (features, weight, bias, *learned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_z_loss_adds_the_squared_log_sum_exp(dtype):
    features, weight, target, bias = (
        t.to(dtype) if t.is_floating_point() else t for t in loss_inputs()
    )
    given = {"bias": bias, "modulator": far_modulator().to(dtype), "ignore_index": 1}
    loss, nll_loss = linear_cross_entropy(features, weight, target, z_loss=0.3, **given)
    without, same = linear_cross_entropy(features, weight, target, **given)
    logits = far_modulator().to(dtype)(F.linear(features, weight, bias))
    squares = logits.logsumexp(-1).square()[target != 1]
    assert torch.equal(nll_loss, same)
    torch.testing.assert_close(loss, without + 0.3 * squares.sum().to(loss.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_maxsup_adds_the_maximum_minus_the_mean(dtype):
    features, weight, target, bias = loss_inputs(dtype)
    given = {"bias": bias, "modulator": far_modulator().to(dtype), "ignore_index": 1}
    loss, nll_loss = linear_cross_entropy(features, weight, target, maxsup=0.3, **given)
    logits = given["modulator"](F.linear(features, weight, bias))[target != 1]
    expected = F.cross_entropy(logits, target[target != 1], reduction="sum")
    torch.testing.assert_close(nll_loss, expected.to(loss.dtype))
    expected = expected + 0.3 * (logits.amax(-1) - logits.mean(-1)).sum()
    torch.testing.assert_close(loss, expected.to(loss.dtype))
    learned = (features, weight, bias)
    found, right = (torch.autograd.grad(x, learned) for x in (loss, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_maxsup_shares_its_gradient_among_equal_maxima(backend, monkeypatch):
    """All 300 logits are 0, in more than two tiles of classes."""
    monkeypatch.setenv("MULTIMAX_BACKEND", backend)
    weight = torch.zeros(300, 16, requires_grad=True)
    bias = torch.zeros(300, requires_grad=True)
    given = {"bias": bias, "maxsup": 1.0}
    loss, nll_loss = linear_cross_entropy(torch.ones(5, 16), weight, torch.arange(5), **given)
    torch.testing.assert_close(loss, nll_loss)
    (found,) = torch.autograd.grad(loss, bias)
    expected = 5 * torch.full((300,), 1 / 300) - (torch.arange(300) < 5).float()
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("impossible", [128, 256])
def test_linear_cross_entropy_ignores_leading_excluded_classes(impossible):
    """One and two whole tiles of classes."""
    features, weight = random_scores(20, 16, spread=1.0), random_scores(400, 16, seed=1, spread=1.0)
    bias = random_scores(400, seed=2)
    bias[:impossible] = -torch.inf
    features, weight, bias = (t.float() for t in (features, weight, bias))
    target = torch.arange(380, 400)
    loss, _ = linear_cross_entropy(features, weight, target, bias=bias)
    expected = F.cross_entropy(F.linear(features, weight, bias), target, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)


def test_linear_cross_entropy_accepts_narrow_features():
    """The kernel stores scores in the weight's gradient if that is wide enough."""
    parts = [random_scores(5, 10, spread=1.0), random_scores(300, 10, seed=1, spread=1.0)]
    parts = [t.float().requires_grad_() for t in parts]
    target = torch.tensor([0, 299, 5, 128, 5])
    loss, _ = linear_cross_entropy(*parts, target)
    expected = F.cross_entropy(F.linear(*parts), target, reduction="sum")
    found = (torch.autograd.grad(x, parts) for x in (loss, expected))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_linear_cross_entropy_is_zero_if_no_target_counts():
    features, weight, target, bias = loss_inputs()
    loss, nll_loss = linear_cross_entropy(
        features,
        weight,
        torch.ones_like(target),
        bias=bias,
        modulator=far_modulator(),
        ignore_index=1,
    )
    loss.backward()
    assert loss == nll_loss == 0
    assert all((t.grad == 0).all() for t in (features, weight, bias))
    empty = linear_cross_entropy(features[:0], weight, target[:0])[0]
    assert empty == 0 and empty.requires_grad


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_mean_reduction_is_nan_if_no_target_counts(backend, monkeypatch):
    monkeypatch.setenv("MULTIMAX_BACKEND", backend)
    features, weight, target, _ = loss_inputs(torch.float32)
    module = far_modulator().float()
    ignored = torch.full_like(target, -100)
    assert F.cross_entropy(features @ weight.T, ignored).isnan()
    for found in (
        linear_cross_entropy(features, weight, ignored, modulator=module, reduction="mean")[0],
        symmetric_divergence(
            features,
            features.detach().roll(1, 0),
            weight,
            modulator=module,
            mask=ignored < 0,
            reduction="mean",
        ),
    ):
        grads = torch.autograd.grad(found, (features, weight, *module.parameters()))
        assert found.isnan() and all((grad == 0).all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_linear_cross_entropy_is_as_accurate_as_plain_per_dtype(dtype):
    exact = loss_inputs()
    module = far_modulator()

    def gradients(inputs, fused):
        features, weight, target, bias = inputs
        if fused:
            loss = linear_cross_entropy(
                features, weight, target, bias=bias, modulator=module, chunk_size=3
            )[0]
        else:
            loss = F.cross_entropy(
                module(F.linear(features, weight, bias)), target, reduction="sum"
            )
        return [loss, *torch.autograd.grad(loss, (features, weight, bias, *module.parameters()))]

    truth = gradients(exact, fused=False)
    low = [t if t.dtype == torch.int64 else t.detach().to(dtype).requires_grad_() for t in exact]
    for ours, plain, true in zip(gradients(low, True), gradients(low, False), truth, strict=True):
        assert ours.dtype == plain.dtype
        scale = true.abs().max() * torch.finfo(dtype).eps
        error, plain_error = ((t.double() - true).abs().max() for t in (ours, plain))
        assert error <= 2 * plain_error + 4 * scale


def test_linear_cross_entropy_refuses_wrong_options():
    features, weight, target, _ = loss_inputs()
    for options, part in (
        ({"reduction": "product"}, "product"),
        ({"label_smoothing": 1.0}, "1.0"),
        ({"chunk_size": 0}, "0"),
    ):
        with pytest.raises(ValueError, match=part):
            linear_cross_entropy(features, weight, target, **options)


@pytest.fixture
def mesh():
    """A device mesh of one process."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shard", [Replicate(), Shard(0), Shard(1)])
def test_operators_accept_distributed_tensors(mesh, shard):
    features, weight, target, bias = loss_inputs(torch.float32)
    module, found = Modulator(), []
    for make in (lambda t, _: t, lambda t, placement: distribute_tensor(t, mesh, [placement])):
        learned = [make(features.detach(), Replicate()), make(weight.detach(), shard)]
        learned = [t.detach().requires_grad_() for t in learned]
        targets, other, offsets = (
            make(t, Replicate()) for t in (target, features.detach().flip(0), bias.detach())
        )
        found.append([])
        for loss in (
            linear_cross_entropy(*learned, targets, bias=offsets, label_smoothing=0.1)[0],
            symmetric_divergence(learned[0], other, learned[1], bias=offsets),
        ):
            found[-1] += [loss, *torch.autograd.grad(loss, learned)]
        query = learned[0][None, None]
        attention = scaled_dot_product_attention(query, query, query, normalizer="softmax")
        found[-1] += [attention, module(learned[0]), best_scores(learned[0], 2)[0]]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other.full_tensor(), one)


@pytest.mark.skipif(native.library() is None, reason="needs the kernels in C++")
@pytest.mark.parametrize("freed", ["features", "weight", "bias", "parameters"])
def test_output_scores_refuses_tensors_with_freed_memory(freed):
    """FSDP frees the weights of a sharded layer outside of its forward pass."""
    features, weight, _, bias = loss_inputs(torch.float32)
    given = {"features": features, "weight": weight, "bias": bias, "parameters": torch.zeros(1, 8)}
    given[freed].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{freed} has no memory: it was freed"):
        torch.ops.multimax_fairseq.output_scores(*(t.detach() for t in given.values()))


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_linear_cross_entropy_supports_batched_gradients(backend, monkeypatch):
    """torch.autograd.functional.jacobian(vectorize=True) does this."""
    monkeypatch.setenv("MULTIMAX_BACKEND", backend)
    features, weight, target, _ = loss_inputs(torch.float32)
    module = far_modulator().float()
    learned = (features, weight, *module.parameters())
    several = torch.tensor([1.0, -2.0, 0.5])
    for found in (
        linear_cross_entropy(features, weight, target, modulator=module)[0],
        module(features).sum(),
    ):
        ask = {"retain_graph": True, "allow_unused": True}
        at_once = torch.autograd.grad(found, learned, several, is_grads_batched=True, **ask)
        for n, factor in enumerate(several):
            each = torch.autograd.grad(found, learned, factor, **ask)
            for one, other in zip(each, at_once, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(other[n], one)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in build.MARCH,
    reason="no CPU kernels for this processor: plain PyTorch is used",
)
@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages in this system"
)
@pytest.mark.parametrize("tokens", [1, 600])
def test_linear_cross_entropy_puts_large_gradients_in_huge_pages(tokens):
    """Reads the flag of the memory mapping from /proc."""
    weight = torch.zeros(2**14, 256, requires_grad=True)  # 16 MiB
    features, target = torch.zeros(tokens, 256), torch.zeros(tokens, dtype=torch.int64)
    (grad,) = torch.autograd.grad(linear_cross_entropy(features, weight, target)[0], weight)
    middle, flags = grad.data_ptr() + grad.nbytes // 2, []
    for line in Path("/proc/self/smaps").read_text(encoding="ascii", errors="replace").splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
        elif first == "VmFlags:" and begin <= middle < end:
            flags = rest
    assert "hg" in flags
