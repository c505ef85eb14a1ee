"""A user's mistakes: one sentence names flag and value, and nothing is trained."""

import json
import math
import shlex
import shutil
import types

import pytest
import torch
from commands import PLUGIN, ROOT, refused, run
from conftest import SIZES
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.tasks import FairseqTask
from mistakes import COMMANDS, FLAGS, GOOD, LM, MT, RECURRENT, cases

from multimax_fairseq.criterions.cross_entropy import RDropConfig
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.config import OPTIONS, SETTINGS, flag
from multimax_fairseq.models.rnn_multimax import RECURRENT_OPTIONS

TRAIN = ("--optimizer", "adam", "--max-tokens", "200", "--max-update", "1", "--save-dir", "model")
TRANSLATE = (*f"{SIZES.format('encoder')} {SIZES.format('decoder')}".split(), *TRAIN)
MODEL_LANGUAGE = ("--task", "language_modeling", "--arch", LM, *SIZES.format("decoder").split())
MODEL_LANGUAGE += ("--tokens-per-sample", "64", *TRAIN)
EVALUATE = ("--gen-subset", "valid", "--tokens-per-sample")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    output = run(tmp_path_factory.mktemp("answers"), "python", ROOT / "tests" / "mistakes.py")
    return json.loads(output.splitlines()[-1])


def test_a_wrong_flag_or_pair_is_named_in_one_sentence(answers, capsys):
    tried = [*cases(), *((command, words, [named]) for command, words, named in COMMANDS)]
    wrong = [
        (words, sentence)
        for (_, words, named), sentence in zip(tried, answers[0], strict=True)
        if sentence.startswith(("taken", "Traceback"))
        or "\n" in sentence
        or not all(word in sentence for word in named)
    ]
    assert not wrong, "\n".join(map(str, wrong))
    with capsys.disabled():
        print(f" {len(tried)} wrong flags and pairs of flags: each told in a sentence ", end="")


def test_an_option_is_refused_beside_every_mapping_but_its_own(answers, capsys):
    for case, sentence in answers[1].items():
        name, _ = case.split()
        shown = flag(name) if GOOD[name] is True else f"{flag(name)} {GOOD[name]}"
        assert sentence.startswith(f"{shown} belongs to "), case
    assert GOOD.keys() == OPTIONS.keys() == {case.split()[0] for case in answers[1]}
    with capsys.disabled():
        print(f" {len(answers[1])} options beside other mappings: each refused ", end="")


def test_every_flag_of_ours_was_given_wrong():
    settings = {setting.name for setting in SETTINGS} | RECURRENT_OPTIONS.keys()
    settings |= {name for name in RDropConfig.__dataclass_fields__ if name[0] != "_"}
    settings |= {"scalar_lr_scale", "scalar_freeze_updates"}
    tried = {"--attention-normalizer-at", *(name for name, *_ in (*FLAGS, *RECURRENT))}
    assert tried == {flag(name) for name in settings}


# --- whole commands -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, named",
    [
        (("mt", "--arch", "transformer", *TRANSLATE, "--criterion", "entmax_loss"), "entmax_loss"),
        (("lm", *MODEL_LANGUAGE, "--output-normalizer", "sparsemax"), "sparsemax gives words"),
    ],
)
def test_a_criterion_that_cannot_train_the_model_is_refused_before_training(
    data, tmp_path, words, named
):
    kind, *words = words
    sentence = refused(tmp_path, "fairseq-train", data / kind, *PLUGIN, *words)
    assert named in sentence
    assert not list((tmp_path / "model").iterdir())  # not even a crash.pt


def test_a_checkpoint_of_another_criterion_is_refused_with_the_remedy(data, checkpoint, tmp_path):
    path = checkpoint(MT)
    state = torch.load(path)
    state["optimizer_history"][0]["criterion_name"] = "EntmaxLossCriterion"
    state["last_optimizer_state"] = {}
    torch.save(state, tmp_path / "other.pt")
    words = ("--arch", MT, "--share-all-embeddings", *TRANSLATE, "--restore-file", "other.pt")
    sentence = refused(tmp_path, "fairseq-train", data / "mt", *PLUGIN, *words)
    assert "EntmaxLossCriterion vs CrossEntropyCriterion" in sentence
    assert "--reset-optimizer" in sentence


