"""Scores of an output layer for decoding, without gradients: all of them, or the largest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import choose
from multimax_fairseq.ops.checks import check_cpu, check_float, check_tensor, is_whole
from multimax_fairseq.ops.cross_entropy import cast_output, check_output, linear_backend
from multimax_fairseq.ops.linear_loss import check_linear, parameters_or_none
from multimax_fairseq.ops.modulator import AnyModulator
from multimax_fairseq.ops.registration import Operator, define, without_gradient

# The C++ kernels insert into a sorted list, which is fast only for a short list.
MAX_COUNT = 256


def fused_scores(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: AnyModulator | None,
) -> Tensor | None:
    """Return the modulated scores of an output layer, or None if no kernel can compute them.

    Equivalent to: modulator(F.linear(features, weight, bias)).detach()

    Args:
        features: (..., D). weight: (V, D). bias: (V,) or None.
        modulator: a `Modulator` with shared heads, or a `SoftCap`; None leaves the scores as they
            are.

    Returns:
        (..., V), float32, or None.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.
    """
    check_linear(features, weight, bias, modulator)
    parameters = parameters_or_none(modulator, features)
    if linear_backend("output scores", features, weight, bias, parameters) != "cpp":
        return None
    with torch.no_grad():
        rows = features.reshape(-1, features.shape[-1])
        parameters = None if parameters is None else parameters.float()
        scores = output_scores(rows, weight, bias, parameters)
        return scores.view(*features.shape[:-1], weight.shape[0])


def best_outputs(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: AnyModulator | None,
    count: int,
    apart: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return the largest modulated scores of an output layer, without storing all of them.

    Equivalent to: the top k of `fused_scores` without the columns `apart`; the log-sum-exp of all
    columns, NaN if one is inf; and the columns `apart`.

    Args:
        features: (N, D). weight, bias, modulator: as `fused_scores`.
        count: at least 1, at most V.
        apart: classes whose scores are returned separately.

    Returns:
        values, the largest first: (N, count). indices: (N, count), int64, arbitrary where the value
        is -inf. log-sum-exp: (N,). Scores of the classes `apart`: (N, len(apart)).
        None if no kernel can compute them.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`; features that are not a matrix; a wrong
            count or class.
    """
    check_linear(features, weight, bias, modulator)
    if features.dim() != 2:
        raise ValueError(f"features must be (N, D), got {list(features.shape)}")
    classes = weight.shape[0]
    _check_count(count, classes)
    is_listed = isinstance(apart, Sequence) and not isinstance(apart, str)
    if not is_listed or not all(is_whole(k, minimum=0) and k < classes for k in apart):
        raise ValueError(f"apart must be some of {classes} classes, got {apart!r}")
    parameters = parameters_or_none(modulator, features)
    is_short = count <= MAX_COUNT and classes < 2**31
    if not is_short or linear_backend("best outputs", features, weight, bias, parameters) != "cpp":
        return None
    with torch.no_grad():
        parameters = None if parameters is None else parameters.float()
        return best_outputs_operator(features, weight, bias, parameters, count, apart)


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest scores of each row and its log-sum-exp, without gradients.

    Equivalent to: (*scores.detach().topk(count), scores.detach().logsumexp(-1))

    Args:
        scores: (N, V).
        count: at least 1, at most V.

    Returns:
        values, the largest first: (N, count). indices: (N, count), int64. log-sum-exp: (N,).

    Raises:
        ValueError: scores that are not a floating-point matrix; a wrong count.
    """
    check_tensor("scores", scores)
    if scores.dim() != 2 or not scores.is_floating_point():
        raise ValueError(
            f"scores must be a matrix, (N, V), of floating-point numbers, got {scores.dtype} "
            f"{list(scores.shape)}"
        )
    _check_count(count, scores.shape[1])
    scores = scores.detach()
    unsupported = "" if count <= MAX_COUNT else f"more than {MAX_COUNT} scores are wanted"
    if scores.numel() == 0:
        unsupported = "there are no scores"
    dtypes = (torch.float32,)
    if choose("best scores", "auto", scores, unsupported=unsupported, dtypes=dtypes) == "cpp":
        return best_scores_operator(scores, count)
    values, indices = scores.topk(count)
    return values, indices, scores.logsumexp(1)


def _check_count(count: int, classes: int) -> None:
    if not is_whole(count) or count > classes:
        raise ValueError(f"count must be between 1 and {classes} scores, got {count!r}")


# --- torch.ops.multimax_fairseq.output_scores --------------------------------------------------

_OUTPUT = "Tensor features, Tensor weight, Tensor? bias, Tensor? parameters"


def _check_output_scores(
    features: Tensor, weight: Tensor, bias: Tensor | None, parameters: Tensor | None
) -> None:
    check_output(features, weight, bias, parameters)
    check_cpu("features", features)


def _output_scores(
    features: Tensor, weight: Tensor, bias: Tensor | None, parameters: Tensor | None
) -> Tensor:
    """Return the modulated scores, (N, V) float32."""
    layer = native.linear_layer(*native.in_float32(features, weight, bias, parameters))
    out = features.new_empty(len(features), len(weight), dtype=torch.float32)
    native.call("projection", native.Projection, out=out, **layer)
    return out


def _output_scores_fake(features: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return features.new_empty(features.shape[0], weight.shape[0], dtype=torch.float32)


output_scores: Operator = define(
    f"output_scores({_OUTPUT}) -> Tensor",
    check=_check_output_scores,
    kernel=_output_scores,
    fake=_output_scores_fake,
    autograd=without_gradient("output_scores"),
    autocast=cast_output,
)


# --- torch.ops.multimax_fairseq.best_scores ----------------------------------------------------


def _check_best(scores: Tensor, count: int) -> None:
    if scores.dim() != 2 or not 1 <= count <= scores.shape[1]:
        raise ValueError(
            f"scores must be (N, V) and count between 1 and V, got {list(scores.shape)} and {count}"
        )
    check_float("scores", scores, scores, "scores")
    check_cpu("scores", scores)


def _best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores.float()
    rows, classes = scores.shape
    values, indices, totals = _empty_lists(scores, count)
    native.call(
        "best_scores",
        native.Best,
        rows=rows,
        classes=classes,
        count=count,
        threads=torch.get_num_threads(),
        scores=scores.contiguous(),
        values=values,
        indices=indices,
        totals=totals,
    )
    return values, indices, totals


def _empty_lists(like: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for values, indices and log-sum-exp of as many rows as `like` has."""
    values = like.new_empty(like.shape[0], count, dtype=torch.float32)
    return values, torch.empty_like(values, dtype=torch.int64), values.new_empty(like.shape[0])


