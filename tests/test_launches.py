"""Autotuning and launches of the Triton kernels, with stand-ins for kernels and GPU."""

import importlib.util
from random import Random
from types import SimpleNamespace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import create_function_from_signature

from multimax_fairseq.ops.triton import attention_kernels, cross_entropy, launches, modulator
from multimax_fairseq.ops.triton.attention_kernels import forward_kernel
from multimax_fairseq.ops.triton.launches import Call, Launch, candidates, is_heavy, run_fastest

CHOICE = [Launch(64, 64, 4, 2), Launch(64, 32, 4, 2), Launch(32, 32, 4, 1)]
TOO_LARGE = CHOICE[2]


class Kernel:
    """Records its launches; a launch takes a time proportional to the number of keys."""

    def __init__(self):
        self.tried, self.ran = [], []

    def __call__(self, launch):
        if launch == TOO_LARGE:
            raise OutOfResources(2**18, 2**17, "shared memory")
        self.ran.append(launch)
        return launch

    def timer(self, run):
        launch = run()
        self.tried.append(launch)
        return float(launch.keys)

    def launch(self, call, choice=CHOICE):
        return run_fastest(choice, call, self, self.timer)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel on a GPU outside of graph capture, without tuned configurations."""
    monkeypatch.setattr(launches, "interpreted", lambda: False)
    monkeypatch.setattr(launches, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Kernel()


def test_run_fastest_remembers_the_fastest_launch(kernel):
    assert [kernel.launch("a call") for _ in range(3)] == [CHOICE[1]] * 3
    assert kernel.tried == CHOICE[:2]
    kernel.launch("another")
    assert kernel.tried == CHOICE[:2] * 2


def test_run_fastest_times_no_single_candidate(kernel):
    assert kernel.launch("a call", CHOICE[:1]) == CHOICE[0]
    assert kernel.tried == []


def test_run_fastest_raises_if_no_launch_fits(kernel):
    with pytest.raises(OutOfResources):
        kernel.launch("a call", [TOO_LARGE, TOO_LARGE])


def test_run_fastest_raises_other_errors(kernel):
    def broken(launch):
        raise RuntimeError("an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        run_fastest(CHOICE, "a call", broken, kernel.timer)


def test_run_fastest_takes_the_first_if_deterministic(kernel):
    assert kernel.launch("a call") == CHOICE[1]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernel.launch("a call") == kernel.launch("another") == CHOICE[0]
    finally:
        torch.use_deterministic_algorithms(False)
    assert kernel.tried == CHOICE[:2]


def test_run_fastest_times_nothing_during_graph_capture(kernel, monkeypatch):
    kernel.launch("a call")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert kernel.launch("a call") == CHOICE[1] and kernel.launch("another") == CHOICE[0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert kernel.launch("another") == CHOICE[1]
    assert kernel.tried == CHOICE[:2] * 2


def test_run_fastest_takes_the_first_in_the_interpreter(kernel, monkeypatch):
    monkeypatch.setattr(launches, "interpreted", lambda: True)
    assert kernel.launch("a call") == CHOICE[0] and kernel.tried == []


@pytest.mark.parametrize("error", [OutOfResources(2**18, 2**17, "shared memory"), PTXASError()])
def test_run_fastest_skips_launches_that_fail(kernel, error):
    def run(launch):
        if launch == CHOICE[1]:
            raise error
        return kernel(launch)

    assert run_fastest(CHOICE[:2], "a call", run, kernel.timer) == CHOICE[0]


def test_milliseconds_returns_the_shortest_warm_run(monkeypatch):
    ran, times = [], iter([5.0, 3.0, 4.0, 9.0, 8.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.synchronize = lambda: None

        def record(self):
            self.at = len(ran)

        def elapsed_time(self, end):
            assert 1 <= self.at == end.at - 1  # one run, and not the first
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert launches._milliseconds(lambda: ran.append(1)) == 3.0 and len(ran) == 6


@pytest.mark.parametrize(
    "constants, found",
    [
        ({"CAUSAL": True, "LOW": 2}, False),
        ({"MASKING": 1}, False),  # a padding mask: one row for all queries
        *(({name: 12}, True) for name in ("MASKING", "DROPOUT", "COLUMNS")),
    ],
)
def test_is_heavy_detects_register_pressure(constants, found):
    assert bool(is_heavy(**constants)) == found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_candidates_are_large_if_shared_memory_allows(dtype):
    for (name, width), large in launches._LARGE.items():
        light, heavy = (Call(name, dtype, width, is_heavy) for is_heavy in (False, True))
        usual = launches._CANDIDATES[name][dtype == torch.float32, width]
        for capability in (80, 86, 89, 120):
            assert candidates(light, capability) == candidates(heavy, capability) == usual
        for capability in (90, 100, 103):
            if dtype == torch.float32:
                assert candidates(light, capability) == candidates(heavy, capability) == usual
            else:
                assert candidates(light, capability) == [large]
                other = launches._LARGE_HEAVY.get((name, width), large)
                assert candidates(heavy, capability) == [other]


# --- a launch ----------------------------------------------------------------------------------


class Compiled(launches.CompiledKernel):
    """A stand-in for a compiled Triton kernel; records its launches."""

    def __init__(self, alike):
        self.alike, self.launched, self.module = alike, [], None

    def __getitem__(self, grid):
        return lambda *values: self.launched.append((grid, values))


class Compiler:
    """A kernel without a GPU, specialized by Triton's own analysis of the arguments."""

    def __init__(self, kernel):
        self.fn, self.params, self.arg_names = kernel.fn, kernel.params, kernel.arg_names
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        self.made = []

    def alike(self, arguments):
        _, specialization, options = self.binder(**arguments)
        return specialization, options

    def __getitem__(self, grid):
        def compile(**arguments):
            self.made.append(Compiled(self.alike(arguments)))
            return self.made[-1]

        return compile


