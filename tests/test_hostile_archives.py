"""Malicious archives are refused with one sentence, and nothing is unpacked.

test_data_prep.py tests paths outside of the folder, links and accidental damage.
"""

import bz2
import gzip
import struct
import tarfile
import zipfile

import archives
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import wikitext103
from hostile import END, WIKI, header, refuses, zipped

pytestmark = pytest.mark.long

PAX = {"size": 10, "kind": tarfile.XHDTYPE, "data": b"10 a=bcde\n"}


def sparse():
    """A sparse file of 8 GiB that stores nothing."""
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
def test_read_tar_refuses_hostile_archives(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 24)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2500)
    path = tmp_path / "a.tar"
    path.write_bytes(TARS[kind][0]())
    refuses(lambda path: archives.read_tar(path, ["a.txt"]), path, TARS[kind][1])


def in_directory(offset, value):
    """Change a field of the first entry and of its entry in the central directory."""

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
                list(stream)


@pytest.mark.parametrize("kind", ZIPS)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_zip_members_refuses_hostile_archives(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 24)
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2500)
    members, how, words = ZIPS[kind]
    path = tmp_path / "wiki.zip"
    path.write_bytes(zipped(*members, **how))
    refuses(read_zip, path, words)


def test_parquet_lines_limits_the_unpacked_size(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_BYTES", 1 << 26)
    path = tmp_path / "train.parquet"
    lines = pyarrow.DictionaryArray.from_arrays(np.zeros(1 << 20, np.int32), ["x" * (1 << 16)])
    table = pyarrow.table({"text": lines})
    pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 1 << 20

    def read(path):
        with path.open("rb") as file:
            for _ in wikitext103.parquet_lines(file, path):
                pass

    refuses(read, path, "unpacks to more than")
