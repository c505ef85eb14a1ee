#!/usr/bin/env python3
"""Measures time and memory of MultiMax against stock fairseq's softmax.

    scripts/benchmark.py attention [--shape BxHxTxD ...] [--mask causal] [--sweep LENGTHS]
    scripts/benchmark.py output [--tokens N] [--vocabulary V] [--width D] [--sweep VOCABULARIES]
    scripts/benchmark.py train DATA-BIN [-- fairseq-train options]
    scripts/benchmark.py train --vocabulary V [-- fairseq-train options]
    scripts/benchmark.py generate DATA-BIN --checkpoint FILE

All contestants take turns in one process. Those that compute the same function are compared before
any is timed. Ratios are medians over the rounds of the ratio within a round: lower is better for
times, higher for tokens per second. Peak memory is that of a step, above the memory before it; on a
CPU it is measured in one process per contestant.

"plain" and "auto" are backends (MULTIMAX_BACKEND); "torch expression" is MultiMax in plain PyTorch
operations, as its authors wrote it. --out DIR writes DIR/benchmark-NAME.json (every round, and
everything needed to repeat the measurement) and, for a --sweep, .png and .svg.
"""

import argparse
import contextlib
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import baselines
import torch
import torch.nn.functional as F
from paired import AUTO, BEST, PLAIN, Case, Contestant, Ready, conditions, measure, quiet, report
from torch import Tensor

from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.errors import UsageError

SHAPES = ["4x8x512x64", "16x8x128x64"]
EXPRESSION = "MultiMax (torch expression)"
PRODUCTS = "matrix products"
# Other mappings with fused kernels, and their learned parameters per head.
RIVALS = {"ssmax": {"length_scale": 0.2}, "softmax1": {}, "sink": {"sink": 0.5}}


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

        def make(plain: Contestant = plain) -> Ready:
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

        contestants[f"{name}, CUDA graph"] = plain._replace(make=make)


def products(work: Callable[[], list[Tensor]], learned: dict[str, Tensor]) -> Ready:
    """The matrix products that every implementation needs: a lower bound."""

    def step(_: int) -> dict[str, int]:
        work()
        return {}

    return Ready(step, work, sum(t.numel() * t.element_size() for t in learned.values()))


# --- attention ---------------------------------------------------------------------------------


def attention(args: argparse.Namespace) -> list[Case]:
    if args.sweep is None:
        shapes = args.shape
    else:
        batch, heads, _, size = args.shape[0]
        shapes = [(batch, heads, length, size) for length in args.sweep]
    return [attention_case(args, shape) for shape in shapes]


