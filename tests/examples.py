"""An example of each mapping, for the tests that iterate over all mappings."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import reference


@dataclasses.dataclass(frozen=True)
class Example:
    """A mapping's reference and values for its arguments.

    Attributes:
        reference: NumPy function of (scores, excluded, **arguments); None if it takes a module.
        arguments: numbers for the mapping's function, besides scores and mask.
        options: of `Normalizer`, each with another value than its default.
        needed: the options that `Normalizer` requires.
    """

    reference: Callable[..., Any] | None
    arguments: dict[str, float] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    needed: dict[str, Any] = dataclasses.field(default_factory=dict)


EXAMPLES = {
    "softmax": Example(
        lambda x, excluded, temperature: reference.softmax(x / temperature, excluded),
        arguments={"temperature": 0.7},
        options={"temperature": 2.0, "learn_temperature": True},
    ),
    "softcap": Example(
        lambda x, excluded, cap, shift, width: reference.softmax(
            cap * np.tanh((x + shift) / width), excluded
        ),
        {"cap": 1.5, "shift": 0.5, "width": 2.0},
        options={"cap": 2.0, "shift": 1.0, "width": 3.0, "learn_softcap": True},
    ),
    "multimax": Example(
        None,
        options={
            **{"order": 1, "terms": "low", "init_std": 0.0},
            **{"monotone": True, "sink": "learned", "length_scale": True},
        },
    ),
    "topk": Example(reference.topk, {"k": 2}, options={"k": 3}, needed={"k": 3}),
    "sparsemax": Example(lambda x, excluded: reference.entmax(x, excluded, 2)),
    "entmax15": Example(lambda x, excluded: reference.entmax(x, excluded, 1.5)),
    "alpha_entmax": Example(reference.entmax, {"alpha": 1.3}, options={"alpha": 1.5}),
    "evsoftmax": Example(reference.evsoftmax),
    "ssmax": Example(reference.ssmax, {"length_scale": 0.4}, options={"start": 1.0}),
    "softmax1": Example(lambda x, excluded: reference.softmax_with_sink(x, excluded, 0.0)),
    "sink": Example(reference.softmax_with_sink, {"sink": 0.7}),
    "softpick": Example(reference.softpick),
    "sigmoid": Example(reference.sigmoid, options={"bias": -2.0}),
    "asentmax": Example(reference.asentmax, {"beta": 0.5, "gamma": 1.1}, needed={"hidden_size": 5}),
    "adaptive_temperature": Example(reference.adaptive_temperature),
}
