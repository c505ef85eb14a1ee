"""Randomly damaged files are read as before, or refused with one of this project's errors.

Readers never raise another error, crash, write a file, or exceed limits of memory and time. The
tests print the number of files. `scripts/test.sh --all` tries a thousand for each reader.
"""

import argparse
import copy
import io
import random
import re
import shutil
import tarfile
import zipfile

import archives
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import wikitext103
from corpus import ENGLISH
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from hostile import WIKI, bounded, zipped

from multimax_fairseq import compat

pytestmark = pytest.mark.long

ARCH = "transformer_multimax"
NUMBERS = [
    *("-1", "0", "1e999", "-0.0", "NaN", "Infinity", "null", '"x"', "[]", "{}", "9" * 30, "1.5"),
    *("4294967296", "-9223372036854775809"),
]
BYTES = [bytes(4), b"\xff" * 4, b"\xff" * 8, b"\x7f" + b"\xff" * 3, b"\xff\xff\xff\x7f", b"\x80"]
EXTREMES = [
    *(None, True, -1, 0, 10**9, 1 << 63, 1e308, float("nan"), float("inf"), "", "x", "9**9**9"),
    *("__import__('os').getcwd()", "${oc.env:HOME}", (), [], {}, [[]], {"a": {}}, b"x"),
    *(torch.zeros(2), torch.zeros(0), torch.ones(2).bool(), np.zeros(3), argparse.Namespace()),
]


# --- mutations -----------------------------------------------------------------------------------


