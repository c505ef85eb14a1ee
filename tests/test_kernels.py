"""The compiled CPU kernels are as accurate as plain PyTorch for each shape, mask and build."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_as_accurate
from commands import run

from multimax_fairseq import (
    Modulator,
    linear_cross_entropy,
    linear_log_probs,
    scaled_dot_product_attention,
)
from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.softcap import SoftCap
from multimax_fairseq.ops import backend, build, cross_entropy
from multimax_fairseq.ops.attention import windows
from multimax_fairseq.ops.best_outputs import fused_scores
from multimax_fairseq.ops.modulator import tails, tails_operator

CAPABILITY = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(
    CAPABILITY not in build.MARCH, reason=f"no CPU kernels for {CAPABILITY}: plain PyTorch is used"
)


def some_modulator(heads=None, **options):
    """Return a modulator far from the identity, with other values for each head."""
    torch.manual_seed(3)
    module = Modulator(num_heads=heads, init_std=0.2, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "coefficient" in name and module.order == 2:
                parameter[..., 1] *= 0.2
    return module


def attention_inputs(batch, heads, queries, keys, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, n, size) for n in (queries, keys, keys, queries)]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return [2 * query, key, value], grad


def attend(dtype, parts, grad, modulator, **options):
    """Return the output and the gradients of query, key, value, per-head numbers and parameters."""
    parts = [part.detach().to(dtype).requires_grad_() for part in parts]
    wide = torch.promote_types(dtype, torch.float32)
    numbers = {n: t for n, t in options.items() if n in ("sink", "length_scale", "outer_scale")}
    numbers = {n: t.detach().to(wide).requires_grad_() for n, t in numbers.items()}
    learned = [] if modulator is None else list(modulator.to(wide).parameters())
    options = {"normalizer": "softmax" if modulator is None else "multimax"} | options | numbers
    output = scaled_dot_product_attention(*parts, modulator=modulator, **options)
    assert output.dtype == dtype
    grads = torch.autograd.grad(output, [*parts, *numbers.values(), *learned], grad.to(dtype))
    single = 3 + len(numbers)
    found = [output.detach(), *grads[:single]]
    return found + ([torch.cat([g.flatten() for g in grads[single:]])] if learned else [])


def assert_attention_as_accurate(
    shape, modulator, factor=1.0, mask=None, allowed=None, dtype=torch.float32, **options
):
    """Check accuracy over several draws, since eight parameters have noisy rounding errors.

    `mask` is the kernels' form of the bool mask `allowed`. Returns output and gradients of the
    last draw.
    """
    kinds = [(dtype, "cpp"), (dtype, "plain"), (torch.float64, "plain")]
    found = []
    for precision, kind in kinds:
        draws = []
        for seed in range(12):
            (query, *rest), grad = attention_inputs(*shape, seed=seed)
            parts = [part.to(dtype) for part in (factor * query, *rest)]
            options |= {"backend": kind, "attn_mask": mask if kind == "cpp" else allowed}
            draws.append(attend(precision, parts, grad.to(dtype), modulator, **options))
        found.append([torch.cat(parts) for parts in zip(*draws, strict=True)])
    assert_as_accurate(*found)
    return [part.chunk(12)[-1] for part in found[0]]


@pytest.mark.parametrize(
    "shape, causal",
    [
        ((1, 2, 70, 70, 64), True),
        ((2, 2, 33, 50, 32), False),
        ((1, 2, 130, 17, 80), True),
        ((2, 1, 5, 40, 128), False),
        ((3, 2, 1, 9, 48), False),
        ((1, 1, 16, 600, 20), True),
        ((1, 1, 65, 1030, 16), False),
    ],
    ids=str,
)
def test_attention_is_as_accurate_as_plain_pytorch(kernels, shape, causal):
    assert_attention_as_accurate(shape, some_modulator(), is_causal=causal)


@pytest.mark.parametrize("options", [{"order": 1}, {"terms": "low"}, {"terms": "high"}, None])
def test_attention_accepts_modulators_with_fewer_terms(kernels, options):
    modulator = None if options is None else some_modulator(**options)
    assert_attention_as_accurate((2, 2, 20, 30, 32), modulator)


def test_attention_applies_one_modulator_per_head(kernels):
    assert_attention_as_accurate((2, 3, 20, 30, 32), some_modulator(heads=3))


BASELINES = {
    "sink": {"sink": torch.tensor([0.7, -30.0, 4.0])[:, None, None]},
    "shared sink": {"normalizer": "sink", "sink": torch.full((1, 1, 1), 1.2)},
    "softmax1": {},
    "softcap": {"cap": 0.7, "shift": 0.3, "width": 0.9},
    "ssmax": {"length_scale": torch.tensor([0.5, 0.2, -0.1])[:, None, None]},
    "multimax": {"sink": torch.tensor([0.7, -torch.inf, 2.0])[:, None, None]},
    "length scale": {
        "normalizer": "multimax",
        "outer_scale": torch.tensor([0.5, 0.2, -0.1])[:, None, None],
    },
    "monotone length scale": {"normalizer": "multimax", "outer_scale": torch.full((1, 1, 1), 0.3)},
    "learned soft-cap": {"normalizer": "multimax"},
}
MODULATORS = {
    "multimax": lambda: some_modulator(3),
    "length scale": lambda: some_modulator(3),
    "monotone length scale": lambda: some_modulator(monotone=True),
    "learned soft-cap": lambda: SoftCap(0.7, 0.3, 0.9, learned=True),
}


NORMAL, LONG, SHORT = (2, 3, 40, 50, 32), (2, 3, 70, 600, 16), (2, 3, 3, 9, 32)


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        *((name, NORMAL, torch.float32) for name in BASELINES),
        ("sink", LONG, torch.float32),
        ("ssmax", LONG, torch.float32),
        ("length scale", LONG, torch.float32),
        ("length scale", SHORT, torch.bfloat16),
        ("sink", SHORT, torch.bfloat16),
        ("multimax", SHORT, torch.float32),
        ("softcap", NORMAL, torch.bfloat16),
        ("ssmax", NORMAL, torch.float16),
        ("multimax", NORMAL, torch.float16),
        ("shared sink", NORMAL, torch.bfloat16),
    ],
)
def test_attention_with_sink_or_length_scale_is_as_accurate(kernels, name, shape, dtype):
    modulator = MODULATORS[name]() if name in MODULATORS else None
    options = {"normalizer": name} | BASELINES[name]
    keys = torch.arange(shape[3])
    padding = keys < torch.tensor([shape[3], 5])[:, None, None, None]
    rows = torch.rand(shape[2], shape[3], generator=torch.Generator().manual_seed(1)) < 0.6
    rows[0] = False
    for allowed, causal in ((padding, True), (rows, False), (None, True)):
        mask = None if allowed is None else allowed
        found = assert_attention_as_accurate(
            shape, modulator, 1.0, mask, allowed, dtype, is_causal=causal, **options
        )
        assert all(part.isfinite().all() for part in found)
        with torch.no_grad():  # few queries have their own kernel
            (query, *rest), _ = attention_inputs(*shape)
            backends = {
                kind: scaled_dot_product_attention(
                    *(query[:, :, :3], *rest), modulator=modulator, backend=kind, is_causal=causal,
                    attn_mask=allowed[:3] if allowed is rows else allowed, **options,
                )
                for kind in ("cpp", "plain")
            }  # fmt: skip
        torch.testing.assert_close(backends["cpp"], backends["plain"], rtol=1e-4, atol=1e-5)


def test_attention_propagates_nan_and_inf_sinks(kernels):
    parts, _ = attention_inputs(1, 3, 20, 30, 16)
    for wrong in (torch.nan, torch.inf):
        sink = torch.tensor([0.0, wrong, 0.0])[:, None, None]
        for queries in (20, 2):
            for grad in (True, False):
                query = parts[0][:, :, :queries].clone().requires_grad_(grad)
                for kind in ("cpp", "plain"):
                    out = scaled_dot_product_attention(
                        query, *parts[1:], normalizer="sink", sink=sink, backend=kind
                    )
                    assert out[:, 1].isnan().all() and out[:, ::2].isfinite().all()


MASKS = {
    "padding on the right": lambda s, t: s < torch.tensor([30, 1, 17])[:, None, None, None],
    "padding on the left": lambda s, t: s >= torch.tensor([0, 29, 17])[:, None, None, None],
    "future": lambda s, t: s <= t,
    "window": lambda s, t: (s <= t) & (s > t - 5),
    "both": lambda s, t: (s <= t) & (s < torch.tensor([30, 1, 17])[:, None, None, None]),
    "nothing left": lambda s, t: (s < 7) & (t > 3) & (torch.arange(3) != 1)[:, None, None, None],
    "nothing at first": lambda s, t: (s < 7) & (2 * t > len(t)),
    "holes": lambda s, t: (s + t) % 3 > 0,
    "a head": lambda s, t: s < torch.tensor([20, 25])[:, None, None],
    "any windows": lambda s, t: (s >= 97 * t % 64) & (s < 61 * t % len(t)),
    "fewer and fewer": lambda s, t: s < len(t) - t,
}


@pytest.mark.parametrize(
    "name, kind",
    [
        pair
        for number, name in enumerate(MASKS)
        for pair in ((name, "bool"), (name, ("long", "float", "transposed")[number % 3]))
    ],
)
def test_attention_reads_every_mask(kernels, name, kind):
    length = 100 if kind == "long" else 30
    allowed = MASKS[name](torch.arange(length), torch.arange(length)[:, None])
    mask = allowed
    if kind == "float":
        mask = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
    elif kind == "transposed":
        mask = allowed.expand(*allowed.shape[:-2], length, length).mT.contiguous().mT
    fast = assert_attention_as_accurate(
        (3, 2, length, length, 16), some_modulator(), mask=mask, allowed=allowed
    )
    nothing = ~allowed.expand(3, 2, length, length).any(-1)
    assert (fast[0][nothing] == 0).all() and (fast[1][nothing] == 0).all()


FLOATS = {
    "finite": lambda s, t: (s - t) / 10.0,
    "a head": lambda s, t: -torch.tensor([0.1, 0.5])[:, None, None] * (t - s).abs(),
    "a sentence": lambda s, t: torch.randn(3, 1, 1, 30, generator=torch.Generator().manual_seed(1)),
    "as BERT": lambda s, t: -1e4 * (s > torch.tensor([30, 3, 17])[:, None, None, None]),
    "finite and infinite": lambda s, t: torch.where((s + 2 * t) % 5 > 1, s / 20, -torch.inf),
    "nothing left": lambda s, t: torch.where(t > 4, 0.3, -torch.inf) + 0 * s,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", FLOATS)
def test_attention_adds_float_masks_after_the_modulator(kernels, name, causal):
    mask = FLOATS[name](torch.arange(30), torch.arange(30)[:, None])
    fast = assert_attention_as_accurate(
        (3, 2, 30, 30, 16), some_modulator(), mask=mask, allowed=mask, is_causal=causal
    )
    assert all(part.isfinite().all() for part in fast)
    nothing = (mask == -torch.inf).expand(3, 2, 30, 30).all(-1)
    assert (fast[0][nothing] == 0).all() and (fast[1][nothing] == 0).all()


def test_attention_excludes_keys_with_large_negative_masks():
    parts, _ = attention_inputs(2, 2, 9, 9, 16)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    for seed in range(20):
        torch.manual_seed(seed)
        module = Modulator(init_std=0.2)
        for kind in ("cpp", "plain"):
            options = {"modulator": module, "backend": kind}
            expected = scaled_dot_product_attention(*parts, attn_mask=allowed, **options)
            for number in (-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf):
                mask = torch.zeros(9, 9).masked_fill(~allowed, number)
                ours = scaled_dot_product_attention(*parts, attn_mask=mask, **options)
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_windows_finds_ranges_and_reports_irregular_masks():
    future = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
    padding = torch.tensor([[False] * 4, [True, True, False, False]])[:, None, None]
    for kind in (future.expand(2, 1, 4, 4), future[None, None]):
        starts, ends, more = windows(2, 4, 4, kind, False)
        assert not more and starts.tolist() == [[0] * 4] * 2 and ends.tolist() == [[1, 2, 3, 4]] * 2
    starts, ends, more = windows(2, 4, 4, padding, True)
    assert not more and starts.tolist() == [[0] * 4, [2] * 4]
    assert ends.tolist() == [[1, 2, 3, 4], [2, 2, 3, 4]]
    starts, ends, more = windows(
        2, 4, 4, torch.tensor([False, True, False, False])[(None,) * 3], True
    )
    assert more and starts.tolist() == [[0] * 4] * 2 and ends.tolist() == [[1, 2, 3, 4]] * 2
    assert windows(2, 4, 4, torch.full((2, 1, 4, 4), 0.5), False)[2]
    assert windows(2, 4, 4, torch.zeros(1, 2, 4, 4), False) == (None, None, True)
    assert windows(2, 4, 4, None, False) == (None, None, False)


@pytest.mark.parametrize("heads", [None, 3])
def test_attention_with_monotone_modulator_is_as_accurate(kernels, heads):
    module = some_modulator(heads, monotone=True)
    with torch.no_grad():
        module.low_coefficient[..., 1] = 0.2
        module.high_coefficient[..., 1] = -0.3
    plain = some_modulator(heads)
    plain.load_state_dict(module.state_dict())
    for causal in (False, True):
        assert_attention_as_accurate((2, 3, 40, 30, 16), module, factor=3.0, is_causal=causal)
    (query, *rest), grad = attention_inputs(2, 3, 40, 30, 16)
    parts = [3 * query, *rest]
    ours, theirs = (attend(torch.float32, parts, grad, m) for m in (module.float(), plain))
    assert not torch.allclose(ours[0], theirs[0], atol=1e-2), "no score lies beyond a turn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_as_accurate_in_half_precision(kernels, dtype):
    parts, grad = attention_inputs(2, 2, 40, 50, 32)
    found = []
    for kind, precision in (("cpp", dtype), ("plain", dtype), ("plain", torch.float64)):
        module = some_modulator()
        rounded = [part.to(dtype).to(precision).requires_grad_() for part in parts]
        output = scaled_dot_product_attention(*rounded, modulator=module, backend=kind)
        grads = torch.autograd.grad(
            output, [*rounded, *module.parameters()], grad.to(dtype).to(precision)
        )
        assert output.dtype == precision
        found.append([output.detach(), *grads[:3], torch.cat([g.flatten() for g in grads[3:]])])
    assert_as_accurate(*found)


def test_attention_accepts_any_layout_and_extreme_scores(kernels):
    parts, grad = attention_inputs(2, 3, 40, 40, 32)
    strided = [part.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for part in parts]
    strided[1] = parts[1].mT.contiguous().mT
    for ours, theirs in zip(
        attend(torch.float32, strided, grad, some_modulator(), backend="cpp"),
        attend(torch.float32, parts, grad, some_modulator(), backend="cpp"),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert_attention_as_accurate((2, 3, 40, 40, 32), None, factor=60.0)


def test_attention_is_deterministic_for_any_number_of_threads(kernels):
    parts, grad = attention_inputs(3, 3, 100, 100, 32)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            found.append(attend(torch.float32, parts, grad, some_modulator(), backend="cpp"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_attention_dropout_uses_one_mask_in_both_passes(kernels):
    size = 64
    parts, grad = attention_inputs(2, 2, 50, size, size)
    modulator, dropout = some_modulator(), 0.3

    def dropped(value):
        torch.manual_seed(5)
        return scaled_dot_product_attention(
            *parts[:2], value, modulator=modulator, dropout_p=dropout, backend="cpp"
        )

    # With the identity for values, the output is the probabilities.
    identity = torch.eye(size).expand(2, 2, size, size).contiguous()
    kept = dropped(identity) != 0
    share = kept.float().mean().item()
    assert abs(share - 0.7) < 4 * (0.3 * 0.7 / kept.numel()) ** 0.5
    # Each row, column, head and sentence has the same dropped fraction.
    for dims in ((0, 1, 2), (0, 1, 3)):
        assert (kept.float().mean(dims) - 0.7).abs().max() < 0.16
    assert not torch.equal(kept[0, 0], kept[0, 1]) and not torch.equal(kept[0, 0], kept[1, 0])
    torch.manual_seed(6)
    other = scaled_dot_product_attention(
        *parts[:2], identity, modulator=modulator, dropout_p=dropout, backend="cpp"
    )
    assert not torch.equal(kept, other != 0)

    def reference(dtype):
        query, key, value = (part.detach().to(dtype).requires_grad_() for part in parts)
        module = some_modulator().to(dtype)
        probs = module(query @ key.mT / size**0.5).softmax(-1)
        output = (probs * kept / (1 - dropout)) @ value
        learned = [query, key, value, *module.parameters()]
        return [output, *torch.autograd.grad(output, learned, grad.to(dtype))]

    query, key, value = parts = [part.requires_grad_() for part in parts]
    output = dropped(value)
    fast = [output, *torch.autograd.grad(output, [*parts, *modulator.parameters()], grad)]
    assert_as_accurate(fast, reference(torch.float32), reference(torch.float64))


# ------------------------------------------------------------------------------ output loss


def loss_inputs(tokens, classes, size, bias=True):
    generator = torch.Generator().manual_seed(tokens)
    features = torch.randn(tokens, size, generator=generator)
    weight = torch.randn(classes, size, generator=generator) * 2 / size**0.5
    offset = torch.randn(classes, generator=generator) if bias else None
    target = torch.randint(classes, (tokens,), generator=generator)
    target[::5] = 1
    return features, weight, offset, target


def losses(dtype, parts, modulator, kind, monkeypatch, **options):
    """Return the loss and the gradients of features, weight, bias and all parameters."""
    *tensors, target = parts
    learned = [t.detach().to(dtype).requires_grad_() for t in tensors if t is not None]
    parameters = [] if modulator is None else list(modulator.to(dtype).parameters())
    monkeypatch.setenv("MULTIMAX_BACKEND", kind)
    loss, nll = linear_cross_entropy(
        *learned[:2],
        target,
        bias=learned[2] if len(learned) > 2 else None,
        modulator=modulator,
        ignore_index=1,
        **options,
    )
    weights = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view_as(loss)
    grads = torch.autograd.grad((loss * weights).sum(), [*learned, *parameters])
    found = [loss.detach(), nll, *grads[: len(learned)]]
    rest = grads[len(learned) :]
    return found + ([torch.cat([g.flatten() for g in rest])] if parameters else [])


@pytest.mark.parametrize(
    "tokens, classes, size, chunk, smoothing, bias, options, reduction",
    [
        (40, 1000, 64, 16, 0.1, True, {}, "none"),
        (100, 333, 48, None, 0.0, False, {}, "mean"),
        (7, 50, 20, 64, 0.1, False, None, "none"),
        (300, 2000, 128, None, 0.0, False, {"order": 1}, "sum"),
        (50, 130, 33, 17, 0.2, True, {"terms": "high"}, "mean"),
        # All scores fit into the memory of the weight's gradient.
        (64, 300, 64, None, 0.1, True, {"monotone": True}, "sum"),
        (500, 200, 512, None, 0.0, False, {}, "none"),
        (30, 1000, 32, 32, 0.2, True, None, "sum"),
    ],
)
def test_linear_cross_entropy_is_as_accurate_as_plain(
    kernels, monkeypatch, tokens, classes, size, chunk, smoothing, bias, options, reduction
):
    parts = loss_inputs(tokens, classes, size, bias)
    modulator = None if options is None else some_modulator(**options)
    settings = {"chunk_size": chunk, "label_smoothing": smoothing, "reduction": reduction}
    settings |= {"z_loss": 0.02, "maxsup": 0.3} if bias else {}
    kinds = [(torch.float32, "cpp"), (torch.float32, "plain"), (torch.float64, "plain")]
    assert_as_accurate(
        *(losses(dtype, parts, modulator, kind, monkeypatch, **settings) for dtype, kind in kinds)
    )


def test_linear_cross_entropy_ignores_chunks_threads_and_order(kernels, monkeypatch):
    parts = loss_inputs(200, 1000, 32)
    modulator = some_modulator()
    first = losses(torch.float32, parts, modulator, "cpp", monkeypatch)
    again = losses(torch.float32, parts, modulator, "cpp", monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    features, weight, bias, target = parts
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    others = [losses(torch.float32, parts, modulator, "cpp", monkeypatch, chunk_size=48)]
    shuffled = losses(
        torch.float32, (features[order], weight, bias, target[order]), modulator, "cpp", monkeypatch
    )
    shuffled[2] = shuffled[2][order.argsort()]
    try:
        torch.set_num_threads(3 - min(threads, 2))
        others += [shuffled, losses(torch.float32, parts, modulator, "cpp", monkeypatch)]
    finally:
        torch.set_num_threads(threads)
    for other in others:
        for ours, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max())


def test_linear_cross_entropy_computes_needed_gradients_only(kernels, monkeypatch):
    monkeypatch.setenv("MULTIMAX_BACKEND", "cpp")
    features, weight, bias, target = loss_inputs(20, 40, 16)
    features.requires_grad_()
    with torch.no_grad():
        loss, _ = linear_cross_entropy(features, weight, target, bias=bias)
    expected, _ = linear_cross_entropy(features, weight, target, bias=bias)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    assert weight.grad is None and features.grad.abs().sum() > 0
    parts = (features.detach(), weight, bias, torch.full_like(target, 1))
    for found in losses(torch.float32, parts, some_modulator(), "cpp", monkeypatch):
        assert (found == 0).all()
    for wrong in (40, 1000):
        with pytest.raises(ValueError, match=f"target {wrong} is neither one of 40 classes"):
            linear_cross_entropy(features, weight, target.clone().fill_(wrong))


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_log_probs])
@pytest.mark.parametrize("bound, needs_weight", [(1.4, True), (0.2, False)])
def test_output_loss_of_few_tokens_allocates_no_logits(
    kernels, monkeypatch, bound, needs_weight, function
):
    """Holds with at most as many tokens as features, and without gradients."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    monkeypatch.setenv("MULTIMAX_BACKEND", "cpp")
    features, weight, _, target = loss_inputs(60, 200_000, 64)  # beyond what malloc keeps

    def kilobytes(name):
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if name in line).split()[1])

    def loss():
        return sum(map(torch.sum, function(features, weight, target, modulator=some_modulator())))

    loss()
    weight.requires_grad_(needs_weight)
    Path("/proc/self/clear_refs").write_text("5")
    before = kilobytes("VmRSS")
    with torch.set_grad_enabled(needs_weight):
        found = loss()
    if needs_weight:
        found.backward()
    assert kilobytes("VmHWM") - before < bound * weight.numel() * 4 / 1024


