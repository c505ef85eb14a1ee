"""How an operator is defined, called and differentiated, and the checks that all of them make."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("multimax_fairseq", "DEF")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest below 1 in float32, which the kernels take it as.
MAX_DROPOUT = 1 - 2**-24


# As Triton reads it, at its import.
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, which takes tensors on the CPU."""
    return _INTERPRETED


def on_triton(device: torch.device) -> bool:
    """Whether operators on this device are Triton's kernels, not those in C++."""
    return device.type == "cuda" or interpreted()


@functools.cache
def capability(device: torch.device | str) -> int:
    """The compute capability of a GPU, as 90 for 9.0; 0 elsewhere, as in the interpreter."""
    device = torch.device(device)
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Operator:
    """An operator of torch. Called here, it runs without the dispatcher, whose ways through Python
    cost more than a decoding step's attention, unless somebody looks: a compiler, a mode, a
    profiler, a class of tensors, autocast."""

    def __init__(self, name: str, kernel: Callable[..., Any], autograd: Callable[..., Any]) -> None:
        self.overload = getattr(torch.ops.multimax_fairseq, name).default
        self.eager = functools.partial(autograd, kernel)

    def __call__(self, *inputs: Any) -> Any:
        return self.overload(*inputs) if _is_seen(inputs) else self.eager(*inputs)


def _is_seen(inputs: tuple[Any, ...]) -> bool:
    if traced() or torch._C._autograd._profiler_enabled():
        return True
    if torch.is_autocast_enabled(inputs[0].device.type):
        return True
    # A loop of few calls: this is a good part of what a decoding step's attention costs.
    for given in inputs:
        kind = type(given)
        if kind is Tensor or kind is torch.nn.Parameter:
            keys = torch._C._dispatch_keys(given).raw_repr()
            if keys not in _ORDINARY and not _is_ordinary(given, keys):
                return True
        elif kind not in _NO_TENSORS and isinstance(given, Tensor):
            return True
    return False


_NO_TENSORS = {type(None), bool, int, float}
# The keys, under which torch dispatches, of tensors that are their numbers in memory: not sparse,
# lazily negated, or wrapped.
_ORDINARY: set[int] = set()


def _is_ordinary(tensor: Tensor, keys: int) -> bool:
    for mode in (False, True):
        with torch.inference_mode(mode):
            like = torch.empty(0, device=tensor.device)
            _ORDINARY.add(torch._C._dispatch_keys(like).raw_repr())
    return keys in _ORDINARY


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    autocast: Callable[..., Any],
) -> Operator:
    """Define an operator; autograd(below, *inputs) calls `below` with them where no gradient can be
    wanted."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    operator = Operator(name, kernel, autograd)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, device)
        LIBRARY.impl(name, autocast, f"Autocast{device}")

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.overload(*inputs)

    LIBRARY.impl(name, functools.partial(autograd, below), "Autograd")
    torch.library.register_fake(f"multimax_fairseq::{name}", fake, lib=LIBRARY)
    return operator


def no_autocast(device: str, operator: Operator, *inputs: Any) -> Any:
    key = torch._C.DispatchKey.AutocastCPU if device == "cpu" else torch._C.DispatchKey.AutocastCUDA
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return operator.overload(*inputs)


def traced() -> bool:
    """Whether torch records or transforms what is called rather than only runs it."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        or transformed()
    )


def transformed() -> bool:
    """Whether torch.func or forward-mode differentiation is at work, which has no rule for us."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return True
    # For what is differentiated forwards, torch.autograd.Function says that it has no rule.
    return forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    )


class _WithoutGradient(torch.autograd.Function):
    """What a graph with gradients recorded, and runs where inputs require them, has no second
    ones: that is said where they are asked for."""

    @staticmethod
    def forward(ctx: Any, name: str, *inputs: Any) -> Any:
        ctx.name = name
        return getattr(torch.ops.multimax_fairseq, name).default(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"torch.ops.multimax_fairseq.{ctx.name} has no gradient")


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Have the derivatives of what a Function's backward returns refused, by whatever they are.

    torch's once_differentiable lets a graph that reaches its inputs in another way as well pass by.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        given = [i for i, t in enumerate(found) if t is not None]
        parts = _Once.apply(len(sources), *sources, *(found[i] for i in given))
        found = list(found)
        for i, part in zip(given, parts, strict=True):
            found[i] = part
        return tuple(found)

    return wrapper


class _Once(torch.autograd.Function):
    """Gradients as they are, in a graph of what they were formed from: it cannot be walked."""

    @staticmethod
    def forward(ctx: Any, sources: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[sources:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            "this gradient has no derivative of its own: write the function out in plain PyTorch"
        )


def without_gradient(name: str) -> Callable[..., Any]:
    """The autograd rule of an operator that has no gradient: clear words instead of zeros."""

    def autograd(below: Callable[..., Any], *inputs: Any) -> Any:
        if needs_gradient(*(x for x in inputs if isinstance(x, Tensor))):
            return _WithoutGradient.apply(name, *inputs)
        return below(*inputs)

    return autograd


# --- checks ------------------------------------------------------------------------------------


def check_float(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    if tensor.dtype not in DTYPES or tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} must be float32, float16 or bfloat16, and of the dtype of {like_name} "
            f"({like.dtype}), got {tensor.dtype}"
        )
    check_device(name, tensor, like, like_name)


def check_device(name: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    """Raise ValueError where two tensors are on different devices."""
    if tensor.device != like.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but {like_name} on {like.device}: move one of them"
        )


def check_dropout(name: str, p: float, seed: Tensor | None) -> None:
    if not 0 <= p <= MAX_DROPOUT:
        raise ValueError(f"{name} must be in [0, 1) as a float32, got {p}")
    if p > 0 and seed is None:
        raise ValueError("dropout needs a seed: give a scalar of int64 on the CPU, got None")
    if seed is not None and (seed.dim(), seed.dtype, seed.device.type) != (0, torch.int64, "cpu"):
        raise ValueError(
            f"seed must be a scalar of int64 on the CPU, got {list(seed.shape)}, {seed.dtype} on "
            f"{seed.device}"
        )


def check_table(table: Tensor, heads: int | None, like: Tensor, like_name: str) -> None:
    rows = (1, heads) if heads else (1,)
    if table.dim() != 2 or table.shape[0] not in rows or table.shape[1] not in (8, 12):
        wanted = " or ".join(map(str, dict.fromkeys(rows)))
        raise ValueError(f"table must be ({wanted}, 8 or 12), got {list(table.shape)}")
    if table.dtype != torch.float32:
        raise ValueError(f"table must be float32, got {table.dtype}")
    check_device("table", table, like, like_name)
