"""Normalizers in small Hugging Face models."""

import itertools
import re

import pytest
import reference
import torch
import transformers as hf
from hugging_face import (
    LAYERS,
    MODELS,
    PAD,
    WIDTHS,
    bart,
    decoder,
    encoder_decoder,
    gpt2,
    llama,
    logits,
    made,
    t5,
    tokens,
)
from torch import nn

from multimax_fairseq import Modulator, Normalizer
from multimax_fairseq.integrations.transformers import attach, interface, register

pytestmark = pytest.mark.long


def scattered(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Modulator):
            for parameter in module.parameters():
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def padded(side):
    """Return ids and attention mask of sentences that are padded on this side."""
    ids, mask = tokens(), torch.ones(3, 9, dtype=torch.long)
    for row, length in enumerate((9, 6, 4)):
        mask[row, slice(length, None) if side == "right" else slice(9 - length)] = 0
    return ids.masked_fill(mask == 0, PAD), mask


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_attach_with_init_std_zero_equals_sdpa(make, per_head):
    model = made(make)
    assert model.config._attn_implementation == "sdpa"
    inputs = [(tokens(), None), *(padded(side) for side in ("left", "right"))]
    before = [logits(model, *each) for each in inputs]
    names = attach(model, init_std=0.0, per_head=per_head)
    assert len(names) == {gpt2: 2, llama: 2, bart: 6, t5: 6}[make]
    assert all(re.search(r"(attn|Attention)$", name) for name in names)
    assert model.config._attn_implementation == "multimax"
    for (ids, mask), expected in zip(inputs, before, strict=True):
        real = torch.ones_like(ids) if mask is None else mask
        difference = (logits(model, ids, mask) - expected)[real.bool()]
        assert difference.abs().max() < 1e-5 * expected.abs().max()
    scattered(model)
    assert (logits(model, *inputs[0]) - before[0]).abs().max() > 1e-2 * before[0].abs().max()


@pytest.mark.parametrize("kind", ["T5", "MT5", "UMT5", "SwitchTransformers"])
def test_attach_with_init_std_zero_equals_eager(kind):
    more = {"num_experts": 2, "num_decoder_layers": 2} if kind == "SwitchTransformers" else {}
    model = made(t5, kind=kind, **more)
    model.set_attn_implementation("eager")
    ids, mask = padded("right")
    before = logits(model, ids, mask)
    assert len(attach(model, init_std=0.0)) == 6
    difference = logits(model, ids, mask) - before
    assert difference.abs().max() < 1e-5 * before.abs().max()


