"""That no kernel reads or writes beside a tensor: each lies next to memory that may not be touched.

A read beside a tensor mostly finds other memory of the process, and what it finds is mostly not
used. Where a tensor ends with its page or its GPU's segment, the process ends.
"""

import ctypes
import importlib.util
import itertools
import math
import mmap
import os
import subprocess
import sys

import pytest
import torch

from multimax_fairseq.kernels import operators

PAGE = mmap.PAGESIZE
WITHOUT_ACCESS = 0


def run_checks(**environment):
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-o", "python_functions=check_*", __file__]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_stay_within_their_tensors():
    run_checks(TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_cpp_kernels_stay_within_their_tensors(capability):
    chosen = {} if capability == "default" else {"ATEN_CPU_CAPABILITY": capability}
    run_checks(TRITON_INTERPRET="0", MULTIMAX_BACKEND="cpp", **chosen)


def test_a_fence_ends_a_process_that_touches_it():
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import ctypes, torch
from test_fences import fenced
found = fenced(torch.arange(5.0), "{{}}")
assert found.tolist() == [0, 1, 2, 3, 4]
ctypes.string_at(found.data_ptr() + {{}}, 1)
"""
    for side, place in (("before", -1), ("after", 20)):
        done = subprocess.run([sys.executable, "-c", program.format(side, place)])
        assert done.returncode < 0


# --- in a process of their own -----------------------------------------------------------------

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # noqa: F401  (mends it)

kept = []


def fenced(tensor, side):
    """A tensor of these numbers and strides that begins or ends beside memory without access."""
    if tensor is None or tensor.numel() == 0:
        return tensor
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size()
    whole = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, whole + 2 * PAGE)
    begin = PAGE if side == "before" else PAGE + whole - size
    flat = torch.frombuffer(memory, dtype=tensor.dtype, count=last + 1, offset=begin)
    found = flat.as_strided(tensor.shape, tensor.stride())
    found.copy_(tensor)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    for place in (address, address + PAGE + whole):
        assert libc.mprotect(ctypes.c_void_p(place), PAGE, WITHOUT_ACCESS) == 0
    kept.append(memory)
    return found


def fenced_all(side, *tensors):
    return [fenced(t, side) for t in tensors]


def masks(batch, heads, queries, keys):
    """Of every form and order in memory: none, bool and added, for keys, rows, and both."""
    lengths = torch.tensor([keys, keys // 2 + 1])[:batch, None, None, None]
    padding = torch.arange(keys).expand(batch, 1, 1, keys) >= lengths
    torch.manual_seed(1)
    full = torch.rand(batch, heads, queries, keys) < 0.3
    yield from (None, padding.contiguous(), full, full.mT.contiguous().mT)
    yield from (torch.randn(1, heads, 1, keys), torch.randn(batch, 1, queries, keys))
    yield torch.randn(1, 1, queries, 1).masked_fill(torch.arange(queries)[:, None] == 1, -math.inf)


DTYPES = [torch.float32, torch.float16]
SHAPES = [(2, 2, 16, 16, 32), (1, 2, 37, 45, 64), (2, 1, 70, 9, 80), (1, 1, 1, 67, 16)]


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def check_attention(shape, dtype, side):
    batch, heads, queries, keys, size = shape
    torch.manual_seed(0)
    lengths = (queries, keys, keys, queries)
    tensors = [torch.randn(batch, n, heads, size).to(dtype).transpose(1, 2) for n in lengths]
    table = torch.tensor([[0.3, 0.1, -0.2, -0.4, -0.2, 0.1, 0.3, 0.6]])
    sink = torch.randn(heads)
    for number, mask in enumerate(masks(batch, heads, queries, keys)):
        causal, dropout_p = number % 2 == 0 and queries == keys, 0.2 * (number % 3 == 0)
        inputs = [*tensors[:3], [table, None][number % 2], [None, sink][number % 2], mask]
        numbers = (torch.tensor(7), causal, dropout_p, 0.2, 2, 2)
        expected = operators.attention(*inputs, *numbers, True)
        grads = operators.attention_backward(
            tensors[3], *tensors[:3], *expected, *inputs[3:], *numbers
        )
        inputs = fenced_all(side, *inputs)
        found = operators.attention(*inputs, *numbers, True)
        assert_alike(found, expected)
        grad, *both = fenced_all(side, tensors[3], *expected)
        others = operators.attention_backward(grad, *inputs[:3], *both, *inputs[3:], *numbers)
        assert_alike(others, grads)


def assert_alike(found, expected):
    """To the bit: the kernels are the same, and so are the numbers."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, classes, width", [(5, 37, 24), (1, 5, 3), (67, 2051, 16)])
