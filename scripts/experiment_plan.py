"""The rows of an experiment as they will be trained: a file of configs/ each, or an entry of the
experiment's own in configs/rows/, and the fairseq-train call that it stands for."""

import argparse
import shlex
from pathlib import Path
from typing import NamedTuple

import evaluate
import hydra
from methods import METHODS
from omegaconf import DictConfig, OmegaConf

from multimax_fairseq.errors import UsageError

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
# The options of fairseq-train that choose a group's implementation.
CHOICES = {
    "task": "--task",
    "model": "--arch",
    "criterion": "--criterion",
    "optimizer": "--optimizer",
    "lr_scheduler": "--lr-scheduler",
}


def listed(experiment: str) -> DictConfig | None:
    """{group: {row: what it changes}} of configs/rows/; None where each row is a file."""
    file = CONFIGS / "rows" / f"{experiment}.yaml"
    return OmegaConf.load(file) if file.exists() else None


def groups(experiment: str) -> dict[str, list[str]]:
    """The rows by group; those of the paper first, and softmax, which the others are compared with,
    first among them."""
    if (entries := listed(experiment)) is not None:
        return {group: list(rows) for group, rows in entries.items()}
    names = [file.stem.removeprefix(f"{experiment}_") for file in CONFIGS.glob(f"{experiment}_*")]
    names.sort(key=lambda name: (name != "softmax", name))
    paper = METHODS.get(experiment, names)
    found = {
        "paper": [name for name in names if name in paper],
        "mappings": [name for name in names if name not in paper],
    }
    return {group: rows for group, rows in found.items() if rows}


def compose(experiment: str, row: str) -> DictConfig:
    """A row's config as fairseq-hydra-train reads it."""
    entries = listed(experiment)
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.1"):  # fairseq's own
        cfg = hydra.compose(experiment if entries is not None else f"{experiment}_{row}")
    OmegaConf.set_struct(cfg, False)
    if entries is None:
        return cfg
    return OmegaConf.merge(cfg, *(rows[row] for rows in entries.values() if row in rows))


def fit(cfg: DictConfig, gpus: int) -> None:
    """Keep the batch on another number of GPUs; 0 is the CPU."""
    key, unit = ("batch_size", "sentences")
    if "batch_size" not in cfg.dataset:
        key, unit = ("max_tokens", "tokens")
    each = cfg.dataset[key]
    world = cfg.distributed_training.distributed_world_size
    batch = each * world * cfg.optimization.update_freq[0]
    devices = max(gpus, 1)
    cfg.distributed_training.distributed_world_size = devices
    if batch % (each * devices) == 0:
        cfg.optimization.update_freq = [batch // (each * devices)]
    elif batch % devices == 0:
        cfg.dataset[key] = batch // devices
        cfg.optimization.update_freq = [1]
    else:
        raise UsageError(f"--gpus {gpus} cannot share {batch} {unit}: choose a divisor")
    if gpus == 0:
        cfg.common.cpu = True
        cfg.common.fp16 = False


def options(cfg: DictConfig) -> list[str]:
    """The command-line options of fairseq-train that a config stands for, without its data."""
    words = []
    for group, settings in cfg.items():
        for key, value in settings.items():
            flag = "--" + key.replace("_", "-")
            if key == "_name":
                words += [CHOICES[group], value]
            elif (group, key) == ("task", "data") or value is None or value is False:
                continue
            elif value is True:
                words.append(flag)
            elif OmegaConf.is_list(value):
                words += [flag, ",".join(map(str, value))]
            else:
                words += [flag, str(value)]
    return words


def options_of(command: list[str]) -> dict[str, tuple[str, ...]]:
    """{option: its values}, and under "" what comes before any; the last of several counts."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in command:
        if word.startswith("--"):
            name, has_value, value = word.partition("=")
            found[name] = (value,) if has_value else ()
        else:
            found[name] = (*found.get(name, ()), word)
    return found


class Run(NamedTuple):
    experiment: str
    row: str
    seed: int
    folder: Path
    data: Path
    plugin: str
    command: list[str]
    updates: int

    @property
    def name(self) -> str:
        return f"{self.experiment} {self.row}, seed {self.seed}"

    @property
    def text(self) -> str:
        return shlex.join(self.command) + "\n"


def plan(args: argparse.Namespace, row: str, seed: int) -> Run:
    cfg = compose(args.experiment, row)
    folder = args.out / row / f"seed-{seed}"
    fit(cfg, args.gpus)
    cfg.common.user_dir = str(ROOT / cfg.common.user_dir)
    cfg.common.seed = seed
    cfg.checkpoint.save_dir = str(folder)
    if args.max_update is not None:
        cfg.optimization.max_update = args.max_update
    if cfg.task.get("eval_bleu"):
        text = evaluate.describe(args.data_bin, cfg.task.target_lang)
        cfg.task.eval_bleu_remove_bpe = text["remove_bpe"]
        cfg.task.eval_bleu_detok = text["tokenizer"] or "space"
    program = evaluate.program("fairseq-train")
    words = [program, str(args.data_bin), *options(cfg), *args.train]
    asked = options_of(words)
    updates, plugin = (" ".join(asked[name]) for name in ("--max-update", "--user-dir"))
    if not updates.isdecimal():
        raise UsageError(
            f"--max-update '{updates}' after -- must be one whole number: give --max-update N "
            "before --"
        )
    if not plugin:
        raise UsageError("--user-dir after -- needs the folder of a plugin: give it, or leave it")
    return Run(args.experiment, row, seed, folder, args.data_bin, plugin, words, int(updates))
