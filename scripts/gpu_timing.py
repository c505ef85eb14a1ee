"""What scripts/gpu_check.py times: forward and backward, ours against torch's own.

All contestants take their turns in every round, and a ratio is the median over the rounds of the
ratio within a round. A contestant that cannot run here has the reason in its row; that ours cannot
is a failed check.
"""

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from gpu_reference import (
    Finding,
    Place,
    our_attention,
    our_loss,
    plain_attention,
    plain_loss,
    random,
    sigma,
    some_modulator,
)
from torch import Tensor

Step = Callable[[], Any]
ROUNDS, WARMUP = 15, 3
# Seconds that a turn should take at least, for the clock and for launches to matter little.
TURN = 4e-3
SHAPES = [
    ((16, 16, 1024, 64), "causal"),
    ((4, 8, 512, 64), "causal"),
    ((8, 16, 2048, 128), "causal"),
    ((32, 8, 128, 64), "padding"),
]
LOSSES = [(8192, 32768, 512), (2048, 267744, 512)]
OURS = "MultiMax (ours)"
# Ends a contestant's name; such steps come after the same step as it is, which compiles.
AS_GRAPH = ", as a CUDA graph"


# --- measurement -------------------------------------------------------------------------------


def seconds(place: Place, step: Step, times: int) -> float:
    """What a step takes on the device, of so many in a row."""
    if not place.is_gpu:
        begin = time.perf_counter()
        for _ in range(times):
            step()
        return (time.perf_counter() - begin) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def peak(place: Place, step: Step) -> str:
    """What a step takes of memory beyond what is there, in MB."""
    if not place.is_gpu:
        return ""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return f"{(torch.cuda.max_memory_allocated() - before) / 1e6:,.0f}"


def contest(place: Place, title: str, contestants: dict[str, Step], reference: str) -> Finding:
    """The time of each, and as a share of the reference's; the figure is ours."""
    # So many forms of one function are not compiled, even if they come from different checks.
    torch.compiler.reset()
    ready: dict[str, tuple[Step, int]] = {}
    refused: dict[str, str] = {}
    for name, step in contestants.items():
        try:
            step = graphed(step) if name.endswith(AS_GRAPH) else step
            for _ in range(WARMUP):
                step()
            times = max(1, min(50, round(TURN / max(seconds(place, step, 2), 1e-6))))
            ready[name] = step, times
        except Exception as error:
            if name == OURS:
                raise
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            refused[name] = f"{type(error).__name__}: {lines[0][:80] if lines else ''}"
        # What a refused one held is for the next.
        gc.collect()
    found: dict[str, list[float]] = {name: [] for name in ready}
    for number in range(ROUNDS):
        names = list(ready)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(seconds(place, *ready[name]))
    if reference not in ready:
        raise RuntimeError(f"{reference}, which all are compared with: {refused[reference]}")
    rows = []
    for name in contestants:
        if name in refused:
            rows.append([name, "", "", "", refused[name]])
            continue
        low, middle, high = statistics.quantiles(found[name], n=4)
        ratio = statistics.median(map(share, found[name], found[reference]))
        rows.append(
            [name, f"{1e3 * middle:.3f}", f"{1e3 * low:.3f} to {1e3 * high:.3f}", f"{ratio:.2f}"]
            + [peak(place, ready[name][0])]
        )
    ours = statistics.median(map(share, found[OURS], found[reference]))
    heads = ["", "ms", "quartiles", f"of {reference}", "MB beyond inputs"]
    return Finding(ours, None, f"the time of {reference}", (title, heads, rows))


def share(ours: float, theirs: float) -> float:
    return ours / theirs


def differentiated(
    function: Callable[..., Tensor], learned: list[Tensor], grad: Tensor | None = None
) -> Step:
    """A step forward and backward."""

    def step() -> None:
        torch.autograd.grad(function(), learned, grad)

    return step


