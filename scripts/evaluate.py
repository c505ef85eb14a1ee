#!/usr/bin/env python3
"""Evaluates a checkpoint on a folder of fairseq-preprocess: SacreBLEU, or perplexity.

    scripts/evaluate.sh CHECKPOINT DATA-BIN [--average N] [--subset test] [--beam 5] [--json FILE]
                        [--user-dir DIR] [--quantize int8]

Translation: SacreBLEU and chrF of the detokenised text, and BLEU of its Moses tokens, as older
papers have it. A translation has at most 1.2 tokens for each of its source, and 10 more, or what
max_len_a and max_len_b say in the --eval-bleu-args that the model was trained with. The references
are DATA-BIN/SUBSET.reference.LANGUAGE where data preparation has left them, raw text, one sentence
per line; else they are read back from DATA-BIN, where an unknown word matches nothing, and the
output gives the number of references that hold one. Where evaluation.json there says that the model
knows lower case alone, no score looks at case; where it says that the data have other numbers of
sentence pairs than expected, the signatures end in them.

Both compute in float32, whether or not the model was trained with --bf16. A source that is longer
than the model takes is an error: --truncate-source of the training does not act here.

Language model: perplexity a token, end-of-sentence tokens included, by fairseq's protocol: each
token after at least 400 earlier ones in blocks of 512 (in the same proportion for other blocks).
Perplexity a word, of the text before subwords, where evaluation.json has their number.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from average_checkpoints import newest, write_average
from fairseq import checkpoint_utils
from fairseq.data.data_utils import infer_language_pair
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesDetokenizer, MosesTokenizer

from multimax_fairseq import compat
from multimax_fairseq.compat.silent import UNKNOWN_IN_REFERENCE, UNKNOWN_WORD
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import check_place, whole
from multimax_fairseq.models.loading import task_of

ROOT = Path(__file__).resolve().parent.parent
PLUGIN = ROOT / "multimax_fairseq"


def program(name: str) -> str:
    """The path of a stock fairseq command: this environment's, or the one in PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"there is no command {name}: activate the environment it is in")
    return found


def check_path(what: str, path: Path) -> None:
    """Raise UsageError for a path that fairseq would read as several."""
    if ":" in str(path):
        raise UsageError(
            f"{what} '{path}' has a ':', where fairseq would split it: name another folder"
        )


def portable(words: list[str]) -> list[str]:
    """A command as it is called from the checkout, whose own place is nobody's business."""
    inside = [word.removeprefix(f"{ROOT}/") for word in words[1:]]
    return [Path(words[0]).name, *inside]


def command(name: str, *arguments: object) -> list[str]:
    return [program(name), *map(str, arguments)]


def not_ours(described: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{described} is not what data-prep/ writes ({error}): prepare the data again, or remove "
        "that file"
    )


def describe(data: Path, target: str) -> dict[str, Any]:
    """What undoes the preparation of the text: evaluation.json, or what the dictionary tells; and
    `pairs`, the numbers of sentence pairs where they are not those expected, for a signature."""
    if (described := data / "evaluation.json").is_file():
        try:
            found = json.loads(described.read_text(encoding="utf-8"))
            text = {key: found[key] for key in ("remove_bpe", "tokenizer", "lowercase")}
            text["pairs"] = ", ".join(
                f"{split} {counts['found']:,} (expected {counts['expected']:,})"
                for split, counts in found.get("differing_counts", {}).items()
            )
            return text
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise not_ours(described, error) from None
    file = data / f"dict.{target}.txt"
    if not file.is_file():
        raise UsageError(f"'{data}' has no {file.name}: give a folder of fairseq-preprocess")
    types = [line.split(" ")[0] for line in raw_lines(file)]
    remove = None
    if any(word.startswith("▁") for word in types):
        remove = "sentencepiece"
    elif any(word.endswith("@@") for word in types):
        remove = "@@ "
    return {"remove_bpe": remove, "tokenizer": None, "lowercase": False, "pairs": ""}


