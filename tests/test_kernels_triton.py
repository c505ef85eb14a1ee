"""The Triton kernels: against the plain path in Triton's interpreter, and compiled for two GPUs.

Functions named check_* run in a process of their own, since Triton decides at its import whether
it interprets; where there is a GPU, they run on it as well. Those named compile_* need no GPU.
"""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.functional import modulator

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def run_functions(prefix, tmp_path, **environment):
    """Collect this file's functions of that prefix in a fresh process."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), **environment}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider"]
    command += ["-o", f"python_functions={prefix}_*", __file__]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_kernels_equal_the_plain_path_in_the_interpreter(tmp_path):
    run_functions("check", tmp_path, TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: interpreted and compiled only")
def test_kernels_equal_the_plain_path_on_the_gpu(tmp_path):
    run_functions("check", tmp_path)


def test_kernels_compile_ahead_of_time(tmp_path):
    run_functions("compile", tmp_path)


# --- inputs, and what is right -----------------------------------------------------------------

if INTERPRETED:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    # The interpreter multiplies bfloat16 as if it were integers, and truncates where GPUs round.
    plain_dot, plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return plain_dot(self, widened(a), widened(b), *rest)

    def cast_impl(self, source, destination):
        if (source.dtype.scalar, destination.scalar) != (tl.float32, tl.bfloat16):
            return plain_cast(self, source, destination)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


# Far from the identity, with sparse and multi-modal signs in both orders.
FAR = ([1.9, 1.05], [0.4, 0.97], [0.3, -0.4], [0.6, 0.9])
NAMES = ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")


def far_modulator(heads, order=2, terms="both"):
    """Parameters a head, all different."""
    t_b, t_d, b, d = ([[v + 0.05 * h for v in row[:order]] for h in range(heads)] for row in FAR)
    low, high = ((t_b, b), (t_d, d))
    low = low if terms != "high" else (None, None)
    high = high if terms != "low" else (None, None)
    return Modulator.from_values(low[0], high[0], low[1], high[1]).to(DEVICE)


def as_table(module, heads):
    """The kernels' table, with zeros for what the module lacks."""
    columns = []
    for name in NAMES:
        parameter = getattr(module, name)
        column = torch.zeros(heads, 2) if parameter is None else parameter.detach().cpu()
        columns.append(F.pad(column, (0, 2 - column.shape[-1])))
    return torch.cat(columns, -1).float().to(DEVICE).requires_grad_()


def attention_inputs(batch, heads, length, keys, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, heads, n, size) for n in (length, keys, keys, length)]
    query, key, value, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    tensors = (1.5 * query, 1.5 * key, value, grad)
    return [t.to(DEVICE, dtype).requires_grad_(n < 3) for n, t in enumerate(tensors)]


