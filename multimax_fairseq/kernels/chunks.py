"""The output loss a chunk of rows at a time, so that its logits are never held all at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Logits held at a time. On the CPU a chunk should stay in the last-level cache through the passes
# over it; on a GPU it has to fill the matrix units, and each reads all of the weight and its
# gradient: so many rows at least, as long as their logits are not more than the most.
CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**27}
LEAST_ROWS = {"cpu": 64, "cuda": 2048}
MOST_LOGITS = 2**30
# Matrix products of half precision are fast where rows begin at multiples of 16 bytes.
ALIGNMENT = 64

OneChunk = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None],
    tuple[Tensor, Tensor, Tensor | None, Tensor | None],
]


def through_chunks(
    one_chunk: OneChunk,
    target: Tensor,
    factors: Tensor | None,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    needed: Sequence[bool],
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return nll and smooth losses a row, and the gradients by features, weight, bias and table.

    No step waits for the device.

    Args:
        one_chunk: takes the scores (R, V) of some rows, which it may overwrite, in the dtype of
            features, with unit last stride; the table; their targets and factors. Returns their
            nll and smooth losses (R,), and the gradients by scores (R, V), or None without
            factors, and by the table, or None.
        target: (N,) int64.
        factors: (N,), the gradient by each row's loss; None for no gradients.
        features: (N, D). weight: (V, D). bias: (V,) or None. table: None or as one_chunk takes it.
        needed: whether features, weight, bias and table need gradients.
        chunk_size: rows taken at a time; None chooses.

    Returns:
        Losses (N,), in the dtype of features but at least float32. Gradients, None where not
        needed: that by features in their dtype; sums over chunks in that of the losses, but the
        one by weight in its own where a single chunk forms it.
    """
    count, classes, device = len(target), len(weight), features.device
    if chunk_size is None:
        chunk_size = chunk_rows(count, classes, device.type)
    wide = torch.promote_types(features.dtype, torch.float32)
    needed = [n and factors is not None for n in needed]
    if count == 0:
        nll, smooth = (torch.zeros(0, dtype=wide, device=device) for _ in range(2))
        given = zip((features, weight, bias, table), needed, strict=True)
        empty = [t.new_zeros(t.shape) if t is not None and n else None for t, n in given]
        return nll, smooth, empty
    by_features, by_weight, by_bias, by_table = [None] * 4
    if needed[0]:
        by_features = torch.empty(features.shape, dtype=features.dtype, device=device)
    if needed[1]:
        dtype = weight.dtype if count <= chunk_size else wide
        by_weight = torch.empty(weight.shape, dtype=dtype, device=device)
    width = classes if device.type == "cpu" else -(-classes // ALIGNMENT) * ALIGNMENT
    logits = features.new_empty(min(chunk_size, count), width)[:, :classes]
    losses = []
    for start in range(0, count, chunk_size):
        rows = slice(start, min(start + chunk_size, count))
        inputs, scores = features[rows], logits[: rows.stop - start]
        if bias is None:
            torch.mm(inputs, weight.T, out=scores)
        else:
            torch.addmm(bias, inputs, weight.T, out=scores)
        some = None if factors is None else factors[rows].to(wide)
        *both, grad_scores, grad_table = one_chunk(scores, table, target[rows], some)
        losses.append(both)
        if grad_scores is None:
            continue
        narrow = grad_scores.to(weight.dtype)
        if by_features is not None:
            torch.mm(narrow, weight, out=by_features[rows])
        if by_weight is not None:
            _add_product(by_weight, narrow.T, inputs, is_first=start == 0)
        if bias is not None and needed[2]:
            part = grad_scores.sum(0, dtype=wide)
            by_bias = part if by_bias is None else by_bias.add_(part)
        if grad_table is not None and needed[3]:
            by_table = grad_table if by_table is None else by_table.add_(grad_table)
    nll, smooth = losses[0] if len(losses) == 1 else map(torch.cat, zip(*losses, strict=True))
    return nll, smooth, [by_features, by_weight, by_bias, by_table]


def chunk_rows(count: int, classes: int, device: str) -> int:
    """Rows that are taken at a time: all chunks alike, but for what does not divide."""
    device = device if device in CHUNK_LOGITS else "cuda"
    most = max(LEAST_ROWS[device], CHUNK_LOGITS[device] // classes)
    most = min(most, max(64, MOST_LOGITS // classes))
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """total += a @ b, the sum in the dtype of total, of which the first finds nothing."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if is_first else total.addmm_(a, b)
    elif not _accumulates(total.device, a.dtype):
        total.copy_(a @ b) if is_first else total.add_(a @ b)
    elif is_first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@functools.cache
def _accumulates(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a matrix product of this type adds to a float32 matrix: not on a CPU, or it may."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=total)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True
