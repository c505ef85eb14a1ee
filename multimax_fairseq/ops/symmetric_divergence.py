"""The symmetric divergence of two outputs of a linear layer, without holding all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.ops.backend import is_autocast, needs_plain_operations, select
from multimax_fairseq.ops.checks import check_device, check_tensor
from multimax_fairseq.ops.linear_loss import (
    DivergenceCall,
    LinearLoss,
    cast_for_plain,
    check_linear,
    check_reduction,
    chunk_rows,
    logits_of,
    mean_of,
    modulated_logits,
    parameters_or_none,
    through_chunks,
)
from multimax_fairseq.ops.modulator import (
    AnyModulator,
    modulate_backward,
    modulate_operator,
    modulated_gradients,
)
from multimax_fairseq.ops.registration import needs_gradient


def symmetric_divergence(
    features: Tensor,
    other: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    modulator: AnyModulator | None = None,
    mask: Tensor | None = None,
    reduction: str = "sum",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the symmetric divergence of MultiMax (or softmax) over a linear layer's outputs.

        (KL(p|q) + KL(q|p)) / 2 = sum_k (p_k - q_k) (log p_k - log q_k) / 2
        p = softmax(sigma(W h + b)) of features h,  q the same of other      (Liang et al. 2021)
    Equivalent to: with log_p and log_q the log_softmax of modulator(F.linear(h, weight, bias)),
    (F.kl_div(log_q, log_p, log_target=True, reduction="sum")
    + F.kl_div(log_p, log_q, log_target=True, reduction="sum")) / 2

    Both p and q get gradients. As in `linear_cross_entropy`, forward and backward pass run together
    on each chunk of rows, so the (N, V) logits are never stored.

    Args:
        features: (N, D) or (..., D), floating.
        other: the shape and dtype of features.
        weight: (V, D), of the dtype of features.
        bias: (V,), of the dtype of features.
        modulator: a `Modulator` with shared heads, or a `SoftCap`; None is softmax.
        mask: the leading shape of features, bool: True excludes a row.
        reduction: "sum", "mean" (over the rows that count; NaN if none does) or "none".
        chunk_size: rows of features taken at a time; None chooses.

    Returns:
        Nats, float32 or wider: a scalar, or the leading shape of features for "none".

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: shapes, dtypes or devices do not match; a modulator per head; a mask that is
            not bool; an unknown reduction; a chunk size below 1.
    """
    check_linear(features, weight, bias, modulator)
    _check_other(features, other)
    if mask is None:
        mask = features.new_zeros(features.shape[:-1], dtype=torch.bool)
    else:
        _check_mask(features, mask)
    check_reduction(reduction, chunk_size)
    # Row 2 i is h, row 2 i + 1 is the other one: a chunk has both.
    count = mask.numel()
    rows = torch.stack((features, other), -2).reshape(2 * count, features.shape[-1])
    parameters = parameters_or_none(modulator, features)
    call = DivergenceCall(rows, weight, bias, parameters, mask.reshape(-1), chunk_size)
    divergence = _plain(call, reduction != "none")
    if reduction == "none":
        return divergence.view(mask.shape)
    return mean_of(divergence, (~mask).sum()) if reduction == "mean" else divergence


def _check_other(features: Tensor, other: Tensor) -> None:
    check_tensor("other", other)
    if other.shape != features.shape:
        raise ValueError(
            f"other must be {list(features.shape)}, as features, got {list(other.shape)}"
        )
    check_device("other", other, features, "features")
    fits = other.is_floating_point() and is_autocast(features.device.type)
    if other.dtype != features.dtype and not fits:
        raise ValueError(f"other is {other.dtype}, but features {features.dtype}: cast one of them")


def _check_mask(features: Tensor, mask: Tensor) -> None:
    check_tensor("mask", mask)
    if mask.dtype != torch.bool or mask.shape != features.shape[:-1]:
        raise ValueError(
            f"mask must be bool {list(features.shape[:-1])}, as features {list(features.shape)}, "
            f"got {mask.dtype} {list(mask.shape)}"
        )
    check_device("mask", mask, features, "features")


