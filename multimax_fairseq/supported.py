"""Refuse versions of Python and torch that are too old, at import."""

import importlib.metadata
import re
import sys

PYTHON, TORCH = (3, 11), (2, 10)  # as in pyproject.toml


def check(python: tuple[int, ...], torch: str) -> None:
    """Raise ImportError if Python or torch is older than the oldest supported version."""
    if python < PYTHON or tuple(map(int, re.findall(r"\d+", torch)[:2])) < TORCH:
        oldest, needed, found = (".".join(map(str, v[:2])) for v in (PYTHON, TORCH, python))
        raise ImportError(
            f"multimax_fairseq needs Python {oldest} and torch {needed} or newer, but this is "
            f"Python {found} with torch {torch}: install newer ones, for example by "
            "scripts/setup.sh"
        )


check(tuple(sys.version_info[:3]), importlib.metadata.version("torch"))  # importing torch is slow
