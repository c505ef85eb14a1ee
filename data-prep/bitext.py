"""Shared code of translation data: sentence pairs, Moses tokens, BPE, counts."""

import functools
import io
import json
import multiprocessing
import multiprocessing.pool
import os
import re
import shutil
import signal
import unicodedata
from collections.abc import Callable, Collection, Iterable
from contextlib import redirect_stderr
from pathlib import Path

from archives import Archive, differing_counts, read_tar
from steps import MARK, SPLITS, decode, fail, read, say, step, warn, write
from subwords import binarize

from multimax_fairseq.children import end_with_parent

WORKERS = min(8, os.cpu_count() or 1)
Sides = tuple[list[str], ...]  # the lines of the source and of the target
Languages = tuple[str, str]  # source and target

MAX_LETTERS = 1000  # of a word
LAST_STOP = re.compile(r"([^\s.])\.$")
SEGMENT = re.compile(r'<seg id="[0-9]*">\s*|\s*</seg>\s*')
WHOLE_SEGMENT = re.compile(r'\s*<seg id="([0-9]*)">((?!</seg>|<seg id).)*</seg>\s*')
MOSES_BPE = {"remove_bpe": "@@ ", "tokenizer": "moses", "lowercase": False}
LOWER_MOSES_BPE = {**MOSES_BPE, "lowercase": True}
DIFFERING = "differing-counts.json"  # in the text folder, if counts differ


# --- pairs -------------------------------------------------------------------------------------


def spaced(line: str) -> str:
    """The line with single spaces for any whitespace."""
    return " ".join(line.split())


def is_clean(source: str, target: str, most: int, ratio: float = 1.5) -> bool:
    """Whether Moses' clean-corpus-n keeps the pair.

    Each side has 1 to `most` tokens, and the longer one at most `ratio` times the shorter one's.
    """
    sides = source.split(), target.split()
    lengths = sorted(map(len, sides))
    return (
        0 < lengths[0]
        and lengths[1] <= most
        and lengths[1] / lengths[0] <= ratio
        and all(len(word) <= MAX_LETTERS for side in sides for word in side)
    )


def xml_lines(lines: list[str]) -> list[str]:
    """The text of the segments of a development or test file, with ’ replaced by '."""
    return [SEGMENT.sub("", line).replace("’", "'") for line in lines if "<seg id" in line]


def read_files(archive: Path, names: Iterable[str] | re.Pattern[str]) -> dict[str, list[str]]:
    """{file: its lines} for these names, or for the names that match."""
    members = read_tar(archive, names)
    return {name: decode(data, f"{name} in {archive}") for name, data in members.items()}


def check_segments(
    pair: tuple[str, str], files: dict[str, list[str]], source: object, official: bool
) -> None:
    """Refuse broken segments, and pairs of segments with different numbers.

    In an official archive they are used as they are, with a warning.
    """
    rows = [
        [(number, line) for number, line in enumerate(files[name], 1) if "<seg id" in line]
        for name in pair
    ]
    for row in zip(*rows, strict=True):
        found = [WHOLE_SEGMENT.fullmatch(line) for _, line in row]
        if not all(found) or len({match[1] for match in found if match}) > 1:
            lines = (f"line {n:,} of {name}" for name, (n, _) in zip(pair, row, strict=True))
            what = f"{source}: the segments in {' and '.join(lines)} are broken or do not match"
            if not official:
                fail(f"{what}; get it again.")
            warn(f"{what}; it is the official archive, so they are used as they are.")


def aligned(
    files: dict[str, list[str]],
    pairs: Iterable[tuple[str, str]],
    extract: Callable[[list[str]], list[str]],
    source: object,
    official: bool,
) -> Sides:
    """Apply `extract` to the (source, target) files and concatenate the results."""
    sides: Sides = ([], [])
    for pair in pairs:
        found = [extract(files[name]) for name in pair]
        if len(found[0]) != len(found[1]):
            fail(
                f"{source} is misaligned: {pair[0]} has {len(found[0]):,} sentences,"
                f" {pair[1]} {len(found[1]):,}; get it again."
            )
        if extract is xml_lines:
            check_segments(pair, files, source, official)
        for side, lines in zip(sides, found, strict=True):
            side += map(spaced, lines)
    return sides


# --- tokens and subwords -----------------------------------------------------------------------


@functools.cache
def tokenizer(language: str):
    from sacremoses import MosesTokenizer

    return MosesTokenizer(language)


def tokenize(language: str, line: str) -> str:
    tokens = spaced(tokenizer(language).tokenize(line, return_str=True))
    # Moses always splits off the last full stop; sacremoses does not after a possible abbreviation
    # or ordinal. The token counts decide which pairs are kept.
    return LAST_STOP.sub(r"\1 .", tokens)


def normalize(language: str, line: str) -> str:
    """The line after Moses' normalize-punctuation and remove-non-printing-char."""
    return "".join(
        " " if unicodedata.category(letter)[0] == "C" else letter
        for letter in normalizer(language).normalize(line)
    )


@functools.cache
def normalizer(language: str):
    from sacremoses import MosesPunctNormalizer

    return MosesPunctNormalizer(language)


