"""Attention: the operators of the fused kernels, and the same function in plain PyTorch.

    O = dropout(f(scale * Q K^T + mask)) V

f is softmax, with MultiMax's modulator and a sink, or a row function such as entmax. The kernels do
not store the (T, S) weights.

A module calls `compute_attention` with `AttentionInputs`. This function calls `fused_attention`,
which builds an `AttentionCall` for the operator `attention`, or computes scores, probabilities and
context itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import (
    KERNELS,
    choose,
    has_row_library,
    is_autocast,
    is_triton_requested,
    on_triton,
    requested,
    select,
    transformed,
)
from multimax_fairseq.ops.checks import (
    DTYPES,
    MAX_DROPOUT,
    check_device,
    check_dropout,
    check_flag,
    check_float,
    check_number,
    check_tensor,
    is_finite,
)
from multimax_fairseq.ops.dropout import draw_seed, dropout
from multimax_fairseq.ops.masks import attention_key_counts, causal_mask
from multimax_fairseq.ops.modulator import (
    CAP_COLUMNS,
    check_parameters,
    fits_heads,
    has_parameters,
    packed_parameters,
)
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    differentiable_once,
    needs_gradient,
    schema_of,
    without_gradient,
)
from multimax_fairseq.ops.row_function import (
    FUNCTIONS,
    LEARNED,
    ON_TRITON,
    WITHOUT_GRADIENT,
    RowFunction,
    check_row_name,
)

# The largest head size on a GPU, where a tile must fit into shared memory.
MAX_HEAD_SIZE = 128


class AttentionInputs(NamedTuple):
    """The inputs of one attention, as modules pass them. A frozen dataclass is slower to create.

    Attributes:
        query: (B, H, T, D), floating.
        key, value: (B, H, S, D) and (B, H, S, any size), of query's dtype.
        mask: broadcastable to (B, H, T, S). Bool: True excludes. Float: added to the scores, after
            a modulator.
        is_causal: query t attends to keys up to t; with a mask, both hold.
        dropout_p: probability of dropping an attention probability.
        scale: default 1 / sqrt(D).
        hidden: (B, 1, T, any size), the hidden states from which the queries are projected. Gates
            and asentmax read them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    hidden: Tensor | None = None


