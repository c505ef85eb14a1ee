"""Projection, modulator, log-normaliser and cross-entropy in one, without holding all logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.backend import choose, is_autocast, recorded
from multimax_fairseq.functional.checks import check_integer, check_number, check_tensor, is_whole
from multimax_fairseq.functional.modulator import (
    ModulatorParameters,
    is_known,
    modulated,
    modulated_gradients,
    table_of,
)
from multimax_fairseq.kernels import operators
from multimax_fairseq.kernels.chunks import through_chunks

# Where their list is short enough to be looked through at each score that joins it.
MOST_BEST = 256


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
    gradients are formed in the backward pass, from logits that are computed again.

    Args:
        features: (N, D) or (..., D), floating.
        weight: (V, D), of the dtype of features.
        target: the leading shape of features, an integer type.
        bias: (V,), of the dtype of features.
        modulator: a `Modulator` with shared heads; None is softmax.
        label_smoothing: in [0, 1).
        ignore_index: targets of this value count for nothing.
        reduction: "sum", "mean" (over the targets that count; nan where none does) or "none".
        chunk_size: rows taken at a time; None chooses.

    Returns:
        (loss, nll_loss), both in nats and float32 or wider: scalars, or the shape of target for
        "none". nll_loss has no gradient.

    Raises:
        TypeError: something that is no tensor; a modulator that is no `Modulator`; an argument of
            another type.
        ValueError: shapes, dtypes or devices that do not fit; a modulator per head; an unknown
            reduction; label smoothing out of range; a chunk size below 1; on the CPU, a target that
            is neither one of the V classes nor ignore_index. Elsewhere, and in what torch.compile
            made, such a target gives nan.
    """
    check_output(features, weight, bias, modulator)
    target = _checked_target(features, target)
    check_integer("ignore_index", ignore_index)
    check_summing(reduction, chunk_size)
    check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    shape, classes = target.shape, weight.shape[0]
    target = target.reshape(-1)
    rows = features.reshape(target.shape[0], features.shape[-1])
    smooth_weight = float(label_smoothing) / max(classes - 1, 1)
    # Not 1 - label_smoothing - smooth_weight: of a single class nothing is left to learn.
    numbers = (smooth_weight, 1 - smooth_weight * classes, ignore_index, chunk_size)
    summed = reduction != "none"
    table = output_table(modulator)
    if _output_kernel("output loss", rows, weight, bias, table) != "plain":
        table = None if table is None else table.float()
        loss, nll_loss = operators.output_loss(rows, weight, bias, table, target, *numbers, summed)
    else:
        loss, nll_loss = _plain(rows, weight, bias, table, target, numbers, summed)
    if not summed:
        return loss.view(shape), nll_loss.view(shape)
    if reduction == "mean":
        count = (target != ignore_index).sum()
        loss, nll_loss = mean_of(loss, count), mean_of(nll_loss, count)
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
        (..., V), float32, or None.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.
    """
    check_output(features, weight, bias, modulator)
    table = output_table(modulator)
    if _output_kernel("output scores", features, weight, bias, table) != "cpp":
        return None
    with torch.no_grad():
        rows = features.reshape(-1, features.shape[-1])
        table = None if table is None else table.float()
        scores = operators.output_scores(rows, weight, bias, table)
        return scores.view(*features.shape[:-1], weight.shape[0])


def best_outputs(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: ModulatorParameters | None,
    count: int,
    apart: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the largest modulated scores of an output layer, and some classes' apart, without ever
    holding all of them; None where no kernel can.

    Equivalent to: the largest of `fused_scores` less the columns `apart`, their log-sum-exp with
        these, which is nan beside a score of inf, and these columns

    Args:
        features: (N, D). weight, bias, modulator: as `fused_scores`.
        count: at least 1, at most V.
        apart: classes.

    Returns:
        values, the largest first: (N, count). indices: (N, count), int64, any where the value is
        -inf. log sum exp: (N,). Scores of the classes apart: (N, len(apart)).

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`; features that are no matrix; another
            count; something else than classes apart.
    """
    check_output(features, weight, bias, modulator)
    if features.dim() != 2:
        raise ValueError(f"features must be (N, D), got {list(features.shape)}")
    classes = weight.shape[0]
    _check_count(count, classes)
    is_listed = isinstance(apart, Sequence) and not isinstance(apart, str)
    if not is_listed or not all(is_whole(k, least=0) and k < classes for k in apart):
        raise ValueError(f"apart must be some of {classes} classes, got {apart!r}")
    table = output_table(modulator)
    is_short = count <= MOST_BEST
    if not is_short or _output_kernel("best outputs", features, weight, bias, table) != "cpp":
        return None
    with torch.no_grad():
        table = None if table is None else table.float()
        return operators.best_outputs(features, weight, bias, table, count, apart)


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest scores of each row and its log-sum-exp, without gradients.

    Equivalent to: (*scores.detach().topk(count), scores.detach().logsumexp(-1))

    Args:
        scores: (N, V).
        count: at least 1, at most V.

    Returns:
        values, the largest first: (N, count). indices: (N, count), int64. log sum exp: (N,).

    Raises:
        ValueError: scores that are no matrix of floating-point numbers; another count.
    """
    check_tensor("scores", scores)
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be a matrix, (N, V), of floating-point numbers, got {scores.dtype} "
            f"{list(scores.shape)}"
        )
    _check_count(count, scores.shape[1])
    scores = scores.detach()
    able = scores.numel() > 0 and count <= MOST_BEST
    if choose("best scores", "auto", scores, able=able, dtypes=(torch.float32,)) == "cpp":
        return operators.best_scores(scores, count)
    values, indices = scores.topk(count)
    return values, indices, scores.logsumexp(1)


def _check_count(count: int, classes: int) -> None:
    if not is_whole(count) or count > classes:
        raise ValueError(f"count must be between 1 and {classes} scores, got {count!r}")


def _output_kernel(
    operation: str, features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> str:
    able = features.numel() > 0 and weight.numel() > 0
    able = able and (table is None or (table.shape[0] == 1 and table.device == features.device))
    # The kernel for the CPU computes in float32: from a narrower weight it would need a copy.
    dtypes = operators.DTYPES if operators.on_triton(features.device) else (torch.float32,)
    return choose(operation, "auto", features, weight, bias, able=able, dtypes=dtypes)


def output_table(modulator: ModulatorParameters | None) -> Tensor | None:
    """Return `table_of` an output layer's modulator without its orders; None of softmax."""
    return None if modulator is None else table_of(modulator)[0]


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count: of nothing nan, with the gradient 0, as torch's own losses."""
    return (total / count.clamp(min=1)).masked_fill(count == 0, torch.nan)


