#!/usr/bin/env bash
# Language modelling, film reviews; reviews.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" reviews "$@"
