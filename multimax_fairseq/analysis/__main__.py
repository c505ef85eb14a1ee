"""The command multimax-analyze."""

import argparse
import importlib
import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="multimax-analyze", description="Shows what a checkpoint's mappings have learned."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "parameters", help="print what mappings have learned, layer by layer"
    )
    command.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of fairseq-train")
    add_user_dir(command)
    command.set_defaults(run=print_parameters)
    command = commands.add_parser(
        "collect", help="measure attention and output layer of checkpoints on data, into files"
    )
    command.add_argument(
        "checkpoints",
        type=Path,
        nargs="+",
        metavar="CHECKPOINT",
        help="of fairseq-train; several checkpoints of one run give trajectories",
    )
    command.add_argument(
        "data", type=Path, metavar="DATA-BIN", help="a folder of fairseq-preprocess"
    )
    command.add_argument("--subset", default="valid", help="of DATA-BIN; default: valid")
    command.add_argument(
        "--max-sentences",
        type=int,
        default=1000,
        metavar="N",
        help="number of sentences, or blocks of text; default: 1000",
    )
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder of the collection; an earlier collection in it is replaced",
    )
    add_user_dir(command)
    command.set_defaults(run=collect)
    for name, help, run, default in (
        ("plot", "draw the figures of a collection", plot, "DIR/figures"),
        ("report", "write one self-contained HTML page of a collection", report, "DIR"),
        ("compare", "compare several collections, in figures and one page", compare, None),
    ):
        command = commands.add_parser(name, help=help)
        several: dict[str, Any] = {"nargs": "+"} if name == "compare" else {}
        command.add_argument(
            "collection", type=Path, metavar="DIR", help="written by `collect`", **several
        )
        command.add_argument(
            "--out",
            type=Path,
            required=default is None,
            metavar="OUT",
            help="folder to write into" + (f"; default: {default}" if default else ""),
        )
        command.set_defaults(run=run)
        if name == "plot":
            add_form(command)
    command = commands.add_parser(
        "trajectories", help="draw what --monitor-interval has logged, of one run or several"
    )
    command.add_argument(
        "logs", type=Path, nargs="+", metavar="LOG", help="of fairseq-train --log-format json"
    )
    add_out(command, Path("trajectories"))
    command.set_defaults(run=trajectories)
    command = commands.add_parser(
        "densities", help="draw the densities of continuous attention; needs no model"
    )
    add_out(command, Path("densities"))
    command.set_defaults(run=densities)
    args = parser.parse_args()
    from multimax_fairseq.compat.program import program  # imports torch; --help does without it

    with program("multimax-analyze"):
        args.run(args)


def add_user_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--user-dir", metavar="DIR", help="a plugin that the checkpoints need")


def add_out(command: argparse.ArgumentParser, folder: Path) -> None:
    command.add_argument(
        "--out",
        type=Path,
        default=folder,
        metavar="OUT",
        help="folder to write into; default: %(default)s",
    )


def add_form(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--only", nargs="+", default=(), metavar="NAME", help="draw only these figures"
    )
    command.add_argument(
        "--format",
        nargs="+",
        choices=["pdf", "png", "svg"],
        default=["png", "svg"],
        help="default: png svg",
    )
    command.add_argument("--no-title", action="store_true", help="for a figure with a caption")
    command.add_argument("--width", type=width, metavar="CM", help="width of each figure")


def width(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def module(name: str) -> Any:
    """Import a module of the analysis. Other commands may not have its packages installed."""
    return importlib.import_module(f"multimax_fairseq.analysis.{name}")


def with_fairseq(name: str, plugin: str | None = None) -> Any:
    """Import a module of the analysis that needs fairseq, after a --user-dir with mappings."""
    from multimax_fairseq import compat

    compat.apply()
    if plugin is not None:
        from fairseq import utils

        utils.import_user_module(argparse.Namespace(user_dir=plugin))
    return module(name)


def print_parameters(args: argparse.Namespace) -> None:
    parameters = with_fairseq("parameters", args.user_dir)
    print(parameters.table(parameters.read(args.checkpoint)), end="")


def collect(args: argparse.Namespace) -> None:
    with_fairseq("collect", args.user_dir).collect(
        args.checkpoints,
        args.data,
        args.subset,
        args.max_sentences,
        args.out,
        ["multimax-analyze", *sys.argv[1:]],
    )
    print(f"Collected in {args.out}. Next: multimax-analyze report {shlex.quote(str(args.out))}")


def plot(args: argparse.Namespace) -> None:
    out = args.out or args.collection / "figures"
    figures = module("figures")
    form = figures.Form(tuple(args.format), not args.no_title, args.width)
    collection = module("collection").read(args.collection)
    print_progress(figures.plot(collection, out, args.only, form), out)


def report(args: argparse.Namespace) -> None:
    out = args.out or args.collection
    drawn = module("report").report(module("collection").read(args.collection), out)
    print_progress(drawn, out / "report.html")


def compare(args: argparse.Namespace) -> None:
    drawn = module("report").compare(module("collection").read_all(args.collection), args.out)
    print_progress(drawn, args.out / "compare.html")


def trajectories(args: argparse.Namespace) -> None:
    logs = module("training_log").read_all(args.logs)
    print_progress(module("figures.trajectories").plot(logs, args.out), args.out)


def densities(args: argparse.Namespace) -> None:
    print_progress(module("figures.families").plot(args.out), args.out)


def print_progress(drawn: Iterable[str], written: Path) -> None:
    """Print the name of each figure when it is drawn."""
    for name in drawn:
        print(f"drawn: {name}", flush=True)
    print(f"written: {written}")


if __name__ == "__main__":
    main()
