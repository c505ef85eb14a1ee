"""Figures of one collection, or of several for comparison.

There is one module per theme and one function per figure, whose docstring is the caption in the
report. A function returns None if a collection has no data for the figure.
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
from multimax_fairseq.files import whole

# In the order of the report.
CATALOGUE = catalogue(modulators, sparsity, weights, densities, smoothing, simplex, heads, output)


def draw(collections: list[Collection]) -> Iterator[Drawn]:
    """Yield every figure that the collections have data for."""
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
            size = min(
                12, 110 * figure.get_figwidth() / len(heading)
            )  # a long title gets a smaller font
            figure.suptitle(heading[0].upper() + heading[1:], fontsize=size, fontweight="bold")
            name = entry.name if place is None else f"{entry.name}-{place}"
            yield Drawn(name, title[0].upper() + title[1:], entry.caption, figure)


def plot(collection: Collection, out: Path) -> Iterator[str]:
    """Write every figure of a collection and yield its name."""
    for drawn in draw([collection]):
        write(drawn, out)
        yield drawn.name


def write(drawn: Drawn, out: Path) -> list[Path]:
    """Write a figure as PNG and SVG, reproducibly: without dates and random ids."""
    files = [out / f"{drawn.name}.{form}" for form in ("png", "svg")]
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        same = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name})
        with whole(file) as aside, same:
            dated = {"Date": None} if file.suffix == ".svg" else None
            drawn.figure.savefig(aside, format=file.suffix[1:], dpi=150, metadata=dated)
        drawn.figure.set_layout_engine("none")  # the second format reuses the layout
    return files
