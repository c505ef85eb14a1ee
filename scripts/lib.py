"""Shared code of the scripts: experiments, files, commands and tables. Needs no fairseq."""

import argparse
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multimax_fairseq.commands.tables import Column, Line, mean_of, summary
from multimax_fairseq.files import read_lines, write

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # hint: tensorboardX
# The options of fairseq-train that choose the implementation of a config group.
CHOICES = {
    "task": "--task",
    "model": "--arch",
    "criterion": "--criterion",
    "optimizer": "--optimizer",
    "lr_scheduler": "--lr-scheduler",
}


def options(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The fairseq-train options of a config, without its data."""
    words = []
    for group, settings in config.items():
        for key, value in settings.items():
            flag = "--" + key.replace("_", "-")
            if key == "_name":
                words += [CHOICES[group], value]
            elif (group, key) == ("task", "data") or value is None or value is False:
                continue
            elif value is True:
                words.append(flag)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                words += [flag, ",".join(map(str, value))]
            else:
                words += [flag, str(value)]
    return words


# --- experiments -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """The rows of an experiment: the file configs/rows/NAME.yaml.

    Attributes:
        groups: {group: its rows}.
        changes: {row: {config group: {key: value}}}, on top of configs/NAME.yaml.
        data: {data set: changes in the same form}, if --data chooses one.
        labels: {row: its name in tables}.
        papers: {row: the paper's score}.
        paper_data: the paper's data set.
        score: name and field of what scripts/results.py compares.
        pairs: the pairs of rows that it compares.
        baselines: {group: the row that its rows are compared with}, if that is not softmax.
        rates: {method: {learning rate: its row}}; validation selects one rate of each method.
        power: rows, and the seeds, fixed in advance, of one test of the second minus the first.
        softmax_decoding: rows that are also decoded with softmax in the decoder's self-attention.
        longer: if above 1, also evaluate the language model on blocks this many times as long as
            in training.
    """

    name: str
    groups: dict[str, list[str]]
    changes: dict[str, dict[str, dict[str, Any]]]
    data: dict[str, dict[str, dict[str, Any]]]
    labels: dict[str, str]
    papers: dict[str, str]
    paper_data: str
    seeds: list[int]
    score: dict[str, str]
    pairs: list[list[str]]
    baselines: dict[str, str]
    rates: dict[str, dict[float, str]]
    power: dict[str, list[Any]]
    softmax_decoding: list[str]
    longer: int

    @classmethod
    def read(cls, name: str) -> "Experiment":
        import yaml  # the GPU benchmarks do without it

        found = yaml.safe_load((CONFIGS / "rows" / f"{name}.yaml").read_text(encoding="utf-8"))
        rows = {
            row: dict(each) for group in found["groups"].values() for row, each in group.items()
        }
        return cls(
            name=name,
            groups={group: list(rows) for group, rows in found["groups"].items()},
            labels={row: each.pop("label", row) for row, each in rows.items()},
            papers={row: each.pop("paper", "") for row, each in rows.items()},
            changes=rows,
            data=found.get("data", {}),
            paper_data=found.get("paper_data", ""),
            seeds=found.get("seeds", [1]),
            score=found.get("score", {}),
            pairs=found.get("pairs", []),
            baselines=found.get("baselines", {}),
            rates=found.get("rates", {}),
            power=found.get("power", {"rows": [], "seeds": []}),
            softmax_decoding=found.get("softmax_decoding", []),
            longer=found.get("longer", 1),
        )


# --- commands ----------------------------------------------------------------------------------


def positive(text: str) -> int:
    """The type of an option that is a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def numbers(text: str) -> list[int]:
    """The type of an option such as --seeds 1,2,3."""
    return [int(number) for number in text.split(",")]


# --- files -------------------------------------------------------------------------------------


def read_results(file: Path) -> list[Line]:
    return [json.loads(line) for line in read_lines(file)]


def write_results(file: Path, lines: Iterable[Line]) -> None:
    write(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def collect(out: Path, table: Callable[[list[Line]], str]) -> str:
    """Write all results of a folder to results.jsonl and their table to table.md; return it."""
    files = sorted(out.glob("*/seed-*/result.json"))
    write(out / "results.jsonl", "".join(f.read_text(encoding="utf-8") for f in files))
    text = table(read_results(out / "results.jsonl"))
    write(out / "table.md", text)
    return text


# --- tables ------------------------------------------------------------------------------------


def notes(lines: list[Line]) -> str:
    """A Markdown list of how results were scored and made; each name has its distinct values."""
    values = {
        "Data set": [line.get("data_set") for line in lines],
        "Scores": [f"{x['signature']} ({x['protocol']})" for x in lines if "protocol" in x],
        "chrF": [line.get("chrf_signature") for line in lines],
        "Tokenised BLEU": [line.get("tokenized_signature") for line in lines],
        "Data (SHA-256)": [line.get("data") for line in lines],
        "Processors": [line["hardware"] for line in lines],
        "Versions": [", ".join(f"{n} {v}" for n, v in line["versions"].items()) for line in lines],
        # 12 digits, and "-dirty" if files differed.
        "Commits": [f"{str(line['commit'])[:12]}{str(line['commit'])[40:]}" for line in lines],
    }
    distinct = {name: sorted({value for value in each if value}) for name, each in values.items()}
    return "".join(f"- {name}: {'; '.join(each)}\n" for name, each in distinct.items() if each)


def by_row(results: list[Line]) -> dict[str, list[Line]]:
    """{row: its results}, in the order of the experiment's file; other labels come last."""
    rows = Experiment.read(results[0]["experiment"]).changes
    blocks: dict[str, list[Line]] = {row: [] for row in rows}
    for result in results:
        blocks.setdefault(result["row"], []).append(result)
    return {row: block for row, block in blocks.items() if block}


def results_table(results: list[Line]) -> str:
    """The Markdown table of one experiment's results, with the notes needed to read it."""
    experiment = Experiment.read(results[0]["experiment"])
    metric = results[0]["metric"]

    def distinct(key: str) -> Column:
        return lambda block: ", ".join(f"{n:,}" for n in sorted({r[key] or 0 for r in block}))

    optional = {
        "perplexity per word": "word_perplexity",
        "chrF": "chrf",
        "tokenised BLEU": "tokenized_bleu",
    }
    columns = {
        "method": lambda block: experiment.labels.get(block[0]["row"], block[0]["row"]),
        metric: mean_of("value"),
        **{n: mean_of(key) for n, key in optional.items() if any(key in r for r in results)},
        "runs": lambda block: str(len(block)),
        "parameters": distinct("parameters"),
        "updates": distinct("updates"),
        "tokens/s": mean_of("tokens_per_second", digits=0),
        "minutes": mean_of("seconds", digits=1, unit=60),
        "peak GB": mean_of("peak_memory", unit=1e9),
    }
    if any(experiment.papers.values()):
        paper = f"paper, {experiment.paper_data}"
        columns[paper] = lambda block: experiment.papers.get(block[0]["row"], "")
    seeds = ", ".join(map(str, sorted({r["seed"] for r in results})))
    return (
        f"{summary(by_row(results).values(), columns)}\n{notes(results)}- Seeds: {seeds}\n"
        "- ±: standard deviation over the runs; tokens/s: target tokens in training, median\n"
    )
