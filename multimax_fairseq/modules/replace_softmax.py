"""Any normalizer in the attention of other people's torch models."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.table import mapping_named
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.ops.backend import is_autocast

# No score of a live model lies this low. One that does is modulated as if it were this, and what it
# lies below is added after: a gradient by the square of -1e9, a mask's, would be a rounding error,
# and the square of -3e38 is infinite.
LOWEST_SCORE = -1024.0


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
    moved with it. Load the weights of a softmax model first. Not answered: log_softmax, and
    attention that calls none of torch's public softmaxes (xFormers, flex_attention).

    The masks of scaled_dot_product_attention and of nn.MultiheadAttention act after the modulator,
    as in `multimax_fairseq.scaled_dot_product_attention`. A softmax gets scores and mask (or
    position bias) as one: -inf excludes, with probability and gradient exactly 0, and a row that is
    wholly excluded is zero; any other number is modulated like a score. So that it goes on meaning
    next to nothing, be it -100 or -1e9, multimax is monotone here unless told otherwise.

    torch.compile, torch.export and tracing record the normalizer. A changed module in which
    torch.compile has to break the graph runs uncompiled.

    Args:
        model: changed in place; it may be an attention module itself.
        normalizer: a key of `NORMALIZERS`.
        where: whether the module of this name is to be changed. Default: its class name contains
            "Attention", and that of no module inside it does.
        per_head: learn the parameters per head. The scores have the heads in dimension -3, and the
            module has their number as `num_heads`.
        settings: what else `Normalizer` takes; monotone is True by default.

    Raises:
        TypeError: an argument of another type; a setting that `Normalizer` does not know.
        ValueError: no such module; one that is changed already, has a `normalizer` or a forward
            of its own, or lacks `num_heads`; settings out of range; a mapping that reads hidden
            states (asentmax). The model is then as before.
        RuntimeError: in forward, when a changed module met no softmax, or met it inside of
            torch.utils.checkpoint, whose second pass would be softmax.
    """
    for name, value, kind in (
        ("model", model, nn.Module),
        ("normalizer", normalizer, str),
        ("per_head", per_head, bool),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
    if not (where is None or callable(where)):
        raise TypeError(f"where must be a function of a name and a module, got {where!r}")
    if mapping_named(normalizer).hidden:
        raise UsageError(
            f"the normalizer {normalizer!r} reads hidden states, which no softmax is given: choose "
            "another"
        )
    where = where or _is_innermost_attention
    picked = {name: module for name, module in model.named_modules() if where(name, module)}
    if not picked:
        raise ValueError(
            f"no attention module in {type(model).__name__}: say by `where` which modules have one"
        )
    if normalizer == "multimax":
        settings = {"monotone": True, **settings}
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
    own_forward = "forward" in module.__dict__ or "forward" in module._modules
    for taken, is_taken in (
        ("normalizer", hasattr(module, "normalizer")),
        ("forward", own_forward),
    ):
        if is_taken:
            raise ValueError(
                f"module {name!r} has a {taken!r} of its own, which would be in the way: leave the "
                "module out by `where`"
            )
    if not per_head:
        return None
    num_heads = getattr(module, "num_heads", None)
    if not isinstance(num_heads, int):
        raise ValueError(
            f"parameters per head need the attribute num_heads of module {name!r}, got "
            f"{num_heads!r}: set it, or leave per_head out"
        )
    return num_heads


def _keep(module: nn.Module, inputs: Any, output: Any) -> None:
    """A hook that changes nothing."""


def _check_padding(mask: Tensor, keys: int, batch: int) -> None:
    """As torch's own, whose message is a function, which torch.compile cannot take."""
    if tuple(mask.shape) != (batch, keys):
        raise ValueError(f"key_padding_mask must be {[batch, keys]}, got {list(mask.shape)}")


# A mode is asked about this function as a whole, and no more about what its body calls. Here is the
# body alone, for a mode to be asked about its softmax.
_multi_head_body: Any = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {
        **vars(F),
        "has_torch_function": lambda tensors: False,
        "_check_key_padding_mask": _check_padding,
    },
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class _Answers(TorchFunctionMode):
    """Answers the calls of torch's softmax by a module's normalizer, and notes if there were any.

    Args:
        module: has the normalizer.
        traced: by torch.compile, which then enters this mode on paper only.
        num_heads: inside of `F.multi_head_attention_forward`, where the scores are (B H, T, S).
    """

    def __init__(self, module: Any, traced: bool, num_heads: int | None = None) -> None:
        super().__init__()
        self.module, self.traced, self.num_heads, self.met = module, traced, num_heads, False
        self.trains = torch.is_grad_enabled()
        self.answers: dict[Any, Callable[..., Any]] = {
            torch.softmax: self.softmax,
            torch.special.softmax: self.softmax,
            torch.ops.aten.softmax: self.softmax,
            torch.ops.aten.softmax.int: self.softmax,
            Tensor.softmax: self.softmax,
            F.softmax: self.softmax,
            F.scaled_dot_product_attention: self.attention,
            F.multi_head_attention_forward: self.multi_head_attention,
        }
        if num_heads is not None:
            self.answers |= {torch.baddbmm: self.scores_and_mask, F.softmax: self.softmax_of_heads}

    # One of its own keeps torch.compile from breaking a graph inside of the mode: the second graph
    # would run while the mode is in force, which would answer the normalizer's own softmax.
    def __enter__(self) -> _Answers:
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer = self.answers.get(func)
        if answer is not None:
            if not self.traced:
                self.check_caller()
            return answer(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and args and isinstance(args[0], Tensor):
            # torch.compile knows the methods that are written in Python as methods only.
            name = getattr(func, "__name__", "")
            if getattr(Tensor, name, None) is func:
                return getattr(args[0], name)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def checked(self, output: Any) -> Any:
        if not self.met:
            raise RuntimeError(
                f"module {self.module.replaced_at!r} ({type(self.module).__name__}) met no softmax "
                "of torch in its forward, so that nothing was replaced: leave it out by `where`"
            )
        return output

    def check_caller(self) -> None:
        """Refuse to answer what will be called again without an answer."""
        if torch.compiler.is_dynamo_compiling():
            # The model itself compiles what it calls here: see `__enter__`.
            torch._dynamo.graph_break()
            return
        frame = sys._getframe(2) if self.trains else None
        while frame is not None and frame.f_code is not _Normalized._forward_answered.__code__:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                raise RuntimeError(
                    f"module {self.module.replaced_at!r} calls softmax inside of "
                    "torch.utils.checkpoint, whose second pass would not be answered: checkpoint "
                    "the module as a whole, or leave it out by `where`"
                )
            frame = frame.f_back

    def normalized(self, scores: Tensor, dim: int, mask: Tensor | None) -> Tensor:
        self.met = True
        # Nor does the mode of a module around this one answer the normalizer's own softmax.
        with torch._C.DisableTorchFunction():
            return self.module.normalizer(scores, dim, mask)

    def softmax(
        self,
        input: Tensor,
        dim: int | None = None,
        *places: Any,
        _stacklevel: int = 3,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if dim is None:
            raise ValueError("softmax without a dim: give the dimension that sums to one")
        # torch's three signatures have the dtype in different places.
        dtype = next((place for place in places if isinstance(place, torch.dtype)), dtype)
        dtype = dtype or _dtype_of_softmax(input)
        if not dtype.is_floating_point:
            raise ValueError(f"softmax needs floating-point scores or a dtype, got {dtype}")
        wide = input.to(torch.promote_types(dtype, torch.float32))
        scores = wide.clamp(min=LOWEST_SCORE)
        found = self.normalized(scores, dim, wide - scores).to(dtype)
        return found if out is None else out.copy_(found)

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
        mask = attn_mask
        if mask is not None and mask.dtype == torch.bool:
            mask = ~mask
        self.met = True
        with torch._C.DisableTorchFunction():
            context, _ = self.module.normalizer.attend(
                query,
                key,
                value,
                mask,
                is_causal=is_causal,
                dropout_p=dropout_p,
                # torch.jit.trace has made a tensor of what was computed of a shape.
                scale=float(scale) if isinstance(scale, Tensor) else scale,
            )
        return context

    def multi_head_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        inside = _Answers(self.module, self.traced, num_heads)
        with inside:
            output = _multi_head_body(
                query, key, value, embed_dim_to_check, num_heads, *args, **kwargs
            )
        self.met = self.met or inside.met
        return output

    def scores_and_mask(self, mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """In place of their sum, which the body gives to nothing but softmax."""
        return torch.bmm(query, key), mask

    def softmax_of_heads(self, input: Tensor | tuple[Tensor, Tensor], dim: int, **_: Any) -> Tensor:
        scores, mask = (input, None) if isinstance(input, Tensor) else input
        if mask is not None:
            mask = mask[None] if mask.shape[0] == 1 else mask.unflatten(0, (-1, self.num_heads))
        probs = self.normalized(scores.unflatten(0, (-1, self.num_heads)), dim, mask)
        return probs.flatten(0, 1).to(_dtype_of_softmax(scores))


def _dtype_of_softmax(scores: Tensor) -> torch.dtype:
    """What torch gives for scores of this dtype: autocast makes it float32, but not on the CPU."""
    device = scores.device.type
    wide = device != "cpu" and is_autocast(device)
    return torch.promote_types(scores.dtype, torch.float32) if wide else scores.dtype


class _Normalized(nn.Module):
    """Comes before a module's class, in a class of both that `_normalized` makes."""

    softmax_class: Any
    normalizer: nn.Module
    _forward_uncompiled: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return self._forward_uncompiled(*args, **kwargs)
        # All of it here: a graph that breaks inside of `with` gives up this function as a whole,
        # which then runs, and takes the other way.
        answers = _Answers(self, traced=True)
        with answers:
            output = super().forward(*args, **kwargs)
        return answers.checked(output)

    def _forward_answered(self, *args: Any, **kwargs: Any) -> Any:
        answers = _Answers(self, traced=False)
        with answers:
            output = super().forward(*args, **kwargs)
        return answers.checked(output)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # pickle and deepcopy find no class that was made on the way.
        return _new, (self.softmax_class,), self.__getstate__()


@functools.cache
def _normalized(softmax_class: Any) -> Any:
    attributes = {"softmax_class": softmax_class, "__module__": softmax_class.__module__}
    # A graph that breaks would as well give up what is called here: nothing is compiled while the
    # mode is in force. Here rather than in the class, because it imports the compiler.
    attributes["_forward_uncompiled"] = torch.compiler.disable(_Normalized._forward_answered)
    return type(softmax_class.__name__, (_Normalized, softmax_class), attributes)


def _new(softmax_class: Any) -> Any:
    normalized = _normalized(softmax_class)
    return normalized.__new__(normalized)
