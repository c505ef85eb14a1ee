"""Where the compiled kernels for the CPU come from: a cache folder, or the C++ compiler.

A C interface rather than a torch extension: it compiles in seconds instead of a minute, needs
neither ninja nor Python's headers, and leaves no lock behind when a build is killed.

Nothing that goes wrong here may end or stall a training. A kept library carries a digest, because
a file that was cut short or altered can kill the process that loads it; a new one is tried in
another process first; a compiler has a time limit. What cannot be built is plain PyTorch, and
the log says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "cpu.cpp"
SYMBOLS = (
    "start",
    "attention_forward",
    "attention_backward",
    "find_windows",
    "output_loss",
    "modulation",
    "tails",
    "projection",
    "attention_step",
    "best_scores",
    "best_outputs",
    "drop",
)
# What a processor must have, by the names that torch and compilers use.
MARCH = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
FLAGS = ["-std=gnu++20", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]

# Seconds that a compiler may take; on a slow processor it takes some twenty.
LIMIT = 300
# Bytes that a folder must have room for: the library, and what a compiler writes on the way to it.
ROOM = 2**23
# What folders begin with in which a process compiles, and the seconds after which one is left over:
# by a process that was killed, as compiler and trial together may take twice LIMIT.
SCRATCH, ABANDONED = "tmp", 3600
# Of a compiler's messages, the bytes that are read.
MESSAGES = 2**20

_TORCH = Path(torch.__file__).parent
# Exits with the reason why a library does not load, or lacks a symbol. Loading torch's library is
# faster than importing torch, but some builds of it find their own dependencies only by the import.
_TRIAL = """
import ctypes, sys
library, torch_cpu, *symbols = sys.argv[1:]
try:
    ctypes.CDLL(torch_cpu)
except OSError:
    import torch
try:
    kernels = ctypes.CDLL(library)
    for symbol in symbols:
        getattr(kernels, symbol)
except (OSError, AttributeError) as error:
    sys.exit(str(error))
"""


class BuildError(Exception):
    """There is no compiled library, for the reason in the message."""


class LoadError(OSError):
    """A library cannot be loaded from where it lies, or would lie."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None, logged with the reason, where there can be none."""
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability not in MARCH:
        logger.info(
            f"no compiled CPU kernels for {capability} on {sys.platform}: plain PyTorch is used"
        )
        return None
    try:
        kernels = load([*FLAGS, *MARCH[capability]])
    except (BuildError, OSError) as error:
        lost = f"loaded ({error.__cause__}) nor " if error.__cause__ else ""
        failed = "loaded" if isinstance(error, LoadError) else "compiled"
        logger.warning(
            f"the CPU kernels could not be {lost}{failed} ({error}): plain PyTorch is "
            "used, which is slower; with a C++20 compiler, such as g++ 11 or the one that CXX "
            "names, and a folder to write to and to load from, such as the one that "
            "TORCH_EXTENSIONS_DIR names, they are built at the next start"
        )
        return None
    onednn = capability == "AVX512" and torch.backends.mkldnn.is_available()
    if not (onednn and kernels.start(1)) and not kernels.start(0):
        logger.info("this torch offers the CPU kernels no matrix product: plain PyTorch is used")
        return None
    return kernels


