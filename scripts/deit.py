"""Data and training of one DeiT model, for scripts/imagenet.py. Needs timm."""

import argparse
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import classifiers
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
WARMUP_EPOCHS = 5
LEARNING_RATE, WEIGHT_DECAY = 5e-4, 0.05  # the learning rate is per 512 images of a batch
DROP_PATH, REPEATS = 0.1, 3
IMAGES = {"interpolation": "bicubic", "use_prefetcher": True}
AUGMENTATION = {"auto_augment": "rand-m9-mstd0.5-inc1"}
ERASING = {"re_prob": 0.25, "re_mode": "pixel"}
MIXING = {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1}
WARMUP_LEARNING_RATE, MIN_LEARNING_RATE, CROP = 1e-6, 1e-5, 0.875


# --- data --------------------------------------------------------------------------------------


def read_data(folder: Path) -> dict[str, ImageDataset]:
    """Return the images of each split."""
    for split in ("train", "val"):
        if not (folder / split).is_dir():
            raise UsageError(
                f"--data '{folder}' has no folder {split}: pass a folder with train/ and val/, "
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
    size: str,
    options: dict[str, Any],
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
    options = {**options, "num_classes": classes}
    name = f"deit_{size}_multimax"
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
                classifiers.save(state, folder / f"epoch-{epoch + 1}.pt")
            resuming = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
            classifiers.save(state | resuming, folder / "checkpoint.pt")
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
