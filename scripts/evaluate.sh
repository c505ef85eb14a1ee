#!/usr/bin/env bash
# Evaluates a checkpoint; evaluate.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/evaluate.py" "$@"
