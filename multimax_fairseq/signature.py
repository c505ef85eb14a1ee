"""The signature of a result: versions, commit, date and processor."""

import datetime
import hashlib
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("multimax-fairseq", "torch", "fairseq-fixed", "entmax", "numpy")
ROOT = Path(__file__).resolve().parent.parent


def signature(*more: str) -> dict[str, Any]:
    """Return versions (of PACKAGES and `more` that are installed), commit and date, for JSON."""
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"versions": versions, "commit": commit(), "date": now}


def processor() -> str:
    """Return the name of the CPU, with family and model if known."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    name = found.get("model name", f"{platform.machine()} CPU")
    if not {"cpu family", "model"} <= found.keys():
        return name
    return f"{name} (family {found['cpu family']}, model {found['model']})"


def processor_and_threads(threads: int) -> str:
    """Return the name of the CPU, and how many threads a run used."""
    return f"{processor()}, {threads} thread{'' if threads == 1 else 's'}"


def data_checksum(folder: Path) -> str:
    """Return the SHA-256 of all files that fairseq reads from a data folder, and of references."""
    kinds = ("*.bin", "*.idx", "dict.*", "*.reference.*")
    total = hashlib.sha256()
    for file in sorted(file for kind in kinds for file in folder.glob(kind)):
        with file.open("rb") as content:
            checksum = hashlib.file_digest(content, "sha256").hexdigest()
        total.update(f"{file.name} {checksum}\n".encode())
    return total.hexdigest()


def commit() -> str | None:
    """Return the git commit of the checkout, with "-dirty" if files differ; None outside of one."""
    # An installed copy may lie inside another checkout, whose commit is unrelated.
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return None
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return f"{_git('rev-parse', 'HEAD')}{'-dirty' if changed else ''}"


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()
