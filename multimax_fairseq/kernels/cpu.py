"""The compiled kernels for the CPU, called by their addresses, if `library` has any.

The functions take float32 tensors on the CPU. `table` is (heads, 8) float32, a modulator's
parameters in the order of `modulator.parameter_table`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multimax_fairseq.kernels.build import library as library  # public here as well

# What a fused loss may hold of the logits, and how many tokens go through it together: enough for
# the weight to be read seldom, few enough for a tile to stay in the second-level cache.
MAX_LOGITS, MAX_TOKENS = 70_000_000, 256
# Scores that a thread takes at a time, where one modulator serves all of them.
PIECE = 2**15

# The structures of cpu.cpp, field by field.
_Fields = list[tuple[str, Any]]


def _fields(names: str, kind: Any) -> _Fields:
    return [(name, kind) for name in names.split()]


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


class _Attention(ctypes.Structure):
    _fields_ = [
        *_fields("batch heads queries keys size threads", ctypes.c_int64),
        *_fields("scale dropout", ctypes.c_float),
        *_fields("seed", ctypes.c_uint64),
        *_fields("starts ends table statistics grad_table", ctypes.c_void_p),
        *_fields("query key value output", _Rows),
        *_fields("grad_output grad_query grad_key grad_value", _Rows),
    ]


class _Mask(ctypes.Structure):
    _fields_ = [
        *_fields("data", ctypes.c_void_p),
        *_fields("is_float allows", ctypes.c_int64),
        *_fields("threshold", ctypes.c_float),
        *_fields("batch queries keys", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 3),
    ]


class _OutputLoss(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size chunk threads", ctypes.c_int64),
        *_fields("share hit", ctypes.c_float),
        *_fields("features weight bias table target factors nll smooth", ctypes.c_void_p),
        *_fields("grad_features grad_weight grad_bias grad_table", ctypes.c_void_p),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size threads", ctypes.c_int64),
        *_fields("features weight bias table out", ctypes.c_void_p),
    ]


class _Modulation(ctypes.Structure):
    _fields_ = [
        *_fields("count inner heads threads", ctypes.c_int64),
        *_fields("table scores grad out grad_table", ctypes.c_void_p),
    ]


def _call(name: str, structure: type[ctypes.Structure], **values: Any) -> int:
    """Call a kernel with a structure of numbers and tensors; None is a null pointer."""
    kinds = {field[0]: field[1] for field in structure._fields_}
    filled = structure()
    for field, value in values.items():
        if isinstance(value, Tensor) and kinds[field] is _Rows:
            value = _Rows(value.data_ptr(), (ctypes.c_int64 * 3)(*value.stride()[:3]))
        elif isinstance(value, Tensor):
            value = value.data_ptr()
        if value is not None:
            setattr(filled, field, value)
    kernels = library()
    assert kernels is not None
    return int(getattr(kernels, name)(ctypes.byref(filled)))


def windows(
    batch: int,
    queries: int,
    keys: int,
    masks: Sequence[tuple[Tensor, bool]],
    threshold: float,
    is_causal: bool,
) -> tuple[Tensor | None, Tensor | None] | None:
    """Return the keys that each query may attend to as starts <= s < ends, both (batch, queries)
    int32; (None, None) where that is all, and None where the masks cannot be written so.

    Args:
        masks: each (batch, queries, keys), of any strides, bool or float32, and whether True
            means that a key may be attended to; a float at or below the threshold excludes, and
            any other must be 0.
        is_causal: query t attends to keys up to t.
    """
    if not masks and not is_causal:
        return None, None
    starts = torch.zeros(batch, queries, dtype=torch.int32)
    ends = torch.full((batch, queries), keys, dtype=torch.int32)
    if is_causal:
        last = torch.arange(1, queries + 1, dtype=torch.int32).clamp_(max=keys)
        ends = last.repeat(batch, 1)
    for mask, allows in masks:
        filled = _Mask(
            data=mask.data_ptr(),
            is_float=mask.dtype == torch.float32,
            allows=allows,
            threshold=threshold,
            batch=batch,
            queries=queries,
            keys=keys,
            strides=(ctypes.c_int64 * 3)(*mask.stride()),
        )
        kernels = library()
        assert kernels is not None
        ok = kernels.narrow_windows(
            ctypes.byref(filled),
            ctypes.c_void_p(starts.data_ptr()),
            ctypes.c_void_p(ends.data_ptr()),
        )
        if not ok:
            return None
    return starts, ends


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """Return MultiMax attention, or softmax attention where the table is None.

        O = dropout(softmax(sigma(scale Q K^T))) V
    Equivalent to: functional.scaled_dot_product_attention(..., backend="plain")

    Args:
        query: (B, H, T, D). key, value: (B, H, S, D). None of the sizes is 0.
        starts, ends: (B, T) int32 or None, of `windows`.
        dropout_p: below 1.

    Returns:
        (B, H, T, D), laid out as (T, B, H, D), which is what fairseq reads.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    seed = int(torch.randint(2**62, ())) if dropout_p > 0 else 0
    return _Attend.apply(query, key, value, table, starts, ends, scale, dropout_p, seed)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        starts: Tensor | None,
        ends: Tensor | None,
        *numbers: Any,
    ) -> Tensor:
        batch, heads, queries, size = query.shape
        output = query.new_empty(queries, batch, heads, size).permute(1, 2, 0, 3)
        statistics = None
        if any(ctx.needs_input_grad):
            statistics = query.new_empty(batch, heads, 2, queries)
        table = None if table is None else table.contiguous()
        ctx.numbers = numbers
        saved = (query, key, value, table, starts, ends, statistics)
        _call("attention_forward", _Attention, output=output, **_arguments(*saved, *numbers))
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, table, *_ = saved = ctx.saved_tensors
        grads = tuple(map(torch.empty_like, (query, key, value)))
        grad_table = None
        if table is not None:
            grad_table = torch.zeros(query.shape[0], *table.shape, dtype=torch.float64)
        _call(
            "attention_backward",
            _Attention,
            **_arguments(*saved, *ctx.numbers),
            grad_output=grad if grad.stride(-1) == 1 else grad.contiguous(),
            grad_query=grads[0],
            grad_key=grads[1],
            grad_value=grads[2],
            grad_table=grad_table,
        )
        if grad_table is not None:
            grads += (grad_table.sum(0).float(),)
        return grads + (None,) * (9 - len(grads))


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    starts: Tensor | None,
    ends: Tensor | None,
    statistics: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
) -> dict[str, Any]:
    arguments = dict(locals())
    batch, heads, queries, size = query.shape
    arguments |= {"batch": batch, "heads": heads, "queries": queries, "size": size}
    return arguments | {"keys": key.shape[2], "threads": torch.get_num_threads()}


