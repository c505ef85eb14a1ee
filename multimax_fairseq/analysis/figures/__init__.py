"""Figures of one collection, or of several for comparison.

There is one module per theme and one function per figure, whose docstring is the caption in the
report. A function returns None if a collection has no data for the figure.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from multimax_fairseq.analysis.canvas import plain
from multimax_fairseq.analysis.collection import KINDS, Collection
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
from multimax_fairseq.errors import UsageError, remedy_for
from multimax_fairseq.files import whole

CM = 2.54  # per inch

# In the order of the report.
CATALOGUE = catalogue(modulators, sparsity, weights, densities, smoothing, simplex, heads, output)


@dataclass(frozen=True)
class Form:
    """How a figure is written."""

    formats: tuple[str, ...] = ("png", "svg")
    has_title: bool = True
    width: float | None = None  # in cm; None for the figure's own


def draw(
    collections: list[Collection], only: Sequence[str] = (), has_title: bool = True
) -> Iterator[Drawn]:
    """Yield the figures that the collections have data for; all, or those in `only`.

    Raises:
        UsageError: `only` has a name that is no figure, or names none that there is data for.
    """
    several = len(collections) > 1
    names = {name for entry in CATALOGUE for name in (entry.name, *entry.names())}
    for name in only:
        if name not in names:
            raise UsageError(f"there is no figure {name!r}: {remedy_for(name, names)}")
    is_drawn = not only
    for entry in CATALOGUE:
        if several and not entry.comparable:
            continue
        what: Any = collections if entry.comparable else collections[0]
        for name, kind in entry.names().items():
            if only and not {entry.name, name} & set(only):
                continue
            figure = entry.draw(what) if kind is None else entry.draw(what, kind)
            if figure is None:
                continue
            title = entry.title if kind is None else f"{entry.title}: {KINDS[kind]}"
            heading = title if several else f"{title} ({plain(collections[0].label)})"
            if has_title:
                # A long title gets a smaller font.
                size = min(12, 110 * figure.get_figwidth() / len(heading))
                figure.suptitle(heading[0].upper() + heading[1:], fontsize=size, fontweight="bold")
            is_drawn = True
            yield Drawn(name, title[0].upper() + title[1:], entry.caption, figure)
    if not is_drawn:
        raise UsageError(
            f"this collection has no data for {' or '.join(only)}: leave --only out to draw what "
            "it has"
        )


def plot(
    collection: Collection, out: Path, only: Sequence[str] = (), form: Form = Form()
) -> Iterator[str]:
    """Write figures of a collection and yield their names."""
    for drawn in draw([collection], only, form.has_title):
        write(drawn, out, form)
        yield drawn.name


def write(drawn: Drawn, out: Path, form: Form = Form()) -> list[Path]:
    """Write a figure reproducibly, without dates and random ids."""
    files = [out / f"{drawn.name}.{suffix}" for suffix in form.formats]
    out.mkdir(parents=True, exist_ok=True)
    if form.width is not None:
        width, height = drawn.figure.get_size_inches()
        drawn.figure.set_size_inches(form.width / CM, height * form.width / CM / width)
    for file in files:
        same = matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": drawn.name})
        with whole(file) as aside, same, warnings.catch_warnings():
            if form.width is not None:
                warnings.filterwarnings("error", "constrained_layout not applied")
            dated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix)
            try:
                drawn.figure.savefig(aside, format=file.suffix[1:], dpi=150, metadata=dated)
            except UserWarning:
                raise UsageError(
                    f"--width {form.width:g} is too narrow for {drawn.name}: pass a larger one"
                ) from None
        drawn.figure.set_layout_engine("none")  # the second format reuses the layout
    return files
