"""Exports fairseq's translation and language models to transformers."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from multimax_fairseq.compat.text import SYMBOLS
from multimax_fairseq.errors import UsageError
from multimax_fairseq.integrations.plain import check_new, load_plain, sides
from multimax_fairseq.integrations.transformers import fsmt
from multimax_fairseq.integrations.transformers.checkpoint import save
from multimax_fairseq.integrations.transformers.layers import (
    add_normalizer,
    attached,
    set_implementation,
)
from multimax_fairseq.mappings.registry import NORMALIZERS
from multimax_fairseq.models.config import build_normalizer
from multimax_fairseq.modules.normalizer import Normalizer

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_accurate",
    "gelu_accurate": "gelu_accurate",
    "relu_squared": "relu2",
    "tanh": "tanh",
    "linear": "linear",
}
SPACES = r"\s\x{1c}-\x{1f}"  # where Python's str.split, which fairseq uses, splits
TOLERANCE = 1e-5  # of the logits, relative to the largest one


def export_translation(
    checkpoint: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> PreTrainedModel:
    """Convert a fairseq translation model to a Hugging Face model, write it and return it.

    A post-norm Transformer becomes an FSMTForConditionalGeneration. A pre-norm Transformer with one
    embedding for both languages becomes an M2M100ForConditionalGeneration. `out` has a tokenizer
    for the source dictionary, `out/target` one for the target dictionary. They take the text that
    fairseq-interactive takes, tokenised and split into subwords. Word ids are fairseq's. The
    generation settings are those of fairseq-generate with --beam 5. The function compares the
    logits before it writes anything.

    `save_pretrained` writes a model with softmax throughout. `save` of this package writes any
    other, and `load` reads it.

    Args:
        checkpoint: written by fairseq-train.
        data_bin: the folder of fairseq-preprocess that the model was trained on.
        out: a new folder.

    Raises:
        UsageError: a file or folder is missing, `out` exists already, or neither class supports
            the model (a mapping that reads hidden states, a sparse output layer, learned positions,
            a recurrent decoder, ...).
    """
    return _export("translation", Path(checkpoint), Path(data_bin), Path(out))


def export_language_model(
    checkpoint: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> PreTrainedModel:
    """Convert a fairseq language model to a Hugging Face model, write it and return it.

    A Transformer, such as `transformer_lm_multimax`, becomes an OPTForCausalLM. `out` has a
    tokenizer for the dictionary, which puts the end of sentence before a text, as fairseq does. All
    else is as in `export_translation`.

    Args:
        checkpoint, data_bin, out: as `export_translation`.

    Raises:
        UsageError: as `export_translation`.
    """
    return _export("language_modeling", Path(checkpoint), Path(data_bin), Path(out))


def _export(kind: str, checkpoint: Path, data_bin: Path, out: Path) -> PreTrainedModel:
    out = out.resolve()
    check_new(out)
    model, task, args = load_plain(kind, checkpoint, data_bin)
    is_translation = kind == "translation"
    obstacle = _obstacle(model, is_translation)
    if obstacle:
        raise UsageError(
            f"checkpoint '{checkpoint}' cannot be exported: it has {obstacle}, which "
            f"{'neither FSMT nor M2M100 supports' if is_translation else 'OPT does not support'}"
        )
    exported = _translation(model, task) if is_translation else _language_model(model, task)
    _add_normalizers(model, exported, args)
    _check_equal(model, exported, task)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as aside:
        whole = Path(aside, "model")
        if attached(exported):
            save(exported, whole)
        else:
            exported.save_pretrained(whole)
        _tokenizer(task.source_dictionary, is_translation).save_pretrained(whole)
        if is_translation:
            _tokenizer(task.target_dictionary, True).save_pretrained(whole / "target")
        whole.replace(out)
    return exported


def _obstacle(model: Any, is_translation: bool) -> str | None:
    """Return a part of the model that the classes of transformers do not support, or None."""
    decoder, parts = model.decoder, sides(model)
    cfg = decoder.cfg
    layers = [layer for part in parts.values() for layer in part.layers]
    before = {layer.normalize_before for layer in layers}
    normalizers = [m for m in model.modules() if isinstance(m, Normalizer)]
    hidden = [m.name for m in normalizers if NORMALIZERS[m.name].hidden]
    for side, part in parts.items():
        for is_so, what in (
            (part.embed_positions is None, "no positions"),
            (is_translation and not _is_sinusoidal(part), "learned positions"),
            (part.layernorm_embedding is not None, "a layer norm of the embeddings"),
            (
                before != {part.layer_norm is not None},
                "layer norms before some sublayers, but not before all and at the end,",
            ),
        ):
            if is_so:
                return f"{what} in the {side}"
    for is_so, what in (
        (bool(hidden), f"{''.join(hidden[:1])}, which reads hidden states"),
        (cfg.activation_fn not in ACTIVATIONS, f"the activation {cfg.activation_fn}"),
        (decoder.project_in_dim is not None, "a decoder input of another width"),
        (decoder.project_out_dim is not None, "a decoder output of another width"),
        (is_translation and cfg.encoder.embed_dim != cfg.decoder.embed_dim, "two widths"),
        (
            is_translation and before == {True} and not cfg.share_all_embeddings,
            "layer norms before its sublayers and embeddings that are not all shared",
        ),
    ):
        if is_so:
            return what
    return None


def _is_sinusoidal(side: Any) -> bool:
    return isinstance(side.embed_positions, SinusoidalPositionalEmbedding)


def _translation(model: Any, task: Any) -> PreTrainedModel:
    """Return the model of transformers with the same weights, without normalizers."""
    cfg, source, target = model.decoder.cfg, task.source_dictionary, task.target_dictionary
    settings: dict[str, Any] = {
        "d_model": cfg.decoder.embed_dim,
        "activation_function": ACTIVATIONS[cfg.activation_fn],
        "max_position_embeddings": max(cfg.max_source_positions, cfg.max_target_positions),
        "dropout": cfg.dropout,
        "attention_dropout": cfg.attention_dropout,
        "activation_dropout": cfg.activation_dropout or cfg.relu_dropout,
        "scale_embedding": not cfg.no_scale_embedding,
        "bos_token_id": target.bos(),
        "pad_token_id": target.pad(),
        "eos_token_id": target.eos(),
        "decoder_start_token_id": target.eos(),  # fairseq's first decoder input
        "tie_word_embeddings": cfg.share_all_embeddings,
    }
    for side in ("encoder", "decoder"):
        sizes = getattr(cfg, side)
        settings |= {
            f"{side}_layers": len(getattr(model, side).layers),
            f"{side}_ffn_dim": sizes.ffn_embed_dim,
            f"{side}_attention_heads": sizes.attention_heads,
            f"{side}_layerdrop": sizes.layerdrop,
        }
    state = {f"model.{name}": value for name, value in _weights(model).items()}
    theirs: Any
    if model.decoder.layer_norm is not None:
        theirs = M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(target), **settings))
        state["lm_head.weight"] = state.pop("model.decoder.output_projection.weight")
        state["model.shared.weight"] = state["lm_head.weight"]
    else:
        words = {"src_vocab_size": len(source), "tgt_vocab_size": len(target)}
        langs = [task.cfg.source_lang, task.cfg.target_lang]
        theirs = FSMTForConditionalGeneration(FSMTConfig(langs=langs, **words, **settings))
    _load_weights(theirs, state)
    theirs.generation_config = GenerationConfig(
        bos_token_id=target.bos(),
        pad_token_id=target.pad(),
        eos_token_id=target.eos(),
        decoder_start_token_id=target.eos(),
        forced_eos_token_id=target.eos(),
        suppress_tokens=[target.pad()],
        num_beams=5,
        length_penalty=1.0,
        early_stopping=True,
        min_new_tokens=1,  # --min-len 1: not only the end of sentence
        max_new_tokens=201,  # --max-len-b 200, plus the end of sentence
    )
    return theirs.eval()


def _language_model(model: Any, task: Any) -> PreTrainedModel:
    """Return the model of transformers with the same weights, without normalizers."""
    decoder, words = model.decoder, task.target_dictionary
    cfg = decoder.cfg
    special = {
        "bos_token_id": words.eos(),  # fairseq's first input
        "pad_token_id": words.pad(),
        "eos_token_id": words.eos(),
    }
    # OPT does not scale its embeddings, so the input and the output layer need two tables.
    scale = 1.0 if cfg.no_scale_embedding else math.sqrt(cfg.decoder.embed_dim)
    theirs: Any = OPTForCausalLM(
        OPTConfig(
            vocab_size=len(words),
            hidden_size=cfg.decoder.embed_dim,
            num_hidden_layers=len(decoder.layers),
            ffn_dim=cfg.decoder.ffn_embed_dim,
            max_position_embeddings=cfg.max_target_positions,
            do_layer_norm_before=decoder.layer_norm is not None,
            dropout=cfg.dropout,
            attention_dropout=cfg.attention_dropout,
            num_attention_heads=cfg.decoder.attention_heads,
            activation_function=ACTIVATIONS[cfg.activation_fn],
            layerdrop=cfg.decoder.layerdrop,
            tie_word_embeddings=decoder.share_input_output_embed and scale == 1.0,
            **special,
        )
    )
    state = {
        f"model.{name.replace('decoder.layer_norm', 'decoder.final_layer_norm')}": value
        for name, value in _weights(model).items()
    }
    state["lm_head.weight"] = state.pop("model.decoder.output_projection.weight")
    state["model.decoder.embed_tokens.weight"] = scale * state["model.decoder.embed_tokens.weight"]
    if _is_sinusoidal(decoder):
        state["model.decoder.embed_positions.weight"] = SinusoidalPositionalEmbedding.get_embedding(
            *theirs.model.decoder.embed_positions.weight.shape, words.pad()
        )
    _load_weights(theirs, state)
    theirs.generation_config = GenerationConfig(**special)
    return theirs.eval()


def _weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a fairseq model that transformers has too."""
    own = (".version", "_float_tensor")
    return {
        name: value
        for name, value in model.state_dict().items()
        if not name.endswith(own) and ".normalizer." not in name and "output_modulator" not in name
    }


