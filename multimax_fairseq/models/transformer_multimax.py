"""The translation Transformer: its layers, encoder, decoder, model and architectures."""

import argparse
from typing import Any

import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model, register_model_architecture
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
    base_architecture,
    transformer_iwslt_de_en,
)
from fairseq.modules import FairseqDropout, SinusoidalPositionalEmbedding
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from fairseq.utils import make_positions
from omegaconf import DictConfig
from torch import Tensor, nn

from multimax_fairseq.models.checks import check_heads, check_keys, check_settings
from multimax_fairseq.models.config import (
    ATTENTIONS,
    as_namespace,
    build_attention,
    set_defaults,
    translation_config,
)
from multimax_fairseq.models.learned_scalars import LoadsSoftmaxCheckpoints, prepare_scalars
from multimax_fairseq.models.monitor import Monitored, set_monitor
from multimax_fairseq.models.numerics import Examined
from multimax_fairseq.models.output_layer import NormalizedOutput
from multimax_fairseq.modules import Normalizer
from multimax_fairseq.modules.dropout import Dropout
from multimax_fairseq.modules.multihead_attention import MultiheadAttention
from multimax_fairseq.ops.backend import traced


def normalized_attention(attention: Any, cfg, kind: str) -> nn.Module:
    """Return an attention layer with the mapping that the flags select.

    Args:
        attention: the layer that fairseq built; plain softmax keeps it.
        cfg: the model's settings.
        kind: one of `ATTENTIONS`.
    """
    module = build_attention(
        cfg, kind, attention.num_heads, attention.embed_dim, attention.head_dim
    )
    if isinstance(module, Normalizer) and module.name == "softmax" and module.modulator is None:
        return attention
    return MultiheadAttention(attention, module)


def replace_dropout(module: nn.Module, stock_name: str) -> None:
    """Replace a module's dropout by ours.

    `stock_name` is the name of fairseq's class, as in --retain-dropout-modules.
    """
    for name, child in module.named_children():
        if isinstance(child, FairseqDropout) and child.module_name == type(module).__name__:
            setattr(module, name, Dropout(child.p, stock_name))


def wrap_layer(layer: nn.Module, cfg) -> nn.Module:
    """Apply activation checkpointing and FSDP to a layer as the flags ask."""
    replace_dropout(layer, type(layer).__base__.__name__)
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


class MultimaxEncoderLayer(TransformerEncoderLayerBase):
    def build_self_attention(self, embed_dim, cfg):
        return normalized_attention(super().build_self_attention(embed_dim, cfg), cfg, "encoder")


class MultimaxDecoderLayer(TransformerDecoderLayerBase):
    def build_self_attention(self, embed_dim, cfg, add_bias_kv=False, add_zero_attn=False):
        attention = super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        return normalized_attention(attention, cfg, "decoder")

    def build_encoder_attention(self, embed_dim, cfg):
        return normalized_attention(super().build_encoder_attention(embed_dim, cfg), cfg, "cross")


class SinusoidalPositions(SinusoidalPositionalEmbedding):
    """The stock embedding with the length read from the shape, so that torch can trace it."""

    def forward(
        self,
        input,
        incremental_state: Any | None = None,
        timestep: Tensor | None = None,
        positions: Any | None = None,
    ):
        """Return the embeddings of the positions of (B, T) tokens, (B, T, C).

        Incremental decoding needs the last position only, (B, 1, C).
        """
        last = self.padding_idx + input.size(1)
        if last >= self.weights.size(0):
            self.weights = self.get_embedding(last + 1, self.embedding_dim, self.padding_idx).to(
                self.weights
            )
        if incremental_state is None:
            return nn.functional.embedding(make_positions(input, self.padding_idx), self.weights)
        if timestep is not None:
            last = int(timestep.view(-1)[0]) + 1 + self.padding_idx
        return self.weights[last].expand(input.size(0), 1, -1)


def replace_positions(module: nn.Module) -> None:
    """Replace the sinusoidal positions of an encoder or decoder by ones that torch can trace."""
    stock = module.embed_positions
    if type(stock) is SinusoidalPositionalEmbedding:
        module.embed_positions = SinusoidalPositions(
            stock.embedding_dim, stock.padding_idx, stock.weights.size(0)
        )


