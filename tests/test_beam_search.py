"""The fast beam search finds fairseq's hypotheses and scores."""

import copy
import math

import pytest
import torch
from fairseq import search
from fairseq.dataclass.configs import GenerationConfig
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from toy_models import scatter_modulators, stock_model

from multimax_fairseq import Modulator, Normalizer
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models import beam_search
from multimax_fairseq.models.beam_search import BeamGenerator
from multimax_fairseq.models.output_layer import plain_output
from multimax_fairseq.models.transformer_multimax import MultimaxDecoder
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.best_outputs import best_outputs_operator
from multimax_fairseq.ops.decoding import KVCache, attention_step, decoding_attention

pytestmark = pytest.mark.long

ARCH = "transformer_multimax"
END = 2  # of sentence, in fairseq's dictionaries
# (source length, target length); the target is not read
SIZES = ((9, 2), (4, 2), (1, 2), (6, 2), (6, 2))
MODELS = {
    "multimax": (),
    "output": ("--output-normalizer", "multimax"),
    "separate heads": ("--multimax-heads", "separate", "--multimax-sink", "learned"),
    "softmax": ("--attention-normalizer", "softmax"),
    "sparsemax": ("--attention-normalizer", "sparsemax"),
    "gate": ("--attention-gate",),
    "pre-norm": ("--decoder-normalize-before", "--decoder-learned-pos"),
    "density": ("--cross-attention", "continuous_softmax"),
    "no cross-attention": ("--no-cross-attention",),
}
OPTIONS = {
    "as it comes": {},
    "greedy": {"beam_size": 1},
    "wide": {"beam_size": 15},
    "at least six words": {"min_len": 6},
    "unknown words are cheap": {"unk_penalty": -3.0},
    "unknown words are dear": {"unk_penalty": 3.0},
    "cold": {"temperature": 0.3},
    "sums": {"normalize_scores": False},
    "short": {"len_penalty": 0.3},
    "cut": {"max_len_b": 3},
    "long": {"max_len_b": 40},
    "no longer than a model can": {"max_len": 6},
    "after another first word": {"bos_token": 7, "min_len": 2},
}


