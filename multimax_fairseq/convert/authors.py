"""The authors' patched fairseq: `ts` and `ranges` in each attention and in the decoder.

Their cross-attention has both too, but never uses them: it is softmax. So is their output layer
with an adaptive softmax.
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

from multimax_fairseq.convert import checkpoint, vectors
from multimax_fairseq.convert.checkpoint import State
from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.config import (
    MAPPINGS,
    NormalizerConfig,
    TranslationConfig,
    places,
)

# What their code cannot know of our model, kept in the checkpoint for the way back. It goes by
# itself where they train on, as fairseq writes a checkpoint anew.
RECORD = "multimax_fairseq"
ATTENTION = re.compile(
    r"((encoder|decoder)\.layers\.\d+\.(self_attn|encoder_attn))\.q_proj\.weight"
)
OUTPUT = "decoder"
SUFFIX = "_multimax"
# The same losses, see criterions/.
STOCK_CRITERIA = {
    "multimax_cross_entropy": "cross_entropy",
    "label_smoothed_multimax_cross_entropy": "label_smoothed_cross_entropy",
}


def from_authors(state: State) -> None:
    """Make a checkpoint of ours out of theirs, in place.

    Raises:
        UsageError: an architecture that is not a stock Transformer's, a modulator that is missing
            or damaged.
    """
    theirs = checkpoint.architecture(state)
    if ARCH_MODEL_REGISTRY.get(theirs) not in (TransformerModel, TransformerLanguageModel):
        raise UsageError(
            f"a checkpoint of the architecture '{theirs}' is none of the authors': theirs are "
            "fairseq's Transformers, such as transformer_iwslt_de_en and transformer_lm"
        )
    found = {at: (_take(state, at), place) for at, place in _everywhere(state)}
    record = state.pop(RECORD, None) or {}
    settings = _settings(state) | _known(state, record.get("settings", {}))
    if not _hold(settings, [pair for pair in found.values() if pair[1] in _acting(state)]):
        record, settings = {}, _settings(state)  # theirs was changed since
    chosen = _chosen(settings)
    order, terms = settings["multimax_order"], settings["multimax_terms"]
    for at, (pair, place) in found.items():
        if chosen[place] == "multimax":
            own = vectors.split(pair, order, terms)
            state["model"].update({f"{_our_module(at)}.{name}": v for name, v in own.items()})
    # An architecture of theirs that has no namesake here is one of these with other sizes.
    filled = argparse.Namespace(**checkpoint.options(state))
    ARCH_CONFIG_REGISTRY[theirs](filled)
    checkpoint.options(state).update({**vars(filled), **settings})
    base = "transformer_lm" if checkpoint.is_language_model(state) else "transformer"
    ours = theirs if f"{theirs}{SUFFIX}" in ARCH_MODEL_REGISTRY else base
    checkpoint.set_architecture(state, f"{ours}{SUFFIX}")
    if "criterion" in record:
        checkpoint.options(state, "criterion")["_name"] = record["criterion"]


def to_authors(state: State) -> None:
    """Make a checkpoint of theirs out of ours, in place; where ours is softmax, `ts` is zero.

    Raises:
        UsageError: what theirs cannot represent, by name; no modulator.
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
    for at, place in list(_everywhere(state)):
        if chosen[place] == "multimax":
            keys = {name: f"{_our_module(at)}.{name}" for name in names}
            ts, ranges = vectors.join({n: _pop(model, key) for n, key in keys.items()})
        else:
            like = model["decoder.embed_tokens.weight" if at == OUTPUT else f"{at}.q_proj.weight"]
            ts, ranges = (torch.zeros(4, dtype=like.dtype) for _ in range(2))
        vectors.check((ts, ranges), at)
        model.update({f"{at}.ts": ts, f"{at}.ranges": ranges})
    own, ours = checkpoint.options(state), checkpoint.architecture(state)
    kept = {name: own.pop(name) for name in _names(state) if name in own}
    state[RECORD] = {"settings": kept}
    checkpoint.set_architecture(state, ours.removesuffix(SUFFIX))
    criterion = checkpoint.options(state, "criterion")
    if (name := criterion.get("_name")) in STOCK_CRITERIA:
        state[RECORD]["criterion"] = name
        criterion["_name"] = STOCK_CRITERIA[name]


