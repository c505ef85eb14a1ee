"""Downloads, checks and reads archives, and compares counts with those of official archives."""

import contextlib
import errno
import hashlib
import http.client
import lzma
import re
import tarfile
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from urllib.error import HTTPError, URLError

from steps import alone, fail, say, warn

LABELS = {"md5": "MD5", "sha256": "SHA-256"}
BLOCK = 1 << 18
TOLERANCE = 0.005  # relative, for counts that depend on the tokenizer


# --- checksums and downloads ---------------------------------------------------------------------


class Official(NamedTuple):
    """An archive as published by its authors; checksum and size are None if they are unknown."""

    name: str
    urls: tuple[str, ...]
    checksum: str | None = None  # "md5=HEX" or "sha256=HEX"
    size: int | None = None  # in bytes


class Archive(NamedTuple):
    path: Path
    identity: str  # equal for equal contents
    official: bool


class HostFailed(Exception):
    """A host failed; the next one may work."""


def digest(file: Path, algorithm: str = "sha256") -> str:
    with file.open("rb") as f:
        return hashlib.file_digest(f, algorithm).hexdigest()


def mismatch(file: Path, checksum: str | None, size: int | None = None) -> str | None:
    """Why the file does not have this checksum, or else this size; None if it has."""
    if checksum is None:
        found_size = file.stat().st_size
        return None if size in (None, found_size) else f"has {found_size:,} bytes, not {size:,}"
    algorithm, _, expected = checksum.partition("=")
    found = digest(file, algorithm)
    if found == expected:
        return None
    return f"has the {LABELS[algorithm]} {found}, not {expected}"


def check(file: Path, checksum: str | None, size: int | None = None) -> None:
    if wrong := mismatch(file, checksum, size):
        fail(f"{file} {wrong}: nothing was unpacked; remove it.")


def split_checksum(given: str) -> tuple[str, str | None]:
    """ "PATH_OR_URL#sha256=HEX" as (PATH_OR_URL, "sha256=HEX")."""
    match = re.fullmatch(r"(.*)#(md5|sha256)=(.*)", given, re.DOTALL)
    if not match:
        return given, None
    source, algorithm, value = match.groups()
    if (
        not re.fullmatch(r"[0-9a-fA-F]*", value)
        or len(value) != {"md5": 32, "sha256": 64}[algorithm]
    ):
        fail(f"'{value}' is not the {LABELS[algorithm]} of a file: state it in hexadecimal digits.")
    return source, f"{algorithm}={value.lower()}"


def obtain(official: Official, given: str | None, folder: Path) -> Archive:
    """The archive that --archive names (a file or an address), or else the official one.

    Downloads go to `folder`.
    """
    source, stated = split_checksum(given) if given is not None else ("", None)
    if given is not None and "://" not in source:
        path = Path(source)
        if not path.is_file():
            state = "is a folder" if path.is_dir() else "does not exist"
            fail(f"--archive {path} {state}: pass a file, or an address.")
        if stated:
            check(path, stated)
    else:
        checksum, name = stated or official.checksum, official.name
        if checksum != official.checksum:  # do not replace the official one
            base = PurePosixPath(urllib.parse.urlsplit(source).path).name
            name = f"{checksum.partition('=')[2][:12]}-{base}"
        path = folder / name
        size = official.size if checksum == official.checksum else None
        download((source,) if source else official.urls, path, checksum, size)
    is_known = given is None or official.checksum or official.size
    is_official = is_known and mismatch(path, official.checksum, official.size) is None
    found = Archive(path, digest(path), bool(is_official))
    if not found.official:
        say(
            f"{path} is not the official archive (its SHA-256 is {found.identity}):"
            " official counts are not checked."
        )
    return found


def obtain_all(official: Iterable[Official], given: str | None, folder: Path) -> list[Archive]:
    """Like `obtain` for several archives: --archive is a folder or an address that holds them."""
    return [obtain(each, given and f"{given.rstrip('/')}/{each.name}", folder) for each in official]


