"""Fixes for checkpoints that run code, or do not hold what fairseq-train writes.

torch refuses code in a checkpoint. It does not check the contents: parameters that are not finite
numbers, settings that call a resolver, altered bytes.
"""

import argparse
import ast
import codecs
import contextlib
import contextvars
import functools
import math
import os
import re
import reprlib
import sys
import zipfile
from pickle import UnpicklingError

import numpy as np
import torch

from multimax_fairseq.compat.mistakes import explain, is_raised_by_fairseq
from multimax_fairseq.compat.patch import replace
from multimax_fairseq.compat.silent import check_languages
from multimax_fairseq.errors import CheckpointError, UsageError, first_line

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Limits far above a run of fairseq: values beside the parameters, and layers. A few bytes of a file
# can ask for more than fits into memory.
MAX_VALUES, MAX_LAYERS = 500_000, 1000
RESOLVER = r"\$\{[^}]*(:|\$\{)"  # ${oc.env:HOME}, also with a nested name


def literal(text):
    """Return the value of a Python literal; replaces eval() in fairseq.

    Lists may be added and repeated, as in "[(512, 3)] * 20", the layers of a stock model. Raises
    TypeError, as eval() does, for anything but a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected a string, got {text!r}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        raise ValueError(
            f"{reprlib.repr(text)} is no Python literal: write a number, tuple, list or dictionary"
        ) from None


def _value(node):
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(left, list) and isinstance(right, int) and len(left) * right <= MAX_LAYERS:
            return left * right
    return ast.literal_eval(node)


def evaluate_literals():
    """Read settings such as adam_betas as literals, in each loaded module of fairseq.

    Cause: fairseq calls eval() on settings of a checkpoint or a command line. `literal` replaces it
    in each module under the name eval.
    Remove when fairseq calls ast.literal_eval.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("fairseq", "fairseq_cli"):
            module.eval = literal


class _PickledDtype:
    """Stands in for numpy.dtype in a checkpoint; accepts plain number types only."""

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
    """Stands in for numpy.ndarray in a checkpoint; its bytes must fill its shape."""

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


# argparse.Namespace only keeps attributes. --eval-bleu saves numpy arrays of counts, and numbers.
# numpy's own classes are unsafe, because a forged dtype makes numpy read any address. The classes
# above replace them under numpy's names.
SAFE_GLOBALS = {
    "argparse.Namespace": argparse.Namespace,
    "numpy.dtype": _PickledDtype,
    "numpy.ndarray": _PickledArray,
    "numpy._core.multiarray._reconstruct": _pickled_array,
    "numpy._core.multiarray.scalar": _pickled_scalar,
    "numpy.core.multiarray._reconstruct": _pickled_array,  # written under numpy 1
    "numpy.core.multiarray.scalar": _pickled_scalar,
}


@contextlib.contextmanager
def checkpoint_classes():
    """Let torch load the few classes of fairseq's checkpoints in a with block.

    torch's protection stays on. Other loads in this process, such as those of transformers'
    Trainer, get numpy's own classes.
    """
    before = torch.serialization.get_safe_globals()
    others = [entry for entry in before if _name(entry) not in SAFE_GLOBALS]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(
        others + [(value, name) for name, value in SAFE_GLOBALS.items()]
    )
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _name(entry):
    """Return the name under which torch unpickles an entry of its safe globals."""
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