def graphed(step: Step) -> Step:
    """The step as a CUDA graph: what the device takes, without what launches it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def once_compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, dynamic=False)


# --- attention ---------------------------------------------------------------------------------


def attention(place: Place, shape: tuple[int, ...], mask: str, dtype: str) -> Finding:
    batch, heads, length, _ = shape
    causal = mask == "causal"
    inputs = [random(place, dtype, *shape, seed=n).requires_grad_() for n in range(3)]
    grad = random(place, dtype, *shape, seed=3)
    # Sentences from the full length down to half of it.
    kept = (length - torch.arange(batch) * length // (2 * batch)).to(place.device)
    allowed = None
    if not causal:
        allowed = (torch.arange(length, device=place.device) < kept[:, None])[:, None, None]
    kinds = ("shared", "monotone", "shared")
    shared, monotone, fixed = (some_modulator(kind, heads, place.device) for kind in kinds)
    fixed.requires_grad_(False)

    def step(function: Callable[..., Tensor], modulator: Any) -> Step:
        parameters = [] if modulator is None else modulator.parameters()
        learned = [*inputs, *(p for p in parameters if p.requires_grad)]
        options = {"mask": allowed, "causal": causal}
        called = functools.partial(function, *inputs, modulator, **options)
        return differentiated(called, learned, grad)

    reference = "softmax (torch's flash)" if causal else "softmax (torch)"
    flexible = flex(kept, causal)
    contestants = {
        reference: step(torchs_own, None),
        "softmax (ours)": step(our_attention, None),
        OURS: step(our_attention, shared),
        "MultiMax, monotone (ours)": step(our_attention, monotone),
        f"{reference}{AS_GRAPH}": step(torchs_own, None),
        f"softmax (ours){AS_GRAPH}": step(our_attention, None),
        f"{OURS}{AS_GRAPH}": step(our_attention, shared),
        "MultiMax (plain)": step(plain_attention, shared),
    }
    if dtype != "float16" or place.full:  # they take long to compile
        contestants |= {
            "MultiMax (FlexAttention)": step(flexible, shared),
            "MultiMax, not learned (FlexAttention)": step(flexible, fixed),
            "MultiMax (plain, torch.compile)": step(once_compiled(plain_attention), shared),
            "softmax (plain, torch.compile)": step(once_compiled(plain_attention), None),
        }
    label = "x".join(map(str, shape))
    title = f"Attention forward and backward, {label}, {mask}, {dtype}"
    return contest(place, title, contestants, reference)


def torchs_own(
    query: Tensor, key: Tensor, value: Tensor, _: None, mask: Tensor | None, causal: bool
) -> Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if mask is not None:  # which the flash backend does not take
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def flex(kept: Tensor, causal: bool) -> Callable[..., Tensor]:
    """FlexAttention, compiled, with the modulator written out."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    fast = torch.compile(flex_attention, dynamic=False)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k if causal else k < kept[b]

    @functools.cache
    def blocks(batch: int, length: int, device: Any) -> Any:
        return create_block_mask(allowed, None if causal else batch, None, length, length, device)

    def attend(query: Tensor, key: Tensor, value: Tensor, modulator: Any, **_: Any) -> Tensor:
        names = ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")
        function = None
        if modulator is not None:
            parts = (getattr(modulator, name).unbind() for name in names)
            function = functools.partial(written_out, *parts)
        mask = blocks(query.shape[0], query.shape[2], query.device)
        return fast(query, key, value, score_mod=function, block_mask=mask)

    return attend


def written_out(
    c: tuple[Tensor, ...],
    t: tuple[Tensor, ...],
    k: tuple[Tensor, ...],
    d: tuple[Tensor, ...],
    score: Tensor,
    *_: Tensor,
) -> Tensor:
    """The modulator of one score, as FlexAttention wants it."""
    low, high = [(edge - score).relu() for edge in t], [(score - edge).relu() for edge in d]
    z = score + c[0] * low[0] + k[0] * high[0]
    return z + c[1] * low[1] * low[1] + k[1] * high[1] * high[1]


