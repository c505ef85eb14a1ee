"""Fixes for text that fairseq 0.12.3 reads differently from how it is written."""

import codecs
import fileinput
import functools
import io
import math
import os
import sys

import torch

from multimax_fairseq import bleu
from multimax_fairseq.compat.patch import command, replace
from multimax_fairseq.errors import UsageError, first_line

# Symbols that fairseq adds to sentences. <unk> is not here: it occurs in texts, with this meaning.
SYMBOLS = frozenset(("<s>", "</s>", "<pad>"))


def text_lines():
    """Split text at line feeds, at positions counted in bytes.

    Cause: fairseq-preprocess uses tell() of the decoded text as the position in the file. The two
    can differ in a file with CR LF. A worker then reads lines of the next worker again, so source
    and target no longer match. A carriage return within a line ends the line, and a byte order mark
    becomes part of the first word.
    Remove when fairseq reads bytes.
    """
    from fairseq import file_chunker_utils

    @replace(file_chunker_utils, "_safe_readline")
    def _safe_readline(original, fd):
        return fd.buffer.readline()

    @replace(file_chunker_utils.ChunkLineIterator, "__iter__")
    def __iter__(original, self):
        file, position = self._fd.buffer, self._start_offset
        end = self._end_offset if self._end_offset > 0 else math.inf
        file.seek(position)
        while position < end and (line := file.readline()):
            yield (line if position else line.removeprefix(codecs.BOM_UTF8)).decode("utf-8")
            position += len(line)


def check_files(args):
    """Raise UsageError for text that fairseq-preprocess would read wrongly.

    Cause: fairseq-preprocess reads UTF-16 as words, the word "</s>" as the end of a sentence and
    "<pad>" as padding. It accepts source and target of unequal length.
    Remove when fairseq checks its files.
    """
    languages = [args.source_lang] + ([] if args.only_source else [args.target_lang])
    prefixes = [
        args.trainpref,
        *(args.validpref or "").split(","),
        *(args.testpref or "").split(","),
    ]
    for prefix in filter(None, prefixes):
        files = [f"{prefix}.{language}" if language else prefix for language in languages]
        counts = [count_lines(file) for file in files]
        if len(set(counts)) > 1:
            raise UsageError(
                f"'{files[0]}' has {counts[0]:,} lines, but '{files[1]}' {counts[1]:,}: correct "
                "them, so that line N of one is the translation of line N of the other"
            )


def count_lines(path):
    """Return the number of lines of a text; UsageError names the first line that is not text."""
    number, line = 0, b""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if reason := what_is_wrong(line):
                raise UsageError(f"line {number:,} of '{path}' {reason[0]}: {reason[1]}")
    if number == 1 and not line.endswith(b"\n") and b"\r" in line.rstrip():
        raise UsageError(
            f"'{path}' has carriage returns and no line feed: convert its line endings, as "
            "tr '\\r' '\\n' does"
        )
    return number


def what_is_wrong(line):
    """Return (fault, remedy) of a line in bytes that fairseq cannot read; None if it can."""
    if reason := _not_utf8(line):
        return reason
    text = line.decode("utf-8")
    if "\0" in text:
        return (
            "has a NUL character",
            "convert it with iconv -f UTF-16 -t UTF-8 if it is UTF-16, or remove these with "
            "tr -d '\\000'",
        )
    if "<" in text and (words := SYMBOLS.intersection(text.split())):
        return (
            f"has the word '{min(words)}', which fairseq uses as a symbol",
            "write it differently, or remove the line",
        )
    return None


def _not_utf8(line):
    """Return (fault, remedy) of a line in bytes that is not UTF-8; None if it is."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        is_wide = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return (
            f"is not UTF-8 (byte {line[error.start]:#04x})",
            f"convert it, as iconv -f {'UTF-16' if is_wide else 'LATIN1'} -t UTF-8 does",
        )
    return None


def _open(path, mode="r", newline=None):
    """Open a text without its byte order mark; UsageError names a line that is not UTF-8."""
    if os.path.isfile(path):  # a pipe can be read only once
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if reason := _not_utf8(line):
                    raise UsageError(f"line {number:,} of '{path}' {reason[0]}: {reason[1]}")
    return open(path, mode, encoding="utf-8-sig", newline=newline)


def dictionaries():
    """Name the dictionary that cannot be read.

    Cause: fairseq's error for a damaged dictionary does not name the file.
    Remove when it does.
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
                f"the dictionary '{f}' is damaged ({first_line(error)[:100]}): write it as "
                "fairseq-preprocess wrote it, or prepare the data again"
            ) from error


