"""Attention on the scores of a trained model, beside random scores of the same shape."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq import checkpoint_utils, utils
from torch import Tensor

import multimax_fairseq.models  # noqa: F401
from benchmarks.measurement import BEST, Case, Contestant, Ready
from benchmarks.operators import gradients_of, share_of_zeros
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.ops.masks import causal_mask


class Recorded(NamedTuple):
    """One attention of the model: its arguments, except for the value."""

    place: str
    normalizer: Normalizer
    query: Tensor
    key: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    hidden: Tensor | None

    @property
    def excluded(self) -> Tensor | None:
        """The excluded keys of each query, True; with the causal mask."""
        if not self.is_causal:
            return self.mask
        return causal_mask(self.mask, self.query.shape[2], self.key.shape[2], self.query.device)


def recording(normalizer: Normalizer, place: str, recorded: list[Recorded]) -> Callable[..., Any]:
    """Return the method `attend` of a normalizer, which also records its arguments."""
    attend = normalizer.attend

    def record(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> Any:
        recorded.append(Recorded(place, normalizer, query, key, mask, is_causal, scale, hidden))
        return attend(query, key, value, mask, is_causal, dropout_p, scale, need_probs, hidden)

    return record


def record(args: argparse.Namespace) -> list[Recorded]:
    """Run the model on the largest batch of the test data."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.checkpoint)], {"data": str(args.data)}
    )
    model = model.eval().to(args.device, getattr(torch, args.dtype))
    task.load_dataset("test")
    batches = task.get_batch_iterator(task.dataset("test"), max_tokens=args.max_tokens)
    batch = max(batches.next_epoch_itr(shuffle=False), key=lambda batch: batch["ntokens"])
    recorded: list[Recorded] = []
    for name, module in model.named_modules():
        if isinstance(module, Normalizer):
            place = name.removesuffix(".normalizer")
            module.attend = recording(module, place, recorded)  # type: ignore[method-assign]
    with torch.no_grad():
        model(**(utils.move_to_cuda(batch) if args.device == "cuda" else batch)["net_input"])
    for normalizer in {call.normalizer for call in recorded}:
        del normalizer.attend
    return recorded


def trained(args: argparse.Namespace) -> list[Case]:
    return [layer_case(call, args) for call in record(args)]


def layer_case(call: Recorded, args: argparse.Namespace) -> Case:
    name = call.normalizer.name

    @functools.cache
    def inputs(is_random: bool) -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator().manual_seed(1)
        parts = [call.query, call.key, call.key]
        draws = [torch.randn(part.shape, generator=draw).to(part) for part in parts]
        parts = draws if is_random else [call.query, call.key, draws[2]]
        grad = torch.randn(call.query.shape, generator=draw).to(call.query)
        return [part.clone().requires_grad_() for part in parts], grad

    def contestant(label: str, attend: Callable[..., Tensor], is_random: bool) -> Contestant:
        def make() -> Ready:
            parts, grad = inputs(is_random)
            learned: dict[str, Any] = dict(zip(("query", "key", "value"), parts, strict=True))
            if label != "softmax (torch)":
                learned |= dict(call.normalizer.named_parameters())
            ready = gradients_of(lambda: (attend(*parts), grad), learned)
            if label == "softmax (torch)":
                return ready
            with torch.no_grad():
                arguments = (call.mask, call.is_causal, 0.0, call.scale, True, call.hidden)
                _, probs = call.normalizer.attend(*parts, *arguments)
            return ready._replace(zeros=share_of_zeros(probs, call.excluded))

        return Contestant(make, label)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        arguments = (call.mask, call.is_causal, 0.0, call.scale, False, call.hidden)
        return call.normalizer.attend(query, key, value, *arguments)[0]

    allowed = None if call.mask is None else ~call.mask
    if call.is_causal and allowed is not None:
        allowed, is_causal = ~call.excluded, False
    else:
        is_causal = call.is_causal
    softmax = functools.partial(
        F.scaled_dot_product_attention, attn_mask=allowed, is_causal=is_causal, scale=call.scale
    )
    contestants = {
        "softmax (torch)": contestant("softmax (torch)", softmax, False),
        f"{name}, trained": contestant(f"{name}, trained", ours, False),
        f"{name}, random scores": contestant(f"{name}, random scores", ours, True),
    }
    queries, keys = "x".join(map(str, call.query.shape)), call.key.shape[2]
    label = f"{call.place}, {queries}, {keys} keys"
    baselines = ["softmax (torch)"]
    return Case(label, 0, contestants, [BEST], ["seconds"], baselines, settles=True)
