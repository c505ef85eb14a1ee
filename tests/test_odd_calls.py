"""Unusual but valid calls equal the plain formula in float64, with their gradients.

In such a call, one or more tensors have an unusual memory layout, dtype or shape.
"""

import functools
import itertools
import math

import isolated_calls
import pytest
import torch
import torch.nn.functional as F
from examples import EXAMPLES
from plain_formulas import (
    LAYOUTS,
    PARAMETERS,
    beside_plain,
    distance,
    mapped,
    ours_attention,
    ours_divergence,
    ours_log_multimax,
    ours_loss,
    ours_multimax,
    ours_scores,
    plain_attention,
    plain_divergence,
    plain_log_multimax,
    plain_loss,
    plain_modulate,
    plain_multimax,
    plain_scores,
)
from random_inputs import drawn
from torch import nn

from multimax_fairseq import NORMALIZERS, linear_cross_entropy
from multimax_fairseq.ops import cross_entropy
from multimax_fairseq.ops.modulator import modulate

pytestmark = pytest.mark.long

B, H, T, S, D, N, V = 3, 4, 5, 6, 16, 10, 300


def offsets(*shape):
    """Return parameters of a modulator that is far from the identity for scores of a few units."""
    return {name: 0.2 * drawn(*shape, seed=n) for n, name in enumerate(PARAMETERS)}


BIAS, TARGET = drawn(V), 29 * torch.arange(N)
LOSS = dict(features=drawn(N, D), weight=drawn(V, D, seed=1), bias=BIAS, target=TARGET)
ATTENTION = dict(
    query=2 * drawn(B, H, T, D), key=drawn(B, H, S, D, seed=1), value=drawn(B, H, S, D)
)
MASKED = dict(x=2 * drawn(B, H, T, S), mask=drawn(B, H, T, S) > 0.5)
FUNCTIONS = {
    "modulate": (modulate, plain_modulate, dict(x=2 * drawn(B, H, T, S)) | offsets(H, 2)),
    "multimax": (ours_multimax, plain_multimax, MASKED | offsets(2)),
    "log_multimax": (ours_log_multimax, plain_log_multimax, MASKED | offsets(2)),
    "attention": (
        ours_attention,
        plain_attention,
        ATTENTION | dict(attn_mask=drawn(B, H, T, S, seed=3) > -1) | offsets(H, 2),
    ),
    # With a gradient for the mask.
    "attention and a bias": (
        ours_attention,
        plain_attention,
        ATTENTION | dict(attn_mask=drawn(B, H, T, S, seed=3)) | offsets(2),
    ),
    "softmax attention": (ours_attention, plain_attention, ATTENTION),
    "loss": (ours_loss, plain_loss, LOSS | offsets(2)),
    "softmax loss": (ours_loss, plain_loss, LOSS),
    "divergence": (
        ours_divergence,
        plain_divergence,
        {name: LOSS[name] for name in ("features", "weight", "bias")}
        | dict(other=drawn(N, D, seed=4), mask=drawn(N) > 1)
        | offsets(2),
    ),
    "fused_scores": (
        ours_scores,
        plain_scores,
        {name: LOSS[name] for name in ("features", "weight", "bias")} | offsets(2),
    ),
}


def compared(name, changes=None, **options):
    """Change a valid call and compare it with the formula; return {what differs: by how much}."""
    ours, plain, good = FUNCTIONS[name]
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in good.items()}
    for key, change in (changes or {}).items():
        arguments[key] = change(arguments[key]) if callable(change) else change
    return beside_plain(ours, plain, arguments, options)


# --- CASES[function][what is unusual] = a function that returns the differences -------------------

OF_FLOATS = {
    "negated in place of a copy": lambda t: torch.complex(torch.zeros_like(t), t).conj().imag,
    "a zero without memory": lambda t: torch._efficientzerotensor(t.shape),
    "a parameter": lambda t: nn.Parameter(t),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32)
ALL = " ".join(PARAMETERS)
# Arguments with an unusual layout; arguments with another dtype than the rest.
TENSORS = {
    "modulate": ["x", ALL],
    "multimax": ["x", "mask"],
    "log_multimax": ["x"],
    "attention": ["query", "key", "value", "query key value", "attn_mask", ALL],
    "attention and a bias": ["attn_mask"],
    "softmax attention": ["query key"],
    "loss": ["features", "weight", "bias", "target", ALL],
    "softmax loss": ["features weight"],
    "fused_scores": ["features", "weight", "bias"],
}
OTHER_DTYPE = {
    "modulate": ["x", *PARAMETERS],
    "multimax": ["x", *PARAMETERS],
    "attention": ["value", "query key", "query key value", "low_coefficient high_threshold"],
    "attention and a bias": ["attn_mask"],
    "softmax attention": ["query key value", "value"],
    "loss": ["features weight bias", *PARAMETERS],
    "fused_scores": ["features weight bias"],
}
CASES = {}


