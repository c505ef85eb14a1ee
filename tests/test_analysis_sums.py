"""statistics/sums.py: sums over queries and keys, and the models that the recorder refuses."""

import math
from types import SimpleNamespace

import pytest
import torch
import toy_models

from multimax_fairseq import normalize
from multimax_fairseq.analysis.recorder import Recorder
from multimax_fairseq.analysis.words import WordBoundaries
from multimax_fairseq.errors import UsageError
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.statistics.sums import AttentionSums, OutputSums, QueriesAndKeys


@pytest.mark.parametrize(("name", "loss"), [("softmax", 300.0), ("entmax15", math.inf)])
def test_output_sums_loss_is_infinite_only_at_exact_zeros(dictionary, name, loss):
    def probabilities(output, log_probs):
        if name == "softmax":
            return output[0].log_softmax(-1) if log_probs else output[0].softmax(-1)
        probs = normalize(name, output[0])
        return probs.log() if log_probs else probs

    logits = torch.zeros(2, len(dictionary))
    logits[:, 5] = 300.0  # exp(-300) is 0 in float32
    decoder = SimpleNamespace(
        dictionary=dictionary, output_layer=lambda x: x, get_normalized_probs=probabilities
    )
    sums = OutputSums(dictionary)
    sums.add(decoder, logits, torch.tensor([6, 7]))
    (row,) = sums.rows()
    assert row["nll"] == pytest.approx(loss) and row["probability"] == 0
    assert row["entropy"] == pytest.approx(0, abs=1e-6) and row["tokens"] == 2


def test_attention_sums_ignore_queries_without_weight():
    positions = torch.arange(4)
    offsets = (positions - positions[:, None])[None, None]
    nothing = torch.zeros(1, 4, dtype=torch.bool)
    words = positions[None]
    unasked = nothing[:, None, None]
    pair = QueriesAndKeys(nothing, nothing, offsets, True, words, unasked, nothing)
    probs = torch.zeros(1, 2, 4, 4)
    probs[0, 0, 1, 2] = 0.25
    sums = AttentionSums(Normalizer("softpick"), 2)
    sums.add(torch.randn(1, 2, 4, 4), probs, torch.zeros(1, 1, 4, 4, dtype=torch.bool), pair)
    looking, idle = sums.head_rows()
    assert looking["offset"] == 1 and sums.top_offsets.sum() == 1
    assert looking["confidence"] == pytest.approx(0.25 / 3)
    assert "offset" not in idle and "confidence" not in idle


@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_lm_multimax"])
def test_recorder_names_the_layer_of_non_finite_scores(build, dictionary, lm_batch, arch):
    model = build(arch).eval()
    with torch.no_grad():
        model.decoder.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    recorder = Recorder(model, None, WordBoundaries(dictionary), set())
    with pytest.raises(UsageError, match="in layer 2 of decoder attention are not finite.*: pass"):
        recorder.run(lm_batch())


@pytest.mark.parametrize(
    ("arch", "why"),
    [
        ("lstm_lm", "layer 1 of its decoder has no self-attention"),
        ("lightconv_lm", "layer 1 of its decoder has no self-attention"),
        ("lightconv_iwslt_de_en", "layer 1 of its encoder has no self-attention"),
        ("transformer_align", "a TransformerAlignModel has no forward for the features only"),
    ],
)
def test_recorder_refuses_unsupported_models(build, task, dictionary, monkeypatch, arch, why):
    for name in ("dictionary", "output_dictionary"):
        monkeypatch.setattr(task, name, dictionary, raising=False)
    if arch != "transformer_align":  # they have no such flags
        monkeypatch.setattr(toy_models, "sizes_of", lambda arch: [])
    words = WordBoundaries(dictionary)
    with pytest.raises(UsageError, match=rf"cannot be analysed \({why}\): pass one of a transf"):
        Recorder(build(arch), None if "_lm" in arch else words, words, set())


def test_recorder_ignores_beginning_of_sentence_targets(build, dictionary, lm_batch):
    recorder = Recorder(
        build("transformer_lm_multimax").eval(), None, WordBoundaries(dictionary), set()
    )
    sample = lm_batch()
    sample["target"][:, 0] = dictionary.bos()
    recorder.run(sample)
    assert sum(recorder.output.tokens) == sample["ntokens"] - len(sample["target"])
