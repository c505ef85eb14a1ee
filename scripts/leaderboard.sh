#!/usr/bin/env bash
# The leaderboard's synthetic tasks; leaderboard.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec python "$root/scripts/leaderboard.py" "$@"
