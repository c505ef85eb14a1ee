"""DeiT-small with MultiMax in every attention and in its output layer, on models from timm.

    python user_dir/vit_multimax.py

As in Table 2 of the paper: global average pooling in place of the class token, and modulators that
may fall far from zero (Eq. 6). This file does not use fairseq.
"""

import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parameters_to_vector

from multimax_fairseq import Modulator, replace_softmax

try:
    import timm
except ModuleNotFoundError as error:
    if error.name != "timm":
        raise
    raise SystemExit(
        "timm is missing, which has this example's model: docs/python.md says how to install it"
    ) from None


def build(normalizer="multimax", **timm_options):
    """Return DeiT-small with this normalizer; a MultiMax model's logits are modulated too."""
    options = {"global_pool": "avg", "class_token": False, **timm_options}
    model = timm.create_model("deit_small_patch16_224", **options)
    # No image patch is masked, so the modulators need not be monotone.
    settings = {"monotone": False} if normalizer == "multimax" else {}
    replace_softmax(model, normalizer, **settings)
    if normalizer == "multimax":
        # Cross-entropy and softmax of modulated logits are those of MultiMax.
        model.head = nn.Sequential(model.head, Modulator())
    return model


def main():
    torch.manual_seed(1)
    model = build()
    modulators = {n: m for n, m in model.named_modules() if isinstance(m, Modulator)}
    before = {n: parameters_to_vector(m.parameters()).detach() for n, m in modulators.items()}
    images, labels = torch.randn(2, 3, 224, 224), torch.randint(1000, (2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    start = time.perf_counter()
    loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    seconds = time.perf_counter() - start
    with torch.no_grad():
        later = F.cross_entropy(model(images), labels)
    for name, modulator in modulators.items():
        change = parameters_to_vector(modulator.parameters()) - before[name]
        print(f"{name} moved by up to {change.abs().max():.1e}")
    print(f"{sum(len(vector) for vector in before.values())} extra scalars")
    print(f"loss {loss:.3f}, after a step of {seconds:.1f} s {later:.3f}")


if __name__ == "__main__":
    main()
