"""Toy models, data and batches as fixtures; which tests run, and in which order."""

import collections
import functools
import itertools
import os
import random
import signal
import tempfile
from types import SimpleNamespace

import batches
import numpy
import pytest
import quick_compose  # noqa: F401
import torch
import toy_data
import toy_models
from fairseq.data import Dictionary
from fairseq.logging import metrics

import multimax_fairseq.models  # noqa: F401
from multimax_fairseq.ops import build as kernel_build
from multimax_fairseq.ops import native

# The cache of torch.compile does not notice that an operator's schema has changed.
compiled = tempfile.TemporaryDirectory()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled.name
torch.set_num_threads(1)  # a forked process hangs if OpenMP has started threads before
# A shell's background ignores SIGINT and SIGQUIT, and nohup ignores SIGHUP. Programs that tests
# start would inherit that, but they do not inherit a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda *_: None)


AVX2 = "AVX2 and MKL"
# test_gpu.py runs tests/gpu in separate processes.
collect_ignore = ["gpu"]


def pytest_addoption(parser):
    parser.addoption("--fast", action="store_true", help="leave out the files marked long")
    parser.addoption("--all", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    # Long files first: two processes then end at about the same time.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    cases = collections.Counter()
    left_out = [
        item
        for item in items
        if (config.getoption("fast") and item.get_closest_marker("long"))
        or (
            not config.getoption("all")
            and (item.get_closest_marker("slow") or is_repeat(item, cases))
        )
    ]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def is_repeat(item, cases):
    """Return whether the AVX2 build leaves out this case; it runs every fifth case of each test."""
    if "callspec" not in vars(item) or item.callspec.params.get("kernels") != AVX2:
        return False
    cases[item.originalname] += 1
    return cases[item.originalname] % 5 != 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Each test draws the same numbers whatever ran before it in its process."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=["as built", AVX2])
def kernels(request, monkeypatch):
    """The library for this machine's CPU, and those for other CPUs."""
    library = native.library
    built = library()
    assert built is not None, "the tests of the kernels need a C++ compiler"
    if request.param == "as built":
        yield
        return
    built = kernel_build.load([*kernel_build.FLAGS, *kernel_build.MARCH["AVX2"]])
    kernel_build.start(built, may_use_onednn=False)
    monkeypatch.setattr(native, "library", lambda: built)
    yield
    library.cache_clear()


@pytest.fixture(scope="session")
def dictionary():
    words = Dictionary()
    for index in range(30):
        words.add_symbol(f"word{index}")
    return words


@pytest.fixture(scope="session")
def task(dictionary):
    """The attributes of a task that models and criteria read."""
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        src_dict=dictionary,
        tgt_dict=dictionary,
    )


@pytest.fixture(scope="session")
def build(task):
    """build(arch, *flags, seed=1) -> a toy model, through the command line's own parser."""
    return functools.partial(toy_models.build, task)


@pytest.fixture(scope="session")
def translation_batch(dictionary):
    return functools.partial(batches.translation_batch, dictionary)


@pytest.fixture(scope="session")
def lm_batch(dictionary):
    return functools.partial(batches.lm_batch, dictionary)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with mt/ and lm/ of one dictionary each, and mt-other/ with a smaller dictionary."""
    return toy_data.write_subwords(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder with mt/ and lm/, each with train, valid and test; tests of one file train in it."""
    return toy_data.write_words(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def checkpoint(data, tmp_path_factory):
    """checkpoint(arch, *flags, updates=7, seed=1) -> a file as fairseq-train saves it."""
    folder = tmp_path_factory.mktemp("checkpoints")

    numbers = itertools.count()

    @functools.cache
    def make(arch, *flags, updates=7, seed=1):
        path = folder / f"{next(numbers)}.pt"
        toy_models.save_checkpoint(path, data, arch, *flags, updates=updates, seed=seed)
        return path

    return make


@pytest.fixture
def trainer_of(data, tmp_path):
    """trainer_of(arch, *flags, fp16=False) -> a trainer on the CPU and its batches."""
    metrics.reset()
    yield functools.partial(toy_models.trainer_of, data, tmp_path)
    metrics.reset()
