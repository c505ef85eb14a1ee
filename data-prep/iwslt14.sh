#!/usr/bin/env bash
# Prepares IWSLT 2014 German-English as fairseq's recipe does; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/iwslt14.py" "$@"
