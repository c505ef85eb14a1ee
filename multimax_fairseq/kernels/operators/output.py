"""The operators of the output layer: output_loss, the parts that it is made of, output_scores,
best_scores, best_outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.kernels import cpu
from multimax_fairseq.kernels.operators.definition import (
    Operator,
    check_device,
    check_float,
    check_table,
    define,
    differentiable_once,
    needs_gradient,
    no_autocast,
    on_triton,
    traced,
    without_gradient,
)
from multimax_fairseq.kernels.operators.modulator import modulate

_OUTPUT = "Tensor features, Tensor weight, Tensor? bias, Tensor? table"
_LOSS = "float smooth_weight, float nll_weight, int ignore_index, int? chunk_size"


def _check_output(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> None:
    if features.dim() != 2 or weight.dim() != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, D) and weight (V, D), got {list(features.shape)} and "
            f"{list(weight.shape)}"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight must have classes and a width, got {list(weight.shape)}")
    check_float("features", features, features, "features")
    check_float("weight", weight, features, "features")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be ({weight.shape[0]},), got {list(bias.shape)}")
        check_float("bias", bias, features, "features")
    if table is not None:
        check_table(table, None, features, "features")


def _check_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    needed: Sequence[bool],
    chunk_size: int | None,
) -> None:
    _check_output(features, weight, bias, table)
    for name, tensor, dtype in (("target", target, torch.int64), ("factors", factors, torch.float)):
        if tensor is None:
            continue
        if tensor.shape != features.shape[:1] or tensor.dtype != dtype:
            raise ValueError(
                f"{name} must be {dtype} ({features.shape[0]},), got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        check_device(name, tensor, features, "features")
    if len(needed) != 4:
        raise ValueError(
            f"needed must say it of features, weight, bias and table, got {list(needed)}"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def _output_loss_parts(
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
) -> tuple[Tensor, ...]:
    _check_loss(features, weight, bias, table, target, factors, needed, chunk_size)
    if not abs(smooth_weight * weight.shape[0] + nll_weight - 1) < 1e-6:
        raise ValueError(
            f"smooth_weight * {weight.shape[0]} + nll_weight must be 1, got smooth_weight "
            f"{smooth_weight} and nll_weight {nll_weight}"
        )
    inputs = (features, weight, bias, table)
    if on_triton(features.device):
        from multimax_fairseq.kernels import triton_cross_entropy

        # There a negative target is ignored, and one beyond the classes gives nan.
        target = torch.where(target < 0, weight.shape[0], target).masked_fill(
            target == ignore_index, -1
        )
        nll, smooth, grads = triton_cross_entropy.output_loss(
            *inputs, target, factors, smooth_weight, nll_weight, needed, chunk_size
        )
    else:
        nll, smooth, grads = cpu.output_loss(
            *_wide(*inputs),
            target,
            factors,
            smooth_weight,
            nll_weight,
            ignore_index,
            chunk_size,
            needed,
        )
    pairs = zip(grads, inputs, strict=True)
    return nll, smooth, *(_or_empty(g, t, features) for g, t in pairs)


def _wide(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """An output layer in float32, which the kernels for the CPU compute in."""
    wide_bias, wide_table = (None if t is None else t.float() for t in (bias, table))
    return features.float(), weight.float(), wide_bias, wide_table


def _or_empty(grad: Tensor | None, tensor: Tensor | None, like: Tensor) -> Tensor:
    if grad is None or tensor is None:
        return like.new_empty(0)
    return grad.to(tensor.dtype)


def _output_loss_parts_fake(
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
) -> tuple[Tensor, ...]:
    _check_loss(features, weight, bias, table, target, factors, needed, chunk_size)
    nll, smooth = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    grads = (
        features.new_empty(0) if t is None or factors is None or not need else t.new_empty(t.shape)
        for t, need in zip((features, weight, bias, table), needed, strict=True)
    )
    return nll, smooth, *grads


output_loss_parts: Operator = define(
    f"output_loss_parts({_OUTPUT}, Tensor target, Tensor? factors, bool[] needed, {_LOSS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _output_loss_parts,
    _output_loss_parts_fake,
    without_gradient("output_loss_parts"),
    lambda features, *rest: no_autocast(features.device.type, output_loss_parts, features, *rest),
)


class OutputLoss(torch.autograd.Function):
    """The losses of a linear layer's outputs, by `compute`, an operator or its plain form.

    compute(*inputs, target, factors, needed, *numbers) is the operator output_loss_parts. Where the
    losses are summed, the gradients are formed in the forward pass, while the logits are there;
    but not in float16, where they would underflow without the loss scaling.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[..., Any],
        numbers: Sequence[Any],
        summed: bool,
        target: Tensor,
        *inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.compute, ctx.numbers = compute, numbers
        ctx.save_for_backward(target, *inputs)
        ctx.early = summed and inputs[0].dtype != torch.float16
        factors = torch.ones_like(target, dtype=torch.float32) if ctx.early else None
        needed = ctx.needs_input_grad[4:]
        nll, smooth, *ctx.grads = compute(*inputs, target, factors, needed, *numbers)
        loss = mixed(nll, smooth, *numbers[:2])
        if summed:
            loss, nll = loss.sum(), nll.sum()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        target, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[4:]
        # Given away rather than kept, so that they need no copy; a second backward pass through
        # a retained graph forms them anew.
        grads, ctx.grads = ctx.grads, None
        if not ctx.early or grads is None:
            factors = torch.ones_like(target, dtype=torch.float32) if ctx.early else grad
            factors = factors.expand(target.shape).contiguous()
            _, _, *grads = ctx.compute(*inputs, target, factors, needed, *ctx.numbers)
        # On a GPU, to look at the number would be to wait for it.
        if ctx.early and torch._C._functorch.is_legacy_batchedtensor(grad):  # is_grads_batched
            grads = [None if g is None else g * grad for g in grads]
        elif ctx.early and (traced() or grad.device.type != "cpu" or grad != 1):
            grads = [None if g is None else g.mul_(grad) for g in grads]
        return (*(None,) * 4, *(g if n else None for g, n in zip(grads, needed, strict=True)))


def mixed(nll: Tensor, smooth: Tensor, smooth_weight: float, nll_weight: float) -> Tensor:
    """Return the losses that label smoothing makes of the two sums, in a tensor of their own."""
    return nll_weight * nll + smooth_weight * smooth if smooth_weight else nll.clone()


def _output_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    smooth_weight: float,
    nll_weight: float,
    ignore_index: int,
    chunk_size: int | None,
    summed: bool,
) -> tuple[Tensor, Tensor]:
    nll, smooth, *_ = _output_loss_parts(
        *(features, weight, bias, table, target, None, (False,) * 4),
        *(smooth_weight, nll_weight, ignore_index, chunk_size),
    )
    loss = mixed(nll, smooth, smooth_weight, nll_weight)
    return (loss.sum(), nll.sum()) if summed else (loss, nll)


def _output_loss_fake(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    smooth_weight: float,
    nll_weight: float,
    ignore_index: int,
    chunk_size: int | None,
    summed: bool,
) -> tuple[Tensor, Tensor]:
    _check_loss(features, weight, bias, table, target, None, (False,) * 4, chunk_size)
    shape = () if summed else target.shape
    loss, nll = (features.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return loss, nll


def _output_loss_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    *tensors, target, smooth_weight, nll_weight, ignore_index, chunk_size, summed = inputs
    if not needs_gradient(*tensors):
        return below(*inputs)
    numbers = (smooth_weight, nll_weight, ignore_index, chunk_size)
    return OutputLoss.apply(output_loss_parts, numbers, summed, target, *tensors)


def _output_loss_autocast(
    features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return no_autocast(
        features.device.type, output_loss, *cast_output(features, weight, bias), *rest
    )


def cast_output(
    features: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return an output layer's inputs in the dtype that autocast has them computed in.

    On a GPU that of its matrix products. On the CPU the kernel computes in float32 whatever it is
    given, so that the widest dtype among them costs nothing, and a copy of the weight is spared.
    """
    device = features.device.type
    if device == "cpu":
        dtype = torch.promote_types(features.dtype, weight.dtype)
    else:
        dtype = torch.get_autocast_dtype(device)
    features, weight = (t if t.dtype == torch.float64 else t.to(dtype) for t in (features, weight))
    if bias is not None and bias.dtype != torch.float64:
        bias = bias.to(dtype)
    return features, weight, bias


output_loss: Operator = define(
    f"output_loss({_OUTPUT}, Tensor target, {_LOSS}, bool summed) -> (Tensor, Tensor)",
    _output_loss,
    _output_loss_fake,
    _output_loss_autograd,
    _output_loss_autocast,
)


def _output_scores(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> Tensor:
    _check_output(features, weight, bias, table)
    if on_triton(features.device):
        scores = torch.nn.functional.linear(features, weight, bias)
        return scores.float() if table is None else modulate(scores, table)
    return cpu.output_scores(*_wide(features, weight, bias, table))


def _output_scores_fake(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> Tensor:
    _check_output(features, weight, bias, table)
    return features.new_empty(features.shape[0], weight.shape[0], dtype=torch.float32)


output_scores: Operator = define(
    f"output_scores({_OUTPUT}) -> Tensor",
    _output_scores,
    _output_scores_fake,
    without_gradient("output_scores"),
    lambda features, weight, bias, table: no_autocast(
        features.device.type, output_scores, *cast_output(features, weight, bias), table
    ),
)


def _check_best(scores: Tensor, count: int) -> None:
    if scores.dim() != 2 or not 1 <= count <= scores.shape[1]:
        raise ValueError(
            f"scores must be (N, V) and count between 1 and V, got {list(scores.shape)} and {count}"
        )
    check_float("scores", scores, scores, "scores")


def _best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_best(scores, count)
    scores = scores.float()
    if on_triton(scores.device):
        values, indices = scores.topk(count)
        return values, indices, scores.logsumexp(1)
    return cpu.best_scores(scores, count)


def _best_scores_fake(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    _check_best(scores, count)
    return cpu.best_lists(scores, count)


best_scores: Operator = define(
    "best_scores(Tensor scores, int count) -> (Tensor, Tensor, Tensor)",
    _best_scores,
    _best_scores_fake,
    without_gradient("best_scores"),
    lambda scores, count: no_autocast(scores.device.type, best_scores, scores, count),
)


def _check_choice(classes: int, count: int, apart: Sequence[int]) -> None:
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
    table: Tensor | None,
    count: int,
    apart: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_output(features, weight, bias, table)
    _check_choice(weight.shape[0], count, apart)
    if on_triton(features.device):
        scores = _output_scores(features, weight, bias, table)
        columns = torch.tensor(apart, dtype=torch.int64, device=scores.device)
        others = scores.index_fill(1, columns, -torch.inf)
        return *others.topk(count), scores.logsumexp(1), scores[:, columns]
    return cpu.best_outputs(*_wide(features, weight, bias, table), count, apart)


def _best_outputs_fake(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    count: int,
    apart: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_output(features, weight, bias, table)
    _check_choice(weight.shape[0], count, apart)
    apart_scores = features.new_empty(features.shape[0], len(apart), dtype=torch.float32)
    return *cpu.best_lists(features, count), apart_scores


best_outputs: Operator = define(
    f"best_outputs({_OUTPUT}, int count, int[] apart) -> (Tensor, Tensor, Tensor, Tensor)",
    _best_outputs,
    _best_outputs_fake,
    without_gradient("best_outputs"),
    lambda features, weight, bias, *rest: no_autocast(
        features.device.type, best_outputs, *cast_output(features, weight, bias), *rest
    ),
)
