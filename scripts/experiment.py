#!/usr/bin/env python3
"""Trains, evaluates and tabulates the rows of an experiment: those of the papers, and with
scripts/quickstart.sh those of the quickstart.

    scripts/iwslt14.sh      [options] [-- fairseq-train options]
    scripts/wikitext103.sh  [options] [-- fairseq-train options]
    scripts/iwslt17.sh      [options] [-- fairseq-train options]
    scripts/multi30k.sh     [options] [-- fairseq-train options]
    scripts/speeches.sh     [options] [-- fairseq-train options]

A row is a file of configs/, EXPERIMENT_ROW.yaml, or an entry of configs/rows/EXPERIMENT.yaml, with
what all rows share in EXPERIMENT.yaml; its values become the options of one stock fairseq-train
call for each seed. In OUT/ROW/seed-N:

    command             that call, to be repeated by hand
    train.log           all that it printed; checkpoint_best.pt, checkpoint_last.pt: its checkpoints
    evaluate.log        likewise for fairseq-generate or fairseq-eval-lm
    result.json         the figure, and all that it takes to find it again
    data.sha256         of the data that it reads

OUT/results.jsonl collects the results, OUT/table.md is their table. What is finished is not done
again; what was stopped goes on where it stopped. The same command may run several times at once, on
one GPU each, say (CUDA_VISIBLE_DEVICES): each takes runs that no other has.

Options after -- go to every fairseq-train call, after those of the row: other sizes, another
schedule. Without a GPU everything runs on the CPU, in float32.
"""

import argparse
import datetime
import fcntl
import functools
import hashlib
import logging
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import evaluate
import torch
from experiment_plan import ROOT, Run, groups, options_of, plan
from tqdm import tqdm

from multimax_fairseq import compat
from multimax_fairseq.compat import saving
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import whole
from multimax_fairseq.signature import processor, signature

STARTED, PEAK = "=== fairseq-train starts:", "=== peak memory:"  # our own lines in train.log


# --- one run -----------------------------------------------------------------------------------


def claim(run: Run, wait: bool) -> int | None:
    """Lock the run's folder and return the lock, or None where another process has it.

    fairseq-train inherits the lock: it holds as long as one of the two lives.
    """
    run.folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(run.folder / "lock", os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def last_checkpoint(folder: Path) -> Path:
    """The checkpoint that a run goes on from, if there is one; fairseq-train itself sees to a
    damaged one. A run that was killed before the first checkpoint had that name too gets it."""
    last = folder / "checkpoint_last.pt"
    numbered = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda f: int(f.stem.split("_")[2]))
    if numbered and not last.exists():
        with whole(last) as aside:
            shutil.copyfile(numbered[-1], aside)
    return last


def train(run: Run, lock: int) -> None:
    """Train to the end, from the last checkpoint if there is one; leaves the file `trained`."""
    made = saving.updates(last_checkpoint(run.folder))
    log = run.folder / "train.log"
    start = f"going on from update {made:,}" if made else "training"
    print(f"{run.name}: {start}; full log: {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{STARTED}\n{run.text}")
        file.flush()
        process = subprocess.Popen(
            run.command, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )
        try:
            with log.open(encoding="utf-8", errors="replace") as follow:
                follow.seek(file.tell())
                memory = watch(run, process, follow)
        finally:
            if process.returncode is None:
                process.terminate()
                process.wait()
        if process.returncode:
            said = evaluate.last_line(log.read_text(encoding="utf-8", errors="replace"))
            raise UsageError(f"fairseq-train failed, see {log}: {said}")
        file.write(f"{PEAK} {memory} bytes\n")
    (run.folder / "trained").touch()


def watch(run: Run, process: subprocess.Popen, follow: TextIO) -> int:
    """Show what the log says until the process ends; return the most memory that it took.

    On a terminal as a bar, elsewhere line by line.
    """
    rest = ""
    plain = not sys.stdout.isatty()
    with tqdm(
        total=run.updates, desc=run.name, unit="update", dynamic_ncols=True, disable=plain
    ) as bar:
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            *lines, rest = (rest + follow.read()).split("\n")
            for line in lines:
                show(run, line, bar)
            if pid:
                break
            time.sleep(0.2)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def show(run: Run, line: str, bar: tqdm) -> None:
    """What a line of fairseq-train's log says to a person, if anything."""
    if found := re.search(r"train_inner.* loss=([\d.]+).* wps=(\d+).* num_updates=(\d+)", line):
        loss, speed, update = found[1], int(found[2]), int(found[3])
        bar.set_postfix_str(f"loss {loss}", refresh=False)
        bar.update(update - bar.n)
        told = f"update {update:,} of {run.updates:,}, loss {loss}, {speed:,} tokens a second"
    elif found := re.search(r"valid on.*\| loss (\S+).*\| ppl (\S+)", line):
        told = f"held-out loss {found[1]}, perplexity {found[2]}"
    else:
        return
    if bar.disable:
        print(f"{run.name}: {told}", flush=True)


