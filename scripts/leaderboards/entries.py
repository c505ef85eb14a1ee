"""The entries of the leaderboard: every mapping of the registry, and variants of MultiMax."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lib import ROOT

from leaderboards.tasks import HEADS, SIZE
from multimax_fairseq import NORMALIZERS, Normalizer
from multimax_fairseq.errors import UsageError
from multimax_fairseq.mappings.registry import SEPARATE_HEADS, Option


@dataclass(frozen=True)
class Entry:
    """A mapping with its options.

    Attributes:
        label: for tables.
        mapping: a key of `NORMALIZERS`.
        options: of `Normalizer`.
        separate_heads: learn parameters per head although the mapping shares them by default.
        user_dir: the folder of the plugin that registers the mapping.
        translation, language_model: the rows of configs/rows/multi30k.yaml and speeches.yaml with
            this mapping in attention alone.
    """

    label: str
    mapping: str
    options: dict[str, Any] = field(default_factory=dict)
    separate_heads: bool = False
    user_dir: str = ""
    translation: str = ""
    language_model: str = ""

    def normalizer(self) -> Normalizer:
        """Return a new normalizer for the models of `tasks`."""
        import_plugin(self.user_dir)
        heads = NORMALIZERS[self.mapping].heads
        default = heads.default if isinstance(heads, Option) else heads
        is_separate = self.separate_heads or default == SEPARATE_HEADS
        return Normalizer(self.mapping, HEADS if is_separate else None, SIZE, **self.options)


TEMPERED = str(ROOT / "user_dir" / "tempered")
VARIANTS = {
    "softmax": Entry("softmax", "softmax", translation="softmax", language_model="softmax"),
    "temperature": Entry(
        "softmax, learned temperature",
        "softmax",
        {"learn_temperature": True},
        translation="temperature",
        language_model="temperature",
    ),
    "multimax": Entry(
        "MultiMax", "multimax", translation="multimax", language_model="multimax_attention"
    ),
    "multimax_order_1": Entry(
        "MultiMax, order 1",
        "multimax",
        {"order": 1},
        translation="order_1",
        language_model="attention_order_1",
    ),
    "multimax_monotone": Entry(
        "MultiMax, monotone",
        "multimax",
        {"monotone": True},
        translation="monotone",
        language_model="attention_monotone",
    ),
    "multimax_separate_heads": Entry(
        "MultiMax, per head",
        "multimax",
        separate_heads=True,
        translation="separate_heads",
        language_model="attention_separate_heads",
    ),
    "multimax_sink": Entry(
        "MultiMax with a sink",
        "multimax",
        {"sink": "learned"},
        translation="multimax_sink",
        language_model="attention_sink",
    ),
    "multimax_length_scale": Entry(
        "MultiMax with a length scale",
        "multimax",
        {"length_scale": True},
        translation="length_scale",
        language_model="attention_length_scale",
    ),
    "multimax_of_ssmax": Entry("MultiMax of s log(n) x", "multimax_of_ssmax", user_dir=TEMPERED),
    "affine_multimax": Entry("MultiMax of t x + b, order 1", "affine_multimax", user_dir=TEMPERED),
    "learned_softcap": Entry(
        "softmax, learned soft-cap",
        "softcap",
        {"learn_softcap": True, "cap": 5.0},  # its start
        translation="learned_softcap",
        language_model="learned_softcap",
    ),
    "topk": Entry(
        "top-8 (16 in language modelling)",
        "topk",
        {"k": 8},
        translation="topk",
        language_model="topk",
    ),
}

# The entries that the figure of noisy retrieval compares with softmax, and softmax.
COMPARED = (
    "softmax",
    "temperature",
    "ssmax",
    "topk",
    "alpha_entmax",
    "multimax",
    "multimax_length_scale",
    "learned_softcap",
)


def import_plugin(user_dir: str) -> None:
    """Import a plugin that registers mappings; no plugin if the folder is ""."""
    if user_dir:
        if not Path(user_dir).is_dir():
            raise UsageError(f"--user-dir '{user_dir}' does not exist: check its path")
        from fairseq import utils  # takes seconds, and the package's own mappings do without it

        utils.import_user_module(argparse.Namespace(user_dir=user_dir))


def entries() -> dict[str, Entry]:
    """Return `VARIANTS`, and an entry with default options for every other mapping."""
    others = {
        name: Entry(mapping.label, name, translation=name, language_model=name)
        for name, mapping in NORMALIZERS.items()
        if name not in VARIANTS
    }
    return VARIANTS | others