class AttentionCall(NamedTuple):
    """The arguments of the operator `attention`.

    Attributes:
        query: (B, H, T, D), float32, float16 or bfloat16, any strides.
        key, value: (B, H, S, D), of the same dtype.
        parameters: of the modulator, (1 or H, 8 or 12), or (1, 3) for a soft-cap; float32, from
            `packed_parameters`. None is softmax.
        factor: (B, H, T) float32, multiplies the modulated scores of each query; None for none.
            Only with parameters of `Modulator`, on the CPU.
        sink: (H,) float32, the score of an entry without a key; None for no sink.
        row_parameter: (H,) float32, of the row function, or None.
        mask: (B or 1, H or 1, T or 1, S or 1). Bool: True excludes. float32: added to the modulated
            scores, -inf excludes. A query with no key left gets zeros.
        seed: scalar int64 on the CPU, for dropout; its lower 31 bits count.
        is_causal: query t attends to keys up to t; with a mask, both hold.
        dropout_p: probability of dropping an attention probability, below 1.
        scale: finite.
        low, high: orders of the modulator's sides, 0 to 2; the Triton kernels compile for them.
        function, header: the name and the header of a `RowFunction`, which takes neither parameters
            nor sink; None is softmax.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    parameters: Tensor | None
    factor: Tensor | None
    sink: Tensor | None
    row_parameter: Tensor | None
    mask: Tensor | None
    seed: Tensor | None
    is_causal: bool
    dropout_p: float
    scale: float
    low: int
    high: int
    function: str | None
    header: str | None

    @property
    def is_empty(self) -> bool:
        """Whether there is no query or no key."""
        return self.query.numel() == 0 or self.key.numel() == 0


# The order of the fields: tensors with a gradient, other tensors, settings.
_DIFFERENTIABLE = ("query", "key", "value", "parameters", "factor", "sink", "row_parameter")
_TENSORS = (*_DIFFERENTIABLE, "mask", "seed")
_SETTINGS = AttentionCall._fields[len(_TENSORS) :]
_differentiable = operator.attrgetter(*_DIFFERENTIABLE)
_tensors = operator.attrgetter(*_TENSORS)
_settings = operator.attrgetter(*_SETTINGS)
_ARGUMENTS = schema_of(AttentionCall)


# --- checks ------------------------------------------------------------------------------------


def supports_head_size(device: torch.device, size: int) -> bool:
    return size <= MAX_HEAD_SIZE or not on_triton(device)


def check_attention(inputs: AttentionInputs, mask_name: str = "mask") -> None:
    """Raise TypeError or ValueError for invalid inputs, in any backend."""
    query, key, value, mask, is_causal, dropout_p, scale, _ = inputs
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() < 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating-point (..., length, size), got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        check_device(name, tensor, query, "query")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            "query and key must agree in their last dimension, and key and value in their length, "
            f"got query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        )
    if query.dtype != key.dtype and not is_autocast(query.device.type):
        raise ValueError(f"query is {query.dtype}, but key {key.dtype}: cast one of them")
    batch = query.shape[:-2]
    if key.shape[:-2] != batch or value.shape[:-2] != batch:
        try:
            batch = torch.broadcast_shapes(batch, key.shape[:-2], value.shape[:-2])
        except RuntimeError:
            raise ValueError(
                "the leading dimensions of query, key and value must be broadcastable, got "
                f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
            ) from None
    if mask is not None:
        check_mask(mask_name, mask, (*batch, query.shape[-2], key.shape[-2]), query)
    check_flag("is_causal", is_causal)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if scale is not None:
        check_number("scale", scale)


def check_mask(name: str, mask: Tensor, full: tuple[int, ...], query: Tensor) -> None:
    check_tensor(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        kinds = "True may attend" if name == "attn_mask" else "True excludes"
        raise ValueError(
            f"{name} must be bool ({kinds}) or floating-point (added), got {mask.dtype}"
        )
    check_device(name, mask, query, "query")
    fits = mask.dim() <= len(full) and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must be broadcastable to {list(full)}, got {list(mask.shape)}")


def check_call(call: AttentionCall) -> None:
    """Raise ValueError for a call that the kernels cannot take."""
    query = call.query
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)
        if tensor.dim() != 4:
            raise ValueError(f"{name} must be (B, H, length, D), got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    batch, heads, queries, size = query.shape
    keys = call.key.shape[2]
    if call.key.shape != (batch, heads, keys, size) or call.value.shape != call.key.shape:
        raise ValueError(
            f"key and value must be ({batch}, {heads}, S, {size}), as query, got "
            f"{list(call.key.shape)} and {list(call.value.shape)}"
        )
    if not supports_head_size(query.device, size):
        raise ValueError(f"head sizes above {MAX_HEAD_SIZE} are not supported on a GPU, got {size}")
    check_mapping(call)
    if (factor := call.factor) is not None:
        check_takes_factor("factor", call)
        if factor.shape != query.shape[:-1] or factor.dtype != torch.float32:
            raise ValueError(
                f"factor must be float32 {list(query.shape[:-1])}, got {factor.dtype} "
                f"{list(factor.shape)}"
            )
        check_device("factor", factor, query, "query")
    if call.mask is not None:
        full = (batch, heads, queries, keys)
        if call.mask.dim() != 4:
            raise ValueError(
                f"mask must be 4-dimensional and broadcastable to {list(full)}, got "
                f"{list(call.mask.shape)}"
            )
        check_mask("mask", call.mask, full, query)
        if call.mask.dtype not in (torch.bool, torch.float32):
            raise ValueError(
                f"mask must be bool (True excludes) or float32 (added), got {call.mask.dtype}"
            )
    if keys >= 2**31:
        raise ValueError(f"key must have fewer than 2**31 rows, got {keys}")
    check_dropout("dropout_p", call.dropout_p, call.seed)
    if call.low not in (0, 1, 2) or call.high not in (0, 1, 2):
        raise ValueError(
            f"the orders low and high must be 0, 1 or 2, got {call.low} and {call.high}"
        )


def check_mapping(call: Any) -> None:
    """Raise ValueError for a modulator, sink, scale or row function that the kernels cannot take.

    Args:
        call: an `AttentionCall` or a `StepCall`.
    """
    query, parameters = call.query, call.parameters
    if parameters is not None:
        check_parameters(parameters, query.shape[1], query, "query")
    if call.sink is not None:
        check_per_head("sink", call.sink, query, "score")
    if not -torch.inf < call.scale < torch.inf:
        raise ValueError(f"scale must be finite, got {call.scale}")
    _check_row_function(call)


def _check_row_function(call: Any) -> None:
    function, header, row_parameter = call.function, call.header, call.row_parameter
    if function is None:
        if row_parameter is not None or header is not None:
            raise ValueError("row_parameter and header belong to a function: pass its name too")
        return
    if call.parameters is not None or call.sink is not None:
        raise ValueError(
            f"the row function {function} takes neither parameters nor sink: pass None"
        )
    check_row_name(function, header, row_parameter is not None)
    if row_parameter is not None:
        check_per_head("row_parameter", row_parameter, call.query, "number")
    if on_triton(call.query.device):
        if header is not None or function not in ON_TRITON:
            raise ValueError(f"{function} has no kernel on a GPU: use the mapping's own function")
    elif native.row_library(header, function) is None:
        raise ValueError(f"there is no compiled row function {function}: the log says why")


def check_per_head(name: str, value: Tensor, query: Tensor, what: str) -> None:
    """Raise ValueError unless the value is float32 (H,), on query's device."""
    heads = query.shape[1]
    if tuple(value.shape) != (heads,) or value.dtype != torch.float32:
        raise ValueError(
            f"{name} must be float32 ({heads},), one {what} per head, got {value.dtype} "
            f"{list(value.shape)}"
        )
    check_device(name, value, query, "query")


