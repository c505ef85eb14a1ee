"""Saves and loads Hugging Face models with normalizers."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.transformers import fsmt
from multimax_fairseq.integrations.transformers.layers import (
    add_normalizer,
    attached,
    quiet,
    set_implementation,
)

FILE, LAYERS = "multimax.safetensors", "layers"


def save(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write a model with normalizers to a folder that `load` reads.

    It calls `model.save_pretrained(folder)` and writes the normalizers to multimax.safetensors.

    Example:
        save(model, "folder")
        model = load("folder")

    Args:
        model: a model that `attach` changed.
        folder: created if necessary. An earlier model in it is replaced when this one is complete.

    Raises:
        UsageError: the model has no normalizers from `attach`.
    """
    layers = attached(model)
    # replace_softmax sets `forward` of a layer.
    if not layers or any("forward" in vars(layer) for layer in layers.values()):
        raise UsageError(
            f"{type(model).__name__} has no normalizers from attach: call attach, or use "
            "save_pretrained"
        )
    folder = Path(folder)
    tensors = {
        f"{name}.{key}": value.detach().contiguous()
        for name, layer in layers.items()
        for key, value in layer.normalizer.state_dict().items()
    }
    arguments = json.dumps({name: layer.normalizer.arguments for name, layer in layers.items()})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
        temporary = Path(name)
        model.save_pretrained(temporary)
        save_file(tensors, temporary / FILE, {LAYERS: arguments})
        # FILE is removed first and moved last, so that `load` refuses an interrupted save.
        (folder / FILE).unlink(missing_ok=True)
        for weights in folder.glob("model*.safetensors*"):
            weights.unlink()
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == FILE):
            file.replace(folder / file.name)


def load(
    folder: str | os.PathLike[str],
    model_class: type[PreTrainedModel] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a model that `save` wrote, in evaluation mode.

    Args:
        folder: the folder given to `save`.
        model_class: the model's class. Default: the class of transformers that config.json names.
        options: other arguments of `model_class.from_pretrained`, such as dtype and device_map. The
            normalizers keep the dtype in which they were saved.

    Raises:
        UsageError: the folder is not from `save`, or its weights are not those of the class.
    """
    folder = Path(folder)
    arguments_by_layer, tensors = _read(folder / FILE)
    model_class = model_class or _class_of(folder)
    options.setdefault("use_safetensors", True)  # a pickle could run code
    with quiet():  # transformers reports the normalizers as unexpected keys
        model, info = model_class.from_pretrained(folder, **options, output_loading_info=True)
    known = tuple(f"{name}.normalizer." for name in arguments_by_layer)
    unknown = (name for name in info["unexpected_keys"] if not name.startswith(known))
    wrong = {*info["missing_keys"], *unknown}
    if wrong:
        raise UsageError(
            f"the weights in '{folder}' are not those of {type(model).__name__} (such as "
            f"{min(wrong)!r}): give the model_class that was saved"
        )
    fsmt.adapt(model)
    for name, arguments in arguments_by_layer.items():
        layer: Any = model.get_submodule(name)
        add_normalizer(layer, arguments)
        device = next((p.device for p in layer.normalizer.parameters()), None)
        state = {key: value.to(device) for key, value in tensors[name].items()}
        layer.normalizer.load_state_dict(state, assign=True)
    if any(not isinstance(layer, nn.Linear) for layer in attached(model).values()):
        set_implementation(model)
    return model


def _read(file: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
    """Return the arguments and the tensors of each layer's normalizer."""
    if not file.is_file():
        raise UsageError(f"'{file}' does not exist: give a folder that save wrote")
    with safe_open(file, "pt") as opened:
        arguments_by_layer = json.loads(opened.metadata()[LAYERS])
        tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in arguments_by_layer}
        for full in opened.keys():  # noqa: SIM118  it is not a dict
            name = max((n for n in arguments_by_layer if full.startswith(f"{n}.")), key=len)
            tensors[name][full.removeprefix(f"{name}.")] = opened.get_tensor(full)
    return arguments_by_layer, tensors


def _class_of(folder: Path) -> type[PreTrainedModel]:
    """Return the class that config.json names."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    name = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, PreTrainedModel):
        raise UsageError(f"transformers has no class {name!r}: pass it as model_class")
    return model_class