def _plain(call: DivergenceCall, summed: bool) -> Tensor:
    """Return the divergences of neighbouring rows (2 N, D), (N,) or their sum."""
    call = cast_for_plain(call)
    mask = call.mask
    if needs_plain_operations(*call.inputs, mask):  # torch differentiates it
        log_probs = logits_of(call).log_softmax(-1)
        p, q = _pairs(log_probs)
        divergences = _divergences(p.exp(), q.exp(), p - q).masked_fill(mask, 0.0)
        return divergences.sum() if summed else divergences
    # `LinearLoss` has one loss for each row: half of its pair's divergence.
    rows, classes = len(call.features), len(call.weight)
    pairs = call.chunk_size or -(-chunk_rows(rows, classes, mask.device.type) // 2)
    call = call._replace(mask=mask.repeat_interleave(2), chunk_size=2 * pairs)
    if needs_gradient(*call.inputs):
        divergences, _ = LinearLoss.apply(DivergenceCall, _plain_parts, summed, *call)
    else:
        divergences = _plain_parts(call, None, (False,) * 4)[1]
        divergences = divergences.sum() if summed else divergences
    return divergences if summed else divergences.view(-1, 2).sum(-1)


def _pairs(of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd rows of (2 N, V), (N, V) each."""
    first, second = of_rows.unflatten(0, (-1, 2)).unbind(1)
    return first, second


def _divergences(p: Tensor, q: Tensor, gap: Tensor) -> Tensor:
    """Return the symmetric divergence of each row of (N, V), given gap = log p - log q."""
    # No term is negative, so that terms never cancel, however close p and q are.
    return ((p - q) * gap).sum(-1) / 2


def _plain_parts(
    call: DivergenceCall, factors: Tensor | None, needed: Sequence[bool]
) -> tuple[Any, ...]:
    """Return for each row 0, and half the divergence of its pair; and the gradients."""
    # In plain PyTorch, the modulator would take half of the time.
    parameters, device = call.parameters, call.features.device
    fast = parameters is not None and parameters.device == device
    fast = fast and select("auto", call.features)[0] != "plain"

    def one_chunk(
        scores: Tensor, parameters: Tensor | None, mask: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        logits = (
            modulate_operator(scores, parameters) if fast else modulated_logits(scores, parameters)
        )
        probs = logits.log_softmax(-1)
        log_p, log_q = _pairs(probs)
        gap = log_p - log_q
        p, q = _pairs(probs.exp_())
        divergences = (_divergences(p, q, gap) / 2).repeat_interleave(2).masked_fill_(mask, 0.0)
        zeros = torch.zeros_like(divergences)
        if factors is None:
            return zeros, divergences, None, None
        # The gradient of p's logits: (p (log p - log q - KL(p|q)) + p - q) / 2; q likewise.
        difference = p - q
        for probs_of, sign in ((p, 1), (q, -1)):
            rest = probs_of * gap
            mean = rest.sum(-1, keepdim=True)
            rest.addcmul_(probs_of, mean, value=-1).add_(difference)
            torch.mul(rest, sign, out=probs_of)
        grad = probs.mul_(factors.view(-1, 2).sum(-1).div_(4).repeat_interleave(2).unsqueeze(-1))
        grad.masked_fill_(mask.unsqueeze(-1), 0.0)
        if parameters is None:
            return zeros, divergences, grad, None
        if fast:
            return zeros, divergences, *modulate_backward(grad, scores, parameters)
        return (
            zeros,
            divergences,
            *modulated_gradients(grad, scores.to(grad.dtype), parameters, 2, 2),
        )

    zeros, divergences, grads = through_chunks(one_chunk, call, factors, needed)
    return zeros, divergences, *grads
