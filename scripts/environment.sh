# shellcheck shell=bash
# Source this file. It sets $root, the checkout, and puts an environment with all packages first in
# PATH: the active one if it has them and uses this checkout, else the one of scripts/setup.sh.
root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
if ! python -c '
import os, sys
sys.path[:] = filter(None, sys.path)  # import from the environment, not from the current folder
import entmax, fairseq_cli, multimax_fairseq, pyarrow
import sacrebleu, sacremoses, sentencepiece, subword_nmt, unearth
found = os.path.dirname(multimax_fairseq.__file__)
sys.exit(not os.path.samefile(found, os.path.join(sys.argv[1], "multimax_fairseq")))
' "$root" 2>/dev/null; then
    "$root/scripts/setup.sh"
    PATH=$root/.venv/bin:$PATH
fi
# As multimax_fairseq/children.py does: torch reads it when it is loaded.
[[ -n ${OMP_WAIT_POLICY:-} ]] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}