class MultimaxEncoder(TransformerEncoderBase):
    def __init__(self, cfg, dictionary, embed_tokens, return_fc=False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        replace_dropout(self, "TransformerEncoder")
        replace_positions(self)

    def build_encoder_layer(self, cfg):
        return wrap_layer(MultimaxEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def forward(
        self,
        src_tokens,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ):
        """Encode (B, S) tokens as the stock encoder does.

        A traced graph always masks padding, because it cannot branch on the tokens.
        """
        padding = src_tokens.eq(self.padding_idx)
        mask = padding if traced() or padding.any() else None
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        x = x.masked_fill(padding.unsqueeze(-1), 0.0).transpose(0, 1)  # (S, B, C)
        states, fc_results = [x] if return_all_hiddens else [], []
        for layer in self.layers:
            output = layer(x, encoder_padding_mask=mask)
            x, fc_result = output if isinstance(output, tuple) else (output, None)
            if return_all_hiddens:
                states.append(x)
                fc_results.append(fc_result)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": fc_results,
            "src_tokens": [],
            "src_lengths": [(~padding).sum(1, keepdim=True, dtype=torch.int32)],
        }


class MultimaxDecoder(NormalizedOutput, TransformerDecoderBase):
    """A decoder with a chosen mapping in its output layer."""

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn=False):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn)
        replace_dropout(self, "TransformerDecoder")
        replace_positions(self)
        self.set_output_normalizer(cfg)

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        layer = MultimaxDecoderLayer(cfg, no_encoder_attn)
        layer.need_attn = False
        return wrap_layer(layer, cfg)

    def forward(
        self,
        prev_output_tokens,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        features_only: bool = False,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        *args: Any,
        **kwargs: Any,
    ):
        """Return (logits, extra) as the stock decoder does.

        With features_only, return (features, extra). The attention weights are then None unless
        alignment_layer is given, because the fused kernels do not compute them.
        """
        if features_only and alignment_layer is None:
            alignment_layer = self.num_layers  # past the last layer: no attention weights
        return super().forward(
            prev_output_tokens,
            encoder_out,
            incremental_state,
            features_only,
            full_context_alignment,
            alignment_layer,
            *args,
            **kwargs,
        )

    def extract_features(self, *args: Any, **kwargs: Any):
        """Return (features, extra) as the stock decoder does."""
        # A traced graph cannot branch on the tokens. With this flag the stock decoder always makes
        # a padding mask. Its layers do not read the flag.
        self.cross_self_attention = traced() or self.cfg.cross_self_attention
        features, extra = super().extract_features(*args, **kwargs)
        self._show_output_parameters(extra)
        return features, extra

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """Return fairseq's causal mask, (T, T), with a mark so that attention need not read it."""
        length = tensor.size(0)
        mask = self._future_mask
        if traced() or mask.size(0) < length or mask.device != tensor.device:
            mask = tensor.new_full([length, length], float("-inf")).triu(1)
        if not traced():  # a graph must not cache tensors
            self._future_mask = mask = mask.to(tensor)
        mask = mask[:length, :length]
        mask.is_future_mask = True
        return mask


@register_model("transformer_multimax")
class MultimaxTransformerModel(Examined, Monitored, LoadsSoftmaxCheckpoints, TransformerModel):
    """Encoder-decoder Transformer with a chosen mapping in each of its attentions."""

    @classmethod
    def hub_models(cls):
        return {}

    @classmethod
    def add_args(cls, parser):
        """Add the stock Transformer's flags and those of this package."""
        super().add_args(parser)
        gen_parser_from_dataclass(parser, translation_config()(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build a new model.

        Raises:
            UsageError: the settings cannot be combined.
        """
        if isinstance(args, DictConfig):
            check_keys(args, cls._known_keys())
        args = as_namespace(args)
        multimax_architecture(args)
        without = ("cross",) if args.no_cross_attention else ()
        check_settings(args, attentions=[kind for kind in ATTENTIONS if kind not in without])
        check_heads(args)
        for side in ("encoder", "decoder"):
            # The command line gives a list, but the stock model expects a string.
            layers = getattr(args, f"{side}_layers_to_keep")
            if isinstance(layers, list):
                setattr(args, f"{side}_layers_to_keep", ",".join(map(str, layers)))
        model = super().build_model(args, task)
        prepare_scalars(model, args)
        set_monitor(model, args)
        return model

    @classmethod
    def _known_keys(cls):
        parser = argparse.ArgumentParser()
        cls.add_args(parser)
        defaults = argparse.Namespace()
        multimax_architecture(defaults)
        return {action.dest for action in parser._actions} | set(vars(defaults))

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return MultimaxEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        cfg = TransformerConfig.from_namespace(args)
        return MultimaxDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


# In translation, the paper modulates only the attention.
@register_model_architecture("transformer_multimax", "transformer_multimax")
def multimax_architecture(args):
    set_defaults(args, output_normalizer="softmax")
    base_architecture(args)


@register_model_architecture("transformer_multimax", "transformer_iwslt_de_en_multimax")
def multimax_iwslt_de_en(args):
    set_defaults(args, output_normalizer="softmax")
    transformer_iwslt_de_en(args)