def _refused_content(error):
    """Return what torch refuses to load, by its error; None if the file is damaged."""
    text = str(error)
    if "Unsupported operand 149" in text:  # FRAME, with which protocol 4 begins
        return "a pickle of protocol 4 or newer"
    name = re.search(r"GLOBAL (\S+)|function (\S+)|but got (<[^>]*>)|(numpy\.\S+)", text)
    return next(filter(None, name.groups())) if name else None


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file that differs from the one that was written."""


def _damaged(path):
    return DamagedCheckpointError(
        f"'{path}' is damaged or incomplete; copy it again, or delete it and continue from "
        "another one."
    )


def _is_altered(path):
    """Whether a file of torch's zip format fails its checksums; other formats have none.

    torch does not compress, so larger members mean a forged file.
    """
    with open(path, "rb") as file:
        if file.read(2) != b"PK":
            return False
        try:
            archive = zipfile.ZipFile(file)
            size = sum(member.file_size for member in archive.infolist())
            return size > os.path.getsize(path) or archive.testzip() is not None
        except Exception:  # zipfile raises any kind for a damaged file
            return True


def _is_text(path):
    """Whether a file begins with printable text."""
    with open(path, "rb") as file:
        head = file.read(64)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # may end within a character
        return bool(text) and "".join(text.split()).isprintable()
    except UnicodeDecodeError:
        return False


def _checked(path, local):
    """Return a checkpoint's state; CheckpointError if it is altered, holds code or is none."""
    if _is_altered(local):
        raise _damaged(path)
    load = functools.partial(torch.load, local, map_location="cpu", weights_only=True)
    try:
        try:
            state = load(mmap=True)  # so that parameters stay on the disk
        except Exception:  # a file of old torch cannot be mapped
            state = load()
    except Exception as error:  # torch and pickle raise any kind for a damaged file
        content = _refused_content(error) if isinstance(error, UnpicklingError) else None
        if content is None and _is_text(local):
            raise CheckpointError(
                f"'{path}' is text, not a checkpoint: pass a file that fairseq-train wrote, such "
                "as checkpoint_best.pt"
            ) from error
        if content is None:
            raise _damaged(path) from error
        raise CheckpointError(
            f"'{path}' is refused: it holds {content}, which is no part of a fairseq checkpoint "
            "and could run code; get a file from a source that you trust."
        ) from error
    try:
        _check_contents(state)
    except ValueError as error:
        raise CheckpointError(
            f"'{path}' is refused: {error}; use a file that fairseq-train wrote."
        ) from error
    return state


def checkpoint_files():
    """Refuse a file that holds code, is altered or is no checkpoint; name it and the remedy.

    Cause: since torch 2.6, torch.load accepts tensors and plain values only, which fairseq's
    checkpoints are not. torch's error for code names neither the file nor the remedy. torch does
    not compare the checksums that it writes, so altered numbers load. Neither torch nor fairseq
    checks the contents.
    Remove when fairseq does all of it.
    """
    from fairseq import checkpoint_utils
    from fairseq.file_io import PathManager

    @replace(checkpoint_utils, "load_checkpoint_to_cpu")
    @checkpoint_classes()
    def load_checkpoint_to_cpu(original, path, arg_overrides=None, *args, **kwargs):
        local = PathManager.get_local_path(path)
        if os.path.isfile(local):
            check_languages(path, _checked(path, local), _task.get(), arg_overrides)
        try:
            return original(path, arg_overrides, *args, **kwargs)
        except (OSError, UsageError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"'{path}' is not a fairseq checkpoint ({first_line(error)}); use a file that "
                "fairseq-train wrote."
            ) from error

    @replace(checkpoint_utils, "load_ema_from_checkpoint")  # for --ema-seed-model
    @checkpoint_classes()
    def load_ema_from_checkpoint(original, path):
        return original(path)


def unwrapped(parameters):
    """Return {name: parameter} without the prefix of a wrapper for several GPUs."""
    return {name.removeprefix("module."): value for name, value in parameters.items()}


def _check_contents(state):
    """Raise ValueError with the reason if a state is not a checkpoint's."""
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError("it has no parameters of a model")
    if isinstance(state.get("cfg"), str):  # which OmegaConf reads as YAML, where \x24 means $
        raise ValueError("its cfg is text")
    for name, value in state["model"].items():
        if not torch.is_tensor(value) or value.dtype not in FLOATS or not value.numel():
            continue
        # A stride of 0 makes a tensor of any size out of one number.
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"its parameter {name} is larger than what is stored")
        # A sink, and a mask, may be -inf. NaN goes through the largest value.
        if not value.amax() < torch.inf:
            raise ValueError(f"its parameter {name} has numbers that are not finite")
    _check_values({name: value for name, value in state.items() if name != "model"})


