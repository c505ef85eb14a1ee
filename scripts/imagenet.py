#!/usr/bin/env python3
"""Trains, evaluates and tabulates the DeiT models of the MultiMax paper (Tables 1, 2, 5 and 6).

    scripts/imagenet.sh --data DATA [--rows ROW,...] [--seeds N,...] [--gpus N] [--out OUT]

DATA has one folder of images for each class, in train/ and in val/. The models are those of
user_dir/vit_multimax.py; data, augmentation, optimizer and scheduler are timm's, with DeiT's
settings. OUT/ROW/seed-N holds the newest checkpoint, the weights after every 10% of the epochs
(epoch-N.pt) and result.json; OUT/results.jsonl and OUT/table.md hold the results of all runs.
Finished runs are skipped, interrupted ones resume after their last epoch.

ImageNet-1k (1,281,167 and 50,000 images) is at https://image-net.org, for registered users:
ILSVRC2012_img_train.tar (MD5 1d675b47d978889d74fa0da5fadfb00e), ILSVRC2012_img_val.tar (MD5
29b22e2961454d5413ddabcf34fc5622) and ILSVRC2012_devkit_t12.tar.gz (MD5
fa75699e90414af021442c21a62c3abf); the site gives no checksums, these are torchvision's.
torchvision.datasets.ImageNet(DATA, split) unpacks them, for the splits "train" and "val".
"""

import argparse
import functools
import hashlib
import socket
from pathlib import Path
from typing import Any, NamedTuple

import classifiers
import lib
import torch

from multimax_fairseq.commands.tables import Line, mean_of
from multimax_fairseq.compat.program import program
from multimax_fairseq.errors import UsageError

EPOCHS, BATCH_SIZE = 300, 1024  # as in DeiT's code, see deit.py
TOP_K = 100  # of 196 patches (our choice: the paper gives no k)


class Row(NamedTuple):
    label: str
    paper: str  # accuracy in percent
    size: str
    options: dict[str, Any]  # of vit_multimax.deit
    epochs: int = EPOCHS


SOFTMAX = {"normalizer": "softmax", "output": "softmax"}
ROWS = {
    # Table 2; Table 6 trains softmax and multimax with three seeds.
    "softmax": Row("softmax", "80.4; three seeds 80.3 ± 0.05", "small", SOFTMAX),
    "topk": Row(
        "top-k", "80.6", "small", {**SOFTMAX, "normalizer": "topk", "settings": {"k": TOP_K}}
    ),
    "evsoftmax": Row("EvSoftmax", "80.0", "small", {**SOFTMAX, "normalizer": "evsoftmax"}),
    "attention": Row("MultiMax attention", "80.7", "small", {"output": "softmax"}),
    "output": Row("MultiMax output", "80.7", "small", {"normalizer": "softmax"}),
    "multimax": Row("MultiMax", "81.0; three seeds 80.8 ± 0.12", "small", {}),
    "multimax_400": Row("MultiMax", "81.2", "small", {}, 400),
    "multimax_500": Row("MultiMax", "81.3", "small", {}, 500),
    "tiny_softmax": Row("softmax", "72.8", "tiny", SOFTMAX),
    "tiny_multimax": Row("MultiMax", "73.4", "tiny", {}),
    "base_softmax": Row("softmax", "82.1", "base", SOFTMAX),
    "base_multimax": Row("MultiMax", "82.6", "base", {}),
    # Table 5.
    "low": Row("MultiMax, low term of order 1", "80.6", "small", {"order": 1, "terms": "low"}),
    "both": Row("MultiMax, both terms of order 1", "80.7", "small", {"order": 1}),
}
# Table 1. There is no row gap_1: it is the row softmax.
for head, papers in {
    "cls": {"0.1": "5.1", "0.5": "79.9", "1": "79.9", "2": "80.0", "10": "79.5", "learned": "79.7"},
    "gap": {"0.1": "4.7", "0.5": "80.3", "2": "80.0", "10": "79.9", "learned": "80.2"},
}.items():
    for value, paper in papers.items():
        learned = value == "learned"
        settings = {"learn_temperature": True} if learned else {"temperature": float(value)}
        label = f"softmax, temperature {value}, {head.upper()}"
        options = {**SOFTMAX, "head": head, "settings": settings}
        ROWS[f"{head}_{value}"] = Row(label, paper, "small", options)


# --- all of them -------------------------------------------------------------------------------


def result(
    row: str,
    seed: int,
    epochs: int,
    folder: Path,
    args: argparse.Namespace,
    data: dict[str, Any],
) -> Line:
    """Train in one process per GPU, and return the metrics."""
    import deit

    size, options = ROWS[row].size, ROWS[row].options
    words = (row, size, options, seed, epochs, folder, args, data)
    if args.gpus > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(deit.train, (port, *words), nprocs=args.gpus)
    else:
        deit.train(0, 0, *words)
    state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
    return {
        "metric": "top-1 accuracy",
        "value": state["accuracies"][-1],
        "best": max(state["accuracies"]),
        "epochs": len(state["accuracies"]),
        "images_per_second": round(state["updates"] * args.batch_size / state["seconds"], 1),
        "seconds": round(state["seconds"], 1),
        "parameters": sum(values.numel() for values in state["model"].values()),
    }


def parse() -> argparse.Namespace:
    parser = classifiers.options("imagenet", __doc__, ROWS, "softmax,multimax")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--batch-size",
        type=lib.positive,
        default=BATCH_SIZE,
        metavar="N",
        help=f"total over all GPUs; the learning rate scales with it; default {BATCH_SIZE}",
    )
    parser.add_argument(
        "--gpus",
        type=lib.positive,
        default=1,
        metavar="N",
        help="default 1; without a GPU, trains on the CPU",
    )
    parser.add_argument(
        "--workers", type=int, default=8, metavar="N", help="processes per GPU; default 8"
    )
    args = parser.parse_args()
    if args.gpus > max(1, torch.cuda.device_count()):
        raise UsageError(f"--gpus {args.gpus}: this machine has {torch.cuda.device_count()}")
    if args.batch_size % (2 * args.gpus):
        raise UsageError(
            f"--batch-size {args.batch_size} must be an even number of images for each GPU, since "
            "Mixup mixes pairs"
        )
    return args


def main() -> None:
    with program("imagenet.sh", resumes=True):
        args = parse()
        import deit  # needs timm, which --help does without

        data = deit.read_data(args.data)
        images = len(deit.RepeatAugSampler(data["train"], args.gpus, 0, num_repeats=deit.REPEATS))
        images *= args.gpus
        if args.batch_size > images:
            raise UsageError(
                f"--batch-size {args.batch_size} exceeds the {images} images per epoch"
            )
        names = [name for split in data.values() for name in split.filenames()]
        classifiers.run_all(
            "imagenet",
            ROWS,
            args,
            ["--data", str(args.data), "--batch-size", str(args.batch_size)],
            hashlib.sha256("\n".join(names).encode()).hexdigest(),
            functools.partial(result, args=args, data=data),
            {
                "model": lambda block: f"DeiT-{ROWS[block[0]['row']].size}",
                "method": lambda block: ROWS[block[0]["row"]].label,
                "accuracy": mean_of("value"),
                "best accuracy": mean_of("best"),
                "runs": lambda block: str(len(block)),
                "epochs": mean_of("epochs", digits=0),
                "images/s": mean_of("images_per_second", digits=0),
            },
        )


if __name__ == "__main__":
    main()
