"""What scripts/gpu_check.py compares: attention and losses by the package and by plain PyTorch.

An error is a distance to float64, as a share of what is allowed: twice the error of plain PyTorch
in the same dtype, and some roundings of float32. Plain PyTorch is written out here, not the
package's.
"""

import contextlib
import copy
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.functional.modulator import table_of


class Place(NamedTuple):
    """Where checks run: on "cuda", or on the "cpu" in Triton's interpreter; all of them if full."""

    device: str
    full: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"


class Finding(NamedTuple):
    """The worst figure, what it may be (None: anything), and where it was found or what it means.

    `table` is (title, columns, rows) of what was measured.
    """

    figure: float
    limit: float | None
    note: str
    table: tuple[str, list[str], list[list[str]]] | None = None


class LeftOut(Exception):
    """A check that cannot be made here, and why."""


# Scores and sums are formed in float32 in another order than the plain formula's.
FLOOR = 32 * torch.finfo(torch.float32).eps
# The kernels' doors, through which every use of them goes.
DOORS = {
    "triton_attention": ("attention_forward", "attention_backward"),
    "triton_cross_entropy": ("output_loss",),
    "triton_modulator": ("modulate", "modulate_backward"),
}
ATTENTION, LOSS = DOORS["triton_attention"], DOORS["triton_cross_entropy"]
MODULATOR = "gradient by modulator"


@functools.cache
def calls() -> Counter:
    """How often each of the kernels' functions was called, from the first use of this on."""
    found: Counter = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return counted

    for module_name, names in DOORS.items():
        module = importlib.import_module(f"multimax_fairseq.kernels.{module_name}")
        for name in names:
            setattr(module, name, counting(name, getattr(module, name)))
    return found


@contextlib.contextmanager
def through(*names: str) -> Iterator[None]:
    """RuntimeError if what runs inside does not call these of the kernels' functions, and others.

    Plain PyTorch is silently right: that it was meant to be a kernel has to be checked.
    """
    before = calls().copy()
    yield
    used = calls() - before
    if set(used) != set(names):
        raise RuntimeError(
            f"ran through {', '.join(used) or 'plain PyTorch'}, should be "
            f"{', '.join(names) or 'plain PyTorch'}"
        )


def some_modulator(kind: str, heads: int, device: str) -> Modulator | None:
    """Far from the identity, with sparse and multi-modal signs; a smooth one has no term of the
    first order, whose slope makes a step: of a score beside it, any rounding may change it."""
    if kind == "softmax":
        return None
    terms = "low" if kind == "low side" else "both"
    order = 1 if kind == "first order" else 2
    separate = heads if kind == "separate" else None
    modulator = Modulator(order, terms, separate, monotone=kind == "monotone")
    # The monotone one turns among the scores.
    second = (0.3, -0.1) if kind == "monotone" else (-0.05, -0.03)
    values = {
        "low_coefficient": (-0.9, second[0]),
        "low_threshold": (0.3, -0.4),
        "high_coefficient": (-0.6, second[1]),
        "high_threshold": (0.6, 0.9),
    }
    with torch.no_grad():
        for name, parameter in modulator.named_parameters():
            value = torch.tensor(values[name])[:order]
            rows = 0.05 * torch.arange(heads)[:, None] if separate else 0
            parameter.copy_(value + rows)
            if kind == "smooth" and "coefficient" in name:
                parameter[0] = 0
    return modulator.to(device)


def sigma(x: Tensor, modulator: Modulator | None) -> Tensor:
    """The modulator by its formula, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if modulator is None:
        return x
    table = table_of(modulator)[0].to(x.dtype)
    columns = table.T[:, 0] if len(table) == 1 else table.T[:, :, None, None]
    z = x
    for n in (1, 2):
        z = z + columns[n - 1] * (columns[1 + n] - x).relu() ** n
        z = z + columns[3 + n] * (x - columns[5 + n]).relu() ** n
    if len(columns) == 12:
        low_turn, high_turn, low_offset, high_level = columns[8:]
        z = torch.where(x < low_turn, x + low_offset, z)
        z = torch.where(x > high_turn, high_level, z)
    return z


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modulator: Modulator | None,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention with all probabilities, in the dtype of the inputs but for the softmax."""
    z = sigma((query * query.shape[-1] ** -0.5) @ key.mT, modulator)
    if mask is not None:
        z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.to(z.dtype)
    if causal:
        future = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).triu(1)
        z = z.masked_fill(future, -math.inf)
    some = (z > -math.inf).any(-1, keepdim=True)
    probs = torch.where(some, z, 0.0).softmax(-1) * some
    return probs.to(value.dtype) @ value


def our_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    modulator: Modulator | None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    return scaled_dot_product_attention(
        *(query, key, value),
        normalizer="softmax" if modulator is None else "multimax",
        modulator=modulator,
        attn_mask=mask,
        is_causal=causal,
        dropout_p=dropout_p,
    )


