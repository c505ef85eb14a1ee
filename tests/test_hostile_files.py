"""Files that were made to do harm: each is refused in one sentence, and nothing else happens.

Nothing of theirs is run or written, and neither memory nor time is theirs to take. What else is
wrong with files, by accident rather than by design, is in the tests of their readers.
"""

import bz2
import contextlib
import gzip
import io
import json
import os
import pickle
import resource
import runpy
import signal
import struct
import sys
import tarfile
import threading
import zipfile
from collections import OrderedDict

import archives
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import wikitext103
from collection import write as write_collection
from commands import ROOT, TRACEBACK, refused
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

from multimax_fairseq import compat
from multimax_fairseq.analysis import __main__ as analyze
from multimax_fairseq.analysis import collection, training_log
from multimax_fairseq.convert import __main__ as convert
from multimax_fairseq.convert import paddlefleet

SECONDS, MEMORY = 20, 1 << 30
ARCH = "transformer_multimax"
WEIGHT = "decoder.layers.0.fc1.weight"
SCALAR = "decoder.layers.0.self_attn.normalizer.modulator.low_threshold"


@contextlib.contextmanager
def bounded():
    """What takes more memory, or more time, ends in an error that no sentence explains."""

    def late(*_):
        raise SystemError(f"more than {SECONDS} seconds")

    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """refusal(read, path, words): the sentence names the file, and nothing has come of it."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    compat.apply()

    def check(read, path, words):
        before = sorted(tmp_path.rglob("*"))
        with bounded(), pytest.raises((ValueError, SystemExit)) as caught:
            read(path)
        error = caught.value
        text = " ".join(str(error).splitlines()).removesuffix(f" {TRACEBACK}")
        if not isinstance(error, SystemExit):
            text = compat.explain(error)
            assert text, repr(error)
        assert words in text and str(path) in text, text
        assert ":" in text or ";" in text, text  # what to do
        assert len(text) < 800 and sorted(tmp_path.rglob("*")) == before

    return check


# --- archives ------------------------------------------------------------------------------------


def header(name="a.txt", size=0, kind=tarfile.REGTYPE, data=b"", packed_size=None):
    """A member as tar writes it; `packed_size` is a number that tarfile would not write."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    if packed_size is not None:
        block[124:136] = packed_size.to_bytes(12, "big", signed=True)
        block[124] |= 0x80
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + data + b"\0" * (-len(data) % 512)


END = b"\0" * 1024
PAX = {"size": 10, "kind": tarfile.XHDTYPE, "data": b"10 a=bcde\n"}


def sparse():
    """A file of 8 GiB of zeros, of which nothing is stored."""
    info = tarfile.TarInfo("a.txt")
    info.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % ((1 << 33) - 1)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + END


TARS = {
    "pipe": (lambda: header(kind=tarfile.FIFOTYPE) + END, "nothing was unpacked"),
    "block device": (lambda: header(kind=tarfile.BLKTYPE) + END, "nothing was unpacked"),
    "sparse file": (sparse, "nothing was unpacked"),
    "unknown kind of member": (lambda: header(kind=b"Z") + END, "nothing was unpacked"),
    "a member twice": (lambda: header() + header() + END, "holds 2 files a.txt"),
    "declares 8 GiB": (lambda: header(packed_size=1 << 33) + END, "unpacks to more than"),
    "declares fewer than no bytes": (
        lambda: header(packed_size=-512) + END,
        "truncated or corrupt",
    ),
    "a header of fewer than no bytes": (
        lambda: header(kind=tarfile.XHDTYPE, packed_size=-512) + END,
        "truncated or corrupt",
    ),
    "a header of 8 GiB": (
        lambda: header(kind=tarfile.XHDTYPE, packed_size=1 << 33) + END,
        "unpacks to more than",
    ),
    "headers of headers": (lambda: header(**PAX) * 2000 + header() + END, "truncated or corrupt"),
    "unpacks to 64 MiB": (lambda: gzip.compress(bytes(1 << 26)), "unpacks to more than"),
    "64 MiB after its end": (
        lambda: bz2.compress(header() + END + bytes(1 << 26)),
        "unpacks to more than",
    ),
    "3,000 members": (lambda: gzip.compress(header() * 3000 + END), "unpacks to more than"),
    "an archive in an archive": (
        lambda: gzip.compress(gzip.compress(header() + END)),
        "truncated or corrupt",
    ),
    "cut": (lambda: header(size=2000, data=bytes(1500)), "truncated or corrupt"),
}


