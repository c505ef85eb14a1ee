#!/usr/bin/env python3
"""Stores lines of the leaderboard and writes the tables and figures of docs/leaderboard.md.

    scripts/leaderboard_page.py [OUT ...]

OUT is the --out of scripts/leaderboard.sh, speeches.sh or multi30k.sh. Its finished runs are added
to docs/results/leaderboard.jsonl, one line each; a newer run of the same row and seed replaces an
older one. Then the page is written, also without any OUT. The attention tables take the scores of
Multi30k from docs/results/multi30k.jsonl, and of rows missing there from leaderboard.jsonl.

A comparison pairs runs of the same seed. Its p value is from a paired t-test, after Holm's
correction for all entries of a column. The effect size is the mean of the differences over their
standard deviation.
"""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lib
import matplotlib
import pages
from lib import ROOT

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from leaderboards.entries import COMPARED, Entry, entries
from leaderboards.tasks import KEYS, NOISES, TASKS, in_words

from multimax_fairseq.analysis.canvas import style
from multimax_fairseq.commands import tables
from multimax_fairseq.commands.tables import Comparison, Line, Scores, mean_of
from multimax_fairseq.errors import UsageError

LINES = ROOT / "docs" / "results" / "leaderboard.jsonl"
TRANSLATIONS = ROOT / "docs" / "results" / "multi30k.jsonl"
SEEDS = range(1, 6)
PAGE, FIGURE = ROOT / "docs" / "leaderboard.md", ROOT / "docs" / "leaderboard.svg"
NOISY_FIGURE = ROOT / "docs" / "noisy-retrieval.svg"
# The tasks of the tables of attention, and of noisy retrieval.
MAIN, NOISY = ("retrieval", "recall", "maximum"), ("noisy", "needle", "share")
MARK = "<!-- Below: made by scripts/leaderboard_page.py -->\n"
LARGE = 5  # the effect size at which the colours of the figure end
# {entry of the output layer: its row in configs/rows/speeches.yaml and multi30k.yaml}
OUTPUTS = {
    "softmax": "softmax",
    "learned temperature": "output_temperature",
    "MultiMax": "output_alone",
    "piecewise-linear": "output_piecewise_linear",
    "soft-cap": "output_softcap",
    "learned soft-cap": "output_learned_softcap",
    "asymmetric cap": "output_asymmetric_cap",
    "mixture of two softmaxes": "output_mixture",
    "z-loss": "z_loss",
    "MaxSup": "maxsup",
    "label smoothing": "label_smoothing",
    "no label smoothing": "no_label_smoothing",
}

# {label of scalars that are fitted to finished models of softmax: their row in the same files}
FITS = {
    "softmax": "softmax",
    "learned temperature": "fit_temperature",
    "soft-cap": "fit_softcap",
    "MultiMax": "fit_multimax",
    "MultiMax, 20 updates": "fit_multimax_20",
    "MultiMax in attention": "fit_attention",
    "MultiMax in both": "fit_both",
}


# --- lines ---------------------------------------------------------------------------------------


def key(line: Line) -> tuple[str, str, str, int]:
    return line["experiment"], line.get("task", ""), line["row"], line["seed"]


def stored() -> list[Line]:
    return lib.read_results(LINES) if LINES.exists() else []


def add_runs(out: Path) -> None:
    """Add a folder's finished runs to the stored lines."""
    known = {key(line): line for line in stored()}
    translations = lib.read_results(TRANSLATIONS)
    for run, line in pages.finished_runs(out):
        if line["experiment"] not in ("leaderboard", "speeches", "multi30k"):
            raise UsageError(
                f"'{out}' is of {line['experiment']}: pass the --out of leaderboard.sh, "
                "speeches.sh or multi30k.sh"
            )
        if "-dirty" in str(line["commit"]) or "--quick" in line["command"]:
            raise UsageError(
                f"'{out}' has a run made with --quick or with uncommitted changes: repeat it "
                "without --quick in a clean checkout"
            )
        before = known.get(key(line))
        if before is None or before["date"] < line["date"]:
            pages.check_same(run, line, [*known.values(), *translations])
            known[key(line)] = line
    lib.write_results(LINES, [known[name] for name in sorted(known)])


