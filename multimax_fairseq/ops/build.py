"""Compiles the CPU kernels, keeps the library in a cache folder and loads it.

The kernels have a C interface instead of being a torch extension: they compile in seconds rather
than a minute, and need neither ninja nor Python's headers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "cpu.cpp"
# Instruction sets, by torch's names for them.
MARCH = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
FLAGS = ["-std=gnu++20", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]
TIMEOUT = 300  # seconds; a slow processor takes about 20

_TORCH = Path(torch.__file__).parent


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; without them, log the reason once and return None."""
    capability = torch.backends.cpu.get_cpu_capability()
    try:
        kernels = load(_flags())
        onednn = capability == "AVX512" and torch.backends.mkldnn.is_available()
        if not (onednn and kernels.start(1)) and not kernels.start(0):
            raise RuntimeError("this build of torch offers no matrix product to them")
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning(
            f"plain PyTorch replaces the CPU kernels, which is slower: {error}. CXX names a C++20 "
            "compiler (default: c++), TORCH_EXTENSIONS_DIR a folder for the compiled library"
        )
        return None
    return kernels


@functools.cache
def row_library(header: str, function: str) -> ctypes.CDLL | None:
    """Return the kernels of a `RowFunction` with a header; if None, the reason is logged once."""
    path = Path(header).resolve()
    try:
        name = [f'-DROW_HEADER="{path}"', f"-DROW_FUNCTION={function}"]
        return load([*_flags(), *name], SOURCE.with_name("plugin_row.cpp"), path.parent)
    except (OSError, RuntimeError, ValueError, subprocess.TimeoutExpired) as error:
        logger.warning(f"plain PyTorch replaces the row function {function} of {header}: {error}")
        return None


def _flags() -> list[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if sys.platform != "linux" or capability not in MARCH:
        raise RuntimeError(f"they need Linux and AVX2, not {sys.platform} and {capability}")
    return [*FLAGS, *MARCH[capability]]


def load(flags: list[str], source: Path | None = None, *folders: Path) -> ctypes.CDLL:
    """Return the library for these compiler flags. Compile it if the cache folder lacks it.

    Args:
        source: default SOURCE.
        folders: those with headers that the source includes, besides its own.

    Raises:
        OSError, RuntimeError, ValueError, subprocess.TimeoutExpired: there is no library, for the
            reason in the message.
    """
    source = source or SOURCE
    command = [*shlex.split(os.environ.get("CXX", "").strip() or "c++"), *flags, str(source)]
    command += [f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    path = _private_folder() / f"cpu-{_digest(command, source, source.parent, *folders)}.so"
    if not path.exists():
        # A warning, because Python prints it even if logging is not configured.
        logger.warning(f"compiling multimax_fairseq's CPU kernels in {path.parent} (20 seconds)")
        _compile(command, path)
    return ctypes.CDLL(str(path))


def _private_folder() -> Path:
    """Return the cache folder. Refuse one that others can write to: a library is code."""
    # torch has functions for its cache folder, but they warn of a missing GPU.
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions")
    folder = root.expanduser().absolute() / "multimax_fairseq"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & 0o022:
        raise RuntimeError(f"'{folder}' is open to other users: remove it")
    return folder


def _digest(command: list[str], source: Path, *folders: Path) -> str:
    """Return a digest of everything that a library depends on; machines may share the folder."""
    parts = [*command, torch.__version__, torch.version.git_version, *platform.libc_ver()]
    digest = hashlib.sha256(os.fsencode("\n".join(map(str, parts))))
    for path in [source, *(path for folder in folders for path in sorted(folder.glob("*.h")))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(command: list[str], path: Path) -> None:
    """Compile the library and put it in place in one step."""
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        built = Path(scratch) / path.name
        process = subprocess.Popen(
            [*command, "-o", str(built)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": scratch, "LC_ALL": "C"},
            start_new_session=True,  # one process group, which can be killed as a whole
        )
        try:
            _, messages = process.communicate(timeout=TIMEOUT)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode:
            errors = [line for line in messages.splitlines() if "error:" in line.lower()]
            reason = errors[0] if errors else f"exit status {process.returncode}"
            raise RuntimeError(f"{command[0]!r} failed: {reason}")
        with open(built, "rb") as file:
            os.fsync(file.fileno())  # a crash of the machine must not leave a short file
        # Another machine may have mapped a library that is there, so it is not replaced.
        if not path.exists():
            built.rename(path)
