"""Cross-entropy of MultiMax or softmax over a linear layer, without holding all logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from multimax_fairseq.ops import native
from multimax_fairseq.ops.backend import choose, needs_plain_operations, on_triton
from multimax_fairseq.ops.checks import (
    DTYPES,
    check_device,
    check_float,
    check_integer,
    check_number,
    check_tensor,
)
from multimax_fairseq.ops.linear_loss import (
    LinearLoss,
    LossCall,
    cast_for_plain,
    cast_layer,
    check_linear,
    check_reduction,
    logits_of,
    mean_of,
    modulated_logits,
    parameters_or_none,
    through_chunks,
)
from multimax_fairseq.ops.modulator import (
    AnyModulator,
    check_parameters,
    modulated_gradients,
)
from multimax_fairseq.ops.registration import (
    Operator,
    define,
    needs_gradient,
    schema_of,
    without_gradient,
)

# Limits of a chunk in the C++ kernel. Larger chunks read the weight less often, but with more
# tokens a tile would not stay in the L2 cache.
CHUNK_LOGITS, CHUNK_TOKENS = 70_000_000, 512
# Floats of the widest vector. A chunk is padded to a multiple of it.
MAX_LANES = 16


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    modulator: AnyModulator | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    maxsup: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "sum",
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of MultiMax (or softmax) over the outputs of a linear layer.

        loss = (1 - e - e_i) nll - e_i sum_k log p_k
               + z_loss (log sum_k exp(z_k))^2 + maxsup (max_k z_k - mean_k z_k)
        nll = log sum_k exp(z_k) - z_y,  z = sigma(W h + b)
        e = label_smoothing,  e_i = e / (V - 1)
    Equivalent to: F.cross_entropy(modulator(F.linear(features, weight, bias)), target) without
    label smoothing. With it, e is spread over the V - 1 other classes, as in fairseq.

    Forward and backward pass run together on each chunk of rows, so the (N, V) logits are never
    stored. With reduction "none" and in float16, the backward pass computes the logits again.

    Args:
        features: (N, D) or (..., D), floating.
        weight: (V, D), of the dtype of features.
        target: the leading shape of features, an integer type.
        bias: (V,), of the dtype of features.
        modulator: a `Modulator` with shared heads, or a `SoftCap`; None is softmax.
        label_smoothing: in [0, 1).
        z_loss: at least 0; it keeps the logits from growing, as in PaLM (Chowdhery et al. 2022).
        maxsup: at least 0; max suppression, in place of label smoothing (Zhou et al. 2025).
        ignore_index: targets of this value are ignored.
        reduction: "sum", "mean" (over the targets that count; NaN if none does) or "none".
        chunk_size: rows taken at a time; None chooses.

    Returns:
        (loss, nll_loss), both in nats and float32 or wider: scalars, or the shape of target for
        "none". nll_loss has no gradient.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: shapes, dtypes or devices that do not match; a modulator per head; an unknown
            reduction; label smoothing, z_loss or maxsup out of range; a chunk size below 1; on
            the CPU, a target that is neither one of the V classes nor ignore_index. On other
            devices and under torch.compile, such a target gives NaN.
    """
    check_linear(features, weight, bias, modulator)
    target = _checked_target(features, target)
    check_integer("ignore_index", ignore_index)
    check_reduction(reduction, chunk_size)
    check_number("label_smoothing", label_smoothing)
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    for name, value in (("z_loss", z_loss), ("maxsup", maxsup)):
        check_number(name, value)
        if not 0 <= value < torch.inf:
            raise ValueError(f"{name} must be finite and at least 0, got {value}")
    shape, classes = target.shape, weight.shape[0]
    target = target.reshape(-1)
    rows = features.reshape(target.shape[0], features.shape[-1])
    smooth_weight = float(label_smoothing) / max(classes - 1, 1)
    # Not 1 - label_smoothing - smooth_weight, which differs if there is a single class.
    nll_weight = 1 - smooth_weight * classes
    summed = reduction != "none"
    parameters = parameters_or_none(modulator, features)
    weights = (smooth_weight, nll_weight, float(z_loss), float(maxsup))
    numbers = (*weights, ignore_index, chunk_size, False)
    call = LossCall(rows, weight, bias, parameters, target, *numbers)
    loss, nll_loss = _loss_of(call, summed)
    if not summed:
        return loss.view(shape), nll_loss.view(shape)
    if reduction == "mean":
        count = (target != ignore_index).sum()
        loss, nll_loss = mean_of(loss, count), mean_of(nll_loss, count)
    return loss, nll_loss