def interactive_lines():
    """Split the input of fairseq-interactive at line feeds, and skip a byte order mark.

    Cause: fairseq-interactive also ends a line at a carriage return, so all later lines get wrong
    numbers. A byte order mark becomes part of the first word.
    Remove when fairseq reads utf-8-sig with newline="\\n".
    """
    if command() != "fairseq-interactive":
        return

    @replace(fileinput, "hook_encoded")
    def hook_encoded(original, encoding, errors=None):
        return functools.partial(_open, newline="\n")

    if isinstance(sys.stdin, io.TextIOWrapper):
        encoding = sys.stdin.encoding.lower()
        encoding = "utf-8-sig" if encoding == "utf-8" else encoding
        sys.stdin.reconfigure(encoding=encoding, newline="\n")


def symbols_in_input():
    """Read "<pad>", "<s>" and "</s>" in the input of fairseq-interactive as unknown words.

    Cause: fairseq reads them as padding and as the start or end of the sentence.
    Remove when fairseq reads them as words.
    """
    from fairseq.tasks import FairseqTask

    @replace(FairseqTask, "get_interactive_tokens_and_lengths")
    def get_interactive_tokens_and_lengths(original, self, lines, encode_fn):
        sentences, lengths = original(self, lines, encode_fn)
        return [symbols_as_unknown(s, self.source_dictionary) for s in sentences], lengths


def symbols_as_unknown(tokens, dictionary):
    """Return an encoded sentence with the symbols before its end replaced by the unknown word."""
    symbols = torch.tensor([dictionary.index(symbol) for symbol in SYMBOLS])
    is_symbol = torch.isin(tokens, symbols)
    is_symbol[-1] = False  # the end of the sentence
    return tokens.masked_fill(is_symbol, dictionary.unk())


def truncated_input():
    """Truncate the input of fairseq-interactive under --truncate-source.

    Cause: fairseq truncates only the sources of prepared data.
    Remove when it truncates these too.
    """
    if command() != "fairseq-interactive":
        return
    from fairseq.tasks.translation import TranslationTask

    @replace(TranslationTask, "build_dataset_for_inference")
    def build_dataset_for_inference(original, self, src_tokens, src_lengths, *args, **kwargs):
        if self.cfg.truncate_source:
            kept = self.cfg.max_source_positions - 1
            src_tokens = [torch.cat([each[:-1][:kept], each[-1:]]) for each in src_tokens]
            src_lengths = [len(each) for each in src_tokens]
        return original(self, src_tokens, src_lengths, *args, **kwargs)


def scored_lines():
    """Refuse what fairseq-score scores wrongly: unequal lengths, ignored flags, unspaced text.

    Cause: fairseq-score leaves out the extra lines of the longer file. With --sacrebleu it ignores
    --ignore-case, --sentence-bleu and --order. It reads a byte order mark as part of a word, which
    the fix skips. A sentence without spaces is one word, so BLEU of Chinese is 0.
    Remove when fairseq-score compares the lengths, refuses the flags, skips the mark and has
    SacreBLEU's -tok.
    """
    from fairseq_cli import score

    score.open = _open  # the plain `open` that fairseq-score calls

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
                    f"{counts[1]:,}: pass the same sentences in the same order, one a line (a "
                    "carriage return also ends a line)"
                )
            with _open(args.ref) as lines:
                if bleu.lacks_spaces(lines):
                    raise UsageError(
                        f"'{args.ref}' has no spaces between words, so BLEU would compare whole "
                        "sentences: use sacrebleu with -tok zh, ja-mecab or char"
                    )
        return original()


def _lines_to_score(path):
    """Return the number of lines as fairseq-score counts them."""
    if path == "-":
        return sum(1 for _ in io.StringIO(sys.stdin.getvalue(), newline=None))
    with _open(path) as file:
        return sum(1 for _ in file)
