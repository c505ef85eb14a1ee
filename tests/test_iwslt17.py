"""data-prep/iwslt17.sh end to end, on small archives in the official layout."""

import functools
import http.server
import json
import math
import sys
import threading

import archives
import bitext
import iwslt17
import pytest
import steps
from bitext import tokenize
from commands import BIN
from corpus import ENGLISH, GERMAN
from iwslt17 import LANGUAGES
from prep_archives import natural, pack, xml
from prep_scripts import PREP, contents, kill_at, refused, run, script, stamps

pytestmark = pytest.mark.long

TRANSCRIPTS, TEST_DE, TEST_EN = (each.name for each in iwslt17.OFFICIAL)
TRAIN_DE, TRAIN_EN = (f"train.tags.de-en.{language}" for language in LANGUAGES)


def training_pairs():
    """(German line, English line, is it text, is it used in training)."""
    plain = list(zip(natural(GERMAN), natural(ENGLISH), strict=True))
    rows = [
        (f"{de} Nummer {i}.", f"{en} Number {i}.", True, True) for i in "ab" for de, en in plain
    ]
    odd = [
        ('<doc docid="1">', '<doc docid="1">', False, False),
        ("<url>http://localhost/1</url>", "<url>http://localhost/1</url>", False, False),
        ("<talkid>1</talkid>", "<talkid>1</talkid>", False, False),
        (" <title>Die Rechte</title>", "<title>The rights</title>", False, False),
        ("<description>Alle.</description>", "<description>All.</description>", False, False),
        ("Drei < vier\r", "Three < four\r", True, True),
        ("a " * 62, "b", True, True),
        ("a " * 63, "b", True, False),
        ("a", "b " * 63, True, False),
        ("", "An empty side.", True, False),
        ("Eine leere Seite.", " \r", True, False),
    ]
    for i, row in enumerate(odd):
        rows.insert(3 * i, row)
    return rows


def evaluation_pairs(name):
    return [
        (f"{name} sagt ’s {i}.", f"{name} says it’s {i}.") for i in range(1 + int(name[-1]) % 3)
    ]


def layout():
    """{archive: {file: text}}"""
    transcripts, *tests = {}, {}, {}
    for side, language in enumerate(LANGUAGES):
        text = "".join(f"{row[side]}\n" for row in training_pairs())
        transcripts[f"train.tags.de-en.{language}"] = text
        for name in iwslt17.VALID:
            text = xml(pair[side] for pair in evaluation_pairs(name))
            transcripts[f"IWSLT17.TED.{name}.de-en.{language}.xml"] = text
        for name in iwslt17.TEST:
            text = xml(pair[side] for pair in evaluation_pairs(name))
            direction = ("de-en", "en-de")[side]
            tests[side][f"IWSLT17.TED.{name}.{direction}.{language}.xml"] = text
    return dict(zip((TRANSCRIPTS, TEST_DE, TEST_EN), (transcripts, *tests), strict=True))


def make(folder, made):
    for name, files in made.items():
        (folder / name).parent.mkdir(parents=True)
        pack(folder / name, [(f"a-folder/{file}", text.encode()) for file, text in files.items()])
    return folder


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    return make(tmp_path_factory.mktemp("iwslt17") / "archive", layout())


@pytest.fixture(scope="module")
def prepared(official):
    """The folder, and the output of the run that resumed a killed one."""
    words = ["--archive", f"{official.name}/", "--out", "out"]
    out = official.parent / "out"
    kill_at(out / "text.part" / "codes", script("iwslt17.py", *words, cpus=2), official.parent)
    assert not (out / "text").exists()
    return out, run(["bash", PREP / "iwslt17.sh", *words], official.parent).stdout


def expected():
    """{split: pairs of raw and prepared text}."""
    raw = {
        "train": [(row[0].strip(), row[1].strip()) for row in training_pairs() if row[2]],
        "valid": [pair for name in iwslt17.VALID for pair in evaluation_pairs(name)],
        "test": [pair for name in iwslt17.TEST for pair in evaluation_pairs(name)],
    }
    splits = {}
    for split, pairs in raw.items():
        if split != "train":
            pairs = [tuple(side.replace("’", "'") for side in pair) for pair in pairs]
        tokens = [tuple(map(tokenize, LANGUAGES, pair)) for pair in pairs]
        splits[split] = [(a, tuple(map(str.lower, b))) for a, b in zip(pairs, tokens, strict=True)]
    return splits


