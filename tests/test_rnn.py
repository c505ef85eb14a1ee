"""The recurrent model follows its equations, computes one function in every path, and validates."""

import argparse
import io
import math
from types import SimpleNamespace

import pytest
import torch
from decoding import full_context, incremental, log_probs, score_of
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from torch import nn
from toy_models import RECURRENT, scatter_modulators

from multimax_fairseq import NORMALIZERS, Normalizer
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.rnn_multimax import RecurrentModel, recurrent_iwslt_de_en
from multimax_fairseq.modules import AdditiveAttention, ContinuousAttention, RecurrentCell

SOFTMAX = ("--attention-normalizer", "softmax")
LSTM = ("--cell-type", "lstm")
OUTPUT = ("--output-normalizer", "multimax")
TOLERANCE = {"rtol": 0, "atol": 1e-4}
SIZES = ((9, 7), (4, 5), (6, 1))


def continuous(density, context="combined"):
    return (*SOFTMAX, "--cross-attention", density, "--continuous-context", context)


CONTINUOUS = {
    "continuous softmax": continuous("continuous_softmax"),
    "continuous sparsemax": continuous("continuous_sparsemax"),
    "continuous softmax alone": continuous("continuous_softmax", "continuous"),
    "continuous sparsemax alone": continuous("continuous_sparsemax", "continuous"),
}
DISCRETE = {
    name: ("--attention-normalizer", name, *(("--topk", "3") if name == "topk" else ()))
    for name in NORMALIZERS
}
FLAGS = {**DISCRETE, **CONTINUOUS}
# (flags, cell, beam): each mapping, and each pair of cell and beam
CELLS = [pytest.param(flags, "gru", 5, id=name) for name, flags in FLAGS.items()]
CELLS += [pytest.param(SOFTMAX, "lstm", beam, id=f"lstm, beam {beam}") for beam in (1, 5)]
CELLS += [pytest.param(CONTINUOUS["continuous softmax"], "gru", 1, id="beam 1")]


def spread(model, seed=0):
    """Draw weights large enough for words, states and scores to differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulator" not in name:
                parameter.normal_(0, 0.4, generator=generator)
    return scatter_modulators(model)


@pytest.fixture
def build(task):
    """Build from the model's own flags alone, which is fast."""

    def build_model(*flags, seed=1):
        parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)  # as fairseq's
        RecurrentModel.add_args(parser)
        torch.manual_seed(seed)
        return RecurrentModel.build_model(parser.parse_args([*RECURRENT.split(), *flags]), task)

    return build_model


def kept(sample):
    return sample["net_input"]["prev_output_tokens"].ne(1)


# --- the plain equations -----------------------------------------------------------------------


def step(kind, x, state, of_input, of_hidden, input_bias, hidden_bias):
    """Return the next state (Cho et al. 2014; Hochreiter and Schmidhuber 1997)."""
    given, known = of_input @ x + input_bias, of_hidden @ state[0] + hidden_bias
    if kind == "lstm":
        enter, forget, new, leave = (given + known).chunk(4)
        cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.sigmoid(leave) * torch.tanh(cell), cell
    reset, update, new = zip(given.chunk(3), known.chunk(3), strict=True)
    reset, update = torch.sigmoid(sum(reset)), torch.sigmoid(sum(update))
    return ((1 - update) * torch.tanh(new[0] + reset * new[1]) + update * state[0],)


def expectation(probs, values, density, context):
    """Return the sum of the discrete context and a density's, integrated numerically."""
    time = torch.arange(1, len(probs) + 1).double() / len(probs)
    mean = (probs * time).sum()
    variance = ((probs * time**2).sum() - mean**2).clamp(min=1e-6)
    bases = [(m, s) for s in (0.03, 0.1, 0.3) for m in torch.linspace(0, 1, 10).tolist()]

    centers, widths = torch.tensor(bases).double().T[..., None]

    def basis(t):
        return torch.distributions.Normal(centers, widths).log_prob(t).exp()

    square = basis(time) @ basis(time).T + 0.1 * torch.eye(30).double()
    coefficients = torch.linalg.solve(square, basis(time)) @ values
    reach = (1.5 * variance) ** (1 / 3) if density == "sparsemax" else 8 * variance.sqrt()
    times = mean + reach * torch.linspace(-1, 1, 2001).double()
    if density == "sparsemax":
        weights = ((reach**2 - (times - mean) ** 2) / (2 * variance)).clamp(min=0)
    else:
        weights = torch.exp(-((times - mean) ** 2) / (2 * variance))
    expected = (weights / weights.sum()) @ (basis(times).T @ coefficients)
    return expected + (probs @ values if context == "combined" else 0)


def logits_of(model, kind, source, previous, attend, layers=1):
    """Return the logits, (T, V) in float64, of one sentence without padding."""
    p = {name: tensor.double() for name, tensor in model.state_dict().items()}
    encoded = p["encoder.embed_tokens.weight"][source]
    for layer in range(layers):
        directions = []
        for end in ("", "_reverse"):
            parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [p[f"encoder.rnn.{part}_l{layer}{end}"] for part in parts]
            state, states = (torch.zeros(weights[1].shape[1]).double(),) * 2, []
            for x in encoded.flip(0) if end else encoded:
                state = step(kind, x, state, *weights)
                states.append(state[0])
            directions.append((states[::-1] if end else states, state[0]))
        encoded = torch.cat([torch.stack(states) for states, _ in directions], 1)
    final = torch.cat([last for _, last in directions])
    hidden = torch.tanh(p["decoder.bridge.weight"] @ final + p["decoder.bridge.bias"])
    state, fed, logits = (hidden, hidden), torch.zeros_like(hidden), []
    cell, attention = "decoder.cell.{}_projection.{}", "decoder.attention.{}_projection.weight"
    of_input = torch.cat([p[cell.format(part, "weight")] for part in ("word", "fed")], 1)
    weights = [of_input, p[cell.format("hidden", "weight")]]
    weights += [p[cell.format(part, "bias")] for part in ("word", "hidden")]
    of_query, of_key, of_score = (p[attention.format(part)] for part in ("query", "key", "score"))
    for word in p["decoder.embed_tokens.weight"][previous]:
        state = step(kind, torch.cat([word, fed]), state, *weights)
        scores = torch.tanh(of_query @ state[0] + encoded @ of_key.T) @ of_score[0]
        both = torch.cat([state[0], attend(scores.softmax(0), encoded)])
        layer = "decoder.feature_projection"
        fed = torch.tanh(p[f"{layer}.weight"] @ both + p[f"{layer}.bias"])
        logits.append(p["decoder.output_projection.weight"] @ fed)
    return torch.stack(logits)


def discrete(probs, values):
    return probs @ values


REFERENCES = {
    "discrete": (SOFTMAX, discrete),
    **{
        f"{density}, {context}": (
            continuous(f"continuous_{density}", context),
            lambda probs, values, d=density, c=context: expectation(probs, values, d, c),
        )
        for density in ("softmax", "sparsemax")
        for context in ("combined", "continuous")
    },
}


@pytest.mark.parametrize(
    "name, kind, layers",
    [*((name, "gru", 1) for name in REFERENCES), ("discrete", "lstm", 1), ("discrete", "gru", 2)]
    + [("softmax, combined", "lstm", 2)],
)
@torch.no_grad()
def test_model_equals_its_equations(build, translation_batch, name, kind, layers):
    flags, attend = REFERENCES[name]
    flags = (*flags, "--cell-type", kind, "--encoder-layers", str(layers))
    model, sample = spread(build(*flags)).eval(), translation_batch()
    found = model(**sample["net_input"])[0]
    for row, (_, length) in enumerate(SIZES):
        source = sample["net_input"]["src_tokens"][row]
        previous = sample["net_input"]["prev_output_tokens"][row, : length + 1]
        expected = logits_of(model, kind, source[source.ne(1)], previous, attend, layers)
        torch.testing.assert_close(found[row, : length + 1].double(), expected, **TOLERANCE)


@pytest.mark.parametrize("kind, torchs", [("gru", nn.GRUCell), ("lstm", nn.LSTMCell)])
def test_recurrent_cell_equals_torch(kind, torchs):
    torch.manual_seed(0)
    cell, twin = RecurrentCell(kind, 5, 3, 4), torchs(8, 4)
    of_both = torch.cat([cell.word_projection.weight, cell.fed_projection.weight], 1)
    weights = (of_both, cell.hidden_projection.weight)
    biases = (cell.word_projection.bias, cell.hidden_projection.bias)
    twin.load_state_dict(dict(zip(twin.state_dict(), (*weights, *biases), strict=True)))
    words, fed, *state = (torch.randn(6, size) for size in (5, 3, 4, 4))
    expected = twin(torch.cat([words, fed], 1), state[0] if kind == "gru" else tuple(state))
    found = cell(cell.project_words(words), fed, tuple(state))
    torch.testing.assert_close(found[0] if kind == "gru" else found, expected)
    forget = sum(bias.chunk(4)[1] for bias in biases)
    assert (forget == 1).all() if kind == "lstm" else not any(bias.any() for bias in biases)


