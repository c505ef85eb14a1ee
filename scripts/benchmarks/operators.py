"""Attention, and the output layer with its loss."""

import argparse
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import baselines
from benchmarks.measurement import AUTO, BEST, PLAIN, Case, Contestant, Ready
from multimax_fairseq import (
    Modulator,
    linear_cross_entropy,
    normalize,
    scaled_dot_product_attention,
)

EXPRESSION = "MultiMax (torch expression)"
PRODUCTS = "matrix products"
# The other mappings, their learned parameters per head, and their other options.
MAPPINGS = {
    **{"ssmax": {"length_scale": 0.2}, "softmax1": {}, "sink": {"sink": 0.5}, "topk": {}},
    **{"evsoftmax": {}, "sparsemax": {}, "entmax15": {}, "alpha_entmax": {"alpha": 1.5}},
    **{"softpick": {}, "sigmoid": {}, "asentmax": {"beta": 0.2, "gamma": 0.5}},
    "adaptive_temperature": {},
}
MAPPING_OPTIONS = {"topk": {"k": 8}, "adaptive_temperature": {"training": True}}


def expression(x: Tensor, modulator: Modulator) -> Tensor:
    """sigma(x) in plain PyTorch operations."""
    out = x
    for n in (1, 2):
        low = (modulator.low_threshold[n - 1] - x).relu() ** n
        high = (x - modulator.high_threshold[n - 1]).relu() ** n
        out = out + modulator.low_coefficient[n - 1] * low
        out = out + modulator.high_coefficient[n - 1] * high
    return out


def random(seed: int, args: argparse.Namespace, *shape: int, scale: float = 1.0) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(args.device, getattr(torch, args.dtype))


def some_modulator(args: argparse.Namespace) -> Modulator:
    """A modulator about as far from softmax as a trained one, in the dtype of the model."""
    torch.manual_seed(1)
    return Modulator(init_std=0.1).to(args.device, getattr(torch, args.dtype))


def gradients_of(
    outputs: Callable[[], tuple[Tensor, Tensor | None]], learned: dict[str, Tensor]
) -> Ready:
    """Forward and backward pass; `outputs` returns the output and its gradient."""

    def result() -> dict[str, Tensor]:
        output, grad = outputs()
        grads = torch.autograd.grad(output, list(learned.values()), grad)
        names = [f"gradient of {name}" for name in learned]
        return {"output": output.detach(), **dict(zip(names, grads, strict=True))}

    def step(_: int) -> dict[str, int]:
        result()
        return {}

    return Ready(step, result, sum(t.numel() * t.element_size() for t in learned.values()))


