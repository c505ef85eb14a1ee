"""Prepares Multi30k German-English as docs/your-data.md does: raw text, 6,000 joint pieces.

    data-prep/multi30k.sh --archive DIR [--out DIR]

--archive is the folder data/task1/raw of https://github.com/multi30k/dataset: train, val and
test_2016_flickr in both languages, as train.de or train.de.gz. The results:

    DIR/text      SPLIT.LANGUAGE, their pieces SPLIT.sp.LANGUAGE, and sentencepiece.model
    DIR/data-bin  fairseq's binary form; for evaluation, the raw references

A finished folder is not made again; an interrupted run resumes.
"""

import gzip
import hashlib
import shlex
import shutil
from pathlib import Path

from archives import readable
from steps import MARK, SPLITS, Options, check_free, decode, fail, lacking, run, say, step, write
from subwords import binarize, sentencepieces

LANGUAGES = ("de", "en")
NAMES = {"train": "train", "valid": "val", "test": "test_2016_flickr"}
PAIRS = {"train": 29_000, "valid": 1_014, "test": 1_000}
PIECES = 6000


def read(archive: Path, split: str, language: str) -> bytes:
    """The bytes of one text, decompressed."""
    name = f"{NAMES[split]}.{language}"
    for file, opened in ((archive / name, open), (archive / f"{name}.gz", gzip.open)):
        if file.is_file():
            with readable(file), opened(file, "rb") as text:
                return text.read()
    fail(f"'{archive}' has no {name}, nor {name}.gz: pass Multi30k's folder data/task1/raw.")


def make_text(texts: dict[tuple[str, str], bytes], folder: Path) -> None:
    for split in SPLITS:
        sides = [decode(texts[split, language], f"{split}.{language}") for language in LANGUAGES]
        if len(sides[0]) != len(sides[1]) or len(sides[0]) != PAIRS[split]:
            found = " and ".join(f"{len(side):,}" for side in sides)
            fail(f"{NAMES[split]} has {found} lines, not {PAIRS[split]:,}: get it again.")
        for language, side in zip(LANGUAGES, sides, strict=True):
            write(folder / f"{split}.{language}", side)
    sentencepieces(folder, LANGUAGES, PIECES, "unigram")


def make_data_bin(text: Path, folder: Path) -> None:
    prefixes = [text / f"{split}.sp" for split in SPLITS]
    binarize(
        prefixes, folder, 2, "--source-lang", "de", "--target-lang", "en", "--joined-dictionary"
    )
    for split in ("valid", "test"):
        shutil.copyfile(text / f"{split}.en", folder / f"{split}.reference.en")


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--archive", type=Path, metavar="DIR", help="needed by the first run")
    parser.add_out("multi30k")
    arguments = parser.parse_args()
    out = arguments.out
    check_free(out / "text", out / "data-bin")
    if arguments.archive is None:
        if not (out / "data-bin" / MARK).is_file() or lacking(out / "data-bin"):
            fail("--archive is missing: pass Multi30k's folder data/task1/raw; see --help.")
        say(f"Nothing to do: {out / 'data-bin'} is prepared.")
        return
    texts = {(s, lang): read(arguments.archive, s, lang) for s in SPLITS for lang in LANGUAGES}
    made_from = hashlib.sha256(b"".join(texts.values())).hexdigest()
    step(out / "text", made_from, lambda folder: make_text(texts, folder))
    step(out / "data-bin", made_from, lambda folder: make_data_bin(out / "text", folder))
    say(f"Next: scripts/multi30k.sh --data-bin {shlex.quote(str(out / 'data-bin'))}")


if __name__ == "__main__":
    run(main)
