"""Invalid calls raise an error that names the argument, in each function and backend.

An invalid call is a valid one with one or more wrong arguments. It must raise ValueError, TypeError
or RuntimeError with the name of the argument or with what is wrong with it.
"""

import functools
import math
import re
import types

import isolated_calls
import pytest
import torch
from examples import EXAMPLES
from random_inputs import drawn

from multimax_fairseq import (
    NORMALIZERS,
    Modulator,
    linear_cross_entropy,
    log_multimax,
    multimax,
    normalize,
    scaled_dot_product_attention,
    symmetric_divergence,
)
from multimax_fairseq.ops.best_outputs import best_outputs, fused_scores
from multimax_fairseq.ops.modulator import modulate, table_of

pytestmark = pytest.mark.long

B, H, T, S, D, N, V = 3, 4, 5, 6, 8, 10, 300
PARAMETERS = ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")


# --- errors: (argument, what is wrong, the value or a function of the valid one) ------------------

MISSING = object()
KINDS = {
    "a list": lambda t: t.tolist(),
    "a numpy array": lambda t: t.numpy(),
    "a string": lambda t: "tensor",
    "on meta": lambda t: t.to("meta"),
    "complex": lambda t: t.to(torch.complex64),
    "conjugate": lambda t: t.to(torch.complex64).conj(),
    "int8": lambda t: t.to(torch.int8),
    "sparse": lambda t: t.to_sparse(),
    "compressed": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "jagged": lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
    "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "of oneDNN": lambda t: t.float().to_mkldnn(),
}
SHAPES = {
    "a dimension more": lambda t: t[None],
    "a dimension less": lambda t: t[0],
    "a scalar": lambda t: t.flatten()[0],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a row less": lambda t: t[1:],
    "a column more": lambda t: torch.cat([t, t[..., :1]], -1),
    "a column less": lambda t: t[..., 1:],
    "no columns": lambda t: t[..., :0],
    "flat": lambda t: t.flatten(),
    "twice": lambda t: torch.stack([t, t], 1),
}
# Other words with which PyTorch or this project names the error.
WORDS = {
    "x": ("scores",),
    "on meta": ("meta",),
    "on two devices": ("meta",),
    "complex": ("omplex",),
    "conjugate": ("omplex",),
    "sparse": ("parse", "memory format"),
    "compressed": ("parse",),
    "nested": ("ested",),
    "jagged": ("ested", "Mismatch in shape", "multimax_fairseq."),
    "quantised": ("uantized",),
    "of oneDNN": ("kldnn", "OpaqueTensor"),
    "with a gradient": ("gets no gradient",),
    "modulator": ("coefficient", "threshold", "heads", "scores"),
    "name": ("unknown mapping", "multimax()"),
    "num_heads": ("number of heads",),
    "'topk' without k": ("topk()",),
    "a scalar with a row of a mask": ("alpha",),
    # Errors name a modulator's values by their term or their shapes.
    **dict.fromkeys(
        ("t_b", "t_d", "b", "d"),
        (
            "term needs both",
            "term's threshold",
            "term's temperature",
            "one shape",
            "data type",
            "real number",
            "sequence",
            "dimensions",
        ),
    ),
}


def changed(changes, arguments, without=""):
    return [
        (argument, what, change)
        for argument in arguments.split()
        for what, change in changes.items()
        if what not in without
    ]


def values(arguments, *wrong):
    return [
        (argument, f"{value!r:.30}", value) for argument in arguments.split() for value in wrong
    ]


kinds = functools.partial(changed, KINDS)
shapes = functools.partial(changed, SHAPES)
double = functools.partial(changed, {"double": lambda t: t.double()})
missing = functools.partial(changed, {"missing": MISSING})
HUGE = 10**400
NUMBERS = (math.nan, math.inf, -math.inf, HUGE, -HUGE, True, "1", None, [1.0], 1j)
INTEGERS = (True, 1.5, "1", [1], HUGE, 2**63)

# --- the mappings ------------------------------------------------------------------------------

PLAIN = Modulator()
SCORES = dict(scores=drawn(T, S), dim=-1, mask=drawn(T, S, seed=1) > 0)
MAPPING = [
    *kinds("scores"),
    *missing("scores"),
    ("scores", "bool", lambda t: t > 0),
    *values("dim", 2, -3, 10**6, -HUGE, 1.5, "last", None, True, [0], torch.tensor(0.0)),
    *kinds("mask", without="conjugate"),
    *shapes("mask", without="a dimension less, a scalar, flat"),
    *values("mask", -1.0, True),
    ("mask", "turned", lambda t: t.mT),
    ("scores mask", "a scalar with a row of a mask", lambda s, m: (s[0, 0], m[0])),
    ("temprature", "no option", 1.0),
]
OVER_X = [(argument.replace("scores", "x"), *rest) for argument, *rest in MAPPING]
MODULATORS = [
    *values("modulator", None, True, 1.0, "multimax", [0.1], {}, torch.zeros(8)),
    ("modulator", "its class", Modulator),
    ("modulator", "of two heads", Modulator(num_heads=2)),
    ("modulator", "giving another shape", lambda _: lambda x: x[..., :1]),
    ("modulator", "giving nothing", lambda _: lambda x: None),
    ("modulator", "giving integers", lambda _: lambda x: x.long()),
]
MULTIMAX = [*OVER_X, *MODULATORS, *missing("modulator"), ("modulator", "a list", [PLAIN])]
# Changes that a user may make to a modulator's parameters.
BROKEN = {
    "without a threshold": dict(low_threshold=None),
    "without a coefficient": dict(high_coefficient=None),
    "without any term": dict.fromkeys(PARAMETERS),
    "of a short threshold": dict(high_threshold=torch.zeros(1)),
    "of order 3": dict(low_coefficient=torch.zeros(3), low_threshold=torch.zeros(3)),
    "of scalars": dict(low_coefficient=torch.zeros(()), low_threshold=torch.zeros(())),
    "of no heads": dict(low_coefficient=torch.zeros(0, 2), low_threshold=torch.zeros(0, 2)),
    "of complex numbers": dict(low_coefficient=torch.zeros(2, dtype=torch.complex64)),
    "of integers": dict(low_coefficient=torch.zeros(2, dtype=torch.long)),
    "of a list": dict(low_coefficient=[0.0, 0.0]),
    "of sparse ones": dict(high_threshold=torch.zeros(2).to_sparse()),
    "on two devices": dict(low_coefficient=torch.zeros(2, device="meta")),
    "on meta": dict.fromkeys(PARAMETERS, torch.zeros(2, device="meta")),
}


class Broken(types.SimpleNamespace):
    monotone = False

    def __call__(self, x):
        return modulate(x, **vars(self))


BREAKING = [
    ("modulator", what, Broken(**dict.fromkeys(PARAMETERS, torch.zeros(2)) | broken))
    for what, broken in BROKEN.items()
]
OF_OUTPUT = [
    *values("modulator", True, 1.0, "multimax", [0.1], Modulator),
    ("modulator", "a function", lambda _: lambda x: x),
    ("modulator", "of four heads", Modulator(num_heads=4)),
    ("modulator", "of one head", Modulator(num_heads=1)),
    *BREAKING,
]

# --- the operators -----------------------------------------------------------------------------

