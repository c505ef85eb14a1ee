"""The dropout kernel: the dropped fraction, and the same mask in the gradient."""

import pytest
import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from recorded_programs import NEEDS_KERNELS, Recorder
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from multimax_fairseq import scaled_dot_product_attention
from multimax_fairseq.modules.dropout import Dropout
from multimax_fairseq.ops import native
from multimax_fairseq.ops.build import FLAGS, MARCH, load
from multimax_fairseq.ops.dropout import draw_seed, dropout, dropout_operator

pytestmark = NEEDS_KERNELS


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def kept(shape, p, seed):
    return dropout_operator(torch.ones(shape), torch.tensor(seed), p) > 0


@pytest.mark.parametrize("p", [1e-3, 0.1, 0.3, 0.5, 0.9])
def test_dropout_drops_the_given_fraction(p):
    n = 2**20 + 5
    dropped = n - kept(n, p, 7).sum().item()
    assert abs(dropped - n * p) < 5 * (n * p * (1 - p)) ** 0.5


@pytest.mark.parametrize("apart", [1, 2, 8, 16, 100, 4096, 4097, 8192])
def test_dropout_draws_independent_entries(apart):
    """Neighbours, entries of other blocks and the same entry under another seed are independent."""
    n, p = 2**20, 0.3
    one = kept(n, p, 3)
    for other in (one.roll(apart), kept(n, p, 3 + apart)):
        both = (one & other).sum().item()
        q = (1 - p) ** 2
        assert abs(both - n * q) < 5 * (n * q * (1 - q)) ** 0.5


def test_draw_seed_returns_different_seeds():
    assert len({int(draw_seed()) for _ in range(2000)}) > 1990


def test_dropout_drops_short_rows_uniformly():
    n, p = 2000, 0.3
    often = sum((~kept(19, p, seed)).int() for seed in range(n))
    assert ((often - n * p).abs() < 5 * (n * p * (1 - p)) ** 0.5).all()


def test_dropout_of_the_last_block_is_independent():
    """The last block has fewer entries than the kernel draws at once."""
    n = 4000
    rows = torch.stack([kept(19, 0.5, seed) for seed in range(n)])
    both = (rows[:, :3] & rows[:, 16:]).sum(0) / n
    assert ((both - 0.25).abs() < 5 * (0.25 * 0.75 / n) ** 0.5).all()


@pytest.mark.parametrize("shape", [(), (1,), (7,), (16,), (3, 0), (4096,), (2, 3, 4111), (5, 8193)])
def test_dropout_gradient_uses_the_mask_of_the_output(shape):
    """Kept entries are divided by 1 - p in both, for any memory layout."""
    p = 0.3
    turned = tuple(reversed(range(len(shape))))
    for x in (torch.randn(shape), torch.randn(shape[::-1]).permute(turned)):
        x = x.detach().requires_grad_()
        grad = torch.randn(shape[::-1]).permute(turned).requires_grad_()
        output = dropout(x, p)
        (found,) = torch.autograd.grad(output, x, grad, create_graph=True)
        keep = (output != 0).float()
        factor = torch.tensor(1.0) / (1 - torch.tensor(p))
        torch.testing.assert_close(output, x * keep * factor, rtol=1e-6, atol=0)
        torch.testing.assert_close(found, grad * keep * factor, rtol=1e-6, atol=0)
        (second,) = torch.autograd.grad(found, grad, x)  # it is linear in the gradient
        torch.testing.assert_close(second, output.detach())


def test_dropout_mask_is_independent_of_threads_and_processor(monkeypatch):
    found = [kept(100_001, 0.4, 11)]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(kept(100_001, 0.4, 11))
    finally:
        torch.set_num_threads(threads)
    narrow = load([*FLAGS, *MARCH["AVX2"]])
    monkeypatch.setattr(native, "library", lambda: narrow)
    found.append(kept(100_001, 0.4, 11))
    assert all(map(found[0].equal, found))


def test_dropout_uses_the_torch_generator():
    x = torch.ones(1000)
    first, other = dropout(x, 0.5), dropout(x, 0.5)
    assert not first.equal(other)
    torch.manual_seed(1)
    assert dropout(x, 0.5).equal(first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [False, True])
def test_dropout_rounds_once_in_half_precision(dtype, cast):
    x = torch.randn(500).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        output = dropout(x, 0.3)
    exact = (x.double() / (1 - torch.tensor(0.3).double())).to(dtype)
    assert output.dtype == dtype and output.equal(torch.where(output != 0, exact, 0))
    output.sum().backward()
    assert x.grad.dtype == dtype and (x.grad != 0).equal(output != 0)


