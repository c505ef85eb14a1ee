"""The build of the compiled kernels: kept and found again, or plain PyTorch and the reason."""

import errno
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from commands import run

from multimax_fairseq.ops import build

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() not in build.MARCH,
    reason="no CPU kernels for this machine: plain PyTorch is used",
)

FLAGS = ["-shared", "-fPIC"]
# A process of its own, where a crash would end the tests; without the package, it starts sooner.
KERNELS = str(Path(build.__file__).parent)
LOAD = """
import logging, sys
from pathlib import Path
logging.basicConfig()
import build
build.SOURCE = Path(sys.argv[1])
for flag in sys.argv[2:]:
    build.load(["-shared", "-fPIC", flag])
    print("loaded", flag, flush=True)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A library of all symbols that compiles in no time: its source, and next to it the result."""
    source = tmp_path_factory.mktemp("stand_in") / "cpu.cpp"
    functions = [f'extern "C" int {name}(int) {{ return 1; }}\n' for name in build.SYMBOLS]
    source.write_text("".join(functions))
    subprocess.run(["c++", *FLAGS, source, "-o", source.with_suffix(".so")], check=True)
    return source


@pytest.fixture
def cache(stand_in, tmp_path, monkeypatch):
    """The cache folder of a machine that builds the stand-in."""
    monkeypatch.setattr(build, "SOURCE", stand_in)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    yield tmp_path / "cache" / "multimax_fairseq"
    assert not list((tmp_path / "temporary").iterdir()), "something was left behind"
    build.library.cache_clear()


