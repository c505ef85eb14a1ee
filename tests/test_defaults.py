"""Results do not depend on PyTorch's default device and dtype.

The default device "meta" stands for any device other than the inputs' device.
"""

import contextlib
import subprocess
import sys

import pytest
import torch

from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.continuous.many_dimensions import continuous_sparsemax_2d
from multimax_fairseq.ops.best_outputs import best_scores
from multimax_fairseq.ops.decoding import KVCache, decoding_attention

B, H, T, D, V = 2, 3, 5, 16, 40


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


QUERY, KEY, VALUE = (drawn(B, H, T, D, seed=n) for n in range(3))
PADDING = (torch.arange(T) < torch.tensor([[5], [3]]))[:, None, None]
MODULATOR = Modulator(monotone=True)
FEATURES, WEIGHT, TARGET = drawn(7, D, seed=3), drawn(V, D, seed=4), torch.arange(7)
WORDS = drawn(4, H, D).detach()
ANCESTORS = torch.tensor([[0, 5], [1, 5], [2, 4], [3, 7]])
STEPS = KVCache(torch.cat([WORDS, WORDS + 1]), torch.cat([WORDS - 1, WORDS]), ANCESTORS)
MEAN, PLANE = drawn(2), torch.eye(2)


def attention(**options):
    return lambda: scaled_dot_product_attention(QUERY, KEY, VALUE, **options)


def steps():
    return decoding_attention(WORDS, H, D, sink=0.5)(WORDS, STEPS, 0.2)


CALLS = {
    "causal": attention(normalizer="softmax", is_causal=True),
    "padding": attention(normalizer="softmax", attn_mask=PADDING),
    "multimax": attention(modulator=MODULATOR, is_causal=True, attn_mask=PADDING),
    "dropout": attention(normalizer="softmax", dropout_p=0.5),
    "softmax1": attention(normalizer="softmax1"),
    "softcap": attention(normalizer="softcap", cap=0.7),
    "sink": attention(normalizer="sink", sink=0.5),
    "ssmax": attention(normalizer="ssmax", length_scale=0.2, is_causal=True),
    "plain": attention(modulator=MODULATOR, is_causal=True, backend="plain"),
    "modulator": lambda: MODULATOR(QUERY),
    "loss": lambda: linear_cross_entropy(FEATURES, WEIGHT, TARGET, modulator=MODULATOR)[0],
    "best scores": lambda: best_scores(WEIGHT, 3)[2],
    "density": lambda: continuous_sparsemax_2d(MEAN, PLANE, PLANE, PLANE.expand(2, 2, 2)),
}
if decoding_attention(WORDS, H, D) is not None:  # it has no plain fallback
    CALLS["steps"] = steps


def results(call):
    """Return the outputs of a call and its gradients."""
    torch.manual_seed(1)
    found = call()
    if not found.requires_grad:
        return [found]
    inputs = [QUERY, KEY, VALUE, *MODULATOR.parameters(), FEATURES, WEIGHT, MEAN]
    grads = torch.autograd.grad(found, inputs, torch.ones_like(found), allow_unused=True)
    return [found.detach(), *(g for g in grads if g is not None)]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_operators_ignore_default_device_and_dtype(name, surroundings):
    wanted = results(CALLS[name])
    with SURROUNDINGS[surroundings]():
        found = results(CALLS[name])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_package_imports_under_another_default_device():
    program = """if True:
        import torch
        with torch.device("meta"):
            import multimax_fairseq.models
            from multimax_fairseq.continuous import expectation as continuous
        assert continuous.NODES.device.type == "cpu"
    """
    subprocess.run([sys.executable, "-c", program], check=True)
