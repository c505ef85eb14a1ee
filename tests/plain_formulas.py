"""The public functions and the plain PyTorch formula of each, with the same arguments.

`beside_plain` compares values and gradients of a call with the formula in float64.
"""

import math
import types

import numpy as np
import torch
import torch.nn.functional as F
from examples import EXAMPLES
from random_inputs import drawn

from multimax_fairseq import (
    NORMALIZERS,
    linear_cross_entropy,
    log_multimax,
    multimax,
    scaled_dot_product_attention,
    symmetric_divergence,
)
from multimax_fairseq.ops.best_outputs import fused_scores
from multimax_fairseq.ops.modulator import modulate

PARAMETERS = ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")


class Given(types.SimpleNamespace):
    """A modulator with these parameters, of any shape, dtype and memory layout."""

    monotone = False

    def __call__(self, x):
        return modulate(x, **vars(self))


def given(options):
    """Remove a modulator's parameters from the options; return the modulator, or None."""
    parameters = {name: options.pop(name) for name in PARAMETERS if name in options}
    return Given(**parameters) if parameters else None


def ours_multimax(x, mask=None, dim=-1, **parameters):
    return multimax(x, given(parameters), dim, mask)


def ours_log_multimax(x, mask=None, dim=-1, **parameters):
    # Excluded entries are -inf, which has no finite gradient.
    return log_multimax(x, given(parameters), dim, mask).clamp(min=-100)


def ours_attention(query, key, value, **options):
    modulator = given(options)
    name = "softmax" if modulator is None else "multimax"
    return scaled_dot_product_attention(
        query, key, value, modulator=modulator, normalizer=name, **options
    )


def ours_loss(features, weight, target, **options):
    return linear_cross_entropy(features, weight, target, modulator=given(options), **options)[0]


def ours_divergence(features, other, weight, **options):
    return symmetric_divergence(features, other, weight, modulator=given(options), **options)


def ours_scores(features, weight, bias=None, **parameters):
    scores = fused_scores(features, weight, bias, given(dict(parameters)))
    # None: no kernel supports the call, and the caller uses the plain formula.
    return plain_scores(features, weight, bias, **parameters) if scores is None else scores


def plain_modulate(x, **parameters):
    gone = x == -math.inf
    x = out = x.masked_fill(gone, 0.0)
    for side, sign in (("low", -1), ("high", 1)):
        coefficient, threshold = (
            parameters.get(f"{side}_{n}") for n in ("coefficient", "threshold")
        )
        for n in range(0 if coefficient is None else coefficient.shape[-1]):
            c, t = (p[n] if p.dim() == 1 else p[:, None, None, n] for p in (coefficient, threshold))
            out = out + c * (sign * (x - t)).relu() ** (n + 1)
    return out.masked_fill(gone, -math.inf)


def plain_multimax(x, mask=None, dim=-1, **parameters):
    return plain_softmax(plain_modulate(x, **parameters), mask, dim)


def plain_log_multimax(x, mask=None, dim=-1, **parameters):
    return plain_multimax(x, mask, dim, **parameters).clamp(min=math.exp(-100)).log()


def plain_softmax(x, mask=None, dim=-1):
    if mask is not None:
        x = x.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else x + mask
    if x.numel() == 0:
        return x
    weights = (x - x.detach().amax(dim, True).clamp(min=-1e300)).exp()
    # A fully masked row gives zeros.
    return weights / weights.sum(dim, True).clamp(min=1e-30)


def plain_attention(
    query, key, value, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, **parameters
):
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = plain_modulate(query @ key.mT * scale, **parameters)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    return (1 - dropout_p) * plain_softmax(scores, attn_mask) @ value


def plain_scores(features, weight, bias=None, **parameters):
    return plain_modulate(F.linear(features, weight, bias), **parameters).detach()


