"""Collects from checkpoints of toy models and reads the tables that are written."""

import csv

from multimax_fairseq.analysis import collect as collection

TRANSLATION = "transformer_iwslt_de_en_multimax"

# {name: flags of a translation model}
VARIANTS = {
    "multimax": ["--output-normalizer", "multimax"],
    "multimax-heads": ["--multimax-heads", "separate", "--multimax-order", "1"],
    "softmax": ["--attention-normalizer", "softmax"],
    "temperature": ["--attention-normalizer", "softmax", "--learn-temperature"],
    "topk": ["--attention-normalizer", "topk", "--topk", "3"],
    "entmax15": ["--attention-normalizer", "entmax15", "--output-normalizer", "entmax15"],
    "alpha_entmax": ["--attention-normalizer", "alpha_entmax"],
    "evsoftmax": ["--attention-normalizer", "evsoftmax"],
}


def gather(out, *checkpoints, data, sentences=1000, subset="valid"):
    """Collect in this process; return the folder."""
    collection.collect(list(checkpoints), data, subset, sentences, out, ["a", "command"])
    return out


def table(folder, name):
    """Return the rows of a collection's CSV file; empty cells are None."""
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as stream:
        return [{key: number(cell) for key, cell in row.items()} for row in csv.DictReader(stream)]


def number(cell):
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell
