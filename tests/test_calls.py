"""Calls of the public functions: random and unusual ones equal a formula, wrong ones are refused.

- Random calls draw sizes, dtypes, memory layouts, masks and modulators. `scripts/test.sh --all`
  draws a thousand of them for each function.
- Unusual calls have an argument that is rarely drawn.
- Wrong calls are valid ones with one or more wrong arguments. Each raises ValueError, TypeError or
  RuntimeError with the name of the argument or with what is wrong with it.
"""

import functools
import itertools
import math
import re
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from examples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_settings import the_same_draws
from random_inputs import drawn
from torch import nn

import multimax_fairseq as mm
from multimax_fairseq import NORMALIZERS, Modulator
from multimax_fairseq.ops import cross_entropy
from multimax_fairseq.ops.best_outputs import best_outputs, fused_scores
from multimax_fairseq.ops.modulator import modulate, packed_parameters

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

PARAMETERS = ("low_coefficient", "low_threshold", "high_coefficient", "high_threshold")
ALL = " ".join(PARAMETERS)


# --- each function with a modulator's parameters as arguments, and its formula --------------------


class Given(types.SimpleNamespace):
    """A modulator with these parameters, of any shape, dtype and memory layout."""

    monotone = False

    def __call__(self, x):
        return modulate(x, **vars(self))


def modulator_of(options):
    """Remove a modulator's parameters from the options; return the modulator, or None."""
    parameters = {name: options.pop(name) for name in PARAMETERS if name in options}
    return Given(**parameters) if parameters else None


def ours_multimax(x, mask=None, dim=-1, **parameters):
    return mm.multimax(x, modulator_of(parameters), dim, mask)


def ours_log_multimax(x, mask=None, dim=-1, **parameters):
    # Excluded entries are -inf, which has no finite gradient.
    return mm.log_multimax(x, modulator_of(parameters), dim, mask).clamp(min=-100)


def ours_attention(query, key, value, **options):
    modulator = modulator_of(options)
    options["normalizer"] = "softmax" if modulator is None else "multimax"
    return mm.scaled_dot_product_attention(query, key, value, modulator=modulator, **options)


def ours_loss(features, weight, target, **options):
    modulator = modulator_of(options)
    return mm.linear_cross_entropy(features, weight, target, modulator=modulator, **options)[0]


def ours_log_probs(features, weight, target, **options):
    modulator = modulator_of(options)
    return torch.stack(
        mm.linear_log_probs(features, weight, target, modulator=modulator, **options)
    )


def ours_divergence(features, other, weight, **options):
    modulator = modulator_of(options)
    return mm.symmetric_divergence(features, other, weight, modulator=modulator, **options)


def ours_scores(features, weight, bias=None, **parameters):
    scores = fused_scores(features, weight, bias, modulator_of(dict(parameters)))
    # None: no kernel supports the call, and the caller uses the plain formula.
    return plain_scores(features, weight, bias, **parameters) if scores is None else scores


def plain_modulate(x, **parameters):
    gone = x == -math.inf
    x = out = x.masked_fill(gone, 0.0)
    for side, sign in (("low", -1), ("high", 1)):
        coefficient, threshold = (
            parameters.get(f"{side}_{n}") for n in ("coefficient", "threshold")
        )
        for n in range(0 if coefficient is None else coefficient.shape[-1]):
            c, t = (p[n] if p.dim() == 1 else p[:, None, None, n] for p in (coefficient, threshold))
            out = out + c * (sign * (x - t)).relu() ** (n + 1)
    return out.masked_fill(gone, -math.inf)


def plain_multimax(x, mask=None, dim=-1, **parameters):
    return plain_softmax(plain_modulate(x, **parameters), mask, dim)


def plain_log_multimax(x, mask=None, dim=-1, **parameters):
    return plain_multimax(x, mask, dim, **parameters).clamp(min=math.exp(-100)).log()


def plain_softmax(x, mask=None, dim=-1):
    if mask is not None:
        x = x.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else x + mask
    if x.numel() == 0:
        return x
    weights = (x - x.detach().amax(dim, True).clamp(min=-1e300)).exp()
    # A fully masked row gives zeros.
    return weights / weights.sum(dim, True).clamp(min=1e-30)


def plain_attention(
    query, key, value, attn_mask=None, is_causal=False, dropout_p=0.0, scale=None, **parameters
):
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    scores = plain_modulate(query @ key.mT * scale, **parameters)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = ~attn_mask
    return (1 - dropout_p) * plain_softmax(scores, attn_mask) @ value


def plain_scores(features, weight, bias=None, **parameters):
    return plain_modulate(F.linear(features, weight, bias), **parameters).detach()


def plain_loss(features, weight, target, bias=None, **options):
    smoothing, ignored = options.pop("label_smoothing", 0.0), options.pop("ignore_index", -100)
    reduction = options.pop("reduction", "sum")
    options.pop("chunk_size", None)
    log_probs = plain_modulate(F.linear(features, weight, bias), **options).log_softmax(-1)
    counts = target.long() != ignored
    losses = -log_probs.gather(-1, target.long().where(counts, 0)[..., None])[..., 0]
    if smoothing:
        others = -log_probs.sum(-1) - losses
        losses = (1 - smoothing) * losses + smoothing / max(len(weight) - 1, 1) * others
    losses = losses * counts
    if reduction == "none":
        return losses
    return losses.sum() / (counts.sum() if reduction == "mean" else 1)


def plain_log_probs(features, weight, target, bias=None, chunk_size=None, **parameters):
    log_probs = plain_modulate(F.linear(features, weight, bias), **parameters).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    of_target = log_probs.gather(-1, target.clamp(min=0)[:, None])[:, 0]
    return torch.stack([of_target, entropy]).masked_fill(target == -100, 0.0)


def plain_divergence(
    features, other, weight, bias=None, mask=None, reduction="sum", chunk_size=None, **parameters
):
    scores = (F.linear(h, weight, bias) for h in (features, other))
    log_p, log_q = (plain_modulate(x, **parameters).log_softmax(-1) for x in scores)
    found = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1) / 2
    counts = torch.ones_like(found) if mask is None else 1 - mask.to(found.dtype)
    if reduction == "none":
        return found * counts
    return (found * counts).sum() / (counts.sum() if reduction == "mean" else 1)


