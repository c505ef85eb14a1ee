"""Fused attention by row functions equals the mappings in plain PyTorch."""

import math

import pytest
import torch
from accuracy import assert_as_accurate
from torch.library import opcheck

from multimax_fairseq import NORMALIZERS, scaled_dot_product_attention
from multimax_fairseq.ops import build
from multimax_fairseq.ops.attention import AttentionCall
from multimax_fairseq.ops.decoding import KVCache, decoding_attention
from multimax_fairseq.ops.row_function import FUNCTIONS, WITHOUT_GRADIENT

CAPABILITY = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(
    CAPABILITY not in build.MARCH, reason=f"no CPU kernels for {CAPABILITY}: plain PyTorch is used"
)
HEADS = 3
MAPPINGS = {
    "topk": ("topk", {"k": 4}),
    "topk of one": ("topk", {"k": 1}),
    "evsoftmax": ("evsoftmax", {}),
    "evsoftmax in training": ("evsoftmax", {"training": True}),
    "sparsemax": ("sparsemax", {}),
    "entmax15": ("entmax15", {}),
    "alpha_entmax, fixed": ("alpha_entmax", {"alpha": 1.3}),
    "alpha_entmax": ("alpha_entmax", {"alpha": torch.tensor([1.01, 1.5, 1.9])[:, None, None]}),
    "sigmoid": ("sigmoid", {}),
    "sigmoid with a bias": ("sigmoid", {"bias": -2.0}),
    "softpick": ("softpick", {}),
    "adaptive_temperature": ("adaptive_temperature", {}),
    "asentmax": ("asentmax", {"beta": torch.tensor([0.2, 0.5, 0.0])[:, None, None], "gamma": 0.7}),
}
# For each shape (mask, causal).
SHAPES = {
    (2, 70, 70, 64): [("none", True), ("padding", True)],
    (2, 33, 90, 24): [("holes", False), ("nothing left", True)],
    (3, 5, 130, 16): [("padding", False)],
    (2, 9, 1, 16): [("none", False)],
}


