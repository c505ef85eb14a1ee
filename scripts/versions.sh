#!/usr/bin/env bash
# Runs the fast tests of the last commit under several versions of CPython and torch.
#
#   scripts/versions.sh [--out DIR] CPYTHON:TORCH...
#   scripts/versions.sh 3.11:2.10.0 3.13:2.15.0
#
# Each pair gets its own clone and environment in DIR (default: versions), which are removed when its
# tests have ended. DIR/CPYTHON-TORCH.log has their output, and DIR/table.md one row per pair. The
# same command resumes: a pair whose tests have ended at this commit is not run again.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
out=versions
case ${1:-} in
-h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit ;;
--out) out=$2 && shift 2 ;;
esac
for pair in "$@"; do
    [[ $pair == *:* ]] || { printf "versions.sh: '%s' is no CPYTHON:TORCH; see --help.\n" "$pair" >&2 && exit 2; }
done
mkdir -p "$out"
out=$(cd "$out" && pwd) table=$out/table.md
commit=$(git -C "$root" rev-parse --short HEAD)
[[ -e $table ]] || printf '| CPython | torch | commit | date | fast tests |\n|%s\n' ' --- | --- | --- | --- | --- |' >"$table"

for pair in "$@"; do
    python=${pair%%:*} torch=${pair#*:}
    ! grep -q "^| $python | $torch | $commit |.* passed" "$table" || continue
    log=$out/$python-$torch.log clone=$out/$python-$torch
    if "python$python" --version >/dev/null 2>&1; then
        printf '%s with torch %s: %s\n' "$python" "$torch" "$log"
        rm -rf "$clone"
        git clone --quiet "$root" "$clone"
        PYTHON=python$python MULTIMAX_TORCH=torch==$torch "$clone/scripts/test.sh" --fast \
            >"$log" 2>&1 </dev/null || true
        result=$(sed -n 's/^=* *\([0-9].* \(passed\|failed\).*\) in .*/\1/p' "$log" | tail -n 1)
        rm -rf "$clone"
    else
        result="not run: there is no python$python here"
    fi
    printf '| %s | %s | %s | %s | %s |\n' \
        "$python" "$torch" "$commit" "$(date +%F)" "${result:-failed before the tests}" |
        tee -a "$table"
done