def test_iwslt17_prepares_the_expected_text(official, prepared):
    out, printed = prepared
    splits = expected()
    trained = [row[3] for row in training_pairs() if row[2]]
    for split, pairs in splits.items():
        for side, language in enumerate(LANGUAGES):
            lines = [tokens[side] for _, tokens in pairs]
            text = (out / "text" / f"{split}.{language}").read_bytes().decode()
            assert text == "".join(f"{line}\n" for line in lines)
            if split == "train":
                lines = [line for line, kept in zip(lines, trained, strict=True) if kept]
            subwords = (out / "text" / f"{split}.bpe.{language}").read_bytes().decode()
            assert subwords.replace("@@ ", "") == "".join(f"{line}\n" for line in lines)
        if split != "train":
            reference = (out / "data-bin" / f"{split}.reference.en").read_bytes().decode()
            assert reference == "".join(f"{raw[1]}\n" for raw, _ in pairs)
    counts = ", ".join(f"{len(pairs)} {split}" for split, pairs in splits.items())
    assert f"sentence pairs: {counts}\n" in printed
    assert f"1 to 62 subwords per side: {sum(trained)} of {len(trained)} train\n" in printed
    assert printed.count("is not the official archive") == 3
    assert printed.endswith("Next: scripts/iwslt17.sh --data-bin out/data-bin\n")
    assert json.loads((out / "data-bin" / "evaluation.json").read_text()) == {
        "source": "de",
        "target": "en",
        "remove_bpe": "@@ ",
        "tokenizer": "moses",
        "lowercase": True,
    }
    dictionaries = [(out / "data-bin" / f"dict.{x}.txt").read_text() for x in LANGUAGES]
    assert dictionaries[0] != dictionaries[1]
    before = stamps(out)
    again = run(script("iwslt17.py", "--archive", official, "--out", out), out.parent)
    assert again.stdout.count("Nothing to do") == 2
    assert stamps(out) == before


def test_iwslt17_downloads_three_archives(official, prepared, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "*")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=official)
    found = {split: len(pairs) for split, pairs in expected().items() if split != "test"}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        own = [
            each._replace(
                urls=(f"http://127.0.0.1:{server.server_port}/{each.name}",),
                checksum=f"md5={archives.digest(official / each.name, 'md5')}",
            )
            for each in iwslt17.OFFICIAL
        ]
        monkeypatch.setattr(iwslt17, "OFFICIAL", own)
        monkeypatch.setattr(iwslt17, "PAIRS", found)
        monkeypatch.setattr(sys, "argv", ["iwslt17.py", "--out", str(tmp_path)])
        monkeypatch.setattr(sys, "executable", str(BIN / "python"))
        steps.run(iwslt17.main)
        server.shutdown()
    assert "official" not in capsys.readouterr().out
    for name in layout():  # as --archive takes them
        assert (tmp_path / "archives" / name).read_bytes() == (official / name).read_bytes()
    for folder in ("text", "data-bin"):
        assert contents(tmp_path / folder) == contents(prepared[0] / folder)


def test_iwslt17_refuses_wrong_official_counts(official, tmp_path, monkeypatch):
    given = [archives.Archive(official / name, "", official=True) for name in layout()]
    found = {split: len(pairs) for split, pairs in expected().items() if split != "test"}
    for split, count in found.items():
        monkeypatch.setattr(iwslt17, "PAIRS", {**found, split: count + 1})
        with pytest.raises(
            SystemExit, match=f"{split} has {count} sentence pairs, but {count + 1}"
        ):
            iwslt17.make_text(given, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("archive", "file", "change", "said"),
    [
        (TRANSCRIPTS, TRAIN_EN, None, f"no files {TRAIN_EN}"),
        (TEST_EN, "IWSLT17.TED.tst2016.en-de.en.xml", None, "no files IWSLT17.TED.tst2016.en-de"),
        (TRANSCRIPTS, TRAIN_DE, "\nmore", f"{TRAIN_DE} has .* sentences, {TRAIN_EN} "),
        (
            TEST_EN,
            "IWSLT17.TED.tst2017.en-de.en.xml",
            '<seg id="9">x</seg>',
            "de-en.tgz and .*en-de.tgz is misaligned: .* has 2 sentences, .* 3; get it again",
        ),
    ],
)
def test_iwslt17_refuses_wrong_contents(archive, file, change, said, tmp_path):
    made = layout()
    text = made[archive].pop(file)
    if change:
        made[archive][file] = text + change
    folder = make(tmp_path / "archive", made)
    given = [archives.Archive(folder / name, "", official=False) for name in made]
    (out := tmp_path / "text").mkdir()
    with pytest.raises(SystemExit, match=said):
        iwslt17.make_text(given, out)
    assert not list(out.iterdir())


