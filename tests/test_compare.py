"""multimax-compare: from raw text to a test over seeds."""

import json
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import mean, stdev

import pytest
from commands import BIN, alive, programs_first, refused, run
from corpus import ENGLISH, GERMAN
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from scipy import stats

from multimax_fairseq.commands import tables
from multimax_fairseq.commands.parallel_text import LONGEST, SPLITS, SUBWORDS, prepare
from multimax_fairseq.errors import UsageError

pytestmark = pytest.mark.long

PAIR = ("--source", "de", "--target", "en")


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "my text"
    folder.mkdir()
    for language, lines in (("de", GERMAN.splitlines()), ("en", ENGLISH.splitlines())):
        for split, part in (("train", [*lines, ""]), ("valid", lines[::3]), ("test", lines[1::3])):
            ends = "".join(f"{line}\r\n" for line in part)
            (folder / f"{split}.{language}").write_text(f"\ufeff{ends}", newline="")
    return folder


def scores(comparison):
    """Return {mapping: BLEU of each seed}."""
    models = json.loads((comparison / "result.json").read_text())["models"]
    return {name: [run["value"] for run in model["runs"]] for name, model in models.items()}


def next_command(output):
    """Return the command that the last line of the output names."""
    last = output.splitlines()[-1]
    assert last.startswith("Next, to ")
    return last.partition(": ")[2]


def test_compare_takes_a_folder_of_preprocess(text, tmp_path):
    words = ["fairseq-preprocess", *("--source-lang", "de", "--target-lang", "en")]
    words += ["--trainpref", text / "train", "--validpref", text / "valid"]
    run(tmp_path, *words)
    command = ("multimax-compare", "data-bin", "--updates", "5")
    assert "'data-bin' has no test.de-en.de.idx: run" in refused(tmp_path, *command)
    shutil.rmtree(tmp_path / "data-bin")
    run(tmp_path, *words, "--testpref", text / "test")
    sentence = refused(tmp_path, *command, "--source", "de")
    assert "languages of 'data-bin' are unknown: pass --source and --target" in sentence
    output = run(tmp_path, *command)
    found = json.loads((tmp_path / "comparison/result.json").read_text())["models"]
    assert found["multimax"]["value"] == found["multimax"]["runs"][0]["value"]
    settings = json.loads((tmp_path / "comparison/settings.json").read_text())
    assert "--share-decoder-input-output-embed" in settings["options"]  # two dictionaries
    block = r"  source +\S.*\n  reference +\S.*\n  softmax.*\n  multimax"
    assert len(re.findall(block, output)) == 3
    run(tmp_path, "bash", "-c", next_command(output))
    assert (tmp_path / "comparison/analysis/heads.csv").exists()
    assert "comparison of other text" in refused(tmp_path, *command, "--updates", "4")


def test_compare_reports_no_p_of_one_seed_and_resumes_with_more(text, tmp_path):
    command = ("multimax-compare", text, *PAIR, "--updates", "5", "--seed", "3")
    comparison = tmp_path / "comparison"
    with ThreadPoolExecutor() as pool:  # two commands at once share the runs
        output, other = pool.map(lambda _: run(tmp_path, *command), range(2))
    assert output.endswith(other[other.index("| attention") :])
    found = json.loads((comparison / "result.json").read_text())
    assert found["models"].keys() == {"softmax", "multimax"} and found["p"] is None
    assert "p =" not in output and "not enough to compare them" in output
    values = scores(comparison)
    assert found["difference"] == pytest.approx(values["multimax"][0] - values["softmax"][0])
    for name, model in found["models"].items():
        (each,) = model["runs"]
        assert f"--attention-normalizer {name}" in " ".join(each["command"])
        assert "--seed 3" in " ".join(each["command"])
        assert "references: raw text" in model["protocol"]
        assert model["value"] == each["value"] and model["value_deviation"] is None
    references = (comparison / "data-bin/test.reference.en").read_text()
    assert references == "".join(f"{line}\n" for line in ENGLISH.splitlines()[1::3])
    # Three sentences with both translations, and the losses of both trainings.
    block = r"  source +\S.*\n  reference +\S.*\n  softmax.*\n  multimax"
    assert len(re.findall(block, output)) == 3
    curves = (comparison / "curves.svg").read_text()
    assert "validation loss" in curves and "softmax" in curves
    command_line = next_command(output)
    assert re.search(r"^D-0\t", run(tmp_path, "bash", "-c", f"echo hallo | {command_line}"), re.M)
    # The command trains no finished model again, and continues an unfinished one.
    last = comparison / "softmax/seed-3/checkpoint_last.pt"
    before = last.stat().st_mtime_ns
    for file in [*(comparison / "multimax/seed-3").iterdir(), comparison / "result.json"]:
        file.unlink()
    output = run(tmp_path, *command, "--seeds", "3")
    both = scores(comparison)
    assert {name: each[:1] for name, each in both.items()} == values
    assert last.stat().st_mtime_ns == before
    found = json.loads((comparison / "result.json").read_text())
    differences = [b - a for a, b in zip(both["softmax"], both["multimax"], strict=True)]
    assert found["seeds"] == [3, 4, 5] and found["difference"] == pytest.approx(mean(differences))
    for name, model in found["models"].items():
        assert model["value"] == pytest.approx(mean(both[name]))
        assert model["value_deviation"] == pytest.approx(stdev(both[name]))
    assert re.search(
        r"multimax +\| \d+\.\d+ ± \d+\.\d+ +\| \d+\.\d+ ± \d+\.\d+ +\|\n"
        r"difference: [+-]\d+\.\d+ ± \d+\.\d+ BLEU, p = \d\.\d+ \(paired t-test over 3 seeds\)\n",
        output,
    )
    sentence = refused(tmp_path, *command, "--updates", "4")
    assert "'comparison' is a comparison of other text or settings" in sentence


