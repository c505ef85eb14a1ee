"""The compiled kernels under load: many threads at once, and forks after the first use."""

import os
import signal
import threading

import pytest
import torch

import multimax_fairseq as mm
from multimax_fairseq.ops import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no CPU kernels for this machine")

PATIENCE = 60  # seconds


def made(seed, length):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 4, length, 16, generator=generator) for _ in range(3))
    target = torch.randint(50, (length,), generator=generator)
    return query, key, value, torch.randn(50, 16, generator=generator), target


def results(seed, length, modulator):
    """Return attention, the output loss and their gradients."""
    query, key, value, weight, target = made(seed, length)
    for tensor in (query, key, value, weight):
        tensor.requires_grad_()
    context = mm.scaled_dot_product_attention(
        query, key, value, modulator=modulator, is_causal=True, backend="cpp"
    )
    loss, _ = mm.linear_cross_entropy(context[0, 0], weight, target, modulator=modulator)
    found = torch.autograd.grad(loss, (query, key, value, weight))
    return [context.detach(), loss.detach(), *found]


@pytest.fixture
def modulator():
    torch.manual_seed(1)
    found = mm.Modulator(init_std=0.2)
    return found.requires_grad_(False)


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def test_cpu_kernels_in_many_threads_equal_serial_results(modulator, threads):
    lengths = [1, 7, 33, 64, 130]
    alone = {length: results(length, length, modulator) for length in lengths}
    off = []

    def work(turn):
        for n in range(20):
            length = lengths[(turn + n) % len(lengths)]
            found = results(length, length, modulator)
            if not all(map(torch.equal, found, alone[length])):
                off.append((turn, length))

    workers = [threading.Thread(target=work, args=(turn,)) for turn in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
        assert not worker.is_alive(), "a thread hangs"
    assert not off


def test_cpu_kernels_work_in_forked_processes(modulator, threads):
    """A data loader's workers have one thread, whatever their parent has."""
    wanted = results(3, 64, modulator)
    for _ in range(4):
        child = os.fork()
        if child == 0:
            signal.alarm(PATIENCE)  # ends a child that hangs
            try:
                torch.set_num_threads(1)
                is_right = all(map(torch.equal, results(3, 64, modulator), wanted))
                os._exit(0 if is_right else 1)
            finally:
                os._exit(2)  # the child must not continue with the tests
        assert os.waitpid(child, 0)[1] == 0