def test_a_yaml_has_no_flag_that_is_not_read(data, tmp_path):
    words = ("task=language_modeling", f"task.data={data / 'lm'}", "criterion=cross_entropy")
    words += (
        f"common.user_dir={ROOT / 'multimax_fairseq'}",
        "model=transformer_lm/transformer_lm_gpt",
    )
    for slip in (
        "common.tpu=true",
        "dataset.num_shards=2",
        "optimization.update_freq=[0]",
        "checkpoint.best_checkpoint_metric=bleu",
    ):
        sentence = refused(tmp_path, "fairseq-hydra-train", *words, slip)
        assert sentence.startswith(slip.split("=")[0])
    warmup = ("lr_scheduler=inverse_sqrt", "lr_scheduler.warmup_updates=0")
    sentence = refused(tmp_path, "fairseq-hydra-train", *words, *warmup)
    assert "lr_scheduler.warmup_updates 0 must be at least 1" in sentence


@pytest.mark.parametrize(
    "slip, said",
    [
        ("model=transformer_lm_multimax", "+model._name="),
        ("+criterion._name=multimax_cross_entropy", "without a plus"),
    ],
)
def test_a_name_that_hydra_cannot_know_yet_is_explained(tmp_path, slip, said):
    words = (f"common.user_dir={ROOT / 'multimax_fairseq'}", "task=language_modeling", slip)
    assert said in refused(tmp_path, "fairseq-hydra-train", *words)


@pytest.mark.parametrize(
    "words, said",
    [
        ("--config-name run1", "'.' has no run1.yaml: check --config-name"),
        ("--config-name run model.dropout=0.3", "write +model.dropout=0.3 to add it"),
        ("--config-name run d/lm-bin", "quote a value with spaces or signs"),
    ],
)
def test_a_yaml_that_is_misread_is_explained(tmp_path, words, said):
    (tmp_path / "run.yaml").write_text("model: {_name: transformer_lm}\n")
    command = ("fairseq-hydra-train", "--config-dir", ".", *shlex.split(words))
    assert said in refused(tmp_path, *command)


@pytest.mark.parametrize(
    "script, words",
    [
        ("evaluate.py", ("x.pt", "data", "--json", "none/r.json")),
        ("average_checkpoints.py", ("x.pt", "--output", "none/a.pt")),
    ],
)
def test_an_output_that_has_no_folder_is_refused_before_the_work(tmp_path, script, words):
    output = run(tmp_path, "python", ROOT / "scripts" / script, *words, code=1)
    flag, path = words[-2:]
    assert f"error: {flag} '{path}' must be a file in a folder that can be written to" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("command", ["fairseq-generate", "fairseq-validate"])
def test_a_misspelt_override_is_named(data, checkpoint, tmp_path, command):
    words = (command, data / "mt", *PLUGIN, "--task", "translation", "--path", checkpoint(MT))
    short = ("--gen-subset", "valid", "--max-len-b", "2") if command == "fairseq-generate" else ()
    words += (*short, "--max-tokens", "400", "--model-overrides")
    sentence = refused(tmp_path, *words, "{'attention_normalyzer': 'softmax'}")
    assert (
        "'attention_normalyzer'" in sentence and "did you mean 'attention_normalizer'" in sentence
    )
    run(tmp_path, *words, "{'dropout': 0.3, 'encoder_layers_to_keep': None}")


def test_a_misspelt_override_of_a_language_model_is_named(data, checkpoint, tmp_path):
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", checkpoint(LM), *EVALUATE, "64")
    sentence = refused(tmp_path, *words, "--model-overrides", "{'model': {'dropot': 0.3}}")
    assert "'dropot'" in sentence and "did you mean 'dropout'" in sentence


@pytest.mark.parametrize(
    "kind, words", [("mt", ("--arch", MT, *TRANSLATE)), ("lm", MODEL_LANGUAGE)]
)
def test_last_batch_names_max_tokens_if_no_sentence_fits(data, tmp_path, kind, words):
    words = ("fairseq-train", data / kind, *PLUGIN, *words, "--max-tokens", "2")
    sentence = refused(tmp_path, *words)
    assert sentence.startswith("no sentence is left, as all are longer than --max-tokens 2, ")


