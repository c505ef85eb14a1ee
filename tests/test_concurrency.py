"""The compiled kernels under load: many threads at once, and forks after the first use."""

import multiprocessing
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

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


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_cpu_kernels_in_many_threads_equal_serial_results(modulator, one_thread, threads):
    torch.set_num_threads(threads)
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


def in_fork(modulator):
    """A data loader's workers have one thread, whatever their parent has."""
    signal.alarm(PATIENCE)  # ends a process that hangs
    torch.set_num_threads(1)
    return [tensor.tolist() for tensor in results(3, 64, modulator)]


def in_forks(modulator):
    """Use the kernels, then return the results of four forks of this process, by its threads.

    PyTorch allows no gradient in a fork of a process whose autograd has started threads, which it
    does if there is a GPU. So this process computes none.
    """
    query, key, value, weight, target = made(3, 64)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        context = mm.scaled_dot_product_attention(
            query, key, value, modulator=modulator, backend="cpp"
        )
        mm.linear_cross_entropy(context[0, 0], weight, target, modulator=modulator)
        with ProcessPoolExecutor(4, multiprocessing.get_context("fork")) as pool:
            found.extend(pool.map(in_fork, [modulator] * 4))
    return found


def test_cpu_kernels_work_in_forked_processes(modulator):
    wanted = [tensor.tolist() for tensor in results(3, 64, modulator)]
    # In a fresh process, since other tests have computed gradients in this one.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        found = pool.submit(in_forks, modulator).result()
    assert found == [wanted] * 8
