"""data-prep/ end to end, on small archives in the official layouts."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import zipfile

import archives
import iwslt14
import pyarrow
import pyarrow.parquet
import pytest
import steps
import wikitext103
from bitext import tokenize
from commands import BIN
from corpus import ENGLISH, GERMAN
from iwslt14 import LANGUAGES
from prep_archives import ENTITIES, evaluation_pairs, layout, natural, pack, training_pairs
from prep_scripts import PREP, contents, files_up_to, kill_at, refused, run, script, stamps
from sacremoses import MosesDetokenizer, MosesTokenizer

pytestmark = pytest.mark.long

# --- IWSLT14 -----------------------------------------------------------------------------------


def expected_pairs():
    """Return raw and prepared pairs by an independent implementation."""
    tokenizers = [MosesTokenizer(language) for language in LANGUAGES]

    def tokens(pair):
        words = [t.tokenize(x) for t, x in zip(tokenizers, pair, strict=True)]
        for side in words:  # a full stop at the end of the line stands alone
            if len(side[-1]) > 1 and side[-1][-1] == "." != side[-1][-2]:
                side[-1:] = [side[-1][:-1], "."]
        return tuple(map(" ".join, words))

    splits = {"train": [], "valid": [], "test": []}
    number = 0
    for _, _, text in training_pairs():
        if text is None:
            continue
        moses = tokens(text)
        german, english = (len(side.split(" ")) for side in moses)
        if german > 1.5 * english or english > 1.5 * german or max(german, english) > 175:
            continue
        number += 1
        splits["train" if number % 23 else "valid"].append((text, moses))
    for _, pairs in evaluation_pairs():
        for pair in pairs:
            text = tuple(side.replace("’", "'") for side in pair)
            splits["test"].append((text, tokens(text)))
    return splits


@pytest.fixture(scope="module")
def tgz(tmp_path_factory):
    folder = tmp_path_factory.mktemp("iwslt14")
    return pack(folder / "own.tgz", layout().items())


@pytest.fixture(scope="module")
def prepared(tgz):
    out = tgz.parent / "out"
    command = ["bash", PREP / "iwslt14.sh", "--archive", tgz.name, "--out", "out"]
    done = run(command, tgz.parent)
    return out, done.stdout


def test_iwslt14_prepares_the_expected_text(prepared):
    out, printed = prepared
    expected = expected_pairs()
    for split, pairs in expected.items():
        for side, language in enumerate(LANGUAGES):
            text = (out / "text" / f"{split}.{language}").read_bytes().decode()
            assert text == "".join(f"{moses[side].lower()}\n" for _, moses in pairs)
            subwords = (out / "text" / f"{split}.bpe.{language}").read_bytes().decode()
            assert subwords.replace("@@ ", "") == text
            assert subwords != text or split == "test"
        if split != "train":
            reference = (out / "data-bin" / f"{split}.reference.en").read_bytes().decode()
            assert reference == "".join(f"{raw[1]}\n" for raw, _ in pairs)
    counts = ", ".join(f"{len(pairs)} {split}" for split, pairs in expected.items())
    assert f"sentence pairs: {counts}\n" in printed
    assert "is not the official archive" in printed
    assert printed.endswith("Next: scripts/iwslt14.sh --data-bin out/data-bin\n")
    assert json.loads((out / "data-bin" / "evaluation.json").read_text()) == {
        "source": "de",
        "target": "en",
        "remove_bpe": "@@ ",
        "tokenizer": "moses",
        "lowercase": True,
    }
    dictionaries = [(out / "data-bin" / f"dict.{x}.txt").read_text() for x in LANGUAGES]
    assert dictionaries[0] != dictionaries[1]
    codes = (out / "text" / "codes").read_text()
    assert codes.startswith("#version") and codes.count("\n") > 100


def test_iwslt14_filters_pairs_by_length(prepared):
    kept = {
        language: "".join(
            (prepared[0] / "text" / f"{split}.{language}").read_bytes().decode()
            for split in ("train", "valid")
        ).split("\n")
        for language in LANGUAGES
    }
    for line in (
        *("die rechte", "mit crlf .", "drei worte hier", "eine zeile hier", "noch eine zeile"),
        *("rand ist weg", "a b c", "a b", "w" * 1000, "a " * 174 + "a"),
        "&lt; reviewer href = &quot; http : / / localhost / a &quot; &gt; erika muster"
        " &lt; / reviewer &gt;",
    ):
        assert line in kept["de"]
    for line in ("an empty side .", "before &lt; url &gt;", "a b c d", "b " * 175 + "b"):
        assert line not in kept["en"]
    assert not any(word in line for line in kept["en"] for word in ("talkid", "keywords"))


def test_iwslt14_skips_finished_folders(prepared, tgz):
    out, _ = prepared
    before = stamps(out)
    done = run(script("iwslt14.py", "--archive", tgz, "--out", out), tgz.parent)
    assert done.stdout.count("Nothing to do") == 2
    assert stamps(out) == before


def test_iwslt14_killed_midway_resumes_bitwise(prepared, tgz, tmp_path):
    """Holds for any number of workers."""
    out = tmp_path / "out"
    command = script("iwslt14.py", "--archive", tgz, "--out", out, cpus=2)
    for name in ("text.part", "text.part/train.de", "text.part/codes"):
        kill_at(out / name, command, tmp_path)
        assert not (out / "text").exists()
    kill_at(out / "text", command, tmp_path)
    text = stamps(out / "text")
    kill_at(out / "data-bin.part" / "dict.de.txt", command, tmp_path)
    assert not (out / "data-bin").exists()
    run(command, tmp_path)
    assert stamps(out / "text") == text
    for folder in ("text", "data-bin"):
        assert contents(out / folder) == contents(prepared[0] / folder)
    assert {f.name for f in out.iterdir()} == {".data-bin.lock", ".text.lock", "data-bin", "text"}


def test_iwslt14_remakes_for_another_tokenization(tgz, prepared, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(prepared[0], out)
    command = script("iwslt14.py", "--archive", tgz, "--out", out)
    run([*command, "--tokenization", "sentencepiece"], tmp_path)
    lines = {x: (out / "text" / f"train.{x}").read_bytes().decode() for x in LANGUAGES}
    assert "Alle sind gleich.\n" in lines["de"] and "All are equal.\n" in lines["en"]
    for language, text in lines.items():
        pieces = (out / "text" / f"train.sp.{language}").read_bytes().decode()
        assert pieces.count("\n") == text.count("\n")
        joined = pieces.replace(" ", "").replace("▁", " ").replace("\n ", "\n")
        assert joined.removeprefix(" ") == text
    dictionaries = [(out / "data-bin" / f"dict.{x}.txt").read_bytes() for x in LANGUAGES]
    assert dictionaries[0] == dictionaries[1]
    assert (out / "text" / "sentencepiece.model").exists()
    assert not (out / "text" / "codes").exists()
    reference = (out / "data-bin" / "valid.reference.en").read_bytes()
    assert reference == (out / "text" / "valid.en").read_bytes()
    evaluation = json.loads((out / "data-bin" / "evaluation.json").read_text())
    assert evaluation["remove_bpe"] == "sentencepiece"
    assert evaluation["tokenizer"] is None and evaluation["lowercase"] is False
    for file in contents(out).values():  # no path of the machine
        assert str(tmp_path).encode() not in file


def test_tokenize_inverts_detokenisation():
    for language, text in (("de", GERMAN), ("en", ENGLISH)):
        back = MosesDetokenizer(language)
        for line in [*natural(text), ENTITIES]:
            tokens = tokenize(language, line)
            assert tokenize(language, back.detokenize(tokens.split(" "))) == tokens
    entities = "&quot; Das ist &apos; s &quot; &amp; &lt; &gt; &#124; &#91; &#93; ."
    assert tokenize("de", ENTITIES).endswith(entities)
    assert tokenize("de", "") == ""


def test_tokenize_splits_the_last_full_stop_as_moses_does():
    for language, line, tokens in (
        ("en", "in the U.S. or the U.S.", "in the U.S. or the U.S ."),
        ("en", "Mr. Smith, No. 5", "Mr. Smith , No. 5"),
        ("en", "He said ...", "He said ..."),
        ("en", "He said... ", "He said ..."),
        ("de", "am 20. Mai, z.B. am 20.", "am 20. Mai , z.B. am 20 ."),
        ("de", ".", "."),
    ):
        assert tokenize(language, line) == tokens


def changed(name, change):
    members = layout()
    (path,) = [path for path in members if path.endswith(f"/{name}")]
    members[path] = change(members[path])
    return members


def without(name):
    return {path: data for path, data in layout().items() if not path.endswith(f"/{name}")}


TRAIN_DE, TRAIN_EN = (f"train.tags.de-en.{language}" for language in LANGUAGES)
XML = "IWSLT14.TEDX.dev2012.de-en.en.xml"
TRAINING = sum(  # pairs that the recipe keeps before cleaning
    not any(tag in row[0] for tag in ("<url>", "<talkid>", "<keywords>"))
    for row in training_pairs()
)


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (without(XML), f"no files {XML}"),
        ({**layout(), f"other/{TRAIN_DE}": b""}, f"2 files {TRAIN_DE}"),
        (
            changed(TRAIN_EN, lambda data: data + b"\nmore"),
            f"{TRAIN_DE} has {TRAINING} sentences, {TRAIN_EN} {TRAINING + 1};",
        ),
        (changed(XML, lambda data: data + b'<seg id="9">x</seg>'), f"{XML} "),
        (
            changed(TRAIN_DE, lambda data: b"\n\n" + data + b"\xff"),
            f"{TRAIN_DE} in .* in line {len(training_pairs()) + 2}:",
        ),
        (changed(XML, lambda data: data[:45] + b"\xe2\x80"), f"{XML} in .* in line 3:"),
        (
            {path: b"\n" if "train" in path else data for path, data in layout().items()},
            "too small: training pairs of a usable length are 0, but 23",
        ),
    ],
)
def test_iwslt14_refuses_wrong_contents(members, said, tmp_path):
    archive = archives.Archive(pack(tmp_path / "own.tgz", members.items()), "", official=False)
    with pytest.raises(SystemExit, match=said):
        iwslt14.make_text(archive, "sentencepiece", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["own.tgz"]


def test_iwslt14_refuses_wrong_official_counts(tgz, tmp_path):
    archive = archives.Archive(tgz, "", official=True)
    with pytest.raises(SystemExit, match="train has .* pairs, but 160,239 are expected"):
        iwslt14.make_text(archive, "moses-bpe", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def nearly_official(tmp_path_factory):
    """An archive of 10,000 training pairs; the filter removes 3."""
    rows = [("Nein, danke.", "No, thanks.", None)] * 10_451
    rows[5_000:5_000] = [("a b c d e", "a b c", None)] * 3
    return pack(tmp_path_factory.mktemp("nearly") / "de-en.tgz", layout(rows).items())


def prepare_official(archive, pairs, out, monkeypatch):
    """Run iwslt14.py as if the archive's checksum were official."""
    own = iwslt14.Official("de-en.tgz", (), f"md5={archives.digest(archive, 'md5')}")
    monkeypatch.setattr(iwslt14, "OFFICIAL", own)
    monkeypatch.setattr(iwslt14, "PAIRS", pairs)
    monkeypatch.setattr(sys, "argv", ["iwslt14.py", "--archive", str(archive), "--out", str(out)])
    monkeypatch.setattr(sys, "executable", str(BIN / "python"))
    steps.run(iwslt14.main)