def linear_log_probs(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    modulator: AnyModulator | None = None,
    ignore_index: int = -100,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the targets' log-probabilities under a linear layer, and the entropy of each row.

        log_probs = log p_y,  entropy = -sum_k p_k log p_k,  p = softmax(sigma(W h + b))
    Equivalent to: with log_p the log_softmax of modulator(F.linear(features, weight, bias)),
    log_p.gather(-1, target[..., None])[..., 0] and -(log_p.exp() * log_p).sum(-1)

    Policy-gradient methods such as PPO need both for each token. Both have gradients. One pass over
    the classes computes both, and the backward pass computes the logits again, so the (N, V) logits
    are never stored.

    Args:
        features, weight, target, bias, modulator, chunk_size: as `linear_cross_entropy`.
        ignore_index: for targets of this value, both results are 0 and have no gradient.

    Returns:
        (log_probs, entropy), both in nats, of the shape of target and in float32 or wider.

    Raises:
        TypeError, ValueError: as `linear_cross_entropy`.
    """
    check_linear(features, weight, bias, modulator)
    target = _checked_target(features, target)
    check_integer("ignore_index", ignore_index)
    check_reduction("none", chunk_size)
    rows = features.reshape(target.numel(), features.shape[-1])
    parameters = parameters_or_none(modulator, features)
    call = LossCall(
        features=rows,
        weight=weight,
        bias=bias,
        parameters=parameters,
        target=target.reshape(-1),
        smooth_weight=0.0,
        nll_weight=1.0,
        z_weight=0.0,
        max_weight=0.0,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        entropy=True,  # as the loss
    )
    entropy, nll = _loss_of(call, summed=False)
    return -nll.view(target.shape), entropy.view(target.shape)


def _loss_of(call: LossCall, summed: bool) -> tuple[Tensor, Tensor]:
    """Return loss and nll, from the kernel that supports the call or from plain PyTorch."""
    # A GPU kernel would round the maximum differently in its two passes.
    is_unsupported = call.max_weight and on_triton(call.features.device)
    unsupported = "maxsup has no kernel on a GPU" if is_unsupported else ""
    if linear_backend("output loss", *call.inputs, unsupported) == "plain":
        return _plain(call, summed)
    parameters = None if call.parameters is None else call.parameters.float()
    return output_loss(*call._replace(parameters=parameters), summed)


def _checked_target(features: Tensor, target: Tensor) -> Tensor:
    """Return the targets as int64."""
    check_tensor("target", target)
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise ValueError(f"target must be of an integer type, got {target.dtype}")
    if target.dtype == torch.uint64:
        raise ValueError("target is torch.uint64, which int64 cannot hold: cast it")
    if target.shape != features.shape[:-1]:
        raise ValueError(
            f"target must be {list(features.shape[:-1])}, as features {list(features.shape)}, got "
            f"{list(target.shape)}"
        )
    check_device("target", target, features, "features")
    return target.long()


def linear_backend(
    operation: str,
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    parameters: Tensor | None,
    unsupported: str = "",
) -> str:
    """Return the backend for a linear layer and its modulator, as `choose`."""
    if parameters is not None and (len(parameters) > 1 or parameters.device != features.device):
        unsupported = "the modulator has heads, or is for another device"
    elif features.numel() == 0 or weight.numel() == 0:
        unsupported = "a tensor is empty"
    return choose(
        operation,
        "auto",
        *(features, weight, bias),
        unsupported=unsupported,
        # The C++ kernel computes in float32; a narrower weight would need a copy.
        dtypes=DTYPES if on_triton(features.device) else (torch.float32,),
    )


# --- plain PyTorch -----------------------------------------------------------------------------


def _plain(call: LossCall, summed: bool) -> tuple[Tensor, Tensor]:
    call = cast_for_plain(call)
    if needs_plain_operations(*call.inputs, call.target):  # torch differentiates it
        nll, loss, _ = _losses(logits_of(call), call.target, call)
    else:
        if call.target.device.type == "cpu":
            _check_range(call)
        if needs_gradient(*call.inputs):
            return LinearLoss.apply(LossCall, _plain_parts, summed, *call)
        nll, loss = _plain_parts(call, None, (False,) * 4)[:2]
    nll = nll if call.entropy else nll.detach()
    return (loss.sum(), nll.sum()) if summed else (loss, nll)


def _check_range(call: LossCall) -> None:
    target, classes = call.target, call.weight.shape[0]
    wrong = target[((target < 0) | (target >= classes)) & (target != call.ignore_index)]
    if len(wrong) > 0:
        raise ValueError(
            f"target {int(wrong[0])} is neither one of {classes} classes nor ignore_index "
            f"{call.ignore_index}"
        )


def _losses(logits: Tensor, target: Tensor, call: LossCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return nll, loss and log-sum-exp of each row of logits (N, V).

    nll and loss are NaN for a target that is not a class.
    """
    classes = logits.shape[-1]
    log_total = logits.logsumexp(-1)
    logit = logits.gather(-1, target.clamp(0, classes - 1).unsqueeze(-1)).squeeze(-1)
    logit = logit.masked_fill((target < 0) | (target >= classes), torch.nan)
    ignored = target == call.ignore_index
    nll = log_total - logit
    loss = nll.clone()
    if call.smooth_weight:
        loss = call.nll_weight * nll
        loss = loss + call.smooth_weight * (classes * log_total - logits.sum(-1))
    if call.z_weight:
        loss = loss + call.z_weight * log_total.square()
    if call.max_weight:
        loss = loss + call.max_weight * (logits.amax(-1) - logits.mean(-1))
    if call.entropy:
        log_probs = logits.log_softmax(-1)
        probs = log_probs.exp()
        loss = -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)
    return nll.masked_fill(ignored, 0.0), loss.masked_fill(ignored, 0.0), log_total


