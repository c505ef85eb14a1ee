"""The operator dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.kernels import cpu
from multimax_fairseq.kernels.operators.definition import (
    Operator,
    check_dropout,
    check_float,
    define,
    needs_gradient,
    no_autocast,
)


def _check(input: Tensor, seed: Tensor, p: float) -> None:
    check_float("input", input, input, "input")
    if input.device.type not in ("cpu", "meta"):
        raise ValueError(
            f"input is on {input.device}: this dropout is for the CPU, elsewhere use torch's"
        )
    check_dropout("p", p, seed)


def _dropout(input: Tensor, seed: Tensor, p: float) -> Tensor:
    _check(input, seed, p)
    return cpu.dropout(input, int(seed), p)


def _dropout_fake(input: Tensor, seed: Tensor, p: float) -> Tensor:
    _check(input, seed, p)
    return input.new_empty(input.shape)


class _Dropout(torch.autograd.Function):
    """Keeps nothing but the seed: the same entries are dropped from the gradient."""

    @staticmethod
    def forward(
        ctx: Any, below: Callable[..., Any], input: Tensor, seed: Tensor, p: float
    ) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p = p
        return below(input, seed, p)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (seed,) = ctx.saved_tensors
        return None, dropout(grad, seed, ctx.p), None, None


def _dropout_autograd(below: Callable[..., Any], input: Tensor, seed: Tensor, p: float) -> Any:
    if needs_gradient(input):
        return _Dropout.apply(below, input, seed, p)
    return below(input, seed, p)


dropout: Operator = define(
    "dropout(Tensor input, Tensor seed, float p) -> Tensor",
    _dropout,
    _dropout_fake,
    _dropout_autograd,
    # It keeps the dtype, as torch's.
    lambda input, seed, p: no_autocast(input.device.type, dropout, input, seed, p),
)
