"""Prepares WMT 2016 Romanian-English for Adaptively Sparse Transformers.

    data-prep/wmt16.sh [--archive FOLDER] [--out DIR]

Downloads four archives, or takes them from --archive: a folder or an address with

    training-parallel-ep-v8.tgz    from http://data.statmt.org/wmt16/translation-task/
    en-ro.txt.zip                  SETIMES2, from https://object.pouta.csc.fi/OPUS-SETIMES/v2/moses/
    dev-romanian-updated.tgz       from http://data.statmt.org/wmt16/translation-task/
    test.tgz                       from http://data.statmt.org/wmt16/translation-task/

(sizes and checksums unknown). The results:

    DIR/text      SPLIT.LANGUAGE, Moses tokens; SPLIT.bpe.LANGUAGE, their subwords; codes, the
                  32,000 joint merges
    DIR/data-bin  fairseq's binary form, one dictionary per language; for evaluation, the raw
                  references (SPLIT.reference.en) and evaluation.json
    DIR/archives  downloads

Training: Europarl v8 and SETIMES2, 612,422 pairs, less those of more than 250 subwords or of a
ratio above 1.5. Validation: newsdev2016. Test: newstest2016, 1,999 pairs each. The paper has 600K
pairs and 32,000 merges, and does not say how it tokenises. A finished folder is not made again; an
interrupted run resumes.
"""

from pathlib import Path

import bitext
import wmt
from archives import Archive, Official, read_zip
from bitext import Sides
from steps import decode, run

HOST = "http://data.statmt.org/wmt16/translation-task"
OFFICIAL = (
    Official("training-parallel-ep-v8.tgz", (f"{HOST}/training-parallel-ep-v8.tgz",)),
    Official("en-ro.txt.zip", ("https://object.pouta.csc.fi/OPUS-SETIMES/v2/moses/en-ro.txt.zip",)),
    Official("dev-romanian-updated.tgz", (f"{HOST}/dev-romanian-updated.tgz",)),
    Official("test.tgz", (f"{HOST}/test.tgz",)),
)
LANGUAGES = ("ro", "en")
EUROPARL = ("europarl-v8.ro-en.ro", "europarl-v8.ro-en.en")
SETIMES = ("SETIMES.en-ro.ro", "SETIMES.en-ro.en")
VALID = ("newsdev2016-roen-src.ro.sgm", "newsdev2016-roen-ref.en.sgm")
TEST = ("newstest2016-roen-src.ro.sgm", "newstest2016-roen-ref.en.sgm")
PAIRS = {"train": 399_375 + 213_047, "valid": 1_999, "test": 1_999}


def read_pairs(archives: list[Archive], folder: Path) -> dict[str, Sides]:
    europarl, setimes, valid, test = archives
    files = bitext.read_files(europarl.path, EUROPARL)
    for name, data in read_zip(setimes.path, SETIMES).items():
        files[name] = decode(data, f"{name} in {setimes.path}")
    for archive, names in ((valid, VALID), (test, TEST)):
        files |= bitext.read_files(archive.path, names)
    source = " and ".join(str(archive.path) for archive in archives)
    known = all(archive.official for archive in archives)
    raw = {
        "train": bitext.aligned(files, [EUROPARL, SETIMES], list, source, known),
        "valid": bitext.aligned(files, [VALID], bitext.xml_lines, source, known),
        "test": bitext.aligned(files, [TEST], bitext.xml_lines, source, known),
    }
    counts = {split: len(sides[0]) for split, sides in raw.items()}
    bitext.check_counts(folder, counts, PAIRS if known else {}, ())
    return raw


def make_text(archives: list[Archive], folder: Path) -> None:
    wmt.write_text(LANGUAGES, read_pairs(archives, folder), folder)


if __name__ == "__main__":
    run(lambda: wmt.main(__doc__, "wmt16", OFFICIAL, LANGUAGES, make_text))
