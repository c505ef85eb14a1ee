"""Properties of single mappings: key counts, sinks, hidden states and gates."""

import math

import numpy as np
import pytest
import reference
import torch
from fairseq.models import BaseFairseqModel
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from random_inputs import drawn
from recorded_programs import NEEDS_KERNELS
from toy_models import scatter_modulators

from multimax_fairseq import (
    NORMALIZERS,
    Modulator,
    Normalizer,
    normalize,
    replace_softmax,
    scaled_dot_product_attention,
)
from multimax_fairseq.mappings.entmax import EntmaxAlpha
from multimax_fairseq.mappings.length_scale import HiddenScale, LengthScale
from multimax_fairseq.mappings.sinks import Sink
from multimax_fairseq.models import learned_scalars
from multimax_fairseq.models.learned_scalars import symbols
from multimax_fairseq.modules import ContinuousAttention, GatedAttention
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.attention import AttentionInputs
from multimax_fairseq.ops.masks import key_counts
from multimax_fairseq.statistics import metrics

B, H, T, S, D, C = 2, 3, 4, 6, 8, 5
TRANSLATION = "transformer_multimax"


def heads():
    return drawn(B, H, T, D), drawn(B, H, S, D, seed=1), drawn(B, H, S, D, seed=2)


# --- counts of keys ----------------------------------------------------------------------------

MASKS = {
    "none": None,
    "a key each": torch.eye(4, 6) < 1,
    "padding": torch.tensor([0, 0, 0, 1, 1, 1]).bool().expand(2, 1, 1, 6),
    "of a key": torch.tensor([1, 0, 0, 0, 0, 0]).bool(),
    "of queries": torch.tensor([[0], [1], [0], [1]]).bool(),
    "nothing left": torch.ones(1, 6).bool(),
}


@pytest.mark.parametrize("added", [-torch.inf, -1e9, -1e4, torch.finfo(torch.float16).min])
@pytest.mark.parametrize("name", MASKS)
def test_key_counts_accepts_every_kind_of_mask(name, added):
    scores, mask = drawn(B, H, T, S), MASKS[name]
    full = torch.zeros(B, H, T, S).bool() if mask is None else mask.expand(B, H, T, S)
    expected = (~full).sum(-1, keepdim=True).clamp(min=1).float().expand(B, H, T, 1)
    for form in [mask] if mask is None else [mask, torch.where(mask, added, 0.5)]:
        assert torch.equal(key_counts(scores, -1, form).expand(B, H, T, 1), expected)
    if mask is not None:
        turned = key_counts(scores.mT, -2, full.mT)
        assert torch.equal(turned.mT, expected)


@pytest.mark.parametrize("normalizer, options", [("ssmax", {"length_scale": 0.7}), ("sigmoid", {})])
def test_attention_counts_only_visible_keys(normalizer, options):
    query, key, value = heads()
    whole = scaled_dot_product_attention(
        query, key, value, normalizer=normalizer, is_causal=True, **options
    )
    for t in range(T):
        step = scaled_dot_product_attention(
            *(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1]),
            normalizer=normalizer,
            **options,
        )
        torch.testing.assert_close(whole[:, :, t : t + 1], step)
    allowed = torch.arange(S) < 4
    padded = scaled_dot_product_attention(
        query, key, value, normalizer=normalizer, attn_mask=allowed, **options
    )
    short = scaled_dot_product_attention(
        query, key[:, :, :4], value[:, :, :4], normalizer=normalizer, **options
    )
    torch.testing.assert_close(padded, short)


@NEEDS_KERNELS
@pytest.mark.parametrize("normalizer, options", [("softmax", {}), ("ssmax", {"length_scale": 0.7})])
@pytest.mark.parametrize("queries", [2, 12])
@pytest.mark.parametrize("allowed", [[0, 1, 3, 5], [2, 3, 4, 5]], ids=["scattered", "left-padded"])
def test_attention_ignores_values_of_masked_keys(allowed, queries, normalizer, options):
    """Few and many queries use different kernels."""
    lengths = enumerate((queries, S, S))
    query, key, value = (drawn(B, H, n, 16, seed=seed) for seed, n in lengths)
    mask = torch.zeros(S).bool()
    mask[allowed] = True
    expected = scaled_dot_product_attention(
        query, key[:, :, mask], value[:, :, mask], normalizer=normalizer, backend="plain", **options
    )
    for number in (0.5, math.inf, math.nan):
        found = scaled_dot_product_attention(
            *(query, key.masked_fill(~mask[:, None], number), value),
            attn_mask=mask, normalizer=normalizer, backend="cpp", **options,
        )  # fmt: skip
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("keys", [0, S])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", [torch.tensor(True), torch.tensor(0.0), torch.ones(1, 1).bool()])
def test_attention_with_scalar_mask_keeps_key_counts(mask, is_causal, keys):
    query, key, value = heads()
    given = {"normalizer": "ssmax", "length_scale": 0.7, "is_causal": is_causal}
    inputs = (query, key[:, :, :keys], value[:, :, :keys])
    found = scaled_dot_product_attention(*inputs, attn_mask=mask, **given)
    torch.testing.assert_close(found, scaled_dot_product_attention(*inputs, **given))


