"""Random tensors from a seed, and a modulator far from the identity."""

import torch

from multimax_fairseq import Modulator

# Far from the identity, with sparse and multi-modal signs in both orders.
FAR = ([1.9, 1.05], [0.4, 0.97], [0.3, -0.4], [0.6, 0.9])


def far_modulator(heads=None, terms="both"):
    t_b, t_d, b, d = (
        values if heads is None else [[v + 0.05 * h for v in values] for h in range(heads)]
        for values in FAR
    )
    if terms == "low":
        t_d = d = None
    elif terms == "high":
        t_b = b = None
    return Modulator.from_values(t_b, t_d, b, d)


def random_scores(*shape, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * spread


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
