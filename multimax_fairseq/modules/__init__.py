"""Parameters and layers. The attention layer needs fairseq and is imported by its own name."""

from multimax_fairseq.modules.modulator import Modulator

__all__ = ["Modulator"]
