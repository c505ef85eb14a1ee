"""Translation models with continuous attention compute one function in every path."""

import pytest
import torch
from decoding import TOLERANCE, full_context, incremental, log_probs, score_of
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from fairseq.sequence_generator import SequenceGenerator
from torch._dynamo.testing import CompileCounterWithBackend
from toy_models import attentions, parameters_of, scatter_modulators

from multimax_fairseq import Normalizer
from multimax_fairseq.criterions.cross_entropy import LabelSmoothedMultimaxCrossEntropyCriterion
from multimax_fairseq.modules import ContinuousAttention
from multimax_fairseq.modules.multihead_attention import MultiheadAttention

pytestmark = pytest.mark.long

TRANSLATION = ("transformer_multimax", "transformer_iwslt_de_en_multimax")
PARABOLA = ("--cross-attention", "continuous_sparsemax")
FLAGS = {
    "gaussian": ("--cross-attention", "continuous_softmax"),
    "parabola": PARABOLA,
    "alone": (*PARABOLA, "--continuous-context", "continuous"),
    "of sparsemax": (*PARABOLA, "--attention-normalizer", "sparsemax"),
    "of softmax": (*PARABOLA, "--attention-normalizer", "softmax"),
    "encoder": ("--encoder-self-attention", "continuous_softmax"),
    "both": (*PARABOLA, "--encoder-self-attention", "continuous_sparsemax"),
    "few bases": (*PARABOLA, "--continuous-bases", "4", "--continuous-widths", "0.1,0.5"),
}


@pytest.fixture(params=FLAGS)
def model(request, build):
    return scatter_modulators(build(TRANSLATION[1], *FLAGS[request.param])).eval()


@pytest.mark.parametrize(
    "beam, shared_cache, left_pad_source", [(1, False, True), (5, True, False)]
)
@torch.no_grad()
def test_decoder_incremental_steps_equal_full_context(
    model, translation_batch, beam, shared_cache, left_pad_source
):
    sample = translation_batch(left_pad_source=left_pad_source)
    expected = full_context(model, sample)
    if shared_cache:
        for module in attentions(model).values():
            module.set_beam_size(beam)
    steps, _ = incremental(model, sample, beam)
    kept = sample["net_input"]["prev_output_tokens"].ne(1)
    for hypothesis in range(beam):
        torch.testing.assert_close(steps[hypothesis::beam][kept], expected[kept], **TOLERANCE)


@torch.no_grad()
def test_model_ignores_padding(model, translation_batch):
    sample = translation_batch()
    together = full_context(model, sample)
    for row, (source_length, target_length) in enumerate(((9, 7), (4, 5), (6, 1))):
        inputs = {name: tensor[row : row + 1] for name, tensor in sample["net_input"].items()}
        inputs["src_tokens"] = inputs["src_tokens"][:, -(source_length + 1) :]
        alone = log_probs(model, model(**inputs))[0, : target_length + 1]
        torch.testing.assert_close(alone, together[row, : target_length + 1], **TOLERANCE)


@torch.no_grad()
def test_sequence_generator_scores_equal_teacher_forcing(model, dictionary, translation_batch):
    sample = translation_batch()
    generator = SequenceGenerator([model], dictionary, 5, max_len_b=12, normalize_scores=False)
    for row, hypotheses in enumerate(generator.generate([model], sample)):
        for hypothesis in hypotheses:
            expected = score_of(model, sample, row, hypothesis["tokens"])
            torch.testing.assert_close(torch.as_tensor(hypothesis["score"]), expected, **TOLERANCE)


@torch.no_grad()
def test_sequence_generator_averages_mixed_ensemble(build, dictionary, translation_batch):
    sample = translation_batch()
    models = [build(TRANSLATION[1], *flags).eval() for flags in (PARABOLA, ())]
    generator = SequenceGenerator(models, dictionary, 5, max_len_b=12, normalize_scores=False)
    for row, (best, *_) in enumerate(generator.generate(models, sample)):
        tokens = best["tokens"]
        inputs = {name: tensor[row : row + 1] for name, tensor in sample["net_input"].items()}
        inputs["prev_output_tokens"] = torch.cat([torch.tensor([2]), tokens[:-1]])[None]
        mixed = torch.stack([log_probs(m, m(**inputs)) for m in models]).exp().mean(0).log()
        expected = mixed[0].gather(1, tokens[:, None]).sum()
        torch.testing.assert_close(torch.as_tensor(best["score"]), expected, **TOLERANCE)


@torch.no_grad()
def test_sequence_generator_solves_each_regression_once(
    build, dictionary, translation_batch, monkeypatch
):
    """Each layer solves its regression once, for any number of steps and hypotheses."""
    solved = []
    coefficients = ContinuousAttention._coefficients

    def counted(self, value, tokens):
        solved.append((id(self), len(value)))
        return coefficients(self, value, tokens)

    monkeypatch.setattr(ContinuousAttention, "_coefficients", counted)
    model = build(TRANSLATION[1], *PARABOLA).eval()
    for module in attentions(model).values():
        module.set_beam_size(5)
    generator = SequenceGenerator([model], dictionary, 5, max_len_b=12)
    generator.generate([model], translation_batch())
    layers = [id(layer.encoder_attn.normalizer) for layer in model.decoder.layers]
    assert solved == [(layer, 3) for layer in layers]


def test_model_has_the_same_initial_parameters_as_discrete(build):
    discrete, continuous = (
        build(TRANSLATION[1], "--attention-normalizer", "softmax", *flags)
        for flags in ((), PARABOLA)
    )
    assert parameters_of(discrete).keys() == parameters_of(continuous).keys()
    for name, parameter in parameters_of(continuous).items():
        assert torch.equal(parameter, parameters_of(discrete)[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_model_is_accurate_in_half_precision(model, translation_batch, dtype):
    sample = translation_batch()
    expected = full_context(model, sample)
    found = full_context(model.to(dtype), sample).float()
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0, atol=30 * torch.finfo(dtype).eps)


def test_model_trains_under_autocast(build, translation_batch):
    model = scatter_modulators(build(TRANSLATION[1], *FLAGS["both"]))
    with torch.autocast("cpu", torch.bfloat16):
        full_context(model, translation_batch()).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_checkpoint_activations_keeps_gradients(build, translation_batch):
    gradients = []
    for flags in ((), ("--checkpoint-activations",)):
        model = scatter_modulators(build(TRANSLATION[1], *FLAGS["both"], *flags))
        full_context(model, translation_batch()).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for checkpointed, kept in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, kept)


def test_criterion_compiles_to_one_graph(build, task, translation_batch):
    torch._dynamo.reset()
    flags = (*PARABOLA, "--encoder-self-attention", "continuous_softmax")
    model = build(TRANSLATION[0], *flags, "--encoder-layers", "1", "--decoder-layers", "1")
    criterion = LabelSmoothedMultimaxCrossEntropyCriterion(task, False, 0.1)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(criterion, fullgraph=True, backend=counter)
    for sample in (translation_batch(((9, 7),) * 3), translation_batch(seed=1)):
        gradients = []
        for run in (criterion, step):
            model.zero_grad()
            loss = run(model, sample)[0]
            loss.backward()
            gradients.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        for eager, compiled in zip(*gradients, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-4 * eager.abs().max())


def test_continuous_attention_refuses_extra_keys():
    stock = SoftmaxMultiheadAttention(8, 2, add_zero_attn=True, self_attention=True)
    with pytest.raises(ValueError, match="no place for the extra keys"):
        MultiheadAttention(stock, ContinuousAttention(Normalizer("softmax")))
