"""Runs fairseq's commands and reads their output."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from multimax_fairseq.children import child
from multimax_fairseq.compat import PACKAGE
from multimax_fairseq.errors import UsageError

CHECKOUT = Path(PACKAGE).parent


def find_command(name: str) -> str:
    """Return the path of a command: this environment's, or the one in PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise UsageError(f"there is no command {name}: activate the environment it is in")
    return found


def portable(command: list[str]) -> list[str]:
    """Return the command as called from the checkout's root, without this machine's paths."""
    name = Path(command[0]).name if command[0].startswith("/") else command[0]
    return [name, *(word.removeprefix(f"{CHECKOUT}/") for word in command[1:])]


def run(words: list[str], log: Path) -> str:
    """Run a command; return its stderr and stdout, also written to `log`."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        with child(words, stdout=subprocess.PIPE, stderr=errors, encoding="utf-8") as process:
            stdout, _ = process.communicate()
        errors.seek(0)
        stderr = errors.read()
    output = f"{stderr}\n{stdout}"
    log.write_text(output, encoding="utf-8")
    if process.returncode:
        raise failure(Path(words[0]).name, stderr.strip() or stdout, log)
    return output


def failure(name: str, output: str, log: Path) -> UsageError:
    """Return the error for a failed command: the last line of its output, and the log."""
    return UsageError(f"{name} failed, see {log}: {last_line(output)}")


def last_line(output: str) -> str:
    """Return the last line of a failed command's output: its error."""
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def sentences(output: str, kind: str) -> dict[int, str]:
    """Return {number: text} from fairseq-generate's lines H (hypothesis), S (source) or T."""
    tab = r"\t\S+\t" if kind == "H" else r"\t"
    return {int(n): s for n, s in re.findall(rf"^{kind}-(\d+){tab}(.*)$", output, re.MULTILINE)}
