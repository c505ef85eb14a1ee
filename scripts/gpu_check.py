#!/usr/bin/env python3
"""Shows whether the GPU path works and what it costs, in ten minutes on one GPU.

    scripts/gpu_check.sh [--minutes M] [--full] [--only TEXT] [--out FILE]

It needs torch and triton, and neither network nor fairseq. The kernels are checked against plain
PyTorch in float64, timed against torch's own attention and losses, trained with if fairseq can be
imported, and read as the compiler leaves them. Without a GPU, small sizes run in Triton's
interpreter, and the kernels are compiled ahead of time for sm_80 and sm_90.

It ends with tables and a file of the same, and with status 1 if a check failed. What did not fit
into the time, or cannot be had here, is listed as left out.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# In the order in which they run, each with the part of the time at which it has to be over.
SECTIONS = {"correctness": 0.45, "timing": 0.8, "training": 0.93, "compiler": 0.97}
NEED_GPU = ("timing", "training")
# Seconds for one check, and for one that had begun when the time was up.
LONGEST, GRACE = 240, 15
# With which a process asks for another one in its place: its device answers no more.
BROKEN = 75
# Cores that a process takes which mostly compiles, and the most processes on one GPU.
CORES, PROCESSES = 2, 6


class Order(NamedTuple):
    """What a process of ours is asked to do, as JSON."""

    section: str
    names: list[str]
    device: str
    full: bool
    end: float
    pipe: int


def make_importable() -> None:
    """The package from this checkout, also where what only other mappings need is missing."""
    sys.path.insert(0, str(ROOT))
    try:
        importlib.import_module("entmax")
    except ModuleNotFoundError:
        sys.modules["entmax"] = types.ModuleType("entmax")


def checks_of(section: str, device: str, full: bool) -> dict[str, Callable[[], Any]]:
    place = importlib.import_module("gpu_reference").Place(device, full)
    name = {"compiler": "compile"}.get(section, section)
    module = importlib.import_module(f"gpu_{name}")
    return module.checks(place)


# --- in a process of its own -------------------------------------------------------------------


def work(order: Order) -> None:
    """Run checks, and write what is found of each as a line of JSON."""
    make_importable()
    checks = checks_of(order.section, order.device, order.full)
    left_out = importlib.import_module("gpu_reference").LeftOut
    with open(order.pipe, "w", encoding="utf-8") as pipe:
        for name in order.names:
            begin, found = time.time(), {"section": order.section, "name": name}
            if begin > order.end:
                found |= {"status": "left out", "note": "there was no time left"}
            else:
                found |= outcome(checks[name], left_out)
                found["seconds"] = round(time.time() - begin, 1)
            print(json.dumps(found), file=pipe, flush=True)
            if found["status"] == "failed" and is_broken(order.device):
                os._exit(BROKEN)  # an orderly end would wait for the device


def outcome(check: Callable[[], Any], left_out: type[Exception]) -> dict[str, Any]:
    """A check's figures and verdict; that it raised is one, too."""
    try:
        found = check()
    except left_out as reason:
        return {"status": "left out", "note": str(reason)}
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {
            "status": "failed",
            "note": f"{type(error).__name__}: {' '.join(lines)[:300]}".rstrip(": "),
        }
    # What is not a number is not below its limit.
    within = found.limit is None or found.figure <= found.limit
    return found._asdict() | {"status": "passed" if within else "failed"}


def is_broken(device: str) -> bool:
    """Whether an error has left the GPU's context unusable to this process."""
    import torch

    if device != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


# --- what starts them --------------------------------------------------------------------------


