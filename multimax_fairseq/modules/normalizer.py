"""A named mapping as a module, with its learned parameters and its attention."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.mappings.softmax import softmax
from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.ops.attention import (
    AttentionInputs,
    check_attention,
    compute_attention,
    weighted_values,
)
from multimax_fairseq.ops.checks import is_whole
from multimax_fairseq.ops.decoding import DecodingAttention, KVCache, decoding_attention


class Normalizer(AttentionModule):
    """A mapping of `NORMALIZERS` as a module.

    `normalizer(scores, dim, mask)` returns probabilities. `attend` computes attention from queries
    and keys, `attend_by_scores` from scores. `decoding_attention` prepares the decoding steps of
    one sentence. All apply the same mapping.

    Args:
        name: a key of `NORMALIZERS`.
        num_heads: None learns one set of parameters. Otherwise each head has its own, and scores
            carry the heads in dimension -3. Mappings without parameters ignore it.
        hidden_size: size of the hidden states from which the queries are projected. asentmax reads
            them; other mappings ignore it.
        options: of the mapping, `NORMALIZERS[name].options`:
            order, terms, init_std, monotone: multimax, as `Modulator`.
            sink: multimax, "none", "zero" or "learned", as `Sink`.
            length_scale: multimax, whether to learn an outer scale, as `LengthScale`.
            temperature, learn_temperature: softmax, as `Temperature`.
            cap, shift, width, learn_softcap: softcap, as `SoftCap`.
            k: topk.
            alpha: alpha_entmax with a fixed alpha; None learns it, as `EntmaxAlpha`.
            start: ssmax, as `LengthScale`.
            bias: sigmoid; None stands for minus the logarithm of the number of keys.

    Submodules: the learned arguments of the mapping's function, by their names: `modulator`
    (multimax, softcap, and softmax with a temperature; None for other mappings), `alpha`
    (alpha_entmax), `sink` (sink, multimax), `length_scale` (ssmax), `outer_scale` (multimax),
    `beta` and `gamma` (asentmax).

    Raises:
        TypeError: an option that no mapping has.
        ValueError: the name is unknown; an option of another mapping differs from its default; an
            argument is out of range; hidden_size is missing for asentmax.

    Example:
        >>> normalizer = Normalizer("alpha_entmax", num_heads=8)
        >>> normalizer(torch.randn(2, 8, 10, 10)).sum(-1).allclose(torch.ones(()))
        True
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
                "the number of heads must be a whole number of at least 1, or None to share "
                f"the parameters among all heads, got {num_heads!r}"
            )
        # The arguments of an equal normalizer.
        self.arguments = {"name": name, "num_heads": num_heads, "hidden_size": hidden_size}
        self.arguments |= options
        options = mapping.complete(options)
        if mapping.hidden:
            if not is_whole(hidden_size):
                raise ValueError(
                    f"the mapping {name!r} reads the hidden states of queries: give their size "
                    f"as hidden_size, a whole number of at least 1, got {hidden_size!r}"
                )
            options["hidden_size"] = hidden_size
        self.name, self.num_heads, self.hidden_size = name, num_heads, hidden_size or 0
        # Called after a fused kernel: hook(self, inputs).
        self.kernel_hooks: list[Callable[..., None]] = []
        self.modulator: nn.Module | None = None
        self.fixed: dict[str, Any] = {}
        arguments = mapping.build(num_heads, **options)
        for argument, value in arguments.items():
            if isinstance(value, nn.Module):
                if getattr(self, argument, None) is not None:
                    raise ValueError(
                        f"the mapping {name!r} builds a module for an argument {argument!r}, which "
                        "every module has: give the argument another name"
                    )
                setattr(self, argument, value)
            else:
                self.fixed[argument] = value
        self.modulated = mapping.modulated and arguments.keys() <= {"modulator"}
        self.sums_to_one = mapping.sums_to_one and "sink" not in arguments

    def forward(
        self,
        scores: Tensor,
        dim: int = -1,
        mask: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Return probabilities, the shape of scores, in float32 or wider; the mask excludes.

        Args:
            hidden: as `AttentionInputs`.
        """
        if not self.modulated:
            return self._normalize(scores, dim, mask, hidden)
        # Not the mapping's function: `softmax` takes a temperature, but not the module `modulator`.
        if self.modulator is not None:
            scores = self.modulator(scores)
        return softmax(scores, dim, mask)

    def attention(
        self, inputs: AttentionInputs, need_probs: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context of each query, and its attention probabilities.

            context = dropout(normalizer(scale * Q K^T, mask)) V

        Args, Returns: as `AttentionModule.attention`.

        Raises:
            TypeError, ValueError: as `scaled_dot_product_attention`.
        """
        check_attention(inputs)
        hidden = inputs.hidden
        context, probs = compute_attention(
            inputs,
            self.name,
            lambda scores, mask: self(scores, -1, mask, hidden),
            None if need_probs else self._kernel_arguments(hidden),
        )
        if probs is None:
            for hook in self.kernel_hooks:
                hook(self, inputs)
        return context, probs if need_probs else None

    def decoding_attention(self, like: Tensor, heads: int, size: int) -> DecodingAttention | None:
        def prepare(hidden: Tensor | None) -> DecodingAttention | None:
            arguments = self._kernel_arguments(hidden)
            return None if arguments is None else decoding_attention(like, heads, size, **arguments)

        if not mapping_named(self.name).hidden:
            return prepare(None)

        def attend(
            query: Tensor, cache: KVCache, scale: float, hidden: Tensor | None = None
        ) -> Tensor:
            step = prepare(hidden)  # the arguments differ in each step
            assert step is not None
            return step(query, cache, scale, hidden)

        is_supported = prepare(like.new_zeros(1, 1, 1, self.hidden_size)) is not None
        return attend if is_supported else None

    def attend_by_scores(
        self,
        scores: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        need_probs: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        probs = self(scores, -1, mask, hidden)
        return weighted_values(probs, value, dropout_p), probs if need_probs else None

    def _kernel_arguments(self, hidden: Tensor | None) -> dict[str, Any] | None:
        """Return the arguments of `fused_attention`; None if no kernel supports this mapping."""
        mapping = mapping_named(self.name)
        return None if mapping.kernel is None else mapping.for_kernel(**self._arguments(hidden))

    def _normalize(
        self, scores: Tensor, dim: int, mask: Tensor | None, hidden: Tensor | None
    ) -> Tensor:
        function, arguments = mapping_named(self.name).function, self._arguments(hidden)
        if scores.dim() < 3:  # a shared parameter, (1, 1, 1), would add dimensions
            for name, value in arguments.items():
                if isinstance(value, Tensor) and value.numel() == 1:
                    arguments[name] = value.reshape(())
        return function(scores, dim=dim, mask=mask, **arguments)

    def _arguments(self, hidden: Tensor | None) -> dict[str, Any]:
        """Return the arguments of the mapping's function."""
        mapping, arguments = mapping_named(self.name), dict(self.fixed)
        if mapping.hidden and hidden is None:
            raise ValueError(
                f"the mapping {self.name!r} reads the hidden states from which "
                "the queries are projected: pass them as hidden"
            )
        for argument, module in self.named_children():
            if argument == "modulator":
                arguments[argument] = module
            else:
                arguments[argument] = module(hidden) if mapping.hidden else module()
        if mapping.training:
            arguments["training"] = self.training
        return arguments

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **options: Any
    ) -> None:
        if "outer_scale" in self._modules and f"{prefix}length_scale.scale" in state_dict:
            raise ValueError(
                "this checkpoint computes sigma(s log(n) x), and MultiMax's length scale now "
                "computes s log(n) sigma(x): train again, or install the version that trained it"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **options)

    def keep_heads(self, heads: list[int]) -> None:
        """Keep only these heads' parameters, if each head has its own."""
        if self.num_heads is None:
            return
        for parameter in self.parameters():
            if parameter.dim() > 0:  # all heads share a learned temperature
                parameter.data = parameter.data[heads]  # keeps tied parameters tied
        for module in self.modules():
            if hasattr(module, "num_heads"):
                setattr(module, "num_heads", len(heads))  # noqa: B010  its type is the class's own
        self.arguments["num_heads"] = len(heads)

    def extra_repr(self) -> str:
        return ", ".join([repr(self.name), *(f"{key}={v}" for key, v in self.fixed.items())])


def normalizer_chain(module: nn.Module | None) -> Iterator[nn.Module]:
    """Yield a module, then its attribute `normalizer`, and so on."""
    while module is not None:
        yield module
        module = getattr(module, "normalizer", None)
