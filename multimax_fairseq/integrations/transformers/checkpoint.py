"""Saves and loads Hugging Face models with mappings."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.transformers import fsmt
from multimax_fairseq.integrations.transformers.layers import (
    KEY,
    TAG,
    add_normalizer,
    attached,
    quiet,
    record,
    set_implementation,
)

CONFIG, CARD = "config.json", "README.md"
# Folders from before the arguments were in CONFIG have them in the metadata of this file.
OLD_FILE, OLD_LAYERS = "multimax.safetensors", "layers"

# `save` replaces a card that has the comment.
CARD_COMMENT = "<!-- Written by multimax_fairseq. Remove this line to keep your changes. -->"
CARD_TEMPLATE = """\
---
library_name: transformers
tags:
- {tag}
---
{comment}

# {model} with {mappings}

In place of softmax, this model uses:

{layers}
{results}## Load the model

    pip install 'multimax-fairseq[transformers]'

```python
from multimax_fairseq.integrations.transformers import load

model = load(name)  # this folder, or the name of its repository on the Hub
```

`from_pretrained` alone drops the parameters of the mapping and returns a softmax model.
"""


def save(
    model: Any, folder: str | os.PathLike[str], metrics: Mapping[str, Any] | None = None
) -> None:
    """Write a model with normalizers to a folder that `load` reads.

    It calls `save_pretrained` of the model of transformers, which may be inside a wrapper, such as
    DistributedDataParallel. A model of PEFT is copied, and its adapters are merged into the copy.
    README.md is the model card: the mapping of each layer, the metrics, how to load the model.

    Example:
        save(model, "folder", metrics=trainer.evaluate())
        model = load("folder")

    Args:
        model: a model that `attach` changed.
        folder: created if necessary. An earlier model in it is replaced when this one is complete.
            A README.md that you wrote or changed is kept.
        metrics: {name: value}, for the model card.

    Raises:
        UsageError: the model has no normalizers from `attach`.
    """
    peft = next((part for part in model.modules() if hasattr(part, "merge_and_unload")), None)
    if peft is not None:
        model = copy.deepcopy(peft).merge_and_unload()
    while not isinstance(model, PreTrainedModel) and len(parts := list(model.children())) == 1:
        model = parts[0]
    layers = attached(model).values() if isinstance(model, PreTrainedModel) else []
    # replace_softmax sets `forward` of a layer. After add_adapter, save_pretrained writes no model.
    is_other = any("forward" in vars(x) for x in layers) or hasattr(model, "peft_config")
    if not layers or is_other:
        raise UsageError(
            f"save needs a model of transformers with normalizers from attach, which this "
            f"{type(model).__name__} is not: call attach, or use save_pretrained"
        )
    record(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as name:
        temporary = Path(name)
        model.save_pretrained(temporary)
        card = folder / CARD
        if not card.exists() or CARD_COMMENT in card.read_text(encoding="utf-8"):
            (temporary / CARD).write_text(_card(model, metrics or {}), encoding="utf-8")
        # CONFIG is removed first and moved last, so that `load` refuses an interrupted save.
        for old in (folder / CONFIG, folder / OLD_FILE, *folder.glob("model*.safetensors*")):
            old.unlink(missing_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda file: file.name == CONFIG):
            file.replace(folder / file.name)


def _card(model: Any, metrics: Mapping[str, Any]) -> str:
    """Return the text of the model card."""
    layers: dict[str, list[str]] = {}
    for name, layer in attached(model).items():
        given = {k: v for k, v in layer.normalizer.arguments.items() if v is not None}
        mapping = given.pop("name")
        settings = ", ".join(f"{key}={value}" for key, value in given.items())
        layers.setdefault(f"{mapping} ({settings})" if settings else mapping, []).append(name)
    results = "".join(
        f"| {name} | {f'{value:.6g}' if isinstance(value, float) else value} |\n"
        for name, value in metrics.items()
    )
    return CARD_TEMPLATE.format(
        tag=TAG,
        comment=CARD_COMMENT,
        model=type(model).__name__,
        mappings=" and ".join(dict.fromkeys(mapping.split(" (")[0] for mapping in layers)),
        layers="".join(
            f"- {mapping} in {', '.join(f'`{name}`' for name in names)}\n"
            for mapping, names in layers.items()
        ),
        results=f"## Results\n\n| metric | value |\n|---|---|\n{results}\n" if results else "",
    )


def load(
    folder: str | os.PathLike[str],
    model_class: type[PreTrainedModel] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Return a model with the normalizers that `attach` gave it, in evaluation mode.

    Args:
        folder: written by `save`, `save_pretrained` or Trainer after `attach`; or the name of a
            repository on the Hub, from which it downloads only JSON and safetensors files.
        model_class: the model's class. Default: the class of transformers that config.json names.
        options: other arguments of `model_class.from_pretrained`, such as dtype and device_map, and
            for a repository revision, token and cache_dir. The normalizers are float32, or wider if
            the model is.

    Raises:
        UsageError: there is no such folder or repository, it has no normalizers, or its weights are
            not those of the class.
    """
    if not Path(folder).is_dir():
        folder = _downloaded(str(folder), options)
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise UsageError(
            f"'{folder / CONFIG}' does not exist: pass a folder that save, save_pretrained or "
            "Trainer wrote. For a folder of PEFT, call attach and PeftModel.from_pretrained"
        )
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    layers = getattr(config, KEY, None) or _old_arguments(folder)
    options.setdefault("use_safetensors", True)  # a pickle could run code
    builder: Any = _with_normalizers(model_class or _class_of(config), layers)
    with quiet():
        model, info = builder.from_pretrained(folder, **options, output_loading_info=True)
    wrong = {*info["missing_keys"], *info["unexpected_keys"]}
    if wrong:
        raise UsageError(
            f"the weights in '{folder}' are not those of {type(model).__name__} with its "
            f"normalizers (such as {min(wrong)!r}): pass the model_class that was saved"
        )
    if any(not isinstance(layer, nn.Linear) for layer in attached(model).values()):
        set_implementation(model)
    record(model)
    return model


