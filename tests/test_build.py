"""The build of the CPU kernels: compiled once, loaded from a private folder, or plain PyTorch."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from commands import ROOT, run

from multimax_fairseq.ops import build

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        sys.platform != "linux" or torch.backends.cpu.get_cpu_capability() not in build.MARCH,
        reason="no CPU kernels for this machine",
    ),
]

FLAGS = ["-shared", "-fPIC"]
COPY = 'cp "$made" "$out"'
# Imports only build.py, since importing the package takes longer.
LOAD = """
import sys
from pathlib import Path
import build
build.SOURCE = Path(sys.argv[1])
print("loaded", build.load(["-shared", "-fPIC"])._name)
"""


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """The source of a tiny library, with the compiled library beside it."""
    source = tmp_path_factory.mktemp("stand_in") / "cpu.cpp"
    source.write_text('extern "C" int start(void*) { return 1; }\n')
    subprocess.run(["c++", *FLAGS, source, "-o", source.with_suffix(".so")], check=True)
    return source


@pytest.fixture
def cache(stand_in, tmp_path, monkeypatch):
    """The cache folder of a machine that builds the stand-in."""
    monkeypatch.setattr(build, "SOURCE", stand_in)
    monkeypatch.setattr(build, "FLAGS", FLAGS)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    build.library.cache_clear()
    yield tmp_path / "cache" / "multimax_fairseq"
    build.library.cache_clear()


@pytest.fixture
def compiler(stand_in, tmp_path, monkeypatch):
    """compiler(script) sets CXX to it; $out is its output file, $made the compiled stand-in."""

    def make(script):
        path = tmp_path / "compiler"
        made = stand_in.with_suffix(".so")
        path.write_text(f"#!/bin/sh\nfor out; do :; done\nmade={made}\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def load_elsewhere(tmp_path, stand_in):
    """Load the library in another process and return what it prints."""
    kernels = str(Path(build.__file__).parent)
    return run(tmp_path, "python", "-c", LOAD, stand_in, PYTHONPATH=kernels)


def fallback_reason(caplog):
    """Return the reason for plain PyTorch, which is logged once."""
    caplog.clear()
    assert build.library() is None and build.library() is None
    start = "plain PyTorch replaces the CPU kernels, which is slower: "
    [message] = [r.getMessage() for r in caplog.records if r.getMessage().startswith(start)]
    assert "CXX" in message and "TORCH_EXTENSIONS_DIR" in message
    return message.removeprefix(start)


def assert_ended(process):
    """Wait until a process has ended."""
    status = Path("/proc", str(process), "status")
    for _ in range(50):
        if not status.exists() or "State:\tZ" in status.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"process {process} still runs")


def test_load_compiles_once(cache, compiler):
    path = compiler(COPY)
    first = build.load(FLAGS)
    path.unlink()
    second = build.load(FLAGS)
    [built] = cache.iterdir()
    assert re.fullmatch(r"cpu-[0-9a-f]{16}\.so", built.name)
    assert first.start(1) == 1 and first._name == second._name == str(built)


def test_load_announces_compilation_without_configured_logging(cache, tmp_path, stand_in):
    first, second = (load_elsewhere(tmp_path, stand_in).splitlines() for _ in range(2))
    assert first == [
        f"compiling multimax_fairseq's CPU kernels in {cache} (20 seconds)",
        *second,
    ]


@pytest.mark.parametrize("named", ["c++ -pipe", "", "  "])
def test_load_accepts_a_compiler_with_arguments_or_none(cache, monkeypatch, named):
    monkeypatch.setenv("CXX", named)
    assert build.load(FLAGS).start(1) == 1


def test_load_keeps_one_library_per_source_and_processor(cache, compiler, monkeypatch, tmp_path):
    compiler(COPY)

    def count(flags=FLAGS):
        build.load(flags)
        return len(list(cache.iterdir()))

    assert count() == 1
    assert count([*FLAGS, *build.MARCH["AVX2"]]) == 2
    assert count([*FLAGS, *build.MARCH["AVX512"]]) == 3
    (tmp_path / "cpu.cpp").write_text("// changed")
    with monkeypatch.context() as other:
        other.setattr(build, "SOURCE", tmp_path / "cpu.cpp")
        assert count() == 4
    (tmp_path / "added.h").write_text("// a header")
    with monkeypatch.context() as other:
        other.setattr(build, "SOURCE", tmp_path / "cpu.cpp")
        assert count() == 5


def test_load_hides_a_library_until_it_is_whole(cache, compiler, tmp_path):
    compiler(f'head -c 4096 "$made" > "$out"; ls {cache}/*.so > {tmp_path}/seen; {COPY}')
    assert build.load(FLAGS).start(1) == 1
    assert (tmp_path / "seen").read_text() == ""


def test_load_keeps_the_first_of_two_concurrent_builds(cache, compiler, tmp_path, stand_in):
    # Each compiler waits until the other one has started.
    compiler(
        f"touch {tmp_path}/$$.started; "
        f"for i in $(seq 200); do [ $(ls {tmp_path} | grep -c started) = 2 ] && break; "
        f"sleep 0.1; done; {COPY}"
    )
    printed = []
    thread = threading.Thread(target=lambda: printed.append(load_elsewhere(tmp_path, stand_in)))
    thread.start()
    kernels = build.load(FLAGS)
    thread.join()
    assert len(list(tmp_path.glob("*.started"))) == 2
    [kept] = cache.iterdir()
    assert kernels.start(1) == 1 and kernels._name == str(kept)
    assert printed[0].splitlines()[-1] == f"loaded {kept}"


@pytest.mark.parametrize("mode, owner", [(0o777, None), (0o775, None), (0o755, 12345)])
def test_library_refuses_a_folder_of_other_users(cache, compiler, caplog, monkeypatch, mode, owner):
    compiler(COPY)
    build.load(FLAGS)
    [foreign] = cache.iterdir()
    cache.chmod(mode)
    if owner is not None:
        stat = Path.stat

        def of_other(path, **options):
            status = stat(path, **options)
            if path != cache:
                return status
            return os.stat_result([*status[:4], owner, *status[5:]])

        monkeypatch.setattr(Path, "stat", of_other)
    assert fallback_reason(caplog).startswith(f"'{cache}' is open to other users: remove it")
    assert list(cache.iterdir()) == [foreign]


def test_library_makes_a_private_folder(cache, compiler):
    compiler(COPY)
    umask = os.umask(0o002)
    try:
        build.load(FLAGS)
    finally:
        os.umask(umask)
    assert cache.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("named", ["here/cache", "~/cache"])
def test_load_accepts_a_relative_folder_or_one_at_home(
    cache, compiler, monkeypatch, tmp_path, named
):
    compiler(COPY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "here"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", named)
    build.load(FLAGS)
    assert len(list(tmp_path.glob("here/cache/multimax_fairseq/cpu-*.so"))) == 1


@pytest.mark.parametrize(
    "script, reason",
    [
        (r"printf 'note\n\377 error: bad\n' >&2; exit 1", "'{path}' failed: \ufffd error: bad."),
        ("exit 3", "'{path}' failed: exit status 3."),
        ("kill -9 $$", "'{path}' failed: exit status -9."),
        ("exit 0", "[Errno 2] No such file or directory: "),
    ],
)
def test_library_falls_back_if_the_compiler_fails(cache, compiler, caplog, script, reason):
    path = compiler(script)
    assert fallback_reason(caplog).startswith(reason.format(path=path))
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    "named, reason",
    [
        ("/none/c++", "[Errno 2] No such file or directory: '/none/c++'"),
        ("/dev/null", "[Errno 13] Permission denied: '/dev/null'"),
        ('c++ "-pipe', "No closing quotation"),
    ],
)
def test_library_falls_back_without_a_compiler(cache, caplog, monkeypatch, named, reason):
    monkeypatch.setenv("CXX", named)
    assert fallback_reason(caplog).startswith(reason)


@pytest.mark.parametrize(
    "named, reason",
    [
        ("/proc/cache", "[Errno 2] No such file or directory: "),
        ("/dev/null/cache", "[Errno 20] Not a directory: "),
        ("~nobody-of-that-name/cache", "Could not determine home directory"),
    ],
)
def test_library_falls_back_without_a_folder(cache, compiler, caplog, monkeypatch, named, reason):
    compiler(COPY)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", named)
    assert fallback_reason(caplog).startswith(reason)


def test_library_falls_back_if_the_library_does_not_load(cache, compiler, caplog):
    compiler('echo no library > "$out"')
    assert re.match(
        rf"{cache}/cpu-\w+\.so: (invalid ELF header|file too short)", fallback_reason(caplog)
    )


def test_library_falls_back_without_a_matrix_product(cache, monkeypatch, caplog, tmp_path):
    (tmp_path / "cpu.cpp").write_text('extern "C" int start(void*) { return 0; }\n')
    monkeypatch.setattr(build, "SOURCE", tmp_path / "cpu.cpp")
    assert fallback_reason(caplog).startswith("this build of torch offers no matrix product")


def test_library_falls_back_on_other_processors(cache, monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert fallback_reason(caplog).startswith("they need Linux and AVX2, not linux and DEFAULT")


def test_library_stops_a_compiler_that_hangs(cache, compiler, caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "TIMEOUT", 2)
    compiler(f"sleep 600 & echo $! $$ > {tmp_path}/processes; wait")
    start = time.monotonic()
    assert "timed out after 2 seconds" in fallback_reason(caplog)
    assert time.monotonic() - start < 60
    for process in (tmp_path / "processes").read_text().split():
        assert_ended(process)
    assert list(cache.iterdir()) == []


def test_library_stops_the_compiler_at_an_interrupt(cache, compiler, tmp_path):
    process = tmp_path / "process"
    compiler(f"echo $$ > {process}; exec sleep 600")

    def interrupt():
        while not (process.exists() and process.read_text()):
            time.sleep(0.01)
        time.sleep(0.5)  # until the main thread waits for the compiler
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build.library()
    thread.join()
    assert_ended(process.read_text().strip())
    assert list(cache.iterdir()) == []


def test_package_works_without_a_compiler(tmp_path):
    script = """
