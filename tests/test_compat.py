"""compat/: for each fix, a command or a call that fails without it."""

import argparse
import json
import os
import pickle
import random
import re
import sys
import types
import warnings
from pathlib import Path

import fork_server
import numpy as np
import pytest
import quick_compose
import torch
from commands import ROOT, TRACEBACK, refused, run
from fairseq import checkpoint_utils as fairseq_checkpoints
from fairseq import scoring, utils
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.data import Dictionary
from fairseq.logging import progress_bar
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from omegaconf import OmegaConf

from multimax_fairseq import bleu, compat
from multimax_fairseq.compat import mistakes, running, untrusted
from multimax_fairseq.compat.patch import COMMANDS
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

PACKAGE = Path(compat.PACKAGE)
TINY = [
    *("--encoder-layers", "1", "--encoder-embed-dim", "8", "--encoder-ffn-embed-dim", "8"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "8", "--decoder-ffn-embed-dim", "8"),
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2"),
]
TRAIN = ["--optimizer", "adam", "--lr", "0.001", "--max-tokens", "400", "--max-update", "2"]
TRANSLATE = ["--arch", "transformer", *TINY, *TRAIN]
MODEL_LANGUAGE = ["--task", "language_modeling", "--arch", "transformer_lm", *TINY[6:12], *TRAIN]
MODEL_LANGUAGE += ["--decoder-attention-heads", "2"]


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A folder with two toy data sets; fairseq-preprocess wrote mt/ and lm/."""
    folder = tmp_path_factory.mktemp("toy")
    draw = random.Random(0)
    words = [f"w{i}" for i in range(40)]
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = [" ".join(draw.choices(words, k=draw.randint(3, 9))) for _ in range(lines)]
        (folder / f"{split}.de").write_text("\n".join(text) + "\n")
        (folder / f"{split}.en").write_text("\n".join(line.upper() for line in text) + "\n")
        # Blank lines are blocks of one token under --sample-break-mode eos.
        (folder / f"{split}.txt").write_text("\n\n".join(text) + "\n")
    prefixes = ["--trainpref", "train", "--validpref", "valid", "--testpref", "test"]
    run(folder, "fairseq-preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", "mt")
    prefixes = [word + ".txt" if word in ("train", "valid", "test") else word for word in prefixes]
    run(folder, "fairseq-preprocess", "--only-source", *prefixes, "--destdir", "lm")
    return folder


@pytest.fixture(scope="session")
def translation(toy):
    """A stock translation model's checkpoint, which holds a Namespace and numpy arrays."""
    bleu = ["--eval-bleu", "--eval-bleu-detok", "space", "--eval-bleu-args", '{"max_len_b": 3}']
    best = ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    run(toy, "fairseq-train", "mt", *TRANSLATE, *bleu, *best, "--save-dir", "mt-model")
    return toy / "mt-model" / "checkpoint_best.pt"


@pytest.fixture(scope="session")
def language_model(toy):
    """A stock language model's checkpoint, trained on blocks of one sentence each."""
    options = ["--sample-break-mode", "eos", "--tokens-per-sample", "64"]
    run(toy, "fairseq-train", "lm", *MODEL_LANGUAGE, *options, "--save-dir", "lm-model")
    return toy / "lm-model" / "checkpoint_best.pt"


class Evil:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def foreign_globals(path):
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))


# --- checkpoints ---------------------------------------------------------------------------------


def test_checkpoint_classes_allows_only_safe_names():
    multiarrays = ("numpy.core.multiarray", "numpy._core.multiarray")
    numpy_names = {f"{m}.{name}" for m in multiarrays for name in ("_reconstruct", "scalar")}
    expected = {"argparse.Namespace", "numpy.dtype", "numpy.ndarray"} | numpy_names
    assert set(untrusted.SAFE_GLOBALS) == expected
    with torch.serialization.safe_globals([np.dtype, np.ndarray]):
        before = torch.serialization.get_safe_globals()
        with untrusted.checkpoint_classes():
            inside = torch.serialization.get_safe_globals()
        assert set(torch.serialization.get_safe_globals()) == set(before)
    added = [entry for entry in inside if entry not in before]
    assert {name for _, name in added} == expected
    assert np.dtype not in inside and np.ndarray not in inside


