"""Prepares WikiText-103 for language models.

    data-prep/wikitext103.sh [--archive FILE] [--out DIR]

Downloads the archive, or takes the text from --archive: a folder, or a zip archive (a file or an
address, followed by `#sha256=HEX` or `#md5=HEX` if it is not the official one), with
wiki.{train,valid,test}.tokens, {train,valid,test}.txt, wiki.{train,valid,test}.txt, or Parquet
files train*, valid* and test* with a column `text`. The results:

    DIR/text      wiki.{train,valid,test}.tokens
    DIR/data-bin  fairseq's binary form
    DIR/archives  downloads

A finished folder is not made again; an interrupted run resumes after the last finished folder.
"""

import fnmatch
import functools
import hashlib
import io
import logging
import re
import shlex
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from archives import (
    Archive,
    Official,
    choose,
    differing_counts,
    digest,
    obtain,
    readable,
    split_checksum,
    zip_members,
)
from steps import SPLITS, Options, check_free, copy_text, fail, run, say, step
from subwords import binarize

OFFICIAL = Official(
    "wikitext-103-v1.zip",
    (
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip",
        "https://wikitext.smerity.com/wikitext-103-v1.zip",
    ),
    "sha256=242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
)
# Counts of the official text; each line adds one end of sentence to the tokens.
TOKENS = {"train": 103_227_021, "valid": 217_646, "test": 245_569}
LINES = {"train": 1_801_350, "valid": 3_760, "test": 4_358}
TYPES = 267_744  # with fairseq's symbols, padded to a multiple of 8

PLAIN = ("wiki.{}.tokens", "{}.txt", "wiki.{}.txt")  # the first one that all splits have
ROWS = 1024  # of a Parquet file at once
PARQUET = {"train": ("train*",), "valid": ("validation*", "valid*"), "test": ("test*",)}

Source = dict[str, list[tuple[str, Callable[[], BinaryIO]]]]  # {split: its files}


# --- the text ----------------------------------------------------------------------------------


def select(archive: Path, members: list[tuple[str, Callable[[], BinaryIO]]]) -> Source:
    names = {PurePosixPath(path).name for path, _ in members}
    for form in PLAIN:
        wanted = {split: form.format(split) for split in SPLITS}
        if names.issuperset(wanted.values()):
            return {s: [(name, choose(archive, members, name))] for s, name in wanted.items()}
    source: Source = {}
    for split, patterns in PARQUET.items():
        for pattern in patterns:
            found = sorted(fnmatch.filter(names, f"{pattern}.parquet"))
            shards = [re.search(r"-(\d+)-of-(\d+)(-\w+)?\.parquet$", name) for name in found]
            if any(shards):
                numbers = sorted((int(s[2]), int(s[1])) for s in shards if s)
                if numbers != [(len(found), number) for number in range(len(found))]:
                    fail(
                        f"{archive} holds {', '.join(found)}, which are not all parts of one"
                        " text: add the missing parts, or remove the others."
                    )
            source[split] = [(name, choose(archive, members, name)) for name in found]
            if found:
                break
    if not all(source.values()):
        fail(
            f"{archive} holds neither wiki.{{train,valid,test}}.tokens, nor the same as .txt, nor"
            " Parquet files train*, valid* and test*: pass an archive or folder that does."
        )
    return source


def parquet_lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Yield one line per row; a row may end in a line feed."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(file)
    columns = table.schema_arrow
    if "text" not in columns.names or columns.field("text").type not in (
        pyarrow.string(),
        pyarrow.large_string(),
    ):
        fail(f"{name} has no column `text` of strings, but {', '.join(columns.names)}.")
    for batch in table.iter_batches(ROWS, columns=["text"]):
        for row in batch.column(0).to_pylist():
            row = row or ""
            line = (row if row.endswith("\n") else f"{row}\n").encode()
            yield line


def make_text(archive: Path, source: Source, folder: Path) -> None:
    for split, files in source.items():
        target = folder / f"wiki.{split}.tokens"
        with readable(archive):
            for name, opened in files:
                with opened() as file:
                    where = f"{name} in {archive}"
                    lines = parquet_lines(file, where) if name.endswith(".parquet") else file
                    copy_text(lines, target, where)
        if not target.stat().st_size:
            fail(f"{archive} is too small: no text for {split}.")