def _check_learned_parameter(call: AttentionCall) -> None:
    """Raise ValueError if the parameter needs a gradient that the row function does not give."""
    if call.row_parameter is None or not call.row_parameter.requires_grad:
        return
    assert call.function is not None
    if call.header is None:
        learns = call.function in LEARNED
    else:
        kernels = native.row_library(call.header, call.function)
        learns = kernels is not None and bool(kernels.row_learns())
    if not learns:
        remedy = "detach it"
        if call.header is not None:
            remedy += f", or define learns and parameter_gradient in {call.header}"
        raise ValueError(f"the parameter of {call.function} has no gradient: {remedy}")


# --- torch.ops.multimax_fairseq.attention ------------------------------------------------------


def _attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return the output and, if the last input is True, the row statistics for the gradient."""
    call, keep = AttentionCall(*inputs[:-1]), inputs[-1]
    query = call.query
    if on_triton(query.device) and not call.is_empty:
        from multimax_fairseq.ops.triton.attention import attention_forward
        from multimax_fairseq.ops.triton.row_attention import row_attention_forward

        forward = attention_forward if call.function is None else row_attention_forward
        output, statistics = forward(call)
        return output, statistics if keep else statistics.new_empty(0)
    statistics = query.new_empty(_statistics_shape(call, keep), dtype=torch.float32)
    if call.is_empty:
        return native.dense_like(query).zero_(), statistics.zero_()
    output = native.dense_like(query, torch.float32)
    native.call(
        kernel_name("attention_forward", call.function),
        native.Attention,
        output=output,
        statistics=statistics if keep else None,
        **_fields_of(call),
    )
    return native.cast(output, query.dtype), statistics


def _statistics_shape(call: AttentionCall, keep: bool) -> tuple[int, ...]:
    """Return the shape of the row statistics.

    For softmax, C++ stores the maximum score and 1 / sum of each row, Triton the log-sum-exp. A row
    function has three, as in cpp/rows.h.
    """
    if not keep:
        return (0,)
    batch, heads, queries, _ = call.query.shape
    count = 3 if call.function is not None else 1 if on_triton(call.query.device) else 2
    return batch, heads, count, queries


def _attention_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    call, keep = AttentionCall(*inputs[:-1]), inputs[-1]
    shape = _statistics_shape(call, keep)
    return native.dense_like(call.query), call.query.new_empty(shape, dtype=torch.float32)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, below: Callable[..., Any], *inputs: Any) -> tuple[Tensor, Tensor]:
        call = AttentionCall(*inputs)
        output, statistics = below(*call, True)
        kept = output if _needs_output(call) else None
        ctx.save_for_backward(kept, statistics, *_tensors(call))
        ctx.settings = _settings(call)
        ctx.mark_non_differentiable(statistics)
        ctx.set_materialize_grads(False)  # the gradient of the statistics is not read
        return output, statistics

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * (1 + len(AttentionCall._fields))
        # Read once: under activation checkpointing, each access computes them again.
        output, statistics, *tensors = ctx.saved_tensors
        found = attention_backward(grad, output, statistics, *tensors, *ctx.settings)
        grads = (
            None if x is None else gradient for x, gradient in zip(tensors, found, strict=False)
        )
        # None for `below`, the mask, the seed and the settings.
        return (None, *grads, None, None, *(None for _ in _SETTINGS))


def _needs_output(call: AttentionCall) -> bool:
    """Whether the backward pass reads the output: Triton's does, for softmax."""
    return call.function is None and on_triton(call.query.device)