def _load_weights(theirs: Any, state: dict[str, Tensor]) -> None:
    found = theirs.load_state_dict(state, strict=False)
    lost = [*found.unexpected_keys, *(n for n in found.missing_keys if "embed_positions" not in n)]
    if lost:
        raise UsageError(
            f"the parameters of the checkpoint and of {type(theirs).__name__} differ: only one of "
            f"them has {', '.join(name.removeprefix('model.') for name in lost)}"
        )


def _add_normalizers(model: Any, theirs: Any, args: Any) -> None:
    """Add the normalizers of the fairseq model to the exported model."""
    layers = {
        f"model.{name}": module
        for name, module in model.named_modules()
        if isinstance(module, MultiheadAttention)
    }
    if any(hasattr(layer, "normalizer") for layer in layers.values()):
        fsmt.adapt(theirs)
        for name, layer in layers.items():
            _copy(getattr(layer, "normalizer", Normalizer("softmax")), theirs.get_submodule(name))
        set_implementation(theirs)
    if getattr(model.decoder, "output_modulator", None) is not None:
        normalizer = build_normalizer(args, args.output_normalizer, of_output=True)
        normalizer.modulator = model.decoder.output_modulator
        is_fsmt = isinstance(theirs, FSMTForConditionalGeneration)
        output = (
            theirs.model.decoder.output_projection if is_fsmt else theirs.get_output_embeddings()
        )
        _copy(normalizer, output)


