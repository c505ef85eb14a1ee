"""What scripts/gpu_check.py checks of the GPU path: that it is right, and how it runs.

The same checks run in Triton's interpreter, as far as they make sense there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gpu_reference import (
    ATTENTION,
    DOORS,
    LOSS,
    Errors,
    Finding,
    LeftOut,
    Place,
    against_plain,
    attention_inputs,
    doubled,
    error,
    loss_inputs,
    masking,
    our_attention,
    our_loss,
    plain_attention,
    plain_loss,
    random,
    sigma,
    some_modulator,
    step,
    through,
    worst,
)
from torch import Tensor

from multimax_fairseq import Modulator
from multimax_fairseq.functional.modulator import table_of

HALVES = ("float16", "bfloat16")

# --- attention ---------------------------------------------------------------------------------

MASKS = ("none", "padding", "full", "added", "bias", "causal", "causal and padding")
KINDS = ("shared", "separate", "monotone", "softmax", "first order", "low side")


def attention(place: Place, dtype: str, size: int) -> Finding:
    """All masks, and with each another modulator."""
    queries, keys = (150, 170) if place.is_gpu else (37, 45)
    masks = MASKS if place.is_gpu or place.full else MASKS[::2]
    turn = (size // 16 + 3 * (dtype == "float16")) % len(KINDS)
    kinds = itertools.islice(itertools.cycle(KINDS), turn, None)

    def cases() -> Iterator[Errors]:
        for mask, kind in zip(masks, kinds, strict=False):
            inputs = attention_inputs(place, dtype, 2, 2, queries, keys, size)
            options = masking(place, mask, 2, queries, keys)
            yield against_plain(place, inputs, kind, f"mask {mask}, {kind}", **options)

    return worst(cases())


def lengths(place: Place, dtype: str) -> Finding:
    """Lengths of one, of none, and beside the blocks' sizes."""
    pairs = [(1, 9), (9, 1), (0, 5), (5, 0)]
    pairs += [(1, 1), (63, 65), (64, 64), (129, 128), (200, 1)] if place.is_gpu else []

    def cases() -> Iterator[Errors]:
        for (queries, keys), causal in itertools.product(pairs, (False, True)):
            inputs = attention_inputs(place, dtype, 1, 2, queries, keys, 32)
            names = ATTENTION if queries * keys > 0 else ()
            where = f"{queries} x {keys}"
            yield against_plain(place, inputs, "shared", where, names, causal=causal)

    return worst(cases())


def wide_head(place: Place, dtype: str) -> Finding:
    """What no kernel of attention takes is plain PyTorch, and the modulator's own kernel."""
    names = DOORS["triton_modulator"]

    def cases() -> Iterator[Errors]:
        for causal, kind in ((True, "shared"), (False, "separate"), (False, "monotone")):
            inputs = attention_inputs(place, dtype, 1, 2, 20, 20, 256)
            yield against_plain(place, inputs, kind, kind, names, causal=causal)

    return worst(cases())


def dropout(place: Place, dtype: str) -> Finding:
    """The share that is kept, and gradients through what was."""
    found = []
    for seed in range(4 if place.is_gpu else 1):
        found += dropped(place, dtype, seed)
    return worst(found)


