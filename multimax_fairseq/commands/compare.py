"""Trains softmax and MultiMax on your parallel text, and compares their translations."""

import argparse
import hashlib
import itertools
import json
import re
import shutil
import subprocess
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest, Result
from tqdm import tqdm

from multimax_fairseq.children import child
from multimax_fairseq.commands.evaluate import PLUGIN, evaluate
from multimax_fairseq.commands.stock import failure, find_command, portable, run, sentences
from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.files import read_lines, write, write_json
from multimax_fairseq.signature import processor, signature

MAPPINGS = ("softmax", "multimax")
SPLITS = ("train", "valid", "test")
Pairs = dict[str, list[tuple[str, str]]]  # {split: sentences with their translations}
SUBWORDS, LONGEST = 6000, 250  # subwords in the vocabulary, and in a sentence of train and valid
POSITIONS = 1024  # of the architecture, with the end of sentence
SAMPLES = 1000
COMMON = (
    "--arch transformer_iwslt_de_en_multimax --share-all-embeddings --encoder-normalize-before "
    "--decoder-normalize-before --criterion label_smoothed_multimax_cross_entropy "
    "--label-smoothing 0.1 --optimizer adam --lr-scheduler polynomial_decay "
    "--required-batch-size-multiple 1 --no-epoch-checkpoints --keep-interval-updates 1 "
    "--log-format simple --log-interval 10"
).split()
ON_CPU = (
    "--encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --decoder-layers 2 "
    "--decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --dropout 0.1 --max-tokens 1500 --lr 5e-3 "
    "--warmup-updates 300 --cpu"
).split()
# The architecture's own size; the paper's batch and dropout.
ON_GPU = "--dropout 0.3 --max-tokens 4096 --lr 5e-4 --warmup-updates 4000 --fp16".split()


def main(args: argparse.Namespace) -> None:
    is_gpu = torch.cuda.is_available()
    if args.updates is None:
        args.updates = 30_000 if is_gpu else 2_500
    pairs = {split: read_pairs(args.text, split, (args.source, args.target)) for split in SPLITS}
    claim(args.out, args, pairs)
    made_with = signature("sacrebleu")  # before the checkout can change
    data = prepare(pairs, args.source, args.target, args.out)
    results = {}
    for mapping in MAPPINGS:
        words = ["--attention-normalizer", mapping, "--seed", str(args.seed)]
        words += ["--max-update", str(args.updates), "--total-num-update", str(args.updates)]
        words += ["--save-interval-updates", str(max(1, args.updates // 5))]
        words += [*COMMON, *(ON_GPU if is_gpu else ON_CPU)]
        folder = args.out / mapping
        command = train(data, folder, words, args.updates)
        log = folder / "evaluate.log"
        result = evaluate(folder / "checkpoint_best.pt", data, log=log)
        results[mapping] = result | {"command": portable(command)}
    references = read_lines(data / f"test.reference.{args.target}")
    systems = [hypotheses(args.out / mapping, len(references)) for mapping in MAPPINGS]
    found = paired_bootstrap(systems[0], systems[1], references)
    line = {"models": results, **found, "hardware": processor(), **made_with}
    write_json(args.out / "result.json", line)
    print(table(results, **found), end="")
    print(f"written: {args.out / 'result.json'}")


def claim(out: Path, args: argparse.Namespace, pairs: Pairs) -> None:
    """Write the settings of a new comparison; raise UsageError if `out` has another one."""
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    settings = {name: getattr(args, name) for name in ("source", "target", "updates", "seed")}
    file, line = out / "settings.json", json.dumps({**settings, "sha256": digest})
    if file.exists() and read_lines(file) != [line]:
        raise UsageError(f"'{out}' is a comparison of other text or settings: give another --out")
    out.mkdir(parents=True, exist_ok=True)
    write(file, f"{line}\n")


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


def train(data: Path, folder: Path, words: list[str], updates: int) -> list[str]:
    """Run or resume fairseq-train with a progress bar; return the command."""
    folder.mkdir(exist_ok=True)
    command = [find_command("fairseq-train"), str(data), "--user-dir", str(PLUGIN), *words]
    command += ["--save-dir", str(folder)]
    log = folder / "train.log"
    with (
        log.open("a", encoding="utf-8") as file,
        tqdm(total=updates, desc=folder.name, unit=" updates") as bar,
        child(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            if found := re.search(r" loss=([\d.]+).* num_updates=(\d+)", line):
                bar.set_postfix_str(f"loss {found[1]}", refresh=False)
                bar.update(int(found[2]) - bar.n)
    if process.returncode:
        raise failure("fairseq-train", log.read_text(encoding="utf-8"), log)
    return command


def hypotheses(folder: Path, count: int) -> list[str]:
    """Return the translations in a model's evaluate.log."""
    found = sentences((folder / "evaluate.log").read_text(encoding="utf-8"), "H")
    return [found[number] for number in range(count)]


def paired_bootstrap(softmax: list[str], other: list[str], references: list[str]) -> dict[str, Any]:
    """Return the difference in BLEU, and p of a paired bootstrap test (Koehn, 2004)."""
    systems: list[tuple[str, Sequence[str]]] = [("softmax", softmax), ("other", other)]
    test = PairedTest(systems, {"BLEU": BLEU()}, [references], "bs", SAMPLES)
    base, found = typing.cast(list[Result], test()[1]["BLEU"])
    difference = found.score - base.score
    # SacreBLEU's p of identical translations is 1 / (SAMPLES + 1), as if they differed.
    return {"difference": difference, "p": found.p_value if difference else 1.0}


def table(results: dict[str, Any], difference: float, p: float) -> str:
    lines = ["attention  SacreBLEU   chrF"]
    lines += [
        f"{mapping:<9}{result['value']:11.2f}{result['chrf']:7.2f}"
        for mapping, result in results.items()
    ]
    lines += [
        f"difference: {difference:+.2f} BLEU, p = {p:.3f} (paired bootstrap over {SAMPLES:,} "
        "samples of the test set; one training each)",
        results["softmax"]["signature"],
    ]
    return "".join(f"{line}\n" for line in lines)
