"""Runs tests/gpu without a GPU: in Triton's interpreter, or with ahead-of-time compilation."""

import importlib.util
import os
import subprocess
import sys

import pytest
from commands import ROOT

pytestmark = pytest.mark.long

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed (it is published for Linux)", allow_module_level=True)

GPU_TESTS = ROOT / "tests" / "gpu"


def test_attention_in_the_interpreter_supports_bfloat16():
    """Triton's interpreter multiplies bfloat16 as integers; tests/gpu/interpreter.py fixes it."""
    program = """
import torch
from multimax_fairseq import scaled_dot_product_attention
from multimax_fairseq.ops.backend import select
query = torch.randn(1, 1, 3, 16)
assert select("auto", query) == select("auto", query.half()) == ("triton", "")
for mode in (torch.autocast("cpu"), torch.autocast("cpu", enabled=False)):
    given = query if mode._enabled else query.bfloat16()
    with mode:
        found, plain = (
            scaled_dot_product_attention(given, given, given, normalizer="softmax", backend=backend)
            for backend in ("auto", "plain")
        )
    torch.testing.assert_close(found, plain)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment.pop("MULTIMAX_BACKEND", None)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_gpu_tests_pass_without_a_gpu(how, tmp_path):
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "1"}
    tests = GPU_TESTS
    if how == "compiled":  # the interpreter cannot compile
        del env["TRITON_INTERPRET"]
        tests = GPU_TESTS / "test_compiled.py"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", GPU_TESTS]
    done = subprocess.run([sys.executable, *words, tests], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
