"""Attention over any of the normalizers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.functional.backend import choose, is_autocast, requested
from multimax_fairseq.functional.checks import (
    check_flag,
    check_number,
    check_tensor,
    is_finite,
)
from multimax_fairseq.functional.dropout import draw_seed, dropout
from multimax_fairseq.functional.mapping import mapping_named
from multimax_fairseq.functional.modulator import fits_heads, is_known, table_of
from multimax_fairseq.functional.normalizers import ScoreFunction, hidden_keys, multimax
from multimax_fairseq.functional.rescaled import key_counts, ssmax_scale
from multimax_fairseq.kernels import operators


def attention_scores(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """Return attention scores, (B, H, T, S): scale * Q K^T.

    Equivalent to: scale * query @ key.mT

    Args:
        query: (B, H, T, D).
        key: (B, H, S, D).
        scale: default 1 / sqrt(D).
    """
    if scale is None:
        scale = _default_scale(query)
    # The product of a half-precision pair is rounded once, as in the framework's own attention.
    return (query * scale) @ key.transpose(-2, -1)


def _default_scale(query: Tensor) -> float:
    return 1 / math.sqrt(max(query.shape[-1], 1))


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    normalizer: str = "multimax",
    modulator: ScoreFunction | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
    **options: Any,
) -> Tensor:
    """Return attention outputs, with the arguments of torch's function of the same name.

        O = dropout(normalize(scale * Q K^T + mask)) V
    Equivalent to: torch.nn.functional.scaled_dot_product_attention with another normaliser

    Args:
        query: (B, H, T, D), floating.
        key: (B, H, S, D), of query's dtype.
        value: (B, H, S, D) or of another last dimension.
        normalizer: a key of `NORMALIZERS`.
        modulator: for multimax, which needs it.
        attn_mask: broadcastable to (B, H, T, S). Bool: True may attend. Float: added to the
            scores, for multimax to the modulated ones, with its gradient; -inf excludes. A query
            that may attend to nothing gets zeros.
        is_causal: query t attends to keys up to t; together with attn_mask, both hold.
        dropout_p: probability of dropping an attention probability.
        scale: default 1 / sqrt(D).
        backend: "cpp" and "triton" never hold the (T, S) probabilities; they serve multimax,
            softmax without a temperature, ssmax, softmax1 and sink. "plain" holds them, and serves
            all, twice differentiable outside of the modulator. "auto" takes what
            MULTIMAX_BACKEND says, else the fastest that can do it.
        options: what else the normalizer takes, as `normalize`.

    Returns:
        (B, H, T, D of value), in the dtype of value, or of autocast.

    Raises:
        TypeError: something that is no tensor; an argument of another type; an option that the
            normalizer does not take.
        ValueError: an unknown normalizer or backend; multimax without a modulator, or another
            normalizer with one; shapes, dtypes or devices that do not fit; a dropout_p outside of
            [0, 1]; a scale that is not finite.
    """
    _check(query, key, value, attn_mask, is_causal, dropout_p, scale)
    dropout_p, scale = float(dropout_p), None if scale is None else float(scale)
    mapping = mapping_named(normalizer)
    if mapping.function is multimax:
        if modulator is None:
            raise ValueError(
                f"normalizer {normalizer!r} needs a modulator: pass modulator=Modulator()"
            )
        if not callable(modulator):
            raise TypeError(
                f"modulator must be a Modulator or a function of the scores, got {modulator!r}"
            )
    elif modulator is not None:
        raise ValueError(
            f"normalizer {normalizer!r} takes no modulator, got {modulator!r}: leave it out, or "
            "pass normalizer='multimax'"
        )
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:
        mask = ~mask
    if modulator is not None:
        options["modulator"] = modulator
    asked = mapping.for_kernel(**options)
    if asked is not None:
        context = fused_attention(
            query, key, value, mask, is_causal, dropout_p, scale, backend, **asked
        )
        if context is not None:
            return context
    requested(backend)
    if is_causal:
        mask = with_future(mask, query.shape[-2], key.shape[-2], query.device)
    scores = attention_scores(query, key, scale)
    # With its dim, so that no other can be among the options.
    probs = mapping.function(scores, dim=-1, mask=mask, **options)
    return weighted_values(probs, value, dropout_p, backend)


def weighted_values(
    probs: Tensor, value: Tensor, dropout_p: float, backend: str = "auto"
) -> Tensor:
    """Return the values under probabilities of which some are dropped, in the values' dtype.

    Equivalent to: dropout(probs, dropout_p) @ value
    """
    return dropout(probs.to(value.dtype), dropout_p, backend) @ value


def with_future(mask: Tensor | None, queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask (bool: True excludes; or float) that excludes later keys too, (..., T, S)."""
    future = torch.ones([queries, keys], dtype=torch.bool, device=device).triu(1)
    if mask is None:
        return future
    return mask | future if mask.dtype == torch.bool else mask.masked_fill(future, -float("inf"))


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    backend: str = "auto",
    *,
    modulator: Any = None,
    sink: float | Tensor | None = None,
    length_scale: float | Tensor | None = None,
) -> Tensor | None:
    """Return attention outputs that no probabilities were kept for, or None where that cannot be.

    Args:
        query, key, value, is_causal, dropout_p, scale: as `scaled_dot_product_attention`, checked.
        mask: broadcastable to (B, H, T, S) or None; bool: True excludes; float: added to the
            modulated scores.
        modulator: None is softmax.
        sink: as `softmax_with_sink`.
        length_scale: as `ssmax`.
    """
    # The kernels know one size of a head: zeros fill up the smaller one, and change no score.
    size, value_size = max(key.shape[-1], value.shape[-1]), value.shape[-1]
    able = query.dim() == 4 and key.shape[:-1] == value.shape[:-1]
    able = able and key.shape[:2] == query.shape[:2]
    able = able and dropout_p <= operators.MAX_DROPOUT and operators.serves(query.device, size)
    able = able and (modulator is None or is_known(modulator))
    able = able and _fit_heads(query, query.shape[1], sink, length_scale)
    # A kernel gives a mask no gradient.
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        able = False
    table: Tensor | None = None
    low = high = 2
    if able and modulator is not None:
        table, low, high = table_of(modulator)
        able = fits_heads(modulator, query.shape[1]) and table.device == query.device
    if choose("attention", backend, query, key, value, able=able) == "plain":
        return None
    if length_scale is not None:
        factor = ssmax_scale(_key_counts(query, key, mask, is_causal), length_scale)
        query = (query * factor).to(query.dtype)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        mask = mask if mask.dtype == torch.bool else mask.detach().float()
    scale = _default_scale(query) if scale is None else scale
    query, key, value = (_filled_up(tensor, size) for tensor in (query, key, value))
    seed = draw_seed() if dropout_p > 0 else None
    output, _ = operators.attention(
        *(query, key, value, None if table is None else table.float()),
        *(_a_head_each(sink, query), mask, seed),
        *(is_causal, dropout_p, scale, low, high, False),
    )
    return output if value_size == size else output[..., :value_size]


