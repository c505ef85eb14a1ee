"""A named mapping from scores to probabilities, with what it learns, and attention by it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from multimax_fairseq.functional.attention import (
    AttentionToSteps,
    attention_scores,
    attention_to_steps,
    fused_attention,
    weighted_values,
    with_future,
)
from multimax_fairseq.functional.checks import is_whole
from multimax_fairseq.functional.mapping import mapping_named
from multimax_fairseq.functional.normalizers import softmax


class Normalizer(nn.Module):
    """Any of `NORMALIZERS` as a module: `normalizer(scores, dim, mask)` gives probabilities, and
    `normalizer.attend(query, key, value, mask)` the values under them.

    Args:
        name: a key of `NORMALIZERS`.
        num_heads: None learns one set of parameters; else each head has its own, and scores carry
            the heads in dimension -3. Any mapping takes it, for a model has one number of heads
            whatever the mapping; it changes nothing where nothing is learned.
        hidden_size: of the hidden states that queries are projections of; for asentmax, which reads
            them, and nothing to the others.
        options: of the mapping, `NORMALIZERS[name].options`:
            order, terms, init_std, monotone: multimax, as `Modulator`.
            sink: multimax, "none", "zero" or "learned", as `Sink`.
            temperature, learn_temperature: softmax, as `Temperature`.
            k: topk.
            alpha: alpha_entmax at this alpha; None learns it, as `EntmaxAlpha`.
            start: ssmax, as `LengthScale`.
            bias: sigmoid; None is minus the logarithm of the number of keys.

    Submodules: what is learned, under the name of the function's argument: `modulator` (multimax;
    softmax at a temperature), which other mappings have as None, `alpha` (alpha_entmax), `sink`
    (sink, multimax), `length_scale` (ssmax), `beta` and `gamma` (asentmax).

    Raises:
        TypeError: an option that no mapping has.
        ValueError: an unknown name, an option that this mapping does not take with a value other
            than its default, an argument out of its range, or asentmax without hidden_size.
    """

    def __init__(
        self,
        name: str = "multimax",
        num_heads: int | None = None,
        hidden_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        mapping = mapping_named(name)
        if num_heads is not None and not is_whole(num_heads):
            raise ValueError(
                "the number of heads must be a whole number of at least 1, or None for all heads "
                f"alike, got {num_heads!r}"
            )
        options = mapping.complete(options)
        if mapping.hidden:
            if not is_whole(hidden_size):
                raise ValueError(
                    f"the normalizer {name!r} reads the hidden states of queries: give their size "
                    f"as hidden_size, a whole number of at least 1, got {hidden_size!r}"
                )
            options["hidden_size"] = hidden_size
        self.name, self.num_heads = name, num_heads
        self.modulator: nn.Module | None = None
        self.fixed: dict[str, Any] = {}
        for argument, value in mapping.build(num_heads, **options).items():
            if isinstance(value, nn.Module):
                if getattr(self, argument, None) is not None:
                    raise ValueError(
                        f"the mapping {name!r} builds a module for an argument {argument!r}, which "
                        "every module has: give the argument another name"
                    )
                setattr(self, argument, value)
            else:
                self.fixed[argument] = value
        has_sink = "sink" in self.fixed or isinstance(getattr(self, "sink", None), nn.Module)
        self.modulated = mapping.modulated and not has_sink
        self.sums_to_one = mapping.sums_to_one and not has_sink

    def forward(
        self,
        scores: Tensor,
        dim: int = -1,
        mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return probabilities, the shape of scores, in float32 or wider; the mask excludes.

        Args:
            hidden: as `attend`.
        """
        if not self.modulated:
            return self._named(scores, dim, mask, hidden)
        if self.modulator is not None:
            scores = self.modulator(scores)
        return softmax(scores, dim, mask)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context of each query, and the probabilities that it was formed by.

            context = dropout(normalizer(scale * Q K^T, mask)) V
        Any module with this method and `keep_heads` can stand in fairseq's attention.

        Args:
            query: (B, H, T, D), floating.
            key, value: (B, H, S, D) and (B, H, S, any size), of query's dtype.
            mask: broadcastable to (B, H, T, S). Bool: True excludes. Float: added to the scores,
                after a modulator.
            is_causal: query t attends to keys up to t; together with a mask, both hold.
            dropout_p: probability of dropping a probability.
            scale: default 1 / sqrt(D).
            need_probs: whether anybody reads the probabilities: the kernels do not hold them.
            hidden: (B, 1, T, hidden_size), what the queries are projections of; only some read it.

        Returns:
            ((B, H, T, size of a value) in the dtype of value, or of autocast; None, or the
            probabilities before dropout, (B, H, T, S) in float32 or wider).
        """
        if not need_probs:
            context = self._fused(query, key, value, mask, is_causal, dropout_p, scale)
            if context is not None:
                return context, None
        if is_causal:
            mask = with_future(mask, query.shape[-2], key.shape[-2], query.device)
        scores = attention_scores(query, key, scale)
        return self.attend_by_scores(scores, value, mask, dropout_p, need_probs, hidden)

    def for_steps(self, like: Tensor, heads: int, size: int) -> AttentionToSteps | None:
        """Return `functional.attention.attention_to_steps` by this mapping, for as long as what it
        has learned stays the same, or None where no kernel can.

        Args:
            like: a tensor of the dtype and on the device of queries.
            heads, size: of the queries.
        """
        asked = self._for_kernel()
        return None if asked is None else attention_to_steps(like, heads, size, **asked)

    def attend_by_scores(
        self,
        scores: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what `attend` does, by scores that somebody else has formed.

        Args:
            scores: (B, H, T, S), floating.
            value, mask, dropout_p, need_probs, hidden: as `attend`.
        """
        probs = self(scores, -1, mask, hidden)
        return weighted_values(probs, value, dropout_p), probs if need_probs else None

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        scale: float | None,
    ) -> Tensor | None:
        asked = self._for_kernel()
        if asked is None:
            return None
        return fused_attention(query, key, value, mask, is_causal, dropout_p, scale, **asked)

    def _for_kernel(self) -> dict[str, Any] | None:
        """As `Mapping.for_kernel`, None also for what reads hidden states; arguments that no kernel
        would read are not formed."""
        mapping = mapping_named(self.name)
        if mapping.kernel is None or mapping.hidden:
            return None
        return mapping.for_kernel(**self._arguments(None))

    def _named(
        self, scores: Tensor, dim: int, mask: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        function, arguments = mapping_named(self.name).function, self._arguments(hidden)
        if scores.dim() < 3:  # what heads share, (1, 1, 1), would make more dimensions of them
            for name, value in arguments.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    arguments[name] = value.reshape(())
        return function(scores, dim=dim, mask=mask, **arguments)

    def _arguments(self, hidden: Tensor | None) -> dict[str, Any]:
        """Those of the mapping's function."""
        mapping, arguments = mapping_named(self.name), dict(self.fixed)
        if mapping.hidden and hidden is None:
            raise ValueError(
                f"the normalizer {self.name!r} reads the hidden states that queries are "
                "projections of: pass them as hidden"
            )
        for argument, module in self.named_children():
            if argument == "modulator":
                arguments[argument] = module
            else:
                arguments[argument] = module(hidden) if mapping.hidden else module()
        if mapping.training:
            arguments["training"] = self.training
        return arguments

    def keep_heads(self, heads: list[int]) -> None:
        """Forget all but these heads' parameters, where each head has its own."""
        if self.num_heads is None:
            return
        for parameter in self.parameters():
            if parameter.dim() > 0:  # a learned temperature is one for all heads
                parameter.data = parameter.data[heads]  # in place, for what is tied to it
        for module in self.modules():
            if hasattr(module, "num_heads"):
                setattr(module, "num_heads", len(heads))  # noqa: B010  its type is the class's own

    def extra_repr(self) -> str:
        return ", ".join([repr(self.name), *(f"{key}={v}" for key, v in self.fixed.items())])


def attending(module: nn.Module | None) -> Iterator[nn.Module]:
    """Yield a module with `attend`, then what it attends by, which each has as `normalizer`."""
    while module is not None:
        yield module
        module = getattr(module, "normalizer", None)
