"""The operators pass PyTorch's checks and work under recording, autocast and torch.func."""

import logging
from contextlib import nullcontext

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from recorded_programs import KEYS, NEEDS_KERNELS, QUERIES, Recorder, autocast, ours
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from multimax_fairseq import (
    Modulator,
    linear_cross_entropy,
    linear_log_probs,
    multimax,
    scaled_dot_product_attention,
    symmetric_divergence,
)
from multimax_fairseq.ops import attention, backend, best_outputs, cross_entropy  # noqa: F401
from multimax_fairseq.ops.modulator import packed_parameters

pytestmark = [pytest.mark.long, NEEDS_KERNELS]

OPERATORS = torch.ops.multimax_fairseq
MODULATORS = {"shared": {}, "a head": {"num_heads": 3}, "monotone": {"monotone": True}}
HALF = [torch.bfloat16, torch.float16]
BATCH, HEADS, SIZE, CLASSES = 2, 3, 8, 11


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(1)


def some_modulator(**options):
    """Return a modulator far from the identity, with other values for each head."""
    generator = torch.Generator().manual_seed(3)
    module = Modulator(**options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = torch.tensor([0.6, 0.1]) if "coefficient" in name else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


def some_table(**options):
    return packed_parameters(some_modulator(**options))[0].detach().requires_grad_()


def random(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def some_heads(queries=4, keys=5, **options):
    return [random(BATCH, HEADS, n, SIZE, **options) for n in (queries, keys, keys)]


def some_mask(*shape, kind=torch.bool):
    if kind != torch.bool:
        return torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, -torch.inf)
    return (torch.rand(shape) < 0.3).index_fill_(-1, torch.tensor(0), False)


def some_output(tokens=7, dtype=torch.float32, grad=True):
    """Return features, weight, bias and targets of an output layer; one target is ignored."""
    shapes = (tokens, SIZE), (CLASSES, SIZE), (CLASSES,)
    target = torch.randint(CLASSES, (tokens,))
    target[torch.randint(tokens, ())] = -100
    return *(random(*shape, dtype=dtype, grad=grad) for shape in shapes), target


# --- torch's own checks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, dtype",
    [("shared", torch.float32), ("a head", HALF[0]), ("monotone", HALF[1])],
)
def test_modulate_passes_opcheck(kind, dtype):
    scores, parameters = random(2, 3, 5, 4, dtype=dtype), some_table(**MODULATORS[kind])
    scores = scores.detach().mT.requires_grad_()
    opcheck(OPERATORS.modulate, (scores, parameters))
    gradient = random(2, 3, 4, 5, grad=False)
    opcheck(OPERATORS.modulate_backward, (gradient, scores.detach(), parameters.detach()))


def test_tails_passes_opcheck():
    opcheck(OPERATORS.tails, (some_table(num_heads=3),))


# dtype, parameters, mask, causal, dropout, keep, whether heads lie inside the positions in memory
ATTENTIONS = {
    "plain": (torch.float32, None, None, False, 0.0, False, False),
    "padding": (torch.bfloat16, {}, (BATCH, 1, 1, 5), False, 0.0, True, True),
    "dropout": (torch.float16, {"monotone": True}, (1, 1, 4, 5), False, 0.3, True, True),
    "added mask": (torch.bfloat16, {"num_heads": 3}, (1, HEADS, 4, 5), True, 0.2, True, False),
    "sink": (torch.float16, None, (BATCH, 1, 4, 1), False, 0.0, True, False),
    "sink, dropout": (torch.float32, {}, None, True, 0.3, True, False),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_passes_opcheck(name):
    dtype, options, shape, is_causal, dropout, keep, interleaved = ATTENTIONS[name]
    parts = some_heads(dtype=dtype, grad=False)
    if interleaved:
        parts = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in parts]
    kind = torch.float32 if "added" in name else torch.bool
    inputs = (
        *(t.requires_grad_() for t in parts),
        None if options is None else some_table(**options),
        torch.rand(BATCH, HEADS, 4).requires_grad_() if name == "dropout" else None,
        torch.randn(HEADS).requires_grad_() if "sink" in name else None,
        None,
        None if shape is None else some_mask(*shape, kind=kind),
        torch.tensor(5) if dropout > 0 else None,
    )
    numbers = (is_causal, dropout, 0.3, 2, 2, None, None)
    opcheck(OPERATORS.attention, (*inputs, *numbers, keep))
    constant = [t if t is None else t.detach() for t in inputs]
    output, statistics = OPERATORS.attention(*constant, *numbers, True)
    gradient = torch.randn(output.shape, dtype=dtype)
    inputs = (gradient, output, statistics, *constant, *numbers)
    opcheck(OPERATORS.attention_backward, inputs)