def with_graphs(contestants: dict[str, Contestant], args: argparse.Namespace, *names: str) -> None:
    """Add these contestants as CUDA graphs, which exclude the time of the host."""
    for name in names if args.device == "cuda" else ():
        plain = contestants[name]

        def make_ready(plain: Contestant = plain) -> Ready:
            ready, stream = plain.make(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                ready.step(0)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ready.step(0)

            def step(_: int) -> dict[str, int]:
                graph.replay()
                return {}

            return ready._replace(step=step)

        contestants[f"{name}, CUDA graph"] = plain._replace(make=make_ready)


def share_of_zeros(probs: Tensor, excluded: Tensor | None) -> float:
    """The share of zeros among the weights of keys that are not excluded."""
    zeros = probs == 0
    if excluded is not None:
        zeros = zeros[~excluded.expand_as(zeros)]
    return zeros.float().mean().item()


def products(work: Callable[[], list[Tensor]], learned: dict[str, Tensor]) -> Ready:
    """The matrix products that every implementation needs: a lower bound."""

    def step(_: int) -> dict[str, int]:
        work()
        return {}

    return Ready(step, work, sum(t.numel() * t.element_size() for t in learned.values()))


# --- attention ---------------------------------------------------------------------------------


def attention(args: argparse.Namespace) -> list[Case]:
    if args.checkpoint is not None:
        from benchmarks.trained import trained  # imports fairseq

        return trained(args)
    if args.sweep is None:
        shapes = args.shape
    else:
        batch, heads, _, size = args.shape[0]
        shapes = [(batch, heads, length, size) for length in args.sweep]
    return [attention_case(args, shape) for shape in shapes]


def attention_case(args: argparse.Namespace, shape: tuple[int, ...]) -> Case:
    @functools.cache
    def inputs() -> Inputs:
        return attention_inputs(args, shape)  # once, when the first contestant is built

    def contestant(
        name: str, make_attend: Callable[[Inputs], Callable], backend: str = "auto"
    ) -> Contestant:
        family = name.split()[0]

        def make_ready() -> Ready:
            tensors = inputs()
            attend = make_attend(tensors)
            learned = dict(tensors.parts)
            if family == "MultiMax":
                learned |= dict(tensors.modulator.named_parameters())
            learned |= {option: attend.keywords[option] for option in MAPPINGS.get(family, {})}
            ready = gradients_of(lambda: (attend(*tensors.parts.values()), tensors.grad), learned)
            if backend == "plain" or family not in MAPPINGS:
                return ready
            return ready._replace(zeros=zeros_of(tensors, family))

        return Contestant(make_ready, family, backend)

    def lower_bound() -> Ready:
        tensors = inputs()
        operands = [*(part.detach() for part in tensors.parts.values()), tensors.grad]
        return products(
            lambda: baselines.attention_products(operands, tensors.is_causal), tensors.parts
        )

    multimax = functools.partial(our_attention, normalizer="multimax")
    contestants = {
        "softmax (torch)": contestant("softmax (torch)", torch_attention),
        "softmax (plain)": contestant("softmax (plain)", our_attention, "plain"),
        EXPRESSION: contestant(EXPRESSION, expression_attention),
        PLAIN: contestant(PLAIN, multimax, "plain"),
        AUTO: contestant(AUTO, multimax),
    }
    for name, kind in itertools.product(MAPPINGS if args.rivals else (), ("plain", "auto")):
        attend = functools.partial(our_attention, normalizer=name)
        contestants[f"{name} ({kind})"] = contestant(f"{name} ({kind})", attend, kind)
    others = {"softmax (compiled)": baselines.compiled_attention}
    if args.device == "cuda":
        others["softmax (FlexAttention)"] = baselines.flex_attention
    for name, make in others.items() if args.compile else ():
        contestants[name] = contestant(name, lambda tensors, make=make: make(tensors.mask))
    with_graphs(contestants, args, "softmax (torch)", AUTO)
    contestants[PRODUCTS] = Contestant(lower_bound, PRODUCTS)
    references = [BEST, PRODUCTS, AUTO if args.rivals else EXPRESSION]
    compared = ["softmax (torch)", *(others if args.compile else ())]
    label = f"attention {'x'.join(map(str, shape))}, mask: {args.mask}"
    return Case(label, shape[2], contestants, references, ["seconds"], compared, settles=True)


@dataclass(frozen=True)
class Inputs:
    """The tensors of an attention, and its mask: True = may attend."""

    parts: dict[str, Tensor]  # query, key and value, (B, H, T, D)
    grad: Tensor  # of the output
    modulator: Modulator
    allowed: Tensor | None  # padding, (B, 1, 1, T)
    is_causal: bool

    @property
    def mask(self) -> Tensor | None:
        """The padding and causal masks combined, (B or 1, 1, T or 1, T)."""
        if not self.is_causal:
            return self.allowed
        length = self.grad.shape[2]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.grad.device).tril()
        return causal[None, None] if self.allowed is None else self.allowed & causal

    def parameters(self, normalizer: str) -> dict[str, Tensor]:
        """Return a mapping's learned parameters, one per head."""
        shape = (self.grad.shape[1], 1, 1)
        return {
            name: torch.full(shape, value, device=self.grad.device).requires_grad_()
            for name, value in MAPPINGS.get(normalizer, {}).items()
        }


def attention_inputs(args: argparse.Namespace, shape: tuple[int, ...]) -> Inputs:
    batch, _, length, _ = shape
    names = ("query", "key", "value")
    parts = {n: random(i, args, *shape).requires_grad_() for i, n in enumerate(names)}
    allowed = None
    if args.mask in ("padding", "both"):
        # Sentence lengths from the full length down to half of it.
        lengths = length - torch.arange(batch) * length // (2 * batch)
        allowed = (torch.arange(length) < lengths[:, None])[:, None, None].to(args.device)
    is_causal = args.mask in ("causal", "both")
    return Inputs(parts, random(3, args, *shape), some_modulator(args), allowed, is_causal)


def torch_attention(inputs: Inputs) -> Callable:
    # Without padding, torch's is_causal is faster than a mask; torch refuses both together.
    mask = inputs.mask if inputs.allowed is not None else None
    flag = inputs.is_causal and inputs.allowed is None
    return functools.partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=flag)


def our_attention(inputs: Inputs, normalizer: str = "softmax") -> Callable:
    options: dict[str, Any] = {
        **inputs.parameters(normalizer),
        **MAPPING_OPTIONS.get(normalizer, {}),
    }
    if normalizer == "multimax":
        options["modulator"] = inputs.modulator
    options |= {"attn_mask": inputs.allowed, "is_causal": inputs.is_causal}
    return functools.partial(scaled_dot_product_attention, normalizer=normalizer, **options)


