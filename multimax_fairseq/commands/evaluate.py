"""Evaluates a checkpoint on a folder of fairseq-preprocess: SacreBLEU, or perplexity."""

import argparse
import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import infer_language_pair
from fairseq.tasks import TASK_REGISTRY
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacremoses import MosesDetokenizer, MosesTokenizer

from multimax_fairseq import bleu
from multimax_fairseq.commands.average import average, newest
from multimax_fairseq.commands.parallel_text import unknown_share
from multimax_fairseq.commands.stock import find_command, portable, run, sentences
from multimax_fairseq.compat import PACKAGE
from multimax_fairseq.compat.silent import UNKNOWN_IN_REFERENCE, UNKNOWN_WORD
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import check_output_file, read_lines, write_json
from multimax_fairseq.integrations.convert.checkpoint import write
from multimax_fairseq.models.loading import kind_of, task_of

logger = logging.getLogger(__name__)
PLUGIN = Path(PACKAGE)


def stock_command(name: str, *arguments: object) -> list[str]:
    return [find_command(name), *map(str, arguments)]


def invalid_description(described: Path, error: Exception) -> UsageError:
    return UsageError(
        f"{described} is not what data-prep/ writes ({error}): prepare the data again, or remove "
        "that file"
    )


def describe(data: Path, target: str) -> dict[str, Any]:
    """Return how the text was prepared, from evaluation.json or else from the dictionary.

    `pairs` names the splits whose number of sentence pairs differs from the expected one.
    """
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
            raise invalid_description(described, error) from None
    file = data / f"dict.{target}.txt"
    if not file.is_file():
        raise UsageError(f"'{data}' has no {file.name}: pass a folder of fairseq-preprocess")
    types = [line.split(" ")[0] for line in read_lines(file)]
    remove = None
    if any(word.startswith("▁") for word in types):
        remove = "sentencepiece"
    elif any(word.endswith("@@") for word in types):
        remove = "@@ "
    return {"remove_bpe": remove, "tokenizer": None, "lowercase": False, "pairs": ""}


def translation(
    checkpoint: Path, data: Path, task: Any, subset: str, beam: int, options: list[str], log: Path
) -> dict[str, Any]:
    source, target = task.source_lang, task.target_lang
    if source is None or target is None:
        source, target = infer_language_pair(str(data))
    if target is None:
        raise UsageError(f"'{data}' has no data of a language pair: check its path")
    text = describe(data, target)
    sacrebleu = bleu.metric(target, text["lowercase"])  # first, since a package may be missing
    length = json.loads(getattr(task, "eval_bleu_args", None) or "{}")
    words = stock_command(
        *("fairseq-generate", data, "--path", checkpoint, "--gen-subset", subset),
        *("--source-lang", source, "--target-lang", target, "--beam", beam),
        *("--max-len-a", length.get("max_len_a", 1.2), "--max-len-b", length.get("max_len_b", 10)),
        *("--max-tokens", 4096, *options),
        *("--required-batch-size-multiple", 1),
        *(("--remove-bpe", text["remove_bpe"]) if text["remove_bpe"] else ()),
    )
    output = run(words, log)
    file = data / f"{subset}.reference.{target}"
    raw = read_lines(file) if file.is_file() else None
    hypotheses, targets = in_order(output, raw, log)
    is_tokenized = text["tokenizer"] == "moses"
    translations, translation_tokens = text_and_tokens(hypotheses, target, is_tokenized)
    # The raw text is not tokenised, so the reference of Moses tokens is the binarised one.
    lines = targets if raw is None or is_tokenized else raw
    references, reference_tokens = text_and_tokens(lines, target, is_tokenized)
    unknown_in_tokens = sum(UNKNOWN_WORD in line for line in targets) if lines is targets else 0
    unknown = unknown_in_tokens if raw is None else 0
    references = references if raw is None else raw
    if mistake := bleu.language_mistake(target, references):
        logger.warning(mistake)
    chrf = CHRF(lowercase=text["lowercase"])
    # In the format of SacreBLEU's signatures.
    differing = f"|pairs:{text['pairs']}" if text["pairs"] else ""
    of_tokens = {}
    if is_tokenized or bleu.tokenizer(target) == bleu.DEFAULT:
        tokenized = BLEU(lowercase=text["lowercase"], tokenize="none", force=True)
        score = tokenized.corpus_score(translation_tokens, [reference_tokens]).score
        signature = f"{tokenized.get_signature()}{differing}{noted(unknown_in_tokens)}"
        of_tokens = {"tokenized_bleu": score, "tokenized_signature": signature}
    return {
        "metric": "SacreBLEU",
        "value": sacrebleu.corpus_score(translations, [references]).score,
        "signature": f"{sacrebleu.get_signature()}{differing}{noted(unknown)}",
        "chrf": chrf.corpus_score(translations, [references]).score,
        "chrf_signature": f"{chrf.get_signature()}{differing}{noted(unknown)}",
        **of_tokens,
        **unknown_tokens(
            data,
            [f"{subset}.{a}-{b}.{source}" for a, b in ((source, target), (target, source))],
            f"dict.{source}.txt",
        ),
        "protocol": f"{subset}, {len(targets):,} sentences, beam {beam}, detokenised; references: "
        + ("read back from the binarised data" if raw is None else "raw text")
        + (f", {unknown:,} with unknown words" if unknown else ""),
        "hypotheses": hashlib.sha256("\n".join(translations).encode()).hexdigest(),
        "evaluation": portable(words),
    }


