#!/usr/bin/env python3
"""Keeps the results of experiments as data, and makes the tables of docs/results.md and README.

    scripts/results.py [OUT ...]

OUT is the --out of scripts/multi30k.sh or scripts/speeches.sh. Its finished runs are taken into
docs/results/EXPERIMENT.jsonl, a line each, translations with a paired bootstrap (SacreBLEU's, 1,000
samples) against softmax of the same seed. Then, or without any OUT, the tables are written.
"""

import argparse
import json
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import evaluate
from experiment_plan import ROOT, groups, listed, options_of
from methods import METHODS, PAPERS_DATA
from omegaconf import OmegaConf
from sacrebleu.metrics import BLEU
from sacrebleu.significance import PairedTest
from scipy import stats

from multimax_fairseq.errors import UsageError

DATA = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "results.md"
README = ROOT / "README.md"
EXPERIMENTS = {
    "multi30k": "Translation: Multi30k, German-English",
    "speeches": "Language modelling: State of the Union addresses",
}
# What is compared, and where a line has it.
SCORES = {"multi30k": ("SacreBLEU", "value"), "speeches": ("perplexity a word", "word_perplexity")}
# Which of two rows is better, where softmax is not what a row has to be compared with.
PAIRS = {
    "multi30k": [
        ("multimax", "temperature"),
        ("tempered", "temperature"),
        ("rdrop", "softmax_rdrop"),
    ],
    "speeches": [
        ("output_alone", "output_temperature"),
        ("output_alone", "multimax"),
        ("multimax", "multimax_attention"),
        ("freeze_third", "multimax"),
        ("freeze_third", "freeze_output"),
        ("rdrop", "softmax_rdrop"),
    ],
}
SAMPLES = 1000
# From this one on they are kept for what the others have chosen, and have tables of their own.
NEW_SEEDS = 6
MARK = "<!-- Below: made by scripts/results.py -->\n"
Line = dict[str, Any]


# --- lines ---------------------------------------------------------------------------------------


def lines_of(experiment: str) -> list[Line]:
    file = DATA / f"{experiment}.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def first(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["seed"] < NEW_SEEDS]


def key(line: Line) -> tuple[str, int]:
    return line["row"], line["seed"]


def of_row(lines: list[Line], row: str) -> list[Line]:
    return [line for line in lines if line["row"] == row]


def hypotheses(run: Path, references: list[str]) -> list[str]:
    found = evaluate.sentences((run / "evaluate.log").read_text(encoding="utf-8"), "H")
    return [found[number] for number in range(len(references))]


def bootstrap(ours: list[str], softmax: list[str], references: list[str]) -> dict[str, float]:
    """The difference in BLEU, and how probable one as large is of two systems that are alike."""
    test = PairedTest(
        [("softmax", softmax), ("ours", ours)],
        {"BLEU": BLEU()},
        [references],
        test_type="bs",
        n_samples=SAMPLES,
    )
    base, other = test()[1]["BLEU"]
    return {"difference": other.score - base.score, "p": other.p_value}


def settings(line: Line) -> dict[str, tuple[str, ...]]:
    """What a line's command asks for, but for its seed and for where things lie."""
    options = options_of(shlex.split(line["command"]))
    elsewhere = ("", "--seed", "--save-dir", "--user-dir")
    return {name: values for name, values in options.items() if name not in elsewhere}


def check(run: Path, line: Line, kept: list[Line]) -> None:
    """Refuse a run of other data or settings than those of the lines that are kept."""
    for other in kept:
        for name in ("data", "updates"):
            if line[name] != other[name]:
                raise UsageError(
                    f"'{run}' has other {name} than the lines of docs/results ({line[name]}, not "
                    f"{other[name]}): only runs that can be compared with them are kept"
                )
        if line["row"] == other["row"] and (mine := settings(line)) != (theirs := settings(other)):
            name = next(n for n in mine | theirs if mine.get(n) != theirs.get(n))
            raise UsageError(
                f"'{run}' was not trained as row {line['row']} of docs/results ({name}): only runs "
                "that can be compared with it are kept"
            )


