"""Top-k scores for beam search: of each row, and of an output layer."""

import math

import numpy as np
import pytest
import reference
import torch

from multimax_fairseq import Modulator
from multimax_fairseq.ops import native
from multimax_fairseq.ops.best_outputs import best_outputs, best_scores

OPERATORS = torch.ops.multimax_fairseq
needs_kernel = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")


@pytest.mark.parametrize("backend", ["auto", "plain"])
@pytest.mark.parametrize("rows, classes", [(1, 1), (3, 17), (7, 130), (2, 1000), (5, 6007)])
def test_best_scores_equal_sorted_scores_and_logsumexp(rows, classes, backend, monkeypatch):
    monkeypatch.setenv("MULTIMAX_BACKEND", backend)
    random = np.random.default_rng(rows + classes)
    for scale in (1e-3, 1.0, 30.0, 1e30):
        scores = (random.standard_normal((rows, classes)) * scale).astype(np.float32)
        orders = {"as drawn": scores, "rising": np.sort(scores), "falling": -np.sort(-scores)}
        for given in orders.values():
            for count in {1, min(13, classes), classes}:
                values, indices, totals = best_scores(torch.tensor(given), count)
                wanted = -np.sort(-given)[:, :count]
                assert np.array_equal(values.numpy(), wanted)
                assert np.array_equal(np.take_along_axis(given, indices.numpy(), 1), wanted)
                assert all(len(set(row)) == count for row in indices.tolist())
                wide = given.astype(np.float64)
                total = wide.max(1) + np.log(np.exp(wide - wide.max(1)[:, None]).sum(1))
                assert np.allclose(totals.numpy(), total, rtol=3e-7, atol=3e-7)


def test_best_scores_handles_ties_infinity_and_nan():
    infinite = math.inf
    scores = torch.full((5, 400), -infinite)
    scores[1] = 2.0
    scores[2, 300] = infinite
    scores[3, 7], scores[3, 399] = 1.0, 1.0
    scores[4] = torch.arange(400.0)
    values, indices, totals = best_scores(scores, 3)
    assert totals[:4].tolist() == pytest.approx(
        [-infinite, 2 + math.log(400), infinite, 1 + math.log(2)]
    )
    assert values[2, 0] == infinite and indices[2, 0] == 300
    assert indices[3, :2].tolist() == [7, 399] and values[3].tolist() == [1, 1, -infinite]
    assert values[4].tolist() == [399, 398, 397] and values[1].tolist() == [2, 2, 2]
    for position in (0, 150, 399):
        broken = torch.randn(2, 400)
        broken[0, position] = math.nan
        assert best_scores(broken, 3)[2].isnan().tolist() == [True, False]
        broken[0, 3] = infinite
        assert best_scores(broken, 3)[2].isnan().tolist() == [True, False]


@needs_kernel
def test_best_scores_orders_ties_by_index():
    assert best_scores(torch.full((1, 20), 2.0), 3)[1].tolist() == [[0, 1, 2]]


def test_best_scores_accepts_other_layouts_and_dtypes():
    scores = torch.randn(6, 50)
    wanted = scores.topk(4)
    for given in (
        scores.t().contiguous().t(), scores.double(), scores.clone().requires_grad_(),
        scores[:, None].expand(6, 2, 50)[:, 1],
    ):  # fmt: skip
        values, indices, totals = best_scores(given, 4)
        assert torch.equal(values.float(), wanted.values) and not values.requires_grad
        assert torch.equal(indices, wanted.indices)
        torch.testing.assert_close(totals.float(), scores.logsumexp(1))
    half = best_scores(scores.half(), 4)
    assert half[0].dtype == torch.float16
    assert [x.shape for x in best_scores(torch.empty(0, 5), 2)] == [(0, 2), (0, 2), (0,)]
    operator = OPERATORS.best_scores
    compiled = torch.compile(lambda x: operator(x, 4), backend="aot_eager", fullgraph=True)
    for found, other in zip(compiled(scores), best_scores(scores, 4), strict=True):
        assert torch.equal(found, other)
    torch.library.opcheck(torch.ops.multimax_fairseq.best_scores.default, (scores, 4))


@pytest.mark.parametrize(
    "scores, count, said",
    [
        (torch.zeros(3), 1, r"must be a matrix, .* got torch.float32 \[3\]"),
        (torch.zeros(3, 4, dtype=torch.long), 1, "got torch.int64"),
        (torch.zeros(3, 4), 0, "between 1 and 4 scores, got 0"),
        (torch.zeros(3, 4), 5, "got 5"),
        (torch.zeros(3, 4), True, "got True"),
        (torch.zeros(3, 4), 1.0, "got 1.0"),
        (torch.zeros(3, 0), 1, "got 1"),
    ],
)
def test_best_scores_refuses_invalid_arguments(scores, count, said):
    with pytest.raises(ValueError, match=said):
        best_scores(scores, count)
    if scores.dtype == torch.float32 and isinstance(count, int):
        with pytest.raises(ValueError, match="scores must be|count"):
            OPERATORS.best_scores(scores, 9)


# --- top k of an output layer, without materializing all scores ----------------------------------


def some_output(tokens, classes, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*n, generator=generator) for n in ((tokens, size), (classes, size))] + [
        torch.randn(classes, generator=generator)
    ]