class Steps(NamedTuple):
    """Keys and values of the words of hypotheses, each of them once.

    keys, values: (N, H, D), of the words of all L steps, the first part of memory that has room for
        more.
    ancestors: (R, L) int64, the rows of hypothesis r.
    room: that memory; None where there is none but what is taken.
    """

    keys: Tensor
    values: Tensor
    ancestors: Tensor
    room: Room | None = None

    def ancestors_in(self, order: Tensor | None) -> Tensor:
        """Return the ancestors of these hypotheses, (R',) int64; None for all of them."""
        return self.ancestors if order is None else self.ancestors.index_select(0, order)

    def and_one_more(self, key: Tensor, value: Tensor, order: Tensor | None) -> Steps:
        """Return these with one more word of each hypothesis; these stay as they are.

        Args:
            key, value: (R', H, D), of the words.
            order: (R',) int64, which hypotheses go on with them; None for all, each with its own.
        """
        count, more = len(self.keys), len(key)
        rows = torch.arange(count, count + more, device=key.device)[:, None]
        room = self.room
        if room is None or not room.has(count, more):
            room = Room(self.keys, self.values, more)
        keys, values = room.put(key, value)
        return Steps(keys, values, torch.cat([self.ancestors_in(order), rows], 1), room)


class Room:
    """Memory for keys and values, (N, H, D), to be put behind those that are in it.

    Args:
        keys, values: the first ones.
        more: rows of the next step; there is room for 16 such, and for as many as the first ones.
    """

    STEPS = 16

    def __init__(self, keys: Tensor, values: Tensor, more: int) -> None:
        self.taken = len(keys)
        size = 2 * self.taken + self.STEPS * more
        self.tensors = [x.new_empty(size, *x.shape[1:]) for x in (keys, values)]
        for tensor, first in zip(self.tensors, (keys, values), strict=True):
            tensor[: self.taken] = first

    def has(self, count: int, more: int) -> bool:
        """Whether as many fit behind the first `count`, which nobody has gone on from before."""
        memory = self.tensors[0]
        is_ours = torch.is_inference_mode_enabled() or not memory.is_inference()
        return self.taken == count and count + more <= len(memory) and is_ours

    def put(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Put them behind the others, and return all keys and all values."""
        first, self.taken = self.taken, self.taken + len(key)
        for tensor, new in zip(self.tensors, (key, value), strict=True):
            tensor[first : self.taken] = new
        return [tensor[: self.taken] for tensor in self.tensors]


AttentionToSteps: TypeAlias = Callable[[Tensor, Steps, float, Tensor | None], Tensor]


def attention_to_steps(
    like: Tensor,
    heads: int,
    size: int,
    *,
    modulator: Any = None,
    sink: float | Tensor | None = None,
    length_scale: float | Tensor | None = None,
) -> AttentionToSteps | None:
    """Return `attend(query, steps, scale, hidden)`, attention of hypotheses to keys that they share
    and without gradients, or None where no kernel can.

    Its query is (R, H, D), the last word of each hypothesis, and what it returns too. The hidden
    states, (R, 1, 1, any size), are for a gate, which calls it and is called in the same way.
    Equivalent to: fused_attention(query[:, :, None], *(x[steps.ancestors].transpose(1, 2)
        for x in (steps.keys, steps.values)), None, False, 0.0, scale, ...)[:, :, 0]

    Args:
        like: a tensor of the dtype and on the device of the query.
        heads, size: H and D.
        modulator, sink, length_scale: as `fused_attention`.
    """
    able = size % operators.STEP_SIZES == 0 and like.numel() > 0
    able = able and not is_autocast(like.device.type)  # whose projections are not float32
    able = able and (modulator is None or is_known(modulator))
    able = able and _fit_heads(like, heads, sink, length_scale)
    table: Tensor | None = None
    if able and modulator is not None:
        table = table_of(modulator)[0].detach().float()
        able = fits_heads(modulator, heads) and table.device == like.device
    if choose("", "auto", like, able=able, dtypes=(torch.float32,)) != "cpp":
        return None

    @torch.no_grad()
    def attend(query: Tensor, steps: Steps, scale: float, hidden: Tensor | None = None) -> Tensor:
        if length_scale is not None:
            counts = query.new_full((), steps.ancestors.shape[1])
            query = query * ssmax_scale(counts, length_scale).reshape(-1, 1)
        own_sink = _a_head_each(sink, query)
        return operators.attention_step(query, *steps[:3], table, own_sink, scale)

    return attend


def _fit_heads(like: Tensor, heads: int, *numbers: float | Tensor | None) -> bool:
    """Whether these are one for all heads or one per head, on the device of `like`; the plain form
    knows what else there may be, and says what may not."""
    for number in numbers:
        if isinstance(number, Tensor):
            given = number.shape[-3] if number.dim() > 2 else 1
            fits = given in (1, heads) and number.numel() == given
            if not fits or not number.is_floating_point() or number.device != like.device:
                return False
        elif number is not None and not (is_finite(number) or number == -torch.inf):
            return False
    return True


def _a_head_each(number: float | Tensor | None, query: Tensor) -> Tensor | None:
    """The number of each head, (H,) float32."""
    if number is None:
        return None
    if not isinstance(number, Tensor):
        return query.new_full(query.shape[1:2], float(number), dtype=torch.float32)
    return number.float().reshape(-1).expand(query.shape[1])


def _key_counts(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """As `key_counts` of the scores, without making a mask of both where none is needed."""
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is not None and (mask.dim() == 0 or queries == 0 or keys == 0):
        mask = None  # all keys or none, or no query: then no count is read
    if is_causal and mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
        mask, is_causal = with_future(mask, queries, keys, query.device), False
    if not is_causal:
        return key_counts(query.new_empty(()).expand(*query.shape[:-1], keys), -1, mask)
    last = torch.arange(queries, device=query.device).clamp(max=keys - 1)
    if mask is None:
        return (last + 1).clamp(min=1).float()[:, None]
    kept = (~hidden_keys(mask)).expand(*mask.shape[:-1], keys)
    counts = kept.cumsum(-1).index_select(-1, last).clamp(min=1).float()
    return counts.unsqueeze(-1) if mask.dim() == 1 else counts.mT


def _filled_up(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, tensor)
        if tensor.dim() < 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{name} must be floating-point (..., length, size), got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        operators.check_device(name, tensor, query, "query")
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
    if attn_mask is not None:
        _check_mask(attn_mask, (*batch, query.shape[-2], key.shape[-2]), query)
    check_flag("is_causal", is_causal)
    check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p must be in [0, 1], got {dropout_p}")
    if scale is not None:
        check_number("scale", scale)


def _check_mask(mask: Tensor, full: tuple[int, ...], query: Tensor) -> None:
    check_tensor("attn_mask", mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"attn_mask must be bool (True may attend) or floating-point (added), got {mask.dtype}"
        )
    operators.check_device("attn_mask", mask, query, "query")
    fits = mask.dim() <= len(full) and all(
        n in (1, m) for n, m in zip(reversed(mask.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(f"attn_mask must be broadcastable to {list(full)}, got {list(mask.shape)}")
