"""Projection, modulator, log-normaliser and cross-entropy in one, without holding all logits."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimax_fairseq.functional.modulator import modulate, modulate_backward

# Logits held at a time. A chunk should stay in the last-level cache through the passes over it,
# and be tall enough for the matrix products to run at full speed.
CHUNK_LOGITS = 2**19


class ModulatorParameters(Protocol):
    """What is read of a modulator; `Modulator` has it."""

    low_coefficient: Tensor | None
    low_threshold: Tensor | None
    high_coefficient: Tensor | None
    high_threshold: Tensor | None
    monotone: bool


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    modulator: ModulatorParameters | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "sum",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of MultiMax (or softmax) over a linear layer's outputs.

        nll = log sum_k exp(z_k) - z_y,      z = sigma(W h + b)
        loss = (1 - e - e_i) nll - e_i sum_k log p_k,   e_i = e / (V - 1),  e = label_smoothing
    Equivalent to: F.cross_entropy(modulator(F.linear(features, weight, bias)), target) without
    label smoothing; with it, fairseq's spreading of e over the V - 1 other classes.

    With reduction "sum" or "mean" a chunk of rows is taken through both passes at once, so that
    (N, V) is never held. Half-precision float16 and autocast keep all logits, because gradients
    that are formed ahead of the loss scaling would underflow; so does a monotone modulator.

    Args:
        features: (N, D) or (..., D).
        weight: (V, D).
        target: the leading shape of features, int64.
        bias: (V,).
        modulator: a `Modulator` with shared heads; None is softmax.
        label_smoothing: in [0, 1).
        ignore_index: targets of this value count for nothing.
        reduction: "sum", "mean" (over the targets that count) or "none".
        chunk_size: rows taken at a time; None chooses from V.

    Returns:
        (loss, nll_loss), both in nats and float32 or wider: scalars, or the shape of target for
        "none". nll_loss has no gradient.

    Raises:
        ValueError: an unknown reduction; label smoothing out of range; a chunk size below 1.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"unknown reduction {reduction!r}: choose sum, mean or none")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label smoothing must be in [0, 1), got {label_smoothing}")
    if chunk_size is None:
        chunk_size = max(64, CHUNK_LOGITS // weight.shape[0])
    elif chunk_size < 1:
        raise ValueError(f"the chunk size must be at least 1, got {chunk_size}")
    shape = target.shape
    features, target = features.reshape(-1, features.shape[-1]), target.reshape(-1)
    low_c = low_t = high_c = high_t = None
    if modulator is not None:
        low_c, low_t = modulator.low_coefficient, modulator.low_threshold
        high_c, high_t = modulator.high_coefficient, modulator.high_threshold
    half = features.dtype == torch.float16 or torch.is_autocast_enabled(features.device.type)
    monotone = modulator is not None and modulator.monotone
    if reduction == "none" or half or monotone:
        scores = F.linear(features, weight, bias)
        logits = modulate(scores, low_c, low_t, high_c, high_t, monotone)
        loss, nll_loss = _loss_of_logits(logits, target, label_smoothing, ignore_index)
        if reduction == "none":
            return loss.view(shape), nll_loss.view(shape)
        loss, nll_loss = loss.sum(), nll_loss.sum()
    else:
        inputs = (features, weight, bias, low_c, low_t, high_c, high_t)
        loss, nll_loss = _LinearCrossEntropy.apply(
            label_smoothing, ignore_index, chunk_size, target, *inputs
        )
    if reduction == "mean":
        count = target.ne(ignore_index).sum()
        loss, nll_loss = loss / count, nll_loss / count
    return loss, nll_loss


def _loss_of_logits(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss a row, from logits (N, V) that are modulated already."""
    ignored = target.eq(ignore_index)
    index = target.masked_fill(ignored, 0).unsqueeze(-1)
    log_total = logits.logsumexp(-1)
    nll_loss = log_total - logits.gather(-1, index).squeeze(-1)
    loss = nll_loss
    if label_smoothing:
        vocabulary = logits.shape[-1]
        share = label_smoothing / (vocabulary - 1)
        smooth_loss = vocabulary * log_total - logits.sum(-1)
        loss = (1 - label_smoothing - share) * nll_loss + share * smooth_loss
    return loss.masked_fill(ignored, 0.0), nll_loss.detach().masked_fill(ignored, 0.0)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        label_smoothing: float,
        ignore_index: int,
        chunk_size: int,
        target: Tensor,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = (label_smoothing, ignore_index, chunk_size)
        ctx.save_for_backward(target, *inputs)
        needed = ctx.needs_input_grad[4:]
        loss, nll_loss, ctx.grads = _through_chunks(*ctx.options, needed, target, *inputs)
        ctx.mark_non_differentiable(nll_loss)
        return loss, nll_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Given away rather than kept, so that they need no copy; a second backward pass through
        # a retained graph forms them anew.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            needed = ctx.needs_input_grad[4:]
            grads = _through_chunks(*ctx.options, needed, *ctx.saved_tensors)[2]
        if grad != 1:
            grads = [None if g is None else g.mul_(grad) for g in grads]
        inputs = ctx.saved_tensors[1:]
        return (None,) * 4 + tuple(
            None if g is None else g.to(t.dtype) for g, t in zip(grads, inputs, strict=True)
        )


