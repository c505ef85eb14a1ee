#!/usr/bin/env bash
# Checks and tests: scripts/test.sh [--fast | --all] [pytest arguments]
# --fast leaves out what runs whole commands, draws figures or interprets GPU kernels; --all adds
# what takes minutes or hours: many kills, long runs, large fuzzed inputs.
# At most two processes of one thread each, so that it suits a small shared machine; more with -n N.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# The tests interpret the GPU kernels with it; it is large, and nothing else needs it without a GPU.
# A torch that is built for CUDA brought its own.
python -c "import triton" 2>/dev/null ||
    python -m pip install --quiet "triton==3.9.0; sys_platform == 'linux'"
# multimax_fairseq.transformers is the only room that needs these; the rest of what they import is
# in requirements.txt already.
python -m pip install --quiet --no-deps \
    transformers==5.23.0 huggingface-hub==2.4.0 safetensors==0.8.0 tokenizers==0.23.3

ruff check .
ruff format --check .
mypy
# --dist loadfile: a file's tests share the checkpoints that its fixtures train. The files are
# handed out in the order of tests/conftest.py.
python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder "$@"