def as_trained(model, seed=0):
    """Set weights with clearly different scores, and hypotheses of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = model.decoder.output_projection.weight
        weight.copy_(torch.randn(weight.shape, generator=generator) * 0.6)
        for embedding in (model.encoder.embed_tokens, model.decoder.embed_tokens):
            embedding.weight.copy_(torch.randn(embedding.weight.shape, generator=generator))
        # The end of sentence is about as likely as a word.
        weight[END] = 0.9 * weight[END + 2 :: 3].sum(0)
    return model


def compare(models, dictionary, sample, own=True, **given):
    """Check that both generators find the same hypotheses, and return them."""
    given = {"beam_size": 5, "max_len_a": 1.2, "max_len_b": 10, **given}
    settings = {k: v for k, v in given.items() if k not in ("prefix_tokens", "bos_token")}
    inputs = {k: v for k, v in given.items() if k not in settings}
    ours = BeamGenerator(models, dictionary, **settings)
    calls = []
    search_ = ours._search
    ours._search = lambda *args: calls.append(args) or search_(*args)
    stock = SequenceGenerator(models, dictionary, **settings)
    found, wanted = (g.generate(models, copy.deepcopy(sample), **inputs) for g in (ours, stock))
    assert len(calls) == own
    assert len(found) == len(wanted)
    for hypotheses, others in zip(found, wanted, strict=True):
        assert len(hypotheses) == len(others)
        for hypothesis, other in zip(hypotheses, others, strict=True):
            assert hypothesis["tokens"].tolist() == other["tokens"].tolist()
            # fairseq's loop computes attention weights at each step, in plain PyTorch.
            within = max(1e-5, 4 * torch.finfo(next(models[0].parameters()).dtype).eps)
            for name in ("score", "positional_scores", "attention"):
                torch.testing.assert_close(hypothesis[name], other[name], rtol=within, atol=within)
            assert hypothesis.keys() == other.keys()
    return found


@pytest.mark.parametrize("flags", MODELS)
def test_beam_search_equals_fairseq_for_every_model(build, dictionary, translation_batch, flags):
    model = as_trained(scatter_modulators(build(ARCH, *MODELS[flags]))).eval()
    left_pad = flags not in ("softmax", "output", "density")
    found = compare([model], dictionary, translation_batch(SIZES, left_pad_source=left_pad))
    if flags != "no cross-attention":  # it translates all sentences alike
        assert len({len(one["tokens"]) for hypotheses in found for one in hypotheses}) > 3


@pytest.mark.parametrize("given", OPTIONS)
def test_beam_search_equals_fairseq_under_every_option(build, dictionary, translation_batch, given):
    model = as_trained(scatter_modulators(build(ARCH))).eval()
    compare([model], dictionary, translation_batch(SIZES), **OPTIONS[given])


@pytest.mark.parametrize("beam", [1, 4])
def test_beam_search_equals_fairseq_for_ensembles(task, build, dictionary, translation_batch, beam):
    ours = as_trained(scatter_modulators(build(ARCH))).eval()
    stock = as_trained(stock_model(task), 1)
    sample = translation_batch(SIZES)
    compare([stock], dictionary, sample, beam_size=beam)
    compare([ours, stock], dictionary, sample, beam_size=beam)


STEPPED = {
    "multimax": (),
    "separate heads": ("--multimax-heads", "separate", "--multimax-sink", "learned"),
    "length scale": ("--multimax-length-scale", "--multimax-monotone"),
    "ssmax": ("--attention-normalizer", "ssmax"),
    "gate": ("--attention-gate",),
}


@pytest.mark.parametrize("flags", STEPPED)
def test_beam_search_with_a_shared_cache_equals_plain(
    build, dictionary, translation_batch, flags, monkeypatch
):
    """The kernel shares one cache and needs a head dimension of 16; plain PyTorch copies it."""
    heads = ("--decoder-attention-heads", "2", "--decoder-embed-dim", "32")
    model = build(ARCH, *heads, *STEPPED[flags])
    model = as_trained(scatter_modulators(model)).eval()
    sample, found = translation_batch(SIZES), {}
    steps = []
    step = attention_step.eager
    monkeypatch.setattr(attention_step, "eager", lambda *x: steps.append(x) or step(*x))
    for backend in ("plain", "auto"):
        monkeypatch.setenv("MULTIMAX_BACKEND", backend)
        assert not steps
        for kind in (SequenceGenerator, BeamGenerator):
            generator = kind([model], dictionary, beam_size=4, max_len_a=0, max_len_b=40)
            found[backend, kind] = generator.generate([model], copy.deepcopy(sample))
    assert len(steps) > 40  # the cache has grown
    for hypotheses in zip(*found.values(), strict=True):
        for one, *others in zip(*hypotheses, strict=True):
            for other in others:
                assert other["tokens"].tolist() == one["tokens"].tolist()
                torch.testing.assert_close(
                    other["positional_scores"], one["positional_scores"], rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("flags", [(), ("--attention-normalizer", "sparsemax")])
@torch.no_grad()
def test_beam_search_projects_each_word_once(build, dictionary, translation_batch, flags):
    heads = ("--decoder-attention-heads", "2", "--decoder-embed-dim", "32")
    model, calls = build(ARCH, *heads, *flags).eval(), []
    attention = model.decoder.layers[0].self_attn
    attention.k_proj.register_forward_hook(lambda *_: calls.append(1))
    steps = []
    model.decoder.register_forward_hook(lambda *_: steps.append(1))
    BeamGenerator([model], dictionary).generate([model], translation_batch(SIZES))
    assert len(calls) == len(steps) > 3


@torch.no_grad()
def test_shared_cache_expands_when_gradients_are_needed(build, translation_batch):
    heads = ("--decoder-attention-heads", "2", "--decoder-embed-dim", "32")
    model = scatter_modulators(build(ARCH, *heads)).eval()
    sample = translation_batch(SIZES)["net_input"]
    encoded = model.encoder(sample["src_tokens"], sample["src_lengths"])
    twice = torch.arange(len(SIZES)).repeat_interleave(2)  # two hypotheses of each sentence
    encoded = model.encoder.reorder_encoder_out(encoded, twice)
    tokens = torch.randint(4, 30, (len(twice), 9))
    wanted = model.decoder(tokens, encoder_out=encoded)[0]
    state: dict = {}
    for step in range(9):
        if step in (2, 5, 6):  # swap the hypotheses
            swap = torch.arange(len(twice)).view(-1, 2).flip(1).flatten()
            model.decoder.reorder_incremental_state_scripting(state, swap)
            tokens, wanted = tokens[swap], wanted[swap]
        with torch.set_grad_enabled(step >= 6):  # the decoding kernel has no gradient
            got = model.decoder(
                tokens[:, : step + 1], encoder_out=encoded, incremental_state=state
            )[0]
        torch.testing.assert_close(got[:, 0], wanted[:, step], rtol=1e-4, atol=1e-4)
        assert any("cache" in layer for layer in state.values()) == (step < 6)


@pytest.fixture
def searches(caplog):
    """Return the lines that are logged about the search since the last call."""
    caplog.set_level("INFO", beam_search.logger.name)
    beam_search.log_search.cache_clear()

    def logged():
        messages = [m for m in caplog.messages if m.startswith("beam search: ")]
        caplog.clear()
        return messages

    yield logged
    beam_search.log_search.cache_clear()


def test_beam_search_logs_the_fast_search_once(build, dictionary, translation_batch, searches):
    model, sample = as_trained(build(ARCH)).eval(), translation_batch(SIZES)
    for _ in range(2):
        BeamGenerator([model], dictionary).generate([model], sample)
    assert searches() == ["beam search: multimax_fairseq's fast one"]


PREFIX = torch.tensor([[7, 8], [9, 10], [11, 1], [5, 6], [4, 4]])


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"prefix_tokens": PREFIX}, "the first words of the targets are given"),
        ({"no_repeat_ngram_size": 2}, "--no-repeat-ngram-size is given"),
        ({"tokens_to_suppress": ("word3",)}, "some words are suppressed"),
        ({"beam_size": 16}, "the beam is too large for the vocabulary"),
        ({"match_source_len": True}, "--match-source-len is given"),
        ({"search_strategy": "diverse"}, "the search strategy is DiverseBeamSearch"),
        ({"search_strategy": "changed"}, "the search strategy is HalvedSearch"),
        ({"lm_model": "lm", "lm_weight": 0.5}, "a language model scores the hypotheses"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_beam_search_leaves_unsupported_options_to_fairseq(
    build, dictionary, translation_batch, searches, given, reason
):
    class HalvedSearch(search.BeamSearch):
        def step(self, step, lprobs, *args, **kwargs):
            return super().step(step, lprobs / 2, *args, **kwargs)

    made = {
        "diverse": lambda: search.DiverseBeamSearch(dictionary, 1, 0.5),
        "changed": lambda: HalvedSearch(dictionary),
        "lm": lambda: build("transformer_lm_multimax").eval(),
    }
    given = {k: made[v]() if isinstance(v, str) else v for k, v in given.items()}
    model = as_trained(scatter_modulators(build(ARCH))).eval()
    compare([model], dictionary, translation_batch(SIZES), own=False, **given)
    assert searches() == [f"beam search: fairseq's own, because {reason}"]


@pytest.mark.parametrize(
    "arch, flags, reason",
    [
        (
            "rnn_multimax",
            (),
            "the fast one does not support RecurrentDecoder",
        ),
        (ARCH, ("--output-normalizer", "entmax15"), "the output layer uses entmax15"),
        (ARCH, ("--adaptive-softmax-cutoff", "10,20"), "the model has an adaptive softmax"),
        (
            ARCH,
            ("--cross-self-attention", "--no-cross-attention"),
            "the model was trained with --cross-self-attention",
        ),
    ],
)
def test_beam_search_leaves_unsupported_models_to_fairseq(
    build, dictionary, translation_batch, searches, arch, flags, reason
):
    model = build(arch, *flags).eval()
    compare([model], dictionary, translation_batch(SIZES), own=False)
    assert searches() == [f"beam search: fairseq's own, because {reason}"]


def test_beam_search_leaves_a_changed_decoder_to_fairseq(build, dictionary, translation_batch):
    class Backwards(MultimaxDecoder):
        def get_normalized_probs(self, *args, **kwargs):
            return super().get_normalized_probs(*args, **kwargs).flip(-1)

    model = as_trained(scatter_modulators(build(ARCH))).eval()
    model.decoder.__class__ = Backwards
    compare([model], dictionary, translation_batch(SIZES), own=False)


def test_beam_search_leaves_invalid_lengths_to_fairseq(build, dictionary, translation_batch):
    model = build(ARCH).eval()
    generator = BeamGenerator([model], dictionary, min_len=9, max_len_b=8)
    with pytest.raises(AssertionError, match="min_len cannot be larger than max_len"):
        generator.generate([model], translation_batch(SIZES))


@pytest.mark.parametrize("beam", [1, 2])
def test_beam_search_with_likely_special_words_equals_fairseq(
    build, dictionary, translation_batch, beam
):
    model = as_trained(scatter_modulators(build(ARCH))).eval()
    bias = torch.zeros(len(dictionary))
    bias[dictionary.pad()] = bias[dictionary.unk()] = 50.0
    model.decoder.output_projection.bias = torch.nn.Parameter(bias)
    compare([model], dictionary, translation_batch(SIZES), beam_size=beam, unk_penalty=100.0)


def test_beam_search_takes_as_many_steps_as_fairseq(build, dictionary, translation_batch):
    model, steps, counts = as_trained(scatter_modulators(build(ARCH))).eval(), [], []
    bias = torch.zeros(len(dictionary))
    bias[END] = 4.0
    model.decoder.output_projection.bias = torch.nn.Parameter(bias)
    model.decoder.layers[0].register_forward_hook(lambda *_: steps.append(1))
    for kind in (SequenceGenerator, BeamGenerator):
        steps.clear()
        kind([model], dictionary, max_len_b=40).generate([model], translation_batch(SIZES))
        counts.append(len(steps))
    assert counts[0] == counts[1] < 40


def test_build_generator_replaces_only_the_plain_generator(task, build, searches):
    model = build(ARCH).eval()
    config = GenerationConfig()
    assert type(FairseqTask.build_generator(task, [model], config)) is BeamGenerator
    assert searches() == []
    aligned = GenerationConfig(print_alignment="hard")
    assert (
        type(FairseqTask.build_generator(task, [model], aligned)) is SequenceGeneratorWithAlignment
    )
    assert searches() == ["beam search: fairseq's own, because --print-alignment is given"]
    given = FairseqTask.build_generator(task, [model], config, seq_gen_cls=SequenceGenerator)
    assert type(given) is SequenceGenerator


def test_beam_search_leaves_the_model_trainable(task, dictionary, translation_batch):
    """fairseq's attention layers store a beam size, which must be 1 in training."""
    model = as_trained(stock_model(task))
    sample = translation_batch(((9, 7), (4, 5), (6, 1), (3, 3)))
    before = model(**sample["net_input"])[0]
    BeamGenerator([model], dictionary, beam_size=2).generate([model], sample)
    assert torch.equal(model(**sample["net_input"])[0], before)
    with pytest.raises(RuntimeError):  # from an invalid sample
        sample["net_input"]["src_lengths"] = sample["net_input"]["src_lengths"][:1]
        sample["net_input"]["src_tokens"] = sample["net_input"]["src_tokens"].double()
        BeamGenerator([model], dictionary, beam_size=2).generate([model], sample)
    assert {layer.encoder_attn.beam_size for layer in model.decoder.layers} == {1}


