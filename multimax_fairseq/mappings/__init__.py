"""Mappings from scores to weights: one file per family (function, module, registry entry)."""

import importlib
import pkgutil

from multimax_fairseq.mappings.multimax import Modulator, log_multimax, multimax
from multimax_fairseq.mappings.registry import NORMALIZERS, Mapping, Option, normalize, register

# The files register their mappings.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
for _name in sorted(NORMALIZERS):  # the order does not depend on imports
    NORMALIZERS[_name] = NORMALIZERS.pop(_name)

from multimax_fairseq.mappings.attention import scaled_dot_product_attention  # noqa: E402

__all__ = [
    "NORMALIZERS",
    "Mapping",
    "Modulator",
    "Option",
    "log_multimax",
    "multimax",
    "normalize",
    "register",
    "scaled_dot_product_attention",
]
