#!/usr/bin/env bash
# Checks and tests: scripts/test.sh [pytest arguments]
# At most two processes of one thread each, so that it suits a small shared machine; more with -n N.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
cd "$root"
export PATH="$root/.venv/bin:$PATH" OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

ruff check .
ruff format --check .
mypy
# --dist loadfile: a file's tests share the checkpoints that its fixtures train
python -m pytest tests -n 2 --dist loadfile "$@"