def _attention_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    if not needs_gradient(*inputs):
        return below(*inputs)
    call = AttentionCall(*inputs[:-1])
    if call.mask is not None and call.mask.requires_grad:
        raise ValueError("mask gets no gradient here: scaled_dot_product_attention gives it one")
    if call.function in WITHOUT_GRADIENT and call.header is None:
        raise ValueError(f"{call.function} has no gradient here: use the mapping's own function")
    _check_learned_parameter(call)
    return _Attention.apply(below, *call)


def _to_autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Any, ...]:
    """Cast as torch does for its own attention; other tensors stay float32."""
    dtype = torch.get_autocast_dtype(query.device.type)
    parts = (t.to(dtype) if t.dtype in DTYPES else t for t in (query, key, value))
    return *parts, *rest


attention: Operator = define(
    f"attention({_ARGUMENTS}, bool keep) -> (Tensor, Tensor)",
    check=lambda *inputs: check_call(AttentionCall(*inputs[:-1])),
    kernel=_attention,
    fake=_attention_fake,
    autograd=_attention_autograd,
    autocast=_to_autocast,
)


# --- torch.ops.multimax_fairseq.attention_backward ---------------------------------------------


def _check_backward(grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any) -> None:
    call = AttentionCall(*inputs)
    check_call(call)
    query = call.query
    if output is None and _needs_output(call):
        raise ValueError("output is None: pass that of the forward pass")
    for name, tensor in (("grad", grad), ("output", output)):
        if tensor is None:
            continue
        if tensor.shape != query.shape:
            raise ValueError(f"{name} must be {list(query.shape)}, got {list(tensor.shape)}")
        check_float(name, tensor, query, "query")
    shape = _statistics_shape(call, True)
    if tuple(statistics.shape) != shape or statistics.dtype != torch.float32:
        raise ValueError(
            f"statistics must be float32 {list(shape)}, of a call with keep=True, got "
            f"{statistics.dtype} {list(statistics.shape)}"
        )
    check_device("statistics", statistics, query, "query")
    if not statistics.is_contiguous():
        raise ValueError("statistics must be contiguous, as the forward pass gave them")