def unknown_tokens(data: Path, names: list[str], dictionary: str) -> dict[str, float]:
    """Return {"unknown": share of <unk> in percent} if it is not 0; one of the texts exists."""
    texts = [data / name for name in names if (data / f"{name}.idx").exists()]
    share = max((unknown_share(text, data / dictionary) for text in texts), default=0.0)
    return {"unknown": share} if share else {}


def in_order(output: str, raw: list[str] | None, log: Path) -> tuple[list[str], list[str]]:
    """Return fairseq-generate's translations and targets, in the order of the text.

    Raises:
        UsageError: a sentence is missing, by the numbers of targets or of raw references.
    """
    hypotheses, targets = sentences(output, "H"), sentences(output, "T")
    count = len(targets) if raw is None else len(raw)
    if not count or not set(hypotheses) == set(targets) == set(range(count)):
        raise UsageError(
            f"fairseq-generate gave {len(hypotheses)} translations for {count} references: see "
            f"{log}"
        )
    # SacreBLEU would split fairseq's placeholder into tokens that match <unk> in a translation.
    references = [targets[i].replace(UNKNOWN_IN_REFERENCE, UNKNOWN_WORD) for i in range(count)]
    return [hypotheses[i] for i in range(count)], references


def text_and_tokens(
    lines: list[str], language: str, is_tokenized: bool
) -> tuple[list[str], list[str]]:
    """Return lines as plain text and as Moses tokens; with `is_tokenized` they are tokens."""
    if is_tokenized:
        detokenize = MosesDetokenizer(lang=language).detokenize
        return [detokenize(line.split()) for line in lines], lines
    tokenize = MosesTokenizer(lang=language).tokenize
    return lines, [tokenize(line, return_str=True, escape=False) for line in lines]


def noted(unknown: int) -> str:
    """Return the number of references with unknown words for a signature."""
    return f"|unknown:{unknown:,}" if unknown else ""


def words_of(data: Path, subset: str) -> int | None:
    """Return the number of words before subwords, plus one per paragraph; None if unknown."""
    described = data / "evaluation.json"
    if not described.is_file():
        return None
    try:
        return int(json.loads(described.read_text(encoding="utf-8"))["words"][subset])
    except (ValueError, LookupError, TypeError) as error:
        raise invalid_description(described, error) from None


def language_model(
    checkpoint: Path, data: Path, task: Any, subset: str, longer: int, options: list[str], log: Path
) -> dict[str, Any]:
    block = longer * task.tokens_per_sample
    context = 400 * block // 512
    words = stock_command(
        *("fairseq-eval-lm", data, "--path", checkpoint, "--gen-subset", subset),
        *("--tokens-per-sample", block, "--context-window", context, "--sample-break-mode", "none"),
        *("--max-tokens", 4 * block, "--required-batch-size-multiple", 1, *options),
    )
    if longer > 1:
        words += ["--model-overrides", repr({"max_target_positions": block})]
    output = run(words, log)
    loss = re.findall(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+|inf)", output)
    count = re.findall(r"Evaluated ([\d,]+) tokens", output)
    if not loss or not count:
        raise UsageError(f"fairseq-eval-lm printed no perplexity: see {log}")
    bits, tokens = float(loss[-1][0]), int(count[-1].replace(",", ""))
    count_of_words = words_of(data, subset)
    per_word = {}
    if count_of_words is not None:  # the same probability of the same text, normalised by words
        per_word = {"word_perplexity": 2 ** (bits * tokens / count_of_words)}
    return {
        "metric": "perplexity",
        "value": 2**bits,
        **per_word,
        **unknown_tokens(data, [subset], "dict.txt"),
        "signature": f"per token, {count[-1]} tokens, blocks of {block}, context window {context}",
        "protocol": f"{subset}, fairseq-eval-lm, each token after at least {context} others where "
        "the text has as many",
        "evaluation": portable(words),
    }