def take_in(out: Path) -> None:
    """Add an experiment's finished runs to its lines, in place of earlier ones of the same."""
    files = sorted(out.glob("*/seed-*/result.json"))
    if not files:
        raise UsageError(f"'{out}' has no finished run: give the --out of an experiment")
    results = [(file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in files]
    experiment = results[0][1]["experiment"]
    if experiment not in EXPERIMENTS:
        raise UsageError(f"'{out}' is of {experiment}: only {', '.join(EXPERIMENTS)} are kept")
    known = {key(line): line for line in lines_of(experiment)}
    for run, line in results:
        check(run, line, list(known.values()))
    runs = {key(line): run for run, line in results}
    new = {key(line) for _, line in results if known.get(key(line), {}).get("date") != line["date"]}
    for run, line in results:
        is_alone = line["row"] == "softmax" or "hypotheses" not in line
        # What was compared with an earlier run of softmax is compared anew.
        needed = {key(line)} if is_alone else {key(line), ("softmax", line["seed"])}
        if not needed & new and (is_alone or "bootstrap" in known[key(line)]):
            continue
        softmax = runs.get(("softmax", line["seed"]))
        if "hypotheses" in line and line["row"] != "softmax" and softmax is not None:
            data = ROOT / line["evaluation"][1]
            references = evaluate.raw_lines(data / "test.reference.en")
            both = (hypotheses(each, references) for each in (run, softmax))
            line["bootstrap"] = bootstrap(*both, references)
        known[key(line)] = line
    order = [row for rows in groups(experiment).values() for row in rows]
    ordered = sorted(known.values(), key=lambda line: (order.index(line["row"]), line["seed"]))
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered)
    DATA.mkdir(exist_ok=True)
    evaluate.write(DATA / f"{experiment}.jsonl", text)


# --- the page ------------------------------------------------------------------------------------


def spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.2f}"


def against(block: list[Line], base: list[Line], field: str) -> tuple[str, str]:
    """A row's differences to another's runs of the same seeds, mean and deviation; the p of a
    paired t-test."""
    theirs = {line["seed"]: line[field] for line in base}
    pairs = [(line[field], theirs[line["seed"]]) for line in block if line["seed"] in theirs]
    if not pairs or block == base:
        return "", ""
    differences = [one - other for one, other in pairs]
    mean = f"{statistics.mean(differences):+.2f}"
    if len(pairs) < 2:
        return mean, ""
    p = stats.ttest_rel(*zip(*pairs, strict=True)).pvalue
    return f"{mean} ± {statistics.stdev(differences):.2f}", "< 0.001" if p < 0.001 else f"{p:.3f}"


def markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def changes(experiment: str, row: str) -> str:
    """What a row changes, as flags of fairseq-train."""
    entries = listed(experiment)
    assert entries is not None
    found = next(rows[row] for rows in entries.values() if row in rows)
    words = []
    for settings in OmegaConf.to_container(found).values():
        for name, value in settings.items():
            flag = "--optimizer" if name == "_name" else f"--{name.replace('_', '-')}"
            words.append(flag if value is True else f"{flag} {value}")
    return f"`{' '.join(words)}`" if words else "the default"


def table(experiment: str, rows: list[str], lines: list[Line]) -> str:
    is_translation = experiment == "multi30k"
    score, field = SCORES[experiment]
    softmax = of_row(lines, "softmax")
    head = ["row", "what it changes", "seeds", score, "minus softmax's", "p"]
    head += (
        ["bootstrap: better, worse of", "chrF", "tokenised BLEU", "validation"]
        if is_translation
        else ["perplexity a subword", "validation"]
    )
    head += [f"paper, {PAPERS_DATA[experiment]}"]
    out = []
    for row in rows:
        block = of_row(lines, row)
        if not block:
            continue
        seeds = ", ".join(str(line["seed"]) for line in block)
        cells = [row, changes(experiment, row), seeds, spread([line[field] for line in block])]
        cells += against(block, softmax, field)
        if is_translation:
            tests = [line["bootstrap"] for line in block if "bootstrap" in line]
            # Of translations that are the same, SacreBLEU's p is 0.
            clear = [t["difference"] for t in tests if t["difference"] and t["p"] < 0.05]
            better = sum(difference > 0 for difference in clear)
            cells.append(f"{better}, {len(clear) - better} of {len(tests)}" if tests else "")
            cells += [spread([line[name] for line in block]) for name in ("chrf", "tokenized_bleu")]
        else:
            cells.append(spread([line["value"] for line in block]))
        cells.append(spread([line["validation"] for line in block]))
        cells.append(METHODS[experiment].get(row, ("", ""))[1])
        out.append(cells)
    return markdown(head, out)