def test_attention_of_many_queries_equals_one_by_one():
    torch.manual_seed(0)
    for normalizer in (Normalizer("sparsemax"), ContinuousAttention(Normalizer("softmax"))):
        attention = AdditiveAttention(4, 6, 5, normalizer)
        query, encoded = torch.randn(3, 7, 4), torch.randn(3, 8, 6)
        padding = torch.arange(8) < torch.tensor([[0], [3], [7]])
        parts = (attention.keys(encoded), attention.values(encoded, padding), padding)
        context, probs = attention(query, *parts, need_probs=True)
        assert context.shape == (3, 7, 6) and probs.shape == (3, 7, 8)
        steps = [attention(one, *parts) for one in query.split(1, 1)]
        torch.testing.assert_close(torch.cat([found for found, _ in steps], 1), context)
        assert all(unread is None for _, unread in steps)


# --- one model, one function -------------------------------------------------------------------


@pytest.mark.parametrize("flags, cell, beam", CELLS)
@torch.no_grad()
def test_incremental_decoding_equals_full_context(build, translation_batch, flags, cell, beam):
    model = spread(build(*flags, "--cell-type", cell)).eval()
    for left_pad_source in (True, False):
        sample = translation_batch(left_pad_source=left_pad_source)
        expected = full_context(model, sample)
        steps, _ = incremental(model, sample, beam)
        for hypothesis in range(beam):
            ours = steps[hypothesis::beam]
            torch.testing.assert_close(ours[kept(sample)], expected[kept(sample)], **TOLERANCE)


@pytest.mark.parametrize("flags", [LSTM, CONTINUOUS["continuous sparsemax"]], ids=["lstm", "gru"])
@torch.no_grad()
def test_reordered_hypotheses_keep_their_state(build, translation_batch, flags):
    """Hypotheses are swapped, repeated, and dropped with a finished sentence."""
    model, sample = spread(build(*flags)).eval(), translation_batch()
    source = sample["net_input"]["src_tokens"].repeat_interleave(2, 0)
    encoder_out, state = model.encoder(source), {}
    tokens = torch.randint(4, 30, (6, 1), generator=torch.Generator().manual_seed(1))
    for number, order in enumerate(([1, 0, 2, 2, 5, 4], [0, 0, 4, 5], [1, 0, 3, 2], [2, 3], [])):
        found = log_probs(model, model.decoder(tokens, encoder_out, state))[:, -1]
        expected = log_probs(model, model(source, None, tokens))[:, -1]
        torch.testing.assert_close(found, expected, **TOLERANCE)
        order = torch.tensor(order, dtype=torch.long)
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
        new = torch.arange(len(order))[:, None] + 5 + number
        source, tokens = source[order], torch.cat([tokens[order], new], 1)


@pytest.mark.parametrize("flags", [SOFTMAX, *CONTINUOUS.values()], ids=["discrete", *CONTINUOUS])
@torch.no_grad()
def test_padding_does_not_change_the_output(build, translation_batch, flags):
    model = spread(build(*flags, "--encoder-layers", "2")).eval()
    left, right = (translation_batch(left_pad_source=left) for left in (True, False))
    together = full_context(model, left)
    torch.testing.assert_close(full_context(model, right)[kept(left)], together[kept(left)])
    for row, (_, length) in enumerate(SIZES):
        inputs = {name: value[row : row + 1] for name, value in left["net_input"].items()}
        source, previous = inputs["src_tokens"], inputs["prev_output_tokens"]
        alone = log_probs(model, model(source[source.ne(1)][None], None, previous[:, : length + 1]))
        torch.testing.assert_close(alone[0], together[row, : length + 1], rtol=0, atol=1e-5)
    nothing = torch.full((2, 3), 1)
    assert model(nothing, None, nothing)[0].isfinite().all()


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize(
    "flags", [(*LSTM, *OUTPUT), CONTINUOUS["continuous softmax"]], ids=["lstm", "continuous"]
)
@torch.no_grad()
def test_beam_search_scores_equal_teacher_forcing(
    build, dictionary, translation_batch, flags, beam
):
    model, sample = spread(build(*flags)).eval(), translation_batch()
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam, max_len_b=12, normalize_scores=False
    )
    for row, hypotheses in enumerate(generator.generate([model], sample)):
        assert len(hypotheses) == beam
        for hypothesis in hypotheses:
            expected = score_of(model, sample, row, hypothesis["tokens"])
            torch.testing.assert_close(torch.as_tensor(hypothesis["score"]), expected, **TOLERANCE)


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@torch.no_grad()
def test_attention_weights_are_a_distribution_over_tokens(
    build, translation_batch, dictionary, flags
):
    model = spread(build(*flags)).eval()
    sums_to_one = all(m.sums_to_one for m in model.modules() if isinstance(m, Normalizer))
    left, right = (translation_batch(left_pad_source=side) for side in (True, False))
    of_tokens = []
    for sample in (left, right):
        tokens = sample["net_input"]["src_tokens"].ne(1)
        (weights,) = model(**sample["net_input"])[1]["attn"]
        if sums_to_one:
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 8))
        assert (weights[~tokens[:, None].expand_as(weights)] == 0).all()
        of_tokens.append(weights.transpose(1, 2)[tokens])
    torch.testing.assert_close(*of_tokens)
    generator = SequenceGenerator([model], dictionary, beam_size=2, max_len_b=5)
    for hypotheses in generator.generate([model], left):
        weights = hypotheses[0]["attention"]
        if sums_to_one:
            torch.testing.assert_close(weights.sum(0), torch.ones(weights.shape[1]))


