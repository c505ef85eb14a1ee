"""The compiled kernels for the CPU, called by their addresses, if `library` has any.

`table` is (1 or heads, 8 or 12) float32, a modulator's parameters in the order of
`functional.modulator.pack`. Inputs are checked by `operators`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.kernels.build import library as library  # public here as well

# What a fused loss may hold of the logits, and how many tokens go through it together: enough for
# the weight to be read seldom, few enough for a tile to stay in the second-level cache. Where that
# is all of them, their logits can lie in the memory of the weight's gradient.
MAX_LOGITS, MAX_TOKENS = 70_000_000, 512
# Floats of the widest vectors, which logits lie in whole.
MOST_LANES = 16
# Scores that a thread takes at a time, where one modulator serves all of them.
PIECE = 2**15

# The structures of cpp/*.h, field by field.
_Fields = list[tuple[str, Any]]


def _fields(names: str, kind: Any) -> _Fields:
    return [(name, kind) for name in names.split()]


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", ctypes.c_int64 * 3)]


class _Mask(ctypes.Structure):
    _fields_ = [
        *_fields("data", ctypes.c_void_p),
        *_fields("is_float", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 4),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *_fields("batch heads queries keys size threads", ctypes.c_int64),
        *_fields("columns table_row is_causal", ctypes.c_int64),
        *_fields("scale dropout", ctypes.c_float),
        *_fields("seed", ctypes.c_uint64),
        *_fields("starts ends table sink statistics grad_table grad_sink", ctypes.c_void_p),
        *_fields("mask", _Mask),
        *_fields("query key value output", _Rows),
        *_fields("grad_output grad_query grad_key grad_value", _Rows),
        *_fields("ancestors", ctypes.c_void_p),
        *_fields("rows", ctypes.c_int64),
    ]


_WITH_STRIDES = {field[0] for field in _Attention._fields_ if field[1] is _Rows}


class _OutputLoss(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size chunk threads columns ignore_index", ctypes.c_int64),
        *_fields("smooth_weight nll_weight", ctypes.c_float),
        *_fields("features weight bias table target factors nll smooth", ctypes.c_void_p),
        *_fields("grad_features grad_weight grad_bias grad_table", ctypes.c_void_p),
    ]


class _Projection(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size threads columns", ctypes.c_int64),
        *_fields("features weight bias table out", ctypes.c_void_p),
    ]


class _Best(ctypes.Structure):
    _fields_ = [
        *_fields("rows classes count threads", ctypes.c_int64),
        *_fields("scores values indices totals", ctypes.c_void_p),
    ]


class _BestOutputs(ctypes.Structure):
    _fields_ = [
        *_fields("tokens classes size count apart threads columns", ctypes.c_int64),
        *_fields("features weight bias table apart_classes", ctypes.c_void_p),
        *_fields("values indices totals apart_scores", ctypes.c_void_p),
    ]


class _Drop(ctypes.Structure):
    _fields_ = [
        *_fields("count threads", ctypes.c_int64),
        *_fields("probability", ctypes.c_float),
        *_fields("seed", ctypes.c_uint64),
        *_fields("entries out", ctypes.c_void_p),
    ]


class _Modulation(ctypes.Structure):
    _fields_ = [
        *_fields("count inner heads threads columns", ctypes.c_int64),
        *_fields("table scores grad out grad_table", ctypes.c_void_p),
    ]


class _Tails(ctypes.Structure):
    _fields_ = [*_fields("rows", ctypes.c_int64), *_fields("table out jacobian", ctypes.c_void_p)]


def _call(name: str, structure: type[ctypes.Structure], **values: Any) -> int:
    """Call a kernel with a structure of numbers and tensors; None is a null pointer."""
    given = structure()
    for field, value in values.items():
        if isinstance(value, Tensor):
            address = value.data_ptr()
            if not address and value.numel():
                raise ValueError(
                    f"{field} has no memory: it was freed, as FSDP frees parameters outside of the "
                    "forward pass of their module"
                )
            value = (address, value.stride()[:3]) if field in _WITH_STRIDES else address
        if value is not None:
            setattr(given, field, value)
    kernels = library()
    assert kernels is not None
    status = int(getattr(kernels, name)(ctypes.byref(given)))
    if status == 0:
        raise MemoryError(f"{name}: not enough memory for its buffers; give smaller batches")
    return status


def _linear(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> dict[str, Any]:
    """The arguments of a kernel that say what a linear layer is given, and what modulates it."""
    return {
        "tokens": len(features),
        "classes": len(weight),
        "size": weight.shape[1],
        "threads": torch.get_num_threads(),
        "columns": 0 if table is None else table.shape[1],
        "features": features.contiguous(),
        "weight": weight.contiguous(),
        "bias": None if bias is None else bias.contiguous(),
        "table": None if table is None else table.contiguous(),
    }


def _wide(tensor: Tensor | None) -> Tensor | None:
    """As float32, which the kernels compute in; with a dense last dimension."""
    if tensor is None:
        return None
    tensor = _as(tensor, torch.float32)
    return tensor if tensor.dim() == 0 or tensor.stride(-1) == 1 else tensor.contiguous()


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # A call of `to` that changes nothing is a good part of what small tensors cost.
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def dense_like(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return memory for a tensor of this shape, in its order of dimensions, the last one dense."""
    out = torch.empty_like(tensor, dtype=dtype)
    return out if out.stride(-1) == 1 else out.new_empty(out.shape)