class Run:
    """Collects what the processes find, and shows it as it comes."""

    def __init__(self, device: str, full: bool, minutes: float, total: int) -> None:
        self.device, self.full, self.total = device, full, total
        self.begin, self.seconds = time.time(), 60 * minutes
        self.found: list[dict[str, Any]] = []
        self.lock, self.cancelled = threading.Lock(), False
        self.running: set[subprocess.Popen] = set()

    def add(self, found: dict[str, Any]) -> None:
        with self.lock:
            self.found.append(found)
            figure = "" if found.get("figure") is None else f" {number(found['figure'])}"
            text = f"{found['name']}: {found['status']}{figure}"
            if found["status"] != "passed":
                text += f", {found['note']}"
            took = f" ({found['seconds']} s)" if "seconds" in found else ""
            print(f"[{len(self.found)}/{self.total}] {text}{took}", flush=True)

    def side_by_side(self, jobs: list[tuple[str, list[str]]]) -> None:
        """Run sections' checks, a process for each of these jobs."""
        with ThreadPoolExecutor(max(1, len(jobs))) as pool:
            try:
                list(pool.map(lambda job: self.job(*job), jobs))
            except BaseException:
                self.cancel()
                raise

    def cancel(self) -> None:
        self.cancelled = True
        with self.lock:
            for process in self.running:
                kill(process)

    def job(self, section: str, names: list[str]) -> None:
        """Run these checks in a process, and in another one those that it did not come to."""
        end = self.begin + self.seconds * SECTIONS[section]
        left = list(names)
        while left and not self.cancelled:
            status, stopped, said = self.process(section, left, end)
            if not left or status == BROKEN or self.cancelled:
                continue
            verdict, note = "failed", f"its process ended with status {status}: {said}"
            if stopped and time.time() > end:
                verdict, note = "left out", "there was no time left: it was stopped"
            elif stopped:
                note = f"took more than {LONGEST} seconds, and was stopped"
            name = left.pop(0)
            self.add({"section": section, "name": name, "status": verdict, "note": note})

    def process(self, section: str, left: list[str], end: float) -> tuple[int, bool, str]:
        """Run checks in a process and strike those that it comes to off the list.

        Returns its exit status, whether it had to be stopped, and the last line that it said.
        """
        reading, writing = os.pipe()
        order = Order(section, left, self.device, self.full, end, writing)
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if self.device != "cuda" and section == "correctness":
            environment["TRITON_INTERPRET"] = "1"
        stopped = threading.Event()
        with tempfile.TemporaryFile("w+", errors="replace") as said:
            process = subprocess.Popen(
                [sys.executable, __file__, "--work", json.dumps(order)],
                pass_fds=[writing],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            os.close(writing)
            with self.lock:
                self.running.add(process)

            def stop() -> None:
                stopped.set()
                kill(process)

            def watched() -> threading.Timer:
                seconds = min(LONGEST, end + GRACE - time.time())
                timer = threading.Timer(max(seconds, GRACE), stop)
                timer.daemon = True
                timer.start()
                return timer

            timer = watched()
            try:
                with open(reading, encoding="utf-8") as lines:
                    for line in lines:
                        timer.cancel()
                        found = json.loads(line)
                        left.remove(found["name"])
                        self.add(found)
                        timer = watched()
                status = process.wait()
            finally:
                timer.cancel()
                kill(process)
                with self.lock:
                    self.running.remove(process)
            said.seek(0)
            lines_said = [line.strip() for line in said if line.strip()]
        return status, stopped.is_set(), lines_said[-1][:300] if lines_said else "nothing said"


def kill(process: subprocess.Popen) -> None:
    """A process and what it started, as a training."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- the report --------------------------------------------------------------------------------


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def columns(rows: list[list[str]]) -> Iterable[str]:
    """Lines of cells that stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def report(found: list[dict[str, Any]]) -> str:
    """A line a check, and what was measured."""
    lines = []
    rows = [["check", "worst", "limit", "", "what the figure is"]]
    tables: dict[tuple[str, tuple[str, ...]], list[list[str]]] = {}
    left: dict[str, list[str]] = {}
    for entry in found:
        if entry["status"] == "left out":
            left.setdefault(entry["note"], []).append(entry["name"])
            continue
        figures = [number(entry.get(name)) for name in ("figure", "limit")]
        rows.append([entry["name"], *figures, entry["status"], entry["note"]])
        if entry.get("table"):
            title, heads, cells = entry["table"]
            tables.setdefault((title, tuple(heads)), []).extend(cells)
    lines += columns(rows)
    for (title, heads), cells in tables.items():
        lines += ["", title, *columns([list(heads), *cells])]
    counts = {
        status: sum(entry["status"] == status for entry in found)
        for status in ("passed", "failed", "left out")
    }
    if left:
        lines += ["", f"LEFT OUT, {counts['left out']} of {len(found)} checks:"]
        lines += [f"  {reason}: {'; '.join(names)}" for reason, names in left.items()]
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items())]
    return "\n".join(lines)