@pytest.mark.parametrize("kind", TARS)
def test_tar(kind, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 1 << 24)
    monkeypatch.setattr(archives, "MOST", 2500)
    path = tmp_path / "a.tar"
    path.write_bytes(TARS[kind][0]())
    refusal(lambda path: archives.read_tar(path, ["a.txt"]), path, TARS[kind][1])


def zipped(*members, compression=zipfile.ZIP_DEFLATED, change=lambda data: data):
    """The bytes of an archive of (name, content)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        for name, content in members:
            file.writestr(name, content)
    return change(stream.getvalue())


def in_directory(offset, value):
    """Changes a field of the first entry of the central directory, and of the entry itself."""

    def change(data):
        data = bytearray(data)
        for signature, shift in ((b"PK\1\2", 0), (b"PK\3\4", -2)):
            at = data.index(signature) + offset + shift
            data[at : at + len(value)] = value
        return bytes(data)

    return change


def unix(kind):
    info = zipfile.ZipInfo("wiki.train.tokens")
    info.external_attr = kind << 28
    return info


WIKI = [(f"wiki.{split}.tokens", f"{split} text\n" * 99) for split in ("train", "valid", "test")]
ZIPS = {
    "pipe": ([(unix(0o01), ""), *WIKI[1:]], {}, "nothing was unpacked"),
    "device": ([(unix(0o06), ""), *WIKI[1:]], {}, "nothing was unpacked"),
    "a member twice": ([WIKI[0], ("other/wiki.train.tokens", ""), *WIKI[1:]], {}, "holds 2 files"),
    "unpacks to 64 MiB": ([("x", bytes(1 << 26)), *WIKI], {}, "unpacks to more than"),
    "more than it declares": (
        WIKI,
        {"change": in_directory(24, struct.pack("<I", 60))},
        "truncated or corrupt",
    ),
    "declares 4 GiB": (WIKI, {"change": in_directory(24, b"\xfe" * 4)}, "unpacks to more than"),
    "3,000 members": ([(f"{n}", "") for n in range(3000)], {}, "unpacks to more than"),
    "encrypted": (WIKI, {"change": in_directory(8, b"\1")}, "truncated or corrupt"),
    "packed in an unknown way": (WIKI, {"change": in_directory(10, b"\x63")}, "truncated or cor"),
    "cut": (WIKI, {"change": lambda data: data[:-30]}, "truncated or corrupt"),
    "an archive in an archive": ([("wiki.zip", zipped(*WIKI))], {}, "holds neither"),
}


def read_zip(path):
    with archives.readable(path):
        file = zipfile.ZipFile(path)
    with file:
        source = wikitext103.zip_source(path, file)
        for (_, opened), *_ in source.values():
            with archives.readable(path), opened() as stream:
                stream.read()


@pytest.mark.parametrize("kind", ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip(kind, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 1 << 24)
    monkeypatch.setattr(archives, "MOST", 2500)
    members, how, words = ZIPS[kind]
    path = tmp_path / "wiki.zip"
    path.write_bytes(zipped(*members, **how))
    refusal(read_zip, path, words)


def test_a_column_of_one_long_line_a_million_times(refusal, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "LARGEST", 1 << 26)
    path = tmp_path / "train.parquet"
    lines = pyarrow.DictionaryArray.from_arrays(np.zeros(1 << 20, np.int32), ["x" * (1 << 16)])
    table = pyarrow.table({"text": lines})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20

    def read(path):
        with path.open("rb") as file:
            for _ in wikitext103.parquet_lines(file, path):
                pass

    refusal(read, path, "unpacks to more than")


# --- checkpoints ---------------------------------------------------------------------------------


class Forged:
    """A tensor of any size, strides and place in a storage of four numbers."""

    def __init__(self, size, stride, offset=0):
        self.layout = offset, size, stride

    def __reduce_ex__(self, protocol):
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.zeros(4).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, *self.layout, False, OrderedDict())


class Called:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


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


def put(**values):
    return lambda state: state.update(values)


def cyclic(state):
    state["cfg"]["itself"] = state["cfg"]


def other_model(state):
    state["model"] = {f"other.{name}": value for name, value in state["model"].items()}


CODE = "__import__('os').system('touch ran')"
STATES = {
    "a list": (lambda state: [1], "no parameters of a model"),
    "no model": (lambda state: state.pop("model"), "no parameters of a model"),
    "a list of parameters": (put(model=[1]), "no parameters of a model"),
    "parameters without names": (parameter(lambda _: torch.zeros(1), 3), "parameter 3"),
    "parameters of another model": (other_model, "does not fit"),
    "text in place of a parameter": (parameter(lambda _: "x"), "type str"),
    "an array of numpy in its place": (parameter(lambda w: w.numpy()), WEIGHT),
    "whole numbers": (parameter(lambda w: w.long()), "numbers of torch.int64"),
    "truth values": (parameter(lambda w: w > 0), "numbers of torch.bool"),
    "complex numbers": (parameter(lambda w: w.cfloat()), "numbers of torch.complex64"),
    "float8": (parameter(lambda w: w.to(torch.float8_e5m2)), "numbers of torch.float8_e5m2"),
    "sparse": (parameter(lambda w: w.to_sparse()), "torch.sparse_coo"),
    "without numbers": (parameter(lambda w: w.to("meta")), "on meta"),
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
    "settings as text": (put(cfg="model: {}"), "its cfg is of the type str"),
    "settings as code": (put(cfg=CODE), "its cfg is of the type str"),
    "code in a setting": (option("task", source_lang=CODE), "source_lang is code"),
    "a power without end": (option("model", lr="(9**9**9,)"), "lr is code"),
    "a list without end": (option("model", lr="[0] * 99999 * 99999"), "lr is code"),
    "loops in a setting": (option("model", lr="[0 for a in b]"), "lr is code"),
    "a variable of the environment": (option("common", log_file="${oc.env:HOME}"), "is code"),
    "settings in settings": (
        lambda state: state["cfg"].update(x=nested([], 5000, lambda x: [x])),
        "nested without end",
    ),
    "settings of themselves": (cyclic, "nested without end"),
    "settings ten billion times": (
        lambda state: state["cfg"].update(x=nested([0], 10, lambda x: [x] * 10)),
        "nested without end",
    ),
    "a deep state of the iterator": (put(extra_state=nested({}, 5000, lambda x: {1: x})), "nested"),
    "a billion layers": (option("model", decoder_layers=10**9), "decoder_layers is 1000000000"),
    "a trillion positions": (option("model", max_source_positions=10**12), "positions is 10000"),
    "a width of a billion": (option("model", decoder_embed_dim=1 << 30), "decoder_embed_dim is"),
    "a setting of another type": (option("model", decoder_layers="two"), "no model can be built"),
    "an unknown task": (option("task", _name="none"), "no model can be built"),
    "no history": (put(optimizer_history=[]), "optimizer_history is empty"),
    "updates that are no number": (
        put(optimizer_history=[{"num_updates": "x"}]),
        "num_updates is 'x'",
    ),
    "state of the task as a number": (put(task_state=3), "task_state is of the type int"),
    "numpy: bytes that do not fill the shape": (
        put(x=Called(np.ndarray.__new__, np.ndarray, (1 << 40,))),
        "numpy",
    ),
    "numpy: a trillion zeros": (put(x=Called(bytearray, 10**12)), "damaged"),
}


def deep(call, *arguments):
    """Calls a function with room for recursion, of which pickle needs much."""
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
def test_checkpoint(kind, state, refusal, tmp_path):
    change, words = STATES[kind]
    path = tmp_path / "hostile.pt"
    changed = change(state)
    deep(torch.save, changed if kind == "a list" else state, path)
    refusal(load, path, words)


def repacked(checkpoint, change):
    """A checkpoint's members, each changed by change(name, data) -> data, packed anew."""
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
    """Every entry of the central directory is told to be as large as the file."""
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
def test_file_that_is_no_checkpoint(kind, checkpoint, refusal, tmp_path):
    path = tmp_path / "hostile.pt"
    path.write_bytes(FILES[kind](checkpoint(ARCH)))
    refusal(load, path, "damaged or incomplete")