def test_other_loads_get_the_classes_of_numpy(tmp_path):
    """transformers' Trainer unpickles random states so."""
    compat.apply()
    path = tmp_path / "state.pt"
    torch.save({"numpy": np.random.get_state()}, path)
    assert untrusted.read_metadata(path, lambda state: type(state["numpy"][1]) is not np.ndarray)
    with torch.serialization.safe_globals(
        [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType]
    ):
        state = torch.load(path)["numpy"]
    assert type(state[1]) is np.ndarray
    np.random.set_state(state)


def test_checkpoint_classes_keep_numbers(tmp_path):
    state = {
        "counts": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "big_endian": np.array([1.5, -2.5], dtype=">f4"),
        "flag": np.array([True, False]),
        "best": np.float64(2.5),
        "args": argparse.Namespace(lr=[0.1], name="x"),
    }
    for round_trip in ("first.pt", "second.pt"):  # the second is saved from the loaded first
        torch.save(state, tmp_path / round_trip)
        with untrusted.checkpoint_classes():
            assert not foreign_globals(tmp_path / round_trip)
            loaded = torch.load(tmp_path / round_trip)
        for name in ("counts", "big_endian", "flag"):
            np.testing.assert_array_equal(loaded[name], state[name])
            assert loaded[name].dtype.newbyteorder("=") == state[name].dtype.newbyteorder("=")
        assert loaded["best"] == 2.5 and loaded["args"] == state["args"]
        state = loaded
    assert type(pickle.loads(pickle.dumps(loaded["counts"]))) is np.ndarray


@pytest.mark.parametrize("offset,size", [(0, 8), (1 << 20, 1)])
def test_checkpoint_classes_refuse_forged_numpy_types(tmp_path, offset, size):
    """numpy itself would follow a forged pointer, or read past its memory."""

    class Forged:
        def __reduce__(self):
            kind = np.dtype("O" if offset == 0 else "i8")
            state = (3, "|", None, ("a",), {"a": (kind, offset)}, size, 1, 0)
            return np.dtype, (f"V{size}", False, True), state

    torch.save({"x": Forged()}, tmp_path / "forged.pt")
    with pytest.raises(pickle.UnpicklingError), untrusted.checkpoint_classes():
        torch.load(tmp_path / "forged.pt")


@pytest.mark.parametrize(
    "arch, shared",
    [
        ("transformer", "--share-all-embeddings"),
        ("transformer_multimax", "--share-all-embeddings"),
        ("transformer_lm_multimax", "--share-decoder-input-output-embed"),
    ],
)
def test_adaptive_softmax_checkpoints_load_shared_embeddings(build, arch, shared):
    output = ("--output-normalizer", "softmax") if "_lm" in arch else ()
    flags = (shared, "--adaptive-softmax-cutoff", "10,20", *output)
    trained, loaded = (build(arch, *flags, seed=seed) for seed in (1, 2))
    loaded.load_state_dict(trained.state_dict())
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


@torch.no_grad()
def test_adaptive_tails_count_every_word(build, task, dictionary):
    flags = ("--adaptive-softmax-cutoff", "10,20", "--output-normalizer", "softmax")
    model = build("transformer_lm_multimax", *flags).eval()
    criterion = AdaptiveLoss(task, sentence_avg=False)
    source = torch.randint(4, len(dictionary), (1, 6), generator=torch.Generator().manual_seed(1))
    given = {"src_tokens": source, "src_lengths": torch.tensor([6])}
    log_probs = model.get_normalized_probs(model(**given), log_probs=True, sample=None)
    words = [word for word in range(len(dictionary)) if word != dictionary.pad()]
    for word in words:
        target = torch.full_like(source, word)
        loss, count, _ = criterion(model, {"net_input": given, "target": target})
        torch.testing.assert_close(loss.sum(), -log_probs[..., word].sum())
        assert count == 6
    target[0, 2:] = dictionary.pad()
    loss, count, _ = criterion(model, {"net_input": given, "target": target})
    torch.testing.assert_close(loss.sum(), -log_probs[0, :2, words[-1]].sum())
    assert count == 2 and not model.decoder.adaptive_softmax._forward_hooks


