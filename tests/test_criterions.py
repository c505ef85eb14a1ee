"""The criteria give the stock criteria's losses, gradients and logged fields."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_alignment import (
    LabelSmoothedCrossEntropyCriterionWithAlignment,
)
from fairseq.logging import metrics
from toy_models import scatter_modulators

from multimax_fairseq.criterions import cross_entropy
from multimax_fairseq.criterions.cross_entropy import (
    LabelSmoothedMultimaxCrossEntropyCriterion,
    MultimaxCrossEntropyCriterion,
)
from multimax_fairseq.criterions.entmax_loss import EntmaxLossCriterion
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

PAIRS = {
    "plain": (CrossEntropyCriterion, MultimaxCrossEntropyCriterion, {}),
    "smoothed": (
        LabelSmoothedCrossEntropyCriterion,
        LabelSmoothedMultimaxCrossEntropyCriterion,
        {"label_smoothing": 0.1, "report_accuracy": True},
    ),
    "smoothed, prefix ignored": (
        LabelSmoothedCrossEntropyCriterion,
        LabelSmoothedMultimaxCrossEntropyCriterion,
        {"label_smoothing": 0.2, "ignore_prefix_size": 2},
    ),
}


@pytest.fixture(params=["transformer_lm_multimax", "transformer_multimax", "rnn_multimax"])
def model_and_batch(request, build, lm_batch, translation_batch):
    def make(normalizer, alpha="1.5", **batch_options):
        flags = ("--output-normalizer", normalizer)
        if normalizer == "alpha_entmax":
            flags += ("--output-entmax-alpha", alpha)
        model = scatter_modulators(build(request.param, *flags))
        if request.param == "rnn_multimax":  # its initial embeddings are small
            for side in (model.encoder, model.decoder):
                side.embed_tokens.weight.data *= 100
        batch = lm_batch if "_lm" in request.param else translation_batch
        return model, batch(**batch_options)

    return make


def run(criterion, model, sample, reduce=True):
    loss, sample_size, logged = criterion(model, sample, reduce=reduce)
    assert not any(getattr(value, "requires_grad", False) for value in logged.values())
    model.zero_grad()
    loss.sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return loss, sample_size, logged, copy.deepcopy(gradients)


@pytest.mark.parametrize(
    "pair, normalizer, sentence_avg, empty",
    [
        ("plain", "multimax", False, False),
        ("plain", "softmax", True, False),
        ("smoothed", "softcap", True, False),
        ("smoothed, prefix ignored", "multimax", False, False),
        ("smoothed", "multimax", True, True),
    ],
)
def test_cross_entropy_equals_stock_loss_gradients_and_fields(
    task, model_and_batch, pair, normalizer, sentence_avg, empty
):
    stock, ours, options = PAIRS[pair]
    model, sample = model_and_batch(normalizer)
    if empty:
        sample["target"].fill_(task.target_dictionary.pad())
        sample["ntokens"] = 0
    results = [
        run(cls(task, sentence_avg=sentence_avg, **options), model, sample) for cls in (stock, ours)
    ]
    (stock_loss, stock_size, stock_logged, stock_gradients), (loss, size, logged, gradients) = (
        results
    )
    torch.testing.assert_close(loss, stock_loss, rtol=1e-5, atol=1e-6)
    assert size == stock_size
    assert logged.keys() == stock_logged.keys()
    for key, value in stock_logged.items():
        assert float(logged[key]) == pytest.approx(float(value), rel=1e-5), key
    for name, gradient in stock_gradients.items():
        torch.testing.assert_close(
            gradients[name], gradient, rtol=1e-4, atol=1e-5 * max(1.0, gradient.abs().max().item())
        )
    assert any((g != 0).any() for g in gradients.values()) != empty


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_cross_entropy_equals_stock_losses_without_reduction(task, model_and_batch, pair):
    stock, ours, options = pair
    model, sample = model_and_batch("multimax")
    (expected, *_, stock_logged, _), (loss, *_, logged, _) = (
        run(cls(task, sentence_avg=False, **options), model, sample, reduce=False)
        for cls in (stock, ours)
    )
    if options:
        # The stock criterion weighs two losses per token.
        assert expected.shape == loss.shape
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logged["loss"], stock_logged["loss"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_cross_entropy_equals_stock_metrics(task, model_and_batch, pair):
    model, sample = model_and_batch("multimax")
    reduced = []
    for cls in pair[:2]:
        logged = cls(task, sentence_avg=True, **pair[2])(model, sample)[2]
        with metrics.aggregate(new_root=True) as meters:
            cls.reduce_metrics([logged, logged])
        reduced.append(meters.get_smoothed_values())
    assert reduced[0].keys() == reduced[1].keys() and "loss" in reduced[0]
    for key, value in reduced[0].items():
        assert reduced[1][key] == pytest.approx(value, rel=1e-3), key


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_z_loss_and_maxsup_are_added_in_training_only(task, model_and_batch, pair):
    _, ours, options = pair
    model, sample = model_and_batch("multimax")
    without, criterion = (
        ours(task, False, **options, z_loss=weight, maxsup=3 * weight) for weight in (0.0, 0.1)
    )
    model.eval()
    assert criterion(model, sample)[0] == without(model, sample)[0]
    model.train()
    for dropout in (m for m in model.modules() if hasattr(m, "apply_during_inference")):
        dropout.p = 0.0
    prefix = options.get("ignore_prefix_size", 0)
    logits = model(**sample["net_input"])[0][:, prefix:]
    counted = sample["target"][:, prefix:] != task.target_dictionary.pad()
    squares = logits.logsumexp(-1).square()[counted].sum()
    gaps = (logits.amax(-1) - logits.mean(-1))[counted].sum()
    found = criterion(model, sample)[0]
    expected = without(model, sample)[0] + 0.1 * squares + 0.3 * gaps
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_z_loss_refuses_other_output_layers_and_weights(task, build, translation_batch):
    model, sample = build("transformer"), translation_batch()
    criterion = MultimaxCrossEntropyCriterion(task, False, z_loss=0.1)
    with pytest.raises(UsageError, match="--z-loss and --maxsup need an output layer"):
        criterion(model, sample)
    for wrong in (-1.0, math.nan):
        for name in ("z_loss", "maxsup"):
            with pytest.raises(UsageError, match="must be a finite number, at least 0: 0 is off;"):
                MultimaxCrossEntropyCriterion(task, False, **{name: wrong})


def test_cross_entropy_equals_stock_without_linear_output(task, build, translation_batch, caplog):
    model, sample = build("transformer"), translation_batch()
    cross_entropy._log_all_logits.cache_clear()
    expected = CrossEntropyCriterion(task, False)(model, sample)[0]
    with caplog.at_level("INFO", MultimaxCrossEntropyCriterion.__module__):
        criterion = MultimaxCrossEntropyCriterion(task, False)
        losses = [criterion(model, sample)[0] for _ in range(2)]
    assert losses == [expected, expected]
    assert sum("has no linear_output()" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    "pair, more", zip(PAIRS.values(), ("a hook", "weight norm", "another class"), strict=True)
)
def test_cross_entropy_equals_stock_with_changed_output_layer(task, model_and_batch, pair, more):
    class Doubled(torch.nn.Linear):
        def forward(self, features):
            return 2 * super().forward(features)

    model, sample = model_and_batch("multimax")
    plain = run(pair[1](task, False, **pair[2]), model, sample)[0]
    projection = model.decoder.output_projection
    if more == "a hook":
        projection.register_forward_hook(lambda module, args, logits: 2 * logits)
    elif more == "weight norm":
        with torch.no_grad():
            torch.nn.utils.parametrizations.weight_norm(projection)
            projection.parametrizations.weight.original0.mul_(2)
    else:
        projection.__class__ = Doubled
    (expected, *_, gradients), (loss, *_, ours) = (
        run(cls(task, False, **pair[2]), model, sample) for cls in pair[:2]
    )
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert (loss - plain).abs() > 1e-2 and gradients.keys() == ours.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5)


def test_cross_entropy_accuracy_counts_every_token(task, build, lm_batch):
    """Scores are computed for 256 tokens at a time."""
    flags = ("--output-normalizer", "softmax", "--tokens-per-sample", "512")
    model, sample = build("transformer_lm_multimax", *flags).eval(), lm_batch((60,) * 6)
    sample["target"] = model(**sample["net_input"])[0].argmax(-1)
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1, report_accuracy=True)
    logged = criterion(model, sample)[2]
    assert logged["n_correct"] == logged["total"] > 256


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_cross_entropy_never_holds_all_logits(task, build, lm_batch, monkeypatch, pair):
    model = build("transformer_lm_multimax")
    held = []
    monkeypatch.setattr(
        type(model.decoder), "output_layer", lambda self, features: held.append(features)
    )
    options = {**pair[2], "report_accuracy": False} if pair[2] else {}
    pair[1](task, sentence_avg=False, **options)(model, lm_batch())[0].backward()
    assert held == []


# --- sparse output layers ----------------------------------------------------------------------

ALPHAS = {"sparsemax": 2.0, "entmax15": 1.5, "alpha_entmax": 1.3}


def sparse(model):
    """Logits far enough apart that some words become impossible."""
    with torch.no_grad():
        model.decoder.output_projection.weight.mul_(20)
    return model


@pytest.mark.parametrize("normalizer", ALPHAS)
def test_entmax_loss_equals_the_reference(task, model_and_batch, normalizer):
    model, sample = model_and_batch(normalizer, alpha="1.3")
    sparse(model)
    with torch.no_grad():
        sample["target"][0, 0] = model(**sample["net_input"])[0][0, 0].argmax()
    criterion = EntmaxLossCriterion(task, sentence_avg=False)
    loss, size, logged, _ = run(criterion, model, sample)
    counted = sample["target"].ne(task.target_dictionary.pad())
    net_output = model(**sample["net_input"])
    logits, wanted = net_output[0][counted].detach().double(), sample["target"][counted]
    expected = reference.fenchel_young_loss(logits.numpy(), wanted.tolist(), ALPHAS[normalizer])
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert size == logged["ntokens"] == int(counted.sum())
    probs = reference.entmax(logits.numpy(), np.zeros(logits.shape, bool), ALPHAS[normalizer])
    impossible = (probs[np.arange(len(wanted)), wanted] == 0).sum()
    assert 0 < int(logged["zero"]) == impossible < len(wanted)
    net_output[0].retain_grad()
    model.get_targets = lambda sample, _: sample["target"]
    model.forward = lambda **_: net_output
    criterion(model, sample)[0].backward()
    gradient = torch.from_numpy(probs).float()
    gradient[torch.arange(len(wanted)), wanted] -= 1
    torch.testing.assert_close(net_output[0].grad[counted], gradient, rtol=0, atol=1e-4)
    assert (net_output[0].grad[~counted] == 0).all()


def test_entmax_loss_handles_no_reduction_and_no_targets(task, model_and_batch):
    model, sample = model_and_batch("entmax15")
    sparse(model)
    criterion = EntmaxLossCriterion(task, sentence_avg=True)
    whole, size, logged, _ = run(criterion, model, sample)
    parts, *_ = run(criterion, model, sample, reduce=False)
    assert parts.shape == sample["target"].shape
    torch.testing.assert_close(parts.sum(), whole)
    assert size == len(sample["target"])
    with metrics.aggregate(new_root=True) as meters:
        EntmaxLossCriterion.reduce_metrics([logged, logged])
    values = meters.get_smoothed_values()
    assert values["loss"] == pytest.approx(whole.item() / size, abs=1e-3)
    assert values["zero"] == pytest.approx(int(logged["zero"]) / logged["ntokens"], abs=1e-4)
    assert values["zero"] > 0
    with metrics.aggregate(new_root=True) as meters:
        EntmaxLossCriterion.reduce_metrics([{}])  # from a worker with a dummy batch
    assert set(meters.get_smoothed_values().values()) == {0}
    sample["target"].fill_(task.target_dictionary.pad())
    sample["ntokens"] = 0
    assert run(criterion, model, sample)[0] == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("normalizer", ALPHAS)
def test_entmax_loss_propagates_non_finite_weights(task, build, lm_batch, normalizer, value):
    model = build("transformer_lm_multimax", "--output-normalizer", normalizer)
    with torch.no_grad():
        model.decoder.output_projection.weight[7, 0] = value
    loss = EntmaxLossCriterion(task, sentence_avg=False)(model, lm_batch())[0]
    assert not loss.isfinite()


def test_entmax_loss_of_half_precision_is_float32(task, build, lm_batch):
    model = build("transformer_lm_multimax", "--output-normalizer", "entmax15").bfloat16()
    loss, _, logged = EntmaxLossCriterion(task, sentence_avg=False)(model, lm_batch())
    assert loss.dtype == logged["loss"].dtype == torch.float32


def test_entmax_loss_counts_sentences_and_sums_fields(task, build, lm_batch):
    model, sample = build("transformer_lm_multimax", "--output-normalizer", "entmax15"), lm_batch()
    logged = EntmaxLossCriterion(task, sentence_avg=False)(model, sample)[2]
    assert logged["nsentences"] == len(sample["target"])
    assert EntmaxLossCriterion.logging_outputs_can_be_summed()


def test_entmax_loss_refuses_a_dense_output_layer(task, build):
    model = build("transformer_lm_multimax", "--output-normalizer", "softmax")
    with pytest.raises(UsageError, match="is for sparse output layers"):
        EntmaxLossCriterion(task, sentence_avg=False).check_model(model)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_cross_entropy_refuses_a_sparse_output_layer(task, model_and_batch, pair):
    model, sample = model_and_batch("entmax15")
    for cls in pair[:2]:
        with pytest.raises(UsageError, match="label smoothing.*entmax_loss"):
            cls(task, sentence_avg=False, **pair[2])(model, sample)
    with pytest.raises(UsageError, match="label smoothing.*entmax_loss"):
        pair[1](task, sentence_avg=False, **pair[2]).check_model(model)
    model, sample = model_and_batch("softmax")
    with pytest.raises(UsageError, match="--output-normalizer with one of alpha_entmax, entmax15"):
        EntmaxLossCriterion(task, sentence_avg=False)(model, sample)


@pytest.mark.parametrize("arch", ["transformer_multimax", "rnn_multimax"])
def test_alignment_criterion_trains_cross_attention(task, build, translation_batch, arch):
    sample = translation_batch()
    # (source position, row of the flattened target (3 x 8)).
    sample["alignments"] = torch.tensor([[3, 0], [4, 2], [7, 9]])
    sample["align_weights"] = torch.tensor([1.0, 0.5, 1.0])
    task = SimpleNamespace(target_dictionary=task.target_dictionary)
    criterion = LabelSmoothedCrossEntropyCriterionWithAlignment(task, False, 0.1, 1.0)
    found = {}
    flags = {"softmax": (), "multimax": ("--multimax-init-std", "0")}
    for normalizer, more in flags.items():
        model = build(arch, "--attention-normalizer", normalizer, *more)
        loss, _, logged = criterion(model, sample)
        loss.backward()
        found[normalizer] = (loss.detach(), torch.tensor(logged["alignment_loss"]))
    assert found["multimax"][1] > 0
    torch.testing.assert_close(found["multimax"], found["softmax"])
    learned = [p for n, p in model.named_parameters() if "normalizer" in n]
    assert learned and any(p.grad.abs().sum() > 0 for p in learned)