def _attention_backward(
    grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of the first seven fields; empty for None."""
    call = AttentionCall(*inputs)
    wanted = dict(zip(_DIFFERENTIABLE, _differentiable(call), strict=True))
    if call.is_empty:
        grads = {name: native.dense_like(x).zero_() for name, x in wanted.items() if x is not None}
    elif on_triton(call.query.device):
        from multimax_fairseq.ops.triton import attention as softmax_attention
        from multimax_fairseq.ops.triton import row_attention

        if call.function is None:
            grads = softmax_attention.attention_backward(grad, output, statistics, call)
        else:
            grads = row_attention.row_attention_backward(grad, statistics, call)
    else:
        grads = {
            name: native.dense_like(x, torch.float32) for name, x in wanted.items() if x is not None
        }
        fields: dict[str, Any] = {f"grad_{name}": x for name, x in grads.items()}
        native.call(
            kernel_name("attention_backward", call.function),
            native.Attention,
            **_fields_of(call),
            statistics=statistics,
            grad_output=native.wide(grad),
            **fields,
        )
        for name in ("query", "key", "value"):
            grads[name] = native.cast(grads[name], call.query.dtype)
    for name, x in wanted.items():
        if x is None:  # outputs of an operator must not share memory
            grads[name] = call.query.new_empty(0, dtype=torch.float32)
        elif name not in grads:
            grads[name] = torch.zeros_like(x, memory_format=torch.contiguous_format)
    return tuple(map(grads.__getitem__, wanted))


def _attention_backward_fake(
    grad: Tensor, output: Tensor | None, statistics: Tensor, *inputs: Any
) -> tuple[Tensor, ...]:
    call = AttentionCall(*inputs)
    of_scalars = (
        call.query.new_empty((0,) if x is None else x.shape, dtype=torch.float32)
        for x in (call.parameters, call.factor, call.sink, call.row_parameter)
    )
    return *(native.dense_like(x) for x in (call.query, call.key, call.value)), *of_scalars


attention_backward: Operator = define(
    f"attention_backward(Tensor grad, Tensor? output, Tensor statistics, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    kernel=_attention_backward,
    fake=_attention_backward_fake,
    autograd=without_gradient("attention_backward"),
)


# --- C++ ---------------------------------------------------------------------------------------


def kernel_name(name: str, function: str | None) -> str:
    """Return the name of the C++ function of softmax, or of row functions."""
    return name if function is None else f"row_{name}"


def _fields_of(call: AttentionCall) -> dict[str, Any]:
    """Return the fields of `native.Attention` that the forward and the backward pass share."""
    batch, heads, queries, size = call.query.shape
    keys = call.key.shape[2]
    starts, ends, needs_mask = windows(batch, queries, keys, call.mask, call.is_causal)
    fields: dict[str, Any] = {
        "batch": batch,
        "heads": heads,
        "queries": queries,
        "keys": keys,
        "size": size,
        "threads": torch.get_num_threads(),
        "query": native.wide(call.query),
        "key": native.wide(call.key),
        "value": native.wide(call.value),
        "seed": 0 if call.seed is None else int(call.seed),
        "starts": starts,
        "ends": ends,
        "is_causal": call.is_causal,
        "dropout": call.dropout_p,
        "scale": call.scale,
        "factor": None if call.factor is None else call.factor.contiguous(),
        **mapping_fields(call),
    }
    if needs_mask and call.mask is not None:
        fields["mask"] = _mask_of(call.mask)
    return fields


def mapping_fields(call: Any) -> dict[str, Any]:
    """Return the fields of `native.Attention` for the mapping, with `kernels`, its library.

    Args:
        call: an `AttentionCall` or a `StepCall`.
    """
    fields: dict[str, Any] = {}
    if call.parameters is not None:
        columns = call.parameters.shape[1]
        fields["parameters"], fields["columns"] = call.parameters.contiguous(), columns
        fields["head_stride"] = columns if len(call.parameters) > 1 else 0
    for name in ("sink", "row_parameter"):
        if (value := getattr(call, name)) is not None:
            fields[name] = value.contiguous()
    if call.function is not None:
        fields["kernels"] = native.row_library(call.header, call.function)
        fields["function"] = FUNCTIONS.index(call.function) if call.header is None else 0
    return fields


def _mask_of(mask: Tensor) -> native.Mask:
    strides = [0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True)]
    return native.Mask(mask.data_ptr(), mask.dtype == torch.float32, tuple(strides))


def windows(
    batch: int, queries: int, keys: int, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return which keys each query may attend to, as starts <= s < ends.

    Args:
        mask, is_causal: as in `AttentionCall`.

    Returns:
        starts and ends, (batch, queries) int32, or None for all keys that `is_causal` allows; and
        whether the kernel must read the mask too, because windows do not describe it.
    """
    if mask is None or mask.shape[1] > 1:
        return None, None, mask is not None
    starts, ends = torch.empty(2, batch, queries, dtype=torch.int32, device="cpu")
    is_whole = native.find_windows(_mask_of(mask), batch, queries, keys, is_causal, starts, ends)
    return starts, ends, not is_whole


# --- plain PyTorch -----------------------------------------------------------------------------


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return attention scores, (B, H, T, S): scale * Q K^T.

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D).
        scale: default 1 / sqrt(D).
    """
    if scale is None:
        scale = _default_scale(query)
    # Scaling the query rounds half-precision scores once, as torch's own attention does.
    return (query * scale) @ key.transpose(-2, -1)


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1], 1))


def weighted_values(
    probs: Tensor, value: Tensor, dropout_p: float, backend: str = "auto"
) -> Tensor:
    """Return dropout(probs, dropout_p) @ value, in the dtype of value."""
    return dropout(probs.to(value.dtype), dropout_p, backend) @ value


# --- the choice of a kernel --------------------------------------------------------------------


def compute_attention(
    inputs: AttentionInputs,
    name: str,
    normalize: Callable[[Tensor, Tensor | None], Tensor],
    kernel_arguments: dict[str, Any] | None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return the context and, unless a kernel computes it, the probabilities.

    Args:
        inputs: the caller has run `check_attention`.
        name: of the mapping, for errors.
        normalize: (scores, mask) -> probabilities, in plain PyTorch.
        kernel_arguments: of `fused_attention`; None uses plain PyTorch.
        backend: as `scaled_dot_product_attention`.

    Raises:
        ValueError: the requested backend does not exist, or has no kernel for this call.
    """
    if kernel_arguments is not None:
        context = fused_attention(inputs, backend, **kernel_arguments)
        if context is not None:
            return context, None
    requested(backend)  # raises for an unknown backend
    if backend in KERNELS:
        where = (
            "under torch.func, forward mode or torch.jit.trace"
            if transformed()
            else "with these arguments"
        )
        raise ValueError(
            f"no {backend} kernel computes {name!r} {where}: pass backend='auto' to use plain "
            "PyTorch"
        )
    query, key, value, mask, is_causal, dropout_p, scale, _ = inputs
    if is_causal:
        mask = causal_mask(mask, query.shape[-2], key.shape[-2], query.device)
    probs = normalize(attention_scores(query, key, scale), mask)
    return weighted_values(probs, value, dropout_p, backend), probs


