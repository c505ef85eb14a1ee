"""The models compute one function in every path, and the stock model's at the identity."""

import copy
import math

import pytest
import torch
import toy_models
from decoding import TOLERANCE, full_context, incremental, log_probs, score_of
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.modules import FairseqDropout, SinusoidalPositionalEmbedding
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from toy_models import attentions, parameters_of, scatter_modulators

from multimax_fairseq import NORMALIZERS, Modulator
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.modules.multihead_attention import MultiheadAttention

pytestmark = pytest.mark.long

TRANSLATION = ("transformer_multimax", "transformer_iwslt_de_en_multimax")
SHARED = ("--share-all-embeddings",)
SOFTMAX, ENTMAX = (("--attention-normalizer", name) for name in ("softmax", "alpha_entmax"))
STOCK = {"softmax", "multimax", "topk"}  # have their own flags
FLAGS = {
    "default": (),
    "output": ("--output-normalizer", "multimax"),
    "separate heads": ("--multimax-heads", "separate", "--output-normalizer", "multimax"),
    "low, first order": ("--multimax-terms", "low", "--multimax-order", "1"),
    "cross alone": ("--attention-normalizer-at", "cross"),
    "pre-norm": ("--encoder-normalize-before", "--decoder-normalize-before"),
    "cross+self": ("--cross-self-attention", "--no-cross-attention"),
    "topk": ("--attention-normalizer", "topk", "--topk", "3"),
    "temperature": ("--attention-normalizer", "softmax", "--learn-temperature"),
    "monotone": ("--multimax-monotone", "--output-normalizer", "multimax"),
    "multimax with a sink": ("--multimax-sink", "learned", "--multimax-heads", "separate"),
    "multimax with a length scale": ("--multimax-length-scale",),
    "gate": ("--attention-gate",),
    **{n: ("--attention-normalizer", n) for n in sorted(NORMALIZERS.keys() - STOCK)},
    "one each": ("--attention-normalizer-at", "encoder=entmax15,decoder,cross=sparsemax"),
}


# --- which attentions are built ----------------------------------------------------------------


@pytest.mark.parametrize("selected", ["encoder", "decoder", "cross", "encoder,cross"])
def test_attention_normalizer_at_selects_the_attentions(build, selected):
    model = build(TRANSLATION[0], "--attention-normalizer-at", selected)
    kinds = {"encoder.": "encoder", "decoder.": "decoder"}
    for name, module in attentions(model).items():
        kind = "cross" if "encoder_attn" in name else kinds[name[:8]]
        assert isinstance(module, MultiheadAttention) == (kind in selected.split(","))
    assert len(attentions(model)) == 6


def test_attention_normalizer_at_sets_a_mapping_per_attention(build):
    model = build(TRANSLATION[0], *FLAGS["one each"])
    names = {name: module.normalizer.name for name, module in attentions(model).items()}
    assert names["encoder.layers.1.self_attn"] == "entmax15"
    assert names["decoder.layers.0.self_attn"] == "multimax"
    assert names["decoder.layers.1.encoder_attn"] == "sparsemax"
    assert len(names) == 6


def test_temperature_and_alpha_reach_the_attention(build, translation_batch):
    sample = translation_batch()
    full = [
        full_context(build(TRANSLATION[0], *flags).eval(), sample)
        for flags in (
            SOFTMAX,
            (*SOFTMAX, "--learn-temperature"),
            (*ENTMAX, "--entmax-alpha", "1"),
            (*SOFTMAX, "--softmax-temperature", "0.5"),
            (*SOFTMAX, "--softmax-temperature", "0.5", "--learn-temperature"),
            (*ENTMAX, "--entmax-alpha", "2"),
            ("--attention-normalizer", "sparsemax"),
        )
    ]
    for one, other, same in ((0, 1, True), (0, 2, True), (3, 4, True), (5, 6, True), (0, 3, False)):
        assert torch.allclose(full[one], full[other], atol=1e-5) == same
    learned = [p.numel() for p in build(TRANSLATION[0], *ENTMAX).parameters() if p.dim() == 1]
    shared = build(TRANSLATION[0], *ENTMAX, "--entmax-heads", "shared")
    assert [learned.count(4), [p.shape for p in shared.parameters()].count((1,))] == [6, 6]


