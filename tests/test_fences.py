"""Kernels read and write only inside their tensors.

An out-of-bounds read usually finds other memory of the process and changes no result. It crashes
the process only where a tensor ends with its page or its GPU segment. Here every tensor lies next
to a page without access, so each such read crashes a subprocess.
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

import multimax_fairseq.ops.best_outputs  # noqa: F401

PAGE = mmap.PAGESIZE
WITHOUT_ACCESS = 0


def run_checks(tmp_path, *chosen, **environment):
    """Run this file's check_* functions with pytest in a subprocess; `chosen` are its options."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-o", "python_functions=check_*", __file__, *chosen]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_stay_within_their_tensors(tmp_path):
    run_checks(tmp_path, "-k", "not float16", TRITON_INTERPRET="1")


@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_cpp_kernels_stay_within_their_tensors(capability, tmp_path):
    if capability == "default":
        run_checks(tmp_path, MULTIMAX_BACKEND="cpp")
    else:
        run_checks(tmp_path, "-k", "after", MULTIMAX_BACKEND="cpp", ATEN_CPU_CAPABILITY=capability)


def test_fenced_crashes_a_process_that_reads_outside():
    program = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import ctypes, torch
from test_fences import fenced
found = fenced(torch.arange(5.0), "{{}}")
assert found.tolist() == [0, 1, 2, 3, 4]
ctypes.string_at(found.data_ptr() + {{}}, 1)
"""
    for side, offset in (("before", -1), ("after", 20)):
        done = subprocess.run([sys.executable, "-c", program.format(side, offset)])
        assert done.returncode < 0


# --- checks that run in a subprocess ------------------------------------------------------------

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a hundred times slower
if INTERPRETED:
    import interpreter  # noqa: F401  fixes it


def fenced(tensor, side):
    """Return a copy with the same strides that begins or ends next to memory without access."""
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
    for start in (address, address + PAGE + whole):
        assert libc.mprotect(ctypes.c_void_p(start), PAGE, WITHOUT_ACCESS) == 0
    return found


def fence_results(monkeypatch, side):
    """Allocate kernel outputs next to memory without access too, filled with invalid values."""

    def fenced_result(make):
        def made(*args, **options):
            found = make(*args, **options)
            poison = math.nan if found.is_floating_point() else 77
            return fenced(found.fill_(poison), side)

        return made

    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty"), (torch, "empty_like")):
        monkeypatch.setattr(owner, name, fenced_result(getattr(owner, name)))


def assert_stays_within(side, operator, *given):
    """Check that an operator returns the same with fenced tensors; return its outputs."""
    expected = operator(*given)
    beside = [fenced(x, side) if isinstance(x, torch.Tensor) else x for x in given]
    with pytest.MonkeyPatch.context() as patch:
        fence_results(patch, side)
        found = operator(*beside)
    many = isinstance(found, tuple)
    pairs = zip(found, expected, strict=True) if many else [(found, expected)]
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)
    return expected


def masks(batch, heads, queries, keys):
    """Return masks of each kind and layout: none, bool and float; for keys, rows and both."""
    lengths = torch.tensor([keys, keys // 2 + 1])[:batch, None, None, None]
    padding = torch.arange(keys).expand(batch, 1, 1, keys) >= lengths
    full = torch.rand(batch, heads, queries, keys) < 0.3
    yield from (None, padding.contiguous(), full, full.mT.contiguous().mT)
    yield from (torch.randn(1, heads, 1, keys), torch.randn(batch, 1, queries, keys))
    yield torch.randn(1, 1, queries, 1).masked_fill(torch.arange(queries)[:, None] == 1, -math.inf)


OPERATORS = torch.ops.multimax_fairseq
both_sides = pytest.mark.parametrize("side", ["before", "after"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
TABLE = torch.tensor([[0.3, 0.1, -0.2, -0.4, -0.2, 0.1, 0.3, 0.6]])
SHAPES = [(2, 2, 16, 16, 32), (1, 2, 37, 45, 64), (2, 1, 70, 9, 80), (1, 1, 1, 67, 16)]
LAYERS = [(5, 37, 24), (1, 5, 3), (67, 2051, 16)]
if INTERPRETED:
    SHAPES = [(1, 1, 16, 16, 32), (2, 1, 37, 9, 24), (1, 1, 1, 67, 16)]
    LAYERS = [(5, 37, 24), (1, 5, 3), (18, 261, 16)]


@both_sides
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def check_attention(shape, dtype, side):
    batch, heads, queries, keys, size = shape
    torch.manual_seed(0)
    lengths = (queries, keys, keys, queries)
    made = (torch.randn(batch, n, heads, size).to(dtype) for n in lengths)
    *tensors, grad = (t.transpose(1, 2) for t in made)
    sink = torch.randn(heads)
    for number, mask in enumerate(masks(batch, heads, queries, keys)):
        causal, dropout_p = number % 2 == 0 and queries == keys, 0.2 * (number % 3 == 0)
        table = [TABLE, None][number % 2]
        has_factor = table is not None and number % 4 == 0 and not INTERPRETED
        factor = torch.rand(batch, heads, queries) if has_factor else None
        rest = [table, factor, [None, sink][number % 2], None, mask]
        rest += [torch.tensor(7), causal, dropout_p, 0.2, 2, 2, None, None]
        found = assert_stays_within(side, OPERATORS.attention, *tensors, *rest, True)
        assert_stays_within(side, OPERATORS.attention_backward, grad, *found, *tensors, *rest)


@both_sides
@dtypes
@pytest.mark.parametrize("tokens, classes, width", LAYERS)
def check_the_output_layer(tokens, classes, width, dtype, side):
    torch.manual_seed(0)
    sizes = ((tokens, width), (classes, width), (classes,))
    *layer, some_bias = (torch.randn(size).to(dtype) for size in sizes)
    target, factors = torch.randint(classes, (tokens,)), torch.rand(tokens)
    target[0] = -100
    smooth = 0.1 / classes
    numbers = (smooth, 1 - smooth * classes, 0.1, 0.0, -100, None, False)
    of_entropy = (0.0, 1.0, 0.0, 0.0, -100, None, True)
    monotone = torch.cat([TABLE, torch.tensor([[-9.0, 9.0, 1.0, 8.0]])], 1)
    for bias, table in itertools.product((None, some_bias), (None, TABLE, monotone)):
        given = (*layer, bias, table)
        for call in ((*numbers, factors), (*of_entropy, torch.rand(tokens, 2))):
            call = (*given, target, *call, [True] * 4)
            assert_stays_within(side, OPERATORS.output_loss_parts, *call)
        assert_stays_within(side, OPERATORS.output_scores, *given)
        for apart in ([], [2, 4]):
            count = min(4, classes - len(apart))
            assert_stays_within(side, OPERATORS.best_outputs, *given, count, apart)


@both_sides
@pytest.mark.parametrize("shape", [(2, 3, 7, 11), (1, 3, 1, 1), (1, 3, 33, 67)])
def check_numbers_one_by_one(shape, side):
    torch.manual_seed(0)
    scores, grad = torch.randn(2, *shape)
    for table in (TABLE, TABLE.repeat(3, 1)):
        assert_stays_within(side, OPERATORS.modulate, scores, table)
        assert_stays_within(side, OPERATORS.modulate_backward, grad, scores, table)
        assert_stays_within(side, OPERATORS.tails, table)
    rows = scores.flatten(0, 2)
    assert_stays_within(side, OPERATORS.best_scores, rows, min(3, rows.shape[1]))
    assert_stays_within(side, OPERATORS.dropout, scores, torch.tensor(5), 0.3)


@both_sides
def check_a_step(side):
    torch.manual_seed(0)
    tensors = [torch.randn(n, 3, 16) for n in (5, 13, 13)]
    ancestors = torch.randint(13, (5, 7))
    ancestors[-1] = torch.arange(6, 13)
    length_scale = None if INTERPRETED else torch.rand(3)
    for scalars in ((None,) * 3, (TABLE.repeat(3, 1), length_scale, torch.randn(3))):
        given = (*tensors, ancestors, *scalars, 0.2, None, None, None)
        assert_stays_within(side, OPERATORS.attention_step, *given)
