"""The modules' arguments and parameters, and errors that name a wrong argument."""

import itertools
import math

import numpy as np
import pytest
import torch
from attention_modules import replaced
from examples import EXAMPLES
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention

from multimax_fairseq import NORMALIZERS, Modulator, normalize, replace_softmax
from multimax_fairseq.mappings.entmax import EntmaxAlpha
from multimax_fairseq.mappings.softmax import Temperature
from multimax_fairseq.modules import (
    AdditiveAttention,
    ContinuousAttention,
    Normalizer,
    RecurrentCell,
)
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops import attention

# --- what a module learns ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, part",
    [
        ({"order": 3}, "order .* got 3"),
        ({"order": True}, "order .* got True"),
        ({"order": 2.0}, r"order .* got 2\.0"),
        ({"order": "2"}, "order .* got '2'"),
        ({"terms": "middle"}, "terms .* got 'middle'"),
        ({"terms": None}, "terms .* got None"),
        ({"terms": ["low"]}, r"terms .* got \['low'\]"),
        ({"num_heads": 0}, "heads .* got 0"),
        ({"num_heads": 1.5}, r"heads .* got 1\.5"),
        ({"num_heads": True}, "heads .* got True"),
        ({"init_std": -1.0}, r"init_std .* got -1\.0"),
        ({"init_std": math.nan}, "init_std .* got nan"),
        ({"init_std": math.inf}, "init_std .* got inf"),
        ({"init_std": "0.02"}, "init_std .* got '0.02'"),
        ({"monotone": "no"}, "monotone .* got 'no'"),
    ],
)
def test_modulator_refuses_arguments_by_name(arguments, part):
    with pytest.raises(ValueError, match=part):
        Modulator(**arguments)


@pytest.mark.parametrize(
    "build, part",
    [
        (lambda n: RecurrentCell("rnn", 2, 2, 2), "'rnn': choose one of gru, lstm"),
        (lambda n: RecurrentCell("gru", 2, 0, 2), "fed_size .* got 0"),
        (lambda n: AdditiveAttention(2, 2.5, 2, n), r"key_size .* got 2\.5"),
        (lambda n: ContinuousAttention(n, query_size=-1), "query_size .* got -1"),
        (lambda n: ContinuousAttention(n, widths=0.3), r"widths .* got 0\.3"),
    ],
)
def test_other_modules_refuse_arguments_by_name(build, part):
    with pytest.raises(ValueError, match=part):
        build(Normalizer("softmax"))


def test_modules_accept_numpy_scalars():
    module = Modulator(np.int64(1), num_heads=np.int32(3), init_std=np.float32(0.1))
    assert module.low_threshold.shape == (3, 1)
    assert Normalizer("topk", k=np.int64(2)).fixed == {"k": 2}
    scores = torch.tensor([1.0, 0.0, -2.0])
    for name, option, value in (("alpha_entmax", "alpha", 1.25), ("sink", "sink", -math.inf)):
        found = normalize(name, scores, **{option: np.float32(value)})
        assert torch.equal(found, normalize(name, scores, **{option: value}))


@pytest.mark.parametrize(
    "low, high, part",
    [
        ([[1.0, 2.0], [1.0]], [1.0, 2.0], r"low term's temperature .* got \[\[1\.0, 2\.0\], \[1"),
        ([1.0, "a"], [1.0, 2.0], "low term's temperature .* got .*'a'"),
        ("12", [1.0, 2.0], "low term's temperature .* got '12'"),
        ([1.0, 2.0], [1.0, math.nan], "high term's temperature .* nan"),
        ([1.0, math.inf], [1.0, 2.0], "low term's temperature .* inf"),
        ([1.0, 2.0], [1.0, None], "high term's temperature .* None"),
        ([10**400], [1.0], "low term's temperature .* got "),
        ([1.0], [1.0, 2.0], "one shape"),
        ([[[1.0]]], [[[1.0]]], "one shape"),
        (1.0, 1.0, "one shape"),
        ([], [], "order must be 1 or 2, got 0"),
        ([[], []], [[], []], "order must be 1 or 2, got 0"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "order must be 1 or 2, got 3"),
    ],
)
def test_from_values_refuses_wrong_values(low, high, part):
    with pytest.raises(ValueError, match=part):
        Modulator.from_values(low, high, low, high)


def test_from_values_accepts_integers():
    ours, expected = (Modulator.from_values([a], [a], [b], [b]) for a, b in ((2, 1), (2.0, 1.0)))
    assert all(map(torch.equal, ours.parameters(), expected.parameters()))
    with pytest.raises(ValueError, match="high term's threshold .* got .*inf"):
        Modulator.from_values([1.0], [1.0], [0.0], [-math.inf])


