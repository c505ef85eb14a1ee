#!/usr/bin/env python3
"""Trains, evaluates and tabulates the rows of an experiment.

    scripts/iwslt14.sh      [options] [-- fairseq-train options]
    scripts/wikitext103.sh  [options] [-- fairseq-train options]
    scripts/iwslt17.sh      [options] [-- fairseq-train options]
    scripts/adaptively_sparse.sh --data NAME [options] [-- fairseq-train options]
    scripts/multi30k.sh     [options] [-- fairseq-train options]
    scripts/speeches.sh     [options] [-- fairseq-train options]
    scripts/reviews.sh      [options] [-- fairseq-train options]
    scripts/tatoeba.sh      [options] [-- fairseq-train options]

configs/EXPERIMENT.yaml has the settings that all rows share, configs/rows/EXPERIMENT.yaml what each
row changes. Each row and seed is one call of fairseq-train. OUT/ROW/seed-N holds

    command             this call, to repeat it by hand
    train.log           its output; checkpoint_best.pt, checkpoint_last.pt: its checkpoints
    evaluate.log        the output of fairseq-generate or fairseq-eval-lm
    result.json         the score, and everything needed to reproduce it
    data.sha256         the checksum of the data

OUT/results.jsonl collects the results, OUT/table.md is their table. Finished runs are skipped,
interrupted ones resume. Several processes can run the same command, for example one per GPU
(CUDA_VISIBLE_DEVICES); each run is done by one of them.

Options after -- go to every fairseq-train call, after those of the row. Without a GPU everything
runs on the CPU in float32.
"""

import argparse
import datetime
import functools
import logging
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import hydra
import lib
import torch
from lib import CONFIGS, ROOT, Experiment, options
from model_statistics import language_model_statistics, learned_values, with_softmax
from omegaconf import DictConfig, OmegaConf

from multimax_fairseq import compat
from multimax_fairseq.children import child
from multimax_fairseq.commands import evaluate
from multimax_fairseq.commands.runs import (
    PEAK,
    STARTED,
    Run,
    next_analysis,
    options_of,
    train,
    work,
)
from multimax_fairseq.commands.stock import find_command
from multimax_fairseq.compat.program import program
from multimax_fairseq.errors import UsageError
from multimax_fairseq.signature import data_checksum, processor_and_threads

# --- from a row to its command -------------------------------------------------------------------


def compose(experiment: Experiment, row: str, data_set: str = "") -> DictConfig:
    """The config of a row on a data set, as fairseq-hydra-train reads it."""
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.1"):  # fairseq's own version
        cfg = hydra.compose(experiment.name)
    OmegaConf.set_struct(cfg, False)
    return OmegaConf.merge(cfg, experiment.data.get(data_set, {}), experiment.changes[row])