def compare(ours, plain, arguments, options):
    """Compare a call with the formula in float64; return {what differs: by how much}.

    Compares the values without and with gradients, each gradient, and that no input was changed.
    """
    floats = [k for k, v in arguments.items() if v is not None and v.is_floating_point()]
    before = {k: None if v is None else v.clone() for k, v in arguments.items()}
    learned = [arguments[k].requires_grad_() for k in floats]
    exact = arguments | {k: arguments[k].double() for k in floats}
    with torch.no_grad():
        quick = ours(**arguments, **options)
    found, true = ours(**arguments, **options), plain(**exact, **options)
    pairs = {"without gradients": (quick, true), "values": (found, true)}
    if found.requires_grad:
        grad = drawn(*true.shape, seed=9)
        grads = torch.autograd.grad(found, learned, grad.to(found.dtype), allow_unused=True)
        trues = torch.autograd.grad(true, learned, grad.double(), allow_unused=True)
        pairs |= {f"gradient of {k}": p for k, *p in zip(floats, grads, trues, strict=True)}
    narrow = {arguments[k].dtype for k in floats}
    error = 0.05 if torch.bfloat16 in narrow else 0.01 if torch.float16 in narrow else 1e-4
    off = {what: distance(*pair, error) for what, pair in pairs.items()}
    for key, value in before.items():
        if value is not None and not torch.equal(arguments[key], value):
            off[key] = "was written to"
    return {what: how for what, how in off.items() if how}


