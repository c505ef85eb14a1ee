"""Which launch of a kernel is taken: the fastest, tried once, or the first without trying."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from multimax_fairseq.kernels import launches
from multimax_fairseq.kernels.launches import Launch, run_fastest

CHOICE = [Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1)]
TOO_LARGE = CHOICE[2]


class Kernel:
    """Notes what it was run with; a launch takes as long as it has keys."""

    def __init__(self):
        self.tried, self.ran = [], []

    def __call__(self, launch):
        if launch == TOO_LARGE:
            raise OutOfResources(2**18, 2**17, "shared memory")
        self.ran.append(launch)
        return launch

    def timer(self, run):
        launch = run()
        self.tried.append(launch)
        return float(launch.keys)

    def launch(self, call, choice=CHOICE):
        return run_fastest(choice, call, self, self.timer)


@pytest.fixture
def kernel(monkeypatch):
    """As on a GPU that records no graph, with nothing tried yet."""
    monkeypatch.setattr(launches, "interpreted", lambda: False)
    monkeypatch.setattr(launches, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Kernel()


def test_the_fastest_is_remembered_and_what_cannot_be_launched_is_skipped(kernel):
    assert [kernel.launch("a call") for _ in range(3)] == [CHOICE[1]] * 3
    assert kernel.tried == CHOICE[:2]
    kernel.launch("another")
    assert kernel.tried == CHOICE[:2] * 2


def test_without_a_choice_nothing_is_tried(kernel):
    assert kernel.launch("a call", CHOICE[:1]) == CHOICE[0]
    assert kernel.tried == []


def test_what_no_launch_can_do_says_why(kernel):
    with pytest.raises(OutOfResources):
        kernel.launch("a call", [TOO_LARGE, TOO_LARGE])


def test_another_error_is_not_hidden(kernel):
    def broken(launch):
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        run_fastest(CHOICE, "a call", broken, kernel.timer)


def test_deterministic_algorithms_take_the_first(kernel):
    assert kernel.launch("a call") == CHOICE[1]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel.launch("a call") == kernel.launch("another") == CHOICE[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.tried == CHOICE[:2]


def test_a_graph_that_is_recorded_takes_what_is_known_or_the_first(kernel, monkeypatch):
    kernel.launch("a call")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel.launch("a call") == CHOICE[1] and kernel.launch("another") == CHOICE[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernel.launch("another") == CHOICE[1]
    assert kernel.tried == CHOICE[:2] * 2


def test_the_interpreter_takes_the_first(kernel, monkeypatch):
    monkeypatch.setattr(launches, "interpreted", lambda: True)
    assert kernel.launch("a call") == CHOICE[0] and kernel.tried == []