TABLE = table_of(PLAIN)[0].detach()
QUERY, KEY, VALUE = (drawn(B, H, n, D, seed=n) for n in (T, S, S))
ALLOWED = drawn(B, 1, T, S, seed=3) > -1
FEATURES, WEIGHT, BIAS, TARGET = drawn(N, D), drawn(V, D), drawn(V), 7 * torch.arange(N)
ATTEND = dict(
    **dict(query=QUERY, key=KEY, value=VALUE, table=TABLE, mask=~ALLOWED, seed=torch.tensor(1)),
    sink=torch.zeros(H),
    **dict(is_causal=False, dropout_p=0.1, scale=0.3, low=2, high=2),
)
PROJECT = dict(features=FEATURES, weight=WEIGHT, bias=BIAS, table=TABLE)
LOSS = dict(
    **PROJECT,
    **dict(target=TARGET, smooth_weight=0.0, nll_weight=1.0, z_weight=0.0, max_weight=0.0),
    **dict(ignore_index=-100, chunk_size=None),
)
OF_TABLE = [
    *kinds("table"),
    *shapes("table", without="a scalar, a row less"),
    *double("table"),
    ("table", "half", lambda t: t.half()),
    ("table", "of 13 columns", torch.zeros(1, 13)),
    ("table", "of no rows", torch.zeros(0, 8)),
]
NO_DROPOUT = (-0.1, 1.0, 1 - 1e-12, math.nan, math.inf, HUGE, "half", None)
OF_SEED = [
    *values("seed", 1, "1", torch.tensor(1.0), torch.zeros(1, dtype=torch.long)),
    ("seed", "on meta", torch.zeros((), dtype=torch.long, device="meta")),
    ("seed", "none, to drop with", None),
]
OF_ATTENTION = [
    *kinds("query key value", without="conjugate"),
    *shapes("query key value", without="a scalar, flat"),
    *double("query key value"),
    ("query", "bfloat16", lambda t: t.bfloat16()),
    (
        "key value mask",
        "too many rows",
        lambda k, v, _: (*(t[:, :, :1].expand(-1, -1, 2**40, -1) for t in (k, v)), None),
    ),
    *OF_TABLE,
    *kinds("sink"),
    *shapes("sink", without="a scalar, flat"),
    *double("sink"),
    ("sink", "half", lambda t: t.half()),
    *kinds("mask", without="conjugate"),
    *shapes("mask", without="a row less"),
    *OF_SEED,
    *values("is_causal", "yes", [True]),
    *values("dropout_p", *NO_DROPOUT),
    *values("scale", math.nan, math.inf, -math.inf, HUGE, "half", None),
    *values("low high", -1, 3, 1.5, "2", None, 2**63),
]
OF_PROJECTION = [
    *kinds("features weight bias", without="conjugate"),
    *shapes("features", without="a row more, a row less"),
    *shapes("weight", without="no columns, a row more, a row less"),
    *shapes("bias", without="no columns, flat"),
    ("features weight", "no columns", lambda f, w: (f[:, :0], w[:, :0])),
    ("weight bias", "no classes", lambda w, b: (w[:0], b[:0])),
    *double("features weight bias"),
    *missing("features weight"),
    *OF_TABLE,
    ("table", "one row per head", torch.zeros(3, 8)),
]
OF_LOSS = [
    *OF_PROJECTION,
    *kinds("target", without="of oneDNN, quantised"),
    *shapes("target", without="no columns, flat"),
    *(("target", f"{d}", TARGET.to(d)) for d in (torch.int32, torch.uint64, torch.bool)),
    *(("target", f"{t}", TARGET.clone().fill_(t)) for t in (-1, -99, V, 2**62, -(2**63))),
    *values("smooth_weight nll_weight", math.nan, math.inf, -math.inf, HUGE, "1", None),
    *values("z_weight max_weight", "1", None),
    ("smooth_weight", "not what gradients are formed for", 0.1),
    *values("ignore_index", 1.0, "1", 2**63, None),
    *values("chunk_size", 0, -1, 1.5, "1", 2**63),
]


# --- wrong only in the backward pass -----------------------------------------------------------


