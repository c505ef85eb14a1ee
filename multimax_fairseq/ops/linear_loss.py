"""A loss over the outputs of a linear layer, in chunks of rows: (N, V) logits are never stored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq.ops.backend import is_autocast, traced
from multimax_fairseq.ops.checks import check_device, check_integer, check_tensor
from multimax_fairseq.ops.modulator import (
    AnyModulator,
    has_parameters,
    modulated,
    packed_parameters,
)
from multimax_fairseq.ops.registration import differentiable_once

# Logits of a chunk. On the CPU, a chunk stays in the last-level cache during both passes. On a GPU,
# it fills the matrix units. Each chunk reads the whole weight and its gradient, so a chunk has at
# least MIN_ROWS rows, unless that exceeds MAX_LOGITS.
CHUNK_LOGITS = {"cpu": 2**19, "cuda": 2**27}
MIN_ROWS = {"cpu": 64, "cuda": 2048}
MAX_LOGITS = 2**30
# Half-precision matrix products are fast if rows start at multiples of 16 bytes.
ALIGNMENT = 64


class LossCall(NamedTuple):
    """The arguments of one loss over a linear layer, from the public function to the kernels.

    loss = nll_weight * nll + smooth_weight * smooth + z_weight * lse^2
           + max_weight * (max_k z_k - mean_k z_k), with z = sigma(W h + b),
    lse = log sum_k exp(z_k), nll = lse - z_target and smooth = sum_k (lse - z_k).
    With `entropy`, loss is -sum_k p_k log p_k instead, and nll has a gradient too.

    Attributes:
        features: (N, D), float32, float16 or bfloat16. weight: (V, D). bias: (V,) or None.
        parameters: of the modulator, (1, 8 or 12), or (1, 3) for a soft-cap; float32, from
            `packed_parameters`. None is softmax.
        target: (N,) int64.
        smooth_weight, nll_weight: smooth_weight * V + nll_weight = 1, so that the gradient of z_k
            contains (1 + 2 z_weight lse) p_k.
        ignore_index: targets of this value are ignored.
        chunk_size: rows taken at a time; None chooses.
        entropy: needs nll_weight 1 and the other weights 0.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    parameters: Tensor | None
    target: Tensor
    smooth_weight: float
    nll_weight: float
    z_weight: float
    max_weight: float
    ignore_index: int
    chunk_size: int | None
    entropy: bool

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tensors that may need gradients."""
        return self[:4]

    @property
    def per_row(self) -> Tensor:
        """What the loss reads beside the logits, (N,)."""
        return self.target

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """(N,), of the gradients with respect to loss; (N, 2) for nll and loss with `entropy`."""
        return (*self.target.shape, 2) if self.entropy else self.target.shape


class DivergenceCall(NamedTuple):
    """The arguments of one symmetric divergence over a linear layer.

    Attributes:
        features: (2 N, D), of which row 2 i is compared with row 2 i + 1.
        weight, bias, parameters: as in `LossCall`.
        mask: (N,) bool, True excludes a pair; (2 N,) in chunks.
        chunk_size: pairs taken at a time, None chooses; rows in chunks.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    parameters: Tensor | None
    mask: Tensor
    chunk_size: int | None

    @property
    def per_row(self) -> Tensor:
        """What the divergence reads beside the logits."""
        return self.mask

    @property
    def factor_shape(self) -> tuple[int, ...]:
        """The shape of the gradients with respect to the divergences."""
        return self.mask.shape

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The tensors that may need gradients."""
        return self[:4]


Call = TypeVar("Call", LossCall, DivergenceCall)
# compute(call, factors, needed) -> (nll, loss, *gradients of features, weight, bias, parameters)
Compute = Callable[[Any, Tensor | None, Sequence[bool]], Sequence[Any]]
# one_chunk(scores (R, V), parameters, per_row (R,), factors (R,) or (R, 2) or None)
#     -> (nll (R,), loss (R,), gradient of scores or None, gradient of parameters or None)
OneChunk = Callable[
    [Tensor, Tensor | None, Tensor, Tensor | None],
    tuple[Tensor, Tensor, Tensor | None, Tensor | None],
]


class LinearLoss(torch.autograd.Function):
    """apply(kind, compute, summed, *call) returns (loss, nll) of a call.

    `kind` is LossCall or DivergenceCall.

    If the losses are summed, the forward pass computes the gradients too, while it has the logits.
    In float16 it does not: they would underflow before loss scaling is applied.
    """

    @staticmethod
    def forward(
        ctx: Any, kind: Any, compute: Compute, summed: bool, *arguments: Any
    ) -> tuple[Tensor, Tensor]:
        call = kind(*arguments)
        tensors = (*call.inputs, call.per_row)
        ctx.kind, ctx.compute, ctx.numbers = kind, compute, arguments[len(tensors) :]
        ctx.save_for_backward(*tensors)
        ctx.early = summed and call.features.dtype != torch.float16
        factors = torch.ones_like(call.per_row, dtype=torch.float32) if ctx.early else None
        nll, loss, *ctx.grads = compute(call, factors, ctx.needs_input_grad[3:7])
        if summed:
            loss, nll = loss.sum(), nll.sum()
        if len(call.factor_shape) == 1:
            ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor, grad_nll: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.kind(*ctx.saved_tensors, *ctx.numbers)
        needed = ctx.needs_input_grad[3:7]
        # Return the gradients without a copy. A second backward pass through a retained graph
        # computes them again.
        grads, ctx.grads = ctx.grads, None
        if not ctx.early or grads is None:
            if ctx.early:
                factors = torch.ones_like(call.per_row, dtype=torch.float32)
            else:
                both = len(call.factor_shape) == 2
                factors = torch.stack((grad_nll, grad), -1) if both else grad
            factors = factors.expand(call.factor_shape).contiguous()
            _, _, *grads = ctx.compute(call, factors, needed)
        if ctx.early and torch._C._functorch.is_legacy_batchedtensor(grad):  # is_grads_batched
            grads = [None if g is None else g * grad for g in grads]
        # Reading the value of `grad` on a GPU would synchronise.
        elif ctx.early and (traced() or grad.device.type != "cpu" or grad != 1):
            grads = [None if g is None else g.mul_(grad) for g in grads]
        grad_inputs = (g if n else None for g, n in zip(grads, needed, strict=True))
        # None for `kind`, `compute`, `summed`, what is per row, and the numbers.
        return (None, None, None, *grad_inputs, None, *(None for _ in ctx.numbers))


def through_chunks(
    one_chunk: OneChunk, call: Call, factors: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Return nll and loss of each row, and the gradients of features, weight, bias and parameters.

    No step synchronises with the device.

    Args:
        one_chunk: as `OneChunk`. It may overwrite the scores, which have the dtype of features and
            unit last stride. It returns gradients unless `factors` is None.
        factors: of the call's `factor_shape`; None for no gradients.
        needed: which of features, weight, bias and parameters need gradients.

    Returns:
        nll and loss, (N,), in the dtype of features but at least float32; gradients in the dtypes
        of their inputs, None if not needed. Sums over chunks are computed in the dtype of nll.
    """
    features, weight, bias, parameters = call.inputs
    count, classes, device = len(features), len(weight), features.device
    chunk_size = call.chunk_size
    if chunk_size is None:
        chunk_size = chunk_rows(count, classes, device.type)
    wide = torch.promote_types(features.dtype, torch.float32)
    needed = [n and factors is not None for n in needed]
    if count == 0:
        nll, loss = (torch.zeros(0, dtype=wide, device=device) for _ in range(2))
        pairs = zip((features, weight, bias, parameters), needed, strict=True)
        empty = [t.new_zeros(t.shape) if t is not None and n else None for t, n in pairs]
        return nll, loss, empty
    grad_features, grad_weight, grad_bias, grad_parameters = [None] * 4
    if needed[0]:
        grad_features = torch.empty(features.shape, dtype=features.dtype, device=device)
    if needed[1]:
        dtype = weight.dtype if count <= chunk_size else wide
        grad_weight = torch.empty(weight.shape, dtype=dtype, device=device)
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
        chunk_factors = None if factors is None else factors[rows].to(wide)
        *both, grad_scores, chunk_grad = one_chunk(
            scores, parameters, call.per_row[rows], chunk_factors
        )
        losses.append(both)
        if grad_scores is None:
            continue
        narrow = grad_scores.to(weight.dtype)
        if grad_features is not None:
            torch.mm(narrow, weight, out=grad_features[rows])
        if grad_weight is not None:
            _add_product(grad_weight, narrow.T, inputs, is_first=start == 0)
        if bias is not None and needed[2]:
            part = grad_scores.sum(0, dtype=wide)
            grad_bias = part if grad_bias is None else grad_bias.add_(part)
        if chunk_grad is not None and needed[3]:
            grad_parameters = (
                chunk_grad if grad_parameters is None else grad_parameters.add_(chunk_grad)
            )
    nll, loss = losses[0] if len(losses) == 1 else map(torch.cat, zip(*losses, strict=True))
    grads = zip((grad_features, grad_weight, grad_bias, grad_parameters), call.inputs, strict=True)
    return nll, loss, [None if g is None or t is None else g.to(t.dtype) for g, t in grads]