def test_linear_cross_entropy_ignores_classes_with_infinite_bias(kernels, monkeypatch):
    monkeypatch.setenv("MULTIMAX_BACKEND", "cpp")
    features, weight, bias, target = loss_inputs(20, 400, 16)
    bias[128:256] = -torch.inf  # a whole tile
    target = target % 128
    for module, reduction in (
        *((None, "sum"), (some_modulator(), "none")),
        (some_modulator(monotone=True), "sum"),
    ):
        parts = [t.clone().requires_grad_() for t in (features, weight, bias)]
        options = {"bias": parts[2], "modulator": module, "reduction": reduction}
        loss, _ = linear_cross_entropy(*parts[:2], target, **options)
        logits = F.linear(*(t.detach().double() for t in parts))
        logits = logits if module is None else module.double()(logits)
        expected = F.cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(loss.sum(), parts)
        assert all(grad.isfinite().all() for grad in grads)
        assert (grads[1][128:256] == 0).all() and (grads[2][128:256] == 0).all()


def test_linear_cross_entropy_skips_gradients_under_no_grad(monkeypatch):
    features, weight, bias, target = loss_inputs(20, 40, 16)
    parameters = [torch.nn.Parameter(t) for t in (weight, bias)]
    formed = []
    plain, compiled = cross_entropy._plain_parts, cross_entropy._run_cpp

    def noted(function):
        def call(*inputs):
            formed.append(inputs[1] is not None)
            return function(*inputs)

        return call

    monkeypatch.setattr(cross_entropy, "_run_cpp", noted(compiled))
    monkeypatch.setattr(cross_entropy, "_plain_parts", noted(plain))
    for kind in ("cpp", "plain"):
        monkeypatch.setenv("MULTIMAX_BACKEND", kind)
        for reduction in ("sum", "none"):
            with torch.no_grad():
                linear_cross_entropy(
                    features, parameters[0], target, bias=parameters[1], reduction=reduction
                )
    assert formed == [False] * 4


