"""Any normalizer in the attention of models that know nothing of this package."""

import copy
import importlib.util
import io
import pathlib
import pickle
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode

from multimax_fairseq import NORMALIZERS, Modulator, multimax, replace_softmax
from multimax_fairseq.modules import Normalizer

HEADS, LENGTH, WIDTH = 4, 5, 16
EXAMPLE = pathlib.Path(__file__).parent.parent / "user_dir/vit_multimax.py"
KINDS = ["tensor", "torch", "functional", "module", "bool", "float", "causal", "plain", "torch-mha"]
SETTINGS = {"topk": {"k": 2}}
IDENTITY = {"softmax": {}, "multimax": {"init_std": 0.0}}
# Far from the identity, low scores and high ones.
FAR = {
    "low_coefficient": [-0.9, -0.05],
    "low_threshold": [0.3, -0.4],
    "high_coefficient": [-0.6, -0.03],
    "high_threshold": [0.6, 0.9],
}


class OwnAttention(nn.Module):
    """Causal self-attention (but for "plain" and "tensor"), its softmax called in many ways."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own_softmax = nn.Softmax(-2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        lowest = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(x.dtype).min)
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        sdpa = F.scaled_dot_product_attention
        if self.kind == "tensor":
            out = scores.softmax(dim=-1) @ v
        elif self.kind == "torch":
            out = torch.softmax(scores + bias, -1, torch.float64).to(v.dtype) @ v
        elif self.kind == "functional":
            out = F.softmax(scores + lowest, dim=-1, dtype=torch.float32) @ v
        elif self.kind == "module":
            out = self.own_softmax((scores + bias).mT).mT @ v
        elif self.kind == "bool":
            out = sdpa(q, k, v, attn_mask=allowed)
        elif self.kind == "float":
            out = sdpa(q, k, v, lowest, dropout_p=0.0)
        elif self.kind == "causal":
            out = sdpa(q, k, v, is_causal=True)
        elif self.kind == "plain":
            out = sdpa(q, k, v, scale=q.shape[-1] ** -0.5)
        return self.proj(out.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=future, need_weights=self.need_weights)[0]


def two_layers(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "torch-mha":
        return nn.Sequential(TorchAttention(), nn.GELU(), TorchAttention(need_weights=True))
    return nn.Sequential(OwnAttention(kind), nn.GELU(), OwnAttention(kind))


def batch(length=LENGTH):
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(0))


def pull_far(model):
    """Give all modulators values that are far from the identity, of each head its own."""
    for module in model.modules():
        if isinstance(module, Modulator):
            for name, values in FAR.items():
                parameter = getattr(module, name)
                far = torch.tensor(values).expand_as(parameter)
                if parameter.dim() == 2:
                    far = far + 0.1 * torch.arange(len(parameter))[:, None]
                parameter.data.copy_(far)
    return model


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
def test_the_identity_changes_no_output_and_no_gradient(kind, normalizer):
    model = two_layers(kind)
    expected = outputs_and_grads(model)
    names = replace_softmax(model, normalizer, **IDENTITY[normalizer])
    assert names == (["0.inner", "2.inner"] if kind == "torch-mha" else ["0", "2"])
    assert_same(outputs_and_grads(model), expected)
    # torch fuses attention where nothing is to be learned.
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(batch()), expected["out"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_far_modulators_equal_the_function(kind, per_head):
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
    # The scores of "module" go in turned around, which changes nothing in what is expected.
    probs = multimax(q @ k.mT / 2, first.normalizer.modulator, mask=mask)
    expected = weights[2]((probs @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(model[0](batch()), expected, rtol=1e-5, atol=1e-6)
    assert (two_layers(kind)[0](batch()) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("kind", ["torch", "functional", "bool", "float", "causal", "torch-mha"])
def test_what_is_excluded_has_no_share(kind, normalizer):
    model = two_layers(kind)
    replace_softmax(model, normalizer, **SETTINGS.get(normalizer, {}))
    x = batch().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out[:, :2].sum(), x, retain_graph=True)
    assert (grad[:, 2:] == 0).all() and grad[:, :2].ne(0).any()
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("settings", [{"temperature": 2.0, "learn_temperature": True}, {}])
def test_a_row_with_nothing_left_is_zero(settings):
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
def test_what_is_learned_moves_in_a_step(kind, normalizer, per_head):
    model = two_layers(kind)
    replace_softmax(model, normalizer, per_head=per_head)
    learned = {n: p for n, p in model.named_parameters() if "normalizer" in n}
    scalars = (8 if normalizer == "multimax" else 1) * (HEADS if per_head else 1)
    assert sum(p.numel() for p in learned.values()) == 2 * scalars
    before = {n: p.detach().clone() for n, p in learned.items()}
    # Many scores, spread over both sides of all thresholds, in the second layer too.
    model[1] = nn.LayerNorm(WIDTH)
    model(2 * batch(length=100)).square().sum().backward()
    torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-30).step()
    for name, parameter in learned.items():
        assert parameter.grad.ne(0).all(), name
        assert parameter.ne(before[name]).all(), name


def test_scores_keep_their_dtype():
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


def test_grouped_queries_and_dropout():
    q, k, v = torch.randn(2, 8, 3, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 6)

    class Attention(nn.Module):
        def forward(self, dropout):
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True)

    attention = Attention()
    expected = attention(0.0)
    replace_softmax(attention, "softmax")
    torch.testing.assert_close(attention(0.0), expected)
    assert attention(1.0).eq(0).all() and attention(0.5).ne(expected).any()


def test_state_dict_round_trip():
    model, other = two_layers("tensor"), two_layers("tensor", seed=1)
    replace_softmax(model)
    replace_softmax(other)
    pull_far(model)
    assert "0.normalizer.modulator.low_coefficient" in model.state_dict()
    other.load_state_dict(model.state_dict())
    assert other(batch()).equal(model(batch()))


@pytest.mark.parametrize("kind", ["causal", "torch-mha"])
def test_copies_are_equal_and_independent(kind):
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
    assert isinstance(model[0], type(original)) and type(model[0]) is type(copies[0][0])


def test_the_normalizer_starts_where_its_module_is():
    model = two_layers("tensor").to("meta")
    replace_softmax(model)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert model(batch().to("meta")).shape == (3, LENGTH, WIDTH)


def test_train_and_eval_reach_the_normalizer():
    model = two_layers("tensor").eval()
    replace_softmax(model, "evsoftmax")
    assert not model[0].normalizer.training
    sparse = model(batch())
    assert model.train()(batch()).ne(sparse).any()
    assert model.eval()(batch()).equal(sparse)


@pytest.mark.parametrize("normalizer", ["softmax", "multimax"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_fused_encoder_is_left(normalizer):
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


@pytest.mark.parametrize("kind", ["tensor", "causal", "torch-mha"])
def test_a_compiled_model_gives_the_same_numbers(kind):
    model = two_layers(kind)
    replace_softmax(model)
    pull_far(model)
    torch.testing.assert_close(torch.compile(model, backend="eager")(batch()), model(batch()))


def test_where_chooses():
    model = nn.ModuleDict({"a": two_layers("tensor"), "b": two_layers("causal")})
    replaced = replace_softmax(model, where=lambda name, module: name in ("a.0", "b.2"))
    assert replaced == ["a.0", "b.2"]
    assert not hasattr(model["a"][2], "normalizer")
    names = replace_softmax(model, where=lambda name, module: name == "a.2")
    assert names == ["a.2"]


def test_nothing_is_active_outside_of_forward():
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


def test_refusals():
    with pytest.raises(ValueError, match="no attention module in Linear: say by `where`"):
        replace_softmax(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="unknown normalizer 'softermax'"):
        replace_softmax(two_layers("tensor"), "softermax")
    model = two_layers("tensor")
    with pytest.raises(ValueError, match="'softmax' does not take init_std=0.5: .*temperature"):
        replace_softmax(model, "softmax", init_std=0.5)
    assert not hasattr(model[0], "normalizer")
    del model[2].num_heads
    with pytest.raises(ValueError, match="num_heads of module '2', got None"):
        replace_softmax(model, per_head=True)
    assert not hasattr(model[0], "normalizer")
    replace_softmax(model)
    with pytest.raises(ValueError, match="module '0' is replaced already"):
        replace_softmax(model)
    for taken in ("normalizer", "forward"):
        model = two_layers("tensor")
        setattr(model[2], taken, nn.Identity())
        with pytest.raises(ValueError, match=f"module '2' has a '{taken}' of its own"):
            replace_softmax(model)


def test_a_forward_without_softmax_is_an_error():
    class LinearAttention(nn.Linear):
        pass

    model = nn.Sequential(two_layers("tensor"), LinearAttention(WIDTH, WIDTH))
    replace_softmax(model)
    with pytest.raises(RuntimeError, match=r"module '1' \(LinearAttention\) met no softmax"):
        model(batch())

    class ImplicitAttention(nn.Module):
        def forward(self, x):
            return F.softmax(x)

    attention = ImplicitAttention()
    replace_softmax(attention)
    with pytest.raises(ValueError, match="softmax without a dim"):
        attention(batch())


# --- the example -------------------------------------------------------------------------------


class Attention(nn.Module):
    """As timm's, with its names."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.fused_attn = num_heads, True
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, 6)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 56, 56)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(12)))
        self.head = nn.Linear(dim, 1000)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def run_example(monkeypatch, timm):
    monkeypatch.setitem(sys.modules, "timm", timm)
    spec = importlib.util.spec_from_file_location("vit_multimax", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_with_a_stand_in_for_timm(monkeypatch, capsys):
    """A small model with timm's names; timm's own DeiT-small was run by hand."""
    asked = []

    def create_model(name, **options):
        asked.append((name, options))
        return VisionTransformer()

    example = run_example(monkeypatch, types.SimpleNamespace(create_model=create_model))
    example.main()
    assert asked == [("deit_small_patch16_224", {"global_pool": "avg", "class_token": False})]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 + 2 and lines[-2] == "104 extra scalars"
    assert not any("by up to 0.0e+00" in line for line in lines)
    before, _, after = (float(number) for number in re.findall(r"\d+\.\d+", lines[-1]))
    assert after < before

    model = example.build("sparsemax", num_classes=10)
    assert isinstance(model.head, nn.Linear) and asked[-1][1]["num_classes"] == 10
    fused = model(torch.ones(1, 3, 224, 224))
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(torch.ones(1, 3, 224, 224)), fused)


def test_the_example_without_timm_says_how_to_get_it(monkeypatch):
    with pytest.raises(SystemExit, match="pip install timm"):
        run_example(monkeypatch, None)
