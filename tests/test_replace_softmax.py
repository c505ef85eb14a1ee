"""replace_softmax in eager mode."""

import copy
import io
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from attention_modules import (
    ALL,
    HEADS,
    KINDS,
    LENGTH,
    SETTINGS,
    WIDTH,
    Calls,
    batch,
    far_layer,
    one_layer,
    pull_far,
    replaced,
    two_layers,
)
from reference import TABLE_7, TABLE_8
from torch import nn
from torch.overrides import _get_current_function_mode

from multimax_fairseq import NORMALIZERS, Modulator, multimax, normalize, replace_softmax
from multimax_fairseq.modules import Normalizer

# asentmax reads hidden states, which softmax does not receive.
REPLACING = [name for name, mapping in NORMALIZERS.items() if not mapping.hidden]
IDENTITY = {"softmax": {}, "multimax": {"init_std": 0.0}}


def outputs_and_grads(model):
    x = batch().requires_grad_()
    out = model(x)
    named = [(n, p) for n, p in model.named_parameters() if "normalizer" not in n]
    grads = torch.autograd.grad(out.square().sum(), [x, *(p for _, p in named)])
    return dict(zip(["out", "x", *(n for n, _ in named)], [out, *grads], strict=True))


def assert_same(actual, expected):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("normalizer", ["softmax", "multimax"])
def test_identity_normalizer_keeps_outputs_and_gradients(kind, normalizer):
    model = two_layers(kind)
    expected = outputs_and_grads(model)
    names = replace_softmax(model, normalizer, **IDENTITY[normalizer])
    assert names == (["0.inner", "2.inner"] if kind == "torch-mha" else ["0", "2"])
    assert_same(outputs_and_grads(model), expected)
    # Without gradients, PyTorch would use its fused encoder kernel.
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch()), expected["out"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_replaced_attention_equals_multimax(kind, per_head):
    model = two_layers(kind)
    replace_softmax(model, per_head=per_head)
    pull_far(model)
    first = model[0].inner if kind == "torch-mha" else model[0]
    if kind == "torch-mha":
        weights = (first.in_proj_weight, first.in_proj_bias, first.out_proj)
    else:
        weights = (first.qkv.weight, first.qkv.bias, first.proj)
    q, k, v = F.linear(batch(), *weights[:2]).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = None if kind in ("tensor", "plain") else future
    probs = multimax(q @ k.mT / 2, first.normalizer.modulator, mask=mask)
    expected = weights[2]((probs @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(model[0](batch()), expected, rtol=1e-5, atol=1e-6)
    assert (two_layers(kind)[0](batch()) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("normalizer", REPLACING)
@pytest.mark.parametrize("kind", ["torch", "functional", "bool", "float", "causal", "torch-mha"])
def test_masked_keys_have_zero_gradient(kind, normalizer):
    model = two_layers(kind)
    replace_softmax(model, normalizer, **SETTINGS.get(normalizer, {}))
    x = batch().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out[:, :2].sum(), x, retain_graph=True)
    assert (grad[:, 2:] == 0).all() and grad[:, :2].ne(0).any()
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("settings", [{"temperature": 2.0, "learn_temperature": True}, {}])
def test_fully_masked_row_is_zero(settings):
    class Attention(nn.Module):
        def forward(self, scores, mask):
            return (scores + mask).softmax(-1)

    attention = Attention()
    replace_softmax(attention, "softmax" if settings else "multimax", **settings)
    scores = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[-torch.inf] * 3, [0.0, 0.0, -torch.inf]])
    probs = attention(scores, mask)
    assert probs[0].tolist() == [0, 0, 0] and probs[1, 2] == 0
    probs.square().sum().backward()
    assert scores.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in attention.parameters())


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("normalizer", ["multimax", "alpha_entmax"])
@pytest.mark.parametrize("kind", ["tensor", "causal", "torch-mha"])
def test_optimizer_step_changes_all_learned_scalars(kind, normalizer, per_head):
    model = two_layers(kind)
    replace_softmax(model, normalizer, per_head=per_head)
    learned = {n: p for n, p in model.named_parameters() if "normalizer" in n}
    scalars = (8 if normalizer == "multimax" else 1) * (HEADS if per_head else 1)
    assert sum(p.numel() for p in learned.values()) == 2 * scalars
    before = {n: p.detach().clone() for n, p in learned.items()}
    # Large inputs put scores on both sides of all thresholds, in the second layer too.
    model[1] = nn.LayerNorm(WIDTH)
    model(2 * batch(length=100)).square().sum().backward()
    torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-30).step()
    for name, parameter in learned.items():
        assert parameter.grad.ne(0).all(), name
        assert parameter.ne(before[name]).all(), name


