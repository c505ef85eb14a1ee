"""Subwords, and their binarisation by fairseq-preprocess."""

import io
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from steps import SPLITS, fail, read, say, write

from multimax_fairseq.children import child

# The lines of fairseq-preprocess: the text, and the share of its tokens that are <unk>.
REPLACED = re.compile(r"([^/\n]+): \d+ sents, \d+ tokens, (\S+)% replaced")


def sentencepieces(
    folder: Path, languages: tuple[str, ...], size: int, model_type: str = "bpe"
) -> None:
    """Write sentencepiece.model, dict.txt and the subwords of each text, SPLIT.sp.LANGUAGE.

    "bpe" trains ten times as fast as sentencepiece's default, "unigram".
    """
    import sentencepiece

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        # File names would be recorded in the model.
        sentence_iterator=itertools.chain.from_iterable(
            read(folder / f"train.{language}") for language in languages
        ),
        model_writer=made,
        model_type=model_type,
        vocab_size=size,
        hard_vocab_limit=False,  # a smaller text gets a smaller vocabulary
        character_coverage=1.0,
        max_sentence_length=1 << 20,  # in bytes; sentencepiece silently drops longer lines
        minloglevel=1,
    )
    (folder / "sentencepiece.model").write_bytes(made.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    # fairseq adds the first three (<unk>, <s>, </s>) itself, and does not use the counts.
    write(
        folder / "dict.txt",
        (f"{model.id_to_piece(i)} 1" for i in range(3, model.vocab_size())),
    )
    for split, language in itertools.product(SPLITS, languages):
        lines = read(folder / f"{split}.{language}")
        write(folder / f"{split}.sp.{language}", map(" ".join, model.encode(lines, out_type=str)))


def binarize(prefixes: Iterable[Path], target: Path, workers: int, *options: object) -> None:
    """Run fairseq-preprocess on the texts of the splits; print the share of unknown tokens."""
    command = [sys.executable, "-m", "multimax_fairseq", "fairseq-preprocess"]
    command += ["--destdir", str(target)]
    for split, prefix in zip(SPLITS, prefixes, strict=True):
        command += [f"--{split}pref", str(prefix)]
    command += ["--workers", str(min(workers, os.cpu_count() or 1)), *map(str, options)]
    with child(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        close_fds=False,  # see alone()
    ) as process:
        output, _ = process.communicate()
    if process.returncode:
        if os.environ.get("MULTIMAX_TRACEBACK", "0") not in ("", "0"):
            sys.stderr.buffer.write(output)
        lines = filter(str.strip, output.decode(errors="replace").split("\n"))
        said = [line for line in lines if not line.startswith("(MULTIMAX_TRACEBACK")]
        last = said[-1].strip() if said else "no output"
        fail(f"fairseq-preprocess failed: {last}; MULTIMAX_TRACEBACK=1 shows its output.")
    for name, share in REPLACED.findall(output.decode(errors="replace")):
        if float(share):
            say(f"  {name}: {share}% of the tokens are <unk>")
    (target / "preprocess.log").unlink()  # it names folders of this machine