# --- columns and comparisons ---------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """Scores of one measurement: {entry: {seed: score}}."""

    title: str
    scores: dict[str, dict[int, float]]
    digits: int
    is_error: bool  # lower is better

    def gains(self) -> dict[str, Scores]:
        """The scores with the sign for which higher is better."""
        sign = -1 if self.is_error else 1
        return {e: {s: sign * x for s, x in own.items()} for e, own in self.scores.items()}


def scores_of(
    lines: list[Line], rows: dict[str, str], score: Callable[[Line], float]
) -> dict[str, dict[int, float]]:
    """Return {entry: {seed: score}}; `rows` names the row of each entry."""
    found: dict[str, dict[int, float]] = {}
    for entry, row in rows.items():
        own = {line["seed"]: score(line) for line in lines if line["row"] == row}
        if own:
            found[entry] = own
    return found


def compare(column: Column, base: str) -> dict[str, Comparison]:
    """Compare the entries of a column with one of them; a positive difference is better."""
    gains = column.gains()
    baseline = gains.pop(base, {})
    return tables.compare({entry: (own, baseline) for entry, own in gains.items()})


def task_column(lines: list[Line], name: str, length: int) -> Column:
    """The scores of all entries in a synthetic task at one length."""
    task, own = TASKS[name], [line for line in lines if line.get("task") == name]
    scores = scores_of(own, {line["row"]: line["row"] for line in own}, at_length(length))
    title = f"{task.title}, {length:,} ({task.unit})"
    return Column(title, scores, task.digits, task.is_error)


def columns(lines: list[Line], entries_by_name: dict[str, Entry]) -> list[Column]:
    """The columns of the attention's table: each synthetic task at two lengths, and both texts."""
    return [
        *(
            task_column(lines, name, length)
            for name in MAIN
            for length in (TASKS[name].train[-1], TASKS[name].test[-1])
        ),
        *text_columns(
            lines,
            {e: entry.translation for e, entry in entries_by_name.items()},
            {e: entry.language_model for e, entry in entries_by_name.items()},
        ),
    ]


def known_scores(found: list[Column]) -> list[Column]:
    """The columns of the tasks that some entry has run."""
    return [column for column in found if column.scores]


def at_length(length: int) -> Callable[[Line], float]:
    return lambda line: line["scores"][str(length)]


def text_columns(
    lines: list[Line], translation: dict[str, str], language_model: dict[str, str]
) -> list[Column]:
    """SacreBLEU, and perplexity at the trained length and beyond."""
    multi30k, speeches = (
        [line for line in lines if line["experiment"] == name] for name in ("multi30k", "speeches")
    )
    perplexity = scores_of(speeches, language_model, lambda line: line["word_perplexity"])
    longer = scores_of(speeches, language_model, lambda line: line["longer"]["word_perplexity"])
    return [
        Column("SacreBLEU", scores_of(multi30k, translation, lambda x: x["value"]), 2, False),
        Column("perplexity", perplexity, 1, True),
        Column("perplexity, 4 x length", longer, 1, True),
    ]


# --- the page ------------------------------------------------------------------------------------


def scores_table(found: list[Column], names: dict[str, str]) -> str:
    """One row for each entry: mean ± deviation, and the number of seeds if fewer than five.

    + and - mark significant differences from softmax.
    """
    verdicts = [compare(column, "softmax") for column in found]

    def cell(column: Column, compared: dict[str, Comparison], entry: str) -> str:
        own = list(column.scores.get(entry, {}).values())
        count = f" ({len(own)})" if 0 < len(own) < len(SEEDS) else ""
        mark = {1: " +", -1: " -", 0: ""}[compared[entry].verdict] if entry in compared else ""
        return tables.mean_text(own, column.digits) + count + mark

    rows = [
        [names[entry], *(cell(c, v, entry) for c, v in zip(found, verdicts, strict=True))]
        for entry in names
        if any(entry in column.scores for column in found)
    ]
    return tables.markdown(["mapping", *(column.title for column in found)], rows)


def gains_table(found: list[Column], names: dict[str, str], base: str) -> str:
    """One row for each entry: its gain over the baseline, effect size and corrected p."""
    compared = [compare(column, base) for column in found]

    def cell(column: Column, one: Comparison | None) -> str:
        if one is None:
            return ""
        difference, _, p = one.cells(column.digits)
        return f"{difference}, d = {one.size:z.1f}, p {p if '<' in p else f'= {p}'}"

    rows = [
        [names[entry], *(cell(c, each.get(entry)) for c, each in zip(found, compared, strict=True))]
        for entry in names
        if any(entry in each for each in compared)
    ]
    return tables.markdown(["mapping", *(column.title for column in found)], rows)