def _through_chunks(
    label_smoothing: float,
    ignore_index: int,
    chunk_size: int,
    needed: tuple[bool, ...],
    target: Tensor,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *parameters: Tensor | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the summed loss and nll_loss, and the gradients of those inputs that need one."""
    # Sums over many chunks: in float32 or wider whatever the inputs are.
    wide = torch.promote_types(features.dtype, torch.float32)
    grads = [
        torch.zeros_like(t, dtype=wide) if t is not None and need else None
        for t, need in zip((features, weight, bias, *parameters), needed, strict=True)
    ]
    low_c, low_t, high_c, high_t = (None if p is None else p.to(wide) for p in parameters)
    loss, nll_loss = features.new_zeros((), dtype=wide), features.new_zeros((), dtype=wide)
    for start in range(0, len(target), chunk_size):
        rows = slice(start, start + chunk_size)
        scores = F.linear(features[rows], weight, bias).to(wide)
        logits = modulate(scores, low_c, low_t, high_c, high_t)
        row_loss, row_nll = _loss_of_logits(logits, target[rows], label_smoothing, ignore_index)
        loss += row_loss.sum()
        nll_loss += row_nll.sum()
        if any(needed):
            grad = _grad_of_logits(logits, target[rows], label_smoothing, ignore_index)
            grad_scores, *shares = modulate_backward(grad, scores, low_c, low_t, high_c, high_t)
            _add_grads(grads, rows, grad_scores, features, weight, shares)
    return loss, nll_loss, grads


def _grad_of_logits(
    logits: Tensor, target: Tensor, label_smoothing: float, ignore_index: int
) -> Tensor:
    """p - (1 - e - e_i) onehot - e_i, the derivative of the loss by the logits."""
    share = label_smoothing / max(logits.shape[-1] - 1, 1)
    ignored = target.eq(ignore_index)
    index = target.masked_fill(ignored, 0).unsqueeze(-1)
    grad = logits.softmax(-1)
    if share:
        grad.sub_(share)
    grad.scatter_add_(-1, index, grad.new_full((), label_smoothing + share - 1).expand(index.shape))
    return grad.masked_fill_(ignored.unsqueeze(-1), 0.0)


def _add_grads(
    grads: list[Tensor | None],
    rows: slice,
    grad_scores: Tensor,
    features: Tensor,
    weight: Tensor,
    shares: list[Tensor | None],
) -> None:
    """Add a chunk's share to the gradients of (features, weight, bias, modulator)."""
    narrow = grad_scores.to(weight.dtype)
    grad_features, grad_weight, grad_bias, *totals = grads
    if grad_features is not None:
        grad_features[rows] = narrow @ weight
    if grad_weight is not None and grad_weight.dtype == narrow.dtype:
        grad_weight.addmm_(narrow.T, features[rows])
    elif grad_weight is not None:
        grad_weight += narrow.T @ features[rows]
    if grad_bias is not None:
        grad_bias += grad_scores.sum(0)
    for total, share in zip(totals, shares, strict=True):
        if total is not None and share is not None:
            total += share
