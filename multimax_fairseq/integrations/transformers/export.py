"""Exports fairseq translation models to transformers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, tasks
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel, TransformerModelBase
from fairseq.modules import MultiheadAttention, SinusoidalPositionalEmbedding
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    FSMTConfig,
    FSMTForConditionalGeneration,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from multimax_fairseq.errors import UsageError, no_file
from multimax_fairseq.models.loading import build, task_of
from multimax_fairseq.models.transformer_multimax import MultimaxTransformerModel

MODELS = (TransformerModel, TransformerModelBase, MultimaxTransformerModel)
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_accurate",
    "gelu_accurate": "gelu_accurate",
    "relu_squared": "relu2",
    "tanh": "tanh",
    "linear": "linear",
}
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

    Args:
        checkpoint: written by fairseq-train, with softmax in every attention and the output layer.
        data_bin: the folder of fairseq-preprocess that the model was trained on.
        out: a new folder.

    Raises:
        UsageError: a file or folder is missing, `out` exists already, or neither class supports
            the model (another mapping than softmax, learned positions, a recurrent decoder, ...).
    """
    checkpoint, data_bin, out = Path(checkpoint), Path(data_bin), Path(out).resolve()
    _check_place(out)
    model, task = _load(checkpoint, data_bin)
    obstacle = _obstacle(model)
    if obstacle:
        raise UsageError(
            f"checkpoint '{checkpoint}' cannot be exported: it has {obstacle}, which neither FSMT "
            "nor M2M100 supports"
        )
    exported = _converted(model, task)
    _check_equal(model, exported, task)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as aside:
        whole = Path(aside, "model")
        exported.save_pretrained(whole)
        _tokenizer(task.source_dictionary).save_pretrained(whole)
        _tokenizer(task.target_dictionary).save_pretrained(whole / "target")
        whole.replace(out)
    return exported


def _check_place(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"'{out}' exists already: give a new folder")


def _load(checkpoint: Path, data_bin: Path) -> tuple[Any, Any]:
    if not checkpoint.is_file():
        raise no_file("checkpoint", checkpoint)
    if not data_bin.is_dir():
        raise UsageError(
            f"data folder '{data_bin}' does not exist: give the folder that fairseq-preprocess "
            "wrote"
        )
    overrides = {"data": str(data_bin), "eval_bleu": False}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), overrides)
    cfg = task_of(state, checkpoint)
    if cfg._name != "translation":
        raise UsageError(
            f"checkpoint '{checkpoint}' is of the task {cfg._name}: give one of translation"
        )
    try:
        task = tasks.setup_task(cfg, from_checkpoint=True)
    except FileNotFoundError as error:  # of its dictionaries
        raise UsageError(
            f"data folder '{data_bin}' has no {Path(error.filename).name}: give the folder that "
            "the model was trained on"
        ) from None
    return build(state, checkpoint, task, data_bin)[0], task


