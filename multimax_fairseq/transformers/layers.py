"""Gives each attention layer of a Hugging Face model a normalizer of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.table import mapping_named
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.transformers import interface


def attach(
    model: PreTrainedModel,
    normalizer: str = "multimax",
    *,
    inputs: Mapping[str, Any] | None = None,
    per_head: bool = False,
    **settings: Any,
) -> list[str]:
    """Put a normalizer in place of softmax in a model's attention layers, and return their names.

        attach(AutoModelForCausalLM.from_pretrained("gpt2"))
    Equivalent to: model.set_attn_implementation("sdpa"), but for the softmax

    The model is called once: the layers that form their attention through transformers'
    AttentionInterface in this call get a `Normalizer`, as their submodule `normalizer`, which is
    trained, moved and in the state dict with them. Its parameters are float32 whatever the
    model's; with `init_std=0` the model is the one that it was. Load the weights of a softmax
    model first. `save` and `load` keep the normalizers; `from_pretrained` alone would drop them.

    Args:
        model: changed in place.
        normalizer: a key of `NORMALIZERS`.
        inputs: the arguments of the call, which has to reach every attention layer. Default:
            `model.dummy_inputs`.
        per_head: learn the parameters per head.
        settings: what else `Normalizer` takes.

    Raises:
        TypeError: an argument of another type; a setting that `Normalizer` does not know.
        ValueError: settings out of range; a mapping that reads hidden states; a model that has
            normalizers already, has a part that forms its attention by itself, or uses
            soft-capping, sinks or position biases. The model is then as before.
    """
    for name, value, kind in (
        ("model", model, PreTrainedModel),
        ("normalizer", normalizer, str),
        ("inputs", inputs, Mapping | None),
        ("per_head", per_head, bool),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {getattr(kind, '__name__', kind)}, got {value!r}")
    if mapping_named(normalizer).hidden:
        raise UsageError(
            f"the normalizer {normalizer!r} reads hidden states, which transformers gives no "
            "attention function: choose another"
        )
    # Numbers of numpy's are none that a file of JSON can hold.
    settings = {k: v.item() if isinstance(v, np.generic) else v for k, v in settings.items()}
    Normalizer(normalizer, **settings)  # what is out of range is said before anything is changed
    if attached(model):
        raise UsageError(
            f"{type(model).__name__} has normalizers already: attach once, to a softmax model"
        )
    names = {module: name for name, module in model.named_modules()}
    given: dict[str, nn.Module] = {}

    def give(module: nn.Module, num_heads: int) -> None:
        name = names[module]
        put(module, {"name": normalizer, "num_heads": num_heads if per_head else None, **settings})
        given[name] = module

    with _unchanged_on_error(model, given):
        use(model)
        token = interface.equip.set(give)
        try:
            _call(model, inputs)
        finally:
            interface.equip.reset(token)
        if not given:
            raise UsageError(_ignores_the_interface(model))
    return [name for name in names.values() if name in given]


def attached(model: nn.Module) -> dict[str, Any]:
    """Return the attention layers that have a normalizer, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "normalizer", None), Normalizer)
    }


def put(module: Any, made_with: dict[str, Any]) -> None:
    """Give a layer the normalizer that these arguments of `Normalizer` make."""
    if hasattr(module, "normalizer"):
        raise UsageError(
            f"{type(module).__name__} has an attribute 'normalizer' of its own, which would be in "
            "the way: rename it"
        )
    normalizer: Any = Normalizer(**made_with)
    normalizer.made_with = made_with  # for save
    device = next((parameter.device for parameter in module.parameters()), None)
    module.normalizer = normalizer.to(device=device).train(module.training)


def use(model: Any) -> None:
    """Set the attention implementation of a model and of its parts."""
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            if part.config._attn_implementation != interface.IMPLEMENTATION:
                raise UsageError(_ignores_the_interface(part))
    # EncoderDecoderModel gives its two models new configs, but their layers keep the old ones.
    for config in _configs(model):
        config._attn_implementation = interface.IMPLEMENTATION


def _configs(model: nn.Module) -> list[Any]:
    """Return each config in the model once; a model's own comes before those of its parts."""
    return list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())


def _ignores_the_interface(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} forms its attention by itself, not through transformers' "
        "AttentionInterface: use multimax_fairseq.replace_softmax(model)"
    )


def _call(model: Any, inputs: Mapping[str, Any] | None) -> None:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), quiet():
            if inputs is not None:
                model(**inputs)
            else:
                _call_with_dummies(model)
    finally:
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
def _unchanged_on_error(model: Any, given: dict[str, nn.Module]) -> Iterator[None]:
    # Setting a config's implementation also sets that of the configs inside it, so those come last.
    before = [(config, config._attn_implementation) for config in _configs(model)]
    try:
        yield
    except BaseException:
        for module in given.values():
            del module.normalizer
        for config, implementation in before:
            config._attn_implementation = implementation
        raise


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of transformers: of a call with dummies, or of what is checked here."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(before)