def load(flags: list[str]) -> ctypes.CDLL:
    """Return the library for these flags, compiled unless the cache folder has it.

    Raises:
        BuildError, OSError: there is neither, with the reason, and as its cause why what the cache
            folder has is of no use.
    """
    command = [*_compiler(), *flags, str(SOURCE)]
    command += [f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    name = f"cpu-{_signature(command)}.so"
    unkept = lost = None
    try:
        folder = _cache_folder()
        _remove_abandoned(folder)
        if _is_whole(folder / name):
            return _loaded(folder / name)
        if os.path.isfile(folder / name):
            lost = LoadError(f"{folder / name} is not as it was written")
            logger.warning(f"{lost}: it is compiled anew")
        scratch = _scratch(folder)
    except OSError as error:  # also where another system's compiler made it: it is left to that
        unkept, folder = error, Path(tempfile.gettempdir())
        lost = error if isinstance(error, LoadError) else lost
        scratch = _scratch(folder)
    with scratch:
        # A warning, because Python prints it on stderr also where logging is not configured.
        logger.warning(f"compiling multimax_fairseq's CPU kernels in {folder}: some 20 seconds")
        try:
            built = _compiled(command, Path(scratch.name))
        except BuildError as error:
            raise error from lost
        path = Path(scratch.name) / name
        _write(path, built + hashlib.sha256(built).digest())
        if unkept is None:
            try:
                # What another process wrote meanwhile may be in use, on other machines as well.
                path = folder / name if _is_whole(folder / name) else path.replace(folder / name)
            except OSError as error:
                unkept = error
        # What is loaded stays so when its file is removed.
        kernels = _loaded(path)
    if unkept is not None:
        logger.warning(
            f"the CPU kernels cannot be kept ({unkept}): every process compiles them for itself; "
            "TORCH_EXTENSIONS_DIR names another folder"
        )
    return kernels


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").strip() or "c++"
    if shutil.which(named):  # of which the name may have spaces
        return [named]
    try:
        return shlex.split(named)
    except ValueError as error:
        raise BuildError(f"CXX {named!r}: {error}") from None


def _signature(command: list[str]) -> str:
    """Return what tells libraries apart that may lie in one folder, which machines may share."""
    parts = [*command, torch.__version__, torch.version.git_version, *platform.libc_ver()]
    text = os.fsencode("\n".join(map(str, parts)))
    sources = b"".join(path.read_bytes() for path in _sources())
    return hashlib.sha256(text + sources).hexdigest()[:16]


def _sources() -> list[Path]:
    """The file that is compiled, and the headers beside it."""
    return [SOURCE, *sorted(SOURCE.parent.glob("*.h"))]


def _cache_folder() -> Path:
    # Where torch keeps what it compiles; its own functions for that warn of a missing GPU.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    named = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    root = os.path.expanduser(named)
    if root.startswith("~"):
        raise FileNotFoundError(errno.ENOENT, "there is no such home folder", root)
    return Path(root).absolute() / "multimax_fairseq"


def _is_whole(path: Path) -> bool:
    """Whether a library is there as it was written, its digest at the end.

    Raises:
        OSError: it cannot be read.
    """
    if not os.path.isfile(path):
        return False
    data, size = path.read_bytes(), hashlib.sha256().digest_size
    return hashlib.sha256(data[:-size]).digest() == data[-size:]


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise LoadError(str(error)) from None


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes that were killed while they compiled have left in the cache folder."""
    for path in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):  # another process removes it as well
            if time.time() - path.stat().st_mtime > ABANDONED:
                shutil.rmtree(path, ignore_errors=True)


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a folder in this one, which is made; a library can be written there, and loaded.

    Raises:
        OSError: it cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise LoadError(f"'{folder}' is on a file system mounted noexec")
    scratch = tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True)
    try:
        # A compiler's message about a full disk is seldom told from one about the source.
        room = Path(scratch.name) / "room"
        _write(room, bytes(ROOM))
        room.unlink()
    except OSError as error:
        scratch.cleanup()
        raise OSError(error.errno, error.strerror, str(folder)) from None
    return scratch


def _compiled(command: list[str], scratch: Path) -> bytes:
    """Return a library as the compiler wrote it, which loads and has all symbols.

    Raises:
        BuildError, OSError: there is none, with the reason.
    """
    path = scratch / "compiled.so"
    # Here, what a killed compiler leaves is removed as well. C, so that an error is called one.
    environment = {"TMPDIR": str(scratch), "LC_ALL": "C"}
    if reason := _failure([*command, "-o", str(path)], scratch, environment):
        raise BuildError(f"{command[0]!r}: {reason}")
    if not os.path.isfile(path):
        raise BuildError(f"{command[0]!r}: it wrote no library, and no error")
    python = sys.executable or ""  # None in some programs that hold a Python
    trial = [python, "-P", "-c", _TRIAL, str(path), str(_TORCH / "lib" / "libtorch_cpu.so")]
    # The backend keeps a program that holds a Python, and is its executable, from starting over.
    environment = {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "MULTIMAX_BACKEND": "plain"}
    if reason := _failure([*trial, *SYMBOLS], scratch, environment):
        raise BuildError(f"{command[0]!r}: what it wrote does not load: {reason}")
    return path.read_bytes()


def _failure(command: list[str], scratch: Path, environment: dict[str, str]) -> str | None:
    """Return why a command failed, in a line, or None where it did not."""
    # A file rather than a pipe: one that is left running in the background would hold that open.
    with open(scratch / "messages", "w+b") as messages:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=messages,
                stderr=messages,
                env={**os.environ, **environment},
                start_new_session=True,  # so that all that it starts can be killed with it
            )
        except OSError as error:
            return error.strerror or str(error)
        try:
            status = process.wait(LIMIT)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)  # one that waits for a dead disk outlives even that
            if isinstance(error, subprocess.TimeoutExpired):
                return f"it was stopped after {LIMIT} seconds"
            raise
        if status == 0:
            return None
        messages.seek(0)
        lines = messages.read(MESSAGES).decode("utf-8", "replace").strip().splitlines()
    if lines:
        # The linker's own messages come before the compiler's word that it failed.
        errors = [x for x in lines if "error:" in x.lower() and "ld returned" not in x]
        return (errors or lines)[0].strip()[:500]
    if status < 0:
        return f"it was ended by signal {-status} ({signal.strsignal(-status)})"
    return f"it ended with status {status}, and no error"


def _write(path: Path, data: bytes) -> None:
    """Write a file that is on the disk when this returns."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
