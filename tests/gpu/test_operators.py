"""The registered operators over the Triton kernels."""

import pytest
import torch
from plain import (
    DEVICE,
    attend,
    attention_inputs,
    far_parameters,
    loss_inputs,
    make_mask,
    monotone_parameters,
)
from torch._subclasses import FakeTensorMode

import multimax_fairseq  # noqa: F401

OPERATORS = torch.ops.multimax_fairseq


def test_attention_returns_zeros_for_empty_inputs():
    for length, keys in ((0, 5), (5, 0)):
        *inputs, grad = attention_inputs(1, 2, length, keys, 16)
        inputs = [t.requires_grad_() for t in inputs]
        for parameters in (far_parameters(2), monotone_parameters(1), None):
            numbers = (parameters, *[None] * 5, False, 0.0, 1.0, 2, 2, None, None, False)
            out, _ = OPERATORS.attention(*inputs, *numbers)
            grads = torch.autograd.grad(out, inputs, grad)
            assert all((t == 0).all() for t in (out, *grads))


def laid_out(tensors):
    return [(t.dtype, tuple(t.shape), t.stride()) for t in tensors]


def assert_as_fake(operator, *arguments):
    """Check that outputs have the strides of the fake kernel and share no memory; return them."""
    found = operator(*arguments)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        assert laid_out(operator(*fakes)) == laid_out(found)
    addresses = [t.untyped_storage().data_ptr() for t in found if t.numel() > 0]
    assert len(set(addresses)) == len(addresses)
    return found


LAYOUTS = {
    "as projections leave it": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "turned": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2],
    "expanded": lambda t: t[..., :1].expand(t.shape),
}


@pytest.mark.parametrize(
    "layout, scale", zip(LAYOUTS, (0.3, -0.3, 0.3, -0.3), strict=True), ids=LAYOUTS
)
def test_attention_strides_equal_fake_kernel(layout, scale):
    query, key, value, grad = map(LAYOUTS[layout], attention_inputs(2, 3, 5, 7, 32))
    sink = torch.zeros(3, device=DEVICE)
    numbers = (far_parameters(1), None, sink, None, None, None, False, 0.0, scale, 2, 2, None, None)
    output = assert_as_fake(OPERATORS.attention, query, key, value, *numbers, True)
    assert_as_fake(OPERATORS.attention_backward, grad, *output, query, key, value, *numbers)


@pytest.mark.parametrize("turn", [False, True])
def test_output_loss_strides_equal_fake_kernel(turn):
    (features, weight, bias), target, factors = loss_inputs(torch.float32, 50)
    if turn:
        features, weight = (t.mT.contiguous().mT for t in (features, weight))
    numbers = (0.0, 1.0, 0.01, 0.0, -1, None, False)
    layer = (weight, bias, far_parameters(1))
    for count in (None, 0):
        for some in (factors, None):
            rows, some = (t if t is None else t[:count] for t in (target, some))
            call = (features[:count], *layer, rows, *numbers)
            assert_as_fake(OPERATORS.output_loss_parts, *call, some, [True] * 4)


def test_output_loss_gives_nan_for_out_of_range_target():
    (features, weight, bias), _, _ = loss_inputs(torch.float32, 50)
    features.requires_grad_(), weight.requires_grad_()
    target = torch.full((len(features),), 3, device=DEVICE)
    target[1] = 50
    numbers = (0.0, 1.0, 0.0, 0.0, -1, None, False, True)
    loss, _ = OPERATORS.output_loss(features, weight, bias, None, target, *numbers)
    loss.backward()
    assert loss.isnan() and weight.grad.isnan().all()
    wrong = torch.arange(len(features), device=DEVICE) == 1
    assert torch.equal(features.grad.isnan().all(1), wrong)
    assert torch.equal(features.grad.isnan().any(1), wrong)


@pytest.mark.parametrize("dtype, masking", [(torch.float32, None), (torch.bfloat16, "added")])
def test_run_fastest_can_repeat_a_launch(dtype, masking, monkeypatch):
    """Autotuning launches a kernel several times."""
    from multimax_fairseq.ops.triton import attention as kernels

    *inputs, grad = attention_inputs(1, 2, 20, 30, 16, dtype)
    arguments = (inputs, grad, far_parameters(2), make_mask(masking, 1, 2, 20, 30))
    sink = torch.zeros(2, device=DEVICE)
    first = attend(*arguments, sink=sink)
    once = kernels._run_fastest

    def twice(*call):
        once(*call)
        return once(*call)

    monkeypatch.setattr(kernels, "_run_fastest", twice)
    assert all(map(torch.equal, first, attend(*arguments, sink=sink)))
