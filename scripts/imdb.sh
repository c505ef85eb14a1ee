#!/usr/bin/env bash
# The document classification of the continuous-attention paper, on IMDB reviews; imdb.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/imdb.py" "$@"
