"""Put a mapping in place of softmax in the attention of any PyTorch model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.ops.backend import is_autocast
from multimax_fairseq.ops.masks import combine_masks

# Scores below this bound are masks, such as -1e9, whose square would dominate the gradient. The
# modulator receives this bound instead, and the rest is added after the modulator.
LOWEST_SCORE = -1024.0


def replace_softmax(
    model: nn.Module,
    normalizer: str = "multimax",
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    per_head: bool = False,
    **settings: Any,
) -> list[str]:
    """Replace softmax by a mapping in a model's attention modules; return the modules' names.

        replace_softmax(timm.create_model("deit_small_patch16_224"))
    Equivalent to: writing self.normalizer(scores) for scores.softmax(-1) in each module's forward

    Each module gets a `Normalizer` as its submodule `normalizer`, which is trained, saved and moved
    with the module. While the module's forward runs, the normalizer computes torch.softmax,
    Tensor.softmax, F.softmax, F.scaled_dot_product_attention and the attention of
    nn.MultiheadAttention. It does not replace log_softmax, nor attention that calls none of these
    functions (xFormers, flex_attention). Load a softmax model's weights first.

    A mask of scaled_dot_product_attention or nn.MultiheadAttention acts after the modulator. A call
    of softmax receives the sum of scores and mask. There -inf excludes, with probability and
    gradient 0, and a fully masked row is zero. The modulator transforms any other number. MultiMax
    is therefore monotone by default, so that a mask of -100 or -1e9 still excludes.

    Call the module, not its `forward`. torch.compile and torch.export record the normalizer; a
    module whose forward breaks the graph runs uncompiled.

    Args:
        model: changed in place; may itself be an attention module.
        normalizer: a key of `NORMALIZERS`.
        where: whether to change the module with this name. Default: the class name contains
            "Attention", and no submodule's class name does.
        per_head: learn the parameters per head. The scores have the heads in dimension -3, and the
            module has their number as `num_heads`.
        settings: other arguments of `Normalizer`; monotone is True by default.

    Raises:
        TypeError: a setting that `Normalizer` does not know.
        ValueError: no module to change; a module that is already changed, has its own `normalizer`
            or instance `forward`, or lacks `num_heads`; settings out of range; a mapping that reads
            hidden states (asentmax). The model is then unchanged.
        RuntimeError: in forward, if the module calls no softmax, or calls it inside
            torch.utils.checkpoint, whose second pass would compute softmax.
    """
    if mapping_named(normalizer).hidden:
        raise UsageError(
            f"the mapping {normalizer!r} reads hidden states, which softmax does not receive: "
            "choose another"
        )
    where = where or _is_innermost_attention
    chosen = {name: module for name, module in model.named_modules() if where(name, module)}
    if not chosen:
        raise ValueError(
            f"no attention module in {type(model).__name__}: choose the modules with `where`"
        )
    if normalizer == "multimax":
        settings = {"monotone": True, **settings}
    normalizers = [
        Normalizer(normalizer, _heads(name, module, per_head), **settings)
        for name, module in chosen.items()
    ]
    for module, made in zip(chosen.values(), normalizers, strict=True):
        device = next((parameter.device for parameter in module.parameters()), None)
        module.normalizer = made.to(device=device).train(module.training)
        # DataParallel copies attributes and hooks to its replicas, so neither holds the module: the
        # hook passes it. With a hook, TransformerEncoderLayer also skips its fused kernel.
        module.forward = _forward
        module.register_forward_pre_hook(_pass_module, with_kwargs=True)
    for module in model.modules():
        inside = (part.forward is _forward for part in module.modules())
        if isinstance(module, nn.TransformerEncoder) and any(inside):
            module.use_nested_tensor = False  # only the fused kernel takes nested tensors
    return list(chosen)


def _is_innermost_attention(name: str, module: nn.Module) -> bool:
    first, *inside = ["Attention" in type(part).__name__ for part in module.modules()]
    return first and not any(inside)


def _heads(name: str, module: nn.Module, per_head: bool) -> int | None:
    """Return the number of heads to learn for; raise ValueError if the module cannot be changed."""
    if module.forward is _forward:
        raise ValueError(f"the softmax of module {name!r} is replaced already")
    for attribute, taken in (
        ("normalizer", hasattr(module, "normalizer")),
        ("forward", "forward" in vars(module)),
    ):
        if taken:
            raise ValueError(
                f"module {name!r} has its own {attribute!r}: exclude the module with `where`"
            )
    if not per_head:
        return None
    num_heads = getattr(module, "num_heads", None)
    if not isinstance(num_heads, int):
        raise ValueError(
            f"per_head needs the attribute num_heads of module {name!r}, got {num_heads!r}: set "
            "it, or leave out per_head"
        )
    return num_heads


def _pass_module(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, "replaced": module}


def _forward(*args: Any, replaced: Any = None, **kwargs: Any) -> Any:
    """Run the module's own forward inside the mode."""
    if not torch.compiler.is_dynamo_compiling():
        return _forward_eager()(*args, replaced=replaced, **kwargs)
    # At a graph break, torch.compile runs the function that enters the mode again, in eager mode.
    # It must be this function, which then takes the branch above.
    mode = _SoftmaxMode(replaced)
    with mode:
        output = type(replaced).forward(replaced, *args, **kwargs)
    return mode.checked(output)


@functools.cache
def _forward_eager() -> Callable[..., Any]:
    def forward(*args: Any, replaced: Any, **kwargs: Any) -> Any:
        mode = _SoftmaxMode(replaced)
        with mode:
            output = type(replaced).forward(replaced, *args, **kwargs)
        return mode.checked(output)

    return torch.compiler.disable(forward)  # not at import time, because it imports the compiler


class _SoftmaxMode(TorchFunctionMode):
    """Computes softmax and attention by a module's normalizer."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.called = False
        self.recording = _recording()
        self.replacements: dict[Any, Callable[..., Any]] = {
            torch.softmax: self.softmax,
            torch.special.softmax: self.softmax,
            Tensor.softmax: self.softmax,
            F.softmax: self.softmax,
            F.scaled_dot_product_attention: self.attention,
            F.multi_head_attention_forward: self.multi_head_attention,
        }

    # With an `__enter__` of the mode's own, torch.compile does not break a graph inside the mode.
    def __enter__(self) -> _SoftmaxMode:
        super().__enter__()
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        if replacement is None:
            # torch.compile traces Tensor.unflatten and the like only as methods.
            name = getattr(func, "__name__", "")
            if torch.compiler.is_dynamo_compiling() and getattr(Tensor, name, None) is func:
                return getattr(args[0], name)(*args[1:], **kwargs)
            return func(*args, **kwargs)
        self.called = True
        is_compiling = torch.compiler.is_dynamo_compiling()
        if not is_compiling and self.recording not in (None, _recording()):
            raise RuntimeError(
                f"{type(self.module).__name__} calls softmax inside torch.utils.checkpoint, whose "
                "second pass would compute softmax: checkpoint the whole module, or exclude it "
                "with `where`"
            )
        # The modes of modules around this one must not replace the normalizer's own softmax.
        with torch._C.DisableTorchFunction():
            return replacement(*args, **kwargs)

    def checked(self, output: Any) -> Any:
        if not self.called:
            raise RuntimeError(
                f"{type(self.module).__name__} calls no softmax in its forward, so nothing is "
                "replaced: exclude it with `where`"
            )
        return output

    def softmax(self, input: Tensor, dim: int, *args: Any, **kwargs: Any) -> Tensor:
        # F.softmax has _stacklevel before dtype; the other signatures do not.
        dtypes = [arg for arg in (*args, kwargs.get("dtype")) if isinstance(arg, torch.dtype)]
        dtype = dtypes[0] if dtypes else _dtype_of_softmax(input)
        wide = input.to(torch.promote_types(dtype, torch.float32))
        scores = wide.clamp(min=LOWEST_SCORE)
        return self.module.normalizer(scores, dim, wide - scores).to(dtype)

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
        context, _ = self.module.normalizer.attend(
            query, key, value, mask, is_causal=is_causal, dropout_p=dropout_p, scale=scale
        )
        return context

    def multi_head_attention(
        self,
        query: Tensor,  # (T, B, E), or (T, E) without a batch; key and value alike with S
        key: Tensor,
        value: Tensor,
        embed_dim_to_check: int,
        num_heads: int,
        in_proj_weight: Tensor | None,
        in_proj_bias: Tensor | None,
        bias_k: Tensor | None,
        bias_v: Tensor | None,
        add_zero_attn: bool,
        dropout_p: float,
        out_proj_weight: Tensor,
        out_proj_bias: Tensor | None,
        training: bool = True,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None,
        k_proj_weight: Tensor | None = None,
        v_proj_weight: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **static: None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `F.multi_head_attention_forward`, whose masks act after the modulator here."""
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = query[:, None], key[:, None], value[:, None]
        (queries, batch, _), keys = query.shape, key.shape[0]
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
        if not use_separate_proj_weight:
            weights = in_proj_weight.chunk(3)  # type: ignore[union-attr]
        biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        if bias_k is not None and bias_v is not None:
            k = torch.cat([k, bias_k.expand(1, batch, -1)])
            v = torch.cat([v, bias_v.expand(1, batch, -1)])
        if add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 0, 0, 1)), F.pad(v, (0, 0, 0, 0, 0, 1))
        extra = k.shape[0] - keys  # keys that no mask excludes
        if is_causal and not extra:
            attn_mask = None
        mask = None
        if attn_mask is not None:  # (T, S) or (B H, T, S)
            mask = attn_mask.view(-1, num_heads if attn_mask.dim() == 3 else 1, queries, keys)
        if key_padding_mask is not None:
            padding = key_padding_mask.view(batch, 1, 1, keys)
            mask = combine_masks(mask, padding)
        if mask is not None:
            mask = F.pad(mask, (0, extra))
        q, k, v = (x.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
        context, probs = self.module.normalizer.attend(
            q,
            k,
            v,
            mask,
            is_causal=is_causal and not extra,
            dropout_p=dropout_p if training else 0.0,
            need_probs=need_weights,
        )
        # (B, H, T, D) to (T, B, E)
        output = F.linear(context.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
        if probs is not None:
            probs = probs.to(_dtype_of_softmax(context))
            probs = probs.mean(1) if average_attn_weights else probs
        if not is_batched:
            output, probs = output[:, 0], None if probs is None else probs[0]
        return output, probs


def _recording() -> Any:
    """Return the saved-tensor hooks, which torch.utils.checkpoint replaces.

    None without gradients or under torch.compile.
    """
    if torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled():
        return None
    return torch._C._autograd._top_saved_tensors_default_hooks(True) or ()


def _dtype_of_softmax(scores: Tensor) -> torch.dtype:
    """Return the dtype of PyTorch's softmax, which autocast makes float32 except on the CPU."""
    device = scores.device.type
    is_wide = device != "cpu" and is_autocast(device)
    return torch.promote_types(scores.dtype, torch.float32) if is_wide else scores.dtype