def test_sequence_scorer_takes_an_ensemble_with_a_stock_model(
    task, build, dictionary, translation_batch
):
    models, sample = [stock_model(task), build(ARCH).eval()], translation_batch(SIZES)

    def probs(models):
        found = SequenceScorer(dictionary).generate(models, sample)
        return torch.cat([best["positional_scores"] for best, *_ in found]).exp()

    mean = sum(probs([model]) for model in models) / 2
    torch.testing.assert_close(probs(models), mean)


def test_beam_search_reports_non_finite_scores(build, dictionary, translation_batch):
    model = build(ARCH).eval()
    with torch.no_grad():
        model.decoder.output_projection.weight.fill_(math.nan)
    with pytest.raises(UsageError, match="scores are not finite"):
        compare([model], dictionary, translation_batch(SIZES))
    # If only some hypotheses have non-finite scores, the others continue.
    model = as_trained(scatter_modulators(build(ARCH))).eval()
    before = compare([model], dictionary, translation_batch(SIZES))
    word = before[0][1]["tokens"][0]
    with torch.no_grad():
        model.decoder.embed_tokens.weight[word] = math.nan
    after = compare([model], dictionary, translation_batch(SIZES))
    assert all(one["score"].isfinite() for hypotheses in after for one in hypotheses)