@pytest.mark.parametrize("heads", [0, 1.5, True, None])
def test_entmax_alpha_refuses_wrong_number_of_heads(heads):
    with pytest.raises(ValueError, match=f"heads .* got {heads}"):
        EntmaxAlpha(heads)


@pytest.mark.parametrize("temperature", [-2, 0, math.nan, math.inf, 10**400, True, "1", None])
def test_temperature_refuses_wrong_values(temperature):
    for learned in (False, True):
        with pytest.raises(ValueError, match=f"above 0, got {temperature!r}"):
            Temperature(temperature, learned)


def test_temperature_refuses_non_boolean_learned():
    with pytest.raises(ValueError, match="true or false, got 'no'"):
        Temperature(1.0, "no")


# --- the normalizer ----------------------------------------------------------------------------

OPTIONS = {name: {o.name for o in mapping.options} for name, mapping in NORMALIZERS.items()}
DEFAULTS = {name: {o.name: o.default for o in m.options} for name, m in NORMALIZERS.items()}


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizer_refuses_options_of_other_mappings(name):
    needed = EXAMPLES[name].needed
    assert EXAMPLES[name].options.keys() == OPTIONS[name], "tests/examples.py"
    for option, value in EXAMPLES[name].options.items():
        assert value != DEFAULTS[name][option]
        Normalizer(name, **{**needed, option: value})
    for owner, example in EXAMPLES.items():
        for option in example.options.keys() - OPTIONS[name]:
            Normalizer(name, 4, **needed, **{option: DEFAULTS[owner][option]})
            value = example.options[option]
            with pytest.raises(ValueError) as refusal:
                Normalizer(name, **needed, **{option: value})
            message = str(refusal.value)
            assert f"{option}={value!r}" in message and repr(name) in message
            assert all(own in message for own in OPTIONS[name] or ["none"])
    with pytest.raises(TypeError, match=rf"'warmth': the options of '{name}' are "):
        Normalizer(name, warmth=1.0)


@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizer_call_leaves_the_module_unchanged(name):
    module = Normalizer(name, 2, **EXAMPLES[name].needed)
    before = repr(module), dict(module.fixed)
    module(torch.randn(1, 2, 3, 4), hidden=torch.randn(1, 1, 3, 5))
    assert (repr(module), module.fixed) == before


@pytest.mark.parametrize("name", [name for name, m in NORMALIZERS.items() if not m.hidden])
def test_normalizer_accepts_scores_without_head_dimension(name):
    module = Normalizer(name, **EXAMPLES[name].needed).eval()
    scores = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    expected = module(scores[None, None])[0, 0]
    torch.testing.assert_close(module(scores), expected)
    for row, probs in zip(scores, expected, strict=True):
        torch.testing.assert_close(module(row), probs)


def test_normalizer_with_zero_sink_has_no_sink_parameter():
    module = Normalizer("multimax", sink="zero")
    assert module.fixed == {"sink": 0.0}
    assert all(name.startswith("modulator.") for name, _ in module.named_parameters())


@pytest.mark.parametrize("need_probs", [False, True])
def test_normalizer_attend_applies_given_scale(need_probs):
    query, key, value = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    found, _ = Normalizer("softmax").attend(query, key, value, scale=1.0, need_probs=need_probs)
    torch.testing.assert_close(found, (query @ key.mT).softmax(-1) @ value)


@pytest.mark.parametrize("name", ["evsoftmax", "adaptive_temperature"])
def test_normalizer_follows_training_mode(name):
    # Scores so close that adaptive temperature sharpens every row.
    module, scores = Normalizer(name), torch.randn(5, 8)
    found = {training: module.train(training)(scores) for training in (True, False)}
    for training, probs in found.items():
        assert torch.equal(probs, normalize(name, scores, training=training))
    assert not torch.equal(found[True], found[False])


@pytest.mark.parametrize(
    "name, options",
    [
        ("softmax", {}),
        ("multimax", {}),
        ("multimax", {"sink": "learned"}),
        ("multimax", {"sink": "learned", "length_scale": True}),
        ("ssmax", {}),
        ("softmax1", {}),
        ("softcap", {"cap": 1.0}),
        ("sink", {}),
    ],
)
def test_normalizer_attend_uses_kernel_for_softmax_mappings(monkeypatch, name, options):
    calls, fused = [], attention.attention
    monkeypatch.setattr(attention, "attention", lambda *x: calls.append(x) or fused(*x))
    module = Normalizer(name, 3, **options)
    query, key, value = (torch.randn(2, 3, 5, 8) for _ in range(3))
    for is_causal in (False, True):
        found, unread = module.attend(query, key, value, is_causal=is_causal)
        assert unread is None and len(calls) == 1 and calls.pop()
        plain, probs = module.attend(query, key, value, is_causal=is_causal, need_probs=True)
        torch.testing.assert_close(found, plain)
        assert not calls and bool(probs.triu(1).any()) != is_causal