def _plain_parts(call: LossCall, factors: Tensor | None, needed: Sequence[bool]) -> tuple[Any, ...]:
    """Compute `output_loss_parts` in plain PyTorch, over chunks of rows."""

    def one_chunk(
        scores: Tensor, parameters: Tensor | None, target: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        logits = modulated_logits(scores, parameters)
        nll, loss, log_total = _losses(logits, target, call)
        if factors is None:
            return nll, loss, None, None
        # nll and smooth together contain p once, because smooth_weight * V + nll_weight = 1.
        grad = logits.softmax(-1)
        of_entropy = None
        if call.entropy:
            # The gradient of the entropy is -p (log p + entropy).
            factors, factors_of_entropy = factors.unbind(-1)
            of_entropy = (logits - (log_total - loss).unsqueeze(-1)).masked_fill_(grad == 0, 0.0)
            of_entropy.mul_(grad).mul_(-factors_of_entropy.unsqueeze(-1))
        if call.z_weight:
            grad.mul_((1 + 2 * call.z_weight * log_total).unsqueeze(-1))
        grad.sub_(call.smooth_weight + call.max_weight / logits.shape[-1])
        if call.max_weight:
            is_max = logits == logits.amax(-1, keepdim=True)
            grad.add_(is_max / is_max.sum(-1, keepdim=True), alpha=call.max_weight)
        index = target.clamp(0, logits.shape[-1] - 1).unsqueeze(-1)
        grad.scatter_add_(-1, index, grad.new_full((), -call.nll_weight).expand(index.shape))
        factors = factors.masked_fill(nll.isnan(), torch.nan).unsqueeze(-1)
        ignored = (target == call.ignore_index).unsqueeze(-1)
        grad.mul_(factors)
        if of_entropy is not None:
            grad.add_(of_entropy)
        grad.masked_fill_(ignored, 0.0)
        if parameters is None:
            return nll, loss, grad, None
        return nll, loss, *modulated_gradients(grad, scores.to(grad.dtype), parameters, 2, 2)

    nll, loss, grads = through_chunks(one_chunk, call, factors, needed)
    return nll, loss, *grads


# --- torch.ops.multimax_fairseq.output_loss_parts ----------------------------------------------

_ARGUMENTS = schema_of(LossCall)


def check_output(
    features: Tensor, weight: Tensor, bias: Tensor | None, parameters: Tensor | None
) -> None:
    """Raise ValueError unless the kernels can take this linear layer and parameters."""
    if features.dim() != 2 or weight.dim() != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, D) and weight (V, D), got {list(features.shape)} and "
            f"{list(weight.shape)}"
        )
    if weight.shape[0] == 0 or weight.shape[1] == 0:
        raise ValueError(f"weight must have classes and a width, got {list(weight.shape)}")
    check_float("features", features, features, "features")
    check_float("weight", weight, features, "features")
    if bias is not None:
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be ({weight.shape[0]},), got {list(bias.shape)}")
        check_float("bias", bias, features, "features")
    if parameters is not None:
        check_parameters(parameters, None, features, "features")


