"""Claims, trains, skips and resumes runs.

A run has the folder OUT/ROW/seed-N:

    lock            held by the process that does the run
    command         its command, to repeat it by hand
    data.sha256     the checksum of its data
    train.log       the output of fairseq-train
    trained         exists once fairseq-train has ended without an error
    result.json     the result, once the run is finished
"""

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from multimax_fairseq.children import child
from multimax_fairseq.commands.stock import failure, portable
from multimax_fairseq.compat import PACKAGE, saving
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import read_lines, whole, write, write_json
from multimax_fairseq.signature import signature

STARTED, PEAK = "=== fairseq-train starts:", "=== peak memory:"  # our own lines in train.log


class Run(NamedTuple):
    """A training with its evaluation.

    Attributes:
        name: for messages.
        folder: OUT/ROW/seed-N.
        command: the words of the command that repeats it.
        checksum: of its data; "" if the run makes its data.
        make: make(run, lock) returns the result. Child processes that inherit the lock hold it too.
    """

    name: str
    folder: Path
    command: list[str]
    checksum: str
    make: Callable[["Run", int], dict[str, Any]]


def work(runs: list[Run]) -> None:
    """Finish all runs: first those that no other process holds, then the others."""
    for run in [run for run in runs if finish(run, wait=False) is None]:
        print(f"{run.name}: waiting for another process", flush=True)
        finish(run)


def finish(run: Run, wait: bool = True) -> dict[str, Any] | None:
    """Return a run's result, made now if it is missing; None if another process holds the run."""
    with claim(run.folder, wait) as lock:
        if lock is None:
            return None
        result = finished(run)
        if result is not None:
            print(f"Nothing to do: {run.name} is finished.")
            return result
        made_with = signature("sacrebleu", "timm")  # before the checkout can change
        write(run.folder / "command", f"{shlex.join(run.command)}\n")
        if run.checksum:
            write(run.folder / "data.sha256", f"{run.checksum}\n")
            made_with["data"] = run.checksum
        command = shlex.join(portable(run.command))
        result = {"command": command, **run.make(run, lock), **made_with}
        write_json(run.folder / "result.json", result)
        return result


@contextlib.contextmanager
def claim(folder: Path, wait: bool) -> Iterator[int | None]:
    """Lock a run's folder; yield the lock, or None if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        lock: int | None = file.fileno()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            lock = None
        yield lock


def finished(run: Run) -> dict[str, Any] | None:
    """Return the result of a finished run, else None.

    Raises:
        UsageError: the folder has a run with another command, or a run of the same experiment used
            other data.
    """
    file, remedy = run.folder / "result.json", "pass another --out, or remove that folder"
    result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    command, _ = recorded(run.folder)
    # Older runs of leaderboard.sh have their command in result.json alone.
    before = command[0] if command else (result or {}).get("command")
    if isinstance(before, str) and settings(shlex.split(before)) != settings(run.command):
        raise UsageError(f"'{run.folder}' was trained with another command ({before}): {remedy}")
    for folder in run.folder.parent.parent.glob("*/seed-*"):
        if recorded(folder)[1] not in ([], [run.checksum]):
            raise UsageError(
                f"'{folder}' was trained on other data: runs on different data cannot share a "
                f"table; {remedy}"
            )
    return result


def recorded(folder: Path) -> tuple[list[str], list[str]]:
    """Return a run's command and the checksum of its data; [] for what is unknown.

    Older runs of imdb.sh and imagenet.sh have both in `command`.
    """
    files = (folder / name for name in ("command", "data.sha256"))
    command, data = (read_lines(file) if file.exists() else [] for file in files)
    return command[-1:], data or command[:-1]


def settings(command: list[str]) -> dict[str, tuple[str, ...]]:
    """Return a command's options, without its folder, paths of this machine, and the first words.

    `finished` compares the data by their checksum.
    """
    return {**options_of(portable(command)), "": (), "--save-dir": ()}


def options_of(command: list[str]) -> dict[str, tuple[str, ...]]:
    """Return {option: its values}; "" holds the words before the first option.

    If an option is repeated, its last value counts.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in command:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            found[name] = (value,) if has_value else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


def next_analysis(checkpoint: Path, data: Path, out: Path, plugin: str = PACKAGE) -> str:
    """Return the sentence with the command that shows what a run's model has learned."""
    words = ["multimax-analyze", "collect", str(checkpoint), str(data), "--subset", "test"]
    words += ["--out", str(out / "analysis")]
    words += [] if plugin == PACKAGE else ["--user-dir", plugin]
    return f"Next, to see what the model has learned: {shlex.join(words)}"


# --- fairseq-train -------------------------------------------------------------------------------


def train(run: Run, lock: int, report: Callable[[str], None]) -> None:
    """Run fairseq-train to the end, unless done; `report` gets each line of its output.

    It resumes from the last checkpoint.
    """
    if (run.folder / "trained").exists():
        return
    done = saving.updates(last_checkpoint(run.folder))
    log = run.folder / "train.log"
    start = f"resuming from update {done:,}" if done else "training"
    print(f"{run.name}: {start}; full log: {log}", flush=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(f"{STARTED}\n{shlex.join(run.command)}\n")
        file.flush()
        with (
            child(run.command, stdout=file, stderr=subprocess.STDOUT, pass_fds=(lock,)) as process,
            log.open(encoding="utf-8", errors="replace") as follow,
        ):
            follow.seek(file.tell())
            memory = watch(process, follow, report)
        if process.returncode:
            output = log.read_text(encoding="utf-8", errors="replace")
            raise failure("fairseq-train", output, log)
        file.write(f"{PEAK} {memory} bytes\n")
    (run.folder / "trained").touch()


def watch(process: subprocess.Popen[bytes], follow: TextIO, report: Callable[[str], None]) -> int:
    """Report the lines of the log until the process ends; return its peak memory in bytes."""
    rest, pid = "", 0
    while not pid:
        time.sleep(0.2)
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        *lines, rest = (rest + follow.read()).split("\n")
        for line in lines:
            report(line)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def last_checkpoint(folder: Path) -> Path:
    """Return the path of checkpoint_last.pt; restore the file if it alone is missing.

    fairseq writes the numbered checkpoint first. If a run was killed before the copy to
    checkpoint_last.pt, the copy is made here.
    """
    last = folder / "checkpoint_last.pt"
    numbered = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda f: int(f.stem.split("_")[2]))
    if numbered and not last.exists():
        with whole(last) as aside:
            shutil.copyfile(numbered[-1], aside)
    return last
