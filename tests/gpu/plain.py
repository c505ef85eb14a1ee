"""The plain formulas that the Triton kernels equal, their inputs, and how errors are compared.

On a GPU everything here runs on it; with TRITON_INTERPRET=1, on the CPU.
"""

import math
import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")


def modulated(x, parameters):
    """sigma(x), x (..., heads, T, S), by the plain formula in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if parameters is None:
        return x
    if parameters.shape[1] == 3:
        cap, shift, width = parameters[0].to(x.dtype)
        inner = (x.masked_fill(~x.isfinite(), 0.0) + shift) / width  # no gradient of NaN
        return torch.where(x.isfinite(), cap * inner.tanh(), x)
    columns = parameters.to(x.dtype).T[:, :, None, None]
    z = x
    for order in (1, 2):
        low = (columns[1 + order] - x).clamp(0, 1e18)
        high = (x - columns[5 + order]).clamp(0, 1e18)
        z = z + columns[order - 1] * low**order + columns[3 + order] * high**order
    if len(columns) == 12:
        low_turn, high_turn, low_offset, high_level = columns[8:]
        z = torch.where(x < low_turn, x + low_offset, z)
        z = torch.where(x > high_turn, high_level, z)
    return z


# Far from the identity, with sparse and multi-modal signs in both orders.
FAR = (-0.9, -0.05, 0.3, -0.4, -0.6, -0.03, 0.6, 0.9)


def far_parameters(rows, low=2, high=2):
    """Return different parameters per head; zeros for orders above `low` and `high`."""
    parameters = torch.tensor(FAR) + 0.05 * torch.arange(rows)[:, None]
    present = [order <= side for side in (low, low, high, high) for order in (1, 2)]
    return torch.where(torch.tensor(present), parameters, 0.0).to(DEVICE)


def monotone_parameters(rows, low_turn=-2.0, high_turn=1.5):
    """Return parameters of a sigma that is level above high_turn, with slope 1 below low_turn."""
    parameters = far_parameters(rows).cpu()
    turns = torch.tensor([low_turn, high_turn]) + 0.05 * torch.arange(rows)[:, None]
    at_turns = modulated(turns[:, None].double(), parameters)[:, 0].float()
    offset = torch.where(turns.isfinite(), at_turns - turns, 0.0)[:, :1]
    level = torch.where(turns.isfinite(), at_turns, 0.0)[:, 1:]
    return torch.cat([parameters, turns, offset, level], -1).to(DEVICE)


def soft_cap(cap=1.5):
    """Return the parameters of a soft-cap near which the scores lie."""
    return torch.tensor([[cap, 0.3, 2.0]], device=DEVICE)


# The kernels sum in float32 in another order than the plain formula.
ROUNDING = 16 * torch.finfo(torch.float32).eps


def assert_as_accurate(ours, plain, exact):
    """Check for at most twice the plain formula's error in the same dtype plus rounding."""
    for number, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        error, plain_error = ((t.double() - truth).norm().item() for t in (a, b))
        limit = 2 * plain_error + ROUNDING * truth.norm().item()
        assert error <= limit, (number, error, plain_error, limit)