def test_keep_clean_refuses_an_empty_result(tmp_path):
    for language in LANGUAGES:
        (tmp_path / f"train.bpe.{language}").write_text("a " * 63 + "\n")
    with pytest.raises(SystemExit, match="no training pair has 1 to 62 subwords"):
        bitext.keep_clean(tmp_path, LANGUAGES, 62, math.inf)


def one_archive(file, sets, leave_out=()):
    texts = {
        f"train.tags.de-en.{x}": layout()[TRANSCRIPTS][f"train.tags.de-en.{x}"] for x in LANGUAGES
    }
    for name in sets:
        for side, language in enumerate(LANGUAGES):
            text = xml(pair[side] for pair in evaluation_pairs(name))
            texts[f"IWSLT17.TED.{name}.de-en.{language}.xml"] = text
    texts["README"] = "about"
    pack(file, [(f"de-en/{n}", t.encode()) for n, t in texts.items() if n not in leave_out])
    return [archives.Archive(file, "", official=False)]


def test_iwslt17_reads_a_single_archive(prepared, tmp_path):
    one_archive(file := tmp_path / "de-en.tgz", (*iwslt17.VALID, *iwslt17.TEST))
    run(script("iwslt17.py", "--archive", file, "--out", tmp_path / "out"), tmp_path)
    for folder in ("text", "data-bin"):
        found, expected = (contents(out / folder) for out in (tmp_path / "out", prepared[0]))
        for files in (found, expected):
            files.pop("prepared.sha256", None), files.pop("preprocess.log", None)
        assert found == expected


@pytest.mark.parametrize(
    "sets, valid, test",
    [
        (iwslt17.VALID, iwslt17.VALID[:-2], iwslt17.VALID[-2:]),
        (("dev2010", "tst2016"), ("dev2010",), ("tst2016",)),
        (("dev2010", "tst2010"), ("dev2010",), ("tst2010",)),
    ],
)
def test_read_one_takes_the_last_sets_as_test(sets, valid, test, tmp_path):
    pairs = iwslt17.read_pairs(one_archive(tmp_path / "de-en.tgz", sets))
    for split, names in (("valid", valid), ("test", test)):
        expected = [pair[1].replace("’", "'") for name in names for pair in evaluation_pairs(name)]
        assert pairs[split][1] == expected


@pytest.mark.parametrize(
    "sets, leave_out, said",
    [
        (("dev2010",), (), "has 1 sets IWSLT17.TED.SET"),
        ((), (), "has no sets IWSLT17.TED.SET"),
        (("dev2010", "tst2010"), (TRAIN_DE,), f"lacks the files {TRAIN_DE}:"),
    ],
)
def test_read_one_refuses_missing_files(sets, leave_out, said, tmp_path):
    with pytest.raises(SystemExit, match=said):
        iwslt17.read_pairs(one_archive(tmp_path / "de-en.tgz", sets, leave_out))


def test_iwslt17_refuses_a_missing_archive(tmp_path):
    sentence = refused(script("iwslt17.py", "--archive", "none.tgz", "--out", "out"), tmp_path)
    assert "--archive none.tgz does not exist: pass a file" in sentence
    command = script("iwslt17.py", "--archive", tmp_path, "--out", "out")
    assert f"--archive {tmp_path / TRANSCRIPTS} does not exist" in refused(command, tmp_path)
    assert not list(tmp_path.iterdir())