def test_attach_with_freeze_trains_the_normalizers_alone():
    model = made(gpt2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attach(model, init_std=0.0, freeze=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    # At the identity, the thresholds have no gradient yet.
    learned = [value for name, value in after.items() if name.endswith("_coefficient")]
    assert learned and all(value.any() for value in learned)


def test_attention_equals_the_formula():
    """Grouped keys, padding and a causal mask agree with the float64 reference."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8) for heads in (4, 2, 2))
    allowed = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    allowed[1, ..., 0] = False
    model = made(llama)
    attach(model, per_head=True, init_std=0.3)
    layer = model.model.layers[0].self_attn
    context, probs = interface.attention(
        *(layer, query, key, value, allowed), scaling=0.5, output_attentions=True
    )
    fused, none = interface.attention(layer, query, key, value, allowed, scaling=0.5)
    assert none is None
    torch.testing.assert_close(fused, context, atol=1e-5, rtol=0)
    learned = {n: p.detach().double().numpy() for n, p in layer.normalizer.named_parameters()}
    for row, head in itertools.product(range(2), range(4)):
        low, at, high, over = (
            learned[f"modulator.{side}_{name}"][head]
            for side in ("low", "high")
            for name in ("coefficient", "threshold")
        )
        scores = 0.5 * query[row, head].double() @ key[row, head // 2].double().mT
        modulated = reference.sigma(scores.numpy(), 1 - low, 1 + high, at, over)
        expected = reference.softmax(modulated, ~allowed[row, 0].numpy())
        weights = torch.from_numpy(expected)
        torch.testing.assert_close(probs[row, head].double(), weights, atol=1e-6, rtol=0)
        mine = weights @ value[row, head // 2].double()
        torch.testing.assert_close(context[row, :, head].double(), mine, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", MODELS)
def test_attention_is_causal(make):
    model = made(make)
    attach(model, init_std=0.3)
    ids, later = tokens(), tokens()
    later[:, 5] = (later[:, 5] + 3) % 40 + 3
    if model.config.is_encoder_decoder:
        before, after = (logits(model, ids, decoder_input_ids=each) for each in (ids, later))
    else:
        before, after = logits(model, ids), logits(model, later)
    torch.testing.assert_close(after[:, :5], before[:, :5], atol=1e-6, rtol=0)
    changed = (after - before).abs().amax((0, 2))
    assert (changed[5:] > 1e-4).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", MODELS)
def test_attention_ignores_padding(make, side):
    model = made(make)
    attach(model, init_std=0.3)
    ids, mask = padded(side)
    other = torch.where(mask.bool(), ids, tokens(seed=7))
    is_pair = model.config.is_encoder_decoder
    more = {"decoder_input_ids": tokens(seed=2)} if is_pair else {}
    before, after = (logits(model, each, mask, **more) for each in (ids, other))
    if is_pair:
        mask = torch.ones_like(mask)
    assert before.isfinite().all()
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["Mistral", "Gemma3Text"])
def test_attention_follows_sliding_windows(kind):
    more = {"head_dim": 8} if kind == "Gemma3Text" else {}
    name = kind.removesuffix("Text")
    config = getattr(hf, f"{kind}Config")(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
        **more,
    )
    model = made(lambda: getattr(hf, f"{name}ForCausalLM")(config))
    ids, mask = padded("left")
    before = logits(model, ids, mask)
    attach(model, init_std=0.0)
    difference = (logits(model, ids, mask) - before)[mask.bool()]
    assert difference.abs().max() < 1e-5 * before.abs().max()


def test_encoder_attends_to_both_sides():
    config = hf.BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model = made(lambda: hf.BertModel(config))
    ids, mask = padded("right")
    with torch.no_grad():
        before = model(ids, mask).last_hidden_state
        assert attach(model, init_std=0.0) == [
            f"encoder.layer.{layer}.attention.self" for layer in range(2)
        ]
        after = model(ids, mask).last_hidden_state
    torch.testing.assert_close(after[mask.bool()], before[mask.bool()], atol=1e-5, rtol=0)
    later = ids.clone()
    later[0, -1] = 3
    with torch.no_grad():
        assert (model(later, mask).last_hidden_state - after)[0, 0].abs().max() > 1e-4


def test_output_attentions_returns_probabilities():
    model = made(llama)
    attach(model, "sparsemax")
    ids, mask = padded("left")
    probs = torch.stack(model(ids, attention_mask=mask, output_attentions=True).attentions)
    assert probs.shape == (2, 3, 4, 9, 9)
    sums = probs.sum(-1)[:, mask[:, None].expand(-1, 4, -1).bool()]
    torch.testing.assert_close(sums, torch.ones_like(sums))
    assert not probs.triu(1).any() and not probs[:, 2, :, :, :5].any()
    inside = probs[:, 0].masked_select(torch.ones(9, 9).tril().bool())
    assert 0.05 < (inside == 0).float().mean()


@pytest.mark.parametrize("make", MODELS)
def test_output_attentions_has_the_shapes_of_eager_attention(make):
    """Some models pass output_attentions to their layers; others collect the outputs."""
    model, eager = made(make), made(make)
    attach(model, init_std=0.0)
    eager.set_attn_implementation("eager")
    ids, mask = padded("right")
    inputs = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    found, wanted = (
        m(ids, attention_mask=mask, output_attentions=True, use_cache=False, **inputs)
        for m in (model, eager)
    )
    names = [name for name in wanted if name.endswith("attentions") and wanted[name]]
    assert names
    for name in names:
        assert [t.shape for t in found[name]] == [t.shape for t in wanted[name]], name


def test_attention_calls_a_wrapped_normalizer():
    class Wrapper(torch.nn.Module):  # like PEFT's for modules_to_save
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def attend(self, *arguments, **options):
            return self.inner.attend(*arguments, **options)

    model = made(llama)
    ids, mask = padded("left")
    names = attach(model, init_std=0.5)
    before = logits(model, ids, mask)
    for name in names:
        layer = model.get_submodule(name)
        layer.normalizer = Wrapper(layer.normalizer)
    torch.testing.assert_close(logits(model, ids, mask), before)


def full_context(model, sequences, mask, **inputs):
    """Return log-probabilities of each next token, (B, T - 1, V), without a KV cache."""
    if "decoder_input_ids" not in inputs:
        more = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        return logits(model, sequences, mask, use_cache=False, **more).log_softmax(-1)[:, :-1]
    return logits(model, mask=mask, use_cache=False, **inputs).log_softmax(-1)[:, :-1]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize("make", MODELS)
def test_generation_equals_full_context(make, beams, cache):
    """The scores of generated tokens, in a batch padded on the left, equal full context."""
    model = made(make)
    attach(model, init_std=0.3)
    ids, mask = padded("left")
    found = model.generate(
        ids,
        attention_mask=mask,
        num_beams=beams,
        do_sample=False,
        max_new_tokens=8,
        min_new_tokens=8,
        length_penalty=0.0,
        cache_implementation=cache if cache == "static" else None,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    sequences = found.sequences
    if model.config.is_encoder_decoder:
        expected = full_context(model, ids, mask, ids=ids, decoder_input_ids=sequences)
    else:
        whole = torch.cat([mask, torch.ones(3, 8, dtype=torch.long)], 1)
        expected = full_context(model, sequences, whole)
    expected = expected[:, -8:]
    if beams == 1:
        stepwise = torch.stack(found.logits, 1).log_softmax(-1)
        torch.testing.assert_close(stepwise, expected, atol=1e-4, rtol=0)
        banned = expected.index_fill(-1, torch.tensor([2]), -torch.inf)  # by min_new_tokens
        assert torch.equal(banned.argmax(-1), sequences[:, -8:])
    else:
        chosen = expected.gather(-1, sequences[:, -8:, None]).sum((1, 2))
        torch.testing.assert_close(found.sequences_scores, chosen, atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_chunked_prefill_equals_full_context(make):
    model = made(make)
    attach(model, init_std=0.3)
    ids = tokens()
    expected = logits(model, ids)
    cache = hf.DynamicCache(config=model.config)
    parts = [logits(model, part, past_key_values=cache, use_cache=True) for part in ids.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", MODELS)
def test_attached_model_trains(make):
    model = made(make)
    names = attach(model)
    model.train()
    learned = {n: p for n, p in model.named_parameters() if ".normalizer." in n}
    assert len(learned) == 4 * len(names)
    start = {name: parameter.detach().clone() for name, parameter in learned.items()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    ids, mask = padded("right")
    labels = ids.masked_fill(mask == 0, -100)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        assert all(parameter.grad.isfinite().all() for parameter in learned.values())
        optimizer.step()
        losses.append(loss.item())
        if make is t5:
            bias = model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
            assert bias.weight.grad.any()
    assert losses[-1] < 0.8 * losses[0]
    for name, parameter in learned.items():
        assert (parameter - start[name]).abs().max() > 1e-4 and parameter.grad.any(), name


@pytest.mark.parametrize("options", [{}, {"output_attentions": True}])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_gradient_checkpointing_keeps_the_gradients(make, use_reentrant, options):
    gradients = []
    for checkpointing in (False, True):
        model = made(make)
        torch.manual_seed(3)
        attach(model, init_std=0.3)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        assert model.is_gradient_checkpointing is checkpointing
        model.train()
        torch.manual_seed(4)
        model(tokens(), labels=tokens(), **options).loss.backward()
        learned = [p.grad for n, p in model.named_parameters() if ".normalizer." in n]
        gradients.append(torch.cat([gradient.flatten() for gradient in learned]))
    assert gradients[0].abs().max() > 1e-4
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-7)


def test_dropout_acts_in_training_only():
    model = made(llama, attention_dropout=0.5)
    attach(model)
    ids = tokens()
    assert torch.equal(logits(model, ids), logits(model, ids))
    model.train()
    different = (logits(model, ids) - logits(model, ids)).abs().amax((0, 2))
    assert (different[1:] > 1e-3).all()


def test_attach_keeps_modes_and_dtypes():
    model = made(llama).to(torch.bfloat16).train()
    model.lm_head.eval()
    attach(model)
    assert model.training and not model.lm_head.training
    layer = model.model.layers[0].self_attn
    assert layer.normalizer.training
    assert layer.normalizer.modulator.low_threshold.dtype == torch.float32
    assert logits(model.eval(), tokens()).dtype == torch.bfloat16


@pytest.mark.parametrize("make", MODELS)
def test_attach_keeps_other_models_of_the_same_config(make):
    model = made(make)
    before = model.config.to_dict()
    other = type(model)(model.config).eval()
    expected = logits(other, tokens())
    attach(model)
    assert torch.equal(logits(other, tokens()), expected)
    assert other.config.to_dict() == before
    assert logits(type(other)(other.config).eval(), tokens()).shape == expected.shape
    assert logits(model, tokens()).shape == expected.shape


def test_attach_calls_a_vision_model_with_its_inputs():
    config = hf.ViTConfig(
        image_size=16,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model, images = made(lambda: hf.ViTModel(config)), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        before = model(images).last_hidden_state
        attach(model, init_std=0.0, inputs={"pixel_values": images})
        torch.testing.assert_close(model(images).last_hidden_state, before, atol=1e-5, rtol=0)


def gpt_j():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8}
    return hf.GPTJForCausalLM(hf.GPTJConfig(vocab_size=50, **sizes))


def gemma2():
    return decoder("Gemma2", head_dim=8)


def gpt_oss():
    return decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1)


def long_t5():
    return t5("LongT5")


def deberta_gpt2():
    config = hf.DebertaConfig(vocab_size=50, **LAYERS, **WIDTHS)
    return encoder_decoder(hf.DebertaModel(config), gpt2().config)


class Deaf(hf.PreTrainedModel):
    """A model that claims to take any attention implementation but uses its own."""

    config_class = hf.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.attention = nn.Embedding(50, 8), nn.MultiheadAttention(8, 2)
        self.post_init()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.attention(x, x, x)[0]


def deaf():
    return Deaf(hf.LlamaConfig(vocab_size=50))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (gpt_j, "GPTJForCausalLM does not use .* AttentionInterface.*replace_softmax"),
        (
            deberta_gpt2,
            "DebertaModel does not use .* AttentionInterface.*replace_softmax",
        ),
        (deaf, "Deaf does not use .* AttentionInterface.*replace_softmax"),
        (gemma2, "Gemma2Attention uses soft-capping of the scores .softcap."),
        (gpt_oss, "GptOssAttention uses attention sinks .s_aux."),
        (long_t5, "LongT5Stack does not use .* AttentionInterface.*replace_softmax"),
    ],
)
def test_attach_refuses_unsupported_models(make, message):
    torch.manual_seed(0)
    model = make().train()
    keys, before = list(model.state_dict()), model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        attach(model)
    assert list(model.state_dict()) == keys and model.training
    assert model.config._attn_implementation == before != "multimax"
    assert not any(isinstance(module, Normalizer) for module in model.modules())
    assert not any(hasattr(module, "normalizer") for module in model.modules())


def test_attach_names_replace_softmax_for_a_model_of_torch():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)
    with pytest.raises(ValueError, match="TransformerEncoder does not use .*replace_softmax"):
        attach(model)


def test_attach_refuses_mappings_of_hidden_states():
    with pytest.raises(ValueError, match="'asentmax' reads hidden states"):
        attach(llama(), "asentmax")


def test_attention_needs_a_normalizer_in_every_layer():
    """A layer that the call did not reach is refused at its first use."""
    ids, states = tokens(), torch.randn(3, 4, 32)
    model = made(gpt2, add_cross_attention=True)
    expected = logits(model, ids, encoder_hidden_states=states)
    assert len(attach(model)) == 2
    with pytest.raises(ValueError, match="this GPT2Attention has no normalizer.*inputs="):
        logits(model, ids, encoder_hidden_states=states)
    model = made(gpt2, add_cross_attention=True)
    names = attach(model, inputs={"input_ids": ids, "encoder_hidden_states": states}, init_std=0.0)
    assert len(names) == 4 and names[1] == "transformer.h.0.crossattention"
    after = logits(model, ids, encoder_hidden_states=states)
    torch.testing.assert_close(after, expected, atol=1e-5, rtol=0)


def test_register_without_attach_names_attach():
    register()
    model = made(llama)
    model.set_attn_implementation("multimax")
    with pytest.raises(ValueError, match="this LlamaAttention has no normalizer: call"):
        logits(model, tokens())


def test_attach_refuses_invalid_arguments():
    model = made(llama)
    for wrong, kind, message in (
        ({"normalizer": "hardmax"}, ValueError, "hardmax"),
        ({"order": 3}, ValueError, "order.*3"),
        ({"normalizer": "topk"}, ValueError, "k"),
        ({"size": 3}, TypeError, "size"),
    ):
        with pytest.raises(kind, match=message):
            attach(**{"model": model, **wrong})
        assert model.config._attn_implementation == "sdpa"
    attach(model)
    with pytest.raises(ValueError, match="LlamaForCausalLM has normalizers already"):
        attach(model)
    model = made(llama)
    model.model.layers[1].self_attn.normalizer = nn.Identity()
    with pytest.raises(ValueError, match="has an attribute 'normalizer'"):
        attach(model)
    assert not hasattr(model.model.layers[0].self_attn, "normalizer")
    assert isinstance(model.model.layers[1].self_attn.normalizer, nn.Identity)
    tiny = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=5, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="its own dummy_inputs .*pass inputs="):
        attach(tiny)
    assert attach(tiny, inputs={"input_ids": torch.tensor([[1, 2]])}) == ["transformer.h.0.attn"]
    with pytest.raises(ValueError, match="attention mask of torch.int64"):
        logits(tiny, torch.tensor([[1, 2]]), torch.ones(1, 1, 2, 2, dtype=torch.long))


def test_attention_adds_a_float_mask():
    model, ids = made(llama), tokens()
    attach(model, init_std=0.3)
    future = torch.ones(9, 9, dtype=torch.bool).triu(1)
    mask = torch.zeros(9, 9).masked_fill(future, torch.finfo(torch.float32).min)
    expected = logits(model, ids)
    torch.testing.assert_close(logits(model, ids, mask.expand(3, 1, 9, 9)), expected)


@pytest.mark.parametrize("boundaries", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("softmax", {}),
        ("multimax", {"init_std": 0.3, "length_scale": True}),
        ("ssmax", {}),
        ("sigmoid", {}),
        ("adaptive_temperature", {}),
        ("alpha_entmax", {}),
        ("topk", {"k": 2}),
    ],
)
def test_packed_documents_equal_rows(name, settings, boundaries):
    """A mapping that counts keys counts those of the query's document."""
    model = made(llama)
    attach(model, name, **settings)
    rows = [tokens(1, length, seed=length) for length in (4, 9, 6)]
    is_flash = boundaries == "cu_seq_lens"
    pack = hf.DataCollatorWithFlattening(
        return_position_ids=not is_flash, return_flash_attn_kwargs=is_flash
    )
    packed = pack([{"input_ids": row[0].tolist()} for row in rows])
    with torch.no_grad():
        # With a KV cache, transformers does not look for restarts of position_ids.
        found = model(**packed, use_cache=is_flash).logits
    expected = torch.cat([logits(model, row) for row in rows], 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_attention_adds_a_position_bias_after_the_modulator():
    layer, (query, key, value) = nn.Module(), torch.randn(3, 2, 4, 5, 8)
    layer.normalizer = Normalizer(init_std=0.3)
    bias, later = torch.randn(1, 4, 5, 5), torch.ones(5, 5, dtype=torch.bool).triu(1)
    scores = layer.normalizer.modulator(0.5 * query @ key.mT) + bias
    expected = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
    for mask in (None, ~later, torch.zeros(5, 5).masked_fill(later, -torch.inf)):
        found, _ = interface.attention(
            layer, query, key, value, mask, scaling=0.5, position_bias=bias
        )
        torch.testing.assert_close(found.transpose(1, 2), expected, atol=1e-5, rtol=0)


def test_attention_without_a_mask_follows_is_causal():
    """As in sdpa, several queries are causal, and one query attends to all keys."""
    model = made(llama)
    attach(model, init_std=0.0)
    layer = model.model.layers[0].self_attn
    query, key, value = (torch.randn(2, 4, length, 8) for length in (3, 5, 5))
    for queries, flag in ((3, True), (3, False), (3, None), (1, None)):
        inputs = query[:, :, :queries], key, value
        mine, _ = interface.attention(layer, *inputs, None, is_causal=flag)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            *inputs, is_causal=queries > 1 and flag is not False
        )
        torch.testing.assert_close(mine, theirs.transpose(1, 2))


def test_compiled_model_equals_eager():
    model = made(llama)
    attach(model, init_std=0.3)
    ids, mask = padded("left")
    expected = logits(model, ids, mask)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    difference = (logits(compiled, ids, mask) - expected)[mask.bool()]
    assert difference.abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", "softcap s_aux sinks indices block_indices cache".split())
def test_attention_refuses_unsupported_arguments(name):
    layer, x = nn.Module(), torch.zeros(1, 2, 3, 8)
    layer.normalizer = Normalizer()
    with pytest.raises(ValueError, match=rf"Module uses .*\({name}\)"):
        interface.attention(layer, x, x, x, None, **{name: torch.zeros(1)})


def test_attention_is_causal_by_default_with_contiguous_output():
    layer, (query, key, value) = nn.Module(), torch.randn(3, 2, 4, 3, 8)
    layer.normalizer = Normalizer("softmax")
    found, _ = interface.attention(layer, query, key, value, None)
    theirs = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(found, theirs.transpose(1, 2))
    assert found.is_contiguous()
