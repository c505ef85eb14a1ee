"""The entries of the leaderboard: every mapping of the table, and variants of MultiMax."""

from dataclasses import dataclass, field
from typing import Any

from leaderboards.tasks import HEADS, SIZE
from multimax_fairseq import NORMALIZERS, Normalizer
from multimax_fairseq.mappings.table import SEPARATE_HEADS


@dataclass(frozen=True)
class Entry:
    """A mapping with its options.

    Attributes:
        label: for tables.
        mapping: a key of `NORMALIZERS`.
        options: of `Normalizer`.
        separate_heads: learn parameters per head although the mapping shares them by default.
        translation, language_model: the rows of configs/rows/multi30k.yaml and speeches.yaml with
            this entry in attention alone.
    """

    label: str
    mapping: str
    options: dict[str, Any] = field(default_factory=dict)
    separate_heads: bool = False
    translation: str = ""
    language_model: str = ""

    def normalizer(self) -> Normalizer:
        """Return a new normalizer for the models of `tasks`."""
        is_separate = self.separate_heads or NORMALIZERS[self.mapping].heads == SEPARATE_HEADS
        return Normalizer(self.mapping, HEADS if is_separate else None, SIZE, **self.options)


MULTIMAX = Entry("MultiMax", "multimax", {}, False, "multimax", "multimax_attention")
VARIANTS = {
    "softmax": Entry("softmax", "softmax", {}, False, "softmax", "softmax"),
    "temperature": Entry(
        "softmax, learned temperature",
        "softmax",
        {"learn_temperature": True},
        False,
        "temperature",
        "temperature",
    ),
    "multimax": MULTIMAX,
    "multimax_order_1": Entry(
        "MultiMax, order 1", "multimax", {"order": 1}, False, "order_1", "attention_order_1"
    ),
    "multimax_monotone": Entry(
        "MultiMax, monotone",
        "multimax",
        {"monotone": True},
        False,
        "monotone",
        "attention_monotone",
    ),
    "multimax_separate_heads": Entry(
        "MultiMax, per head", "multimax", {}, True, "separate_heads", "attention_separate_heads"
    ),
    "multimax_sink": Entry(
        "MultiMax with a sink",
        "multimax",
        {"sink": "learned"},
        False,
        "multimax_sink",
        "attention_sink",
    ),
    "multimax_length_scale": Entry(
        "MultiMax with a length scale",
        "multimax",
        {"length_scale": True},
        False,
        "length_scale",
        "attention_length_scale",
    ),
    "topk": Entry("top-8 (16 in language modelling)", "topk", {"k": 8}, False, "topk", "topk"),
}


def entries() -> dict[str, Entry]:
    """Return all entries; a mapping that a plugin has registered is one with its defaults."""
    others = {
        name: Entry(mapping.label, name, {}, False, name, name)
        for name, mapping in NORMALIZERS.items()
        if name not in VARIANTS
    }
    return VARIANTS | others
