"""The kernels of the output loss against the plain formula in float64."""

import math

import pytest
import torch
from plain import (
    assert_as_accurate,
    attend,
    attention_inputs,
    by_parameter,
    far_parameters,
    loss_inputs,
    monotone_parameters,
    plain_entropy,
    plain_loss,
    soft_cap,
)


@pytest.mark.parametrize(
    "dtype, kind, chunk_size",
    [
        (torch.float32, None, 4),
        (torch.float32, "monotone", None),
        (torch.float32, "soft-cap", 4),
        (torch.float16, "shared", 4),
        (torch.bfloat16, "monotone", 4),
        (torch.bfloat16, None, None),
    ],
)
def test_output_loss_equals_plain_formula_and_gradients(dtype, kind, chunk_size):
    from multimax_fairseq.ops.linear_loss import LossCall
    from multimax_fairseq.ops.triton.cross_entropy import output_loss

    inputs, target, factors = loss_inputs(dtype, 2500)
    parameters = {
        None: None,
        "shared": far_parameters(1),
        "monotone": monotone_parameters(1, -0.5, 1.0),
        "soft-cap": soft_cap(),
    }[kind]
    smooth_weight = 0.1 / 2499  # smooth_weight * classes + nll_weight = 1
    nll_weight = 0.9 - smooth_weight

    def expected(dtype):
        learned = [t.to(dtype) for t in inputs]
        if parameters is not None:
            learned.append(parameters.to(torch.promote_types(dtype, torch.float32)))
        learned = [t.clone().requires_grad_() for t in learned]
        given = learned if parameters is not None else [*learned, None]
        nll, loss = plain_loss(*given, target, smooth_weight, nll_weight, 0.01)
        grads = torch.autograd.grad(loss, learned, factors.to(loss.dtype))
        return [nll, loss, *grads[:3], *by_parameter(grads[3:])]

    needed = (True,) * 4
    runs = []
    for _ in range(2):
        call = LossCall(
            *inputs, parameters, target, smooth_weight, nll_weight, 0.01, 0.0, -1, chunk_size, False
        )
        nll, loss, grads = output_loss(call, factors, needed)
        assert nll.dtype == loss.dtype == torch.float32
        assert (grads[3] is None) == (parameters is None)
        runs.append([nll, loss, *(g for g in grads if g is not None)])
    ours = [*runs[0][:5], *by_parameter(runs[0][5:])]
    assert_as_accurate(ours, expected(dtype), expected(torch.float64))
    assert all(map(torch.equal, *runs))
    assert (runs[0][2][factors * (target >= 0) == 0] == 0).all()
    nll, loss, grads = output_loss(call, None, needed)
    assert torch.equal(nll, runs[0][0]) and grads == [None] * 4
    for wanted in range(4 if kind == "monotone" and dtype == torch.float32 else 0):
        needed = [number == wanted for number in range(4)]
        grads = output_loss(call, factors, needed)[2]
        assert [g is not None for g in grads] == needed
        torch.testing.assert_close(grads[wanted], runs[0][2 + wanted])


