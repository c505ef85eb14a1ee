"""Builds models with toy sizes, through the command line's own parser."""

import copy
import dataclasses
import functools

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.modules import MultiheadAttention as SoftmaxMultiheadAttention
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from multimax_fairseq.mappings.multimax import Modulator
from multimax_fairseq.models.config import as_namespace
from multimax_fairseq.models.learned_scalars import learned_modules

SIZES = (
    "--{0}-layers 2 --{0}-embed-dim 16 --{0}-ffn-embed-dim 32 --{0}-attention-heads 4 --dropout 0"
)
RECURRENT = (
    "--encoder-embed-dim 16 --encoder-hidden-size 12 --decoder-embed-dim 16 "
    "--decoder-hidden-size 16 --dropout 0 --hidden-dropout 0"
)


def sizes_of(arch):
    """Return the flags that give an architecture toy sizes."""
    if arch.startswith("rnn_"):
        return RECURRENT.split()
    more = SIZES.format("encoder")
    if "_lm" in arch:
        more = "--decoder-input-dim 16 --decoder-output-dim 16 --tokens-per-sample 64"
    return f"{SIZES.format('decoder')} {more}".split()


def parse_model(arch, *flags):
    """Return the arguments of fairseq-train's parser for a model."""
    name = "language_modeling" if "_lm" in arch else "translation"
    words = ["data", "--task", name, "--arch", arch, *sizes_of(arch), *flags]
    return options.parse_args_and_arch(options.get_training_parser(name), words)


@functools.cache
def settings_of_model(arch, *flags):
    """Return the model's settings.

    They equal those of fairseq's convert_namespace_to_omegaconf, which composes all of fairseq's
    config for half a second.
    """
    args = parse_model(arch, *flags)
    kind = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[arch])
    if kind is None:
        args._name = arch
        return args
    name = ARCH_MODEL_NAME_REGISTRY[arch]
    return OmegaConf.create({**dataclasses.asdict(kind.from_namespace(args)), "_name": name})


def build(task, arch, *flags, seed=1):
    """Return a model, initialized with this seed."""
    settings = copy.deepcopy(settings_of_model(arch, *flags))
    torch.manual_seed(seed)
    return tasks.FairseqTask.build_model(task, settings)


def scatter_modulators(model, seed=0):
    """Set each modulator to random values far from the identity; shift other learned scalars."""
    generator = torch.Generator().manual_seed(seed)
    for _, module in learned_modules(model):
        if not isinstance(module, Modulator):
            for parameter in module.parameters():
                with torch.no_grad():
                    parameter.add_(torch.rand(parameter.shape, generator=generator) - 0.5)
    for module in model.modules():
        if isinstance(module, Modulator):
            for name, parameter in module.named_parameters():
                scale = torch.tensor([0.8, 0.15])[: module.order] if "coefficient" in name else 0.5
                with torch.no_grad():
                    parameter.copy_(
                        (torch.rand(parameter.shape, generator=generator) * 2 - 1) * scale
                    )
    return model


def parameters_of(model):
    """Return the named parameters outside of the modulators."""
    return {name: p for name, p in model.named_parameters() if "modulator" not in name}


def attentions(model):
    """Return the named attention modules."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SoftmaxMultiheadAttention)}


def stock_model(task):
    """Return fairseq's Transformer, prepared as its commands do."""
    settings = settings_of_model("transformer_multimax", "--attention-normalizer", "softmax")
    torch.manual_seed(1)
    model = TransformerModel.build_model(copy.deepcopy(as_namespace(settings)), task).eval()
    for layer in model.decoder.layers:
        layer.make_generation_fast_(need_attn=False)
    return model


def configuration(data, arch, *flags):
    """Return the configuration of fairseq-train on the data of `toy_data.write_subwords`."""
    is_lm = "_lm" in arch
    task = "language_modeling" if is_lm else "translation"
    words = [str(data / ("lm" if is_lm else "mt")), "--task", task, "--arch", arch, *sizes_of(arch)]
    words += ["--sample-break-mode", "eos"] if is_lm else ["--share-all-embeddings"]
    args = options.parse_args_and_arch(options.get_training_parser(task), [*words, *flags])
    return convert_namespace_to_omegaconf(args)


def save_checkpoint(path, data, arch, *flags, updates, seed):
    """Save a model with random scalars, norms and biases, as fairseq-train saves it."""
    if "_lm" not in arch:
        flags = ("--source-lang", "de", "--target-lang", "en", *flags)
    cfg = configuration(data, arch, *flags)
    torch.manual_seed(seed)
    model = scatter_modulators(tasks.setup_task(cfg.task).build_model(cfg.model), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("alpha.logit", "log_temperature")):
                parameter.add_(torch.randn_like(parameter) * 0.5)
            elif "norm" in name and "normalizer" not in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [
            {"num_updates": updates, "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
        ],
        "extra_state": {"train_iterator": {"epoch": 1}},
        "task_state": {},
    }
    torch.save(state, path)


def trainer_of(data, save_dir, arch, *flags, fp16=False):
    """Return a trainer on the CPU and its batches.

    `fp16` sets what --fp16 sets; compat refuses that flag on a CPU.
    """
    kind = "" if "_lm" in arch else "label_smoothed_"
    words = ["--cpu", "--optimizer", "adam", "--lr", "0.01", "--max-tokens", "200"]
    # Without worker processes: torch waits seconds for those of an iterator that does not end.
    words += ["--save-dir", str(save_dir), "--multimax-init-std", "0.3", "--num-workers", "0"]
    words += ["--criterion", f"{kind}multimax_cross_entropy", *flags]
    cfg = configuration(data, arch, *words, "--required-batch-size-multiple", "1")
    cfg.common.fp16 = fp16
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    trainer = Trainer(cfg, task, model, criterion)
    return trainer, list(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False))