# --- learned parameters ------------------------------------------------------------------------


def test_variants_share_initial_weights(build):
    """A density adds no parameter, a mapping only its own."""
    baseline = build(*SOFTMAX).state_dict()
    for flags in FLAGS.values():
        found = build(*flags).state_dict()
        assert found.keys() == baseline.keys() or not flags[-1].startswith("continuous")
        assert all(torch.equal(found[name], value) for name, value in baseline.items())


def test_initial_weights_follow_joeynmt(build):
    model = build("--encoder-embed-dim", "300", "--decoder-hidden-size", "200")
    for name, parameter in model.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        elif "embed" in name:
            assert parameter[1].abs().max() == 0
            assert float(parameter.std()) == pytest.approx(0.01, rel=0.1)
    for weight in model.encoder.rnn.weight_ih_l0.chunk(3):
        assert float(weight.abs().max()) == pytest.approx(math.sqrt(6 / 312), rel=0.01)
    for part in ("word", "fed"):
        weight = getattr(model.decoder.cell, f"{part}_projection").weight
        assert float(weight.abs().max()) == pytest.approx(math.sqrt(6 / 416), rel=0.01)
    for weight in model.decoder.cell.hidden_projection.weight.chunk(3):
        assert float(weight.abs().max()) == pytest.approx(math.sqrt(6 / 400), rel=0.01)


@pytest.mark.parametrize("flags, cell, _", CELLS)
def test_gradients_reach_every_parameter(build, translation_batch, flags, cell, _):
    model = spread(build(*flags, *OUTPUT, "--cell-type", cell))
    sample = translation_batch()
    scores = full_context(model, sample).gather(-1, sample["target"][..., None])[..., 0]
    scores[sample["target"].ne(1)].sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_parameter_count_of_the_papers_model(task):
    words, embedding, size = len(task.source_dictionary), 620, 1000
    half = size // 2
    encoder = 2 * 3 * half * (embedding + half + 2)
    decoder = size * (size + 1) + 3 * size * (embedding + size + size + 2)
    attention, features = 2 * size * size + size, size * (2 * size + 1)
    expected = words * (2 * embedding + size) + encoder + decoder + attention + features
    for extra, settings in (
        (0, {"attention_normalizer": "softmax"}),
        (0, {"attention_normalizer": "softmax", "cross_attention": "continuous_sparsemax"}),
        (8, {}),
    ):
        args = argparse.Namespace(**settings)
        recurrent_iwslt_de_en(args)
        assert (args.dropout, args.hidden_dropout, args.cell_type) == (0.0, 0.2, "gru")
        model = RecurrentModel.build_model(args, task)
        assert sum(p.numel() for p in model.parameters()) == expected + extra


def test_shared_embeddings_are_one_parameter(build):
    plain, output, everything = (
        build(*flags)
        for flags in ((), ("--share-decoder-input-output-embed",), ("--share-all-embeddings",))
    )
    counts = [sum(p.numel() for p in m.parameters()) for m in (plain, output, everything)]
    assert counts[0] - counts[1] == counts[1] - counts[2] == 34 * 16
    assert everything.encoder.embed_tokens is everything.decoder.embed_tokens
    assert output.decoder.output_projection.weight is output.decoder.embed_tokens.weight


