"""R-Drop's loss and gradients equal the formula, with fixed dropout masks."""

import contextlib
import copy
import math
import re

import numpy as np
import pytest
import reference
import torch
from commands import PLUGIN, refused, run
from fairseq.criterions.label_smoothed_cross_entropy_with_rdrop import (
    RdropLabelSmoothedCrossEntropyCriterion,
)
from fairseq.logging import metrics
from toy_models import scatter_modulators
from train_commands import ALL, TRANSLATE, hypotheses

from multimax_fairseq.criterions.cross_entropy import (
    LabelSmoothedMultimaxCrossEntropyCriterion,
    MultimaxCrossEntropyCriterion,
    doubled,
)
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

ALPHA = 5.0
SENTENCES = 3  # per batch; no other dimension has this size or twice this size
# (criterion, its options, label smoothing, ignored prefix)
CRITERIA = {
    "plain": (MultimaxCrossEntropyCriterion, {}, 0.0, 0),
    "smoothed": (LabelSmoothedMultimaxCrossEntropyCriterion, {"label_smoothing": 0.1}, 0.1, 0),
    "smoothed, prefix ignored": (
        LabelSmoothedMultimaxCrossEntropyCriterion,
        {"label_smoothing": 0.2, "ignore_prefix_size": 2},
        0.2,
        2,
    ),
}
DROPOUT = ("--dropout", "0.3")
STOCK = (*DROPOUT, "--activation-dropout", "0.1")
MORE = (*STOCK, "--attention-dropout", "0.2")
MODULATED = ("--output-normalizer", "multimax")
MODELS = {
    "transformer_lm_multimax": (*MORE, *MODULATED),
    "transformer_multimax": (*MORE, *MODULATED),
    "rnn_multimax": (*DROPOUT, "--hidden-dropout", "0.2", *MODULATED),
    # Without linear_output(), over all logits.
    "transformer": STOCK,
}


class Masks:
    """Fixed dropout masks: two for each sentence in each layer of the model."""

    def __init__(self):
        self.stored, self.generator = [], torch.Generator().manual_seed(7)

    @contextlib.contextmanager
    def passes(self, *rows):
        """Set the (pass, sentence) pairs of the rows of the next batch."""
        self.rows, self.index = rows, 0
        yield
        assert self.index == len(self.stored) > 0

    def dropout(self, x, p=0.5, training=True, inplace=False):
        if p == 0 or not training:
            return x
        assert x.shape.count(len(self.rows)) == 1
        dim = x.shape.index(len(self.rows))
        if self.index == len(self.stored):
            shape = (2, SENTENCES, *x.shape[:dim], *x.shape[dim + 1 :])
            self.stored.append(torch.rand(shape, generator=self.generator) >= p)
        kept = torch.stack([self.stored[self.index][row] for row in self.rows], dim)
        self.index += 1
        return x * kept / (1 - p)


FIRST, SECOND = ([(number, n) for n in range(SENTENCES)] for number in range(2))
NEIGHBOURS = [row for pair in zip(FIRST, SECOND, strict=True) for row in pair]


@pytest.fixture
def masks(monkeypatch):
    masks = Masks()
    monkeypatch.setattr(torch.nn.functional, "dropout", masks.dropout)
    return masks


@pytest.fixture(params=MODELS)
def model_and_batch(request, build, lm_batch, translation_batch):
    return training_model(request.param, build, lm_batch, translation_batch)


def training_model(arch, build, lm_batch, translation_batch):
    model = scatter_modulators(build(arch, *MODELS[arch])).double().train()
    if arch == "rnn_multimax":  # its initial embeddings are small
        for side in (model.encoder, model.decoder):
            side.embed_tokens.weight.data *= 100
    if arch == "transformer_lm_multimax":
        bias = torch.linspace(-1, 1, len(model.decoder.output_projection.weight))
        model.decoder.output_projection.bias = torch.nn.Parameter(bias.double())
    return model, lm_batch() if "_lm" in arch else translation_batch()