def _check_loss(call: LossCall) -> None:
    check_output(*call.inputs)
    _check_rows("target", call.target, torch.int64, call.features.shape[:1], call.features)
    if call.chunk_size is not None and call.chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {call.chunk_size}")
    if call.max_weight and on_triton(call.features.device):
        raise ValueError(f"max_weight must be 0 on a GPU, got {call.max_weight}")
    weights = (call.smooth_weight, call.nll_weight, call.z_weight, call.max_weight)
    if call.entropy and weights != (0, 1, 0, 0):
        raise ValueError(f"entropy needs nll_weight 1 and the other weights 0, got {weights}")


def _check_rows(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], features: Tensor
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    check_device(name, tensor, features, "features")


def _check_parts(*inputs: Any) -> None:
    *arguments, factors, needed = inputs
    call = LossCall(*arguments)
    _check_loss(call)
    if factors is not None:
        _check_rows("factors", factors, torch.float32, call.factor_shape, call.features)
    if len(needed) != 4:
        raise ValueError(
            "needed must have an entry for features, weight, bias and parameters, got "
            f"{list(needed)}"
        )


def _output_loss_parts(*inputs: Any) -> tuple[Tensor, ...]:
    """Return nll and loss, (N,) float32, 0 if ignored, and the gradients; empty if not needed.

    The last two inputs are factors, float32 of the call's `factor_shape`, None for no gradients;
    and which of features, weight, bias and parameters need gradients.
    """
    *arguments, factors, needed = inputs
    call = LossCall(*arguments)
    classes = len(call.weight)
    # Not in `check`, which torch.compile traces with symbolic sizes.
    if not abs(call.smooth_weight * classes + call.nll_weight - 1) < 1e-6:
        raise ValueError(
            f"smooth_weight * {classes} + nll_weight must be 1, got smooth_weight "
            f"{call.smooth_weight} and nll_weight {call.nll_weight}"
        )
    if on_triton(call.features.device):
        from multimax_fairseq.ops.triton import cross_entropy

        nll, loss, grads = cross_entropy.output_loss(call, factors, needed)
    else:
        nll, loss, grads = _run_cpp(call, factors, needed)
    pairs = zip(grads, call.inputs, strict=True)
    return nll, loss, *(_or_empty(call, g, t) for g, t in pairs)


def _or_empty(call: LossCall, grad: Tensor | None, tensor: Tensor | None) -> Tensor:
    if grad is None or tensor is None:
        return call.features.new_empty(0)
    return grad.to(tensor.dtype)


def _output_loss_parts_fake(*inputs: Any) -> tuple[Tensor, ...]:
    *arguments, factors, needed = inputs
    call = LossCall(*arguments)
    target = call.target
    nll, loss = (target.new_empty(target.shape, dtype=torch.float32) for _ in range(2))
    grads = (
        call.features.new_empty(0)
        if t is None or factors is None or not need
        else t.new_empty(t.shape)
        for t, need in zip(call.inputs, needed, strict=True)
    )
    return nll, loss, *grads


output_loss_parts: Operator = define(
    f"output_loss_parts({_ARGUMENTS}, Tensor? factors, bool[] needed) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_parts,
    kernel=_output_loss_parts,
    fake=_output_loss_parts_fake,
    autograd=without_gradient("output_loss_parts"),
)


