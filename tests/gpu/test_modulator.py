"""The modulator kernels, element by element, against the plain formula in float64."""

import math

import pytest
import torch
from plain import (
    DEVICE,
    FAR,
    assert_as_accurate,
    by_parameter,
    far_parameters,
    modulated,
    monotone_parameters,
    soft_cap,
)


@pytest.mark.parametrize(
    "dtype, shape, kind",
    [
        (torch.float32, (5, 3, 20, 30), "shared"),
        (torch.float32, (3, 100, 90), "monotone"),
        (torch.float32, (3, 1, 1), "separate"),
        (torch.float16, (3, 100, 90), "separate"),
        (torch.bfloat16, (5, 3, 20, 30), "monotone"),
        (torch.float32, (5, 3, 20, 30), "soft-cap"),
        (torch.float16, (3, 100, 90), "soft-cap"),
    ],
)
def test_modulate_is_as_accurate_as_plain_pytorch(dtype, shape, kind):
    from multimax_fairseq.ops.triton.modulator import modulate, modulate_backward

    generator = torch.Generator().manual_seed(0)
    scores, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    scores, grad = (3 * scores).to(DEVICE, dtype), grad.to(DEVICE)
    rows = 1 if kind == "shared" else 3
    parameters = monotone_parameters(rows) if kind == "monotone" else far_parameters(rows)
    parameters = soft_cap() if kind == "soft-cap" else parameters

    def plain(wide):
        learned = [t.detach().to(wide).clone().requires_grad_() for t in (scores, parameters)]
        out = modulated(*learned)
        grad_scores, grad_parameters = torch.autograd.grad(out, learned, grad.to(wide))
        grad_scores = grad_scores if wide == torch.float64 else grad_scores.to(dtype)
        return [out.detach(), grad_scores, *by_parameter([grad_parameters])]

    out, (grad_scores, grad_parameters) = (
        modulate(scores, parameters),
        modulate_backward(grad, scores, parameters),
    )
    assert out.dtype == grad_parameters.dtype == torch.float32 and grad_scores.dtype == dtype
    assert (
        out.shape == grad_scores.shape == scores.shape and grad_parameters.shape == parameters.shape
    )
    ours = [out, grad_scores, *by_parameter([grad_parameters])]
    assert_as_accurate(ours, plain(torch.float32), plain(torch.float64))
    again = modulate_backward(grad, scores, parameters)
    assert all(map(torch.equal, (grad_scores, grad_parameters), again))
    turned = scores.mT.contiguous().mT
    assert torch.equal(modulate(turned, parameters), out)


def test_modulate_handles_infinite_and_empty_inputs():
    from multimax_fairseq.ops import modulator
    from multimax_fairseq.ops.triton.modulator import (
        MAX_DISTANCE,
        modulate,
        modulate_backward,
    )

    assert MAX_DISTANCE.value == modulator.MAX_DISTANCE
    ends = torch.tensor([-math.inf, -1e30, 1e30, math.inf, math.nan], device=DEVICE)
    for parameters in (
        far_parameters(1),
        monotone_parameters(1, -math.inf, math.inf),
        -far_parameters(1),
        soft_cap(),
    ):
        torch.testing.assert_close(
            modulate(ends, parameters),
            modulated(ends.view(1, 1, 5), parameters)[0, 0],
            equal_nan=True,
        )
        half = modulate(ends.half(), parameters)
        assert half[0] == -math.inf and half[3] == math.inf
        grads = modulate_backward(torch.zeros_like(ends), ends, parameters)
        assert (grads[0][:4] == 0).all()
    # Beyond the turns, values and gradients come from the last four columns alone.
    parameters = torch.tensor([[*FAR, -2.0, 1.0, -7.0, 9.0]], device=DEVICE)
    scores = torch.tensor([-3.0, -2.0, 1.0, 4.0], device=DEVICE)
    out = modulate(scores, parameters)
    assert out[0] == -10 and out[3] == 9
    torch.testing.assert_close(out[1:3], modulate(scores[1:3], parameters[:, :8]))
    outer = torch.tensor([2.0, 0.0, 0.0, 3.0], device=DEVICE)
    grad_scores, grad_parameters = modulate_backward(outer, scores, parameters)
    assert grad_scores.tolist() == [2, 0, 0, 0] and grad_parameters[0].tolist() == [0] * 10 + [2, 3]
    # Infinity and NaN stay unchanged beyond a turn.
    for dtype in (torch.float32, torch.float16):
        lost = torch.tensor([math.inf, math.nan, -math.inf], device=DEVICE, dtype=dtype)
        for kind in (parameters, -parameters):
            out = modulate(lost, torch.cat([kind[:, :8], parameters[:, 8:]], -1))
            assert out[0] == math.inf and out[1].isnan() and out[2] == -math.inf
    for shape in ((0,), (2, 3, 0, 4)):
        nothing = torch.zeros(shape, device=DEVICE)
        assert modulate(nothing, parameters).shape == shape
        assert (modulate_backward(nothing, nothing, parameters)[1] == 0).all()


def test_tails_equal_cpu_kernel():
    from multimax_fairseq.ops.modulator import _tails_in_cpp as in_cpp
    from multimax_fairseq.ops.triton.modulator import tails

    parameters = torch.randn(60, 8, generator=torch.Generator().manual_seed(2))
    parameters[::3] *= 0.02
    parameters[1::3, [1, 5]] = 0
    parameters[2::3, 3] = parameters[2::3, 2]
    for ours, compiled in zip(tails(parameters.to(DEVICE)), in_cpp(parameters), strict=True):
        torch.testing.assert_close(ours.cpu(), compiled, rtol=1e-4, atol=1e-4)