def last_line(said: str) -> str:
    """Return the last line of a command's output, which is the sentence of its error."""
    lines = [line for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def run(words: list[str], log: Path) -> str:
    """Run a command; return what it printed, errors first, which is kept in a file too."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8")
        errors.seek(0)
        told = errors.read()
    log.write_text(f"{told}\n{done.stdout}", encoding="utf-8")
    if done.returncode:
        said = last_line(told.strip() or done.stdout)
        raise UsageError(f"{Path(words[0]).name} failed, see {log}: {said}")
    return f"{told}\n{done.stdout}"


def sentences(output: str, kind: str) -> dict[int, str]:
    """Text by sentence number of fairseq-generate's lines H (hypothesis) or T (target)."""
    tab = r"\t\S+\t" if kind == "H" else r"\t"
    return {int(n): s for n, s in re.findall(rf"^{kind}-(\d+){tab}(.*)$", output, re.MULTILINE)}


def raw_lines(file: Path) -> list[str]:
    """The lines of a text; nothing but a line feed ends one."""
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            return [line.removesuffix("\n") for line in lines]
    except UnicodeDecodeError as error:
        raise UsageError(f"'{file}' is not UTF-8 ({error}): prepare the data again") from None


def translation(
    checkpoint: Path, data: Path, task: Any, subset: str, beam: int, options: list[str], log: Path
) -> dict[str, Any]:
    source, target = task.source_lang, task.target_lang
    if source is None or target is None:
        source, target = infer_language_pair(str(data))
    if target is None:
        raise UsageError(f"'{data}' has no data of a language pair: check its path")
    text = describe(data, target)
    length = json.loads(getattr(task, "eval_bleu_args", None) or "{}")
    words = command(
        *("fairseq-generate", data, "--path", checkpoint, "--gen-subset", subset),
        *("--source-lang", source, "--target-lang", target, "--beam", beam),
        *("--max-len-a", length.get("max_len_a", 1.2), "--max-len-b", length.get("max_len_b", 10)),
        *("--max-tokens", 4096, *options),
        *("--required-batch-size-multiple", 1),
        *(("--remove-bpe", text["remove_bpe"]) if text["remove_bpe"] else ()),
    )
    output = run(words, log)
    found, wanted = sentences(output, "H"), sentences(output, "T")
    kept = data / f"{subset}.reference.{target}"
    count = len(wanted)
    if kept.is_file():
        references = raw_lines(kept)
        count = len(references)
    if not count or not set(found) == set(wanted) == set(range(count)):
        raise UsageError(
            f"fairseq-generate gave {len(found)} translations for {count} references: see {log}"
        )
    ordered = [found[i] for i in range(count)]
    # SacreBLEU would split fairseq's placeholder into pieces that match <unk> in a translation.
    targets = [wanted[i].replace(UNKNOWN_IN_REFERENCE, UNKNOWN_WORD) for i in range(count)]
    detokenized = ordered
    if text["tokenizer"] == "moses":
        detokenize = MosesDetokenizer(lang=target).detokenize
        detokenized = [detokenize(line.split()) for line in ordered]
        tokens, target_tokens = ordered, targets
        if not kept.is_file():
            references = [detokenize(line.split()) for line in targets]
    else:
        if not kept.is_file():
            references = targets
        tokenize = MosesTokenizer(lang=target).tokenize
        tokens = [tokenize(line, return_str=True, escape=False) for line in ordered]
        target_tokens = [tokenize(line, return_str=True, escape=False) for line in references]
    bleu = BLEU(lowercase=text["lowercase"])
    tokenized = BLEU(lowercase=text["lowercase"], tokenize="none", force=True)
    chrf = CHRF(lowercase=text["lowercase"])
    unknown = 0 if kept.is_file() else sum(UNKNOWN_WORD in line for line in targets)
    differing = f"|pairs:{text['pairs']}" if text["pairs"] else ""  # in SacreBLEU's own form
    differing += f"|unknown:{unknown:,}" if unknown else ""
    return {
        "metric": "SacreBLEU",
        "value": bleu.corpus_score(detokenized, [references]).score,
        "signature": f"{bleu.get_signature()}{differing}",
        "chrf": chrf.corpus_score(detokenized, [references]).score,
        "chrf_signature": f"{chrf.get_signature()}{differing}",
        "tokenized_bleu": tokenized.corpus_score(tokens, [target_tokens]).score,
        "tokenized_signature": f"{tokenized.get_signature()}{differing}",
        "protocol": f"{subset}, {count:,} sentences, beam {beam}, detokenised; references: "
        + ("raw text" if kept.is_file() else "read back from the binarised data")
        + (f", {unknown:,} with unknown words" if unknown else ""),
        "hypotheses": hashlib.sha256("\n".join(detokenized).encode()).hexdigest(),
        "evaluation": portable(words),
    }


def words_of(data: Path, subset: str) -> int | None:
    """How many words a text of subwords had, each paragraph's end among them, if data-prep/ has
    noted it."""
    described = data / "evaluation.json"
    if not described.is_file():
        return None
    try:
        return int(json.loads(described.read_text(encoding="utf-8"))["words"][subset])
    except (ValueError, LookupError, TypeError) as error:
        raise not_ours(described, error) from None


def language_model(
    checkpoint: Path, data: Path, task: Any, subset: str, options: list[str], log: Path
) -> dict[str, Any]:
    block = task.tokens_per_sample
    context = 400 * block // 512
    words = command(
        *("fairseq-eval-lm", data, "--path", checkpoint, "--gen-subset", subset),
        *("--tokens-per-sample", block, "--context-window", context, "--sample-break-mode", "none"),
        *("--max-tokens", 4 * block, "--required-batch-size-multiple", 1, *options),
    )
    output = run(words, log)
    loss = re.findall(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+|inf)", output)
    count = re.findall(r"Evaluated ([\d,]+) tokens", output)
    if not loss or not count:
        raise UsageError(f"fairseq-eval-lm printed no perplexity: see {log}")
    bits, tokens = float(loss[-1][0]), int(count[-1].replace(",", ""))
    kept = words_of(data, subset)
    # The same probability of the same text, shared out over other units.
    a_word = {} if kept is None else {"word_perplexity": 2 ** (bits * tokens / kept)}
    return {
        "metric": "perplexity",
        "value": 2**bits,
        **a_word,
        "signature": f"a token, {count[-1]} tokens, blocks of {block}, context window {context}",
        "protocol": f"{subset}, fairseq-eval-lm, each token after at least {context} others where "
        "the text has as many",
        "evaluation": portable(words),
    }


def log_of(checkpoint: Path, name: str) -> Path:
    """Where what an evaluation prints is kept: beside the checkpoint, if that can be."""
    beside = os.access(checkpoint.parent, os.W_OK)
    folder = checkpoint.parent if beside else Path(tempfile.gettempdir())
    return folder / f"{checkpoint.stem}.{name}.log"


def evaluate(
    checkpoint: Path,
    data: Path,
    subset: str = "test",
    beam: int | None = None,
    log: Path | None = None,
    quantized: bool = False,
    plugin: str | Path = PLUGIN,
) -> dict[str, Any]:
    """Return metric, value, signature and protocol; UsageError, in one sentence, for what fails."""
    for path, what in ((checkpoint, "checkpoint"), (data, "data folder")):
        if not path.exists():
            raise UsageError(f"{what} '{path}' does not exist: check its path")
        check_path(what, path)
    log = log or log_of(checkpoint, subset)
    task = task_of(checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint)), checkpoint)
    options = [] if torch.cuda.is_available() and not quantized else ["--cpu"]
    options += ["--quantize", "int8"] if quantized else []
    options += ["--user-dir", str(plugin)]
    if task._name == "language_modeling":
        for flag, given in (("--quantize int8", quantized), (f"--beam {beam}", beam is not None)):
            if given:
                raise UsageError(f"{flag} is for translation: leave it out")
        return language_model(checkpoint, data, task, subset, options, log)
    if not hasattr(task, "source_lang"):
        raise UsageError(
            f"checkpoint '{checkpoint}' is of the task {task._name}: give one of translation or "
            "language_modeling"
        )
    beam = 5 if beam is None else beam
    return translation(checkpoint, data, task, subset, beam, options, log)


