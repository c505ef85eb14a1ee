# shellcheck shell=bash
# To be sourced: sets $root, the checkout, and puts an environment that has all the packages first in
# PATH: the active one if it has them, this package from this checkout, else scripts/setup.sh's.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! python -c '
import os, sys
sys.path[:] = filter(None, sys.path)  # of the environment, not of the folder that this is run in
import entmax, fairseq_cli, multimax_fairseq, pyarrow
import sacrebleu, sacremoses, sentencepiece, subword_nmt, unearth
found = os.path.dirname(multimax_fairseq.__file__)
sys.exit(not os.path.samefile(found, os.path.join(sys.argv[1], "multimax_fairseq")))
' "$root" 2>/dev/null; then
    "$root/scripts/setup.sh"
    PATH=$root/.venv/bin:$PATH
fi