def fit_batch(cfg: DictConfig, gpus: int) -> None:
    """Adjust the batch per GPU, or update_freq, to keep the total batch; gpus=0 means the CPU."""
    key, unit = "batch_size", "sentences"
    if "batch_size" not in cfg.dataset:
        key, unit = "max_tokens", "tokens"
    each = cfg.dataset[key]
    world = cfg.distributed_training.distributed_world_size
    batch = each * world * cfg.optimization.update_freq[0]
    devices = max(gpus, 1)
    cfg.distributed_training.distributed_world_size = devices
    if batch % (each * devices) == 0:
        cfg.optimization.update_freq = [batch // (each * devices)]
    elif batch % devices == 0:
        cfg.dataset[key] = batch // devices
        cfg.optimization.update_freq = [1]
    else:
        raise UsageError(f"--gpus {gpus} cannot share {batch} {unit}: choose a divisor")
    if gpus == 0:
        cfg.common.cpu = True
        cfg.common.fp16 = False


def plan(args: argparse.Namespace, row: str, seed: int) -> Run:
    cfg = compose(args.experiment, row, args.data)
    folder = args.out / row / f"seed-{seed}"
    fit_batch(cfg, args.gpus)
    cfg.common.user_dir = str(ROOT / cfg.common.user_dir)
    cfg.common.seed = seed
    cfg.checkpoint.save_dir = str(folder)
    if args.max_update is not None:
        cfg.optimization.max_update = args.max_update
    if cfg.task.get("eval_bleu"):
        text = evaluate.describe(args.data_bin, cfg.task.target_lang)
        cfg.task.eval_bleu_remove_bpe = text["remove_bpe"]
        cfg.task.eval_bleu_detok = text["tokenizer"] or "space"
    command = [find_command("fairseq-train"), str(args.data_bin), *options(cfg), *args.train]
    return Run(
        f"{' '.join(filter(None, (args.experiment.name, args.data)))} {row}, seed {seed}",
        folder,
        command,
        checksum_of(args.data_bin),
        functools.partial(result_of, args, row, seed),
    )


# --- one run -----------------------------------------------------------------------------------


def progress(run: Run, line: str) -> None:
    """Print a line of fairseq-train's log, shortened, if it reports progress."""
    text = ""
    if found := re.search(r"train_inner.* loss=([\d.]+).* wps=(\d+).* num_updates=(\d+)", line):
        loss, speed, update = found[1], int(found[2]), int(found[3])
        updates = int(options_of(run.command)["--max-update"][0])
        text = f"update {update:,} of {updates:,}, loss {loss}, {speed:,} tokens per second"
    elif found := re.search(r"valid on.*\| loss (\S+).*\| ppl (\S+)", line):
        text = f"validation loss {found[1]}, perplexity {found[2]}"
    if text:
        print(f"{run.name}: {text}", flush=True)


def measured(log: str) -> dict[str, Any]:
    """Parameters, updates, seconds, tokens per second and peak memory, from a run's whole log."""
    seconds = 0.0
    for part in log.split(STARTED)[1:]:
        stamps = re.findall(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \|", part, re.MULTILINE)
        times = [datetime.datetime.fromisoformat(stamp) for stamp in stamps]
        if times:
            seconds += (max(times) - min(times)).total_seconds()
    devices = re.findall(r"total memory = ([\d.]+) GB ; name = (.*?)\s*$", log, re.MULTILINE)
    if devices:
        free = [float(gb) for gb in re.findall(r" gb_free=([\d.]+)", log)]
        memory = round((float(devices[0][0]) - min(free)) * 2**30) if free else None
        ranks = set(re.findall(r"rank +(\d+): capabilities", log))
        hardware = f"{len(ranks)} x {devices[0][1]}"
    else:
        peaks = re.findall(rf"^{PEAK} (\d+) bytes", log, re.MULTILINE)
        memory = max(map(int, peaks), default=None)
        hardware = processor_and_threads(torch.get_num_threads())
    speeds = [float(speed) for speed in re.findall(r" wps=([\d.]+)", log)]
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", log)
    updates = re.findall(r" num_updates=(\d+)| num_updates (\d+)", log)
    return {
        "parameters": int(parameters[-1].replace(",", "")) if parameters else None,
        "updates": max((int(a or b) for a, b in updates), default=0),
        "seconds": seconds,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "peak_memory": memory,
        "hardware": hardware,
    }


checksum_of = functools.cache(data_checksum)


def check_finished(run: Run) -> None:
    """Raise UsageError if a model that the run starts from is not trained to its end."""
    for model in options_of(run.command).get("--finetune-from-model", ()):
        if not Path(model).with_name("trained").exists():
            raise UsageError(
                f"{run.name} starts from '{model}', which is not finished: train its row first"
            )


def result_of(args: argparse.Namespace, row: str, seed: int, run: Run, lock: int) -> dict[str, Any]:
    """Train and evaluate; return the result."""
    experiment = args.experiment
    check_finished(run)
    train(run, lock, functools.partial(progress, run))
    print(f"{run.name}: evaluating", flush=True)

    best, plugin = run.folder / "checkpoint_best.pt", options_of(run.command)["--user-dir"][0]

    def score(subset: str, log: str, longer: int | None = None) -> dict[str, Any]:
        file = run.folder / log
        return evaluate.evaluate(
            best, args.data_bin, subset, log=file, plugin=plugin, longer=longer
        )

    result = {**score("test", "evaluate.log"), "learned": learned_values(best)}
    if row in experiment.softmax_decoding:
        softmax = run.folder / "softmax_decoding.pt"
        with_softmax(best, "decoder", softmax)
        log = run.folder / "evaluate.softmax_decoding.log"
        result["softmax_decoding"] = evaluate.evaluate(
            softmax, args.data_bin, "test", log=log, plugin=plugin
        )["value"]
    if not experiment.name.startswith("quickstart_"):
        # Settings are chosen by this score.
        result["validation"] = score("valid", "evaluate.valid.log")["value"]
        if result["metric"] == "perplexity":
            result |= language_model_statistics(best, args.data_bin, plugin)
    if experiment.longer > 1:
        longer = score("test", "evaluate.longer.log", experiment.longer)
        kept = ("value", "word_perplexity", "signature")
        result["longer"] = {key: longer[key] for key in kept if key in longer}
    print(f"{run.name}: {result['metric']} {result['value']:.2f}", flush=True)
    log = (run.folder / "train.log").read_text(encoding="utf-8", errors="replace")
    return {
        **{"experiment": experiment.name, "row": row, "seed": seed},
        **({"data_set": args.data} if args.data else {}),
        **result,
        **measured(log),
    }


# --- all of them -------------------------------------------------------------------------------


# {experiment: the part of data-prep/demo.py that prepares its data}
DEMO = {"speeches": "lm", "reviews": "reviews", "tatoeba": "translation"}


def own_data(experiment: str) -> Path:
    """Where data-prep/ writes an experiment's data by default."""
    return ROOT / "data" / experiment / DEMO.get(experiment, "") / "data-bin"


def choose_rows(experiment: Experiment, text: str) -> list[str]:
    """The rows that --rows names, singly or by group."""
    known = {row: [row] for row in experiment.changes} | experiment.groups
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--rows has the unknown {unknown[0]!r}: choose from {', '.join(known)}")
    return list(dict.fromkeys(row for name in names for row in known[name]))


def parse(name: str) -> argparse.Namespace:
    experiment = Experiment.read(name)
    groups = "; ".join(f"{group}: {', '.join(rows)}" for group, rows in experiment.groups.items())
    seeds, first, gpus = experiment.seeds, next(iter(experiment.groups)), torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        prog=f"{name}.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sets = list(experiment.data)
    if sets:
        text = f"the data set: {', '.join(sets)}; default {sets[0]}"
        parser.add_argument("--data", choices=sets, default=sets[0], metavar="NAME", help=text)
    parser.add_argument(
        "--rows", default=first, help=f"rows or whole groups ({groups}); default {first}"
    )
    text = ",".join(map(str, seeds))
    parser.add_argument(
        "--seeds", type=lib.numbers, default=seeds, metavar="N,N,...", help=f"default {text}"
    )
    parser.add_argument("--gpus", type=int, default=gpus, help="GPUs per run; default all")
    parser.add_argument("--max-update", type=int, metavar="N", help="instead of the config's")
    text = f"default {own_data('NAME' if sets else name).relative_to(ROOT)}, which data-prep/ makes"
    parser.add_argument("--data-bin", type=Path, metavar="DIR", help=f"{text} if it is missing")
    parser.add_argument(
        "--archive", metavar="FILE|DIR", help="archives from which data-prep/ makes --data-bin"
    )
    text = f"default results/{name}{'/NAME' if sets else ''}"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    words = sys.argv[2:]
    cut = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:cut])
    if rest:
        raise UsageError(f"unrecognized {' '.join(rest)}: pass fairseq-train's options after --")
    args.train = words[cut + 1 :]
    # With these options, a run's folder would have the wrong name.
    for flag, ours in (("--seed", "--seeds"), ("--save-dir", "--out")):
        if any(word.partition("=")[0] == flag for word in args.train):
            raise UsageError(f"{flag} after -- is not possible: pass {ours} before --")
    if not 0 <= args.gpus <= gpus:
        raise UsageError(f"--gpus {args.gpus}: this machine has {gpus}")
    args.experiment, args.rows = experiment, choose_rows(experiment, args.rows)
    args.data = args.data if sets else ""
    args.prepared = own_data(args.data or name).resolve()
    args.data_bin = (args.data_bin or args.prepared).resolve()
    args.out = (args.out or ROOT / "results" / name / args.data).resolve()
    return args


