"""The modulator of PaddleFleet's language-model head, in an .npz file."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multimax_fairseq.errors import UsageError, first_line, no_file
from multimax_fairseq.files import whole
from multimax_fairseq.integrations.convert import checkpoint, vectors
from multimax_fairseq.integrations.convert.checkpoint import State

NAMES = ("model.lm_head.multimax_ts", "model.lm_head.multimax_ranges")
OURS = "decoder.output_modulator."


def to_paddlefleet(state: State) -> vectors.Vectors:
    """Return (ts, ranges) of the output layer.

    Raises:
        UsageError: the output layer has no MultiMax, or one with other options.
    """
    settings = checkpoint.our_settings(state)
    checkpoint.refuse_output(settings)
    model = state["model"]
    parameters = {k.removeprefix(OURS): v for k, v in model.items() if k.startswith(OURS)}
    if not parameters:
        raise UsageError(
            "the output layer has no MultiMax: pass a checkpoint of a model trained with "
            "--output-normalizer multimax"
        )
    return vectors.check(vectors.join(parameters), "the output layer")


def from_paddlefleet(head: vectors.Vectors, state: State) -> None:
    """Put (ts, ranges) into the output layer of one of our checkpoints, in place.

    Raises:
        UsageError: the output layer cannot represent them.
    """
    settings = checkpoint.our_settings(state)
    checkpoint.refuse_output(settings)
    if getattr(settings, "adaptive_softmax_cutoff", None):
        raise UsageError("an adaptive softmax has no MultiMax: pass a checkpoint without it")
    order, terms = settings.multimax_order, settings.multimax_terms
    if not vectors.can_represent(head, order, terms):
        raise UsageError(
            f"an output layer of order {order} and terms '{terms}' cannot represent the head: pass "
            "a checkpoint of order 2 with both terms"
        )
    checkpoint.options(state)["output_normalizer"] = "multimax"
    parameters = vectors.split(head, order, terms)
    state["model"].update({f"{OURS}{name}": value for name, value in parameters.items()})


def read(path: Path) -> vectors.Vectors:
    """Return (ts, ranges) of a file.

    Raises:
        UsageError: the file does not have them.
    """
    if not path.is_file():
        raise no_file("head", path)
    try:
        with np.load(path, allow_pickle=False) as file:  # a pickle could run code
            arrays = [file[name] for name in NAMES]
    except (KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(
            f"'{path}' is not an .npz file with {' and '.join(NAMES)} ({first_line(error)}): write "
            "one with numpy.savez"
        ) from None
    if any(array.dtype.kind != "f" for array in arrays):
        raise UsageError(
            f"'{path}' has numbers of the types {', '.join(str(a.dtype) for a in arrays)}: cast "
            "them to float32 before numpy.savez, without loss from bfloat16"
        )
    ts, ranges = map(torch.from_numpy, arrays)
    return vectors.check((ts, ranges), f"'{path}'")


def write(head: vectors.Vectors, path: Path) -> None:
    """Write (ts, ranges). numpy has no bfloat16, so bfloat16 becomes float32, without loss."""
    wide = [v.float() if v.dtype == torch.bfloat16 else v for v in head]
    arrays: dict[str, Any] = {n: v.numpy() for n, v in zip(NAMES, wide, strict=True)}
    with whole(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)
