"""PaddleFleet's language-model head: its modulator in an .npz file of numpy, by its names there."""

import errno
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multimax_fairseq.convert import checkpoint, vectors
from multimax_fairseq.convert.checkpoint import State
from multimax_fairseq.errors import UsageError
from multimax_fairseq.files import whole

NAMES = ("model.lm_head.multimax_ts", "model.lm_head.multimax_ranges")
OURS = "decoder.output_modulator."
LARGEST = 1 << 16  # bytes of an array, unpacked; numpy's header of it is a part


def to_paddlefleet(state: State) -> vectors.Vectors:
    """Return (ts, ranges) of the output layer; UsageError if it has no MultiMax of their kind."""
    settings = checkpoint.our_settings(state)
    checkpoint.refuse_output(settings)
    model = state["model"]
    own = {k.removeprefix(OURS): value for k, value in model.items() if k.startswith(OURS)}
    if not own:
        raise UsageError(
            "the output layer has no MultiMax: give a checkpoint that was trained with "
            "--output-normalizer multimax"
        )
    return vectors.check(vectors.join(own), "the output layer")


def from_paddlefleet(head: vectors.Vectors, state: State) -> None:
    """Put (ts, ranges) into the output layer of a checkpoint of ours, in place.

    Raises:
        UsageError: an output layer that cannot hold them.
    """
    settings = checkpoint.our_settings(state)
    checkpoint.refuse_output(settings)
    if getattr(settings, "adaptive_softmax_cutoff", None):
        raise UsageError("an adaptive softmax has no MultiMax: give a checkpoint without it")
    order, terms = settings.multimax_order, settings.multimax_terms
    if not vectors.fits(head, order, terms):
        raise UsageError(
            f"the output layer of order {order} and terms '{terms}' has no place for all of the "
            "head's numbers: give a checkpoint of order 2 and both terms"
        )
    checkpoint.options(state)["output_normalizer"] = "multimax"
    own = vectors.split(head, order, terms)
    state["model"].update({f"{OURS}{name}": value for name, value in own.items()})


def read(path: Path) -> vectors.Vectors:
    """Return (ts, ranges) of a file; UsageError if it has none."""
    try:
        # No pickle: a file of plain numbers runs nothing.
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("an array without a name")
        with file:
            archive: Any = file.zip
            members = [archive.getinfo(f"{name}.npy") for name in NAMES]
            if max(member.file_size for member in members) > LARGEST:
                raise ValueError("arrays of more than four numbers")
            arrays = [file[name] for name in NAMES]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            raise ValueError("text in place of an array")
    except FileNotFoundError:
        raise UsageError(f"'{path}' does not exist: check its path") from None
    except Exception as error:  # numpy's and zipfile's own, of what they stumble over
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise  # the disk's
        raise UsageError(
            f"'{path}' is not an .npz file with {' and '.join(NAMES)} ({error}): write one with "
            "numpy.savez"
        ) from None
    if any(array.dtype.kind != "f" for array in arrays):
        raise UsageError(
            f"'{path}' has numbers of the types {', '.join(str(a.dtype) for a in arrays)}: cast "
            "them to float32, which holds all that bfloat16 does, before numpy gets them"
        )
    ts, ranges = map(torch.from_numpy, arrays)
    return vectors.check((ts, ranges), f"'{path}'")


def write(head: vectors.Vectors, path: Path) -> None:
    """Write (ts, ranges); bfloat16, which numpy lacks, as the same numbers in float32."""
    wide = [v.float() if v.dtype == torch.bfloat16 else v for v in head]
    arrays: dict[str, Any] = {n: v.numpy() for n, v in zip(NAMES, wide, strict=True)}
    with whole(path) as aside, aside.open("wb") as file:
        np.savez(file, **arrays)