@pytest.mark.parametrize(
    "name, arguments, part",
    [
        ("topk", {}, "got None"),
        ("topk", {"k": 0}, "got 0"),
        ("topk", {"k": 2.5}, r"got 2\.5"),
        ("topk", {"k": True}, "got True"),
        ("alpha_entmax", {"alpha": 0.5}, r"got 0\.5"),
        ("alpha_entmax", {"alpha": math.nan}, "got nan"),
        ("alpha_entmax", {"alpha": math.inf}, "got inf"),
        ("alpha_entmax", {"alpha": "1.5"}, "got '1.5'"),
        ("softmax", {"temperature": math.inf}, "got inf"),
        ("softmax", {"temperature": True}, "got True"),
        ("softmax", {"learn_temperature": 0}, "got 0"),
        ("softmax", {"num_heads": 0}, "heads .* got 0"),
        ("sparsemax", {"num_heads": 1.5}, r"heads .* got 1\.5"),
        ("alpha_entmax", {"num_heads": 0}, "heads .* got 0"),
        ("ssmax", {"start": math.nan}, "got nan"),
        ("sigmoid", {"bias": math.inf}, "got inf"),
        ("multimax", {"sink": "some"}, "none, zero, learned, got 'some'"),
        ("asentmax", {}, "hidden_size, .* got None"),
        ("asentmax", {"hidden_size": 0}, "hidden_size, .* got 0"),
    ],
)
def test_normalizer_refuses_arguments_by_name(name, arguments, part):
    with pytest.raises(ValueError, match=part):
        Normalizer(name, **arguments)


# --- replace_softmax ---------------------------------------------------------------------------


def test_replace_softmax_keeps_large_negative_scores():
    module = replaced(lambda x: x.softmax(-1), monotone=False, init_std=0.1)
    for lowest in (-10.0, -300.0, -1000.0):
        scores = torch.linspace(lowest, lowest + 5, 12)
        torch.testing.assert_close(module(scores), module.normalizer(scores))


def test_replace_softmax_keeps_half_precision_dtype():
    x = torch.randn(5, 3, 8, dtype=torch.bfloat16)
    attention = torch.nn.MultiheadAttention(8, 2, dtype=torch.bfloat16)
    expected = attention(x, x, x)
    replace_softmax(attention, "softmax")
    for found, plain in zip(attention(x, x, x), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=0.02, atol=0.02)
    with torch.autocast("cpu", torch.bfloat16):
        assert replaced(lambda x: x.softmax(-1))(x).dtype == x.softmax(-1).dtype


# --- fairseq's attention, incrementally ----------------------------------------------------------


def self_attention(**options):
    """A head dimension of 16, which the decoding kernel supports."""
    torch.manual_seed(0)
    stock = SoftmaxMultiheadAttention(32, 2, self_attention=True, **options)
    return MultiheadAttention(stock, Normalizer("multimax", init_std=0.3)).eval()


def stepped(layer, x, read=(False,) * 5, padding=None):
    """Return the outputs of steps; `read` gives the steps at which the weights are read."""
    state = {}
    given = [None] * 5 if padding is None else padding.split(1, 1)
    found = [
        layer(one[None], None, None, hides, incremental_state=state, need_weights=needed)[0]
        for one, needed, hides in zip(x, read, given, strict=True)
    ]
    return torch.cat(found)


def all_at_once(layer, x, padding=None):
    mask = torch.full((5, 5), -math.inf).triu(1)
    return layer(x, x, x, padding, attn_mask=mask, need_weights=False)[0]


@torch.no_grad()
def test_attention_step_equals_full_pass_if_weights_are_read():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    expected = all_at_once(layer, x)
    for read in itertools.product((False, True), repeat=5):
        torch.testing.assert_close(stepped(layer, x, read), expected)


@torch.no_grad()
def test_attention_averages_the_weights_of_its_heads():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    _, mean = layer(x, x, x)
    _, weights = layer(x, x, x, need_head_weights=True)
    assert weights.shape == (2, 3, 5, 5) and not weights[0].allclose(weights[1])
    torch.testing.assert_close(mean, weights.mean(0))


