#!/usr/bin/env bash
# Prepares WikiText-103 for language models; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/wikitext103.py" "$@"