def test_beam_search_computes_all_scores_only_for_hooks(
    task, build, dictionary, translation_batch, monkeypatch
):
    calls = []
    eager = best_outputs_operator.eager
    monkeypatch.setattr(best_outputs_operator, "eager", lambda *x: calls.append(1) or eager(*x))
    sample = translation_batch(SIZES)
    for model in (as_trained(scatter_modulators(build(ARCH))), as_trained(stock_model(task))):
        model.eval()
        words = []
        for is_watched in (False, True):
            calls.clear()
            if is_watched:  # the hook also changes them
                model.decoder.output_projection.register_forward_hook(lambda m, x, y: y.roll(3, -1))
            found = compare([model], dictionary, sample)
            words.append([[one["tokens"].tolist() for one in each] for each in found])
            assert bool(calls) != is_watched
        assert words[0] != words[1]


# --- attention to a cache that hypotheses share ---------------------------------------------------


def some_steps(hypotheses=5, heads=2, size=16, steps=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(hypotheses, heads, size, generator=generator)
    rows = 6 * steps
    keys, values = (torch.randn(rows, heads, size, generator=generator) for _ in range(2))
    ancestors = torch.randint(rows, (hypotheses, steps), generator=generator)
    return query, keys, values, ancestors


@pytest.mark.parametrize("columns", [0, 8, 12])
@pytest.mark.parametrize("each_head", [False, True])
@pytest.mark.parametrize("size", [16, 48, 128])
@pytest.mark.parametrize("hypotheses", [1, 5, 40])
def test_attention_step_equals_float64_attention(columns, each_head, size, hypotheses):
    query, keys, values, ancestors = some_steps(hypotheses, size=size, steps=37)
    scale = 1.5 * size**-0.5
    torch.manual_seed(size)
    modulator = Modulator(num_heads=2 if each_head else None, init_std=0.3, monotone=columns == 12)
    sink = torch.tensor([0.5, -1.0])[:, None, None] if each_head else None
    given = {"modulator": modulator} if columns else {}
    attend = decoding_attention(query, 2, size, sink=sink, **given)
    found = attend(query, KVCache(keys, values, ancestors), scale)
    own = [x.double()[ancestors].transpose(1, 2) for x in (keys, values)]
    scores = scale * query.double()[:, :, None] @ own[0].mT
    with torch.no_grad():
        scores = modulator.double()(scores) if columns else scores
    if sink is not None:
        scores = torch.cat([scores, sink.double().expand(hypotheses, 2, 1, 1)], -1)
    probs = scores.softmax(-1)[..., :37]
    torch.testing.assert_close(found.double(), (probs @ own[1])[:, :, 0], rtol=1e-5, atol=1e-5)


def test_attention_step_validates_its_arguments():
    query, keys, values, ancestors = some_steps()
    step = torch.ops.multimax_fairseq.attention_step
    for wrong in (-1, 42, 2**40):
        other = ancestors.clone()
        other[-1, -1] = wrong
        with pytest.raises(ValueError, match=f"0 to 41, got .*{wrong}"):
            step(query, keys, values, other, None, None, None, 1.0)
    narrow, halves = (keys[..., :8], values[..., :8]), (keys.half(), values.half())
    for inputs, said in (
        ((query[0], keys, values, ancestors), "query must be"),
        ((query[..., :8], *narrow, ancestors), "multiple of 16, got"),
        ((query, narrow[0], values, ancestors), "keys and values must be"),
        ((query, keys, values[:3], ancestors), "keys and values must be"),
        ((query, keys[0], values[0], ancestors), "keys and values must be"),
        ((query, keys, values, ancestors[:3]), "ancestors must be int64"),
        ((query, keys, values, ancestors[0]), "ancestors must be int64"),
        ((query, keys, values, ancestors.int()), "ancestors must be int64"),
        ((query.half(), *halves, ancestors), "float32 on the CPU"),
    ):
        with pytest.raises(ValueError, match=said):
            step(*inputs, None, None, None, 1.0)
    with pytest.raises(ValueError, match="scale must be finite"):
        step(query, keys, values, ancestors, None, None, None, math.nan)
    with pytest.raises(ValueError, match="length_scale needs the parameters of a Modulator"):
        step(query, keys, values, ancestors, None, torch.ones(2), None, 1.0)
    with pytest.raises(ValueError, match="length_scale must be float32"):
        step(query, keys, values, ancestors, torch.zeros(1, 8), torch.ones(5, 2), None, 1.0)
    with pytest.raises(ValueError, match="sink must be"):
        step(query, keys, values, ancestors, None, None, torch.zeros(3), 1.0)
    with pytest.raises(RuntimeError, match="attention_step has no gradient"):
        learned = keys.clone().requires_grad_()
        step(query, learned, values, ancestors, None, None, None, 1.0).sum().backward()
    wanted = step(query, keys, values, ancestors, None, None, None, 1.0)
    spread = [torch.stack([x, x], -1)[..., 0] for x in (query, keys, values, ancestors)]
    assert torch.equal(step(*spread, None, None, None, 1.0), wanted)
    assert step(query[:0], keys, values, ancestors[:0], None, None, None, 1.0).shape == (0, 2, 16)
    assert not step(query, keys[:0], values[:0], ancestors[:, :0], None, None, None, 1.0).any()
    overload = torch.ops.multimax_fairseq.attention_step.default
    torch.library.opcheck(overload, (query, keys, values, ancestors, None, None, None, 1.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_kv_cache_branches_keep_their_contents(mode):
    """The buffer has room for the steps of one branch; beyond it, it grows."""
    generator = torch.Generator().manual_seed(0)

    def some(rows):
        return [torch.randn(rows, 2, 16, generator=generator) for _ in range(2)]

    def own(steps):
        return [x[steps.ancestors].clone() for x in (steps.keys, steps.values)]

    with mode():
        first = KVCache(*some(0), torch.empty(3, 0, dtype=torch.int64)).append(*some(3), None)
    branches, wanted = [[first], [first]], [[own(first)], [own(first)]]
    for step in range(60):
        for branch, expected in zip(branches, wanted, strict=True):
            order = torch.randint(3, (3,), generator=generator) if step % 2 else None
            new = some(3)
            with mode() if step < 40 else torch.no_grad():
                branch.append(branch[-1].append(*new, order))
            before = expected[-1] if order is None else [x[order] for x in expected[-1]]
            both = zip(before, new, strict=True)
            expected.append([torch.cat([x, last[:, None]], 1) for x, last in both])
    memory = {steps.keys.data_ptr() for branch in branches for steps in branch}
    assert len(memory) < 12  # the buffer is rarely copied
    for branch, expected in zip(branches, wanted, strict=True):
        for steps, tensors in zip(branch, expected, strict=True):
            assert all(map(torch.equal, own(steps), tensors))


def test_decoding_attention_returns_none_if_unsupported():
    query = some_steps()[0]
    assert decoding_attention(query, 2, 8) is None
    assert decoding_attention(query.double(), 2, 16) is None
    assert decoding_attention(query, 2, 16, modulator=torch.tanh) is None
    assert decoding_attention(query, 2, 16, sink=torch.zeros(3)) is None
    with torch.autocast("cpu", torch.bfloat16):  # the projections are bfloat16
        assert decoding_attention(query, 2, 16) is None


@pytest.mark.parametrize("name", ["multimax", "softmax"])
def test_incremental_attention_under_autocast_equals_plain(name):
    attention = MultiheadAttention(
        SoftmaxMultiheadAttention(32, 2, self_attention=True), Normalizer(name)
    ).eval()
    words = torch.randn(5, 1, 4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = {}
        for need_weights in (True, False):
            state: dict = {}
            found[need_weights] = [
                attention(x, x, x, incremental_state=state, need_weights=need_weights)[0]
                for x in words
            ]
    torch.testing.assert_close(found[False], found[True], rtol=0.02, atol=0.02)


def test_incremental_attention_applies_dropout_in_training():
    attention = MultiheadAttention(
        SoftmaxMultiheadAttention(32, 2, dropout=0.5, self_attention=True), Normalizer("multimax")
    )
    words = torch.randn(5, 1, 4, 32, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def last():
        state: dict = {}
        for x in words:
            found = attention(x, x, x, incremental_state=state, need_weights=False)[0]
        return found

    assert not torch.equal(last(), last())
    attention.eval()
    assert torch.equal(last(), last())


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_beam_search_in_chunks_equals_fairseq(
    build, dictionary, translation_batch, monkeypatch, temperature
):
    """75 rows of scores are computed in parts of 64."""
    monkeypatch.setattr(beam_search, "MAX_SCORES", 0)
    models = [as_trained(scatter_modulators(build(ARCH), seed), seed).eval() for seed in range(2)]
    given = {"beam_size": 15, "temperature": temperature}
    compare(models, dictionary, translation_batch(SIZES), **given)


@pytest.mark.parametrize("name", [None, "fairseq-train", "fairseq-generate", "fairseq-interactive"])
def test_build_generator_speeds_up_layers_only_for_translation(task, build, monkeypatch, name):
    monkeypatch.setattr(beam_search, "command", lambda: name)
    made = []
    monkeypatch.setattr(beam_search, "faster_layers", made.append)
    models = [build(ARCH).eval()]
    FairseqTask.build_generator(task, models, GenerationConfig())
    assert made == ([models] if name in ("fairseq-generate", "fairseq-interactive") else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_beam_search_in_half_precision_equals_fairseq(build, dictionary, translation_batch, dtype):
    model = as_trained(scatter_modulators(build(ARCH))).eval().to(dtype)
    compare([model], dictionary, translation_batch(SIZES), beam_size=1)


@pytest.mark.parametrize("change", ["pre-hook", "hook", "modulator", "layer"])
def test_plain_output_returns_none_for_changed_layers(build, translation_batch, change):
    """Without gradients a kernel computes the scores of a plain output layer."""

    class Halved(torch.nn.Linear):
        def forward(self, input):
            return super().forward(input) / 2

    model = build(ARCH, "--output-normalizer", "multimax").eval()
    sample, projection = translation_batch()["net_input"], model.decoder.output_projection
    if change == "pre-hook":
        projection.register_forward_pre_hook(lambda layer, x: (x[0] / 2,))
    elif change == "hook":
        projection.register_forward_hook(lambda layer, x, y: y / 2)
    elif change == "modulator":
        model.decoder.output_modulator = torch.nn.Tanh()
    else:
        projection.__class__ = Halved
    expected = model(**sample)[0]
    assert plain_output(model.decoder) is None
    with torch.no_grad():
        torch.testing.assert_close(model(**sample)[0], expected)


def test_diverse_beam_search_is_independent_of_the_batch(build, dictionary, translation_batch):
    """Neither the sentence ids nor the order in which sentences finish matter."""
    model = as_trained(scatter_modulators(build(ARCH))).eval()
    sample = translation_batch(SIZES)
    sample["id"] = torch.tensor([7, 3, 20, 0, 11])

    def found(rows):
        inputs = {name: value[rows] for name, value in sample["net_input"].items()}
        strategy = search.DiverseBeamSearch(dictionary, 2, 0.3)
        generator = SequenceGenerator(
            [model], dictionary, beam_size=4, max_len_b=30, search_strategy=strategy
        )
        hypotheses = generator.generate([model], {"id": sample["id"][rows], "net_input": inputs})
        return [[one["tokens"].tolist() for one in each] for each in hypotheses]

    assert found(list(range(len(SIZES)))) == [found([row])[0] for row in range(len(SIZES))]


def test_hypothesis_copies_hold_their_attention_weights(build, dictionary, translation_batch):
    model, sample = as_trained(build(ARCH)).eval(), translation_batch(SIZES)
    found = BeamGenerator([model], dictionary, beam_size=2).generate([model], sample)[0][0]

    copied = copy.deepcopy(found)

    assert type(copied) is dict and torch.equal(copied["attention"], found["attention"])
    with pytest.raises(KeyError, match="attentions"):
        found["attentions"]


def test_beam_search_computes_attention_weights_lazily(
    build, dictionary, translation_batch, monkeypatch
):
    calls, forward = [], MultiheadAttention.forward

    def recorded(self, *inputs, **options):
        calls.append(options.get("need_weights") or options.get("need_head_weights"))
        return forward(self, *inputs, **options)

    monkeypatch.setattr(MultiheadAttention, "forward", recorded)
    model, sample = as_trained(build(ARCH)).eval(), translation_batch(SIZES)

    found = BeamGenerator([model], dictionary, beam_size=2).generate([model], sample)

    assert calls and not any(calls)
    assert all(one["attention"].numel() for hypotheses in found for one in hypotheses)
    assert sum(map(bool, calls)) == 1  # one pass of one layer serves the batch


@pytest.mark.parametrize("arch", ["stock", ARCH, "rnn_multimax"])
def test_task_generator_gives_attention_weights_and_alignments(
    task, build, dictionary, translation_batch, arch
):
    """After `prepare_for_inference_`, as `from_pretrained` calls it."""
    model = stock_model(task) if arch == "stock" else build(arch).eval()
    model.make_generation_fast_(need_attn=None)
    sample = translation_batch(SIZES)
    for given in ({}, {"sampling": True}, {"print_alignment": "hard"}):
        config = GenerationConfig(beam=2, max_len_b=9, **given)
        generator = FairseqTask.build_generator(task, [model], config)
        for hypotheses in generator.generate([model], sample):
            for one in hypotheses:
                weights = one["attention"]
                assert weights.shape == (10, len(one["tokens"]))
                torch.testing.assert_close(weights.sum(0), torch.ones(len(one["tokens"])))
                assert "print_alignment" not in given or len(one["alignment"])


def test_decoding_attention_needs_matching_modulator_heads():
    query = some_steps()[0]
    for heads, is_able in ((None, True), (2, True), (3, False)):
        attend = decoding_attention(query, 2, 16, modulator=Modulator(num_heads=heads))
        assert (attend is not None) == is_able
