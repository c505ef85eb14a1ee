#!/usr/bin/env bash
# Language modelling, the State of the Union addresses; speeches.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" speeches "$@"