def test_softmax_keeps_dtype():
    scores = torch.randn(2, HEADS, LENGTH, LENGTH, dtype=torch.bfloat16)
    seen = []

    class Attention(nn.Module):
        def forward(self, x):
            seen.extend([x.softmax(-1), torch.softmax(input=x, dim=-1, dtype=torch.float32)])
            seen.extend([F.softmax(x, -1, 3, torch.float64), torch.special.softmax(x, -1)])
            seen.append(F.scaled_dot_product_attention(x, x, x))

    attention = Attention()
    replace_softmax(attention, "sparsemax")
    attention(scores)
    half = torch.bfloat16
    assert [x.dtype for x in seen] == [half, torch.float32, torch.float64, half, half]
    torch.testing.assert_close(seen[0], Normalizer("sparsemax")(scores).to(half))


def test_attention_supports_grouped_queries_and_dropout():
    q, k, v = torch.randn(2, 8, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 6)

    class Attention(nn.Module):
        def forward(self, dropout):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True)

    attention = Attention()
    expected = attention(0.0)
    replace_softmax(attention, "softmax")
    torch.testing.assert_close(attention(0.0), expected)
    assert attention(1.0).eq(0).all() and attention(0.5).ne(expected).any()


def test_state_dict_restores_normalizers():
    model, other = two_layers("tensor"), two_layers("tensor", seed=1)
    replace_softmax(model)
    replace_softmax(other)
    pull_far(model)
    assert "0.normalizer.modulator.low_coefficient" in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert other(batch()).equal(model(batch()))


@pytest.mark.parametrize("kind", ["causal", "torch-mha"])
def test_deepcopy_and_pickle_give_independent_copies(kind):
    model = two_layers(kind)
    replace_softmax(model)
    pull_far(model)
    expected = model(batch())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for twin in copies:
        assert twin(batch()).equal(expected)
        with pytest.raises(ValueError, match="replaced already"):
            replace_softmax(twin)
    original = two_layers(kind)[0]
    assert type(model[0]) is type(copies[0][0]) is type(original)


def test_normalizer_starts_on_the_module_device():
    model = two_layers("tensor").to("meta")
    replace_softmax(model)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model(batch().to("meta")).shape == (3, LENGTH, WIDTH)


def test_train_and_eval_modes_reach_the_normalizer():
    model = two_layers("tensor").eval()
    replace_softmax(model, "evsoftmax")
    assert not model[0].normalizer.training
    sparse = model(batch())
    assert model.train()(batch()).ne(sparse).any()
    assert model.eval()(batch()).equal(sparse)


