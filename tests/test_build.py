"""The build of the compiled kernels: kept and found again, or plain PyTorch and the reason."""

import os
import subprocess
import sys

import pytest
import torch
from commands import run

from multimax_fairseq.kernels import build

CAPABILITY = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(
    CAPABILITY not in build.MARCH, reason=f"no CPU kernels for {CAPABILITY}: plain PyTorch is used"
)


def test_without_a_compiler_plain_pytorch_is_used_and_the_log_says_so(tmp_path):
    script = """
import logging, torch
logging.basicConfig()
from multimax_fairseq import Modulator
print(Modulator(init_std=1.0)(torch.zeros(3)).shape)
"""
    elsewhere = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "built"), "CXX": str(tmp_path / "none")}
    printed = run(tmp_path, sys.executable, "-c", script, **elsewhere)
    assert "torch.Size([3])" in printed and "plain PyTorch is used" in printed
    assert not list(tmp_path.glob("built/**/*.so"))
    refused = run(
        tmp_path, sys.executable, "-c", script, code=1, MULTIMAX_BACKEND="cpp", **elsewhere
    )
    assert "MULTIMAX_BACKEND 'cpp' needs a C++ compiler" in refused


def test_the_kernels_are_built_once_and_nothing_is_left_of_a_build_that_failed(
    tmp_path, monkeypatch
):
    folder = tmp_path / "multimax_fairseq"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    flags = [*build.FLAGS, *build.MARCH[CAPABILITY]]
    with pytest.raises(subprocess.CalledProcessError):
        build._built([*flags, "--no-such-flag"])
    assert not list(folder.iterdir())
    built = build._built(flags)
    stamp = os.stat(built).st_mtime_ns
    assert build._built(flags) == built and os.stat(built).st_mtime_ns == stamp
    assert list(folder.iterdir()) == [built]
