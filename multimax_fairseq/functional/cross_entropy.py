"""Projection, modulator, log-normaliser and cross-entropy in one, without holding all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimax_fairseq.functional.backend import choose, is_autocast
from multimax_fairseq.functional.modulator import (
    ModulatorParameters,
    modulate,
    modulate_backward,
    parameter_table,
    parameters_of,
    table_columns,
)
from multimax_fairseq.kernels import cpu

# Logits held at a time by the paths that are not compiled C++. On the CPU a chunk should stay in
# the last-level cache through the passes over it; on a GPU it has to fill the matrix units.
CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**27}


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

    A chunk of rows is taken through both passes at once, so that (N, V) is never held. For
    reduction "none", and in float16, whose gradients would underflow without the loss scaling, the
    gradients are formed in the backward pass, from logits that are computed again. A monotone
    modulator keeps all logits.

    Args:
        features: (N, D) or (..., D).
        weight: (V, D).
        target: the leading shape of features, int64.
        bias: (V,).
        modulator: a `Modulator` with shared heads; None is softmax.
        label_smoothing: in [0, 1).
        ignore_index: targets of this value count for nothing.
        reduction: "sum", "mean" (over the targets that count) or "none".
        chunk_size: rows taken at a time; None chooses.

    Returns:
        (loss, nll_loss), both in nats and float32 or wider: scalars, or the shape of target for
        "none". nll_loss has no gradient.

    Raises:
        ValueError: an unknown reduction; label smoothing out of range; a chunk size below 1; on the
            CPU, a target outside of the V classes.
    """
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"unknown reduction {reduction!r}: choose sum, mean or none")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label smoothing must be in [0, 1), got {label_smoothing}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"the chunk size must be at least 1, got {chunk_size}")
    shape, device = target.shape, features.device.type
    features, target = features.reshape(-1, features.shape[-1]), target.reshape(-1)
    if is_autocast(device):
        # What F.linear would do.
        dtype = torch.get_autocast_dtype(device)
        features, weight = features.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    parameters = parameters_of(modulator)
    inputs = (features, weight, bias, *parameters)
    share = label_smoothing / max(weight.shape[0] - 1, 1)
    settings = _Settings(share, 1 - label_smoothing - share, chunk_size)
    target = target.masked_fill(target == ignore_index, -1)
    if device == "cpu" and target.numel() and int(target.max()) >= weight.shape[0]:
        raise ValueError(f"target {int(target.max())} is not one of {weight.shape[0]} classes")
    if modulator is not None and modulator.monotone:
        logits = modulate(F.linear(features, weight, bias), *parameters, True)
        nll_loss, smooth_loss = _losses(logits, target)
        loss, nll_loss = settings.mix(nll_loss, smooth_loss), nll_loss.detach()
    elif reduction == "none" or features.dtype == torch.float16:
        loss, nll_loss = _LateGradients.apply(settings, target, *inputs)
    else:
        loss, nll_loss = _EarlyGradients.apply(settings, target, *inputs)
    if reduction == "none":
        return loss.view(shape), nll_loss.view(shape)
    loss, nll_loss = loss.sum(), nll_loss.sum()
    if reduction == "mean":
        count = (target >= 0).sum()
        loss, nll_loss = loss / count, nll_loss / count
    return loss, nll_loss


def fused_scores(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: ModulatorParameters | None,
) -> Tensor | None:
    """Return an output layer's modulated scores, without gradients; None where no kernel can.

    Equivalent to: modulator(F.linear(features, weight, bias)).detach()

    Args:
        features: (..., D). weight: (V, D). bias: (V,) or None.
        modulator: a `Modulator` with shared heads; None leaves the scores as they are.

    Returns:
        (..., V) or None.
    """
    monotone = modulator is not None and modulator.monotone
    if monotone or choose("output scores", "auto", features, weight) != "cpp":
        return None
    with torch.no_grad():
        table = None if modulator is None else parameter_table(*parameters_of(modulator)).float()
        rows = features.reshape(-1, features.shape[-1])
        return cpu.project(rows, weight, bias, table).view(*features.shape[:-1], len(weight))


class _Settings(NamedTuple):
    share: float  # of the loss that each class has by label smoothing
    hit: float  # what the target has beyond that
    chunk_size: int | None

    def mix(self, nll_loss: Tensor, smooth_loss: Tensor) -> Tensor:
        return self.hit * nll_loss + self.share * smooth_loss if self.share else nll_loss


class _LateGradients(torch.autograd.Function):
    """The losses a row; everything is computed again for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, target: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.settings = settings
        ctx.save_for_backward(target, *inputs)
        nll_loss, smooth_loss, _ = _losses_and_gradients(settings, target, None, inputs)
        ctx.mark_non_differentiable(nll_loss)
        # Not the same tensor twice: one of the two has a gradient.
        return settings.mix(nll_loss, smooth_loss).clone(), nll_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        target, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grads = _losses_and_gradients(ctx.settings, target, grad, inputs, needed)[2]
        return (None, None, *_narrow(grads, inputs))


class _EarlyGradients(torch.autograd.Function):
    """The summed losses, with the gradients formed on the way."""

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, target: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.settings = settings
        ctx.save_for_backward(target, *inputs)
        needed = ctx.needs_input_grad[2:]
        factors = torch.ones_like(target, dtype=torch.float32) if any(needed) else None
        nll_loss, smooth_loss, ctx.grads = _losses_and_gradients(
            settings, target, factors, inputs, needed
        )
        loss, nll_loss = settings.mix(nll_loss, smooth_loss).sum(), nll_loss.sum()
        ctx.mark_non_differentiable(nll_loss)
        return loss, nll_loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        target, *inputs = ctx.saved_tensors
        # Given away rather than kept, so that they need no copy; a second backward pass through
        # a retained graph forms them anew.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            needed, factors = ctx.needs_input_grad[2:], torch.ones_like(target, dtype=torch.float32)
            grads = _losses_and_gradients(ctx.settings, target, factors, inputs, needed)[2]
        if grad != 1:
            grads = [None if g is None else g.mul_(grad) for g in grads]
        return (None, None, *_narrow(grads, inputs))


def _narrow(grads: Sequence[Tensor | None], inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(grads, inputs, strict=True)
    return [None if g is None or t is None else g.to(t.dtype) for g, t in pairs]


def _losses_and_gradients(
    settings: _Settings,
    target: Tensor,
    factors: Tensor | None,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool] = (False,) * 7,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return nll and smooth losses a row and the gradients of those inputs that need one.

    factors (N,) are the gradients by the losses of the rows; None for none.
    """
    features, weight, bias, *parameters = inputs
    assert features is not None and weight is not None
    wide = torch.promote_types(features.dtype, torch.float32)
    has_modulator = any(p is not None for p in parameters)
    table = parameter_table(*parameters).to(wide) if has_modulator else None
    choice = choose("output loss", "auto", features, weight)
    if choice == "cpp":
        nll_loss, smooth_loss, grads = cpu.output_loss(
            features,
            weight,
            bias,
            table,
            target,
            factors,
            settings.share,
            settings.hit,
            needed[:3],
            settings.chunk_size,
        )
        nll_loss, smooth_loss = nll_loss.float(), smooth_loss.float()
    else:
        nll_loss, smooth_loss, grads = _through_chunks(
            settings, target, factors, features, weight, bias, table, needed, choice
        )
    *grads, grad_table = grads
    columns = [None] * 4 if grad_table is None else table_columns(grad_table, parameters)
    return nll_loss, smooth_loss, [*grads, *columns]