def measured(log: str) -> dict[str, Any]:
    """Parameters, updates, seconds, tokens a second and peak memory, from a run's whole log."""
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
        hardware = f"{processor()}, {torch.get_num_threads()} threads"
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


@functools.cache
def digest(data: Path) -> str:
    """The checksum of all that a run reads of its data."""
    kinds = ("*.bin", "*.idx", "dict.*", "*.reference.*")
    total = hashlib.sha256()
    for file in sorted(file for kind in kinds for file in data.glob(kind)):
        with file.open("rb") as content:
            total.update(
                f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode()
            )
    return total.hexdigest()


def finish(run: Run, lock: int) -> None:
    """Train and evaluate, as far as that is not done; leaves result.json."""
    kept, data = run.folder / "command", run.folder / "data.sha256"
    found = digest(run.data)
    other = None
    # In whatever order: that of a config's keys means nothing.
    before = shlex.split(kept.read_text("utf-8")) if kept.exists() else run.command
    if options_of(before) != options_of(run.command):
        other = "with another command (its file `command`)"
    elif data.exists() and data.read_text("utf-8").strip() != found:
        other = f"on other data than '{run.data}' now holds"
    if other:
        raise UsageError(
            f"'{run.folder}' was trained {other}: give another --out, or remove that folder"
        )
    for file in run.folder.parent.parent.glob("*/seed-*/data.sha256"):  # one table compares them
        if file.read_text("utf-8").strip() != found:
            raise UsageError(
                f"'{file.parent}' was trained on other data than '{run.data}' holds, with which no "
                "table can compare it: give another --out"
            )
    if (run.folder / "result.json").exists():
        print(f"Nothing to do: {run.name} is finished.")
        return
    evaluate.write(kept, run.text)
    evaluate.write(data, f"{found}\n")
    if not (run.folder / "trained").exists():
        train(run, lock)
    print(f"{run.name}: evaluating", flush=True)
    best = run.folder / "checkpoint_best.pt"
    log = run.folder / "evaluate.log"
    result = evaluate.evaluate(best, run.data, log=log, plugin=run.plugin)
    if not run.experiment.startswith("quickstart_"):  # what settings may be chosen by
        log = run.folder / "evaluate.valid.log"
        valid = evaluate.evaluate(best, run.data, "valid", log=log, plugin=run.plugin)
        result["validation"] = valid["value"]
    print(f"{run.name}: {result['metric']} {result['value']:.2f}", flush=True)
    log = (run.folder / "train.log").read_text(encoding="utf-8", errors="replace")
    evaluate.write_json(
        run.folder / "result.json",
        {
            **{"experiment": run.experiment, "row": run.row, "seed": run.seed},
            **result,
            **measured(log),
            "data": found,
            "command": shlex.join(evaluate.portable(run.command)),
            **signature("sacrebleu"),
        },
    )


# --- all of them -------------------------------------------------------------------------------


