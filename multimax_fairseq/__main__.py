"""python -m multimax_fairseq COMMAND ...: a fairseq command with the fixes of compat/.

    python -m multimax_fairseq fairseq-score --sys hypotheses --ref references --sacrebleu

For commands that take no --user-dir, and for models of stock fairseq that need none.
"""

import importlib
import sys
from typing import Any

from multimax_fairseq import compat
from multimax_fairseq.children import exit_on_signals
from multimax_fairseq.compat import untrusted
from multimax_fairseq.compat.patch import COMMANDS
from multimax_fairseq.compat.program import missing_package


def run(command: str) -> Any:
    """Run a fairseq command on sys.argv, and return what it returns."""
    module = command.removeprefix("fairseq-").replace("-", "_")
    try:
        compat.apply()
        program = importlib.import_module(f"fairseq_cli.{module}")
        untrusted.evaluate_literals()  # of the command's own module
    except ModuleNotFoundError as error:
        sys.exit(f"{command}: error: {missing_package(error) or error}")
    with exit_on_signals():  # fairseq-preprocess ends its workers at exit
        return program.cli_main()


def main() -> None:
    sys.argv = sys.argv[1:]
    command = sys.argv[0] if sys.argv else ""
    if command not in COMMANDS:
        sys.exit(
            f"python -m multimax_fairseq: error: '{command}' is no command of fairseq: use one of "
            f"{', '.join(COMMANDS)}"
        )
    sys.exit(run(command))


if __name__ == "__main__":
    main()