def make_mask(kind, batch, length, keys):
    generator = torch.Generator().manual_seed(1)
    if kind is None:
        return None
    if kind == "padding":
        lengths = torch.tensor([keys, keys // 2])[:batch]
        return (torch.arange(keys) >= lengths[:, None]).view(batch, 1, 1, keys).to(DEVICE)
    mask = torch.rand(batch, 1, length, keys, generator=generator) < 0.4
    mask[0, :, length // 2] = True
    return mask.to(DEVICE)


# Scores and sums are formed in float32 in another order than the plain path's.
ROUNDING = 16 * torch.finfo(torch.float32).eps


def assert_as_accurate(ours, plain, exact):
    """At most twice the plain path's error in the same type, and some roundings of float32."""
    for number, (a, b, truth) in enumerate(zip(ours, plain, exact, strict=True)):
        error, plain_error = ((t.double() - truth).norm().item() for t in (a, b))
        limit = 2 * plain_error + ROUNDING * truth.norm().item()
        assert error <= limit, (number, error, plain_error, limit)


# --- attention ---------------------------------------------------------------------------------

CASES = [
    # type, (B, H, T, S, D), mask, causal, order, terms
    ("float32", (1, 2, 70, 70, 32), None, False, 2, "both"),
    ("float32", (1, 1, 100, 100, 64), None, True, 2, "both"),
    ("float32", (2, 2, 33, 75, 64), "padding", False, 2, "both"),
    ("float32", (2, 1, 50, 70, 32), "full", False, 2, "both"),
    ("float32", (2, 1, 70, 45, 32), "full", True, 2, "both"),
    ("float32", (2, 2, 40, 40, 16), "padding", True, 2, "both"),
    ("float32", (1, 2, 17, 41, 80), None, False, 1, "both"),
    ("float32", (1, 2, 37, 37, 128), None, True, 2, "low"),
    ("float32", (1, 2, 37, 40, 24), None, False, 2, "high"),
    ("float32", (1, 2, 40, 37, 32), None, False, 1, "low"),
    ("float32", (1, 2, 1, 9, 32), None, False, 1, "high"),
    ("float32", (2, 2, 50, 50, 64), "full", True, 2, None),
    ("float16", (2, 2, 150, 150, 64), None, True, 2, "both"),
    ("float16", (2, 2, 70, 90, 80), "padding", False, 2, "both"),
    ("float16", (2, 1, 130, 70, 128), "full", False, 1, "both"),
    ("float16", (2, 2, 100, 130, 64), None, False, 2, None),
    ("bfloat16", (2, 2, 150, 150, 64), None, True, 2, "both"),
    ("bfloat16", (2, 2, 90, 140, 32), "padding", False, 2, "both"),
    ("bfloat16", (2, 1, 130, 90, 128), "full", False, 2, "high"),
    ("bfloat16", (2, 2, 70, 150, 64), None, False, 1, "low"),
    ("bfloat16", (2, 2, 100, 130, 80), "padding", True, 2, None),
]


@pytest.mark.parametrize("dtype, shape, masking, causal, order, terms", CASES)
def check_attention_and_every_gradient(dtype, shape, masking, causal, order, terms):
    from multimax_fairseq.kernels.triton_attention import attention

    dtype, (batch, heads, length, keys, _) = getattr(torch, dtype), shape
    *low, grad = attention_inputs(*shape, dtype)
    wide = [t.detach().double().requires_grad_() for t in low]
    mask = make_mask(masking, batch, length, keys)
    options = {"attn_mask": None if mask is None else ~mask, "is_causal": causal}
    learned, table, names = [], None, []
    if terms is None:
        options["normalizer"] = "softmax"
    else:
        options["modulator"] = module = far_modulator(heads, order, terms)
        table = as_table(module, heads)
        names = [name for name in NAMES if getattr(module, name) is not None]
        learned = [getattr(module, name) for name in names]

    def outputs(inputs):
        out = scaled_dot_product_attention(*inputs, **options)
        return [out, *torch.autograd.grad(out, (*inputs, *learned), grad.to(out.dtype))]

    # One order too many reads the table's zeros, which changes nothing.
    told = {} if terms is None else {"order": order, "terms": terms}
    for extra in (told, {}) if order == 1 else (told,):
        out = attention(*low, table, mask=mask, is_causal=causal, **extra)
        grads = torch.autograd.grad(out, (*low, *([] if table is None else [table])), grad)
        ours = [out, *grads[:3]]
        for name in names:
            start = 2 * NAMES.index(name)
            ours.append(grads[3][:, start : start + order])
        assert out.dtype == dtype and out.shape == low[0].shape
        assert_as_accurate(ours, outputs(low), outputs(wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_what_is_excluded_has_no_part(dtype):
    from multimax_fairseq.kernels.triton_attention import attention

    *inputs, grad = attention_inputs(2, 2, 40, 70, 32, dtype)
    table = as_table(far_modulator(2), 2)
    mask = make_mask("full", 2, 40, 70) | make_mask("padding", 2, 40, 70)
    out = attention(*inputs, table, mask=mask)
    grads = torch.autograd.grad(out, (*inputs, table), grad)
    assert all(t.isfinite().all() for t in (out, *grads))
    assert (out[0, :, 20] == 0).all() and (grads[0][0, :, 20] == 0).all()
    assert all((t[1, :, 35:] == 0).all() for t in grads[1:3])
    nothing = attention(*inputs, table, mask=torch.ones_like(mask))
    grads = torch.autograd.grad(nothing, (*inputs, table), grad)
    assert all((t == 0).all() for t in (nothing, *grads))


def check_neutral_parameters_are_torchs_attention():
    from multimax_fairseq.kernels.triton_attention import attention

    *inputs, _ = attention_inputs(1, 2, 50, 50, 32)
    table = torch.zeros(2, 8, device=DEVICE)
    torch.testing.assert_close(
        attention(*inputs, table, is_causal=True),
        F.scaled_dot_product_attention(*inputs, is_causal=True),
    )


@pytest.mark.parametrize("scale", [0.3, -0.2, 0.0])
def check_scale(scale):
    from multimax_fairseq.kernels.triton_attention import attention

    *inputs, _ = attention_inputs(1, 2, 20, 20, 16)
    module = far_modulator(2)
    torch.testing.assert_close(
        attention(*inputs, as_table(module, 2), scale=scale),
        scaled_dot_product_attention(*inputs, modulator=module.float(), scale=scale),
    )


def check_strides_and_masks_of_any_rank():
    from multimax_fairseq.kernels.triton_attention import attention

    *inputs, _ = attention_inputs(2, 2, 20, 20, 32)
    table = as_table(far_modulator(2), 2)
    mask = torch.rand(20, 20, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.3
    expected = attention(*inputs, table, mask=mask.expand(2, 2, 20, 20).contiguous())
    # (B, T, H, D) in memory, as projections leave it, and a last dimension that is strided.
    query = inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    key = inputs[1].transpose(2, 3).contiguous().transpose(2, 3)
    out = attention(query, key, inputs[2], table, mask=mask)
    assert torch.equal(out, expected) and out.stride() == query.stride()
    ours = torch.autograd.grad(out.sum(), (*inputs, table))
    theirs = torch.autograd.grad(expected, (*inputs, table), torch.ones_like(expected))
    assert all(map(torch.equal, ours, theirs))
    shared = table.detach()[:1]
    assert torch.equal(
        attention(*inputs, shared.expand(2, 8)), attention(*inputs, shared.repeat(2, 1))
    )
    row = mask[0]
    assert torch.equal(
        attention(*inputs, table, mask=row), attention(*inputs, table, mask=row.expand(20, 20))
    )


def check_nothing_to_attend_to_or_from():
    from multimax_fairseq.kernels.triton_attention import attention

    table = as_table(far_modulator(2), 2)
    for length, keys in ((0, 5), (5, 0)):
        *inputs, grad = attention_inputs(1, 2, length, keys, 16)
        out = attention(*inputs, table)
        grads = torch.autograd.grad(out, (*inputs, table), grad)
        assert all((t == 0).all() for t in (out, *grads))


def check_scores_beyond_the_cap_stay_finite():
    from multimax_fairseq.kernels.triton_attention import attention
    from multimax_fairseq.kernels.triton_modulator import MAX_DISTANCE

    assert MAX_DISTANCE.value == modulator.MAX_DISTANCE
    *inputs, grad = attention_inputs(1, 1, 8, 8, 16)
    module = far_modulator(1).float()
    huge = [(inputs[0] * 1e10).detach(), (inputs[1] * 1e10).detach(), inputs[2]]
    torch.testing.assert_close(
        attention(*huge, as_table(module, 1)),
        scaled_dot_product_attention(*huge, modulator=module),
    )


def check_two_runs_agree_to_the_bit():
    from multimax_fairseq.kernels.triton_attention import attention

    *inputs, grad = attention_inputs(2, 2, 90, 90, 32, torch.float16)
    table = as_table(far_modulator(2), 2)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        out = attention(*inputs, table, is_causal=True, dropout_p=0.1)
        runs.append([out, *torch.autograd.grad(out, (*inputs, table), grad)])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("causal", [False, True])
def check_dropout(causal):
    from multimax_fairseq.kernels.triton_attention import attention

    keys, share = 128, 0.3
    query, key, _, grad = attention_inputs(2, 2, 90, keys, keys)
    module = far_modulator(2).float()
    table = as_table(module, 2)
    # With the identity as the values, the outputs are the probabilities.
    identity = torch.eye(keys, device=DEVICE).expand(2, 2, keys, keys)
    value = identity.clone().requires_grad_()
    torch.manual_seed(0)
    out = attention(query, key, value, table, is_causal=causal, dropout_p=share)
    probs = scaled_dot_product_attention(query, key, identity, modulator=module, is_causal=causal)
    seen = probs > 1e-30
    kept = (out != 0) & seen
    count = seen.sum().item()
    assert abs(kept.sum().item() / count - (1 - share)) < 4 * (share * (1 - share) / count) ** 0.5
    dense = probs * kept / (1 - share)
    torch.testing.assert_close(out, dense)
    # Rows, keys, heads and batches draw each for themselves.
    flat = torch.where(seen, kept.float() - (1 - share), 0.0)
    for shift, dim in ((1, -1), (4, -1), (1, -2), (32, -2), (1, 1), (1, 0)):
        together = (flat * flat.roll(shift, dim)).sum() / count
        assert together.abs() < 4 * share * (1 - share) / count**0.5
    ours = torch.autograd.grad(out, (query, key, value, table), grad)
    theirs = torch.autograd.grad(
        dense @ value, (query, key, value, *(getattr(module, name) for name in NAMES)), grad
    )
    torch.testing.assert_close(ours[:3], theirs[:3])
    torch.testing.assert_close(ours[3], torch.cat(theirs[3:], -1), rtol=1e-4, atol=1e-4)
    assert not torch.equal(out, attention(query, key, value, table, dropout_p=share))
    assert (attention(query, key, value, table, dropout_p=1.0) == 0).all()


def check_unserved_arguments_are_refused():
    from multimax_fairseq.kernels.triton_attention import attention

    query = torch.zeros(1, 2, 4, 16, device=DEVICE)
    wide = torch.zeros(1, 2, 4, 129, device=DEVICE)
    for tensors, table, mask, part in (
        ((wide,) * 3, None, None, "129"),
        ((query, query.half(), query), None, None, "float16"),
        ((query.double(),) * 3, None, None, "float64"),
        ((query,) * 3, torch.zeros(8, device=DEVICE), None, r"\(2, 8\)"),
        ((query,) * 3, None, torch.zeros(4, 4, device=DEVICE), "float32"),
    ):
        with pytest.raises(ValueError, match=part):
            attention(*tensors, table, mask=mask)


# --- the output loss ---------------------------------------------------------------------------


def loss_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    scores = (2 * torch.randn(6, 5000, generator=generator)).to(DEVICE, dtype)
    target = torch.tensor([0, 4999, -1, 3000, 17, -100], device=DEVICE)
    return scores, target, far_modulator(1)


def run_statistics(scores, table, target, tile):
    from multimax_fairseq.kernels.triton_cross_entropy import statistics

    state = torch.tensor([-torch.inf, 0, 0, 0], device=DEVICE).repeat(len(scores), 1)
    for first in range(0, scores.shape[1], tile):
        statistics(scores[:, first : first + tile], table, target, first, state)
    return state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modulated", [False, True])
def check_statistics(dtype, modulated):
    scores, target, module = loss_inputs(dtype)
    table = as_table(module, 1)[0].detach() if modulated else None

    def expected(scores):
        z = scores if table is None else module(scores[:, None, None])[:, 0, 0]
        top = z.amax(-1)
        hit = z.gather(-1, target.clamp(min=0)[:, None])[:, 0]
        total = (z - top[:, None]).exp().sum(-1)
        return [top, total, z.sum(-1), hit.masked_fill(target < 0, 0.0)]

    exact = expected(scores.double())
    module.float()
    for tile in (1700, 5000):
        ours = run_statistics(scores, table, target, tile).unbind(-1)
        assert_as_accurate(ours, expected(scores.float()), exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("modulated", [False, True])
def check_gradient(dtype, modulated):
    from multimax_fairseq.kernels.triton_cross_entropy import gradient

    scores, target, module = loss_inputs(dtype)
    table = as_table(module, 1)[0].detach() if modulated else None
    row_scale = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.5, 0.0], device=DEVICE)
    share, hit = 0.01, 0.9
    scores[5] = torch.nan  # a row that does not count, whatever it holds

    def expected(scores):
        scores = scores.masked_fill(row_scale[:, None] == 0, 0.0).requires_grad_()
        z = scores if table is None else module(scores[:, None, None])[:, 0, 0]
        grad = z.softmax(-1) - share
        grad = grad - hit * F.one_hot(target.clamp(min=0), z.shape[-1])
        grad = (grad * row_scale[:, None]).detach()
        # A row at a time, for the parameters' gradients.
        rows = [torch.zeros(8, dtype=z.dtype, device=DEVICE) for _ in scores]
        if table is not None:
            learned = [getattr(module, name) for name in NAMES]
            for row in range(len(rows)):
                grads = torch.autograd.grad(z[row], learned, grad[row], retain_graph=True)
                rows[row] = torch.cat([g.flatten() for g in grads])
        log_total = z.logsumexp(-1).detach()
        return log_total, [torch.autograd.grad(z, scores, grad)[0], torch.stack(rows)]

    log_total, exact = expected(scores.double())
    module.float()
    plain = expected(scores.float())[1]
    plain[0] = plain[0].to(dtype)
    runs = []
    for tile in (1700, 1700, 5000):
        out = scores.clone()
        table_grad = torch.zeros(6, 8, device=DEVICE)
        for first in range(0, 5000, tile):
            part = out[:, first : first + tile]
            gradient(
                part, table, target, first, log_total.float(), row_scale, share, hit, part,
                table_grad if modulated else None,
            )  # fmt: skip
        assert_as_accurate([out, table_grad], plain, exact)
        assert (out[row_scale == 0] == 0).all() and (table_grad[row_scale == 0] == 0).all()
        runs.append((out, table_grad))
    assert all(map(torch.equal, *runs[:2]))


# --- as they are called ------------------------------------------------------------------------


@pytest.mark.parametrize("order, terms", [(2, "both"), (1, "low"), (2, "high")])
@pytest.mark.parametrize("form", ["bool", "float"])
def check_attention_as_it_is_called(form, order, terms):
    *parts, grad = attention_inputs(2, 2, 30, 41, 32)
    allowed = ~make_mask("padding", 2, 30, 41)
    mask = allowed
    if form == "float":
        mask = torch.zeros(allowed.shape, device=DEVICE).masked_fill(~allowed, -torch.inf)
    found = []
    for backend, dtype in (("triton", None), ("plain", None), ("plain", torch.float64)):
        module = far_modulator(2, order, terms).to(dtype or torch.float32)
        inputs = [part.detach().to(dtype or part.dtype).requires_grad_() for part in parts]
        chosen = mask if backend == "triton" else allowed
        output = scaled_dot_product_attention(
            *inputs, modulator=module, attn_mask=chosen, is_causal=True, backend=backend
        )
        learned = [*inputs, *module.parameters()]
        found.append([output, *torch.autograd.grad(output, learned, grad.to(output.dtype))])
    assert found[0][0].grad_fn.name() == "_AttentionBackward"
    assert_as_accurate(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("modulated", [False, True])
def check_loss_as_it_is_called(monkeypatch, dtype, reduction, modulated):
    from multimax_fairseq.kernels import triton_cross_entropy

    generator = torch.Generator().manual_seed(0)
    features, weight, bias = (
        torch.randn(shape, generator=generator).to(DEVICE, dtype)
        for shape in ((13, 24), (70, 24), (70,))
    )
    target = torch.randint(70, (13,), generator=generator).to(DEVICE)
    target[::4] = 1
    found, calls = [], []
    statistics = triton_cross_entropy.statistics
    monkeypatch.setattr(
        triton_cross_entropy, "statistics", lambda *a: calls.append(1) or statistics(*a)
    )
    for backend, to in (("triton", dtype), ("plain", dtype), ("plain", torch.float64)):
        monkeypatch.setenv("MULTIMAX_BACKEND", backend)
        module = Modulator.from_values(*FAR).to(DEVICE, to) if modulated else None
        inputs = [t.detach().to(to).requires_grad_() for t in (features, weight, bias)]
        loss, nll_loss = linear_cross_entropy(
            *inputs[:2],
            target,
            bias=inputs[2],
            modulator=module,
            label_smoothing=0.1,
            ignore_index=1,
            reduction=reduction,
            chunk_size=5,
        )
        learned = [*inputs, *(module.parameters() if modulated else [])]
        grads = torch.autograd.grad(loss.sum(), learned)
        found.append([loss, nll_loss, *grads])
    assert calls
    assert_as_accurate(*found)


# --- ahead of time -----------------------------------------------------------------------------

# The smallest that a GPU of compute capability 8.0 or above offers a program.
SHARED_MEMORY = 99 * 1024
FLOAT32 = ("TOTAL", "TABLE", "DELTA", "SUMS", "STATE", "ROW_SCALE", "TABLE_GRAD")
INTEGERS = {"MASK": "*u8", "TARGET": "*i64"}


def build_kernel(kernel, capability, element, arguments):
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
            signature[name] = INTEGERS.get(name, "*fp32" if name in FLOAT32 else f"*{element}")
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            floating = name in ("scale", "keep_scale", "share", "hit")
            signature[name] = "fp32" if floating else "i32"
            if name[-2:] in ("_b", "_h", "_n"):
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=options | {"enable_fp_fusion": True})
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert compiled.asm["cubin"]


@pytest.mark.parametrize(
    "capability, element, size, orders, masking, causal, dropout",
    [
        (90, "bf16", 64, (2, 2), 0, True, False),
        (90, "fp16", 80, (1, 2), 1, False, False),
        (80, "bf16", 64, (2, 2), 1, False, True),
        (80, "fp16", 128, (0, 0), 2, True, False),
        (80, "fp32", 32, (1, 0), 0, False, False),
    ],
)
def compile_attention(capability, element, size, orders, masking, causal, dropout):
    import multimax_fairseq.kernels.triton_attention as kernels

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[element]
    arguments = {"D": size, "WIDTH": 1 << (size - 1).bit_length(), "CAP": element != "fp16"}
    arguments |= {"LOW": orders[0], "HIGH": orders[1], "MASKING": masking}
    arguments |= {"CAUSAL": causal, "DROPOUT": dropout}
    if not masking:
        arguments["MASK"] = None
    summed = sum(orders) > 0
    if not summed:
        arguments["TABLE"] = None
    extra = {"EXACT": element == "fp32", "SUMMED": summed} | ({} if summed else {"SUMS": None})
    for kernel, blocks, constants in (
        (kernels.forward_kernel, kernels.FORWARD, {}),
        (kernels.query_kernel, kernels.QUERIES, extra),
        (kernels.key_kernel, kernels.KEYS, {}),
    ):
        chosen = kernels.launch(blocks, dtype, arguments["WIDTH"])
        build_kernel(kernel, capability, element, arguments | constants | chosen)


@pytest.mark.parametrize("capability, element", [(90, "bf16"), (80, "fp32")])
def compile_cross_entropy(capability, element):
    import multimax_fairseq.kernels.triton_cross_entropy as kernels

    shared = {"ORDER": 2, "BLOCK": kernels.BLOCK, "num_warps": kernels.WARPS, "num_stages": 3}
    build_kernel(kernels.statistics_kernel, capability, element, shared)
    build_kernel(kernels.gradient_kernel, capability, element, shared | {"SUMMED": True})
