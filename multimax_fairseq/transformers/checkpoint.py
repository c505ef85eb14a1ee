"""A Hugging Face model with normalizers, to a folder and back."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from multimax_fairseq.errors import UsageError, first_line
from multimax_fairseq.transformers.layers import attached, put, quiet, use

FILE, LAYERS = "multimax.safetensors", "layers"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = 1 << 20  # of the numbers that a normalizer is made with, such as its heads


def save(model: PreTrainedModel, folder: str | os.PathLike[str]) -> None:
    """Write a model with normalizers to a folder that `load` reads.

        save(model, "folder"); model = load("folder")
    Equivalent to: model.save_pretrained(folder), and the normalizers in multimax.safetensors

    Args:
        model: one that `attach` changed.
        folder: is made; an earlier model there is replaced once this one is written.

    Raises:
        ValueError: a model without normalizers; a folder that is a file.
    """
    layers = attached(model)
    if not layers or not all(hasattr(layer.normalizer, "made_with") for layer in layers.values()):
        raise UsageError(
            f"{type(model).__name__} has no normalizers that attach gave it: attach them, or use "
            "save_pretrained"
        )
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"'{folder}' is a file: give a folder")
    tensors = {
        f"{name}.{key}": value.detach().contiguous()
        for name, layer in layers.items()
        for key, value in layer.normalizer.state_dict().items()
    }
    made_with = json.dumps({name: layer.normalizer.made_with for name, layer in layers.items()})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as written:
        aside = Path(written)
        model.save_pretrained(aside)
        save_file(tensors, aside / FILE, {LAYERS: made_with})
        # Its file goes first and comes last: an interrupted save is never another model's half.
        (folder / FILE).unlink(missing_ok=True)
        for weights in folder.glob("model*.safetensors*"):
            weights.unlink()
        for file in sorted(aside.iterdir(), key=lambda file: file.name == FILE):
            file.replace(folder / file.name)


def load(
    folder: str | os.PathLike[str],
    model_class: type[PreTrainedModel] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return the model that `save` wrote, in eval mode.

    Args:
        folder: of `save`.
        model_class: default: the class of transformers that config.json names.
        options: what else `model_class.from_pretrained` takes, such as dtype and device_map. The
            normalizers keep the dtype that they were saved in.

    Raises:
        ValueError: the folder is not one of `save`, is damaged, or does not fit the class.
    """
    for name in ("attn_implementation", "output_loading_info"):
        if name in options:
            raise UsageError(f"load sets {name} itself: leave it out")
    folder = Path(folder)
    made_with, tensors = _read(folder / FILE)
    model_class = model_class or _class_of(folder)
    options.setdefault("use_safetensors", True)  # `save` writes nothing else, and no pickle
    try:
        with quiet():  # its report of the keys that are unexpected
            model, found = model_class.from_pretrained(folder, **options, output_loading_info=True)
    except Exception as error:  # whatever transformers finds in files of others
        raise UsageError(
            f"no {model_class.__name__} can be read from '{folder}' ({first_line(error)}): save "
            "the model again, or give the class and options that fit it"
        ) from error
    # What is in their file too is not expected there.
    known = tuple(f"{name}.normalizer." for name in made_with)
    unknown = (name for name in found["unexpected_keys"] if not name.startswith(known))
    lost = {*found["missing_keys"], *unknown}
    if lost:
        raise UsageError(
            f"the weights in '{folder}' are not those of {type(model).__name__} (such as "
            f"{min(lost)!r}): give the model_class that was saved"
        )
    try:
        for name, arguments in made_with.items():
            layer: Any = model.get_submodule(name)
            put(layer, arguments)
            device = next((p.device for p in layer.normalizer.parameters()), None)
            state = {key: value.to(device) for key, value in tensors[name].items()}
            layer.normalizer.load_state_dict(state, assign=True)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise UsageError(
            f"'{folder / FILE}' does not fit {type(model).__name__} ({name}: {why}): give the "
            "model_class that was saved"
        ) from error
    use(model)
    return model


def _read(file: Path) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, torch.Tensor]]]:
    """Return what each layer's normalizer was made with, and its tensors."""
    if not file.is_file():
        raise UsageError(f"'{file}' does not exist: give a folder that save wrote as a whole")
    try:
        with safe_open(file, "pt") as opened:
            made_with = json.loads((opened.metadata() or {})[LAYERS])
            tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in made_with}
            for full in opened.keys():  # noqa: SIM118  it is no dict
                name = max((n for n in made_with if full.startswith(f"{n}.")), key=len)
                tensors[name][full.removeprefix(f"{name}.")] = opened.get_tensor(full)
        if not made_with or not all(isinstance(each, dict) for each in made_with.values()):
            raise TypeError("layers without settings")
        for name, each in made_with.items():
            if any(isinstance(value, int) and value > LARGEST for value in each.values()):
                raise ValueError(f"no layer has such numbers as {name}")
            for key, value in tensors[name].items():
                if value.dtype not in FLOATS or not value.isfinite().all():
                    raise ValueError(f"{name}.{key} is not of finite numbers")
    except (
        *(SafetensorError, AttributeError, KeyError, TypeError, ValueError),
        RecursionError,
    ) as error:
        raise UsageError(f"'{file}' is damaged ({error}): save the model again") from error
    return made_with, tensors


def _class_of(folder: Path) -> type[PreTrainedModel]:
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        name = (config.architectures or ["none"])[0]
        found = getattr(transformers, name, None)
    except Exception as error:  # whatever transformers finds in a file of others
        raise UsageError(
            f"'{folder / 'config.json'}' cannot be read ({first_line(error)}): save the model "
            "again, or pass its class as model_class"
        ) from error
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise UsageError(f"transformers has no class {name!r}: pass it as model_class")
    return found