def prepare(args: argparse.Namespace) -> None:
    """Prepare the data if --archive asks for it or the default folder is used."""
    name = args.data or args.experiment.name
    if args.archive is not None or args.data_bin == args.prepared:
        part = DEMO.get(name, "")
        end = Path(part, "data-bin")
        if not args.data_bin.match(str(end)):
            raise UsageError(f"--data-bin {args.data_bin} must end in {end} to be prepared")
        folder, flag = args.data_bin.parents[len(end.parts) - 1], "--archive"
        command = [str(ROOT / "data-prep" / f"{name}.sh")]
        if part:
            command = [sys.executable, str(ROOT / "data-prep" / "demo.py"), "--only", part]
            flag = f"--archive-{part}"
        command += ["--out", str(folder)]
        command += [] if args.archive is None else [flag, args.archive]
        with child(command) as process:
            pass
        if process.returncode:
            sys.exit(process.returncode)
    if not args.data_bin.is_dir():
        raise UsageError(f"--data-bin '{args.data_bin}' is not a folder: check its path")


def main() -> None:
    logging.getLogger("hydra").setLevel(logging.WARNING)
    name = sys.argv[1]
    is_quickstart = name.startswith("quickstart_")
    compat.apply()
    with program(f"{'quickstart' if is_quickstart else name}.sh", resumes=True):
        args = parse(name)
        prepare(args)
        args.out.mkdir(parents=True, exist_ok=True)
        # Each seed runs all rows before the next seed, so that the table has all rows early.
        runs = [plan(args, row, seed) for seed in args.seeds for row in args.rows]
        work(runs)
        if not is_quickstart:  # scripts/quickstart_report.py reports those
            print(f"\n{lib.collect(args.out, lib.results_table)}\nResults: {args.out}")
            plugin = options_of(runs[-1].command)["--user-dir"][0]
            best = runs[-1].folder / "checkpoint_best.pt"
            print(next_analysis(best, args.data_bin, args.out, plugin))


if __name__ == "__main__":
    main()