def fused_attention(
    inputs: AttentionInputs,
    backend: str = "auto",
    *,
    modulator: Any = None,
    sink: float | Tensor | None = None,
    length_scale: float | Tensor | None = None,
    growth: tuple[float | Tensor, float | Tensor] | None = None,
    row: RowFunction | None = None,
) -> Tensor | None:
    """Return the attention output from a kernel, or None if no kernel can compute it.

    Args:
        inputs: the caller has run `check_attention`.
        modulator: None is softmax.
        sink: the score of an entry without a key, for all heads or per head.
        length_scale: as `ssmax`; with a modulator, as the outer_scale of `multimax`.
        growth: beta and gamma of `asentmax`.
        row: a row function in place of softmax.
    """
    query, key, value, mask, is_causal, dropout_p, scale, _ = inputs
    # The kernels need equal sizes of key and value. Zero padding changes no score.
    size, value_size = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    unsupported = _unsupported_call(inputs, size, growth, row)
    parameters: Tensor | None = None
    low = high = 0
    if not unsupported:
        heads = query.shape[1]
        unsupported = unsupported_mapping(query, heads, backend, modulator, sink, length_scale, row)
        if not unsupported and modulator is not None:
            parameters, low, high = packed_parameters(modulator, query.device)
            unsupported = unsupported_parameters(
                modulator, parameters, length_scale, heads, query.device
            )
    if choose("attention", backend, query, key, value, unsupported=unsupported) == "plain":
        return None
    factor: Tensor | None = None
    if length_scale is not None or growth is not None:
        counts = attention_key_counts(query, key, mask, is_causal)
        factor = row_factor(counts, length_scale, growth)
        if parameters is None:
            query, factor = (query * factor).to(query.dtype), None
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.dtype == torch.bool else mask.detach().float()
    scale = _default_scale(query) if scale is None else scale
    if key.shape[-1] != value_size:
        query, key, value = (_padded(tensor, size) for tensor in (query, key, value))
    seed = draw_seed() if dropout_p > 0 else None
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        parameters=None if parameters is None else parameters.float(),
        factor=None if factor is None else factor.float()[..., 0].expand(query.shape[:-1]),
        sink=per_head(sink, query),
        row_parameter=None if row is None else per_head(row.parameter, query),
        mask=mask,
        seed=seed,
        is_causal=is_causal,
        dropout_p=float(dropout_p),
        scale=float(scale),
        low=low,
        high=high,
        function=None if row is None else row.name,
        header=None if row is None else row.header,
    )
    output, _ = attention(*call, False)
    return output if value_size == size else output[..., :value_size]