def compare_mapping(name, x, mask=None, dim=-1, **options):
    """Compare a mapping with its NumPy reference; return {what differs: by how much}."""
    found = NORMALIZERS[name](x, dim, mask, **options)
    excluded = torch.zeros(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    rows = [np.moveaxis(np.atleast_1d(t.numpy()), dim, -1) for t in (x.double(), excluded)]
    true = np.moveaxis(EXAMPLES[name].reference(*rows, **options), -1, dim)
    off = distance(found, torch.from_numpy(np.array(true)).reshape(x.shape), 1e-4)
    return {"values": off} if off else {}


def distance(found, true, error):
    if found is None or true is None:
        return None if found is true else "one of them is missing"
    if found.shape != true.shape:
        return f"{list(found.shape)} is not {list(true.shape)}"
    if found.numel() == 0:
        return None
    far, most = ((t.double().abs().max().item()) for t in (found - true, true))
    return None if far <= error * (most + 0.3) else f"off by {far} of {most}"


def doubled(arguments):
    is_float = {k: torch.is_tensor(v) and v.is_floating_point() for k, v in arguments.items()}
    return {k: v.double() if is_float[k] else v for k, v in arguments.items()}


# --- random calls ---------------------------------------------------------------------------------

LAYOUTS = {
    "turned": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "one row for all": lambda t: t[:1].expand_as(t),
    "one column for all": lambda t: t[..., :1].expand_as(t),
    "one number for all": lambda t: t.flatten()[0].expand_as(t),
    "sliced": lambda t: torch.cat([t, t], -1)[..., t.shape[-1] // 2 :][..., : t.shape[-1]],
    "every second column": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "every second row": lambda t: t.repeat_interleave(2, 0)[::2],
    "behind others": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "overlapping": lambda t: t.flatten().as_strided(t.shape, (1,) * t.dim()),
    "overlapping rows": lambda t: t.flatten().as_strided(t.shape, (*range(2, t.dim() + 1), 1)),
}
SIZE, HEADS = st.integers(0, 9), st.integers(1, 4)
WIDE = st.sampled_from([0, 1, 3, 8, 16, 40])
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.bool, torch.cfloat)


class Call(types.SimpleNamespace):
    """A function, its plain formula and the arguments of both."""

    def outcome(self):
        return compare(self.ours, self.plain, self.arguments, self.options)


class Source:
    """Draws the arguments of a call."""

    def __init__(self, data):
        self.draw = data.draw
        self.dtype = self.pick(*FLOATS)
        # In half precision, products of larger numbers exceed the tolerance.
        narrow = self.dtype in (torch.float16, torch.bfloat16)
        self.size = self.pick(0.0, 1.0, *(() if narrow else (4.0,)))

    def pick(self, *values):
        return self.draw(st.sampled_from(values))

    def tensor(self, *shape, size=None):
        """Draw a tensor in any memory layout."""
        values = drawn(*shape, seed=self.draw(st.integers(0, 99))).to(self.dtype)
        values = values * (self.size if size is None else size)
        layout = self.pick(None, None, *LAYOUTS)
        if layout is None or values.numel() == 0 or values.dim() < 2:
            return values
        try:
            return LAYOUTS[layout](values)
        except RuntimeError:  # too few numbers for this layout
            return values

    def mask(self, *shape, excludes=True, biases=True):
        """Draw None or a mask that broadcasts to the shape; it may exclude whole rows."""
        kind = self.pick("none", "bool", "all", *(("float", "infinite") if biases else ()))
        if kind == "none":
            return None
        shape = [self.pick(1, n) if n else n for n in shape[:-1]] + [shape[-1]]
        shape = shape[self.draw(st.integers(0, len(shape) - 1)) :]
        noise = drawn(*shape, seed=self.draw(st.integers(0, 99)))
        if kind == "all":
            return torch.full(shape, excludes)
        if kind == "bool":
            return noise > 0.3
        bias = noise if kind == "float" else noise.masked_fill(noise > 0.3, -math.inf)
        return bias.to(self.dtype)

    def modulator(self, heads=None, sides=("", "low high")):
        """Draw modulator parameters: no side, one or both, of order 1 or 2."""
        sides = self.pick(*sides).split()
        order = self.draw(st.integers(1, 2))
        shape = (order,) if heads is None or self.draw(st.booleans()) else (heads, order)
        return {
            name: 0.2 * drawn(*shape, seed=n)
            for n, name in enumerate(PARAMETERS)
            if name.partition("_")[0] in sides
        }


def a_modulation(source):
    heads = source.draw(HEADS)
    x = source.tensor(source.draw(SIZE), heads, source.draw(SIZE), source.draw(WIDE))
    arguments = {"x": x} | source.modulator(heads, ("", "low", "high", "low high"))
    return Call(ours=modulate, plain=plain_modulate, arguments=arguments, options={})


def a_multimax(source, ours=ours_multimax, plain=plain_multimax):
    shape = [source.draw(SIZE), source.draw(HEADS), source.draw(SIZE), source.draw(WIDE)]
    mask = source.mask(*shape)
    arguments = {"x": source.tensor(*shape), "mask": mask}
    arguments |= source.modulator(sides=("low", "high", "low high"))
    dim = source.pick(-1, 3, 0, 1, -2) if mask is None else -1
    return Call(ours=ours, plain=plain, arguments=arguments, options={"dim": dim})


def a_log_multimax(source):
    return a_multimax(source, ours_log_multimax, plain_log_multimax)


def an_attention(source):
    batch, heads, queries, keys = (source.draw(s) for s in (SIZE, HEADS, SIZE, SIZE))
    width, values = source.draw(WIDE), source.draw(WIDE)
    size = math.sqrt(source.size)
    arguments = {
        "attn_mask": source.mask(batch, heads, queries, keys, excludes=False),
        "query": source.tensor(batch, heads, queries, width, size=size),
        "key": source.tensor(batch, heads, keys, width, size=size),
        "value": source.tensor(batch, heads, keys, values, size=1.0),
        **source.modulator(heads),
    }
    options = {"is_causal": source.pick(False, True), "scale": source.pick(None, 0.1, 0.0)}
    return Call(ours=ours_attention, plain=plain_attention, arguments=arguments, options=options)


def an_output(source):
    tokens, width, words = source.draw(SIZE), source.draw(WIDE), source.draw(st.integers(1, 70))
    size = math.sqrt(source.size / max(width, 1))
    arguments = {
        "features": source.tensor(tokens, width, size=size),
        "weight": source.tensor(words, width, size=size),
        "bias": source.tensor(words) if source.pick(False, True) else None,
    }
    options = {
        "reduction": source.pick("sum", "none"),
        "chunk_size": source.pick(None, 1, 3, 100),
    }
    return arguments | source.modulator(), options


def a_loss(source):
    arguments, options = an_output(source)
    words, tokens = len(arguments["weight"]), len(arguments["features"])
    target = (drawn(tokens) * 1e4).long() % words
    arguments["target"] = target.masked_fill(drawn(tokens, seed=1) > 1, -100)
    options["label_smoothing"] = source.pick(0.0, 0.1, 0.9)
    return Call(ours=ours_loss, plain=plain_loss, arguments=arguments, options=options)


def some_log_probs(source):
    found = a_loss(source)
    options = {"chunk_size": found.options["chunk_size"]}
    return Call(
        ours=ours_log_probs, plain=plain_log_probs, arguments=found.arguments, options=options
    )


def a_divergence(source):
    arguments, options = an_output(source)
    arguments["other"] = source.tensor(*arguments["features"].shape, size=0.5)
    arguments["mask"] = drawn(len(arguments["other"])) > 1 if source.pick(False, True) else None
    return Call(ours=ours_divergence, plain=plain_divergence, arguments=arguments, options=options)


def a_mapping(name, source):
    x = source.tensor(source.draw(SIZE), source.draw(st.integers(2, 9)))
    mask, dim = source.mask(*x.shape, biases=False), source.pick(-1, -1, 0)
    options = EXAMPLES[name].arguments
    ours = functools.partial(NORMALIZERS[name], dim=dim, **options)
    found = Call(ours=ours, arguments={"x": x, "mask": mask}, options={}, plain=None)
    found.outcome = lambda: compare_mapping(name, x, mask, dim, **options)
    return found


def an_expectation(function, dimensions, source):
    """An expectation under a density over positions equals float64 up to the dtype's rounding."""
    count, bases = source.draw(SIZE), source.draw(st.integers(1, 6))
    if dimensions:
        spread = [torch.eye(dimensions).expand(n, -1, -1) for n in (count, bases)]
        shapes = [(count, dimensions), (bases, dimensions)]
    else:
        spread = [drawn(n).abs() + 0.05 for n in (count, bases)]
        shapes = [(count,), (bases,)]
    mean, centers = (source.tensor(*shape, size=1.0) for shape in shapes)
    spread, widths = ((s * source.pick(0.05, 1.0)).to(source.dtype) for s in spread)
    inputs = (mean, spread, centers, widths)

    def outcome():
        exact, found = function(*(tensor.double() for tensor in inputs)), function(*inputs)
        assert exact.shape == (count, bases) and exact.isfinite().all() and (exact >= 0).all()
        off = distance(found, exact, 1e-3)
        return {"values": off} if off else {}

    arguments = dict(zip(("mean", "spread", "centers", "widths"), inputs, strict=True))
    found = Call(ours=lambda **given: function(*given.values()), arguments=arguments, options={})
    found.plain, found.outcome = None, outcome
    return found


RANDOM = {
    "modulate": a_modulation,
    "multimax": a_multimax,
    "log_multimax": a_log_multimax,
    "scaled_dot_product_attention": an_attention,
    "linear_cross_entropy": a_loss,
    "linear_log_probs": some_log_probs,
    "symmetric_divergence": a_divergence,
    **{n: functools.partial(a_mapping, n) for n, each in EXAMPLES.items() if each.reference},
    **{
        function.__name__: functools.partial(an_expectation, function, dimensions)
        for function, dimensions in (
            *((mm.continuous_softmax, 0), (mm.continuous_sparsemax, 0)),
            *((mm.continuous_softmax_nd, 3), (mm.continuous_sparsemax_2d, 2)),
        )
    },
}


def right(name, source):
    """Make a valid call."""
    call = RANDOM[name](source)
    off = call.outcome()
    assert not off, (off, describe(call))


def strange(name, source):
    """Make a call in which one tensor has any shape and dtype; it is right or raises an error."""
    call = RANDOM[name](source)
    tensors = [key for key, value in call.arguments.items() if isinstance(value, torch.Tensor)]
    key = source.pick(*tensors)
    shape = source.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=5))
    call.arguments[key] = drawn(*shape).to(source.pick(*FLOATS[:2], FLOATS[3], *OTHERS))
    try:
        found = call.ours(**call.arguments, **call.options)
    except (ValueError, TypeError, RuntimeError) as error:
        assert str(error).strip(), describe(call)
        return
    if call.plain is None:  # no formula: require numbers only
        assert found.isfinite().all() or not call.arguments[key].isfinite().all(), describe(call)
        return
    off = distance(found, call.plain(**doubled(call.arguments), **call.options), 0.05)
    assert not off, (off, describe(call))


