#!/usr/bin/env bash
# Prepares WMT 2014 English-German with 32,000 joint merges; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/wmt14.py" "$@"
