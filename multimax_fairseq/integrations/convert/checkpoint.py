"""Reads, describes and writes the checkpoints to convert."""

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
from multimax_fairseq.mappings.registry import NORMALIZERS
from multimax_fairseq.models.config import (
    ATTENTIONS,
    TRAINING_ONLY,
    flag,
    set_defaults,
    translation_config,
)
from multimax_fairseq.models.transformer_lm_multimax import MultimaxLanguageModel
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel

State = dict[str, Any]

# Settings that the two vectors can represent, or that matter only in training.
REPRESENTED = TRAINING_ONLY | {
    *("attention_normalizer", "attention_normalizer_at", "output_normalizer"),
    *("multimax_order", "multimax_terms"),
}


def read(path: Path) -> State:
    """Return a checkpoint in the form that fairseq saves today.

    Raises:
        UsageError: it does not exist, or is not fairseq's.
    """
    if not path.is_file():
        raise no_file("checkpoint", path)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    if not isinstance(state.get("model"), dict) or state.get("cfg") is None:
        raise CheckpointError(
            f"'{path}' has no model and settings: pass a checkpoint that fairseq-train wrote"
        )
    # Loading converts the settings, also the args of old checkpoints, to a config object.
    state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    state["args"] = None
    state["model"] = untrusted.unwrapped(state["model"])
    return state


def write(state: State, path: Path) -> None:
    """Write a checkpoint without optimizer state and EMA, which do not match the new parameters."""
    state.pop("last_optimizer_state", None)
    for name in ("ema", "ema_fp32_params"):
        state.get("extra_state", {}).pop(name, None)
    saving.save(state, path)


def options(state: State, group: str = "model") -> dict[str, Any]:
    """Return the settings of a group. They share memory with the state."""
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
    """Return the settings of one of our Transformers.

    Raises:
        UsageError: the checkpoint is of another architecture.
    """
    name = architecture(state)
    known = (MultimaxTransformerModel, MultimaxLanguageModel)
    if ARCH_MODEL_REGISTRY.get(name) not in known:
        names = [name for name, model in ARCH_MODEL_REGISTRY.items() if model in known]
        raise UsageError(
            f"a checkpoint of the architecture '{name}' cannot be converted: pass one of "
            f"{', '.join(names)}"
        )
    return complete(name, options(state))


def complete(name: str, saved: dict[str, Any]) -> argparse.Namespace:
    """Return all settings of an architecture; a run from a YAML file saves only its own."""
    settings = argparse.Namespace(**saved)
    ARCH_CONFIG_REGISTRY[name](settings)
    set_defaults(settings)
    return settings


def attentions(state: State) -> tuple[str, ...]:
    """Return those of `ATTENTIONS` that the model has."""
    if is_language_model(state):
        return ("decoder",)
    return ATTENTIONS[:2] if options(state).get("no_cross_attention") else ATTENTIONS


def label_of(name: str) -> str:
    """Return a mapping's display name, or its own name if its plugin is not imported."""
    return NORMALIZERS[name].label if name in NORMALIZERS else repr(name)


def refuse_options(settings: argparse.Namespace, names: Iterable[str]) -> None:
    """Raise UsageError if one of these settings cannot be represented."""
    defaults = translation_config()()
    for name in names:
        value = getattr(settings, name)
        if name not in REPRESENTED and value != getattr(defaults, name):
            shown = flag(name) if value is True else f"{flag(name)} {value}"
            raise UsageError(
                f"{shown} cannot be represented, because the other toolkit has no such option: "
                "train without it"
            )


def refuse_output(settings: argparse.Namespace) -> None:
    """Raise UsageError unless the output layer is softmax or plain MultiMax."""
    if settings.output_normalizer not in ("softmax", "multimax"):
        label = label_of(settings.output_normalizer)
        raise UsageError(
            f"{label} in the output layer cannot be represented, because the other toolkit has "
            "softmax or MultiMax there: train with --output-normalizer multimax"
        )
    mapping = NORMALIZERS["multimax"]
    refuse_options(settings, map(mapping.setting_of, mapping.output_options or ()))
