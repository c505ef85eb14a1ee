"""Trains softmax and MultiMax on your parallel text or data-bin, and compares translations."""

import argparse
import functools
import hashlib
import itertools
import json
import re
import shlex
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fairseq.data.data_utils import infer_language_pair
from tqdm import tqdm

from multimax_fairseq.bleu import metric
from multimax_fairseq.commands.evaluate import PLUGIN, evaluate
from multimax_fairseq.commands.parallel_text import SPLITS, Pairs, prepare, read_pairs
from multimax_fairseq.commands.runs import Run, claim, finished, next_analysis, train, work
from multimax_fairseq.commands.stock import find_command, portable, sentences
from multimax_fairseq.commands.tables import FEWEST, markdown, mean_text, paired
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import read_lines, whole, write, write_json
from multimax_fairseq.signature import data_checksum, processor

MAPPINGS = ("softmax", "multimax")
Result = dict[str, Any]
DESCRIPTIONS = ("protocol", "signature")  # of a result; the same for every seed
# docs/results/multi30k.jsonl: the standard deviation over all 16 seeds of the row softmax.
FEW_SEEDS = (
    "One or two trainings of each mapping are not enough to compare them: on Multi30k, 16 softmax "
    "models (2 + 2 layers, 128 wide) that differ in the seed alone have a standard deviation of "
    "0.38 BLEU. Pass --seeds 5 for a test over seeds."
)
VALIDATION = r"valid on 'valid' subset .* nll_loss (\S+) .* num_updates (\d+)"
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
    for flag in ("updates", "seeds"):
        if (number := getattr(args, flag)) < 1:
            raise UsageError(f"--{flag} {number} must be at least 1")
    source, target, is_binarised = languages(args)
    options = [*COMMON, *(ON_GPU if is_gpu else ON_CPU)]
    options += ["--max-update", str(args.updates), "--total-num-update", str(args.updates)]
    options += ["--save-interval-updates", str(max(1, args.updates // 5))]
    pairs: Pairs = {}
    if is_binarised:
        data = args.text
        check_splits(data, source, target)
        options += ["--source-lang", source, "--target-lang", target]
        if len({(data / f"dict.{language}.txt").read_bytes() for language in (source, target)}) > 1:
            options[options.index("--share-all-embeddings")] = "--share-decoder-input-output-embed"
        digest = data_checksum(data)
    else:
        data = args.out / "data-bin"
        pairs = {split: read_pairs(args.text, split, (source, target)) for split in SPLITS}
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    settings = {"source": source, "target": target, "options": options, "sha256": digest}
    with claim(args.out, wait=True):
        keep_settings(args.out, settings, data)
        if not is_binarised:
            prepare(pairs, source, target, args.out)
    seeds = range(args.seed, args.seed + args.seeds)
    checksum, make_result = data_checksum(data), functools.partial(result_of, data, args.updates)
    trainings: dict[tuple[str, int], Run] = {}
    for seed, mapping in itertools.product(seeds, MAPPINGS):
        folder = args.out / mapping / f"seed-{seed}"
        command = [find_command("fairseq-train"), str(data), "--user-dir", str(PLUGIN)]
        command += ["--attention-normalizer", mapping, "--seed", str(seed), *options]
        command += ["--save-dir", str(folder)]
        name = f"{mapping}, seed {seed}"
        trainings[mapping, seed] = Run(name, folder, command, checksum, make_result)
    work([*trainings.values()])
    runs = {
        mapping: [finished(trainings[mapping, seed]) or {} for seed in seeds]
        for mapping in MAPPINGS
    }
    models = {mapping: over_seeds(results) for mapping, results in runs.items()}
    scores = ([run["value"] for run in runs[mapping]] for mapping in MAPPINGS)
    gains = [multimax - softmax for softmax, multimax in zip(*scores, strict=True)]
    found = {"seeds": [*seeds], "models": models, **difference(gains)}
    write_json(args.out / "result.json", found)
    folders = {mapping: args.out / mapping / f"seed-{args.seed}" for mapping in MAPPINGS}
    print(samples(pairs.get("test") or read_back(folders["multimax"]), folders))
    print(table(runs, gains, found["p"]), end="")
    print(f"written: {args.out / 'result.json'}")
    print(draw(args.out, seeds))
    best = folders["multimax"] / "checkpoint_best.pt"
    print(next_analysis(best, data, args.out) if is_binarised else next_translation(best, data))


def languages(args: argparse.Namespace) -> tuple[str, str, bool]:
    """Return both languages, and whether the folder is one of fairseq-preprocess."""
    given = args.source, args.target
    found = infer_language_pair(str(args.text)) if args.text.is_dir() else (None, None)
    is_binarised = None not in found
    if None in given and (any(given) or not is_binarised):
        raise UsageError(f"the languages of '{args.text}' are unknown: pass --source and --target")
    return *(found if None in given else given), is_binarised


def check_splits(data: Path, source: str, target: str) -> None:
    """Raise UsageError if a folder of fairseq-preprocess lacks what the runs need."""
    metric(target)  # raises UsageError without its package
    for split, language in itertools.product(SPLITS, (source, target)):
        names = [f"{split}.{a}-{b}.{language}.idx" for a, b in ((source, target), (target, source))]
        if not any((data / name).is_file() for name in names):
            raise UsageError(
                f"'{data}' has no {names[0]}: run fairseq-preprocess with --trainpref, "
                "--validpref and --testpref"
            )


def keep_settings(out: Path, settings: dict[str, Any], data: Path) -> None:
    """Write the settings of a new comparison; raise UsageError if `out` has another one."""
    file, line = out / "settings.json", json.dumps(settings)
    is_started = file.exists() and data.exists()
    if is_started and read_lines(file) != [line]:
        raise UsageError(f"'{out}' is a comparison of other text or settings: pass another --out")
    write(file, f"{line}\n")


def result_of(data: Path, updates: int, run: Run, lock: int) -> Result:
    """Train with a progress bar, and evaluate; return the result."""
    # The bar appears with the first progress, below the line that train() prints.
    with tqdm(total=updates, desc=run.name, unit=" updates", delay=1) as bar:

        def advance(line: str) -> None:
            if found := re.search(r" loss=([\d.]+).* num_updates=(\d+)", line):
                bar.set_postfix_str(f"loss {found[1]}", refresh=False)
                bar.update(int(found[2]) - bar.n)

        train(run, lock, advance)
    result = evaluate(run.folder / "checkpoint_best.pt", data, log=run.folder / "evaluate.log")
    return {**result, "command": portable(run.command), "hardware": processor()}


def hypotheses(folder: Path, count: int) -> list[str]:
    """Return the translations in a model's evaluate.log."""
    found = sentences((folder / "evaluate.log").read_text(encoding="utf-8"), "H")
    return [found[number] for number in range(count)]


def read_back(folder: Path) -> list[tuple[str, str]]:
    """Return the test sentences and their references from a model's evaluate.log."""
    output = (folder / "evaluate.log").read_text(encoding="utf-8")
    sources, references = sentences(output, "S"), sentences(output, "T")
    return [(sources[number], references[number]) for number in range(len(references))]


def over_seeds(runs: list[Result]) -> Result:
    """Return the means of the scores, and their standard deviations if there are several runs."""
    found: Result = {name: runs[0][name] for name in runs[0] if name.endswith(DESCRIPTIONS)}
    for name in ("value", "chrf"):
        scores = [run[name] for run in runs]
        found[name] = statistics.mean(scores)
        found[f"{name}_deviation"] = statistics.stdev(scores) if len(scores) > 1 else None
    return {**found, "runs": runs}


def difference(gains: list[float]) -> Result:
    """Return the mean difference in BLEU, its deviation, and p from FEWEST seeds on."""
    test = paired(gains) if len(gains) > 1 else None
    return {
        "difference": statistics.mean(gains),
        "deviation": test and test.deviation,
        "p": test.p if test and len(gains) >= FEWEST else None,
    }


def samples(pairs: list[tuple[str, str]], folders: dict[str, Path]) -> str:
    """Return three test sentences with their references and translations."""
    found = {name: hypotheses(folder, len(pairs)) for name, folder in folders.items()}
    text = ""
    for number in range(0, len(pairs), -(-len(pairs) // 3)):
        source, reference = pairs[number]
        lines = {"source": source, "reference": reference}
        lines |= {name: translations[number] for name, translations in found.items()}
        text += "\n" + "".join(f"  {name:10}{line}\n" for name, line in lines.items())
    return text


def table(runs: dict[str, list[Result]], gains: list[float], p: float | None) -> str:
    rows = [
        [mapping, *(mean_text(run[key] for run in each) for key in ("value", "chrf"))]
        for mapping, each in runs.items()
    ]
    text = markdown(["attention", "SacreBLEU", "chrF"], rows, align=True)
    text += f"difference: {mean_text(gains, sign='+')} BLEU"
    if p is None:
        text += f"\n{FEW_SEEDS}"
    else:
        text += f", p = {p:.3f} (paired t-test over {len(gains)} seeds)"
    return f"{text}\n{runs['softmax'][0]['signature']}\n"


def next_translation(checkpoint: Path, data: Path) -> str:
    words = ["fairseq-interactive", data, "--user-dir", PLUGIN.name, "--path", checkpoint]
    words += ["--beam", 5, "--bpe", "sentencepiece"]
    words += ["--sentencepiece-model", data / "sentencepiece.model"]
    return f"Next, to translate your own sentences: {shlex.join(map(str, words))}"


def draw(out: Path, seeds: Iterable[int]) -> str:
    """Draw the validation losses of all runs; return what to print."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "no curves.svg: matplotlib is missing (pip install 'multimax-fairseq[analysis]')"
    figure = Figure(figsize=(5.5, 3.5), layout="constrained")
    axes = figure.subplots()
    for mapping, style in zip(MAPPINGS, ("C0-o", "C1--s"), strict=True):
        for number, seed in enumerate(seeds):
            log = (out / mapping / f"seed-{seed}" / "train.log").read_text(encoding="utf-8")
            # By update: a resumed run repeats some.
            losses = {int(n): float(loss) for loss, n in re.findall(VALIDATION, log)}
            label = None if number else mapping
            axes.plot(*zip(*sorted(losses.items()), strict=True), style, markersize=3, label=label)
    axes.set(xlabel="updates", ylabel="validation loss, bits per subword")
    axes.legend()
    with whole(out / "curves.svg") as aside:
        figure.savefig(aside, format="svg")
    return f"drawn: {out / 'curves.svg'}"
