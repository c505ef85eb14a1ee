"""Small attention modules in plain PyTorch, whose softmax replace_softmax replaces."""

import torch
import torch.nn.functional as F
from torch import nn

from multimax_fairseq import Modulator, replace_softmax

HEADS, LENGTH, WIDTH = 4, 5, 16
# Ways to call softmax
KINDS = ["tensor", "torch", "functional", "module", "bool", "float", "causal", "plain", "torch-mha"]
ALL = [*KINDS, "torch-mha-weights"]
# {normalizer: required settings}
SETTINGS = {"topk": {"k": 2}}

# Modulator offsets far from the identity, for low and for high scores.
FAR = {
    "low_coefficient": [-0.9, -0.05],
    "low_threshold": [0.3, -0.4],
    "high_coefficient": [-0.6, -0.03],
    "high_threshold": [0.6, 0.9],
}


class OwnAttention(nn.Module):
    """Self-attention that calls softmax in many ways; causal except for "plain" and "tensor"."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.num_heads = kind, HEADS
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.own_softmax = nn.Softmax(-2)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        bias = torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
        lowest = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(x.dtype).min)
        scores = q * q.shape[-1] ** -0.5 @ k.mT
        sdpa = F.scaled_dot_product_attention
        if self.kind == "tensor":
            out = scores.softmax(dim=-1) @ v
        elif self.kind == "torch":
            out = torch.softmax(scores + bias, -1, torch.float64).to(v.dtype) @ v
        elif self.kind == "functional":
            out = F.softmax(scores + lowest, dim=-1, dtype=torch.float32) @ v
        elif self.kind == "module":
            out = self.own_softmax((scores + bias).mT).mT @ v
        elif self.kind == "bool":
            out = sdpa(q, k, v, attn_mask=allowed)
        elif self.kind == "float":
            out = sdpa(q, k, v, lowest, dropout_p=0.0)
        elif self.kind == "causal":
            out = sdpa(q, k, v, is_causal=True)
        elif self.kind == "plain":
            out = sdpa(q, k, v, scale=q.shape[-1] ** -0.5)
        return self.proj(out.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    def __init__(self, need_weights=False):
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.inner(x, x, x, attn_mask=future, need_weights=self.need_weights)[0]


class Calls(nn.Module):
    """A module whose forward is the given function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def replaced(function, normalizer="multimax", **settings):
    """Return a module whose forward is this function with softmax replaced."""
    module = Calls(function)
    replace_softmax(module, normalizer, where=lambda name, _: name == "", **settings)
    return module


def two_layers(kind, seed=0):
    torch.manual_seed(seed)
    if kind == "torch-mha":
        return nn.Sequential(TorchAttention(), nn.GELU(), TorchAttention(need_weights=True))
    return nn.Sequential(OwnAttention(kind), nn.GELU(), OwnAttention(kind))


def batch(length=LENGTH):
    return torch.randn(3, length, WIDTH, generator=torch.Generator().manual_seed(0))


def pull_far(model):
    """Set all modulators far from the identity, with other values for each head."""
    for module in model.modules():
        if isinstance(module, Modulator):
            for name, values in FAR.items():
                parameter = getattr(module, name)
                far = torch.tensor(values).expand_as(parameter)
                if parameter.dim() == 2:
                    far = far + 0.1 * torch.arange(len(parameter))[:, None]
                parameter.data.copy_(far)
    return model


def one_layer(kind):
    torch.manual_seed(0)
    if kind.startswith("torch-mha"):
        return nn.Sequential(TorchAttention("weights" in kind), nn.GELU())
    return nn.Sequential(OwnAttention(kind), nn.GELU())


def far_layer(kind, normalizer="multimax", **settings):
    model = one_layer(kind)
    replace_softmax(model, normalizer, **settings)
    return pull_far(model)