@pytest.mark.parametrize(
    "dtype, kind, chunk_size",
    [
        (torch.float32, None, 4),
        (torch.float32, "monotone", None),
        (torch.float32, "soft-cap", None),
        (torch.float16, "shared", None),
        (torch.bfloat16, "shared", 4),
    ],
)
def test_entropy_equals_plain_formula_and_gradients(dtype, kind, chunk_size):
    from multimax_fairseq.ops.linear_loss import LossCall
    from multimax_fairseq.ops.triton.cross_entropy import output_loss

    inputs, target, factors = loss_inputs(dtype, 2500)
    inputs[2][2048:2100] = -math.inf  # excluded classes
    target[(inputs[2][target.clamp(min=0)] == -math.inf)] = 0
    parameters = {
        None: None,
        "shared": -far_parameters(1),
        "monotone": monotone_parameters(1, -math.inf, 1.0),
        "soft-cap": soft_cap(),
    }[kind]
    factors = torch.stack([factors, 2 * factors - 3], -1)
    factors[5] = 0.0

    def expected(dtype):
        learned = [t.to(dtype) for t in inputs]
        if parameters is not None:
            learned.append(parameters.to(torch.promote_types(dtype, torch.float32)))
        learned = [t.clone().requires_grad_() for t in learned]
        given = learned if parameters is not None else [*learned, None]
        results = plain_entropy(*given, target)
        grads = torch.autograd.grad(results, learned, [*factors.to(results[0].dtype).unbind(-1)])
        return [*results, *grads[:3], *by_parameter(grads[3:])]

    call = LossCall(*inputs, parameters, target, 0.0, 1.0, 0.0, 0.0, -1, chunk_size, True)
    nll, entropy, grads = output_loss(call, factors, (True,) * 4)
    ours = [nll, entropy, *grads[:3], *by_parameter([g for g in grads[3:] if g is not None])]
    assert_as_accurate(ours, expected(dtype), expected(torch.float64))
    assert (grads[0][(target < 0) | (factors == 0).all(-1)] == 0).all()
    again = output_loss(call, None, (False,) * 4)
    assert torch.equal(again[0], nll) and torch.equal(again[1], entropy)


@pytest.mark.parametrize(
    "dtype, kind",
    [
        (torch.float32, None),
        (torch.float32, "monotone"),
        (torch.float32, "soft-cap"),
        (torch.float16, "shared"),
    ],
)
def test_output_loss_ignores_excluded_classes(dtype, kind):
    from multimax_fairseq.ops.linear_loss import LossCall
    from multimax_fairseq.ops.triton.cross_entropy import BLOCK, output_loss

    inputs, target, factors = loss_inputs(dtype, 5000)
    inputs[2][128:256] = inputs[2][BLOCK : 2 * BLOCK] = -math.inf
    target[(inputs[2][target.clamp(min=0)] == -math.inf)] = 0
    parameters = {
        None: None,
        "shared": -far_parameters(1),
        "monotone": monotone_parameters(1, -math.inf),
        "soft-cap": soft_cap(),
    }[kind]
    call = LossCall(*inputs, parameters, target, 0.0, 1.0, 0.0, 0.0, -1, None, False)
    nll, _, grads = output_loss(call, factors, (True,) * 4)
    learned = [t.double().requires_grad_() for t in inputs[:2]]
    expected, _ = plain_loss(*learned, inputs[2].double(), parameters, target, 0.0, 1.0)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {}
    torch.testing.assert_close(nll.double(), expected, check_dtype=False, **tolerance)
    assert all(g is None or g.isfinite().all() for g in grads)
    assert (grads[1][128:256] == 0).all() and (grads[2][BLOCK : 2 * BLOCK] == 0).all()
    # Nothing is read for a target that is not a class.
    target[1] = len(inputs[1])
    nll = output_loss(call, None, (False,) * 4)[0]
    assert nll[1].isnan() and nll[2:].isfinite().all()


@pytest.mark.parametrize(
    "dtype, number",
    [(torch.float32, math.inf), (torch.float16, math.nan), (torch.bfloat16, math.inf)],
)
def test_monotone_modulator_propagates_overflow(dtype, number):
    from multimax_fairseq.ops.linear_loss import LossCall
    from multimax_fairseq.ops.triton.cross_entropy import output_loss

    parameters = monotone_parameters(1, -2.0, 1.0)
    inputs, target, _ = loss_inputs(dtype, 2500)
    inputs[2][7] = number
    for kind in (parameters, torch.cat([-parameters[:, :8], parameters[:, 8:]], -1)):
        nll = output_loss(
            LossCall(*inputs, kind, target, 0.0, 1.0, 0.0, 0.0, -1, None, False), None, (False,) * 4
        )[0]
        assert not nll[target >= 0].isfinite().any()
        *attended, grad = attention_inputs(1, 1, 20, 40, 16, dtype)
        attended[1][0, 0, 3, 0] = number
        out = attend(attended, grad, kind)[0]
        # A score of -inf has no part.
        lost = attended[0][0, 0, :, 0] > (-math.inf if math.isnan(number) else 0)
        assert lost.any() and not out[0, 0, lost].isfinite().any()