def test_key_counts_accepts_empty_inputs():
    assert key_counts(torch.zeros(2, 0)) == 1
    query, (_, key, value) = drawn(B, H, 0, D), heads()
    mask = torch.zeros(0, S)
    for backend in ("auto", "plain"):
        found = scaled_dot_product_attention(
            *(query, key, value), normalizer="ssmax", length_scale=1.0, is_causal=True,
            attn_mask=mask, backend=backend,
        )  # fmt: skip
        assert found.shape == (B, H, 0, D)


def test_key_counts_returns_float32_for_half_precision():
    scores = torch.zeros(1, 4001, dtype=torch.float16)  # float16 has no 4001
    for mask in (None, torch.zeros(1, 4001).bool()):
        count = key_counts(scores, -1, mask)
        assert count == 4001 and count.dtype == torch.float32


def test_ssmax_of_float64_scores_computes_in_float64():
    scores, scale = drawn(B, H, T, S).double(), torch.full((H, 1, 1), 0.4)
    expected = normalize("ssmax", scores, length_scale=scale.double())
    assert torch.equal(normalize("ssmax", scores, length_scale=scale), expected)


def test_ssmax_equals_softmax_at_inverse_log_of_key_count():
    scores = drawn(T, S)
    torch.testing.assert_close(
        normalize("ssmax", scores, length_scale=1 / math.log(S)), scores.softmax(-1)
    )
    assert torch.equal(normalize("ssmax", scores[:, :1], length_scale=3.0), torch.ones(T, 1))


def test_multimax_multiplies_modulated_scores_by_the_outer_scale():
    scores, modulator = drawn(B, H, T, S).double(), Modulator(init_std=0.3).double()
    mask, scale = MASKS["a key each"], drawn(H, 1, 1, seed=1).double()
    found = normalize("multimax", scores, mask=mask, modulator=modulator, outer_scale=scale)
    by_hand = torch.softmax(
        (scale * math.log(S - 1) * modulator(scores)).masked_fill(mask, -1e9), -1
    )
    torch.testing.assert_close(found, by_hand)

    ssmax = normalize("ssmax", modulator(scores), mask=mask, length_scale=scale)
    torch.testing.assert_close(found, ssmax)


def test_multimax_refuses_a_model_with_the_scale_inside():
    old = Normalizer("multimax", length_scale=True).state_dict()
    old["length_scale.scale"] = old.pop("outer_scale.scale")
    with pytest.raises(ValueError, match="train again, or install the version that trained it"):
        Normalizer("multimax", length_scale=True).load_state_dict(old)


