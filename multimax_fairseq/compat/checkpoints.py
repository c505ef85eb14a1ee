"""Checkpoints: what torch refuses of them, what a damaged one is called, who builds a model."""

import argparse
import contextvars
import functools
import math
import os
import pickletools
import re
import zipfile
from pickle import UnpicklingError

import numpy as np
import torch

from multimax_fairseq.compat import contents
from multimax_fairseq.compat.explain import explain, is_raised_by_fairseq
from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import CheckpointError, UsageError, first_line


class _PickledDtype:
    """Stands in for numpy.dtype in a checkpoint: a plain number type and nothing else."""

    def __init__(self, code, align=False, copy=True):
        if not re.fullmatch(r"[biufc]\d\d?", code):
            raise UnpicklingError(f"numpy.dtype({code!r}) is not a plain number type")
        self.dtype = np.dtype(code)

    def __setstate__(self, state):
        _version, order, subarray, names, fields = state[:5]
        if subarray is not None or names is not None or fields is not None:
            raise UnpicklingError("numpy.dtype with fields is not a plain number type")
        self.dtype = self.dtype.newbyteorder(order)


class _PickledArray(np.ndarray):
    """Stands in for numpy.ndarray in a checkpoint: plain numbers whose bytes fill its shape."""

    def __new__(cls):
        return np.ndarray.__new__(cls, (0,), np.uint8)

    def __setstate__(self, state):
        _version, shape, dtype, fortran, data = state
        dtype = dtype.dtype
        if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
            raise UnpicklingError("numpy.ndarray whose bytes do not fill its shape")
        super().__setstate__((1, shape, dtype, fortran, data))

    def __reduce__(self):  # the next checkpoint holds an ordinary array
        return np.array(self).__reduce__()


def _pickled_array(subtype, shape, typecode):
    return _PickledArray()


def _pickled_scalar(dtype, data):
    return np.frombuffer(data, dtype.dtype, count=1)[0]


# Namespace: keeps attributes, runs nothing. numpy: arrays of counts (--eval-bleu) and single
# numbers. numpy's own classes are not harmless: a forged dtype makes numpy read wherever a
# checkpoint says, objects included. So the stand-ins above are allowed under numpy's names.
SAFE_GLOBALS = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _PickledDtype,
    "numpy.ndarray": _PickledArray,
    "numpy._core.multiarray._reconstruct": _pickled_array,
    "numpy._core.multiarray.scalar": _pickled_scalar,
    "numpy.core.multiarray._reconstruct": _pickled_array,  # written under numpy 1
    "numpy.core.multiarray.scalar": _pickled_scalar,
}


def checkpoint_classes():
    """torch 2.6 loads tensors and plain values only; fairseq's checkpoints hold a little more.

    Can go when fairseq's checkpoints hold plain values only. torch's protection stays on.
    """
    known = {
        entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"
        for entry in torch.serialization.get_safe_globals()
    }
    torch.serialization.add_safe_globals(
        [(value, name) for name, value in SAFE_GLOBALS.items() if name not in known]
    )


def _raised_in_torch_load(error):
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "load" and code.co_filename == torch.serialization.__file__:
            return True
        trace = trace.tb_next
    return False


def _refused(error, path):
    """What torch would not load, by name; None if it stumbled over something that is no code."""
    known = re.search(r"GLOBAL (\S+)|function (\S+)|but got (<[^>]*>)|(numpy\.\S+)", str(error))
    if known:
        return next(filter(None, known.groups()))
    # Pickle protocols that torch does not read: list the opcodes, which runs none of them.
    strings = []
    try:
        with open(path, "rb") as file:
            if zipfile.is_zipfile(file):
                archive = zipfile.ZipFile(file)
                member = next(name for name in archive.namelist() if name.endswith("data.pkl"))
                file = archive.open(member)
            else:
                file.seek(0)
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "STACK_GLOBAL"):
                    words = argument.split() if opcode.name == "GLOBAL" else strings[-2:]
                    if words[:1] not in (["torch"], ["collections"]):
                        return ".".join(words)
                elif isinstance(argument, str):
                    strings.append(argument)
    except Exception:  # whatever zipfile and pickletools stumble over in a damaged file
        pass
    return None


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file that is not as it was written."""


def _damaged(path):
    return DamagedCheckpointError(
        f"'{path}' is damaged or incomplete; copy it again, or delete it and continue from "
        "another one."
    )


def _is_altered(path):
    """Whether a file of torch's zip format is not as it was written; other formats cannot tell.

    torch compresses nothing, so that what is unpacked is never more than the file.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
        try:
            archive = zipfile.ZipFile(file)
            members = archive.infolist()
            if sum(member.file_size for member in members) > os.path.getsize(path):
                return True
            return archive.testzip() is not None
        except Exception:  # whatever zipfile stumbles over in a damaged file
            return True


