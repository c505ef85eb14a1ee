"""Pages of docs/ that end in tables, and the stored results that the tables come from."""

import argparse
import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

from multimax_fairseq.commands.runs import options_of
from multimax_fairseq.commands.tables import Line
from multimax_fairseq.compat.program import program
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import write


def finished_runs(out: Path) -> list[tuple[Path, Line]]:
    """The folder and the result of each finished run of an experiment."""
    files = sorted(out.glob("*/seed-*/result.json"))
    if not files:
        raise UsageError(f"'{out}' has no finished run: pass the --out of an experiment")
    return [(file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def settings(line: Line) -> dict[str, tuple[str, ...]]:
    """The options of a line's command, without its seed and its paths."""
    options = options_of(shlex.split(line["command"]))
    varying = ("", "--seed", "--seeds", "--save-dir", "--user-dir", "--finetune-from-model")
    return {name: values for name, values in options.items() if name not in varying}


def check_same(run: Path, line: Line, stored: Iterable[Line]) -> None:
    """Raise UsageError if a run's data, updates or settings differ from those of stored lines.

    Lines of one experiment share their data; lines of one row also share updates and settings.
    """
    for other in stored:
        if line["experiment"] != other["experiment"]:
            continue
        is_same_row = (line["row"], line.get("task")) == (other["row"], other.get("task"))
        for name in ("data", "updates") if is_same_row else ("data",):
            if (mine := line.get(name)) != (theirs := other.get(name)):
                raise UsageError(
                    f"'{run}' has other {name} than the lines of docs/results ({mine}, not "
                    f"{theirs}): a table needs the same for all runs; to replace the lines, remove "
                    "them first"
                )
        if is_same_row and (ours := settings(line)) != (before := settings(other)):
            name = next(n for n in ours | before if ours.get(n) != before.get(n))
            raise UsageError(
                f"'{run}' was not trained as row {line['row']} of docs/results ({name}): all runs "
                "of a row need the same settings; to replace the lines, remove them first"
            )


def text_above(mark: str, text: str) -> str:
    """The text of a page through the line after which its tables begin."""
    head, found, _ = text.partition(mark)
    if not found:
        raise UsageError(f"the page has no line '{mark.strip()}': put it above its tables")
    return head + mark


def store_and_write(
    doc: str, add_runs: Callable[[Path], None], pages: dict[Path, Callable[[str], str]]
) -> None:
    """The command of a script that stores the runs of each OUT, then renews its pages."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="*", metavar="OUT")
    args = parser.parse_args()
    with program(parser.prog):
        for out in args.out:
            add_runs(out)
        for file, renew in pages.items():
            write(file, renew(file.read_text(encoding="utf-8")))
    print(f"Written: {', '.join(map(str, pages))}")