@pytest.mark.parametrize(
    "options, has_bias, smooth_weight, chunk_size, summed, dtype",
    [
        ({}, True, 0.01, 3, True, torch.float32),
        ({"monotone": True}, False, 0.0, None, False, torch.bfloat16),
        (None, True, 0.0, 2, False, torch.float16),
    ],
)
def test_output_loss_passes_opcheck(options, has_bias, smooth_weight, chunk_size, summed, dtype):
    features, weight, bias, target = some_output(dtype=dtype)
    parameters = None if options is None else some_table(**options)
    inputs = (features, weight, bias if has_bias else None, parameters)
    numbers = (smooth_weight, 1 - CLASSES * smooth_weight, 0.1, 0.2, -100, chunk_size, False)
    opcheck(OPERATORS.output_loss, (*inputs, target, *numbers, summed))
    constant = [t if t is None else t.detach() for t in inputs]
    opcheck(OPERATORS.output_scores, constant)
    factors, needed = (torch.rand(7), [True] * 4) if summed else (None, [False] * 4)
    opcheck(OPERATORS.output_loss_parts, (*constant, target, *numbers, factors, needed))
    needed = [True, False, has_bias, False]
    opcheck(OPERATORS.output_loss_parts, (*constant, target, *numbers, torch.rand(7), needed))
    numbers = (0.0, 1.0, 0.0, 0.0, -100, chunk_size, True)
    opcheck(OPERATORS.output_loss, (*inputs, target, *numbers, False))
    opcheck(OPERATORS.output_loss_parts, (*constant, target, *numbers, torch.rand(7, 2), needed))


# --- recorded functions ------------------------------------------------------------------------


class Case(nn.Module):
    """A public function as a module, and a function that makes inputs of any length."""

    def __init__(self, function, inputs, dynamic, **options):
        super().__init__()
        self.modulator = some_modulator(**options)
        self.function, self.inputs, self.dynamic = function, inputs, dynamic

    def forward(self, *inputs):
        return self.function(self.modulator, *inputs)


def on_scores(function, **options):
    def inputs(queries, keys):
        return [random(BATCH, HEADS, queries, keys), some_mask(BATCH, 1, 1, keys)]

    return Case(function, inputs, [(0, 2), (0, 3), (1, 3)], **options)


def on_heads(mask=None, kind=torch.bool, grad=False, **options):
    arguments = {"is_causal": options.pop("is_causal", False)}

    def attend(modulator, query, key, value, mask=None):
        return scaled_dot_product_attention(
            query, key, value, modulator=modulator, attn_mask=mask, **arguments
        )

    def inputs(queries, keys):
        masks = []
        if mask is not None:
            shape = [n if n else {2: queries, 3: keys}[i] for i, n in enumerate(mask)]
            masks = [some_mask(*shape, kind=kind)]
            if kind == torch.bool:
                masks = [~masks[0]]
            masks = [
                m.masked_fill(m == -torch.inf, -3.0).requires_grad_() if grad else m for m in masks
            ]
        return [*some_heads(queries, keys), *masks]

    dynamic = [(i, 2) for i in range(3)] + [(3, 3)] + ([(3, 2)] if mask and not mask[2] else [])
    return Case(attend, inputs, dynamic, **options)


