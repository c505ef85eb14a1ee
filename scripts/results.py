#!/usr/bin/env python3
"""Stores results of experiments and writes the tables of docs/results.md and the README.

    scripts/results.py [OUT ...]

OUT is the --out of scripts/multi30k.sh, speeches.sh, tatoeba.sh or reviews.sh. Its finished runs
are added to docs/results/EXPERIMENT.jsonl, one line each. A translation gets a paired bootstrap
test (SacreBLEU's, 1,000 samples) against softmax of the same seed. Then the tables are written,
also without any OUT.
"""

import re
import statistics
from pathlib import Path

import lib
import pages
from lib import ROOT, Experiment
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from multimax_fairseq.commands import tables
from multimax_fairseq.commands.compare import hypotheses
from multimax_fairseq.commands.tables import Column, Comparison, Line, Scores, mean_of
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import read_lines

DATA = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
EXPERIMENTS = {
    "multi30k": "Translation: Multi30k, German-English",
    "speeches": "Language modelling: State of the Union addresses",
    "tatoeba": "More text, translation: Tatoeba, Spanish-English",
    "reviews": "More text, language modelling: film reviews",
}
# Seeds from this one on confirm what the earlier seeds selected; they have tables of their own.
NEW_SEEDS = 6
SAMPLES = 1000  # of the bootstrap test
MARK = "<!-- Below: made by scripts/results.py -->\n"


# --- lines ---------------------------------------------------------------------------------------


def lines_of(experiment: str) -> list[Line]:
    file = DATA / f"{experiment}.jsonl"
    return lib.read_results(file) if file.exists() else []


def key(line: Line) -> tuple[str, int]:
    return line["row"], line["seed"]


def of_row(lines: list[Line], row: str) -> list[Line]:
    return [line for line in lines if line["row"] == row]


def add_runs(out: Path) -> None:
    """Add a folder's finished runs to the experiment's lines; a newer run replaces an older one."""
    results = pages.finished_runs(out)
    experiment = results[0][1]["experiment"]
    if experiment not in EXPERIMENTS:
        raise UsageError(f"'{out}' is of {experiment}: only {', '.join(EXPERIMENTS)} are kept")
    known = {key(line): line for line in lines_of(experiment)}
    results = [
        (run, line) for run, line in results if line["date"] >= known.get(key(line), line)["date"]
    ]
    for run, line in results:
        pages.check_same(run, line, known.values())
    runs = {key(line): run for run, line in results}
    new = {key(line) for _, line in results if known.get(key(line), {}).get("date") != line["date"]}
    for run, line in results:
        is_compared = line["row"] != "softmax" and "hypotheses" in line
        # A new run of softmax makes the comparisons with it out of date.
        needed = {key(line), ("softmax", line["seed"])} if is_compared else {key(line)}
        if not needed & new and (not is_compared or "bootstrap" in known[key(line)]):
            continue
        softmax = runs.get(("softmax", line["seed"]))
        if is_compared and softmax is not None:
            references = read_lines(ROOT / line["evaluation"][1] / "test.reference.en")
            both = (hypotheses(each, len(references)) for each in (softmax, run))
            line["bootstrap"] = paired_bootstrap(*both, references)
        known[key(line)] = line
    order = list(Experiment.read(experiment).changes)
    ordered = sorted(known.values(), key=lambda line: (order.index(line["row"]), line["seed"]))
    DATA.mkdir(exist_ok=True)
    lib.write_results(DATA / f"{experiment}.jsonl", ordered)


def paired_bootstrap(softmax: list[str], other: list[str], references: list[str]) -> Line:
    """Return the difference in BLEU, and p of a paired bootstrap test (Koehn, 2004)."""
    systems = [("softmax", softmax), ("other", other)]
    test = PairedTest(systems, {"BLEU": BLEU()}, [references], "bs", SAMPLES)
    base, found = test()[1]["BLEU"]
    difference = found.score - base.score
    # SacreBLEU's p of identical translations is 1 / (SAMPLES + 1), as if they differed.
    return {"difference": difference, "p": found.p_value if difference else 1.0}


# --- the page ------------------------------------------------------------------------------------


def scores(experiment: Experiment, lines: list[Line], row: str) -> Scores:
    return {line["seed"]: line[experiment.score["field"]] for line in of_row(lines, row)}


def compare(experiment: Experiment, lines: list[Line]) -> dict[str, Comparison]:
    """Compare each row with its group's softmax; the correction counts the compared rows.

    The rows of other learning rates are not compared.
    """
    baselines = {
        row: experiment.baselines.get(group, "softmax")
        for group, rows in experiment.groups.items()
        for row in rows
        if group != "rates"
    }
    known = {line["row"] for line in lines}
    return tables.compare(
        {
            row: (scores(experiment, lines, row), scores(experiment, lines, baseline))
            for row, baseline in baselines.items()
            if row in known and row != baseline
        }
    )


def comparison(compared: dict[str, Comparison]) -> dict[str, Column]:
    """The columns of each row's comparison."""

    def column(number: int) -> Column:
        return lambda block: one.cells()[number] if (one := compared.get(block[0]["row"])) else ""

    return {"minus softmax's": column(0), "95 % interval": column(1), "p": column(2)}


def flags(changes: dict[str, dict[str, object]]) -> str:
    """What a row changes, as options of fairseq-train."""
    words = lib.options(changes)
    return f"`{' '.join(words)}`" if words else "the default"


def significant(block: list[Line]) -> str:
    """How many runs the bootstrap finds better and worse than softmax, at p < 0.05."""
    tests = [line["bootstrap"] for line in block if "bootstrap" in line]
    clear = [test["difference"] for test in tests if test["p"] < 0.05]
    better = sum(difference > 0 for difference in clear)
    return f"{better}, {len(clear) - better} of {len(tests)}" if tests else ""


def increase(block: list[Line]) -> str:
    """The increase of the loss with int8 linear layers."""
    found = [line["int8"] for line in block if "int8" in line]
    return tables.mean_text((x["quantized_loss"] - x["loss"] for x in found), 4, sign="+")


def kurtosis(block: list[Line]) -> str:
    """The largest kurtosis of a layer's attention inputs."""
    found = [line["layers"] for line in block if "layers" in line]
    return tables.mean_text((max(layer["kurtosis"] for layer in x) for x in found), 1)


# Columns that only some lines have: {name: (the field, the column)}.
OPTIONAL: dict[str, tuple[str, Column]] = {
    "decoded with softmax in the decoder": ("softmax_decoding", mean_of("softmax_decoding")),
    "calibration error": ("calibration_error", mean_of("calibration_error", digits=4)),
    "loss in int8": ("int8", increase),
    "kurtosis": ("layers", kurtosis),
}


def table(
    experiment: Experiment, rows: list[str], lines: list[Line], compared: dict[str, Comparison]
) -> str:
    field = experiment.score["field"]

    columns = {
        "row": lambda block: block[0]["row"],
        "what it changes": lambda block: flags(experiment.changes[block[0]["row"]]),
        "seeds": lambda block: ", ".join(str(line["seed"]) for line in block),
        experiment.score["name"]: mean_of(field),
        **comparison(compared),
    }
    if field == "value":  # a translation
        columns["bootstrap: better, worse of"] = significant
        columns |= {"chrF": mean_of("chrf"), "tokenised BLEU": mean_of("tokenized_bleu")}
    else:
        columns["perplexity per subword"] = mean_of("value")
    columns["validation"] = mean_of("validation")
    kept = [line for line in lines if line["row"] in rows]
    for name, (needed, column) in OPTIONAL.items():
        if any(needed in line for line in kept):
            columns[name] = column
    if experiment.paper_data:
        columns[f"paper, {experiment.paper_data}"] = lambda b: experiment.papers[b[0]["row"]]
    return tables.summary([of_row(lines, row) for row in rows], columns)


def pairs(experiment: Experiment, lines: list[Line]) -> str:
    """The table of the pairs of rows; empty if no pair has three seeds in common."""
    both = {
        f"{one} minus {other}": (scores(experiment, lines, one), scores(experiment, lines, other))
        for one, other in experiment.pairs
    }
    rows = [
        [name, ", ".join(str(s) for s in both[name][0] if s in both[name][1]), *found.cells()]
        for name, found in tables.compare(both).items()
    ]
    head = ["rows", "seeds", experiment.score["name"], "95 % interval", "p"]
    return tables.markdown(head, rows) if rows else ""