def backward(function, **good):
    """Return a function of the wrong arguments that gives the gradients of the float arguments."""

    def first(found):
        return found[0] if isinstance(found, tuple) else found

    def differentiate(grad, again=False, overwritten=False, second=False):
        call = dict(good)
        names = [n for n, a in good.items() if torch.is_tensor(a) and a.is_floating_point()]
        call |= {name: good[name].clone().requires_grad_() for name in names}
        learned = [call[name] for name in names]
        out = first(function(**call))
        if overwritten:
            with torch.no_grad():
                learned[0].zero_()
        grads = torch.autograd.grad(out, learned, grad, create_graph=second)
        if second:
            # The graph also reaches the scores through another path.
            total = sum((g + t.pow(3)).sum() for g, t in zip(grads, learned, strict=True))
            return torch.autograd.grad(total, learned)
        return torch.autograd.grad(out, learned, grad) if again else grads

    return differentiate, dict(grad=torch.ones_like(first(function(**good))))


BACKWARD = [
    *kinds("grad", without="a list, int8, of oneDNN, quantised"),
    *shapes("grad", without="no columns, flat, twice, a scalar"),
    ("again", "through a graph that is gone", True),
]
OVERWRITTEN = ("overwritten", "what the graph has kept", True)
SECOND = ("second", "a derivative of the gradient", True)
WORDS |= {
    "grad": ("ismatch in shape", "gradient"),
    "again": ("a second time",),
    "overwritten": ("inplace",),
    "second": ("no derivative",),
}

# --- every function: (function, valid arguments, wrong ones) -----------------------------------

ALL = " ".join(PARAMETERS)
OFFSETS = {name: 0.1 * drawn(H, 2, seed=n) for n, name in enumerate(PARAMETERS)}
ATTENTION = dict(query=QUERY, key=KEY, value=VALUE, modulator=PLAIN, attn_mask=ALLOWED)
OUTPUT = dict(features=FEATURES, weight=WEIGHT, bias=BIAS, modulator=PLAIN)
OVER_MODULATED = dict(x=SCORES["scores"], dim=-1, mask=SCORES["mask"], modulator=PLAIN)
VALUES = dict(t_b=[1.0, 1.0], t_d=[1.0, 1.0], b=[0.0, 0.0], d=[0.0, 0.0])
OF_SCORES = [
    *kinds("features weight bias", without="conjugate"),
    *changed({name: SHAPES[name] for name in ("a scalar", "a column more", "flat")}, "features"),
    *shapes("weight", without="no columns, a row more, a row less"),
    *shapes("bias", without="flat"),
    *missing("features weight bias modulator"),
    ("weight", "of another width", drawn(V, 2 * D)),
    ("weight bias", "no classes", lambda w, b: (w[:0], b[:0])),
    *double("features weight bias"),
    *OF_OUTPUT,
]
OF_BEST = [
    *values("count", 0, -1, V + 1, None, *INTEGERS[1:]),
    *values("apart", [V], [-1], ["1"], [1.5], [None], None, "1", 2.0),
]