def test_iwslt14_records_slightly_different_counts(nearly_official, tmp_path, monkeypatch, capsys):
    pairs = {"train": 10_000, "valid": 454, "test": 13}
    prepare_official(nearly_official, pairs, tmp_path, monkeypatch)
    printed = capsys.readouterr()
    (warning,) = [line for line in printed.err.splitlines() if "warning:" in line]
    assert warning.startswith(
        "iwslt14.sh: warning: train has 9,997 sentence pairs, but 10,000 are expected;"
    )
    assert "9,997 train, 454 valid" in printed.out
    assert (tmp_path / "text" / "train.de").read_bytes().count(b"\n") == 9_997
    evaluation = json.loads((tmp_path / "data-bin" / "evaluation.json").read_text())
    assert evaluation["differing_counts"] == {"train": {"expected": 10_000, "found": 9_997}}


@pytest.mark.parametrize(("split", "expected"), [("train", 10_201), ("test", 14)])
def test_iwslt14_refuses_very_different_counts(
    split, expected, nearly_official, tmp_path, monkeypatch
):
    """2% of the training pairs; one test pair, since test pairs are not filtered."""
    pairs = {"train": 10_000, "valid": 454, "test": 13, split: expected}
    with pytest.raises(SystemExit) as refusal:
        prepare_official(nearly_official, pairs, tmp_path, monkeypatch)
    (sentence,) = str(refusal.value).splitlines()
    found = {"train": "9,997", "test": "13"}[split]
    assert f"{split} has {found} sentence pairs, but {expected:,} are expected" in sentence
    assert "scripts/requirements.txt" in sentence
    assert [file.name for file in tmp_path.iterdir()] == [".text.lock"]