@pytest.mark.parametrize("shape", [(-2, -4), (-1,), (1 << 62, 4), (1 << 40, 0), ("x",), (2.0, 0.5)])
def test_shape_of_an_array(shape):
    """What torch calls for a pickled array, which numpy would call by itself."""
    from multimax_fairseq.compat import checkpoints

    array = checkpoints._pickled_array(checkpoints._PickledArray, (0,), b"b")
    kind = checkpoints._PickledDtype("u1")
    with bounded(), pytest.raises((pickle.UnpicklingError, ValueError, TypeError)):
        array.__setstate__((1, shape, kind, False, b"12345678"))


# --- commands, and code in what they read --------------------------------------------------------


@pytest.fixture
def evil(tmp_path):
    path = tmp_path / "evil.pt"
    command = f"touch {tmp_path / 'ran'}"
    torch.save({"args": None, "cfg": None, "model": Called(os.system, command)}, path)
    return path


def main(command, *words):
    """A command of ours, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*map(str, words)])
        command() if callable(command) else runpy.run_path(command, run_name="__main__")


def test_code_is_not_run_by_our_commands(evil, checkpoint, data, refusal, tmp_path):
    average = str(ROOT / "scripts" / "average_checkpoints.py")
    new, whole = tmp_path / "new", checkpoint(ARCH)
    for words in (
        [analyze.main, "multimax-analyze", "parameters", evil],
        [analyze.main, "multimax-analyze", "collect", evil, data / "mt", "--out", new],
        [average, "average", "--output", new, whole, evil],
        [average, "average", "--output", new, evil],
        [convert.main, "multimax-convert", "to-authors", evil, new],
        [convert.main, "multimax-convert", "to-paddlefleet", evil, new],
    ):
        refusal(lambda _, words=words: main(*words), evil, "could run code")


def test_code_is_not_run_by_fairseqs_commands(evil, data, tmp_path):
    sizes = ["--arch", "transformer", "--optimizer", "adam", "--max-tokens", "400", "--no-save"]
    for command in (
        ["fairseq-train", data / "mt", *sizes, "--restore-file", evil],
        ["fairseq-train", data / "mt", *sizes, "--finetune-from-model", evil],
        ["fairseq-validate", data / "mt", "--task", "translation", *sizes[4:6], "--path", evil],
    ):
        sentence = refused(tmp_path, *command)
        assert "evil.pt' is refused" in sentence and "system" in sentence
        assert not (tmp_path / "ran").exists()


# --- arrays, tables and lines --------------------------------------------------------------------


def npz(**changes):
    """An .npz file of a head, with members changed."""
    stream, plain = io.BytesIO(), io.BytesIO()
    np.save(plain, np.zeros(4, np.float32))
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, short in zip(paddlefleet.NAMES, ("ts", "ranges"), strict=True):
            file.writestr(f"{name}.npy", changes.get(short, lambda b: b)(plain.getvalue()))
    return stream.getvalue()


def numpy_header(text):
    """An array's file with another header."""
    line = text.encode() + b"\n"
    return lambda data: data[:8] + struct.pack("<H", len(line)) + line + data[-16:]


