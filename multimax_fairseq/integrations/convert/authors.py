"""Checkpoints of the authors' patched fairseq, whose modulators are `ts` and `ranges`.

Each attention and the decoder's output layer have a modulator. Cross-attention and an adaptive
softmax do not apply it, so they are softmax.
"""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from torch import Tensor

from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.convert import checkpoint, vectors
from multimax_fairseq.integrations.convert.checkpoint import State
from multimax_fairseq.models.config import normalizer_config, normalizer_names, translation_config

# Key under which a converted checkpoint keeps our settings, for the conversion back. The authors'
# code drops it when it trains the model further.
RECORD = "multimax_fairseq"
ATTENTION = re.compile(
    r"((encoder|decoder)\.layers\.\d+\.(self_attn|encoder_attn))\.q_proj\.weight"
)
OUTPUT = "decoder"
SUFFIX = "_multimax"
# Our criteria and the stock criteria with the same losses.
STOCK_CRITERIA = {
    "multimax_cross_entropy": "cross_entropy",
    "label_smoothed_multimax_cross_entropy": "label_smoothed_cross_entropy",
}


def from_authors(state: State) -> None:
    """Convert a checkpoint of the authors' code to one of this package, in place.

    Raises:
        UsageError: the architecture is not a stock Transformer, or a modulator is missing.
    """
    theirs = checkpoint.architecture(state)
    if ARCH_MODEL_REGISTRY.get(theirs) not in (TransformerModel, TransformerLanguageModel):
        raise UsageError(
            f"the checkpoint has the architecture '{theirs}', but the authors' code has fairseq's "
            "Transformers: pass one of those, such as transformer_iwslt_de_en or transformer_lm"
        )
    model, options = state["model"], checkpoint.options(state)
    if not any(name.endswith(".ts") for name in model):
        raise UsageError(
            "the checkpoint has no ts and ranges, so it is not of the authors' code: to use a "
            "softmax model of stock fairseq, pass it to --finetune-from-model as it is"
        )
    pairs = {at: (_pop_vectors(model, at), kind) for at, kind in _modulated_modules(state)}
    ours = f"{theirs}{SUFFIX}"
    if ours not in ARCH_MODEL_REGISTRY:  # the same architecture in another size
        sizes = argparse.Namespace(**options)
        ARCH_CONFIG_REGISTRY[theirs](sizes)
        options.update(vars(sizes))
        base = "transformer_lm" if checkpoint.is_language_model(state) else "transformer"
        ours = f"{base}{SUFFIX}"
    record, own_settings = state.pop(RECORD, None), _settings(state)
    modulated = _modulated_kinds(options)
    if record is not None:
        recorded = {name: v for name, v in record["settings"].items() if name in own_settings}
        settings = vars(checkpoint.complete(ours, options | recorded))
        # The record does not match a model whose modulators have changed since.
        if _can_represent(settings, [pair for pair in pairs.values() if pair[1] in modulated]):
            own_settings = recorded
            checkpoint.options(state, "criterion").update(record["criterion"])
    options.update(own_settings)
    checkpoint.set_architecture(state, ours)
    settings = vars(checkpoint.our_settings(state))
    mappings = _mappings_by_kind(settings)
    for at, (pair, kind) in pairs.items():
        if mappings[kind] == "multimax":
            parameters = vectors.split(pair, settings["multimax_order"], settings["multimax_terms"])
            prefix = _modulator_name(at)
            model.update({f"{prefix}.{name}": value for name, value in parameters.items()})


def to_authors(state: State) -> None:
    """Convert a checkpoint of this package to one of the authors' code, in place.

    For softmax, `ts` is zero.

    Raises:
        UsageError: the model has no modulator, or a part that the authors' code cannot represent.
    """
    settings = checkpoint.our_settings(state)
    _check_representable(state, settings)
    mappings, model = _mappings_by_kind(vars(settings)), state["model"]
    names = vectors.names(settings.multimax_terms)
    if not any(name.endswith(tuple(names)) for name in model):
        raise UsageError(
            "the checkpoint has no modulator: pass one that was trained with MultiMax in encoder, "
            "decoder or output layer"
        )
    dtype = next(value.dtype for name, value in model.items() if ATTENTION.fullmatch(name))
    for at, kind in list(_modulated_modules(state)):
        if mappings[kind] == "multimax":
            keys = {name: f"{_modulator_name(at)}.{name}" for name in names}
            ts, ranges = vectors.join({n: _pop(model, key) for n, key in keys.items()})
        else:
            ts, ranges = (torch.zeros(4, dtype=dtype) for _ in range(2))
        vectors.check((ts, ranges), at)
        model.update({f"{at}.ts": ts, f"{at}.ranges": ranges})
    options, criterion = checkpoint.options(state), checkpoint.options(state, "criterion")
    settings_of_ours = {n: options.pop(n) for n in _settings(state) if n in options}
    name = criterion.get("_name")
    state[RECORD] = {"settings": settings_of_ours, "criterion": {}}
    if name in STOCK_CRITERIA:
        state[RECORD]["criterion"]["_name"] = name
        criterion["_name"] = STOCK_CRITERIA[name]
    checkpoint.set_architecture(state, checkpoint.architecture(state).removesuffix(SUFFIX))


