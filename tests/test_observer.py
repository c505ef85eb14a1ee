"""analysis/observer.py: what a listener receives from a forward pass."""

import pytest
import torch

from multimax_fairseq.analysis.observer import AttentionListener, Observer
from multimax_fairseq.modules import Normalizer

PLACES = [(place, layer) for place in ("encoder", "decoder", "cross") for layer in range(2)]


class Lists(AttentionListener):
    def __init__(self):
        self.attentions, self.outputs = [], []

    def on_attention(self, attention):
        self.attentions.append(attention)

    def on_output(self, decoder, shown, is_logits):
        self.outputs.append((shown, is_logits))


@pytest.fixture(params=["transformer_multimax", "transformer"])
def model(build, request):
    return build(request.param).eval()


def test_observer_shows_each_attention_once(model, translation_batch):
    listener, sample = Lists(), translation_batch()
    Observer(model, listener, once=True)

    with torch.no_grad():
        logits, _ = model(**sample["net_input"])

    assert sorted((a.place, a.layer) for a in listener.attentions) == sorted(PLACES)
    for attention in listener.attentions:
        normalizer = attention.normalizer or Normalizer("softmax")
        expected = normalizer(attention.scores, -1, attention.excluded)
        torch.testing.assert_close(attention.probs, expected)
        assert attention.kept.shape == attention.scores.shape
    ((shown, is_logits),) = listener.outputs
    padding = sample["net_input"]["prev_output_tokens"] == model.decoder.dictionary.pad()
    assert is_logits and shown.equal(logits[~padding])


def test_observer_keeps_outputs(model, translation_batch):
    inputs = translation_batch()["net_input"]
    with torch.no_grad():
        expected, _ = model(**inputs)
        Observer(model, Lists())
        found, _ = model(**inputs)
    assert found.equal(expected)


@pytest.mark.parametrize("once", [False, True])
def test_observer_stops(model, translation_batch, once):
    inputs, listener = translation_batch()["net_input"], Lists()
    observer = Observer(model, listener, once=once)

    with torch.no_grad():
        model(**inputs)
        if not once:
            observer.stop()
        model(**inputs)

    assert len(listener.outputs) == 1 and len(listener.attentions) == len(PLACES)
    assert not any("attend" in vars(module) for module in model.modules())


def test_observer_counts_layers_that_share_a_module(model, translation_batch):
    model.encoder.layers[1] = model.encoder.layers[0]
    listener = Lists()
    Observer(model, listener)

    with torch.no_grad():
        model(**translation_batch()["net_input"])

    first, second = (a for a in listener.attentions if a.place == "encoder")
    assert (first.layer, second.layer) == (0, 1)
    assert not first.scores.equal(second.scores)