def write(file: Path, text: str) -> None:
    """Write a file, complete or not at all, whoever else is writing it."""
    with whole(file) as aside:
        aside.write_text(text, encoding="utf-8")


def write_json(file: Path, value: Any) -> None:
    write(file, json.dumps(value, ensure_ascii=False) + "\n")


def show(result: dict[str, Any]) -> None:
    print(f"{result['metric']} {result['value']:.2f} ({result['protocol']})")
    print(f"  {result['signature']}")
    if "int8" in result:
        difference = round(result["int8"] - result["value"], 2) + 0.0  # which -0 is not
        print(f"in int8 {result['int8']:.2f}: {difference:+.2f}")
    if "word_perplexity" in result:
        print(f"perplexity a word {result['word_perplexity']:.2f} (between spaces, or an end)")
    if "tokenized_bleu" in result:
        print(f"chrF {result['chrf']:.2f}")
        print(f"  {result['chrf_signature']}")
        print(f"tokenised BLEU {result['tokenized_bleu']:.2f} (Moses tokens)")
        print(f"  {result['tokenized_signature']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="evaluate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path, metavar="DATA-BIN")
    parser.add_argument(
        "--average",
        type=int,
        metavar="N",
        help="first average the folder's last N checkpoints, into averageN.pt there",
    )
    parser.add_argument("--subset", default="test", help="of DATA-BIN; default test")
    parser.add_argument("--beam", type=int, help="of a translation; default 5")
    parser.add_argument(
        "--quantize",
        choices=["int8"],
        help="evaluate in int8 on the CPU besides, and print the difference",
    )
    parser.add_argument(
        "--user-dir",
        type=Path,
        default=PLUGIN,
        metavar="DIR",
        help="the model's own, with this plugin in it; default multimax_fairseq",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    args = parser.parse_args()
    compat.apply()
    try:
        checkpoint = args.checkpoint
        if args.json is not None:
            check_place("--json", args.json)
        if not checkpoint.exists():
            raise UsageError(f"checkpoint '{checkpoint}' does not exist: check its path")
        if args.average is None and checkpoint.is_dir():
            raise UsageError(
                f"'{checkpoint}' is a folder: give one of its checkpoints, or --average N"
            )
        if args.average is not None:
            if args.average < 1:
                raise UsageError(f"--average {args.average} must be at least 1")
            folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
            checkpoint = folder / f"average{args.average}.pt"
            write_average(newest(folder, args.average), checkpoint)
        given = (checkpoint, args.data, args.subset, args.beam)
        score = functools.partial(evaluate, *given, plugin=args.user_dir)
        narrow = {}
        if args.quantize is not None:
            log = log_of(checkpoint, f"{args.subset}.int8")
            narrow = {"int8": score(log=log, quantized=True)["value"]}
        result = score() | narrow
        show(result)
        if args.json is not None:
            write_json(args.json, result)
    except (UsageError, OSError) as error:
        sys.exit(f"evaluate.sh: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