def test_parameter_counts_equal_the_paper(build):
    stock = sum(p.numel() for p in build("transformer_lm").parameters())
    for flags, extra in (
        ((), 2 * 8 + 8),
        (("--output-normalizer", "softmax"), 2 * 8),
        (("--multimax-order", "1"), 3 * 4),
        (("--multimax-terms", "high"), 3 * 4),
        (("--multimax-heads", "separate"), 2 * 8 * 4 + 8),
        (("--attention-normalizer", "softmax"), 8),
    ):
        model = build("transformer_lm_multimax", *flags)
        assert sum(p.numel() for p in model.parameters()) == stock + extra


def test_build_model_keeps_the_initial_weights_of_stock(build):
    for ours, stock in (
        ("transformer_lm_multimax", "transformer_lm"),
        ("transformer_iwslt_de_en_multimax", "transformer_iwslt_de_en"),
    ):
        model, twin = build(ours), build(stock)
        for (name, ours_value), (_, value) in zip(
            parameters_of(model).items(), twin.named_parameters(), strict=True
        ):
            assert torch.equal(ours_value, value), name
        drawn = [m.low_coefficient for m in model.modules() if isinstance(m, Modulator)]
        assert len({tuple(value.tolist()) for value in drawn}) == len(drawn) > 1


# --- the identity is stock fairseq -------------------------------------------------------------


@pytest.mark.parametrize("normalizer", ["softmax", "multimax"])
@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_iwslt_de_en"])
def test_identity_normalizer_keeps_stock_loss_and_gradients(
    build, arch, normalizer, translation_batch, lm_batch
):
    sample = lm_batch() if "_lm" in arch else translation_batch()
    flags = ("--attention-normalizer", normalizer, "--output-normalizer", normalizer)
    flags += ("--multimax-init-std", "0") if normalizer == "multimax" else ()
    results = []
    for model in (build(arch), build(arch + "_multimax", *flags)):
        lprobs = full_context(model, sample)
        loss = torch.nn.functional.nll_loss(
            lprobs.flatten(0, 1), sample["target"].flatten(), ignore_index=1, reduction="sum"
        )
        loss.backward()
        results.append((loss.item(), parameters_of(model)))
    (stock_loss, stock), (our_loss, ours) = results
    assert our_loss == pytest.approx(stock_loss, rel=1e-5)
    assert stock.keys() == ours.keys()
    scale = max(p.grad.norm() for p in stock.values())
    for name, parameter in stock.items():
        difference = (parameter.grad - ours[name].grad).norm()
        assert difference <= 1e-5 * max(parameter.grad.norm(), 1e-2 * scale), name


@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_iwslt_de_en"])
def test_load_state_dict_of_a_stock_model_starts_at_identity(
    build, arch, translation_batch, lm_batch
):
    sample = lm_batch() if "_lm" in arch else translation_batch()
    stock, ours = build(arch, seed=5).eval(), scatter_modulators(build(arch + "_multimax")).eval()
    ours.load_state_dict(stock.state_dict())
    torch.testing.assert_close(full_context(ours, sample), full_context(stock, sample))
    incomplete = {k: v for k, v in ours.state_dict().items() if "layers.0.self_attn.norm" not in k}
    with pytest.raises(RuntimeError, match="modulator"):
        ours.load_state_dict(incomplete)