@pytest.fixture(params=CRITERIA)
def kind(request):
    return CRITERIA[request.param]


def gradients(model, loss):
    model.zero_grad()
    loss.sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def two_logits(model, sample, masks, prefix):
    """Return the outputs of the two passes, run one after the other."""
    for rows in (FIRST, SECOND):
        with masks.passes(*rows):
            logits = model(**sample["net_input"])[0]
        yield logits[:, prefix:].flatten(0, 1)


def written_out(two, target, smoothing, pad):
    """Return loss_1 + loss_2 + alpha (KL(p|q) + KL(q|p)) / 2 over the counted tokens."""
    counted = target != pad
    log_p, log_q = (x[counted].log_softmax(-1) for x in two)
    loss = 0.0
    for log_probs in (log_p, log_q):
        nll = -log_probs.gather(-1, target[counted][:, None]).sum()
        share = smoothing / (log_probs.shape[-1] - 1)
        loss = loss + (1 - smoothing) * nll + share * (-log_probs.sum() - nll)
    there = (log_p.exp() * (log_p - log_q)).sum()
    back = (log_q.exp() * (log_q - log_p)).sum()
    return loss + ALPHA * (there + back) / 2


def test_rdrop_equals_the_formula_with_gradients(task, model_and_batch, masks, kind):
    (model, sample), (cls, options, smoothing, prefix) = model_and_batch, kind
    pad = task.target_dictionary.pad()
    criterion = cls(task, sentence_avg=False, rdrop_alpha=ALPHA, **options)
    target = sample["target"][:, prefix:].flatten()
    given = copy.deepcopy(sample)
    with masks.passes(*NEIGHBOURS):
        loss, size, logged = criterion(model, sample)
    assert not any(getattr(value, "requires_grad", False) for value in logged.values())
    assert all((sample["net_input"][k] == v).all() for k, v in given["net_input"].items())
    assert size == logged["ntokens"] == int(given["target"].ne(pad).sum())
    ours = gradients(model, loss)
    two = list(two_logits(model, sample, masks, prefix))
    arrays = [x.detach().double().numpy() for x in two]
    expected, divergence = reference.rdrop(*arrays, target.numpy(), ALPHA, smoothing, pad)
    # Without linear_output(), fairseq computes log-probabilities in float32.
    fused = hasattr(model.decoder, "linear_output")
    close = 1e-10 if fused else 1e-5
    assert loss.item() == pytest.approx(expected, rel=close)
    assert logged["rdrop"].item() == pytest.approx(divergence, rel=close)
    assert divergence > 0.1
    theirs = gradients(model, written_out(two, target, smoothing, pad))
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        scale = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(
            ours[name], gradient, rtol=close, atol=close * scale, msg=f"{name}"
        )
    learned = [name for name in ours if name.startswith("decoder.output_modulator")]
    assert len(learned) == (4 if fused else 0)
    assert all((ours[name] != 0).all() for name in learned)


def test_rdrop_without_weight_sums_two_passes(task, model_and_batch, masks, kind):
    """With alpha 0 the criterion runs one plain pass."""
    (model, sample), (cls, options, *_) = model_and_batch, kind
    with masks.passes(*NEIGHBOURS):
        criterion = cls(task, sentence_avg=False, rdrop_alpha=1e-300, **options)
        loss, _, logged = criterion(model, sample)
    ours = gradients(model, loss)
    plain = cls(task, sentence_avg=False, rdrop_alpha=0.0, **options)
    found = []
    for rows in (FIRST, SECOND):
        with masks.passes(*rows):
            found.append(plain(model, sample))
    torch.testing.assert_close(loss, found[0][0] + found[1][0])
    theirs = gradients(model, found[0][0] + found[1][0])
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)
    # The log has the mean of the two passes.
    assert logged.keys() == found[0][2].keys() | {"rdrop"}
    for key in ("loss", "nll_loss"):
        if key in logged:
            mean = (found[0][2][key] + found[1][2][key]) / 2
            torch.testing.assert_close(logged[key], mean)


