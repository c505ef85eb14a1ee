"""A checkpoint to convert: read, described, written."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel
from omegaconf import OmegaConf

import multimax_fairseq.models  # noqa: F401  registers the architectures
from multimax_fairseq.compat import saving, untrusted
from multimax_fairseq.errors import CheckpointError, UsageError, no_file
from multimax_fairseq.models.config import (
    DEFAULTS,
    MAPPINGS,
    OF_TRAINING,
    PLACES,
    flag,
    set_defaults,
)
from multimax_fairseq.models.transformer_lm_multimax import MultimaxLanguageModel
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel

State = dict[str, Any]

# The settings that two vectors of four numbers can follow, or that end with the training.
REPRESENTED = OF_TRAINING | {
    *("attention_normalizer", "attention_normalizer_at", "output_normalizer"),
    *("multimax_order", "multimax_terms"),
}


def read(path: Path) -> State:
    """Return a checkpoint as fairseq would save it today; UsageError if it is none."""
    if not path.is_file():
        raise no_file("checkpoint", path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if not isinstance(state.get("model"), dict) or state.get("cfg") is None:
        raise CheckpointError(
            f"'{path}' has no model and settings: give a checkpoint that fairseq-train wrote"
        )
    # Loading made a config object of it, which no checkpoint may hold; old ones have args instead.
    state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    state["args"] = None
    state["model"] = untrusted.unwrapped(state["model"])
    return state


def write(state: State, path: Path) -> None:
    """Write a checkpoint without what belongs to the parameters of the one it was made of."""
    state.pop("last_optimizer_state", None)
    for name in ("ema", "ema_fp32_params"):
        state.get("extra_state", {}).pop(name, None)
    saving.save(state, path)


def options(state: State, group: str = "model") -> dict[str, Any]:
    """Return the settings of a group, in place: what is changed in it is changed in the state."""
    settings = state["cfg"].get(group)
    return vars(settings) if isinstance(settings, argparse.Namespace) else settings or {}


def architecture(state: State) -> str:
    """Return the name of the model's architecture."""
    settings = options(state)
    return str(settings.get("_name") or settings.get("arch"))


def set_architecture(state: State, name: str) -> None:
    settings = options(state)
    settings.update({key: name for key in ("_name", "arch") if settings.get(key) is not None})


def is_language_model(state: State) -> bool:
    return issubclass(ARCH_MODEL_REGISTRY[architecture(state)], TransformerLanguageModel)


def our_settings(state: State) -> argparse.Namespace:
    """Return the settings of a Transformer of ours; UsageError if it is none."""
    name = architecture(state)
    known = (MultimaxTransformerModel, MultimaxLanguageModel)
    if ARCH_MODEL_REGISTRY.get(name) not in known:
        names = [name for name, model in ARCH_MODEL_REGISTRY.items() if model in known]
        raise UsageError(
            f"a checkpoint of the architecture '{name}' cannot be converted: give one of "
            f"{', '.join(names)}"
        )
    return complete(name, options(state))


def complete(name: str, given: dict[str, Any]) -> argparse.Namespace:
    """Return an architecture's settings, of which a checkpoint of a YAML file has those alone that
    were given."""
    settings = argparse.Namespace(**given)
    ARCH_CONFIG_REGISTRY[name](settings)
    set_defaults(settings)
    return settings


def attentions(state: State) -> tuple[str, ...]:
    """Return those of `PLACES` that the model has."""
    if is_language_model(state):
        return ("decoder",)
    return PLACES[:2] if options(state).get("no_cross_attention") else PLACES


def label_of(name: str) -> str:
    """Return what a mapping is called, be it of another plugin, which is not imported here."""
    return MAPPINGS[name].label if name in MAPPINGS else repr(name)


def refuse_options(settings: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise UsageError for the first of these settings that others have nothing for."""
    for name in names:
        value = getattr(settings, name)
        if name not in REPRESENTED and value != getattr(DEFAULTS, name):
            shown = flag(name) if value is True else f"{flag(name)} {value}"
            raise UsageError(
                f"{shown} cannot be represented: the other side has nothing like it, so train "
                "without it"
            )


def refuse_output(settings: argparse.Namespace) -> None:
    """Raise UsageError for an output layer that is neither softmax nor plain MultiMax."""
    if settings.output_normalizer not in ("softmax", "multimax"):
        label = label_of(settings.output_normalizer)
        raise UsageError(
            f"{label} in the output layer cannot be represented: the other side has softmax or "
            "MultiMax there"
        )
    mapping = MAPPINGS["multimax"]
    refuse_options(settings, map(mapping.setting_of, mapping.output_options or ()))
