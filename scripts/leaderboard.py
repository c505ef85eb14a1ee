#!/usr/bin/env python3
"""Trains one attention layer with each mapping on synthetic tasks, with several seeds.

    scripts/leaderboard.sh [--tasks T,...] [--entries E,...] [--seeds N,...] [--quick]
                           [--user-dir DIR] [--jobs N] [--out DIR]

Each task (scripts/leaderboards/tasks.py) is tested at the trained length and at longer ones:

    retrieval  a query averages the values of 1 to 8 relevant keys among many (KL divergence)
    recall     predict the value of a key that a sequence repeats (accuracy)
    maximum    a query finds the class of the item with the largest number (accuracy)
    noisy      as retrieval, but each relevant key is the query plus noise (KL divergence)
    needle     the same with one relevant key
    share      the same with an eighth of the keys relevant
    noise_*, relevant_*  noisy with other noise, or another number of relevant keys

needle, share, noise_* and relevant_* train only the entries that the figure of docs/leaderboard.md
compares, unless --entries names others.

An entry is a mapping of `NORMALIZERS` or a variant of MultiMax (scripts/leaderboards/entries.py). A
mapping of your own joins with --user-dir, the folder of a plugin that registers it.

Each run is one process with one thread and writes OUT/TASK-ENTRY/seed-N/result.json. Finished runs
are skipped, so the same command resumes after an interruption. OUT/results.jsonl collects the
results, OUT/table.md is their table. scripts/leaderboard_page.py adds them to docs/leaderboard.md.
"""

import argparse
import functools
import itertools
import logging
import multiprocessing
import os
import resource
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import lib
import torch
from leaderboards.entries import COMPARED, entries, import_plugin
from leaderboards.tasks import TASKS, TEST_BATCHES, evaluate, train

from multimax_fairseq.children import end_with_parent
from multimax_fairseq.commands import tables
from multimax_fairseq.commands.runs import Run, finish, finished
from multimax_fairseq.commands.stock import portable
from multimax_fairseq.commands.tables import Line, mean_of
from multimax_fairseq.compat.program import program
from multimax_fairseq.errors import UsageError
from multimax_fairseq.signature import processor_and_threads


def plan(out: Path, task: str, entry: str, seed: int, is_quick: bool, user_dir: str) -> Run:
    words = ["scripts/leaderboard.sh", "--tasks", task, "--entries", entry, "--seeds", str(seed)]
    words += ["--quick"] if is_quick else []
    words += ["--user-dir", user_dir] if user_dir else []
    name, folder = f"{task}, {entry}, seed {seed}", out / f"{task}-{entry}" / f"seed-{seed}"
    make_result = functools.partial(result_of, task, entry, seed, is_quick, user_dir)
    return Run(name, folder, portable(words), "", make_result)


