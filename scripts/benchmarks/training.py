"""Training steps of whole models."""

import argparse
import itertools
import shlex
from pathlib import Path

import torch
from fairseq import options, tasks, utils
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.data_utils import infer_language_pair
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from torch import Tensor

import multimax_fairseq.models  # noqa: F401
from benchmarks.measurement import AUTO, PLAIN, Case, Contestant, Ready

OPTIMISER = ["--optimizer", "adam", "--lr", "0.0005", "--clip-norm", "0.1", "--max-tokens", "1024"]
# {task: (options, (architecture, criterion) for softmax, the same for MultiMax)}
TRAINING = {
    "language_modeling": (
        [*OPTIMISER, "--tokens-per-sample", "256", "--share-decoder-input-output-embed"],
        ("transformer_lm", "cross_entropy"),
        ("transformer_lm_multimax", "multimax_cross_entropy"),
    ),
    "translation": (
        [*OPTIMISER, "--label-smoothing", "0.1"],
        ("transformer_iwslt_de_en", "label_smoothed_cross_entropy"),
        ("transformer_iwslt_de_en_multimax", "label_smoothed_multimax_cross_entropy"),
    ),
}


def random_text(folder: Path, vocabulary: int, tokens: int = 2**18) -> None:
    """Write a text of random words in the format of fairseq-preprocess."""
    words = Dictionary()
    for index in range(vocabulary - len(words)):
        words.add_symbol(f"w{index}")
    words.save(str(folder / "dict.txt"))
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(words.nspecial, vocabulary, (tokens,), generator=generator)
    binary = str(folder / "train.bin")
    builder = indexed_dataset.make_builder(binary, "mmap", vocabulary)
    for line in text.split(64):
        builder.add_item(line)
    builder.finalize(str(folder / "train.idx"))


def train(args: argparse.Namespace) -> list[Case]:
    task_name = "translation" if infer_language_pair(str(args.data))[1] else "language_modeling"
    recipe, softmax, multimax = TRAINING[task_name]
    words = [str(args.data), "--task", task_name, *recipe, "--seed", "1", "--num-workers", "0"]
    words += ["--distributed-world-size", "1"]
    words += {"float32": [], "float16": ["--fp16"], "bfloat16": ["--bf16"]}[args.dtype]
    words += ["--cpu"] if args.device == "cpu" else []

    def contestant(chosen: tuple[str, str], backend: str = "auto", flags: str = "") -> Contestant:
        def make_ready() -> Ready:
            arguments = [*words, "--arch", chosen[0], "--criterion", chosen[1], *args.rest]
            arguments += shlex.split(flags)
            cfg = convert_namespace_to_omegaconf(
                options.parse_args_and_arch(options.get_training_parser(task_name), arguments)
            )
            task = tasks.setup_task(cfg.task)
            utils.set_torch_seed(cfg.common.seed)
            model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
            return training_step(Trainer(cfg, task, model, criterion), args)

        return Contestant(make_ready, f"{chosen[0]} {flags}", backend)

    contestants = {
        "softmax (fairseq)": contestant(softmax),
        PLAIN: contestant(multimax, "plain"),
        AUTO: contestant(multimax),
        **{flags: contestant(multimax, flags=flags) for flags in args.variant},
    }
    references = ["softmax (fairseq)", PLAIN, *([AUTO] if args.variant else [])]
    label = f"training step, {task_name.replace('_', ' ')}"
    return [Case(label, 0, contestants, references, ["tokens/s"])]


def training_step(trainer: Trainer, args: argparse.Namespace) -> Ready:
    epoch = trainer.get_train_iterator(epoch=1).next_epoch_itr()
    batches = list(itertools.islice(epoch, args.warmup + args.rounds))
    trainer.begin_epoch(1)

    def step(number: int) -> dict[str, int]:
        batch = batches[number % len(batches)]
        with metrics.aggregate("train"):  # as fairseq-train does; --monitor-interval needs it
            trainer.train_step([batch])
        return {"tokens": batch["ntokens"]}

    def result() -> dict[str, Tensor]:
        """Loss and gradient without dropout: backends may draw random numbers in another order."""
        model = trainer.model.eval()
        batch = utils.move_to_cuda(batches[0]) if trainer.cuda else batches[0]
        loss, size, _ = trainer.criterion(model, batch)
        loss.backward()
        grads = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
        trainer.zero_grad()
        return {"loss": loss.detach() / size, "norm of the gradient": torch.stack(grads).norm()}

    return Ready(step, result)
