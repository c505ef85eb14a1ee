"""Makes tables of results, and compares results by a paired t-test."""

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Line = dict[str, Any]  # one result
Column = Callable[[list[Line]], str]  # computes a cell from the results of a row
Scores = dict[int, float]  # {seed: score}
SIGNIFICANT = 0.05
FEWEST = 3  # differences that a comparison needs


# --- tables --------------------------------------------------------------------------------------


def markdown(head: list[str], rows: list[list[str]], align: bool = False) -> str:
    """Return a Markdown table; with `align`, columns are padded for a terminal."""
    lines = [head, ["---"] * len(head), *rows]
    if align:
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines[1] = ["-" * width for width in widths]
        lines = [[cell.ljust(width) for cell, width in zip(x, widths, strict=True)] for x in lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def summary(blocks: Iterable[list[Line]], columns: dict[str, Column]) -> str:
    """Return a Markdown table with one row for each block of results."""
    rows = [[cell(block) for cell in columns.values()] for block in blocks if block]
    return markdown(list(columns), rows)


def mean_of(*keys: str, digits: int = 2, unit: float = 1.0) -> Column:
    """Return the column of the mean of a field; several keys name a nested field."""

    def value(line: Line) -> float | None:
        found: Any = line
        for key in keys:
            found = found and found.get(key)
        return found and found / unit

    return lambda block: mean_text(map(value, block), digits)


def mean_text(values: Iterable[float | None], digits: int = 2, sign: str = "") -> str:
    """Return the mean of the known values, ± the standard deviation (n - 1) if several."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    text = f"{statistics.mean(known):{sign},.{digits}f}"
    return text if len(known) < 2 else f"{text} ± {statistics.stdev(known):,.{digits}f}"


# --- statistics ----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Differences from a baseline, paired by seed."""

    mean: float
    deviation: float
    interval: tuple[float, float]  # 95 %, of the mean; without correction
    p: float  # of a paired t-test; `compare` applies Holm's correction

    @property
    def size(self) -> float:
        """The effect size d."""
        return self.mean / self.deviation if self.deviation else 0.0

    @property
    def verdict(self) -> int:
        """1 higher, -1 lower, 0 no significant difference."""
        return 0 if self.p >= SIGNIFICANT else 1 if self.mean > 0 else -1

    def cells(self, digits: int = 2) -> list[str]:
        """Return mean ± standard deviation, interval and p for a table."""
        low, high = self.interval
        return [
            f"{self.mean:+.{digits}f} ± {self.deviation:.{digits}f}",
            f"{low:+.{digits}f} to {high:+.{digits}f}",
            "< 0.001" if self.p < 0.001 else f"{self.p:.3f}",
        ]


def paired(differences: list[float]) -> Comparison:
    """Test the differences between runs of the same seed by a paired t-test."""
    from scipy import stats  # slow to import

    mean, deviation = statistics.mean(differences), statistics.stdev(differences)
    test = stats.ttest_1samp(differences, 0)
    interval = test.confidence_interval(0.95) if deviation else (mean, mean)
    p = float(test.pvalue) if any(differences) else 1.0
    return Comparison(mean, deviation, tuple(interval), p)


def compare(pairs: dict[str, tuple[Scores, Scores]]) -> dict[str, Comparison]:
    """Compare {name: (scores, scores of its baseline)}, where FEWEST seeds are in both."""
    found = {}
    for name, (scores, baseline) in pairs.items():
        gains = [score - baseline[seed] for seed, score in scores.items() if seed in baseline]
        if len(gains) >= FEWEST:
            found[name] = paired(gains)
    corrected = holm({name: one.p for name, one in found.items()})
    return {name: one._replace(p=corrected[name]) for name, one in found.items()}


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Return p values after Holm's step-down correction (Holm 1979)."""
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected
