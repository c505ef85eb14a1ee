"""The operators modulate, modulate_backward and tails."""

from __future__ import annotations

from collections.abc import Callable
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
    without_gradient,
)


def _check_modulate(scores: Tensor, table: Tensor) -> None:
    check_float("scores", scores, scores, "scores")
    heads = scores.shape[-3] if scores.dim() >= 3 else None
    check_table(table, heads, scores, "scores")


def _modulate(scores: Tensor, table: Tensor) -> Tensor:
    _check_modulate(scores, table)
    if on_triton(scores.device):
        from multimax_fairseq.kernels import triton_modulator

        return triton_modulator.modulate(scores, table)
    return cpu.modulate(scores, table)


def _modulate_fake(scores: Tensor, table: Tensor) -> Tensor:
    _check_modulate(scores, table)
    return scores.new_empty(scores.shape, dtype=torch.float32)


class _Modulate(torch.autograd.Function):
    """Keeps only the scores for the backward pass: the distances are cheap to form again."""

    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], scores: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(scores, table)
        return below(scores, table)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, *modulate_backward(grad, *ctx.saved_tensors)


def _modulate_autograd(below: Callable[..., Any], scores: Tensor, table: Tensor) -> Any:
    if needs_gradient(scores, table):
        return _Modulate.apply(below, scores, table)
    return below(scores, table)


def _modulate_autocast(scores: Tensor, table: Tensor) -> Tensor:
    # Any dtype is computed in float32: there is nothing to cast.
    return no_autocast(scores.device.type, modulate, scores, table)


modulate: Operator = define(
    "modulate(Tensor scores, Tensor table) -> Tensor",
    _modulate,
    _modulate_fake,
    _modulate_autograd,
    _modulate_autocast,
)


def _modulate_backward(grad: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    _check_gradient(grad, scores)
    _check_modulate(scores, table)
    if on_triton(scores.device):
        from multimax_fairseq.kernels import triton_modulator

        return triton_modulator.modulate_backward(grad, scores, table)
    return cpu.modulate_backward(grad, scores, table)


def _modulate_backward_fake(grad: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    _check_gradient(grad, scores)
    _check_modulate(scores, table)
    return scores.new_empty(scores.shape), table.new_empty(table.shape)


def _check_gradient(grad: Tensor, output: Tensor) -> None:
    if grad.shape != output.shape:
        raise ValueError(f"grad must be {list(output.shape)}, got {list(grad.shape)}")
    check_float("grad", grad, grad, "grad")
    check_device("grad", grad, output, "the output")


modulate_backward: Operator = define(
    "modulate_backward(Tensor grad, Tensor scores, Tensor table) -> (Tensor, Tensor)",
    _modulate_backward,
    _modulate_backward_fake,
    without_gradient("modulate_backward"),
    lambda grad, scores, table: no_autocast(
        scores.device.type, modulate_backward, grad, scores, table
    ),
)


def _check_tails(table: Tensor) -> None:
    if table.dim() != 2 or table.shape[0] == 0 or table.shape[1] != 8:
        raise ValueError(f"table must be (1 or more, 8), got {list(table.shape)}")
    if table.dtype != torch.float32:
        raise ValueError(f"table must be float32, got {table.dtype}")


def _tails(table: Tensor) -> tuple[Tensor, Tensor]:
    _check_tails(table)
    if on_triton(table.device):
        from multimax_fairseq.kernels import triton_modulator

        return triton_modulator.tails(table)
    return cpu.tails(table)


def _tails_fake(table: Tensor) -> tuple[Tensor, Tensor]:
    _check_tails(table)
    return table.new_empty(len(table), 4), table.new_empty(len(table), 4, 8)


class _Tails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], table: Tensor) -> tuple[Tensor, Tensor]:
        out, jacobian = below(table)
        ctx.save_for_backward(jacobian)
        ctx.mark_non_differentiable(jacobian)
        return out, jacobian

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[None, Tensor]:
        (jacobian,) = ctx.saved_tensors
        # Not a matrix product, which autocast or a GPU may round.
        return None, (grad.unsqueeze(-1) * jacobian).sum(1)


def _tails_autograd(below: Callable[..., Any], table: Tensor) -> Any:
    return _Tails.apply(below, table) if needs_gradient(table) else below(table)


tails: Operator = define(
    "tails(Tensor table) -> (Tensor, Tensor)",
    _tails,
    _tails_fake,
    _tails_autograd,
    lambda table: no_autocast(table.device.type, tails, table),
)
