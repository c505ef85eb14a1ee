"""Reads parallel text, and prepares it for fairseq: subwords, and the binarised data."""

import itertools
import shutil
from pathlib import Path

from multimax_fairseq.commands.stock import find_command, run
from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.files import read_lines, write

SPLITS = ("train", "valid", "test")
Pairs = dict[str, list[tuple[str, str]]]  # {split: sentences with their translations}
SUBWORDS, LONGEST = 6000, 250  # subwords in the vocabulary, and in a sentence of train and valid
POSITIONS = 1024  # of the architecture, with the end of sentence


def read_pairs(text: Path, split: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the sentence pairs of a split."""
    files = [text / f"{split}.{language}" for language in languages]
    for file in files:
        if not file.is_file():
            raise no_file("text", file)
    sides = [[line.removeprefix("\ufeff").strip() for line in read_lines(file)] for file in files]
    if len(sides[0]) != len(sides[1]) or not sides[0]:
        raise UsageError(
            f"'{files[0]}' has {len(sides[0]):,} lines and '{files[1]}' {len(sides[1]):,}: each "
            "line needs its translation in the other file"
        )
    return list(zip(*sides, strict=True))


def prepare(pairs: Pairs, source: str, target: str, out: Path) -> Path:
    """Learn subwords and binarise the text, unless done; return the folder of the data."""
    data = out / "data-bin"
    if data.exists():
        return data
    import sentencepiece  # slow to import

    part = out / "data.part"  # renamed at the end
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    print(f"Learning subwords from {len(pairs['train']):,} sentence pairs", flush=True)
    model = part / "sentencepiece.model"
    with model.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(pairs["train"]),
            model_writer=writer,
            model_type="bpe",
            vocab_size=SUBWORDS,
            hard_vocab_limit=False,  # a small text has fewer
            character_coverage=1.0,
            minloglevel=2,
        )
    encode = sentencepiece.SentencePieceProcessor(model_file=str(model)).encode
    for split, lines in pairs.items():
        sides = (encode(list(side), out_type=str) for side in zip(*lines, strict=True))
        pieces = list(zip(*sides, strict=True))
        if split == "test":
            check_lengths([source for source, _ in pieces])
        else:
            kept = [pair for pair in pieces if all(0 < len(side) <= LONGEST for side in pair)]
            if len(kept) < len(pieces):
                print(f"{split}: left out {len(pieces) - len(kept):,} empty or too long pairs")
            pieces = kept
        for language, side in zip((source, target), zip(*pieces, strict=True), strict=True):
            write(part / f"{split}.{language}", "".join(f"{' '.join(x)}\n" for x in side))
    words = [find_command("fairseq-preprocess"), "--source-lang", source, "--target-lang", target]
    words += ["--joined-dictionary", "--destdir", str(part)]
    for split in SPLITS:
        words += [f"--{split}pref", str(part / split)]
    run(words, part / "preprocess.log")
    references = "".join(f"{line}\n" for _, line in pairs["test"])
    write(part / f"test.reference.{target}", references)
    part.rename(data)
    return data


def check_lengths(sources: list[list[str]]) -> None:
    """Raise UsageError if a test sentence is longer than the model's positions."""
    longest = max(range(len(sources)), key=lambda line: len(sources[line]))
    if len(sources[longest]) >= POSITIONS:
        raise UsageError(
            f"line {longest + 1} of the test source has {len(sources[longest]):,} subwords, but "
            f"the model takes only {POSITIONS - 1:,}: split the line"
        )