def step(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    modulator: Modulator | None,
    grad: Tensor | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Forward and backward: the output, and the gradients by inputs and modulator."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    learned = [] if modulator is None else list(modulator.parameters())
    out = function(*inputs, modulator, **options)
    given = None if grad is None else grad.to(out.dtype)
    grads = torch.autograd.grad(out, [*inputs, *learned], given)
    found = {"output": out.detach()}
    for name, value in zip(("1st", "2nd", "3rd"), grads[: len(inputs)], strict=False):
        found[f"gradient by {name} input"] = value
    if learned:
        rest = grads[len(inputs) :]
        found[MODULATOR] = torch.cat([g.double().flatten() for g in rest])
    return found


def doubled(value: Any) -> Any:
    """In float64 what is floating."""
    if isinstance(value, Modulator):
        return copy.deepcopy(value).double()
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return [doubled(v) for v in value] if isinstance(value, list) else value


class Errors(NamedTuple):
    """A case's largest share of the allowed error, and of what it is.

    What the modulator's gradient is off by, here and of plain PyTorch, as shares of the largest
    gradient, is judged over all cases together: of a few sums that cancel, an error is luck.
    """

    share: float
    where: str
    ours: float = 0.0
    plain: float = 0.0


def error(
    ours: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], where: str
) -> Errors:
    top = max(truth.norm().item() for truth in exact.values())
    found, learned = [], (0.0, 0.0)
    for name, truth in exact.items():
        if ours[name].shape != truth.shape:
            return Errors(math.inf, f"{where}: {name} has the shape {list(ours[name].shape)}")
        off, allowed = ((t[name].double() - truth).norm().item() for t in (ours, plain))
        if name == MODULATOR and top > 0 and math.isfinite(off):
            learned = off / top, allowed / top
            continue
        # Of a sum that is zero, the rounding is that of its terms.
        allowed = 2 * allowed + FLOOR * max(truth.norm().item(), top / 4)
        share = 0.0 if off == 0 else off / allowed if allowed > 0 else math.inf
        found.append((math.inf if math.isnan(share) else share, f"{where}: {name}"))
    return Errors(*max(found), *learned)


def worst(found: Iterable[Errors]) -> Finding:
    """Of shares of the allowed error."""
    cases = list(found)
    shares = [(case.share, case.where) for case in cases]
    ours, plain = (
        math.hypot(*(getattr(case, name) for case in cases)) for name in ("ours", "plain")
    )
    shares.append((ours / (2 * plain + FLOOR), f"{MODULATOR}, over all cases"))
    figure, where = max(shares)
    return Finding(figure, 1.0, f"of the allowed error, in {len(cases)} cases; {where}")


def against_plain(
    place: Place,
    inputs: list[Tensor],
    kind: str,
    where: str,
    names: Sequence[str] = ATTENTION,
    **options: Any,
) -> Errors:
    """An attention's error, when it ran through the kernels of these names."""
    *inputs, grad = inputs
    modulator = some_modulator(kind, inputs[0].shape[1], place.device)
    with through(*names):
        ours = step(our_attention, inputs, modulator, grad, **options)
    if ours["output"].dtype != inputs[0].dtype:
        raise RuntimeError(f"{where}: the output is {ours['output'].dtype}")
    plain = step(plain_attention, inputs, modulator, grad, **options)
    wide = {name: doubled(value) for name, value in options.items()}
    exact = step(plain_attention, doubled(inputs), doubled(modulator), doubled(grad), **wide)
    return error(ours, plain, exact, where)


def random(place: Place, dtype: str, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(place.device, getattr(torch, dtype))


def attention_inputs(
    place: Place,
    dtype: str,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    size: int,
    seed: int = 0,
) -> list[Tensor]:
    """Query, key, value and the gradient by the output."""
    parts = ((queries, 1.5), (keys, 1.5), (keys, 1.0), (queries, 1.0))
    return [
        random(place, dtype, batch, heads, length, size, seed=4 * seed + number, scale=scale)
        for number, (length, scale) in enumerate(parts)
    ]


def masking(place: Place, kind: str, batch: int, queries: int, keys: int) -> dict[str, Any]:
    """The arguments of attention that mask: of a bool one, True may be attended to."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([keys, *[keys // 2] * (batch - 1)])[:, None]
    padding = (torch.arange(keys) < lengths).view(batch, 1, 1, keys)
    mask = None
    if "padding" in kind:
        mask = padding
    elif kind == "full":  # with holes, and a row of nothing else
        mask = torch.rand(batch, 1, queries, keys, generator=generator) < 0.6
        mask[0, :, queries // 2] = False
    elif kind == "added":
        mask = torch.randn(batch, 1, queries, keys, generator=generator)
        mask = mask.masked_fill(~padding, -math.inf)
        mask[:, :, 0] = -math.inf
    elif kind == "bias":  # a slope over relative positions
        mask = -0.1 * (torch.arange(keys) - torch.arange(queries)[:, None]).abs().float()
    return {"mask": None if mask is None else mask.to(place.device), "causal": "causal" in kind}


def plain_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor,
    modulator: Modulator | None,
    target: Tensor,
    smoothing: float = 0.0,
    reduction: str = "sum",
    **_: Any,
) -> Tensor:
    log_probs = sigma(F.linear(features, weight, bias), modulator).log_softmax(-1)
    nll = -log_probs.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    share = smoothing / (len(weight) - 1)
    losses = (1 - smoothing - share) * nll - share * log_probs.sum(-1)
    losses = losses.masked_fill(target == -1, 0.0)
    if reduction == "mean":
        return losses.sum() / (target != -1).sum()
    return losses.sum() if reduction == "sum" else losses


def our_loss(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    modulator: Modulator | None,
    target: Tensor,
    smoothing: float = 0.0,
    **options: Any,
) -> Tensor:
    return linear_cross_entropy(
        *(features, weight, target),
        bias=bias,
        modulator=modulator,
        label_smoothing=smoothing,
        ignore_index=-1,
        **options,
    )[0]


def loss_inputs(
    place: Place, dtype: str, tokens: int, classes: int, width: int, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    inputs = [
        random(place, dtype, *shape, seed=3 * seed + number, scale=0.4)
        for number, shape in enumerate(((tokens, width), (classes, width), (classes,)))
    ]
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(3))
    target[::5] = -1
    return inputs, target.to(place.device)