def rates(experiment: Experiment, lines: list[Line]) -> str:
    """The table of each method's validation at all learning rates; empty if no method has all.

    The means are over the seeds that a method has at all rates.
    """
    cells = []
    for method, rows in experiment.rates.items():
        of_rates = [
            {line["seed"]: line["validation"] for line in of_row(lines, row)}
            for row in rows.values()
        ]
        if seeds := set.intersection(*map(set, of_rates)):
            means = [statistics.mean(found[seed] for seed in seeds) for found in of_rates]
            _, selected = min(zip(means, rows, strict=True))
            cells.append(
                [method, *(f"{mean:.2f}" for mean in means), f"{len(seeds)}", f"{selected:g}"]
            )
    head = ["method", *(f"validation at {rate:g}" for rate in experiment.rates.get("softmax", ()))]
    return tables.markdown([*head, "seeds", "selected"], cells) if cells else ""


# {name in the table by layer: field of a line's "layers"}
STATISTICS = {
    "largest score": "largest_score",
    "slope of sigma at the 5 % quantile": "slope_at_5_percent",
    "slope of sigma at the 95 % quantile": "slope_at_95_percent",
    "sparsity": "sparsity",
    "multi-modality": "multi_modality",
    "patch similarity": "patch_similarity",
    "kurtosis of the input": "kurtosis",
}


def by_layer(lines: list[Line], rows: list[str]) -> str:
    """The table of statistics by layer, means over seeds; empty if no line has them."""
    cells = []
    for row in rows:
        found = [line["layers"] for line in of_row(lines, row) if "layers" in line]
        for name, key in STATISTICS.items():
            if found and key in found[0][0]:
                layers = zip(*found, strict=True)
                means = (statistics.mean(layer[key] for layer in each) for each in layers)
                cells.append([row, name, *(f"{mean:.2f}" for mean in means)])
    if not cells:
        return ""
    return tables.markdown(["row", "statistic", *map(str, range(1, len(cells[0]) - 1))], cells)


def page(text: str) -> str:
    """docs/results.md with new tables below the mark."""
    text = pages.text_above(MARK, text)
    for name, title in EXPERIMENTS.items():
        lines, experiment = lines_of(name), Experiment.read(name)
        if not lines:
            continue
        text += f"\n## {title}\n"
        power, seeds = experiment.power["rows"], experiment.power["seeds"]
        old = [line for line in lines if line["seed"] < NEW_SEEDS]
        fixed = [line for line in lines if line["seed"] in seeds]
        new = [line for line in lines if line["seed"] not in seeds and line["seed"] >= NEW_SEEDS]
        others = [line for line in fixed if line["row"] not in power]
        sections = {
            group.replace("_", " ").capitalize(): (rows, old)
            for group, rows in experiment.groups.items()
        }
        sections["New seeds"] = (list(dict.fromkeys(line["row"] for line in new)), new)
        # The test that was fixed in advance needs no correction for other rows.
        sections["Seeds fixed in advance"] = (power, [x for x in fixed if x["row"] in power])
        rows = ["softmax", *dict.fromkeys(line["row"] for line in others)] if others else []
        sections["Other rows with these seeds"] = (rows, [*of_row(fixed, "softmax"), *others])
        for heading, (rows, some) in sections.items():
            if any(line["row"] in rows for line in some):
                compared = compare(experiment, some)
                text += f"\n### {heading}\n\n{table(experiment, rows, some, compared)}"
                if heading == "Depth":
                    text += f"\n{by_layer(some, rows)}"
        if of_rates := rates(experiment, old):
            text += f"\n### Learning rates by validation\n\n{of_rates}"
        if of_pairs := pairs(experiment, lines):
            text += f"\n### Two rows of the same seeds\n\n{of_pairs}"
        text += f"\n{lib.notes(lines)}"
    return text


def front_page(text: str) -> str:
    """The README with a new table of translation results."""
    experiment = Experiment.read("multi30k")
    lines = [line for line in lines_of("multi30k") if line["seed"] < NEW_SEEDS]
    compared = compare(experiment, lines)
    columns = {
        "attention": lambda block: experiment.labels[block[0]["row"]],
        "seeds": lambda block: str(len(block)),
        "SacreBLEU": mean_of("value"),
        **comparison(compared),
        f"paper, {experiment.paper_data}": lambda b: experiment.papers[b[0]["row"]],
    }
    table = tables.summary([of_row(lines, row) for row in experiment.groups["paper"]], columns)
    text, count = re.subn(r"(?m)^\| attention \| seeds \|.*\n(\|.*\n)+", lambda _: table, text)
    if count != 1:
        raise UsageError(
            f"'{README}' has {count} tables that begin with attention and seeds, not 1"
        )
    return text


if __name__ == "__main__":
    pages.store_and_write(__doc__, add_runs, {PAGE: page, README: front_page})
