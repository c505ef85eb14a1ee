"""Whole models give one graph and eager's numbers under torch.compile, export and autocast."""

from contextlib import nullcontext

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from recorded_programs import (
    KEYS,
    NEEDS_KERNELS,
    QUERIES,
    Recorder,
    autocast,
    is_wide,
    ours,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from toy_models import scatter_modulators

from multimax_fairseq.criterions.cross_entropy import LabelSmoothedMultimaxCrossEntropyCriterion
from multimax_fairseq.ops import backend

pytestmark = [pytest.mark.long, NEEDS_KERNELS]

ARCHITECTURES = {
    "transformer_multimax": ["--multimax-heads", "separate", "--output-normalizer", "multimax"],
    "transformer_lm_multimax": [],
}
ONE_LAYER = ["--encoder-layers", "1", "--decoder-layers", "1"]


def some_batches(arch, translation_batch, lm_batch):
    """Return two batches of one shape, the first without padding, and one of another shape."""
    if "_lm" in arch:
        return [lm_batch((8, 8, 8)), lm_batch((8, 5, 3), seed=1), lm_batch((6, 4, 2))]
    return [
        translation_batch(((9, 7),) * 3),
        translation_batch(seed=1),
        translation_batch(((5, 6), (3, 3), (1, 2))),
    ]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(1)


@pytest.fixture(params=ARCHITECTURES)
def training(request, build, translation_batch, lm_batch):
    arch = request.param
    layers = ONE_LAYER[2:] if "_lm" in arch else ONE_LAYER
    model = scatter_modulators(build(arch, *ARCHITECTURES[arch], *layers))
    return model, some_batches(arch, translation_batch, lm_batch)


class Scores(nn.Module):
    """A model as a module from tensors to scores."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        return self.model(*inputs)[0]

    def inputs(self, sample):
        names = ["src_tokens", "src_lengths", "prev_output_tokens"]
        if "prev_output_tokens" not in sample["net_input"]:
            names = names[:1]
        return tuple(sample["net_input"][name] for name in names)


def assert_same_gradients(model, got, rtol=1e-5):
    for name, parameter in model.named_parameters():
        expected = got[name]
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            atol = rtol * expected.abs().max().item()
            torch.testing.assert_close(parameter.grad, expected, rtol=rtol, atol=atol)


def gradients_of(model):
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return gradients


def test_criterion_compiles_to_one_graph(training, task):
    model, batches = training
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1, report_accuracy=True)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    for sample in batches[:2]:
        loss, sample_size, logged = criterion(model, sample)
        loss.backward()
        expected = gradients_of(model)
        got = step(model, sample)
        torch.testing.assert_close(got, (loss, sample_size, logged), rtol=1e-5, atol=1e-5)
        got[0].backward()
        assert_same_gradients(model, expected)
        model.zero_grad()
    # PyTorch 2.10 treats the first number of tokens as a constant until it changes.
    assert counter.frame_count == (2 if torch.__version__.startswith("2.10.") else 1)
    assert ours(counter.graphs[0].graph) >= {"attention", "output_loss"}


@torch.no_grad()
def test_decoding_steps_compile_to_few_graphs(build, lm_batch):
    model = scatter_modulators(build("transformer_lm_multimax", *ONE_LAYER[2:])).eval()
    tokens = lm_batch((8,) * 3)["net_input"]["src_tokens"]
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    state, scores = {}, []
    for length in range(1, 9):
        scores.append(step(tokens[:, :length].contiguous(), incremental_state=state)[0])
    torch.testing.assert_close(torch.cat(scores, 1), model(tokens)[0], rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 3


@pytest.mark.parametrize("gradients", [True, False])
def test_export_of_a_model_equals_eager(training, gradients):
    model, batches = training
    scores = Scores(model).eval()
    with nullcontext() if gradients else torch.no_grad():
        exported = torch.export.export(scores, scores.inputs(batches[0]))
        # Operators without gradients are in the graph only if no gradient is possible.
        assert ours(exported.graph) == (
            {"attention"} if gradients else {"attention", "output_scores"}
        )
    for sample in batches[:2]:
        inputs = scores.inputs(sample)
        torch.testing.assert_close(exported.module()(*inputs), scores(*inputs))


def test_make_fx_records_a_model_and_gradients(training):
    model, batches = training
    scores = Scores(model)
    parameters = dict(scores.named_parameters())

    def function(parameters, inputs):
        output = functional_call(scores, parameters, inputs)
        wanted = list(parameters.values())
        return output, torch.autograd.grad(output.logsumexp(-1).sum(), wanted, allow_unused=True)

    recorded = make_fx(function)(parameters, scores.inputs(batches[0]))
    assert ours(recorded.graph) >= {"attention", "attention_backward"}
    for sample in batches[:2]:
        inputs = scores.inputs(sample)
        expected, got = function(parameters, inputs), recorded(parameters, inputs)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_model_trains_under_autocast_without_wide_scores(
    arch, build, translation_batch, lm_batch, task
):
    model = build(arch, *ARCHITECTURES[arch])
    if "_lm" in arch:
        sample = lm_batch((QUERIES, 20, 30))
    else:
        sample = translation_batch(((KEYS - 1, QUERIES - 1), (20, 30), (9, 9)))
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    held, losses = [], []

    def pack(tensor):
        held.extend([tuple(tensor.shape)] if is_wide(tensor) else [])
        return tensor

    recorder = Recorder()
    for step in range(8):
        context = (
            recorder if step == 0 else torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        )
        with context:
            with autocast():
                loss, sample_size, _ = criterion(model, sample)
            optimizer.zero_grad()
            (loss / sample_size).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses
    assert recorder.wide == held == []
    assert recorder.names == {"attention", "attention_backward", "output_loss_parts"}


def test_criterion_under_autocast_compiles_to_one_graph(build, lm_batch, task):
    model = scatter_modulators(build("transformer_lm_multimax", *ONE_LAYER[2:]))
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1)
    step, sample = torch.compile(criterion, fullgraph=True, backend="aot_eager"), lm_batch()
    losses, gradients = [], []
    for function in (criterion, step):
        with autocast():
            loss, *_ = function(model, sample)
        loss.backward()
        losses.append(loss)
        gradients.append(gradients_of(model))
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)
    for name, expected in gradients[0].items():
        difference = (gradients[1][name] - expected).norm()
        assert difference <= 0.02 * expected.norm() + 1e-6, name


@pytest.mark.parametrize("wanted", ["auto", "plain"])
def test_sequence_generator_supports_inference_mode(
    wanted, build, translation_batch, dictionary, task, monkeypatch
):
    monkeypatch.setenv(backend.VARIABLE, wanted)
    model = scatter_modulators(build("transformer_multimax")).eval()
    sample = translation_batch()
    generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=8)
    hypotheses = []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            found = generator.generate([model], sample)
            scores, _ = model(**sample["net_input"])
        hypotheses.append([h["tokens"].tolist() for row in found for h in row])
    assert hypotheses[0] == hypotheses[1] and scores.is_inference()
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1)
    loss, *_ = criterion(model.train(), sample)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