def test_dropout_propagates_nan_and_inf():
    """As in PyTorch, dropped entries are multiplied by 0, so NaN stays NaN."""
    assert dropout(torch.full([100], torch.nan), 0.5).isnan().all()
    infinite = torch.full([100], torch.inf)
    keep = kept(100, 0.5, 3)
    found = dropout_operator(infinite, torch.tensor(3), 0.5)
    assert found.isnan().equal(~keep) and found.isinf().equal(keep)


def test_dropout_supports_compile_and_checkpoint():
    x = torch.randn(7, 33, requires_grad=True)
    opcheck(torch.ops.multimax_fairseq.dropout, (x, torch.tensor(5), 0.3))
    compiled = torch.compile(lambda t: dropout(t.sin(), 0.3), backend="aot_eager", fullgraph=True)
    output = compiled(x)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert (grad != 0).equal(output != 0) and 0 < (output == 0).sum() < output.numel()
    output = checkpoint(lambda t: dropout(t, 0.3), x, use_reentrant=False)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert (grad != 0).equal(output != 0)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_falls_back_to_torch(p, monkeypatch):
    """Other dtypes, p of 0 or 1, torch.func and the plain backend use PyTorch's dropout."""

    def assert_torchs(x, call=dropout):
        torch.manual_seed(3)
        expected = F.dropout(x, p)
        torch.manual_seed(3)
        assert call(x, p).equal(expected)

    x = torch.randn(50)
    assert_torchs(x.double())
    assert_torchs(x, lambda x, p: dropout(x, p, "plain"))
    if p != 0.3:
        assert_torchs(x)
    torch.vmap(lambda x: dropout(x, p), randomness="different")(x)
    torch.func.grad(lambda x: dropout(x, p).sum())(x)
    monkeypatch.setenv("MULTIMAX_BACKEND", "plain")
    assert_torchs(x)


@pytest.mark.parametrize(
    "mapping, kernel",
    [
        ({"normalizer": "softmax"}, "attention"),
        ({"normalizer": "entmax15"}, "attention"),
        ({"normalizer": "softmax", "temperature": 0.5}, "dropout"),
    ],
)
def test_attention_selects_dropout_kernel_by_backend(mapping, kernel):
    """Returned probabilities may use the dropout kernel, except with the plain backend."""
    query, key, value = torch.randn(3, 2, 4, 5, 8)
    for backend, expected in (("auto", {kernel}), ("plain", set())):
        with Recorder() as recorder:
            options = {"dropout_p": 0.3, "backend": backend}
            scaled_dot_product_attention(query, key, value, **mapping, **options)
        assert recorder.names == expected


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 8])
def test_attention_of_few_queries_applies_dropout(queries):
    """The kernel for few queries has no dropout, so another path serves the call."""
    query, key, value = (torch.randn(1, 2, n, 16) for n in (queries, 6, 6))
    options = {"normalizer": "softmax", "backend": "cpp"}
    dropped, whole = (
        scaled_dot_product_attention(query, key, value, dropout_p=p, **options) for p in (0.5, 0.0)
    )
    assert not torch.equal(dropped, whole)


def test_dropout_layer_follows_fairseq():
    x = torch.randn(40, 50)
    layer = Dropout(0.5, "Name")
    assert 0.4 < (layer(x) == 0).float().mean() < 0.6
    given = x.clone()
    assert layer(given, inplace=True) is given and (given == 0).any()
    assert layer.eval()(x) is x and Dropout(0.0)(x) is x
    layer.make_generation_fast_("layer", retain_dropout=True, retain_dropout_modules=["Name"])
    assert (layer(x) == 0).any()


@pytest.mark.parametrize(
    "flags",
    [
        ("transformer_multimax",),
        ("transformer_multimax", "--attention-normalizer-at", "encoder"),
        ("transformer_lm_multimax",),
        ("rnn_multimax",),
    ],
)
def test_models_use_dropout_layer_outside_stock_attention(build, flags):
    model = build(*flags)
    layers = {n: type(m) for n, m in model.named_modules() if isinstance(m, FairseqDropout)}
    ours = {name for name, kind in layers.items() if kind is Dropout}
    assert len(ours) > 1 and all("attn." in name for name in layers.keys() - ours)
