"""Prepares WMT 2014 English-German for Adaptively Sparse Transformers, as fairseq's recipe does.

    data-prep/wmt14.sh [--archive FOLDER] [--out DIR]

Downloads four archives, or takes them from --archive: a folder or an address with

    training-parallel-europarl-v7.tgz    from http://statmt.org/wmt13/    657,632,379 bytes
    training-parallel-commoncrawl.tgz    from http://statmt.org/wmt13/    918,311,367 bytes
    training-parallel-nc-v9.tgz          from http://statmt.org/wmt14/     80,418,416 bytes
    test-full.tgz                        from http://statmt.org/wmt14/      3,255,445 bytes

(checksums unknown). The results:

    DIR/text      SPLIT.LANGUAGE, Moses tokens; SPLIT.bpe.LANGUAGE, their subwords; codes, the
                  32,000 joint merges
    DIR/data-bin  fairseq's binary form, one dictionary per language; for evaluation, the raw
                  references (SPLIT.reference.de) and evaluation.json
    DIR/archives  downloads

Training: 4,520,620 pairs, less every 100th, which is for validation, and less those of more than
250 subwords or of a ratio above 1.5. Test: newstest2014, 3,003 pairs. The paper has 4.5M pairs and
32,000 merges, and does not say how it tokenises. A finished folder is not made again; an
interrupted run resumes.
"""

from pathlib import Path

import bitext
import wmt
from archives import Archive, Official
from bitext import Sides
from steps import fail, run

HOST = "http://statmt.org"
OFFICIAL = tuple(
    Official(name, (f"{HOST}/{year}/{name}",), size=size)
    for name, year, size in (
        ("training-parallel-europarl-v7.tgz", "wmt13", 657_632_379),
        ("training-parallel-commoncrawl.tgz", "wmt13", 918_311_367),
        ("training-parallel-nc-v9.tgz", "wmt14", 80_418_416),
        ("test-full.tgz", "wmt14", 3_255_445),
    )
)
LANGUAGES = ("en", "de")
CORPORA = ("europarl-v7.de-en", "commoncrawl.de-en", "news-commentary-v9.de-en")
TEST = ("newstest2014-deen-src.en.sgm", "newstest2014-deen-ref.de.sgm")
PAIRS = {"train": 4_520_620, "test": 3_003}  # train includes the pairs for validation
VALID_EVERY = 100


def read_pairs(archives: list[Archive], folder: Path) -> dict[str, Sides]:
    *training, test = archives
    both: Sides = ([], [])
    for archive, corpus in zip(training, CORPORA, strict=True):
        names = (f"{corpus}.en", f"{corpus}.de")
        files = bitext.read_files(archive.path, names)
        for side, lines in zip(
            both, bitext.aligned(files, [names], list, archive.path, archive.official), strict=True
        ):
            side += lines
    files = bitext.read_files(test.path, TEST)
    tests = bitext.aligned(files, [TEST], bitext.xml_lines, test.path, test.official)
    if len(both[0]) < VALID_EVERY:
        fail(
            f"the archives are too small: {len(both[0])} training pairs, but {VALID_EVERY} are "
            f"needed, as every {VALID_EVERY}th is for validation."
        )
    known = all(archive.official for archive in archives)
    counts = {"train": len(both[0]), "test": len(tests[0])}
    bitext.check_counts(folder, counts, PAIRS if known else {}, ())
    numbers = range(1, len(both[0]) + 1)
    return {
        "train": tuple(
            [line for n, line in zip(numbers, side, strict=True) if n % VALID_EVERY]
            for side in both
        ),
        "valid": tuple(side[VALID_EVERY - 1 :: VALID_EVERY] for side in both),
        "test": tests,
    }


def make_text(archives: list[Archive], folder: Path) -> None:
    wmt.write_text(LANGUAGES, read_pairs(archives, folder), folder)


if __name__ == "__main__":
    run(lambda: wmt.main(__doc__, "wmt14", OFFICIAL, LANGUAGES, make_text))