def pickled(_):
    stream = io.BytesIO()
    np.save(stream, np.array([Called(os.system, "touch ran")] * 4), allow_pickle=True)
    return stream.getvalue()


SHAPE = "{'descr': '<f4', 'fortran_order': False, 'shape': %s}"
HEADS = {
    "pickles": npz(ts=pickled),
    "a pickle instead of an archive": pickle.dumps(Called(os.system, "touch ran")),
    "64 MiB packed into some KB": npz(ts=lambda data: data + bytes(1 << 26)),
    "a shape of 8 TiB": npz(ts=numpy_header(SHAPE % "(2199023255552,)")),
    "a shape below 0": npz(ts=numpy_header(SHAPE % "(-1,)")),
    "a shape of more bits than there are": npz(ts=numpy_header(SHAPE % "(4294967296, 4294967296)")),
    "a header that is code": npz(ts=numpy_header(CODE)),
    "a header that is nested": npz(ts=numpy_header("(" * 5000)),
    "a header that does not end": npz(ts=numpy_header("{'descr': '''")),
    "an archive that is damaged": npz()[:90] + b"\xff" * 40 + npz()[130:],
    "text in place of an array": npz(ts=lambda data: b"ts"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_array(kind, refusal, tmp_path):
    path = tmp_path / "head.npz"
    path.write_bytes(HEADS[kind])
    refusal(paddlefleet.read, path, "numpy.savez")


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected") / "folder"
    write_collection(folder, layers=2, heads=2)
    return folder


def first_line(file, at, value):
    """A table's text, with a cell of its first row changed."""
    lines = file.read_text().splitlines()
    names, row = lines[0].split(","), lines[1].split(",")
    row[names.index(at)] = value
    return "\n".join([lines[0], ",".join(row), *lines[2:]])


NESTED = "[" * 100_000
TABLES = {
    "NaN in JSON": ("examples.json", '[{"attention": NaN}]'),
    "nested JSON": ("examples.json", NESTED),
    "a list of numbers": ("examples.json", "[1]"),
    "a number of 5,000 digits": ("examples.json", f"[{'9' * 5000}]"),
    "checkpoints as a number": ("collection.json", '{"checkpoints": 3}'),
    "checkpoints as text": ("collection.json", '{"checkpoints": ["x"]}'),
    "updates of two types": (
        "collection.json",
        '{"checkpoints": [{"updates": "x"}, {"updates": 3}]}',
    ),
    "a billionth layer": ("layers.csv", ("layer", "1000000000")),
    "a layer below 0": ("heads.csv", ("layer", "-1")),
    "half a head": ("heads.csv", ("head", "0.5")),
    "infinite updates": ("heads.csv", ("updates", "inf")),
    "an unknown place": ("layers.csv", ("place", "nowhere")),
    "zeros": ("layers.csv", "\0" * 1000),
}


@pytest.mark.parametrize("kind", TABLES)
def test_collection(kind, collected, refusal):
    name, text = TABLES[kind]
    file = collected / name
    kept = file.read_text()
    file.write_text(text if isinstance(text, str) else first_line(file, *text))
    try:
        refusal(lambda file: collection.read(file.parent), file, "collect again")
    finally:
        file.write_text(kept)


FIGURE = '{"monitor/updates": 3, "monitor/%s": %s}'
LOGS = {
    "text as a number": FIGURE % ("encoder.0/entropy", '"x"'),
    "a list as a number": FIGURE % ("encoder.0/entropy", "[1]"),
    "infinite updates": '{"monitor/updates": Infinity, "monitor/encoder.0/entropy": 1}',
    "a layer that is none": FIGURE % ("encoder.x/entropy", "1"),
    "a nested line": f'{{"monitor/updates": {NESTED}',
}


@pytest.mark.parametrize("kind", LOGS)
def test_log(kind, refusal, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(LOGS[kind])
    refusal(training_log.read, path, "monitor")


RESULT = {"experiment": "iwslt14", "row": "softmax", "metric": "BLEU", "value": 1.0, "seed": 1}
RESULT |= {"parameters": 1, "updates": 1, "tokens_per_second": 1, "seconds": 1, "peak_memory": 1}
RESULT |= {"signature": "s", "protocol": "p", "hardware": "h", "versions": {}, "commit": "c"}
LINES = {
    "nested": NESTED,
    "a list": "[1]",
    "versions that are none": json.dumps(RESULT | {"versions": [1]}),
    "a number past all": json.dumps(RESULT | {"value": 10**400}),
    "text as a number": json.dumps(RESULT | {"parameters": "x"}),
    "a row that is a list": json.dumps(RESULT | {"row": []}),
}


@pytest.mark.parametrize("kind", LINES)
def test_results(kind, refusal, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(LINES[kind])
    tabulate = str(ROOT / "scripts" / "tabulate")
    refusal(lambda path: main(tabulate, "tabulate", path), path, "results.jsonl of")


# --- fairseq's data ------------------------------------------------------------------------------


def index_field(at, form, *values):
    def change(index, _):
        index[at : at + struct.calcsize(form)] = struct.pack(form, *values)

    return change


def last_word(index, words):
    words[-2:] = b"\xff\xff"


INDICES = {
    "another magic": (index_field(0, "<9s", b"TNTIDX\1\1"), ".idx"),
    "another version": (index_field(9, "<Q", 7), ".idx"),
    "an unknown type": (index_field(17, "<B", 77), ".idx"),
    "words that are fractions": (index_field(17, "<B", 6), ".idx"),
    "a quintillion sentences": (index_field(18, "<Q", 1 << 60), ".idx"),
    "a sentence of fewer than no words": (index_field(26, "<i", -5), ".idx"),
    "a sentence longer than the data": (index_field(26, "<i", 1 << 30), ".bin"),
    "a sentence before the data": (lambda index, _: index.__setitem__(slice(-8, None), b"\xff" * 8),
                                   ".idx"),
    "a cut index": (lambda index, _: index.__delitem__(slice(40, None)), ".idx"),
    "an index of a few bytes": (lambda index, _: index.__delitem__(slice(12, None)), ".idx"),
    "an empty index": (lambda index, _: index.clear(), ".idx"),
    "no data": (lambda _, words: words.clear(), ".bin"),
    "cut data": (lambda _, words: words.__delitem__(slice(-2, None)), ".bin"),
    "a word that the dictionary lacks": (last_word, ".bin"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDICES)
def test_binary_data(kind, data, refusal, tmp_path):
    change, suffix = INDICES[kind]
    index = bytearray((data / "lm" / "train.idx").read_bytes())
    words = bytearray((data / "lm" / "train.bin").read_bytes())
    change(index, words)
    path = tmp_path / "train"
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(words)
    dictionary = Dictionary.load(str(data / "lm" / "dict.txt"))

    def read(_):
        data_utils.load_indexed_dataset(str(path), dictionary, "mmap")

    refusal(read, path.with_suffix(suffix), "prepare the data again")


DICTIONARIES = {
    "no UTF-8": b"\xff 3\n",
    "a word twice": b"a 3\na 2\n",
    "no count": b"word\n",
    "a count that is none": b"word x\n",
    "a count of 5,000 digits": b"word " + b"9" * 5000 + b"\n",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("kind", DICTIONARIES)
def test_dictionary(kind, refusal, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(DICTIONARIES[kind])
    refusal(lambda path: Dictionary.load(str(path)), path, "prepare the data again")
