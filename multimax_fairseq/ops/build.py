"""Loads the CPU kernels: the library of the wheel, or one that it compiles into a cache folder.

The kernels have a C interface and link neither to torch nor to Python, so one library serves every
version of both. The matrix products and OpenMP come from what torch has loaded.

hatch_build.py imports this file alone, without torch, to compile the libraries of a wheel.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "cpp" / "cpu.cpp"
BUILT = Path(__file__).parent / "lib"  # the libraries of a wheel or an editable installation
# Instruction sets, by torch's names for them.
MARCH = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
FLAGS = ["-std=gnu++20", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]
TIMEOUT = 300  # seconds; a slow processor takes about 20
# torch's functions for matrix products, as its library names them.
BRGEMM = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
BRGEMM_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels; without them, log the reason once and return None."""
    try:
        kernels = load(_flags())
        start(kernels)
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


def _capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _flags() -> list[str]:
    capability = _capability()
    if sys.platform != "linux" or capability not in MARCH:
        raise RuntimeError(f"they need Linux and AVX2, not {sys.platform} and {capability}")
    return [*FLAGS, *MARCH[capability]]


def start(kernels: ctypes.CDLL, may_use_onednn: bool = True) -> None:
    """Pass torch's matrix products to the kernels: oneDNN's with AVX-512, else those of BLAS.

    On AVX-512 processors of AMD, oneDNN is about twice as fast as MKL.

    Raises:
        RuntimeError: torch has neither.
    """
    import torch

    blas = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    brgemm, release, sgemm = (
        ctypes.cast(getattr(blas, name, 0), ctypes.c_void_p)
        for name in (BRGEMM, BRGEMM_RELEASE, "sgemm_")
    )
    if _capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        may_use_onednn = False
    if may_use_onednn and brgemm and release and kernels.start(brgemm, release, sgemm):
        return
    if not kernels.start(None, None, sgemm):
        raise RuntimeError("this build of torch offers no matrix product to them")


def load(flags: list[str], source: Path | None = None, *folders: Path) -> ctypes.CDLL:
    """Return the library for these compiler flags; compile one that BUILT and the cache lack.

    Args:
        source: default SOURCE.
        folders: those with headers that the source includes, besides its own.

    Raises:
        OSError, RuntimeError, ValueError, subprocess.TimeoutExpired: there is no library, for the
            reason in the message.
    """
    source = source or SOURCE
    built = BUILT / _name(flags, source, *folders)
    if built.exists():
        _share_openmp()
        return ctypes.CDLL(str(built))
    command = [*_compiler(), *flags, str(source)]
    path = _private_folder() / _name([*command, *platform.libc_ver()], source, *folders)
    if not path.exists():
        # A warning, because Python prints it even if logging is not configured.
        logger.warning(f"compiling multimax_fairseq's CPU kernels in {path.parent} (20 seconds)")
        _compile(path, command)
    return ctypes.CDLL(str(path))


def build_libraries() -> None:
    """Compile a library for each instruction set into BUILT, and remove older ones.

    Raises:
        OSError, RuntimeError, ValueError, subprocess.TimeoutExpired: as `load`.
    """

    def build(march: list[str]) -> Path:
        path = BUILT / _name([*FLAGS, *march], SOURCE)
        if not path.exists():
            # Without -fopenmp the linker does not bind the library to one OpenMP runtime.
            compiler, link = _compiler(), [flag for flag in FLAGS if flag != "-fopenmp"]
            compile_flags = [flag for flag in FLAGS if flag != "-shared"]
            _compile(
                path, [*compiler, *compile_flags, *march, "-c", str(SOURCE)], [*compiler, *link]
            )
        return path

    BUILT.mkdir(exist_ok=True)
    with ThreadPoolExecutor() as pool:
        current = set(pool.map(build, MARCH.values()))
    for path in set(BUILT.glob("*.so")) - current:
        path.unlink()


def _share_openmp() -> None:
    """Make the OpenMP runtime that torch has loaded visible to libraries that do not name one."""
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    with open("/proc/self/maps") as file:
        found = re.findall(r"/\S*/lib(?:gomp|iomp5|omp)[-.]\S*", file.read())
    for path in [*sorted(set(found)), "libgomp.so.1"]:
        if hasattr(ctypes.CDLL(path, ctypes.RTLD_GLOBAL), "GOMP_parallel"):
            return


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "").strip() or "c++")


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


def _name(parts: list[str], source: Path, *folders: Path) -> str:
    """Return a library's name, with a digest of all that it depends on; machines may share it."""
    digest = hashlib.sha256(os.fsencode("\n".join(parts)))
    headers = (path for folder in (source.parent, *folders) for path in sorted(folder.glob("*.h")))
    for path in (source, *headers):
        digest.update(path.read_bytes())
    return f"cpu-{digest.hexdigest()[:16]}.so"


def _compile(path: Path, *commands: list[str]) -> None:
    """Run the commands, each with the output of the one before, and put the result in place."""
    with tempfile.TemporaryDirectory(dir=path.parent, ignore_cleanup_errors=True) as scratch:
        built = Path(scratch) / path.name
        for number, command in enumerate(commands):
            inputs = [f"{built}.{number - 1}.o"] * (number > 0)
            output = str(built) if command is commands[-1] else f"{built}.{number}.o"
            _run([*command, *inputs, "-o", output], scratch)
        with open(built, "rb") as file:
            os.fsync(file.fileno())  # a crash of the machine must not leave a short file
        # Another machine may have mapped a library that is there, so it is not replaced.
        if not path.exists():
            built.rename(path)


def _run(command: list[str], scratch: str) -> None:
    """Run a compiler; RuntimeError with its first error."""
    process = subprocess.Popen(
        command,
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
