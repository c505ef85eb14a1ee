"""Malicious archives are refused with one sentence, and nothing is unpacked.

test_data_prep.py tests paths outside of the folder, links and accidental damage.
"""

import gzip
import struct
import tarfile
import zipfile

import archives
import pytest
import wikitext103
from hostile import END, WIKI, header, refuses, zipped

pytestmark = pytest.mark.long

TARS = {
    "pipe": (lambda: header(kind=tarfile.FIFOTYPE) + END, "nothing was unpacked"),
    "block device": (lambda: header(kind=tarfile.BLKTYPE) + END, "nothing was unpacked"),
    "unknown kind of member": (lambda: header(kind=b"Z") + END, "nothing was unpacked"),
    "a member twice": (lambda: header() + header() + END, "holds 2 files a.txt"),
    "an archive in an archive": (
        lambda: gzip.compress(gzip.compress(header() + END)),
        "truncated or corrupt",
    ),
    "cut": (lambda: header(size=2000, data=bytes(1500)), "truncated or corrupt"),
}


@pytest.mark.parametrize("kind", TARS)
def test_read_tar_refuses_hostile_archives(kind, tmp_path):
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
    "more than it declares": (
        WIKI,
        {"change": in_directory(24, struct.pack("<I", 60))},
        "truncated or corrupt",
    ),
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
def test_zip_members_refuses_hostile_archives(kind, tmp_path):
    members, how, words = ZIPS[kind]
    path = tmp_path / "wiki.zip"
    path.write_bytes(zipped(*members, **how))
    refuses(read_zip, path, words)