import torch
from multimax_fairseq import Modulator
from multimax_fairseq.ops import build
build.FLAGS = [*build.FLAGS, "-DANOTHER_LIBRARY"]
print(Modulator(init_std=1.0)(torch.zeros(3)).shape)
"""
    elsewhere = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "CXX": str(tmp_path / "none")}
    command = (tmp_path, "python", "-c", script)
    printed = run(*command, **elsewhere)
    assert "torch.Size([3])" in printed and "plain PyTorch replaces the CPU kernels" in printed
    refused = run(*command, code=1, MULTIMAX_BACKEND="cpp", **elsewhere)
    assert "MULTIMAX_BACKEND 'cpp' needs a C++ compiler" in refused


# --- the wheel -----------------------------------------------------------------------------------

WHEEL = """
import json, sys, torch
import multimax_fairseq
from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.ops import native
torch.manual_seed(0)
query, key, value = torch.randn(3, 2, 2, 40, 16)
features, weight, target = torch.randn(9, 16), torch.randn(50, 16), torch.arange(9)
modulator = Modulator.from_values([1.1, 1.0], [0.7, 1.0], [0.2, 0.0], [1.5, 0.0]).float()
results = [
    scaled_dot_product_attention(query, key, value, modulator=modulator, backend="cpp"),
    scaled_dot_product_attention(query, key, value, normalizer="entmax15", backend="cpp"),
    linear_cross_entropy(features, weight, target, modulator=modulator)[0],
]
with open("/proc/self/maps") as file:
    runtimes = sorted({line.split()[-1] for line in file if "gomp" in line})
