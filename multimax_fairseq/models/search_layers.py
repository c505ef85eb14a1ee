"""Faster linear layers for Transformers that only translate, on a CPU."""

import functools
import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from multimax_fairseq.ops.best_outputs import fused_scores
from multimax_fairseq.signature import processor

# Names of the linear layers in fairseq's attention and feed-forward blocks.
LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
# Number of multiplications from which the kernel is faster, including the cost of its call.
MIN_PRODUCTS = 2**22


class KernelLinear(nn.Linear):
    """A linear layer whose large matrix products run in the output layer's kernel.

    It shares the parameters of the layer that it replaces.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return the same as `nn.Linear`."""
        if not torch.is_grad_enabled() and input.numel() * len(self.weight) >= MIN_PRODUCTS:
            output = fused_scores(input, self.weight, self.bias, None)
            if output is not None:
                return output
        return super().forward(input)


@functools.cache
def torch_is_narrow() -> bool:
    """Whether torch multiplies with half of the processor's vector width.

    torch's MKL uses 256-bit vectors on AMD processors. Those since Zen 5 (family 26) compute 512
    bits at once.
    """
    family = re.match(r"AMD .*\(family (\d+)", processor())
    is_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return is_wide and family is not None and int(family[1]) >= 26


def faster_layers(models: Iterable[nn.Module]) -> None:
    """Speed up the attention and feed-forward layers of models that no longer train, on a CPU.

    Where torch does not use the full vector width, our kernel computes the products. Elsewhere the
    weights become column-major, which is faster for small batches.
    """
    for parent in [module for model in models for module in model.modules()]:
        for name, child in parent.named_children():
            if type(child) is not nn.Linear or name not in LAYERS:
                continue
            weight = child.weight
            if weight.device.type != "cpu" or weight.dim() != 2:
                continue
            if torch_is_narrow():
                setattr(parent, name, KernelLinear(child))
            else:
                weight.data = weight.data.t().contiguous().t()
