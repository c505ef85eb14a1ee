"""Checkpoints: what torch refuses of them, what a damaged one is called, who builds a model."""

import argparse
import ast
import builtins
import contextvars
import math
import os
import pickletools
import re
import sys
import zipfile
from pickle import UnpicklingError

import numpy as np
import torch

from multimax_fairseq.compat.patch import wrap
from multimax_fairseq.errors import CheckpointError


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
    except (ValueError, StopIteration, IndexError, zipfile.BadZipFile):
        pass
    return None


def _is_code(text):
    """Whether a string calls something that fairseq's eval() would find."""
    try:
        tree = ast.parse(text.strip(), mode="eval") if "(" in text else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call):
            root = node.func
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if not isinstance(root, ast.Name) or hasattr(builtins, root.id):
                return True
            fairseq = [m for name, m in sys.modules.items() if name.split(".")[0] == "fairseq"]
            if any(hasattr(module, root.id) for module in fairseq):
                return True
    return False


def _code_in_options(options, name=""):
    """The first option of a checkpoint that is code, as (name, value); None if there is none."""
    from omegaconf import DictConfig, OmegaConf

    if isinstance(options, DictConfig):
        options = OmegaConf.to_container(options, resolve=False)
    if isinstance(options, argparse.Namespace):
        options = vars(options)
    if isinstance(options, dict):
        pairs = options.items()
    elif isinstance(options, list | tuple):
        pairs = ((name, value) for value in options)
    else:
        return (name, options) if isinstance(options, str) and _is_code(options) else None
    return next(filter(None, (_code_in_options(value, key) for key, value in pairs)), None)


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file that is not as it was written."""


def _damaged(path):
    return DamagedCheckpointError(
        f"'{path}' is damaged or incomplete; copy it again, or delete it and continue from "
        "another one."
    )


def _is_altered(path):
    """Whether a file of torch's zip format is not as it was written; other formats cannot tell."""
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
        try:
            return zipfile.ZipFile(file).testzip() is not None
        except (zipfile.BadZipFile, OSError, EOFError, ValueError):
            return True


def checkpoint_errors():
    """torch explains a refused or damaged file in a page that names neither file nor remedy.

    And options that fairseq keeps as text, such as adaptive_softmax_cutoff, it hands to eval():
    those of a checkpoint must not call anything. And torch does not look at the checksums that it
    has written, so that altered numbers load in silence. Can go when fairseq does all three.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    def make(original):
        def load_checkpoint_to_cpu(path, *args, **kwargs):
            local = PathManager.get_local_path(path)
            if os.path.isfile(local) and _is_altered(local):
                raise _damaged(path)
            try:
                state = original(path, *args, **kwargs)
                code = _code_in_options([state.get("args"), state.get("cfg")])
                if code:
                    raise CheckpointError(
                        f"'{path}' is refused: its option {code[0]} is code, {code[1]!r}; "
                        "get a file from a source that you trust."
                    )
                return state
            except CheckpointError:
                raise
            except Exception as error:
                if not _raised_in_torch_load(error):  # such as a missing file
                    if isinstance(error, (KeyError, TypeError, AttributeError)):
                        raise CheckpointError(
                            f"'{path}' is not a fairseq checkpoint ({type(error).__name__}: "
                            f"{error}); give a file that fairseq-train wrote."
                        ) from error
                    raise
                refused = isinstance(error, UnpicklingError) and _refused(error, path)
                if refused:
                    raise CheckpointError(
                        f"'{path}' is refused: it holds {refused}, which is no part of a "
                        "fairseq checkpoint and could run code; get a file from a source that "
                        "you trust."
                    ) from error
                raise _damaged(path) from error

        return load_checkpoint_to_cpu

    wrap(checkpoint_utils, "load_checkpoint_to_cpu", make)


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


def checkpoint_models():
    """A model is not told whether it is built to be trained, or for the parameters of a checkpoint.

    So it cannot refuse a setting in training alone: see building_from_checkpoint(). Can go when
    fairseq hands `from_checkpoint`, which its tasks get, on to the models.
    """
    from fairseq import checkpoint_utils

    def make(original):
        def load_model_ensemble_and_task(*args, **kwargs):
            token = _building.set(True)
            try:
                return original(*args, **kwargs)
            finally:
                _building.reset(token)

        return load_model_ensemble_and_task

    wrap(checkpoint_utils, "load_model_ensemble_and_task", make)


def building_from_checkpoint():
    """Whether fairseq is loading a checkpoint's model."""
    return _building.get()