def _run_cpp(
    call: LossCall, factors: Tensor | None, needed: Sequence[bool]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Call the C++ kernel; ValueError for a target that is neither a class nor ignore_index."""
    features, weight, bias, parameters = native.in_float32(*call.inputs)
    tokens, (classes, size) = len(call.target), weight.shape
    chunk_size = call.chunk_size
    if chunk_size is None:
        most = max(16, min(CHUNK_TOKENS, CHUNK_LOGITS // classes))
        # The logits of so few tokens fit into the buffer of the weight's gradient.
        in_gradient = min(CHUNK_TOKENS, size // MAX_LANES * MAX_LANES)
        if factors is not None and needed[1] and tokens <= in_gradient:
            most = in_gradient
        chunks = max(1, -(-tokens // most))
        chunk_size = max(1, -(-tokens // chunks))
    nll, loss = features.new_empty(2, tokens, dtype=torch.float64)
    grads: list[Tensor | None] = [None] * 3
    grad_parameters = features.new_zeros(1, 12, dtype=torch.float64)
    if factors is not None:
        layer = zip((features, weight, bias), needed, strict=False)
        grads = [t.new_empty(t.shape) if t is not None and need else None for t, need in layer]
    status = native.call(
        "output_loss",
        native.OutputLoss,
        chunk=chunk_size,
        ignore_index=call.ignore_index,
        entropy=call.entropy,
        smooth_weight=call.smooth_weight,
        nll_weight=call.nll_weight,
        z_weight=call.z_weight,
        max_weight=call.max_weight,
        target=call.target.contiguous(),
        factors=None if factors is None else factors.contiguous(),
        nll=nll,
        loss=loss,
        grad_features=grads[0],
        grad_weight=grads[1],
        grad_bias=grads[2],
        grad_parameters=grad_parameters,
        **native.linear_layer(features, weight, bias, parameters),
    )
    if status < 0:
        raise ValueError(
            f"target {int(call.target[-1 - status])} is neither one of {classes} classes nor "
            f"ignore_index {call.ignore_index}"
        )
    grads.append(None)
    if parameters is not None and factors is not None and needed[3]:
        grads[3] = grad_parameters[:, : parameters.shape[1]].float()
    return nll.float(), loss.float(), grads


# --- torch.ops.multimax_fairseq.output_loss ----------------------------------------------------


def _check_output_loss(*inputs: Any) -> None:
    *arguments, summed = inputs
    call = LossCall(*arguments)
    _check_loss(call)
    if call.entropy and summed:
        raise ValueError("entropy is for each row: pass summed=False")


def _compute(call: LossCall, factors: Tensor | None, needed: Sequence[bool]) -> Any:
    return output_loss_parts(*call, factors, needed)


def _output_loss(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return (loss, nll), (N,) or, if `summed`, scalars; float32."""
    *arguments, summed = inputs
    call = LossCall(*arguments)
    nll, loss, *_ = _output_loss_parts(*call, None, (False,) * 4)
    return (loss.sum(), nll.sum()) if summed else (loss, nll)


def _output_loss_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    *arguments, summed = inputs
    call = LossCall(*arguments)
    shape = () if summed else call.target.shape
    loss, nll = (call.features.new_empty(shape, dtype=torch.float32) for _ in range(2))
    return loss, nll


def _output_loss_autograd(below: Callable[..., Any], *inputs: Any) -> Any:
    *arguments, summed = inputs
    call = LossCall(*arguments)
    if not needs_gradient(*call.inputs):
        return below(*inputs)
    return LinearLoss.apply(LossCall, _compute, summed, *call)


def cast_output(
    features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Any, ...]:
    """Cast the inputs of an output layer as autocast requires.

    On a GPU this is the dtype of matrix products. On the CPU the kernel always computes in float32;
    the widest dtype avoids a copy of the weight.
    """
    device = features.device.type
    if device == "cpu":
        dtype = torch.promote_types(features.dtype, weight.dtype)
    else:
        dtype = torch.get_autocast_dtype(device)
    return *cast_layer(features, weight, bias, dtype), *rest


output_loss: Operator = define(
    f"output_loss({_ARGUMENTS}, bool summed) -> (Tensor, Tensor)",
    check=_check_output_loss,
    kernel=_output_loss,
    fake=_output_loss_fake,
    autograd=_output_loss_autograd,
    autocast=cast_output,
)