def _unsupported_call(
    inputs: AttentionInputs,
    size: int,
    growth: tuple[float | Tensor, float | Tensor] | None,
    row: RowFunction | None,
) -> str:
    """Return why no kernel supports these arguments of `fused_attention`; "" if one may."""
    query, key, value, mask, _, dropout_p, *_ = inputs
    if not (query.dim() == key.dim() == value.dim() == 4) or not (
        query.shape[:2] == key.shape[:2] == value.shape[:2]
    ):
        return "query, key and value must be (B, H, length, size)"
    if key.shape[2] >= 2**31:
        return "there are 2**31 keys or more"
    if not supports_head_size(query.device, size):
        return f"the head size is above {MAX_HEAD_SIZE}"
    if dropout_p > MAX_DROPOUT:
        return f"dropout_p is above {MAX_DROPOUT}"
    if growth is not None and not _fits_each_query(query, *growth):
        return "beta or gamma does not broadcast to the queries"
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        return "the mask needs a gradient"
    if row is not None:
        if not row.supports_mask(mask):
            return f"{row.name} supports only masks that exclude keys"
        if row.name in WITHOUT_GRADIENT and needs_gradient(query, key, value):
            return f"{row.name} has no kernel for its gradient"
    return ""


def unsupported_mapping(
    like: Tensor,
    heads: int,
    backend: str,
    modulator: Any,
    sink: float | Tensor | None,
    length_scale: float | Tensor | None,
    row: RowFunction | None,
) -> str:
    """Return why no kernel supports these arguments of `fused_attention`; "" if one does."""
    if not fits_each_head(like, heads, sink, length_scale):
        return "sink and length_scale must be one number, or one per head"
    if row is not None:
        if modulator is not None or sink is not None:
            return f"{row.name} replaces softmax, its modulator and its sink"
        return _unsupported_row(row, like, heads, backend)
    if modulator is not None and not has_parameters(modulator):
        return "the modulator is a function without parameters"
    return ""


