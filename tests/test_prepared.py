"""data-prep/steps.py: existing folders, and errors that come before any work."""

import errno
import os
import sys

import archives
import bitext
import iwslt14
import multi30k
import pytest
import steps
from commands import ROOT
from prep_archives import layout, pack, training_pairs
from prep_scripts import refused, script

PREP = ROOT / "data-prep"


def fill(folder):
    (folder / "deep").mkdir()
    (folder / "a b").write_text("one\ntwo\n")
    (folder / "deep" / "c").write_text("three\n")


@pytest.fixture
def made(tmp_path, capsys):
    steps.step(tmp_path / "text", "an archive", fill)
    assert capsys.readouterr().out == f"Preparing {tmp_path / 'text'}\n"
    return tmp_path / "text"


def test_step_skips_a_complete_folder(made, capsys):
    (made / "notes").write_text("of the user")
    steps.step(made, "an archive", lambda _: pytest.fail("made again"))
    assert capsys.readouterr().out == f"Nothing to do: {made} is prepared.\n"


@pytest.mark.parametrize("name", ["a b", "deep/c"])
@pytest.mark.parametrize(
    "damage", [lambda f: f.unlink(), lambda f: os.truncate(f, 2), lambda f: f.write_text("")]
)
def test_step_remakes_a_damaged_folder(made, capsys, damage, name):
    damage(made / name)
    steps.step(made, "an archive", fill)
    said = capsys.readouterr().out
    assert said == f"Preparing {made} anew, as {name} in it is missing or has another size\n"
    steps.step(made, "an archive", fill)
    assert "Nothing to do" in capsys.readouterr().out
    assert (made / "a b").read_text() == "one\ntwo\n"


def test_step_names_the_folder_on_a_full_disk(tmp_path, capsys):
    def full(folder):
        raise OSError(errno.EFBIG, "File too large")  # without a file name, as a failed write

    with pytest.raises(SystemExit) as error:
        steps.run(lambda: steps.step(tmp_path / "text", "an archive", full))
    assert f"{tmp_path}/text.part: File too large; run this again" in str(error.value)


def test_step_remakes_for_another_archive(made, capsys):
    steps.step(made, "another archive", fill)
    why = "the archive, an option or the code has changed"
    assert capsys.readouterr().out == f"Preparing {made} anew, as {why}\n"


def test_prepare_remakes_data_of_new_text(tmp_path, monkeypatch):
    def copy(text, folder, *_):
        (folder / "copy").write_text((text / "train").read_text())

    def prepare(words):
        def make_text(_, folder):
            (folder / "train").write_text(words)

        bitext.prepare(tmp_path, [], ("de", "en"), make_text, {})
        return (tmp_path / "data-bin" / "copy").read_text()

    monkeypatch.setattr(bitext, "make_data_bin", copy)
    assert prepare("one") == "one"
    (tmp_path / "text" / "train").unlink()  # makes the text anew
    assert prepare("other words") == "other words"


def test_step_refuses_folders_of_other_origin(tmp_path):
    empty, own, file = (tmp_path / name for name in ("empty", "own", "file"))
    empty.mkdir(), own.mkdir(), file.touch()
    (own / "letter").write_text("mine")
    steps.step(empty, "an archive", fill)
    assert (empty / "a b").exists()
    for taken in (own, file):
        with pytest.raises(SystemExit, match=f"{taken} was not made by this script: move it"):
            steps.step(taken, "an archive", fill)
    assert (own / "letter").read_text() == "mine" and file.read_bytes() == b""


@pytest.mark.parametrize("name", ["iwslt14", "iwslt17", "multi30k", "wikitext103"])
def test_scripts_refuse_a_foreign_data_bin_first(name, tmp_path):
    (tmp_path / "data-bin").mkdir()
    (tmp_path / "data-bin" / "dict.txt").touch()
    command = script(f"{name}.py", "--archive", "none", "--out", tmp_path)
    sentence = f"{name}.sh: {tmp_path}/data-bin was not made by this script: move it"
    assert refused(command, tmp_path).startswith(sentence)
    assert [file.name for file in tmp_path.iterdir()] == ["data-bin"]


def test_multi30k_without_archive_needs_complete_data(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multi30k.py", "--out", str(tmp_path)])
    steps.step(tmp_path / "data-bin", "an archive", fill)
    steps.run(multi30k.main)
    assert "Nothing to do" in capsys.readouterr().out
    (tmp_path / "data-bin" / "a b").unlink()
    with pytest.raises(SystemExit, match="^multi30k.sh: --archive is missing"):
        steps.run(multi30k.main)


@pytest.mark.parametrize("pairs", [0, 1, 22])
def test_make_text_refuses_too_few_pairs(pairs, tmp_path):
    rows = [row for row in training_pairs() if row[2]][:pairs] or [("", "", None)]
    archive = archives.Archive(pack(tmp_path / "own.tgz", layout(rows).items()), "", False)
    (out := tmp_path / "text").mkdir()
    said = f"too small: training pairs of a usable length are {pairs}, but 23 are needed"
    with pytest.raises(SystemExit, match=said):
        iwslt14.make_text(archive, "sentencepiece", out)
