"""user_dir/vit_multimax.py, on a stand-in for timm's model."""

import importlib.util
import re
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from commands import ROOT
from torch import nn

from multimax_fairseq import Modulator

pytestmark = pytest.mark.long


class Attention(nn.Module):
    """Attention with the attribute names of timm's."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.fused_attn = num_heads, True
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused_attn:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, 6)
        self.norm2, self.mlp = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 56, 56)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(12)))
        self.head = nn.Linear(dim, 1000)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def run_example(monkeypatch, timm):
    monkeypatch.setitem(sys.modules, "timm", timm)
    spec = importlib.util.spec_from_file_location("vit_multimax", ROOT / "user_dir/vit_multimax.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_vit_multimax_trains_on_a_timm_stand_in(monkeypatch, capsys):
    """A small model with timm's names; timm's own DeiT-small was run by hand."""
    asked = []

    def create_model(name, **options):
        asked.append((name, options))
        return VisionTransformer()

    example = run_example(monkeypatch, types.SimpleNamespace(create_model=create_model))
    example.main()
    assert asked == [("deit_small_patch16_224", {"global_pool": "avg", "class_token": False})]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13 + 2 and lines[-2] == "104 extra scalars"
    assert not any("by up to 0.0e+00" in line for line in lines)
    before, _, after = (float(number) for number in re.findall(r"\d+\.\d+", lines[-1]))
    assert after < before

    modulators = [m for m in example.build().modules() if isinstance(m, Modulator)]
    assert len(modulators) == 13 and not any(m.monotone for m in modulators)

    model = example.build("sparsemax", num_classes=10)
    assert isinstance(model.head, nn.Linear) and asked[-1][1]["num_classes"] == 10
    fused = model(torch.ones(1, 3, 224, 224))
    for block in model.blocks:
        block.attn.fused_attn = False
    torch.testing.assert_close(model(torch.ones(1, 3, 224, 224)), fused)


def test_vit_multimax_names_missing_timm(monkeypatch):
    with pytest.raises(SystemExit, match="timm is missing.*docs/python.md"):
        run_example(monkeypatch, None)
