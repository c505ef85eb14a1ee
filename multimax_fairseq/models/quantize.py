"""Linear layers in int8, for translating on a CPU: `--quantize int8` of the commands that do."""

import argparse
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from fairseq import options
from fairseq.models import BaseFairseqModel
from fairseq.modules import MultiheadAttention
from torch import nn
from torch.ao import quantization

from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.search_layers import LAYERS

# What normalizers and gates learn stays as it is.
NARROW = (*LAYERS, "output_projection")


def quantize(models: Iterable[nn.Module]) -> None:
    """Put linear layers in place into int8, a scale for each row of a weight; inputs are rounded to
    8 bits as they come, all else stays float32.

    Raises:
        UsageError: a model that is not float32 on the CPU, or has no such layers; a processor that
            torch has no int8 for.
    """
    for model in models:
        parameter = next(model.parameters())
        if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
            raise UsageError(
                f"--quantize int8 is for float32 on the CPU, and the model is {parameter.dtype} on "
                f"{parameter.device}: add --cpu, and leave out --fp16 and --bf16"
            )
        if torch.backends.quantized.engine in (None, "none"):
            raise UsageError("--quantize int8: torch has no int8 for this processor; leave it out")
        for module in model.modules():
            if isinstance(module, MultiheadAttention):
                module._set_skip_embed_dim_check()  # else fairseq reads weights around its layers
        chosen = {
            name: quantization.per_channel_dynamic_qconfig
            for name, module in model.named_modules()
            if type(module) is nn.Linear and name.rpartition(".")[2] in NARROW
        }
        if not any(name.rpartition(".")[2] in LAYERS for name in chosen):
            raise UsageError(
                f"--quantize int8 is for Transformers: {type(model).__name__} has none of their "
                "linear layers, so leave it out"
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch 2.10 and later
            warnings.simplefilter("ignore", UserWarning)  # of ranges that narrow sums would need
            quantization.quantize_dynamic(model, chosen, inplace=True)


class _Quantize(argparse.Action):
    """`--quantize int8`: fairseq's settings have no place for it."""

    chosen = False  # by the command whose flags were read last

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, values)
        type(self).chosen = True


def quantized_generation() -> None:
    """Give fairseq-generate and fairseq-interactive the flag `--quantize`."""

    def make_args(original):
        def add_generation_args(parser):
            group = original(parser)
            _Quantize.chosen = False
            group.add_argument(
                "--quantize",
                choices=["int8"],
                action=_Quantize,
                help="put linear layers into int8, on the CPU: faster, and nearly the same",
            )
            return group

        return add_generation_args

    def make_prepare(original):
        def prepare_for_inference_(self, cfg):
            original(self, cfg)
            if _Quantize.chosen:
                quantize([self])

        return prepare_for_inference_

    wrap(options, "add_generation_args", make_args)
    wrap(BaseFairseqModel, "prepare_for_inference_", make_prepare)