def test_multimax_with_a_length_scale_has_the_gradients_of_plain_pytorch():
    normalizer = Normalizer("multimax", H, init_std=0.3, length_scale=True)
    query, key, value = heads()
    mask = MASKS["padding"]
    found = []
    for need_probs in (False, True):
        inputs = [t.clone().requires_grad_() for t in (query, key, value)]
        context, _ = normalizer.attend(*inputs, mask, need_probs=need_probs)
        learned = [*inputs, *normalizer.parameters()]
        found.append(torch.autograd.grad(context.square().sum(), learned))
    assert len(found[0]) == 3 + 4 + 1
    for fused, plain in zip(*found, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ssmax", "asentmax", "adaptive_temperature", "multimax"])
@pytest.mark.parametrize("masked", [False, True])
def test_normalize_ignores_scores_of_minus_infinity(name, masked):
    """A score of -inf gives the probabilities and gradients of a very low score."""
    names = {
        "asentmax": ("beta", "gamma"),
        "adaptive_temperature": (),
        "multimax": ("outer_scale",),
    }
    factors = names.get(name, ("length_scale",))
    options = {factor: torch.full((1,), 0.7, requires_grad=True) for factor in factors}
    fixed = {"modulator": Modulator(init_std=0.0)} if name == "multimax" else {}
    mask = torch.tensor([False, False, False, True]) if masked else None
    found = []
    for low in (-torch.inf, -1e4):
        scores = torch.tensor([1.0, low, 0.0, 0.5], requires_grad=True)
        probs = normalize(name, scores, mask=mask, **options, **fixed)
        weighted = probs @ torch.tensor([1.0, 2.0, 3.0, 5.0])
        found.append([probs, *torch.autograd.grad(weighted, (scores, *options.values()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name, options",
    [
        ("ssmax", {"length_scale": 1.0}),
        ("asentmax", {"beta": 0.5, "gamma": 0.5}),
        ("adaptive_temperature", {}),
    ],
)
def test_normalize_ignores_masked_scores_for_the_maximum(name, options):
    scores, mask = torch.tensor([0.0, 1.0, 1e9]), torch.tensor([False, False, True])
    found = normalize(name, scores, mask=mask, **options)
    torch.testing.assert_close(found[:2], normalize(name, scores[:2], **options))


def test_adaptive_temperature_sharpens_uncertain_rows_only():
    certain, spread = torch.tensor([[6.0, 0, 0, 0]]), torch.tensor([[1.0, 0.5, 0, -0.5]])
    for rows in (certain, spread):
        probs, plain = normalize("adaptive_temperature", rows), rows.softmax(-1)
        assert torch.equal(probs, plain) == (rows is certain)
        assert metrics.entropy(probs) <= metrics.entropy(plain)
    # At this entropy the polynomial is below 1, so the scores stay unchanged.
    many = torch.zeros(1, 500)
    assert np.polyval([-0.037, 0.481, -2.3, 4.917, -1.791], math.log(500)) < 1
    torch.testing.assert_close(normalize("adaptive_temperature", many), many.softmax(-1))


# --- sinks, and rows that do not sum to one ------------------------------------------------------


def test_sink_has_softmax_and_zero_weights_as_limits():
    scores, module = drawn(T, S), Modulator(init_std=0.2)
    for name, options in (("sink", {}), ("multimax", {"modulator": module})):
        plain = normalize("softmax" if name == "sink" else name, scores, **options)
        below = normalize(name, scores, sink=Sink().softmax_state()["score"], **options)
        torch.testing.assert_close(below, plain)
        assert torch.equal(normalize(name, scores, sink=-torch.inf, **options), plain)
        assert normalize(name, scores, sink=1e4, **options).max() == 0


def test_softpick_gives_zero_weight_to_negative_scores():
    scores = torch.tensor([[1.0, -2.0, 0.5], [-1.0, -200.0, -3.0]], requires_grad=True)
    weights = normalize("softpick", scores)
    assert torch.equal(weights > 0, scores > 0)
    weights.pow(2).sum().backward()
    assert scores.grad[0].ne(0).all() and scores.grad[1].eq(0).all()
    # Small scores keep their precision, unlike with exp(x) - 1.
    small = torch.tensor([[1e-7, 3e-7]])
    expected = reference.softpick(small.double().numpy(), np.zeros((1, 2), bool))
    np.testing.assert_allclose(normalize("softpick", small), expected, rtol=1e-5)
    # A key masked by a large negative number has no share, for any score.
    mask = torch.tensor([0.0, -5000.0, 0.0])
    found = normalize("softpick", torch.tensor([1.0, 6000.0, 0.5]), mask=mask)
    torch.testing.assert_close(found[::2], normalize("softpick", torch.tensor([1.0, 0.5])))
    assert found[1] == 0


@pytest.mark.parametrize("name", [n for n, m in NORMALIZERS.items() if not m.sums_to_one])
def test_metrics_normalize_rows_with_other_sums(name):
    scores = drawn(B, H, T, S)
    probs = Normalizer(name)(scores).detach()
    found = metrics.of_queries(scores, probs)
    assert not Normalizer(name).sums_to_one
    torch.testing.assert_close(found["mass"], probs.sum(-1))
    assert (found["mass"] - 1).abs().max() > 0.01
    for part in np.ndindex(B, H, T):
        row = probs[part].double().numpy()
        share = row[row > 0] / row.sum()
        expected = -(share * np.log(share)).sum() if len(share) else math.nan
        np.testing.assert_allclose(found["entropy"][part], expected, rtol=1e-5, atol=1e-6)
    one = probs[:, :1].expand(B, H, T, S)  # equal heads with different scales
    scaled = one * torch.tensor([1.0, 0.5, 0.1])[:, None, None]
    torch.testing.assert_close(
        metrics.head_diversity(scaled).nan_to_num(), torch.zeros(B, T), rtol=0, atol=1e-6
    )


def test_normalizer_with_sink_reports_sums_to_one_false():
    assert Normalizer("multimax").sums_to_one and Normalizer("multimax").modulated
    for sink in ("zero", "learned"):
        normalizer = Normalizer("multimax", sink=sink)
        assert not normalizer.sums_to_one and not normalizer.modulated


# --- what is learned -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, part",
    [
        (lambda: Sink(0), "got 0"),
        (lambda: LengthScale(1.5), r"got 1\.5"),
        (lambda: LengthScale(2, math.inf), "got inf"),
        (lambda: HiddenScale("delta", 4), "'delta': choose beta or gamma"),
        (lambda: HiddenScale("beta", 0), "hidden_size .* got 0"),
        (lambda: HiddenScale("beta", 4, 0), "num_heads .* got 0"),
        (lambda: GatedAttention(Normalizer(), 0, 2, 4), "hidden_size .* got 0"),
        (lambda: GatedAttention(Normalizer(), 4, 0, 4), "num_heads .* got 0"),
        (lambda: GatedAttention(Normalizer(), 4, 2, 0), "head_size .* got 0"),
    ],
)
def test_modules_refuse_arguments_by_name(build, part):
    with pytest.raises(ValueError, match=part):
        build()


def test_parameters_start_with_small_standard_deviation():
    torch.manual_seed(0)
    for values in (Sink(4000).score, HiddenScale("gamma", 1000, 4).weight):
        assert float(values.std()) == pytest.approx(0.02, rel=0.1) and values.mean().abs() < 0.002


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_in_half_precision_give_float32(dtype):
    hidden = drawn(B, 1, T, C, seed=3).to(dtype)
    for module, given in (
        (EntmaxAlpha(H), ()),
        (Sink(H), ()),
        (LengthScale(H), ()),
        (HiddenScale("beta", C, H), (hidden,)),
        (HiddenScale("gamma", C, H), (hidden,)),
    ):
        found = module.to(dtype)(*given)
        assert found.dtype == torch.float32
        expected = module.double()(*(x.double() for x in given))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


def test_asentmax_reads_the_hidden_states_of_queries():
    torch.manual_seed(0)
    normalizer = Normalizer("asentmax", H, C)
    hidden = 5 * drawn(B, 1, T, C, seed=3)
    query, key, value = heads()
    mask = (torch.arange(S) >= torch.tensor([S, 4])[:, None])[:, None, None]
    context, probs = normalizer.attend(query, key, value, mask, need_probs=True, hidden=hidden)
    scores = (query @ key.mT / math.sqrt(D)).double().numpy()
    weights = {n: p.detach().double().numpy() for n, p in normalizer.named_parameters()}
    state = hidden[:, 0].double().numpy()
    for b, h, t in np.ndindex(B, H, T):
        beta = math.log1p(math.exp(weights["beta.weight"][h] @ state[b, t]))
        gamma = 2 * math.tanh(weights["gamma.weight"][h] @ state[b, t])
        excluded = mask[b, 0].numpy()
        expected = reference.asentmax(scores[b, h, t][None], excluded, beta, gamma)[0]
        np.testing.assert_allclose(probs[b, h, t].detach(), expected, atol=1e-5)
    torch.testing.assert_close(context, probs @ value)
    context.square().sum().backward()
    assert all(p.grad.abs().sum(-1).gt(0).all() for p in normalizer.parameters())
    with pytest.raises(ValueError, match="pass them as hidden"):
        normalizer.attend(query, key, value)
    with pytest.raises(ValueError, match="reads hidden states, which softmax does not receive"):
        replace_softmax(torch.nn.MultiheadAttention(8, 2), "asentmax")


@pytest.mark.parametrize("continuous", [False, True])
def test_gated_attention_multiplies_the_context(continuous):
    torch.manual_seed(0)
    inner = Normalizer("softmax")
    inner = ContinuousAttention(inner) if continuous else inner
    module = GatedAttention(inner, C, H, D)
    hidden, tensors = drawn(B, 1, T, C, seed=3), heads()
    context, _ = inner.attend(*tensors)
    torch.testing.assert_close(module.attend(*tensors, hidden=hidden)[0], context / 2)
    torch.nn.init.normal_(module.gate.weight)
    gate = (hidden[:, 0] @ module.gate.weight.T).sigmoid().unflatten(-1, (H, D)).transpose(1, 2)
    torch.testing.assert_close(module.attend(*tensors, hidden=hidden)[0], context * gate)
    scores = tensors[0] @ tensors[1].mT
    by_scores, _ = module.attend_by_scores(scores, tensors[2], hidden=hidden)
    torch.testing.assert_close(by_scores, inner.attend_by_scores(scores, tensors[2])[0] * gate)
    assert (module.static_values(tensors[2]).shape[2] > S) == continuous
    half = [t.bfloat16() for t in tensors]
    assert module.attend(*half, hidden=hidden)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="pass them as hidden"):
        module.attend(*tensors)
    kept = [2, 0]
    module.keep_heads(kept)
    fewer = [t[:, kept] for t in tensors]
    torch.testing.assert_close(
        module.attend(*fewer, hidden=hidden)[0], (context * gate)[:, kept], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("by_scores", [False, True])
def test_gated_attention_forwards_arguments(by_scores):
    """The gate forwards dropout, scale and probabilities; its initial factor is one half."""
    inner, (query, key, value), hidden = Normalizer("softmax"), heads(), drawn(B, 1, T, C, seed=3)
    found = []
    for attention in (inner, GatedAttention(inner, C, H, D)):
        torch.manual_seed(0)
        if by_scores:
            given = (query @ key.mT, value, None, 0.5, True, hidden)
            found.append(attention.attend_by_scores(*given))
        else:
            inputs = AttentionInputs(query, key, value, None, True, 0.5, 0.7, hidden)
            found.append(attention.attention(inputs, need_probs=True))
    (context, probs), (gated, same) = found
    torch.testing.assert_close(gated, context / 2)
    torch.testing.assert_close(same, probs)


def test_keep_heads_selects_parameters_and_gates():
    torch.manual_seed(0)
    stock = SoftmaxMultiheadAttention(12, 3, self_attention=True)
    for name in ("ssmax", "sink", "asentmax", "multimax"):
        normalizer = Normalizer(name, 3, 12)
        attention = MultiheadAttention(stock, GatedAttention(normalizer, 12, 3, 4)).eval()
        before = {n: p.clone() for n, p in normalizer.named_parameters()}
        attention.normalizer.keep_heads([2, 0])
        for n, p in normalizer.named_parameters():
            assert torch.equal(p, before[n][[2, 0]])
        assert attention.normalizer.normalizer is normalizer
        assert "num_heads=3" not in repr(normalizer)
    shared = Normalizer("multimax")
    before = shared.state_dict()
    shared.keep_heads([2, 0])
    assert all(torch.equal(p, before[n]) for n, p in shared.state_dict().items())


def test_symbols_returns_the_papers_values_in_float64():
    values, scalar = drawn(2, 2).half(), torch.tensor(0.5)
    exact = values.double()
    for name, value, expected in (
        ("modulator.low_coefficient", values, {"t_b1": 1 - exact[:, 0], "t_b2": 1 - exact[:, 1]}),
        ("modulator.high_coefficient", values, {"t_d1": 1 + exact[:, 0], "t_d2": 1 + exact[:, 1]}),
        ("modulator.high_threshold", values, {"d1": exact[:, 0], "d2": exact[:, 1]}),
        ("alpha.logit", values[0], {"alpha": 1 + exact[0].sigmoid()}),
        ("modulator.log_temperature", scalar, {"temperature": scalar.double().exp()[None]}),
        ("modulator.log_width", scalar, {"width": scalar.double().exp()[None]}),
        ("modulator.shift", scalar, {"shift": scalar.double()[None]}),
        ("sink.score", values[0], {"sink.score": exact[0]}),
        ("beta.weight", values, {}),
    ):
        before = torch.random.get_rng_state()
        found = symbols(f"layers.0.self_attn.normalizer.{name}", value)
        assert torch.equal(torch.random.get_rng_state(), before)
        assert found.keys() == expected.keys()
        for symbol, numbers in expected.items():
            torch.testing.assert_close(found[symbol], numbers, rtol=1e-12, atol=0)
    assert list(symbols("decoder.output_modulator.shift", scalar)) == ["shift"]


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.3, 1.7, torch.tensor([[1.2], [1.4], [1.8]])])
def test_alpha_entmax_passes_gradgradcheck_with_zeros(alpha):
    scores = 2 * torch.randn(3, 6, generator=torch.Generator().manual_seed(3)).double()
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 2] = True
    given = (scores, alpha.double()) if isinstance(alpha, torch.Tensor) else (scores,)
    given = tuple(t.clone().requires_grad_() for t in given)

    def mapping(scores, alpha=alpha):
        return normalize("alpha_entmax", scores, mask=mask, alpha=alpha)

    assert ((mapping(*given) == 0) & ~mask).any()
    assert torch.autograd.gradcheck(mapping, given)
    assert torch.autograd.gradgradcheck(mapping, given)


