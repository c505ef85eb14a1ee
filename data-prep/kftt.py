"""Prepares the Kyoto Free Translation Task, Japanese-English, for Adaptively Sparse Transformers.

    data-prep/kftt.sh [--archive FILE] [--out DIR]

Downloads kftt-data-1.0.tar.gz from http://www.phontron.com/kftt/ (SHA-256 fcfcaa67...3282dc6d1638,
as others who use it report; size unknown), or takes it from --archive: a file or an address,
followed by `#sha256=HEX` or `#md5=HEX` if it is not the official one. Its licence is CC BY-SA 3.0.
The results:

    DIR/text      SPLIT.LANGUAGE, the task's own tokens; SPLIT.bpe.LANGUAGE, their subwords; codes,
                  the 32,000 joint merges
    DIR/data-bin  fairseq's binary form, one dictionary per language; for evaluation, the raw
                  references (SPLIT.reference.en) and evaluation.json
    DIR/archives  downloads

Training: the task's cleaned pairs of 1 to 40 words per side (kyoto-train.cln), some 330,000, where
the paper says 300K. A finished folder is not made again; an interrupted run resumes.
"""

import shlex
from pathlib import Path

import bitext
from archives import Archive, Official, obtain
from steps import SPLITS, Options, check_free, fail, run, say

OFFICIAL = Official(
    "kftt-data-1.0.tar.gz",
    ("http://www.phontron.com/kftt/download/kftt-data-1.0.tar.gz",),
    "sha256=fcfcaa670d6d59aa691b0e909c0d7c393852dd2fb1d6310fda9b3282dc6d1638",
)
LANGUAGES = ("ja", "en")
FILES = {"train": "kyoto-train.cln", "valid": "kyoto-dev", "test": "kyoto-test"}
PAIRS = {"valid": 1_166}
MERGES = 32_000


def make_text(archives: list[Archive], folder: Path) -> None:
    (archive,) = archives
    tokens = {split: [f"tok/{name}.{x}" for x in LANGUAGES] for split, name in FILES.items()}
    raw = {split: f"orig/{FILES[split]}.en" for split in ("valid", "test")}
    names = [name for pair in tokens.values() for name in pair] + list(raw.values())
    files = bitext.read_files(archive.path, names)
    sides = {
        split: bitext.aligned(files, [tuple(pair)], list, archive.path, archive.official)
        for split, pair in tokens.items()
    }
    counts = {split: len(sides[split][0]) for split in SPLITS}
    bitext.check_counts(folder, counts, PAIRS if archive.official else {}, ())
    for split in SPLITS:
        references = files[raw[split]] if split in raw else sides[split][1]
        if len(references) != counts[split]:
            fail(
                f"{archive.path} is misaligned: {raw[split]} has {len(references):,} sentences, "
                f"{tokens[split][1]} {counts[split]:,}; get it again."
            )
        bitext.write_split(folder, split, LANGUAGES, sides[split], (sides[split][0], references))
    with bitext.start_pool() as pool:
        bitext.joint_bpe(pool, folder, LANGUAGES, MERGES)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--archive", metavar="FILE", help="a file or an address")
    parser.add_out("kftt")
    arguments = parser.parse_args()
    out = arguments.out
    check_free(out / "text", out / "data-bin")
    archive = obtain(OFFICIAL, arguments.archive, out / "archives")
    bitext.prepare(out, [archive], LANGUAGES, make_text, bitext.MOSES_BPE)
    data = shlex.quote(str(out / "data-bin"))
    say(f"Next: scripts/adaptively_sparse.sh --data kftt --data-bin {data}")


if __name__ == "__main__":
    run(main)