def plain_loss(
    features,
    weight,
    target,
    bias=None,
    label_smoothing=0.0,
    ignore_index=-100,
    reduction="sum",
    chunk_size=None,
    **parameters,
):
    log_probs = plain_modulate(F.linear(features, weight, bias), **parameters).log_softmax(-1)
    counts = target.long() != ignore_index
    losses = -log_probs.gather(-1, target.long().where(counts, 0)[..., None])[..., 0]
    if label_smoothing:
        others = -log_probs.sum(-1) - losses
        share = label_smoothing / max(len(weight) - 1, 1)
        losses = (1 - label_smoothing) * losses + share * others
    losses = losses * counts
    if reduction == "none":
        return losses
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


def plain_divergence(
    features, other, weight, bias=None, mask=None, reduction="sum", chunk_size=None, **parameters
):
    scores = (F.linear(h, weight, bias) for h in (features, other))
    log_p, log_q = (plain_modulate(x, **parameters).log_softmax(-1) for x in scores)
    found = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    counts = torch.ones_like(found) if mask is None else 1 - mask.to(found.dtype)
    if reduction == "none":
        return found * counts
    return (found * counts).sum() / (counts.sum() if reduction == "mean" else 1)


def beside_plain(ours, plain, arguments, options):
    """Compare a call with the formula in float64; return {what differs: by how much}.

    Compares the values without and with gradients, each gradient, and that no input was changed.
    """
    floats = [k for k, v in arguments.items() if v is not None and v.is_floating_point()]
    before = {k: None if v is None else v.clone() for k, v in arguments.items()}
    learned = [arguments[k].requires_grad_() for k in floats]
    exact = arguments | {k: arguments[k].double() for k in floats}
    with torch.no_grad():
        quick = ours(**arguments, **options)
    found, true = ours(**arguments, **options), plain(**exact, **options)
    pairs = {"without gradients": (quick, true), "values": (found, true)}
    if found.requires_grad:
        grad = drawn(*true.shape, seed=9)
        grads = torch.autograd.grad(found, learned, grad.to(found.dtype), allow_unused=True)
        trues = torch.autograd.grad(true, learned, grad.double(), allow_unused=True)
        pairs |= {f"grad_{k}": p for k, *p in zip(floats, grads, trues, strict=True)}
    narrow = {arguments[k].dtype for k in floats}
    error = 0.05 if torch.bfloat16 in narrow else 0.01 if torch.float16 in narrow else 1e-4
    off = {what: distance(*pair, error) for what, pair in pairs.items()}
    for key, value in before.items():
        if value is not None and not torch.equal(arguments[key], value):
            off[key] = "was written to"
    return {what: how for what, how in off.items() if how}


def distance(found, true, error):
    if found is None or true is None:
        return None if found is true else "one of them is missing"
    if found.shape != true.shape:
        return f"{list(found.shape)} is not {list(true.shape)}"
    if found.numel() == 0:
        return None
    far, most = ((t.double().abs().max().item()) for t in (found - true, true))
    return None if far <= error * (most + 0.3) else f"off by {far} of {most}"


LAYOUTS = {
    "turned": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one row for all": lambda t: t[:1].expand_as(t),
    "one column for all": lambda t: t[..., :1].expand_as(t),
    "one number for all": lambda t: t.flatten()[0].expand_as(t),
    "sliced": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] // 2 :][..., : t.shape[-1]],
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "behind others": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (1,) * t.dim()),
    "overlapping rows": lambda t: t.flatten().as_strided(t.shape, (*range(2, t.dim() + 1), 1)),
}


def mapped(name, x, mask=None, dim=-1, **options):
    """Compare a mapping with its NumPy reference; return {what differs: by how much}."""
    found = NORMALIZERS[name](x, dim, mask, **options)
    excluded = torch.zeros(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    rows = [np.moveaxis(np.atleast_1d(t.numpy()), dim, -1) for t in (x.double(), excluded)]
    true = np.moveaxis(EXAMPLES[name].reference(*rows, **options), -1, dim)
    off = distance(found, torch.from_numpy(np.array(true)).reshape(x.shape), 1e-4)
    return {"values": off} if off else {}