def test_paired_equals_the_test_of_scipy():
    one, other = [38.1, 38.9, 37.7], [38.6, 38.8, 38.4]
    differences = [b - a for a, b in zip(one, other, strict=True)]
    found, expected = tables.paired(differences), stats.ttest_rel(other, one)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(tuple(expected.confidence_interval(0.95)))
    assert tables.paired([0.0, 0.0]).p == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_compare_ends_training_and_says_that_it_resumes(text, tmp_path, number):
    process = subprocess.Popen(
        [BIN / "multimax-compare", text, *PAIR, "--updates", "100000"],
        cwd=tmp_path,
        env=programs_first(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "comparison/softmax/seed-1/train.log"
    while not (log.exists() and "num_updates" in log.read_text()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in output
    assert ("the same command resumes" in output) == (number == signal.SIGINT)
    before = log.read_text()
    time.sleep(2)
    assert log.read_text() == before and not alive(process.pid)


def test_compare_refuses_text_that_is_not_parallel(text, tmp_path):
    (text / "valid.en").write_text("one line\n")
    sentence = refused(tmp_path, "multimax-compare", text, *PAIR)
    assert "each line needs its translation in the other file" in sentence
    (text / "test.de").unlink()
    (text / "valid.en").write_text((text / "valid.de").read_text())
    assert "test.de' does not exist" in refused(tmp_path, "multimax-compare", text, *PAIR)
    assert not (tmp_path / "comparison").exists()


def pairs(train, test):
    return {"train": train, "valid": test, "test": test}


def test_prepare_knows_each_character_of_the_training_text(tmp_path, capsys):
    lines = list(zip(GERMAN.splitlines(), ENGLISH.splitlines(), strict=True))
    prepare(pairs(lines[::2], lines[1::2]), "de", "en", tmp_path)
    seen = {x for pair in lines[::2] for line in pair for x in line}
    shares = {}
    for column, language in enumerate(("de", "en")):
        data = tmp_path / "data-bin"
        words = Dictionary.load(str(data / f"dict.{language}.txt"))
        text = "".join(pair[column] for pair in lines[1::2])
        binary = load_indexed_dataset(str(data / f"test.de-en.{language}"))
        unknown = sum(int((line == words.unk()).sum()) for line in binary)
        assert unknown <= sum(x not in seen for x in text)
        shares[language] = 100 * unknown / int(sum(binary.sizes))
    printed = capsys.readouterr().out
    for language, share in shares.items():
        said = f"test.{language}: {share:.3g}% of the tokens are <unk>"
        assert (said in printed) == (share > 0)


def test_prepare_learns_from_any_number_of_characters(tmp_path):
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + SUBWORDS + 100)))
    lines = [(characters[i : i + 50], "x") for i in range(0, len(characters), 50)]
    data = prepare(pairs(lines, lines[:2]), "zh", "en", tmp_path)
    assert set(characters) <= set(Dictionary.load(str(data / "dict.zh.txt")).symbols)


@pytest.mark.parametrize("line", ["word " * 1000, "word " * (LONGEST + 1), "w" * 100_000])
def test_prepare_refuses_text_without_a_usable_pair(tmp_path, line):
    with pytest.raises(UsageError, match="train has no pair with 1 to 250 subwords"):
        prepare(pairs([(line, line)] * 3, [("x", "x")]), "de", "en", tmp_path)


def test_prepare_names_the_missing_package_of_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_ko_mecab.MeCab", None)
    with pytest.raises(UsageError, match=r"pip install 'sacrebleu\[ko\]'"):
        prepare(pairs([], []), "en", "ko_KR", tmp_path)


def test_prepare_refuses_text_without_spaces_in_an_unknown_language(tmp_path):
    with pytest.raises(UsageError, match="the text in 'tgt' has no spaces between words"):
        prepare(pairs([], [("x", "今天天气很好")]), "src", "tgt", tmp_path)


@pytest.mark.parametrize("split", SPLITS)
def test_compare_refuses_a_split_without_a_pair(text, tmp_path, split):
    (text / f"{split}.de").write_text("eins\n\n")
    (text / f"{split}.en").write_text("\ntwo\n")
    sentence = refused(tmp_path, "multimax-compare", text, *PAIR)
    assert sentence.endswith(f"{split}.en' have no line with text in both: add some")


def test_compare_refuses_a_test_sentence_that_is_too_long(text, tmp_path):
    (text / "test.de").write_text("x y " * 1000 + "\n")
    (text / "test.en").write_text("long\n")
    sentence = refused(tmp_path, "multimax-compare", text, *PAIR)
    assert sentence.startswith("line 1 of the test source has ") and "split the line" in sentence
