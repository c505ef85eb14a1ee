"""Each common mistake of a new user ends the command with one sentence, and trains nothing."""

import shlex
import shutil

import pytest
import torch
from commands import PLUGIN, refused, run
from fairseq.data.data_utils import load_indexed_dataset

from multimax_fairseq import trained
from multimax_fairseq.compat import mistakes
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

# Each table has pairs of a command and the words that its error must contain. `paths` makes what
# the braces name: {mt} and {lm} are data of fairseq-preprocess, {other} has other dictionaries,
# {as_lm} is {mt} under the names of {lm}; {MT}, {LM} and {ENTMAX} are checkpoints; {plugin} is
# --user-dir with {package}. Other files are in the current folder.

LM, MT = "transformer_lm_multimax", "transformer_multimax"
SIZES = "--{0}-layers 2 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 4"
BOTH = f"{SIZES.format('encoder')} {SIZES.format('decoder')} --share-all-embeddings"
TRAIN = "--optimizer adam --max-tokens 200 --max-update 1 --save-dir model"
TRANSLATE = f"fairseq-train {{mt}} {{plugin}} --arch {MT} {BOTH} {TRAIN}"
OF_LM = f"--task language_modeling --tokens-per-sample 32 {SIZES.format('decoder')} {TRAIN}"
MODEL = f"fairseq-train {{lm}} {{plugin}} --arch {LM} {OF_LM}"
GENERATE = "fairseq-generate {mt} {plugin} --gen-subset valid --max-tokens 400 --path {MT}"
EVAL_LM = "fairseq-eval-lm {lm} {plugin} --gen-subset valid --path {LM}"
HYDRA = "fairseq-hydra-train common.user_dir={package} task=language_modeling task.data={lm}"
STOCK = f"fairseq-train {{mt}} {BOTH} {TRAIN}"

