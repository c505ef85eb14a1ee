"""The figures of a collection, or of several beside each other, from their files only.

A module a theme, a function a figure; its docstring is the caption that the report prints below
it. A function returns None where a collection has nothing to show.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from multimax_fairseq.analysis.canvas import plain
from multimax_fairseq.analysis.collection import PLACES, Collection
from multimax_fairseq.analysis.figures import (
    densities,
    heads,
    modulators,
    output,
    simplex,
    smoothing,
    sparsity,
    weights,
)
from multimax_fairseq.analysis.figures.catalogue import Drawn, catalogue
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import whole

# In the order of a report.
CATALOGUE = catalogue(modulators, sparsity, weights, densities, smoothing, simplex, heads, output)


def draw(collections: list[Collection]) -> Iterator[Drawn]:
    """Draw, one after the other, every figure that one collection, or several, has data for."""
    several = len(collections) > 1
    for entry in CATALOGUE:
        if several and not entry.comparable:
            continue
        what: Any = collections if entry.comparable else collections[0]
        for place in entry.places or (None,):
            figure = entry.draw(what) if place is None else entry.draw(what, place)
            if figure is None:
                continue
            title = entry.title if place is None else f"{entry.title}: {PLACES[place]}"
            heading = title if several else f"{title} ({plain(collections[0].label)})"
            size = min(12, 110 * figure.get_figwidth() / len(heading))  # a long one still fits
            figure.suptitle(heading[0].upper() + heading[1:], fontsize=size, fontweight="bold")
            name = entry.name if place is None else f"{entry.name}-{place}"
            yield Drawn(name, title[0].upper() + title[1:], entry.caption, figure)


def plot(collection: Collection, out: Path) -> Iterator[str]:
    """Write every figure of a collection; yield its name once it is there.

    Raises:
        UsageError: the folder cannot be written.
    """
    for drawn in draw([collection]):
        write(drawn, out)
        yield drawn.name


def write(drawn: Drawn, out: Path) -> list[Path]:
    """Write PNG and SVG, whole or not at all.

    Raises:
        UsageError: the folder cannot be written.
    """
    files = [out / f"{drawn.name}.{form}" for form in ("png", "svg")]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in files:
            # Text stays text in SVG, and nothing random or dated: the same files each time.
            same = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name})
            with whole(file) as aside, same:
                dated = {"Date": None} if file.suffix == ".svg" else None
                drawn.figure.savefig(aside, format=file.suffix[1:], dpi=150, metadata=dated)
            # Laid out for the first format; the second need not wait for it again.
            drawn.figure.set_layout_engine("none")
    except OSError as error:
        raise UsageError(cannot_write(out, error)) from None
    return files


def cannot_write(out: Path, error: OSError) -> str:
    return (
        f"cannot write in '{out}' ({error.strerror}): give a folder that can be written with --out"
    )
