"""What scripts/gpu_check.py trains: toy models through fairseq-train, in every precision."""

import functools
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_reference import Finding, LeftOut, Place

ROOT = Path(__file__).resolve().parent.parent
UPDATES = 100
WORDS = 200
LAYER = "--{0}-layers 2 --{0}-embed-dim 64 --{0}-ffn-embed-dim 128 --{0}-attention-heads 2"
COMMON = (
    f"--lr 0.003 --clip-norm 1.0 --max-tokens 1024 --max-update {UPDATES} "
    "--seed 1 --no-save --disable-validation --log-format json --log-interval 1 --num-workers 0 "
    "--distributed-world-size 1"
)
PRECISIONS = ("fp16", "bf16", "amp", "memory-efficient-bf16")
MODELS = {
    "transformer_multimax": (
        f"--task translation --source-lang de --target-lang en {LAYER.format('encoder')} "
        f"{LAYER.format('decoder')} --criterion label_smoothed_multimax_cross_entropy "
        "--label-smoothing 0.1"
    ),
    "transformer_lm_multimax": (
        f"--task language_modeling {LAYER.format('decoder')} --decoder-input-dim 64 "
        "--decoder-output-dim 64 --tokens-per-sample 64 --criterion multimax_cross_entropy"
    ),
}


def random_text(folder: Path) -> None:
    """What fairseq-preprocess would make of random words, some of them more frequent: a corpus of
    one language, and one of sentence pairs."""
    from fairseq.data import Dictionary, indexed_dataset

    words = Dictionary()
    for index in range(WORDS - len(words)):
        words.add_symbol(f"w{index}")
    generator = torch.Generator().manual_seed(1)
    weights = 1 / (1 + torch.arange(WORDS - words.nspecial))
    text = torch.multinomial(weights, 2**15, True, generator=generator) + words.nspecial
    for ending in ("", ".de", ".en"):
        words.save(str(folder / f"dict{ending}.txt"))
        name = str(folder / ("train" if not ending else f"train.de-en{ending}"))
        builder = indexed_dataset.make_builder(f"{name}.bin", "mmap", WORDS)
        for line in text.split(15):
            builder.add_item(torch.cat([line, torch.tensor([words.eos()])]))
        builder.finalize(f"{name}.idx")


def train(place: Place, arch: str, precision: str) -> Finding:
    """The loss of the last ten updates, as a share of that of the first."""
    with tempfile.TemporaryDirectory() as folder:
        random_text(Path(folder))
        command = [sys.executable, "-m", "fairseq_cli.train", folder, "--arch", arch]
        command += ["--user-dir", str(ROOT / "multimax_fairseq"), *MODELS[arch].split()]
        command += [*COMMON.split(), f"--{precision}"]
        # Which is for the parameters themselves, not for copies of them.
        many = precision.startswith("memory-efficient")
        command += ["--optimizer", "multimax_adam" if many else "adam"]
        command += [] if place.is_gpu else ["--cpu"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        # An error of C++ comes before the places where it was.
        said = [line for line in done.stdout.splitlines() if line.strip()]
        last = ([line for line in said if "error" in line.lower()] or said)[-1:]
        raise RuntimeError(f"fairseq-train ended with status {done.returncode}: {''.join(last)}")
    logged = re.findall(r"\| INFO \| train_inner \| (\{.*\})", done.stdout)
    losses = [float(json.loads(line)["loss"]) for line in logged]
    if not losses or not all(map(math.isfinite, losses)):
        raise RuntimeError(f"{len(losses)} losses were logged, and not all are finite")
    first, last_ones = losses[0], losses[-10:]
    figure = sum(last_ones) / len(last_ones) / first
    return Finding(figure, 0.9, f"of the first loss, {first:.3g}, after {UPDATES} updates")


def without_fairseq() -> Finding:
    raise LeftOut("fairseq is not importable")


def checks(place: Place) -> dict[str, Callable[[], Finding]]:
    able = importlib.util.find_spec("fairseq") is not None
    found = {}
    for arch, precision in itertools.product(MODELS, PRECISIONS):
        run = functools.partial(train, place, arch, precision) if able else without_fairseq
        found[f"{UPDATES} updates of {arch}, --{precision}"] = run
    return found