def by_parameter(parameter_grads, orders=(2, 2)):
    """Return the parameters' gradient in pairs of columns, up to each side's order, without turns.

    Its sums cancel, so the relative error of a single entry is noisy; that of a group is stable.
    """
    pairs = [pair for grad in parameter_grads for pair in grad.split(2, -1)]
    assert len(pairs) < 5 or (pairs[4] == 0).all()
    sides = [pair[:, : orders[number // 2]] for number, pair in enumerate(pairs[:4])]
    return [pair for pair in sides + pairs[5:] if pair.numel() > 0]


def doubled(inputs, *others):
    return [t.double() for t in inputs], *(t if t is None else t.double() for t in others)


def plain_attention(query, key, value, parameters, mask=None, causal=False, scale=None, sink=None):
    """The plain formula, in the dtype of the inputs except for the softmax."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    z = modulated((query * scale) @ key.mT, parameters)
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask.to(z.dtype)
    elif mask is not None:
        z = z.masked_fill(mask, -math.inf)
    if causal:
        z = z.masked_fill(torch.ones_like(z[0, 0], dtype=torch.bool).triu(1), -math.inf)
    some = (z > -math.inf).any(-1, keepdim=True)
    z = torch.where(some, z, 0.0)
    if sink is not None:
        z = torch.cat([z, sink.to(z.dtype)[:, None, None].expand_as(z[..., :1])], -1)
    probs = z.softmax(-1)[..., : key.shape[2]] * some
    return probs.to(value.dtype) @ value


def attend(inputs, grad, parameters, mask=None, causal=False, scale=None, orders=(2, 2), **more):
    """Return the kernels' [output, gradients of query, key, value, parameters and sink]."""
    from multimax_fairseq.ops.attention import AttentionCall
    from multimax_fairseq.ops.triton import attention as kernels

    inputs = [t.detach() for t in inputs]
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    drop = more.get("drop", (0, 0.0))
    seed = torch.tensor(drop[0])
    numbers = (seed, causal, drop[1], scale, *orders, None, None)
    call = AttentionCall(*inputs, parameters, None, more.get("sink"), None, mask, *numbers)
    out, total = kernels.attention_forward(call)
    grads = kernels.attention_backward(grad, out, total, call)
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    assert total.shape == (*out.shape[:2], 1, out.shape[2]) and total.dtype == torch.float32
    assert ("parameters" in grads) == (parameters is not None)
    return [out, *grads.values()]


def plain_attend(inputs, grad, parameters, **options):
    inputs = [t.detach().requires_grad_() for t in inputs]
    numbers = {"parameters": parameters, "sink": options.pop("sink", None)}
    numbers = {n: t.detach().requires_grad_() for n, t in numbers.items() if t is not None}
    out = plain_attention(*inputs, **{"parameters": None} | numbers | options)
    grads = torch.autograd.grad(out, (*inputs, *numbers.values()), grad.to(out.dtype))
    return [out.detach(), *grads]


def attention_inputs(batch, heads, length, keys, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, n, size) for n in (length, keys, keys, length)]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.to(DEVICE, dtype) for t in (1.5 * query, 1.5 * key, value, grad)]


def make_mask(kind, batch, heads, length, keys):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([keys, keys // 2])[:batch, None]
    padding = (torch.arange(keys) >= lengths).view(batch, 1, 1, keys)
    full = torch.rand(batch, 1, length, keys, generator=generator) < 0.4
    full[0, :, length // 2] = True
    far = torch.arange(keys) - torch.arange(length)[:, None]
    if kind == "padding":
        mask = padding
    elif kind == "full":
        mask = full
    elif kind == "added padding":
        mask = torch.where(padding, -1e9, 0.0)
    elif kind == "added":  # one row of only -1e4, another of only -inf
        mask = torch.where(full, -1e4, 0.0)
        mask[:, :, 0] = -torch.inf
    elif kind == "bias":  # relative positions, one slope per head
        slopes = 0.5 ** torch.arange(1, heads + 1)
        mask = -far.abs() * slopes.view(1, heads, 1, 1)
    elif kind == "key bias":
        mask = torch.randn(1, heads, 1, keys, generator=generator)
        mask[..., -3:] = -torch.inf
    elif kind == "row bias":
        mask = torch.randn(batch, 1, length, 1, generator=generator)
    else:
        return None
    return mask.to(DEVICE)


def plain_loss(features, weight, bias, parameters, target, smooth_weight, nll_weight, z_weight=0.0):
    """Return nll and the loss of each row."""
    scores = F.linear(features, weight, bias)
    z = modulated(scores[:, None, None], parameters)[:, 0, 0]
    total = z.logsumexp(-1)
    nll = (total - z.gather(-1, target.clamp(min=0)[:, None])[:, 0]).masked_fill(target < 0, 0.0)
    smooth = (z.shape[-1] * total - z.sum(-1)).masked_fill(target < 0, 0.0)
    squared = total.square().masked_fill(target < 0, 0.0)
    if smooth_weight == 0:  # smooth may be inf
        return nll, nll + z_weight * squared
    return nll, smooth_weight * smooth + nll_weight * nll + z_weight * squared


def plain_entropy(features, weight, bias, parameters, target):
    """Return nll and the entropy of each row."""
    scores = F.linear(features, weight, bias)
    log_probs = modulated(scores[:, None, None], parameters)[:, 0, 0].log_softmax(-1)
    nll = -log_probs.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs.masked_fill(log_probs == -math.inf, 0.0)).sum(-1)
    return [t.masked_fill(target < 0, 0.0) for t in (nll, entropy)]


def loss_inputs(dtype, classes):
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 24), (classes, 24), (classes,))
    inputs = [torch.randn(shape, generator=generator) / 3 for shape in shapes]
    target = torch.randint(classes, (9,), generator=generator)
    target[::4], target[1], target[2] = -1, 0, classes - 1
    factors = torch.linspace(0.5, 2.0, 9)
    factors[5] = 0.0
    return [t.to(DEVICE, dtype) for t in inputs], target.to(DEVICE), factors.to(DEVICE)
