"""How far two output distributions of a linear layer are apart, without holding all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.backend import choose, is_autocast, recorded
from multimax_fairseq.functional.checks import check_tensor
from multimax_fairseq.functional.cross_entropy import (
    cast,
    check_output,
    check_summing,
    logits_of,
    mean_of,
    output_table,
)
from multimax_fairseq.functional.modulator import (
    ModulatorParameters,
    modulated_gradients,
)
from multimax_fairseq.kernels import operators
from multimax_fairseq.kernels.chunks import chunk_rows, through_chunks


def symmetric_divergence(
    features: Tensor,
    other: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    modulator: ModulatorParameters | None = None,
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

    Gradients go into both p and q. A chunk of rows is taken through both passes at once, as
    `linear_cross_entropy` does, so that (N, V) is never held.

    Args:
        features: (N, D) or (..., D), floating.
        other: the shape and dtype of features.
        weight: (V, D), of the dtype of features.
        bias: (V,), of the dtype of features.
        modulator: a `Modulator` with shared heads; None is softmax.
        mask: the leading shape of features, bool: True counts for nothing.
        reduction: "sum", "mean" (over the rows that count; nan where none does) or "none".
        chunk_size: rows of features taken at a time; None chooses.

    Returns:
        Nats, float32 or wider: a scalar, or the leading shape of features for "none".

    Raises:
        TypeError: something that is no tensor; a modulator that is no `Modulator`; an argument of
            another type.
        ValueError: shapes, dtypes or devices that do not fit; a modulator per head; a mask that is
            not bool; an unknown reduction; a chunk size below 1.
    """
    check_output(features, weight, bias, modulator)
    _check_other(features, other)
    if mask is None:
        mask = features.new_zeros(features.shape[:-1], dtype=torch.bool)
    else:
        _check_mask(features, mask)
    check_summing(reduction, chunk_size)
    # A row of features and its other one are neighbours, and come into a chunk together.
    count = mask.numel()
    rows = torch.stack((features, other), -2).reshape(2 * count, features.shape[-1])
    table = output_table(modulator)
    found = _plain(rows, weight, bias, table, mask.reshape(-1), chunk_size, reduction != "none")
    if reduction == "none":
        return found.view(mask.shape)
    return mean_of(found, (~mask).sum()) if reduction == "mean" else found


def _check_other(features: Tensor, other: Tensor) -> None:
    check_tensor("other", other)
    if other.shape != features.shape:
        raise ValueError(
            f"other must be {list(features.shape)}, as features, got {list(other.shape)}"
        )
    operators.check_device("other", other, features, "features")
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
    operators.check_device("mask", mask, features, "features")


def _plain(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    mask: Tensor,
    chunk_size: int | None,
    summed: bool,
) -> Tensor:
    """The divergences of neighbouring rows (2 N, D), (N,) or their sum."""
    rows, weight, bias, table = inputs = cast(rows, weight, bias, table)
    if recorded(rows, weight, bias, table, mask):  # then torch differentiates it
        log_probs = logits_of(F.linear(rows, weight, bias), table).log_softmax(-1)
        p, q = _pairs(log_probs)
        found = _divergences(p.exp(), q.exp(), p - q).masked_fill(mask, 0.0)
        return found.sum() if summed else found
    # What `OutputLoss` has for a token is here for a row, which has half of its pair's divergence.
    some = chunk_size or -(-chunk_rows(len(rows), len(weight), rows.device.type) // 2)
    halves, numbers = mask.repeat_interleave(2), (0.0, 1.0, 2 * some)
    if operators.needs_gradient(*inputs):
        found, _ = operators.OutputLoss.apply(_plain_parts, numbers, summed, halves, *inputs)
    else:
        found = _plain_parts(*inputs, halves, None, (False,) * 4, *numbers)[0]
        found = found.sum() if summed else found
    return found if summed else found.view(-1, 2).sum(-1)


def _pairs(of_rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows (2 N, V) the first and the second of each two, (N, V)."""
    first, second = of_rows.unflatten(0, (-1, 2)).unbind(1)
    return first, second


def _divergences(p: Tensor, q: Tensor, gap: Tensor) -> Tensor:
    """The symmetric divergence a row of probabilities (N, V), given log p - log q."""
    # No term is negative, so that none cancels another, however near the two are.
    return ((p - q) * gap).sum(-1) / 2


def _plain_parts(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    mask: Tensor,
    factors: Tensor | None,
    needed: Sequence[bool],
    *numbers: Any,
) -> tuple[Any, ...]:
    """As `operators.output_loss_parts`: half of its pair's divergence for each row."""
    # Written out, the modulator would take half of the time.
    fast = choose("", "auto", rows, able=table is not None) != "plain"

    def one_chunk(
        scores: Tensor, table: Tensor | None, mask: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        logits = operators.modulate(scores, table) if fast else logits_of(scores, table)
        probs = logits.log_softmax(-1)
        log_p, log_q = _pairs(probs)
        gap = log_p - log_q
        p, q = _pairs(probs.exp_())
        found = (_divergences(p, q, gap) / 2).repeat_interleave(2).masked_fill_(mask, 0.0)
        nothing = torch.zeros_like(found)
        if factors is None:
            return found, nothing, None, None
        # By the logits of p: (p (log p - log q - KL(p|q)) + p - q) / 2; by those of q likewise.
        difference = p - q
        for probs_of, sign in ((p, 1), (q, -1)):
            rest = probs_of * gap
            mean = rest.sum(-1, keepdim=True)
            rest.addcmul_(probs_of, mean, value=-1).add_(difference)
            torch.mul(rest, sign, out=probs_of)
        grad = probs.mul_(factors.view(-1, 2).sum(-1).div_(4).repeat_interleave(2).unsqueeze(-1))
        grad.masked_fill_(mask.unsqueeze(-1), 0.0)
        if table is None:
            return found, nothing, grad, None
        if fast:
            return found, nothing, *operators.modulate_backward(grad, scores, table)
        return found, nothing, *modulated_gradients(grad, scores.to(grad.dtype), table, 2, 2)

    inputs = (rows, weight, bias, table)
    found, nothing, grads = through_chunks(one_chunk, mask, factors, *inputs, needed, numbers[2])
    pairs = zip(grads, inputs, strict=True)
    return found, nothing, *(None if g is None or t is None else g.to(t.dtype) for g, t in pairs)
