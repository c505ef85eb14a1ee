"""Data preparation keeps the lines of any text aligned, or refuses the file by name.

Random lines have control characters, Unicode line separators, markers of subword models, words
that look like fairseq's symbols, emoji and right-to-left text. Whole commands get one corpus with
all of them. `scripts/test.sh --all` draws a thousand texts for each function.
"""

import argparse
import itertools
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import bitext
import demo
import iwslt14
import pytest
import steps
import subwords
import wikitext103
from archives import Archive
from commands import BIN, PLUGIN, refused, run
from corpus import ENGLISH, GERMAN
from fairseq.data import Dictionary, indexed_dataset
from fairseq.file_chunker_utils import Chunker, find_offsets
from fairseq.tokenizer import tokenize_line
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_settings import the_same_draws
from prep_archives import layout, pack, xml
from prep_scripts import contents
from sacrebleu.metrics import BLEU
from train_commands import TRANSLATE

from multimax_fairseq.commands.stock import sentences
from multimax_fairseq.compat.text import SYMBOLS, check_files, count_lines
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import read_lines

pytestmark = pytest.mark.long

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
# The corpus has a line with each of them.
KINDS = {
    "carriage return": "a\rb",
    "form feed": "a\x0cb\x0bc",
    "information separators": "a\x1cb\x1dc\x1ed",
    "control characters": "a\x01\x07\x08\x1b[0m\x7fb",
    "next line": "a\x85b",
    "line and paragraph separator": "a\u2028b\u2029c",
    "no width": "a\u200bb\u200cc\u2060d\ufeffe",
    "spaces that do not break": "a\xa0b\u202fc\u3000d",
    "tabs": "\ta\t\tb\t",
    "white space alone": " \t\xa0 ",
    "nothing": "",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u202bab\u202c \u0645\u0631\u062d\u0628\u0627",
    "emoji": f"{FAMILY} \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "combining characters": "e\u0301 \u00e9 o\u0308\u0301\u0323 \u1112\u1161\u11ab",
    "marks of subwords": "\u2581a \u2581 a@@ b @@ @@c a@@b @-@",
    "words like symbols": "<unk> <Lua heritage> madeupword0000 <s>x x</s> x<pad> <mask>",
    "entities and tags": "&amp; &lt;b&gt; &#8217; &quot <b>x</i> <seg <talkid",
    "letters that case changes": "\u0130 \u1e9e \ufb01 \u01c5 \u2167 \u2460",
    "a long word": "w" * 3000,
    "a long line": "w " * 3000,
    "private and unassigned": "\ue000 \U0010ffff \ufffe \u0378",
}
REFUSED = {
    "not UTF-8": b"gr\xfc\xdfe",
    "cut within a letter": b"a \xe2\x80",
    "half of a pair": b"\xed\xa0\x80",
    "UTF-16": "\ufeffhier".encode("utf-16-le"),
    "UTF-16 without its mark": "hier".encode("utf-16-le"),
    "NUL": b"a\0b",
    "a symbol": b"vor </s> nach",
    "the symbol of padding": b"<pad>",
    "the symbol of a start": b"\t<s>\r",
}
LETTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\n\0")
LINE = st.lists(st.sampled_from([*KINDS.values()]) | st.text(LETTERS, max_size=6), max_size=4)
LINE = LINE.map(lambda parts: "".join(part[:300] for part in parts))
LINES = st.lists(LINE, max_size=12)
ENCODED = LINE.map(str.encode)
ANY_LINES = st.lists(ENCODED, min_size=1) | st.lists(
    ENCODED | st.sampled_from([*REFUSED.values()]), min_size=1
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sentencepiece model trained on text of all kinds."""
    folder = tmp_path_factory.mktemp("pieces")
    for split, language in itertools.product(steps.SPLITS, ("de", "en")):
        steps.write(folder / f"{split}.{language}", [*KINDS.values(), *GERMAN.split("\n")] * 2)
    subwords.sentencepieces(folder, ("de", "en"), 300)
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(str(folder / "sentencepiece.model"))


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    """Joint BPE merges of text of all kinds."""
    from subword_nmt.learn_bpe import learn_bpe

    file = tmp_path_factory.mktemp("codes") / "codes"
    text = [bitext.tokenize("de", bitext.spaced(x)) for x in [*KINDS.values(), *GERMAN.split("\n")]]
    with file.open("w", encoding="utf-8", newline="\n") as out:
        learn_bpe(text, out, 80)
    return file


# --- one function at a time: returns True if the text was refused --------------------------------


def fairseq_lines(file, workers):
    """Return the lines of a text as this number of fairseq-preprocess workers reads them."""
    offsets = find_offsets(str(file), workers)
    lines = []
    for start, end in itertools.pairwise(offsets):
        with Chunker(str(file), start, end) as part:
            lines += part
    return lines


def any_file(draw, folder):
    """The workers' lines together are the lines of the file, split at line feeds only."""
    file = folder / "text"
    ends = draw(st.sampled_from([["\n"], ["\r\n"], ["\n", "\r\n"]]))
    lines = [line + draw(st.sampled_from(ends)) for line in draw(LINES)] * draw(st.integers(1, 9))
    text = "".join(lines).lstrip("\ufeff")
    if draw(st.booleans()):
        text = text.removesuffix("\n")
    file.write_bytes(draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + text.encode())
    expected = re.findall(r"[^\n]*\n|[^\n]+", text)
    is_old = "\n" not in text and b"\r" in text.encode().rstrip()
    if is_old or SYMBOLS.intersection(text.split()):
        return refuses(lambda: count_lines(file), file)
    for workers in (1, 2, 3, 7):
        assert fairseq_lines(file, workers) in (expected, expected or [""])
    assert count_lines(file) in (len(expected), len(expected) or 1)  # 1: only a byte order mark


def any_bytes(draw, folder):
    """Bytes that are no UTF-8 text are refused with their line; all others are read."""
    file, lines = folder / "text", draw(ANY_LINES)
    file.write_bytes(b"\n".join(lines) + b"\n")
    wrong = [n for n, line in enumerate(b"\n".join(lines).split(b"\n"), 1) if not is_text(line)]
    if wrong:
        return refuses(lambda: count_lines(file), f"line {wrong[0]:,} of '{file}'")
    assert count_lines(file) == len(lines)


def is_text(line):
    try:
        words = line.decode("utf-8").split()
    except UnicodeDecodeError:
        return False
    return b"\0" not in line and SYMBOLS.isdisjoint(words)


def refuses(call, named):
    with pytest.raises((UsageError, SystemExit)) as refusal:
        call()
    sentence = str(refusal.value)
    assert str(named) in sentence and "\n" not in sentence
    return True


def pairs_of_files(draw, folder):
    """A source and a target of unequal length are refused in each split."""
    counts = [draw(st.integers(0, 3)) for _ in range(3) for _ in range(2)]
    if draw(st.booleans()):
        counts[1::2] = counts[::2]
    prefixes = [str(folder / split) for split in steps.SPLITS]
    names = [f"{prefix}.{language}" for prefix in prefixes for language in ("de", "en")]
    for name, count in zip(names, counts, strict=True):
        Path(name).write_text("word\n" * count)
    given = dict(zip(("trainpref", "validpref", "testpref"), prefixes, strict=True))
    args = argparse.Namespace(source_lang="de", target_lang="en", only_source=False, **given)
    unequal = [names[i] for i in (0, 2, 4) if counts[i] != counts[i + 1]]
    if unequal:
        return refuses(lambda: check_files(args), unequal[0])
    check_files(args)


def a_dictionary(draw, folder):
    """fairseq reads back the dictionary of any text, with the same words."""
    file, words = folder / "text", Dictionary()
    lines = [" ".join(w for w in line.split() if w not in SYMBOLS) for line in draw(LINES)]
    steps.write(file, lines)
    Dictionary.add_file_to_dictionary(str(file), words, tokenize_line, 1)
    words.finalize()
    words.save(str(folder / "dict.txt"))
    again = Dictionary.load(str(folder / "dict.txt"))
    assert again.symbols == words.symbols and again.indices == words.indices
    for line in lines:
        assert again.string(again.encode_line(line, add_if_not_exist=False)) == line


def a_wrong_dictionary(draw, folder):
    """A duplicate word, a missing count or invalid UTF-8 is refused with the file's name."""
    words = draw(st.lists(st.text("abc<\u2581", min_size=1), min_size=2, unique=True))
    rows = [f"{word} 1".encode() for word in words]
    wrong = {"twice": rows[0], "no count": b"word", "Latin-1": b"gr\xfcn 1", "own": b"</s> 1"}
    rows.insert(draw(st.integers(1, len(rows))), wrong[draw(st.sampled_from([*wrong]))])
    (folder / "dict.txt").write_bytes(b"\n".join(rows) + b"\n")
    return refuses(lambda: Dictionary.load(str(folder / "dict.txt")), folder / "dict.txt")


def text_of_an_archive(draw, folder):
    """Only a line feed ends a line, in memory and in the copy."""
    lines, file = draw(ANY_LINES), folder / "text"
    data = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + b"\n".join(lines)
    split = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    wrong = [number for number, line in enumerate(split, 1) if not is_decoded(line)]
    if wrong:
        refuses(lambda: steps.copy_text(data.splitlines(keepends=True), file, "it"), "it")
        return refuses(lambda: steps.decode(data, "it"), f"line {wrong[0]:,}")
    found = steps.decode(data, "it")
    assert found == [line.decode() for line in (split if split[-1] else split[:-1])]
    (folder / "data").write_bytes(data)
    file.unlink(missing_ok=True)
    with (folder / "data").open("rb") as opened:
        steps.copy_text(opened, file, "it")
    assert steps.read(file) == found


def is_decoded(line):
    return b"\0" not in line and is_text(line.replace(b"<", b" "))


def talks(draw, folder):
    """Segments of both languages stand side by side, each in a line; others are refused, but in the
    official archive."""
    sides = [], []
    is_good = draw(st.booleans())
    names, tags = [0] * 9 + [1], ["</seg>"] * 9 + ["</seg", "", '</seg><seg id="2">']
    for number in range(draw(st.integers(0, 6))):
        for side in sides:
            text = draw(LINE)
            name = number + (0 if is_good else draw(st.sampled_from(names)))
            tag = "</seg>" if is_good else draw(st.sampled_from(tags))
            side.append((name, text, tag))
            side.append((None, draw(st.sampled_from(["<doc>", "", "<url>x</url>", "</doc>"])), ""))
    files = {
        name: [t if n is None else f'<seg id="{n}"> {t} {tag}\r' for n, t, tag in side]
        for name, side in zip(("a.de", "a.en"), sides, strict=True)
    }

    def read(official=False):
        return bitext.aligned(files, [("a.de", "a.en")], bitext.xml_lines, "it", official)

    segments = [[row for row in side if row[0] is not None] for side in sides]
    whole = all(tag == "</seg>" and "</seg>" not in t for side in segments for _, t, tag in side)
    if not whole or [row[0] for row in segments[0]] != [row[0] for row in segments[1]]:
        read(official=True)  # official archives are not checked
        return refuses(read, "it")
    for found, side in zip(read(), segments, strict=True):
        assert found == [" ".join(text.replace("\u2019", "'").split()) for _, text, _ in side]


def tokens_and_merges(draw, folder, codes):
    """Each line stays one line, and the joined subwords are the tokens."""
    line = bitext.spaced(draw(LINE))
    for language in ("de", "en"):
        tokens = bitext.tokenize(language, line).lower()
        assert tokens == " ".join(tokens.split())
        assert bitext.segment(codes, tokens).replace("@@ ", "") == tokens


def pieces(draw, folder, model):
    """The joined pieces are the normalized line, and fairseq reads as many."""
    lines = draw(LINES)
    split = [" ".join(model.encode(line, out_type=str)) for line in lines]
    for line, parts in zip(lines, split, strict=True):
        joined = parts.replace(" ", "").replace("\u2581", " ").strip(" ")
        assert joined == model.normalize(line).replace("\u2581", " ").strip(" ")
    steps.write(folder / "pieces", split)
    assert len(fairseq_lines(folder / "pieces", 3)) == len(lines)


def demo_pairs(draw, folder):
    """The archive's pairs stay aligned in all splits; a row with other columns is refused."""
    rows = [[draw(LINE), draw(LINE), "author"] for _ in range(draw(st.integers(0, 8)))]
    text = "".join("\t".join(row) + "\n" for row in rows)
    archive = pack(folder / "a.tgz", [("nmt-0.0.6/data/spa.txt", text.encode())])
    if any("\t" in cell for row in rows for cell in row):
        return refuses(lambda: demo.read_translation(archive), archive)
    given_rows = {(es.strip(), en.strip()) for en, es, _ in rows} | {
        (es.strip(), en.removeprefix("\ufeff").strip()) for en, es, _ in rows[:1]
    }
    splits = demo.split_translation(demo.read_translation(archive))
    assert {(es, en) for pairs in splits.values() for es, en, _ in pairs} <= given_rows


def references(draw, folder):
    """The references are the lines of the raw text."""
    lines = draw(LINES)
    steps.write(folder / "test.reference.en", lines)
    assert read_lines(folder / "test.reference.en") == lines
    output = "".join(f"S-{i}\t{x}\nH-{i}\t-0.5\t{x}\n" for i, x in enumerate(lines))
    assert sentences(output, "H") == dict(enumerate(lines))


FUNCTIONS = {
    function.__name__: function
    for function in (
        *(any_file, any_bytes, pairs_of_files, a_dictionary, a_wrong_dictionary),
        *(text_of_an_archive, talks, tokens_and_merges, pieces, demo_pairs, references),
    )
}
REFUSING = {
    *("any_bytes", "pairs_of_files", "a_wrong_dictionary", "text_of_an_archive", "talks"),
    "demo_pairs",
}
GIVEN = {"tokens_and_merges": "codes", "pieces": "model"}


def tried(name, count, request, capsys):
    """Draw `count` texts, the same ones in each run."""
    done = []
    more = [request.getfixturevalue(GIVEN[name])] if name in GIVEN else []

    @the_same_draws(count)
    @given(st.data())
    def attempt(data):
        with tempfile.TemporaryDirectory() as folder:
            done.append(bool(FUNCTIONS[name](data.draw, Path(folder), *more)))

    attempt()
    with capsys.disabled():
        print(f" {name}: {len(done)} texts tried, {sum(done)} refused ", end="")
    assert len(done) >= count // 2
    # The draws must include both outcomes.
    assert all(done) == (name == "a_wrong_dictionary")
    assert any(done) or name not in REFUSING


@pytest.mark.parametrize("name", FUNCTIONS)
def test_data_prep_handles_random_text(name, request, capsys):
    tried(name, 25, request, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_data_prep_handles_a_thousand_random_texts(name, request, capsys):
    tried(name, 1000, request, capsys)


# --- a corpus with all kinds of lines ------------------------------------------------------------


def rows():
    """Return numbered pairs of every kind between pairs of plain text."""
    plain = list(zip(GERMAN.split("\n")[:-1], ENGLISH.split("\n")[:-1], strict=True))
    odd = [(f"{kind} Satz", f"{kind} phrase") for kind in KINDS.values()]
    return [(f"nr{i}x {de}", f"nr{i}x {en}") for i, (de, en) in enumerate([*odd, *plain] * 2)]


@pytest.fixture
def fast_python(monkeypatch):
    """Let scripts that start Python use the fork server."""
    monkeypatch.setattr(sys, "executable", str(BIN / "python"))


SKIP = "--skip-invalid-size-inputs-valid-test"
NUMBER = re.compile(r"nr\d+x")


def numbers(lines):
    return [NUMBER.search(line)[0] for line in lines]


def binarised(folder, split, language, names="de-en"):
    """Return the lines of a data-bin folder as words."""
    words = Dictionary.load(str(folder / f"dict.{language}.txt"))
    data = indexed_dataset.make_dataset(str(folder / f"{split}.{names}.{language}"), impl="mmap")
    return [words.string(sentence) for sentence in data]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Text with a byte order mark and two kinds of line ends, the data and the trained model."""
    folder = tmp_path_factory.mktemp("corpus")
    for side, language in enumerate(("de", "en")):
        lines = [row[side] for row in rows()]
        ends = itertools.cycle(["\r\n", "\n", "\r\n"])
        text = "".join(itertools.chain(*zip(lines, ends, strict=False))) * 6
        (folder / f"train.{language}").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"nr0x end")
        blank = "" if side else " \t"
        steps.write(folder / f"valid.{language}", [*lines, blank])
        short = [line for line in lines if len(line) < 1000]
        steps.write(folder / f"test.{language}", [*short, f"nr0x {blank}", blank])
    run(
        *(folder, "fairseq-preprocess", *PLUGIN, "--source-lang", "de", "--target-lang", "en"),
        *("--trainpref", "train", "--validpref", "valid", "--testpref", "test", "--destdir", "bin"),
        *("--joined-dictionary", "--workers", "3"),
    )
    steps.write(folder / "bin" / "test.reference.en", steps.read(folder / "test.en"))
    run(folder, "fairseq-train", "bin", *PLUGIN, *TRANSLATE, SKIP, "--save-dir", "model")
    return folder


def test_preprocess_keeps_source_and_target_aligned(corpus):
    for language in ("de", "en"):
        found, raw = (
            binarised(corpus / "bin", "train", language),
            steps.read(corpus / f"train.{language}"),
        )
        assert len(found) == len(raw) == 6 * len(rows()) + 1
        assert numbers(found) == numbers(raw)
        assert found == [" ".join(line.split()) for line in raw]
        test = binarised(corpus / "bin", "test", language)
        assert test == [" ".join(line.split()) for line in steps.read(corpus / f"test.{language}")]


def test_interactive_numbers_every_input_line(corpus):
    lines = [*steps.read(corpus / "valid.de"), "<pad> Satz", "</s> Satz", "Satz <s>"]
    (corpus / "input").write_bytes(b"\xef\xbb\xbf" + "".join(f"{x}\n" for x in lines).encode())
    command = ("fairseq-interactive", "bin", *PLUGIN, "--path", "model/checkpoint_last.pt")
    command += ("--source-lang", "de", "--target-lang", "en", "--max-len-b", "3", "--beam", "1")
    command += (
        "--buffer-size",
        "100",
        "--max-tokens",
        "4000",
        SKIP,
    )
    for from_file in (True, False):
        stdin = None if from_file else (corpus / "input").read_bytes().decode()
        output = run(corpus, *command, *["--input", "input"] * from_file, stdin=stdin)
        found = dict(re.findall(r"^S-(\d+)\t(.*)$", output, re.MULTILINE))
        known = Dictionary.load(str(corpus / "bin" / "dict.de.txt"))
        for number, line in enumerate(lines):
            words = [w if w in known and w not in SYMBOLS else "<unk>" for w in line.split()]
            if len(words) < 1000:  # longer lines are skipped
                assert found.pop(str(number)) == " ".join(words)
        assert not found


def test_evaluate_scores_against_raw_references(corpus):
    """BLEU equals the score of the log against the raw text; a too long line is an error."""
    command = ("multimax-evaluate", "model/checkpoint_last.pt", "bin")
    command += ("--beam", "1")
    run(corpus, *command, "--json", "result.json")
    result = json.loads((corpus / "result.json").read_text())
    references = steps.read(corpus / "test.en")
    log = (corpus / "model" / "checkpoint_last.test.log").read_bytes().decode()
    found = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", log, re.MULTILINE))
    ordered = [found[str(i)] for i in range(len(references))]
    assert result["value"] == BLEU().corpus_score(ordered, [references]).score
    assert f"{len(references)} sentences" in result["protocol"]
    assert "references: raw text" in result["protocol"]
    assert "positions: shorten it" in run(corpus, *command, "--subset", "valid", code=1)


@pytest.mark.parametrize("tokenization", ["moses-bpe", "sentencepiece"])
def test_iwslt14_keeps_talks_aligned(tokenization, tmp_path):
    members = layout(rows())
    for name, side in itertools.product(iwslt14.TESTS, (0, 1)):
        path = f"some-folder/IWSLT14.{name}.de-en.{('de', 'en')[side]}.xml"
        members[path] = b"\xef\xbb\xbf" + xml(row[side] for row in rows()).encode()
    archive = Archive(pack(tmp_path / "a.tgz", members.items()), "", official=False)
    made = []
    for name in ("once", "again"):
        (folder := tmp_path / name).mkdir()
        iwslt14.make_text(archive, tokenization, folder)
        made.append(contents(folder))
        for split in steps.SPLITS:
            sides = [steps.read(folder / f"{split}.{language}") for language in ("de", "en")]
            assert numbers(sides[0]) == numbers(sides[1]) and len(sides[0]) > 1
            if split != "train":
                assert numbers(steps.read(folder / f"{split}.reference.en")) == numbers(sides[1])
    assert made[0] == made[1]
    raw = [row[1].replace("\u2019", "'") for row in rows()] * len(iwslt14.TESTS)
    assert steps.read(tmp_path / "once" / "test.reference.en") == list(map(bitext.spaced, raw))


def test_wikitext103_keeps_every_line(tmp_path, fast_python):
    """In the layout of WikiText, the copy equals the text, and fairseq reads its lines."""
    (source := tmp_path / "source").mkdir()
    (text := tmp_path / "text").mkdir()
    lines = [line for row in rows() for line in row]
    for split in steps.SPLITS:
        (source / f"{split}.txt").write_bytes("\r\n".join(lines).encode())
    wikitext103.make_text(source, wikitext103.folder_archive(source)[1], text)
    assert steps.read(text / "wiki.train.tokens") == "\r\n".join(lines).split("\n")
    wikitext103.make_data_bin(text, False, tmp_path / "bin")
    words = Dictionary.load(str(tmp_path / "bin" / "dict.txt"))
    data = indexed_dataset.make_dataset(str(tmp_path / "bin" / "train"), impl="mmap")
    assert [words.string(x) for x in data] == [" ".join(line.split()) for line in lines]


def test_demo_keeps_translation_pairs_aligned(tmp_path, fast_python):
    given = [(en, de, "author") for de, en in rows() if "\t" not in de]
    more = [(f"nr{i}x plain {i}", f"nr{i}x klar {i}", "author") for i in range(1000, 1400)]
    text = "".join("\t".join(row) + "\n" for row in [*given, *more])
    archive = pack(tmp_path / "a.tgz", [("nmt-0.0.6/data/spa.txt", text.encode())])
    demo.prepare_translation(archive, tmp_path)
    for split in steps.SPLITS:
        sides = [steps.read(tmp_path / f"{split}.{language}") for language in ("es", "en")]
        assert numbers(sides[0]) == numbers(sides[1])
        for language, side in zip(("es", "en"), sides, strict=True):
            found = binarised(tmp_path / "data-bin", split, language, "es-en")
            assert len(found) == len(side)


def test_check_files_refuses_invalid_text(tmp_path, capsys):
    pair = {"source_lang": "de", "target_lang": "en", "validpref": None, "testpref": None}
    args = argparse.Namespace(only_source=False, trainpref=str(tmp_path / "train"), **pair)
    steps.write(tmp_path / "train.de", [*GERMAN.split("\n")[:-1], "Satz"])
    for line in REFUSED.values():
        (tmp_path / "train.en").write_bytes(ENGLISH.encode() + line)
        with pytest.raises(UsageError, match=f"line 25 of '{args.trainpref}.en' "):
            check_files(args)
    (tmp_path / "train.en").write_bytes(ENGLISH.encode() + REFUSED["UTF-16"])
    sentence = refused(
        *(tmp_path, "fairseq-preprocess", *PLUGIN, "--source-lang", "de", "--target-lang", "en"),
        *("--trainpref", "train", "--destdir", "bin"),
    )
    assert sentence.startswith("line 25 of 'train.en' is not UTF-8 (byte 0xff)")
    assert not (tmp_path / "bin").exists()
    with capsys.disabled():
        print(f" {len(REFUSED)} kinds of files refused ", end="")


def test_preprocess_and_score_refuse_mismatched_files(tmp_path):
    (tmp_path / "three").write_text("a b c d e\nf g h i j\nk\n")
    (tmp_path / "two").write_text("a b c d e\nf g h i j\n")
    (tmp_path / "old.de").write_bytes(b"a\rb\rc")
    (tmp_path / "old.en").write_bytes(b"a\nb\nc")
    pair = ("--source-lang", "de", "--target-lang", "en", "--destdir", "bin", "--trainpref")
    said = refused(tmp_path, "fairseq-preprocess", *PLUGIN, *pair, "old")
    assert said.startswith("'old.de' has carriage returns and no line feed")
    for option in ([], ["--sacrebleu"], ["--sentence-bleu"]):
        said = refused(tmp_path, "fairseq-score", "--sys", "two", "--ref", "three", *option)
        assert said.startswith("--sys two has 2 lines, but --ref three 3:")
    score = ("fairseq-score", "--ref", "two")
    output = run(tmp_path, *score, stdin=(tmp_path / "two").read_text())
    assert "BLEU4 = 100.00" in output
    assert "-" in run(tmp_path, *score, stdin="a b c d e\n", code=1)


def test_train_refuses_inconsistent_binarized_data(corpus, tmp_path):
    """Data that stock fairseq-preprocess accepts is reported when it is read."""
    train = ("fairseq-train", "bin", *PLUGIN, *TRANSLATE, "--save-dir", tmp_path / "model")
    for name in ("unequal", "empty", "again"):
        shutil.copytree(corpus / "bin", tmp_path / name / "bin")
    for file in ("bin", "idx"):
        path = f"bin/train.de-en.de.{file}"
        shutil.copyfile(corpus / path.replace("train", "test"), tmp_path / "unequal" / path)
    assert "different numbers of lines" in refused(tmp_path / "unequal", *train)
    data, index = (tmp_path / f"empty/bin/valid.de-en.de.{file}" for file in ("bin", "idx"))
    indexed_dataset.MMapIndexedDatasetBuilder(data).finalize(index)
    assert "has no line" in refused(tmp_path / "empty", *train)
    said = refused(tmp_path / "again", *train, "--max-tokens", "20", "--max-tokens-valid", "20")
    assert "positions: shorten it" in said or "--max-tokens" in said
    preprocess = ("fairseq-preprocess", *PLUGIN, "--source-lang", "de", "--target-lang", "en")
    (tmp_path / "again" / "x.de").write_text("a\n")
    (tmp_path / "again" / "x.en").write_text("a\n")
    said = refused(tmp_path / "again", *preprocess, "--trainpref", "x", "--destdir", "bin")
    assert said.startswith("'bin/dict.de.txt' exists already")
