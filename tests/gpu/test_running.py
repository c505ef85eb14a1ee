"""How the public functions run on a GPU: precision, determinism, memory, graphs and compilation."""

import math

import pytest
import torch
from plain import DEVICE, ROUNDING, attention_inputs, loss_inputs, needs_gpu

from multimax_fairseq import Modulator, linear_cross_entropy, scaled_dot_product_attention
from multimax_fairseq.ops import backend

SMALL = (2, 2, 40, 40, 32)
attention_or_loss = pytest.mark.parametrize("kind", ["attention", "loss"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def make_step(kind, dtype, shape=SMALL, classes=2500, **options):
    """Return (inputs, step) of attention or of the output loss.

    `step()` returns [output, gradients with respect to inputs and modulator]. The modulator has
    no term of the first order: at its threshold the slope jumps, and rounding may change the side.
    Its gradients are one vector: each is a sum that cancels, whose relative error says little.
    """
    modulator = Modulator.from_values([1.0, 1.05], [1.0, 0.97], [0.3, -0.4], [0.6, 0.9]).to(DEVICE)
    if kind == "attention":
        *inputs, grad = attention_inputs(*shape, dtype)
        lengths = torch.tensor([shape[3], *[shape[3] // 2] * (shape[0] - 1)])[:, None, None, None]
        allowed = (torch.arange(shape[3]) < lengths).to(DEVICE)
        options = {"attn_mask": allowed, "is_causal": True} | options

        def forward(*inputs):
            return scaled_dot_product_attention(*inputs, modulator=modulator, **options)
    else:
        inputs, target, _ = loss_inputs(dtype, classes)
        grad = torch.ones((), device=DEVICE)
        options = {"label_smoothing": 0.1, "ignore_index": -1} | options

        def forward(features, weight, bias):
            return linear_cross_entropy(
                features, weight, target, bias=bias, modulator=modulator, **options
            )[0]

    def step(function=forward, inputs=inputs):
        inputs = [t.detach().requires_grad_() for t in inputs]
        output = function(*inputs)
        learned = [*inputs, *modulator.parameters()]
        grads = torch.autograd.grad(output, learned, grad.to(output.dtype))
        return [output.detach(), *grads[:3], torch.cat(grads[3:])]

    step.forward = forward
    return inputs, step


def step_in_plain_pytorch(step, monkeypatch, **given):
    with monkeypatch.context() as patch:
        patch.setenv(backend.VARIABLE, "plain")
        return step(**given)


def relative_error(ours, exact):
    return (ours.double() - exact.double()).norm().item() / (exact.double().norm().item() or 1.0)


@pytest.mark.parametrize(
    "kind, precision", [("attention", torch.bfloat16), ("loss", torch.float16)]
)
def test_step_under_autocast_is_as_accurate_as_plain_pytorch(kind, precision, monkeypatch):
    inputs, step = make_step(kind, torch.float32)
    exact = step_in_plain_pytorch(step, monkeypatch, inputs=[t.double() for t in inputs])
    with torch.autocast(DEVICE, precision):
        ours, theirs = step(), step_in_plain_pytorch(step, monkeypatch)
    limit = 2 * math.hypot(*map(relative_error, theirs, exact)) + ROUNDING
    assert math.hypot(*map(relative_error, ours, exact)) <= limit


@pytest.mark.parametrize("kind, dtype", [("attention", torch.bfloat16), ("loss", torch.float32)])
def test_step_is_deterministic(kind, dtype):
    options = {"dropout_p": 0.1} if kind == "attention" else {}
    _, step = make_step(kind, dtype, **options)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step())
    assert all(map(torch.equal, *runs[:2]))
    assert kind == "loss" or not torch.equal(runs[0][0], runs[2][0])


@pytest.mark.parametrize(
    "keys, queries, size",
    [(1, 1, 32), (1, 9, 32), (9, 1, 32), (63, 65, 32), (63, 65, 256)],
)
def test_attention_of_any_size_equals_plain_pytorch(keys, queries, size, monkeypatch):
    """A head of 256 is more than the kernels take."""
    _, step = make_step("attention", torch.float32, (1, 2, queries, keys, size))
    torch.testing.assert_close(
        step(), step_in_plain_pytorch(step, monkeypatch), rtol=1e-4, atol=1e-4
    )


@needs_gpu
@attention_or_loss
@dtypes
def test_step_runs_without_gpu_synchronization(kind, dtype):
    options = {"dropout_p": 0.1} if kind == "attention" else {"reduction": "mean"}
    _, step = make_step(kind, dtype, **options)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@attention_or_loss
def test_step_never_materializes_all_scores(kind):
    length, classes = 8192, 2**22
    _, step = make_step(kind, torch.bfloat16, (1, 4, length, length, 64), classes)
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    probabilities = 4 * length**2 * 2
    gradients_of_the_weight = classes * 24 * 2
    assert peak < (probabilities / 8 if kind == "attention" else 2 * gradients_of_the_weight)


@needs_gpu
@attention_or_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_compiled_equals_eager(kind, dtype):
    _, step = make_step(kind, dtype)
    compiled = torch.compile(step.forward, fullgraph=True)
    for ours, eager in zip(step(compiled), step(), strict=True):
        assert relative_error(ours, eager) <= 4 * torch.finfo(dtype).eps


@needs_gpu
@attention_or_loss
def test_step_in_a_cuda_graph_replays_on_new_inputs(kind):
    inputs, step = make_step(kind, torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in inputs:
        tensor.copy_(tensor.flip(0))
    graph.replay()
    assert all(map(torch.equal, captured, step()))