def chunk_rows(count: int, classes: int, device: str) -> int:
    """Return the chunk size at which all chunks are about equally large."""
    device = device if device in CHUNK_LOGITS else "cuda"
    most = max(MIN_ROWS[device], CHUNK_LOGITS[device] // classes)
    most = min(most, max(64, MAX_LOGITS // classes))
    chunks = max(1, -(-count // most))
    return max(1, -(-count // chunks))


def _add_product(total: Tensor, a: Tensor, b: Tensor, is_first: bool) -> None:
    """Add a @ b to `total` in its dtype; if it is the first, overwrite."""
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
    """Whether this device can accumulate a matrix product of this dtype in float32."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=total)
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
    except (RuntimeError, NotImplementedError):
        return False
    return True


# --- shared by the losses of a linear layer ----------------------------------------------------


def check_linear(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: AnyModulator | None,
) -> None:
    """Raise TypeError or ValueError unless these are a linear layer and its modulator."""
    tensors = [("features", features), ("weight", weight)]
    if bias is not None:
        tensors.append(("bias", bias))
    for name, tensor in tensors:
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating-point, got {tensor.dtype}")
        check_device(name, tensor, features, "features")
        if tensor.dtype != features.dtype and not is_autocast(features.device.type):
            raise ValueError(
                f"{name} is {tensor.dtype}, but features {features.dtype}: cast one of them"
            )
    if features.dim() < 1 or weight.dim() != 2 or features.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"features must be (..., D) and weight (V, D), got {list(features.shape)} and "
            f"{list(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"weight must have at least one class, got {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.shape[0]},), got {list(bias.shape)}")
    if modulator is None:
        return
    if not has_parameters(modulator):
        raise TypeError(f"modulator must be a Modulator, a SoftCap or None, got {modulator!r}")
    if hasattr(modulator, "soft_cap"):
        return
    for coefficient in (modulator.low_coefficient, modulator.high_coefficient):
        if not isinstance(coefficient, Tensor):
            continue  # None, or for packed_parameters to refuse
        check_device("the modulator", coefficient, features, "features")
        if coefficient.dim() == 2:
            raise ValueError(
                "the modulator of an output layer has no heads, got one for "
                f"{coefficient.shape[0]} heads: pass Modulator(num_heads=None)"
            )


def check_reduction(reduction: str, chunk_size: int | None) -> None:
    """Raise TypeError or ValueError for an unknown reduction or a wrong chunk size."""
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"unknown reduction {reduction!r}: choose sum, mean or none")
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size)
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def parameters_or_none(modulator: AnyModulator | None, features: Tensor) -> Tensor | None:
    """Return the parameters of a modulator; None for softmax."""
    return None if modulator is None else packed_parameters(modulator, features.device)[0]


def mean_of(total: Tensor, count: Tensor) -> Tensor:
    """Return total / count; NaN with zero gradient if the count is 0, as torch's own losses."""
    return (total / count.clamp(min=1)).masked_fill(count == 0, torch.nan)


def cast_layer(
    features: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return a linear layer in this dtype; tensors in float64 stay as they are, as in autocast."""
    layer = (features, weight, bias)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in layer)


def cast_for_plain(call: Call) -> Call:
    """Return a call in the dtypes in which the plain form computes: those of F.linear."""
    features, weight, bias, parameters = call.inputs
    if is_autocast(features.device.type):
        dtype = torch.get_autocast_dtype(features.device.type)
        features, weight, bias = cast_layer(features, weight, bias, dtype)
    if parameters is not None:
        parameters = parameters.to(torch.promote_types(features.dtype, torch.float32))
    return call._replace(features=features, weight=weight, bias=bias, parameters=parameters)


def logits_of(call: Call) -> Tensor:
    """Return the modulated logits, (N, V), in float32 or wider."""
    return modulated_logits(F.linear(call.features, call.weight, call.bias), call.parameters)


def modulated_logits(scores: Tensor, parameters: Tensor | None) -> Tensor:
    """Return scores modulated, in float32 or wider."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return scores if parameters is None else modulated(scores, parameters, 2, 2)