print(json.dumps([native.library()._name, runtimes, [x.flatten().tolist() for x in results]]))
"""


def test_wheel_brings_the_kernels(tmp_path):
    """The wheel needs no compiler, and its kernels return the numbers of a compiled library."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(tmp_path, *pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", ".", ROOT)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-manylinux_2_27_x86_64.whl")
    assert wheel.stat().st_size < 3e6
    run(tmp_path, *pip, "install", "-q", "--no-deps", "--target", "installed", wheel)

    given = {"CXX": "false", "TORCH_EXTENSIONS_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    installed = {**given, "PYTHONPATH": str(tmp_path / "installed")}
    library, runtimes, found = json.loads(run(tmp_path, sys.executable, "-c", WHEEL, **installed))

    assert Path(library).parent == tmp_path / "installed/multimax_fairseq/ops/lib"
    torch_folder = str(Path(torch.__file__).parent)
    assert len(runtimes) == 1 and runtimes[0].startswith(torch_folder)
    compiled = 'from multimax_fairseq.ops import build; build.BUILT = build.Path("none")' + WHEEL
    given |= {"CXX": "c++"}
    library, _, expected = json.loads(
        run(tmp_path, sys.executable, "-c", compiled, **given).splitlines()[-1]
    )
    assert Path(library).parent == tmp_path / "multimax_fairseq" and found == expected


def test_wheel_needs_no_newer_glibc_than_its_tag_says(tmp_path):
    versions = set()
    for path in build.BUILT.glob("*.so"):
        symbols = run(tmp_path, "objdump", "-T", path)
        versions |= {tuple(map(int, x.split("."))) for x in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert (2, 17) < max(versions) <= (2, 27)
