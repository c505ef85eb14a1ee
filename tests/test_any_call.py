"""Random calls of the public functions equal the plain formula in float64, or raise an error.

Valid calls: empty and single rows, every dtype, memory layouts, all kinds of masks, scores far from
0. Other calls: one tensor has any shape and dtype. `scripts/test.sh --all` draws a thousand calls
of each kind for each function.
"""

import math
import os
import types

import pytest
import torch
from examples import EXAMPLES
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_settings import the_same_draws
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
    plain_attention,
    plain_divergence,
    plain_log_multimax,
    plain_loss,
    plain_modulate,
    plain_multimax,
)
from random_inputs import drawn

import multimax_fairseq as mm
from multimax_fairseq.ops.modulator import modulate

pytestmark = pytest.mark.long

SIZE, HEADS = st.integers(0, 9), st.integers(1, 4)
WIDE = st.sampled_from([0, 1, 3, 8, 16, 40])
FLOATS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
ANY_DTYPE = st.sampled_from(
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.cfloat,
    ]
)
REFUSALS = (ValueError, TypeError, RuntimeError)


class Call(types.SimpleNamespace):
    """A function, its plain formula and the arguments of both."""

    def outcome(self):
        return beside_plain(self.ours, self.plain, self.arguments, self.options)


class Source:
    """Draws the arguments of a call."""

    def __init__(self, data):
        self.draw = data.draw
        self.dtype = self.draw(FLOATS)
        # In half precision, products of larger numbers exceed the tolerance.
        narrow = self.dtype in (torch.float16, torch.bfloat16)
        self.size = self.draw(st.sampled_from([0.0, 1.0] if narrow else [0.0, 1.0, 4.0]))

    def tensor(self, *shape, size=None):
        values = drawn(*shape, seed=self.draw(st.integers(0, 99))).to(self.dtype)
        return self.laid_out(values * (self.size if size is None else size))

    def laid_out(self, tensor):
        layout = self.draw(st.sampled_from([None, None, *LAYOUTS]))
        if layout is None or tensor.numel() == 0 or tensor.dim() < 2:
            return tensor
        try:
            return LAYOUTS[layout](tensor)
        except RuntimeError:  # too few numbers for this layout
            return tensor

    def mask(self, *shape, excludes=True, biases=True):
        """Draw None or a mask that broadcasts to the shape; it may exclude whole rows."""
        kinds = ["none", "bool", "all"] + ["float", "infinite"] * biases
        kind = self.draw(st.sampled_from(kinds))
        if kind == "none":
            return None
        shape = [self.draw(st.sampled_from([1, n])) if n else n for n in shape[:-1]] + [shape[-1]]
        noise = drawn(*shape, seed=self.draw(st.integers(0, 99)))
        if kind == "all":
            return torch.full(shape, excludes)
        if kind == "bool":
            return noise > 0.3
        bias = noise if kind == "float" else noise.masked_fill(noise > 0.3, -math.inf)
        return bias.to(self.dtype)

    def modulator(self, heads=None, sides=("", "low high")):
        """Draw modulator parameters: no side, one or both, of order 1 or 2."""
        sides = self.draw(st.sampled_from(sides)).split()
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
    return Call(
        ours=modulate,
        plain=plain_modulate,
        arguments={"x": x} | source.modulator(heads, ("", "low", "high", "low high")),
        options={},
    )


def a_multimax(source, ours=ours_multimax, plain=plain_multimax):
    shape = [source.draw(SIZE), source.draw(HEADS), source.draw(SIZE), source.draw(WIDE)]
    mask = source.mask(*shape)
    arguments = {"x": source.tensor(*shape), "mask": mask}
    arguments |= source.modulator(sides=("low", "high", "low high"))
    dim = source.draw(st.sampled_from([-1, 3, 1, -2])) if mask is None else -1
    return Call(ours=ours, plain=plain, arguments=arguments, options={"dim": dim})


def a_log_multimax(source):
    return a_multimax(source, ours_log_multimax, plain_log_multimax)


def an_attention(source):
    batch, heads, queries, keys = (source.draw(s) for s in (SIZE, HEADS, SIZE, SIZE))
    width, values = source.draw(WIDE), source.draw(WIDE)
    size = math.sqrt(source.size)
    mask = source.mask(batch, heads, queries, keys, excludes=False)
    arguments = {
        "query": source.tensor(batch, heads, queries, width, size=size),
        "key": source.tensor(batch, heads, keys, width, size=size),
        "value": source.tensor(batch, heads, keys, values, size=1.0),
        "attn_mask": mask,
    }
    options = {
        "is_causal": source.draw(st.booleans()),
        "scale": source.draw(st.sampled_from([None, 0.1, 0.0])),
    }
    return Call(
        ours=ours_attention,
        plain=plain_attention,
        arguments=arguments | source.modulator(heads),
        options=options,
    )


def an_output(source):
    tokens, width, words = source.draw(SIZE), source.draw(WIDE), source.draw(st.integers(1, 70))
    size = math.sqrt(source.size / max(width, 1))
    arguments = {
        "features": source.tensor(tokens, width, size=size),
        "weight": source.tensor(words, width, size=size),
        "bias": source.tensor(words) if source.draw(st.booleans()) else None,
    }
    options = {
        "reduction": source.draw(st.sampled_from(["sum", "none"])),
        "chunk_size": source.draw(st.sampled_from([None, 1, 3, 100])),
    }
    return arguments | source.modulator(), options