def download(
    urls: Iterable[str], target: Path, checksum: str | None, size: int | None = None
) -> None:
    """Download from the first host that has the right file.

    Data go to TARGET.part, from which the next host or the next run resumes. TARGET appears only
    with the right checksum, or with the right size if no checksum is known.
    """
    part = target.with_name(f"{target.name}.part")
    hosts = []
    with alone(target):
        if target.exists():  # another run may have made it meanwhile
            check(target, checksum, size)
            return
        is_known = checksum or size
        if part.exists() and is_known and not mismatch(part, checksum, size):
            part.rename(target)
            return
        for url in urls:
            host = "{0.scheme}://{0.netloc}".format(urllib.parse.urlsplit(url))
            hosts.append(host)
            say(f"Downloading {url}")
            try:
                resumed = part.exists()
                transfer(url, part)
                if resumed and mismatch(part, checksum, size):
                    say(
                        f"{host}: the partial file of an earlier run does not match; starting over."
                    )
                    part.unlink()
                    transfer(url, part)
            except HostFailed as error:
                say(f"{host}: {error}")
                continue
            wrong = mismatch(part, checksum, size)
            if not wrong:
                part.rename(target)
                return
            part.unlink()
            say(f"{host}: {target.name} {wrong}")
    facts = ", ".join(filter(None, (size and f"{size:,} bytes", checksum))) or "checksum unknown"
    fail(
        f"could not download {target.name} from {', '.join(hosts)}: get the file ({facts}) by hand"
        f" and put it at {target}, or see --archive in --help."
    )


