#!/usr/bin/env python3
"""Prepares IWSLT 2014 German-English, pair by pair as fairseq's published recipe does.

    data-prep/iwslt14.sh [--archive FILE] [--out DIR] [--tokenization moses-bpe|sentencepiece]

Downloads the archive, or takes it from --archive: a file or an address, with its own checksum after
`#sha256=` or `#md5=` if it is not the official one. The results:

    DIR/text      SPLIT.LANGUAGE, the text before subwords, and the subwords: SPLIT.bpe.LANGUAGE and
                  codes, or SPLIT.sp.LANGUAGE and sentencepiece.model
    DIR/data-bin  fairseq's binary form; for evaluation, the references as they were written
                  (SPLIT.reference.en), and in evaluation.json what to undo in a translation and
                  where the numbers of sentence pairs are not those expected
    DIR/archives  what was downloaded

moses-bpe: Moses tokens in lower case, 10,000 merges, a dictionary a language. sentencepiece: the
raw text, 10,000 pieces, one dictionary. A second run does nothing again that is done, and an
interrupted one goes on from the last of the two folders that was complete.
"""

import argparse
import functools
import json
import multiprocessing
import multiprocessing.pool
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from archives import Archive, Official, differing_counts, obtain, read_tar
from steps import SPLITS, Options, decode, fail, read, run, say, step, write
from subwords import binarize, sentencepieces
from tqdm import tqdm

LANGUAGES = ("de", "en")
ROOT = Path(__file__).resolve().parent.parent
WORKERS = min(8, os.cpu_count() or 1)

OFFICIAL = Official(
    "de-en.tgz",
    (
        "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
        "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
    ),
    "md5=10936dfdf616504ddbd844e91b94ef4a",
    19_982_877,
)
PAIRS = {"train": 160_239, "valid": 7_283, "test": 6_750}  # of the official archive
# Which pairs are kept for training and validation depends on their numbers of tokens, and
# sacremoses is not Moses to the last token. All of the test pairs are kept, whatever their tokens.
TOKENIZED = ("train", "valid")
DIFFERING = "differing-counts.json"  # in the text folder, if there is anything to tell

TRAIN = "train.tags.de-en"
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
NOT_SPOKEN = ("<url>", "<talkid>", "<keywords>")
TAGS = re.compile(r"</?(?:title|description)>")
LAST_STOP = re.compile(r"([^\s.])\.$")
SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')

MOST_TOKENS, MOST_LETTERS, RATIO = 175, 1000, 1.5
VALID_EVERY = 23
MERGES = PIECES = 10_000

EVALUATION = {
    "moses-bpe": {"remove_bpe": "@@ ", "tokenizer": "moses", "lowercase": True},
    "sentencepiece": {"remove_bpe": "sentencepiece", "tokenizer": None, "lowercase": False},
}


# --- pairs -------------------------------------------------------------------------------------


def spaced(line: str) -> str:
    """With single spaces for whatever whitespace there is."""
    return " ".join(line.split())


def training_lines(lines: list[str]) -> list[str]:
    return [TAGS.sub("", line) for line in lines if not any(tag in line for tag in NOT_SPOKEN)]


def test_lines(lines: list[str]) -> list[str]:
    return [SEGMENT.sub("", line).replace("’", "'") for line in lines if "<seg id" in line]


def read_pairs(archive: Path) -> dict[str, tuple[list[str], list[str]]]:
    """The German and the English lines for training (valid included) and test."""
    names = {
        "train": [f"{TRAIN}.{{}}"],
        "test": [f"IWSLT14.{name}.de-en.{{}}.xml" for name in TESTS],
    }
    members = read_tar(
        archive, [name.format(x) for group in names.values() for name in group for x in LANGUAGES]
    )
    pairs = {}
    for split, extract in (("train", training_lines), ("test", test_lines)):
        german: list[str] = []
        english: list[str] = []
        for name in names[split]:
            sides = []
            for language in LANGUAGES:
                file = name.format(language)
                sides.append(extract(decode(members[file], f"{file} in {archive}")))
            if len(sides[0]) != len(sides[1]):
                fail(
                    f"{archive} is misaligned: {name.format('de')} has {len(sides[0]):,} sentences,"
                    f" {name.format('en')} {len(sides[1]):,}; get it again."
                )
            german += map(spaced, sides[0])
            english += map(spaced, sides[1])
        pairs[split] = (german, english)
    return pairs


def is_clean(german: str, english: str) -> bool:
    """What Moses' clean-corpus-n keeps, at a ratio of 1.5 and 1 to 175 tokens."""
    sides = german.split(), english.split()
    lengths = sorted(map(len, sides))
    return (
        0 < lengths[0]
        and lengths[1] <= MOST_TOKENS
        and lengths[1] / lengths[0] <= RATIO
        and all(len(word) <= MOST_LETTERS for side in sides for word in side)
    )


# --- tokens and subwords -----------------------------------------------------------------------


@functools.cache
def tokenizer(language: str):
    from sacremoses import MosesTokenizer

    return MosesTokenizer(language)


def tokenize(language: str, line: str) -> str:
    tokens = spaced(tokenizer(language).tokenize(line, return_str=True))
    # Moses splits the last full stop from whatever it follows; sacremoses leaves it at what could
    # be an abbreviation or an ordinal. It decides which pairs are clean, hence their number.
    return LAST_STOP.sub(r"\1 .", tokens)


@functools.cache
def merges(codes: Path):
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8", newline="\n") as file:
        return BPE(file, separator="@@")