def a_loss(source):
    arguments, options = an_output(source)
    words, tokens = len(arguments["weight"]), len(arguments["features"])
    target = (drawn(tokens) * 1e4).long() % words
    arguments["target"] = target.masked_fill(drawn(tokens, seed=1) > 1, -100)
    options["label_smoothing"] = source.draw(st.sampled_from([0.0, 0.1, 0.9]))
    return Call(ours=ours_loss, plain=plain_loss, arguments=arguments, options=options)


def a_divergence(source):
    arguments, options = an_output(source)
    other = source.tensor(*arguments["features"].shape, size=0.5)
    counted = drawn(len(other)) > 1 if source.draw(st.booleans()) else None
    return Call(
        ours=ours_divergence,
        plain=plain_divergence,
        arguments=arguments | {"other": other, "mask": counted},
        options=options,
    )


def a_mapping(name):
    def call(source):
        shape = [source.draw(SIZE), source.draw(st.integers(2, 9))]
        x = source.tensor(*shape)
        mask = source.mask(*shape, biases=False)
        options = EXAMPLES[name].arguments

        def ours(x, mask):
            return mm.normalize(name, x, -1, mask, **options)

        outcome = lambda: mapped(name, x, mask, **options)  # noqa: E731
        found = Call(ours=ours, arguments={"x": x, "mask": mask}, options={}, plain=None)
        found.outcome = outcome
        return found

    return call


def an_expectation(function, dimensions):
    """An expectation under a density over positions equals float64 up to the dtype's rounding."""

    def call(source):
        count, bases = source.draw(SIZE), source.draw(st.integers(1, 6))
        if dimensions:
            spread = [torch.eye(dimensions).expand(n, -1, -1) for n in (count, bases)]
            shapes = [(count, dimensions), None, (bases, dimensions), None]
        else:
            spread = [drawn(n).abs() + 0.05 for n in (count, bases)]
            shapes = [(count,), None, (bases,), None]
        given = [
            (spread[n // 2] * source.draw(st.sampled_from([0.05, 1.0]))).to(source.dtype)
            if shape is None
            else source.tensor(*shape, size=1.0)
            for n, shape in enumerate(shapes)
        ]
        names = ("mean", "spread", "centers", "widths")

        def ours(mean, spread, centers, widths):
            return function(mean, spread, centers, widths)

        def outcome():
            exact = function(*(tensor.double() for tensor in given))
            found = function(*given)
            assert exact.shape == (count, bases) and exact.isfinite().all() and (exact >= 0).all()
            off = distance(found, exact, 1e-3)
            return {"values": off} if off else {}

        found = Call(ours=ours, arguments=dict(zip(names, given, strict=True)), options={})
        found.plain, found.outcome = None, outcome
        return found

    return call


CALLS = {
    "modulate": a_modulation,
    "multimax": a_multimax,
    "log_multimax": a_log_multimax,
    "scaled_dot_product_attention": an_attention,
    "linear_cross_entropy": a_loss,
    "symmetric_divergence": a_divergence,
    **{f"normalize {name}": a_mapping(name) for name in mm.NORMALIZERS if name != "multimax"},
    "continuous_softmax": an_expectation(mm.continuous_softmax, 0),
    "continuous_sparsemax": an_expectation(mm.continuous_sparsemax, 0),
    "continuous_softmax_nd": an_expectation(mm.continuous_softmax_nd, 3),
    "continuous_sparsemax_2d": an_expectation(mm.continuous_sparsemax_2d, 2),
}


def right(name, source):
    """Make a valid call."""
    call = CALLS[name](source)
    off = call.outcome()
    assert not off, (off, describe(call))


def strange(name, source):
    """Make a call in which one tensor has any shape and dtype; it is right or raises an error."""
    call = CALLS[name](source)
    tensors = [key for key, value in call.arguments.items() if isinstance(value, torch.Tensor)]
    key = source.draw(st.sampled_from(tensors))
    shape = source.draw(st.lists(st.sampled_from([0, 1, 2, 3, 8]), max_size=5))
    call.arguments[key] = drawn(*shape).to(source.draw(ANY_DTYPE))
    try:
        found = call.ours(**call.arguments, **call.options)
    except REFUSALS as error:
        assert str(error).strip(), describe(call)
        return
    if call.plain is None:  # no formula: require numbers only
        assert found.isfinite().all() or not call.arguments[key].isfinite().all(), describe(call)
        return
    exact = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in call.arguments.items()
    }
    off = distance(found, call.plain(**exact, **call.options), 0.05)
    assert not off, (off, describe(call))


def describe(call):
    return call.options, {
        key: (value.dtype, list(value.shape), value.stride())
        for key, value in call.arguments.items()
        if isinstance(value, torch.Tensor)
    }


def tried(kind, name, count):
    """Make `count` drawn calls, the same ones in each run."""
    done = []

    @the_same_draws(count)
    @given(st.data(), st.sampled_from(["auto", "plain"]))
    def attempt(data, backend):
        os.environ["MULTIMAX_BACKEND"] = backend
        kind(name, Source(data))
        done.append(True)

    before = os.environ.get("MULTIMAX_BACKEND")
    try:
        attempt()
    finally:
        os.environ.pop("MULTIMAX_BACKEND")
        if before is not None:
            os.environ["MULTIMAX_BACKEND"] = before
    print(f"{name}: {len(done)} {kind.__name__} calls")
    assert len(done) >= count // 2


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [right, strange])
def test_functions_equal_plain_formulas_on_random_calls(kind, name):
    tried(kind, name, 25)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", [right, strange])
def test_functions_equal_plain_formulas_on_1000_random_calls(kind, name):
    tried(kind, name, 1000)