def result_of(name: str, entry: str, seed: int, is_quick: bool, user_dir: str, *_: object) -> Line:
    """Train and evaluate one model; return its result."""
    logging.getLogger("multimax_fairseq").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    import_plugin(user_dir)
    task = TASKS[name]
    updates, batches = (task.updates // 20, 1) if is_quick else (task.updates, TEST_BATCHES)
    torch.manual_seed(seed)
    start = time.monotonic()
    normalizer = entries()[entry].normalizer()
    model = train(task, normalizer, seed, updates)
    seconds = time.monotonic() - start
    scores, attention = evaluate(task, model, batches)
    return {
        "experiment": "leaderboard",
        "task": name,
        "row": entry,
        "seed": seed,
        "scores": scores,
        "unit": task.unit,
        "attention": attention,
        "learned": {name: p.tolist() for name, p in normalizer.named_parameters()},
        "updates": updates,
        "updates_per_second": updates / seconds,
        "peak_memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "hardware": processor_and_threads(1),
    }


def work(runs: list[Run], jobs: int) -> None:
    """Finish all runs, several at a time: first those that no other process holds."""
    # A fresh process for each run: its peak memory is the run's own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        jobs, mp_context=context, max_tasks_per_child=1, initializer=end_with_parent
    ) as pool:
        left, count = runs, 0
        try:
            for wait in (False, True):
                futures = {pool.submit(finish, run, wait): run for run in left}
                left = []
                for future in as_completed(futures):
                    run, line = futures[future], future.result()
                    if line is None:
                        left.append(run)
                        continue
                    count += 1
                    scores = ", ".join(f"{x:.4g} at {n}" for n, x in line["scores"].items())
                    progress = f"({count} of {len(runs)})"
                    print(f"{run.name}: {line['unit']} {scores} {progress}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def table(lines: list[Line]) -> str:
    """One table for each task: the mean score of each entry at each length."""
    labels = {row: entry.label for row, entry in entries().items()}
    # A mapping of a plugin that is not given this time has no entry.
    labels |= {line["row"]: line["row"] for line in lines if line["row"] not in labels}
    text = ""
    for name, task in TASKS.items():
        of_task = [line for line in lines if line["task"] == name]
        blocks = [[line for line in of_task if line["row"] == row] for row in labels]
        columns = {
            "mapping": lambda block: labels[block[0]["row"]],
            "seeds": lambda block: str(len(block)),
            **{f"{n} keys": mean_of("scores", str(n), digits=task.digits) for n in task.test},
        }
        if of_task:
            text += f"{task.title}: {task.unit}\n\n{tables.summary(blocks, columns)}\n"
        fewest = min((line["updates"] for line in of_task), default=task.updates)
        if fewest < task.updates:
            text += (
                f"These scores are not results: --quick trains for only {fewest:,} of "
                f"{task.updates:,} updates.\n\n"
            )
    return text


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="leaderboard.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(TASKS)
    parser.add_argument("--tasks", metavar="T,...", help=f"of {names}; default all")
    parser.add_argument("--entries", metavar="E,...", help="default all")
    parser.add_argument("--seeds", type=lib.numbers, metavar="N,...", help="default 1,2,3,4,5")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a test of the command: two seeds of softmax, MultiMax and the plugin's mappings, "
        "few updates, one batch in evaluation",
    )
    parser.add_argument("--user-dir", default="", metavar="DIR", help="a plugin with mappings")
    parser.add_argument(
        "--jobs", type=lib.positive, default=os.cpu_count(), metavar="N", help="processes at once"
    )
    out = lib.ROOT / "results" / "leaderboard"
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"default {out}")
    return parser.parse_args()


def chosen(option: str, text: str | None, known: list[str]) -> list[str]:
    names = known if text is None else text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown {unknown[0]!r} in {option}: choose from {', '.join(known)}")
    return names


def main() -> None:
    args = parse()
    with program("leaderboard.sh", resumes=True):
        own = entries()
        import_plugin(args.user_dir)
        added = [name for name in entries() if name not in own]
        if args.user_dir and not added:
            raise UsageError(
                f"--user-dir '{args.user_dir}' registers no mapping: pass the folder of a plugin "
                "that calls register"
            )
        quick = ",".join(["softmax", "multimax", *added])
        entry_names = args.entries or (quick if args.quick else None)
        skipped = set() if entry_names else set(entries()) - set(COMPARED)
        seeds = args.seeds or ([1, 2] if args.quick else [1, 2, 3, 4, 5])
        tasks = chosen("--tasks", args.tasks, list(TASKS))
        rows = chosen("--entries", entry_names, list(entries()))
        runs = []
        for seed, task, row in itertools.product(seeds, tasks, rows):
            if TASKS[task].is_compared and row in skipped:
                continue
            plugin = "" if row in own else args.user_dir
            runs.append(plan(args.out, task, row, seed, args.quick, plugin))
        work([run for run in runs if finished(run) is None], args.jobs)
        print(f"\n{lib.collect(args.out, table)}Results: {args.out}")


if __name__ == "__main__":
    main()
