#!/usr/bin/env bash
# Prepares the Kyoto Free Translation Task, Japanese-English with 32,000 joint merges; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/kftt.py" "$@"
