#!/usr/bin/env python3
"""Trains, evaluates and tabulates the document classifiers of Martins et al. 2020 (Table 1).

    scripts/imdb.sh [--data DIR] [--rows ROW,...] [--seeds N,...] [--epochs N] [--out DIR]

DIR is what data-prep/imdb.sh makes. The model is `DocumentClassifier` of
user_dir/continuous_documents.py on frozen GloVe vectors. OUT/ROW/seed-N holds the newest checkpoint
and result.json; OUT/results.jsonl and OUT/table.md collect the results. Finished runs are skipped,
interrupted ones resume after their last epoch.
"""

import hashlib
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import classifiers
import torch
import torch.nn.functional as F
from lib import ROOT
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from multimax_fairseq.commands.tables import mean_of
from multimax_fairseq.compat.program import program
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import read_lines

sys.path.insert(0, str(ROOT / "user_dir"))
from continuous_documents import PAD, DocumentClassifier

# Table 3 of the paper.
BATCH_SIZE, HIDDEN, EPOCHS, PATIENCE = 16, 128, 10, 5
LEARNING_RATE, L2 = 0.001, 0.0001
UNKNOWN = 1  # index of a word without a vector; its vector is 0 (our choice)
POOL = 50  # sort the reviews of this many batches by length at a time (our choice)


class Row(NamedTuple):
    label: str
    paper: str  # accuracy in percent
    attention: str
    density: str
    num_bases: int = 32
    epochs: int = EPOCHS


ROWS = {
    "softmax": Row("discrete softmax", "90.78", "discrete", "softmax"),
    "sparsemax": Row("discrete sparsemax", "90.58", "discrete", "sparsemax"),
}
for (attention, density), papers in {
    ("continuous", "softmax"): ("90.20", "90.68", "90.52"),
    ("continuous", "sparsemax"): ("90.52", "89.63", "90.90"),
    ("combined", "softmax"): ("90.98", "90.69", "89.62"),
    ("combined", "sparsemax"): ("91.10", "91.18", "90.98"),
}.items():
    for bases, paper in zip((32, 64, 128), papers, strict=True):
        label = f"{attention} {density}, N = {bases}"
        ROWS[f"{attention}_{density}_{bases}"] = Row(label, paper, attention, density, bases)


# --- data --------------------------------------------------------------------------------------


class Reviews(NamedTuple):
    labels: Tensor  # (reviews,)
    documents: list[Tensor]  # of word indices


def read_data(folder: Path) -> tuple[dict[str, Reviews], Tensor]:
    """Return the reviews of each split, and the word vectors, (words, D)."""
    if not (folder / "vectors.txt").is_file():
        raise UsageError(f"--data '{folder}' has no vectors.txt: make it with data-prep/imdb.sh")
    index, rows = {}, []
    for line in read_lines(folder / "vectors.txt"):
        word, *numbers = line.split(" ")
        index[word] = len(rows) + 2
        rows.append([float(number) for number in numbers])
    vectors = torch.cat([torch.zeros(2, len(rows[0])), torch.tensor(rows)])
    splits = {}
    for split in ("train", "valid", "test"):
        labels, documents = [], []
        for line in read_lines(folder / f"{split}.tsv"):
            label, _, text = line.partition("\t")
            labels.append(int(label))
            documents.append(torch.tensor([index.get(w, UNKNOWN) for w in text.split(" ")]))
        splits[split] = Reviews(torch.tensor(labels), documents)
    return splits, vectors


def batches(reviews: Reviews, generator: torch.Generator | None = None) -> list[list[int]]:
    """Return the reviews of each batch, of similar lengths; shuffled if there is a generator."""

    def shuffled(things: list[Any]) -> list[Any]:
        if generator is None:
            return things
        return [things[i] for i in torch.randperm(len(things), generator=generator)]

    order = shuffled(list(range(len(reviews.documents))))
    pools = [order[i : i + POOL * BATCH_SIZE] for i in range(0, len(order), POOL * BATCH_SIZE)]
    found = []
    for pool in pools:
        pool.sort(key=lambda review: len(reviews.documents[review]))
        found += [pool[i : i + BATCH_SIZE] for i in range(0, len(pool), BATCH_SIZE)]
    return shuffled(found)


# --- one run -----------------------------------------------------------------------------------


def logits_of(model: DocumentClassifier, reviews: Reviews, batch: list[int]) -> Tensor:
    words = pad_sequence([reviews.documents[i] for i in batch], batch_first=True, padding_value=PAD)
    return model(words.to(model.centers.device))[0]