def orders_table(lines: list[Line]) -> str:
    """Compare s log(n) sigma(x) with sigma(s log(n) x); the correction counts the rows."""
    after, before = "multimax_length_scale", "multimax_of_ssmax"
    found = {
        column.title: column
        for name in ("noisy", "retrieval", "maximum")
        for length in (TASKS[name].train[-1], 1024, 4096)
        if {after, before} <= (column := task_column(lines, name, length)).scores.keys()
    }
    gains = {title: column.gains() for title, column in found.items()}
    compared = tables.compare({title: (own[after], own[before]) for title, own in gains.items()})
    rows = [
        [
            title,
            *(
                tables.mean_text(found[title].scores[entry].values(), found[title].digits)
                for entry in (after, before)
            ),
            *one.cells(found[title].digits),
        ]
        for title, one in compared.items()
    ]
    head = ["task", "s log(n) sigma(x)", "sigma(s log(n) x)", "the first is better by"]
    return tables.markdown([*head, "95 % interval", "p"], rows)


def attention_table(lines: list[Line], entries_by_name: dict[str, Entry]) -> str:
    """The table of attention statistics, speed and memory of the language models."""
    speeches = [line for line in lines if line["experiment"] == "speeches"]
    labels = {entry.language_model: entry.label for entry in entries_by_name.values()}
    columns = {
        "mapping": lambda block: labels[block[0]["row"]],
        "zeros": mean_of("attention", "zeros", digits=3),
        "entropy, nats": mean_of("attention", "entropy"),
        "weight on the first key": mean_of("attention", "first_key", digits=3),
        "largest score": mean_of("attention", "largest_score", digits=1),
        "tokens/s": mean_of("tokens_per_second", digits=0),
        "peak GB": mean_of("peak_memory", unit=1e9),
    }
    return tables.summary([[x for x in speeches if x["row"] == row] for row in labels], columns)


def draw(found: list[Column], names: dict[str, str]) -> None:
    """Draw the effect size against softmax in each column that compares entries with it."""
    all_of = {column.title: compare(column, "softmax") for column in found}
    compared = {title: each for title, each in all_of.items() if each}
    if not compared:
        return
    shown = [entry for entry in names if any(entry in each for each in compared.values())]
    plt.rcParams["svg.hashsalt"] = "leaderboard"  # else each drawing has other identifiers
    figure, axis = plt.subplots(figsize=(10, 0.32 * len(shown) + 2.2))
    sizes = [
        [each[entry].size if entry in each else float("nan") for each in compared.values()]
        for entry in shown
    ]
    # Brown is worse and green is better.
    image = axis.imshow(sizes, cmap="BrBG", vmin=-LARGE, vmax=LARGE, aspect="auto")
    for column, each in enumerate(compared.values()):
        for row, entry in enumerate(shown):
            if entry not in each:
                continue
            one = each[entry]
            look = {"fontweight": "bold"} if one.verdict else {}
            text = f"{one.size:+z.1f}{'*' if one.verdict else ''}"
            color = "white" if abs(one.size) > 0.6 * LARGE else "black"
            axis.text(column, row, text, ha="center", va="center", fontsize=7, color=color, **look)
    parts = [title.replace(" (", "\n(").splitlines() for title in compared]
    titles = ["\n".join(textwrap.fill(part, 13) for part in each) for each in parts]
    axis.set_xticks(range(len(compared)), titles, fontsize=6.5)
    axis.set_yticks(range(len(shown)), [names[entry] for entry in shown], fontsize=8)
    axis.xaxis.tick_top()
    axis.tick_params(length=0)
    for column in range(1, len(compared)):
        axis.axvline(column - 0.5, color="white", linewidth=2)
    for row in range(1, len(shown)):
        axis.axhline(row - 0.5, color="white", linewidth=2)
    bar = figure.colorbar(image, extend="both", aspect=40, pad=0.02)
    bar.set_label("effect size d against softmax: below 0 worse, above 0 better", fontsize=8)
    bar.ax.tick_params(labelsize=7)
    note = f"* bold: p < {tables.SIGNIFICANT} after Holm's correction.   "
    axis.set_xlabel(f"{note}White: fewer than three seeds.", fontsize=8, labelpad=8)
    figure.savefig(FIGURE, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)


def draw_noisy(lines: list[Line], names: dict[str, str]) -> None:
    """Draw the gain over softmax against noise, relevant keys and all keys, where known."""
    length = TASKS["noisy"].train[0]
    ticks_of = {
        "standard deviation of the noise": [
            (str(noise), task_column(lines, name, length)) for name, noise in NOISES.items()
        ],
        "number of relevant keys": [
            (in_words(counts), task_column(lines, name, length)) for name, counts in KEYS.items()
        ],
        f"number of keys ({length} in training)": [
            (f"{keys:,}", task_column(lines, "noisy", keys)) for keys in TASKS["noisy"].test
        ],
    }
    compared = {
        title: {tick: compare(column, "softmax") for tick, column in ticks}
        for title, ticks in ticks_of.items()
    }
    panels = {title: ticks for title, ticks in compared.items() if all(ticks.values())}
    if not panels:
        return
    plt.rcParams["svg.hashsalt"] = "noisy"
    size = (3 * len(panels) + 3, 3.6)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    for axis, (title, ticks) in zip(axes[0], panels.items(), strict=True):
        for number, entry in enumerate(COMPARED[1:]):
            at = {x: each[entry] for x, each in enumerate(ticks.values()) if entry in each}
            # Next to each other, so that the intervals do not cover each other.
            places = [x + 0.06 * (number - 3) for x in at]
            bars = [one.mean - one.interval[0] for one in at.values()]
            means = [one.mean for one in at.values()]
            axis.errorbar(places, means, bars, label=names[entry], **style(number), capsize=2)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xticks(range(len(ticks)), list(ticks))
        axis.set_xlabel(title)
    axes[0][0].set_ylabel("gain over softmax, nats of KL")
    shown = axes[0][0].get_legend_handles_labels()
    figure.legend(*shown, loc="outside right center", fontsize=8)
    figure.savefig(NOISY_FIGURE, metadata={"Date": None})
    plt.close(figure)


def page(text: str) -> str:
    """docs/leaderboard.md with new tables below the mark."""
    own, entries_by_name = stored(), entries()
    translations = [line for line in lib.read_results(TRANSLATIONS) if line["seed"] in SEEDS]
    known = {("multi30k", line["row"]) for line in translations}
    lines = [line for line in own if (line["experiment"], line["row"]) not in known] + translations
    labels = {name: entry.label for name, entry in entries_by_name.items()}
    found = columns(lines, entries_by_name)
    draw(found, labels)
    draw_noisy(own, labels)
    noisy = {
        TASKS[name].title.capitalize(): [
            task_column(own, name, length) for length in (64, 1024, 4096)
        ]
        for name in NOISY
    }
    noisy["Noise and relevant keys"] = [
        task_column(own, name, 64) for name in NOISES | KEYS if name not in NOISY
    ]
    groups = {
        **{title: (known_scores(each), labels, "multimax") for title, each in noisy.items()},
        "Attention": (found, labels, "temperature"),
        "Output layer": (
            text_columns(own, OUTPUTS, OUTPUTS),
            {name: name for name in OUTPUTS},
            "learned temperature",
        ),
        "Scalars fitted to finished models": (
            text_columns(own, FITS, FITS),
            {name: name for name in FITS},
            "learned temperature",
        ),
    }
    parts = {}
    for title, (its_columns, names, baseline) in groups.items():
        parts[f"{title}: scores"] = scores_table(its_columns, names)
        parts[f"{title}: gain over softmax"] = gains_table(its_columns, names, "softmax")
        over = "MultiMax" if baseline == "multimax" else "a learned temperature"
        parts[f"{title}: gain over {over}"] = gains_table(its_columns, names, baseline)
    parts["Two orders of the length scale"] = orders_table(own)
    parts["Attention of the language models"] = attention_table(lines, entries_by_name)
    sections = "".join(
        f"\n## {title}\n\n{table}" for title, table in parts.items() if table.count("\n") > 2
    )
    return f"{pages.text_above(MARK, text)}{sections}\n{lib.notes([*own, *translations])}"


if __name__ == "__main__":
    pages.store_and_write(__doc__, add_runs, {PAGE: page})