def expression_attention(inputs: Inputs) -> Callable:
    """MultiMax's attention as a user would write it in PyTorch."""
    excluded = None if inputs.mask is None else ~inputs.mask

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query / query.shape[-1] ** 0.5) @ key.transpose(-2, -1)
        scores = expression(scores.float(), inputs.modulator)
        if excluded is not None:
            scores = scores.masked_fill(excluded, -torch.inf)
        return scores.softmax(-1).to(value.dtype) @ value

    return attend


@torch.no_grad()
def zeros_of(inputs: Inputs, normalizer: str) -> float:
    """Return the share of zeros among the weights of the first batch element."""
    mask = inputs.mask
    excluded = None if mask is None else ~mask[:1]
    query, key = inputs.parts["query"][:1], inputs.parts["key"][:1]
    scores = query @ key.mT / query.shape[-1] ** 0.5
    parameters = {n: p.to(scores.dtype) for n, p in inputs.parameters(normalizer).items()}
    options: dict[str, Any] = {**parameters, **MAPPING_OPTIONS.get(normalizer, {})}
    return share_of_zeros(normalize(normalizer, scores, mask=excluded, **options), excluded)


# --- the output layer --------------------------------------------------------------------------


def output(args: argparse.Namespace) -> list[Case]:
    return [output_case(args, size) for size in args.sweep or [args.vocabulary]]


def output_case(args: argparse.Namespace, vocabulary: int) -> Case:
    stock = "softmax (log_softmax)"

    @functools.cache
    def inputs() -> tuple[dict[str, Tensor], Modulator, Tensor]:
        features = random(0, args, args.tokens, args.width)
        weight = random(1, args, vocabulary, args.width, scale=args.width**-0.5)
        generator = torch.Generator().manual_seed(2)
        target = torch.randint(vocabulary, (args.tokens,), generator=generator).to(args.device)
        parts = {"features": features.requires_grad_(), "weight": weight.requires_grad_()}
        return parts, some_modulator(args), target

    def fused(features: Tensor, weight: Tensor, target: Tensor, modulator: Modulator | None):
        return linear_cross_entropy(
            features, weight, target, modulator=modulator, label_smoothing=args.label_smoothing
        )[0]

    def unfused(features: Tensor, weight: Tensor, target: Tensor, modulator: Modulator | None):
        logits = F.linear(features, weight)
        if modulator is not None:
            logits = expression(logits.float(), modulator)
        return baselines.loss_of_logits(logits, target, args.label_smoothing)

    def contestant(loss: Callable, modulated: bool) -> Contestant:
        def make_ready() -> Ready:
            parts, modulator, target = inputs()
            learned = dict(parts) | (dict(modulator.named_parameters()) if modulated else {})
            used = modulator if modulated else None
            return gradients_of(lambda: (loss(*parts.values(), target, used), None), learned)

        return Contestant(make_ready, "MultiMax" if modulated else "softmax")

    def torch_loss(name: str) -> Contestant:
        def make_ready() -> Ready:
            parts, _, target = inputs()
            loss = losses()[name]
            return gradients_of(lambda: (loss(*parts.values(), target), None), parts)

        return Contestant(make_ready, "softmax")

    def losses() -> dict[str, baselines.Loss]:
        by_name = baselines.losses(args.label_smoothing)
        if args.compile:
            by_name["softmax (compiled)"] = baselines.compiled_loss(args.label_smoothing)
        return by_name

    def lower_bound() -> Ready:
        parts, *_ = inputs()
        features, weight = (part.detach() for part in parts.values())

        def work() -> list[Tensor]:
            logits = features @ weight.T
            return [logits @ weight, logits.T @ features]

        return products(work, parts)

    smoothing = f", label smoothing {args.label_smoothing}" if args.label_smoothing else ""
    label = f"output layer, {args.tokens:,} x {vocabulary:,} x {args.width}{smoothing}"
    contestants = {
        stock: contestant(unfused, False),
        **{name: torch_loss(name) for name in losses()},
        PRODUCTS: Contestant(lower_bound, PRODUCTS),
        EXPRESSION: contestant(unfused, True),
        "softmax (fused)": contestant(fused, False),
        "MultiMax (fused)": contestant(fused, True),
    }
    with_graphs(contestants, args, "softmax (F.cross_entropy)", "MultiMax (fused)")
    references = [BEST, PRODUCTS, stock, EXPRESSION]
    compared = [stock, *losses()]
    return Case(label, vocabulary, contestants, references, ["seconds"], compared, settles=True)