best_scores_operator: Operator = define(
    "best_scores(Tensor scores, int count) -> (Tensor, Tensor, Tensor)",
    check=_check_best,
    kernel=_best_scores,
    fake=_empty_lists,
    autograd=without_gradient("best_scores"),
)


# --- torch.ops.multimax_fairseq.best_outputs ---------------------------------------------------


def _check_best_outputs(*inputs: Any) -> None:
    *layer, count, apart = inputs
    _check_output_scores(*layer)
    classes = layer[1].shape[0]
    if not 1 <= count <= classes < 2**31:
        raise ValueError(
            f"count must be between 1 and the number of classes, below 2**31, got {count} of "
            f"{classes}"
        )
    if not all(0 <= k < classes for k in apart):
        raise ValueError(f"apart must be some of {classes} classes, got {list(apart)}")


def _best_outputs(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parameters: Tensor | None,
    count: int,
    apart: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    values, indices, totals = _empty_lists(features, count)
    apart_scores = values.new_empty(len(features), len(apart))
    native.call(
        "best_outputs",
        native.BestOutputs,
        count=count,
        apart=len(apart),
        apart_classes=torch.tensor(apart, dtype=torch.int64, device="cpu"),
        values=values,
        indices=indices,
        totals=totals,
        apart_scores=apart_scores,
        **native.linear_layer(*native.in_float32(features, weight, bias, parameters)),
    )
    return values, indices, totals, apart_scores


def _best_outputs_fake(features: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, count, apart = rest
    apart_scores = features.new_empty(features.shape[0], len(apart), dtype=torch.float32)
    return *_empty_lists(features, count), apart_scores


best_outputs_operator: Operator = define(
    f"best_outputs({_OUTPUT}, int count, int[] apart) -> (Tensor, Tensor, Tensor, Tensor)",
    check=_check_best_outputs,
    kernel=_best_outputs,
    fake=_best_outputs_fake,
    autograd=without_gradient("best_outputs"),
    autocast=cast_output,
)
