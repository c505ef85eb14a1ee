"""The recurrent translation model: bidirectional encoder, additive attention, input feeding."""

import argparse
from typing import Any

import torch
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    FairseqIncrementalDecoder,
    register_model,
    register_model_architecture,
)
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import Option, chosen_from, yes_or_no
from multimax_fairseq.models.checks import check_keys, check_option, check_settings
from multimax_fairseq.models.config import (
    as_namespace,
    build_attention,
    cached_per_registry,
    dropout_option,
    set_defaults,
    settings_class,
    translation_config,
)
from multimax_fairseq.models.learned_scalars import LoadsSoftmaxCheckpoints, prepare_scalars
from multimax_fairseq.models.monitor import Monitored, set_monitor
from multimax_fairseq.models.numerics import Examined
from multimax_fairseq.models.output_layer import NormalizedOutput
from multimax_fairseq.modules import AdditiveAttention, RecurrentCell
from multimax_fairseq.modules.dropout import Dropout
from multimax_fairseq.modules.recurrent_cell import start_biases, start_gates
from multimax_fairseq.ops.checks import is_whole

# The model has no limit of its own; --max-source-positions and --max-target-positions apply.
MAX_POSITIONS = 100_000


def _size(name: str, default: int, help: str) -> Option:
    return Option(name, default, int, "a whole number of at least 1", is_whole, help)


RECURRENT_OPTIONS = {
    option.name: option
    for option in (
        Option(
            "cell_type",
            "gru",
            help="recurrent cell of encoder and decoder",
            **chosen_from(("gru", "lstm")),
        ),
        _size("encoder_embed_dim", 512, "size of the source's word embeddings"),
        _size("encoder_hidden_size", 512, "size of the encoder's state in each direction"),
        _size("encoder_layers", 1, "number of the encoder's layers"),
        _size("decoder_embed_dim", 512, "size of the target's word embeddings"),
        _size("decoder_hidden_size", 512, "size of the decoder's state and features"),
        dropout_option("dropout", 0.1, "dropout of embeddings, and between the encoder's layers"),
        dropout_option("hidden_dropout", 0.2, "dropout of the decoder's state and context"),
        Option(
            "share_decoder_input_output_embed",
            False,
            help="use the target's embeddings in the output layer",
            **yes_or_no(),
        ),
        Option(
            "share_all_embeddings",
            False,
            help="use the same embeddings in encoder, decoder and output layer",
            **yes_or_no(),
        ),
    )
}


@cached_per_registry
def recurrent_config() -> Any:
    """Return the dataclass of the flags of the recurrent model."""
    doc = "The flags of the recurrent model."
    base = translation_config()
    return settings_class("RecurrentConfig", doc, RECURRENT_OPTIONS, base, __name__)


# Initial weights are JoeyNMT's defaults, which the paper's experiments use: Xavier for matrices
# (per gate in a cell), a normal distribution with standard deviation 0.01 for embeddings, and 0 for
# biases.
def _embedding(dictionary: Any, size: int) -> nn.Embedding:
    embedding = nn.Embedding(len(dictionary), size, dictionary.pad())
    nn.init.normal_(embedding.weight, std=0.01)
    nn.init.zeros_(embedding.weight[dictionary.pad()])
    return embedding


def _linear(input_size: int, output_size: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(input_size, output_size, bias)
    nn.init.xavier_uniform_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


class RecurrentEncoder(FairseqEncoder):
    """A bidirectional GRU or LSTM."""

    def __init__(self, args, dictionary, embed_tokens):
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.dropout_module = Dropout(args.dropout, module_name=type(self).__name__)
        layers = args.encoder_layers
        kind = nn.GRU if args.cell_type == "gru" else nn.LSTM
        self.rnn = kind(
            args.encoder_embed_dim,
            args.encoder_hidden_size,
            layers,
            batch_first=True,
            bidirectional=True,
            dropout=args.dropout if layers > 1 else 0.0,
        )
        for of_input, of_hidden, input_bias, hidden_bias in self.rnn.all_weights:
            start_gates(of_input, args.cell_type)
            start_gates(of_hidden, args.cell_type)
            start_biases(input_bias, hidden_bias, args.cell_type)
        self.output_size = 2 * args.encoder_hidden_size

    def forward(self, src_tokens, src_lengths=None):
        """Encode.

        Args:
            src_tokens: (B, S), padded on the left or the right.
            src_lengths: unused; the lengths follow from the padding.

        Returns:
            A dict of lists, like the Transformer's: "encoder_out" (B, S, C), 0 at padding;
            "encoder_padding_mask" (B, S), True at padding; "final_state" (B, C), the last hidden
            states of the top layer in both directions.
        """
        padding = src_tokens.eq(self.dictionary.pad())
        # Packing needs the padding on the right. The outputs are moved back afterwards.
        order = padding.byte().argsort(dim=1, stable=True)
        lengths = (~padding).sum(1).clamp(min=1)
        x = self.dropout_module(self.embed_tokens(src_tokens.gather(1, order)))
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        packed, state = self.rnn(packed)
        x, _ = pad_packed_sequence(packed, batch_first=True, total_length=src_tokens.shape[1])
        x = x.gather(1, order.argsort(dim=1)[..., None].expand_as(x))
        hidden = state[0] if isinstance(state, tuple) else state
        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "final_state": [torch.cat([hidden[-2], hidden[-1]], -1)],
        }

    def reorder_encoder_out(self, encoder_out, new_order):
        """Select and reorder the sentences of the encoder's output."""
        return {
            name: [tensor.index_select(0, new_order) for tensor in tensors]
            for name, tensors in encoder_out.items()
        }

    def max_positions(self):
        """Return the greatest source length."""
        return MAX_POSITIONS


