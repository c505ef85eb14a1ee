"""The Triton kernels: against plain formulas in Triton's interpreter, and compiled for two GPUs.

Functions named check_* run in a process of their own, since Triton decides at its import whether
it interprets; where there is a GPU, they run on it as well. Those named compile_* need no GPU.
"""

import importlib.util
import math
import os

import pytest
import torch
import torch.nn.functional as F
from separately import run_functions

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def test_kernels_equal_the_plain_formulas_in_the_interpreter(tmp_path):
    run_functions("check", tmp_path, __file__, TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: interpreted and compiled only")
def test_kernels_equal_the_plain_formulas_on_the_gpu(tmp_path):
    run_functions("check", tmp_path, __file__)


def test_kernels_compile_ahead_of_time(tmp_path):
    run_functions("compile", tmp_path, __file__)


# --- what is right -----------------------------------------------------------------------------

if INTERPRETED:
    import interpreter  # noqa: F401  (mends it)


def modulated(x, table):
    """sigma(x), x (..., heads, T, S), by the plain formula in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if table is None:
        return x
    columns = table.to(x.dtype).T[:, :, None, None]
    z = x
    for order in (1, 2):
        low = (columns[1 + order] - x).clamp(0, 1e18)
        high = (x - columns[5 + order]).clamp(0, 1e18)
        z = z + columns[order - 1] * low**order + columns[3 + order] * high**order
    if len(columns) == 12:
        low_turn, high_turn, low_offset, high_level = columns[8:]
        z = torch.where(x < low_turn, x + low_offset, z)
        z = torch.where(x > high_turn, high_level, z)
    return z


# Far from the identity, with sparse and multi-modal signs in both orders.
FAR = (-0.9, -0.05, 0.3, -0.4, -0.6, -0.03, 0.6, 0.9)


def far_table(rows, low=2, high=2):
    """Parameters a head, all different; zeros for the orders that are not there."""
    table = torch.tensor(FAR) + 0.05 * torch.arange(rows)[:, None]
    present = [order <= side for side in (low, low, high, high) for order in (1, 2)]
    return torch.where(torch.tensor(present), table, 0.0).to(DEVICE)


def monotone_table(rows, low_turn=-2.0, high_turn=1.5):
    """Level beyond its turns, as whoever makes such a table does."""
    table = far_table(rows).cpu()
    turns = torch.tensor([low_turn, high_turn]) + 0.05 * torch.arange(rows)[:, None]
    at_turns = modulated(turns[:, None].double(), table)[:, 0].float()
    offset = torch.where(turns.isfinite(), at_turns - turns, 0.0)[:, :1]
    level = torch.where(turns.isfinite(), at_turns, 0.0)[:, 1:]
    return torch.cat([table, turns, offset, level], -1).to(DEVICE)


# Scores and sums are formed in float32 in another order than the plain formula's.
ROUNDING = 16 * torch.finfo(torch.float32).eps


def assert_as_accurate(ours, plain, exact):
    """At most twice the plain formula's error in the same type, and some roundings of float32."""
    for number, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        error, plain_error = ((t.double() - truth).norm().item() for t in (a, b))
        limit = 2 * plain_error + ROUNDING * truth.norm().item()
        assert error <= limit, (number, error, plain_error, limit)


def by_parameter(table_grads, orders=(2, 2)):
    """A table's gradient apart, in pairs of columns as far as a side's order goes, turns left out:
    sums that cancel have an error of luck, which a few numbers together even out."""
    pairs = [pair for grad in table_grads for pair in grad.split(2, -1)]
    assert len(pairs) < 5 or (pairs[4] == 0).all()
    sides = [pair[:, : orders[number // 2]] for number, pair in enumerate(pairs[:4])]
    return [pair for pair in sides + pairs[5:] if pair.numel() > 0]


# --- attention ---------------------------------------------------------------------------------


def doubled(inputs, *others):
    return [t.double() for t in inputs], *(t if t is None else t.double() for t in others)


def plain_attention(query, key, value, table, mask=None, causal=False, scale=None, sink=None):
    """The plain formula, in the type of the inputs but for the softmax."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    z = modulated((query * scale) @ key.mT, table)
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask.to(z.dtype)
    elif mask is not None:
        z = z.masked_fill(mask, -math.inf)
    if causal:
        z = z.masked_fill(torch.ones_like(z[0, 0], dtype=torch.bool).triu(1), -math.inf)
    some = (z > -math.inf).any(-1, keepdim=True)
    z = torch.where(some, z, 0.0)
    if sink is not None:
        z = torch.cat([z, sink.to(z.dtype)[:, None, None].expand_as(z[..., :1])], -1)
    probs = z.softmax(-1)[..., : key.shape[2]] * some
    return probs.to(value.dtype) @ value


def attend(inputs, grad, table, mask=None, causal=False, scale=None, orders=(2, 2), **more):
    """The kernels' [output, gradients by query, key, value and, if any, table and sink]."""
    from multimax_fairseq.kernels import triton_attention as kernels

    inputs = [t.detach() for t in inputs]
    scale = inputs[0].shape[-1] ** -0.5 if scale is None else scale
    drop = more.get("drop", (0, 0.0))
    options = (table, more.get("sink"), mask, drop[0], causal, drop[1], scale, *orders)
    out, total = kernels.attention_forward(*inputs, *options)
    grads = kernels.attention_backward(grad, *inputs, out, total, *options)
    assert out.dtype == inputs[0].dtype and out.shape == inputs[0].shape
    assert total.shape == (*out.shape[:2], 1, out.shape[2]) and total.dtype == torch.float32
    assert (grads[3] is None) == (table is None)
    return [out, *(g for g in grads if g is not None)]


def plain_attend(inputs, grad, table, **options):
    inputs = [t.detach().requires_grad_() for t in inputs]
    numbers = {"table": table, "sink": options.pop("sink", None)}
    numbers = {n: t.detach().requires_grad_() for n, t in numbers.items() if t is not None}
    out = plain_attention(*inputs, **{"table": None} | numbers | options)
    grads = torch.autograd.grad(out, (*inputs, *numbers.values()), grad.to(out.dtype))
    return [out.detach(), *grads]


def attention_inputs(batch, heads, length, keys, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, n, size) for n in (length, keys, keys, length)]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return [t.to(DEVICE, dtype) for t in (1.5 * query, 1.5 * key, value, grad)]


def make_mask(kind, batch, heads, length, keys):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([keys, keys // 2])[:batch, None]
    padding = (torch.arange(keys) >= lengths).view(batch, 1, 1, keys)
    full = torch.rand(batch, 1, length, keys, generator=generator) < 0.4
    full[0, :, length // 2] = True
    far = torch.arange(keys) - torch.arange(length)[:, None]
    if kind == "padding":
        mask = padding
    elif kind == "full":
        mask = full
    elif kind == "added padding":
        mask = torch.where(padding, -1e9, 0.0)
    elif kind == "added":  # a row of nothing but -1e4, another of nothing but -inf
        mask = torch.where(full, -1e4, 0.0)
        mask[:, :, 0] = -torch.inf
    elif kind == "bias":  # relative positions, one slope per head
        slopes = 0.5 ** torch.arange(1, heads + 1)
        mask = -far.abs() * slopes.view(1, heads, 1, 1)
    elif kind == "key bias":
        mask = torch.randn(1, heads, 1, keys, generator=generator)
        mask[..., -3:] = -torch.inf
    elif kind == "row bias":
        mask = torch.randn(batch, 1, length, 1, generator=generator)
    else:
        return None
    return mask.to(DEVICE)


CASES = [
    # type, (B, H, T, S, D), mask, causal, table (or orders of its sides)
    ("float32", (1, 2, 50, 70, 32), None, False, "separate"),
    ("float32", (1, 2, 50, 50, 64), None, True, "shared"),
    ("float32", (2, 2, 33, 45, 64), "padding", False, "monotone"),
    ("float32", (2, 1, 50, 70, 32), "full", False, "shared"),
    ("float32", (2, 1, 70, 45, 32), "full", True, "no low turn"),
    ("float32", (2, 2, 40, 40, 16), "padding", True, "no high turn"),
    ("float32", (2, 2, 37, 45, 32), "added", False, "separate"),
    ("float32", (2, 2, 40, 40, 16), "added", True, None),
    ("float32", (2, 2, 33, 50, 16), "added padding", False, "monotone"),
    ("float32", (1, 2, 33, 40, 16), "bias", False, "shared"),
    ("float32", (1, 2, 40, 40, 16), "key bias", True, "shared"),
    ("float32", (2, 1, 9, 33, 16), "row bias", False, "monotone"),
    ("float32", (1, 2, 17, 41, 80), None, False, (1, 1)),
    ("float32", (1, 2, 37, 37, 128), None, True, (2, 0)),
    ("float32", (1, 2, 37, 40, 24), None, False, (0, 2)),
    ("float32", (1, 2, 40, 37, 32), None, False, (1, 0)),
    ("float32", (1, 2, 1, 9, 32), None, False, (0, 1)),
    ("float32", (2, 2, 50, 50, 64), "full", True, None),
    ("float16", (2, 2, 150, 150, 64), None, True, "separate"),
    ("float16", (2, 2, 70, 90, 80), "padding", False, "shared"),
    ("float16", (2, 1, 130, 70, 128), "full", False, (1, 1)),
    ("float16", (2, 2, 70, 90, 64), "added", False, "monotone"),
    ("float16", (2, 2, 100, 130, 64), None, False, None),
    ("bfloat16", (2, 2, 150, 150, 64), None, True, "monotone"),
    ("bfloat16", (2, 2, 90, 140, 32), "padding", False, "shared"),
    ("bfloat16", (2, 1, 130, 90, 128), "full", False, (0, 2)),
    ("bfloat16", (2, 2, 70, 150, 64), "added padding", False, (1, 0)),
    ("bfloat16", (2, 2, 70, 130, 64), "bias", True, "shared"),
    ("bfloat16", (2, 2, 100, 130, 80), "padding", True, None),
]


@pytest.mark.parametrize("dtype, shape, masking, causal, kind", CASES)
def check_attention_and_every_gradient(dtype, shape, masking, causal, kind):
    *inputs, grad = attention_inputs(*shape, getattr(torch, dtype))
    heads, orders = shape[1], (2, 2)
    if isinstance(kind, tuple):
        orders, table = kind, far_table(heads, *kind)
    elif kind is None:
        table = None
    elif "turn" in kind:
        turns = (-math.inf, 1.5) if kind == "no low turn" else (-2.0, math.inf)
        table = monotone_table(heads, *turns)
    else:
        rows = 1 if kind == "shared" else heads
        table = monotone_table(rows) if kind == "monotone" else far_table(rows)
    options = {"mask": make_mask(masking, *shape[:4]), "causal": causal}
    plain = plain_attend(inputs, grad, table, **options)
    exact = plain_attend(*doubled(inputs, grad, table), **options)
    # One order too many reads the table's zeros, which changes nothing.
    for told in {orders, tuple(2 if order == 1 else order for order in orders)}:
        ours = attend(inputs, grad, table, orders=told, **options)
        found = [[*list[:4], *by_parameter(list[4:], orders)] for list in (ours, plain, exact)]
        if dtype != "float32" and table is not None:
            # An output's rounding shows in all that its row gives to a single column.
            found = [[*list[:4], torch.cat(list[4:], -1)] for list in found]
        assert_as_accurate(*found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("masking", ["none", "padding", "full", "added"])
@pytest.mark.parametrize("modulated", [False, True])
def check_sinks(dtype, masking, modulated):
    shape = (1, 6, 40, 45, 32)  # of fewer heads, a sink's gradient has an error of luck
    *inputs, grad = attention_inputs(*shape, getattr(torch, dtype))
    table = far_table(6) if modulated else None
    options = {"mask": make_mask(masking, *shape[:4]), "causal": masking in ("none", "full")}
    for last in (-20.0, -math.inf):
        sink = torch.tensor([1.5, 0.0, -1.0, 4.0, 2.5, last], device=DEVICE)
        ours = attend(inputs, grad, table, sink=sink, **options)
        plain = plain_attend(inputs, grad, table, sink=sink, **options)
        exact = plain_attend(*doubled(inputs, grad, table), sink=sink.double(), **options)
        found = [[*list[:4], *by_parameter(list[4:-1]), list[-1]] for list in (ours, plain, exact)]
        if dtype != "float32" and table is not None:
            found = [[*run[:4], torch.cat(run[4:-1], -1), run[-1]] for run in found]
        assert_as_accurate(*found)
    assert attend(inputs, grad, table, sink=sink * math.nan)[0].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["bool", "float"])
def check_what_is_excluded_has_no_part(dtype, form):
    *inputs, grad = attention_inputs(2, 2, 40, 70, 32, dtype)
    table = far_table(2)
    mask = make_mask("full", 2, 2, 40, 70) | make_mask("padding", 2, 2, 40, 70)
    everything = torch.ones_like(mask)
    if form == "float":
        mask, everything = (torch.where(m, -math.inf, 0.0) for m in (mask, everything))
    out, *grads = attend(inputs, grad, table, mask)
    assert all(t.isfinite().all() for t in (out, *grads))
    assert (out[0, :, 20] == 0).all() and (grads[0][0, :, 20] == 0).all()
    assert all((t[1, :, 35:] == 0).all() for t in grads[1:3])
    assert all((t == 0).all() for t in attend(inputs, grad, table, everything))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("number", [-1e9, torch.finfo(torch.float32).min])
def check_a_number_is_no_exclusion(dtype, number):
    # What it absorbs are equal shares, forward and backward, as of the plain formula.
    *inputs, grad = attention_inputs(1, 2, 40, 70, 32, dtype)
    mask = torch.full((1, 1, 40, 70), number, device=DEVICE)
    ours = attend(inputs, grad, far_table(2), mask)
    torch.testing.assert_close(ours[0], inputs[2].mean(2, keepdim=True).expand_as(ours[0]))
    plain = plain_attend(inputs, grad, far_table(2), mask=mask)
    exact = plain_attend([t.float() for t in inputs], grad, far_table(2), mask=mask)
    assert_as_accurate(ours, plain, exact)


def check_neutral_parameters_are_torchs_attention():
    *inputs, grad = attention_inputs(1, 2, 50, 50, 32)
    table = torch.zeros(2, 8, device=DEVICE)
    torch.testing.assert_close(
        attend(inputs, grad, table, causal=True)[0],
        F.scaled_dot_product_attention(*inputs, is_causal=True),
    )


@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def check_scale(scale):
    *inputs, grad = attention_inputs(1, 2, 20, 20, 16)
    for table in (far_table(2), monotone_table(2, -0.4, 0.5)):
        ours = attend(inputs, grad, table, scale=scale)
        plain = plain_attend(inputs, grad, table, scale=scale)
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def check_a_negative_scale_rounds_nothing():
    *inputs, grad = attention_inputs(1, 2, 20, 30, 64, torch.float16)
    found = attend(inputs, grad, monotone_table(2), scale=-0.1)
    expected = attend([-inputs[0], *inputs[1:]], grad, monotone_table(2), scale=0.1)
    expected[1] = -expected[1]
    assert all(map(torch.equal, found, expected))


def check_strides():
    *inputs, grad = attention_inputs(2, 2, 20, 20, 32)
    table = far_table(2)
    mask = torch.rand(1, 1, 20, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.3
    expected = attend(inputs, grad, table, mask.expand(2, 2, 20, 20).contiguous())
    # (B, T, H, D) in memory, as projections leave it, and a last dimension that is strided.
    query = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    key = inputs[1].transpose(2, 3).contiguous().transpose(2, 3)
    turned = mask.mT.contiguous().mT
    ours = attend([query, key, inputs[2]], grad, table, turned)
    assert all(map(torch.equal, ours, expected)) and ours[0].stride() == query.stride()
    # A gradient without strides, as of a sum.
    ones = torch.ones((), device=DEVICE).expand(2, 2, 20, 20 + 12)
    assert all(map(torch.equal, attend(inputs, ones, table), attend(inputs, ones.clone(), table)))
    # One row for all heads is the same row a head, and its gradient the sum of theirs.
    shared = attend(inputs, grad, table[:1], mask)
    repeated = attend(inputs, grad, table[:1].repeat(2, 1), mask)
    assert all(map(torch.equal, shared[:4], repeated[:4]))
    torch.testing.assert_close(shared[4], repeated[4].sum(0, keepdim=True))
    row = mask[:, :, :1]
    expanded = row.expand(1, 1, 20, 20)
    assert torch.equal(
        attend(inputs, grad, table, row)[0], attend(inputs, grad, table, expanded)[0]
    )


def check_scores_beyond_the_cap_stay_finite():
    *inputs, grad = attention_inputs(1, 1, 8, 8, 16)
    huge = [inputs[0] * 1e10, inputs[1] * 1e10, inputs[2]]
    for table in (far_table(1), monotone_table(1), monotone_table(1, -math.inf, math.inf)):
        ours, plain = attend(huge, grad, table), plain_attend(huge, grad, table)
        torch.testing.assert_close(ours[0], plain[0])
        assert all(t.isfinite().all() for t in ours)


def check_two_runs_agree_to_the_bit():
    *inputs, grad = attention_inputs(2, 2, 90, 90, 32, torch.float16)
    runs = [attend(inputs, grad, far_table(2), causal=True, drop=(seed, 0.1)) for seed in (7, 7, 8)]
    assert all(map(torch.equal, *runs[:2])) and not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize("causal, masking", [(False, None), (True, None), (False, "bias")])
def check_dropout(causal, masking):
    keys, share, seed = 64, 0.3125, 2**40 + 5
    query, key, _, grad = attention_inputs(2, 2, 40, keys, keys)
    table, mask = far_table(2), make_mask(masking, 2, 2, 40, keys)
    # With the identity as the values, the outputs are the probabilities.
    value = torch.eye(keys, device=DEVICE).expand(2, 2, keys, keys).contiguous()
    ours = attend((query, key, value), grad, table, mask, causal, drop=(seed, share))
    assert (attend((query, key, value), grad, table, drop=(0, 1.0))[0] == 0).all()
    query, key, variable, table = learned = [
        t.clone().requires_grad_() for t in (query, key, value, table)
    ]
    probs = plain_attention(query, key, value, table, mask, causal)
    seen = probs > 1e-30
    kept = (ours[0] != 0) & seen
    count = seen.sum().item()
    assert abs(kept.sum().item() / count - (1 - share)) < 4 * (share * (1 - share) / count) ** 0.5
    dense = probs * kept / (1 - share)
    torch.testing.assert_close(ours[0], dense)
    # Rows, keys, heads and batches draw each for themselves.
    flat = torch.where(seen, kept.float() - (1 - share), 0.0)
    for shift, dim in ((1, -1), (4, -1), (1, -2), (32, -2), (1, 1), (1, 0)):
        together = (flat * flat.roll(shift, dim)).sum() / count
        assert together.abs() < 4 * share * (1 - share) / count**0.5
    theirs = torch.autograd.grad(dense @ variable, learned, grad)
    torch.testing.assert_close(ours[1:4], list(theirs[:3]))
    torch.testing.assert_close(ours[4], theirs[3], rtol=1e-4, atol=1e-4)


# --- the modulator, element by element ---------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 20, 30), (3, 100, 90), (3, 1, 1)])
@pytest.mark.parametrize("kind", ["shared", "separate", "monotone"])
def check_modulator(dtype, shape, kind):
    from multimax_fairseq.kernels.triton_modulator import modulate, modulate_backward

    generator = torch.Generator().manual_seed(0)
    scores, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    scores, grad = (3 * scores).to(DEVICE, dtype), grad.to(DEVICE)
    rows = 1 if kind == "shared" else 3
    table = monotone_table(rows) if kind == "monotone" else far_table(rows)

    def plain(wide):
        learned = [t.detach().to(wide).clone().requires_grad_() for t in (scores, table)]
        out = modulated(*learned)
        by_scores, by_table = torch.autograd.grad(out, learned, grad.to(wide))
        by_scores = by_scores if wide == torch.float64 else by_scores.to(dtype)
        return [out.detach(), by_scores, *by_parameter([by_table])]

    out, (by_scores, by_table) = modulate(scores, table), modulate_backward(grad, scores, table)
    assert out.dtype == by_table.dtype == torch.float32 and by_scores.dtype == dtype
    assert out.shape == by_scores.shape == scores.shape and by_table.shape == table.shape
    ours = [out, by_scores, *by_parameter([by_table])]
    assert_as_accurate(ours, plain(torch.float32), plain(torch.float64))
    again = modulate_backward(grad, scores, table)
    assert all(map(torch.equal, (by_scores, by_table), again))
    turned = scores.mT.contiguous().mT
    assert torch.equal(modulate(turned, table), out)


def check_modulator_at_its_ends():
    from multimax_fairseq.functional import modulator
    from multimax_fairseq.kernels.triton_modulator import (
        MAX_DISTANCE,
        modulate,
        modulate_backward,
    )

    assert MAX_DISTANCE.value == modulator.MAX_DISTANCE
    ends = torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan], device=DEVICE)
    for table in (far_table(1), monotone_table(1, -math.inf, math.inf), -far_table(1)):
        torch.testing.assert_close(
            modulate(ends, table), modulated(ends.view(1, 1, 5), table)[0, 0], equal_nan=True
        )
        half = modulate(ends.half(), table)
        assert half[0] == -math.inf and half[3] == math.inf
        grads = modulate_backward(torch.zeros_like(ends), ends, table)
        assert all((t[:4] == 0).all() for t in grads[:1])
    # Beyond the turns, what the table says, and gradients by that alone.
    table = torch.tensor([[*FAR, -2.0, 1.0, -7.0, 9.0]], device=DEVICE)
    scores = torch.tensor([-3.0, -2.0, 1.0, 4.0], device=DEVICE)
    out = modulate(scores, table)
    assert out[0] == -10 and out[3] == 9
    torch.testing.assert_close(out[1:3], modulate(scores[1:3], table[:, :8]))
    outer = torch.tensor([2.0, 0.0, 0.0, 3.0], device=DEVICE)
    by_scores, by_table = modulate_backward(outer, scores, table)
    assert by_scores.tolist() == [2, 0, 0, 0] and by_table[0].tolist() == [0] * 10 + [2, 3]
    # What overflowed, or is no number, stays so beyond a turn.
    for dtype in (torch.float32, torch.float16):
        lost = torch.tensor([math.inf, math.nan, -math.inf], device=DEVICE, dtype=dtype)
        for kind in (table, -table):
            out = modulate(lost, torch.cat([kind[:, :8], table[:, 8:]], -1))
            assert out[0] == math.inf and out[1].isnan() and out[2] == -math.inf
    for shape in ((0,), (2, 3, 0, 4)):
        nothing = torch.zeros(shape, device=DEVICE)
        assert modulate(nothing, table).shape == shape
        assert (modulate_backward(nothing, nothing, table)[1] == 0).all()


def check_where_a_monotone_modulator_turns():
    from multimax_fairseq.kernels import cpu
    from multimax_fairseq.kernels.triton_modulator import tails

    table = torch.randn(60, 8, generator=torch.Generator().manual_seed(2))
    table[::3] *= 0.02
    table[1::3, [1, 5]] = 0
    table[2::3, 3] = table[2::3, 2]
    for ours, compiled in zip(tails(table.to(DEVICE)), cpu.tails(table), strict=True):
        torch.testing.assert_close(ours.cpu(), compiled, rtol=1e-4, atol=1e-4)


# --- the output loss ---------------------------------------------------------------------------


def plain_loss(features, weight, bias, table, target, smooth_weight, nll_weight):
    scores = F.linear(features, weight, bias)
    z = modulated(scores[:, None, None], table)[:, 0, 0]
    total = z.logsumexp(-1)
    nll = (total - z.gather(-1, target.clamp(min=0)[:, None])[:, 0]).masked_fill(target < 0, 0.0)
    smooth = (z.shape[-1] * total - z.sum(-1)).masked_fill(target < 0, 0.0)
    return nll, smooth, smooth_weight * smooth + nll_weight * nll


def loss_inputs(dtype, classes):
    generator = torch.Generator().manual_seed(0)
    shapes = ((9, 24), (classes, 24), (classes,))
    inputs = [torch.randn(shape, generator=generator) / 3 for shape in shapes]
    target = torch.randint(classes, (9,), generator=generator)
    target[::4], target[1], target[2] = -1, 0, classes - 1
    factors = torch.linspace(0.5, 2.0, 9)
    factors[5] = 0.0
    return [t.to(DEVICE, dtype) for t in inputs], target.to(DEVICE), factors.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "shared", "monotone"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def check_loss_and_every_gradient(dtype, kind, chunk_size):
    from multimax_fairseq.kernels.triton_cross_entropy import output_loss

    inputs, target, factors = loss_inputs(dtype, 2500)
    table = {None: None, "shared": far_table(1), "monotone": monotone_table(1, -0.5, 1.0)}[kind]
    smooth_weight = 0.1 / 2499  # smooth_weight * classes + nll_weight = 1
    nll_weight = 0.9 - smooth_weight

    def expected(dtype):
        learned = [t.to(dtype) for t in inputs]
        if table is not None:
            learned.append(table.to(torch.promote_types(dtype, torch.float32)))
        learned = [t.clone().requires_grad_() for t in learned]
        given = learned if table is not None else [*learned, None]
        nll, smooth, loss = plain_loss(*given, target, smooth_weight, nll_weight)
        grads = torch.autograd.grad(loss, learned, factors.to(loss.dtype))
        return [nll, smooth, *grads[:3], *by_parameter(grads[3:])]

    needed = (True,) * 4
    runs = []
    for _ in range(2):
        arguments = (*inputs, table, target, factors, smooth_weight, nll_weight, needed, chunk_size)
        nll, smooth, grads = output_loss(*arguments)
        assert nll.dtype == smooth.dtype == torch.float32
        assert (grads[3] is None) == (table is None)
        runs.append([nll, smooth, *(g for g in grads if g is not None)])
    ours = [*runs[0][:5], *by_parameter(runs[0][5:])]
    assert_as_accurate(ours, expected(dtype), expected(torch.float64))
    assert all(map(torch.equal, *runs))
    assert (runs[0][2][factors * (target >= 0) == 0] == 0).all()
    nll, smooth, grads = output_loss(
        *inputs, table, target, None, smooth_weight, nll_weight, needed, chunk_size
    )
    assert torch.equal(nll, runs[0][0]) and grads == [None] * 4
    for wanted in range(4 if kind == "monotone" and dtype == torch.float32 else 0):
        needed = [number == wanted for number in range(4)]
        grads = output_loss(
            *inputs, table, target, factors, smooth_weight, nll_weight, needed, chunk_size
        )[2]
        assert [g is not None for g in grads] == needed
        torch.testing.assert_close(grads[wanted], runs[0][2 + wanted])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [None, "shared", "monotone"])
def check_excluded_classes(dtype, kind):
    from multimax_fairseq.kernels.triton_cross_entropy import BLOCK, output_loss

    inputs, target, factors = loss_inputs(dtype, 5000)
    inputs[2][128:256] = inputs[2][BLOCK : 2 * BLOCK] = -math.inf
    target[(inputs[2][target.clamp(min=0)] == -math.inf)] = 0
    table = {None: None, "shared": -far_table(1), "monotone": monotone_table(1, -math.inf)}[kind]
    nll, _, grads = output_loss(*inputs, table, target, factors, 0.0, 1.0, (True,) * 4, None)
    learned = [t.double().requires_grad_() for t in inputs[:2]]
    expected, _, _ = plain_loss(*learned, inputs[2].double(), table, target, 0.0, 1.0)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {}
    torch.testing.assert_close(nll.double(), expected, check_dtype=False, **tolerance)
    assert all(g is None or g.isfinite().all() for g in grads)
    assert (grads[1][128:256] == 0).all() and (grads[2][BLOCK : 2 * BLOCK] == 0).all()
    # Nothing is read for a target that is not a class.
    target[1] = len(inputs[1])
    nll = output_loss(*inputs, table, target, None, 0.0, 1.0, (False,) * 4, None)[0]
    assert nll[1].isnan() and nll[2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("number", [math.inf, math.nan])
def check_a_monotone_modulator_hides_no_overflow(dtype, number):
    from multimax_fairseq.kernels.triton_cross_entropy import output_loss

    table = monotone_table(1, -2.0, 1.0)
    inputs, target, _ = loss_inputs(dtype, 2500)
    inputs[2][7] = number
    for kind in (table, torch.cat([-table[:, :8], table[:, 8:]], -1)):
        nll = output_loss(*inputs, kind, target, None, 0.0, 1.0, (False,) * 4, None)[0]
        assert not nll[target >= 0].isfinite().any()
        *attended, grad = attention_inputs(1, 1, 20, 40, 16, dtype)
        attended[1][0, 0, 3, 0] = number
        out = attend(attended, grad, kind)[0]
        # A score of -inf has no part.
        lost = attended[0][0, 0, :, 0] > (-math.inf if math.isnan(number) else 0)
        assert lost.any() and not out[0, 0, lost].isfinite().any()


# --- ahead of time -----------------------------------------------------------------------------

# The most that every GPU of these compute capabilities, 8.x and 9.0, offers a program.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}
FLOAT32 = set("TOTAL TABLE SINK DELTA NORM SUMS MEANS FACTORS NLL SMOOTH TABLE_GRAD".split())


def build_kernel(kernel, capability, element, arguments, **types):
    """Compile with these constants, everything else as a launch would pass it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = dict(arguments)
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in arguments:
            signature[name], constants[(index,)] = "constexpr", arguments[name]
        elif name.isupper() and len(name) > 1 or name in "QKV":
            signature[name] = types.get(name, "*fp32" if name in FLOAT32 else f"*{element}")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            floating = name in ("scale", "keep_scale", "smooth_weight", "nll_weight")
            signature[name] = "fp32" if floating else "i32"
            if name[-2:] in ("_b", "_h", "_n") and name != "t_h":
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    assert compiled.metadata.shared <= SHARED_MEMORY[capability]
    assert compiled.asm["cubin"]


@pytest.mark.parametrize(
    "capability, element, size, orders, masking, causal, dropout",
    [
        (90, "bf16", 64, (2, 2), 0, True, False),
        (90, "fp16", 80, (1, 2), 3, False, False),
        (80, "bf16", 64, (2, 2), 1, False, True),
        (80, "fp16", 128, (0, 0), 4, True, False),
        (80, "fp32", 32, (1, 0), 2, False, False),
    ],
)
def compile_attention(capability, element, size, orders, masking, causal, dropout):
    import multimax_fairseq.kernels.triton_attention_kernels as kernels
    from multimax_fairseq.kernels.launches import Call, candidates

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[element]
    summed, normed = sum(orders) > 0, element == "fp32" or masking > 2
    arguments = {"D": size, "WIDTH": 1 << (size - 1).bit_length(), "CAP": 2 * (element != "fp16")}
    arguments |= {"LOW": orders[0], "HIGH": orders[1], "MASKING": masking, "MONOTONE": summed}
    arguments |= {"CAUSAL": causal, "DROPOUT": dropout}
    arguments |= ({} if masking else {"MASK": None}) | ({} if summed else {"TABLE": None})
    later = {"NORMED": normed} | ({} if normed else {"NORM": None})
    sinks = {"SINKS": dropout} | ({} if dropout else {"SINK": None})
    for name, constants in (
        ("forward_kernel", sinks),
        ("mean_kernel", sinks | {"EXACT": element == "fp32"}),
        ("query_kernel", later | {"SUMMED": summed, "SINKS": dropout}),
        ("key_kernel", later),
    ):
        if name == "mean_kernel" and not normed:
            continue
        types = {"MASK": "*fp32" if masking > 2 else "*u8"}
        for launch in candidates(Call(name, dtype, arguments["WIDTH"], True), capability):
            chosen = arguments | constants | launch.arguments()
            build_kernel(getattr(kernels, name), capability, element, chosen, **types)


@pytest.mark.parametrize("capability, element", [(90, "bf16"), (80, "fp32")])
def compile_cross_entropy(capability, element):
    import multimax_fairseq.kernels.triton_cross_entropy as kernels

    arguments = {"ORDER": 2, "BLOCK": kernels.BLOCK, "num_warps": kernels.WARPS, "num_stages": 3}
    arguments |= {"MONOTONE": True, "CAP": 2, "GRADIENT": True, "SUMMED": True}
    build_kernel(kernels.loss_kernel, capability, element, arguments, TARGET="*i64")


@pytest.mark.parametrize("capability, element", [(90, "bf16"), (80, "fp32")])
def compile_modulator(capability, element):
    import multimax_fairseq.kernels.triton_modulator as kernels

    arguments = {"MONOTONE": True, "PIECE": kernels.PIECE, "BLOCK": kernels.BLOCK}
    arguments |= {"num_warps": kernels.WARPS, "num_stages": 3}
    build_kernel(kernels.modulate_kernel, capability, element, arguments, OUT="*fp32")
    build_kernel(kernels.modulate_backward_kernel, capability, element, arguments, GRAD="*fp32")
    kinds = {"OUT": "*fp32", "JACOBIAN": "*fp32"}
    build_kernel(
        kernels.tails_kernel, capability, element, {"num_warps": 1, "num_stages": 3}, **kinds
    )