WRONG = {
    "modulate": (
        modulate,
        dict(x=drawn(B, H, T, S), monotone=False) | OFFSETS,
        [
            *kinds(f"x {ALL}"),
            *shapes(ALL),
            *missing(f"x {ALL}"),
            ("x", "of too few dimensions", lambda t: t[0, 0]),
            ("x", "of other heads", lambda t: t[:, :2]),
            *values("monotone", 1, "no", None, torch.tensor(True)),
            ("low_coefficient low_threshold", "of order 3", lambda *_: drawn(2, H, 3)),
            ("high_coefficient high_threshold", "scalars", lambda *_: drawn(2)),
            ("x low_coefficient low_threshold", "of no heads", lambda *_: drawn(3, 1, 0, 2, 2)),
        ],
    ),
    "Modulator": (
        lambda x, device="cpu", **options: Modulator(**options).to(device)(x),
        dict(x=drawn(B, H, T, S), order=2, terms="both", num_heads=H, init_std=0.1, monotone=False),
        [
            *kinds("x"),
            ("x", "of too few dimensions", lambda t: t[0, 0]),
            ("x", "of other heads", lambda t: t[:, :2]),
            *values("order", 0, 3, -1, math.nan, None, torch.ones(2), *INTEGERS),
            *values("terms", "none", "", None, 2, True, ["low"], torch.ones(2)),
            *values("num_heads", 0, -1, 3.0, torch.tensor(3), *INTEGERS),
            *values("init_std", -0.1, torch.ones(2), *NUMBERS),
            *values("monotone", 1, "no", None),
            ("device", "on meta", "meta"),
            ("x num_heads", "on meta", lambda x, _: (x.to("meta"), None)),
            ("x num_heads device", "meta", lambda *_: (drawn(3), None, "meta")),
            ("x num_heads device", "meta, one score", lambda *_: (drawn()[()], None, "meta")),
            ("temperature", "no option", 1.0),
        ],
    ),
    "Modulator.from_values": (
        lambda x, *args, **options: Modulator.from_values(*args, **options)(x),
        dict(x=drawn(T, S)) | VALUES,
        [
            *values("t_b t_d b d", None, [1.0], [1.0] * 3, 1.0, [], "12", [None, 1], [1j, 1]),
            *values("t_b t_d b d", [[1.0], [1.0, 2.0]], ["1", 2], {}),
            *missing("t_b t_d b d"),
        ],
    ),
    "multimax": (multimax, OVER_MODULATED, MULTIMAX),
    "log_multimax": (log_multimax, OVER_MODULATED, MULTIMAX),
    "normalize": (
        normalize,
        SCORES | dict(name="topk", k=2),
        [
            *MAPPING,
            *values("name", "sofmax", "", None, True, 3, ["topk"], {}, torch.zeros(2), "multimax"),
            *missing("k name"),
            *values("k", 0, 1.5, "2", None),
        ],
    ),
    "scaled_dot_product_attention": (
        scaled_dot_product_attention,
        ATTENTION | dict(normalizer="multimax"),
        [
            *kinds("query key value attn_mask", without="conjugate"),
            *shapes("query key", without="a dimension more, a dimension less, a row less"),
            *changed({name: SHAPES[name] for name in ("a scalar", "a row more", "flat")}, "value"),
            *missing("query key value"),
            ("key value", "of fewer heads", lambda k, v: (k[:, :2], v[:, :2])),
            ("query", "of other heads and rows", lambda q: q[:2, :3]),
            *shapes("attn_mask", without="a dimension less, a scalar"),
            *double("query key"),
            *values("attn_mask", True, 0.0),
            *MODULATORS,
            ("modulator", "of one head", Modulator(num_heads=1)),
            *BREAKING,
            *values("normalizer", "sofmax", "", None, 3, True, ["softmax"], {}, torch.zeros(2)),
            *(("normalizer", f"{name!r}, with a modulator", name) for name in ("softmax", "topk")),
            ("normalizer modulator", "'topk' without k", lambda *_: ("topk", None)),
            ("normalizer modulator k", "'softmax' with k", lambda *_: ("softmax", None, 3)),
            *values("is_causal", 1, 0, "no", None, torch.tensor(True)),
            *values("dropout_p", -0.1, 1.1, torch.tensor(0.1), *NUMBERS),
            *values("scale", torch.tensor(1.0), *(n for n in NUMBERS if n is not None)),
            *values("backend", "fast", "", None, 3, True, ["cpp"], torch.zeros(2)),
            *((name, "no option", 1) for name in ("dim", "mask", "k", "temprature")),
        ],
    ),
    "linear_cross_entropy": (
        linear_cross_entropy,
        OUTPUT | dict(target=TARGET),
        [
            *kinds("features weight bias", without="conjugate"),
            *kinds("target", without="int8, of oneDNN, quantised"),
            *shapes("features target", without="no columns, flat"),
            *shapes("weight", without="no columns, a row more, a row less"),
            *shapes("bias", without="flat"),
            *missing("features weight target"),
            ("weight", "of another width", drawn(V, 2 * D)),
            ("weight bias", "no classes", lambda w, b: (w[:0], b[:0])),
            ("target", "20,000 for 10 rows", torch.zeros(20_000, dtype=torch.long)),
            *(("target", f"{d}", TARGET.to(d)) for d in (torch.half, torch.bool, torch.uint64)),
            *(("target", f"{t}", TARGET.clone().fill_(t)) for t in (-1, -99, V, 2**62, -(2**63))),
            ("bias", "of one", torch.zeros(1)),
            *double("features weight bias"),
            *OF_OUTPUT,
            *values("label_smoothing", -0.1, 1.0, torch.tensor(0.1), *NUMBERS),
            *values("z_loss maxsup", -0.1, torch.tensor(0.1), *NUMBERS),
            *values("ignore_index", 1.0, None, torch.tensor(1), *INTEGERS),
            *values("reduction", "product", "", None, 1, True, ["sum"], torch.zeros(2)),
            *values("chunk_size", 0, -1, math.nan, torch.tensor(1), *INTEGERS),
            ("temperature", "no option", 1.0),
        ],
    ),
    "symmetric_divergence": (
        symmetric_divergence,
        OUTPUT | dict(other=drawn(N, D, seed=5), mask=drawn(N) > 1),
        [
            *kinds("features other weight bias mask", without="conjugate"),
            *shapes("features other mask", without="no columns, flat"),
            *shapes("weight", without="no columns, a row more, a row less"),
            *shapes("bias", without="flat"),
            *missing("features other weight"),
            ("weight", "of another width", drawn(V, 2 * D)),
            ("weight bias", "no classes", lambda w, b: (w[:0], b[:0])),
            *(("mask", f"{d}", TARGET.to(d)) for d in (torch.half, torch.long)),
            *double("features other weight bias"),
            *OF_OUTPUT,
            *values("reduction", "product", "", None, 1, True, ["sum"], torch.zeros(2)),
            *values("chunk_size", 0, -1, math.nan, torch.tensor(1), *INTEGERS),
            ("temperature", "no option", 1.0),
        ],
    ),
    "fused_scores": (fused_scores, OUTPUT, OF_SCORES),
    "best_outputs": (
        best_outputs,
        OUTPUT | dict(count=3, apart=[2, 1]),
        [*OF_SCORES, *OF_BEST, *values("count apart", True), ("features", "3-d", drawn(2, N, D))],
    ),
    "backward of modulate": (
        *backward(modulate, x=drawn(B, H, T, S), **OFFSETS),
        [*BACKWARD, OVERWRITTEN, SECOND],
    ),
    "backward of attention": (
        *backward(scaled_dot_product_attention, **ATTENTION),
        [*BACKWARD, SECOND],
    ),
    "backward of the loss": (
        *backward(linear_cross_entropy, **OUTPUT, target=TARGET, reduction="none"),
        [*BACKWARD, OVERWRITTEN, SECOND],
    ),
    "backward of the sum of the loss": (
        *backward(linear_cross_entropy, **OUTPUT, target=TARGET),
        [*changed({"two": lambda t: t.expand(2), "on meta": KINDS["on meta"]}, "grad"), SECOND],
    ),
    "backward of the divergence": (
        *backward(symmetric_divergence, **OUTPUT, other=drawn(N, D, seed=5), reduction="none"),
        [*BACKWARD, SECOND],
    ),
    "backward of multimax": (*backward(multimax, **OVER_MODULATED), [*BACKWARD, SECOND]),
    "backward of sparsemax": (*backward(NORMALIZERS["sparsemax"], **SCORES), BACKWARD),
}
MISTAKEN = {
    "softmax": values("temperature", 0, -1.0, torch.ones(2), *NUMBERS),
    "topk": values("k", 0, -1, math.nan, None, torch.tensor(2), *INTEGERS),
    "alpha_entmax": [*values("alpha", 0.5, 0, -1, *NUMBERS), *missing("alpha")],
    "evsoftmax": values("training", 1, "no", None),
    "ssmax": [*values("length_scale", *NUMBERS), *missing("length_scale")],
    "sink": values("sink", math.nan, math.inf, HUGE, "1", None, True),
    "sigmoid": values("bias", math.nan, math.inf, -math.inf, HUGE, "1", True),
    "asentmax": [
        *(*values("beta", *NUMBERS), *values("gamma", *NUMBERS)),
        *missing("beta gamma"),
    ],
    "adaptive_temperature": values("training", 1, "no", None),
}
for name, example in EXAMPLES.items():
    if name not in WRONG:
        wrong = [*MAPPING, *MISTAKEN.get(name, [])]
        WRONG[name] = (NORMALIZERS[name], SCORES | example.arguments, wrong)
