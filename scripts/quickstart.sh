#!/usr/bin/env bash
# Trains and evaluates a small MultiMax translation model and language model, side by side: four to
# eight minutes on two CPU cores once everything is installed, which it sees to first.
#
#   scripts/quickstart.sh                 both models
#   scripts/quickstart.sh --compare       and their softmax twins: all else equal
#
#   --out DIR       where all of it goes; default quickstart/ in the checkout
#   --updates N     of each model, to try something out; default 1800 and 1600
#   --archive-translation FILE, --archive-lm FILE
#                   the data's archives, got by hand; see data-prep/demo.py
#
# The models are those of configs/quickstart_*.yaml, trained by scripts/experiment.py. Uses the active
# Python environment if that has fairseq and this package, else scripts/setup.sh's. What is done
# already is not done again, and an interrupted run goes on where it stopped.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/quickstart
rows=(multimax)
archives=()
train=()

fail() {
    printf 'quickstart.sh: %s\n' "$1" >&2
    exit 1
}

while (($#)); do
    case $1 in
    --compare) rows=(multimax softmax) ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit ;;
    --out | --updates | --archive-translation | --archive-lm)
        (($# > 1)) || fail "$1 needs a value."
        case $1 in
        --out) mkdir -p "$2" && out=$(cd "$2" && pwd) ;;
        --updates)
            [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "--updates needs a positive number, not '$2'."
            # As often as in a whole run: four checkpoints and twenty lines of progress.
            train=(--max-update "$2" --
                --save-interval-updates $((($2 + 3) / 4)) --log-interval $((($2 + 19) / 20)))
            ;;
        *) archives+=("$1" "$2") ;;
        esac
        shift
        ;;
    *) fail "no option '$1'; see --help." ;;
    esac
    shift
done

trap 'printf "\nStopped; the same command goes on from here.\n" >&2; exit 130' INT
source "$root/scripts/environment.sh"
trap 'exit 130' INT # what follows says it itself
# Two models at a time, one thread each: models this small gain a tenth by a second thread, and threads
# that wait for each other lose far more as soon as something else runs. Nor do they need a GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=

jobs=()
for what in translation lm; do
    (
        trap - INT # a shell's background jobs would not hear Ctrl-C
        # Through cat, since progress is told in lines where it does not go to a terminal: the bars
        # of two models would overwrite each other.
        {
            python "$root/data-prep/demo.py" --only "$what" --out "$out/data" \
                ${archives[@]+"${archives[@]}"} | sed '/^Next: /d'
            python "$root/scripts/experiment.py" "quickstart_$what" \
                --rows "$(IFS=, && echo "${rows[*]}")" --data-bin "$out/data/$what/data-bin" \
                --out "$out/$what" ${train[@]+"${train[@]}"}
        } | (trap '' INT && exec cat)
    ) &
    jobs+=($!)
done
missing=
for job in "${jobs[@]}"; do
    wait "$job" || missing=yes
done
[[ -z $missing ]] || fail "not every model is there, for the reason above; what is there is kept."

python "$root/scripts/quickstart_report.py" "$out" "${rows[@]}"

# As a shell reads them again, whatever is in them.
quoted() { printf '%q' "$1"; }
cat <<EOF

Next: translate a sentence of your own:
  echo '¿Dónde está la estación?' | PATH=$(quoted "$(dirname "$(command -v fairseq-train)")"):\$PATH fairseq-interactive \\
      $(quoted "$out/data/translation/data-bin") --user-dir $(quoted "$root/multimax_fairseq") \\
      --path $(quoted "$out/translation/multimax/seed-1/checkpoint_best.pt") --source-lang es --target-lang en \\
      --cpu --beam 5 --bpe sentencepiece \\
      --sentencepiece-model $(quoted "$out/data/translation/sentencepiece.model")
EOF
((${#rows[@]} > 1)) || printf 'Or compare with softmax: %q --compare\n' "$root/scripts/quickstart.sh"
