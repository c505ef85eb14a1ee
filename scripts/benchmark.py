#!/usr/bin/env python3
"""Measures time and memory of MultiMax against stock fairseq's softmax.

    scripts/benchmark.py attention [--shape BxHxTxD ...] [--mask causal] [--sweep LENGTHS]
    scripts/benchmark.py attention --checkpoint FILE --data DATA-BIN
    scripts/benchmark.py output [--tokens N] [--vocabulary V] [--width D] [--sweep VOCABULARIES]
    scripts/benchmark.py train DATA-BIN [-- fairseq-train options]
    scripts/benchmark.py train --vocabulary V [-- fairseq-train options]
    scripts/benchmark.py generate DATA-BIN --checkpoint FILE
    scripts/benchmark.py images [--size small] [--batch N]

All contestants take turns in one process. Those that compute the same function are compared before
any is timed. Ratios are medians over the rounds of the ratio within a round: lower is better for
times, higher for tokens per second. Peak memory is that of a step, above the memory before it; on a
CPU it is measured in one process per contestant.

"plain" and "auto" are backends (MULTIMAX_BACKEND); "torch expression" is MultiMax in plain PyTorch
operations, as its authors wrote it. --out DIR writes DIR/benchmark-NAME.json (every round, and
everything needed to repeat the measurement) and, for a --sweep, .png and .svg.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.measurement import Case, measure, quiet
from benchmarks.operators import MAPPINGS, attention, output
from benchmarks.report import conditions, report
from lib import positive

from multimax_fairseq.errors import UsageError

SHAPES = ["4x8x512x64", "16x8x128x64"]


def sizes(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def attention_shape(text: str) -> tuple[int, ...]:
    found = tuple(positive(part) for part in text.split("x"))
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} must be BATCHxHEADSxLENGTHxSIZE, as 4x8x512x64")
    return found


def fraction(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def parse(words: list[str]) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common.add_argument("--rounds", type=positive, default=10, help="timed rounds")
    common.add_argument("--warmup", type=positive, default=2, help="untimed rounds before them")
    common.add_argument("--device", choices=["cpu", "cuda"], default=device, help="where to run")
    dtypes = ["float32", "float16", "bfloat16"]
    common.add_argument("--dtype", choices=dtypes, default="float32", help="of tensors")
    text = "do not measure memory"
    common.add_argument("--no-memory", dest="memory", action="store_false", help=text)
    common.add_argument("--out", type=Path, metavar="DIR", help="write the data and figures there")
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, formatter_class=Help)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Callable[..., Any]:
        one = commands.add_parser(
            name, parents=[common], help=text, description=text, formatter_class=Help
        )
        return one.add_argument

    compiled = {"action": "store_true", "help": "also measure softmax under torch.compile"}
    add = command("attention", "attention alone")
    shapes = [attention_shape(text) for text in SHAPES]
    add(
        "--shape",
        type=attention_shape,
        nargs="+",
        metavar="BxHxTxD",
        default=shapes,
        help="query's shape",
    )
    masks = ["none", "causal", "padding", "both"]
    add("--mask", choices=masks, default="causal", help="what is excluded")
    add("--sweep", type=sizes, metavar="T,T,...", help="the first shape with these lengths")
    add("--rivals", action="store_true", help=f"also measure {', '.join(MAPPINGS)}")
    add("--compile", **compiled)
    text = "use the queries and keys of this translation model, one case per attention"
    add("--checkpoint", type=Path, metavar="FILE", help=text)
    text = "a folder of fairseq-preprocess, for --checkpoint"
    add("--data", type=Path, metavar="DATA-BIN", help=text)
    add("--max-tokens", type=positive, default=4096, help="of a batch of --data")

    add = command("output", "output layer and loss")
    add("--tokens", type=positive, default=512, metavar="N", help="tokens per step")
    add("--vocabulary", type=positive, default=267_744, metavar="V", help="number of words")
    add("--width", type=positive, default=512, metavar="D", help="width of the features")
    add("--label-smoothing", type=fraction, default=0.0, help="epsilon of the loss")
    add("--sweep", type=sizes, metavar="V,V,...", help="instead of --vocabulary")
    add("--compile", **compiled)

    folder = "a folder of fairseq-preprocess"
    add = command("train", "training steps of whole models; options after -- are fairseq-train's")
    add("data", type=Path, metavar="DATA-BIN", nargs="?", help=folder)
    text = "instead of data: a language model on random text with this vocabulary"
    add("--vocabulary", type=positive, metavar="V", help=text)
    text = "also measure MultiMax with these flags; may be repeated"
    add("--variant", action="append", default=[], metavar="FLAGS", help=text)

    add = command("generate", "beam search")
    add("data", type=Path, metavar="DATA-BIN", help=folder)
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="of a MultiMax model")
    add("--subset", default="test", help="of DATA-BIN")
    add("--beam", type=positive, default=5, help="beam size")
    add("--max-tokens", type=positive, default=4096, help="of a batch")

    add = command("images", "training steps and inference of DeiT, and its FLOPs; needs timm")
    add("--size", choices=["tiny", "small", "base"], default="small", help="of DeiT")
    add("--batch", type=positive, default=8, metavar="N", help="images per step")

    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that cannot be combined."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; leave it out for the CPU")
    if args.rest and args.command != "train":
        raise UsageError(f"{args.command} takes no options after --, got {args.rest[0]}")
    if args.command == "train" and (args.data is None) == (args.vocabulary is None):
        raise UsageError("train needs either DATA-BIN or --vocabulary, and not both")
    if args.command == "train" and args.vocabulary is not None and args.vocabulary < 5:
        raise UsageError(f"--vocabulary {args.vocabulary} must be at least 5: 4 are special")
    if args.command == "attention" and (args.data is None) != (args.checkpoint is None):
        raise UsageError("attention needs both --checkpoint and --data, or neither")
    if args.command == "attention" and args.checkpoint is not None:
        shapes = [attention_shape(text) for text in SHAPES]
        others = (
            args.shape != shapes,
            args.mask != "causal",
            args.sweep,
            args.rivals,
            args.compile,
        )
        if any(others):
            raise UsageError(
                "--checkpoint determines the shapes, masks and contestants: leave out --shape, "
                "--mask, --sweep, --rivals and --compile"
            )
    data, checkpoint = getattr(args, "data", None), getattr(args, "checkpoint", None)
    for path, what in ((data, "data folder"), (checkpoint, "checkpoint")):
        if path is not None and not path.exists():
            raise UsageError(f"{what} '{path}' does not exist: check its path")
    if data is not None and not list(data.glob("dict.*")):
        raise UsageError(f"'{data}' has no dictionary: pass a folder of fairseq-preprocess")


def cases_of(command: str) -> Callable[[argparse.Namespace], list[Case]]:
    """The function that builds a command's cases.

    Only train and generate import fairseq, and only images imports timm.
    """
    if command == "train":
        from benchmarks.training import train

        return train
    if command == "generate":
        from benchmarks.generation import generate

        return generate
    if command == "images":
        from benchmarks.images import images

        return images
    return attention if command == "attention" else output


def main() -> None:
    try:
        args = parse(sys.argv[1:])
        with contextlib.ExitStack() as stack:
            cases = cases_of(args.command)
            quiet()
            if args.command == "train" and args.data is None:
                from benchmarks.training import random_text

                args.data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                random_text(args.data, args.vocabulary)
            metadata = conditions(args)  # before the checkout can change
            report(measure(cases, args), metadata, args)
    except (UsageError, OSError) as error:
        sys.exit(f"benchmark.py: error: {error}")
    except torch.OutOfMemoryError:
        sys.exit("benchmark.py: error: the GPU's memory is too small: pass smaller sizes")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
