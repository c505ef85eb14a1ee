"""Reads parallel text, and prepares it for fairseq: subwords, and the binarised data."""

import itertools
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset

from multimax_fairseq.bleu import language_mistake, metric
from multimax_fairseq.commands.stock import find_command, run
from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.files import read_lines, write

SPLITS = ("train", "valid", "test")
Pairs = dict[str, list[tuple[str, str]]]  # {split: sentences with their translations}
SUBWORDS = 6000  # in the dictionary
LONGEST = 250  # subwords of a sentence of train and valid
POSITIONS = 1024  # of the architecture, with the end of sentence


def read_pairs(text: Path, split: str, languages: tuple[str, str]) -> list[tuple[str, str]]:
    """Return the sentence pairs of a split."""
    files = [text / f"{split}.{language}" for language in languages]
    for file in files:
        if not file.is_file():
            raise no_file("text", file)
    sides = [[line.removeprefix("\ufeff").strip() for line in read_lines(file)] for file in files]
    if len(sides[0]) != len(sides[1]):
        raise UsageError(
            f"'{files[0]}' has {len(sides[0]):,} lines and '{files[1]}' {len(sides[1]):,}: each "
            "line needs its translation in the other file"
        )
    pairs = list(zip(*sides, strict=True))
    if not any(map(all, pairs)):
        raise UsageError(f"'{files[0]}' and '{files[1]}' have no line with text in both: add some")
    return pairs


def prepare(pairs: Pairs, source: str, target: str, out: Path) -> Path:
    """Learn subwords and binarise the text, unless done; return the folder of the data."""
    metric(target)  # raises UsageError without its package
    references = [line for _, line in pairs["test"]]
    if mistake := language_mistake(target, references):
        raise UsageError(mistake)
    data = out / "data-bin"
    if data.exists():
        return data
    part = out / "data.part"  # renamed at the end
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    print(f"Learning subwords from {len(pairs['train']):,} sentence pairs", flush=True)
    model = learn_subwords(pairs["train"], part)
    for split, lines in pairs.items():
        sides = (model.encode(list(side), out_type=str) for side in zip(*lines, strict=True))
        pieces = list(zip(*sides, strict=True))
        if split == "test":
            check_lengths([source for source, _ in pieces])
        else:
            kept = [pair for pair in pieces if all(0 < len(side) <= LONGEST for side in pair)]
            check_not_empty(split, kept)
            if len(kept) < len(pieces):
                print(f"{split}: left out {len(pieces) - len(kept):,} empty or too long pairs")
            pieces = kept
        for language, side in zip((source, target), zip(*pieces, strict=True), strict=True):
            write(part / f"{split}.{language}", "".join(f"{' '.join(x)}\n" for x in side))
    words = [find_command("fairseq-preprocess"), "--source-lang", source, "--target-lang", target]
    words += ["--joined-dictionary", "--srcdict", str(part / "dict.txt"), "--destdir", str(part)]
    for split in SPLITS:
        words += [f"--{split}pref", str(part / split)]
    run(words, part / "preprocess.log")
    for split, language in itertools.product(SPLITS, (source, target)):
        binary = part / f"{split}.{source}-{target}.{language}"
        if share := unknown_share(binary, part / "dict.txt"):
            print(f"{split}.{language}: {share:.3g}% of the tokens are <unk>")
    write(part / f"test.reference.{target}", "".join(f"{line}\n" for line in references))
    part.rename(data)
    return data


def learn_subwords(train: list[tuple[str, str]], folder: Path) -> Any:
    """Return a SentencePiece model; write it and dict.txt, the dictionary of all its subwords.

    A dictionary of the training text's subwords would lack some: SentencePiece splits other words
    into subwords that are parts of longer ones there.
    """
    import sentencepiece  # slow to import

    # Other lines are longer than LONGEST subwords, since a subword has at most 16 characters.
    kept = [pair for pair in train if all(0 < len(side) <= 16 * LONGEST for side in pair)]
    check_not_empty("train", kept)
    lines = list(itertools.chain.from_iterable(kept))
    characters = set().union(*(unicodedata.normalize("NFKC", line) for line in lines))
    file = folder / "sentencepiece.model"
    with file.open("wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=writer,
            model_type="bpe",
            # Without fairseq's <pad>; at least half of the subwords are longer than a character.
            vocab_size=max(SUBWORDS, 2 * len(characters)) - 1,
            hard_vocab_limit=False,  # a small text has fewer
            character_coverage=1.0,
            max_sentence_length=64 * LONGEST,  # in bytes; sentencepiece drops longer lines
            minloglevel=2,
        )
    model = sentencepiece.SentencePieceProcessor(model_file=str(file))
    # fairseq adds the first three (<unk>, <s>, </s>) itself, and does not use the counts.
    subwords = (model.id_to_piece(i) for i in range(3, model.vocab_size()))
    write(folder / "dict.txt", "".join(f"{subword} 1\n" for subword in subwords))
    return model


def unknown_share(text: Path, dictionary: Path) -> float:
    """Return the share of <unk> among the tokens of a binarised text, in percent."""
    unknown = Dictionary.load(str(dictionary)).unk()
    lines = load_indexed_dataset(str(text))
    count = sum(int((line == unknown).sum()) for line in lines)
    return 100 * count / int(sum(lines.sizes))


def check_not_empty(split: str, pairs: Sequence[object]) -> None:
    """Raise UsageError if no sentence pair is left of a split."""
    if not pairs:
        raise UsageError(
            f"{split} has no pair with 1 to {LONGEST} subwords on both sides: split its lines into "
            "sentences"
        )


def check_lengths(sources: list[list[str]]) -> None:
    """Raise UsageError if a test sentence is longer than the model's positions."""
    longest = max(range(len(sources)), key=lambda line: len(sources[line]))
    if len(sources[longest]) >= POSITIONS:
        raise UsageError(
            f"line {longest + 1} of the test source has {len(sources[longest]):,} subwords, but "
            f"the model takes only {POSITIONS - 1:,}: split the line"
        )