def on_output(reduction, label_smoothing=0.0):
    def loss(modulator, features, weight, bias, target):
        return linear_cross_entropy(
            *(features, weight, target),
            bias=bias,
            modulator=modulator,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )[0]

    return Case(loss, lambda tokens, _: some_output(tokens), [(0, 0), (3, 0)])


def on_log_probs():
    def log_probs(modulator, features, weight, bias, target):
        found = linear_log_probs(features, weight, target, bias=bias, modulator=modulator)
        return torch.stack(found)

    return Case(log_probs, lambda tokens, _: some_output(tokens), [(0, 0), (3, 0)])


def some_pair(tokens=7, dtype=torch.float32):
    """Return two features, weight, bias and mask of an output layer."""
    features, weight, bias, target = some_output(tokens, dtype)
    return features, random(tokens, SIZE, dtype=dtype), weight, bias, target < 0


def on_pair(reduction):
    def divergence(modulator, features, other, weight, bias, mask):
        options = {"bias": bias, "modulator": modulator, "mask": mask, "reduction": reduction}
        return symmetric_divergence(features, other, weight, **options)

    return Case(divergence, lambda tokens, _: some_pair(tokens), [(0, 0), (1, 0), (4, 0)])


# {case: our operators in the graph}
CASES = {
    "multimax, a head, monotone": (
        lambda: on_scores(lambda m, x, mask: multimax(x, m, mask=mask), num_heads=3, monotone=True),
        {"modulate"},
    ),
    "attention, padding": (lambda: on_heads((BATCH, 1, 1, 0)), {"attention"}),
    "attention, a head, monotone, added mask, causal": (
        lambda: on_heads(
            (1, HEADS, 0, 0), torch.float32, num_heads=3, monotone=True, is_causal=True
        ),
        {"attention"},
    ),
    "attention, learned mask": (
        lambda: on_heads((1, HEADS, 0, 0), torch.float32, grad=True),
        {"modulate"},
    ),
    "loss, mean": (lambda: on_output("mean", 0.1), {"output_loss"}),
    "loss, none": (lambda: on_output("none"), {"output_loss"}),
    "log-probabilities": (on_log_probs, {"output_loss"}),
    "divergence, sum": (lambda: on_pair("sum"), set()),
}
LENGTHS = [(4, 5), (7, 6), (3, 9)]


@pytest.fixture(params=CASES)
def case(request):
    make, names = CASES[request.param]
    module = make()
    module.names = names
    return module


def with_gradients(module):
    """Return a function of parameters and inputs that gives outputs and all gradients."""

    def function(parameters, inputs):
        output = functional_call(module, parameters, tuple(inputs))
        weights = torch.arange(1, output.numel() + 1).view(output.shape) / output.numel()
        wanted = [*parameters.values(), *(t for t in inputs if t.requires_grad)]
        return output, *torch.autograd.grad((output * weights).sum(), wanted)

    return function


def assert_same(module, recorded, inputs):
    """Check that a recorded program has the module's outputs and gradients."""
    parameters = dict(module.named_parameters())
    expected = with_gradients(module)(parameters, inputs)
    output = recorded(*inputs)
    weights = torch.arange(1, output.numel() + 1).view(output.shape) / output.numel()
    own = dict(getattr(recorded, "named_parameters", module.named_parameters)())
    assert len(own) == len(parameters)
    wanted = [*own.values(), *(t for t in inputs if t.requires_grad)]
    got = output, *torch.autograd.grad((output * weights).sum(), wanted)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("error", "ignore:Guards may run slower on Python 3.13.0")