def zip_source(archive: Path, file: zipfile.ZipFile) -> Source:
    def opener(member: zipfile.ZipInfo) -> Callable[[], BinaryIO]:
        return lambda: io.BufferedReader(file.open(member))  # iterates over lines faster

    return select(archive, [(n, opener(member)) for n, member in zip_members(archive, file)])


def folder_archive(folder: Path) -> tuple[Archive, Source]:
    """The files of a folder as an archive; subfolders are ignored."""
    files = [(file.name, functools.partial(file.open, "rb")) for file in folder.iterdir()]
    source = select(folder, files)
    used = sorted(name for files in source.values() for name, _ in files)
    sums = "".join(f"{digest(folder / name)} {name}\n" for name in used)
    return Archive(folder, hashlib.sha256(sums.encode()).hexdigest(), official=False), source


# --- fairseq's binary form ---------------------------------------------------------------------


def count(text: Path) -> tuple[int, int]:
    """(tokens, lines), with one end of sentence per line."""
    tokens = lines = 0
    with text.open(encoding="utf-8", newline="\n") as file:
        for line in file:
            tokens += len(line.split()) + 1
            lines += 1
    return tokens, lines


def make_data_bin(text: Path, official: bool, folder: Path) -> None:
    files = {split: text / f"wiki.{split}.tokens" for split in SPLITS}
    binarize(files.values(), folder, 16, "--only-source")

    logging.disable(logging.INFO)  # importing fairseq prints optional packages
    from fairseq.data import Dictionary, indexed_dataset

    logging.disable(logging.NOTSET)

    tokens, lines = {}, {}
    for split, file in files.items():
        data = indexed_dataset.make_dataset(str(folder / split), impl="mmap")
        tokens[split], lines[split] = int(data.sizes.sum(dtype="int64")), len(data)
        if (counted := count(file)) != (tokens[split], lines[split]):
            fail(
                f"{file} has {counted[0]:,} tokens in {counted[1]:,} lines, but fairseq read"
                f" {tokens[split]:,} in {lines[split]:,}: report this with the archive's name."
            )
    types = len(Dictionary.load(str(folder / "dict.txt")))
    say(f"  tokens: {listed(tokens)}\n  lines: {listed(lines)}\n  types: {types:,}")
    # The official text as Parquet has no known checksum; it is recognised by its number of lines.
    if official or lines["train"] == LINES["train"]:
        # The counts must be exact: the text is already tokenised.
        differing_counts("tokens", TOKENS, tokens, "get it again")
        differing_counts("lines", LINES, lines, "get it again")
        differing_counts("types", {"train": TYPES}, {"train": types}, "get it again")


def listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {split}" for split, n in counts.items())


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--archive", metavar="FILE", help="a file, an address or a folder")
    parser.add_out("wikitext103")
    arguments = parser.parse_args()
    out, given = arguments.out, arguments.archive

    check_free(out / "text", out / "data-bin")
    name, stated = split_checksum(given) if given is not None else (None, None)
    if name is not None and Path(name).is_dir():
        if stated:
            fail(f"{name} is a folder: a checksum can only be stated for a file.")
        archive, source = folder_archive(Path(name))
        prepare(archive, source, out)
    else:
        archive = obtain(OFFICIAL, given, out / "archives")
        with readable(archive.path):
            file = zipfile.ZipFile(archive.path)
        with file:
            prepare(archive, zip_source(archive.path, file), out)
    say(f"Next: scripts/wikitext103.sh --data-bin {shlex.quote(str(out / 'data-bin'))}")


def prepare(archive: Archive, source: Source, out: Path) -> None:
    step(out / "text", archive.identity, lambda folder: make_text(archive.path, source, folder))
    step(
        out / "data-bin",
        archive.identity,
        lambda folder: make_data_bin(out / "text", archive.official, folder),
    )


if __name__ == "__main__":
    run(main)
