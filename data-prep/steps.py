"""What every script of this folder is written with: messages, steps whose result appears only when
it is complete, and text files that are checked line by line."""

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

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "valid", "test")
# In a finished folder: the checksum of all that it was made from, then a line "SIZE NAME" a file.
MARK = "prepared.sha256"
SHARED = ("steps.py", "archives.py", "subwords.py", "iwslt.py")  # what the scripts rest on


# --- messages -----------------------------------------------------------------------------------


def program() -> str:
    """The script as a user calls it: by its .sh, where it has one."""
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
    """A script's options, its docstring being their help. A wrong one is one sentence, as every
    other mistake."""

    def __init__(self, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=program(), description=description, formatter_class=form)

    def add_out(self, name: str) -> None:
        """--out, whose default is the checkout's folder of this name for data."""
        self.add_argument(
            "--out",
            type=out_folder,
            metavar="DIR",
            default=ROOT / "data" / name,
            help=f"default data/{name} in the checkout",
        )

    def error(self, message: str) -> NoReturn:
        fail(f"{message}; see --help.")


def out_folder(name: str) -> Path:
    """What --out names, if fairseq can read from there."""
    if ":" in (path := str(Path(name).resolve())):
        fail(f"--out '{path}' has a ':', where fairseq would split it: name another folder.")
    return Path(name)


def run(main: Callable[[], None]) -> None:
    """What a user or the machine can cause ends without a traceback."""
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on from here.", file=sys.stderr)
        sys.exit(130)
    except ModuleNotFoundError as error:
        fail(f"this Python has no package {error.name}: run scripts/setup.sh, and use its .venv.")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}; run this again once that is mended.")


# --- steps ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(final: Path) -> Iterator[None]:
    """Waits for other runs that make the same file or folder. Children hold the lock too, so that
    one that outlives a killed run never writes into what the next run makes."""
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
    """Refuses folders that are neither missing nor empty nor made by these scripts."""
    for final in folders:
        if final.is_symlink():
            fail(f"{final} is a link, which is not replaced: link the folder that holds it.")
        is_empty = final.is_dir() and not any(final.iterdir())
        if final.exists() and not is_empty and not (final / MARK).is_file():
            fail(f"{final} was not made by this script: move it, or choose another --out.")


def lacking(folder: Path) -> str | None:
    """A file that a finished folder no longer has as it was made, if there is one."""
    for line in (folder / MARK).read_text().splitlines()[1:]:  # an older mark has none
        size, _, name = line.partition(" ")
        file = folder / name
        if not file.is_file() or str(file.stat().st_size) != size:
            return name
    return None


def step(final: Path, made_from: str, make: Callable[[Path], None]) -> None:
    """Has `make` fill a folder aside, which becomes `final` once it is complete; not done again
    unless `made_from` or the code has changed."""
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
            final.rename(aside)  # at once, so that half of it never bears the name of the whole
            shutil.rmtree(aside)
        aside.mkdir()
        try:
            make(aside)
        except SystemExit:  # a refusal: the next run would not get further with what is there
            shutil.rmtree(aside)
            raise
        except OSError as error:  # that of a failed write names no file
            error.filename = error.filename or str(aside)
            raise
        files = sorted(file for file in aside.rglob("*") if file.is_file())
        sizes = "".join(f"{f.stat().st_size} {f.relative_to(aside)}\n" for f in files)
        (aside / MARK).write_text(f"{mark}\n{sizes}")
        aside.rename(final)


# --- text ----------------------------------------------------------------------------------------


def checked(lines: Iterable[bytes], name: object) -> Iterator[bytes]:
    """Lines of text, the first without a byte order mark; a sentence names one that is not text."""
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            line.decode("utf-8")
        except UnicodeDecodeError:
            fail(f"{name} is not UTF-8 in line {number:,}: get it again.")
        if b"\0" in line:  # UTF-16 without its mark is UTF-8 with one of these in each letter
            fail(f"{name} has a NUL character in line {number:,}, which no text has: get it again.")
        yield line


def decode(data: bytes, name: object) -> list[str]:
    """The lines of a file; nothing but a line feed ends one."""
    lines = [line.decode("utf-8") for line in checked(data.split(b"\n"), name)]
    return lines if lines[-1] else lines[:-1]


def copy_text(lines: Iterable[bytes], target: Path, name: object) -> None:
    """Appends to `target`, line by line and checked, each with its line feed."""
    with target.open("ab") as file:
        for line in filter(None, checked(lines, name)):  # a byte order mark alone is no line
            file.write(line if line.endswith(b"\n") else line + b"\n")


def write(file: Path, lines: Iterable[str]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as f:
        f.writelines(f"{line}\n" for line in lines)


def read(file: Path) -> list[str]:
    return decode(file.read_bytes(), file)