def attention_case(args: argparse.Namespace, shape: tuple[int, ...]) -> Case:
    batch, _, length, _ = shape

    @functools.cache
    def inputs() -> tuple[dict[str, Tensor], Modulator, Tensor | None, Tensor]:
        names = ("query", "key", "value")
        parts = {n: random(i, args, *shape).requires_grad_() for i, n in enumerate(names)}
        allowed = None
        if args.mask in ("padding", "both"):
            # Sentence lengths from the full length down to half of it.
            kept = length - torch.arange(batch) * length // (2 * batch)
            allowed = (torch.arange(length) < kept[:, None])[:, None, None].to(args.device)
        return parts, some_modulator(args), allowed, random(3, args, *shape)

    is_causal = args.mask in ("causal", "both")

    def whole_mask(allowed: Tensor | None) -> Tensor | None:
        """Causal and padding mask combined, (B or 1, 1, T or 1, S); True = may attend."""
        if not is_causal:
            return allowed
        causal = torch.ones(length, length, dtype=torch.bool, device=args.device).tril()
        return causal[None, None] if allowed is None else allowed & causal

    def contestant(name: str, make_attend: Callable, backend: str = "auto") -> Contestant:
        def make() -> Ready:
            parts, modulator, allowed, grad = inputs()
            attend = make_attend(modulator, allowed)
            learned = dict(parts)
            if name.startswith("MultiMax"):
                learned |= dict(modulator.named_parameters())
            learned |= {n: attend.keywords[n] for n in RIVALS.get(name.split()[0], {})}
            return gradients_of(lambda: (attend(*parts.values()), grad), learned)

        return Contestant(make, name.split()[0], backend)

    def torchs(_: Modulator, allowed: Tensor | None) -> Callable:
        # Without padding, torch's is_causal is faster than a mask; torch refuses both together.
        mask = whole_mask(allowed) if allowed is not None else None
        flag = is_causal and allowed is None
        return functools.partial(F.scaled_dot_product_attention, attn_mask=mask, is_causal=flag)

    def ours(normalizer: str) -> Callable:
        def make_attend(modulator: Modulator, allowed: Tensor | None) -> Callable:
            given: dict[str, Any] = {"modulator": modulator} if normalizer == "multimax" else {}
            for n, value in RIVALS.get(normalizer, {}).items():
                given[n] = torch.full((shape[1], 1, 1), value, device=args.device).requires_grad_()
            given |= {"normalizer": normalizer, "attn_mask": allowed, "is_causal": is_causal}
            return functools.partial(scaled_dot_product_attention, **given)

        return make_attend

    def written_out(modulator: Modulator, allowed: Tensor | None) -> Callable:
        mask = whole_mask(allowed)
        excluded = None if mask is None else ~mask

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            scores = (query / query.shape[-1] ** 0.5) @ key.transpose(-2, -1)
            scores = expression(scores.float(), modulator)
            if excluded is not None:
                scores = scores.masked_fill(excluded, -torch.inf)
            return scores.softmax(-1).to(value.dtype) @ value

        return attend

    def floor() -> Ready:
        parts, _, _, grad = inputs()
        given = [*(part.detach() for part in parts.values()), grad]
        return products(lambda: baselines.attention_products(given, is_causal), parts)

    label = f"attention {'x'.join(map(str, shape))}, mask: {args.mask}"
    contestants = {
        "softmax (torch)": contestant("softmax (torch)", torchs),
        "softmax (plain)": contestant("softmax (plain)", ours("softmax"), "plain"),
        EXPRESSION: contestant(EXPRESSION, written_out),
        PLAIN: contestant(PLAIN, ours("multimax"), "plain"),
        AUTO: contestant(AUTO, ours("multimax")),
    }
    for name, kind in itertools.product(RIVALS if args.rivals else (), ("plain", "auto")):
        contestants[f"{name} ({kind})"] = contestant(f"{name} ({kind})", ours(name), kind)
    others = {"softmax (compiled)": baselines.compiled_attention}
    if args.device == "cuda":
        others["softmax (FlexAttention)"] = baselines.flex_attention
    for name, make_attend in others.items() if args.compile else ():
        contestants[name] = contestant(name, lambda _, a, make=make_attend: make(whole_mask(a)))
    with_graphs(contestants, args, "softmax (torch)", AUTO)
    contestants[PRODUCTS] = Contestant(floor, PRODUCTS)
    references = [BEST, PRODUCTS, AUTO if args.rivals else EXPRESSION]
    rivals = ["softmax (torch)", *(others if args.compile else ())]
    return Case(label, length, contestants, references, ["seconds"], rivals, settles=True)


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
        def make() -> Ready:
            parts, modulator, target = inputs()
            learned = dict(parts) | (dict(modulator.named_parameters()) if modulated else {})
            used = modulator if modulated else None
            return gradients_of(lambda: (loss(*parts.values(), target, used), None), learned)

        return Contestant(make, "MultiMax" if modulated else "softmax")

    def torchs(name: str) -> Contestant:
        def make() -> Ready:
            parts, _, target = inputs()
            loss = losses()[name]
            return gradients_of(lambda: (loss(*parts.values(), target), None), parts)

        return Contestant(make, "softmax")

    def losses() -> dict[str, baselines.Loss]:
        found = baselines.losses(args.label_smoothing)
        if args.compile:
            found["softmax (compiled)"] = baselines.compiled_loss(args.label_smoothing)
        return found

    def floor() -> Ready:
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
        **{name: torchs(name) for name in losses()},
        PRODUCTS: Contestant(floor, PRODUCTS),
        EXPRESSION: contestant(unfused, True),
        "softmax (fused)": contestant(fused, False),
        "MultiMax (fused)": contestant(fused, True),
    }
    with_graphs(contestants, args, "softmax (F.cross_entropy)", "MultiMax (fused)")
    references = [BEST, PRODUCTS, stock, EXPRESSION]
    rivals = [stock, *losses()]
    return Case(label, vocabulary, contestants, references, ["seconds"], rivals, settles=True)


# --- the command line --------------------------------------------------------------------------


def whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def sizes(text: str) -> list[int]:
    return [whole(part) for part in text.split(",")]


