"""A --user-dir of your own: architectures on top of the installed multimax_fairseq.

    fairseq-train DATA --user-dir user_dir --arch transformer_multimax_small ...

Copy this folder, give it a name of its own, and change what is below.
"""

from fairseq.models import register_model_architecture

# Registers multimax_fairseq's models and criteria: no second --user-dir is needed.
from multimax_fairseq.models.transformer_multimax import multimax_architecture


@register_model_architecture("transformer_multimax", "transformer_multimax_small")
def small(args):
    """A small translation model: MultiMax in the encoder and cross-attention, one per head."""
    defaults = {
        "attention_normalizer_at": "encoder,cross",
        "multimax_heads": "separate",
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_embed_dim": 256,
        "encoder_ffn_embed_dim": 512,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    for name, value in defaults.items():
        # A flag that was given on the command line wins.
        setattr(args, name, getattr(args, name, value))
    multimax_architecture(args)