for name, argument in (("sink", "sink"), ("ssmax", "length_scale")):
    WRONG[f"{name} of a tensor"] = (
        NORMALIZERS[name],
        SCORES | {argument: torch.full((T, 1), 0.3)},
        [*MAPPING, *kinds(argument), *shapes(argument, without="a dimension less, a scalar")],
    )
WRONG["alpha_entmax of a tensor"] = (
    NORMALIZERS["alpha_entmax"],
    SCORES | dict(alpha=torch.full((T, 1), 1.3)),
    [
        *MAPPING,
        *kinds("alpha"),
        *shapes("alpha", without="a dimension less, a scalar"),
        *(
            ("alpha", f"one of them {a}", torch.tensor([[1.3], [a], [1.3], [2], [1.5]]))
            for a in (1.0, 0.5, -1.0, math.nan, math.inf, -math.inf)
        ),
    ],
)
OPERATORS = {
    "modulate": (
        dict(scores=drawn(B, H, T, S), table=TABLE),
        [
            *kinds("scores"),
            *double("scores"),
            *OF_TABLE,
            *missing("scores table"),
            ("table", "a row too many", torch.zeros(H + 1, 8)),
            ("scores table", "heads, and no dimension", lambda s, t: (s[0, 0], t.expand(H, 8))),
            ("scores table", "no heads", lambda s, t: (s[:, :0], t[:0])),
        ],
    ),
    "modulate_backward": (
        dict(grad=drawn(B, H, T, S, seed=1), scores=drawn(B, H, T, S), table=TABLE),
        [*kinds("grad scores"), *shapes("grad"), *double("grad"), *OF_TABLE],
    ),
    "dropout": (
        dict(input=QUERY, seed=torch.tensor(1), p=0.3),
        [
            *kinds("input", without="on meta"),
            *kinds("seed", without="compressed, jagged, nested, of oneDNN"),
            *double("input seed"),
            *missing("input seed p"),
            *OF_SEED,
            *values("p", *NO_DROPOUT),
        ],
    ),
    "tails": (
        dict(table=TABLE),
        [
            *kinds("table", without="on meta"),
            *shapes("table", without="a scalar, a row less, a row more"),
            *double("table"),
            *missing("table"),
            *(("table", f"of {n} columns", torch.zeros(1, n)) for n in (0, 1, 4, 7, 9, 12)),
            *(("table", f"of {n} dimensions", torch.zeros((1,) * (n - 1) + (8,))) for n in (3, 4)),
            *(("table", f"of {d}", lambda t, d=d: t.to(d)) for d in (torch.half, torch.bfloat16)),
            *(("table", f"of {d}", lambda t, d=d: t.to(d)) for d in (torch.int32, torch.uint8)),
            *values("table", 1.0, "table", [0.0] * 8, [[0.0] * 8], {}, True, PLAIN),
        ],
    ),
    "attention": (
        ATTEND | dict(keep=True),
        [
            *OF_ATTENTION,
            *values("keep", "yes", [True]),
            ("mask", "with a gradient", torch.zeros(1, 1, T, S).requires_grad_()),
        ],
    ),
    "attention_backward": (
        dict(**ATTEND, grad=QUERY, output=QUERY, statistics=torch.ones(B, H, 2, T)),
        [
            *OF_ATTENTION,
            *kinds("grad output statistics", without="conjugate"),
            *shapes("grad output statistics"),
            *double("grad output statistics"),
            ("statistics", "strided", torch.ones(B, H, T, 2).mT),
            ("statistics", "of a call that kept nothing", torch.zeros(0)),
        ],
    ),
    "output_scores": (PROJECT, OF_PROJECTION),
    "best_outputs": (
        PROJECT | dict(count=3, apart=[2, 1]),
        [*OF_PROJECTION, *OF_BEST],
    ),
    "output_loss": (LOSS | dict(summed=True), [*OF_LOSS, *values("summed", "yes", [True])]),
    "output_loss_parts": (
        LOSS | dict(factors=torch.ones(N), needed=[True] * 4),
        [
            *OF_LOSS,
            *kinds("factors"),
            *shapes("factors", without="no columns, flat"),
            *double("factors"),
            *values("needed", None, [], [True] * 3, [True] * 5, True, "yes"),
        ],
    ),
}
KERNELS = {
    f"operator {name}": (getattr(torch.ops.multimax_fairseq, name), *rest)
    for name, rest in OPERATORS.items()
}


# --- the calls ---------------------------------------------------------------------------------


def attempt(function, good, wrong):
    """Make an invalid call; return the error's class names and its message."""
    arguments, _, value = wrong
    names = arguments.split()
    call = dict(good)
    if value is MISSING:
        del call[names[0]]
    elif isinstance(value, types.FunctionType):
        given = value(*(call.get(name) for name in names))
        call |= zip(names, given, strict=True) if len(names) > 1 else {names[0]: given}
    else:
        call[names[0]] = value
    try:
        found = function(**call)
    except Exception as error:
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
    return [["nothing"], f"returned {found!r:.200}"]


CALLS = [
    (name, wrong, backend)
    for table, backends in ((WRONG, isolated_calls.BACKENDS), (KERNELS, ("kernels",)))
    for name, (_, _, wrongs) in table.items()
    for wrong in wrongs
    for backend in backends
]
TESTS = {}
for index, (name, wrong, _) in enumerate(CALLS):
    TESTS.setdefault(f"{name}-{wrong[0]}", []).append(index)


@pytest.fixture(scope="module")
def outcomes():
    return isolated_calls.outcomes(__file__)


@pytest.mark.parametrize("test", TESTS)
def test_functions_name_the_wrong_argument(outcomes, test):
    done, gone = outcomes
    failed = {}
    for index in TESTS[test]:
        _, (arguments, what, _), backend = CALLS[index]
        names = "|".join(arguments.split())
        words = [word for key in (*arguments.split(), what) for word in WORDS.get(key, ())]
        if index in gone:
            failed[what, backend] = gone[index]
        elif done[index] is not None:
            kinds, message = done[index]
            known = {"ValueError", "TypeError", "RuntimeError"} & set(kinds)
            named = re.search(rf"\b({names})\b", message) or any(word in message for word in words)
            if not (known and named):
                failed[what, backend] = f"{kinds[0]}: {message}"
    assert not failed, "\n".join(f"{key}: {end}" for key, end in failed.items())
    if all(index in done and done[index] is None for index in TESTS[test]):
        pytest.skip("no compiled kernels")


def test_wrong_calls_cover_at_least_40_errors_per_function():
    counts = {name: len(wrongs) for name, (_, _, wrongs) in (WRONG | KERNELS).items()}
    assert min(count for name, count in counts.items() if "backward of" not in name) >= 40, counts


if __name__ == "__main__":
    isolated_calls.child(
        (backend, functools.partial(attempt, *(WRONG | KERNELS)[name][:2], wrong))
        for name, wrong, backend in CALLS
    )