def check_the_output_layer(tokens, classes, width, dtype, side):
    torch.manual_seed(0)
    sizes = ((tokens, width), (classes, width), (classes,))
    layer = [torch.randn(size).to(dtype) for size in sizes]
    target, factors = torch.randint(classes, (tokens,)), torch.rand(tokens)
    target[0] = -100
    monotone = torch.tensor([[0.3, 0.1, -0.2, -0.4, -0.2, 0.1, 0.3, 0.6, -9.0, 9.0, 1.0, 8.0]])
    for bias, table in itertools.product((None, layer[2]), (None, monotone[:, :8], monotone)):
        plain = [*layer[:2], bias, None if table is None else table.contiguous()]
        beside = fenced_all(side, *plain)
        smooth = 0.1 / classes
        numbers = ([True] * 4, smooth, 1 - smooth * classes, -100, None)
        expected = operators.output_loss_parts(*plain, target, factors, *numbers)
        assert_alike(
            operators.output_loss_parts(*beside, *fenced_all(side, target, factors), *numbers),
            expected,
        )
        assert_alike([operators.output_scores(*beside)], [operators.output_scores(*plain)])
        for chosen in ([], [2, 4]):
            rest = (min(4, classes - len(chosen)), chosen)
            found = operators.best_outputs(*beside, *rest)
            assert_alike(found, operators.best_outputs(*plain, *rest))


@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("shape", [(2, 3, 7, 11), (1, 3, 1, 1), (1, 3, 33, 67)])
def check_numbers_one_by_one(shape, side):
    torch.manual_seed(0)
    scores = torch.randn(shape)
    grad = torch.randn(shape)
    shared = torch.tensor([[0.3, 0.1, -0.2, -0.4, -0.2, 0.1, 0.3, 0.6]])
    for table in (shared, shared.repeat(3, 1)):
        plain, beside = [scores, table], fenced_all(side, scores, table)
        assert_alike([operators.modulate(*beside)], [operators.modulate(*plain)])
        assert_alike(
            operators.modulate_backward(fenced(grad, side), *beside),
            operators.modulate_backward(grad, *plain),
        )
        assert_alike(operators.tails(beside[1]), operators.tails(table))
    rows = scores.flatten(0, 2)
    count = min(3, rows.shape[1])
    assert_alike(
        operators.best_scores(fenced(rows, side), count), operators.best_scores(rows, count)
    )
    seed = torch.tensor(5)
    found = operators.dropout(fenced(scores, side), seed, 0.3)
    assert_alike([found], [operators.dropout(scores, seed, 0.3)])


@pytest.mark.parametrize("side", ["before", "after"])
def check_a_step(side):
    torch.manual_seed(0)
    query, keys, values = (torch.randn(n, 3, 16) for n in (5, 13, 13))
    ancestors = torch.randint(13, (5, 7))
    ancestors[-1] = torch.arange(6, 13)
    table = torch.tensor([[0.3, 0.1, -0.2, -0.4, -0.2, 0.1, 0.3, 0.6]]).repeat(3, 1)
    for scalars in ((None, None), (table, torch.randn(3))):
        given = (query, keys, values, ancestors, *scalars)
        found = operators.attention_step(*fenced_all(side, *given), 0.2)
        assert_alike([found], [operators.attention_step(*given, 0.2)])