def _check_contents(path):
    """Refuse a file whose contents are no checkpoint's, before fairseq handles them."""
    load = functools.partial(torch.load, path, map_location="cpu", weights_only=True)
    try:
        state = load(mmap=True)  # so that parameters stay on the disk
    except Exception:  # of old torch, where files cannot be mapped, or for a reason to be told
        state = load()
    contents.refuse(state)


def checkpoint_errors():
    """torch explains a refused or damaged file in a page that names neither file nor remedy.

    And torch does not look at the checksums that it
    has written, so that altered numbers load in silence; nor do torch and fairseq ask what kind of
    numbers a parameter has. Can go when fairseq does all of it.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    def make(original):
        def load_checkpoint_to_cpu(path, *args, **kwargs):
            local = PathManager.get_local_path(path)
            try:
                if os.path.isfile(local):
                    if _is_altered(local):
                        raise _damaged(path)
                    _check_contents(local)
                return original(path, *args, **kwargs)
            except CheckpointError:
                raise
            except Exception as error:
                told = _explained(error, path, local)
                if told is None:
                    raise
                raise told from error

        return load_checkpoint_to_cpu

    wrap(checkpoint_utils, "load_checkpoint_to_cpu", make)


def _explained(error, path, local):
    """The error that says what is wrong with a checkpoint; None where the file is not to blame."""
    if not _raised_in_torch_load(error):
        if type(error) is ValueError:  # of contents.refuse
            return CheckpointError(f"'{path}' is refused: {error}.")
        if isinstance(error, OSError) or getattr(error, "user_error", False):
            return None
        return CheckpointError(
            f"'{path}' is not a fairseq checkpoint ({first_line(error)}); give a file that "
            "fairseq-train wrote."
        )
    refused = isinstance(error, UnpicklingError) and _refused(error, local)
    if refused:
        return CheckpointError(
            f"'{path}' is refused: it holds {refused}, which is no part of a fairseq checkpoint "
            "and could run code; get a file from a source that you trust."
        )
    return _damaged(path)


def checkpoint_to_workers():
    """The first worker reads a checkpoint and sends it on; torch 2.6 refuses what the others get.

    So no run of several processes can be resumed. torch's own sending of objects is used: a run's
    processes trust each other, and the file was read under torch's protection. Can go when fairseq
    uses it too.
    """
    from fairseq.distributed import utils

    def make(original):
        def _broadcast_object_slow(obj, src_rank, group, dist_device):
            box = [obj]
            torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
            return box[0]

        return _broadcast_object_slow

    wrap(utils, "_broadcast_object_slow", make)


_building = contextvars.ContextVar("building_from_checkpoint", default=False)


def building_from_checkpoint():
    """Whether fairseq is loading a checkpoint's model."""
    return _building.get()


def checkpoint_models():
    """A model is not told whether it is built to be trained, or for the parameters of a checkpoint.

    So it cannot refuse a setting in training alone: see building_from_checkpoint(). And what cannot
    be built of a file's settings is a traceback that does not name it. Can go when fairseq hands
    `from_checkpoint`, which its tasks get, on to the models, and names the file.
    """
    from fairseq import checkpoint_utils

    def make(original):
        def load_model_ensemble_and_task(filenames, *args, **kwargs):
            token = _building.set(True)
            try:
                return original(filenames, *args, **kwargs)
            except Exception as error:
                text = explain(error)
                is_named = text and any(name in text for name in filenames)
                is_flag = isinstance(error, UsageError) and not isinstance(error, CheckpointError)
                is_other = isinstance(error, OSError | ImportError)
                if is_named or is_flag or is_other or not is_raised_by_fairseq(error):
                    raise
                if text is None:
                    text = (
                        f"no model can be built of it ({first_line(error)}); give a checkpoint as "
                        "fairseq-train wrote it."
                    )
                raise CheckpointError(f"'{', '.join(filenames)}': {text}") from error
            finally:
                _building.reset(token)

        return load_model_ensemble_and_task

    wrap(checkpoint_utils, "load_model_ensemble_and_task", make)


