"""Dropout with random numbers from a hash, which cost less than reading the tensor.

On a CPU, torch's dropout spends nine tenths of its time on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import choose
from multimax_fairseq.ops.checks import MAX_DROPOUT, check_cpu, check_dropout, check_float
from multimax_fairseq.ops.registration import Operator, define, needs_gradient


def draw_seed() -> Tensor:
    """Return a seed from torch's CPU generator, which needs no synchronisation."""
    return torch.randint(2**31 - 1, (), device="cpu")


def dropout(input: Tensor, p: float, backend: str = "auto") -> Tensor:
    """Set each entry to 0 with probability p, or divide it by 1 - p.

    Equivalent to: torch.nn.functional.dropout(input, p), with other random numbers

    Args:
        input: any shape.
        p: in [0, 1].
        backend: "auto", "cpp", "triton" or "plain"; the kernel runs for "auto" and "cpp" on a CPU.

    The caller has checked the arguments. Inputs that the kernel does not support use torch's own
    dropout.
    """
    if p == 0:
        return input
    unsupported = f"p is above {MAX_DROPOUT}" if p > MAX_DROPOUT else ""
    if choose("dropout", backend, input, unsupported=unsupported) == "cpp":
        return dropout_operator(input, draw_seed(), p)
    return F.dropout(input, p)


def _check(input: Tensor, seed: Tensor, p: float) -> None:
    check_float("input", input, input, "input")
    check_cpu("input", input)
    check_dropout("p", p, seed)


def _kernel(input: Tensor, seed: Tensor, p: float) -> Tensor:
    """The same entries are dropped for one shape and seed, on any number of threads."""
    entries = native.cast(input, torch.float32).contiguous()
    out = torch.empty_like(entries)
    native.call(
        "drop",
        native.Drop,
        count=entries.numel(),
        threads=torch.get_num_threads(),
        probability=p,
        seed=int(seed),
        entries=entries,
        out=out,
    )
    return native.cast(out, input.dtype)


def _fake(input: Tensor, seed: Tensor, p: float) -> Tensor:
    return input.new_empty(input.shape)


class _Dropout(torch.autograd.Function):
    """Saves the seed only: the backward pass drops the same entries of the gradient."""

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
        return None, dropout_operator(grad, seed, ctx.p), None, None


def _autograd(below: Callable[..., Any], input: Tensor, seed: Tensor, p: float) -> Any:
    return _Dropout.apply(below, input, seed, p) if needs_gradient(input) else below(input, seed, p)


dropout_operator: Operator = define(
    "dropout(Tensor input, Tensor seed, float p) -> Tensor",
    check=_check,
    kernel=_kernel,
    fake=_fake,
    autograd=_autograd,
)
