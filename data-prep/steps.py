"""Shared code of this folder: messages, atomic steps, and checked text files."""

import argparse
import codecs
import contextlib
import fcntl
import hashlib
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from multimax_fairseq.errors import STOPPED

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
# In a finished folder: the checksum of its inputs, then one line "SIZE NAME" per file.
MARK = "prepared.sha256"
SHARED = ("steps.py", "archives.py", "subwords.py", "bitext.py", "wmt.py")  # shared code


# --- messages -----------------------------------------------------------------------------------


def program() -> str:
    """The script's name as a user calls it: with .sh if there is one."""
    name = Path(sys.argv[0]).name
    shell = Path(__file__).with_name(name).with_suffix(".sh")
    return shell.name if shell.exists() else name


def say(message: str) -> None:
    print(message, flush=True)


def warn(message: str) -> None:
    print(f"{program()}: warning: {message}", file=sys.stderr, flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"{program()}: {message}")


class Options(argparse.ArgumentParser):
    """A parser whose help is the script's docstring, and whose errors are one sentence."""

    def __init__(self, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=program(), description=description, formatter_class=form)

    def add_out(self, name: str) -> None:
        """Add --out; default data/NAME in the checkout."""
        self.add_argument(
            "--out",
            type=Path,
            metavar="DIR",
            default=ROOT / "data" / name,
            help=f"default data/{name} in the checkout",
        )

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help.")


def run(main: Callable[[], None]) -> None:
    """Run `main`; interrupts and errors of the disk end without a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print(f"\n{STOPPED}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}; run this again once that is fixed.")


# --- steps ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(final: Path) -> Iterator[None]:
    """Hold a lock while a file or folder is made; wait for other runs that make it.

    Children inherit the lock, so that a child that outlives a killed run cannot write into the
    next run's folder.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    with final.with_name(f".{final.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another run that makes {final}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks
        os.set_inheritable(lock.fileno(), True)
        yield


def check_free(*folders: Path) -> None:
    """Refuse folders that have content and were not made by these scripts."""
    for final in folders:
        is_empty = final.is_dir() and not any(final.iterdir())
        if final.exists() and not is_empty and not (final / MARK).is_file():
            fail(f"{final} was not made by this script: move it, or choose another --out.")


def lacking(folder: Path) -> str | None:
    """A file of a finished folder that is missing or has another size; None if there is none."""
    for line in (folder / MARK).read_text().splitlines()[1:]:
        size, _, name = line.partition(" ")
        file = folder / name
        if not file.is_file() or str(file.stat().st_size) != size:
            return name
    return None


def step(final: Path, made_from: str, make: Callable[..., None], *arguments: object) -> None:
    """Call make(*arguments, folder) to fill a temporary folder, then rename it to `final`.

    Skipped if `final` exists, complete, from the same `made_from` and code.
    """
    here = Path(__file__)
    files = [Path(inspect.getfile(make)), *(here.with_name(name) for name in SHARED)]
    code = b"".join(file.read_bytes() for file in files)
    mark = hashlib.sha256(made_from.encode() + code).hexdigest()
    with alone(final):
        check_free(final)
        why = ""
        if (final / MARK).is_file():
            if (final / MARK).read_text().partition("\n")[0] != mark:
                why = " anew, as the archive, an option or the code has changed"
            elif name := lacking(final):
                why = f" anew, as {name} in it is missing or has another size"
            else:
                say(f"Nothing to do: {final} is prepared.")
                return
        say(f"Preparing {final}{why}")
        aside = final.with_name(f"{final.name}.part")
        if aside.exists():
            shutil.rmtree(aside)
        if final.exists():
            final.rename(aside)  # at once: a partly deleted folder must not look complete
            shutil.rmtree(aside)
        aside.mkdir()
        try:
            make(*arguments, aside)
        except SystemExit:  # fail(): the folder is useless
            shutil.rmtree(aside)
            raise
        except OSError as error:  # a failed write names no file
            error.filename = error.filename or str(aside)
            raise
        files = sorted(file for file in aside.rglob("*") if file.is_file())
        sizes = "".join(f"{f.stat().st_size} {f.relative_to(aside)}\n" for f in files)
        (aside / MARK).write_text(f"{mark}\n{sizes}")
        aside.rename(final)


# --- text ----------------------------------------------------------------------------------------


def checked(lines: Iterable[bytes], name: object) -> Iterator[bytes]:
    """Yield lines without a byte order mark; fail if one is not UTF-8 text."""
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            fail(f"{name} is not UTF-8 in line {number:,}: get it again.")
        if b"\0" in line:  # as UTF-16 without a byte order mark has
            fail(f"{name} has a NUL character in line {number:,}, which no text has: get it again.")
        yield line


def decode(data: bytes, name: object) -> list[str]:
    """The lines of a file; only a line feed ends a line."""
    lines = [line.decode("utf-8") for line in checked(data.split(b"\n"), name)]
    return lines if lines[-1] else lines[:-1]


def copy_text(lines: Iterable[bytes], target: Path, name: object) -> None:
    """Append checked lines to `target`, each with a line feed."""
    with target.open("ab") as file:
        for line in filter(None, checked(lines, name)):  # drops a line of only a byte order mark
            file.write(line if line.endswith(b"\n") else line + b"\n")


def write(file: Path, lines: Iterable[str]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as f:
        f.writelines(f"{line}\n" for line in lines)


def read(file: Path) -> list[str]:
    return decode(file.read_bytes(), file)