# What an optimizer keeps of a parameter, number by number.
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def checkpoint_training():
    """What a run cannot go on from is a traceback, here or at the next update.

    Can go when fairseq names the file, and looks at the shapes of an optimizer's state.
    """
    from fairseq.trainer import Trainer

    def make(original):
        def load_checkpoint(self, filename, *args, **kwargs):
            try:
                loaded = original(self, filename, *args, **kwargs)
                _check_moments(self._optimizer)
                return loaded
            except Exception as error:
                is_other = isinstance(error, OSError | ImportError) or explain(error)
                if is_other or not is_raised_by_fairseq(error):
                    raise
                raise CheckpointError(
                    f"a run cannot go on from '{filename}' ({first_line(error)}); give another "
                    "checkpoint with --restore-file, or take its parameters alone "
                    "(--finetune-from-model)"
                ) from error

        return load_checkpoint

    wrap(Trainer, "load_checkpoint", make)


def resumed_model():
    """A run goes on from a checkpoint of whatever settings, where its parameters fit.

    So it may go on as another function, or end at once as a run of it. Here a model that has
    `check_resumed(settings, before)` is asked. Can go when fairseq compares them.
    """
    from fairseq.trainer import Trainer

    def make(original):
        def load_checkpoint(self, filename, reset_optimizer=False, *args, **kwargs):
            check = getattr(self.get_model(), "check_resumed", None)
            if check is not None and not reset_optimizer and self.data_parallel_rank == 0:
                before = glance(filename, lambda state: state["cfg"]["model"])
                if before is not None:
                    check(self.cfg.model, before)
            return original(self, filename, reset_optimizer, *args, **kwargs)

        return load_checkpoint

    wrap(Trainer, "load_checkpoint", make)


def glance(path, read):
    """What `read` finds in a checkpoint, whose parameters stay on the disk; None if it cannot be
    read, has no such thing, or is not there."""
    try:
        return read(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception:  # whatever torch finds in a damaged file
        return None


def _check_moments(optimizer):
    states = getattr(getattr(optimizer, "optimizer", None), "state", {})
    for parameter, state in states.items():
        for name in MOMENTS:
            shape = getattr(state.get(name), "shape", parameter.shape)
            if shape != parameter.shape:
                raise ValueError(
                    f"its optimizer has {name} of shape {list(shape)} for parameters of shape "
                    f"{list(parameter.shape)}"
                )


def checkpoint_numbers():
    """torch makes whole numbers into parameters without a word.

    Can go when torch or fairseq asks whether a parameter's numbers are of its kind.
    """
    from fairseq.models import BaseFairseqModel

    def make(original):
        def load_state_dict(self, state_dict, *args, **kwargs):
            for name, value in self.state_dict().items():
                found = getattr(state_dict.get(name), "dtype", value.dtype)
                if found.is_floating_point != value.is_floating_point():
                    raise CheckpointError(
                        f"the checkpoint's {name} has numbers of {found}, where the model has "
                        f"{value.dtype}: give a checkpoint of this model"
                    )
            return original(self, state_dict, *args, **kwargs)

        return load_state_dict

    wrap(BaseFairseqModel, "load_state_dict", make)


def checkpoint_adaptive_softmax():
    """Embeddings that input and output share are loaded into an `output_projection`, which a
    decoder with an adaptive softmax does not have: its checkpoints cannot be read again.

    Can go when fairseq asks whether there is one.
    """
    from fairseq.models.transformer import TransformerDecoderBase

    def make(original):
        def upgrade_state_dict_named(self, state_dict, name):
            upgraded = original(self, state_dict, name)
            if self.adaptive_softmax is not None:
                state_dict.pop(f"{name}.output_projection.weight", None)
            return upgraded

        return upgrade_state_dict_named

    wrap(TransformerDecoderBase, "upgrade_state_dict_named", make)