def masks(batch, queries, keys):
    """Return masks by name; True may attend."""
    key, query = torch.arange(keys), torch.arange(queries)[:, None]
    lengths = torch.tensor([keys, 1 + keys // 3, 1])[:batch, None, None, None]
    return {
        "none": None,
        "padding": key < lengths,
        "holes": (key + query) % 3 > 0,
        "nothing left": (key >= 0) & (query > queries // 2),
    }


def inputs(shape, seed=0, factor=1.0):
    batch, queries, keys, size = shape
    draw = torch.Generator().manual_seed(seed)
    sizes = [(batch, HEADS, n, size) for n in (queries, keys, keys, queries)]
    query, key, value, grad = (torch.randn(each, generator=draw) for each in sizes)
    return [factor * query, key, value], grad


def attend(mapping, parts, grad, dtype=torch.float32, precision=torch.float32, **options):
    """Return the output, and the gradients of query, key, value and a learned parameter."""
    name, arguments = mapping
    if name in WITHOUT_GRADIENT:
        parts = [part.to(dtype).to(precision) for part in parts]
        return [scaled_dot_product_attention(*parts, normalizer=name, **arguments, **options)]
    parts = [part.to(dtype).to(precision).requires_grad_() for part in parts]
    wide = torch.promote_types(precision, torch.float32)
    learned = {key: x for key, x in arguments.items() if isinstance(x, torch.Tensor)}
    learned = {key: x.to(wide).requires_grad_() for key, x in learned.items()}
    output = scaled_dot_product_attention(
        *parts, normalizer=name, **{**arguments, **learned}, **options
    )
    grad = grad.to(dtype).to(precision)
    return [output.detach(), *torch.autograd.grad(output, [*parts, *learned.values()], grad)]


def assert_attention_as_accurate(
    mapping, shape, dtype=torch.float32, factor=1.0, backend="cpp", **options
):
    found = []
    for precision, kind in ((dtype, backend), (dtype, "plain"), (torch.float64, "plain")):
        draws = []
        for seed in range(6):
            parts, grad = inputs(shape, seed, factor)
            draws.append(attend(mapping, parts, grad, dtype, precision, backend=kind, **options))
        found.append([torch.cat(parts) for parts in zip(*draws, strict=True)])
    assert_as_accurate(*(parts[:4] for parts in found))
    # Near alpha = 1 the kernel's gradient of alpha is less accurate than that of plain PyTorch.
    rounding = 1e-5 if mapping[0] == "alpha_entmax" else 5e-7
    assert_as_accurate(*(parts[4:] for parts in found), rounding=rounding)
    return found[0]


def test_every_function_is_tested():
    assert {name for name, _ in MAPPINGS.values()} == {*FUNCTIONS, "asentmax"} <= {*NORMALIZERS}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_is_as_accurate_as_plain_pytorch(kernels, mapping, shape):
    batch, queries, keys, _ = shape
    made = masks(batch, queries, keys)
    for name, is_causal in SHAPES[shape]:
        options = {"attn_mask": made[name], "is_causal": is_causal}
        found = assert_attention_as_accurate(mapping, shape, **options)
        assert all(part.isfinite().all() for part in found)
        if name == "nothing left":
            assert all((part[:, :, : queries // 2 + 1] == 0).all() for part in found[:2])


# asentmax multiplies the query, which rounds large scores once more.
@pytest.mark.parametrize("factor", [0.0, 300.0])
@pytest.mark.parametrize("name", [name for name in MAPPINGS if name != "asentmax"])
def test_row_attention_of_ties_and_extreme_scores(kernels, name, factor):
    """With the factor 0 all scores are equal."""
    assert_attention_as_accurate(MAPPINGS[name], (2, 20, 50, 16), factor=factor, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_in_half_precision(mapping, dtype):
    assert_attention_as_accurate(mapping, (2, 20, 50, 16), dtype, is_causal=True)


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_adds_float_masks(mapping):
    """With finite numbers, mappings that count keys are computed in plain PyTorch."""
    draw = torch.Generator().manual_seed(1)
    excluding = torch.zeros(20, 30).masked_fill(torch.rand(20, 30, generator=draw) < 0.5, -math.inf)
    for mask in (excluding, torch.randn(20, 30, generator=draw), excluding - 6e3):
        assert_attention_as_accurate(mapping, (2, 20, 30, 16), backend="auto", attn_mask=mask)
    parts, grad = inputs((2, 20, 30, 16))
    learned = torch.randn(20, 30, generator=draw).requires_grad_()
    ours, plain = (
        torch.autograd.grad(
            scaled_dot_product_attention(
                *parts, normalizer=mapping[0], attn_mask=learned, backend=kind, **mapping[1]
            ),
            learned,
            grad,
        )[0]
        for kind in ("auto", "plain")
    )
    assert torch.equal(ours, plain)


PER_HEAD = torch.tensor([0.2, 0.5, 0.9])[:, None, None]
DIFFERENTIATED = {
    **{"sparsemax": {}, "entmax15": {}, "alpha_entmax": MAPPINGS["alpha_entmax"][1]},
    **{"topk": {"k": 3}, "softpick": {}, "sigmoid": {}, "evsoftmax": {"training": True}},
    **{"asentmax": {"beta": PER_HEAD, "gamma": PER_HEAD.flip(0)}, "sink": {"sink": PER_HEAD}},
    **{"ssmax": {"length_scale": PER_HEAD}, "softcap": {"cap": 0.7}},
}


@pytest.mark.parametrize("name, arguments", DIFFERENTIATED.items(), ids=DIFFERENTIATED)
def test_gradients_equal_finite_differences(name, arguments):
    """Differences in float64 of the plain form, against the kernel's gradients in float32."""
    parts, grad = inputs((1, 6, 9, 8))
    _, *found = attend((name, arguments), parts, grad, backend="cpp")
    given = {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}
    for index, part in enumerate([*parts, *given.values()]):
        direction, step = torch.randn(part.shape, dtype=torch.float64), 1e-5
        losses = []
        for sign in (1, -1):
            moved = [p.double() for p in (*parts, *given.values())]
            moved[index] = moved[index] + sign * step * direction
            options = {**arguments, **dict(zip(given, moved[3:], strict=True))}
            output = scaled_dot_product_attention(*moved[:3], normalizer=name, **options)
            losses.append((output * grad).sum())
        slope = ((losses[0] - losses[1]) / (2 * step)).item()
        expected = (found[index] * direction).sum().item()
        assert slope == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_propagates_nan(kernels, mapping, wrong):
    """A wrong score makes the same queries NaN as in plain PyTorch."""
    parts, _ = inputs((1, 20, 30, 16))
    parts[0][0, 0, 3, 0] = wrong
    plain, fused = (
        scaled_dot_product_attention(*parts, normalizer=mapping[0], backend=kind, **mapping[1])
        for kind in ("plain", "cpp")
    )
    if math.isnan(wrong):
        assert torch.equal(plain.isnan(), fused.isnan())
    assert fused[0, 0, 3].isnan().any() == plain[0, 0, 3].isnan().any()
    others = torch.ones(20, dtype=torch.bool).index_fill_(0, torch.tensor(3), False)
    assert fused[0, :, others].isfinite().all()


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_is_deterministic_for_any_number_of_threads(mapping):
    parts, grad = inputs((3, 100, 100, 32))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            found.append(attend(mapping, parts, grad, backend="cpp"))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_row_attention_uses_one_dropout_mask_in_both_passes(kernels, mapping):
    name, arguments = mapping
    parts, grad = inputs((2, 50, 64, 64))
    identity = torch.eye(64).expand(2, HEADS, 64, 64).contiguous()

    def dropped(query, key, value):
        torch.manual_seed(5)
        return scaled_dot_product_attention(
            query, key, value, normalizer=name, dropout_p=0.3, backend="cpp", **arguments
        )

    # With the identity for values, the output is the probabilities.
    whole = scaled_dot_product_attention(*parts[:2], identity, normalizer=name, **arguments)
    kept = dropped(*parts[:2], identity) != 0
    assert abs(kept[whole != 0].float().mean() - 0.7) < 0.06
    if name in WITHOUT_GRADIENT:
        return
    learned = [part.requires_grad_() for part in parts]
    found = torch.autograd.grad(dropped(*learned), learned, grad)
    query, key, value = (part.detach().double().requires_grad_() for part in parts)
    probs = NORMALIZERS[name](query @ key.mT / 8, **arguments)
    output = (probs * kept / 0.7) @ value
    for ours, right in zip(
        found, torch.autograd.grad(output, [query, key, value], grad.double()), strict=True
    ):
        assert (ours - right).norm() <= 1e-5 * right.norm()


@pytest.mark.parametrize("shape", [(5, 7, 16), (40, 130, 48)])
@pytest.mark.parametrize("mapping", MAPPINGS.values(), ids=MAPPINGS)
def test_attention_step_by_row_functions_equals_float64(kernels, mapping, shape):
    """One decoding step over a cache that hypotheses share."""
    name, arguments = mapping
    hypotheses, length, size = shape
    draw = torch.Generator().manual_seed(length)
    query = torch.randn(hypotheses, HEADS, size, generator=draw)
    keys, values = torch.randn(2, 3 * length, HEADS, size, generator=draw)
    ancestors = torch.randint(3 * length, (hypotheses, length), generator=draw)
    attend = decoding_attention(query, HEADS, size, **NORMALIZERS[name].for_kernel(**arguments))
    found = attend(query, KVCache(keys, values, ancestors), 0.3)
    key, value = (x.double()[ancestors].transpose(1, 2) for x in (keys, values))
    expected = scaled_dot_product_attention(
        query.double()[:, :, None], key, value, normalizer=name, scale=0.3, **arguments
    )
    torch.testing.assert_close(found.double(), expected[:, :, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("function", ["topk", "alpha_entmax", "adaptive_temperature"])
def test_row_attention_passes_opcheck(function):
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, HEADS, n, 8).requires_grad_() for n in (4, 5, 5))
    parameter = torch.tensor([2.0, 1.5, 1.2])
    if function == "alpha_entmax":
        parameter.requires_grad_()
    mask = torch.rand(2, 1, 4, 5) < 0.3
    operators = torch.ops.multimax_fairseq
    numbers = (True, 0.3, 0.4, 0, 0, function, None)
    given = (query, key, value, None, None, None, parameter, mask, torch.tensor(5))
    constant = [None if x is None else x.detach() for x in given]
    learned = constant if function in WITHOUT_GRADIENT else given
    opcheck(operators.attention, (*learned, *numbers, True))
    output, statistics = operators.attention(*constant, *numbers, True)
    opcheck(
        operators.attention_backward,
        (torch.randn_like(output), None, statistics, *constant, *numbers),
    )
    cache = (torch.randn(12, HEADS, 16), torch.randn(12, HEADS, 16), torch.arange(10).view(2, 5))
    step = (torch.randn(2, HEADS, 16), *cache, None, None, None, 0.3, constant[6], function, None)
    opcheck(operators.attention_step, step)


def test_row_attention_operator_refuses_what_it_cannot_take():
    query, key, value = torch.randn(3, 2, HEADS, 4, 8)
    call = AttentionCall(
        *(query, key, value), *[None] * 6, *(False, 0.0, 0.3, 0, 0, "softpick", None)
    )
    for changes, sentence in (
        (
            {"row_parameter": torch.ones(2), "function": "topk"},
            r"row_parameter must be float32 \(3,\)",
        ),
        ({"function": "relu"}, "unknown row function 'relu': choose"),
        ({"function": "alpha_entmax"}, "alpha_entmax needs a parameter"),
        ({"query": query[0]}, r"query must be \(B, H, length, D\)"),
        ({"sink": torch.ones(3)}, "softpick takes neither parameters nor sink"),
        (
            {"function": None, "row_parameter": torch.ones(3)},
            "row_parameter and header belong to a",
        ),
        (
            {"query": query.clone().requires_grad_(), "function": "adaptive_temperature"},
            "adaptive_temperature has no gradient here",
        ),
        (
            {"row_parameter": torch.ones(3, requires_grad=True), "function": "sigmoid"},
            "the parameter of sigmoid has no gradient",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            torch.ops.multimax_fairseq.attention(*call._replace(**changes), False)


def test_topk_finds_its_threshold_over_any_range():
    """Scores from the smallest number to the largest, and numbers that a mask adds."""
    scores = torch.tensor([1.0, 2e-38, 1e-38, 0.0, 0.0, -3e38])
    query, key = torch.ones(1, 1, 1, 1), scores[None, None, :, None]
    for k in range(1, 7):
        options = {"normalizer": "topk", "k": k, "scale": 1.0}
        value = torch.eye(6)[None, None]
        fused = scaled_dot_product_attention(query, key, value, backend="cpp", **options)
        torch.testing.assert_close(fused[0, 0, 0], NORMALIZERS["topk"](scores, k=k))
    lowest = torch.zeros(20, 30)
    lowest[:, ::3] = torch.finfo(torch.float32).min
    assert_attention_as_accurate(MAPPINGS["topk"], (2, 20, 30, 16), attn_mask=lowest)


def test_sigmoid_of_low_scores_keeps_its_gradient():
    query, value = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    key = torch.full((1, 1, 1, 1), -60.0, requires_grad=True)
    options = {"normalizer": "sigmoid", "bias": 0.0, "scale": 1.0, "backend": "cpp"}
    scaled_dot_product_attention(query, key, value, **options).sum().backward()
    assert key.grad.item() == pytest.approx(math.exp(-60), rel=1e-5)


def test_compiled_attention_with_a_float_mask_is_one_graph():
    parts, _ = inputs((1, 8, 9, 16))
    mask = torch.zeros(8, 9).masked_fill(torch.arange(9) > 5, -math.inf)

    def attention(query, key, value, mask):
        return scaled_dot_product_attention(query, key, value, normalizer="sigmoid", attn_mask=mask)

    compiled = torch.compile(attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*parts, mask), attention(*parts, mask))


def test_alpha_outside_of_the_kernel_is_plain():
    """Alpha above 2, or close to 1, is not for the kernel."""
    for alpha in (2.5, 1.005, True, torch.full((HEADS, 1, 1), 3.0)):
        assert NORMALIZERS["alpha_entmax"].for_kernel(alpha=alpha) is None
    assert NORMALIZERS["alpha_entmax"].for_kernel(alpha=1) == {}  # softmax
