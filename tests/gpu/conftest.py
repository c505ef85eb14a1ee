"""Tests of the Triton kernels. They need torch, triton, entmax and pytest, and import no fairseq.

On a GPU, scripts/gpu_check.sh runs them; elsewhere tests/test_gpu.py does, in Triton's interpreter.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # noqa: F401  fixes bfloat16


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: runs on a GPU, or in Triton's interpreter")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.gpu)