@torch.no_grad()
def accuracy(model: DocumentClassifier, reviews: Reviews) -> float:
    """Return the accuracy in percent."""
    model.eval()
    right = 0
    for batch in batches(reviews):
        found = logits_of(model, reviews, batch).argmax(-1).cpu()
        right += int((found == reviews.labels[batch]).sum())
    return 100 * right / len(reviews.documents)


def build(row: Row, vectors: Tensor, seed: int) -> DocumentClassifier:
    torch.manual_seed(seed)
    words, size = vectors.shape
    model = DocumentClassifier(
        words, 2, row.attention, row.density, row.num_bases, size=size, hidden=HIDDEN
    )
    model.embedding = torch.nn.Embedding.from_pretrained(vectors, freeze=True, padding_idx=PAD)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def learned(model: DocumentClassifier) -> dict[str, Tensor]:
    """Return the parameters without the word vectors."""
    state = model.state_dict()
    return {name: x.cpu().clone() for name, x in state.items() if name != "embedding.weight"}


def train_epoch(
    model: DocumentClassifier,
    optimizer: torch.optim.Optimizer,
    reviews: Reviews,
    name: str,
    at: int,
) -> None:
    model.train()
    order = batches(reviews, torch.Generator().manual_seed(at))
    losses, start = [], time.monotonic()
    for number, batch in enumerate(order, 1):
        logits = logits_of(model, reviews, batch)
        loss = F.cross_entropy(logits, reviews.labels[batch].to(logits.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % 200 == 0 or number == len(order):
            speed = number * BATCH_SIZE / (time.monotonic() - start)
            mean = sum(losses[-200:]) / len(losses[-200:])
            print(
                f"{name}: batch {number:,} of {len(order):,}, loss {mean:.3f}, "
                f"{speed:,.0f} reviews per second",
                flush=True,
            )


def train(
    row: str, seed: int, epochs: int, data: dict[str, Reviews], vectors: Tensor, folder: Path
) -> dict[str, Any]:
    """Train with early stopping, resuming from the newest checkpoint; return the metrics."""
    model = build(ROWS[row], vectors, seed)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, weight_decay=L2)
    state = {"epoch": 0, "best_epoch": 0, "best": -1.0, "best_model": learned(model)}
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        print(f"imdb {row}, seed {seed}: resuming after epoch {state['epoch']}", flush=True)
    while state["epoch"] < epochs and state["epoch"] - state["best_epoch"] < PATIENCE:
        state["epoch"] += 1
        name = f"imdb {row}, seed {seed}, epoch {state['epoch']} of {epochs}"
        train_epoch(model, optimizer, data["train"], name, 1000 * seed + state["epoch"])
        found = accuracy(model, data["valid"])
        print(f"{name}: validation accuracy {found:.2f}", flush=True)
        if found > state["best"]:
            best = {"best": found, "best_epoch": state["epoch"], "best_model": learned(model)}
            state.update(best)
        state |= {"model": learned(model), "optimizer": optimizer.state_dict()}
        classifiers.save(state, checkpoint)
    model.load_state_dict(state["best_model"], strict=False)
    return {
        "metric": "accuracy",
        "value": accuracy(model, data["test"]),
        "validation": state["best"],
        "epochs": state["epoch"],
        "best_epoch": state["best_epoch"],
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


# --- all of them -------------------------------------------------------------------------------


def main() -> None:
    with program("imdb.sh", resumes=True):
        parser = classifiers.options("imdb", __doc__, ROWS, ",".join(ROWS))
        parser.add_argument(
            "--data",
            type=Path,
            default=ROOT / "data" / "imdb" / "text",
            metavar="DIR",
            help="default data/imdb/text",
        )
        args = parser.parse_args()
        data, vectors = read_data(args.data)
        names = ("train.tsv", "valid.tsv", "test.tsv", "vectors.txt")
        text = b"".join((args.data / name).read_bytes() for name in names)
        classifiers.run_all(
            "imdb",
            ROWS,
            args,
            ["--data", str(args.data)],
            hashlib.sha256(text).hexdigest(),
            lambda row, seed, epochs, folder: train(row, seed, epochs, data, vectors, folder),
            {
                "attention": lambda block: ROWS[block[0]["row"]].label,
                "accuracy": mean_of("value"),
                "validation accuracy": mean_of("validation"),
                "runs": lambda block: str(len(block)),
                "epochs": mean_of("epochs", digits=1),
            },
        )


if __name__ == "__main__":
    main()