@pytest.mark.parametrize("arch", ["transformer_multimax", "transformer"])
def test_rdrop_equals_fairseqs_rdrop(task, build, lm_batch, translation_batch, masks, arch):
    model, sample = training_model(arch, build, lm_batch, translation_batch)
    options = {"sentence_avg": False, "label_smoothing": 0.1, "rdrop_alpha": ALPHA}
    with masks.passes(*NEIGHBOURS):
        loss, size, logged = LabelSmoothedMultimaxCrossEntropyCriterion(task, **options)(
            model, sample
        )
    ours = gradients(model, loss)
    with masks.passes(*FIRST, *SECOND):  # the second copies follow all sentences
        found = RdropLabelSmoothedCrossEntropyCriterion(task, **options)(model, sample)
    torch.testing.assert_close(loss.float(), found[0].float())
    assert size == found[1]
    assert logged["rdrop"].item() == pytest.approx(found[2]["rdrop_kl_loss"], rel=1e-5)
    for name, gradient in gradients(model, found[0]).items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("arch", ["transformer_multimax", "transformer"])
@pytest.mark.parametrize("sentence_avg", [False, True])
def test_rdrop_logs_mean_loss_and_divergence(
    task, build, lm_batch, translation_batch, masks, kind, sentence_avg, arch
):
    model, sample = training_model(arch, build, lm_batch, translation_batch)
    cls, options, _, prefix = kind
    if options:
        options = {**options, "report_accuracy": True}
    criterion = cls(task, sentence_avg=sentence_avg, rdrop_alpha=ALPHA, **options)
    with masks.passes(*NEIGHBOURS):
        loss, size, logged = criterion(model, sample)
    tokens = sample["ntokens"]
    assert (size, logged["nsentences"]) == (SENTENCES if sentence_avg else tokens, SENTENCES)
    both = 2 * logged["loss"] + ALPHA * logged["rdrop"]
    torch.testing.assert_close(loss.detach(), both)
    if options:
        # The accuracy is of the first pass.
        counted = sample["target"][:, prefix:].ne(task.target_dictionary.pad())
        best = next(two_logits(model, sample, masks, prefix)).argmax(-1).view(counted.shape)
        assert logged["total"] == counted.sum()
        right = best.eq(sample["target"][:, prefix:]) & counted
        assert logged["n_correct"] == right.sum()
    with metrics.aggregate(new_root=True) as meters:
        cls.reduce_metrics([logged, logged])
    values = meters.get_smoothed_values()
    in_bits = logged["rdrop"].item() / tokens / math.log(2)
    assert values["rdrop"] == pytest.approx(in_bits, abs=1e-3) and values["rdrop"] > 0
    with metrics.aggregate(new_root=True) as meters:  # means over updates, weighted by tokens
        for log in (logged, {**logged, "rdrop": 0.0, "ntokens": 3 * tokens}):
            cls.reduce_metrics([log])
    assert meters.get_smoothed_values()["rdrop"] == pytest.approx(in_bits / 4, abs=1e-3)
    mean = logged["loss"].item() / size / math.log(2)
    assert values["loss"] == pytest.approx(mean, abs=1e-3)
    # Per token if they are not summed.
    with masks.passes(*NEIGHBOURS):
        each, _, of_each = criterion(model, sample, reduce=False)
    assert each.shape == of_each["loss"].shape == of_each["rdrop"].shape
    assert each.shape == ((counted.numel(), 1) if options else (sample["target"].numel(),))
    torch.testing.assert_close(each.sum(), loss)
    padded = sample["target"][:, prefix:].eq(task.target_dictionary.pad()).flatten()
    assert padded.any() and (each.flatten()[padded] == 0).all()


def test_doubled_repeats_every_tensor():
    tokens, lengths = torch.arange(6).view(3, 2), torch.tensor([2, 1, 2])
    found = doubled({"src_tokens": tokens, "src_lengths": lengths, "prev_output_tokens": None})
    assert torch.equal(found["src_tokens"], tokens[[0, 0, 1, 1, 2, 2]])
    assert found["src_lengths"].tolist() == [2, 2, 1, 1, 2, 2]
    assert found["prev_output_tokens"] is None


def test_rdrop_metrics_accept_workers_without_divergence():
    idle = {"loss": 0.0, "ntokens": 0, "sample_size": 0}
    log = {"loss": 1.0, "ntokens": 2, "sample_size": 2, "rdrop": 3.0}
    with metrics.aggregate(new_root=True) as meters:
        MultimaxCrossEntropyCriterion.reduce_metrics([idle, log])
    found = meters.get_smoothed_values()["rdrop"]
    assert found == pytest.approx(1.5 / math.log(2), abs=1e-3)


def test_rdrop_evaluates_with_one_pass(task, model_and_batch, kind):
    (model, sample), (cls, options, *_) = model_and_batch, kind
    model.eval()
    found = [
        cls(task, sentence_avg=False, rdrop_alpha=alpha, **options)(model, sample)
        for alpha in (0.0, ALPHA)
    ]
    assert found[0] == found[1] and "rdrop" not in found[1][2]


def test_rdrop_of_padding_has_zero_gradient(task, model_and_batch, kind):
    (model, sample), (cls, options, *_) = model_and_batch, kind
    sample["target"].fill_(task.target_dictionary.pad())
    loss, *_ = cls(task, sentence_avg=True, rdrop_alpha=ALPHA, **options)(model, sample)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients(model, loss).values())


def test_rdrop_never_holds_all_logits(task, build, lm_batch, monkeypatch, kind):
    model, (cls, options, *_) = build("transformer_lm_multimax", *DROPOUT), kind
    held = []
    monkeypatch.setattr(type(model.decoder), "output_layer", lambda _, x: held.append(x))
    cls(task, sentence_avg=False, rdrop_alpha=ALPHA, **options)(model, lm_batch())[0].backward()
    assert held == []


@pytest.mark.parametrize("alpha", [-1.0, -1e-9, math.nan, math.inf])
def test_rdrop_refuses_an_invalid_weight(task, kind, alpha):
    cls, options, *_ = kind
    with pytest.raises(UsageError, match=re.escape(f"--rdrop-alpha {alpha} must be a finite")):
        cls(task, sentence_avg=False, rdrop_alpha=alpha, **options)


def test_rdrop_trains_resumes_and_translates(text):
    command = ["fairseq-train", "mt", *PLUGIN, *TRANSLATE, "--rdrop-alpha", "5"]
    command += ["--update-freq", "2", "--report-accuracy"]
    wrong = refused(text, *command, "--rdrop-alpha", "nan", "--no-save")
    assert "--rdrop-alpha nan must be" in wrong
    step = re.compile(r"train_inner.*? loss=([\d.]+), .*?rdrop=([\d.]+)")
    whole = run(text, *command, "--save-dir", "rdrop-whole")
    run(text, *command, "--save-dir", "rdrop", "--max-update", "3")
    resumed = run(text, *command, "--save-dir", "rdrop")
    figures, later = (np.array(step.findall(log), float) for log in (whole, resumed))
    assert figures.shape == (6, 2) and (figures[:, 1] > 0).all()
    np.testing.assert_allclose(later, figures[3:], rtol=1e-3, atol=1e-3)
    validation = re.findall(r"\| valid \|.*", whole)
    assert validation and not any("rdrop" in line for line in validation)
    path = ("--path", "rdrop/checkpoint_last.pt")
    output = run(text, "fairseq-generate", "mt", *PLUGIN, *path, "--max-len-b", "12", *ALL)
    assert np.isfinite([score for score, _ in hypotheses(output).values()]).all()
    assert len(hypotheses(output)) == 8
