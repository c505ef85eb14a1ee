#!/usr/bin/env bash
# Translation, Multi30k German-English, at the size of README's recipe; multi30k.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" multi30k "$@"