DATA = [
    (f"fairseq-train nowhere {{plugin}} --arch {MT} {TRAIN}", "'nowhere' path"),
    (f"fairseq-train nowhere {{plugin}} --arch {LM} {OF_LM}", "'nowhere/dict.txt' --task"),
    (f"fairseq-train {{lm}} {{plugin}} --arch {MT} {BOTH} {TRAIN}", "--task language_modeling"),
    (f"fairseq-train {{mt}} {{plugin}} --arch {LM} {OF_LM}", "dict.txt' --task"),
    (f"{TRANSLATE} -s fr -t en", "dict.fr.txt' languages"),
    (f"{TRANSLATE} -s en", "--source-lang en --target-lang"),
    (f"{TRANSLATE} --valid-subset dev", "'dev' --valid-subset"),
    (f"{GENERATE} --gen-subset dev", "'dev' --gen-subset"),
    ("fairseq-generate {mt} {plugin} --path nothing.pt", "'nothing.pt' --path"),
    ("fairseq-eval-lm {lm} {plugin} --path nothing.pt", "'nothing.pt' --path"),
    ("fairseq-generate {mt} {plugin}", "--path"),
    ("fairseq-eval-lm {lm} {plugin}", "--path checkpoint"),
    ("fairseq-interactive {mt} {plugin}", "--path checkpoint"),
    ("fairseq-generate {mt} {plugin} --path text", "'text' text, checkpoint_best.pt"),
    (f"{TRANSLATE} --restore-file text", "'text' text, checkpoint_best.pt"),
    ("fairseq-generate {other} {plugin} --gen-subset valid --path {MT}", "dictionaries size"),
    ("fairseq-interactive {mt} {plugin} --path {MT} --input latin", "'latin' line 2 0xfc iconv"),
    ("fairseq-score --sys latin --ref text", "'latin' line 2 0xfc iconv"),
    ("fairseq-interactive {mt} {plugin} --path {MT} --input none", "'none' path"),
    ("fairseq-interactive {mt} {plugin} --path {MT} --bpe sentencepiece", "sentencepiece_model"),
    ("fairseq-preprocess {plugin} -s de -t en --trainpref none --destdir bin", "'none.de' path"),
    ("fairseq-preprocess {plugin} -s de -t en --trainpref two --destdir bin", "'two.de' 2 3"),
    ("fairseq-score --sys none --ref text", "none path"),
    (f"{TRANSLATE} --finetune-from-model none.pt", "none.pt --finetune-from-model"),
]
# argparse reports these, with the exit status 2.
WORDS = [
    (f"{STOCK} {{plugin}} --arch transformer_multimaxx", "'transformer_multimaxx' mean"),
    (f"{STOCK} --arch {MT}", f"'{MT}' --user-dir"),
    (f"{STOCK} --arch transformer --criterion multimax_cross_entropy", "--user-dir"),
    (f"{STOCK} --arch transformer --topk 3", "--topk --user-dir"),
    (f"{STOCK} {{plugin}} --arch transformer --attention-normalizer topk", "--arch"),
    (f"{TRANSLATE} --criterion multimax_crossentropy", "'multimax_crossentropy' mean"),
    (f"{TRANSLATE} --task translat", "'translat' mean"),
    (f"{TRANSLATE} --optimizer adan", "'adan' adam"),
    (f"{TRANSLATE} --attention-normaliser topk", "--attention-normaliser spelling"),
    (f"{TRANSLATE} --attention-normalizer sofmax", "'sofmax' softmax"),
    (f"{TRANSLATE} --output-normalizer topk", "'topk' sparsemax"),
]
NAMES = [
    (f"{STOCK} {{plugin}}", "--arch"),
    (f"{STOCK} --arch {MT} --user-dir no-plugin", "no-plugin --user-dir"),
    ("fairseq-generate {mt} --gen-subset valid --path {MT}", f"'{MT}' --user-dir"),
    (f"{HYDRA} model={LM}", f"'{LM}' +model._name="),
    (f"{HYDRA} model.attention_normalizer=topk", "+model.attention_normalizer"),
    ("fairseq-hydra-train --config-dir . --config-name run1", "run1.yaml --config-name"),
    ("fairseq-hydra-train --config-dir . --config-name key", "'max_updat' OptimizationConfig"),
    ("fairseq-hydra-train --config-dir . --config-name group", "'checkpont' FairseqConfig"),
]
CHECKPOINTS = [
    (f"{TRANSLATE} --restore-file {{MT}} --encoder-embed-dim 8 --decoder-embed-dim 8", "options"),
    (f"{TRANSLATE} --restore-file {{MT}} --attention-normalizer sparsemax", "multimax sparsemax"),
    (f"{TRANSLATE} --restore-file {{ENTMAX}}", "EntmaxLossCriterion --reset-optimizer"),
    (
        f"{GENERATE} --model-overrides \"{{{{'multimax_ordr': 1}}}}\"",
        "'multimax_order'",
    ),
    ("fairseq-eval-lm {as_lm} {plugin} --gen-subset valid --path {MT}", "language model"),
    (f"{EVAL_LM} --self-target", "--self-target"),
    (f"{EVAL_LM} --tokens-per-sample 8 --context-window 8", "--context-window --tokens-per-sample"),
    ("fairseq-validate {mt} {plugin} --path {MT}", "--task translation language_modeling"),
    (f"{MODEL} --past-target", "--past-target"),
]
SIZES_AND_FOLDERS = [
    (f"{TRANSLATE} --max-tokens 2", "--max-tokens 2"),
    (f"{TRANSLATE} --max-source-positions 4 --max-target-positions 4", "positions"),
    (f"{MODEL} --max-tokens 8", "--max-tokens 8"),
    (f"{TRANSLATE} --encoder-attention-heads 3", "--encoder-attention-heads 3 16"),
    (f"{TRANSLATE} --encoder-embed-dim 32", "--share-all-embeddings --encoder-embed-dim"),
    *(
        (f"{TRANSLATE} --save-dir {name}", f"--save-dir '{name}' another")
        for name in ("text", "text/model", "/proc/none")
    ),
    (f"{TRANSLATE} --lr-scheduler polynomial_decay", "--total-num-update"),
    (f"{TRANSLATE} --best-checkpoint-metric bleu", "bleu --eval-bleu"),
    (f"{TRANSLATE} --best-checkpoint-metric bleu --eval-bleu", "--maximize-best-checkpoint-metric"),
    (f"{EVAL_LM} --tokens-per-sample 4000", "--tokens-per-sample"),
]
GPU = [
    (f"{TRANSLATE} --fp16", "--fp16 GPU"),
    (f"{TRANSLATE} --memory-efficient-fp16", "--memory-efficient-fp16 GPU"),
    (f"{GENERATE} --fp16", "--fp16 GPU"),
]
MAPPINGS = [
    (f"{TRANSLATE} --attention-normalizer topk", "topk --topk"),
    (f"{TRANSLATE} --topk 3", "--topk 3 topk"),
    (f"{TRANSLATE} --attention-normalizer topk --topk 0", "--topk 0"),
    (f"{TRANSLATE} --multimax-order 3", "--multimax-order 3"),
    (f"{TRANSLATE} --multimax-init-std nan", "--multimax-init-std nan"),
    (f"{TRANSLATE} --attention-normalizer alpha_entmax --entmax-alpha 0.9", "--entmax-alpha 0.9"),
    (f"{TRANSLATE} --attention-normalizer softmax --multimax-order 1", "--multimax-order 1"),
    (f"{TRANSLATE} --attention-normalizer-at crosss", "'crosss' cross"),
    (f"{TRANSLATE} --attention-normalizer-at cross,cross=softmax", "cross twice"),
    (f"{MODEL} --attention-normalizer-at cross", "cross decoder"),
    (f"{MODEL} --output-normalizer sparsemax", "sparsemax entmax_loss"),
    (f"{TRANSLATE} --criterion entmax_loss", "entmax_loss --output-normalizer"),
    (f"{TRANSLATE} --output-normalizer multimax --adaptive-softmax-cutoff 10,20", "cutoff softmax"),
]
MISTAKES = [*DATA, *NAMES, *CHECKPOINTS, *SIZES_AND_FOLDERS, *GPU, *MAPPINGS]