def log_of(checkpoint: Path, name: str) -> Path:
    """Return a path beside the checkpoint, or in the temporary folder if that is read-only."""
    is_writable = os.access(checkpoint.parent, os.W_OK)
    folder = checkpoint.parent if is_writable else Path(tempfile.gettempdir())
    return folder / f"{checkpoint.stem}.{name}.log"


def evaluate(
    checkpoint: Path,
    data: Path,
    subset: str = "test",
    beam: int | None = None,
    log: Path | None = None,
    quantized: bool = False,
    plugin: str | Path = PLUGIN,
    longer: int | None = None,
) -> dict[str, Any]:
    """Return metric, value, signature and protocol; raise UsageError if a command fails."""
    for path, what in ((checkpoint, "checkpoint"), (data, "data folder")):
        if not path.exists():
            raise UsageError(f"{what} '{path}' does not exist: check its path")
    log = log or log_of(checkpoint, subset)
    task = task_of(checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint)), checkpoint)
    options = [] if torch.cuda.is_available() and not quantized else ["--cpu"]
    options += ["--quantize", "int8"] if quantized else []
    options += ["--user-dir", str(plugin)]
    is_text = not hasattr(task, "source_lang")  # of a plugin's task that is not imported here
    kind = "language_modeling" if is_text else "translation"
    if task._name in TASK_REGISTRY:
        kind = kind_of(task._name) or task._name
    if kind == "language_modeling":
        if quantized:
            raise UsageError("--quantize int8 is for translation: leave it out")
        return language_model(checkpoint, data, task, subset, longer or 1, options, log)
    if longer is not None:
        raise UsageError("--longer is for language models: leave it out")
    if kind != "translation":
        raise UsageError(
            f"checkpoint '{checkpoint}' is of the task {task._name}: pass one of translation or "
            "language_modeling"
        )
    beam = 5 if beam is None else beam
    return translation(checkpoint, data, task, subset, beam, options, log)


def show(result: dict[str, Any]) -> None:
    print(f"{result['metric']} {result['value']:.2f} ({result['protocol']})")
    print(f"  {result['signature']}")
    if "unknown" in result:
        print(f"{result['unknown']:.3g}% of the model's input tokens are <unk>")
    if "int8" in result:
        difference = round(result["int8"] - result["value"], 2) + 0.0  # no -0
        print(f"in int8 {result['int8']:.2f}: {difference:+.2f}")
    if "word_perplexity" in result:
        words = "split at spaces; a line end counts as a word"
        print(f"perplexity per word {result['word_perplexity']:.2f} ({words})")
    if "chrf" in result:
        print(f"chrF {result['chrf']:.2f}")
        print(f"  {result['chrf_signature']}")
    if "tokenized_bleu" in result:
        print(f"tokenised BLEU {result['tokenized_bleu']:.2f} (Moses tokens)")
        print(f"  {result['tokenized_signature']}")


def main(args: argparse.Namespace) -> None:
    checkpoint: Path = args.checkpoint
    if args.json is not None:
        check_output_file("--json", args.json)
    for flag in ("average", "beam", "longer"):
        if (number := getattr(args, flag)) is not None and number < 1:
            raise UsageError(f"--{flag} {number} must be at least 1")
    if not checkpoint.exists():  # --average would take the folder around it
        raise UsageError(f"checkpoint '{checkpoint}' does not exist: check its path")
    if args.average is None and checkpoint.is_dir():
        raise UsageError(f"'{checkpoint}' is a folder: pass one of its checkpoints, or --average N")
    if args.average is not None:
        folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
        checkpoint = folder / f"average{args.average}.pt"
        write(average(newest(folder, args.average)), checkpoint)
    arguments = (checkpoint, args.data, args.subset, args.beam)
    plugin = args.user_dir or PLUGIN
    score = functools.partial(evaluate, *arguments, plugin=plugin, longer=args.longer)
    int8_result = {}
    if args.quantize is not None:
        log = log_of(checkpoint, f"{args.subset}.int8")
        int8_result = {"int8": score(log=log, quantized=True)["value"]}
    result = score() | int8_result
    show(result)
    if args.json is not None:
        write_json(args.json, result)
