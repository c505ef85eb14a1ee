"""Prepares IWSLT 2014 German-English as fairseq's published recipe does.

    data-prep/iwslt14.sh [--archive FILE] [--out DIR] [--tokenization moses-bpe|sentencepiece]

Downloads the archive, or takes it from --archive: a file or an address, followed by `#sha256=HEX`
or `#md5=HEX` if it is not the official one. The results:

    DIR/text      SPLIT.LANGUAGE, the text before subwords, and the subwords: SPLIT.bpe.LANGUAGE and
                  codes, or SPLIT.sp.LANGUAGE and sentencepiece.model
    DIR/data-bin  fairseq's binary form; for evaluation, the raw references (SPLIT.reference.en) and
                  evaluation.json: how to detokenise, and unexpected numbers of sentence pairs
    DIR/archives  downloads

moses-bpe: Moses tokens in lower case, 10,000 merges, one dictionary per language. sentencepiece:
raw text, 10,000 pieces, one joint dictionary. A finished folder is not made again; an interrupted
run resumes after the last finished folder.
"""

import re
import shlex
from pathlib import Path

import bitext
from archives import Archive, Official, obtain
from bitext import Sides
from steps import SPLITS, Options, check_free, fail, run, say, step
from subwords import sentencepieces

OFFICIAL = Official(
    "de-en.tgz",
    (
        "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
        "http://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
    ),
    "md5=10936dfdf616504ddbd844e91b94ef4a",
    19_982_877,
)
LANGUAGES = ("de", "en")
PAIRS = {"train": 160_239, "valid": 7_283, "test": 6_750}  # of the official archive
# The recipe filters training and validation pairs by their numbers of Moses tokens, and sacremoses
# differs from Moses in a few sentences. Test pairs are not filtered.
TOKENIZED = ("train", "valid")

TRAIN = "train.tags.de-en"
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
NOT_SPOKEN = ("<url>", "<talkid>", "<keywords>")
TAGS = re.compile(r"</?(?:title|description)>")

MAX_TOKENS = 175
VALID_EVERY = 23
MERGES = PIECES = 10_000

EVALUATION = {
    "moses-bpe": bitext.LOWER_MOSES_BPE,
    "sentencepiece": {"remove_bpe": "sentencepiece", "tokenizer": None, "lowercase": False},
}


# --- pairs -------------------------------------------------------------------------------------


def training_lines(lines: list[str]) -> list[str]:
    return [TAGS.sub("", line) for line in lines if not any(tag in line for tag in NOT_SPOKEN)]


def both(name: str) -> tuple[str, str]:
    """(German file, English file)."""
    return name.format("de"), name.format("en")


def read_pairs(archive: Archive) -> dict[str, Sides]:
    """The pairs for training (validation included) and for test."""
    train = [both(f"{TRAIN}.{{}}")]
    tests = [both(f"IWSLT14.{name}.de-en.{{}}.xml") for name in TESTS]
    files = bitext.read_files(archive.path, [file for pair in train + tests for file in pair])
    archive_is = archive.path, archive.official
    return {
        "train": bitext.aligned(files, train, training_lines, *archive_is),
        "test": bitext.aligned(files, tests, bitext.xml_lines, *archive_is),
    }


# --- the two steps -----------------------------------------------------------------------------


def make_text(archive: Archive, tokenization: str, folder: Path) -> None:
    raw = read_pairs(archive)
    with bitext.start_pool() as pool:
        tokens = raw
        if tokenization == "moses-bpe":
            tokens = {
                split: bitext.moses_tokens(pool, LANGUAGES, sides, split)
                for split, sides in raw.items()
            }
        clean = [
            i
            for i, pair in enumerate(zip(*tokens["train"], strict=True))
            if bitext.is_clean(*pair, MAX_TOKENS)
        ]
        if len(clean) < VALID_EVERY:
            fail(
                f"the archive is too small: training pairs of a usable length are {len(clean)}, but"
                f" {VALID_EVERY} are needed, as every {VALID_EVERY}rd is for validation."
            )
        chosen = {
            "train": [i for number, i in enumerate(clean, 1) if number % VALID_EVERY],
            "valid": clean[VALID_EVERY - 1 :: VALID_EVERY],
            "test": list(range(len(tokens["test"][0]))),
        }
        known = archive.official and tokenization == "moses-bpe"
        found = {split: len(chosen[split]) for split in SPLITS}
        bitext.check_counts(folder, found, PAIRS if known else {}, TOKENIZED)
        for split in SPLITS:
            source = "test" if split == "test" else "train"
            text, written = (
                tuple([side[i] for i in chosen[split]] for side in pairs[source])
                for pairs in (tokens, raw)
            )
            if EVALUATION[tokenization]["lowercase"]:
                text = tuple(list(map(str.lower, side)) for side in text)
            bitext.write_split(folder, split, LANGUAGES, text, written)
        if tokenization == "moses-bpe":
            bitext.joint_bpe(pool, folder, LANGUAGES, MERGES)
        else:
            sentencepieces(folder, LANGUAGES, PIECES)


def make_data_bin(text: Path, tokenization: str, folder: Path) -> None:
    evaluation = EVALUATION[tokenization]
    if tokenization == "moses-bpe":
        bitext.make_data_bin(text, folder, LANGUAGES, "bpe", evaluation)
    else:
        dictionary = ("--joined-dictionary", "--srcdict", text / "dict.txt")
        bitext.make_data_bin(text, folder, LANGUAGES, "sp", evaluation, *dictionary)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--archive", metavar="FILE", help="a file or an address")
    parser.add_out("iwslt14")
    parser.add_argument(
        "--tokenization", choices=EVALUATION, default="moses-bpe", help="default moses-bpe"
    )
    arguments = parser.parse_args()
    out, tokenization = arguments.out, arguments.tokenization

    check_free(out / "text", out / "data-bin")
    archive = obtain(OFFICIAL, arguments.archive, out / "archives")
    made_from = f"{archive.identity} {tokenization}"
    step(out / "text", made_from, lambda folder: make_text(archive, tokenization, folder))
    step(
        out / "data-bin",
        made_from,
        lambda folder: make_data_bin(out / "text", tokenization, folder),
    )
    say(f"Next: scripts/iwslt14.sh --data-bin {shlex.quote(str(out / 'data-bin'))}")


if __name__ == "__main__":
    run(main)