def conditions(device: str, words: list[str]) -> dict[str, Any]:
    """All that it takes to do it again."""
    import torch

    from multimax_fairseq.signature import signature

    about: dict[str, Any] = {"device": "no GPU", "driver": None, "cuda": torch.version.cuda}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        about |= {"device": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            told = subprocess.run(query, capture_output=True, text=True, timeout=30)
            about["driver"] = told.stdout.strip().splitlines()[0]
        except (OSError, IndexError, subprocess.TimeoutExpired):
            about["driver"] = None
    command = shlex.join(["scripts/gpu_check.sh", *words])
    return {"command": command, **about, **signature("triton")}


def write(file: Path, content: dict[str, Any]) -> None:
    from multimax_fairseq.files import whole

    with whole(file) as aside:
        aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


# --- the command line --------------------------------------------------------------------------


def a_time(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1
    if not 0 < minutes < 1e4:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes above 0")
    return minutes


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=a_time, default=10, help="that it may take; default %(default)s"
    )
    parser.add_argument(
        "--full", action="store_true", help="every launch shape, and more without a GPU"
    )
    parser.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help=f"what has this in its name, or a section: {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("gpu_check.json"),
        help="where the figures go; default %(default)s",
    )
    args = parser.parse_args(words)
    if args.out.is_dir() or not args.out.resolve().parent.is_dir():
        parser.error(f"--out {args.out} must be a file in a folder that there is")
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            parser.error(f"{sys.executable} has no {package}: use a python that has it")
    make_importable()
    args.device = gpu_or_cpu()
    args.names = {
        section: [
            name
            for name in checks_of(section, args.device, args.full)
            if args.only in name or args.only == section
        ]
        for section in SECTIONS
    }
    if not any(args.names.values()):
        parser.error(f"--only {args.only}: no check has this in its name")
    return args


def gpu_or_cpu() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def parts(names: list[str], count: int) -> list[list[str]]:
    """So many lists at most, none of them empty."""
    return [names[start::count] for start in range(min(count, len(names)))]


def check(args: argparse.Namespace, signed: dict[str, Any]) -> int:
    """Run what is asked for, report it, and return the exit status."""
    total = sum(map(len, args.names.values()))
    run = Run(args.device, args.full, args.minutes, total)
    cores = len(os.sched_getaffinity(0))
    if args.device == "cuda":
        for section, names in args.names.items():
            # Nothing may run beside what is timed.
            count = 1 if section == "timing" else min(PROCESSES, max(1, cores // CORES))
            run.side_by_side([(section, part) for part in parts(names, count)])
    else:
        for section in NEED_GPU:
            for name in args.names[section]:
                note = {"status": "left out", "note": "needs a GPU"}
                run.add({"section": section, "name": name} | note)
        jobs = [("correctness", args.names["correctness"])]
        jobs += [("compiler", part) for part in parts(args.names["compiler"], max(1, cores - 1))]
        run.side_by_side(jobs)
    order = [name for names in args.names.values() for name in names]
    found = sorted(run.found, key=lambda entry: order.index(entry["name"]))
    write(args.out, {**signed, "seconds": round(time.time() - run.begin, 1), "checks": found})
    print(f"\n{report(found)}")
    took = f"{time.time() - run.begin:.0f} seconds"
    print(f"{signed['command']}: {signed['device']}, {took}; {args.out}")
    if not any(entry["status"] != "left out" for entry in found):
        print("No check was made: give it more --minutes")
        return 1
    return int(any(entry["status"] == "failed" for entry in found))


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(Order(*json.loads(sys.argv[2])))
        return
    # As an interruption: what was started has to be ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parse(sys.argv[1:])
    signed = conditions(args.device, sys.argv[1:])
    if args.device == "cuda":
        print(f"{signed['device']}, compute capability {signed['capability']}", flush=True)
    else:
        print(
            "No GPU here: small sizes in Triton's interpreter, and kernels compiled ahead of time",
            flush=True,
        )
    try:
        sys.exit(check(args, signed))
    except OSError as error:
        sys.exit(f"gpu_check.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