def tokenize_news(language: str, line: str) -> str:
    """Moses tokens of the normalised line, with hyphens split, as in fairseq's WMT recipe."""
    line = normalize(language, line)
    return spaced(tokenizer(language).tokenize(line, aggressive_dash_splits=True, return_str=True))


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
    from tqdm import tqdm

    results = pool.imap(function, lines, chunksize=500)
    return list(tqdm(results, total=len(lines), desc=what, unit=" lines", disable=None))


def start_pool() -> multiprocessing.pool.Pool:
    return multiprocessing.Pool(WORKERS, start_worker)


def start_worker() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process reports Ctrl-C


def moses_tokens(
    pool: multiprocessing.pool.Pool,
    languages: Languages,
    sides: Sides,
    split: str,
    function: Callable[[str, str], str] = tokenize,
) -> Sides:
    return tuple(
        mapped(pool, functools.partial(function, x), lines, f"tokens of {split}.{x}")
        for x, lines in zip(languages, sides, strict=True)
    )


def joint_bpe(
    pool: multiprocessing.pool.Pool, folder: Path, languages: Languages, size: int
) -> None:
    """Write codes (`size` merges of both languages) and SPLIT.bpe.LANGUAGE for each text."""
    from subword_nmt.learn_bpe import learn_bpe

    text = {
        f"{split}.{{}}.{language}": read(folder / f"{split}.{language}")
        for split in SPLITS
        for language in languages
    }
    codes = folder / "codes"
    say(f"  learning {size:,} merges")
    hidden = redirect_stderr(io.StringIO())  # learn_bpe's progress bar
    with codes.open("w", encoding="utf-8", newline="\n") as file, hidden:
        try:
            learn_bpe([line for x in languages for line in text[f"train.{{}}.{x}"]], file, size)
        except ValueError:  # no word has two characters
            fail("the archive is too small: its text has nothing to merge into subwords.")
    for name, lines in text.items():
        subwords = mapped(pool, functools.partial(segment, codes), lines, name.format("bpe"))
        write(folder / name.format("bpe"), subwords)


def keep_clean(folder: Path, languages: Languages, most: int, ratio: float) -> None:
    """Remove from train.bpe.LANGUAGE the pairs that `is_clean` rejects."""
    files = [folder / f"train.bpe.{language}" for language in languages]
    pairs = list(zip(*map(read, files), strict=True))
    kept = [pair for pair in pairs if is_clean(*pair, most, ratio)]
    if not kept:
        fail(f"no training pair has 1 to {most} subwords per side: get other archives.")
    say(f"  with 1 to {most} subwords per side: {len(kept):,} of {len(pairs):,} train")
    for file, lines in zip(files, zip(*kept, strict=True), strict=True):
        write(file, lines)


# --- the results of the two steps --------------------------------------------------------------


def write_split(folder: Path, split: str, languages: Languages, text: Sides, raw: Sides) -> None:
    """Write SPLIT.LANGUAGE and, for evaluation, the raw references."""
    for language, lines in zip(languages, text, strict=True):
        write(folder / f"{split}.{language}", lines)
    if split != "train":
        write(folder / f"{split}.reference.{languages[1]}", raw[1])


def check_counts(
    folder: Path, found: dict[str, int], expected: dict[str, int], tolerant: Collection[str]
) -> None:
    """Print the numbers of pairs; write DIFFERING if some are not as expected."""
    say("  sentence pairs: " + ", ".join(f"{n:,} {split}" for split, n in found.items()))
    if empty := [split for split, n in found.items() if not n]:
        fail(f"the archive is too small: no sentence pairs for {' and '.join(empty)}.")
    remedy = "install the versions in scripts/requirements.txt; if they are installed, report this"
    differing = differing_counts("sentence pairs", expected, found, remedy, tolerant)
    if differing:
        (folder / DIFFERING).write_text(json.dumps(differing) + "\n")


def make_data_bin(
    text: Path,
    folder: Path,
    languages: Languages,
    kind: str,
    evaluation: dict[str, object],
    *dictionary: object,
) -> None:
    """Binarise the subwords SPLIT.KIND.LANGUAGE; add the files for evaluation."""
    prefixes = [text / f"{split}.{kind}" for split in SPLITS]
    source, target = languages
    pair = ("--source-lang", source, "--target-lang", target)
    binarize(prefixes, folder, WORKERS, *pair, *dictionary)
    for split in ("valid", "test"):
        name = f"{split}.reference.{target}"
        shutil.copyfile(text / name, folder / name)
    evaluation = {"source": source, "target": target, **evaluation}
    if (text / DIFFERING).exists():
        evaluation["differing_counts"] = json.loads((text / DIFFERING).read_text())
    (folder / "evaluation.json").write_text(json.dumps(evaluation) + "\n")


def prepare(
    out: Path,
    archives: list[Archive],
    languages: Languages,
    make_text: Callable[[list[Archive], Path], None],
    evaluation: dict[str, object],
) -> None:
    """Make OUT/text and OUT/data-bin, unless they are finished."""
    made_from = " ".join(archive.identity for archive in archives)
    step(out / "text", made_from, make_text, archives)
    step(
        out / "data-bin",
        (out / "text" / MARK).read_text(),
        lambda folder: make_data_bin(out / "text", folder, languages, "bpe", evaluation),
    )