def a_shape(text: str) -> tuple[int, ...]:
    found = tuple(whole(part) for part in text.split("x"))
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} must be BATCHxHEADSxLENGTHxSIZE, as 4x8x512x64")
    return found


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 0 and below 1")
    return value


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def parse(words: list[str]) -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    common.add_argument("--rounds", type=whole, default=10, help="timed rounds")
    common.add_argument("--warmup", type=whole, default=2, help="untimed rounds before them")
    common.add_argument("--device", choices=["cpu", "cuda"], default=device, help="where to run")
    dtypes = ["float32", "float16", "bfloat16"]
    common.add_argument("--dtype", choices=dtypes, default="float32", help="of tensors")
    text = "do not measure memory"
    common.add_argument("--no-memory", dest="memory", action="store_false", help=text)
    common.add_argument("--out", type=Path, metavar="DIR", help="write the data and figures there")
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__, formatter_class=Help)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> Callable[..., Any]:
        one = commands.add_parser(
            name, parents=[common], help=text, description=text, formatter_class=Help
        )
        return one.add_argument

    compiled = {"action": "store_true", "help": "also measure softmax under torch.compile"}
    add = command("attention", "attention alone")
    shapes = [a_shape(text) for text in SHAPES]
    add("--shape", type=a_shape, nargs="+", metavar="BxHxTxD", default=shapes, help="query's shape")
    masks = ["none", "causal", "padding", "both"]
    add("--mask", choices=masks, default="causal", help="what is excluded")
    add("--sweep", type=sizes, metavar="T,T,...", help="the first shape with these lengths")
    add("--rivals", action="store_true", help=f"also measure {', '.join(RIVALS)}")
    add("--compile", **compiled)

    add = command("output", "output layer and loss")
    add("--tokens", type=whole, default=512, metavar="N", help="tokens per step")
    add("--vocabulary", type=whole, default=267_744, metavar="V", help="number of words")
    add("--width", type=whole, default=512, metavar="D", help="width of the features")
    add("--label-smoothing", type=share, default=0.0, help="epsilon of the loss")
    add("--sweep", type=sizes, metavar="V,V,...", help="instead of --vocabulary")
    add("--compile", **compiled)

    folder = "a folder of fairseq-preprocess"
    add = command("train", "training steps of whole models; options after -- are fairseq-train's")
    add("data", type=Path, metavar="DATA-BIN", nargs="?", help=folder)
    text = "instead of data: a language model on random text with this vocabulary"
    add("--vocabulary", type=whole, metavar="V", help=text)
    text = "also measure MultiMax with these flags; may be repeated"
    add("--variant", action="append", default=[], metavar="FLAGS", help=text)

    add = command("generate", "beam search")
    add("data", type=Path, metavar="DATA-BIN", help=folder)
    add("--checkpoint", type=Path, required=True, metavar="FILE", help="of a MultiMax model")
    add("--subset", default="test", help="of DATA-BIN")
    add("--beam", type=whole, default=5, help="beam size")
    add("--max-tokens", type=whole, default=4096, help="of a batch")

    cut = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:cut])
    args.rest = words[cut + 1 :]
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """Raise UsageError for options that do not fit together."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no GPU here; leave it out for the CPU")
    if args.rest and args.command != "train":
        raise UsageError(f"{args.command} takes no options after --, got {args.rest[0]}")
    if args.command == "train" and (args.data is None) == (args.vocabulary is None):
        raise UsageError("train needs either DATA-BIN or --vocabulary, and not both")
    if args.command == "train" and args.vocabulary is not None and args.vocabulary < 5:
        raise UsageError(f"--vocabulary {args.vocabulary} must be at least 5: 4 are special")
    data, checkpoint = getattr(args, "data", None), getattr(args, "checkpoint", None)
    for path, what in ((data, "data folder"), (checkpoint, "checkpoint")):
        if path is not None and not path.exists():
            raise UsageError(f"{what} '{path}' does not exist: check its path")
    if data is not None and not list(data.glob("dict.*")):
        raise UsageError(f"'{data}' has no dictionary: give a folder of fairseq-preprocess")


def cases_of(command: str) -> Callable[[argparse.Namespace], list[Case]]:
    """The function that builds a command's cases. Only train and generate import fairseq."""
    if command == "train":
        from training import train

        return train
    if command == "generate":
        from generation import generate

        return generate
    return attention if command == "attention" else output


def main() -> None:
    try:
        args = parse(sys.argv[1:])
        with contextlib.ExitStack() as stack:
            cases = cases_of(args.command)
            quiet()
            if args.command == "train" and args.data is None:
                from training import random_text

                args.data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                random_text(args.data, args.vocabulary)
            signed = conditions(args)  # before the checkout can change
            report(measure(cases, args), signed, args)
    except (UsageError, OSError) as error:
        sys.exit(f"benchmark.py: error: {error}")
    except torch.OutOfMemoryError:
        sys.exit("benchmark.py: error: the GPU's memory is too small: give smaller sizes")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
