"""Defines operators with torch.library, and calls them without the dispatcher.

It does not use `torch.library.custom_op`, whose Python wrappers cost more than the attention of one
decoding step.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from multimax_fairseq.ops.backend import traced

LIBRARY = torch.library.Library("multimax_fairseq", "DEF")
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    float: "float",
    int: "int",
    int | None: "int?",
    str: "str",
    str | None: "str?",
}


class Operator:
    """A registered operator, whose caller has checked the arguments.

    In plain eager mode the call bypasses the dispatcher, which costs more than one decoding step.
    The same operators in `torch.ops.multimax_fairseq` check their arguments.
    """

    def __init__(self, name: str, kernel: Callable[..., Any], autograd: Callable[..., Any]) -> None:
        self.overload = getattr(torch.ops.multimax_fairseq, name).default
        self.eager = functools.partial(autograd, kernel)

    def __call__(self, *inputs: Any) -> Any:
        return self.overload(*inputs) if _needs_dispatcher(inputs) else self.eager(*inputs)


def _needs_dispatcher(inputs: tuple[Any, ...]) -> bool:
    """Whether a compiler, mode, profiler, tensor subclass or autocast must see the call."""
    if traced() or torch._C._autograd._profiler_enabled():
        return True
    if torch.is_autocast_enabled(inputs[0].device.type):
        return True
    # A plain loop, because this runs in each decoding step.
    for value in inputs:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            keys = torch._C._dispatch_keys(value).raw_repr()
            if keys not in _ORDINARY and not _is_ordinary(value, keys):
                return True
        elif kind not in _NOT_TENSORS and isinstance(value, Tensor):
            return True
    return False


_NOT_TENSORS = {type(None), bool, int, float, str}
# Dispatch keys of dense tensors that are not lazily negated, conjugated or wrapped.
_ORDINARY: set[int] = set()


def _is_ordinary(tensor: Tensor, keys: int) -> bool:
    for mode in (False, True):
        with torch.inference_mode(mode):
            like = torch.empty(0, device=tensor.device)
            _ORDINARY.add(torch._C._dispatch_keys(like).raw_repr())
    return keys in _ORDINARY


def schema_of(arguments: type[tuple[Any, ...]]) -> str:
    """Return the fields of a NamedTuple as arguments of an operator's schema."""
    hints = typing.get_type_hints(arguments)
    defaults = {name: f"={value}" for name, value in arguments._field_defaults.items()}  # type: ignore[attr-defined]
    return ", ".join(
        f"{_SCHEMA_TYPES[hint]} {name}{defaults.get(name, '')}" for name, hint in hints.items()
    )


def define(
    schema: str,
    *,
    check: Callable[..., None],
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    autocast: Callable[..., Any] | None = None,
) -> Operator:
    """Define an operator of `torch.ops.multimax_fairseq`.

    Args:
        schema: as torch.library takes it.
        check: raises ValueError for arguments that the kernel cannot take. It runs only when the
            operator is called through the dispatcher.
        kernel: computes the result, on any device.
        fake: returns empty outputs of the right shape and dtype.
        autograd: autograd(below, *inputs) computes the outputs and records the gradient. `below`
            computes the outputs without autograd.
        autocast: autocast(*inputs) returns the inputs in the dtypes that autocast wants; None
            leaves them as they are.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)
    operator = Operator(name, kernel, autograd)

    def checked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            check(*inputs)
            return function(*inputs)

        return call

    def without_autocast(*inputs: Any) -> Any:
        keys = torch._C.DispatchKey
        key = keys.AutocastCPU if inputs[0].device.type == "cpu" else keys.AutocastCUDA
        inputs = inputs if autocast is None else autocast(*inputs)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return operator.overload(*inputs)

    def below(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.overload(*inputs)

    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, checked(kernel), device)
        LIBRARY.impl(name, without_autocast, f"Autocast{device}")
    LIBRARY.impl(name, functools.partial(autograd, below), "Autograd")
    torch.library.register_fake(f"multimax_fairseq::{name}", checked(fake), lib=LIBRARY)
    return operator


def needs_gradient(*inputs: Any) -> bool:
    """Whether the autograd rule must run for these inputs of an operator."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return True
    # Under forward-mode differentiation, torch.autograd.Function raises the right error.
    return forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in inputs
    )


class _WithoutGradient(torch.autograd.Function):
    """Runs an operator that has no gradient; the backward pass raises RuntimeError."""

    @staticmethod
    def forward(ctx: Any, name: str, *inputs: Any) -> Any:
        ctx.name = name
        return getattr(torch.ops.multimax_fairseq, name).default(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(f"torch.ops.multimax_fairseq.{ctx.name} has no gradient")


def without_gradient(name: str) -> Callable[..., Any]:
    """Return the autograd rule of an operator that has no gradient: an error instead of zeros."""

    def autograd(below: Callable[..., Any], *inputs: Any) -> Any:
        if needs_gradient(*inputs):
            return _WithoutGradient.apply(name, *inputs)
        return below(*inputs)

    return autograd


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a Function's backward so that second derivatives raise NotImplementedError.

    torch's once_differentiable stays silent if the graph reaches the inputs by another path.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = list(backward(ctx, *grads))
        sources = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
        indices = [i for i, t in enumerate(results) if t is not None]
        tensors = _Once.apply(len(sources), *sources, *(results[i] for i in indices))
        for i, tensor in zip(indices, tensors, strict=True):
            results[i] = tensor
        return tuple(results)

    return wrapper


class _Once(torch.autograd.Function):
    """Identity on gradients that depend on `sources`; its own backward pass raises."""

    @staticmethod
    def forward(ctx: Any, sources: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors[sources:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise NotImplementedError(
            "this gradient has no derivative of its own: write the function out in plain PyTorch"
        )
