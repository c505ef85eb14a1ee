"""The command multimax-analyze."""

import argparse
import logging
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="multimax-analyze", description="Shows what a checkpoint's normalizers have learned."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "parameters", help="print modulators, alphas and temperatures, layer by layer"
    )
    command.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    # fairseq tells everybody who imports it what speech synthesis would need.
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    from multimax_fairseq import compat
    from multimax_fairseq.analysis import parameters

    compat.apply()
    try:
        print(parameters.table(parameters.read(args.checkpoint)), end="")
    except (compat.UsageError, OSError) as error:
        sys.exit(f"multimax-analyze: error: {error}")


if __name__ == "__main__":
    main()
