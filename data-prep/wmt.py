"""Shared code of wmt14.py and wmt16.py: news, validated on held-out pairs or on a news set."""

import shlex
from collections.abc import Callable
from pathlib import Path

import bitext
from archives import Archive, Official, obtain_all
from bitext import Languages, Sides
from steps import SPLITS, Options, check_free, say

MERGES = 32_000
MAX_SUBWORDS, RATIO = 250, 1.5  # of a side in training; of the longer side to the shorter one


def write_text(languages: Languages, raw: dict[str, Sides], folder: Path) -> None:
    """Write tokens and subwords of {split: raw lines}; training keeps clean pairs only."""
    with bitext.start_pool() as pool:
        for split in SPLITS:
            tokens = bitext.moses_tokens(pool, languages, raw[split], split, bitext.tokenize_news)
            bitext.write_split(folder, split, languages, tokens, raw[split])
        bitext.joint_bpe(pool, folder, languages, MERGES)
    bitext.keep_clean(folder, languages, MAX_SUBWORDS, RATIO)


def main(
    doc: str | None,
    name: str,
    official: tuple[Official, ...],
    languages: Languages,
    make_text: Callable[[list[Archive], Path], None],
) -> None:
    parser = Options(doc)
    help = "a folder or an address with all archives"
    parser.add_argument("--archive", metavar="FOLDER", help=help)
    parser.add_out(name)
    arguments = parser.parse_args()
    out = arguments.out
    check_free(out / "text", out / "data-bin")
    archives = obtain_all(official, arguments.archive, out / "archives")
    bitext.prepare(out, archives, languages, make_text, bitext.MOSES_BPE)
    data = shlex.quote(str(out / "data-bin"))
    say(f"Next: scripts/adaptively_sparse.sh --data {name} --data-bin {data}")
