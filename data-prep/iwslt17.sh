#!/usr/bin/env bash
# Prepares IWSLT 2017 German-English in lower case with 32,000 joint merges; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/iwslt17.py" "$@"
