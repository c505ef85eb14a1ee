"""Prepares IMDB reviews and GloVe vectors for the classification of Martins et al. 2020.

    data-prep/imdb.sh --vectors FILE [--archive FILE] [--out DIR]

Downloads aclImdb_v1.tar.gz from https://ai.stanford.edu/~amaas/data/sentiment/ (84,125,825 bytes,
MD5 7c2ac02c03563afcf9b574c7e56c153a), or takes it from --archive: a file or an address, followed by
`#sha256=HEX` or `#md5=HEX` if it is not the official one. --vectors is a text of GloVe, or a zip
archive with one; the paper has glove.840B.300d.zip from https://nlp.stanford.edu/data/ (2.03 GB,
checksum unknown). The result:

    DIR/text      {train,valid,test}.tsv, one review per line: its label (0 or 1), a tab, its
                  tokens; vectors.txt, the vectors of the words in them
    DIR/archives  downloads

Training: 22,500 reviews; validation: every tenth of each class, 2,500; test: 25,000. Tokens are
words and punctuation marks as written (our choice: the paper does not say how it tokenises). A
finished folder is not made again.
"""

import html
import io
import re
import shlex
import zipfile
from collections.abc import Iterator
from pathlib import Path

from archives import Archive, Official, digest, obtain, read_paths, readable, zip_members
from steps import Options, check_free, fail, run, say, step, write

OFFICIAL = Official(
    "aclImdb_v1.tar.gz",
    ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
    "md5=7c2ac02c03563afcf9b574c7e56c153a",
    84_125_825,
)
REVIEW = re.compile(r"(?:.*/)?(train|test)/(pos|neg)/(\d+)_\d+\.txt")
TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
REVIEWS = {"train": 22_500, "valid": 2_500, "test": 25_000}
VALID_EVERY = 10


def tokenize(review: bytes) -> list[str]:
    return TOKEN.findall(html.unescape(review.decode("utf-8").replace("<br />", " ")))


def read_reviews(archive: Archive) -> dict[str, list[tuple[int, list[str]]]]:
    """{split: (label, tokens) of each review}."""
    found = []
    for path, review in read_paths(archive.path, REVIEW).items():
        split, label, number = REVIEW.fullmatch(path).groups()
        found.append((split, int(label == "pos"), int(number), tokenize(review)))
    splits: dict[str, list[tuple[int, list[str]]]] = {"train": [], "valid": [], "test": []}
    for split, label, number, tokens in sorted(found):
        is_valid = split == "train" and number % VALID_EVERY == 0
        splits["valid" if is_valid else split].append((label, tokens))
    counts = {split: len(reviews) for split, reviews in splits.items()}
    say("  reviews: " + ", ".join(f"{n:,} {split}" for split, n in counts.items()))
    if not all(counts.values()):
        fail(f"{archive.path} lacks reviews train/pos/N_M.txt and the like: get it again.")
    if archive.official and counts != REVIEWS:
        fail(f"the official archive has other numbers of reviews than {REVIEWS}: report this.")
    return splits


def vector_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a text of vectors, or of the text in a zip archive."""
    if not zipfile.is_zipfile(file):
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from lines
        return
    with readable(file), zipfile.ZipFile(file) as archive:
        texts = [member for name, member in zip_members(file, archive) if name.endswith(".txt")]
        if len(texts) != 1:
            fail(f"{file} holds {len(texts)} texts, where one is needed: pass GloVe's archive.")
        with archive.open(texts[0]) as text:
            yield from io.TextIOWrapper(text, encoding="utf-8", newline="\n")


def make_text(archive: Archive, vectors: Path, folder: Path) -> None:
    splits = read_reviews(archive)
    for split, reviews in splits.items():
        write(folder / f"{split}.tsv", (f"{label}\t{' '.join(words)}" for label, words in reviews))
    words = {word for reviews in splits.values() for _, review in reviews for word in review}
    kept, size = [], 0
    for line in vector_lines(vectors):
        size = size or line.count(" ")
        # Some words of GloVe's 840B vectors contain spaces; no token does.
        if line.partition(" ")[0] in words and line.count(" ") == size:
            kept.append(line.rstrip("\n"))
    if not kept:
        fail(f"{vectors} is not a text of vectors, WORD NUMBER ... NUMBER: pass one of GloVe.")
    say(f"  {len(kept):,} of {len(words):,} words have a vector")
    write(folder / "vectors.txt", kept)


def main() -> None:
    parser = Options(__doc__)
    parser.add_argument("--vectors", type=Path, required=True, metavar="FILE", help="of GloVe")
    parser.add_argument("--archive", metavar="FILE", help="a file or an address")
    parser.add_out("imdb")
    arguments = parser.parse_args()
    out, vectors = arguments.out, arguments.vectors
    check_free(out / "text")
    if not vectors.is_file():
        fail(f"--vectors {vectors} does not exist: pass a text or zip archive of GloVe.")
    archive = obtain(OFFICIAL, arguments.archive, out / "archives")
    step(out / "text", f"{archive.identity} {digest(vectors)}", make_text, archive, vectors)
    say(f"Next: scripts/imdb.sh --data {shlex.quote(str(out / 'text'))}")


if __name__ == "__main__":
    run(main)
