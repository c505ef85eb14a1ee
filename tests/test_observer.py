"""statistics/observer.py: what a listener receives from a forward pass."""

import pytest
import torch

from multimax_fairseq.modules import Normalizer
from multimax_fairseq.statistics.observer import AttentionListener, Observer

LAYERS = [(kind, layer) for kind in ("encoder", "decoder", "cross") for layer in range(2)]


class Lists(AttentionListener):
    def __init__(self):
        self.attentions, self.outputs = [], []

    def on_attention(self, attention):
        self.attentions.append(attention)

    def on_output(self, decoder, output, is_logits):
        self.outputs.append((output, is_logits))


@pytest.fixture(params=["transformer_multimax", "transformer"])
def model(build, request):
    return build(request.param).eval()


def test_observer_passes_each_attention_once(model, translation_batch):
    lists, sample = Lists(), translation_batch()
    Observer(model, lists, once=True)

    with torch.no_grad():
        logits, _ = model(**sample["net_input"])

    assert sorted((a.kind, a.layer) for a in lists.attentions) == sorted(LAYERS)
    for attention in lists.attentions:
        normalizer = attention.normalizer or Normalizer("softmax")
        expected = normalizer(attention.scores, -1, attention.excluded)
        torch.testing.assert_close(attention.probs, expected)
        assert attention.valid.shape == attention.scores.shape
    ((output, is_logits),) = lists.outputs
    padding = sample["net_input"]["prev_output_tokens"] == model.decoder.dictionary.pad()
    assert is_logits and output.equal(logits[~padding])


def test_observer_passes_the_scores_that_a_modulator_receives(build, translation_batch):
    model, lists = build("transformer_multimax", "--multimax-length-scale").eval(), Lists()
    Observer(model, lists)

    with torch.no_grad():
        model(**translation_batch()["net_input"])

    assert lists.attentions
    for attention in lists.attentions:
        keys = attention.scores.new_full((1,), attention.scores.shape[-1])
        if attention.excluded is not None:
            keys = (~attention.excluded).sum(-1, keepdim=True)
        scale = attention.module.outer_scale() * keys.log()
        expected = scale * attention.modulator(attention.scores)
        if attention.excluded is not None:
            expected = expected.masked_fill(attention.excluded, -torch.inf)
        torch.testing.assert_close(attention.probs, expected.softmax(-1))


def test_observer_adds_float_mask_where_keys_are_not_padding(build, translation_batch):
    model = build("transformer").eval()
    inputs, lists = translation_batch()["net_input"], Lists()
    positions = torch.arange(inputs["src_tokens"].shape[1])
    distances = -(positions[:, None] - positions).abs().float()  # as ALiBi
    model.encoder.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attn_mask": distances}), with_kwargs=True
    )
    Observer(model, lists)

    with torch.no_grad():
        model(**inputs)

    attention = lists.attentions[0]
    padding = (inputs["src_tokens"] == model.encoder.dictionary.pad())[:, None, None]
    assert padding.any()
    expected = (attention.scores + distances).masked_fill(padding, -torch.inf).softmax(-1)
    torch.testing.assert_close(attention.probs, expected)


def test_observer_leaves_model_output_unchanged(model, translation_batch):
    inputs = translation_batch()["net_input"]
    with torch.no_grad():
        expected, _ = model(**inputs)
        Observer(model, Lists())
        found, _ = model(**inputs)
    assert found.equal(expected)


@pytest.mark.parametrize("once", [False, True])
def test_observer_stops(model, translation_batch, once):
    inputs, lists = translation_batch()["net_input"], Lists()
    observer = Observer(model, lists, once=once)

    with torch.no_grad():
        model(**inputs)
        if not once:
            observer.stop()
        model(**inputs)

    assert len(lists.outputs) == 1 and len(lists.attentions) == len(LAYERS)
    assert not any(getattr(module, "kernel_hooks", ()) for module in model.modules())


def test_observer_counts_layers_that_share_a_module(model, translation_batch):
    model.encoder.layers[1] = model.encoder.layers[0]
    lists = Lists()
    Observer(model, lists)

    with torch.no_grad():
        model(**translation_batch()["net_input"])

    first, second = (a for a in lists.attentions if a.kind == "encoder")
    assert (first.layer, second.layer) == (0, 1)
    assert not first.scores.equal(second.scores)
