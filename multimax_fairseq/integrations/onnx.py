"""Exports fairseq's Transformers to ONNX: an encoder, and a decoder with a cache."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor, nn

from multimax_fairseq.integrations.plain import check_new, load_plain
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.ops.backend import plain_backend


def export_onnx(
    checkpoint: str | os.PathLike[str],
    data_bin: str | os.PathLike[str],
    out: str | os.PathLike[str],
) -> Path:
    """Write a translation or language model as ONNX files that onnxruntime runs.

    `out` has the dictionaries, decoder.onnx, and for a translation model encoder.onnx:

        encoder: tokens (B, S) -> memory (2, L, B, H, S, D), excluded (B, S)
        decoder: tokens (B, T), cache (2, L, B, H, P, D), memory, excluded
                 -> logits (B, T, V), cache (2, L, B, H, P + T, D)

    tokens is int64, and a source may be padded on either side. memory and cache are the projected
    keys and values of the decoder's L layers. P is 0 at first. A language model's decoder has no
    memory. The softmax of logits is the model's distribution. settings.json has the sizes L, H and
    D, the ids of padding and end of sentence, and the maximum lengths.

    Args:
        checkpoint: written by fairseq-train.
        data_bin: the folder of fairseq-preprocess that the model was trained on.
        out: a new folder.

    Raises:
        UsageError: a file or folder is missing, `out` exists already, or the model has a part that
            is not supported (a recurrent decoder, continuous attention, a sparse output, ...).
    """
    out = Path(out).resolve()
    check_new(out)
    model, task, _ = load_plain(None, Path(checkpoint), Path(data_bin))
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as aside, torch.no_grad(), plain_backend():
        # ONNX has no form of the kernels, so the graph has plain operations.
        whole = Path(aside, "model")
        whole.mkdir()
        decoder = Decoder(model)
        layers, heads, size = len(decoder.side.layers), decoder.heads, decoder.head_size
        batch, words = torch.export.Dim("batch"), torch.export.Dim("words")
        earlier, source = torch.export.Dim("earlier"), torch.export.Dim("source")
        tokens = torch.full((3, 4), 5)
        arguments = (tokens, torch.zeros(2, layers, 3, heads, 6, size))
        shapes: Any = ({0: batch, 1: words}, {2: batch, 4: earlier})
        names = ["tokens", "cache"]
        if decoder.has_memory:
            encoder = Encoder(model)
            _write(
                *(encoder, (tokens,), whole / "encoder.onnx", ["tokens"], ["memory", "excluded"]),
                ({0: batch, 1: source},),
            )
            arguments += tuple(encoder(torch.full((3, 5), 5)))
            shapes += ({2: batch, 4: source}, {0: batch, 1: source})
            names += ["memory", "excluded"]
        outputs = ["logits", "new_cache"]
        _write(decoder, arguments, whole / "decoder.onnx", names, outputs, shapes)
        settings = {
            "layers": layers,
            "heads": heads,
            "head_size": size,
            "pad": task.target_dictionary.pad(),
            "eos": task.target_dictionary.eos(),
            "max_positions": model.max_positions(),
        }
        (whole / "settings.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")
        task.target_dictionary.save(str(whole / "dict.target.txt"))
        if decoder.has_memory:
            task.source_dictionary.save(str(whole / "dict.source.txt"))
        whole.replace(out)
    return out


def _write(
    model: nn.Module,
    arguments: tuple[Tensor, ...],
    file: Path,
    inputs: list[str],
    outputs: list[str],
    shapes: Any,
) -> None:
    with _quiet_exporter():
        torch.onnx.export(
            model.eval(),
            arguments,
            file,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Silence the warnings that torch's exporter prints for every model."""

    def is_shown(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("torchvision is not installed")

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    logger.addFilter(is_shown)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            warnings.filterwarnings("ignore", "# The axis name: .* shares", UserWarning)
            yield
    finally:
        logger.removeFilter(is_shown)


class Side(nn.Module):
    """The encoder or the decoder of a fairseq Transformer, as code without branches."""

    positions: Tensor

    def __init__(self, side: Any) -> None:
        super().__init__()
        self.side, self.pad = side, side.padding_idx
        positions = side.embed_positions
        if isinstance(positions, SinusoidalPositionalEmbedding):
            size = side.max_positions() + self.pad + 1, positions.embedding_dim
            table = SinusoidalPositionalEmbedding.get_embedding(*size, self.pad)
        else:
            table = torch.zeros(0) if positions is None else positions.weight.detach()
        self.register_buffer("positions", table)

    def embed(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """Return (B, T, C)."""
        side = self.side
        x = side.embed_scale * side.embed_tokens(tokens)
        if getattr(side, "project_in_dim", None) is not None:
            x = side.project_in_dim(x)
        if side.embed_positions is not None:
            x = x + self.positions[indices]
        return x if side.layernorm_embedding is None else side.layernorm_embedding(x)

    def feed_forward(self, layer: Any, x: Tensor) -> Tensor:
        normed = layer.final_layer_norm(x) if layer.normalize_before else x
        x = x + layer.fc2(layer.activation_fn(layer.fc1(normed)))
        return x if layer.normalize_before else layer.final_layer_norm(x)

    def finish(self, x: Tensor) -> Tensor:
        return x if self.side.layer_norm is None else self.side.layer_norm(x)


def heads_of(attention: Any, x: Tensor) -> Tensor:
    """Split (B, T, C) into (B, H, T, D)."""
    return x.unflatten(-1, (attention.num_heads, attention.head_dim)).transpose(1, 2)


def keys_and_values(attention: Any, x: Tensor) -> Tensor:
    """Return (2, B, H, S, D)."""
    parts = (attention.k_proj(x), attention.v_proj(x))
    return torch.stack([heads_of(attention, part) for part in parts])


def attend(attention: Any, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
    """Return the attention of x (B, T, C) to keys and values (2, B, H, S, D)."""
    normalizer = getattr(attention, "normalizer", None) or Normalizer("softmax")
    query = heads_of(attention, attention.q_proj(x)) * attention.scaling
    scores = query @ memory[0].transpose(-1, -2)
    context, _ = normalizer.attend_by_scores(scores, memory[1], mask, hidden=x[:, None])
    return attention.out_proj(context.transpose(1, 2).flatten(2))


class Encoder(Side):
    """Computes the keys and values of the decoder's cross-attention."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.encoder)
        self.cross = nn.ModuleList(layer.encoder_attn for layer in model.decoder.layers)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        is_word = tokens != self.pad
        # fairseq counts the words, so padding on the left does not move them.
        x = self.embed(tokens, is_word.long().cumsum(1) * is_word + self.pad)
        mask = ~is_word[:, None, None]
        for layer in self.side.layers:
            normed = layer.self_attn_layer_norm(x) if layer.normalize_before else x
            memory = keys_and_values(layer.self_attn, normed)
            x = x + attend(layer.self_attn, normed, memory, mask)
            x = x if layer.normalize_before else layer.self_attn_layer_norm(x)
            x = self.feed_forward(layer, x)
        x = self.finish(x)
        return torch.stack([keys_and_values(part, x) for part in self.cross], 1), ~is_word


class Decoder(Side):
    """Computes logits and the cache."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.decoder)
        attention = self.side.layers[0].self_attn
        self.heads, self.head_size = attention.num_heads, attention.head_dim
        self.has_memory = hasattr(model, "encoder")

    def forward(
        self,
        tokens: Tensor,
        cache: Tensor,
        memory: Tensor | None = None,
        excluded: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        count = tokens.shape[1]
        total = cache.shape[4] + count
        position = torch.arange(total - count, total)
        x = self.embed(tokens, position + self.pad + 1)
        later = torch.arange(total) > position[:, None]  # (T, P + T)
        caches = []
        for index, layer in enumerate(self.side.layers):
            normed = layer.self_attn_layer_norm(x) if layer.normalize_before else x
            own = torch.cat([cache[:, index], keys_and_values(layer.self_attn, normed)], 3)
            caches.append(own)
            x = x + attend(layer.self_attn, normed, own, later)
            x = x if layer.normalize_before else layer.self_attn_layer_norm(x)
            if memory is not None and excluded is not None:
                normed = layer.encoder_attn_layer_norm(x) if layer.normalize_before else x
                mask = excluded[:, None, None]
                x = x + attend(layer.encoder_attn, normed, memory[:, index], mask)
                x = x if layer.normalize_before else layer.encoder_attn_layer_norm(x)
            x = self.feed_forward(layer, x)
        x = self.finish(x)
        if self.side.project_out_dim is not None:
            x = self.side.project_out_dim(x)
        return self.side.output_layer(x), torch.stack(caches, 1)