def check_summing(reduction: str, chunk_size: int | None) -> None:
    """Raise ValueError or TypeError for an unknown reduction, or what is no size of a chunk."""
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"unknown reduction {reduction!r}: choose sum, mean or none")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def check_output(
    features: Tensor, weight: Tensor, bias: Tensor | None, modulator: ModulatorParameters | None
) -> None:
    """Raise ValueError or TypeError for what is no output layer, as `linear_cross_entropy` says."""
    given = [("features", features), ("weight", weight)]
    if bias is not None:
        given.append(("bias", bias))
    for name, tensor in given:
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {tensor.dtype}")
        operators.check_device(name, tensor, features, "features")
        if tensor.dtype != features.dtype and not is_autocast(features.device.type):
            raise ValueError(
                f"{name} is {tensor.dtype}, but features {features.dtype}: cast one of them"
            )
    if features.dim() < 1 or weight.dim() != 2 or features.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"features must be (..., D) and weight (V, D), got {list(features.shape)} and "
            f"{list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"weight must have at least one class, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), got {list(bias.shape)}")
    if modulator is None:
        return
    if not is_known(modulator):
        raise TypeError(f"modulator must be a Modulator or None, got {modulator!r}")
    for coefficient in (modulator.low_coefficient, modulator.high_coefficient):
        if not isinstance(coefficient, Tensor):
            continue  # None, or for table_of to refuse
        operators.check_device("the modulator", coefficient, features, "features")
        if coefficient.dim() == 2:
            raise ValueError(
                "the modulator of an output layer has no heads, got one for "
                f"{coefficient.shape[0]} heads: give Modulator(num_heads=None)"
            )


def _checked_target(features: Tensor, target: Tensor) -> Tensor:
    """The targets as int64."""
    check_tensor("target", target)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target must be of an integer type, got {target.dtype}")
    if target.dtype == torch.uint64:
        raise ValueError("target is torch.uint64, of which int64 does not hold all: cast it")
    if target.shape != features.shape[:-1]:
        raise ValueError(
            f"target must be {list(features.shape[:-1])}, as features {list(features.shape)}, got "
            f"{list(target.shape)}"
        )
    operators.check_device("target", target, features, "features")
    return target.long()


