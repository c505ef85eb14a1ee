"""Prepares IWSLT 2017 German-English for the experiment of Martins et al. 2020.

    data-prep/iwslt17.sh [--archive FOLDER|FILE] [--out DIR]

Downloads three archives, or takes them from --archive: a folder or an address with

    2017-01-trnted/texts/de/en/de-en.tgz      training and development sets
    2017-01-ted-test/texts/de/en/de-en.tgz    test sets of 2016 and 2017: German
    2017-01-ted-test/texts/en/de/en-de.tgz    the same: English

or one archive with the two files train.tags.de-en.LANGUAGE and the sets
IWSLT17.TED.SET.de-en.LANGUAGE.xml. The results:

    DIR/text      SPLIT.LANGUAGE, Moses tokens in lower case; SPLIT.bpe.LANGUAGE, their subwords;
                  codes, the 32,000 joint merges
    DIR/data-bin  fairseq's binary form, one dictionary per language; for evaluation, the raw
                  references (SPLIT.reference.en) and evaluation.json: how to detokenise, and
                  unexpected numbers of sentence pairs
    DIR/archives  downloads

Training: the transcripts without titles and descriptions, pairs of 1 to 62 subwords per side. Test:
tst2016 and tst2017, or the last two sets of a single archive that lacks them. Validation: all other
sets, dev2010 and tst2010 to tst2015. A finished folder is not made again; an interrupted run
resumes after the last finished folder.
"""

import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import bitext
from archives import Archive, Official, obtain, obtain_all
from bitext import Sides
from steps import SPLITS, Options, check_free, fail, run, say

HOST = "https://raw.githubusercontent.com/hlt-mt/WIT3/master/archive"  # the authors' own


def official(name: str, md5: str) -> Official:
    return Official(name, (f"{HOST}/{name}",), f"md5={md5}")


OFFICIAL = (
    official("2017-01-trnted/texts/de/en/de-en.tgz", "ca2b94d694150d4d6c5dc64c200fa589"),
    official("2017-01-ted-test/texts/de/en/de-en.tgz", "e3f5b2a075a2da1a395c8b60bf1e9be1"),
    official("2017-01-ted-test/texts/en/de/en-de.tgz", "b68e7097b179491f6c466ef41ad72b9b"),
)
# Counts that others report for the first archive; the paper has 206K, 9K and 2K (test). They may
# differ from ours by a few lines that others treat as tags.
PAIRS = {"train": 206_112, "valid": 8_967}

LANGUAGES = ("de", "en")
VALID = ("dev2010", "tst2010", "tst2011", "tst2012", "tst2013", "tst2014", "tst2015")
TEST = ("tst2016", "tst2017")
MERGES = 32_000
MAX_SUBWORDS = 62  # per side, in training, as in the configuration that the paper started from


Names = list[tuple[str, str]]  # of files, (German, English)
TRAIN = ("train.tags.de-en.de", "train.tags.de-en.en")
FILES = re.compile(r"train\.tags\.de-en\.(de|en)|IWSLT17\.TED\.\w+\.de-en\.(de|en)\.xml")


def xml_names(sets: Iterable[str]) -> Names:
    return [(f"IWSLT17.TED.{x}.de-en.de.xml", f"IWSLT17.TED.{x}.de-en.en.xml") for x in sets]


def read_three(archives: list[Archive]) -> tuple[dict[str, list[str]], Names, Names]:
    """The lines of all files, and the names of the validation and test files."""
    both, german, english = (archive.path for archive in archives)
    valid = xml_names(VALID)
    # Each language of these sets is the source of its own translation direction.
    test = [(de, en.replace("de-en", "en-de")) for de, en in xml_names(TEST)]
    files = bitext.read_files(both, [file for pair in [TRAIN, *valid] for file in pair])
    files |= bitext.read_files(german, [pair[0] for pair in test])
    files |= bitext.read_files(english, [pair[1] for pair in test])
    return files, valid, test


def read_one(archive: Path) -> tuple[dict[str, list[str]], Names, Names]:
    files = bitext.read_files(archive, FILES)
    sets = sorted({name.split(".")[2] for name in files if name.startswith("IWSLT17.")})
    if len(sets) < 2:
        fail(
            f"{archive} has {len(sets) or 'no'} sets IWSLT17.TED.SET.de-en.LANGUAGE.xml, but at"
            " least two are needed, for validation and test: get it again."
        )
    test = [name for name in sets if name in TEST] or sets[-min(2, len(sets) - 1) :]
    valid = [name for name in sets if name not in test]
    say(f"  validation: {', '.join(valid)}; test: {', '.join(test)}")
    names = xml_names(valid), xml_names(test)
    if missing := {file for pair in [TRAIN, *names[0], *names[1]] for file in pair} - files.keys():
        fail(f"{archive} lacks the files {', '.join(sorted(missing))}: get it again.")
    return files, *names


def read_pairs(archives: list[Archive]) -> dict[str, Sides]:
    source = " and ".join(str(archive.path) for archive in archives)
    is_one = len(archives) == 1
    files, valid, test = read_one(archives[0].path) if is_one else read_three(archives)
    archives_are = source, all(archive.official for archive in archives)
    lines = zip(*bitext.aligned(files, [TRAIN], list, *archives_are), strict=True)
    spoken = [pair for pair in lines if not pair[0].startswith("<")]
    return {
        "train": tuple([pair[side] for pair in spoken] for side in range(len(LANGUAGES))),
        "valid": bitext.aligned(files, valid, bitext.xml_lines, *archives_are),
        "test": bitext.aligned(files, test, bitext.xml_lines, *archives_are),
    }


# --- the two steps -----------------------------------------------------------------------------


def make_text(archives: list[Archive], folder: Path) -> None:
    raw = read_pairs(archives)
    known = len(archives) == len(OFFICIAL) and all(archive.official for archive in archives)
    found = {split: len(raw[split][0]) for split in SPLITS}
    bitext.check_counts(folder, found, PAIRS if known else {}, PAIRS)
    with bitext.start_pool() as pool:
        for split in SPLITS:
            tokens = bitext.moses_tokens(pool, LANGUAGES, raw[split], split)
            lower = tuple(list(map(str.lower, side)) for side in tokens)
            bitext.write_split(folder, split, LANGUAGES, lower, raw[split])
        bitext.joint_bpe(pool, folder, LANGUAGES, MERGES)
    bitext.keep_clean(folder, LANGUAGES, MAX_SUBWORDS, math.inf)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument(
        "--archive",
        metavar="FOLDER|FILE",
        help="a folder or an address with the three archives, or one archive with all sets",
    )
    parser.add_out("iwslt17")
    arguments = parser.parse_args()
    out, given = arguments.out, arguments.archive

    check_free(out / "text", out / "data-bin")
    if given and "://" not in given and not Path(given).is_dir():
        archives = [obtain(OFFICIAL[0], given, out / "archives")]
    else:
        archives = obtain_all(OFFICIAL, given, out / "archives")
    bitext.prepare(out, archives, LANGUAGES, make_text, bitext.LOWER_MOSES_BPE)
    say(f"Next: scripts/iwslt17.sh --data-bin {shlex.quote(str(out / 'data-bin'))}")


if __name__ == "__main__":
    run(main)