def _through_chunks(
    settings: _Settings,
    target: Tensor,
    factors: Tensor | None,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    needed: Sequence[bool],
    choice: str,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """As `kernels.cpu.output_loss`, over chunks of rows."""
    chunk_size = settings.chunk_size
    if chunk_size is None:
        budget = CHUNK_LOGITS.get(features.device.type, CHUNK_LOGITS["cuda"])
        chunk_size = max(64, budget // weight.shape[0])
    # Sums over many chunks: in float32 or wider whatever the inputs are.
    wide = torch.promote_types(features.dtype, torch.float32)
    nll_loss, smooth_loss = torch.zeros(2, len(target), dtype=wide, device=target.device)
    grads: list[Tensor | None] = [None] * 4
    if factors is not None:
        given = zip((features, weight, bias, table), (*needed[:3], any(needed[3:])), strict=True)
        grads = [
            torch.zeros_like(t, dtype=wide) if t is not None and need else None for t, need in given
        ]
    one_chunk = _triton_chunk if choice == "triton" else _plain_chunk
    for start in range(0, len(target), chunk_size):
        rows = slice(start, start + chunk_size)
        scores = F.linear(features[rows], weight, bias)
        some = None if factors is None else factors[rows].to(wide)
        nll_loss[rows], smooth_loss[rows], grad_scores, grad_table = one_chunk(
            settings, scores, table, target[rows], some
        )
        if grad_scores is None:
            continue
        narrow = grad_scores.to(weight.dtype)
        if grads[0] is not None:
            grads[0][rows] = narrow @ weight
        if grads[1] is not None and grads[1].dtype == narrow.dtype:
            grads[1].addmm_(narrow.T, features[rows])
        elif grads[1] is not None:
            grads[1] += narrow.T @ features[rows]
        if grads[2] is not None:
            grads[2] += grad_scores.sum(0, dtype=wide)
        if grads[3] is not None and grad_table is not None:
            grads[3] += grad_table
    return nll_loss, smooth_loss, grads


def _losses(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """nll and smooth losses a row, from logits (N, V) that are modulated already."""
    ignored = target < 0
    log_total = logits.logsumexp(-1)
    hit = logits.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smooth_loss = logits.shape[-1] * log_total - logits.sum(-1)
    return (log_total - hit).masked_fill(ignored, 0.0), smooth_loss.masked_fill(ignored, 0.0)


def _plain_chunk(
    settings: _Settings,
    scores: Tensor,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The losses of a chunk and its gradients by scores and table, from scores (N, V)."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    parameters = [] if table is None else [p[0] for p in table.split(2, -1)]
    logits = modulate(scores, *parameters)
    nll_loss, smooth_loss = _losses(logits, target)
    if factors is None:
        return nll_loss, smooth_loss, None, None
    ignored = (target < 0).unsqueeze(-1)
    grad = logits.softmax(-1)
    if settings.share:
        grad.sub_(settings.share)
    index = target.clamp(min=0).unsqueeze(-1)
    grad.scatter_add_(-1, index, grad.new_full((), -settings.hit).expand(index.shape))
    grad.mul_(factors.unsqueeze(-1)).masked_fill_(ignored, 0.0)
    if table is None:
        return nll_loss, smooth_loss, grad, None
    grad, *columns = modulate_backward(grad, scores, *parameters)
    return nll_loss, smooth_loss, grad, torch.cat([c for c in columns if c is not None])


def _triton_chunk(
    settings: _Settings,
    scores: Tensor,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """As `_plain_chunk`; the gradients take the place of the scores."""
    from multimax_fairseq.kernels import triton_cross_entropy

    state = scores.new_tensor([-torch.inf, 0, 0, 0], dtype=torch.float32).repeat(len(scores), 1)
    flat = None if table is None else table[0].contiguous()
    triton_cross_entropy.statistics(scores, flat, target, 0, state)
    top, total, sum_z, hit = state.unbind(-1)
    ignored = target < 0
    log_total = top + total.log()
    nll_loss = (log_total - hit).masked_fill_(ignored, 0.0)
    smooth_loss = (scores.shape[-1] * log_total - sum_z).masked_fill_(ignored, 0.0)
    if factors is None:
        return nll_loss, smooth_loss, None, None
    grad_table = None if table is None else scores.new_zeros(len(scores), 8, dtype=torch.float32)
    triton_cross_entropy.gradient(
        scores,
        flat,
        target,
        0,
        log_total,
        factors.masked_fill(ignored, 0.0),
        settings.share,
        settings.hit,
        scores,
        grad_table,
    )
    return nll_loss, smooth_loss, scores, None if grad_table is None else grad_table.sum(0)
