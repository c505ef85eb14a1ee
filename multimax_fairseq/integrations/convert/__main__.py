"""The command multimax-convert."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import check_output_file

COMMANDS = {
    "from-authors": ("convert a checkpoint from the authors' patched fairseq", "OLD NEW"),
    "to-authors": ("convert a checkpoint for the authors' patched fairseq", "OLD NEW"),
    "to-paddlefleet": ("write our output layer's modulator for PaddleFleet", "OLD HEAD"),
    "from-paddlefleet": ("put PaddleFleet's modulator into our output layer", "HEAD OLD NEW"),
    "onnx": ("export a translation or language model to ONNX", "OLD DATA_BIN OUT"),
}
FILES = {
    "OLD": "a checkpoint of fairseq-train",
    "NEW": "the new checkpoint, without the optimizer's state",
    "HEAD": "an .npz file of model.lm_head.multimax_ts and model.lm_head.multimax_ranges",
    "DATA_BIN": "the folder of fairseq-preprocess that the model was trained on",
    "OUT": "a new folder",
}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="multimax-convert",
        description="Converts MultiMax models from and to other toolkits.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (help, files) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help)
        for file in files.split():
            command.add_argument(file.lower(), type=Path, metavar=file, help=FILES[file])
    args = parser.parse_args(words)
    from multimax_fairseq.compat.program import program  # imports torch; --help does without it

    with program("multimax-convert"):
        print(f"written: {convert(args)}")


def convert(args: argparse.Namespace) -> Path:
    """Run a command and return the file that it wrote."""
    if args.command == "onnx":
        onnx: Path = with_fairseq("integrations.onnx").export_onnx(
            args.old, args.data_bin, args.out
        )
        return onnx
    name, out = ("HEAD", args.head) if args.command == "to-paddlefleet" else ("NEW", args.new)
    check_output_file(name, out)
    if out.exists():
        raise UsageError(f"'{out}' exists already: choose another name, or remove it")
    checkpoint = with_fairseq("integrations.convert.checkpoint")
    if args.command.endswith("authors"):
        state = checkpoint.read(args.old)
        authors = with_fairseq("integrations.convert.authors")
        (authors.from_authors if args.command == "from-authors" else authors.to_authors)(state)
        checkpoint.write(state, out)
        return out
    paddlefleet = with_fairseq("integrations.convert.paddlefleet")
    if args.command == "to-paddlefleet":
        paddlefleet.write(paddlefleet.to_paddlefleet(checkpoint.read(args.old)), out)
    else:
        head = paddlefleet.read(args.head)
        state = checkpoint.read(args.old)
        paddlefleet.from_paddlefleet(head, state)
        checkpoint.write(state, out)
    return out


def with_fairseq(name: str) -> Any:
    """Import a module that needs fairseq; `program` explains an ImportError."""
    from multimax_fairseq import compat

    compat.apply()
    return importlib.import_module(f"multimax_fairseq.{name}")


if __name__ == "__main__":
    main()