def dropped(place: Place, dtype: str, seed: int) -> list[Errors]:
    # A share that random numbers of any width hold exactly.
    size, share = 64, 0.25
    query, key, _, grad = attention_inputs(place, dtype, 1, 2, 40, size, size, seed)
    modulator = some_modulator("separate", 2, place.device)
    # With the identity as the values, the outputs are the probabilities.
    inputs = [query, key, torch.eye(size).to(query).expand(1, 2, -1, -1).contiguous()]

    def ours() -> dict[str, Tensor]:
        with through(*ATTENTION):
            return step(our_attention, inputs, modulator, grad, dropout_p=share)

    torch.manual_seed(seed)
    first = ours()
    kept = first["output"] != 0

    def dense(query: Tensor, key: Tensor, value: Tensor, modulator: Modulator) -> Tensor:
        probs = plain_attention(query, key, torch.eye(size).to(query), modulator)
        return (probs * kept / (1 - share)) @ value

    plain = step(dense, inputs, modulator, grad)
    exact = step(dense, doubled(inputs), doubled(modulator), doubled(grad))
    # Of probabilities that half precision tells from zero.
    seen = plain_attention(*doubled(inputs), doubled(modulator)) > 1e-4
    count = seen.sum().item()
    off = abs((kept & seen).sum().item() / count - (1 - share))
    deviations = off / math.sqrt(share * (1 - share) / count)
    torch.manual_seed(seed)
    again, other = ours(), ours()
    if not all(map(torch.equal, first.values(), again.values())):
        raise RuntimeError("the same seed dropped other probabilities")
    if torch.equal(first["output"], other["output"]):
        raise RuntimeError("another seed dropped the same probabilities")
    found = [error(first, plain, exact, "dropout")]
    return [*found, Errors(deviations / 4, "the share kept, of four deviations")]


# --- the modulator and the output layer --------------------------------------------------------


def modulator(place: Place, dtype: str) -> Finding:
    """Element by element."""
    shapes = [(3, 100, 90), (3, 1, 1), (2, 3, 0, 4)]
    shapes += [(4, 3, 257, 1000)] if place.is_gpu else []
    names = DOORS["triton_modulator"]

    def cases() -> Iterator[Errors]:
        for shape, kind in itertools.product(shapes, ("shared", "separate", "monotone")):
            scores = random(place, dtype, *shape, scale=3.0)
            # Transposed, it is not contiguous.
            scores = scores.mT.contiguous().mT
            used = some_modulator(kind, 3, place.device)
            grad = random(place, "float32", *shape, seed=1)
            with through(*names):
                ours = step(lambda x, m: m(x), [scores], used, grad)
            plain = step(sigma, [scores], used, grad)
            exact = step(sigma, [scores.double()], doubled(used), grad.double())
            yield error(ours, plain, exact, f"{kind}, {list(shape)}")

    return worst(cases())


