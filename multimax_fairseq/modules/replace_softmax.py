"""Any normalizer in the attention of other people's torch models."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multimax_fairseq.functional.attention import attention_scores
from multimax_fairseq.modules.normalizer import Normalizer


def replace_softmax(
    model: nn.Module,
    normalizer: str = "multimax",
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    per_head: bool = False,
    **settings: Any,
) -> list[str]:
    """Put a normalizer in place of softmax in a model's attention modules, and return their names.

        replace_softmax(timm.create_model("deit_small_patch16_224"))
    Equivalent to: writing self.normalizer(scores) for scores.softmax(-1) in each module's forward

    While such a module's forward runs, each softmax and scaled_dot_product_attention of torch is
    answered by the `Normalizer` that it now has as its submodule `normalizer`: trained, saved and
    moved with it. A score of -inf, or at most half its dtype's lowest number, is excluded:
    probability and gradient are exactly 0 there, and a row that is wholly excluded is zero. Any
    other additive mask is part of the score. Load the weights of a softmax model first.
    torch.compile leaves these modules as they are.

    Args:
        model: changed in place; it may be an attention module itself.
        normalizer: a key of `NORMALIZERS`.
        where: whether the module of this name is to be changed. Default: its class name contains
            "Attention", and that of no module inside it does.
        per_head: learn the parameters a head. The scores have the heads in dimension -3, and the
            module has their number as `num_heads`.
        settings: what else `Normalizer` takes.

    Raises:
        ValueError: no such module; one that is changed already, has a `normalizer` or a forward
            of its own, or lacks `num_heads`; settings out of range. The model is then as before.
        RuntimeError: in forward, when a changed module met no softmax.
    """
    where = where or _is_innermost_attention
    picked = {name: module for name, module in model.named_modules() if where(name, module)}
    if not picked:
        raise ValueError(
            f"no attention module in {type(model).__name__}: say by `where` which modules have one"
        )
    made = {
        name: Normalizer(normalizer, _heads(name, module, per_head), **settings)
        for name, module in picked.items()
    }
    for name, module in picked.items():
        device = next((parameter.device for parameter in module.parameters()), None)
        module.normalizer = made[name].to(device=device).train(module.training)
        module.replaced_at = name
        softmax_class: Any = type(module)
        module.__class__ = _normalized(softmax_class)
        if isinstance(module, nn.MultiheadAttention):
            # A hooked module is called even where TransformerEncoderLayer would be fused.
            module.register_forward_hook(_keep)
    for module in model.modules():
        inside = (isinstance(part, _Normalized) for part in module.modules())
        if isinstance(module, nn.TransformerEncoder) and any(inside):
            module.use_nested_tensor = False  # nested tensors need the fused layer
    return list(picked)


def _is_innermost_attention(name: str, module: nn.Module) -> bool:
    first, *inside = ["Attention" in type(part).__name__ for part in module.modules()]
    return first and not any(inside)


def _heads(name: str, module: nn.Module, per_head: bool) -> int | None:
    """Return for how many heads this module is to learn; ValueError if it cannot be changed."""
    if isinstance(module, _Normalized):
        raise ValueError(f"the softmax of module {name!r} is replaced already: do so once")
    for taken in ("normalizer", "forward"):
        if taken in module.__dict__ or taken in module._modules:
            raise ValueError(
                f"module {name!r} has a {taken!r} of its own, which would be in the way: leave the "
                "module out by `where`"
            )
    if not per_head:
        return None
    num_heads = getattr(module, "num_heads", None)
    if not isinstance(num_heads, int):
        raise ValueError(
            f"parameters a head need the attribute num_heads of module {name!r}, got "
            f"{num_heads!r}: set it, or leave per_head out"
        )
    return num_heads


def _keep(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that changes nothing."""


class _Answers(TorchFunctionMode):
    """Answers the calls of torch's softmax by a normalizer, and notes that there were any."""

    def __init__(self, normalizer: nn.Module) -> None:
        super().__init__()
        self.normalizer, self.met = normalizer, False
        self.answers: dict[Any, Callable[..., Any]] = {
            torch.softmax: self.softmax,
            torch.special.softmax: self.softmax,
            Tensor.softmax: self.softmax,
            F.softmax: self.softmax,
            F.scaled_dot_product_attention: self.attention,
            F.multi_head_attention_forward: self.multi_head_attention,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.answers.get(func, func)(*args, **(kwargs or {}))

    def softmax(
        self,
        input: Tensor,
        dim: int | None = None,
        *places: Any,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if dim is None:
            raise ValueError("softmax without a dim: give the dimension that sums to one")
        self.met = True
        # torch's three signatures have the dtype in different places.
        dtype = next((place for place in places if isinstance(place, torch.dtype)), dtype)
        excluded = input <= torch.finfo(input.dtype).min / 2
        # Not -inf: a learned temperature's gradient would be 0 * inf.
        scores = input.masked_fill(excluded, 0.0)
        probs: Tensor = self.normalizer(
            scores if dtype is None else scores.to(dtype), dim, excluded
        )
        return probs.to(dtype or input.dtype)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        boolean = attn_mask is not None and attn_mask.dtype == torch.bool
        scores = attention_scores(query, key, None if boolean else attn_mask, scale)
        if attn_mask is not None and boolean:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        if is_causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        return F.dropout(self.softmax(scores, -1).to(value.dtype), dropout_p) @ value

    def multi_head_attention(self, *args: Any, **kwargs: Any) -> Any:
        num_heads = args[4]

        def softmax(scores: Tensor, dim: int) -> Tensor:
            return self.softmax(scores.unflatten(0, (-1, num_heads)), dim).flatten(0, 1)

        # A mode is asked about this function as a whole, and no more about what its body calls.
        names = {"softmax": softmax, "scaled_dot_product_attention": self.attention}
        function = F.multi_head_attention_forward
        body = types.FunctionType(
            function.__code__,
            {**vars(F), **names, "has_torch_function": lambda tensors: False},
            argdefs=function.__defaults__,
        )
        return body(*args, **kwargs)


class _Normalized(nn.Module):
    """Comes before a module's class, in a class of both that `_normalized` makes."""

    softmax_class: Any
    normalizer: nn.Module

    # What torch.compile (2.13) makes of this forward gives wrong numbers, without an error.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _Answers(self.normalizer) as answers:
            output = super().forward(*args, **kwargs)
        if not answers.met:
            raise RuntimeError(
                f"module {self.replaced_at!r} ({type(self).__name__}) met no softmax of torch in "
                "its forward, so that nothing was replaced: leave it out by `where`"
            )
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and deepcopy find no class that was made on the way.
        return _new, (self.softmax_class,), self.__getstate__()


@functools.cache
def _normalized(softmax_class: Any) -> Any:
    attributes = {"softmax_class": softmax_class, "__module__": softmax_class.__module__}
    return type(softmax_class.__name__, (_Normalized, softmax_class), attributes)


def _new(softmax_class: Any) -> Any:
    normalized = _normalized(softmax_class)
    return normalized.__new__(normalized)