@pytest.fixture
def compiler(stand_in, tmp_path, monkeypatch):
    """compiler(script) makes it what CXX names; $out is the file to write, $made a good one."""

    def make(script, name="compiler"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        made = stand_in.with_suffix(".so")
        path.write_text(f"#!/bin/sh\nfor out; do :; done\nmade={made}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


COPY = 'cp "$made" "$out"'


def files(folder):
    return sorted(path.name for path in folder.rglob("*"))


def why_plain(caplog, failed="compiled"):
    """The reason that is logged, once, where there is no library."""
    build.library.cache_clear()
    caplog.clear()
    assert build.library() is None
    *_, message = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    found = re.fullmatch(
        rf"the CPU kernels could not be {failed} \((.*)\): plain PyTorch is used, which is slower; "
        r".*\bCXX\b.*\bTORCH_EXTENSIONS_DIR\b.*",
        message,
    )
    assert found, message
    return found[1]


def test_every_function_of_the_source_is_looked_for():
    text = "".join(path.read_text() for path in build._sources())
    defined = re.findall(r'^extern "C" \w+ (\w+)\(', text, re.MULTILINE)
    assert sorted(defined) == sorted(build.SYMBOLS)


def test_the_kernels_are_built_once(cache):
    kernels = build.load(FLAGS)
    assert kernels.start(1) == 1
    [built] = cache.iterdir()
    assert re.fullmatch(r"cpu-[0-9a-f]{16}\.so", built.name)
    stamp = os.stat(built).st_mtime_ns
    assert build.load(FLAGS)._name == str(built) and os.stat(built).st_mtime_ns == stamp


def test_load_prints_one_line_about_a_compilation(cache, compiler, tmp_path, stand_in):
    compiler(COPY)
    without_logging = LOAD.replace("logging.basicConfig()", "")
    command = (tmp_path, sys.executable, "-c", without_logging, stand_in, "-D0")
    line = f"compiling multimax_fairseq's CPU kernels in {cache}: some 20 seconds\n"
    assert run(*command, PYTHONPATH=KERNELS) == f"{line}loaded -D0\n"
    assert run(*command, PYTHONPATH=KERNELS) == "loaded -D0\n"


def test_what_was_built_where_there_is_a_compiler_serves_where_there_is_none(cache, compiler):
    path = compiler(COPY)
    build.load(FLAGS)
    path.unlink()
    assert build.load(FLAGS).start(1) == 1


def test_a_kept_library_that_is_damaged_is_built_anew(cache, compiler, tmp_path, stand_in):
    compiler(COPY)
    sizes = [100, 4096, -1, None]
    kept = {}
    for size in sizes:
        build.load([*FLAGS, f"-D{size}"])
        [kept[size]] = set(cache.iterdir()) - set(kept.values())
        data = kept[size].read_bytes()
        # Another file, as the damage would reach what this process has mapped.
        kept[size].unlink()
        middle = len(data) // 2
        altered = data[:middle] + b"\xff" + data[middle + 1 :]
        kept[size].write_bytes(altered if size is None else data[:size])
    flags = [f"-D{size}" for size in sizes]
    printed = run(tmp_path, sys.executable, "-c", LOAD, stand_in, *flags, PYTHONPATH=KERNELS)
    for size in sizes:
        assert f"{kept[size]} is not as it was written: it is compiled anew" in printed
        assert f"loaded -D{size}\n" in printed
        assert kept[size].read_bytes() == data
    assert set(cache.iterdir()) == set(kept.values())


def test_a_library_is_for_one_source_torch_and_processor(cache, compiler, monkeypatch, tmp_path):
    compiler(COPY)
    names = set()

    def count(flags=FLAGS):
        build.load(flags)
        names.update(files(cache))
        return len(names)

    assert count() == 1
    assert count([*FLAGS, *build.MARCH["AVX2"]]) == 2
    assert count([*FLAGS, *build.MARCH["AVX512"]]) == 3
    source = tmp_path / "cpu.cpp"
    source.write_text("// changed")
    with monkeypatch.context() as other:
        other.setattr(build, "SOURCE", source)
        assert count() == 4
    with monkeypatch.context() as other:
        other.setattr(torch, "__version__", "99.0")
        assert count() == 5
    assert count() == 5


def test_a_compiler_that_hangs_is_stopped_with_all_that_it_started(
    cache, compiler, caplog, monkeypatch, tmp_path
):
    monkeypatch.setattr(build, "LIMIT", 2)
    path = compiler(f"sleep 600 & echo $! $$ > {tmp_path}/processes; wait")
    start = time.monotonic()
    assert why_plain(caplog) == f"'{path}': it was stopped after 2 seconds"
    assert time.monotonic() - start < 60
    for number in (tmp_path / "processes").read_text().split():
        status = Path("/proc", number, "status")
        for _ in range(50):
            if not status.exists() or "State:\tZ" in status.read_text():
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{number} is still there")
    assert files(cache) == []


def test_a_compiler_is_stopped_when_the_training_is(cache, compiler, tmp_path):
    compiler(f"echo $$ > {tmp_path}/process; exec sleep 600")
    wrote = tmp_path / "process"

    def interrupt():
        for _ in range(25_000):  # the compiler is stopped a little later by itself
            if wrote.exists() and wrote.read_text():
                time.sleep(0.5)  # until it is waited for
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                break
            time.sleep(0.01)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build.library()
    thread.join()
    assert not Path("/proc", wrote.read_text().strip()).exists()
    assert files(cache) == []


def test_a_compiler_that_leaves_a_process_behind_is_not_waited_for(cache, compiler, tmp_path):
    compiler(f"{COPY}; sleep 600 & echo $! > {tmp_path}/process")
    start = time.monotonic()
    try:
        build.load(FLAGS)
    finally:
        os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)
    assert time.monotonic() - start < 300


@pytest.mark.parametrize(
    "script, reason",
    [
        # bytes that are no UTF-8; and the line that matters among others
        (
            r"printf 'note\n\377\376 error: bad \377\n' >&2; exit 1",
            "\ufffd\ufffd error: bad \ufffd",
        ),
        ("echo 'ld: no -lc10'; echo 'error: ld returned 1' >&2; exit 1", "ld: no -lc10"),
        ("yes x | head -c 9000000 | tr -d '\\n' >&2; exit 1", "x" * 500),
        ("exit 3", "it ended with status 3, and no error"),
        ("echo >&2; exit 3", "it ended with status 3, and no error"),
        ("kill -9 $$", "it was ended by signal 9 (Killed)"),
        ("exit 0", "it wrote no library, and no error"),
        ('mkdir "$out"', "it wrote no library, and no error"),
    ],
)
def test_a_compiler_that_fails(cache, compiler, caplog, script, reason):
    path = compiler(script)
    assert why_plain(caplog) == f"'{path}': {reason}"
    assert files(cache) == []


@pytest.mark.parametrize(
    "script, reason",
    [
        (': > "$out"', "file too short"),
        ('echo rubbish, and more of it > "$out"', "(invalid ELF header|file too short)"),
        ('c++ -shared -fPIC -x c++ /dev/null -o "$out"', "undefined symbol: start"),
    ],
)
def test_a_compiler_that_writes_no_library(cache, compiler, caplog, script, reason):
    path = compiler(script)
    found = why_plain(caplog)
    assert re.fullmatch(f"'{path}': what it wrote does not load: .*{reason}", found), found
    assert files(cache) == []


def test_a_compiler_that_writes_half_a_library(cache, compiler, tmp_path, stand_in):
    path = compiler('head -c 4096 "$made" > "$out"')
    command = (tmp_path, sys.executable, "-c", LOAD, stand_in, "-D0")
    printed = run(*command, code=1, PYTHONPATH=KERNELS)
    assert f"'{path}': what it wrote does not load: it was ended by signal" in printed
    assert files(cache) == []


@pytest.mark.parametrize("python", [None, ""])
def test_a_program_that_holds_a_python_without_a_name(cache, compiler, caplog, monkeypatch, python):
    path = compiler(COPY)
    monkeypatch.setattr(sys, "executable", python)
    assert why_plain(caplog).startswith(f"'{path}': what it wrote does not load: ")
    assert files(cache) == []


@pytest.mark.parametrize(
    "named, reason",
    [
        ("/none/c++", "'/none/c++': No such file or directory"),
        ("none-such -pipe", "'none-such': No such file or directory"),
        ("/", "'/': Permission denied"),
        ("/dev/null", "'/dev/null': Permission denied"),
        ('c++ "-pipe', "CXX 'c++ \"-pipe': No closing quotation"),
        ("\udcff", r"'\udcff': No such file or directory"),
    ],
    ids=ascii,
)
def test_a_compiler_that_is_none(cache, caplog, monkeypatch, named, reason):
    monkeypatch.setenv("CXX", named)
    assert why_plain(caplog) == reason


def test_a_compiler_of_another_kind(cache, compiler, caplog):
    path = compiler("")
    path.write_bytes(b"\x7fELF of another processor")
    assert why_plain(caplog) == f"'{path}': Exec format error"


@pytest.mark.parametrize("named", [None, "", "  "])
def test_without_a_name_the_default_compiler_builds(cache, compiler, monkeypatch, named):
    folder = compiler(COPY, name="c++").parent
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    if named is None:
        monkeypatch.delenv("CXX")
    else:
        monkeypatch.setenv("CXX", named)
    assert build.load(FLAGS).start(1) == 1


@pytest.mark.parametrize("named", ["c++ -pipe", "env c++", " c++  '-pipe' "])
def test_a_compiler_may_be_named_with_arguments(cache, monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert build.load(FLAGS).start(1) == 1


def test_a_compiler_may_be_named_with_a_space(cache, compiler):
    compiler(COPY, name="my compiler")
    assert build.load(FLAGS).start(1) == 1


def a_file_in_its_place(cache, monkeypatch):
    cache.parent.write_text("")


def a_file_further_up(cache, monkeypatch):
    cache.parent.write_text("")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(cache.parent / "more"))


def no_folder_can_be_made(cache, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/cache")


def no_home(cache, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "~nobody-of-that-name/cache")


def read_only(cache, monkeypatch):
    """As for a user who is not root, whom no mode stops."""
    make = os.mkdir

    def mkdir(path, *args):
        if cache in Path(path).parents:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        make(path, *args)

    monkeypatch.setattr(os, "mkdir", mkdir)


def full_disk(cache, monkeypatch):
    write = build._write

    def full(path, data):
        if cache in path.parents:
            path.write_bytes(data[:4096])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    monkeypatch.setattr(build, "_write", full)


def noexec(cache, monkeypatch):
    state = os.statvfs

    def statvfs(path):
        flags = os.ST_NOEXEC if cache in (path, *path.parents) else 0
        return types.SimpleNamespace(f_flag=state(path).f_flag | flags)

    monkeypatch.setattr(os, "statvfs", statvfs)


def a_folder_in_the_place_of_the_library(cache, monkeypatch):
    build.load(FLAGS)
    [kept] = cache.iterdir()
    kept.unlink()
    kept.mkdir()


def a_library_of_another_system(cache, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TORCH_EXTENSIONS_DIR", str(cache.parent / "elsewhere"))
        build.load(FLAGS)
    [kept] = cache.parent.rglob("*.so")
    cache.mkdir()
    foreign = b"no library here" * 100
    (cache / kept.name).write_bytes(foreign + hashlib.sha256(foreign).digest())


@pytest.mark.parametrize(
    "trouble, word",
    [
        (a_file_in_its_place, "Not a directory"),
        (a_file_further_up, "Not a directory"),
        (no_folder_can_be_made, "No such file or directory"),
        (no_home, "there is no such home folder"),
        (read_only, "Read-only file system"),
        (full_disk, "No space left on device: '/"),
        (noexec, "mounted noexec"),
        (a_folder_in_the_place_of_the_library, "Is a directory"),
        (a_library_of_another_system, "invalid ELF header"),
    ],
)
def test_where_nothing_can_be_kept_a_process_builds_for_itself(
    cache, compiler, caplog, monkeypatch, trouble, word
):
    compiler(COPY)
    trouble(cache, monkeypatch)
    before = files(cache.parent)
    assert build.load(FLAGS).start(1) == 1
    *_, message = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert message.startswith("the CPU kernels cannot be kept (") and word in message
    assert message.endswith("TORCH_EXTENSIONS_DIR names another folder")
    assert set(files(cache.parent)) <= {*before, cache.name}


def damaged(cache, monkeypatch):
    build.load(FLAGS)
    [kept] = cache.iterdir()
    data = kept.read_bytes()
    kept.unlink()  # this process has it mapped
    kept.write_bytes(data[:100])


@pytest.mark.parametrize(
    "trouble, reason",
    [
        (damaged, r"/cpu-\w+\.so is not as it was written"),
        (a_library_of_another_system, "invalid ELF header"),
    ],
)
def test_what_is_kept_and_cannot_be_loaded_is_called_so(
    cache, compiler, caplog, monkeypatch, trouble, reason
):
    path = compiler(COPY)
    monkeypatch.setattr(build, "FLAGS", FLAGS)
    monkeypatch.setattr(build, "MARCH", dict.fromkeys(build.MARCH, []))
    trouble(cache, monkeypatch)
    path.unlink()
    found = why_plain(caplog, rf"loaded \(.*{reason}\) nor compiled")
    assert found == f"'{path}': No such file or directory"


def test_where_nothing_can_be_loaded_from_that_is_said(cache, compiler, caplog, monkeypatch):
    compiler(COPY)
    state = os.statvfs
    everywhere = lambda path: types.SimpleNamespace(f_flag=state(path).f_flag | os.ST_NOEXEC)  # noqa: E731
    monkeypatch.setattr(os, "statvfs", everywhere)
    assert why_plain(caplog, "loaded").endswith("is on a file system mounted noexec")


def test_what_a_killed_process_left_is_removed(cache, compiler, stand_in, tmp_path):
    """And nothing of a process that still compiles."""
    compiler(f"echo $$ > {tmp_path}/process; exec sleep 600")
    killed = subprocess.Popen(
        [sys.executable, "-c", LOAD, stand_in, "-D0"], env=os.environ | {"PYTHONPATH": KERNELS}
    )
    wrote = tmp_path / "process"
    while not (wrote.exists() and wrote.read_text().strip()):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    os.kill(int(wrote.read_text()), signal.SIGKILL)
    [left] = cache.iterdir()
    compiler(COPY)
    build.load(FLAGS)
    assert left.exists()  # for all that this process knows, the other still compiles
    long_ago = time.time() - build.ABANDONED - 60
    os.utime(left, (long_ago, long_ago))
    build.load(FLAGS)
    assert [path.suffix for path in cache.iterdir()] == [".so"]


def test_where_nothing_can_be_written_plain_pytorch_is_used(cache, caplog, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/proc/cache")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/temporary")
    assert "No such file or directory: '/proc/temporary'" in why_plain(caplog)


@pytest.mark.parametrize("named", ["here/cache", "~/cache"])
def test_the_folder_may_be_relative_or_at_home(cache, compiler, monkeypatch, tmp_path, named):
    compiler(COPY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", named)
    build.load(FLAGS)
    assert len(list(tmp_path.glob("here/cache/multimax_fairseq/cpu-*.so"))) == 1
    assert not (tmp_path / "~").exists()


def test_processes_that_build_at_once_all_get_a_library(cache, compiler, tmp_path, stand_in):
    # Each waits until the other compiles as well.
    compiler(
        f"touch {tmp_path}/$$.started; "
        f"for i in $(seq 200); do [ $(ls {tmp_path} | grep -c started) = 2 ] && break; "
        f"sleep 0.1; done; {COPY}"
    )
    printed = []

    def load_elsewhere():
        command = (tmp_path, sys.executable, "-c", LOAD, stand_in, "-D0")
        printed.append(run(*command, PYTHONPATH=KERNELS))

    thread = threading.Thread(target=load_elsewhere)
    thread.start()
    assert build.load([*FLAGS, "-D0"]).start(1) == 1
    thread.join()
    assert printed[0].splitlines()[1:] == ["loaded -D0"]
    assert len(list(tmp_path.glob("*.started"))) == 2
    [kept] = cache.iterdir()
    assert build.load([*FLAGS, "-D0"])._name == str(kept)


def test_without_a_compiler_plain_pytorch_is_used_and_the_log_says_so(tmp_path):
    script = """
import logging, torch
logging.basicConfig()
from multimax_fairseq import Modulator
print(Modulator(init_std=1.0)(torch.zeros(3)).shape)
"""
    elsewhere = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "CXX": str(tmp_path / "none")}
    printed = run(tmp_path, sys.executable, "-c", script, **elsewhere)
    assert "torch.Size([3])" in printed and "plain PyTorch is used" in printed
    assert not list(tmp_path.glob("built/**/*.so"))
    refused = run(
        tmp_path, sys.executable, "-c", script, code=1, MULTIMAX_BACKEND="cpp", **elsewhere
    )
    assert "MULTIMAX_BACKEND 'cpp' needs a C++ compiler" in refused