# --- the plain form ----------------------------------------------------------------------------


def _plain(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    numbers: Sequence[Any],
    summed: bool,
) -> tuple[Tensor, Tensor]:
    features, weight, bias, table = cast(features, weight, bias, table)
    if recorded(features, weight, bias, table, target):  # then torch differentiates it
        logits = logits_of(F.linear(features, weight, bias), table)
        nll, smooth = _losses(logits, target, numbers[2])
    else:
        if target.device.type == "cpu":
            _check_range(target, weight.shape[0], numbers[2])
        inputs = (features, weight, bias, table)
        if operators.needs_gradient(*inputs):
            return operators.OutputLoss.apply(_plain_parts, numbers, summed, target, *inputs)
        nll, smooth = _plain_parts(*inputs, target, None, (False,) * 4, *numbers)[:2]
    loss, nll = operators.mixed(nll, smooth, *numbers[:2]), nll.detach()
    return (loss.sum(), nll.sum()) if summed else (loss, nll)


def cast(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return an output layer's tensors in the dtypes that its plain form computes in."""
    if is_autocast(features.device.type):
        # What F.linear would do.
        dtype = torch.get_autocast_dtype(features.device.type)
        features, weight = (
            t if t.dtype == torch.float64 else t.to(dtype) for t in (features, weight)
        )
        bias = bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
    if table is not None:
        table = table.to(torch.promote_types(features.dtype, torch.float32))
    return features, weight, bias, table


def _check_range(target: Tensor, classes: int, ignore_index: int) -> None:
    wrong = target[((target < 0) | (target >= classes)) & (target != ignore_index)]
    if len(wrong) > 0:
        raise ValueError(
            f"target {int(wrong[0])} is neither one of {classes} classes nor ignore_index "
            f"{ignore_index}"
        )


def logits_of(scores: Tensor, table: Tensor | None) -> Tensor:
    """Return scores modulated, in float32 or wider."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if table is None else modulated(scores, table, 2, 2)


def _losses(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """nll and smooth losses a row, from logits (N, V); nan for a target that is no class."""
    classes = logits.shape[-1]
    log_total = logits.logsumexp(-1)
    logit = logits.gather(-1, target.clamp(0, classes - 1).unsqueeze(-1)).squeeze(-1)
    logit = logit.masked_fill((target < 0) | (target >= classes), torch.nan)
    ignored = target == ignore_index
    smooth = classes * log_total - logits.sum(-1)
    return (log_total - logit).masked_fill(ignored, 0.0), smooth.masked_fill(ignored, 0.0)


def _plain_parts(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    needed: Sequence[bool],
    smooth_weight: float,
    nll_weight: float,
    ignore_index: int,
    chunk_size: int | None,
) -> tuple[Any, ...]:
    """As `operators.output_loss_parts`, in torch's own operations over chunks of rows."""

    def one_chunk(
        scores: Tensor, table: Tensor | None, target: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        logits = logits_of(scores, table)
        nll, smooth = _losses(logits, target, ignore_index)
        if factors is None:
            return nll, smooth, None, None
        # The gradient of nll_weight * nll + smooth_weight * smooth; nan as the loss.
        # smooth_weight * V + nll_weight = 1, so that p itself has the weight 1.
        grad = logits.softmax(-1).sub_(smooth_weight)
        index = target.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        grad.scatter_add_(-1, index, grad.new_full((), -nll_weight).expand(index.shape))
        factors = factors.masked_fill(nll.isnan(), torch.nan).unsqueeze(-1)
        grad = grad.mul_(factors).masked_fill_((target == ignore_index).unsqueeze(-1), 0.0)
        if table is None:
            return nll, smooth, grad, None
        return nll, smooth, *modulated_gradients(grad, scores.to(grad.dtype), table, 2, 2)

    inputs = (features, weight, bias, table)
    nll, smooth, grads = through_chunks(one_chunk, target, factors, *inputs, needed, chunk_size)
    pairs = zip(grads, inputs, strict=True)
    return nll, smooth, *(None if g is None or t is None else g.to(t.dtype) for g, t in pairs)
