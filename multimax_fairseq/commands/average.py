"""Averages the parameters of a run's checkpoints into one checkpoint for all fairseq commands."""

import argparse
import itertools
import re
import sys
from pathlib import Path
from typing import Any

from multimax_fairseq.compat.saving import NUMBERED
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import check_output_file
from multimax_fairseq.integrations.convert.checkpoint import options, read, write
from multimax_fairseq.models.config import mapping_settings


def newest(folder: Path, count: int) -> list[Path]:
    """Return the newest `count` numbered checkpoints of a folder."""
    for pattern in (r"checkpoint_\d+_(\d+)\.pt", r"checkpoint(\d+)\.pt"):
        numbered = [
            (int(m[1]), f) for f in folder.iterdir() if (m := re.fullmatch(pattern, f.name))
        ]
        if len(numbered) >= count:
            chosen = sorted(numbered)[-count:]
            steps = {after - before for (before, _), (after, _) in itertools.pairwise(chosen)}
            if len(steps) > 1:
                numbers = ", ".join(str(number) for number, _ in chosen)
                print(
                    f"warning: checkpoints {numbers} of '{folder}' are not evenly spaced; name the "
                    "files to average others",
                    file=sys.stderr,
                )
            return [file for _, file in chosen]
    raise UsageError(
        f"'{folder}' holds fewer than {count} numbered checkpoints: average fewer, or train with "
        "--save-interval-updates and without --no-epoch-checkpoints"
    )


def average(files: list[Path]) -> dict[str, Any]:
    """Return the first checkpoint with the mean of all parameters, summed in float64."""
    first = read(files[0])
    totals = {name: p.double() for name, p in first["model"].items()}
    wanted = mapping_settings(options(first))
    for file in files[1:]:
        state = read(file)
        model = state["model"]
        shapes = {name: p.shape for name, p in model.items()}
        if mapping_settings(options(state)) != wanted:
            raise UsageError(
                f"'{file}' has other mappings than '{files[0]}': average one run's checkpoints"
            )
        if shapes != {name: p.shape for name, p in totals.items()}:
            raise UsageError(
                f"'{file}' has other parameters than '{files[0]}': average one run's checkpoints"
            )
        for name, p in model.items():
            totals[name] = totals[name] + p  # not in place: tied parameters share one tensor
    first["model"] = {
        name: (total / len(files)).to(first["model"][name].dtype) for name, total in totals.items()
    }
    return first


def main(args: argparse.Namespace) -> None:
    files: list[Path] = args.inputs
    if args.last is not None:
        if args.last < 1 or len(files) != 1 or not files[0].is_dir():
            raise UsageError("--last N needs N of at least 1 and one folder")
        files = newest(files[0], args.last)
    check_output_file("--output", args.output)
    if args.output.name == "checkpoint_last.pt" or NUMBERED.fullmatch(args.output.name):
        raise UsageError(
            f"--output '{args.output}' is what training calls a checkpoint of its own: pass "
            "another name, such as average.pt"
        )
    if folders := [file for file in files if file.is_dir()]:
        raise UsageError(
            f"'{folders[0]}' is a folder: add --last N to average its N newest checkpoints"
        )
    write(average(files), args.output)
    print(f"{args.output}: the mean of {', '.join(file.name for file in files)}")