@pytest.mark.parametrize("options", [{}, {"sampling_topk": 3}, {"sampling_topp": 0.9}])
@pytest.mark.parametrize("prefix", [False, True])
@torch.no_grad()
def test_zero_probability_words_are_sampled_where_forced(
    build, dictionary, translation_batch, options, prefix
):
    model = build("transformer_multimax", "--output-normalizer", "entmax15").eval()
    model.decoder.output_projection.weight.mul_(30)
    model.decoder.output_projection.weight[dictionary.eos()] = 0
    sampling = Sampling(dictionary, **options)
    sizes = {"beam_size": 2, "max_len_a": 0, "max_len_b": 4}
    generator = SequenceGenerator([model], dictionary, search_strategy=sampling, **sizes)
    sample = translation_batch()
    first = torch.arange(5, 5 + len(sample["target"]))[:, None] if prefix else None
    for row, found in enumerate(generator.generate([model], sample, prefix_tokens=first)):
        for hypothesis in found:
            steps = hypothesis["positional_scores"]
            assert len(steps) == 5 and steps.isfinite().all() and steps[-1] == -1e4
            assert first is None or hypothesis["tokens"][0] == first[row]


@pytest.mark.parametrize("options", [{}, {"sampling_topk": 3}, {"sampling_topp": 0.9}])
def test_zero_probability_words_leaves_other_sampling_unchanged(dictionary, options):
    sampling, found = Sampling(dictionary, **options), []
    scores = torch.zeros(3, 2, 1)
    log_probs = torch.randn(3, 2, len(dictionary)).log_softmax(-1)
    for step in (Sampling.step, Sampling.step.__wrapped__):
        for number in (0, 1):
            torch.manual_seed(1)
            found.append(step(sampling, number, log_probs.clone(), scores))
    for one, other in zip(found[:2], found[2:], strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("code", ["O8", "V8", "S8", "U8", "M8", "m8", "i", "f16x"])
def test_pickled_dtype_refuses_non_numeric_types(code):
    """Elements of type object are addresses that numpy would follow."""
    with pytest.raises(pickle.UnpicklingError, match="not a plain number type"):
        untrusted._PickledDtype(code)


def test_checkpoint_files_keeps_the_errors_of_open(tmp_path):
    compat.apply()
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none.pt", FileNotFoundError)):
        with pytest.raises(kind):
            fairseq_checkpoints.load_checkpoint_to_cpu(str(path))


def test_pickled_array_refuses_too_few_bytes():
    array = untrusted._pickled_array(untrusted._PickledArray, (0,), b"b")
    with pytest.raises(pickle.UnpicklingError):
        array.__setstate__((1, (1000,), untrusted._PickledDtype("i8"), False, b"12345678"))


def test_checkpoint_of_translation_loads_and_resumes(toy, translation):
    state = torch.load(translation, weights_only=False)  # our own file
    assert isinstance(state["cfg"]["model"], argparse.Namespace)
    assert any("ndarray" in name for name in torch_names(translation))
    # Batches of four, so that a sentence's number exceeds its batch's size: see diverse_beams.
    options = ["--beam", "4", "--diverse-beam-groups", "2", "--batch-size", "4"]
    output = run(toy, "fairseq-generate", "mt", "--path", translation, *options)
    assert len(re.findall(r"H-\d+\t", output)) == 12
    resumed = [*TRANSLATE, "--max-update", "3", "--save-dir", "resumed", "--restore-file"]
    output = run(toy, "fairseq-train", "mt", *resumed, translation)
    assert re.search(r"Loaded checkpoint .* \(epoch \d+ @ 2 updates\)", output)
    assert not any("Pickled" in name for name in torch_names(toy / "resumed/checkpoint_last.pt"))


def test_resumed_runs_starts_a_missing_ema(toy, translation):
    average = ["--store-ema", "--ema-decay", "0.5", "--max-update", "3", "--save-dir", "averaged"]
    run(toy, "fairseq-train", "mt", *TRANSLATE, *average, "--restore-file", translation)

    before = fairseq_checkpoints.load_checkpoint_to_cpu(str(translation))["model"]
    state = fairseq_checkpoints.load_checkpoint_to_cpu(str(toy / "averaged/checkpoint_last.pt"))
    expected = {name: (before[name] + value) / 2 for name, value in state["model"].items()}
    torch.testing.assert_close(dict(state["extra_state"]["ema"]), expected)


def torch_names(path):
    """Return every global in a checkpoint's pickle."""
    import pickletools
    import zipfile

    with zipfile.ZipFile(path) as archive:
        member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        operations = pickletools.genops(archive.read(member))
        return {argument for opcode, argument, _ in operations if opcode.name == "GLOBAL"}


@pytest.mark.parametrize("form", ["zip", "zip, protocol 4", "old torch", "plain pickle"])
def test_checkpoint_files_refuses_code(tmp_path, form):
    from fairseq import checkpoint_utils

    compat.apply()
    marker, path = tmp_path / "marker", tmp_path / "evil.pt"
    state = {"args": None, "cfg": None, "model": Evil(marker)}
    if form == "plain pickle":
        path.write_bytes(pickle.dumps(state))
    elif form == "old torch":
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        torch.save(state, path, pickle_protocol=4 if "4" in form else 2)
    is_read = form in ("zip", "old torch")
    content = r"\w+\.system" if is_read else "a pickle of protocol 4 or newer"
    with pytest.raises(ValueError, match=rf"evil\.pt' is refused: it holds {content}") as caught:
        checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert caught.value.user_error
    assert not marker.exists()


@pytest.mark.parametrize(
    "module, text",
    [
        ("fairseq.utils", "__import__('os').system('x')"),
        ("fairseq.optim.adam", "(0.9, __import__('os').getpid())"),
        ("fairseq.models.fconv", "[0 for _ in ()]"),
    ],
)
def test_evaluate_literals_replaces_eval_in_every_module(module, text):
    compat.apply()
    with pytest.raises(ValueError, match="is no Python literal"):
        sys.modules[module].eval(text)


@pytest.mark.parametrize("text", ["(0.9, 0.98)", "[(512, 3)] * 20", "[1] + [2] * 3", "{'beam': 4}"])
def test_literal_equals_eval(text):
    assert untrusted.literal(text) == eval(text)


def test_literal_refuses_other_types():
    with pytest.raises(TypeError):
        untrusted.literal(True)
    assert utils.eval_bool(True) is False  # which fairseq makes of eval's TypeError


@pytest.mark.parametrize("keep", [0, 10, 0.5, 0.99])
def test_checkpoint_files_names_a_damaged_file(translation, tmp_path, keep):
    from fairseq import checkpoint_utils

    compat.apply()
    content = translation.read_bytes()
    path = tmp_path / "cut.pt"
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(ValueError, match=r"cut\.pt' is damaged or incomplete"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_checkpoint_files_errors_are_one_sentence(toy, translation, tmp_path):
    marker = tmp_path / "marker"
    torch.save({"model": Evil(marker)}, tmp_path / "evil.pt")
    cut = tmp_path / "cut.pt"
    cut.write_bytes(translation.read_bytes()[:5000])
    sentence = refused(toy, "fairseq-generate", "mt", "--path", tmp_path / "evil.pt")
    assert "evil.pt" in sentence and "system" in sentence
    sentence = refused(toy, "fairseq-train", "mt", *TRANSLATE, "--no-save", "--restore-file", cut)
    assert "cut.pt" in sentence and "damaged" in sentence
    assert not marker.exists()


# --- numpy and data ------------------------------------------------------------------------------


def blocks(sentences, **options):
    from fairseq.data import TokenBlockDataset

    compat.apply()
    data = [torch.tensor(sentence) for sentence in sentences]
    sizes = np.array([len(sentence) for sentence in sentences])
    return TokenBlockDataset(data, sizes, pad=1, eos=2, **options)


@pytest.mark.parametrize("mode", ["eos", "none", "complete"])
def test_token_blocks_of_one_token_have_aligned_targets(mode):
    """end - 2 is below zero."""
    data = blocks([[2], [5, 2], [6, 7, 2]], block_size=1, break_mode=mode, include_targets=True)
    stream = torch.tensor([2, 5, 2, 6, 7, 2])
    items = [data[i] for i in range(len(data))]
    assert torch.equal(torch.cat([target for _, target, _ in items]), stream)
    for source, target, past_target in items:
        assert len(source) == len(target) == len(past_target)


@pytest.mark.parametrize("length", [65_535, 65_536, 70_000])
def test_token_blocks_of_many_tokens_keep_their_sizes(length):
    data = blocks([[3] * (length - 1) + [2], [4, 2]], block_size=512, break_mode="complete")
    assert list(data.sizes) == [len(data[i]) for i in range(len(data))] == [length, 2]


def test_token_blocks_of_one_sentence_train_and_evaluate(toy, language_model):
    """np.compat in training, and the shortest blocks in evaluation."""
    options = ["--path", language_model, "--sample-break-mode", "eos", "--tokens-per-sample", "64"]
    output = run(toy, "fairseq-eval-lm", "lm", *options)
    tokens = len((toy / "test.txt").read_text().split()) + 23  # an end for each line
    assert f"Evaluated {tokens} tokens" in output and re.search(r"Perplexity: [\d.]+", output)
    options = ["--task", "language_modeling", *options, "--batch-size", "5", "--beam", "2"]
    assert "Translated 23 sentences" in run(toy, "fairseq-generate", "lm", *options)


@pytest.mark.parametrize("count", [1, 8, 12, 23])
@pytest.mark.parametrize("limit", [{"max_sentences": 8}, {"max_tokens": 50}])
def test_batch_by_size_keeps_the_last_batch(count, limit):
    from fairseq.data import data_utils

    compat.apply()
    sizes = np.arange(count) % 7 + 3
    for vector in (sizes, None):
        batches = data_utils.batch_by_size(
            np.arange(count), sizes.__getitem__, vector, required_batch_size_multiple=8, **limit
        )
        assert np.concatenate(batches).tolist() == list(range(count))
        assert all(len(batch) < 8 or len(batch) % 8 == 0 for batch in batches)


def test_user_dir_finds_the_plugin_from_any_folder(toy, tmp_path):
    options = ["--user-dir", "multimax_fairseq", "--sample-break-mode", "eos", "--no-save"]
    output = run(tmp_path, "fairseq-train", toy / "lm", *MODEL_LANGUAGE, *options)
    assert "done training" in output


# --- repeated n-grams -----------------------------------------------------------------------------


def repeats(tokens, size):
    grams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
    return len(grams) > len(set(grams))


@pytest.fixture(scope="module")
def search(dictionary, task):
    """search(model, sample, **options) -> all hypotheses."""

    def hypotheses(model, sample, prefix=None, **options):
        options = types.SimpleNamespace(beam=4, max_len_b=15, **options)
        generator = FairseqTask.build_generator(task, [model], options)
        found = generator.generate([model], sample, prefix_tokens=prefix)
        return [hypothesis["tokens"].tolist() for beam in found for hypothesis in beam]

    return hypotheses


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeated_ngrams_blocks_repetitions(build, search, translation_batch, size):
    model, batch = build("transformer_multimax").eval(), translation_batch()
    free = search(model, batch)
    assert all(repeats(tokens, size) for tokens in free)
    blocked = search(model, batch, no_repeat_ngram_size=size)
    assert len(blocked) == len(free) == 12 and blocked != free
    assert not any(repeats(tokens, size) for tokens in blocked)
    # The end of sentence may repeat.
    assert size > 1 or min(map(len, blocked)) < 16


def test_repeated_ngrams_keeps_a_prefix(build, search, translation_batch):
    model, batch = build("transformer_multimax").eval(), translation_batch()
    prefix = torch.tensor([[5, 6, 5, 6, 5, 6]]).expand(3, -1)
    for tokens in search(model, batch, prefix, no_repeat_ngram_size=2):
        assert tokens[:6] == [5, 6, 5, 6, 5, 6] and not repeats(tokens[4:], 2)


# --- commands ------------------------------------------------------------------------------------


def test_unknown_words_in_references_match_nothing(toy, caplog):
    words = Dictionary.load(str(toy / "mt" / "dict.en.txt"))
    unknown, score = words.unk_string(escape=True), {}
    compat.apply()
    for last in (unknown, "ANOTHER"):
        scorer = scoring.build_scorer(OmegaConf.create({"_name": "sacrebleu"}), words)
        scorer.add_string("W1 W2 W3 W4 W5", "W1 W2 W3 W4 W5")
        scorer.add_string(f"W1 W2 W3 W4 {last}", "W1 W2 W3 W4 <unk>")
        score[last] = scorer.result_string()
    assert score[unknown] == score["ANOTHER"]
    assert [r.message[:38] for r in caplog.records] == ["1 of 2 references hold unknown words, "]


CHINESE = ["今天天气很好", "我喜欢读书", "他在家里吃饭"] * 20


@pytest.mark.parametrize("wrong", ["last", "all"])
@pytest.mark.parametrize("language", ["zh", "zho_Hans", "th_TH", "de"])
def test_languages_without_spaces_select_checkpoints_by_their_bleu(monkeypatch, language, wrong):
    compat.apply()
    hypotheses = [line[:-1] + "错" if wrong == "last" else "错" for line in CHINESE]
    words = Dictionary()
    indices = {line: words.add_symbol(line) for line in (*CHINESE, *hypotheses)}
    rows = [[torch.tensor([indices[line]]) for line in x] for x in (hypotheses, CHINESE)]
    task = TranslationTask(TranslationConfig(target_lang=language), words, words)
    task.tokenizer = None
    found = [[{"tokens": row}] for row in rows[0]]
    monkeypatch.setattr(task, "inference_step", lambda *_, **__: found)
    score = task._inference_with_bleu(None, {"target": rows[1]}, None).score
    assert score == bleu.metric(language).corpus_score(hypotheses, [CHINESE]).score
    assert (score > 60) == (wrong == "last" and language != "de")


def test_languages_without_spaces_name_the_missing_package(monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ja_mecab.MeCab", None)
    settings = {"eval_bleu": True, "target_lang": "ja_XX"}
    for action in (lambda: bleu.metric("ja"), lambda: mistakes.check_settings(settings)):
        with pytest.raises(UsageError, match=r"needs MeCab: .* pip install 'sacrebleu\[ja\]'"):
            action()


def test_generate_scores_with_the_tokenizer_of_the_language(monkeypatch, caplog):
    compat.apply()
    monkeypatch.setitem(mistakes._settings, "target_lang", "zh")
    choice = OmegaConf.create({"_name": "sacrebleu", "sacrebleu_tokenizer": "13a"})
    scorer = scoring.build_scorer(choice, Dictionary())
    for line in CHINESE:
        scorer.add_string(line, line[:-1] + "错")
    assert scorer.score() > 60
    scoring.build_scorer("bleu", Dictionary())
    assert "for the language 'zh' add --scoring sacrebleu" in caplog.records[-1].message


def test_score_command_refuses_text_without_spaces(tmp_path):
    (tmp_path / "test.zh").write_text("".join(f"{line}\n" for line in CHINESE), encoding="utf-8")
    for more in ((), ("--sacrebleu",)):
        same = ("-s", "test.zh", "-r", "test.zh", *more)
        assert "use sacrebleu with -tok zh" in refused(tmp_path, "fairseq-score", *same)


def test_score_command_scores_with_sacrebleu(toy):
    same = ["-s", "test.en", "-r", "test.en"]
    output = run(toy, "fairseq-score", *same, "--sacrebleu")
    assert re.search(r"^BLEU = 100\.00", output, re.MULTILINE)
    output = run(toy, "fairseq-score", *same, "--sentence-bleu")
    assert len(re.findall(r"^\d+ BLEU4 = ", output, re.MULTILINE)) == 12


def test_scored_lines_skips_a_byte_order_mark(toy, tmp_path):
    lines = (toy / "test.en").read_text()
    (tmp_path / "marked").write_text(lines, encoding="utf-8-sig")
    (tmp_path / "empty").touch()
    words = ("fairseq-score", "-s", "marked", "-r", toy / "test.en")
    for more in ((), ("--sacrebleu",)):
        assert re.search(r"^BLEU4? = 100\.00", run(tmp_path, *words, *more), re.MULTILINE)
    for more in ("--ignore-case", "--sentence-bleu", "--order=2"):
        assert "--sacrebleu reads neither" in refused(tmp_path, *words, "--sacrebleu", more)
    sentence = refused(tmp_path, "fairseq-score", "-s", "empty", "-r", "empty")
    assert sentence.startswith("--sys empty has 0 lines")


def test_result_files_keeps_the_earlier_file(toy, translation, tmp_path):
    words = ("fairseq-generate", "mt", "--path", translation, "--max-len-b", "3")
    words += ("--results-path", tmp_path / "results")
    run(toy, *words)
    file = tmp_path / "results/generate-test.txt"
    before = file.read_text()
    assert "Generate test with beam=5" in before and "\nH-" in before
    assert "nothing.pt" in refused(toy, *words, "--path", "nothing.pt")
    assert file.read_text() == before and list(file.parent.iterdir()) == [file]


def test_command_line_trains_in_bfloat16(toy):
    """--num-batch-buckets needs np.percentile with `interpolation`."""
    options = ["--bf16", "--num-batch-buckets", "3", "--no-save"]
    output = run(toy, "fairseq-train", "mt", *TRANSLATE, *options)
    assert "done training" in output and "'tpu': False" in output


def test_fp16_needs_a_gpu(toy, translation):
    train = ["fairseq-train", "mt", *TRANSLATE, "--no-save", "--fp16"]
    generate = ["fairseq-generate", "mt", "--path", translation, "--max-len-b", "3", "--fp16"]
    if torch.cuda.is_available():
        assert "done training" in run(toy, *train)
        assert "Generate test" in run(toy, *generate)
    else:
        for command in (train, generate):
            sentence = refused(toy, *command)
            assert sentence.startswith("--fp16 needs a GPU") and "leave it out" in sentence


# --- user errors ---------------------------------------------------------------------------------


def test_plain_errors_prints_a_traceback_on_request(toy):
    command = ["fairseq-generate", "mt", "--path", "nothing.pt"]
    assert TRACEBACK in run(toy, *command, code=1)
    output = run(toy, *command, code=1, MULTIMAX_TRACEBACK="1")
    assert "Traceback" in output and "Model file not found: nothing.pt" in output


def test_repeated_warnings_hides_hydra_deprecations(monkeypatch, tmp_path):
    for name, function in quick_compose.FAIRSEQS.items():
        monkeypatch.setattr(quick_compose.utils, name, function)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        running.repeated_warnings()
        quick_compose.utils.convert_namespace_to_omegaconf(argparse.Namespace())
    assert not shown
    (tmp_path / "run.yaml").write_text("task: {_name: translation, data: nothing}\n")
    config = ["--config-dir", tmp_path, "--config-name", "run"]
    assert "Warning" not in run(tmp_path, "fairseq-hydra-train", *config, code=1)


def test_repeated_warnings_leaves_other_warnings():
    others = ["In 'mine': Usage of deprecated keyword in package header", "The strict flag"]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        running.repeated_warnings()
        for message in (*others, "\nThe strict flag in the compose API is deprecated."):
            warnings.warn(message, UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in shown] == others


FAIL = """
import atexit, sys
from multimax_fairseq import compat, errors
sys.argv = ["fairseq-train"]
compat.apply()
atexit.register(print, "printed at exit")
print("in the buffer of stdout")
raise errors.UsageError("--x is 3: give 2")
"""


def test_plain_errors_prints_the_error_last(tmp_path):
    lines = run(tmp_path, "python", "-c", FAIL, code=1).splitlines()
    printed = ["in the buffer of stdout", "printed at exit", TRACEBACK]
    assert lines[-4:] == [*printed, "fairseq-train: error: --x is 3: give 2"]


def test_explain_handles_only_user_errors():
    class Mine(ValueError):
        user_error = True

    try:
        try:
            raise Mine("--x is 3;\n  give 2")
        except Mine:
            raise Exception("Cannot load") from None
    except Exception as error:
        assert compat.explain(error) == "--x is 3; give 2"
    for error in (ValueError("x"), KeyError("x"), RuntimeError("CUDA"), AssertionError("no")):
        assert compat.explain(error) is None
    for error in (OSError("x"), IndexError("multimax"), AssertionError()):
        assert compat.explain(error) is None


def test_installation_has_no_pth_file(tmp_path):
    """Python would run a .pth file at the start of each process."""
    words = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target")
    run(tmp_path, sys.executable, *words, tmp_path / "site", ROOT)
    installed = {file.name for file in (tmp_path / "site").iterdir()}
    assert "multimax_fairseq" in installed
    assert not [file for file in (tmp_path / "site").rglob("*.pth")]


def test_setup_applies_fixes_only_to_fairseq_commands(tmp_path):
    for name in COMMANDS:
        assert f"run('{name}')" in (fork_server.REAL / name).read_text(), "run scripts/setup.sh"
    check = "import sys, runpy; print(sum('multimax' in m or 'fairseq' in m for m in sys.modules))"
    assert run(tmp_path, sys.executable, "-c", check, "fairseq-train") == "0\n"


@pytest.mark.parametrize(
    "program, name",
    [
        ("/usr/bin/fairseq-train", "fairseq-train"),
        ("lib/fairseq_cli/eval_lm.py", "fairseq-eval-lm"),
        ("fairseq-experiments/run.py", None),
        ("fairseq-mine", None),
        ("-c", None),
    ],
)
def test_command_reads_the_executables_name(monkeypatch, program, name):
    monkeypatch.setattr(sys, "argv", [program, "fairseq-train", "fairseq-data"])
    assert compat.command() == name


def test_resolve_prefers_a_package_in_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = PACKAGE.name
    assert (
        running.resolve(name) == str(PACKAGE)
        and running.resolve("other") == "other"
        and running.resolve(None) is None
    )
    (tmp_path / name).mkdir()  # as the folder of a clone
    assert running.resolve(name) == str(PACKAGE)
    (tmp_path / name / "__init__.py").touch()
    assert running.resolve(name) == name


def test_explain_ignores_errors_of_other_plugins(toy, tmp_path):
    """A missing file of another plugin is not a mistake of its user."""
    (tmp_path / "their_plugin").mkdir()
    (tmp_path / "their_plugin/__init__.py").write_text("open('their.file')\n")
    words = ("fairseq-train", toy / "mt", *TRANSLATE, "--user-dir", tmp_path / "their_plugin")
    output = run(tmp_path, *words, code=1)
    assert "Traceback" in output and "their.file" in output
    assert output.rstrip().endswith("No such file or directory: 'their.file'")


def test_progress_lines_leave_out_monitored_values(tmp_path, monkeypatch, caplog):
    written = {}

    class Writer:
        def __init__(self, folder):
            self.add_text = self.flush = self.close = lambda *_: None

        def add_scalar(self, name, value, step):
            written[name] = value

    compat.apply()
    monkeypatch.setattr(progress_bar, "SummaryWriter", Writer)
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    caplog.set_level("INFO", logger=progress_bar.logger.name)
    monkeypatch.setattr(progress_bar.logger, "disabled", False)  # as hydra leaves it
    given = {
        "loss": 1.0,
        "num_updates": 2,
        "monitor/a.0/zeros": 0.5,
        "monitor/b": None,
        "ppl": None,
    }
    for form in ("simple", "json"):
        bar = progress_bar.progress_bar([0], form, 1, epoch=1, tensorboard_logdir=str(tmp_path))
        for _ in bar:
            bar.log(given, "train_inner", step=1)
            bar.print(given, "train", step=2)
    simple, epoch, *rest = [record.message for record in caplog.records]
    assert simple == "epoch 001:      1 / 1 loss=1, num_updates=2, ppl=None"
    assert epoch == "epoch 001 | loss 1 | num_updates 2 | ppl None"
    inner, epoch = map(json.loads, rest)
    kept = {"loss": "1", "num_updates": "2", "monitor/a.0/zeros": "0.5", "ppl": None}
    assert inner == {"epoch": 1, "update": 1.0, **kept}
    assert epoch == {"epoch": 1, **{f"train_{key}": value for key, value in kept.items()}}
    assert written == {"loss": 1.0, "monitor/a.0/zeros": 0.5}


def test_pretrained_bart_trains_and_translates(toy):
    task = ["mt", "--task", "translation_from_pretrained_bart", "--langs", "de,en"]
    task += ["-s", "de", "-t", "en"]
    run(toy, "fairseq-train", *task, *TRANSLATE, "--save-dir", "bart")
    words = [*task, "--path", "bart/checkpoint_last.pt", "--max-len-b", "3"]
    found = run(toy, "fairseq-generate", *words, "--max-tokens", "400")
    typed = run(toy, "fairseq-interactive", *words, stdin=(toy / "test.de").read_text())
    lines = re.compile(r"^([SH]-\d+)\t(?:-[\d.]+\t)?(.*)", re.MULTILINE)  # without scores
    found, typed = (sorted(lines.findall(output)) for output in (found, typed))
    assert len(found) == 24 and found == typed


def test_main_runs_a_command_without_a_user_dir(toy):
    same = ("-s", "test.en", "-r", "test.en", "--sacrebleu")
    output = run(toy, "python", "-m", "multimax_fairseq", "fairseq-score", *same)
    assert re.search(r"^BLEU = 100\.00", output, re.MULTILINE)
    output = run(toy, "python", "-m", "multimax_fairseq", "fairseq-scor", code=1)
    assert "'fairseq-scor' is no command of fairseq: use one of fairseq-eval-lm," in output


def test_apply_is_idempotent():
    from fairseq import checkpoint_utils, utils

    compat.apply()
    first = checkpoint_utils.load_checkpoint_to_cpu, utils.import_user_module
    compat.apply()
    assert first == (checkpoint_utils.load_checkpoint_to_cpu, utils.import_user_module)
