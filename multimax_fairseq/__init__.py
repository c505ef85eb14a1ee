"""MultiMax for fairseq: learnable modulated softmax in attention and in the output layer.

The package needs torch and entmax. `multimax_fairseq.models` registers the architectures and the
criteria; fairseq imports it under `--user-dir`.

The public names are those of api.py, which is imported at their first use. To import torch takes
seconds, and `multimax-compare --help` does not need it.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING

from multimax_fairseq import supported  # noqa: F401  first: refuses old versions of Python and torch

__version__ = "0.2.0"

if TYPE_CHECKING:
    from multimax_fairseq.api import *  # noqa: F403
else:

    def __getattr__(name):
        """Return a submodule or a public name, and cache the public names in this module."""
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        api = importlib.import_module(f"{__name__}.api")
        globals().update({each: getattr(api, each) for each in ("__all__", *api.__all__)})
        if name not in globals():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__getattr__("__all__")})