def damage(draw, data):
    """Flip, cut, double, swap or remove bytes, or replace numbers by extreme ones."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if not data:
            break
        start = draw.randrange(len(data))
        end = min(len(data), start + draw.choice([1, 2, 8, 64, 512]))
        kind = draw.randrange(8)
        if kind == 0:
            data[start] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[start:]
        elif kind == 2:
            del data[start:end]
        elif kind == 3:
            data[start:start] = data[start:end]
        elif kind == 4:
            other = draw.randrange(len(data))
            data[other : other + end - start] = data[start:end]
        elif kind == 5:
            value = draw.choice(BYTES)
            data[start : start + len(value)] = value
        elif kind == 6:
            data[start:end] = draw.randbytes(end - start)
        elif found := list(re.finditer(rb"-?\d+(\.\d+)?", data)):
            match = draw.choice(found)
            data[match.start() : match.end()] = draw.choice(NUMBERS).encode()
    return bytes(data)


def damage_file(*names):
    """Return a function that damages one of these files in a folder."""

    def mutate(draw, folder):
        file = folder / draw.choice(names)
        file.write_bytes(damage(draw, file.read_bytes()))

    return mutate


def damage_member(*names):
    """Return a function that swaps, removes or damages members of a zip; checksums stay right."""

    def mutate(draw, folder):
        file = folder / names[0]
        with zipfile.ZipFile(file) as old:
            members = {name: old.read(name) for name in old.namelist()}
        name, other = draw.sample([*members], 2)
        kind = draw.randrange(6)
        if kind == 0:
            members[name], members[other] = members[other], members[name]
        elif kind == 1:
            del members[name]
        else:
            name = next(m for m in members if m.endswith(names[1])) if kind > 2 else name
            members[name] = damage(draw, members[name])
        with zipfile.ZipFile(file, "w") as new:
            for name, data in members.items():
                new.writestr(name, data)

    return mutate


def inner(value):
    """Yield the entries of a nested value as (container, key) pairs."""
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(pairs):
        yield value, key
        if isinstance(item, dict | list | argparse.Namespace):
            yield from inner(item)


def other_values(draw, folder):
    """Replace some values of a checkpoint by values of any type."""
    file = folder / "file.pt"
    state = torch.load(file, weights_only=False)  # our own
    for _ in range(draw.choice([1, 1, 2, 5])):
        container, key = draw.choice([*inner(state)])
        kind = draw.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1:
            other, at = draw.choice([*inner(state)])
            container[key] = copy.deepcopy(other[at])
        else:
            container[key] = copy.deepcopy(draw.choice(EXTREMES))
    torch.save(state, file)


# --- readers -------------------------------------------------------------------------------------


def text_files():
    lines = ENGLISH.splitlines()
    return {f"{name}.txt": "\n".join(lines[:n]).encode() for name, n in (("a", 3), ("b", 9))}


def tar_of(mode):
    def make(folder):
        with tarfile.open(folder / "file", f"w:{mode}") as tar:
            for name, data in text_files().items():
                member = tarfile.TarInfo(f"folder/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))

    return make


def read_tar(folder):
    return archives.read_tar(folder / "file", re.compile(r".*\.txt"))


def make_zip(folder):
    (folder / "file").write_bytes(zipped(*WIKI))


def read_zip(folder):
    path = folder / "file"
    with archives.readable(path):
        file = zipfile.ZipFile(path)
    with file:
        found = {}
        for split, files in wikitext103.zip_source(path, file).items():
            with archives.readable(path), files[0][1]() as stream:
                found[split] = [*stream]
    return found


def make_parquet(folder):
    table = pyarrow.table({"text": ENGLISH.splitlines(), "number": [*range(24)]})
    pyarrow.parquet.write_table(table, folder / "train.parquet")


def read_parquet(folder):
    path = folder / "train.parquet"
    with archives.readable(path), path.open("rb") as file:
        return [*wikitext103.parquet_lines(file, path)]


def read_checkpoint(folder):
    load = checkpoint_utils.load_model_ensemble_and_task
    ((model,), _, _) = load([str(folder / "file.pt")])
    return {name: value.tolist() for name, value in model.state_dict().items()}


def read_data(folder):
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    data = data_utils.load_indexed_dataset(str(folder / "train"), dictionary, "mmap")
    assert all(0 <= word < len(dictionary) for sentence in data for word in sentence.tolist())


def read_dictionary(folder):
    Dictionary.load(str(folder / "dict.txt"))


# {name: (maker of a valid file, mutation, reader, whether the reader detects every alteration)}.
# Without a checksum, a reader returns the altered contents.
READERS = {
    "tar": (tar_of(""), damage_file("file"), read_tar, False),
    "tar.gz": (tar_of("gz"), damage_file("file"), read_tar, True),
    "tar.bz2": (tar_of("bz2"), damage_file("file"), read_tar, True),
    "tar.xz": (tar_of("xz"), damage_file("file"), read_tar, True),
    "zip": (make_zip, damage_file("file"), read_zip, True),
    "Parquet": (make_parquet, damage_file("train.parquet"), read_parquet, False),
    "checkpoint": ("pt", damage_file("file.pt"), read_checkpoint, True),
    "checkpoint's members": ("pt", damage_member("file.pt", "data.pkl"), read_checkpoint, False),
    "checkpoint's values": ("pt", other_values, read_checkpoint, False),
    "checkpoint of old torch": ("old", damage_file("file.pt"), read_checkpoint, False),
    "fairseq's data": ("data", damage_file("train.idx", "train.bin"), read_data, False),
    "fairseq's dictionary": ("data", damage_file("dict.txt"), read_dictionary, False),
}


@pytest.fixture
def valid(data, checkpoint, tmp_path):
    """valid(how) -> a folder with a valid file."""

    def make(how):
        folder = tmp_path / "valid"
        folder.mkdir()
        if callable(how):
            how(folder)
        elif how == "data":
            for name in ("train.idx", "train.bin", "dict.txt"):
                shutil.copy(data / "lm" / name, folder)
        else:
            state = torch.load(checkpoint(ARCH), weights_only=False)  # our own file
            torch.save(state, folder / "file.pt", _use_new_zipfile_serialization=how == "pt")
        return folder

    return make


@pytest.fixture
def tried(valid, tmp_path, monkeypatch, capsys):
    """tried(reader, count): read a file damaged in `count` ways, the same in each run."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    compat.apply()

    def attempt(reader, count):
        make, mutate, read, is_known = READERS[reader]
        whole, folder = valid(make), tmp_path / "folder"
        expected = read(whole)
        refused = 0
        for seed in range(count):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            mutate(random.Random(f"{reader} {seed}"), folder)
            files = sorted(tmp_path.rglob("*"))
            try:
                with bounded():
                    found = read(folder)
            except (Exception, SystemExit) as error:
                is_told = isinstance(error, SystemExit) and isinstance(error.code, str)
                if not is_told and compat.explain(error) is None:
                    raise AssertionError(f"{reader}, seed {seed}") from error
                refused += 1
            else:
                assert not is_known or found == expected, f"{reader}, seed {seed}: other contents"
            assert sorted(tmp_path.rglob("*")) == files, f"{reader}, seed {seed}: files"
        with capsys.disabled():
            print(f"\n{reader}: {count} damaged files, {refused} refused, the others read")
        assert refused > count // 20

    return attempt


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")
def test_readers_refuse_or_read_damaged_files(reader, tried):
    tried(reader, 10 if "checkpoint" in reader else 25)  # a checkpoint takes a quarter of a second


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.filterwarnings("ignore")
def test_readers_refuse_or_read_a_thousand_damaged_files(reader, tried):
    tried(reader, 1000)