def _obstacle(model: Any) -> str | None:
    """Return a part of the model that neither class supports, or None."""
    if type(model) not in MODELS:
        return f"the structure of a {type(model).__name__}"
    encoder, decoder = model.encoder, model.decoder
    for side, layers in (("encoder", encoder.layers), ("decoder", decoder.layers)):
        for layer in layers:
            for place in ("self_attn", "encoder_attn"):
                what = _obstacle_in_attention(getattr(layer, place, None))
                if what and (place == "self_attn" or side == "decoder"):
                    return f"{what} in {side}.{place}"
    output = getattr(decoder, "output_normalizer", None)
    if output is not None or getattr(decoder, "output_modulator", None) is not None:
        return f"the output normalizer {getattr(output, 'name', 'multimax')}"
    cfg, norms = decoder.cfg, [encoder.layer_norm, decoder.layer_norm]
    before = {layer.normalize_before for layer in (*encoder.layers, *decoder.layers)}
    for is_so, what in (
        (cfg.activation_fn not in ACTIVATIONS, f"the activation {cfg.activation_fn}"),
        (encoder.embed_positions is None, "an encoder without positions"),
        (decoder.embed_positions is None, "a decoder without positions"),
        (not _is_sinusoidal(encoder), "learned positions in the encoder"),
        (not _is_sinusoidal(decoder), "learned positions in the decoder"),
        (encoder.layernorm_embedding is not None, "a layer norm of its embeddings"),
        (decoder.adaptive_softmax is not None, "an adaptive softmax"),
        (type(encoder.embed_tokens) is not nn.Embedding, "adaptive input embeddings"),
        (decoder.project_in_dim is not None, "a decoder input of another width"),
        (decoder.project_out_dim is not None, "a decoder output of another width"),
        (cfg.encoder.embed_dim != cfg.decoder.embed_dim, "two widths"),
        (cfg.cross_self_attention, "cross-self-attention"),
        (bool(cfg.base_layers), "base layers"),
        (len(before) > 1, "layer norms before the sublayers of one side alone"),
        (
            before != {norm is not None for norm in norms},
            "layer norms before its sublayers and none at the end of its decoder",
        ),
        (
            before == {True} and not cfg.share_all_embeddings,
            "layer norms before its sublayers and embeddings that are not all shared",
        ),
    ):
        if is_so:
            return what
    return None


def _obstacle_in_attention(attention: Any) -> str | None:
    if attention is None:
        return "no attention"
    if type(attention) is not MultiheadAttention:
        normalizer = getattr(attention, "normalizer", attention)
        name = getattr(normalizer, "name", type(normalizer).__name__)
        return "a softmax that is not plain" if name == "softmax" else name
    extra = attention.bias_k is not None or attention.add_zero_attn
    return "extra keys" if extra else None


def _is_sinusoidal(side: Any) -> bool:
    return isinstance(side.embed_positions, SinusoidalPositionalEmbedding)


def _converted(model: Any, task: Any) -> PreTrainedModel:
    cfg, source, target = model.decoder.cfg, task.source_dictionary, task.target_dictionary
    is_pre_norm = model.decoder.layer_norm is not None
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
    state: dict[str, Tensor] = {
        f"model.{name}": value
        for name, value in model.state_dict().items()
        if not name.endswith((".version", "_float_tensor"))
    }
    theirs: Any
    if is_pre_norm:
        theirs = M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(target), **settings))
        state["lm_head.weight"] = state.pop("model.decoder.output_projection.weight")
        state["model.shared.weight"] = state["lm_head.weight"]
    else:
        words = {"src_vocab_size": len(source), "tgt_vocab_size": len(target)}
        langs = [task.cfg.source_lang, task.cfg.target_lang]
        theirs = FSMTForConditionalGeneration(FSMTConfig(langs=langs, **words, **settings))
    found = theirs.load_state_dict(state, strict=False)
    lost = [*found.unexpected_keys, *(n for n in found.missing_keys if "embed_positions" not in n)]
    if lost:
        raise UsageError(
            f"the parameters of the checkpoint and of {type(theirs).__name__} differ: only one of "
            f"them has {', '.join(name.removeprefix('model.') for name in lost)}"
        )
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
        expected = model(source, source.ne(pad).sum(1), previous)[0].float()
        logits = theirs(
            source, source.ne(pad).long(), decoder_input_ids=previous, use_cache=False
        ).logits
    error = ((logits - expected).abs().max() / expected.abs().max()).item()
    if not error <= TOLERANCE:
        raise UsageError(
            f"the logits of {type(theirs).__name__} differ from the checkpoint's by {error:.1e} of "
            "the largest one: the class does not support some part of the model"
        )


def _tokenizer(words: Dictionary) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits text at spaces and has the dictionary's ids."""
    eos, unk = words.eos_word, words.unk_word
    vocabulary = {symbol: index for index, symbol in enumerate(words.symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    # As Python's str.split, which fairseq uses: also at four control characters.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\x{1c}-\x{1f}]+"), "removed")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, words.eos())]
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
