# shellcheck shell=bash
# To be sourced: sets $root, the checkout, and puts an environment that has all the packages first in
# PATH: the active one if it has them, else scripts/setup.sh's.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if ! python -c 'import entmax, fairseq_cli, multimax_fairseq, sacrebleu, sacremoses, sentencepiece, subword_nmt, unearth' 2>/dev/null; then
    "$root/scripts/setup.sh"
    PATH=$root/.venv/bin:$PATH
fi