def collect(out: Path) -> str:
    """Write all results under a folder to results.jsonl, and their table, returned, to table.md."""

    files = sorted(out.glob("*/seed-*/result.json"))
    lines = "".join(file.read_text(encoding="utf-8") for file in files)
    evaluate.write(out / "results.jsonl", lines)
    words = [sys.executable, str(ROOT / "scripts" / "tabulate"), str(out / "results.jsonl")]
    table = subprocess.run(words, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    evaluate.write(out / "table.md", table)
    return table


def work(runs: list[Run]) -> None:
    """Finish all runs: first those that no other process is at, then, waiting, the others."""
    waiting = []
    for wait in (False, True):
        for run in waiting if wait else runs:
            if wait:
                print(f"{run.name}: another process is at it; waiting", flush=True)
            lock = claim(run, wait)
            if lock is None:
                waiting.append(run)
                continue
            try:
                finish(run, lock)
            finally:
                os.close(lock)


# As many as in the paper, or as tell small models apart.
SEEDS = {"iwslt14": [1, 2, 3], "multi30k": [1, 2, 3, 4, 5], "speeches": [1, 2, 3, 4, 5]}


# Options of fairseq-train by which a run would not be the one that its folder says.
OWN = {
    "--seed": "give --seeds before --",
    "--save-dir": "give --out before --",
    "--no-save": "leave it out, as the checkpoints are what is evaluated",
    "--disable-validation": "leave it out, as the best checkpoint is what is evaluated",
    "--help": "give it to fairseq-train itself",
    "--log-format": "leave it out, as the log is read",
    "--log-file": "leave it out, as train.log has it all",
}


def own_data(experiment: str) -> Path:
    """Where data-prep/ makes an experiment's data by default."""
    folder = ROOT / "data" / experiment
    return folder / "lm" / "data-bin" if experiment == "speeches" else folder / "data-bin"


def numbers(text: str) -> list[int]:
    found = [int(number) for number in text.split(",")]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{min(found)} is below 0")
    return found


def parse(experiment: str) -> argparse.Namespace:
    known = groups(experiment)
    parser = argparse.ArgumentParser(
        prog=f"{experiment}.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rows",
        default="paper",
        help="; ".join(f"of {group}: {', '.join(names)}" for group, names in known.items())
        + "; or a whole group; default paper",
    )
    parser.add_argument(
        "--seeds",
        type=numbers,
        default=(seeds := SEEDS.get(experiment, [1])),
        metavar="N,N,...",
        help=f"default {','.join(map(str, seeds))}",
    )
    parser.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="for each run; default all"
    )
    parser.add_argument("--max-update", type=int, metavar="N", help="instead of the config's")
    parser.add_argument(
        "--data-bin",
        type=Path,
        default=own_data(experiment),
        metavar="DIR",
        help=f"default {own_data(experiment).relative_to(ROOT)}, made by data-prep/ where it is "
        "missing",
    )
    parser.add_argument(
        "--archive", metavar="FILE|DIR", help="make --data-bin from it, as data-prep/ does"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "results" / experiment,
        metavar="DIR",
        help=f"default results/{experiment}",
    )
    words = sys.argv[2:]
    cut = words.index("--") if "--" in words else len(words)
    args, rest = parser.parse_known_args(words[:cut])
    if rest:
        raise UsageError(f"unrecognized {' '.join(rest)}: give fairseq-train's options after --")
    args.train = words[cut + 1 :]
    args.experiment = experiment
    if args.max_update is not None and args.max_update < 1:
        raise UsageError(f"--max-update {args.max_update} must be at least 1")
    for flag, remedy in OWN.items():
        if any(word.partition("=")[0] == flag for word in args.train):
            raise UsageError(f"{flag} after -- is the script's own: {remedy}")
    single = {name: [name] for names in known.values() for name in names}
    words = [word.strip() for word in args.rows.split(",") if word.strip()]
    unknown = sorted(set(words) - set(single | known))
    if unknown:
        raise UsageError(
            f"--rows has the unknown {unknown[0]!r}: choose from {', '.join(single | known)}"
        )
    if not words:
        raise UsageError(f"--rows names none: choose from {', '.join(single | known)}")
    args.rows = list(dict.fromkeys(row for word in words for row in (single | known)[word]))
    if not 0 <= args.gpus <= torch.cuda.device_count():
        raise UsageError(f"--gpus {args.gpus}: this machine shows {torch.cuda.device_count()}")
    args.data_bin, args.out = args.data_bin.resolve(), args.out.resolve()
    for flag, folder in (("--data-bin", args.data_bin), ("--out", args.out)):
        evaluate.check_path(flag, folder)
    if args.out.exists() and not args.out.is_dir():
        raise UsageError(f"--out '{args.out}' is a file: name a folder")
    return args


def prepare(args: argparse.Namespace) -> None:
    """Make the data where they are asked for, or missing at their own place."""
    if args.archive is not None or args.data_bin == own_data(args.experiment).resolve():
        end = Path("lm/data-bin" if args.experiment == "speeches" else "data-bin")
        if args.data_bin.parts[-len(end.parts) :] != end.parts:
            raise UsageError(
                f"--data-bin {args.data_bin} must end in {end}, as the folders that data-prep/ "
                "makes do"
            )
        folder, flag = args.data_bin.parents[len(end.parts) - 1], "--archive"
        words = [str(ROOT / "data-prep" / f"{args.experiment}.sh")]
        if args.experiment == "speeches":
            words = [sys.executable, str(ROOT / "data-prep" / "demo.py"), "--only", "lm"]
            flag = "--archive-lm"
        words += ["--out", str(folder)]
        words += [] if args.archive is None else [flag, args.archive]
        if code := subprocess.run(words).returncode:
            sys.exit(code)
    if not args.data_bin.is_dir():
        raise UsageError(f"--data-bin '{args.data_bin}' is no folder: check its path")


def main() -> None:
    logging.getLogger("hydra").setLevel(logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    experiment = sys.argv[1]
    is_quickstart = experiment.startswith("quickstart_")
    compat.apply()
    try:
        args = parse(experiment)
        prepare(args)
        args.out.mkdir(parents=True, exist_ok=True)
        # A seed of every row before the next seed, so that the table is whole early.
        work([plan(args, row, seed) for seed in args.seeds for row in args.rows])
        if not is_quickstart:  # which reports its results itself
            print(f"\n{collect(args.out)}\nAll of it: {args.out}")
    except (UsageError, OSError) as error:
        sys.exit(f"{'quickstart' if is_quickstart else experiment}.sh: error: {error}")
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