def _check_values(values):
    """Raise ValueError for values that are too many or too large, or that OmegaConf would resolve.

    A structure that contains itself has no end of values.
    """
    entries = [("", values)]
    for name, value in entries:  # which grows
        if isinstance(value, argparse.Namespace):
            value = vars(value)
        if isinstance(value, dict):
            entries += value.items()
        elif isinstance(value, list | tuple):
            entries += ((name, item) for item in value)
        elif isinstance(value, str) and re.search(RESOLVER, value):
            raise ValueError(f"its option {name} calls a resolver, {reprlib.repr(value)}")
        elif isinstance(value, int) and value > MAX_LAYERS and str(name).endswith("_layers"):
            raise ValueError(f"its setting {name} is {reprlib.repr(value)}")
        if len(entries) > MAX_VALUES:
            raise ValueError("it has too many values beside its parameters")


def checkpoint_numbers():
    """Refuse to load integers into floating-point parameters, or the reverse.

    Cause: torch converts them without an error.
    Remove when torch or fairseq compares the kinds.
    """
    from fairseq.models import BaseFairseqModel

    @replace(BaseFairseqModel, "load_state_dict")
    def load_state_dict(original, self, state_dict, *args, **kwargs):
        for name, value in self.state_dict().items():
            dtype = getattr(state_dict.get(name), "dtype", value.dtype)
            if dtype.is_floating_point != value.is_floating_point():
                raise CheckpointError(
                    f"the checkpoint's {name} has numbers of {dtype}, where the model has "
                    f"{value.dtype}: use a checkpoint of this model"
                )
        return original(self, state_dict, *args, **kwargs)


_building = contextvars.ContextVar("building_from_checkpoint", default=False)
# The task for which fairseq loads a model; None if the checkpoint's own.
_task = contextvars.ContextVar("task", default=None)


def building_from_checkpoint():
    """Whether fairseq is loading the model of a checkpoint."""
    return _building.get()


def checkpoint_models():
    """Name the checkpoint from which no model can be built; tell models that they are being loaded.

    Cause: fairseq's error does not name the file. fairseq passes `from_checkpoint` to its tasks,
    but not to models, which check settings differently in training: see building_from_checkpoint().
    Remove when fairseq passes it to the models and names the file.
    """
    from fairseq import checkpoint_utils

    @replace(checkpoint_utils, "load_model_ensemble_and_task")
    def load_model_ensemble_and_task(
        original, filenames, arg_overrides=None, task=None, *args, **kwargs
    ):
        tokens = _building.set(True), _task.set(task)
        try:
            return original(filenames, arg_overrides, task, *args, **kwargs)
        except Exception as error:
            text = explain(error)
            is_named = text and any(name in text for name in filenames)
            is_flag = isinstance(error, UsageError) and not isinstance(error, CheckpointError)
            is_other = isinstance(error, OSError | ImportError)
            if is_named or is_flag or is_other or not is_raised_by_fairseq(error):
                raise
            if text is None:
                text = (
                    f"no model can be built of it ({first_line(error)}); use a checkpoint "
                    "that fairseq-train wrote."
                )
            raise CheckpointError(f"'{', '.join(filenames)}': {text}") from error
        finally:
            _building.reset(tokens[0])
            _task.reset(tokens[1])


def read_metadata(path, read):
    """Return read(state) of a checkpoint without loading its parameters; None if that fails."""
    try:
        with checkpoint_classes():
            return read(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
    except Exception:  # torch raises any kind for a damaged file
        return None
