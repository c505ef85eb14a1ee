#!/usr/bin/env bash
# Table 4 of the MultiMax paper: translation, IWSLT14 German-English; iwslt14.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" iwslt14 "$@"
