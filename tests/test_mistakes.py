"""The common mistakes of a user: each ends its command in one sentence, and trains nothing."""

import shlex
import shutil

import pytest
import torch
from commands import PLUGIN, ROOT, refused, run
from fairseq.data.data_utils import load_indexed_dataset
from mistakes import EVAL_LM, LM, MISTAKES, MT, STOCK, TRANSLATE, WORDS

from multimax_fairseq.compat import mistakes
from multimax_fairseq.errors import UsageError


@pytest.fixture(scope="module")
def places(data, checkpoint, tmp_path_factory):
    """What the words in braces of tests/mistakes.py stand for."""
    folder = tmp_path_factory.mktemp("places")
    # The data of mt/ under the names that a language model reads.
    shutil.copytree(data / "mt", folder / "as_lm")
    shutil.copy(data / "mt" / "dict.en.txt", folder / "as_lm" / "dict.txt")
    for kind in ("bin", "idx"):
        name = f"valid.de-en.en.{kind}"
        shutil.copy(data / "mt" / name, folder / "as_lm" / f"valid.{kind}")
    state = torch.load(checkpoint(MT))
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
    """The current folder of a command, with the files that tests/mistakes.py names."""
    (tmp_path / "text").write_text("a b\n" * 3)
    (tmp_path / "latin").write_bytes("Würde\n".encode("latin-1"))
    (tmp_path / "two.de").write_text("a\nb\n")
    (tmp_path / "two.en").write_text("a\nb\nc\n")
    return tmp_path


@pytest.mark.parametrize("command, named", [*WORDS, *MISTAKES])
def test_mistake_ends_in_one_sentence(places, folder, command, named):
    words = shlex.split(command.format(**places))
    sentence = refused(folder, *words, code=2 if (command, named) in WORDS else 1)
    assert [word for word in named.split() if word not in sentence] == []
    assert not list(folder.glob("model/*"))  # not even a crash.pt


def test_check_settings_allows_half_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="--fp16 needs a GPU"):
        mistakes.check_settings({"fp16": True})
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    mistakes.check_settings({"fp16": True})


def test_parser_message_names_the_nearest_choices(places, folder):
    words = shlex.split(f"{STOCK} --arch transformr".format(**places))
    sentence = refused(folder, *words, code=2)
    assert "did you mean transformer or " in sentence and len(sentence) < 300
    assert "(choose from " in run(folder, *words, code=2, MULTIMAX_TRACEBACK="1")


def test_one_language_that_fits_the_data_is_enough(places, folder):
    run(folder, *shlex.split(f"{TRANSLATE} --source-lang de --no-save".format(**places)))


@pytest.mark.parametrize(
    "script, words",
    [
        ("evaluate.py", ("x.pt", "data", "--json", "none/r.json")),
        ("average_checkpoints.py", ("x.pt", "--output", "none/a.pt")),
    ],
)
def test_script_checks_the_folder_of_its_output_first(tmp_path, script, words):
    output = run(tmp_path, "python", ROOT / "scripts" / script, *words, code=1)
    flag, path = words[-2:]
    assert f"error: {flag} '{path}' must be a file in a folder that can be written to" in output
    assert "Traceback" not in output


# --- wrong results -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["fairseq-generate", "fairseq-validate"])
def test_model_overrides_takes_settings_of_the_checkpoint_alone(places, folder, command):
    words = f"{command} {{mt}} {{plugin}} --task translation --path {{MT}} --max-tokens 400"
    short = "--gen-subset valid --max-len-b 2" if command == "fairseq-generate" else ""
    words = [*shlex.split(f"{words} {short}".format(**places)), "--model-overrides"]
    run(folder, *words, "{'dropout': 0.3, 'encoder_layers_to_keep': None}")
    sentence = refused(folder, *words, "{'attention_normalyzer': 'softmax'}")
    assert "did you mean 'attention_normalizer'" in sentence


def test_partial_perplexity_is_an_error(places, folder):
    dataset = load_indexed_dataset(str(places["lm"] / "valid"), None)  # whose sizes end with it
    longest = int(dataset.sizes.sum()) - 5
    words = shlex.split(EVAL_LM.format(**places))
    sentence = refused(folder, *words, "--tokens-per-sample", longest)
    assert sentence.startswith("1 of 2 blocks are longer than the ")


def test_perplexity_of_impossible_words_is_an_error(places, checkpoint, folder):
    places = places | {"LM": checkpoint(LM, "--output-normalizer", "sparsemax")}
    words = shlex.split(f"{EVAL_LM} --tokens-per-sample 32".format(**places))
    assert "the probability 0, so the perplexity is infinite" in refused(folder, *words)