# --- one model, one function -------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, beam, shared_cache, left_pad_source",
    [
        *((name, 1, False, False) for name in FLAGS),
        *((name, 5, True, True) for name in FLAGS),
        ("separate heads", 5, False, True),
        ("separate heads", 1, True, False),
    ],
)
@torch.no_grad()
def test_incremental_decoding_equals_full_context(
    build, translation_batch, name, beam, shared_cache, left_pad_source
):
    flags = FLAGS[name]
    sample = translation_batch(left_pad_source=left_pad_source)
    model = scatter_modulators(build(TRANSLATION[1], *flags)).eval()
    expected = full_context(model, sample)
    if shared_cache:
        for module in attentions(model).values():
            module.set_beam_size(beam)
    steps, state = incremental(model, sample, beam)
    kept = sample["net_input"]["prev_output_tokens"].ne(1)
    for hypothesis in range(beam):
        ours = steps[hypothesis::beam]
        torch.testing.assert_close(ours[kept], expected[kept], **TOLERANCE)
    if shared_cache and "--no-cross-attention" not in flags:
        keys = [v["prev_key"].shape[0] for k, v in state.items() if "attn_state" in k]
        assert sample["nsentences"] in keys
    # The cache's beam size must not leak into teacher forcing.
    torch.testing.assert_close(full_context(model, sample), expected)


@pytest.mark.parametrize("flags", [(), ("--output-normalizer", "softmax")])
@torch.no_grad()
def test_language_model_steps_equal_full_context(build, lm_batch, flags):
    sample = lm_batch()
    model = scatter_modulators(build("transformer_lm_multimax", *flags)).eval()
    expected = full_context(model, sample)
    tokens, state = sample["net_input"]["src_tokens"], {}
    for t in range(tokens.shape[1]):
        output = model(tokens[:, : t + 1], incremental_state=state)
        step = log_probs(model, output)[:, 0]
        kept = tokens[:, t].ne(1)
        torch.testing.assert_close(step[kept], expected[kept, t], **TOLERANCE)


@pytest.mark.parametrize("grad", [False, True])
def test_reordered_hypotheses_keep_their_cache(build, grad):
    """Hypotheses are swapped, repeated and dropped between steps, also twice before a step."""
    model = scatter_modulators(build("transformer_lm_multimax")).eval()
    tokens = torch.randint(4, 20, (6, 1), generator=torch.Generator().manual_seed(1))
    state = {}
    orders = [[[0, 0, 2, 4, 5, 5]], [[3, 2, 1]], [[2, 0], [1, 1, 0]], [], [[0, 2, 1]]]
    with torch.set_grad_enabled(grad):
        for step, swaps in enumerate(orders):
            ours = log_probs(model, model(tokens, incremental_state=state))[:, -1]
            expected = log_probs(model, model(tokens))[:, -1]
            kept = tokens.ne(1).all(1)
            assert kept.any()
            torch.testing.assert_close(ours[kept], expected[kept], **TOLERANCE)
            for order in map(torch.tensor, swaps):
                tokens = tokens[order]
                model.decoder.reorder_incremental_state_scripting(state, order)
            new = torch.arange(len(tokens))[:, None] + 2 * step + 5
            if step == 0:
                new[1] = 1  # with its padding mask
            tokens = torch.cat([tokens, new], 1)