# --- where modulators are -------------------------------------------------------------------------


def _everywhere(state: State) -> Iterator[tuple[str, str]]:
    """Give (module, place) of each attention of a model, and of its output layer."""
    for name in list(state["model"]):
        if match := ATTENTION.fullmatch(name):
            yield match[1], "cross" if match[3] == "encoder_attn" else match[2]
    yield OUTPUT, "output"


def _our_module(at: str) -> str:
    return "decoder.output_modulator" if at == OUTPUT else f"{at}.normalizer.modulator"


def _take(state: State, at: str) -> vectors.Vectors:
    """Remove and return (ts, ranges) of a module of theirs."""
    model = state["model"]
    if not any(name.endswith(".ts") for name in model):
        raise UsageError(
            "the checkpoint has no ts and ranges, so it is none of the authors': a softmax model "
            "of stock fairseq goes on with --finetune-from-model as it is"
        )
    return vectors.check((_pop(model, f"{at}.ts"), _pop(model, f"{at}.ranges")), at)


def _pop(model: dict[str, Tensor], name: str) -> Tensor:
    if name not in model:
        raise UsageError(f"the checkpoint lacks {name}, which such a model has: get the file again")
    return model.pop(name)


# --- settings -------------------------------------------------------------------------------------


def _names(state: State) -> list[str]:
    """Return the names of the settings that our model has and theirs has not."""
    kind = NormalizerConfig if checkpoint.is_language_model(state) else TranslationConfig
    return [field.name for field in dataclasses.fields(kind) if not field.name.startswith("_")]


def _settings(state: State) -> dict[str, Any]:
    """Return our settings of a model of theirs."""
    defaults = TranslationConfig()
    is_lm = checkpoint.is_language_model(state)
    return {name: getattr(defaults, name) for name in _names(state)} | {
        "attention_normalizer_at": "decoder" if is_lm else "encoder,decoder",
        "output_normalizer": "multimax" if "output" in _acting(state) else "softmax",
    }


def _acting(state: State) -> set[str]:
    """Return the places whose modulator does something in theirs."""
    is_adaptive = checkpoint.options(state).get("adaptive_softmax_cutoff")
    return {"encoder", "decoder"} if is_adaptive else {"encoder", "decoder", "output"}


def _known(state: State, recorded: dict[str, Any]) -> dict[str, Any]:
    return {name: recorded[name] for name in _names(state) if name in recorded}


def _chosen(settings: dict[str, Any]) -> dict[str, str]:
    """Return the mapping of each attention, and of the output layer."""
    at = argparse.Namespace(**settings)
    return {**places(at), "output": at.output_normalizer}


def _hold(settings: dict[str, Any], found: list[tuple[vectors.Vectors, str]]) -> bool:
    """Whether a model of these settings has a place for all of (vectors, where they act)."""
    chosen = _chosen(settings)
    order, terms = settings["multimax_order"], settings["multimax_terms"]
    return all(
        vectors.fits(pair, order, terms)
        if chosen[place] == "multimax"
        else not any(vector.any() for vector in pair)
        for pair, place in found
    )


def _refuse(state: State, settings: argparse.Namespace) -> None:
    """Raise UsageError for what theirs cannot represent."""
    chosen = places(settings)
    for place in checkpoint.attentions(state):
        where = "cross-attention" if place == "cross" else f"the {place}'s self-attention"
        known = ("softmax",) if place == "cross" else ("softmax", "multimax")
        if chosen[place] not in known:
            labels = [MAPPINGS[name].label for name in (chosen[place], *known)]
            raise UsageError(
                f"{labels[0]} in {where} cannot be represented: the authors' has "
                f"{' or '.join(labels[1:])} there"
            )
    checkpoint.refuse_output(settings)
    checkpoint.refuse_options(settings, _names(state))