def pairs(experiment: str, lines: list[Line]) -> str:
    """The table of the rows that are compared with each other; empty where no two have a seed."""
    score, field = SCORES[experiment]
    out = []
    for one, other in PAIRS[experiment]:
        block, base = of_row(lines, one), of_row(lines, other)
        seeds = sorted({line["seed"] for line in block} & {line["seed"] for line in base})
        if seeds:
            names = f"{one} minus {other}"
            out.append([names, ", ".join(map(str, seeds)), *against(block, base, field)])
    return markdown(["rows", "seeds", score, "p"], out) if out else ""


def notes(lines: list[Line]) -> str:
    def all_of(values: Any) -> str:
        return "; ".join(sorted(set(values)))

    told = {
        "Scores": all_of(f"{line['signature']} ({line['protocol']})" for line in lines),
        "chrF": all_of(line.get("chrf_signature", "") for line in lines),
        "Tokenised BLEU": all_of(line.get("tokenized_signature", "") for line in lines),
        "Data (SHA-256)": all_of(line["data"] for line in lines),
        "Processors": all_of(line["hardware"] for line in lines),
        "Versions": all_of(
            ", ".join(f"{name} {number}" for name, number in line["versions"].items())
            for line in lines
        ),
        "Commits": all_of(str(line["commit"])[:12] for line in lines),
    }
    return "".join(f"- {name}: {text}\n" for name, text in told.items() if text.strip("; "))


def page(text: str) -> str:
    """docs/results.md with all below the mark made anew."""
    head, found, _ = text.partition(MARK)
    if not found:
        raise UsageError(f"'{PAGE}' has no line '{MARK.strip()}', below which its tables go")
    text = head + MARK
    for experiment, title in EXPERIMENTS.items():
        lines = lines_of(experiment)
        if not lines:
            continue
        text += f"\n## {title}\n"
        new = [line for line in lines if line["seed"] >= NEW_SEEDS]
        old = first(lines)
        tables = {name.capitalize(): (rows, old) for name, rows in groups(experiment).items()}
        tables["New seeds"] = (list(dict.fromkeys(line["row"] for line in new)), new)
        for name, (rows, some) in tables.items():
            if any(line["row"] in rows for line in some):
                text += f"\n### {name}\n\n{table(experiment, rows, some)}"
        if compared := pairs(experiment, lines):
            text += f"\n### Two rows of the same seeds\n\n{compared}"
        text += f"\n{notes(lines)}"
    return text


def front_page(text: str) -> str:
    """README with its table of translation made anew."""
    lines = first(lines_of("multi30k"))
    out = []
    for row, (label, paper) in METHODS["multi30k"].items():
        if block := of_row(lines, row):
            scores = spread([line["value"] for line in block])
            compared = against(block, of_row(lines, "softmax"), "value")
            out.append([label, str(len(block)), scores, *compared, paper])
    head = ["attention", "seeds", "SacreBLEU", "minus softmax's", "p"]
    head += [f"paper, {PAPERS_DATA['multi30k']}"]
    made = markdown(head, out)
    text, found = re.subn(r"(?m)^\| attention \| seeds \|.*\n(\|.*\n)+", lambda _: made, text)
    if found != 1:
        raise UsageError(
            f"'{README}' has {found} tables that begin with attention and seeds, not 1"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, nargs="*", metavar="OUT")
    args = parser.parse_args()
    try:
        for out in args.out:
            take_in(out)
        for file, make in ((PAGE, page), (README, front_page)):
            evaluate.write(file, make(file.read_text(encoding="utf-8")))
    except (UsageError, OSError, ValueError, LookupError) as error:
        sys.exit(f"results.py: error: {error}")
    print(f"Written: {PAGE}, {README}")


if __name__ == "__main__":
    main()