@pytest.fixture(scope="module")
def paths(data, checkpoint, tmp_path_factory):
    """The values of the names in braces."""
    folder = tmp_path_factory.mktemp("paths")
    # The data of mt/ under the names that a language model reads.
    shutil.copytree(data / "mt", folder / "as_lm")
    shutil.copy(data / "mt" / "dict.en.txt", folder / "as_lm" / "dict.txt")
    for kind in ("bin", "idx"):
        name = f"valid.de-en.en.{kind}"
        shutil.copy(data / "mt" / name, folder / "as_lm" / f"valid.{kind}")
    state = torch.load(checkpoint(MT), weights_only=False)
    state["optimizer_history"][0]["criterion_name"] = "EntmaxLossCriterion"
    state["last_optimizer_state"] = {}
    torch.save(state, folder / "entmax.pt")
    return {
        "mt": data / "mt",
        "lm": data / "lm",
        "other": data / "mt-other",
        "as_lm": folder / "as_lm",
        "MT": checkpoint(MT),
        "LM": checkpoint(LM),
        "ENTMAX": folder / "entmax.pt",
        "plugin": shlex.join(PLUGIN),
        "package": PLUGIN[1],
    }


@pytest.fixture
def folder(tmp_path):
    """The current folder of a command, with the files that the table names."""
    (tmp_path / "text").write_text("a b\n" * 3)
    (tmp_path / "latin").write_bytes("Recht\nWürde\n".encode("latin-1"))
    (tmp_path / "key.yaml").write_text("optimization: {max_updat: 6}\n")
    (tmp_path / "group.yaml").write_text("checkpont: {save_dir: model}\n")
    (tmp_path / "two.de").write_text("a\nb\n")
    (tmp_path / "two.en").write_text("a\nb\nc\n")
    return tmp_path


@pytest.mark.parametrize("command, named", [*WORDS, *MISTAKES])
def test_commands_report_mistakes_in_one_sentence(paths, folder, command, named):
    words = shlex.split(command.format(**paths))
    sentence = refused(folder, *words, code=2 if (command, named) in WORDS else 1)
    assert [word for word in named.split() if word not in sentence] == []
    assert not list(folder.glob("model/*"))  # not even a crash.pt


def test_check_settings_allows_half_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="--fp16 needs a GPU"):
        mistakes.check_settings({"fp16": True})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    mistakes.check_settings({"fp16": True})


def test_parser_message_names_the_nearest_choices(paths, folder):
    words = shlex.split(f"{STOCK} --arch transformr".format(**paths))
    sentence = refused(folder, *words, code=2)
    assert "did you mean transformer or " in sentence and len(sentence) < 300
    assert "(choose from " in run(folder, *words, code=2, MULTIMAX_TRACEBACK="1")


def test_train_accepts_one_language_that_fits_the_data(paths, folder):
    run(folder, *shlex.split(f"{TRANSLATE} --source-lang de --no-save".format(**paths)))


