"""Checkpoints of the authors' patched fairseq, with `ts` and `ranges` as modulators.

Each attention and the decoder's output layer have them. Cross-attention and an adaptive softmax do
not use theirs, so they are softmax.
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

# Key of our settings in a checkpoint for the authors' code, for the conversion back. Their code
# drops it when it trains the model further.
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
    """Convert a checkpoint of theirs to one of ours, in place.

    Raises:
        UsageError: the architecture is not a stock Transformer, or a modulator is missing.
    """
    theirs = checkpoint.architecture(state)
    if ARCH_MODEL_REGISTRY.get(theirs) not in (TransformerModel, TransformerLanguageModel):
        raise UsageError(
            f"the checkpoint has the architecture '{theirs}', but the authors' code has fairseq's "
            "Transformers: give one of those, such as transformer_iwslt_de_en or transformer_lm"
        )
    model, options = state["model"], checkpoint.options(state)
    if not any(name.endswith(".ts") for name in model):
        raise UsageError(
            "the checkpoint has no ts and ranges, so it is not of the authors' code: to use a "
            "softmax model of stock fairseq, give it to --finetune-from-model as it is"
        )
    found = {at: (_take(model, at), place) for at, place in _everywhere(state)}
    ours = f"{theirs}{SUFFIX}"
    if ours not in ARCH_MODEL_REGISTRY:  # the same architecture in another size
        sizes = argparse.Namespace(**options)
        ARCH_CONFIG_REGISTRY[theirs](sizes)
        options.update(vars(sizes))
        base = "transformer_lm" if checkpoint.is_language_model(state) else "transformer"
        ours = f"{base}{SUFFIX}"
    record, plain = state.pop(RECORD, None), _settings(state)
    acting = _acting(options)
    if record is not None:
        recorded = {name: v for name, v in record["settings"].items() if name in plain}
        settings = vars(checkpoint.complete(ours, options | recorded))
        # The record does not fit a model whose modulators have changed since.
        if _hold(settings, [pair for pair in found.values() if pair[1] in acting]):
            plain = recorded
            checkpoint.options(state, "criterion").update(record["criterion"])
    options.update(plain)
    checkpoint.set_architecture(state, ours)
    settings = vars(checkpoint.our_settings(state))
    chosen = _chosen(settings)
    for at, (pair, place) in found.items():
        if chosen[place] == "multimax":
            own = vectors.split(pair, settings["multimax_order"], settings["multimax_terms"])
            model.update({f"{_our_module(at)}.{name}": value for name, value in own.items()})


def to_authors(state: State) -> None:
    """Convert a checkpoint of ours to one of theirs, in place. For softmax, `ts` is zero.

    Raises:
        UsageError: the model has no modulator, or a part that their code cannot represent.
    """
    settings = checkpoint.our_settings(state)
    _refuse(state, settings)
    chosen, model = _chosen(vars(settings)), state["model"]
    names = vectors.names(settings.multimax_terms)
    if not any(name.endswith(tuple(names)) for name in model):
        raise UsageError(
            "the checkpoint has no modulator: give one that was trained with MultiMax in encoder, "
            "decoder or output layer"
        )
    dtype = next(value.dtype for name, value in model.items() if ATTENTION.fullmatch(name))
    for at, place in list(_everywhere(state)):
        if chosen[place] == "multimax":
            keys = {name: f"{_our_module(at)}.{name}" for name in names}
            ts, ranges = vectors.join({n: _pop(model, key) for n, key in keys.items()})
        else:
            ts, ranges = (torch.zeros(4, dtype=dtype) for _ in range(2))
        vectors.check((ts, ranges), at)
        model.update({f"{at}.ts": ts, f"{at}.ranges": ranges})
    options, criterion = checkpoint.options(state), checkpoint.options(state, "criterion")
    kept = {name: options.pop(name) for name in _settings(state) if name in options}
    name = criterion.get("_name")
    state[RECORD] = {"settings": kept, "criterion": {}}
    if name in STOCK_CRITERIA:
        state[RECORD]["criterion"]["_name"] = name
        criterion["_name"] = STOCK_CRITERIA[name]
    checkpoint.set_architecture(state, checkpoint.architecture(state).removesuffix(SUFFIX))


# --- modulators -----------------------------------------------------------------------------------


def _everywhere(state: State) -> Iterator[tuple[str, str]]:
    """Yield (module, place) of each attention and of the output layer."""
    for name in list(state["model"]):
        if match := ATTENTION.fullmatch(name):
            yield match[1], "cross" if match[3] == "encoder_attn" else match[2]
    yield OUTPUT, "output"


def _our_module(at: str) -> str:
    return "decoder.output_modulator" if at == OUTPUT else f"{at}.normalizer.modulator"


def _take(model: dict[str, Tensor], at: str) -> vectors.Vectors:
    """Remove and return (ts, ranges) of one of their modules."""
    return vectors.check((_pop(model, f"{at}.ts"), _pop(model, f"{at}.ranges")), at)


def _pop(model: dict[str, Tensor], name: str) -> Tensor:
    if name not in model:
        raise UsageError(f"the checkpoint lacks {name}: get the file again")
    return model.pop(name)


# --- settings -------------------------------------------------------------------------------------


def _settings(state: State) -> dict[str, Any]:
    """Return the settings that only our models have, with the values that describe theirs."""
    is_lm, acting = checkpoint.is_language_model(state), _acting(checkpoint.options(state))
    defaults = (normalizer_config() if is_lm else translation_config())()
    names = [field.name for field in dataclasses.fields(defaults) if field.name[0] != "_"]
    return {name: getattr(defaults, name) for name in names} | {
        "attention_normalizer_at": "decoder" if is_lm else "encoder,decoder",
        "output_normalizer": "multimax" if "output" in acting else "softmax",
    }


def _acting(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the places where their model uses its modulator."""
    is_adaptive = options.get("adaptive_softmax_cutoff")
    return ("encoder", "decoder") if is_adaptive else ("encoder", "decoder", "output")


def _chosen(settings: dict[str, Any]) -> dict[str, str]:
    """Return the mapping of each attention and of the output layer."""
    at = argparse.Namespace(**settings)
    return {**normalizer_names(at), "output": at.output_normalizer}


def _hold(settings: dict[str, Any], found: list[tuple[vectors.Vectors, str]]) -> bool:
    """Whether a model with these settings can represent all (vectors, place) pairs."""
    chosen = _chosen(settings)
    order, terms = settings["multimax_order"], settings["multimax_terms"]
    return all(
        vectors.fits(pair, order, terms)
        if chosen[place] == "multimax"
        else not any(vector.any() for vector in pair)
        for pair, place in found
    )


def _refuse(state: State, settings: argparse.Namespace) -> None:
    """Raise UsageError if their code cannot represent the model."""
    chosen = normalizer_names(settings)
    for place in checkpoint.attentions(state):
        where = "cross-attention" if place == "cross" else f"the {place}'s self-attention"
        known, remedy = ["softmax", "multimax"], "--attention-normalizer multimax"
        if place == "cross":
            known, remedy = ["softmax"], "--attention-normalizer-at encoder,decoder"
        if chosen[place] not in known:
            labels = [checkpoint.label_of(name) for name in (chosen[place], *known)]
            raise UsageError(
                f"{labels[0]} in {where} cannot be represented, because the authors' code has "
                f"{' or '.join(labels[1:])} there: train with {remedy}"
            )
    checkpoint.refuse_output(settings)
    checkpoint.refuse_options(settings, _settings(state))