def test_kernels_bound_memory_over_many_sizes(tmp_path):
    """oneDNN caches code for each size, so the sizes must be few or the kernel our own."""
    script = """
import resource, sys, torch
from multimax_fairseq import (
    NORMALIZERS,
    Modulator,
    linear_cross_entropy,
    scaled_dot_product_attention,
)
torch.set_num_threads(1)
options = {"modulator": Modulator()}
weight = torch.randn(1000, 64, requires_grad=True)

def compute(length):
    parts = [torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3)]
    for causal in (False, True):
        scaled_dot_product_attention(*parts, is_causal=causal, **options).sum().backward()
    features, target = torch.randn(3 * length, 64), torch.randint(len(weight), (3 * length,))
    linear_cross_entropy(features, weight, target, **options)[0].sum().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

start = compute(1024)
print(f"{max(map(compute, range(1, 600, 7))) - start:.0f}")
"""
    used = run(tmp_path, "python", "-c", script, MULTIMAX_BACKEND="cpp")
    assert float(used.split()[-1]) < 15


def test_kernels_propagate_nan(kernels, monkeypatch):
    """Training then stops or skips the batch, as with stock softmax."""
    monkeypatch.setenv("MULTIMAX_BACKEND", "cpp")
    (query, key, value), _ = attention_inputs(1, 1, 20, 20, 16)
    for module in (None, some_modulator()):
        for row in (0, 7, 19):
            wrong = query.clone()
            wrong[0, 0, row, 3] = torch.nan
            normalizer = "softmax" if module is None else "multimax"
            out = scaled_dot_product_attention(
                wrong, key, value, normalizer=normalizer, modulator=module
            )
            assert (out.isnan().any(-1).squeeze() == (torch.arange(20) == row)).all()
        features, weight, _, target = loss_inputs(20, 300, 16)
        for word in (0, 150, 299):
            wrong = weight.clone()
            wrong[word, 3] = torch.nan
            loss, _ = linear_cross_entropy(
                features, wrong, target, modulator=module, reduction="none"
            )
            assert loss.isnan().all()