@pytest.mark.parametrize("padding", ["source", "target"])
@torch.no_grad()
def test_padding_does_not_change_the_output(build, translation_batch, padding):
    model = scatter_modulators(build(TRANSLATION[1], "--output-normalizer", "multimax")).eval()
    sample = translation_batch()
    together = full_context(model, sample)
    for row, (source_length, target_length) in enumerate(((9, 7), (4, 5), (6, 1))):
        inputs = {k: v[row : row + 1] for k, v in sample["net_input"].items()}
        if padding == "source":
            inputs["src_tokens"] = inputs["src_tokens"][:, -(source_length + 1) :]
        else:
            inputs["prev_output_tokens"] = inputs["prev_output_tokens"][:, : target_length + 1]
        alone = log_probs(model, model(**inputs))
        torch.testing.assert_close(
            alone[0, : target_length + 1], together[row, : target_length + 1], rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("prefix", [None, [[7, 8], [9, 10], [11, 1]]])
@pytest.mark.parametrize("beam", [1, 5])
@torch.no_grad()
def test_beam_search_scores_equal_teacher_forcing(
    build, dictionary, translation_batch, beam, prefix
):
    model = scatter_modulators(build(TRANSLATION[1], "--output-normalizer", "multimax")).eval()
    sample = translation_batch()
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=12, normalize_scores=False
    )
    prefix_tokens = None if prefix is None else torch.tensor(prefix)
    results = generator.generate([model], sample, prefix_tokens=prefix_tokens)
    for row, hypotheses in enumerate(results):
        assert len(hypotheses) == beam
        for hypothesis in hypotheses:
            expected = score_of(model, sample, row, hypothesis["tokens"])
            torch.testing.assert_close(torch.as_tensor(hypothesis["score"]), expected, **TOLERANCE)
            if prefix is not None:
                wanted = [token for token in prefix[row] if token != 1]
                assert hypothesis["tokens"][: len(wanted)].tolist() == wanted


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax15", "alpha_entmax"])
@torch.no_grad()
def test_beam_search_with_a_sparse_output_layer_stays_finite(
    build, dictionary, translation_batch, normalizer
):
    model = build(TRANSLATION[1], "--output-normalizer", normalizer).eval()
    model.decoder.output_projection.weight.mul_(30)
    # The end of sentence has probability 0; only the length limit produces it.
    model.decoder.output_projection.weight[dictionary.eos()] = 0
    sample = translation_batch()
    output = model(**sample["net_input"])
    scores = log_probs(model, output)
    assert torch.equal(model.get_normalized_probs(output, log_probs=False).log(), scores)
    assert (scores == -math.inf).any() and (scores > -math.inf).any(-1).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(scores.shape[:-1]))
    generator = SequenceGenerator([model], dictionary, beam_size=5, max_len_b=6, max_len_a=0)
    for hypotheses in generator.generate([model], sample):
        assert len(hypotheses) >= 1
        for hypothesis in hypotheses:
            assert math.isfinite(float(hypothesis["score"]))
            assert hypothesis["positional_scores"].isfinite().all()
    forced = generator.generate([model], sample)[0][0]["positional_scores"]
    assert forced[-1] == -1e4 and (forced[:-1] > -100).all()


# --- options of stock Transformers -------------------------------------------------------------


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@torch.no_grad()
def test_attention_weights_are_a_distribution_over_the_source(build, translation_batch, normalizer):
    flags = ("--topk", "5") if normalizer == "topk" else ()
    model = build(TRANSLATION[1], "--attention-normalizer", normalizer, *flags)
    model = scatter_modulators(model).eval()
    sample = translation_batch()
    outputs = {}
    for layer in (0, 1):
        for heads in (1, None):
            _, extra = model(**sample["net_input"], alignment_layer=layer, alignment_heads=heads)
            weights = outputs[layer, heads] = extra["attn"][0]
            assert weights.shape == (3, 8, 10)
            if NORMALIZERS[normalizer].sums_to_one:
                torch.testing.assert_close(weights.sum(-1), torch.ones(3, 8))
            padded = sample["net_input"]["src_tokens"].eq(1)[:, None].expand_as(weights)
            assert (weights[padded] == 0).all() and padded.any()
    assert len({tuple(w.flatten().tolist()) for w in outputs.values()}) == 4


def test_decoder_skips_attention_weights_if_features_only(build, translation_batch, monkeypatch):
    asked = []
    forward = MultiheadAttention.forward

    def recorded(self, *inputs, **options):
        asked.append(options.get("need_weights", True) or options.get("need_head_weights", False))
        return forward(self, *inputs, **options)

    monkeypatch.setattr(MultiheadAttention, "forward", recorded)
    model, sample = build(TRANSLATION[0]), translation_batch()
    for training in (True, False):
        model.train(training)
        asked.clear()
        assert model(**sample["net_input"], features_only=True)[1]["attn"] == [None]
        assert not any(asked)
        assert model(**sample["net_input"])[1]["attn"][0].shape == (3, 8, 10)
        assert sum(asked) == 1  # the last layer's cross-attention


