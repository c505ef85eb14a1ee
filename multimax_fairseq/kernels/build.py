"""Where the compiled kernels for the CPU come from: a cache folder, or the C++ compiler.

A C interface rather than a torch extension: it compiles in seconds instead of a minute, needs
neither ninja nor Python's headers, and leaves no lock behind when a build is killed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.cpp")
# What a processor must have, by the names that torch and compilers use.
MARCH = {"AVX2": ["-march=x86-64-v3"], "AVX512": ["-march=x86-64-v4", "-mprefer-vector-width=512"]}
FLAGS = ["-std=gnu++20", "-O3", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC"]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None, logged with the reason, where there can be none."""
    capability = torch.backends.cpu.get_cpu_capability()
    if capability not in MARCH:
        logger.info(f"no compiled CPU kernels for {capability}: plain PyTorch is used")
        return None
    try:
        kernels = ctypes.CDLL(str(_built([*FLAGS, *MARCH[capability]])))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            f"the CPU kernels could not be compiled ({_first_line(error)}): plain PyTorch is used, "
            "which is slower; with a C++ compiler, such as g++ 11 or the one that CXX names, they "
            "are built at the next start"
        )
        return None
    onednn = capability == "AVX512" and torch.backends.mkldnn.is_available()
    if not (onednn and kernels.start(1)) and not kernels.start(0):
        logger.info("this torch offers the CPU kernels no matrix product: plain PyTorch is used")
        return None
    return kernels


def _built(flags: list[str]) -> Path:
    """Return the shared library for these flags, compiled unless that was done before."""
    torch_root = Path(torch.__file__).parent
    command = [os.environ.get("CXX", "c++"), *flags, str(SOURCE)]
    command += [f"-I{torch_root / 'include'}", f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    signature = "\n".join([*command, torch.__version__]).encode() + SOURCE.read_bytes()
    # Where torch keeps what it compiles; its own functions for that warn of a missing GPU.
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    folder = Path(root) / "multimax_fairseq"
    target = folder / f"cpu-{hashlib.sha256(signature).hexdigest()[:16]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    logger.info(f"compiling the CPU kernels, once, into {folder}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        aside = Path(scratch) / target.name
        subprocess.run([*command, "-o", str(aside)], check=True, capture_output=True, text=True)
        os.replace(aside, target)
    return target


def _first_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0].strip()