def output_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    share: float,
    hit: float,
    needed: Sequence[bool],
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the sums that a loss over a linear layer is made of, and its gradients.

        nll = log sum_k exp(z_k) - z_y,  smooth = sum_k (log sum_j exp(z_j) - z_k),
        z = sigma(W h + b)

    Args:
        features: (N, D). weight: (V, D). bias: (V,) or None.
        table: (1, 8) or None, which is softmax.
        target: (N,) int64; a negative one is ignored.
        factors: (N,), the gradient by each token's loss; None for no gradients.
        share, hit: the loss is share * smooth + hit * nll; both terms together weigh each p_k
            once, so share * V + hit = 1.
        needed: whether features, weight and bias need gradients.
        chunk_size: tokens taken at a time; None chooses.

    Returns:
        nll and smooth, (N,) float64, 0 where ignored; the gradients by features, weight, bias and
        table, None where not needed.
    """
    tokens, classes = len(target), len(weight)
    if chunk_size is None:
        most = max(16, min(MAX_TOKENS, MAX_LOGITS // classes))
        chunks = max(1, -(-tokens // most))
        chunk_size = -(-tokens // chunks)
    features, weight = features.contiguous(), weight.contiguous()
    nll, smooth = torch.empty(2, tokens, dtype=torch.float64)
    grads: list[Tensor | None] = [None] * 3
    grad_table = torch.zeros(1, 8, dtype=torch.float64)
    if factors is not None:
        inputs = zip((features, weight, bias), needed, strict=True)
        grads = [torch.empty_like(t) if t is not None and need else None for t, need in inputs]
    _call(
        "output_loss",
        _OutputLoss,
        tokens=tokens,
        classes=classes,
        size=weight.shape[1],
        chunk=max(chunk_size, 1),
        threads=torch.get_num_threads(),
        share=share,
        hit=hit,
        features=features,
        weight=weight,
        bias=None if bias is None else bias.contiguous(),
        table=None if table is None else table.contiguous(),
        target=target.contiguous(),
        factors=None if factors is None else factors.contiguous(),
        nll=nll,
        smooth=smooth,
        grad_features=grads[0],
        grad_weight=grads[1],
        grad_bias=grads[2],
        grad_table=grad_table,
    )
    needs_table = table is not None and factors is not None
    return nll, smooth, [*grads, grad_table.float() if needs_table else None]


def project(features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None) -> Tensor:
    """Return the modulated scores of a linear layer, (N, V), which no gradient reaches.

    Args:
        features: (N, D). weight: (V, D). bias: (V,) or None.
        table: (1, 8) or None, which leaves the scores as they are.
    """
    features, weight = features.contiguous(), weight.contiguous()
    out = features.new_empty(len(features), len(weight))
    _call(
        "projection",
        _Projection,
        tokens=len(features),
        classes=len(weight),
        size=weight.shape[1],
        threads=torch.get_num_threads(),
        features=features,
        weight=weight,
        bias=None if bias is None else bias.contiguous(),
        table=None if table is None else table.contiguous(),
        out=out,
    )
    return out


def modulate(scores: Tensor, table: Tensor) -> Tensor:
    """Return the modulated scores, as `functional.modulator.modulate`.

    Args:
        scores: any shape; with parameters a head, (..., heads, T, S).
        table: (1, 8), or (heads, 8).
    """
    return _modulation(scores, table, None)[0]


def modulate_backward(grad: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `modulate` by its scores and its table, given that by its result."""
    return _modulation(scores, table, grad)


def _modulation(scores: Tensor, table: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = scores.contiguous()
    heads = len(table)
    inner = PIECE if heads == 1 else scores.shape[-1] * scores.shape[-2]
    out = torch.empty_like(scores)
    pieces = -(-scores.numel() // max(inner, 1))
    grad_table = torch.zeros(pieces, 8, dtype=torch.float64)
    _call(
        "modulation",
        _Modulation,
        count=scores.numel(),
        inner=inner,
        heads=heads,
        threads=torch.get_num_threads(),
        table=table.contiguous(),
        scores=scores,
        grad=None if grad is None else grad.contiguous(),
        out=out,
        grad_table=grad_table,
    )
    return out, grad_table.view(-1, heads, 8).sum(0).float()
