"""Training steps and inference of DeiT on random images. Needs timm."""

import argparse
import sys

import torch
from lib import ROOT
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.measurement import AUTO, PLAIN, Case, Contestant, Ready

sys.path.insert(0, str(ROOT / "user_dir"))
import vit_multimax  # noqa: E402

CLASSES, PIXELS = 1000, 224
# Operations that a second-order sigma adds to each score (Sec. 4.4 of Zhou et al. 2024).
SIGMA = 15


def images(args: argparse.Namespace) -> list[Case]:
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, args.dtype)
    batch = torch.randn(args.batch, 3, PIXELS, PIXELS, generator=generator).to(args.device, dtype)
    labels = torch.randint(CLASSES, (args.batch,), generator=generator).to(args.device)

    def build(normalizer: str) -> nn.Module:
        torch.manual_seed(1)
        model = vit_multimax.deit(args.size, normalizer=normalizer, output=normalizer)
        return model.to(args.device, dtype)

    def training(normalizer: str) -> Ready:
        model = build(normalizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch).float(), labels)
            loss.backward()
            return loss.detach()

        def step(number: int) -> dict[str, int]:
            backward()
            optimizer.step()
            return {"images": args.batch}

        def result() -> dict[str, torch.Tensor]:
            loss = backward()
            norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
            return {"loss": loss, "norm of the gradient": torch.stack(norms).norm()}

        return Ready(step, result)

    def inference(normalizer: str) -> Ready:
        model = build(normalizer).eval()

        @torch.no_grad()
        def result() -> dict[str, torch.Tensor]:
            return {"logits": model(batch)}

        def step(number: int) -> dict[str, int]:
            result()
            return {"images": args.batch}

        return Ready(step, result, flops=count_flops(normalizer))

    def count_flops(normalizer: str) -> float:
        """FLOPs per image: a multiplication with its addition counts once, as in the paper."""
        model = build("softmax").eval()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as count:
            model(batch[:1])
        attention = [block.attn for block in model.blocks]
        scores = sum(each.num_heads for each in attention) * model.patch_embed.num_patches**2
        extra = 0 if normalizer == "softmax" else SIGMA * (scores + CLASSES)
        return count.get_total_flops() / 2 + extra

    cases = []
    for label, make in (("training step", training), ("inference", inference)):
        contestants = {
            "softmax (timm)": Contestant(lambda make=make: make("softmax"), "softmax"),
            PLAIN: Contestant(lambda make=make: make("multimax"), "multimax", "plain"),
            AUTO: Contestant(lambda make=make: make("multimax"), "multimax"),
        }
        references = ["softmax (timm)", PLAIN]
        cases.append(Case(f"{label}, DeiT-{args.size}", 0, contestants, references, ["images/s"]))
    return cases
