#!/usr/bin/env bash
# Checks and tests: scripts/test.sh [--fast | --all] [pytest arguments]
# --fast leaves out what runs whole commands, draws figures or interprets GPU kernels; --all adds
# what takes minutes or hours: many kills, long runs, large fuzzed inputs.
# At most two processes of one thread each, so that it suits a small shared machine; more with -n N.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# What nothing but the tests needs; triton is large, only for Linux, and comes with a torch that is
# built for CUDA.
source "$root/scripts/locked.sh"
more=$(section "Installed by scripts\/test.sh")
if [[ $(uname) != Linux ]] || python -c "import triton" 2>/dev/null; then
    more=$(grep -v '^triton==' <<<"$more")
fi
python -m pip install --quiet --no-deps --require-hashes -r <(locked <<<"$more")

ruff check .
ruff format --check .
mypy
# --dist loadfile: a file's tests share the checkpoints that its fixtures train. The files are
# handed out in the order of tests/conftest.py.
python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder "$@"
