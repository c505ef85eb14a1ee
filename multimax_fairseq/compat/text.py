"""What fairseq 0.12.3 reads from text otherwise than it stands there."""

import codecs
import fileinput
import functools
import io
import math
import os
import sys

import torch

from multimax_fairseq.compat.patch import command, replace
from multimax_fairseq.errors import UsageError, first_line

# fairseq puts these into sentences itself. <unk> is a word of many texts, and means the same.
SYMBOLS = frozenset(("<s>", "</s>", "<pad>"))


def text_lines():
    """fairseq-preprocess takes the position in the decoded text, by tell(), for that in the file.

    The two can differ in a file with CR LF. A worker then reads on through the lines of another:
    they are there twice, and source and target no longer belong together. A carriage return within
    a line ends it, and a byte order mark is part of the first word. Can go when fairseq reads
    bytes.
    """
    from fairseq import file_chunker_utils

    @replace(file_chunker_utils, "_safe_readline")
    def _safe_readline(original, fd):
        return fd.buffer.readline()

    @replace(file_chunker_utils.ChunkLineIterator, "__iter__")
    def __iter__(original, self):
        file, place = self._fd.buffer, self._start_offset
        end = self._end_offset if self._end_offset > 0 else math.inf
        file.seek(place)
        while place < end and (line := file.readline()):
            yield (line if place else line.removeprefix(codecs.BOM_UTF8)).decode("utf-8")
            place += len(line)


def check_files(args):
    """Raise UsageError for text that fairseq-preprocess would read otherwise.

    It takes UTF-16 for words, a word "</s>" for the end of a sentence, a word "<pad>" for padding,
    and source and target of unequal length. Can go when fairseq checks its files.
    """
    languages = [args.source_lang] + ([] if args.only_source else [args.target_lang])
    given = [args.trainpref, *(args.validpref or "").split(","), *(args.testpref or "").split(",")]
    for prefix in filter(None, given):
        files = [f"{prefix}.{language}" if language else prefix for language in languages]
        counts = [count_lines(file) for file in files]
        if len(set(counts)) > 1:
            raise UsageError(
                f"'{files[0]}' has {counts[0]:,} lines, but '{files[1]}' {counts[1]:,}: line N of "
                "one must be the translation of line N of the other; mend them, or find the first "
                "that is not"
            )


def count_lines(path):
    """Return the number of lines of a text; UsageError for the first line that is not text."""
    number, line = 0, b""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if reason := what_is_wrong(line):
                raise UsageError(f"line {number:,} of '{path}' {reason[0]}: {reason[1]}")
    if number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip():
        raise UsageError(
            f"'{path}' has carriage returns and no line feed: convert its ends of lines, as "
            "tr '\\r' '\\n' does"
        )
    return number


def what_is_wrong(line):
    """Return (what, remedy) for a line, as bytes, that is not text to fairseq; None if it is."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        is_wide = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return (
            f"is not UTF-8 (byte {line[error.start]:#04x})",
            f"convert it, as iconv -f {'UTF-16' if is_wide else 'LATIN1'} -t UTF-8 does",
        )
    if "\0" in text:
        return (
            "has a NUL character",
            "convert it with iconv -f UTF-16 -t UTF-8 if it is UTF-16, or remove these with "
            "tr -d '\\000'",
        )
    if "<" in text and (words := SYMBOLS.intersection(text.split())):
        return (
            f"has the word '{min(words)}', which is a symbol of fairseq's own",
            "write it otherwise, or leave the line out",
        )
    return None


def dictionaries():
    """fairseq does not name the dictionary that it cannot read.

    Can go when fairseq does.
    """
    from fairseq.data import Dictionary
    from fairseq.file_io import PathManager

    @replace(Dictionary, "add_from_file")
    def add_from_file(original, self, f):
        if not isinstance(f, str):
            return original(self, f)
        try:
            with open(PathManager.get_local_path(f), encoding="utf-8") as file:
                return original(self, file)
        except OSError:
            raise
        except Exception as error:  # fairseq raises Exception itself
            raise UsageError(
                f"the dictionary '{f}' is damaged ({first_line(error)[:100]}): give it as "
                "fairseq-preprocess wrote it, or prepare the data again"
            ) from error


def interactive_lines():
    """fairseq-interactive ends a line at a carriage return within it, so all lines that follow get
    other numbers; and a byte order mark is part of the first word.

    Can go when fairseq reads utf-8-sig with newline="\\n".
    """
    if command() != "fairseq-interactive":
        return

    @replace(fileinput, "hook_encoded")
    def hook_encoded(original, encoding, errors=None):
        return functools.partial(open, encoding="utf-8-sig", newline="\n")

    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = sys.stdin.encoding.lower()
        encoding = "utf-8-sig" if encoding == "utf-8" else encoding
        sys.stdin.reconfigure(encoding=encoding, newline="\n")


def symbols_in_input():
    """A word "<pad>" of fairseq-interactive's input is padding to the model, and "</s>" an end.

    Here they are unknown words. Can go when fairseq does the same.
    """
    from fairseq.tasks import FairseqTask

    @replace(FairseqTask, "get_interactive_tokens_and_lengths")
    def get_interactive_tokens_and_lengths(original, self, lines, encode_fn):
        sentences, lengths = original(self, lines, encode_fn)
        words = self.source_dictionary
        own = torch.tensor([words.bos(), words.pad(), words.eos()])
        for tokens in sentences:
            tokens[:-1][torch.isin(tokens[:-1], own)] = words.unk()
        return sentences, lengths


def scored_lines():
    """fairseq-score leaves out the lines that one file has more than the other, takes a byte order
    mark for part of a word, and ignores --ignore-case and --order with --sacrebleu.

    Can go when fairseq-score compares the numbers, skips the mark and refuses the flags.
    """
    from fairseq_cli import score

    # The plain `open` that fairseq-score calls.
    score.open = functools.partial(open, encoding="utf-8-sig")

    @replace(score, "cli_main")
    def cli_main(original):
        args = score.get_parser().parse_args()
        if args.sacrebleu and (args.ignore_case or args.sentence_bleu or args.order != 4):
            raise UsageError(
                "--sacrebleu reads neither --ignore-case, --sentence-bleu nor --order: leave "
                "them out, or call sacrebleu itself"
            )
        if args.sys == "-":
            sys.stdin = io.StringIO(sys.stdin.read().removeprefix("\ufeff"))
        if all(map(os.path.exists, {args.sys, args.ref} - {"-"})):
            counts = [_lines_to_score(args.sys), _lines_to_score(args.ref)]
            if counts[0] != counts[1] or counts[0] == 0:
                raise UsageError(
                    f"--sys {args.sys} has {counts[0]:,} lines, but --ref {args.ref} "
                    f"{counts[1]:,}: give the sentences of both in one order, each in a line "
                    "(which a carriage return ends too)"
                )
        return original()


def _lines_to_score(path):
    """Return the number of lines as fairseq-score counts them."""
    if path == "-":
        return sum(1 for _ in io.StringIO(sys.stdin.getvalue(), newline=None))
    with open(path) as file:
        return sum(1 for _ in file)