def output_loss(place: Place, dtype: str) -> Finding:
    sizes = (300, 5003, 72) if place.is_gpu else (9, 2500, 24)
    inputs, target = loss_inputs(place, dtype, *sizes)
    options = [
        {"kind": "shared", "smoothing": 0.1},
        {"kind": "softmax", "chunk_size": sizes[0] // 2},
        {"kind": "monotone", "reduction": "mean", "chunk_size": sizes[0] // 3 + 1},
        {"kind": "first order", "reduction": "none"},
    ]

    def cases() -> Iterator[Errors]:
        for number, chosen in enumerate(options):
            kind, used = chosen["kind"], {k: v for k, v in chosen.items() if k != "kind"}
            learned = some_modulator(kind, 1, place.device)
            grad = random(place, "float32", sizes[0]) if "none" in used.values() else None
            used["target"] = target
            with through(*LOSS):
                ours = step(our_loss, inputs, learned, grad, **used)
            plain = step(plain_loss, inputs, learned, grad, **used)
            exact = step(plain_loss, doubled(inputs), doubled(learned), doubled(grad), **used)
            yield error(ours, plain, exact, f"{kind}, case {number + 1}")

    return worst(cases())


def output_scores(place: Place, dtype: str) -> Finding:
    (features, weight, bias), _ = loss_inputs(place, dtype, 33, 1003, 24)
    inputs = [features, weight, bias]

    def cases() -> Iterator[Errors]:
        for kind in ("softmax", "shared", "monotone"):
            learned = some_modulator(kind, 1, place.device)
            table = None if learned is None else table_of(learned)[0]
            with torch.no_grad(), through(*(() if table is None else ("modulate",))):
                ours = torch.ops.multimax_fairseq.output_scores(*inputs, table)
            plain = sigma(F.linear(*inputs), learned)
            exact = sigma(F.linear(*doubled(inputs)), doubled(learned))
            found = ({"scores": t.detach()} for t in (ours, plain, exact))
            yield error(*found, kind)

    return worst(cases())


# --- how it runs -------------------------------------------------------------------------------


def a_step(
    place: Place,
    what: str,
    dtype: str = "bfloat16",
    seed: int = 0,
    kind: str | None = None,
    **options: Any,
) -> functools.partial:
    """Forward and backward of attention or of the output loss, on inputs that are there."""
    if what == "attention":
        length = 200 if place.is_gpu else 40
        *inputs, grad = attention_inputs(place, dtype, 2, 2, length, length, 64, seed)
        learned = some_modulator(kind or "separate", 2, place.device)
        options = masking(place, "causal and padding", 2, length, length) | options
        return functools.partial(step, our_attention, inputs, learned, grad, **options)
    sizes = (300, 5003, 72) if place.is_gpu else (9, 2500, 24)
    inputs, target = loss_inputs(place, dtype, *sizes, seed)
    learned = some_modulator(kind or "shared", 1, place.device)
    return functools.partial(step, our_loss, inputs, learned, target=target, **options)


def deterministic(place: Place, what: str) -> Finding:
    dtypes = ("float16", "bfloat16", "float32") if place.is_gpu else ("float16",)
    different = []
    for dtype in dtypes:
        options = {"dropout_p": 0.1} if what == "attention" else {"smoothing": 0.1}
        once = a_step(place, what, dtype, **options)
        runs = []
        for _ in range(2):
            torch.manual_seed(1)
            with through(*(ATTENTION if what == "attention" else LOSS)):
                runs.append(once())
        for name, value in runs[0].items():
            if not torch.equal(value, runs[1][name]):
                different.append(f"{name}, {dtype}")
    told = "; ".join(different) or "two runs agree to the bit"
    return Finding(len(different), 0, f"tensors that differ: {told}")


def unsynchronised(place: Place, what: str) -> Finding:
    """Steps in which torch refuses to wait for the device."""
    options = {"dropout_p": 0.1} if what == "attention" else {"smoothing": 0.1}
    found = []
    variants = [options] if what == "attention" else [{**options, "reduction": "mean"}, options]
    for variant, dtype in itertools.product(variants, ("bfloat16", "float16", "float32")):
        once = a_step(place, what, dtype, **variant)
        once()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            once()
        except RuntimeError as refused:
            found.append(f"{dtype}: {str(refused).splitlines()[0]}")
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Finding(len(found), 0, "; ".join(found) or "steps that wait for the device")


def memory(place: Place, what: str) -> Finding:
    """What a step takes beyond its inputs, against what it must never hold."""
    if what == "attention":
        shape, kept = (1, 4, 8192, 64), 4 * 8192**2 * 2
        inputs = [random(place, "bfloat16", *shape, seed=seed) for seed in range(4)]
        learned = some_modulator("shared", 4, place.device)
        once = functools.partial(
            step, our_attention, *(inputs[:3], learned, inputs[3]), causal=True
        )
        part, whole = 1 / 8, "of (T, S) probabilities in bfloat16"
    else:
        tokens, classes, width = 16384, 32768, 256
        inputs, target = loss_inputs(place, "bfloat16", tokens, classes, width)
        learned = some_modulator("shared", 1, place.device)
        once = functools.partial(step, our_loss, inputs, learned, target=target)
        kept, part, whole = tokens * classes * 2, 1 / 2, "of all logits in bfloat16"
    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    once()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    return Finding(peak / kept, part, f"{whole}; {peak / 1e6:.0f} MB")


def compiled(place: Place, what: str) -> Finding:
    """torch.compile without a break, forward and backward: the kernels are the same."""
    whole = torch.compile(our_attention if what == "attention" else our_loss, fullgraph=True)
    found = []
    for dtype in ("bfloat16", "float32"):
        once = a_step(place, what, dtype)
        with through(*(ATTENTION if what == "attention" else LOSS)):
            ours = step(whole, *once.args[1:], **once.keywords)
        for name, value in once().items():
            off = (ours[name].double() - value.double()).norm() / value.double().norm()
            found.append((off.item() / torch.finfo(getattr(torch, dtype)).eps, f"{name}, {dtype}"))
    figure, where = max(found)
    return Finding(figure, 4.0, f"roundings from the step as it is, in {where}")


def graphed(place: Place, what: str) -> Finding:
    """A step in a CUDA graph, replayed on other numbers."""
    once = a_step(place, what)
    inputs = once.args[1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            once()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            kept = once()
    except RuntimeError as refused:
        raise LeftOut(f"cannot be captured: {str(refused).splitlines()[0]}") from None
    for tensor in inputs:
        tensor.copy_(tensor.flip(0))
    graph.replay()
    expected = once()
    different = [name for name, value in expected.items() if not torch.equal(value, kept[name])]
    told = "; ".join(different) or "a replay agrees to the bit"
    return Finding(len(different), 0, f"tensors that differ: {told}")


def autocast(place: Place, what: str, dtype: str) -> Finding:
    names, ours, plain = {
        "attention": (ATTENTION, our_attention, plain_attention),
        "output loss": (LOSS, our_loss, plain_loss),
    }[what]
    precision = getattr(torch, dtype)

    def cases() -> Iterator[Errors]:
        for seed in range(4 if place.is_gpu else 2):
            # Inputs that are rounded, too: where a slope has steps, the error is luck.
            once = a_step(place, what, "float32", seed, "smooth")
            _, *inputs = once.args
            with torch.autocast(place.device, precision):
                with through(*names):
                    found = step(ours, *inputs, **once.keywords)
                theirs = step(plain, *inputs, **once.keywords)
            exact = step(plain, *map(doubled, inputs), **once.keywords)
            yield error(found, theirs, exact, dtype)

    return worst(cases())


# --- all of them -------------------------------------------------------------------------------


def left_out(reason: str) -> Finding:
    raise LeftOut(reason)


def checks(place: Place) -> dict[str, Callable[[], Finding]]:
    """By name, what matters most first."""
    sizes: Sequence[int] = (32, 64, 80, 128)
    found: dict[str, Callable[[], Finding]] = {}

    def add(name: str, function: Callable[..., Finding], *args: Any) -> None:
        found[name] = functools.partial(function, place, *args)

    for dtype in ("float32", "float16", "bfloat16"):
        some = sizes if place.is_gpu or place.full else (32,) if dtype == "float32" else (80,)
        for size in some:
            add(f"attention {dtype}, heads of {size}", attention, dtype, size)
        add(f"output loss {dtype}", output_loss, dtype)
        add(f"modulator {dtype}", modulator, dtype)
        add(f"output scores {dtype}", output_scores, dtype)
        add(f"lengths 0, 1 and odd, {dtype}", lengths, dtype)
        add(f"heads of 256 are plain, {dtype}", wide_head, dtype)
        add(f"dropout {dtype}", dropout, dtype)
    for what in ("attention", "output loss"):
        add(f"two runs of {what}", deterministic, what)
        for dtype in HALVES:
            add(f"autocast {dtype}, {what}", autocast, what, dtype)
        for label, function in (
            ("no waiting in", unsynchronised),
            ("memory of", memory),
            ("torch.compile of", compiled),
            ("CUDA graph of", graphed),
        ):
            add(f"{label} {what}", function, what)
            if not place.is_gpu:
                found[f"{label} {what}"] = functools.partial(left_out, "needs a GPU")
    for name in found:
        if "bfloat16" in name and not place.is_gpu:
            reason = "Triton's interpreter multiplies and rounds bfloat16 wrongly"
            found[name] = functools.partial(left_out, reason)
    return found