def segment(codes: Path, line: str) -> str:
    return merges(codes).process_line(line)


def mapped(
    pool: multiprocessing.pool.Pool, function: Callable[[str], str], lines: list[str], what: str
) -> list[str]:
    results = pool.imap(function, lines, chunksize=500)
    return list(tqdm(results, total=len(lines), desc=what, unit=" lines", disable=None))


def start_pool() -> multiprocessing.pool.Pool:
    # Ctrl-C reaches the workers too; the one sentence about it is the main process's.
    return multiprocessing.Pool(WORKERS, signal.signal, (signal.SIGINT, signal.SIG_IGN))


def moses_bpe(pool: multiprocessing.pool.Pool, folder: Path) -> None:
    from subword_nmt.learn_bpe import learn_bpe

    text = {
        f"{split}.{{}}.{language}": read(folder / f"{split}.{language}")
        for split in SPLITS
        for language in LANGUAGES
    }
    codes = folder / "codes"
    with codes.open("w", encoding="utf-8", newline="\n") as file:
        try:
            learn_bpe(text["train.{}.de"] + text["train.{}.en"], file, MERGES)
        except ValueError:  # no word has two letters
            fail("the archive is too small: its text has nothing to merge into subwords.")
    for name, lines in text.items():
        subwords = mapped(pool, functools.partial(segment, codes), lines, name.format("bpe"))
        write(folder / name.format("bpe"), subwords)


# --- the two steps -----------------------------------------------------------------------------


def make_text(archive: Archive, tokenization: str, folder: Path) -> None:
    raw = read_pairs(archive.path)
    with start_pool() as pool:
        tokens = raw
        if tokenization == "moses-bpe":
            tokens = {
                split: tuple(
                    mapped(pool, functools.partial(tokenize, x), lines, f"tokens of {split}.{x}")
                    for x, lines in zip(LANGUAGES, sides, strict=True)
                )
                for split, sides in raw.items()
            }
        clean = [i for i, pair in enumerate(zip(*tokens["train"], strict=True)) if is_clean(*pair)]
        chosen = {
            "train": [i for number, i in enumerate(clean, 1) if number % VALID_EVERY],
            "valid": clean[VALID_EVERY - 1 :: VALID_EVERY],
            "test": list(range(len(tokens["test"][0]))),
        }
        differing = check_counts(
            {split: len(chosen[split]) for split in SPLITS},
            archive.official and tokenization == "moses-bpe",
        )
        if differing:
            (folder / DIFFERING).write_text(json.dumps(differing) + "\n")
        for split in SPLITS:
            source = "test" if split == "test" else "train"
            for side, language in enumerate(LANGUAGES):
                lines = [tokens[source][side][i] for i in chosen[split]]
                if EVALUATION[tokenization]["lowercase"]:
                    lines = list(map(str.lower, lines))
                write(folder / f"{split}.{language}", lines)
            if split != "train":
                write(folder / f"{split}.reference.en", [raw[source][1][i] for i in chosen[split]])
        if tokenization == "moses-bpe":
            moses_bpe(pool, folder)
        else:
            sentencepieces(folder, LANGUAGES, PIECES)


def check_counts(found: dict[str, int], official: bool) -> dict[str, dict[str, int]]:
    say("  sentence pairs: " + ", ".join(f"{n:,} {split}" for split, n in found.items()))
    if empty := [split for split, n in found.items() if not n]:
        fail(f"the archive is too small: no sentence pairs for {' and '.join(empty)}.")
    if not official:
        return {}
    remedy = "install the versions in scripts/requirements.txt; if they are installed, report this"
    return differing_counts("sentence pairs", PAIRS, found, remedy, TOKENIZED)


def make_data_bin(text: Path, tokenization: str, folder: Path) -> None:
    if tokenization == "moses-bpe":
        kind, dictionary = "bpe", ()
    else:
        kind, dictionary = "sp", ("--joined-dictionary", "--srcdict", text / "dict.txt")
    prefixes = [text / f"{split}.{kind}" for split in SPLITS]
    binarize(prefixes, folder, WORKERS, "--source-lang", "de", "--target-lang", "en", *dictionary)
    for split in ("valid", "test"):
        shutil.copyfile(text / f"{split}.reference.en", folder / f"{split}.reference.en")
    evaluation = {"source": "de", "target": "en", **EVALUATION[tokenization]}
    if (text / DIFFERING).exists():
        evaluation["differing_counts"] = json.loads((text / DIFFERING).read_text())
    (folder / "evaluation.json").write_text(json.dumps(evaluation) + "\n")


def main() -> None:
    parser = Options(
        prog="iwslt14.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--archive", metavar="FILE", help="a file or an address")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        default=ROOT / "data" / "iwslt14",
        help="default data/iwslt14 in the checkout",
    )
    parser.add_argument(
        "--tokenization", choices=EVALUATION, default="moses-bpe", help="default moses-bpe"
    )
    arguments = parser.parse_args()
    out, tokenization = arguments.out, arguments.tokenization

    archive = obtain(OFFICIAL, arguments.archive, out / "archives")
    made_from = f"{archive.identity} {tokenization}"
    step(out / "text", made_from, lambda folder: make_text(archive, tokenization, folder))
    step(
        out / "data-bin",
        made_from,
        lambda folder: make_data_bin(out / "text", tokenization, folder),
    )
    say(f"Next: scripts/iwslt14.sh --data-bin {out / 'data-bin'}")


if __name__ == "__main__":
    run(main)
