"""What data-prep's steps make of a folder that is there already, and what the scripts say early."""

import errno
import io
import os
import sys

import archives
import iwslt
import iwslt14
import multi30k
import pytest
import steps
from commands import ROOT
from test_data_prep import layout, pack, refused, script, training_pairs

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


def test_a_whole_folder_is_not_made_again(made, capsys):
    (made / "notes").write_text("a user's own")
    steps.step(made, "an archive", lambda _: pytest.fail("made again"))
    assert capsys.readouterr().out == f"Nothing to do: {made} is prepared.\n"


@pytest.mark.parametrize("name", ["a b", "deep/c"])
@pytest.mark.parametrize(
    "damage", [lambda f: f.unlink(), lambda f: os.truncate(f, 2), lambda f: f.write_text("")]
)
def test_what_is_missing_or_cut_is_made_anew(made, capsys, damage, name):
    damage(made / name)
    steps.step(made, "an archive", fill)
    said = capsys.readouterr().out
    assert said == f"Preparing {made} anew, as {name} in it is missing or has another size\n"
    steps.step(made, "an archive", fill)
    assert "Nothing to do" in capsys.readouterr().out
    assert (made / "a b").read_text() == "one\ntwo\n"


def test_a_full_disk_says_where(tmp_path, capsys):
    def full(folder):
        raise OSError(errno.EFBIG, "File too large")  # as that of a failed write, without a name

    with pytest.raises(SystemExit) as error:
        steps.run(lambda: steps.step(tmp_path / "text", "an archive", full))
    assert f"{tmp_path}/text.part: File too large; run this again" in str(error.value)


def test_a_mark_without_sizes_counts(made, capsys):
    mark = made / steps.MARK
    mark.write_text(mark.read_text().splitlines()[0] + "\n")
    (made / "a b").unlink()
    steps.step(made, "an archive", fill)
    assert "Nothing to do" in capsys.readouterr().out


def test_another_archive_is_said(made, capsys):
    steps.step(made, "another archive", fill)
    why = "the archive, an option or the code has changed"
    assert capsys.readouterr().out == f"Preparing {made} anew, as {why}\n"


def test_an_empty_folder_is_filled_and_any_other_stays(tmp_path):
    empty, own, file = (tmp_path / name for name in ("empty", "own", "file"))
    empty.mkdir(), own.mkdir(), file.touch()
    (own / "letter").write_text("mine")
    steps.step(empty, "an archive", fill)
    assert (empty / "a b").exists()
    for taken in (own, file):
        with pytest.raises(SystemExit, match=f"{taken} was not made by this script: move it"):
            steps.step(taken, "an archive", fill)
    assert (own / "letter").read_text() == "mine" and file.read_bytes() == b""
    link = tmp_path / "link"
    link.symlink_to(empty)
    with pytest.raises(SystemExit, match=f"{link} is a link, which is not replaced"):
        steps.step(link, "another archive", fill)
    assert link.is_symlink() and (empty / "a b").exists()


@pytest.mark.parametrize("name", ["iwslt14", "iwslt17", "multi30k", "wikitext103"])
def test_another_data_bin_is_refused_before_the_text_is_made(name, tmp_path):
    (tmp_path / "data-bin").mkdir()
    (tmp_path / "data-bin" / "dict.txt").touch()
    command = script(f"{name}.py", "--archive", "none", "--out", tmp_path)
    sentence = f"{name}.sh: {tmp_path}/data-bin was not made by this script: move it"
    assert refused(command, tmp_path).startswith(sentence)
    assert [file.name for file in tmp_path.iterdir()] == ["data-bin"]


def test_multi30k_without_its_archive_needs_a_whole_data_bin(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["multi30k.py", "--out", str(tmp_path)])
    steps.step(tmp_path / "data-bin", "an archive", fill)
    steps.run(multi30k.main)
    assert "Nothing to do" in capsys.readouterr().out
    (tmp_path / "data-bin" / "a b").unlink()
    with pytest.raises(SystemExit, match="^multi30k.sh: --archive is missing"):
        steps.run(multi30k.main)


@pytest.mark.parametrize("name", ["demo", "iwslt14", "iwslt17", "multi30k", "wikitext103"])
def test_a_colon_in_out_is_refused(name, tmp_path):
    sentence = refused(script(f"{name}.py", "--out", "a:b/c"), tmp_path)
    called = "demo.py" if name == "demo" else f"{name}.sh"
    assert sentence.startswith(f"{called}: --out '{tmp_path}/a:b/c' has a ':'")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    def main():
        import pyarrow  # noqa: F401

    with pytest.raises(SystemExit, match="no package pyarrow: run scripts/setup.sh"):
        steps.run(main)


@pytest.mark.parametrize("pairs", [0, 1, 22])
def test_too_few_pairs_for_validation_are_counted(pairs, tmp_path):
    rows = [row for row in training_pairs() if row[2]][:pairs] or [("", "", None)]
    archive = archives.Archive(pack(tmp_path / "own.tgz", layout(rows).items()), "", False)
    (out := tmp_path / "text").mkdir()
    said = f"too small: training pairs of a usable length are {pairs}, but 23 are needed"
    with pytest.raises(SystemExit, match=said):
        iwslt14.make_text(archive, "sentencepiece", out)


def test_another_tokenization_is_said(tmp_path, monkeypatch, capsys):
    tgz = pack(tmp_path / "own.tgz", layout().items())
    monkeypatch.setattr(iwslt14, "make_text", lambda *_: None)
    monkeypatch.setattr(iwslt14, "make_data_bin", lambda *_: None)
    words = ["iwslt14.py", "--archive", str(tgz), "--out", str(tmp_path), "--tokenization"]
    steps.step(tmp_path / "text", "", lambda folder: (folder / "codes").touch())
    for tokenization, said in (("moses-bpe", False), ("sentencepiece", True)):
        (tmp_path / "text" / "codes").touch()
        monkeypatch.setattr(sys, "argv", [*words, tokenization])
        steps.run(iwslt14.main)
        sentence = "The tokenization changes from moses-bpe to sentencepiece: "
        assert (sentence in capsys.readouterr().out) == said


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown_on_a_terminal_alone(terminal, tmp_path, monkeypatch):
    for split in steps.SPLITS:
        for language in iwslt.LANGUAGES:
            (tmp_path / f"{split}.{language}").write_text("some words and some more words\n")
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(iwslt, "mapped", lambda *_: [])
    iwslt.moses_bpe(None, tmp_path, 50)
    assert bool(stream.getvalue()) == terminal
    assert (tmp_path / "codes").read_text().startswith("#version")