def test_differing_counts_judges_the_relative_difference(capsys):
    def differing(found, tokenized=("train",)):
        counts = {"train": found, "test": 5}
        return archives.differing_counts(
            "pairs", {"train": 1000, "test": 5}, counts, "mend it", tokenized
        )

    assert differing(1000) == {} and not capsys.readouterr().err
    for found in (996, 1004):
        assert differing(found) == {"train": {"expected": 1000, "found": found}}
        with pytest.raises(SystemExit, match=f"train has {found:,} pairs, but 1,000 .*: mend it."):
            differing(found, tokenized=())
    for found in (995, 1005, 0):
        with pytest.raises(SystemExit, match=f"train has {found:,} pairs, but 1,000"):
            differing(found)


# --- archives ----------------------------------------------------------------------------------


def special(name, kind):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    "member",
    [
        "../outside",
        "a/../../outside",
        "/outside",
        special("link", tarfile.SYMTYPE),
        special("link", tarfile.LNKTYPE),
        special("device", tarfile.CHRTYPE),
    ],
)
def test_read_tar_refuses_unsafe_members(member, tmp_path):
    archive = pack(tmp_path / "a.tgz", [("folder/good", b"x"), (member, b"")])
    with pytest.raises(SystemExit, match="nothing was unpacked"):
        archives.read_tar(archive, ["good"])