@pytest.mark.parametrize("folder", ["/proc/model", "file", "file/model"])
def test_a_save_dir_that_cannot_be_written_is_named(data, tmp_path, folder):
    (tmp_path / "file").touch()
    words = ("fairseq-train", data / "mt", *PLUGIN, "--arch", MT, *TRANSLATE, "--save-dir", folder)
    sentence = refused(tmp_path, *words)
    assert sentence.startswith(f"cannot write to '{folder}")
    assert sentence.endswith("; give another --save-dir.")


@pytest.mark.parametrize(
    "languages, said",
    [
        ("--source-lang fr", "--source-lang fr does not fit "),
        ("--source-lang en", "--source-lang en does not fit "),  # en to de needs both flags
        ("--target-lang fr", "--target-lang fr does not fit "),
        ("--source-lang fr --target-lang en", "no dictionary "),
        ("--source-lang en --target-lang en", "no split 'valid' in "),
    ],
)
def test_languages_that_do_not_fit_the_data_are_refused(data, tmp_path, languages, said):
    words = ("fairseq-train", data / "mt", *PLUGIN, "--arch", MT, *TRANSLATE, *languages.split())
    sentence = refused(tmp_path, *words)
    assert sentence.startswith(said) and "holds translation data of de-en" in sentence


def test_one_language_that_fits_the_data_is_enough(data, tmp_path):
    words = ("fairseq-train", data / "mt", *PLUGIN, "--arch", MT, *TRANSLATE, "--no-save")
    run(tmp_path, *words, "--source-lang", "de")


@pytest.mark.parametrize(
    "kind, words, task",
    [
        ("mt", MODEL_LANGUAGE, "translation"),
        ("lm", ("--arch", MT, *TRANSLATE), "language_modeling"),
        ("lm", ("--arch", MT, *TRANSLATE, "-s", "de", "-t", "en"), "language_modeling"),
    ],
)
def test_data_of_another_task_name_their_task(data, tmp_path, kind, words, task):
    sentence = refused(tmp_path, "fairseq-train", data / kind, *PLUGIN, *words)
    assert sentence.startswith("no ") and f"add --task {task} " in sentence


@pytest.mark.parametrize(
    "flag, value, nearest",
    [
        ("--arch/-a", "transformer_multimaxx", "did you mean transformer_multimax or "),
        ("--arch/-a", "0", "MULTIMAX_TRACEBACK=1"),
        ("--task", "translat", "did you mean translation or "),
        ("--criterion", "multimax_crossentropy", "did you mean multimax_cross_entropy or "),
    ],
)
def test_plain_errors_name_the_nearest_of_many_choices(data, tmp_path, flag, value, nearest):
    words = ("fairseq-train", data / "mt", *PLUGIN, flag.split("/")[0], value)
    sentence = refused(tmp_path, *words, code=2)
    assert sentence.startswith(f"argument {flag}: invalid choice: '{value}': {nearest}")
    assert "MULTIMAX_TRACEBACK=1 lists all " in sentence and len(sentence) < 300
    assert "(choose from " in run(tmp_path, *words, code=2, MULTIMAX_TRACEBACK="1")


@pytest.mark.parametrize("more", ["100000", "64 --max-tokens 9999 --num-shards 9 --shard-id 8"])
def test_the_perplexity_of_nothing_is_an_error(data, checkpoint, tmp_path, more):
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", checkpoint(LM), *EVALUATE)
    sentence = refused(tmp_path, *words, *more.split())
    assert sentence.startswith("nothing was evaluated")
    assert f"--tokens-per-sample {more.split()[0]}" in sentence


def test_the_perplexity_of_a_part_is_an_error(data, checkpoint, tmp_path):
    dataset = load_indexed_dataset(str(data / "lm" / "valid"), None)  # whose sizes end with it
    count = int(dataset.sizes.sum())
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", checkpoint(LM), *EVALUATE)
    sentence = refused(tmp_path, *words, count - 5)
    assert sentence.startswith("1 of 2 blocks are longer than the ")


def test_the_perplexity_of_impossible_words_is_an_error(data, checkpoint, tmp_path):
    sparse = checkpoint(LM, "--output-normalizer", "sparsemax")
    words = ("fairseq-eval-lm", data / "lm", *PLUGIN, "--path", sparse, *EVALUATE, "32")
    assert "the probability 0, so that the perplexity is infinite" in refused(tmp_path, *words)


