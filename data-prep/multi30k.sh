#!/usr/bin/env bash
# Prepares Multi30k German-English; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/multi30k.py" "$@"