@pytest.mark.parametrize(
    "name, command",
    [
        ("--json", "multimax-evaluate x.pt data --json none/r.json"),
        ("--output", "multimax-average x.pt --output none/a.pt"),
        ("NEW", "multimax-convert to-authors x.pt none/a.pt"),
        ("HEAD", "multimax-convert to-paddlefleet x.pt none/head.npz"),
    ],
)
def test_commands_check_the_output_folder_first(tmp_path, name, command):
    *words, path = command.split()
    sentence = refused(tmp_path, *words, path)
    assert f"{name} '{path}' must be a file in a folder that can be written to" in sentence


# --- wrong results -------------------------------------------------------------------------------


def test_train_refuses_to_resume_without_optimizer_state(paths, folder):
    words = shlex.split(f"{TRANSLATE} --no-save-optimizer-state".format(**paths))
    run(folder, *words)
    for path in ("model/checkpoint_last.pt", paths["MT"]):
        sentence = refused(folder, *words, "--restore-file", path)
        assert f"'{path}', which has no optimizer state" in sentence
        assert "--reset-optimizer" in sentence and "--finetune-from-model" in sentence
    assert "no optimizer state" in refused(folder, *words)
    output = run(folder, *words, "--reset-optimizer")
    assert "num_updates 1 " in output


def test_commands_refuse_another_direction_than_the_checkpoint(paths, folder):
    run(folder, *shlex.split(TRANSLATE.format(**paths)))  # languages inferred from the data
    path, back = folder / "model" / "checkpoint_last.pt", folder / "back"
    shutil.copytree(paths["mt"], back)
    for file in back.glob("*.de-en.*"):
        file.rename(back / file.name.replace("de-en", "en-de"))
    options = ["--task", "translation", *PLUGIN, "--max-tokens", "400", "--path", path]
    swapped = ["-s", "en", "-t", "de"]
    split = {"generate": ["--gen-subset", "valid"], "interactive": ["--input", "text"]}
    for name, data, languages in (
        ("generate", paths["mt"], swapped),
        ("generate", back, []),
        ("interactive", paths["mt"], swapped),
        ("validate", paths["mt"], swapped),
    ):
        words = [f"fairseq-{name}", data, *options, *split.get(name, []), *languages]
        sentence = refused(folder, *words)
        assert sentence.startswith(f"'{path}' translates from de to en, not from en to de: ")
        assert "--source-lang de --target-lang en" in sentence
    # The user can rename the languages.
    names = "{'source_lang': 'en', 'target_lang': 'de'}"
    assert f'--model-overrides "{names}"' in sentence
    run(folder, *words, "--model-overrides", names)
    with pytest.raises(UsageError, match="from de to en"):
        trained.load(path, paths["mt"], source_lang="en", target_lang="de")
    # An earlier checkpoint may not know its languages.
    state = torch.load(path, weights_only=False)
    state["cfg"]["task"].update(source_lang=None, target_lang=None)
    torch.save(state, path)
    run(folder, *words)


@pytest.mark.parametrize("command", ["fairseq-generate", "fairseq-validate"])
def test_model_overrides_accepts_only_settings_of_the_checkpoint(paths, folder, command):
    words = f"{command} {{mt}} {{plugin}} --task translation --path {{MT}} --max-tokens 400"
    short = "--gen-subset valid --max-len-b 2" if command == "fairseq-generate" else ""
    words = [*shlex.split(f"{words} {short}".format(**paths)), "--model-overrides"]
    run(folder, *words, "{'dropout': 0.3, 'encoder_layers_to_keep': None}")
    sentence = refused(folder, *words, "{'attention_normalyzer': 'softmax'}")
    assert "did you mean 'attention_normalizer'" in sentence


def test_eval_lm_refuses_partial_perplexity(paths, folder):
    dataset = load_indexed_dataset(str(paths["lm"] / "valid"), None)  # whose sizes end with it
    longest = int(dataset.sizes.sum()) - 5
    words = shlex.split(EVAL_LM.format(**paths))
    sentence = refused(folder, *words, "--tokens-per-sample", longest)
    assert sentence.startswith("1 of 2 blocks are longer than the ")


def test_eval_lm_refuses_infinite_perplexity(paths, checkpoint, folder):
    paths = paths | {"LM": checkpoint(LM, "--output-normalizer", "sparsemax")}
    words = shlex.split(f"{EVAL_LM} --tokens-per-sample 32".format(**paths))
    assert "the probability 0, so the perplexity is infinite" in refused(folder, *words)
