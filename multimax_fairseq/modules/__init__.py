"""Parameters and layers. The attention layer needs fairseq and is imported by its own name."""

from multimax_fairseq.modules import mappings  # noqa: F401  fills NORMALIZERS
from multimax_fairseq.modules.additive_attention import AdditiveAttention
from multimax_fairseq.modules.attention_gate import GatedAttention
from multimax_fairseq.modules.continuous_attention import ContinuousAttention
from multimax_fairseq.modules.entmax_alpha import EntmaxAlpha
from multimax_fairseq.modules.length_scale import HiddenScale, LengthScale
from multimax_fairseq.modules.modulator import Modulator
from multimax_fairseq.modules.normalizer import Normalizer, attending
from multimax_fairseq.modules.recurrent_cell import RecurrentCell
from multimax_fairseq.modules.replace_softmax import replace_softmax
from multimax_fairseq.modules.sink import Sink
from multimax_fairseq.modules.temperature import Temperature

__all__ = [
    "AdditiveAttention",
    "ContinuousAttention",
    "EntmaxAlpha",
    "GatedAttention",
    "HiddenScale",
    "LengthScale",
    "Modulator",
    "Normalizer",
    "RecurrentCell",
    "Sink",
    "Temperature",
    "attending",
    "replace_softmax",
]