def test_compile_makes_one_graph_for_all_lengths(case):
    counter = CompileCounterWithBackend("aot_eager")
    # The lengths are marked as dynamic; with dynamic=True, every size is.
    dynamic = True if case.names == {"output_loss"} else None
    compiled = torch.compile(case, fullgraph=True, dynamic=dynamic, backend=counter)
    for lengths in LENGTHS:
        inputs = case.inputs(*lengths)
        for index, dim in case.dynamic:
            if index < len(inputs):
                torch._dynamo.mark_dynamic(inputs[index], dim)
        assert_same(case, compiled, inputs)
    (compiled,) = (graph for graph in counter.graphs if len(graph.graph.nodes) > 0)
    # Inductor fuses the rest itself.
    assert ours(compiled.graph) == case.names - {"modulate"}


def test_inductor_equals_eager():
    class All(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.shared = some_modulator(num_heads=HEADS), some_modulator()

        def forward(self, query, key, value, mask, weight, target):
            context = multimax(query @ key.mT, self.heads, mask=~mask) @ value
            attended = scaled_dot_product_attention(context, key, value, modulator=self.heads)
            attended = attended + scaled_dot_product_attention(
                query, key, value, modulator=self.shared, attn_mask=mask
            )
            return linear_cross_entropy(
                attended, weight, target, modulator=self.shared, label_smoothing=0.1
            )[0]

    module = All()
    compiled = torch.compile(module, fullgraph=True)
    for _ in range(2):
        target = torch.randint(CLASSES, (BATCH, HEADS, 4))
        target[0, 1] = -100
        mask = ~some_mask(BATCH, 1, 1, 5)
        assert_same(module, compiled, [*some_heads(), mask, random(CLASSES, SIZE), target])


def test_export_supports_all_lengths(case):
    inputs = tuple(case.inputs(*LENGTHS[0]))
    sizes = [{dim: Dim.DYNAMIC for at, dim in case.dynamic if at == i} for i in range(len(inputs))]
    exported = torch.export.export(case, inputs, dynamic_shapes={"inputs": tuple(sizes)})
    assert ours(exported.graph) == case.names - {"modulate"}
    for lengths in LENGTHS:
        assert_same(case, exported.module(), case.inputs(*lengths))


@torch.no_grad()
def test_make_fx_records_before_dispatch(case):
    recorded = make_fx(case, pre_dispatch=True)(*case.inputs(*LENGTHS[0]))
    inputs = case.inputs(*LENGTHS[0])
    torch.testing.assert_close(recorded(*inputs), case(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case, mode",
    [("attention, padding", "real"), *((name, "symbolic") for name in CASES)],
    indirect=["case"],
)
def test_make_fx_records_forward_and_gradients(case, mode):
    function, parameters = with_gradients(case), dict(case.named_parameters())
    inputs = case.inputs(*LENGTHS[0])
    recorded = make_fx(function, tracing_mode=mode)(parameters, inputs)
    names = {name.removesuffix("_backward").removesuffix("_parts") for name in ours(recorded.graph)}
    assert names == case.names
    for lengths in LENGTHS if mode == "symbolic" else LENGTHS[:1] * 2:
        inputs = case.inputs(*lengths)
        expected = function(parameters, inputs)
        torch.testing.assert_close(recorded(parameters, inputs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_records_no_kernel():
    """Under torch.jit.trace, sizes are tensors; a kernel would read them as numbers."""

    def attend(x):
        return scaled_dot_product_attention(x, x, x, normalizer="softmax")

    traced = torch.jit.trace(attend, torch.randn(2, 3, 5, SIZE))
    x = torch.randn(2, 3, 5, SIZE)
    torch.testing.assert_close(traced(x), attend(x))


def test_backend_logs_nothing_while_recording(caplog):
    backend._log.cache_clear()
    case = on_heads()
    inputs = case.inputs(*LENGTHS[0])
    parameters = dict(case.named_parameters())
    with caplog.at_level(logging.INFO, "multimax_fairseq.ops.backend"):
        torch.compile(case, fullgraph=True, backend="aot_eager")(*inputs)
        torch.export.export(case, tuple(inputs))
        make_fx(with_gradients(case))(parameters, inputs)
        assert caplog.messages == []
        case(*inputs)
        assert caplog.messages == ["attention: cpp backend"]


@pytest.mark.filterwarnings("error", "ignore:Guards may run slower on Python 3.13.0")
@pytest.mark.parametrize("wanted", ["cpp", "plain"])
def test_compile_uses_the_requested_backend(wanted, monkeypatch):
    query, key, value = some_heads()
    modulator = some_modulator()

    def attend(**options):
        return scaled_dot_product_attention(query, key, value, modulator=modulator, **options)

    for options in ({"backend": wanted}, {}):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        output = torch.compile(attend, fullgraph=True, backend=counter)(**options)
        torch.testing.assert_close(output, attend())
        assert ours(counter.graphs[0].graph) == ({"attention"} if wanted == "cpp" else set())
        monkeypatch.setenv(backend.VARIABLE, wanted)


# --- autocast ----------------------------------------------------------------------------------


def attend(modulator, query, key, value, mask):
    return scaled_dot_product_attention(query, key, value, modulator=modulator, attn_mask=mask)


def attend_as_torch(modulator, query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def output_loss(modulator, features, weight, bias, target):
    loss, _ = linear_cross_entropy(
        features, weight, target, bias=bias, modulator=modulator, label_smoothing=0.1
    )
    return loss


def output_loss_as_torch(modulator, features, weight, bias, target):
    return F.cross_entropy(F.linear(features, weight, bias), target, reduction="sum")


def cast_inputs(name, dtype):
    """Return parameters and activations; autocast may have narrowed the activations."""
    if name == "attention":
        shapes = [(BATCH, HEADS, n, SIZE) for n in (QUERIES, KEYS, KEYS)]
        return [*(random(*s).to(dtype) for s in shapes), ~some_mask(BATCH, 1, 1, KEYS)]
    if name == "modulator":
        return [random(BATCH, HEADS, QUERIES, KEYS).to(dtype)]
    target = torch.randint(KEYS, (QUERIES,))
    target[3] = -100
    of_layer = [random(KEYS, SIZE), random(KEYS)]
    if name == "divergence":
        return [*(random(QUERIES, SIZE).to(dtype) for _ in range(2)), *of_layer, target < 0]
    return [random(QUERIES, SIZE).to(dtype), *of_layer, target]


def divergence(modulator, features, other, weight, bias, mask):
    return symmetric_divergence(features, other, weight, bias=bias, modulator=modulator, mask=mask)


def divergence_as_torch(modulator, features, other, weight, bias, mask):
    logs = (F.linear(h, weight, bias).log_softmax(-1) for h in (features, other))
    return F.kl_div(*logs, log_target=True, reduction="sum")


CAST = {
    "attention": (attend, attend_as_torch, {"attention", "attention_backward"}),
    "output loss": (output_loss, output_loss_as_torch, {"output_loss_parts"}),
    "modulator": (
        lambda m, scores: m(scores),
        lambda m, scores: scores.float().relu(),
        {"modulate", "modulate_backward"},
    ),
    "divergence": (divergence, divergence_as_torch, set()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CAST)
def test_operators_are_as_accurate_as_plain_under_autocast(name, dtype, monkeypatch):
    function, as_torch, names = CAST[name]
    modulator = some_modulator(num_heads=HEADS if name in ("attention", "modulator") else None)
    errors = {"auto": [], "plain": []}
    for _ in range(3):
        inputs = [t.detach() for t in cast_inputs(name, dtype)]
        exact = results_of(function, modulator, inputs, torch.float64, nullcontext())
        for wanted in errors:
            monkeypatch.setenv(backend.VARIABLE, wanted)
            recorder = Recorder()
            with recorder:
                got = results_of(function, modulator, inputs, None, autocast())
            errors[wanted].append([relative(a, b) for a, b in zip(got, exact, strict=True)])
            assert recorder.names == (names if wanted == "auto" else set())
            with autocast():
                assert got[0].dtype == as_torch(modulator, *inputs).dtype
            if wanted == "auto" and name in ("attention", "output loss"):
                assert recorder.wide == []
    kernel, plain = (torch.tensor(errors[wanted]).mean(0) for wanted in ("auto", "plain"))
    assert (kernel <= 2 * plain + 1e-6).all(), (kernel, plain)


def results_of(function, modulator, inputs, dtype, context):
    """Return the output and the gradients of the inputs and the modulator's parameters."""
    inputs = [
        (t if dtype is None else t.to(dtype)).clone().requires_grad_()
        if t.is_floating_point()
        else t
        for t in inputs
    ]
    parameters = {n: p if dtype is None else p.to(dtype) for n, p in modulator.named_parameters()}
    module = Case(lambda m, *inputs: function(m, *inputs), None, None)
    module.modulator = modulator
    named = {f"modulator.{name}": parameter for name, parameter in parameters.items()}
    with context:
        output = functional_call(module, named, tuple(inputs))
    weights = torch.linspace(-1, 1.5, output.numel()).view(output.shape).to(output.dtype)
    wanted = [t for t in inputs if t.requires_grad]
    by_inputs = torch.autograd.grad((output * weights).sum(), [*wanted, *parameters.values()])
    split = len(wanted)
    return [output, *by_inputs[:split], torch.cat([g.flatten() for g in by_inputs[split:]])]


def relative(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_cpu_kernels_form_no_score_matrix():
    """A recorder around an operator does not see the calls inside it."""
    query, key, value, mask = cast_inputs("attention", torch.bfloat16)
    parameters = some_table().detach()
    rest = (None, torch.zeros(query.shape[1]), None, ~mask, None, False, 0.0, 0.3, 2, 2, None, None)
    features, weight, bias, target = cast_inputs("output loss", torch.float32)
    numbers = (0.01, 1 - 0.01 * KEYS, 0.1, 0.2, -100, None, False, torch.ones(QUERIES), [True] * 4)
    with torch.no_grad(), Recorder() as recorder:
        output, statistics = attention._attention(query, key, value, parameters, *rest, True)
        attention._attention_backward(
            *(output, output, statistics, query, key, value, parameters, *rest)
        )
        cross_entropy._output_loss_parts(features, weight, bias, parameters, target, *numbers)
    assert recorder.wide == []


@pytest.mark.parametrize("name", CAST)
def test_compile_under_autocast_equals_eager_autocast(name):
    function, *_ = CAST[name]
    served = {"attention": {"attention"}, "output loss": {"output_loss"}}.get(name, set())
    case = Case(lambda m, *inputs: function(m, *inputs), None, None)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(case, fullgraph=True, backend=counter)
    for _ in range(2):
        inputs = [t.detach() for t in cast_inputs(name, torch.float32)]
        inputs = [t.requires_grad_() if t.is_floating_point() else t for t in inputs]
        with autocast():
            expected, got = case(*inputs), compiled(*inputs)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        wanted = [*(t for t in inputs if t.requires_grad), *case.parameters()]
        weights = torch.randn(got.shape).to(got.dtype)
        results = [torch.autograd.grad((out * weights).sum(), wanted) for out in (got, expected)]
        # Without a kernel, rounding to bfloat16 may come before or after the scaling.
        close = 1e-2 if name == "divergence" else 1e-4
        torch.testing.assert_close(*results, rtol=close, atol=close)
    assert counter.frame_count == 1
    assert ours(counter.graphs[0].graph) == served


# --- without gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAST)
def test_operators_in_inference_mode_behave_like_torch(name):
    function, as_torch, _ = CAST[name]
    modulator, inputs = some_modulator(), cast_inputs(name, torch.float32)
    expected = function(modulator, *inputs)
    with torch.no_grad():
        without = function(modulator, *inputs)
    assert not without.requires_grad
    torch.testing.assert_close(without, expected.detach())
    (without * torch.ones((), requires_grad=True)).sum().backward()
    for call in (function, as_torch):
        with torch.inference_mode():
            output = call(modulator, *inputs)
        assert output.is_inference()
        factor = torch.ones((), requires_grad=True)
        (output + factor).sum().backward()
        assert factor.grad == output.numel()
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            output * factor
    with torch.inference_mode():
        torch.testing.assert_close(function(modulator, *inputs), expected.detach())


# --- transformed functions ---------------------------------------------------------------------


@pytest.fixture(params=CAST)
def transformable(request):
    """Return a function of one tensor, and the tensor."""
    function, *_ = CAST[request.param]
    modulator = some_modulator()
    if request.param == "modulator":
        first, *rest = [random(BATCH, HEADS, 4, 5)]
    elif request.param == "attention":
        first, *rest = [*some_heads(), ~some_mask(BATCH, 1, 1, 5)]
    elif request.param == "divergence":
        first, *rest = some_pair()
    else:
        first, *rest = some_output()
    return lambda x: function(modulator, x, *(t.detach() for t in rest)), first.detach()


def reverse(function, x, weights):
    x = x.clone().requires_grad_()
    (function(x) * weights).sum().backward()
    return x.grad


def test_torch_func_transforms_equal_the_kernels(transformable):
    function, x = transformable
    weights = torch.randn_like(function(x))
    expected = reverse(function, x, weights)

    def loss(x):
        return (function(x) * weights).sum()

    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(torch.func.grad(loss)(x), expected, **close)
    xs = torch.stack([x, 2 * x, x - 1])
    torch.testing.assert_close(
        torch.func.vmap(function)(xs), torch.stack([function(x) for x in xs]), **close
    )
    torch.testing.assert_close(
        torch.func.vmap(torch.func.grad(loss))(xs),
        torch.stack([reverse(function, x, weights) for x in xs]),
        **close,
    )
    # Both ways of differentiating: w . (J t) = (J^T w) . t
    tangent = torch.randn_like(x)
    output, forward = torch.func.jvp(function, (x,), (tangent,))
    torch.testing.assert_close(output, function(x), **close)
    torch.testing.assert_close((forward * weights).sum(), (expected * tangent).sum(), **close)
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
        torch.testing.assert_close(dual.tangent, forward, **close)


def test_operators_refuse_unsupported_derivatives():
    scores, parameters = random(2, 3, 4, 5), some_table()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        OPERATORS.modulate(forward_ad.make_dual(scores, scores), parameters)
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(RuntimeError, match="autograd.Function with functorch transforms"):
            transform(lambda x: OPERATORS.modulate(x, parameters).sum())(scores)
    gradient, _ = OPERATORS.modulate_backward(scores, scores, parameters)
    with pytest.raises(RuntimeError, match="modulate_backward has no gradient"):
        gradient.sum().backward()
    features, weight, bias, _ = some_output()
    with pytest.raises(RuntimeError, match="output_scores has no gradient"):
        OPERATORS.output_scores(features, weight, bias, parameters).sum().backward()


def test_functions_refuse_second_derivatives(transformable):
    function, x = transformable
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no derivative of its own"):
        gradient.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_keeps_gradients(transformable, use_reentrant):
    function, x = transformable
    weights = torch.randn_like(function(x))
    checkpointed = reverse(
        lambda x: checkpoint(function, x, use_reentrant=use_reentrant), x, weights
    )
    torch.testing.assert_close(checkpointed, reverse(function, x, weights))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_repeats_the_dropout_mask(use_reentrant):
    modulator = some_modulator()
    query, key, value = (t.detach() for t in some_heads())

    def attend(query):
        return scaled_dot_product_attention(query, key, value, modulator=modulator, dropout_p=0.4)

    gradients = []
    for function in (attend, lambda q: checkpoint(attend, q, use_reentrant=use_reentrant)):
        torch.manual_seed(7)
        gradients.append(reverse(function, query, torch.ones_like(query)))
    torch.testing.assert_close(*gradients)
