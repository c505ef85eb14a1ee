#!/usr/bin/env bash
# Tests the Triton kernels on this machine's GPU, then times them: six minutes on an H200.
#
#   scripts/gpu_check.sh                 tests and timings
#   scripts/gpu_check.sh -k attention    only the tests that pytest selects
#
# It needs a Python with torch, triton, entmax, numpy, pytest and pytest-xdist, but no fairseq and
# no network.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in
-h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit ;;
esac
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# Compilation takes most of the time, so several processes share the tests.
python3 -m pytest "$root/tests/gpu" --confcutdir "$root/tests/gpu" -q -n 6 "$@"
(($# == 0)) || exit 0

benchmark() { python3 "$root/scripts/benchmark.py" "$@" --device cuda --dtype bfloat16; }
benchmark attention --compile --shape 16x16x1024x64 4x8x512x64 8x16x2048x128
benchmark attention --compile --mask padding --shape 32x8x128x64
benchmark output --compile --tokens 8192 --vocabulary 32768
benchmark output --compile --tokens 2048 --vocabulary 267744
