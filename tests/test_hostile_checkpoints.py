"""Malicious checkpoints are refused with one sentence, and none of their code runs.

test_compat.py tests forged NumPy types and code in each form of pickle.
"""

import io
import os
import pickle
import struct
import sys
import threading
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from commands import refused
from fairseq import checkpoint_utils
from hostile import CODE, END, Called, bounded, header, refuses, zipped

from multimax_fairseq.analysis import __main__ as analyze
from multimax_fairseq.commands.__main__ import average
from multimax_fairseq.compat import untrusted
from multimax_fairseq.integrations.convert import __main__ as convert

pytestmark = pytest.mark.long

ARCH = "transformer_multimax"
WEIGHT = "decoder.layers.0.fc1.weight"
SCALAR = "decoder.layers.0.self_attn.normalizer.modulator.low_threshold"


def main(command, *words):
    """Run a command of this package in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, words)])
        command()


class Forged:
    """Pickles as a tensor of any size, strides and offset in a storage of four numbers."""

    def __init__(self, size, stride, offset=0):
        self.layout = offset, size, stride

    def __reduce_ex__(self, protocol):
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.zeros(4).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.layout, False, OrderedDict())


def nested(inner, times, wrap):
    for _ in range(times):
        inner = wrap(inner)
    return inner


def parameter(change, name=WEIGHT):
    return lambda state: state["model"].update({name: change(state["model"].get(name))})


def option(group, **values):
    def change(state):
        settings = state["cfg"][group]
        (settings if isinstance(settings, dict) else vars(settings)).update(values)

    return change


def evaluated(text):
    """A setting that fairseq evaluates when it builds the decoder."""
    return option("model", adaptive_softmax_cutoff=text)


def put(**values):
    return lambda state: state.update(values)


def cyclic(state):
    state["cfg"]["itself"] = state["cfg"]


def other_model(state):
    state["model"] = {f"other.{name}": value for name, value in state["model"].items()}


STATES = {
    "a list": (lambda state: [1], "no parameters of a model"),
    "no model": (lambda state: state.pop("model"), "no parameters of a model"),
    "a list of parameters": (put(model=[1]), "no parameters of a model"),
    "parameters of another model": (other_model, "does not match"),
    "whole numbers": (parameter(lambda w: w.long()), "numbers of torch.int64"),
    "truth values": (parameter(lambda w: w > 0), "numbers of torch.bool"),
    "complex numbers": (parameter(lambda w: w.cfloat()), "numbers of torch.complex64"),
    "another shape": (parameter(lambda w: w[:, :1]), "size mismatch"),
    "a learned scalar that is NaN": (parameter(lambda w: w * torch.nan, SCALAR), "not finite"),
    "a learned scalar that is infinite": (parameter(lambda w: w / 0, SCALAR), "not finite"),
    "more numbers than are stored": (parameter(lambda w: Forged(w.shape, w.stride())), "damaged"),
    "strides that leave the storage": (parameter(lambda w: Forged((2, 2), (9, 1))), "damaged"),
    "strides below 0": (parameter(lambda w: Forged((2, 2), (-1, 1))), "damaged"),
    "a start behind the storage": (parameter(lambda w: Forged((2,), (1,), 3)), "damaged"),
    "one number as many": (parameter(lambda w: Forged(w.shape, (0, 0))), "larger than what is"),
    "one number as a trillion": (parameter(lambda w: Forged((1 << 40,), (0,))), "larger than what"),
    "8 PiB": (parameter(lambda w: Forged((1 << 51,), (1,))), "damaged"),
    "settings as text": (put(cfg='common: {log_file: "\\x24{oc.env:HOME}"}'), "its cfg is text"),
    "code in a setting": (evaluated(CODE), "is no Python literal"),
    "a power without end": (evaluated("(9**9**9,)"), "is no Python literal"),
    "a list without end": (evaluated("[0] * 99999 * 99999"), "is no Python literal"),
    "loops in a setting": (evaluated("[0 for a in b]"), "is no Python literal"),
    "a variable of the environment": (
        option("common", log_file="${oc.env:HOME}"),
        "log_file calls a resolver",
    ),
    "a resolver whose name is a reference": (
        option("common", user_dir="oc.env", log_file="${${.user_dir}:HOME}"),
        "log_file calls a resolver",
    ),
    "settings in settings": (
        lambda state: state["cfg"].update(x=nested([], 500, lambda x: [x])),
        "is not a fairseq checkpoint",
    ),
    "settings of themselves": (cyclic, "too many values"),
    "settings ten billion times": (
        lambda state: state["cfg"].update(x=nested([0], 10, lambda x: [x] * 10)),
        "too many values",
    ),
    "a billion layers": (option("model", decoder_layers=10**9), "decoder_layers is 1000000000"),
    "a trillion positions": (option("model", max_source_positions=10**12), "allocate"),
    "a setting of another type": (option("model", decoder_layers="two"), "no model can be built"),
    "an unknown task": (option("task", _name="none"), "no model can be built"),
    "numpy: bytes that do not fill the shape": (
        put(x=Called(np.ndarray.__new__, np.ndarray, (1 << 40,))),
        "it holds getattr",
    ),
    "numpy: a trillion zeros": (put(x=Called(bytearray, 10**12)), "damaged"),
}


def deep(call, *arguments):
    """Call a function with a high recursion limit, which pickle needs."""
    limit, size = sys.getrecursionlimit(), threading.stack_size(1 << 28)
    sys.setrecursionlimit(10**6)
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join()
    sys.setrecursionlimit(limit)
    threading.stack_size(size)


def load(path):
    checkpoint_utils.load_model_ensemble_and_task([str(path)])


@pytest.fixture
def state(checkpoint):
    return torch.load(checkpoint(ARCH), weights_only=False)  # our own file


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_load_refuses_hostile_states(kind, state, tmp_path):
    change, words = STATES[kind]
    path = tmp_path / "hostile.pt"
    changed = change(state)
    deep(torch.save, changed if kind == "a list" else state, path)
    refuses(load, path, words)


def repacked(checkpoint, change):
    """Return a checkpoint's bytes with each member replaced by change(name, data)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(checkpoint) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            data, how = change(name, old.read(name))
            new.writestr(name, data, how)
    return stream.getvalue()


