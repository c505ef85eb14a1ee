#!/usr/bin/env bash
# The translation of the continuous-attention paper: IWSLT 2017 German-English; iwslt17.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" iwslt17 "$@"
