"""The Transformer language model."""

import ast
from dataclasses import dataclass
from typing import Any

from fairseq import utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_DATACLASS_REGISTRY, register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import (
    DEFAULT_MAX_TARGET_POSITIONS,
    TransformerLanguageModel,
    TransformerLanguageModelConfig,
)
from fairseq.modules import AdaptiveInput, CharacterTokenEmbedder
from hydra.core.config_store import ConfigStore

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import listeners
from multimax_fairseq.models.checks import check_heads, check_settings
from multimax_fairseq.models.config import (
    as_namespace,
    cached_per_registry,
    normalizer_config,
)
from multimax_fairseq.models.learned_scalars import LoadsSoftmaxCheckpoints, prepare_scalars
from multimax_fairseq.models.monitor import Monitored, set_monitor
from multimax_fairseq.models.numerics import Examined
from multimax_fairseq.models.transformer_multimax import MultimaxDecoder

NAME = "transformer_lm_multimax"


@cached_per_registry
def language_model_config() -> Any:
    """Return the dataclass of the stock model's flags and of those of this package."""

    @dataclass
    class MultimaxLanguageModelConfig(normalizer_config(), TransformerLanguageModelConfig):
        pass

    return MultimaxLanguageModelConfig


@register_model(NAME, dataclass=language_model_config())
class MultimaxLanguageModel(Examined, Monitored, LoadsSoftmaxCheckpoints, TransformerLanguageModel):
    """Transformer language model with a chosen mapping in its attention and output layer."""

    @classmethod
    def hub_models(cls):
        return {}

    @classmethod
    def add_args(cls, parser):
        """Add the flags of the stock model and of this package."""
        gen_parser_from_dataclass(parser, language_model_config()(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build a new model.

        Raises:
            UsageError: the settings cannot be combined.
        """
        args = as_namespace(args)
        check_settings(args, attentions=("decoder",))
        check_heads(args)
        if args.decoder_layers_to_keep:
            args.decoder_layers = len(args.decoder_layers_to_keep.split(","))
        if args.max_target_positions is None:
            args.max_target_positions = (
                getattr(args, "tokens_per_sample", None) or DEFAULT_MAX_TARGET_POSITIONS
            )
        embed_tokens = cls.build_input(args, task.source_dictionary)
        cfg = TransformerConfig.from_namespace(args)
        model = cls(
            MultimaxDecoder(cfg, task.target_dictionary, embed_tokens, no_encoder_attn=True)
        )
        prepare_scalars(model, args)
        set_monitor(model, args)
        return model

    @classmethod
    def build_input(cls, args, dictionary):
        """Return the embedding of the input: of tokens, characters, or adaptive."""
        if args.tie_adaptive_weights:
            cls._check_tied(args)
        if args.character_embeddings:
            return CharacterTokenEmbedder(
                dictionary,
                ast.literal_eval(args.character_filters),
                args.character_embedding_dim,
                args.decoder_embed_dim,
                args.char_embedder_highway_layers,
            )
        if args.adaptive_input:
            if not args.adaptive_input_cutoff:
                raise UsageError(
                    "--adaptive-input needs --adaptive-input-cutoff, such as 20000,60000"
                )
            return AdaptiveInput(
                len(dictionary),
                dictionary.pad(),
                args.decoder_input_dim,
                args.adaptive_input_factor,
                args.decoder_embed_dim,
                utils.eval_str_list(args.adaptive_input_cutoff, type=int),
                args.quant_noise_pq,
                args.quant_noise_pq_block_size,
            )
        return cls.build_embedding(args, dictionary, args.decoder_input_dim)

    @staticmethod
    def _check_tied(args):
        if not args.adaptive_input:
            raise UsageError("--tie-adaptive-weights needs --adaptive-input")
        for ours, theirs in (
            ("adaptive_input_factor", "adaptive_softmax_factor"),
            ("adaptive_input_cutoff", "adaptive_softmax_cutoff"),
            ("decoder_input_dim", "decoder_output_dim"),
        ):
            if getattr(args, ours) != getattr(args, theirs):
                raise UsageError(
                    f"--tie-adaptive-weights needs {ours} and {theirs} to be equal, got "
                    f"{getattr(args, ours)} and {getattr(args, theirs)}"
                )


def _renew_flags() -> None:
    """Give fairseq and hydra the flags of a mapping that is registered after this import."""
    MODEL_DATACLASS_REGISTRY[NAME] = config = language_model_config()
    node = config()
    node._name = NAME
    ConfigStore.instance().store(name=NAME, group="model", node=node, provider="fairseq")


listeners.append(_renew_flags)