WIDE = [
    f"--{side}-{part}" for side in ("encoder", "decoder") for part in ("embed-dim", "ffn-embed-dim")
]
WIDE = [word for flag in WIDE for word in (flag, "64")]


@pytest.mark.parametrize("output", ["softmax", "multimax"])
@pytest.mark.parametrize("heads", ["shared", "separate"])
def test_cpp_backend_equals_plain_pytorch(
    build, translation_batch, dictionary, monkeypatch, heads, output
):
    """A head dimension of 16, for which decoding has its own kernel."""
    flags = [*WIDE, "--multimax-heads", heads, "--output-normalizer", output]
    model = scatter_modulators(build(TRANSLATION[0], *flags))
    sample = translation_batch()
    results, hypotheses = [], []
    for backend in ("plain", "cpp"):
        monkeypatch.setenv("MULTIMAX_BACKEND", backend)
        model.train().zero_grad()
        loss = -log_probs(model, model(**sample["net_input"])).gather(
            -1, sample["target"].unsqueeze(-1)
        )
        loss.sum().backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.eval()
        generator = SequenceGenerator([model], dictionary, beam_size=5, max_len_b=12)
        hypotheses.append([h for hs in generator.generate([model], sample) for h in hs])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5 * plain.abs().max().item())
    for plain, fast in zip(*hypotheses, strict=True):
        assert plain["tokens"].tolist() == fast["tokens"].tolist()
        torch.testing.assert_close(fast["positional_scores"], plain["positional_scores"])


def test_checkpoint_activations_keeps_the_gradients(build, translation_batch):
    sample = translation_batch()
    gradients = []
    for flags in ((), ("--checkpoint-activations",)):
        model = scatter_modulators(build(TRANSLATION[0], *flags))
        full_context(model, sample).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_layerdrop_drops_layers_with_their_modulators(build, translation_batch):
    model = build(TRANSLATION[0], "--encoder-layerdrop", "1", "--decoder-layerdrop", "1")
    full_context(model.train(), translation_batch()).sum().backward()
    assert all(p.grad is None for n, p in model.named_parameters() if "layers." in n)
    stock = build("transformer", "--encoder-layerdrop", "1", "--decoder-layerdrop", "1")
    assert len(list(stock.parameters())) + 6 * 4 == len(list(model.parameters()))


def test_layers_to_keep_prunes_a_trained_model(build, translation_batch):
    model = scatter_modulators(build(TRANSLATION[0])).eval()
    kept = build(
        TRANSLATION[0], "--encoder-layers-to-keep", "[1]", "--decoder-layers-to-keep", "[0]"
    )
    keep = {"encoder_layers_to_keep": "1", "decoder_layers_to_keep": "0"}
    cfg = OmegaConf.create({"_name": TRANSLATION[0], **keep})
    kept.load_state_dict(model.state_dict(), model_cfg=cfg)
    ours = kept.encoder.layers[0].self_attn.normalizer.modulator.low_coefficient
    assert torch.equal(ours, model.encoder.layers[1].self_attn.normalizer.modulator.low_coefficient)


@pytest.mark.parametrize(
    "normalizer, settings",
    [
        ("multimax", {"init_std": 0.5}),
        ("alpha_entmax", {}),
        ("softmax", {"temperature": 0.3, "learn_temperature": True}),  # one for all heads
    ],
)
@torch.no_grad()
def test_prune_heads_also_prunes_normalizer_parameters(normalizer, settings):
    stock = SoftmaxMultiheadAttention(8, 4, self_attention=True)
    layer = MultiheadAttention(stock, Normalizer(normalizer, 4, **settings)).eval()
    x = torch.randn(5, 2, 8)
    _, before = layer(x, x, x, need_head_weights=True)
    layer._set_skip_embed_dim_check()
    layer._adaptive_prune_heads([(2, 4), (6, 8)])
    _, after = layer(x, x, x, need_head_weights=True)
    torch.testing.assert_close(after, before[[1, 3]])
    rebuilt = Normalizer(**layer.normalizer.arguments)  # as an export does
    rebuilt.load_state_dict(layer.normalizer.state_dict())


