"""Malicious arrays, results and data are refused in one sentence.

They run no code, write no files and take neither much memory nor time. Archives and checkpoints
are in test_hostile_archives.py and test_hostile_checkpoints.py.
"""

import io
import os
import pickle
import struct
import zipfile

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from hostile import CODE, Called, refuses

from multimax_fairseq.integrations.convert import paddlefleet

pytestmark = pytest.mark.long

# --- arrays, tables and lines --------------------------------------------------------------------


def npz(**changes):
    """Return the bytes of an .npz file with changed members."""
    stream, plain = io.BytesIO(), io.BytesIO()
    np.save(plain, np.zeros(4, np.float32))
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as file:
        for name, short in zip(paddlefleet.NAMES, ("ts", "ranges"), strict=True):
            file.writestr(f"{name}.npy", changes.get(short, lambda b: b)(plain.getvalue()))
    return stream.getvalue()


def numpy_header(text):
    """Return a function that replaces the header of an .npy file."""
    line = text.encode() + b"\n"
    return lambda data: data[:8] + struct.pack("<H", len(line)) + line + data[-16:]


def pickled(_):
    stream = io.BytesIO()
    np.save(stream, np.array([Called(os.system, "touch ran")] * 4), allow_pickle=True)
    return stream.getvalue()


HEADS = {
    "pickles": npz(ts=pickled),
    "a pickle instead of an archive": pickle.dumps(Called(os.system, "touch ran")),
    "a header that is code": npz(ts=numpy_header(CODE)),
}


@pytest.mark.parametrize("kind", HEADS)
def test_paddlefleet_read_runs_no_code(kind, tmp_path):
    path = tmp_path / "head.npz"
    path.write_bytes(HEADS[kind])
    refuses(paddlefleet.read, path, "numpy.savez")


NESTED = "[" * 100_000


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
    "missing data": (None, ".bin"),
    "cut data": (lambda _, words: words.__delitem__(slice(-2, None)), ".bin"),
    "a word that the dictionary lacks": (last_word, ".bin"),
}  # fmt: skip


@pytest.mark.parametrize("kind", INDICES)
def test_load_indexed_dataset_refuses_corrupt_files(kind, data, tmp_path):
    change, suffix = INDICES[kind]
    index = bytearray((data / "lm" / "train.idx").read_bytes())
    words = bytearray((data / "lm" / "train.bin").read_bytes())
    path = tmp_path / "train"
    if change is not None:
        change(index, words)
        path.with_suffix(".bin").write_bytes(words)
    path.with_suffix(".idx").write_bytes(index)
    dictionary = Dictionary.load(str(data / "lm" / "dict.txt"))

    def read(_):
        data_utils.load_indexed_dataset(str(path), dictionary, "mmap")

    refuses(read, path.with_suffix(suffix), "prepare the data again")


DICTIONARIES = {
    "no UTF-8": b"\xff 3\n",
    "a word twice": b"a 3\na 2\n",
    "no count": b"word\n",
    "a count that is none": b"word x\n",
    "a count of 5,000 digits": b"word " + b"9" * 5000 + b"\n",
    "zeros": bytes(1000),
}


@pytest.mark.parametrize("kind", DICTIONARIES)
def test_dictionary_load_refuses_corrupt_files(kind, tmp_path):
    path = tmp_path / "dict.txt"
    path.write_bytes(DICTIONARIES[kind])
    refuses(lambda path: Dictionary.load(str(path)), path, "prepare the data again")