def transfer(url: str, part: Path) -> None:
    """Append the missing bytes to `part`; download all if the host does not support ranges."""
    from tqdm import tqdm

    have = part.stat().st_size if part.exists() else 0
    headers = {
        # Some hosts refuse unknown clients.
        "User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }
    if have:
        headers["Range"] = f"bytes={have}-"
    with contextlib.ExitStack() as stack:
        try:
            with network():
                request = urllib.request.Request(url, headers=headers)
                response = stack.enter_context(urllib.request.urlopen(request, timeout=60))
        except HostFailed as error:
            cause = error.__cause__
            if have and isinstance(cause, HTTPError) and cause.code == 416:
                part.unlink()  # longer than the host's file
                return transfer(url, part)
            raise
        if response.status != 206:
            have = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise HostFailed("it sent another range of bytes than requested")
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdecimal() else None
        file = stack.enter_context(part.open("ab" if have else "wb"))
        bar = stack.enter_context(
            tqdm(total=total, initial=have, unit="B", unit_scale=True, disable=None)
        )
        while True:
            with network():
                block = response.read(BLOCK)
            if not block:
                break
            file.write(block)
            bar.update(len(block))
    if total is not None and (got := part.stat().st_size) < total:
        raise HostFailed(f"the connection ended after {got:,} of {total:,} bytes")


@contextlib.contextmanager
def network() -> Iterator[None]:
    """Turn network errors, but not disk errors, into HostFailed."""
    try:
        yield
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = error
        if isinstance(error, URLError) and not isinstance(error, HTTPError):
            reason = error.reason  # without urllib's own prefix
        raise HostFailed(str(reason) or type(reason).__name__) from error


# --- reading archives ----------------------------------------------------------------------------


@contextlib.contextmanager
def readable(archive: Path) -> Iterator[None]:
    try:
        yield
    except (
        *(EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
        # zipfile: encrypted, or an unknown compression
        *(RuntimeError, NotImplementedError),
        *(OSError, ValueError),  # includes the errors of gzip, bz2 and pyarrow
        KeyError,  # a missing member
    ) as error:
        # Errors of the disk have an errno; EINVAL is an impossible position in the file.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0].rstrip(":")
        fail(f"{archive} is truncated or corrupt, or not such an archive ({reason}): get it again.")


def check_member(archive: Path, name: str, plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    if not plain or path.is_absolute() or ".." in path.parts:
        fail(
            f"{archive} holds '{name}', a link, a device or a path that leaves its folder:"
            " nothing was unpacked; get another archive."
        )


def choose(archive: Path, members: Iterable[tuple[str, object]], name: str) -> object:
    """The only member whose path ends in this name."""
    found = [member for path, member in members if PurePosixPath(path).match(name)]
    if len(found) != 1:
        fail(f"{archive} holds {len(found) or 'no'} files {name}, where one is needed.")
    return found[0]


@contextlib.contextmanager
def opened_tar(
    archive: Path,
) -> Iterator[tuple[tarfile.TarFile, list[tuple[str, tarfile.TarInfo]]]]:
    """Yield the archive and its files, checked; nothing is written to a path from it."""
    with readable(archive), tarfile.open(archive) as tar:
        for member in tar:
            check_member(archive, member.name, member.isfile() or member.isdir())
        while tar.fileobj.read(BLOCK):  # to the end, where gzip has its checksum
            pass
        yield tar, [(member.name, member) for member in tar.getmembers() if member.isfile()]


def read_paths(archive: Path, pattern: re.Pattern[str]) -> dict[str, bytes]:
    """The contents of the members whose whole paths match."""
    with opened_tar(archive) as (tar, files):
        return {
            path: tar.extractfile(member).read()
            for path, member in files
            if pattern.fullmatch(path)
        }


def read_tar(archive: Path, names: Iterable[str] | re.Pattern[str]) -> dict[str, bytes]:
    """The contents of the members whose paths end in these names, or whose base names match."""
    with opened_tar(archive) as (tar, files):
        if isinstance(names, re.Pattern):
            bases = {PurePosixPath(path).name for path, _ in files}
            names = sorted(filter(names.fullmatch, bases))
        chosen = {name: choose(archive, files, name) for name in names}
        # In the archive's order: going back would decompress from the start again.
        order = sorted(chosen, key=lambda name: chosen[name].offset)
        return {name: tar.extractfile(chosen[name]).read() for name in order}


def read_zip(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the members whose paths end in these names."""
    with readable(archive), zipfile.ZipFile(archive) as file:
        members = zip_members(archive, file)
        return {name: file.read(choose(archive, members, name)) for name in names}


def zip_members(archive: Path, file: zipfile.ZipFile) -> list[tuple[str, zipfile.ZipInfo]]:
    members = file.infolist()
    for member in members:
        kind = member.external_attr >> 28  # file type of the Unix mode; 0 if there is none
        check_member(archive, member.filename, kind in (0, 0o04, 0o10))
    return [(member.filename, member) for member in members if member.filename[-1:] != "/"]


# --- counts --------------------------------------------------------------------------------------


def differing_counts(
    what: str,
    expected: dict[str, int],
    found: dict[str, int],
    remedy: str,
    tokenized: Collection[str] = (),
) -> dict[str, dict[str, int]]:
    """{split: counts} where the count of an official text differs from the expected one.

    Counts of the splits in `tokenized` depend on the tokenizer's version. They may differ by less
    than TOLERANCE, with a warning. Any other difference is an error.
    """
    differing = {
        split: {"expected": count, "found": found[split]}
        for split, count in expected.items()
        if found[split] != count
    }
    sentences = {
        split: f"{split} has {counts['found']:,} {what}, but {counts['expected']:,} are expected"
        for split, counts in differing.items()
    }
    for split, counts in differing.items():
        apart = abs(counts["found"] - counts["expected"])
        if split not in tokenized or apart >= TOLERANCE * counts["expected"]:
            fail(f"{sentences[split]} of the official text: {remedy}.")
    for sentence in sentences.values():
        warn(f"{sentence}; the difference is small, and the signature of results will name it.")
    return differing