def test_adaptive_softmax_keeps_the_parameters_of_stock(build, lm_batch):
    flags = "--adaptive-input --adaptive-input-cutoff 10,20 --adaptive-softmax-cutoff 10,20".split()
    flags += ["--tie-adaptive-weights", "--adaptive-input-factor", "2", "--adaptive-softmax-factor"]
    flags += ["2"]
    with pytest.raises(UsageError, match="--output-normalizer softmax"):
        build("transformer_lm_multimax", *flags)
    model = scatter_modulators(
        build("transformer_lm_multimax", *flags, "--output-normalizer", "softmax")
    )
    sample = lm_batch()
    output = model.eval()(**sample["net_input"])
    probs = model.get_normalized_probs(output, log_probs=False)
    torch.testing.assert_close(probs.sum(-1), torch.ones(3, 8))
    stock = build("transformer_lm", *flags)
    assert [p.shape for p in parameters_of(model).values()] == [p.shape for p in stock.parameters()]


def test_language_model_supports_character_embeddings(build, lm_batch):
    model = build(
        "transformer_lm_multimax", "--character-embeddings", "--character-filters", "[(1, 8)]"
    )
    assert full_context(model.eval(), lm_batch()).shape == (3, 8, 34)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_models_stay_close_and_finite(build, translation_batch, dtype):
    sample = translation_batch()
    flags = ("--output-normalizer", "multimax")
    exact = full_context(scatter_modulators(build(TRANSLATION[0], *flags)).eval(), sample)
    half = full_context(scatter_modulators(build(TRANSLATION[0], *flags)).to(dtype).eval(), sample)
    assert half.dtype == torch.float32
    assert (half - exact).abs().max() < 64 * torch.finfo(dtype).eps * exact.abs().max()


def test_autocast_gives_finite_gradients(build, translation_batch):
    model = scatter_modulators(build(TRANSLATION[0]))
    with torch.autocast("cpu", torch.bfloat16):
        full_context(model, translation_batch()).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_attention_supports_bias_kv_and_zero_attn(translation_batch):
    """fairseq's learned and zero keys (in other models) get attention but are not cached."""
    torch.manual_seed(0)
    stock = SoftmaxMultiheadAttention(
        8, 2, add_bias_kv=True, add_zero_attn=True, self_attention=True
    )
    x = torch.randn(5, 3, 8)
    mask = torch.full((5, 5), -math.inf).triu(1)
    padding = torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    expected, _ = stock(x, x, x, attn_mask=mask, key_padding_mask=padding)
    ours = MultiheadAttention(stock, Normalizer("softmax")).eval()
    output, weights = ours(x, x, x, attn_mask=mask, key_padding_mask=padding)
    torch.testing.assert_close(output, expected)
    assert weights.shape == (3, 5, 7)
    mask.is_future_mask = True  # as a decoder marks it, for the kernel; nor are these in the future
    output, _ = ours(x, x, x, attn_mask=mask, key_padding_mask=padding, need_weights=False)
    torch.testing.assert_close(output, expected)
    state = {}
    steps = [ours(x[t : t + 1, :1], None, None, incremental_state=state)[0] for t in range(5)]
    torch.testing.assert_close(torch.cat(steps), expected[:, :1])


@pytest.mark.parametrize("kind", ["transformer", "transformer_lm"])
def test_dropout_modules_keep_their_stock_names(build, kind):
    stock, ours = (
        [m.module_name for m in build(arch).modules() if isinstance(m, FairseqDropout)]
        for arch in (kind, f"{kind}_multimax")
    )
    assert ours == stock and len(set(ours)) > 2


