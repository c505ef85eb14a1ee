#!/usr/bin/env bash
# Runs lint, types and tests: scripts/test.sh [--fast | --all] [pytest arguments]
# --fast skips tests that run whole commands, draw figures or interpret GPU kernels. --all adds slow
# tests, of minutes or hours: many kills, long runs, large fuzzed inputs.
# The tests use two processes with one thread each; -n N changes the number of processes.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Packages that only the tests need. triton is large and only for Linux; PyTorch's CUDA build brings it.
source "$root/scripts/locked.sh"
more=$(section "Installed by scripts\/test.sh alone")
if [[ $(uname) != Linux ]] || python -c "import triton" 2>/dev/null; then
    more=$(grep -v '^triton==' <<<"$more")
fi
python -m pip install --quiet --no-deps --require-hashes -r <(locked <<<"$more")
vision=$root/.venv/vision pins=$(section "Installed by scripts\/test.sh into")
if [[ $(cat "$vision/pins" 2>/dev/null) != "$pins" ]]; then
    python -m pip install --quiet --no-deps --require-hashes --upgrade --target "$vision" \
        -r <(locked <<<"$pins")
    echo "$pins" >"$vision/pins"
fi

ruff check .
ruff format --check .
mypy
# --dist loadfile: the tests of a file share the checkpoints of its fixtures. tests/conftest.py sets
# the order of the files.
python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder "$@"
