"""Parameters and layers. The attention layer needs fairseq and is imported by its own name."""

from multimax_fairseq.modules import mappings  # noqa: F401  fills NORMALIZERS
from multimax_fairseq.modules.additive_attention import AdditiveAttention
from multimax_fairseq.modules.continuous_attention import ContinuousAttention
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.normalizer import Normalizer
from multimax_fairseq.modules.recurrent_cell import RecurrentCell
from multimax_fairseq.modules.replace_softmax import replace_softmax
from multimax_fairseq.modules.temperature import Temperature

__all__ = [
    "AdditiveAttention",
    "ContinuousAttention",
    "EntmaxAlpha",
    "Modulator",
    "Normalizer",
    "RecurrentCell",
    "Temperature",
    "replace_softmax",
]
