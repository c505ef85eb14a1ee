"""A named mapping from scores to probabilities, with what it learns."""

from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.normalizers import NORMALIZERS, normalize, softmax
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.temperature import Temperature

# Softmax of some function of the scores, which TorchScript can read; it finds nothing by its name.
SCRIPTED = ("softmax", "multimax")


class Normalizer(nn.Module):
    """Any of `NORMALIZERS` as a module: `normalizer(scores, dim, mask)` gives probabilities.

    Args:
        name: a key of `NORMALIZERS`.
        num_heads: None learns one set of parameters; else each head has its own, and scores carry
            the heads in dimension -3.
        order, terms, init_std, monotone: multimax, as `Modulator`.
        temperature, learn_temperature: softmax, as `Temperature`.
        k: topk.
        alpha: alpha_entmax at this alpha; None learns it, as `EntmaxAlpha`.

    Submodules, or None: `modulator` (multimax; softmax at a temperature), `alpha` (alpha_entmax).

    Raises:
        ValueError: an unknown name, or an argument out of its range.
    """

    def __init__(
        self,
        name: str = "multimax",
        num_heads: int | None = None,
        *,
        order: int = 2,
        terms: str = "both",
        init_std: float = 0.02,
        monotone: bool = False,
        temperature: float = 1.0,
        learn_temperature: bool = False,
        k: int | None = None,
        alpha: float | None = None,
    ) -> None:
        super().__init__()
        if name not in NORMALIZERS:
            raise ValueError(f"unknown normalizer {name!r}: choose one of {', '.join(NORMALIZERS)}")
        self.name, self.num_heads = name, num_heads
        self.scriptable = name in SCRIPTED
        self.modulator: nn.Module | None = None
        self.alpha: EntmaxAlpha | None = None
        self.fixed: dict[str, Any] = {}
        if name == "multimax":
            self.modulator = Modulator(order, terms, num_heads, init_std, monotone)
        elif name == "softmax" and (temperature != 1 or learn_temperature):
            self.modulator = Temperature(temperature, learn_temperature)
        elif name == "topk":
            if k is None or k < 1:
                raise ValueError(f"topk needs a k of at least 1, got {k}")
            self.fixed["k"] = k
        elif name == "alpha_entmax":
            if alpha is None:
                self.alpha = EntmaxAlpha(num_heads or 1)
            elif alpha >= 1:
                self.fixed["alpha"] = alpha
            else:
                raise ValueError(f"alpha must be at least 1, got {alpha}")

    def forward(self, scores: Tensor, dim: int = -1, mask: Tensor | None = None) -> Tensor:
        """Return probabilities, the shape of scores, in float32 or wider; the mask excludes."""
        if not torch.jit.is_scripting() and not self.scriptable:  # type: ignore[attr-defined]
            return self._named(scores, dim, mask)
        if self.modulator is not None:
            scores = self.modulator(scores)
        return softmax(scores, dim, mask)

    @torch.jit.unused
    def _named(self, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        options = dict(self.fixed)
        if self.alpha is not None:
            options["alpha"] = self.alpha()
        if self.name == "evsoftmax":
            options["training"] = self.training
        return normalize(self.name, scores, dim, mask, **options)

    def keep_heads(self, heads: list[int]) -> None:
        """Forget all but these heads' parameters, where each head has its own."""
        if self.num_heads is None:
            return
        for module in filter(None, (self.modulator, self.alpha)):
            for parameter in module.parameters():
                parameter.data = parameter.data[heads]  # in place, for what is tied to it
        self.num_heads = len(heads)

    def __prepare_scriptable__(self) -> "Normalizer":
        if not self.scriptable:
            raise ValueError(
                f"the normalizer {self.name!r} has no TorchScript form: only softmax and multimax "
                "can be scripted"
            )
        return self

    def extra_repr(self) -> str:
        return ", ".join([repr(self.name), *(f"{key}={v}" for key, v in self.fixed.items())])
