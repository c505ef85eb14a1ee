"""scripts/adaptively_sparse.sh from made archives to a table, and its data preparation."""

import io
import json
import tarfile
import zipfile

import bitext
import kftt
import pytest
import wmt14
import wmt16
from archives import Archive
from commands import ROOT, run
from corpus import ENGLISH, GERMAN

pytestmark = pytest.mark.long

TINY = "--{0}-layers 1 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 2"
TRAIN = "--lr 0.005 --warmup-updates 2 --log-interval 1 --num-workers 0"
PAIRS = [
    (f"{source} {n} .", f"{target} {n} .")
    for n in range(12)
    for source, target in zip(GERMAN.splitlines(), ENGLISH.splitlines(), strict=True)
]


def lines(pairs, side):
    return "".join(f"{pair[side]}\n" for pair in pairs)


def segments(pairs, side):
    found = (f'<seg id="{n}">{pair[side]}</seg>\n' for n, pair in enumerate(pairs, 1))
    return f"<refset>\n<doc>\n<p>\n{''.join(found)}</p>\n</doc>\n</refset>\n"


def tar(file, texts):
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as packed:
        for name, text in texts.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            packed.addfile(member, io.BytesIO(text.encode()))


def kftt_archive(folder):
    """Both tok/ and orig/ have each name; the raw text has other spaces."""
    texts = {}
    for name, pairs in (
        ("kyoto-train", PAIRS + [("zu lang " * 41, "too long " * 41)]),
        ("kyoto-train.cln", PAIRS),
        ("kyoto-dev", PAIRS[:5]),
        ("kyoto-test", PAIRS[5:12]),
    ):
        for side, language in enumerate(kftt.LANGUAGES):
            texts[f"kftt-data-1.0/data/tok/{name}.{language}"] = lines(pairs, side)
            raw = lines(pairs, side).replace(" .\n", ".\n")
            texts[f"kftt-data-1.0/data/orig/{name}.{language}"] = raw
    tar(folder / "kftt.tar.gz", texts)
    return folder / "kftt.tar.gz"


def wmt14_archives(folder):
    thirds = (PAIRS[:100], PAIRS[100:101], PAIRS[101:])
    for each, corpus, pairs in zip(wmt14.OFFICIAL, wmt14.CORPORA, thirds, strict=False):
        sides = {f"training/{corpus}.{x}": lines(pairs, s) for s, x in enumerate(("en", "de"))}
        tar(folder / each.name, sides | {f"training/{corpus}.fr": "another language\n"})
    tests = {f"test-full/{name}": segments(PAIRS[:7], s) for s, name in enumerate(wmt14.TEST)}
    tar(folder / wmt14.OFFICIAL[-1].name, tests)
    return folder


def wmt16_archives(folder):
    europarl, setimes, dev, test = (folder / each.name for each in wmt16.OFFICIAL)
    texts = {f"a/{name}": lines(PAIRS[:90], s) for s, name in enumerate(wmt16.EUROPARL)}
    tar(europarl, texts)
    with zipfile.ZipFile(setimes, "w") as packed:
        for side, name in enumerate(wmt16.SETIMES):
            packed.writestr(name, lines(PAIRS[90:], side))
    tar(dev, {f"dev/{name}": segments(PAIRS[:6], s) for s, name in enumerate(wmt16.VALID)})
    tar(test, {f"test/{name}": segments(PAIRS[6:15], s) for s, name in enumerate(wmt16.TEST)})
    return folder


# test_iwslt17.py has the fourth data set.
ARCHIVES = {"kftt": kftt_archive, "wmt16": wmt16_archives, "wmt14": wmt14_archives}
# (pairs in training after cleaning, in validation, in test)
COUNTS = {
    "kftt": (len(PAIRS), 5, 7),
    "wmt16": (len(PAIRS), 6, 9),
    "wmt14": (len(PAIRS) - len(PAIRS) // 100, len(PAIRS) // 100, 7),
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """The folder of an experiment on KFTT, and what the script printed."""
    folder = tmp_path_factory.mktemp("kftt")
    printed = run(
        folder,
        *(str(ROOT / "scripts" / "adaptively_sparse.sh"), "--data", "kftt"),
        *("--archive", kftt_archive(folder), "--data-bin", folder / "data" / "data-bin"),
        *("--out", folder / "out", "--rows", "alpha_entmax", "--max-update", "3", "--"),
        *TINY.format("encoder").split(),
        *TINY.format("decoder").split(),
        *TRAIN.split(),
    )
    return folder, printed


def test_adaptively_sparse_trains_and_writes_result_table(experiment):
    folder, printed = experiment

    (result,) = (json.loads(line) for line in (folder / "out" / "results.jsonl").open())

    assert result["experiment"] == "adaptively_sparse" and result["data_set"] == "kftt"
    assert result["row"] == "alpha_entmax" and result["updates"] == 3
    assert "case:mixed" in result["signature"]
    assert "raw text" in result["protocol"]
    assert f"alpha-entmax | {result['value']:.2f} |" in printed
    assert "- Data set: kftt\n" in printed


@pytest.mark.parametrize("name", ARCHIVES)
def test_data_prep_splits_the_archive_and_keeps_raw_references(experiment, tmp_path, name):
    folder = experiment[0] / "data"
    if name != "kftt":
        folder = tmp_path / "data"
        prepare = str(ROOT / "data-prep" / f"{name}.sh")
        run(tmp_path, prepare, "--archive", ARCHIVES[name](tmp_path), "--out", folder)
    target = {"wmt14": "de"}.get(name, "en")
    tests = {"kftt": slice(5, 12), "wmt14": slice(7)}
    raw = lines(PAIRS[tests.get(name, slice(6, 15))], 1)

    files = [folder / "text" / file for file in ("train.bpe.en", "valid.en", "test.en")]
    counts = tuple(len(file.read_text().splitlines()) for file in files)
    reference = (folder / "data-bin" / f"test.reference.{target}").read_text()
    evaluation = json.loads((folder / "data-bin" / "evaluation.json").read_text())

    assert counts == COUNTS[name]
    assert reference == (raw.replace(" .\n", ".\n") if name == "kftt" else raw)
    assert not evaluation["lowercase"]


def test_tokenize_news_normalizes_punctuation_and_splits_hyphens():
    line = "„Ein\u00ad so-genannter“ Fall – 3\u200b%"

    tokens = bitext.tokenize_news("de", line)

    assert "@-@" in tokens and "„" not in tokens and "\u200b" not in tokens


@pytest.mark.parametrize("module", [kftt, wmt14, wmt16])
def test_make_text_refuses_wrong_official_counts(module, tmp_path):
    name = module.__name__
    given = ARCHIVES[name](tmp_path)
    paths = [given] if given.is_file() else [given / each.name for each in module.OFFICIAL]
    (folder := tmp_path / "text").mkdir()

    with pytest.raises(SystemExit, match="sentence pairs, but .* are expected"):
        module.make_text([Archive(path, "", official=True) for path in paths], folder)