# --- models --------------------------------------------------------------------------------------


def test_load_state_dict_logs_missing_normalizer_parameters(build, caplog):
    model = build(TRANSLATION, "--attention-normalizer", "softmax")
    with caplog.at_level("INFO", learned_scalars.logger.name):
        model.load_state_dict(model.state_dict())
        assert "normalizers learn" not in caplog.text
        build(TRANSLATION, "--attention-normalizer", "multimax").load_state_dict(model.state_dict())
        assert "the checkpoint has no parameters of a mapping" in caplog.text
        caplog.clear()
        other = build(TRANSLATION, "--attention-normalizer", "sink")
        with pytest.raises(RuntimeError, match="Unexpected key.*modulator"):
            other.load_state_dict(build(TRANSLATION).state_dict())
        assert "normalizers learn" not in caplog.text


@torch.no_grad()
@pytest.mark.parametrize(
    "flags", [("--attention-normalizer", "sink"), ("--multimax-sink", "learned")]
)
def test_load_state_dict_of_softmax_model_turns_sinks_off(build, translation_batch, flags):
    stock = build(TRANSLATION, "--attention-normalizer", "softmax").eval()
    sample = translation_batch()
    expected = stock(**sample["net_input"])[0]
    model = build(TRANSLATION, *flags, seed=2).eval()
    assert not torch.allclose(model(**sample["net_input"])[0], expected, atol=1e-3)
    model.load_state_dict(stock.state_dict())
    torch.testing.assert_close(model(**sample["net_input"])[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flags", [("--attention-normalizer", "asentmax"), ("--attention-gate",)])
def test_learned_scalar_marks_exclude_matrices(build, flags):
    model = build(TRANSLATION, *flags)
    marked = {n for n, p in model.named_parameters() if getattr(p, "learned_scalar", False)}
    matrices = {
        n for n, _ in model.named_parameters() if n.endswith(("beta.weight", "gate.weight"))
    }
    assert matrices and not matrices & marked
    scatter_modulators(model)
    assert all(model.get_parameter(name).abs().max() > 0.1 for name in matrices)


def test_build_model_keeps_initial_values_of_other_parameters(build):
    stock = build(TRANSLATION, "--attention-normalizer", "softmax").state_dict()
    for flags in (("--attention-normalizer", "asentmax"), ("--attention-gate",)):
        state = build(TRANSLATION, *flags).state_dict()
        assert all(torch.equal(value, state[name]) for name, value in stock.items())


def test_load_state_dict_supports_nested_models(build):
    class Around(BaseFairseqModel):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    outer = Around(build(TRANSLATION))
    state = {name: value + 1 for name, value in outer.state_dict().items()}
    outer.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in outer.state_dict().items())
    stock = Around(build(TRANSLATION, "--attention-normalizer", "softmax")).state_dict()
    outer.load_state_dict(stock)
    learned = [v for name, v in outer.state_dict().items() if "coefficient" in name]
    assert learned and not any(map(torch.count_nonzero, learned))


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_ssmax_refuses_an_infinite_length_scale_in_every_backend(backend):
    parts = torch.randn(3, 1, 2, 4, 16)
    options = {"normalizer": "ssmax", "length_scale": -math.inf, "backend": backend}
    with pytest.raises(ValueError, match="length_scale must be finite, got -inf"):
        scaled_dot_product_attention(*parts, **options)


@pytest.mark.parametrize(
    "name, options",
    [
        ("sink", {"sink": None}),
        ("ssmax", {"length_scale": None}),
        ("adaptive_temperature", {"training": 1}),
    ],
)
def test_attention_refuses_options_of_the_wrong_type(name, options):
    query = torch.randn(1, H, T, D)
    with pytest.raises(TypeError, match=next(iter(options))):
        scaled_dot_product_attention(query, query, query, normalizer=name, **options)