@pytest.fixture
def device(monkeypatch):
    """A stand-in for the current device, whose number can change."""
    there = SimpleNamespace(number=0)
    active = SimpleNamespace(get_current_device=lambda: there.number)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launches, "interpreted", lambda: False)
    monkeypatch.setattr(launches, "_compiled", {})
    monkeypatch.setattr(launches, "_parameters", {})
    return there


def some_arguments(random):
    """Draw arguments of the forward kernel: mostly equal ones, sometimes other valid ones."""

    def some(usual, *others):
        return usual if random.random() < 0.9 else random.choice(others)

    memory = torch.zeros(64)
    half = memory.to(some(torch.float16, torch.bfloat16, torch.float32))
    arguments = {name: half[some(0, 1, 4, 8) :] for name in ("Q", "K", "V", "OUT")}
    arguments |= {"TOTAL": memory, "PARAMETERS": some(memory, None), "SINK": None}
    arguments["MASK"] = some(None, memory, memory[1:], memory.to(torch.uint8))
    axes = [f"{name}_{axis}" for name in "qkvo" for axis in "bhn"] + ["m_b", "m_h", "m_t", "m_s"]
    arguments |= dict.fromkeys(axes, 64)
    arguments[random.choice(axes)] = some(64, 0, 1, 2, 16, 17, 2**31)
    arguments |= {name: random.choice([1, 8, 16, 2**20]) for name in ("heads", "T", "S", "t_h")}
    arguments |= {"scale": some(0.125, 1.0, 16.0), "seed": random.randrange(2**31)}
    arguments |= {"threshold": random.randrange(2**16), "keep_scale": some(1.0, 2.0)}
    arguments |= {"D": 64, "WIDTH": 64, "LOW": some(2, 1), "HIGH": 2, "COLUMNS": 8, "CAP": 0}
    arguments |= {"MASKING": 0, "SINKS": False, "CAUSAL": some(True, False), "DROPOUT": False}
    return arguments | some(*CHOICE).arguments() | {"enable_fp_fusion": True}


def test_run_kernel_finds_the_specialization_of_triton(device):
    kernel, random = Compiler(forward_kernel), Random(1)
    calls = 3000
    for number in range(calls):
        arguments = some_arguments(random)
        before = [len(made.launched) for made in kernel.made]
        launches.run_kernel(kernel, 7, arguments)
        new = [m for m, n in zip(kernel.made, before, strict=False) if len(m.launched) > n]
        if not new:  # Triton's own launcher
            continue
        (found,) = new
        assert found.alike == kernel.alike(arguments), number
        grid, values = found.launched[-1]
        assert grid == (7, 1, 1)
        named = zip(kernel.arg_names, values, strict=True)
        assert all(value is arguments[name] for name, value in named)
    assert calls / 10 < len(kernel.made) < calls / 2


@pytest.mark.parametrize(
    "kernel",
    [
        attention_kernels.forward_kernel,
        attention_kernels.mean_kernel,
        attention_kernels.query_kernel,
        attention_kernels.key_kernel,
        cross_entropy.loss_kernel,
        modulator.modulate_kernel,
        modulator.modulate_backward_kernel,
        modulator.tails_kernel,
    ],
    ids=lambda kernel: kernel.fn.__name__,
)
def test_run_kernel_reuses_the_compiled_kernel(device, kernel):
    compiler, memory = Compiler(kernel), torch.zeros(64)
    is_tensor = {p.name for p in kernel.params if p.name.isupper() and not p.is_constexpr}
    arguments = {name: memory if name in is_tensor else 64 for name in kernel.arg_names}
    for _ in range(2):
        launches.run_kernel(compiler, 5, arguments | {"num_warps": 4})
    (compiled,) = compiler.made
    assert compiled.launched == [((5, 1, 1), tuple(arguments.values()))]


def test_run_kernel_compiles_for_each_device(device):
    kernel, arguments = Compiler(forward_kernel), some_arguments(Random(2))
    for device.number in (0, 0, 1, 1, 0):
        launches.run_kernel(kernel, 3, arguments)
    assert [len(made.launched) for made in kernel.made] == [2, 1]