def unsupported_parameters(
    modulator: Any,
    parameters: Tensor,
    length_scale: float | Tensor | None,
    heads: int,
    device: torch.device,
) -> str:
    """Return why no kernel supports the parameters of a modulator; "" if one does."""
    if length_scale is not None and not takes_factor(parameters, device):
        return "only the C++ kernels multiply modulated scores, and only those of a Modulator"
    if fits_heads(modulator, heads) and parameters.device == device:
        return ""
    return "the modulator is for other heads or another device"


def _unsupported_row(row: RowFunction, query: Tensor, heads: int, backend: str) -> str:
    if not (isinstance(row.parameter, float) or fits_each_head(query, heads, row.parameter, None)):
        return f"the parameter of {row.name} must be one number, or one per head"
    if on_triton(query.device):
        # Not by default: their speed on a GPU is unknown.
        if row.name in ON_TRITON and row.header is None and is_triton_requested(backend):
            return ""
        return f"{row.name} has a Triton kernel only if it is requested by name"
    # Compile a header only if the kernel would run.
    if row.header is not None and select(backend, query)[0] == "cpp":
        if not has_row_library(row.header, row.name, backend):
            return f"{row.header} did not compile"
    return ""


def row_factor(
    counts: Tensor,
    length_scale: float | Tensor | None,
    growth: tuple[float | Tensor, float | Tensor] | None,
) -> Tensor:
    """Return the factor of a length scale, or of `growth`."""
    if growth is not None:
        return growth_factor(counts, *growth)
    assert length_scale is not None
    return length_factor(counts, length_scale)


def length_factor(counts: Tensor, length_scale: float | Tensor) -> Tensor:
    """Return the factor s log(n) by which `ssmax` multiplies the scores of n keys."""
    return length_scale * counts.log()


def growth_factor(counts: Tensor, beta: float | Tensor, gamma: float | Tensor) -> Tensor:
    """Return the factor 1 + beta log(n + 1)^gamma by which `asentmax` multiplies n scores."""
    return 1 + beta * (counts + 1).log() ** gamma


def _fits_each_query(query: Tensor, *values: float | Tensor) -> bool:
    """Whether each value is a number or broadcastable to (B, H, T, 1), on query's device."""
    shape = (*query.shape[:-1], 1)
    for value in values:
        if isinstance(value, Tensor):
            sizes = zip(reversed(value.shape), reversed(shape), strict=False)
            fits = value.dim() <= 4 and all(n in (1, m) for n, m in sizes)
            if not fits or not value.is_floating_point() or value.device != query.device:
                return False
        elif not is_finite(value):
            return False
    return True


def fits_each_head(
    like: Tensor, heads: int, sink: float | Tensor | None, length_scale: float | Tensor | None
) -> bool:
    """Whether sink and length_scale are each None, one number, or one per head, on like's device.

    Plain PyTorch supports, or rejects, all other values. A sink of -inf has no effect.
    """
    for value, infinite in ((sink, -torch.inf), (length_scale, None)):
        if isinstance(value, Tensor):
            count = value.shape[-3] if value.dim() > 2 else 1
            fits = count in (1, heads) and value.numel() == count
            if not fits or not value.is_floating_point() or value.device != like.device:
                return False
        elif value is not None and not is_finite(value) and value != infinite:
            return False
    return True


def check_takes_factor(name: str, call: Any) -> None:
    """Raise ValueError unless the kernels can multiply the call's modulated scores."""
    if not takes_factor(call.parameters, call.query.device):
        raise ValueError(f"{name} needs the parameters of a Modulator, and the CPU: pass None")


def takes_factor(parameters: Tensor | None, device: torch.device) -> bool:
    """Whether a device's kernels can multiply the modulated scores of each query."""
    return parameters is not None and parameters.shape[1] > CAP_COLUMNS and not on_triton(device)


def per_head(value: float | Tensor | None, query: Tensor) -> Tensor | None:
    """Return the value of each head, (H,) float32."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return query.new_full(query.shape[1:2], float(value), dtype=torch.float32)
    return value.float().reshape(-1).expand(query.shape[1])


def _padded(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