def exact(features, weight, bias, sigma):
    """Return the scores and their log-sum-exp in float64."""
    scores = features.numpy().astype(np.float64) @ weight.numpy().astype(np.float64).T
    scores = scores if bias is None else scores + bias.numpy()
    scores = scores if sigma is None else reference.sigma(scores, *sigma)
    top = scores.max(1)
    return scores, top + np.log(np.exp(scores - top[:, None]).sum(1))


@pytest.fixture
def at_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "tokens, classes, size, count, apart",
    [
        (1, 1, 1, 1, ()),
        (3, 17, 5, 14, (2, 16, 0)),
        (17, 129, 16, 129, ()),
        (300, 260, 24, 9, (2, 3, 1)),  # two blocks of tokens
        (5, 3000, 64, 256, (2999, 2999)),  # a class twice
    ],
)
def test_best_outputs_equal_float64_scores(
    tokens, classes, size, count, apart, threads, at_threads
):
    at_threads(threads)
    features, weight, bias = some_output(tokens, classes, size)
    sigma = ([0.4, 0.9], [1.5, 1.1], [-0.3, -1.0], [0.2, 0.7])
    for given, numbers in ((None, None), (bias, None), (bias, sigma)):
        modulator = None if numbers is None else Modulator.from_values(*numbers)
        found = best_outputs(features, weight, given, modulator, count, apart)
        values, indices, totals, scores_apart = (x.numpy() for x in found)
        scores, total = exact(features, weight, given, numbers)
        close = dict(rtol=1e-5, atol=1e-5 * np.abs(scores).max())
        np.testing.assert_allclose(totals, total, **close)
        np.testing.assert_allclose(scores_apart, scores[:, list(apart)], **close)
        scores[:, list(apart)] = -math.inf
        wanted = -np.sort(-scores)[:, :count]
        np.testing.assert_allclose(values, wanted, **close)
        there = wanted > -math.inf
        at = np.take_along_axis(scores, indices, 1)
        np.testing.assert_allclose(at[there], wanted[there], **close)
        for row, kept in zip(indices, there, strict=True):
            assert len(set(row[kept])) == kept.sum()


@needs_kernel
def test_best_outputs_handles_ties_infinity_and_nan():
    features = torch.eye(4, 8)
    weight = torch.zeros(300, 8)
    weight[7, 0] = weight[200, 0] = weight[290, 0] = 3.0  # ties
    weight[150, 1], weight[151, 2] = math.nan, math.inf
    weight[:, 3] = -math.inf
    weight[:2, 3] = 2.0
    values, indices, totals, _ = best_outputs(features.clone(), weight, None, None, 3)
    # 0 times infinity is NaN in some rows only.
    assert totals.isnan().all()
    for row, columns in enumerate(weight.T[:4]):
        alone = torch.zeros(300, 8)
        alone[:, row] = columns
        values, indices, totals, _ = best_outputs(features[row, None], alone, None, None, 3)
        if row == 0:
            assert indices.tolist() == [[7, 200, 290]] and values.tolist() == [[3.0] * 3]
        elif row < 3:
            assert totals.isnan().all()
        else:
            assert values.tolist() == [[2.0, 2.0, -math.inf]] and indices[0, :2].tolist() == [0, 1]
            assert totals[0].item() == pytest.approx(2 + math.log(2))
    none = best_outputs(features[:1], torch.zeros(300, 8), torch.full((300,), -math.inf), None, 2)
    assert none[0].tolist() == [[-math.inf] * 2] and none[2].tolist() == [-math.inf]


@needs_kernel
def test_best_outputs_accepts_layouts_and_checks_arguments(monkeypatch):
    features, weight, bias = some_output(6, 50, 8)
    modulator = Modulator()
    wanted = best_outputs(features, weight, bias, modulator, 4, (2, 1))
    for changed in (
        lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
        lambda x: torch.nn.Parameter(x.clone()),
        lambda x: torch.stack([x, x], -1)[..., 0],
    ):
        given = [changed(x) for x in (features, weight, bias)]
        for found, other in zip(
            best_outputs(*given, modulator, 4, (2, 1)), wanted, strict=True
        ):  # fmt: skip
            assert torch.equal(found, other) and not found.requires_grad
    assert best_outputs(features[:0], weight, bias, None, 4) is None
    assert best_outputs(*(x.double() for x in (features, weight, bias)), None, 4) is None
    assert best_outputs(features, torch.zeros(300, 8), None, None, 257) is None
    table = torch.zeros(1, 8)
    operator = OPERATORS.best_outputs
    compiled = torch.compile(lambda *x: operator(*x, 4, (1,)), backend="aot_eager", fullgraph=True)
    inputs = (features, weight, bias, table)
    for found, other in zip(compiled(*inputs), operator(*inputs, 4, (1,)), strict=True):
        assert torch.equal(found, other)
    torch.library.opcheck(torch.ops.multimax_fairseq.best_outputs.default, (*inputs, 4, [2, 1]))
    with pytest.raises(RuntimeError, match="best_outputs has no gradient"):
        operator(features.clone().requires_grad_(), *inputs[1:], 4, [])[0].sum().backward()
    for count, apart, said in ((0, [], "count must"), (51, [], "got 51"), (4, [50], "got .50.")):
        with pytest.raises(ValueError, match=said):
            operator(*inputs, count, apart)
        with pytest.raises(ValueError, match=said):
            best_outputs(features, weight, bias, None, count, apart)
    with pytest.raises(ValueError, match=r"features must be \(N, D\), got \[2, 3, 8\]"):
        best_outputs(features.view(2, 3, 8), weight, bias, None, 4)
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    assert best_outputs(features, weight, bias, None, 4) is None
