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
from multimax_fairseq.ops.attention import AttentionInputs
from multimax_fairseq.ops.masks import causal_mask


class Recorded(NamedTuple):
    """One attention of the model: its normalizer and its inputs."""

    layer: str
    normalizer: Normalizer
    inputs: AttentionInputs

    @property
    def excluded(self) -> Tensor | None:
        """The excluded keys of each query, True; with the causal mask."""
        query, key, _, mask, is_causal, *_ = self.inputs
        if not is_causal:
            return mask
        return causal_mask(mask, query.shape[2], key.shape[2], query.device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, need_probs: bool = False) -> Any:
        """Compute the attention of other tensors."""
        inputs = self.inputs._replace(query=query, key=key, value=value)
        return self.normalizer.attention(inputs, need_probs)


def recording(normalizer: Normalizer, layer: str, recorded: list[Recorded]) -> Callable[..., Any]:
    """Return the method `attention` of a normalizer, which also records its inputs."""
    attention = normalizer.attention

    def record(inputs: AttentionInputs, need_probs: bool = False) -> Any:
        recorded.append(Recorded(layer, normalizer, inputs))
        return attention(inputs, need_probs)

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
            layer = name.removesuffix(".normalizer")
            module.attention = recording(module, layer, recorded)  # type: ignore[method-assign]
    with torch.no_grad():
        model(**(utils.move_to_cuda(batch) if args.device == "cuda" else batch)["net_input"])
    for normalizer in {call.normalizer for call in recorded}:
        del normalizer.attention
    return recorded


def trained(args: argparse.Namespace) -> list[Case]:
    return [layer_case(call, args) for call in record(args)]


def layer_case(call: Recorded, args: argparse.Namespace) -> Case:
    name, query, key = call.normalizer.name, call.inputs.query, call.inputs.key

    @functools.cache
    def inputs(is_random: bool) -> tuple[list[Tensor], Tensor]:
        draw = torch.Generator().manual_seed(1)
        draws = [torch.randn(part.shape, generator=draw).to(part) for part in (query, key, key)]
        parts = draws if is_random else [query, key, draws[2]]
        grad = torch.randn(query.shape, generator=draw).to(query)
        return [part.clone().requires_grad_() for part in parts], grad

    def contestant(label: str, attend: Callable[..., Tensor], is_random: bool) -> Contestant:
        def make_ready() -> Ready:
            parts, grad = inputs(is_random)
            learned: dict[str, Any] = dict(zip(("query", "key", "value"), parts, strict=True))
            if attend is softmax:
                return gradients_of(lambda: (attend(*parts), grad), learned)
            learned |= dict(call.normalizer.named_parameters())
            ready = gradients_of(lambda: (attend(*parts), grad), learned)
            with torch.no_grad():
                _, probs = call.attend(*parts, need_probs=True)
            return ready._replace(zeros=share_of_zeros(probs, call.excluded))

        return Contestant(make_ready, label)

    def ours(*parts: Tensor) -> Tensor:
        return call.attend(*parts)[0]

    mask, is_causal = call.inputs.mask, call.inputs.is_causal
    # torch refuses a mask beside is_causal.
    excluded = call.excluded if mask is not None else None
    softmax = functools.partial(
        F.scaled_dot_product_attention,
        attn_mask=None if excluded is None else ~excluded,
        is_causal=is_causal and mask is None,
        scale=call.inputs.scale,
    )
    contestants = {
        "softmax (torch)": contestant("softmax (torch)", softmax, False),
        f"{name}, trained": contestant(f"{name}, trained", ours, False),
        f"{name}, random scores": contestant(f"{name}, random scores", ours, True),
    }
    label = f"{call.layer}, {'x'.join(map(str, query.shape))}, {key.shape[2]} keys"
    baselines = ["softmax (torch)"]
    return Case(label, 0, contestants, [BEST], ["seconds"], baselines, settles=True)
