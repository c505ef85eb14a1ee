"""MultiMax in Hugging Face models, and export of fairseq's models to transformers.

It needs the extra `transformers`. Only `export_translation` and `export_language_model` need
fairseq.
"""

from typing import Any

try:
    import transformers as _theirs  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "multimax_fairseq.integrations.transformers needs the package transformers: "
        "pip install 'multimax-fairseq[transformers]'",
        name="transformers",
    ) from None

from multimax_fairseq.integrations.transformers.checkpoint import load, save
from multimax_fairseq.integrations.transformers.interface import register
from multimax_fairseq.integrations.transformers.layers import attach

EXPORTS = ("export_translation", "export_language_model")
__all__ = ["attach", "export_language_model", "export_translation", "load", "register", "save"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from multimax_fairseq.integrations.transformers import export

    return getattr(export, name)