def test_attention_with_shared_keys_keeps_its_masks():
    torch.manual_seed(0)
    stock = SoftmaxMultiheadAttention(8, 2, encoder_decoder_attention=True)
    ours = MultiheadAttention(stock, Normalizer(init_std=0.5)).eval()
    ours.set_beam_size(3)
    query = torch.randn(4, 6, 8)
    key = torch.randn(5, 2, 8).repeat_interleave(3, 1)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    excluded = torch.rand(4, 5) < 0.4
    for mask in (excluded, torch.zeros(4, 5).masked_fill(excluded, -1e8)):
        shared, alone = (
            ours(
                query,
                key,
                key,
                key_padding_mask=padding.repeat_interleave(3, 0),
                incremental_state=state,
                static_kv=True,
                attn_mask=mask,
                need_head_weights=True,
            )
            for state in ({}, None)
        )
        torch.testing.assert_close(shared, alone)
        assert (shared[1].masked_select(excluded.expand_as(shared[1])) == 0).all()


# --- settings that cannot work -----------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, parts",
    [
        (("--encoder-attention-heads", "3"), ("--encoder-attention-heads 3", "16")),
        (("--decoder-attention-heads", "5"), ("--decoder-attention-heads 5", "16")),
        (("--multimax-order", "3"), ("--multimax-order 3", "1 or 2")),
        (("--multimax-init-std", "-1"), ("--multimax-init-std -1.0", "0 or more")),
        (("--attention-normalizer", "topk"), ("topk needs --topk: pass a whole number",)),
        (("--attention-normalizer-at", "cross=topk"), ("topk needs --topk: pass a whole",)),
        (("--attention-normalizer-at", "cross=sofmax"), ("'sofmax'", "sparsemax")),
        ((*SOFTMAX, "--softmax-temperature", "0"), ("--softmax-temperature 0.0", "above 0")),
        ((*SOFTMAX, "--softmax-temperature", "inf"), ("--softmax-temperature inf", "above 0")),
        ((*SOFTMAX, "--softmax-temperature", "nan"), ("--softmax-temperature nan", "above 0")),
        ((*ENTMAX, "--entmax-alpha", "0.5"), ("--entmax-alpha 0.5", "at least 1")),
        ((*ENTMAX, "--entmax-alpha", "inf"), ("--entmax-alpha inf", "at least 1")),
        ((*ENTMAX, "--entmax-alpha", "nan"), ("--entmax-alpha nan", "at least 1")),
        (
            ("--output-normalizer", "alpha_entmax", "--output-entmax-alpha", "inf"),
            ("--output-entmax-alpha inf", "above 1"),
        ),
        (("--multimax-init-std", "inf"), ("--multimax-init-std inf", "0 or more")),
        (("--multimax-init-std", "nan"), ("--multimax-init-std nan", "0 or more")),
        (("--attention-normalizer", "topk", "--topk", "0"), ("--topk 0 must", "at least 1")),
        (("--attention-normalizer", "topk", "--topk", "-3"), ("--topk -3 must", "at least 1")),
        (("--attention-normalizer-at", "encoder,decodr"), ("decodr", "encoder, decoder, cross")),
    ],
)
def test_build_model_refuses_invalid_flags(build, flags, parts):
    with pytest.raises(UsageError) as error:
        build(TRANSLATION[0], *flags)
    message = str(error.value)
    assert "\n" not in message and all(part in message for part in parts)
    assert error.value.user_error


@pytest.mark.parametrize("arch", [*TRANSLATION, "transformer_lm_multimax"])
def test_toy_settings_equal_those_of_fairseq_train(arch):
    flags = ("--multimax-order", "1")
    cfg = convert_namespace_to_omegaconf(toy_models.parse_model(arch, *flags))
    assert toy_models.settings_of_model(arch, *flags) == cfg.model