@torch.no_grad()
def test_attention_step_returns_head_weights():
    x = torch.randn(1, 3, 32, generator=torch.Generator().manual_seed(0))
    options = {"need_weights": False, "need_head_weights": True}
    _, weights = self_attention()(x, x, x, incremental_state={}, **options)
    assert torch.equal(weights, torch.ones(2, 3, 1, 1))  # there is only one word


@torch.no_grad()
def test_attention_step_applies_padding_and_extra_keys():
    x, padding = torch.randn(5, 3, 32), torch.zeros(3, 5).bool()
    padding[1, 2], padding[2, 3:] = True, True
    for options in ({}, {"add_bias_kv": True}, {"add_zero_attn": True}):
        layer = self_attention(**options)
        torch.testing.assert_close(stepped(layer, x), all_at_once(layer, x))
        expected = all_at_once(layer, x, padding)
        torch.testing.assert_close(stepped(layer, x, padding=padding), expected)


def test_attention_step_gradients_equal_full_pass():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    expected, found = (
        torch.autograd.grad(call(layer, x).square().sum(), layer.parameters())
        for call in (all_at_once, stepped)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_applies_retained_dropout_in_evaluation():
    layer, x = self_attention(dropout=1.0), torch.randn(5, 3, 32)
    nothing = layer.out_proj.bias.expand(5, 3, 32)
    for is_retained in (False, True):
        layer.dropout_module.apply_during_inference = is_retained
        for call in (all_at_once, stepped):
            assert torch.equal(call(layer, x), nothing) == is_retained


@torch.no_grad()
@pytest.mark.parametrize("kind", ["float", "bool"])
def test_attention_step_applies_mask(kind):
    layer, x = self_attention(), torch.randn(5, 3, 32)
    mask = torch.ones(5, 5).bool().triu(1)
    mask[3, :2] = mask[4, 1] = True
    if kind == "float":
        mask = torch.zeros(5, 5).masked_fill(mask, -math.inf)
    state, expected = {}, layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    given = {"incremental_state": state, "need_weights": False}
    for step, one in enumerate(x):
        seen = mask[step : step + 1, : step + 1]
        found = layer(one[None], None, None, attn_mask=seen, **given)[0]
        torch.testing.assert_close(found, expected[step : step + 1])


@torch.no_grad()
def test_attention_step_accepts_several_tokens():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    state = {}
    layer(x[:3], None, None, incremental_state=state, need_weights=False)
    found = layer(x[3:], None, None, incremental_state=state, need_weights=False)[0]
    expected = layer(x, x, x, need_weights=False)[0][3:]
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_attention_accepts_uint8_mask():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    excluded = torch.ones(5, 5).triu(1)
    expected, found = (
        layer(x, x, x, attn_mask=excluded.to(dtype))[0] for dtype in (torch.bool, torch.uint8)
    )
    assert torch.equal(found, expected)


def test_attention_refuses_xformers_layers():
    stock = SoftmaxMultiheadAttention(8, 2, self_attention=True)
    stock.use_xformers = True
    with pytest.raises(ValueError, match="leave out the xFormers option"):
        MultiheadAttention(stock, Normalizer())


def test_attention_refuses_before_softmax():
    layer, x = self_attention(), torch.randn(5, 3, 32)
    with pytest.raises(ValueError, match="before_softmax=True is not supported"):
        layer(x, x, x, before_softmax=True)


@pytest.mark.parametrize(
    "name, options",
    [
        ("multimax", {}),
        ("multimax", {"sink": "learned"}),
        ("softmax", {"temperature": 2.0, "learn_temperature": True}),
    ],
)
def test_keep_heads_keeps_shared_parameters(name, options):
    normalizer = Normalizer(name, **options)
    before = {key: value.clone() for key, value in normalizer.state_dict().items()}
    normalizer.keep_heads([1])
    after = normalizer.state_dict()
    assert before and all(torch.equal(after[key], value) for key, value in before.items())


def test_cross_attention_accepts_one_key_per_sentence_with_beams():
    torch.manual_seed(0)
    stock = SoftmaxMultiheadAttention(8, 2, encoder_decoder_attention=True)
    ours = MultiheadAttention(stock, Normalizer(init_std=0.5)).eval()
    ours.set_beam_size(3)
    query, key = torch.randn(1, 6, 8), torch.randn(5, 2, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    repeated = key.repeat_interleave(3, 1), padding.repeat_interleave(3, 0)
    once, each = (
        ours(query, k, k, hides, incremental_state={}, static_kv=True)
        for k, hides in ((key, padding), repeated)
    )
    torch.testing.assert_close(once, each)
