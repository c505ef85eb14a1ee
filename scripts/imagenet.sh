#!/usr/bin/env bash
# The image classification of the MultiMax paper, on a folder of images; imagenet.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/imagenet.py" "$@"