def test_build_model_reads_and_checks_hydra_settings(task):
    settings = {
        "_name": "transformer_multimax",
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_embed_dim": 8,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "attention_normalizer_at": "cross",
        "output_normalizer": "multimax",
    }
    model = MultimaxTransformerModel.build_model(OmegaConf.create(settings), task)
    assert [isinstance(m, MultiheadAttention) for m in attentions(model).values()] == [
        False,
        False,
        True,
    ]
    assert model.decoder.output_modulator is not None
    for slip, hint in (
        ({"attention_normaliser": "softmax"}, "'attention_normalizer'"),
        ({"attention_normalizer": "sofmax"}, "must be one of .*multimax, .*topk"),
        ({"attention_normalizer_at": ["encoder", "cross"]}, "one text with commas"),
        ({"topk": 3}, "--topk 3 belongs to topk attention"),
        ({"attention_normalizer": "topk", "topk": 2.5}, "--topk 2.5 must be a whole number"),
        ({"attention_normalizer": "topk", "topk": True}, "--topk True must be a whole number"),
        ({"multimax_order": 2.0}, "--multimax-order 2.0 must be 1 or 2"),
        ({"multimax_order": True}, "--multimax-order True must be 1 or 2"),
        ({"multimax_init_std": "little"}, "--multimax-init-std little must be a finite number"),
        ({"multimax_monotone": "no"}, "--multimax-monotone no must be true or false"),
        ({"learn_temperature": "no"}, "--learn-temperature no must be true or false"),
    ):
        with pytest.raises(UsageError, match=hint):
            MultimaxTransformerModel.build_model(OmegaConf.create(settings | slip), task)


# --- the learned scalars -----------------------------------------------------------------------


@pytest.mark.parametrize("arch", [TRANSLATION[1], "transformer_lm_multimax"])
def test_scalar_gradient_scale_scales_learned_scalars(build, arch, translation_batch, lm_batch):
    sample = lm_batch() if "_lm" in arch else translation_batch()
    gradients = []
    for flags in ((), ("--scalar-gradient-scale", "0.25")):
        model = build(arch, "--output-normalizer", "multimax", *flags)
        full_context(model, sample)[..., 5].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        factor = 0.25 if "modulator" in name else 1
        factor /= math.sqrt(len(model.decoder.dictionary)) if "output_mod" in name else 1
        torch.testing.assert_close(gradients[1][name], gradient * factor)


@pytest.mark.parametrize("arch", [TRANSLATION[1], "transformer_lm_multimax", "rnn_multimax"])
def test_train_scalars_only_freezes_all_other_parameters(build, arch):
    model = build(arch, "--output-normalizer", "multimax", "--train-scalars-only")
    learned = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learned == {name for name, _ in model.named_parameters() if "modulator" in name}
    softmax = ("--attention-normalizer", "softmax", "--output-normalizer", "softmax")
    with pytest.raises(UsageError, match="--train-scalars-only trains nothing"):
        build(arch, *softmax, "--train-scalars-only")


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_sinusoidal_positions_equal_stock_beyond_the_table(build, more):
    positions = build("transformer_multimax").decoder.embed_positions
    stock = SinusoidalPositionalEmbedding(positions.embedding_dim, positions.padding_idx)
    words = positions.weights.size(0) - positions.padding_idx + more
    tokens = torch.full((2, words), 5)
    expected = stock(tokens)
    found = copy.deepcopy(positions)(tokens, incremental_state={})
    assert torch.equal(found, expected[:, -1:])
    assert torch.equal(positions(tokens), expected)


def test_load_state_dict_of_softmax_logs_no_missing_parameters(build, caplog):
    caplog.set_level("INFO")
    model = build(TRANSLATION[1], "--attention-normalizer", "softmax")
    model.load_state_dict(model.state_dict())
    assert "has no parameters of a mapping" not in caplog.text
