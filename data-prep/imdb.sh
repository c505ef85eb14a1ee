#!/usr/bin/env bash
# Prepares IMDB reviews and GloVe vectors for document classification; see --help.
set -euo pipefail
# shellcheck source=../scripts/environment.sh
. "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
exec python "$root/data-prep/imdb.py" "$@"