def bomb(name, data):
    if name.endswith("data.pkl"):
        return b"\x80\2]" + b"]0" * (1 << 25) + b".", zipfile.ZIP_DEFLATED
    return data, zipfile.ZIP_STORED


def overlapping(data):
    """Set the size of every entry in the central directory to the size of the file."""
    data, at = bytearray(data), 0
    while (at := data.find(b"PK\1\2", at + 1)) > 0:
        data[at + 20 : at + 28] = struct.pack("<II", len(data) // 2, len(data) // 2)
    return bytes(data)


FILES = {
    "64 MiB packed into some KB": lambda file: repacked(file, bomb),
    "members that lie in each other": lambda file: overlapping(file.read_bytes()),
    "an archive in an archive": lambda file: zipped(("a/data.pkl", file.read_bytes())),
    "a tar of files": lambda file: header("sys_info", size=2, data=b"\x80\2") + END,
    "a picture": lambda file: b"\x89PNG\r\n\x1a\n" + bytes(1000),
}


@pytest.mark.parametrize("kind", FILES)
def test_load_refuses_hostile_files(kind, checkpoint, tmp_path):
    path = tmp_path / "hostile.pt"
    path.write_bytes(FILES[kind](checkpoint(ARCH)))
    refuses(load, path, "damaged or incomplete")


@pytest.mark.parametrize("shape", [(-2, -4), (-1,), (1 << 62, 4), (1 << 40, 0), ("x",), (2.0, 0.5)])
def test_pickled_array_refuses_invalid_shapes(shape):
    """PyTorch's unpickler calls __setstate__, as NumPy's own would."""
    array = untrusted._pickled_array(untrusted._PickledArray, (0,), b"b")
    kind = untrusted._PickledDtype("u1")
    with bounded(), pytest.raises((pickle.UnpicklingError, ValueError, TypeError)):
        array.__setstate__((1, shape, kind, False, b"12345678"))


# --- commands that read files with code ----------------------------------------------------------


@pytest.fixture
def evil(tmp_path):
    path = tmp_path / "evil.pt"
    command = f"touch {tmp_path / 'ran'}"
    torch.save({"args": None, "cfg": None, "model": Called(os.system, command)}, path)
    return path


def test_package_commands_refuse_code(evil, checkpoint, data, tmp_path):
    new, whole = tmp_path / "new", checkpoint(ARCH)
    for words in (
        [analyze.main, "multimax-analyze", "parameters", evil],
        [analyze.main, "multimax-analyze", "collect", evil, data / "mt", "--out", new],
        [average, "multimax-average", "--output", new, whole, evil],
        [average, "multimax-average", "--output", new, evil],
        [convert.main, "multimax-convert", "to-authors", evil, new],
        [convert.main, "multimax-convert", "to-paddlefleet", evil, new],
    ):
        refuses(lambda _, words=words: main(*words), evil, "could run code")


def test_fairseq_commands_refuse_code(evil, data, tmp_path):
    sizes = ["--arch", "transformer", "--optimizer", "adam", "--max-tokens", "400", "--no-save"]
    for command in (
        ["fairseq-train", data / "mt", *sizes, "--restore-file", evil],
        ["fairseq-validate", data / "mt", "--task", "translation", *sizes[4:6], "--path", evil],
    ):
        sentence = refused(tmp_path, *command)
        assert "evil.pt' is refused" in sentence and "system" in sentence
        assert not (tmp_path / "ran").exists()


# --- resuming ------------------------------------------------------------------------------------


def moments(**values):
    return lambda state: state["last_optimizer_state"]["state"][0].update(values)


RUNS = {
    "moments of another shape": (moments(exp_avg=torch.zeros(3)), "optimizer has exp_avg of shape"),
    "an optimizer's state as text": (
        lambda s: s.update(last_optimizer_state="x"),
        "cannot resume from",
    ),
    "no state in it": (lambda s: s["last_optimizer_state"].pop("state"), "cannot resume from"),
    "a schedule that is a number": (
        lambda s: s["optimizer_history"][-1].update(lr_scheduler_state=3),
        "cannot resume from",
    ),
    "a meter of another kind": (
        lambda s: s["extra_state"].update(metrics={"default": [(0, "a", "deque", {})]}),
        "cannot resume from",
    ),
}


@pytest.fixture
def started(trainer_of, tmp_path):
    """A checkpoint after one update, and the trainer that wrote it."""
    trainer, batches = trainer_of("transformer_multimax")
    trainer.train_step(batches[:1])
    path = tmp_path / "run.pt"
    trainer.consolidate_optimizer()
    state = trainer.state_dict()
    state["extra_state"] |= {"train_iterator": {"epoch": 1}, "best": 3.0}
    torch.save(state, path)
    return path, trainer


def test_load_checkpoint_resumes_its_own_run(started):
    path, trainer = started
    trainer.set_num_updates(7)
    trainer.load_checkpoint(str(path))
    assert trainer.get_num_updates() == 1


@pytest.mark.parametrize("kind", RUNS)
def test_load_checkpoint_refuses_hostile_run_states(kind, started):
    change, words = RUNS[kind]
    path, trainer = started
    state = torch.load(path, weights_only=False)  # our own file
    change(state)
    torch.save(state, path)
    refuses(lambda path: trainer.load_checkpoint(str(path)), path, words)