def _copy(normalizer: Normalizer, layer: Any) -> None:
    add_normalizer(layer, normalizer.arguments).load_state_dict(normalizer.state_dict())


def _check_equal(model: Any, theirs: Any, task: Any) -> None:
    """Raise UsageError if the logits of the models differ for a random batch with padding."""
    words, pad = task.source_dictionary, task.target_dictionary.pad()
    generator = torch.Generator().manual_seed(0)
    source = torch.randint(words.nspecial, len(words), (2, 7), generator=generator)
    source[:, -1] = words.eos()
    source[0, :3] = pad
    previous = torch.randint(
        words.nspecial, len(task.target_dictionary), (2, 5), generator=generator
    )
    previous[:, 0] = task.target_dictionary.eos()
    with torch.no_grad():
        if hasattr(model, "encoder"):
            expected = model(source, source.ne(pad).sum(1), previous)[0].float()
            mask = source.ne(pad).long()
            logits = theirs(source, mask, decoder_input_ids=previous, use_cache=False).logits
        else:
            expected, logits = model(previous)[0].float(), theirs(previous).logits
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not error <= TOLERANCE:
        raise UsageError(
            f"the logits of {type(theirs).__name__} differ from the checkpoint's by {error:.1e} of "
            "the largest one: the class does not support some part of the model"
        )


def _tokenizer(words: Dictionary, is_translation: bool) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits text at spaces and has the dictionary's ids.

    The end of sentence follows a text to translate, and precedes one to continue.
    """
    eos, unk = words.eos_word, words.unk_word
    vocabulary = {symbol: index for index, symbol in enumerate(words.symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    symbols = "|".join(sorted(SYMBOLS))  # unknown words in a text
    is_symbol = Regex(rf"(?<![^{SPACES}])({symbols})(?![^{SPACES}])")
    tokenizer.normalizer = normalizers.Replace(is_symbol, unk)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"[{SPACES}]+"), "removed")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}" if is_translation else f"{eos} $A", special_tokens=[(eos, words.eos())]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=words.bos_word,
        pad_token=words.pad_word,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",  # as fairseq pads sources
        split_special_tokens=True,  # fairseq treats special symbols in text as words
        clean_up_tokenization_spaces=False,
    )
