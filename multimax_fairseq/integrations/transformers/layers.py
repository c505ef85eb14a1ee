"""Attaches a mapping to each attention layer of a Hugging Face model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.fsmt.modeling_fsmt import PretrainedFSMTModel

from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.transformers import fsmt, interface
from multimax_fairseq.mappings.registry import mapping_named
from multimax_fairseq.modules.normalizer import Normalizer

KEY = "multimax_normalizers"  # of config.json: {layer's name: arguments}
TAG = "multimax-fairseq"  # of the model's card on the Hub


def attach(
    model: PreTrainedModel,
    normalizer: str = "multimax",
    *,
    inputs: Mapping[str, Any] | None = None,
    per_head: bool = False,
    freeze: bool = False,
    **settings: Any,
) -> list[str]:
    """Replace softmax in a model's attention layers by a mapping, and return the layers' names.

    The function calls the model once. It adds a `Normalizer`, as the submodule `normalizer`, to
    each layer that computes its attention through transformers' AttentionInterface. The submodule
    is trained, moved and saved in the state dict with the layer. Its parameters are float32 for any
    dtype of the model. With `init_std=0` the model's function does not change.

    FSMT is supported too, although it has no AttentionInterface.

    Load the weights of a softmax model first. `attach` writes the mappings to `model.config`, so
    `load` reads what `save`, `save_pretrained` or Trainer writes. `from_pretrained` drops them. The
    model's config is a copy from then on, because other models may have the same object.

    Example:
        model = AutoModelForCausalLM.from_pretrained("gpt2")
        attach(model)

    Args:
        model: the model, changed in place.
        normalizer: a key of `NORMALIZERS`.
        inputs: the arguments of the call, which must reach every attention layer. Default:
            `model.dummy_inputs`.
        per_head: learn the parameters per head.
        freeze: train the normalizers alone; the other parameters need no gradient from then on.
        settings: other arguments of `Normalizer`.

    Raises:
        TypeError: `Normalizer` does not know a setting.
        ValueError: an unknown mapping; a setting out of range.
        UsageError: the mapping reads hidden states; the model has normalizers already, a part that
            does not use AttentionInterface, soft-capping or sinks. The model is then unchanged.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise UsageError(_ignores_the_interface(model))
    if mapping_named(normalizer).hidden:
        raise UsageError(
            f"the mapping {normalizer!r} reads hidden states, which transformers does not pass "
            "to attention functions: choose another"
        )
    # `save` writes JSON, which has no numpy numbers.
    settings = {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}
    Normalizer(normalizer, **settings)  # raises before the model is changed
    if attached(model):
        raise UsageError(
            f"{type(model).__name__} has normalizers already: attach once, to a softmax model"
        )
    fsmt.adapt(model)
    names = {module: name for name, module in model.named_modules()}
    equipped: dict[str, nn.Module] = {}

    def equip(module: nn.Module, num_heads: int) -> None:
        name = names[module]
        add_normalizer(
            module, {"name": normalizer, "num_heads": num_heads if per_head else None, **settings}
        )
        equipped[name] = module

    with _own_configs(model, equipped):
        set_implementation(model)
        token = interface.equip.set(equip)
        try:
            called = _call_once(model, inputs)
        finally:
            interface.equip.reset(token)
        for part in called:
            if (part is model or _has_attention(part)) and not attached(part):
                raise UsageError(_ignores_the_interface(part))
    record(model)
    if freeze:
        model.requires_grad_(False)
        for module in equipped.values():
            module.normalizer.requires_grad_(True)
    return [name for name in names.values() if name in equipped]


def attached(model: nn.Module) -> dict[str, Any]:
    """Return {name: layer} for the attention layers that have a normalizer."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "normalizer", None), Normalizer)
    }


def record(model: Any) -> None:
    """Write the arguments of each layer's normalizer to the config, for `load`."""
    arguments = {name: layer.normalizer.arguments for name, layer in attached(model).items()}
    setattr(model.config, KEY, arguments)
    model.add_model_tags(TAG)


def add_normalizer(module: Any, arguments: dict[str, Any]) -> Normalizer:
    """Add a `Normalizer` with these arguments to an attention layer or an output layer.

    That of an output layer, an nn.Linear, modulates the logits. The parameters are float32, or
    wider if that is torch's default dtype.
    """
    if hasattr(module, "normalizer"):
        raise UsageError(f"{type(module).__name__} has an attribute 'normalizer': rename it")
    normalizer = Normalizer(**arguments)
    device = next((parameter.device for parameter in module.parameters()), None)
    # from_pretrained builds models with the dtype of their weights as the default dtype.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    module.normalizer = normalizer.to(device, dtype).train(module.training)
    if isinstance(module, nn.Linear):
        module.register_forward_hook(_modulate)
    return normalizer


def _modulate(layer: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
    return layer.normalizer.modulator(logits)


def set_implementation(model: Any) -> None:
    """Set the attention implementation of a model and its parts."""
    interface.register()
    if isinstance(model, PretrainedFSMTModel):  # `fsmt.adapt` changed its layers
        return
    model.set_attn_implementation(interface.IMPLEMENTATION)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            if part.config._attn_implementation != interface.IMPLEMENTATION:
                raise UsageError(_ignores_the_interface(part))
    # The layers of EncoderDecoderModel have other config objects than its two models.
    for config in _configs(model):
        config._attn_implementation = interface.IMPLEMENTATION


def _configs(model: nn.Module) -> list[Any]:
    """Return each config once, a model's own before those of its parts."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


def _ignores_the_interface(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} does not use transformers' AttentionInterface: call "
        "multimax_fairseq.replace_softmax(model) instead"
    )


def _has_attention(part: PreTrainedModel) -> bool:
    return any("Attention" in type(module).__name__ for module in part.modules())


def _call_once(model: Any, inputs: Mapping[str, Any] | None) -> list[PreTrainedModel]:
    """Call the model without gradients; return the models of transformers in it that ran."""
    modes = [(module, module.training) for module in model.modules()]
    called: list[PreTrainedModel] = []
    hooks = [
        part.register_forward_hook(lambda part, *_: called.append(part))
        for part in model.modules()
        if isinstance(part, PreTrainedModel)
    ]
    model.eval()
    try:
        with torch.no_grad(), quiet():
            if inputs is not None:
                model(**inputs)
            else:
                _call_with_dummies(model)
        return called
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes:
            module.training = training
        for layer in attached(model).values():
            layer.normalizer.train(layer.training)


def _call_with_dummies(model: Any) -> None:
    inputs = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value
        for name, value in model.dummy_inputs.items()
    }
    if getattr(model.config, "is_encoder_decoder", False) and "input_ids" in inputs:
        inputs.setdefault("decoder_input_ids", inputs["input_ids"])
    try:
        model(**inputs)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{type(model).__name__} cannot be called with its own dummy_inputs ({error}): pass "
            "inputs=, the arguments of a call that reaches every attention layer"
        ) from error


@contextlib.contextmanager
def _own_configs(model: Any, equipped: dict[str, nn.Module]) -> Iterator[None]:
    """Give the model copies of its configs, which other models may share; undo all on an error."""
    before = [
        (module, module.config)
        for module in model.modules()
        if isinstance(vars(module).get("config"), PretrainedConfig)
    ]
    copies: dict[int, Any] = {}
    for module, config in before:
        module.config = copy.deepcopy(config, copies)
    try:
        yield
    except BaseException:
        for module in equipped.values():
            del module.normalizer
        for module, config in before:
            module.config = config
        raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
