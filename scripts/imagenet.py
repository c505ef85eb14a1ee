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
import math
import socket
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import lib
import runs
import torch
from lib import ROOT

from multimax_fairseq.errors import UsageError

sys.path.insert(0, str(ROOT / "user_dir"))
import vit_multimax  # noqa: F401  registers the models, and says if timm is missing

# isort: split
import timm
from timm.data import ImageDataset, Mixup, create_transform
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.loader import PrefetchLoader, fast_collate
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import random_seed

# The settings of DeiT's code, https://github.com/facebookresearch/deit, which the paper follows.
EPOCHS, WARMUP_EPOCHS, BATCH_SIZE = 300, 5, 1024
LEARNING_RATE, WEIGHT_DECAY = 5e-4, 0.05  # the learning rate is per 512 images of a batch
DROP_PATH, REPEATS = 0.1, 3
IMAGES = {"interpolation": "bicubic", "use_prefetcher": True}
AUGMENTATION = {"auto_augment": "rand-m9-mstd0.5-inc1"}
ERASING = {"re_prob": 0.25, "re_mode": "pixel"}
MIXING = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1}
WARMUP_LEARNING_RATE, MIN_LEARNING_RATE, CROP = 1e-6, 1e-5, 0.875
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


# --- data --------------------------------------------------------------------------------------


def read_data(folder: Path) -> dict[str, ImageDataset]:
    """Return the images of each split."""
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise UsageError(
                f"--data '{folder}' has no folder {split}: give a folder with train/ and val/, "
                "and in each one folder of images per class"
            )
    train, val = (
        ImageDataset(str(folder / split), transform=create_transform(224, **options))
        for split, options in (
            ("train", {"is_training": True, **IMAGES, **AUGMENTATION}),
            ("val", {"is_training": False, **IMAGES, "crop_pct": CROP}),
        )
    )
    missing = train.reader.class_to_idx.keys() ^ val.reader.class_to_idx.keys()
    if missing:
        raise UsageError(
            f"--data '{folder}' has the class {min(missing)!r} in one of train/ and val/ only: "
            "both must have the same folders"
        )
    return {"train": train, "val": val}


def loader(
    data: ImageDataset,
    sampler: RepeatAugSampler | None,
    batch_size: int,
    workers: int,
    device: torch.device,
) -> PrefetchLoader:
    """Return batches of normalized images.

    With a sampler they are for training: with random erasing, and without a last smaller batch.
    """
    batches = torch.utils.data.DataLoader(
        data,
        batch_size,
        sampler=sampler,
        num_workers=workers,
        collate_fn=fast_collate,
        pin_memory=device.type == "cuda",
        drop_last=sampler is not None,
    )
    return PrefetchLoader(batches, device=device, **(ERASING if sampler is not None else {}))


# --- one run -----------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model: torch.nn.Module, batches: PrefetchLoader) -> float:
    """Return the top-1 accuracy in percent."""
    model.eval()
    correct = total = 0
    for images, labels in batches:
        with half_precision(images.device):
            predicted = model(images).argmax(-1)
        correct += (predicted == labels).sum().item()
        total += len(labels)
    return 100 * correct / total


def half_precision(device: torch.device) -> Any:
    """Return a context in which a GPU computes in float16, as in DeiT's code."""
    return torch.autocast("cuda", torch.float16) if device.type == "cuda" else nullcontext()