def describe(call):
    return call.options, {
        key: (value.dtype, list(value.shape), value.stride())
        for key, value in call.arguments.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("kind", [right, strange])
def test_functions_equal_plain_formulas_on_random_calls(kind, name, count, monkeypatch):
    done = []

    @the_same_draws(count)
    @given(st.data(), st.sampled_from(["auto", "plain"]))
    def attempt(data, backend):
        monkeypatch.setenv("MULTIMAX_BACKEND", backend)
        kind(name, Source(data))
        done.append(True)

    attempt()
    print(f"{name}: {len(done)} {kind.__name__} calls")
    assert len(done) >= count // 2


# --- unusual calls --------------------------------------------------------------------------------

B, H, T, S, D, N, V = 3, 4, 5, 6, 16, 10, 300


def offsets(*shape):
    """Return parameters of a modulator that is far from the identity for scores of a few units."""
    return {name: 0.2 * drawn(*shape, seed=n) for n, name in enumerate(PARAMETERS)}


BIAS, TARGET = drawn(V), 29 * torch.arange(N)
LAYER = dict(features=drawn(N, D), weight=drawn(V, D, seed=1), bias=BIAS)
QUERIES = dict(query=2 * drawn(B, H, T, D), key=drawn(B, H, S, D, seed=1), value=drawn(B, H, S, D))
MASKED = dict(x=2 * drawn(B, H, T, S), mask=drawn(B, H, T, S) > 0.5, **offsets(2))
ALLOWED, ADDED = drawn(B, H, T, S, seed=3) > -1, drawn(B, H, T, S, seed=3)
FUNCTIONS = {
    "modulate": (modulate, plain_modulate, dict(x=2 * drawn(B, H, T, S), **offsets(H, 2))),
    "multimax": (ours_multimax, plain_multimax, MASKED),
    "log_multimax": (ours_log_multimax, plain_log_multimax, MASKED),
    "attention": (
        *(ours_attention, plain_attention),
        dict(**QUERIES, attn_mask=ALLOWED, **offsets(H, 2)),
    ),
    # With a gradient for the mask.
    "attention and a bias": (
        *(ours_attention, plain_attention),
        dict(**QUERIES, attn_mask=ADDED, **offsets(2)),
    ),
    "softmax attention": (ours_attention, plain_attention, QUERIES),
    "loss": (ours_loss, plain_loss, dict(**LAYER, target=TARGET, **offsets(2))),
    "softmax loss": (ours_loss, plain_loss, dict(**LAYER, target=TARGET)),
    "divergence": (
        *(ours_divergence, plain_divergence),
        dict(**LAYER, other=drawn(N, D, seed=4), mask=drawn(N) > 1, **offsets(2)),
    ),
    "fused_scores": (ours_scores, plain_scores, dict(**LAYER, **offsets(2))),
}
VIEWS = {
    "negated in place of a copy": lambda t: torch.complex(torch.zeros_like(t), t).conj().imag,
    "a zero without memory": lambda t: torch._efficientzerotensor(t.shape),
    "a parameter": lambda t: nn.Parameter(t),
}
# Arguments that are such a view; arguments with another dtype than the rest.
VIEWED = {
    "modulate": ["x", ALL],
    "multimax": ["x"],
    "attention": ["query", "key", "value", "query key value", ALL],
    "attention and a bias": ["attn_mask"],
    "loss": ["features", "weight", "bias", ALL],
    "fused_scores": ["features", "weight", "bias"],
}
CAST = {
    "modulate": ["x", *PARAMETERS],
    "multimax": ["x", *PARAMETERS],
    "attention": ["value", "query key", "query key value", "low_coefficient high_threshold"],
    "attention and a bias": ["attn_mask"],
    "softmax attention": ["query key value", "value"],
    "loss": ["features weight bias", *PARAMETERS],
    "fused_scores": ["features weight bias"],
}


def unusual_calls():
    """Yield (function, changes, options)."""
    for kinds, arguments in ((list(VIEWS.values()), VIEWED), (FLOATS[1:], CAST)):
        for name, each in arguments.items():
            for names, kind in itertools.product(each, kinds):
                change = kind if callable(kind) else lambda t, d=kind: t.to(d)
                yield name, dict.fromkeys(names.split(), change), {}
    for b, h, t, s, d in (
        *((2, 2, 65, 130, 16), (1, 1, 70, 513, 33), (1, 2, 3, 20, 256), (1, 2, 9, 1, 80)),
        *((1, 2, 3, 20, 0), (0, 2, 3, 4, 16), (2, 0, 3, 4, 16), (2, 2, 0, 7, 16), (2, 2, 8, 0, 16)),
    ):
        sizes = dict(query=drawn(b, h, t, d), key=drawn(b, h, s, d), value=drawn(b, h, s, d))
        yield "softmax attention", sizes, {"is_causal": True}
        yield "attention", sizes | offsets(*([h] if h else []), 2) | {"attn_mask": None}, {}
    for shape in ((0, H, T, S), (B, H, 0, S), (2, B, H, T, S), (H, T, S)):
        yield "modulate", dict(x=drawn(*shape)), {}
    for shape in ((), (0,), (7,), (2, 0, 3, 3)):
        yield "modulate", dict(x=drawn(*shape)) | offsets(2), {}
        yield "loss", dict(features=drawn(*shape, D), target=torch.full(shape, 5)), {}
        yield "fused_scores", dict(features=drawn(*shape, D)), {}
    for n, v, d in ((0, 9, 4), (1, 1, 1), (7, 1, 5), (257, 129, 33), (5, 128, 0)):
        sizes = dict(features=drawn(n, d), weight=drawn(v, d), bias=drawn(v))
        for name, smoothing in (("loss", 0.2), ("softmax loss", 0)):
            rows = sizes | dict(target=torch.arange(n) % v)
            yield name, rows, {"label_smoothing": smoothing, "reduction": "none"}
    for name in ("modulate", "multimax", "attention", "loss", "fused_scores"):
        for side in ("low", "high"):
            parts = offsets(*([H] if name in ("modulate", "attention") else []), 2)
            yield name, {n: None for n in PARAMETERS if side in n}, {}
            yield name, {n: p[..., :1] for n, p in parts.items() if side in n}, {}
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32):
        yield "loss", dict(target=(TARGET % 100).to(dtype)), {"ignore_index": 29}
    for ignored, reduction in itertools.product((0, V, 2**62, -(2**63)), ("sum", "mean", "none")):
        target = torch.where(torch.arange(N) % 3 > 0, TARGET, ignored)
        yield "loss", dict(target=target), {"ignore_index": ignored, "reduction": reduction}
    yield "loss", dict(target=torch.full((N,), -100)), {}
    for start, name in itertools.product((0, 100, 172), ("loss", "softmax loss")):
        excluded = BIAS.index_fill(0, torch.arange(start, start + 128), -math.inf)
        yield name, dict(bias=excluded, target=(start + 128 + 7 * torch.arange(N)) % V), {}
    for chunk in (1, 3, 2**40, 2**63 - 1):
        yield "loss", {}, {"chunk_size": chunk}
    for options in (*({"scale": scale} for scale in (0, -1, 3, 1e-300)), {"dropout_p": 1}):
        yield "attention", {}, options


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_plain_formulas_on_unusual_inputs(name, monkeypatch):
    ours, plain, good = FUNCTIONS[name]
    for number, (of, changes, options) in enumerate(unusual_calls()):
        if of != name:
            continue
        arguments = {k: v.clone() for k, v in good.items()}
        for key, change in changes.items():
            arguments[key] = change(arguments[key]) if callable(change) else change
        monkeypatch.setenv("MULTIMAX_BACKEND", ("auto", "plain")[number % 2])
        off = compare(ours, plain, arguments, options)
        assert not off, (off, describe(Call(arguments=arguments, options=options)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_in_inference_mode_autocast_and_a_graph_of_the_gradients(name):
    ours, plain, good = FUNCTIONS[name]
    for context, error in (
        (torch.inference_mode(), 1e-4),
        (torch.autocast("cpu", torch.bfloat16), 0.05),
    ):
        with context:
            found = ours(**good)
        assert not distance(found, plain(**doubled(good)), error)
    if name != "fused_scores":
        arguments = {k: v.clone() for k, v in good.items()}
        learned = [v.requires_grad_() for v in arguments.values() if v.is_floating_point()]
        grads = [
            torch.autograd.grad(ours(**arguments).sum(), learned, create_graph=graph)
            for graph in (False, True)
        ]
        assert all(map(torch.equal, *grads))


def test_attention_of_a_tensor_to_itself():
    x, pairs = QUERIES["query"].clone().requires_grad_(), []
    for t, function in ((x, ours_attention), (x.double(), plain_attention)):
        out = function(t, t, t, **{k: v.to(t.dtype) for k, v in offsets(H, 2).items()})
        pairs.append((out, torch.autograd.grad(out.pow(2).sum(), x)[0]))
    assert not any(distance(*pair, 1e-4) for pair in zip(*pairs, strict=True))


def test_loss_computes_gradients_only_if_needed(monkeypatch):
    formed = []
    for name in ("_run_cpp", "_plain_parts"):
        function = getattr(cross_entropy, name)

        def record(*arguments, function=function):
            formed.append(arguments[1] is not None)
            return function(*arguments)

        monkeypatch.setattr(cross_entropy, name, record)
    loss = dict(**LAYER, target=TARGET)
    with torch.no_grad():
        mm.linear_cross_entropy(**loss | {"weight": nn.Parameter(loss["weight"])})
    mm.linear_cross_entropy(**loss | {"weight": nn.Parameter(loss["weight"])})
    mm.linear_cross_entropy(**loss)
    assert formed == [False, True, False]


ROWS = 2 * drawn(3, 4)


@pytest.mark.parametrize("name", [name for name, each in EXAMPLES.items() if each.reference])
def test_mappings_equal_the_reference_on_unusual_rows(name):
    options = EXAMPLES[name].arguments
    for x in (ROWS[0, 0], VIEWS["negated in place of a copy"](ROWS), ROWS * 1e5, drawn(3, 0)):
        for mask in (None, torch.tensor(True)):
            off = compare_mapping(name, x, mask, **options)
            assert not off, (off, x.shape, mask)
    for wrong in (math.nan, math.inf, -math.inf):
        # If rows need not sum to 1, a score of -inf is valid and has probability 0.
        if name == "sigmoid" or wrong < 0 and not NORMALIZERS[name].sums_to_one:
            continue
        rows = ROWS.clone()
        rows[1] = torch.tensor([wrong, 1, 2, 3] if wrong != -math.inf else wrong)
        found = NORMALIZERS[name](rows, **options).isnan()
        assert found.all(-1).tolist() == [False, True, False] and found.sum() == 4, wrong


@pytest.mark.parametrize("alpha", [1, 1 + 1e-15, 1 + 1e-9, 1 + 1e-6, 1e4, 1e300])
def test_alpha_entmax_is_softmax_for_alpha_near_one_and_argmax_for_a_large_one(alpha):
    limit = ROWS.softmax(-1) if alpha < 2 else F.one_hot(ROWS.argmax(-1), 4)
    for dtype in FLOATS:
        found = NORMALIZERS["alpha_entmax"](ROWS.to(dtype), alpha=alpha)
        assert not distance(found, limit.double(), 0.01)


# --- wrong calls: (arguments, what is wrong, the value or a function of the valid ones) -----------

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
    **{"x": ("scores",), "on meta": ("meta",), "on two devices": ("meta",)},
    **{"complex": ("omplex",), "conjugate": ("omplex",), "compressed": ("parse",)},
    **{"sparse": ("parse", "memory format"), "quantised": ("uantized",), "nested": ("ested",)},
    "jagged": ("ested", "Mismatch in shape", "multimax_fairseq."),
    **{"of oneDNN": ("kldnn", "OpaqueTensor"), "with a gradient": ("gets no gradient",)},
    "modulator": ("coefficient", "threshold", "heads", "scores"),
    **dict.fromkeys(("name", "normalizer"), ("unknown mapping", "multimax()")),
    "num_heads": ("number of heads",),
    **{"'topk' without k": ("topk()",), "a scalar with a row of a mask": ("alpha",)},
    # Errors name a modulator's values by their term or their shapes.
    **dict.fromkeys(
        ("t_b", "t_d", "b", "d"),
        (
            *("term needs both", "term's threshold", "term's temperature", "one shape"),
            *("data type", "real number", "sequence", "dimensions"),
        ),
    ),
    **{"grad": ("ismatch in shape", "gradient"), "again": ("a second time",)},
    **{"overwritten": ("inplace",), "second": ("no derivative",)},
}
TURN = itertools.count()


def some(changes, arguments, without="", count=3):
    """Return some of the changes for each argument, other ones for each."""
    names = [name for name in changes if name not in without]
    turns = [(x, names[next(TURN) % len(names)]) for x in arguments.split() for _ in range(count)]
    return [(argument, name, changes[name]) for argument, name in turns]


def values(arguments, *wrong):
    return [(name, f"{value!r:.30}", value) for name in arguments.split() for value in wrong]


def missing(arguments):
    return [(argument, "missing", MISSING) for argument in arguments.split()]


def double(arguments):
    return [(argument, "double", lambda t: t.double()) for argument in arguments.split()]


kinds, shapes = functools.partial(some, KINDS), functools.partial(some, SHAPES)
HUGE = 10**400
NUMBERS = (math.nan, math.inf, -math.inf, HUGE, -HUGE, True, "1", None, [1.0], 1j)
INTEGERS = (True, 1.5, "1", [1], HUGE, 2**63)

PLAIN = Modulator()
SCORES = dict(scores=drawn(T, S), dim=-1, mask=drawn(T, S, seed=1) > 0)
OF_SCORES = [
    *kinds("scores", count=13),
    *missing("scores"),
    ("scores", "bool", lambda t: t > 0),
    *values("dim", 2, -3, 10**6, -HUGE, 1.5, "last", None, True, [0], torch.tensor(0.0)),
    *kinds("mask", without="conjugate", count=12),
    *shapes("mask", without="a dimension less, a scalar, flat", count=7),
    *values("mask", -1.0, True),
    ("mask", "turned", lambda t: t.mT),
    ("scores mask", "a scalar with a row of a mask", lambda s, m: (s[0, 0], m[0])),
    ("temprature", "no option", 1.0),
]
OF_MODULATOR = [
    *values("modulator", None, True, 1.0, "multimax", [0.1], {}, torch.zeros(8)),
    ("modulator", "its class", Modulator),
    ("modulator", "of two heads", Modulator(num_heads=2)),
    ("modulator", "giving another shape", lambda _: lambda x: x[..., :1]),
    ("modulator", "giving nothing", lambda _: lambda x: None),
    ("modulator", "giving integers", lambda _: lambda x: x.long()),
]
OF_MULTIMAX = [
    *((argument.replace("scores", "x"), *rest) for argument, *rest in OF_SCORES),
    *(*OF_MODULATOR, *missing("modulator"), ("modulator", "a list", [PLAIN])),
]
# Changes that a user may make to a modulator's parameters.
BROKEN = {
    "without a threshold": dict(low_threshold=None),
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
BREAKING = [
    ("modulator", what, Given(**dict.fromkeys(PARAMETERS, torch.zeros(2)) | broken))
    for what, broken in BROKEN.items()
]
OF_LAYER = [
    *kinds("features weight bias", without="conjugate", count=6),
    *shapes("weight", without="no columns, a row more, a row less", count=7),
    *shapes("bias", without="no columns, flat", count=5),
    *missing("features weight"),
    ("weight bias", "no classes", lambda w, b: (w[:0], b[:0])),
    *double("features weight bias"),
]
OF_OUTPUT = [
    *OF_LAYER,
    ("weight", "of another width", drawn(V, 2 * D)),
    *values("modulator", True, 1.0, "multimax", [0.1], Modulator),
    ("modulator", "a function", lambda _: lambda x: x),
    ("modulator", "of four heads", Modulator(num_heads=4)),
    ("modulator", "of one head", Modulator(num_heads=1)),
    *BREAKING,
]
OF_BEST = [
    *values("count", 0, -1, V + 1, None, *INTEGERS[1:]),
    *values("apart", [V], [-1], ["1"], [1.5], [None], None, "1", 2.0),
]
OF_LOSS = [
    *values("reduction", "product", "", None, 1, True, ["sum"], torch.zeros(2)),
    *values("chunk_size", 0, -1, math.nan, torch.tensor(1), *INTEGERS),
    ("temperature", "no option", 1.0),
]


def backward(function, **good):
    """Return a function of the wrong arguments that gives the gradients of the float arguments."""

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


def first(found):
    return found[0] if isinstance(found, tuple) else found


OF_GRADIENT = [
    *kinds("grad", without="a list, int8, of oneDNN, quantised", count=9),
    *shapes("grad", without="no columns, flat, twice, a scalar", count=6),
    ("again", "through a graph that is gone", True),
]
OVERWRITTEN = ("overwritten", "what the graph has kept", True)
SECOND = ("second", "a derivative of the gradient", True)
ATTENTION = dict(**QUERIES, modulator=PLAIN, attn_mask=ALLOWED[:, :1])
OUTPUT = dict(**LAYER, modulator=PLAIN)
OVER_MODULATED = dict(x=SCORES["scores"], dim=-1, mask=SCORES["mask"], modulator=PLAIN)

# {function: (the function, valid arguments, wrong ones)}
WRONG = {
    "modulate": (
        modulate,
        dict(x=drawn(B, H, T, S), monotone=False, **offsets(H, 2)),
        [
            *(*kinds(f"x {ALL}"), *shapes(ALL), *missing(f"x {ALL}")),
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
            *values("order", 0, 3, -1, math.nan, None, torch.ones(2), *INTEGERS),
            *values("terms", "none", "", None, 2, True, ["low"], torch.ones(2)),
            *values("num_heads", 0, -1, 3.0, torch.tensor(3), *INTEGERS),
            *values("init_std", -0.1, torch.ones(2), *NUMBERS),
            *values("monotone", 1, "no", None),
            ("device", "on meta", "meta"),
            ("x num_heads", "on meta", lambda x, _: (x.to("meta"), None)),
            ("x num_heads device", "meta, one score", lambda *_: (drawn()[()], None, "meta")),
            ("temperature", "no option", 1.0),
        ],
    ),
    "Modulator.from_values": (
        lambda x, *args, **options: Modulator.from_values(*args, **options)(x),
        dict(x=drawn(T, S), t_b=[1.0, 1.0], t_d=[1.0, 1.0], b=[0.0, 0.0], d=[0.0, 0.0]),
        [
            *values("t_b t_d b d", None, [1.0], [1.0] * 3, 1.0, [], "12", [None, 1], [1j, 1]),
            *values("t_b t_d b d", [[1.0], [1.0, 2.0]], ["1", 2], {}),
            *missing("t_b t_d b d"),
        ],
    ),
    "multimax": (mm.multimax, OVER_MODULATED, OF_MULTIMAX),
    "log_multimax": (mm.log_multimax, OVER_MODULATED, OF_MULTIMAX),
    "normalize": (
        mm.normalize,
        SCORES | dict(name="topk", k=2),
        [
            *OF_SCORES,
            *values("name", "sofmax", "", None, True, 3, ["topk"], {}, torch.zeros(2), "multimax"),
            *missing("k name"),
            *values("k", 0, 1.5, "2", None),
        ],
    ),
    "scaled_dot_product_attention": (
        mm.scaled_dot_product_attention,
        ATTENTION | dict(normalizer="multimax"),
        [
            *kinds("query key value attn_mask", without="conjugate", count=6),
            *shapes("query key", without="a dimension more, a dimension less, a row less"),
            *(("value", what, SHAPES[what]) for what in ("a scalar", "a row more", "flat")),
            *missing("query key value"),
            ("key value", "of fewer heads", lambda k, v: (k[:, :2], v[:, :2])),
            ("query", "of other heads and rows", lambda q: q[:2, :3]),
            *shapes("attn_mask", without="a dimension less, a scalar", count=8),
            *double("query key"),
            *values("attn_mask", True, 0.0),
            *OF_MODULATOR,
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
        mm.linear_cross_entropy,
        OUTPUT | dict(target=TARGET),
        [
            *(*OF_OUTPUT, *OF_LOSS, *missing("target")),
            *kinds("target", without="int8, of oneDNN, quantised", count=10),
            *shapes("features target", without="no columns, flat", count=8),
            ("target", "20,000 for 10 rows", torch.zeros(20_000, dtype=torch.long)),
            *(("target", f"{d}", TARGET.to(d)) for d in (torch.half, torch.bool, torch.uint64)),
            *(("target", f"{t}", TARGET.clone().fill_(t)) for t in (-1, -99, V, 2**62, -(2**63))),
            ("bias", "of one", torch.zeros(1)),
            *values("label_smoothing", -0.1, 1.0, torch.tensor(0.1), *NUMBERS),
            *values("z_loss maxsup", -0.1, torch.tensor(0.1), *NUMBERS),
            *values("ignore_index", 1.0, None, torch.tensor(1), *INTEGERS),
        ],
    ),
    "symmetric_divergence": (
        mm.symmetric_divergence,
        OUTPUT | dict(other=drawn(N, D, seed=5), mask=drawn(N) > 1),
        [
            *(*OF_OUTPUT, *OF_LOSS, *missing("other"), *double("other")),
            *kinds("other mask", without="conjugate", count=6),
            *shapes("features other mask", without="no columns, flat", count=4),
            *(("mask", f"{d}", TARGET.to(d)) for d in (torch.half, torch.long)),
        ],
    ),
    "fused_scores": (fused_scores, OUTPUT, [*OF_OUTPUT, *missing("bias modulator")]),
    "best_outputs": (
        best_outputs,
        OUTPUT | dict(count=3, apart=[2, 1]),
        [*OF_OUTPUT, *OF_BEST, *values("count apart", True), ("features", "3-d", drawn(2, N, D))],
    ),
    "backward of modulate": (
        *backward(modulate, x=drawn(B, H, T, S), **offsets(H, 2)),
        [*OF_GRADIENT, OVERWRITTEN, SECOND],
    ),
    "backward of attention": (
        *backward(mm.scaled_dot_product_attention, **ATTENTION),
        [*OF_GRADIENT, SECOND],
    ),
    "backward of the loss": (
        *backward(mm.linear_cross_entropy, **OUTPUT, target=TARGET, reduction="none"),
        [*OF_GRADIENT, OVERWRITTEN, SECOND],
    ),
    "backward of the log-probabilities": (
        *backward(mm.linear_log_probs, **OUTPUT, target=TARGET),
        [*OF_GRADIENT, SECOND],
    ),
    "backward of the sum of the loss": (
        *backward(mm.linear_cross_entropy, **OUTPUT, target=TARGET),
        [("grad", "two", lambda t: t.expand(2)), ("grad", "on meta", KINDS["on meta"]), SECOND],
    ),
    "backward of the divergence": (
        *backward(mm.symmetric_divergence, **OUTPUT, other=drawn(N, D, seed=5), reduction="none"),
        [*OF_GRADIENT, SECOND],
    ),
    "backward of multimax": (*backward(mm.multimax, **OVER_MODULATED), [*OF_GRADIENT, SECOND]),
    "backward of sparsemax": (*backward(NORMALIZERS["sparsemax"], **SCORES), OF_GRADIENT),
}
# Of each mapping: wrong values of its own arguments.
MISTAKEN = {
    "softmax": values("temperature", 0, -1.0, torch.ones(2), *NUMBERS),
    "topk": values("k", 0, -1, math.nan, None, torch.tensor(2), *INTEGERS),
    "alpha_entmax": [*values("alpha", 0.5, 0, -1, *NUMBERS), *missing("alpha")],
    "evsoftmax": values("training", 1, "no", None),
    "ssmax": [*values("length_scale", *NUMBERS), *missing("length_scale")],
    "sink": values("sink", math.nan, math.inf, HUGE, "1", None, True),
    "sigmoid": values("bias", math.nan, math.inf, -math.inf, HUGE, "1", True),
    "asentmax": [*values("beta gamma", *NUMBERS), *missing("beta gamma")],
    "adaptive_temperature": values("training", 1, "no", None),
}
for name, example in EXAMPLES.items():
    if name != "multimax":
        more = [*kinds("scores mask", without="conjugate"), *MISTAKEN.get(name, [])]
        WRONG[name] = (NORMALIZERS[name], SCORES | example.arguments, more)
for name, argument in (("sink", "sink"), ("ssmax", "length_scale"), ("alpha_entmax", "alpha")):
    more = [*kinds(argument, count=13), *shapes(argument, without="a dimension less, a scalar")]
    if name == "alpha_entmax":
        more += [
            ("alpha", f"one of them {a}", torch.tensor([[1.3], [a], [1.3], [2], [1.5]]))
            for a in (1.0, 0.5, -1.0, math.nan, math.inf, -math.inf)
        ]
    good = SCORES | {argument: torch.full((T, 1), 1.3)}
    WRONG[f"{name} of a tensor"] = (NORMALIZERS[name], good, more)

PACKED = packed_parameters(PLAIN)[0].detach()
OF_PACKED = [
    *kinds("parameters", count=13),
    *shapes("parameters", without="a scalar, a row less", count=8),
    *double("parameters"),
    ("parameters", "half", lambda t: t.half()),
    ("parameters", "of 13 columns", torch.zeros(1, 13)),
    ("parameters", "of no rows", torch.zeros(0, 8)),
]
NO_DROPOUT = (-0.1, 1.0, 1 - 1e-12, math.nan, math.inf, HUGE, "half", None)
OF_SEED = [
    *values("seed", 1, "1", torch.tensor(1.0), torch.zeros(1, dtype=torch.long)),
    ("seed", "on meta", torch.zeros((), dtype=torch.long, device="meta")),
    ("seed", "none, to drop with", None),
]
ATTEND = dict(
    **dict(**QUERIES, parameters=PACKED, mask=~ALLOWED, seed=torch.tensor(1), sink=torch.zeros(H)),
    **dict(is_causal=False, dropout_p=0.1, scale=0.3, low=2, high=2),
)
OF_ATTENTION = [
    *kinds("query key value mask", without="conjugate"),
    *shapes("query key value", without="a scalar, flat", count=4),
    *double("query key value sink"),
    ("query", "bfloat16", lambda t: t.bfloat16()),
    (
        "key value mask",
        "too many rows",
        lambda k, v, _: (*(t[:, :, :1].expand(-1, -1, 2**40, -1) for t in (k, v)), None),
    ),
    *OF_PACKED,
    *kinds("sink", count=6),
    *shapes("sink", without="a scalar, flat", count=4),
    ("sink", "half", lambda t: t.half()),
    *shapes("mask", without="a row less", count=9),
    *OF_SEED,
    *values("is_causal", "yes", [True]),
    *values("dropout_p", *NO_DROPOUT),
    *values("scale", math.nan, math.inf, -math.inf, HUGE, "half", None),
    *values("low high", -1, 3, 1.5, "2", None, 2**63),
]
PROJECT = dict(**LAYER, parameters=PACKED)
OF_PROJECTION = [
    *OF_LAYER,
    *shapes("features", without="a row more, a row less", count=8),
    ("features weight", "no columns", lambda f, w: (f[:, :0], w[:, :0])),
    *OF_PACKED,
    ("parameters", "one row per head", torch.zeros(3, 8)),
]
LOSS = dict(
    **PROJECT,
    **dict(target=TARGET, smooth_weight=0.0, nll_weight=1.0, z_weight=0.0, max_weight=0.0),
    **dict(ignore_index=-100, chunk_size=None, entropy=False),
)
OF_PARTS = [
    *OF_PROJECTION,
    *kinds("target", without="of oneDNN, quantised", count=11),
    *shapes("target", without="no columns, flat", count=8),
    *(("target", f"{d}", TARGET.to(d)) for d in (torch.int32, torch.uint64, torch.bool)),
    *(("target", f"{t}", TARGET.clone().fill_(t)) for t in (-1, -99, V, 2**62, -(2**63))),
    *values("smooth_weight nll_weight", math.nan, math.inf, -math.inf, HUGE, "1", None),
    *values("z_weight max_weight", "1", None),
    ("smooth_weight", "not what gradients are formed for", 0.1),
    *values("ignore_index", 1.0, "1", 2**63, None),
    *values("chunk_size", 0, -1, 1.5, "1", 2**63),
    *values("entropy", "yes"),
    ("entropy z_weight", "with a z-loss", lambda *_: (True, 0.1)),
]
OPERATORS = {
    "modulate": (
        dict(scores=drawn(B, H, T, S), parameters=PACKED),
        [
            *(
                *kinds("scores", count=13),
                *double("scores"),
                *OF_PACKED,
                *missing("scores parameters"),
            ),
            ("parameters", "a row too many", torch.zeros(H + 1, 8)),
            (
                "scores parameters",
                "heads, and no dimension",
                lambda s, t: (s[0, 0], t.expand(H, 8)),
            ),
            ("scores parameters", "no heads", lambda s, t: (s[:, :0], t[:0])),
        ],
    ),
    "modulate_backward": (
        dict(grad=drawn(B, H, T, S, seed=1), scores=drawn(B, H, T, S), parameters=PACKED),
        [*kinds("grad scores"), *shapes("grad"), *double("grad"), *OF_PACKED],
    ),
    "dropout": (
        dict(input=QUERIES["query"], seed=torch.tensor(1), p=0.3),
        [
            *kinds("input", without="on meta", count=12),
            *kinds("seed", without="compressed, jagged, nested, of oneDNN", count=9),
            *(*double("input seed"), *missing("input seed p"), *OF_SEED),
            *values("p", *NO_DROPOUT),
        ],
    ),
    "tails": (
        dict(parameters=PACKED),
        [
            *kinds("parameters", without="on meta", count=12),
            *shapes("parameters", without="a scalar, a row less, a row more", count=7),
            *(*double("parameters"), *missing("parameters")),
            *(("parameters", f"of {n} columns", torch.zeros(1, n)) for n in (0, 1, 4, 7, 9, 12)),
            *(
                ("parameters", f"of {n} dimensions", torch.zeros((1,) * (n - 1) + (8,)))
                for n in (3, 4)
            ),
            *(("parameters", f"of {d}", lambda t, d=d: t.to(d)) for d in (torch.half, torch.uint8)),
            *values("parameters", 1.0, "parameters", [0.0] * 8, [[0.0] * 8], {}, True, PLAIN),
        ],
    ),
    "attention": (
        ATTEND | dict(keep=True),
        [
            *(*OF_ATTENTION, *values("keep", "yes", [True])),
            ("mask", "with a gradient", torch.zeros(1, 1, T, S).requires_grad_()),
        ],
    ),
    "attention_backward": (
        dict(
            **ATTEND,
            **dict.fromkeys(("grad", "output"), QUERIES["query"]),
            statistics=torch.ones(B, H, 2, T),
        ),
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
    "best_outputs": (PROJECT | dict(count=3, apart=[2, 1]), [*OF_PROJECTION, *OF_BEST]),
    "output_loss": (
        LOSS | dict(summed=True),
        [
            *OF_PARTS,
            *values("summed", "yes", [True]),
            ("entropy", "of a sum", True),
        ],
    ),
    "output_loss_parts": (
        LOSS | dict(factors=torch.ones(N), needed=[True] * 4),
        [
            *(*OF_PARTS, *kinds("factors", count=6), *double("factors")),
            *shapes("factors", without="no columns, flat", count=4),
            ("entropy factors", "one column", lambda _, factors: (True, factors)),
            *values("needed", None, [], [True] * 3, [True] * 5, True, "yes"),
        ],
    ),
}
for name, operator in OPERATORS.items():
    WRONG[f"operator {name}"] = (getattr(torch.ops.multimax_fairseq, name), *operator)


def refusal(function, good, names, value):
    """Make an invalid call; return what is wrong with its error, or None."""
    call = dict(good)
    if value is MISSING:
        del call[names[0]]
    elif isinstance(value, types.FunctionType):
        found = value(*(call.get(name) for name in names))
        call |= zip(names, found, strict=True) if len(names) > 1 else {names[0]: found}
    else:
        call[names[0]] = value
    try:
        return f"returned {function(**call)!r:.200}", ""
    except (ValueError, TypeError, RuntimeError) as error:
        return None, str(error)
    except Exception as error:
        return repr(error), ""


@pytest.mark.parametrize("name", WRONG)
def test_functions_name_the_wrong_argument(name, monkeypatch):
    function, good, wrongs = WRONG[name]
    failed = {}
    for number, (arguments, what, value) in enumerate(wrongs):
        names = arguments.split()
        kernels = name.startswith("operator")
        backend = "auto" if kernels else ("auto", "plain", "cpp")[number % 3]
        monkeypatch.setenv("MULTIMAX_BACKEND", backend)
        wrong, message = refusal(function, good, names, value)
        words = [word for key in (*names, what) for word in WORDS.get(key, ())]
        named = re.search(rf"\b({'|'.join(names)})\b", message) or any(w in message for w in words)
        if wrong or not named:
            failed[arguments, what, backend] = wrong or message
    assert not failed, "\n".join(f"{key}: {how}" for key, how in failed.items())