# --- the output layer and the modulator --------------------------------------------------------


def output_loss(place: Place, tokens: int, classes: int, width: int) -> Finding:
    dtype = "bfloat16"
    inputs = [
        random(place, dtype, *shape, seed=seed, scale=scale).requires_grad_()
        for seed, (shape, scale) in enumerate((((tokens, width), 1.0), ((classes, width), 0.05)))
    ]
    target = torch.randint(classes, (tokens,), generator=torch.Generator().manual_seed(3))
    target = target.to(place.device)
    shared, monotone = (some_modulator(k, 1, place.device) for k in ("shared", "monotone"))

    def step(function: Callable[..., Tensor], modulator: Any) -> Step:
        learned = [*inputs, *([] if modulator is None else modulator.parameters())]
        called = functools.partial(function, *inputs, None, modulator, target=target)
        return differentiated(called, learned)

    def stock(features: Tensor, weight: Tensor, _: None, __: None, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(features, weight), target, reduction="sum")

    def chunked(features: Tensor, weight: Tensor, _: None, __: None, target: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(features, weight, target, reduction="sum", options=options)

    reference = "softmax (F.cross_entropy)"
    contestants = {
        reference: step(stock, None),
        "softmax (F.cross_entropy, torch.compile)": step(once_compiled(stock), None),
        "softmax (F.linear_cross_entropy, chunks)": step(chunked, None),
        "softmax (ours)": step(our_loss, None),
        OURS: step(our_loss, shared),
        "MultiMax, monotone (ours)": step(our_loss, monotone),
        f"{reference}{AS_GRAPH}": step(stock, None),
        f"{OURS}{AS_GRAPH}": step(our_loss, shared),
        "MultiMax (plain, torch.compile)": step(once_compiled(plain_loss), shared),
        "MultiMax (plain)": step(plain_loss, shared),
    }
    label = f"{tokens} x {classes} x {width}"
    title = f"Output loss forward and backward, {label}, {dtype}"
    return contest(place, title, contestants, reference)


def modulator(place: Place, shape: tuple[int, ...], dtype: str) -> Finding:
    scores = random(place, dtype, *shape).requires_grad_()
    grad = random(place, "float32", *shape, seed=1)
    used = some_modulator("shared", shape[1], place.device)
    learned = [scores, *used.parameters()]

    def step(function: Callable[..., Tensor]) -> Step:
        return differentiated(functools.partial(function, scores), learned, grad)

    def plain(scores: Tensor) -> Tensor:
        return sigma(scores, used)

    reference = "MultiMax (plain)"
    contestants = {
        reference: step(plain),
        OURS: step(used),
        "MultiMax (plain, torch.compile)": step(once_compiled(plain)),
    }
    label = "x".join(map(str, shape))
    title = f"The modulator by itself, forward and backward, {label}, {dtype}"
    return contest(place, title, contestants, reference)


# --- all of them -------------------------------------------------------------------------------


def timings(place: Place) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """What is worth knowing first comes first."""

    def attention_of(shape: tuple[int, ...], mask: str, dtype: str) -> tuple[str, Any]:
        label = f"time of attention {'x'.join(map(str, shape))}, {mask}, {dtype}"
        return label, functools.partial(attention, place, shape, mask, dtype)

    yield from (attention_of(*case, "bfloat16") for case in SHAPES)
    for sizes in LOSSES:
        label = f"time of output loss {'x'.join(map(str, sizes))}"
        yield label, functools.partial(output_loss, place, *sizes)
    yield from (attention_of(*case, "float16") for case in SHAPES)
    yield "time of the modulator", functools.partial(modulator, place, (8, 16, 512, 512), "float16")


def checks(place: Place) -> dict[str, Callable[[], Finding]]:
    return dict(timings(place))