def _mask_of(mask: Tensor) -> _Mask:
    strides = [0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True)]
    return _Mask(mask.data_ptr(), mask.dtype == torch.float32, tuple(strides))


def windows(
    batch: int, queries: int, keys: int, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return which keys each query may attend to, as starts <= s < ends.

    Args:
        mask: as in `attention_forward`.
        is_causal: query t attends to keys up to t.

    Returns:
        starts and ends, (batch, queries) int32, or None for all keys that `is_causal` allows;
        whether the mask says more than they do.
    """
    if mask is None or mask.shape[1] > 1:
        return None, None, mask is not None
    starts, ends = torch.empty(2, batch, queries, dtype=torch.int32, device="cpu")
    kernels = library()
    assert kernels is not None
    is_whole = kernels.find_windows(
        ctypes.byref(_mask_of(mask)),
        *(ctypes.c_int64(n) for n in (batch, queries, keys, is_causal)),
        ctypes.c_void_p(starts.data_ptr()),
        ctypes.c_void_p(ends.data_ptr()),
    )
    return starts, ends, not is_whole


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return MultiMax attention, or softmax attention where the table is None.

        O = dropout(softmax(sigma(scale Q K^T) + mask)) V, beside a sink if there is one
    Equivalent to: functional.scaled_dot_product_attention(..., backend="plain")

    Args:
        query: (B, H, T, D). key, value: (B, H, S, D). None of the sizes is 0.
        sink: (H,) float32 or None.
        mask: (B or 1, H or 1, T or 1, S or 1) or None: bool, where True excludes, or float32.
        dropout_p: below 1.
        keep: whether there will be a backward pass.

    Returns:
        (B, H, T, D), in query's order of dimensions in memory, and what the backward pass needs:
        (B, H, 2, T) or None.
    """
    output = dense_like(query, torch.float32)
    statistics = None
    if keep:
        batch, heads, queries, _ = query.shape
        statistics = output.new_empty(batch, heads, 2, queries)
    _call(
        "attention_forward",
        _Attention,
        output=output,
        statistics=statistics,
        **_arguments(query, key, value, table, sink, mask, seed, is_causal, dropout_p, scale),
    )
    return _as(output, query.dtype), statistics


def attention_step(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    scale: float,
) -> Tensor:
    """Return attention of hypotheses' last words to all of theirs, whose keys they share.

    Args:
        query: (R, H, D) float32, D a multiple of 16.
        keys, values: (N, H, D) float32.
        ancestors: (R, L) int64: key s of hypothesis r is keys[ancestors[r, s]].
        table, sink: as `attention_forward`.

    Returns:
        (R, H, D).

    Raises:
        ValueError: an ancestor that is none of the N rows.
    """
    hypotheses, heads, size = query.shape
    query, ancestors = query.contiguous(), ancestors.contiguous()
    output = torch.empty_like(query)
    status = _call(
        "attention_step",
        _Attention,
        batch=hypotheses,
        heads=heads,
        queries=1,
        keys=ancestors.shape[1],
        size=size,
        threads=torch.get_num_threads(),
        scale=scale,
        query=query.unsqueeze(2),
        key=keys.contiguous().transpose(0, 1).unsqueeze(0),
        value=values.contiguous().transpose(0, 1).unsqueeze(0),
        output=output.unsqueeze(2),
        sink=None if sink is None else sink.contiguous(),
        ancestors=ancestors,
        rows=len(keys),
        **_table_of(table),
    )
    if status < 0:
        raise ValueError(
            f"ancestors must be rows of keys and values, 0 to {len(keys) - 1}, got "
            f"{int(ancestors.min())} to {int(ancestors.max())}"
        )
    return output


def attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    statistics: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients by query, key, value, table and sink."""
    arguments = _arguments(query, key, value, table, sink, mask, seed, is_causal, dropout_p, scale)
    grads = [dense_like(t, torch.float32) for t in (query, key, value)]
    grad_table = None if table is None else torch.empty_like(arguments["table"])
    grad_sink = None if sink is None else torch.empty_like(arguments["sink"])
    _call(
        "attention_backward",
        _Attention,
        **arguments,
        statistics=statistics,
        grad_output=_wide(grad),
        grad_query=grads[0],
        grad_key=grads[1],
        grad_value=grads[2],
        grad_table=grad_table,
        grad_sink=grad_sink,
    )
    by_query, by_key, by_value = map(_as, grads, (query.dtype, key.dtype, value.dtype))
    return by_query, by_key, by_value, grad_table, grad_sink


def _arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: Tensor | None,
    sink: Tensor | None,
    mask: Tensor | None,
    seed: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> dict[str, Any]:
    batch, heads, queries, size = query.shape
    keys = key.shape[2]
    starts, ends, more = windows(batch, queries, keys, mask, is_causal)
    arguments: dict[str, Any] = {"query": _wide(query), "key": _wide(key), "value": _wide(value)}
    arguments |= {"batch": batch, "heads": heads, "queries": queries, "keys": keys, "size": size}
    arguments |= {"is_causal": is_causal, "starts": starts, "ends": ends}
    arguments |= {"scale": scale, "dropout": dropout_p, "seed": seed}
    arguments["threads"] = torch.get_num_threads()
    if sink is not None:
        arguments["sink"] = sink.contiguous()
    if more and mask is not None:
        arguments["mask"] = _mask_of(mask)
    return arguments | _table_of(table)


def _table_of(table: Tensor | None) -> dict[str, Any]:
    """The arguments of an attention that say what modulates its scores, and whether per head."""
    if table is None:
        return {}
    columns = table.shape[1]
    row = columns if len(table) > 1 else 0
    return {"table": table.contiguous(), "columns": columns, "table_row": row}


def output_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    target: Tensor,
    factors: Tensor | None,
    smooth_weight: float,
    nll_weight: float,
    ignore_index: int,
    chunk_size: int | None,
    needed: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return the sums that a loss over a linear layer is made of, and its gradients.

        nll = log sum_k exp(z_k) - z_y,  smooth = sum_k (log sum_j exp(z_j) - z_k),
        z = sigma(W h + b)

    Args:
        features: (N, D) float32. weight: (V, D) float32. bias: (V,) float32 or None.
        table: (1, 8 or 12) or None, which is softmax.
        target: (N,) int64; ignore_index counts for nothing.
        factors: (N,) float32, the gradient by each token's loss; None for no gradients.
        smooth_weight, nll_weight: the loss is smooth_weight * smooth + nll_weight * nll; both
            terms together weigh each p_k once, so smooth_weight * V + nll_weight = 1.
        chunk_size: tokens taken at a time; None chooses.
        needed: whether features, weight, bias and table need gradients.

    Returns:
        nll and smooth, (N,) float32, 0 where ignored; the gradients by features, weight, bias and
        table, None where not needed.

    Raises:
        ValueError: a target that is neither one of the classes nor ignore_index.
    """
    tokens, classes = len(target), len(weight)
    if chunk_size is None:
        most = max(16, min(MAX_TOKENS, MAX_LOGITS // classes))
        in_gradient = min(MAX_TOKENS, weight.shape[1] // MOST_LANES * MOST_LANES)
        if factors is not None and needed[1] and tokens <= in_gradient:
            most = in_gradient
        chunks = max(1, -(-tokens // most))
        chunk_size = max(1, -(-tokens // chunks))
    nll, smooth = features.new_empty(2, tokens, dtype=torch.float64)
    grads: list[Tensor | None] = [None] * 3
    grad_table = features.new_zeros(1, 12, dtype=torch.float64)
    if factors is not None:
        inputs = zip((features, weight, bias), needed, strict=False)
        grads = [t.new_empty(t.shape) if t is not None and need else None for t, need in inputs]
    status = _call(
        "output_loss",
        _OutputLoss,
        chunk=chunk_size,
        ignore_index=ignore_index,
        smooth_weight=smooth_weight,
        nll_weight=nll_weight,
        target=target.contiguous(),
        factors=None if factors is None else factors.contiguous(),
        nll=nll,
        smooth=smooth,
        grad_features=grads[0],
        grad_weight=grads[1],
        grad_bias=grads[2],
        grad_table=grad_table,
        **_linear(features, weight, bias, table),
    )
    if status < 0:
        raise ValueError(
            f"target {int(target[-1 - status])} is neither one of {classes} classes nor "
            f"ignore_index {ignore_index}"
        )
    grads.append(None)
    if table is not None and factors is not None and needed[3]:
        grads[3] = grad_table[:, : table.shape[1]].float()
    return nll.float(), smooth.float(), grads


def output_scores(
    features: Tensor, weight: Tensor, bias: Tensor | None, table: Tensor | None
) -> Tensor:
    """Return the modulated scores of a linear layer, (N, V).

    Args:
        features: (N, D) float32. weight: (V, D) float32. bias: (V,) float32 or None.
        table: (1, 8 or 12) or None, which leaves the scores as they are.
    """
    out = features.new_empty(len(features), len(weight))
    _call("projection", _Projection, out=out, **_linear(features, weight, bias, table))
    return out


def best_lists(like: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for what `best_scores` returns of as many rows as this tensor has."""
    values = like.new_empty(like.shape[0], count, dtype=torch.float32)
    return values, torch.empty_like(values, dtype=torch.int64), values.new_empty(like.shape[0])


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `count` largest of each row, (N, count), where they stand, and log sum exp, (N,).

    Args:
        scores: (N, V), float32.
        count: at least 1, at most V.
    """
    rows, classes = scores.shape
    values, indices, totals = best_lists(scores, count)
    _call(
        "best_scores",
        _Best,
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


def best_outputs(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    count: int,
    apart: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the `count` largest of `output_scores`, (N, count), where they stand, log sum exp of
    all, (N,), nan where one is inf, and the scores of the classes `apart`, (N, len(apart)), which
    are not among the largest. Where values are -inf, they stand anywhere.

    Args:
        features, weight, bias, table: as `output_scores`.
        count: at least 1, at most V.
        apart: classes.
    """
    values, indices, totals = best_lists(features, count)
    apart_scores = features.new_empty(len(features), len(apart))
    _call(
        "best_outputs",
        _BestOutputs,
        count=count,
        apart=len(apart),
        apart_classes=torch.tensor(apart, dtype=torch.int64, device="cpu"),
        values=values,
        indices=indices,
        totals=totals,
        apart_scores=apart_scores,
        **_linear(features, weight, bias, table),
    )
    return values, indices, totals, apart_scores


def dropout(input: Tensor, seed: int, p: float) -> Tensor:
    """Return a dense tensor with entries set to 0 with probability p, the others over 1 - p.

    The same entries for tensors of this shape and this seed, on however many threads.
    """
    given = _as(input, torch.float32).contiguous()
    out = torch.empty_like(given)
    _call(
        "drop",
        _Drop,
        count=given.numel(),
        threads=torch.get_num_threads(),
        probability=p,
        seed=seed,
        entries=given,
        out=out,
    )
    return _as(out, input.dtype)


def modulate(scores: Tensor, table: Tensor) -> Tensor:
    """Return the modulated scores, as `functional.modulator.modulate`, in float32.

    Args:
        scores: any shape; with parameters per head, (..., heads, T, S).
        table: (1 or heads, 8 or 12).
    """
    return _modulation(scores, table)


def modulate_backward(grad: Tensor, scores: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of `modulate` by its scores and its table, given that by its result."""
    grad_table = torch.zeros_like(table, memory_format=torch.contiguous_format)
    grad_scores = _modulation(scores, table, grad.float().contiguous(), grad_table)
    return grad_scores.to(scores.dtype), grad_table


def _modulation(
    scores: Tensor, table: Tensor, grad: Tensor | None = None, grad_table: Tensor | None = None
) -> Tensor:
    scores = scores.float().contiguous()
    heads = len(table)
    inner = PIECE if heads == 1 else scores.shape[-1] * scores.shape[-2]
    out = torch.empty_like(scores)
    if scores.numel() > 0:
        _call(
            "modulation",
            _Modulation,
            count=scores.numel(),
            inner=inner,
            heads=heads,
            threads=torch.get_num_threads(),
            columns=table.shape[1],
            table=table.contiguous(),
            scores=scores,
            grad=grad,
            out=out,
            grad_table=grad_table,
        )
    return out


def tails(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return a monotone modulator's last four columns, (rows, 4), and their derivatives by the
    others, (rows, 4, 8), given those, (rows, 8)."""
    out, jacobian = table.new_empty(len(table), 4), table.new_empty(len(table), 4, 8)
    _call("tails", _Tails, rows=len(table), table=table.contiguous(), out=out, jacobian=jacobian)
    return out, jacobian
