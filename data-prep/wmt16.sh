#!/usr/bin/env bash
# Prepares WMT 2016 Romanian-English with 32,000 joint merges; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/wmt16.py" "$@"