def test_linear_cross_entropy_bounds_memory_by_chunk_size(tmp_path):
    """Runs in a subprocess, whose peak memory is that of the loss."""
    script = """
import resource, torch
from multimax_fairseq import Modulator, linear_cross_entropy
torch.set_num_threads(1)
features, weight = torch.randn(2048, 8, requires_grad=True), torch.randn(30000, 8)
weight.requires_grad_()
module, target = Modulator(), torch.randint(30000, (2048,))
linear_cross_entropy(features[:20], weight, target[:20], modulator=module)[0].backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(features, weight, target, modulator=module)[0].backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    # All logits would be 235 MiB, and a chunk of 256 tokens is 29.
    printed = run(tmp_path, "python", "-c", script, MULTIMAX_BACKEND="cpp")
    assert int(printed.split()[-1]) < 100


# ------------------------------------------------------------------------------ the modulator


@pytest.mark.parametrize(
    "heads, order, shape",
    [
        *((4, order, (3, 4, 50, 33)) for order in (1, 2)),
        *((None, order, (4, 300, 301)) for order in (1, 2)),
        *((heads, 2, shape) for heads in (None, 4) for shape in ((2, 4, 1, 1), (0, 4, 5, 5))),
    ],
)
def test_modulator_is_as_accurate_as_plain_pytorch(kernels, monkeypatch, heads, order, shape):
    generator = torch.Generator().manual_seed(0)
    scores, grad = (2 * torch.randn(shape, generator=generator) for _ in range(2))
    module = some_modulator(heads, order=order)
    found = []
    for dtype, kind in (
        (torch.float32, "cpp"),
        (torch.float32, "plain"),
        (torch.float64, "plain"),
    ):
        monkeypatch.setenv("MULTIMAX_BACKEND", kind)
        x = scores.to(dtype).requires_grad_()
        learned = list(module.to(dtype).parameters())
        out = module(x)
        grads = torch.autograd.grad(out, [x, *learned], grad.to(dtype))
        found.append([out.detach(), grads[0], torch.cat([g.flatten() for g in grads[1:]])])
    assert_as_accurate(*found)


@pytest.mark.parametrize("size", [1e2, 1e6, 1e30])
def test_soft_cap_is_flat_at_large_scores(kernels, size):
    found = []
    for dtype in (torch.float32, torch.float64):
        module = SoftCap(5.0, learned=True).to(dtype)
        keys = torch.tensor([-size, -100.0, 0.5, 100.0, size], dtype=dtype).view(1, 1, 5, 1)
        values = torch.arange(5, dtype=dtype).view(1, 1, 5, 1)
        query = torch.ones(1, 1, 1, 1, dtype=dtype)
        scaled_dot_product_attention(query, keys, values, modulator=module).sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(*found, check_dtype=False)


@pytest.mark.parametrize("options", [None, {}, {"terms": "low"}])
@pytest.mark.parametrize("tokens, classes, size, bias", [(1, 7, 5, True), (130, 300, 64, False)])
def test_fused_scores_is_as_accurate_as_plain(
    kernels, monkeypatch, options, tokens, classes, size, bias
):
    features, weight, offset, _ = loss_inputs(tokens, classes, size, bias)
    module = None if options is None else some_modulator(**options)
    fast = fused_scores(features[None], weight, offset, module)
    assert fast.shape == (1, tokens, classes) and not fast.requires_grad
    found = [[fast]]
    for dtype in (torch.float32, torch.float64):
        parts = [None if x is None else x.to(dtype) for x in (features[None], weight, offset)]
        scores = F.linear(*parts)
        found.append([scores if module is None else module.to(dtype)(scores)])
    assert_as_accurate(*found)
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    assert fused_scores(features[None], weight, offset, None) is None


# ------------------------------------------------------------------------------ kernel selection


def test_select_answers_with_the_requested_backend(monkeypatch, caplog):
    parts, _ = attention_inputs(1, 1, 4, 4, 16)
    backend._log.cache_clear()
    monkeypatch.delenv("MULTIMAX_BACKEND", raising=False)
    with caplog.at_level("INFO", backend.__name__):
        for _ in range(2):
            scaled_dot_product_attention(*parts, modulator=some_modulator())
    assert caplog.messages.count("attention: cpp backend") == 1
    assert backend.select("auto", parts[0].double())[0] == "plain"
    assert backend.select("plain", parts[0])[0] == "plain"
    with torch.autocast("cpu"):
        assert backend.select("auto", parts[0], parts[1].bfloat16()) == ("cpp", "")
        assert backend.select("auto", parts[0].double())[0] == "plain"
    assert backend.select("auto", parts[0], parts[1].bfloat16())[0] == "plain"
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    assert backend.select("auto", parts[0])[0] == "plain"
    assert backend.select("cpp", parts[0]) == ("cpp", "")
    monkeypatch.setenv("MULTIMAX_BACKEND", "fast")
    with pytest.raises(UsageError, match="MULTIMAX_BACKEND 'fast': choose one of auto, plain"):
        scaled_dot_product_attention(*parts, modulator=some_modulator())
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        scaled_dot_product_attention(*parts, modulator=some_modulator(), backend="cuda")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, "the kernel does not support these dtypes"),
        ({"backend": "plain"}, "'plain' is requested and cpu tensors have 'cpp'"),
        ({"modulator": torch.tanh}, "the modulator is a function without parameters"),
        ({"attn_mask": torch.zeros(4, 4, requires_grad=True)}, "the mask needs a gradient"),
    ],
)
def test_log_names_the_condition_of_a_fallback(change, reason, caplog):
    query = torch.ones(1, 1, 4, 16, dtype=torch.float64 if "dtypes" in reason else None)
    backend._log.cache_clear()
    with caplog.at_level("INFO", backend.__name__):
        scaled_dot_product_attention(
            query, query, query, **{"modulator": some_modulator(), **change}
        )
    assert f"attention: plain backend, because {reason}" in caplog.messages


def test_tails_equals_reference_values_and_jacobian():
    parameters = torch.randn(1000, 8, generator=torch.Generator().manual_seed(2))
    parameters[:, [1, 5]] *= 0.5
    # Nearly the identity; first order only; equal thresholds.
    parameters[::4] *= 0.02
    parameters[1::4, [1, 5]] = 0
    parameters[2::4, 3] = parameters[2::4, 2]
    exact = parameters.double().requires_grad_()
    expected = tails(exact)
    finite = expected.isfinite()
    assert 0.2 < finite[:, :2].double().mean() < 0.8
    found, jacobian = tails_operator(parameters)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    for column in range(4):
        total = expected[:, column].where(finite[:, column], 0).sum()
        by = torch.autograd.grad(total, exact, retain_graph=True)[0]
        torch.testing.assert_close(jacobian[:, column].double(), by, rtol=1e-4, atol=1e-4)


MEMORY = """
import os
import resource