@pytest.mark.parametrize("normalizer", ["softmax", "multimax"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transformer_encoder_skips_its_fused_kernel(normalizer):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.arange(LENGTH) >= torch.tensor([5, 3, 4])[:, None]
    with torch.no_grad():
        expected = model(batch(), src_key_padding_mask=padding)[~padding]
    names = replace_softmax(model, normalizer)
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]
    pull_far(model)
    slow = model.train()(batch(), src_key_padding_mask=padding)[~padding]
    with torch.no_grad():
        fast = model.eval()(batch(), src_key_padding_mask=padding)[~padding]
    torch.testing.assert_close(fast, slow)
    assert torch.allclose(fast, expected, atol=1e-5) == (normalizer == "softmax")


# --- masks ---------------------------------------------------------------------------------------


def softmax_with_sum(scores, mask):
    return (scores + mask).softmax(-1)


def softmax_with_fill(scores, mask):
    return F.softmax(scores.masked_fill(mask < 0, mask.min().item()), -1)


def attention_weights(scores, mask):
    """Return the probabilities of scaled_dot_product_attention for these scores."""
    unit = torch.eye(scores.shape[-1])
    return F.scaled_dot_product_attention(scores, unit, unit, mask, scale=1.0)


def attention_weights_of_kernel(scores, mask):
    unit = torch.eye(scores.shape[-1])[None, None]
    return F.scaled_dot_product_attention(scores[None, None], unit, unit, mask, scale=1.0)[0, 0]


def masked_scores(number, length=16):
    generator = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(64, length, generator=generator)
    dropped = torch.rand(64, length, generator=generator) < 0.4
    dropped[:, 0] = False
    return scores, dropped, torch.zeros(64, length).masked_fill(dropped, number)


TABLES = {"TABLE_7": TABLE_7, "TABLE_8": TABLE_8}


@pytest.mark.parametrize("values", ["init_std 0.02", "init_std 0.2", "TABLE_7", "TABLE_8"])
@pytest.mark.parametrize(
    "call",
    [softmax_with_sum, softmax_with_fill, attention_weights, attention_weights_of_kernel],
)
def test_finite_masks_exclude_keys(call, values):
    """-100 as in Swin, -1e4 as in BERT, -1e9, the lowest float, and -inf."""
    for index in range(0, 20, 4) if "init" in values else range(0, len(TABLES[values]), 3):
        torch.manual_seed(index)
        if "init" in values:
            module = replaced(call, init_std=float(values.split()[1]))
        else:
            module = replaced(call)
            learned = Modulator.from_values(*TABLES[values][index])
            module.normalizer.modulator.load_state_dict(learned.state_dict())
        for number in (-100.0, -1e4, -1e9, torch.finfo(torch.float32).min, -math.inf):
            scores, dropped, mask = masked_scores(number)
            assert call(scores, mask)[dropped].max() < 1e-6
            scores.requires_grad_()
            probs = module(scores, mask)
            assert probs[dropped].max() < 1e-6, (index, number)
            torch.testing.assert_close(probs.sum(-1), torch.ones(64))
            (grad,) = torch.autograd.grad(probs.square().sum(), scores)
            assert grad.isfinite().all()
            if number == -math.inf:
                assert probs[dropped].eq(0).all() and grad[dropped].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("std", [0.02, 0.2])
def test_finite_masks_exclude_keys_in_half_precision(dtype, std):
    module = replaced(softmax_with_sum, init_std=std)
    for number in (-100.0, -1e4, torch.finfo(dtype).min, -math.inf):
        scores, dropped, mask = masked_scores(number)
        probs = module(scores.to(dtype), mask.to(dtype))
        assert probs.dtype == dtype and probs[dropped].max() < 1e-6


@pytest.mark.parametrize("normalizer", REPLACING)
@pytest.mark.parametrize("number", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_row_of_equal_finite_masks_is_uniform(normalizer, number):
    module = replaced(softmax_with_fill, normalizer, **SETTINGS.get(normalizer, {}))
    pull_far(module)
    scores = torch.randn(2, 3, 4, 5, requires_grad=True)
    mask = torch.zeros(4, 5)
    mask[0] = number
    probs = module(scores, mask)
    share = 0.2 if NORMALIZERS[normalizer].sums_to_one else 0.0
    torch.testing.assert_close(probs[..., 0, :], torch.full((2, 3, 5), share))
    (probs * torch.randn_like(probs)).sum().backward()
    for tensor in (scores, *module.parameters()):
        assert tensor.grad.isfinite().all() and tensor.grad.abs().max() < 100


def test_multimax_is_monotone_by_default():
    assert replaced(softmax_with_sum).normalizer.modulator.monotone
    given = replaced(softmax_with_sum, monotone=False, init_std=0.0)
    assert not given.normalizer.modulator.monotone
    given.normalizer.modulator.low_coefficient.data[1] = 0.05
    # Without monotone, sigma turns upwards at -10.
    scores = torch.tensor([[0.0, 0.0]])
    mask = torch.tensor([[0.0, -100.0]])
    assert given(scores, mask)[0, 1] > 0.99
    replaced(softmax_with_sum, "sparsemax")


@pytest.mark.parametrize("normalizer", ["multimax", "sparsemax"])
@pytest.mark.parametrize("kernel", [False, True])
def test_float_mask_is_added_after_the_modulator(normalizer, kernel):
    torch.manual_seed(0)
    module = replaced(F.scaled_dot_product_attention, normalizer)
    pull_far(module)
    shape = (2, HEADS, LENGTH, 4) if kernel else (LENGTH, 4)
    q, k, v = torch.randn(3, *shape).unbind()
    bias = torch.randn(LENGTH, LENGTH, requires_grad=True)
    with torch.no_grad():
        bias[0, 1] = -torch.inf
    options = {"modulator": module.normalizer.modulator} if normalizer == "multimax" else {}
    expected = normalize(normalizer, q @ k.mT / 2, mask=bias, **options) @ v
    out = module(q, k, v, bias)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    grads = [torch.autograd.grad(x.square().sum(), bias)[0] for x in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert grads[0].ne(0).sum() > LENGTH and grads[0][0, 1] == 0
    torch.testing.assert_close(module(q, k, v, bias.detach()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("masks", ["none", "bool", "float", "padding", "both", "heads", "causal"])
def test_multihead_attention_masks_equal_multimax(masks, per_head):
    torch.manual_seed(0)
    # PyTorch's is_causal hides the learned key from early queries.
    learned_key = masks != "causal"
    inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, add_bias_kv=learned_key)
    replace_softmax(inner, per_head=per_head)
    pull_far(inner)
    x = batch()
    padding = torch.zeros(3, LENGTH, dtype=torch.bool)
    padding[0, 3:] = True
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    bias = torch.randn(3 * HEADS if masks == "heads" else 1, LENGTH, LENGTH, requires_grad=True)
    given = {
        "bool": {"attn_mask": future},
        "float": {"attn_mask": bias[0]},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": bias[0], "key_padding_mask": padding.float() * -1e9},
        "heads": {"attn_mask": bias},
        "causal": {"attn_mask": future, "is_causal": True},
    }.get(masks, {})

    def run(need_weights):
        out, weights = inner(x, x, x, need_weights=need_weights, **given)
        learned = [p for p in inner.parameters()] + (
            [bias] if bias is given.get("attn_mask") else []
        )
        return out, weights, torch.autograd.grad(out.square().sum(), learned)

    out, weights, grads = run(True)
    plain, none, plain_grads = run(False)
    assert none is None
    torch.testing.assert_close(plain, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain_grads, grads, rtol=1e-4, atol=1e-5)

    q, k, v = F.linear(x, inner.in_proj_weight, inner.in_proj_bias).chunk(3, -1)
    if learned_key:
        k = torch.cat([k, inner.bias_k.expand(3, 1, -1)], 1)
        v = torch.cat([v, inner.bias_v.expand(3, 1, -1)], 1)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    mask = torch.zeros(1, 1, LENGTH, LENGTH)
    if masks in ("bool", "causal"):
        mask = mask.masked_fill(future, -torch.inf)
    if masks in ("float", "both", "heads"):
        mask = mask + bias.unflatten(0, (-1, HEADS if masks == "heads" else 1))
    if masks in ("padding", "both"):
        mask = mask.masked_fill(padding[:, None, None], -torch.inf)
    probs = multimax(
        q @ k.mT / 2, inner.normalizer.modulator, mask=F.pad(mask, (0, int(learned_key)))
    )
    torch.testing.assert_close(weights, probs.mean(1), rtol=1e-5, atol=1e-6)
    expected = inner.out_proj((probs @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"kdim": 6, "vdim": 7, "bias": False}, {"add_zero_attn": True}, {"add_bias_kv": True}],
)
def test_multihead_attention_options_equal_softmax(options, need_weights):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, **options)
    key = torch.randn(7, 3, options.get("kdim", WIDTH))
    value = torch.randn(7, 3, options.get("vdim", WIDTH))
    query, asked = torch.randn(LENGTH, 3, WIDTH), {"need_weights": need_weights}
    mask = torch.rand(3 * HEADS, LENGTH, 7) < 0.3
    calls = [
        ((query, key, value), {**asked, "attn_mask": mask, "average_attn_weights": False}),
        ((query, key, value), {**asked, "key_padding_mask": torch.arange(7).expand(3, 7) > 4}),
        ((query[:, 0], key[:, 0], value[:, 0]), {**asked, "attn_mask": mask[0]}),
        ((query[:, 0], key[:, 0], value[:, 0]), {**asked, "key_padding_mask": mask[0, 0]}),
    ]
    expected = [attention(*args, **given) for args, given in calls]

    replace_softmax(attention, "softmax")

    for (args, given), (output, weights) in zip(calls, expected, strict=True):
        found, found_weights = attention(*args, **given)
        torch.testing.assert_close(found, output)
        if need_weights:
            torch.testing.assert_close(found_weights, weights)
        else:
            assert found_weights is None


# --- modules and modes --------------------------------------------------------------------


def test_threads_use_their_own_mode():
    models = [far_layer("causal"), far_layer("tensor", "sparsemax"), far_layer("torch-mha-weights")]
    expected = [model(batch()) for model in models]
    softmax = batch().softmax(-1)
    wrong, start = [], threading.Barrier(4)

    def work(index):
        start.wait()
        for _ in range(30):
            if index == 3:
                same = batch().softmax(-1).equal(softmax)
            else:
                same = torch.allclose(models[index](batch()), expected[index], atol=1e-6)
            wrong.extend([] if same else [index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("kind", ["causal", "torch-mha"])
def test_data_parallel_replicas_use_their_own_weights(kind):
    module = far_layer(kind)[0]
    twins = {m: m._replicate_for_data_parallel() for m in module.modules()}
    for original, twin in twins.items():
        for name, child in original.named_children():
            setattr(twin, name, twins[child])
        for name, parameter in original.named_parameters(recurse=False):
            setattr(twin, name, parameter * 1)
    torch.testing.assert_close(twins[module](batch()), module(batch()))


@pytest.mark.parametrize("compiled", [False, True])
def test_nested_modules_use_their_own_normalizers(compiled):
    class OuterAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Calls(lambda x: x.softmax(-1) * 3)

        def forward(self, x):
            return self.inner(x.softmax(-1)).softmax(-1)

    model = OuterAttention()
    replace_softmax(model, where=lambda name, _: name == "inner")
    replace_softmax(model, "sparsemax", where=lambda name, _: name == "")
    pull_far(model)
    scores = 3 * torch.randn(2, 4, 6)
    inner = multimax(normalize("sparsemax", scores), model.inner.normalizer.modulator)
    torch._dynamo.reset()
    run = torch.compile(model, backend="eager") if compiled else model
    torch.testing.assert_close(run(scores), normalize("sparsemax", 3 * inner))


@pytest.mark.parametrize("kind", ALL)
def test_autocast_keeps_dtypes(kind):
    model, softmax = far_layer(kind), one_layer(kind)
    exact, expected = model(batch()), softmax(batch())
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        out, rounded = model(batch()), softmax(batch())
        if kind in ("tensor", "causal", "torch-mha"):  # one for each function
            compiled = torch.compile(model, backend="eager", fullgraph=True)(batch())
            torch.testing.assert_close(compiled, out)
    assert out.dtype == rounded.dtype
    # Only the projections round.
    assert (out - exact).abs().max() < 2 * (rounded - expected).abs().max()


def test_replace_softmax_covers_every_public_softmax():
    scores = torch.randn(2, 6)
    names = {
        "Tensor.softmax": lambda x: x.softmax(dim=-1),
        "torch.softmax": lambda x: torch.softmax(x, dim=-1),
        "torch.special.softmax": lambda x: torch.special.softmax(x, -1),
        "F.softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
        "nn.Softmax": lambda x: nn.Softmax(-1)(x),
        "nn.Softmax2d": lambda x: nn.Softmax2d()(x[..., None, None])[..., 0, 0],
        "torch.masked.softmax": lambda x: torch.masked.softmax(x, -1, mask=x < 9),
    }
    for name, function in names.items():
        module = replaced(function, "sparsemax")
        if name == "nn.Softmax2d":
            torch.testing.assert_close(module(scores), normalize("sparsemax", scores), msg=name)
        else:
            assert module(scores).equal(normalize("sparsemax", scores)), name
    for other in (
        lambda x: x.log_softmax(-1),
        lambda x: F.log_softmax(x, -1),
        lambda x: torch._softmax(x, -1, False),
    ):
        with pytest.raises(RuntimeError, match="calls no softmax"):
            replaced(other)(scores)


def test_where_selects_modules():
    model = nn.ModuleDict({"a": two_layers("tensor"), "b": two_layers("causal")})
    replaced = replace_softmax(model, where=lambda name, module: name in ("a.0", "b.2"))
    assert replaced == ["a.0", "b.2"]
    assert not hasattr(model["a"][2], "normalizer")
    names = replace_softmax(model, where=lambda name, module: name == "a.2")
    assert names == ["a.2"]


def test_interrupt_in_forward_leaves_no_mode_active():
    class Attention(nn.Module):
        def forward(self, x):
            if x is None:
                raise KeyboardInterrupt
            return x.softmax(-1)

    attention = Attention()
    replace_softmax(attention, "sparsemax")
    with pytest.raises(KeyboardInterrupt):
        attention(None)
    assert _get_current_function_mode() is None
    scores = torch.tensor([0.0, 9.0])
    assert attention(scores).tolist() == [0, 1] and scores.softmax(-1)[0] > 0


def test_replace_softmax_refuses_invalid_arguments():
    with pytest.raises(TypeError, match="'heads'"):
        replace_softmax(two_layers("tensor"), heads=2)
    with pytest.raises(ValueError, match="no attention module in Linear: choose the modules"):
        replace_softmax(nn.Linear(2, 2))
    for name, why in (("softermax", "unknown mapping"), ("asentmax", "hidden .*: choose ano")):
        pytest.raises(ValueError, replace_softmax, two_layers("tensor"), name).match(why)
    model = two_layers("tensor")
    del model[2].num_heads
    with pytest.raises(ValueError, match="num_heads of module '2', got None"):
        replace_softmax(model, per_head=True)
    assert not hasattr(model[0], "normalizer")
    replace_softmax(model)
    with pytest.raises(ValueError, match="module '0' is replaced already"):
        replace_softmax(model)
    for taken, value in (("normalizer", nn.Identity()), ("forward", torch.relu)):
        model = two_layers("tensor")
        setattr(model[2], taken, value)
        with pytest.raises(ValueError, match=f"module '2' has its own '{taken}'"):
            replace_softmax(model)
    model = two_layers("tensor")
    model[2].__class__ = type("Attention", (type(model[2]),), {"normalizer": "of the class"})
    with pytest.raises(ValueError, match="module '2' has its own 'normalizer'"):
        replace_softmax(model)


def test_forward_without_softmax_raises():
    class LinearAttention(nn.Linear):
        pass

    model = nn.Sequential(two_layers("tensor"), LinearAttention(WIDTH, WIDTH))
    replace_softmax(model)
    with pytest.raises(RuntimeError, match="LinearAttention calls no softmax"):
        model(batch())
