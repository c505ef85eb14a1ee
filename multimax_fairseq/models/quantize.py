"""`--quantize int8`: translation with int8 linear layers on a CPU."""

import warnings
from collections.abc import Iterable

import torch
from fairseq.modules import MultiheadAttention
from omegaconf import OmegaConf
from torch import nn
from torch.ao import quantization

from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.search_layers import LAYERS

QUANTIZED = (*LAYERS, "output_projection")  # not what mappings and gates learn


def quantize(models: Iterable[nn.Module]) -> None:
    """Quantise linear layers in place, with int8 weights and one scale per output feature.

    Their inputs are rounded to 8 bits at each call. Everything else stays float32.

    Raises:
        UsageError: a model is not float32 on the CPU, or has no such layers.
    """
    for model in models:
        parameter = next(model.parameters())
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            raise UsageError(
                f"--quantize int8 is for float32 on the CPU, and the model is {parameter.dtype} on "
                f"{parameter.device}: add --cpu, and leave out --fp16 and --bf16"
            )
        for module in model.modules():
            if isinstance(module, MultiheadAttention):
                # Otherwise fairseq passes the weights to torch instead of calling the layers.
                module._set_skip_embed_dim_check()
        chosen = {
            name: quantization.per_channel_dynamic_qconfig
            for name, module in model.named_modules()
            if type(module) is nn.Linear and name.rpartition(".")[2] in QUANTIZED
        }
        if not any(name.rpartition(".")[2] in LAYERS for name in chosen):
            raise UsageError(
                f"--quantize int8 is for Transformers, and {type(model).__name__} has none of "
                "their linear layers: leave it out"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.10 and later
            warnings.simplefilter("ignore", UserWarning)  # about reduced ranges
            quantization.quantize_dynamic(model, chosen, inplace=True)


def add_generation_args(original, parser):
    """Add the flag `--quantize` to fairseq-generate and fairseq-interactive."""
    group = original(parser)
    group.add_argument(
        "--quantize",
        choices=["int8"],
        help="use int8 linear layers, on the CPU: faster, and nearly the same",
    )
    return group


def override_module_args(original, args):
    """Keep the flag among the settings of `generation`."""
    overrides, deletes = original(args)
    if getattr(args, "quantize", None) is not None:
        overrides.append(f"+generation.quantize={args.quantize}")
    return overrides, deletes


def prepare_for_inference(original, model, cfg):
    """Prepare a model for generation, and quantise it if the flag is given."""
    original(model, cfg)
    if OmegaConf.select(cfg, "generation.quantize") is not None:
        quantize([model])