def train(
    rank: int,
    port: int,
    row: str,
    seed: int,
    epochs: int,
    folder: Path,
    args: argparse.Namespace,
    data: dict[str, ImageDataset],
) -> None:
    """Train one model, as one of args.gpus processes, resuming from the newest checkpoint."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    classes = len(data["train"].reader.class_to_idx)
    sampler = RepeatAugSampler(data["train"], args.gpus, rank, num_repeats=REPEATS)
    batches = loader(data["train"], sampler, args.batch_size // args.gpus, args.workers, device)
    validation = loader(data["val"], None, args.batch_size // args.gpus, args.workers, device)

    random_seed(seed, rank)
    options = {**ROWS[row].options, "num_classes": classes}
    name = f"deit_{ROWS[row].size}_multimax"
    model = timm.create_model(name, drop_path_rate=DROP_PATH, **options).to(device)
    learning_rate = LEARNING_RATE * args.batch_size / 512
    optimizer = create_optimizer_v2(model, "adamw", lr=learning_rate, weight_decay=WEIGHT_DECAY)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        "cosine",
        num_epochs=epochs,
        warmup_epochs=WARMUP_EPOCHS,
        warmup_lr=WARMUP_LEARNING_RATE,
        min_lr=MIN_LEARNING_RATE,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=gpu)
    state: dict[str, Any] = {"accuracies": [], "seconds": 0.0, "updates": 0}
    if (folder / "checkpoint.pt").exists():
        state = torch.load(folder / "checkpoint.pt", map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state.pop("optimizer"))
        scaler.load_state_dict(state.pop("scaler"))
        if rank == 0:
            done = len(state["accuracies"])
            print(f"imagenet {row}, seed {seed}: resuming after epoch {done}", flush=True)
    parallel = model
    if args.gpus > 1:
        torch.cuda.set_device(device)
        address = f"tcp://127.0.0.1:{port}"
        torch.distributed.init_process_group(
            "nccl", init_method=address, rank=rank, world_size=args.gpus
        )
        parallel = torch.nn.parallel.DistributedDataParallel(model, [rank])
    mixup = Mixup(**MIXING, num_classes=classes)

    for epoch in range(len(state["accuracies"]), epochs):
        about = f"imagenet {row}, seed {seed}, epoch {epoch + 1} of {epochs}"
        scheduler.step(epoch)
        sampler.set_epoch(epoch)
        random_seed(1000 * seed + epoch, rank)
        start = time.monotonic()
        train_epoch(parallel, optimizer, scaler, batches, mixup, about, is_first=rank == 0)
        state["seconds"] += time.monotonic() - start
        state["updates"] += len(batches)
        if rank == 0:
            state["accuracies"].append(accuracy(model, validation))
            print(f"{about}: accuracy {state['accuracies'][-1]:.2f}", flush=True)
            state |= {"name": name, "options": options, "model": model.state_dict()}
            if (epoch + 1) % max(1, epochs // 10) == 0 or epoch + 1 == epochs:
                runs.save(state, folder / f"epoch-{epoch + 1}.pt")
            resuming = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            runs.save(state | resuming, folder / "checkpoint.pt")
    if args.gpus > 1:
        torch.distributed.destroy_process_group()


def train_epoch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    batches: PrefetchLoader,
    mixup: Mixup,
    about: str,
    is_first: bool,
) -> None:
    """Train on each batch once; the first process prints the progress."""
    model.train()
    loss_of, total, start = SoftTargetCrossEntropy(), 0.0, time.monotonic()
    for number, (images, labels) in enumerate(batches, 1):
        images, labels = mixup(images, labels)
        with half_precision(images.device):
            loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total = total + loss.detach()
        if number % 50 == 0 or number == len(batches):
            mean = float(total) / number
            if math.isnan(mean):
                sys.exit(f"{about}: the loss is NaN, as training has diverged: try another seed")
            if is_first:
                speed = number * len(images) / (time.monotonic() - start)
                print(
                    f"{about}: batch {number:,} of {len(batches):,}, loss {mean:.3f}, "
                    f"{speed:,.0f} images per second and GPU",
                    flush=True,
                )


# --- all of them -------------------------------------------------------------------------------


def result(
    row: str,
    seed: int,
    epochs: int,
    folder: Path,
    args: argparse.Namespace,
    data: dict[str, ImageDataset],
) -> lib.Line:
    """Train in one process per GPU, and return the metrics."""
    if args.gpus > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(
            train, (port, row, seed, epochs, folder, args, data), nprocs=args.gpus
        )
    else:
        train(0, 0, row, seed, epochs, folder, args, data)
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
    parser = runs.options("imagenet", __doc__, ROWS, "softmax,multimax")
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
    with lib.resumable("imagenet.sh"):
        args = parse()
        data = read_data(args.data)
        images = len(RepeatAugSampler(data["train"], args.gpus, 0, num_repeats=REPEATS))
        images *= args.gpus
        if args.batch_size > images:
            raise UsageError(
                f"--batch-size {args.batch_size} exceeds the {images} images per epoch"
            )
        names = [name for split in data.values() for name in split.filenames()]
        runs.run_all(
            "imagenet",
            ROWS,
            args,
            ["--data", str(args.data), "--batch-size", str(args.batch_size)],
            hashlib.sha256("\n".join(names).encode()).hexdigest(),
            functools.partial(result, args=args, data=data),
            {
                "model": lambda block: f"DeiT-{ROWS[block[0]['row']].size}",
                "method": lambda block: ROWS[block[0]["row"]].label,
                "accuracy": lambda block: lib.mean(r["value"] for r in block),
                "best accuracy": lambda block: lib.mean(r["best"] for r in block),
                "runs": lambda block: str(len(block)),
                "epochs": lambda block: lib.mean((r["epochs"] for r in block), 0),
                "images/s": lambda block: lib.mean((r["images_per_second"] for r in block), 0),
            },
        )


if __name__ == "__main__":
    main()
