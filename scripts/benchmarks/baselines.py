"""PyTorch's fastest implementations of attention and the output layer, and a lower bound."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
# Batch chunks to try for torch's linear_cross_entropy, beside its default.
CHUNKS = (32, 64, 128, 256, 512, 1024)
# Queries per matrix product, so that a causal mask saves most of the excluded half.
BLOCK = 128


def attention_products(inputs: Sequence[Tensor], is_causal: bool) -> list[Tensor]:
    """The six matrix products of attention and its gradients, and nothing else.

    With a causal mask, blocks above the diagonal are left out.

    Args:
        inputs: query, key, value and the gradient of the output, (B, H, T, D).
    """
    query, key, value, grad = (x.flatten(0, 1) for x in inputs)
    length = query.shape[1]
    outputs = [torch.zeros_like(x) for x in (query, query, key, value)]
    step = BLOCK if is_causal else length
    for start in range(0, length, step):
        rows = slice(start, start + step)
        keys = slice(0, min(start + step, length) if is_causal else None)
        probs = query[:, rows] @ key[:, keys].mT
        scores = grad[:, rows] @ value[:, keys].mT
        outputs[0][:, rows] = probs @ value[:, keys]
        outputs[1][:, rows] = scores @ key[:, keys]
        outputs[2][:, keys].baddbmm_(scores.mT, query[:, rows])
        outputs[3][:, keys].baddbmm_(probs.mT, grad[:, rows])
    return outputs


def compiled_attention(mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Softmax attention in plain PyTorch, under torch.compile.

    Args:
        mask: broadcastable to (B, H, T, S); True = may attend.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = (query / query.shape[-1] ** 0.5) @ key.mT
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.float().softmax(-1).to(value.dtype) @ value

    return torch.compile(attend, dynamic=False)


def flex_attention(mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """torch's FlexAttention with a block mask; it has no backward pass on a CPU."""
    from torch.nn.attention import flex_attention as flex

    attend = torch.compile(flex.flex_attention, dynamic=False)
    if mask is None:
        return attend
    allowed = mask.expand(*mask.shape[:2], mask.shape[-1], -1)
    own = [n > 1 for n in mask.shape[:2]]

    def may_attend(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return allowed[batch if own[0] else 0, head if own[1] else 0, row, column]

    sizes = [n if n > 1 else None for n in mask.shape[:2]]
    blocks = flex.create_block_mask(may_attend, *sizes, *allowed.shape[2:], device=mask.device)
    return functools.partial(attend, block_mask=blocks)


def loss_of_logits(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    """The summed loss from the log-probabilities of all words, as fairseq computes it."""
    log_probs = F.log_softmax(logits, -1, dtype=torch.float32)
    nll = F.nll_loss(log_probs, target, reduction="sum")
    if smoothing == 0:
        return nll
    share = smoothing / (logits.shape[-1] - 1)
    smooth = -log_probs.sum(-1).masked_fill(target == -100, 0.0).sum()
    return (1 - smoothing - share) * nll + share * smooth


def compiled_loss(smoothing: float) -> Loss:
    """Output layer and loss under torch.compile."""
    return torch.compile(functools.partial(_cross_entropy, smoothing=smoothing), dynamic=False)


def _cross_entropy(features: Tensor, weight: Tensor, target: Tensor, smoothing: float) -> Tensor:
    words = len(weight)
    # torch smooths over all words, fairseq over all words but the target.
    smoothing *= words / (words - 1)
    logits = F.linear(features, weight)
    return F.cross_entropy(logits, target, reduction="sum", label_smoothing=smoothing)


def losses(smoothing: float) -> dict[str, Loss]:
    """torch's own losses by name."""
    found: dict[str, Loss] = {
        "softmax (F.cross_entropy)": functools.partial(_cross_entropy, smoothing=smoothing)
    }
    # New in torch 2.13; it computes in chunks, but only without label smoothing.
    if hasattr(F, "linear_cross_entropy") and not smoothing:
        found["softmax (linear_cross_entropy)"] = BestChunk()
    return found


class BestChunk:
    """torch's linear_cross_entropy with the fastest chunk size, measured at the first call."""

    def __init__(self) -> None:
        self.chosen: Any = None

    def __call__(self, features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        if self.chosen is None:
            self.chosen = self._fastest(features, weight, target)
        return self._loss(self.chosen, features, weight, target)

    @staticmethod
    def _loss(options: Any, *inputs: Tensor) -> Tensor:
        return F.linear_cross_entropy(*inputs, reduction="sum", options=options)

    def _fastest(self, features: Tensor, weight: Tensor, target: Tensor) -> Any:
        make = torch.nn.LinearCrossEntropyOptions
        choices = [make(), *(make(batch_chunk_size=n) for n in CHUNKS if n < len(features))]

        def seconds(options: Any) -> float:
            times = []
            for _ in range(2):
                start = time.perf_counter()
                torch.autograd.grad(
                    self._loss(options, features, weight, target), [features, weight]
                )
                if features.is_cuda:
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
            return min(times)

        return min(choices, key=seconds)
