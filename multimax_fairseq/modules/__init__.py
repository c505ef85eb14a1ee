"""Layers. `multihead_attention` and `dropout` need fairseq and are imported by their own names."""

from multimax_fairseq.modules.additive_attention import AdditiveAttention
from multimax_fairseq.modules.attention_gate import GatedAttention
from multimax_fairseq.modules.attention_module import AttentionModule
from multimax_fairseq.modules.continuous_attention import ContinuousAttention
from multimax_fairseq.modules.normalizer import Normalizer, normalizer_chain
from multimax_fairseq.modules.recurrent_cell import RecurrentCell

__all__ = [
    "AdditiveAttention",
    "AttentionModule",
    "ContinuousAttention",
    "GatedAttention",
    "Normalizer",
    "RecurrentCell",
    "normalizer_chain",
]
