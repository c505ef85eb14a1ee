"""The catalogue of figures."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from matplotlib.figure import Figure


@dataclass
class Picture:
    """A figure of the catalogue.

    `draw` takes a list of collections if the figure is comparable, otherwise one collection. If
    there is a figure for each of `kinds`, it also takes the kind of attention.
    """

    name: str
    title: str
    draw: Callable[..., Figure | None]
    comparable: bool
    kinds: tuple[str, ...]

    def names(self) -> dict[str, str | None]:
        """Return {name of a figure: its kind}."""
        return {f"{self.name}-{kind}": kind for kind in self.kinds} or {self.name: None}

    @property
    def caption(self) -> str:
        return " ".join((self.draw.__doc__ or "").split())


@dataclass
class Drawn:
    name: str
    title: str
    caption: str
    figure: Figure


# By the module that defines them.
_pictures: dict[str, list[Picture]] = {}


def picture(
    title: str, comparable: bool = False, kinds: tuple[str, ...] = ()
) -> Callable[[Callable[..., Figure | None]], Callable[..., Figure | None]]:
    """Add a function to the catalogue of its module, in the order of definition."""

    def enter(draw: Callable[..., Figure | None]) -> Callable[..., Figure | None]:
        name = draw.__name__.replace("_", "-")
        entry = Picture(name, title, draw, comparable, kinds)
        _pictures.setdefault(draw.__module__, []).append(entry)
        return draw

    return enter


def catalogue(*themes: ModuleType) -> list[Picture]:
    """Return the figures of these modules, in this order."""
    return [entry for theme in themes for entry in _pictures[theme.__name__]]
