"""A named mapping from scores to probabilities, with what it learns."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from multimax_fairseq.functional.normalizers import NORMALIZERS, normalize, softmax
from multimax_fairseq.modules.arguments import is_finite, is_whole
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.temperature import Temperature

# Softmax of some function of the scores, which TorchScript can read; it finds nothing by its name.
SCRIPTED = ("softmax", "multimax")

# The options of `Normalizer` that each mapping takes.
OPTIONS: dict[str, tuple[str, ...]] = {
    "softmax": ("temperature", "learn_temperature"),
    "multimax": ("order", "terms", "init_std", "monotone"),
    "topk": ("k",),
    "sparsemax": (),
    "entmax15": (),
    "alpha_entmax": ("alpha",),
    "evsoftmax": (),
}


class Normalizer(nn.Module):
    """Any of `NORMALIZERS` as a module: `normalizer(scores, dim, mask)` gives probabilities.

    Args:
        name: a key of `NORMALIZERS`.
        num_heads: None learns one set of parameters; else each head has its own, and scores carry
            the heads in dimension -3. Any mapping takes it, for a model has one number of heads
            whatever the mapping; it changes nothing but multimax and a learned alpha.
        order, terms, init_std, monotone: multimax, as `Modulator`.
        temperature, learn_temperature: softmax, as `Temperature`.
        k: topk.
        alpha: alpha_entmax at this alpha; None learns it, as `EntmaxAlpha`.

    Submodules, or None: `modulator` (multimax; softmax at a temperature), `alpha` (alpha_entmax).

    Raises:
        ValueError: an unknown name, an option that this mapping does not take with a value other
            than its default (`OPTIONS` has those it takes), or an argument out of its range.
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
        if num_heads is not None and not is_whole(num_heads):
            raise ValueError(
                "the number of heads must be a whole number of at least 1, or None for all heads "
                f"alike, got {num_heads!r}"
            )
        _refuse_foreign(
            name,
            order=order,
            terms=terms,
            init_std=init_std,
            monotone=monotone,
            temperature=temperature,
            learn_temperature=learn_temperature,
            k=k,
            alpha=alpha,
        )
        self.name, self.num_heads = name, num_heads
        self.scriptable = name in SCRIPTED
        self.modulator: nn.Module | None = None
        self.alpha: EntmaxAlpha | None = None
        self.fixed: dict[str, Any] = {}
        if name == "multimax":
            self.modulator = Modulator(order, terms, num_heads, init_std, monotone)
        elif name == "softmax":
            tempered = Temperature(temperature, learn_temperature)
            if temperature != 1 or learn_temperature:
                self.modulator = tempered
        elif name == "topk":
            if not is_whole(k):
                raise ValueError(f"topk needs as k a whole number of at least 1, got {k!r}")
            self.fixed["k"] = k
        elif name == "alpha_entmax":
            if alpha is None:
                self.alpha = EntmaxAlpha(num_heads or 1)
            elif is_finite(alpha) and alpha >= 1:
                self.fixed["alpha"] = alpha
            else:
                raise ValueError(f"alpha must be a finite number of at least 1, got {alpha!r}")

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
                if parameter.dim() > 0:  # a learned temperature is one for all heads
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


def _refuse_foreign(name: str, **options: Any) -> None:
    """Raise ValueError for an option that would do nothing, being another mapping's."""
    parameters = inspect.signature(Normalizer).parameters
    for option, value in options.items():
        if option not in OPTIONS[name] and value != parameters[option].default:
            raise ValueError(
                f"the normalizer {name!r} does not take {option}={value!r}: leave it out; its "
                f"options are {', '.join(OPTIONS[name]) or 'none'}"
            )
