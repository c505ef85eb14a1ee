#!/usr/bin/env bash
# Table 3 of the MultiMax paper: language modelling, WikiText-103; wikitext103.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/experiment.py" wikitext103 "$@"
