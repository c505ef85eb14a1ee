#!/usr/bin/env bash
# The translation of Adaptively Sparse Transformers: adaptively_sparse.sh --data NAME; see --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" adaptively_sparse "$@"