def test_dropout_acts_in_training_only(build, translation_batch):
    sample = translation_batch()
    for flags in (("--dropout", "0.5"), ("--hidden-dropout", "0.5")):
        model = spread(build(*flags))
        one, other = (full_context(model.train(), sample) for _ in range(2))
        assert not torch.equal(one, other)
        one, other = (full_context(model.eval(), sample) for _ in range(2))
        assert torch.equal(one, other)


@pytest.mark.parametrize("flags", [LSTM, *CONTINUOUS.values()], ids=["lstm", *CONTINUOUS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_and_trains(build, translation_batch, dtype, flags):
    sample = translation_batch()
    exact = full_context(spread(build(*flags)).eval(), sample)
    model = spread(build(*flags)).to(dtype).eval()
    half = full_context(model, sample)
    assert model(**sample["net_input"])[0].dtype == dtype and half.dtype == torch.float32
    difference = (half - exact)[kept(sample)].abs().max()
    assert difference < 64 * torch.finfo(dtype).eps * exact.abs().max()
    steps, _ = incremental(model, sample, 2)
    torch.testing.assert_close(steps[::2][kept(sample)], half[kept(sample)], rtol=0.05, atol=0.05)
    model = spread(build(*flags))
    with torch.autocast("cpu", dtype):
        full_context(model, sample).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_softmax_checkpoint_starts_at_the_identity(build, translation_batch):
    sample = translation_batch()
    model, file = spread(build(*OUTPUT)).eval(), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin = build(*OUTPUT, seed=5).eval()
    twin.load_state_dict(torch.load(file))
    assert torch.equal(full_context(twin, sample), full_context(model, sample))
    softmax = spread(build(*SOFTMAX)).eval()
    model.load_state_dict(softmax.state_dict())
    torch.testing.assert_close(full_context(model, sample), full_context(softmax, sample))


# --- what it refuses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, found",
    [
        ("--encoder-self-attention continuous_softmax", "belongs to encoder self attention, which"),
        ("--attention-normalizer-at encoder", "names encoder, which this model does not have"),
        ("--topk 3", "--topk 3 belongs to topk attention"),
        ("--continuous-bases 3", "--continuous-bases 3 belongs to continuous attention"),
        ("--dropout 1", "--dropout 1.0 must be a number of at least 0 and below 1"),
        ("--hidden-dropout -0.1", "--hidden-dropout -0.1 must be a number of at least 0"),
        ("--decoder-hidden-size 0", "--decoder-hidden-size 0 must be a whole number"),
        ("--encoder-layers 0", "--encoder-layers 0 must be a whole number of at least 1"),
        (
            "--share-decoder-input-output-embed --decoder-embed-dim 8",
            "needs one width, got --decoder-embed-dim 8, --decoder-hidden-size 16: make them equal",
        ),
        ("--share-all-embeddings --encoder-embed-dim 8", "--encoder-embed-dim 8: make them equal"),
    ],
)
def test_build_model_refuses_wrong_settings(build, flags, found):
    with pytest.raises(UsageError) as error:
        build(*flags.split())
    assert found in str(error.value) and "\n" not in str(error.value)


def test_shared_embeddings_need_a_joint_dictionary(task, dictionary):
    other = SimpleNamespace(source_dictionary=dictionary, target_dictionary=type(dictionary)())
    settings = argparse.Namespace(share_all_embeddings=True)
    with pytest.raises(UsageError, match="one dictionary of both languages: run fairseq-preproc"):
        RecurrentModel.build_model(settings, other)


def test_hydra_settings_reach_the_model(task):
    settings = {"_name": "rnn_multimax", "cell_type": "lstm", "decoder_hidden_size": 8}
    model = RecurrentModel.build_model(OmegaConf.create(settings), task)
    assert model.decoder.cell.kind == "lstm" and model.decoder.bridge.out_features == 8
    for slip, hint in (
        ({"cell_typ": "gru"}, "'cell_type'"),
        ({"cell_type": "rnn"}, "--cell-type rnn must be one of gru, lstm"),
        ({"encoder_layers": 1.5}, "--encoder-layers 1.5 must be a whole number"),
        ({"share_all_embeddings": "no"}, "--share-all-embeddings no must be true or false"),
        ({"adaptive_softmax_cutoff": "10,20"}, "no setting 'adaptive_softmax_cutoff'"),
    ):
        with pytest.raises(UsageError, match=hint):
            RecurrentModel.build_model(OmegaConf.create(settings | slip), task)