import torch
from multimax_fairseq import Modulator, scaled_dot_product_attention

OPTIONS = {
    "multimax": {"modulator": Modulator()},
    "alpha_entmax": {"alpha": torch.full((8, 1, 1), 1.3, requires_grad=True)},
    "asentmax": {"beta": torch.full((8, 1, 1), 0.3), "gamma": 0.5},
    "ssmax": {"length_scale": 0.4},
}


def memory(name, length):
    inputs = [torch.randn(1, 8, length, 64).requires_grad_() for _ in range(3)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = {"normalizer": name, "is_causal": True, **OPTIONS[name]}
    scaled_dot_product_attention(*inputs, **options).sum().backward()
    used = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return used / sum(part.nbytes for part in inputs)


torch.set_num_threads(1)
for name in OPTIONS:
    memory(name, 64)  # loads the libraries
    if os.fork() == 0:  # a child's peak starts at what it uses now
        print("used", name, memory(name, 4096), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.long
def test_attention_needs_less_than_three_times_its_inputs(tmp_path):
    """Output, gradients and scratch memory at 4,096 keys, where the scores of a head are 64 MB."""
    printed = run(tmp_path, "python", "-c", MEMORY, OMP_NUM_THREADS="1")
    used = dict(line.split()[1:] for line in printed.splitlines() if line.startswith("used"))
    assert len(used) == 4
    assert all(0.5 < float(share) < 3 for share in used.values()), used
