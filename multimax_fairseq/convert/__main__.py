"""The command multimax-convert."""

import argparse
import importlib
import logging
import sys
from pathlib import Path
from typing import Any

from multimax_fairseq.errors import UsageError

COMMANDS = {
    "from-authors": ("a checkpoint of the authors' patched fairseq becomes one of ours", "OLD NEW"),
    "to-authors": ("one of ours becomes one of the authors'", "OLD NEW"),
    "to-paddlefleet": ("the modulator of our output layer for PaddleFleet's head", "OLD HEAD"),
    "from-paddlefleet": ("PaddleFleet's modulator into our output layer", "HEAD OLD NEW"),
}
FILES = {
    "OLD": "a checkpoint of fairseq-train",
    "NEW": "the new checkpoint, without the optimizer's state",
    "HEAD": "an .npz file of model.lm_head.multimax_ts and model.lm_head.multimax_ranges",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="multimax-convert",
        description="Converts MultiMax models of other toolkits, without changing a number.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (told, files) in COMMANDS.items():
        command = commands.add_parser(name, help=told, description=told)
        for file in files.split():
            command.add_argument(file.lower(), type=Path, metavar=file, help=FILES[file])
    args = parser.parse_args()
    # fairseq tells everybody who imports it what speech synthesis would need.
    for name in ("fairseq", "multimax_fairseq"):
        logging.getLogger(name).setLevel(logging.WARNING)
    from multimax_fairseq import compat

    try:
        written = convert(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        text = compat.explain(error) or _explain(error)
        if text is None or compat.wants_traceback():
            raise
        sys.exit(compat.error_message("multimax-convert", text))
    print(f"written: {written}")


def _explain(error: Exception) -> str | None:
    """One sentence on a missing package or a file that cannot be used; None for anything else."""
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        return f"the package {package} is missing: pip install 'multimax-fairseq[fairseq]'"
    return str(error) if isinstance(error, OSError) else None


def convert(args: argparse.Namespace) -> Path:
    """Run a command, and return the file that it wrote."""
    out: Path = args.head if args.command == "to-paddlefleet" else args.new
    if out.exists():
        raise UsageError(f"'{out}' is there already: give another name, or remove it")
    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist: make it, or give another one")
    with_fairseq("compat").apply()
    checkpoint = with_fairseq("convert.checkpoint")
    if args.command.endswith("authors"):
        state = checkpoint.read(args.old)
        authors = with_fairseq("convert.authors")
        (authors.from_authors if args.command == "from-authors" else authors.to_authors)(state)
        checkpoint.write(state, out)
        return out
    paddlefleet = with_fairseq("convert.paddlefleet")
    if args.command == "to-paddlefleet":
        paddlefleet.write(paddlefleet.to_paddlefleet(checkpoint.read(args.old)), out)
    else:
        head = paddlefleet.read(args.head)
        state = checkpoint.read(args.old)
        paddlefleet.from_paddlefleet(head, state)
        checkpoint.write(state, out)
    return out


def with_fairseq(name: str) -> Any:
    """Import a module that needs fairseq, whose absence is then told in a sentence."""
    return importlib.import_module(f"multimax_fairseq.{name}")


if __name__ == "__main__":
    main()