def case(group, what, function, *arguments, **options):
    CASES.setdefault(group, {})[what] = functools.partial(function, *arguments, **options)


def odd(name, what, changes, **options):
    case(name, what, compared, name, changes, **options)


for name, inputs in TENSORS.items():
    for arguments, (what, change) in itertools.product(inputs, (LAYOUTS | OF_FLOATS).items()):
        floats = arguments not in ("mask", "target") and (name, arguments) != (
            "attention",
            "attn_mask",
        )
        # With equal scores, the gradients are sums that cancel.
        if (floats or what in LAYOUTS) and (arguments, what) != (
            "query key value",
            "one number for all",
        ):
            odd(name, f"{arguments}: {what}", dict.fromkeys(arguments.split(), change))
for name, inputs in OTHER_DTYPE.items():
    for arguments, dtype in itertools.product(inputs, DTYPES):
        odd(
            name,
            f"{arguments}: {dtype}",
            dict.fromkeys(arguments.split(), lambda t, d=dtype: t.to(d)),
        )
for dtype in INTEGERS:
    odd("loss", f"target: {dtype}", dict(target=(TARGET % 100).to(dtype)), ignore_index=29)

# Masks of every shape that can be broadcast.
for shape in [s[n:] for n in range(5) for s in itertools.product((1, B), (1, H), (1, T), (1, S))]:
    allowed = drawn(*shape, seed=len(shape)) > -0.5
    bias = drawn(*shape, seed=7).masked_fill(~allowed, -math.inf)
    for causal in (False, True):
        for name, mask in (("attention", allowed), ("attention and a bias", bias)):
            what = f"{list(shape)}{', causal' * causal}"
            odd(name, what, dict(attn_mask=mask), is_causal=causal)
    odd("multimax", f"mask {list(shape)}", dict(mask=~allowed))
    odd("multimax", f"float mask {list(shape)}", dict(mask=bias))
for dim in (0, 1, 2, -4):
    odd("multimax", f"dim {dim}", {}, dim=dim)
    odd("log_multimax", f"dim {dim}", {}, dim=dim)

# Sizes: (B, H, T, S, D), (N, V, D), and shapes of elementwise calls.
for b, h, t, s, d in (
    *((2, 2, t, s, 16) for t in (0, 1, 8, 9, 65) for s in (0, 1, 7, 64, 130)),
    *((1, 2, 3, 20, d) for d in (0, 1, 3, 15, 17, 33, 80, 256)),
    *((1, 1, 70, 513, d) for d in (1, 33, 256)),
    (0, 2, 3, 4, 16),
    (2, 0, 3, 4, 16),
):
    sizes = dict(
        query=2 * drawn(b, h, t, d), key=drawn(b, h, s, d), value=drawn(b, h, s, d, seed=2)
    )
    for causal in (False, True):
        what = f"{[b, h, t, s, d]}{', causal' * causal}"
        odd("softmax attention", what, sizes, is_causal=causal)
        of_heads = offsets(h, 2) if h else offsets(2)
        odd("attention", what, sizes | of_heads | dict(attn_mask=None), is_causal=causal)
for shape in [(0, H, T, S), (B, H, 0, S), (B, H, T, 0), (B, H, 1, 1), (2, B, H, T, S), (H, T, S)]:
    odd("modulate", f"{list(shape)}", dict(x=drawn(*shape)))
for shape in [(), (0,), (1,), (7,), (3, 4), (2, 0, 3, 3)]:
    odd("modulate", f"{list(shape)}, shared", dict(x=drawn(*shape)) | offsets(2))
for n, v, d in [
    (0, 9, 4),
    (1, 1, 1),
    (7, 1, 5),
    (17, 2, 3),
    (257, 129, 33),
    (5, 128, 0),
    (0, 9, 0),
]:
    sizes = dict(
        features=drawn(n, d), weight=drawn(v, d, seed=1), bias=drawn(v), target=torch.arange(n) % v
    )
    for reduction, smoothing, name in itertools.product(
        ("sum", "none"), (0, 0.2), ("loss", "softmax loss")
    ):
        what = f"{[n, v, d]}, {reduction}, smoothed by {smoothing}"
        odd(name, what, sizes, reduction=reduction, label_smoothing=smoothing)
for shape in [(), (2, 3), (0, 2), (2, 0, 3), (1, 1, 1)]:
    features = drawn(*shape, D)
    target = torch.full(shape, 5)
    odd("loss", f"{list(shape)}", dict(features=features, target=target), reduction="none")
    odd("fused_scores", f"{list(shape)}", dict(features=features))

# Parameters, and numbers.
for name, heads in {
    "modulate": (H,),
    "multimax": (),
    "attention": (H,),
    "loss": (),
    "fused_scores": (),
}.items():
    for side in ("low", "high"):
        odd(name, f"no {side} term", {f"{side}_{n}": None for n in ("coefficient", "threshold")})
        order = {n: p[..., :1] for n, p in offsets(*heads, 2).items() if side in n}
        odd(name, f"the {side} term of order 1", order)
for ignored, reduction in itertools.product(
    (29, 0, -1, V, 2**62, -(2**63)), ("sum", "mean", "none")
):
    target = torch.where(torch.arange(N) % 3 > 0, TARGET, ignored)
    what = f"{ignored} ignored, {reduction}"
    odd("loss", what, dict(target=target), ignore_index=ignored, reduction=reduction)
odd("loss", "all ignored", dict(target=torch.full((N,), -100)))
for start, name in itertools.product((0, 100, 128, 172), ("loss", "softmax loss")):
    excluded = BIAS.index_fill(0, torch.arange(start, start + 128), -math.inf)
    others = (start + 128 + 7 * torch.arange(N)) % V
    odd(name, f"128 classes of -inf from {start}", dict(bias=excluded, target=others))
for chunk in (1, 3, 2**40, 2**63 - 1):
    odd("loss", f"chunks of {chunk}", {}, chunk_size=chunk)
for scale in (0, 0.0, -1, 3, 1e-300):
    odd("attention", f"scale {scale}", {}, scale=scale)
odd("attention", "all dropped", {}, dropout_p=1)


# --- the mappings, which have no kernels ---------------------------------------------------------


def near(alpha):
    """Compare alpha_entmax with softmax for alpha near 1, and with argmax for a large alpha."""
    limit = SCORES.softmax(-1) if alpha < 2 else F.one_hot(SCORES.argmax(-1), 4)
    found = {t: NORMALIZERS["alpha_entmax"](SCORES.to(t), alpha=alpha) for t in DTYPES}
    off = {f"{t}": distance(probs, limit.double(), 0.01) for t, probs in found.items()}
    return {t: how for t, how in off.items() if how}


def lost(name, wrong, **options):
    """Check that a row without a softmax is NaN, and no other row."""
    rows = SCORES.clone()
    rows[1] = wrong
    found = NORMALIZERS[name](rows, **options)
    good = found.isnan().all(-1).tolist() == [False, True, False]
    return {} if good and found.isnan().sum() == 4 else {"values": f"{found}"}


SCORES, ROWS = 2 * drawn(3, 4), drawn(3, 4, seed=1) > 0
for name, example in EXAMPLES.items():
    if example.reference is None:
        continue
    options = example.arguments
    given_oddly = {what: dict(x=change(SCORES)) for what, change in LAYOUTS.items()} | {
        "negated in place of a copy": dict(x=OF_FLOATS["negated in place of a copy"](SCORES)),
        "a scalar": dict(x=SCORES[0, 0]),
        "a scalar, masked": dict(x=SCORES[0, 0], mask=torch.tensor(True)),
        "far apart": dict(x=SCORES * 1e5),
    }
    given_oddly |= {f"mask {k}": dict(x=SCORES, mask=change(ROWS)) for k, change in LAYOUTS.items()}
    given_oddly |= {f"{dtype}": dict(x=SCORES.to(dtype)) for dtype in DTYPES}
    given_oddly |= {f"dim {dim}": dict(x=SCORES, mask=ROWS, dim=dim) for dim in (0, 1, -2)}
    for mask in (ROWS[0], ROWS[:, :1], ROWS[0, :1], ROWS[0, 0]):
        given_oddly[f"mask {list(mask.shape)}"] = dict(x=SCORES, mask=mask)
    for shape in ((1,), (3, 1), (0, 3), (3, 0), (0,)):
        given_oddly[f"{list(shape)}"] = dict(x=drawn(*shape))
    for what, arguments in given_oddly.items():
        case(name, what, mapped, name, **arguments, **options)
    for wrong in (math.nan, math.inf, -math.inf):
        # If rows need not sum to 1, a score of -inf is valid and has probability 0.
        if name == "sigmoid" or wrong < 0 and not NORMALIZERS[name].sums_to_one:
            continue
        case(
            name,
            f"a row of {wrong}",
            lost,
            name,
            torch.tensor([wrong, 1, 2, 3] if wrong > 0 or wrong != wrong else wrong),
            **options,
        )
for alpha in (1, 1 + 1e-15, 1 + 1e-9, 1 + 1e-6, 1e4, 1e300):
    case("alpha_entmax", f"alpha {alpha}", near, alpha)


# --- and the rest ------------------------------------------------------------------------------


def no_gradients_without_need():
    """Check that the loss computes gradients only if they are needed."""
    formed = []

    def recording(function):
        def record(*arguments):
            formed.append(arguments[1] is not None)
            return function(*arguments)

        return record

    modules = ((cross_entropy, "_run_cpp"), (cross_entropy, "_plain_parts"))
    functions = [getattr(*module) for module in modules]
    for module, function in zip(modules, functions, strict=True):
        setattr(*module, recording(function))
    try:
        arguments = LOSS | dict(weight=nn.Parameter(LOSS["weight"]))
        with torch.no_grad():
            linear_cross_entropy(**arguments)
        linear_cross_entropy(**arguments)
        linear_cross_entropy(**LOSS)
    finally:
        for module, function in zip(modules, functions, strict=True):
            setattr(*module, function)
    return {} if formed == [False, True, False] else {"gradients formed": f"{formed}"}


def differentiable_graph(name):
    """Check that create_graph=True does not change the gradients."""
    ours, _, good = FUNCTIONS[name]
    arguments = {k: v.clone() for k, v in good.items()}
    learned = [v.requires_grad_() for v in arguments.values() if v.is_floating_point()]
    grads = [
        torch.autograd.grad(ours(**arguments).sum(), learned, create_graph=graph)
        for graph in (False, True)
    ]
    same = all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    return {} if same else {"gradients": "are others"}


def under(context, name, error):
    """Compare a call under a context with the formula outside of it."""
    ours, plain, good = FUNCTIONS[name]
    with context():
        found = ours(**good)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in good.items()}
    off = distance(found, plain(**exact), error)
    return {"values": off} if off else {}


def thrice():
    """Compare attention with one tensor as query, key and value."""
    x = ATTENTION["query"].clone().requires_grad_()
    modulator = offsets(H, 2)
    pairs = []
    for t, function in ((x, ours_attention), (x.double(), plain_attention)):
        out = function(t, t, t, **{k: v.to(t.dtype) for k, v in modulator.items()})
        pairs.append((out, torch.autograd.grad(out.pow(2).sum(), x)[0]))
    off = {n: distance(*pair, 1e-4) for n, pair in enumerate(zip(*pairs, strict=True))}
    return {n: how for n, how in off.items() if how}


case("loss", "no gradients are formed without need", no_gradients_without_need)
case("attention", "of a tensor to itself", thrice)
bfloat16 = functools.partial(torch.autocast, "cpu", torch.bfloat16)
for name in FUNCTIONS:
    case(name, "in inference mode", under, torch.inference_mode, name, 1e-4)
    case(name, "under autocast", under, bfloat16, name, 0.05)
    if name != "fused_scores":
        case(name, "with a graph of the gradients", differentiable_graph, name)


# --- the tests ---------------------------------------------------------------------------------

CALLS = [
    (group, what, backend)
    for group, cases in CASES.items()
    for what in cases
    for backend in (isolated_calls.BACKENDS if group in FUNCTIONS else ("auto",))
]


def attempt(group, what):
    try:
        return CASES[group][what]()
    except Exception as error:
        return {type(error).__name__: str(error)}


@pytest.fixture(scope="module")
def outcomes():
    return isolated_calls.outcomes(__file__)


@pytest.mark.parametrize("group", CASES)
def test_functions_equal_plain_formulas_on_unusual_inputs(outcomes, group):
    done, gone = outcomes
    calls = {call[1:]: index for index, call in enumerate(CALLS) if call[0] == group}
    off = {call: gone.get(index) or done[index] for call, index in calls.items()}
    off = {call: how for call, how in off.items() if how}
    assert not off, "\n".join(f"{call}: {how}" for call, how in off.items())


if __name__ == "__main__":
    isolated_calls.child(
        (backend, functools.partial(attempt, group, what)) for group, what, backend in CALLS
    )
