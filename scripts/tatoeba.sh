#!/usr/bin/env bash
# Translation, Spanish-English sentences of Tatoeba; tatoeba.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" tatoeba "$@"