def test_zip_members_refuses_unsafe_members(tmp_path):
    link = zipfile.ZipInfo("wiki.train.tokens")
    link.external_attr = 0o120777 << 16
    for number, member in enumerate((link, "../outside", "/outside", "a\\..\\outside")):
        with zipfile.ZipFile(tmp_path / f"{number}.zip", "w") as file:
            file.writestr(member, "x")
        with (
            zipfile.ZipFile(tmp_path / f"{number}.zip") as file,
            pytest.raises(SystemExit, match="nothing was unpacked"),
        ):
            archives.zip_members(tmp_path / "archive.zip", file)


def test_scripts_refuse_damaged_archives(tgz, tmp_path):
    data = tgz.read_bytes()
    unsafe = pack(tmp_path / "unsafe.tgz", [*layout().items(), ("../outside", b"x")])
    broken = bytearray(data)
    broken[-6] ^= 1  # in the checksum of gzip
    for name, wrong, said in (
        ("cut.tgz", data[: len(data) // 2], "is truncated or corrupt"),
        ("end.tgz", data[:-9], "is truncated or corrupt"),
        ("broken.tgz", broken, "is truncated or corrupt"),
        ("text.tgz", b"no archive", "is truncated or corrupt"),
        ("unsafe.tgz", unsafe.read_bytes(), "nothing was unpacked"),
    ):
        (tmp_path / name).write_bytes(wrong)
        command = script("iwslt14.py", "--archive", name, "--out", "out")
        assert said in refused(command, tmp_path)
        assert not (tmp_path / "out" / "text").exists() and not (tmp_path / "outside").exists()


def test_obtain_checks_the_checksum_of_a_file(tgz, tmp_path):
    for stated, said in (
        ("sha256=" + "0" * 64, "has the SHA-256"),
        ("md5=" + "0" * 32, "has the MD5"),
        ("md5=12", "'12' is not the MD5"),
    ):
        command = script("iwslt14.py", "--archive", f"{tgz}#{stated}", "--out", "out")
        assert said in refused(command, tmp_path)
    assert "does not exist" in refused(script("iwslt14.py", "--archive", "nowhere"), tmp_path)
    assert "few" in refused(script("iwslt14.py", "--tokenization", "few"), tmp_path)
    assert not list(tmp_path.iterdir())

    found = archives.obtain(iwslt14.OFFICIAL, f"{tgz}#md5={archives.digest(tgz, 'md5')}", tmp_path)
    assert found == (tgz, hashlib.sha256(tgz.read_bytes()).hexdigest(), False)
    own = archives.Official("a", (), f"sha256={found.identity}")
    assert archives.obtain(own, str(tgz), tmp_path).official


def test_scripts_refuse_to_overwrite_other_folders(tgz, tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "letter").write_text("mine")
    assert "was not made by this script" in refused(
        script("iwslt14.py", "--archive", tgz, "--out", tmp_path), tmp_path
    )
    assert (tmp_path / "text" / "letter").read_text() == "mine"


def test_step_waits_for_another_run(tmp_path):
    code = f"import sys; sys.path[0] = {str(PREP)!r}; import steps, pathlib\n"
    code += f"with steps.alone(pathlib.Path({str(tmp_path / 'made')!r})): print('alone')"
    with steps.alone(tmp_path / "made"):
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline().startswith("Waiting for another run")
        assert other.poll() is None
    assert other.communicate()[0] == "alone\n" and other.returncode == 0


@pytest.mark.parametrize(("size", "step"), [(2000, "text"), (1500, "data-bin")])
def test_iwslt14_reports_a_full_disk(size, step, tgz, prepared, tmp_path):
    out = tmp_path / "out"
    if step == "data-bin":
        shutil.copytree(prepared[0] / "text", out / "text")
    command = script("iwslt14.py", "--archive", tgz, "--out", out)
    assert "File too large" in refused(command, tmp_path, **files_up_to(size, tmp_path))
    assert not (out / step).exists()


# --- WikiText-103 ------------------------------------------------------------------------------


def wiki():
    texts = {}
    for split, times in (("train", 12), ("valid", 1), ("test", 2)):
        lines = [" ", " = Rights = ", " ", *natural(ENGLISH), "one\xa0word \u2028 <unk> @-@ x", ""]
        texts[split] = "".join(f"{line}\n" for line in lines * times)
    return texts


def make_zip(file, form):
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for split, text in wiki().items():
            archive.writestr(f"wikitext-103/{form.format(split)}", text)
    return file


def make_folder(folder, form):
    folder.mkdir()
    for split, text in wiki().items():
        (folder / form.format(split)).write_bytes(text.encode())
    return folder


def make_parquet(folder, ending, valid="validation"):
    folder.mkdir()
    names = {"train": "train-{}-of-2", "valid": f"{valid}-{{}}", "test": "test-{}"}
    for split, text in wiki().items():
        rows = [line + ending if line else line for line in text.split("\n")[:-1]]
        for number, part in enumerate((rows[:20], rows[20:])):
            table = pyarrow.table({"id": range(len(part)), "text": part})
            file = folder / f"{names[split].format(number)}.parquet"
            pyarrow.parquet.write_table(table, file, row_group_size=7)
    return folder


def test_wikitext103_prepares_the_expected_text(tmp_path):
    make_zip(tmp_path / "own.zip", "wiki.{}.tokens")
    out = tmp_path / "out"
    command = script("wikitext103.py", "--archive", "own.zip", "--out", "out", cpus=2)
    kill_at(out / "text", command, tmp_path)
    kill_at(out / "data-bin.part" / "dict.txt", command, tmp_path)
    assert not (out / "data-bin").exists()
    done = run(["bash", PREP / "wikitext103.sh", *command[-4:]], tmp_path)
    for split, text in wiki().items():
        assert (out / "text" / f"wiki.{split}.tokens").read_bytes() == text.encode()
    lines = {split: text.split("\n")[:-1] for split, text in wiki().items()}
    tokens = {split: sum(len(line.split()) + 1 for line in lines[split]) for split in lines}
    types = 4 + len({word for line in lines["train"] for word in line.split()} - {"<unk>"})
    types += -types % 8
    listed = ", ".join(f"{n:,} {split}" for split, n in tokens.items())
    assert f"  tokens: {listed}\n" in done.stdout
    listed = ", ".join(f"{len(part):,} {split}" for split, part in lines.items())
    assert f"  lines: {listed}\n  types: {types}\n" in done.stdout
    assert done.stdout.endswith("Next: scripts/wikitext103.sh --data-bin out/data-bin\n")
    assert "is not the official archive" in done.stdout
    before = stamps(out)
    assert run(command, tmp_path).stdout.count("Nothing to do") == 2
    assert stamps(out) == before


def test_wikitext103_reads_all_formats(tmp_path):
    sources = [
        make_folder(tmp_path / "tokens", "wiki.{}.tokens"),
        make_folder(tmp_path / "txt", "{}.txt"),
        make_folder(tmp_path / "wiki", "wiki.{}.txt"),
        make_parquet(tmp_path / "plain", ""),
        make_parquet(tmp_path / "feeds", "\n", valid="valid"),
    ]
    for number, folder in enumerate(sources):
        archive, source = wikitext103.folder_archive(folder)
        made = tmp_path / str(number)
        made.mkdir()
        wikitext103.make_text(archive.path, source, made)
        assert contents(made) == {
            f"wiki.{split}.tokens": text.encode() for split, text in wiki().items()
        }
    zipped = tmp_path / "parquet.zip"
    with zipfile.ZipFile(zipped, "w") as file:
        for path in (tmp_path / "plain").iterdir():
            file.write(path, f"deep/{path.name}")
    (made := tmp_path / "zipped").mkdir()
    with zipfile.ZipFile(zipped) as file:
        wikitext103.make_text(zipped, wikitext103.zip_source(zipped, file), made)
    assert (made / "wiki.train.tokens").read_bytes() == wiki()["train"].encode()


def test_wikitext103_refuses_wrong_official_counts(tmp_path, monkeypatch):
    text = make_folder(tmp_path / "text", "wiki.{}.tokens")
    monkeypatch.setitem(wikitext103.LINES, "train", wiki()["train"].count("\n"))
    monkeypatch.setattr(sys, "executable", str(BIN / "python"))
    with pytest.raises(SystemExit, match="but 103,227,021 are expected"):
        wikitext103.make_data_bin(text, False, tmp_path / "data-bin")


def test_wikitext103_refuses_wrong_contents(tmp_path):
    def end(given):
        return refused(script("wikitext103.py", "--archive", given, "--out", "out"), tmp_path)

    make_folder(tmp_path / "folder", "{}.txt")
    (tmp_path / "folder" / "test.txt").write_bytes(b"x\n\xff\n")
    assert "test.txt in folder is not UTF-8 in line 2" in end("folder")
    (tmp_path / "folder" / "test.txt").write_bytes(b"")
    assert "no text for test" in end("folder")
    (tmp_path / "folder" / "test.txt").unlink()
    assert "holds neither" in end("folder")
    assert "is a folder" in end("folder#md5=" + "0" * 32)

    make_parquet(tmp_path / "rows", "")
    cut = tmp_path / "rows" / "train-0-of-2.parquet"
    whole = cut.read_bytes()
    cut.unlink()
    assert "are not all parts of one text" in end("rows")
    cut.write_bytes(whole[:-20])
    assert "is truncated or corrupt" in end("rows")
    pyarrow.parquet.write_table(pyarrow.table({"words": ["x"]}), cut)
    assert "has no column `text`" in end("rows")

    data = make_zip(tmp_path / "own.zip", "wiki.{}.tokens").read_bytes()
    for damaged in (data[:-50], data[:200] + bytes([data[200] ^ 0xFF]) + data[201:]):
        (tmp_path / "own.zip").write_bytes(damaged)
        assert "is truncated or corrupt" in end("own.zip")
    assert not (tmp_path / "out" / "text").exists()
