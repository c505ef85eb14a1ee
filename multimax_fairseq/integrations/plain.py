"""Loads trained fairseq models that can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fairseq.models.transformer import TransformerModel, TransformerModelBase
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq.modules import MultiheadAttention
from torch import nn

from multimax_fairseq.errors import UsageError
from multimax_fairseq.models.config import as_namespace
from multimax_fairseq.models.loading import KINDS, kind_of, load
from multimax_fairseq.models.transformer_lm_multimax import MultimaxLanguageModel
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel
from multimax_fairseq.modules.normalizer import Normalizer

MODELS = {
    "translation": (TransformerModel, TransformerModelBase, MultimaxTransformerModel),
    "language_modeling": (TransformerLanguageModel, MultimaxLanguageModel),
}


def check_new(out: Path) -> None:
    """Raise UsageError unless `out` is a new or an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"'{out}' exists already: pass a new folder")


def load_plain(kind: str | None, checkpoint: Path, data_bin: Path) -> tuple[Any, Any, Any]:
    """Return a Transformer, its task and its settings.

    Args:
        kind: the name of the task; None for translation or language modelling.
        checkpoint: written by fairseq-train.
        data_bin: the folder of fairseq-preprocess that the model was trained on.

    Raises:
        UsageError: a file is missing or does not match; a part of the model is not supported.
    """
    model, task, settings = load(checkpoint, data_bin, KINDS if kind is None else [kind])
    obstacle = _obstacle(model, kind or kind_of(settings.task._name))
    if obstacle:
        raise UsageError(
            f"checkpoint '{checkpoint}' cannot be exported: it has {obstacle}. Use the model with "
            "multimax_fairseq.trained.load, or train one without that part"
        )
    return model, task, as_namespace(settings.model)


def sides(model: Any) -> dict[str, Any]:
    """Return the encoder, if there is one, and the decoder."""
    return {name: getattr(model, name) for name in ("encoder", "decoder") if hasattr(model, name)}


def _obstacle(model: Any, kind: Any) -> str | None:
    """Return the first part that cannot be exported, or None."""
    if type(model) not in MODELS[kind]:
        return f"the structure of a {type(model).__name__}"
    for side, part in sides(model).items():
        is_crossing = kind == "translation" and side == "decoder"
        for layer in part.layers:
            for name in ("self_attn", "encoder_attn") if is_crossing else ("self_attn",):
                what = _obstacle_in_attention(getattr(layer, name, None))
                if what:
                    return f"{what} in {side}.{name}"
        if type(part.embed_tokens) is not nn.Embedding:
            return f"adaptive input embeddings in the {side}"
    decoder = model.decoder
    output = getattr(decoder, "output_normalizer", None)
    for is_so, what in (
        (output is not None, f"the sparse output mapping {getattr(output, 'name', '')}"),
        (decoder.adaptive_softmax is not None, "an adaptive softmax"),
        (bool(decoder.cfg.base_layers), "base layers"),
        (decoder.cfg.cross_self_attention, "cross-self-attention"),
    ):
        if is_so:
            return what
    return None


def _obstacle_in_attention(attention: Any) -> str | None:
    if attention is None:
        return "no attention"
    if type(attention) is not MultiheadAttention:
        normalizer = getattr(attention, "normalizer", attention)
        if type(normalizer) is not Normalizer:
            return type(normalizer).__name__
    extra = attention.bias_k is not None or attention.add_zero_attn
    return "extra keys" if extra else None