def _downloaded(name: str, options: dict[str, Any]) -> str:
    """Return the folder of a downloaded repository."""
    mine = {k: options.pop(k) for k in ("revision", "token", "cache_dir") if k in options}
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors"], **mine)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{name!r} is neither a folder nor a repository of the Hub that can be read: pass the "
            "path of a folder, or owner/name"
        ) from error


def _with_normalizers(model_class: Any, layers: dict[str, dict[str, Any]]) -> Any:
    """Return a class whose from_pretrained builds a `model_class`, adds normalizers, then loads."""

    class Builder(model_class):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            model = model_class(*arguments, **options)
            fsmt.adapt(model)
            parts = dict(model.named_modules())
            for name in layers.keys() & parts.keys():
                add_normalizer(parts[name], layers[name])
            return model

    return Builder


def _old_arguments(folder: Path) -> dict[str, dict[str, Any]]:
    if not (folder / OLD_FILE).is_file():
        raise UsageError(
            f"'{folder / CONFIG}' names no normalizers: use from_pretrained for a softmax model. "
            "For a Trainer checkpoint of an earlier version, call attach, then load_state_dict"
        )
    with safe_open(folder / OLD_FILE, "pt") as opened:
        return json.loads(opened.metadata()[OLD_LAYERS])


def _class_of(config: Any) -> type[PreTrainedModel]:
    """Return the class that config.json names."""
    name = (config.architectures or ["none"])[0]
    model_class = getattr(transformers, name, None)
    if not isinstance(model_class, type) or not issubclass(model_class, PreTrainedModel):
        raise UsageError(f"transformers has no class {name!r}: pass it as model_class")
    return model_class
