#!/usr/bin/env bash
# Shows whether the GPU path works and what it costs; gpu_check.sh --help
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# Not environment.sh: a machine with a GPU may have no network to set an environment up from.
for python in python python3 "$root/.venv/bin/python"; do
    if "$python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("triton")))' 2>/dev/null; then
        exec "$python" "$root/scripts/gpu_check.py" "$@"
    fi
done
echo "gpu_check.sh: error: no python here has torch and triton: activate an environment that does" >&2
exit 1