# --- modulators -----------------------------------------------------------------------------------


def _modulated_modules(state: State) -> Iterator[tuple[str, str]]:
    """Yield (module, kind) of each attention and of the output layer."""
    for name in list(state["model"]):
        if match := ATTENTION.fullmatch(name):
            yield match[1], "cross" if match[3] == "encoder_attn" else match[2]
    yield OUTPUT, "output"


def _modulator_name(at: str) -> str:
    return "decoder.output_modulator" if at == OUTPUT else f"{at}.normalizer.modulator"


def _pop_vectors(model: dict[str, Tensor], at: str) -> vectors.Vectors:
    """Remove and return (ts, ranges) of a module of the authors' model."""
    return vectors.check((_pop(model, f"{at}.ts"), _pop(model, f"{at}.ranges")), at)


def _pop(model: dict[str, Tensor], name: str) -> Tensor:
    if name not in model:
        raise UsageError(f"the checkpoint lacks {name}: get the file again")
    return model.pop(name)


# --- settings -------------------------------------------------------------------------------------


def _settings(state: State) -> dict[str, Any]:
    """Return the settings that stock models lack, with values that describe the authors' model."""
    is_lm = checkpoint.is_language_model(state)
    modulated = _modulated_kinds(checkpoint.options(state))
    defaults = (normalizer_config() if is_lm else translation_config())()
    names = [field.name for field in dataclasses.fields(defaults) if field.name[0] != "_"]
    return {name: getattr(defaults, name) for name in names} | {
        "attention_normalizer_at": "decoder" if is_lm else "encoder,decoder",
        "output_normalizer": "multimax" if "output" in modulated else "softmax",
    }


def _modulated_kinds(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the kinds in which the authors' model applies its modulator."""
    is_adaptive = options.get("adaptive_softmax_cutoff")
    return ("encoder", "decoder") if is_adaptive else ("encoder", "decoder", "output")


def _mappings_by_kind(settings: dict[str, Any]) -> dict[str, str]:
    """Return the mapping of each attention and of the output layer."""
    at = argparse.Namespace(**settings)
    return {**normalizer_names(at), "output": at.output_normalizer}


def _can_represent(settings: dict[str, Any], pairs: list[tuple[vectors.Vectors, str]]) -> bool:
    """Whether a model with these settings can represent all (vectors, kind) pairs."""
    mappings = _mappings_by_kind(settings)
    order, terms = settings["multimax_order"], settings["multimax_terms"]
    return all(
        vectors.can_represent(pair, order, terms)
        if mappings[kind] == "multimax"
        else not any(vector.any() for vector in pair)
        for pair, kind in pairs
    )


def _check_representable(state: State, settings: argparse.Namespace) -> None:
    """Raise UsageError if the authors' code cannot represent the model."""
    mappings = normalizer_names(settings)
    for kind in checkpoint.attentions(state):
        where = "cross-attention" if kind == "cross" else f"the {kind}'s self-attention"
        known, remedy = ["softmax", "multimax"], "--attention-normalizer multimax"
        if kind == "cross":
            known, remedy = ["softmax"], "--attention-normalizer-at encoder,decoder"
        if mappings[kind] not in known:
            labels = [checkpoint.label_of(name) for name in (mappings[kind], *known)]
            raise UsageError(
                f"{labels[0]} in {where} cannot be represented, because the authors' code has "
                f"{' or '.join(labels[1:])} there: train with {remedy}"
            )
    checkpoint.refuse_output(settings)
    checkpoint.refuse_options(settings, _settings(state))
