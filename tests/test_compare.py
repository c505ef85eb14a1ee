"""multimax-compare: from raw text to a paired test."""

import json
import re

import pytest
from commands import refused, run
from corpus import ENGLISH, GERMAN

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


def test_compare_trains_both_and_resumes(text, tmp_path):
    command = ("multimax-compare", text, *PAIR, "--updates", "5", "--seed", "3")
    run(tmp_path, *command)
    result = tmp_path / "comparison" / "result.json"
    found = json.loads(result.read_text())
    assert found["models"].keys() == {"softmax", "multimax"} and 0 <= found["p"] <= 1
    values = [model["value"] for model in found["models"].values()]
    assert found["difference"] == pytest.approx(values[1] - values[0])
    for name, model in found["models"].items():
        assert f"--attention-normalizer {name}" in " ".join(model["command"])
        assert "--seed 3" in " ".join(model["command"])
        assert "references: raw text" in model["protocol"]
    references = (tmp_path / "comparison/data-bin/test.reference.en").read_text()
    assert references == "".join(f"{line}\n" for line in ENGLISH.splitlines()[1::3])
    # The command trains no finished model again, and continues an unfinished one.
    last = tmp_path / "comparison/softmax/checkpoint_last.pt"
    before = last.stat().st_mtime_ns
    result.unlink()
    for file in (tmp_path / "comparison" / "multimax").glob("checkpoint*"):
        file.unlink()
    output = run(tmp_path, *command)
    again = json.loads(result.read_text())
    assert [model["value"] for model in again["models"].values()] == values
    assert last.stat().st_mtime_ns == before
    sentence = refused(tmp_path, *command[:-1], "4")
    assert "'comparison' is a comparison of other text or settings" in sentence
    assert re.search(r"multimax +\d+\.\d+ +\d+\.\d+\ndifference: [+-]\d+\.\d+ BLEU, p = ", output)


def test_compare_refuses_text_that_is_not_parallel(text, tmp_path):
    (text / "valid.en").write_text("one line\n")
    sentence = refused(tmp_path, "multimax-compare", text, *PAIR)
    assert "each line needs its translation in the other file" in sentence
    (text / "test.de").unlink()
    (text / "valid.en").write_text((text / "valid.de").read_text())
    assert "test.de' does not exist" in refused(tmp_path, "multimax-compare", text, *PAIR)
    assert not (tmp_path / "comparison").exists()


def test_compare_refuses_a_test_sentence_that_is_too_long(text, tmp_path):
    (text / "test.de").write_text("x y " * 1000 + "\n")
    (text / "test.en").write_text("long\n")
    sentence = refused(tmp_path, "multimax-compare", text, *PAIR)
    assert sentence.startswith("line 1 of the test source has ") and "split the line" in sentence