@pytest.mark.parametrize(
    "words, said",
    [
        ("fairseq-eval-lm lm", "--path is missing: give a checkpoint"),
        ("fairseq-interactive mt", "--path is missing: give a checkpoint"),
        ("fairseq-interactive mt --path C --bpe sentencepiece", "--sentencepiece-model is missing"),
        ("fairseq-interactive mt --path C --tokenizer moses", "--tokenizer needs --source-lang"),
        (
            "fairseq-generate mt --path C --gen-subset valid --remove-bpe spm",
            "--remove-bpe spm is none that",
        ),
        ("fairseq-generate mt --path C --gen-subset a,b", "no split 'a,b' in"),
    ],
)
def test_what_a_command_of_text_lacks_is_named(data, checkpoint, tmp_path, words, said):
    places = {"lm": data / "lm", "mt": data / "mt", "C": checkpoint(MT)}
    words = [places.get(word, word) for word in words.split()]
    sentence = refused(tmp_path, words[0], words[1], *PLUGIN, *words[2:])
    assert sentence.startswith(said)


def test_a_translation_model_is_no_language_model(data, checkpoint, tmp_path):
    # The dictionary of mt/ under the name that the other task reads.
    shutil.copy(data / "mt" / "dict.en.txt", tmp_path / "dict.txt")
    words = ("fairseq-eval-lm", tmp_path, *PLUGIN, "--path", checkpoint(MT))
    sentence = refused(tmp_path, *words)
    assert "MultimaxTransformerModel is no language model: choose one" in sentence


def test_text_that_is_not_utf8_is_shown(data, checkpoint, tmp_path):
    (tmp_path / "latin.txt").write_bytes("Würde\n".encode("latin-1"))
    words = ("fairseq-interactive", data / "mt", *PLUGIN, "--path", checkpoint(MT))
    sentence = refused(tmp_path, *words, "--input", "latin.txt")
    assert "not UTF-8: byte 0xfc in b'W\\xfcrde\\n'" in sentence and "iconv" in sentence


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
def test_no_ngram_repeats(build, search, translation_batch, size):
    model, batch = build(MT).eval(), translation_batch()
    free = search(model, batch)
    assert all(repeats(tokens, size) for tokens in free)
    blocked = search(model, batch, no_repeat_ngram_size=size)
    assert len(blocked) == len(free) == 12 and blocked != free
    assert not any(repeats(tokens, size) for tokens in blocked)
    # Of words: that each hypothesis begins with the symbol of an end keeps none from ending.
    assert size > 1 or min(map(len, blocked)) < 16


def test_a_prefix_may_repeat_ngrams(build, search, translation_batch):
    """It is forced: nothing else is possible there."""
    model, batch = build(MT).eval(), translation_batch()
    prefix = torch.tensor([[5, 6, 5, 6, 5, 6]]).expand(3, -1)
    for tokens in search(model, batch, prefix, no_repeat_ngram_size=2):
        assert tokens[:6] == [5, 6, 5, 6, 5, 6] and not repeats(tokens[4:], 2)


@pytest.mark.parametrize(
    "given",
    [
        {"nbest": 4},
        {"min_len": 15},
        {"max_len_a": 1.2, "max_len_b": 0},
        {"sampling": True, "sampling_topp": 1.0},
        {"sampling": True, "sampling_topk": 3, "sampling_topp": 0.0},
        {"sampling": True, "sampling_topk": None},  # as many as there are words
    ],
)
def test_what_a_search_can_just_take_is_taken(build, task, dictionary, given):
    given = {name: len(dictionary) if value is None else value for name, value in given.items()}
    options = types.SimpleNamespace(**{"beam": 4, "max_len_b": 15, **given})
    FairseqTask.build_generator(task, [build(MT).eval()], options)


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0])
def test_a_temperature_that_is_none(build, task, value):
    options = types.SimpleNamespace(temperature=value)
    with pytest.raises(UsageError, match=f"--temperature {value} must be a finite number above 0"):
        FairseqTask.build_generator(task, [build(MT).eval()], options)