class RecurrentDecoder(NormalizedOutput, FairseqIncrementalDecoder):
    """A recurrent decoder with attention to the source and input feeding.

        state_t    = cell([word_t; features_(t-1)], state_(t-1))
        features_t = tanh(W [state_t; context_t] + b)    (Luong et al. 2015, Eq. 5)

    The initial state is tanh of a linear function of the encoder's final state. An LSTM starts
    with the same hidden and cell state.
    """

    def __init__(self, args, dictionary, embed_tokens, encoder_size):
        super().__init__(dictionary)
        size = args.decoder_hidden_size
        self.embed_tokens = embed_tokens
        self.dropout_module = Dropout(args.dropout, module_name=type(self).__name__)
        self.hidden_dropout_module = Dropout(args.hidden_dropout, module_name=type(self).__name__)
        self.bridge = _linear(encoder_size, size)
        self.cell = RecurrentCell(args.cell_type, args.decoder_embed_dim, size, size)
        self.attention = AdditiveAttention(
            size, encoder_size, size, build_attention(args, "cross", 1, size, encoder_size)
        )
        self.feature_projection = _linear(size + encoder_size, size)
        self.output_projection = _linear(size, len(dictionary), bias=False)
        if args.share_decoder_input_output_embed:
            self.output_projection.weight = embed_tokens.weight
        self.set_output_normalizer(args)

    def forward(
        self, prev_output_tokens, encoder_out=None, incremental_state=None, features_only=False
    ):
        """Return (logits, extra), or (features, extra) with features_only.

        The arguments are those of `extract_features`.
        """
        features, extra = self.extract_features(prev_output_tokens, encoder_out, incremental_state)
        return features if features_only else self.output_layer(features), extra

    def extract_features(self, prev_output_tokens, encoder_out, incremental_state=None):
        """Decode.

        Args:
            prev_output_tokens: (B, T). With an incremental state only the last token is decoded.
            encoder_out: the encoder's output.
            incremental_state: fairseq's decoding state.

        Returns:
            (features (B, T, C), {"attn": [attention weights (B, T, S)]}).
        """
        (padding,) = encoder_out["encoder_padding_mask"]
        if incremental_state is not None:
            prev_output_tokens = prev_output_tokens[:, -1:]
        cache = self.get_incremental_state(incremental_state, "cache") or self._start(encoder_out)
        keys, values, fed, *state = cache.values()
        words = self.cell.project_words(self.dropout_module(self.embed_tokens(prev_output_tokens)))
        features, weights = [], []
        for word in words.unbind(1):
            state = self.cell(word, fed, state)
            context, probs = self.attention(  # (B, 1, C), (B, 1, S)
                state[0][:, None], keys, values, padding, need_probs=True
            )
            both = torch.cat([state[0], context[:, 0]], -1)
            fed = self.feature_projection(self.hidden_dropout_module(both)).tanh()
            features.append(fed)
            weights.append(probs)
        cache = dict(zip(cache, (keys, values, fed, *state), strict=True))
        self.set_incremental_state(incremental_state, "cache", cache)
        extra: dict[str, list[Tensor | None]] = {"attn": [torch.cat(weights, 1)]}
        self._show_output_parameters(extra)
        return torch.stack(features, 1), extra

    def _start(self, encoder_out: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Return the keys, the values and the initial state of each sentence."""
        (encoded,), (padding,) = encoder_out["encoder_out"], encoder_out["encoder_padding_mask"]
        hidden = self.bridge(encoder_out["final_state"][0]).tanh()
        cache = {
            "keys": self.attention.keys(encoded),
            "values": self.attention.values(encoded, padding),
            "fed": torch.zeros_like(hidden),
            "hidden": hidden,
        }
        return cache if self.cell.kind == "gru" else {**cache, "cell": hidden}

    def reorder_incremental_state(self, incremental_state, new_order):
        """Reorder the state for the hypotheses that the search continues with."""
        cache = self.get_incremental_state(incremental_state, "cache")
        if cache is not None:
            cache = {name: tensor.index_select(0, new_order) for name, tensor in cache.items()}
            self.set_incremental_state(incremental_state, "cache", cache)

    def max_positions(self):
        """Return the greatest target length."""
        return MAX_POSITIONS


@register_model("rnn_multimax")
class RecurrentModel(Examined, Monitored, LoadsSoftmaxCheckpoints, FairseqEncoderDecoderModel):
    """Recurrent encoder-decoder with a chosen mapping or density in its attention."""

    @classmethod
    def add_args(cls, parser):
        """Add the model's flags and those of this package."""
        gen_parser_from_dataclass(parser, recurrent_config()(), delete_default=True)

    @classmethod
    def build_model(cls, args, task):
        """Build a new model.

        Raises:
            UsageError: the settings cannot be combined.
        """
        if isinstance(args, DictConfig):
            check_keys(args, set(recurrent_config().__dataclass_fields__))
        args = as_namespace(args)
        recurrent_architecture(args)
        check_settings(args, attentions=("cross",))
        for name, option in RECURRENT_OPTIONS.items():
            check_option(args, name, option)
        source, target = task.source_dictionary, task.target_dictionary
        _check_sharing(args, source == target)
        embed_source = _embedding(source, args.encoder_embed_dim)
        if args.share_all_embeddings:
            args.share_decoder_input_output_embed, embed_target = True, embed_source
        else:
            embed_target = _embedding(target, args.decoder_embed_dim)
        encoder = RecurrentEncoder(args, source, embed_source)
        decoder = RecurrentDecoder(args, target, embed_target, encoder.output_size)
        model = cls(encoder, decoder)
        prepare_scalars(model, args)
        set_monitor(model, args)
        return model

    def forward(self, src_tokens, src_lengths, prev_output_tokens, features_only=False):
        """Return the decoder's (logits, extra), or (features, extra), with teacher forcing."""
        encoder_out = self.encoder(src_tokens, src_lengths)
        return self.decoder(prev_output_tokens, encoder_out, features_only=features_only)


def _check_sharing(args: argparse.Namespace, is_joint: bool) -> None:
    """Raise UsageError if embeddings that the flags share have different sizes."""
    widths = {
        "--decoder-embed-dim": args.decoder_embed_dim,
        "--decoder-hidden-size": args.decoder_hidden_size,
    }
    flag = "--share-decoder-input-output-embed"
    if args.share_all_embeddings:
        flag, widths["--encoder-embed-dim"] = "--share-all-embeddings", args.encoder_embed_dim
        if not is_joint:
            raise UsageError(
                f"{flag} needs one dictionary of both languages: run fairseq-preprocess with "
                "--joined-dictionary"
            )
    elif not args.share_decoder_input_output_embed:
        return
    if len(set(widths.values())) > 1:
        got = ", ".join(f"{name} {value}" for name, value in widths.items())
        raise UsageError(f"{flag} needs one width, got {got}: make them equal")


@register_model_architecture("rnn_multimax", "rnn_multimax")
def recurrent_architecture(args, **own):
    defaults = {name: option.default for name, option in RECURRENT_OPTIONS.items()}
    set_defaults(args, output_normalizer="softmax", **(defaults | own))


# The model of Martins et al. 2020, Table 4. Its "BiLSTM hidden size 1000" is the sum of both
# directions: the JoeyNMT configuration file that the paper names has 500 for each.
@register_model_architecture("rnn_multimax", "rnn_iwslt_de_en_multimax")
def recurrent_iwslt_de_en(args):
    sizes = {"encoder_embed_dim": 620, "encoder_hidden_size": 500}
    sizes |= {"decoder_embed_dim": 620, "decoder_hidden_size": 1000}
    recurrent_architecture(args, dropout=0.0, hidden_dropout=0.2, **sizes)
