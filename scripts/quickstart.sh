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

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/quickstart
rows=(multimax)
archives=()
updates=
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
        --out)
            [[ -n $2 ]] || fail "--out needs the name of a folder, not ''."
            mkdir -p -- "$2" 2>/dev/null && out=$(CDPATH='' cd -- "$2" 2>/dev/null && pwd) ||
                fail "--out '$2' cannot be made or entered: name another folder."
            ;;
        --updates)
            [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "--updates needs a positive number, not '$2'."
            updates=$2
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
[[ $out != *:* ]] ||
    fail "--out '$out' has a ':', where fairseq would split it: name another folder."

trap 'printf "\nStopped; the same command goes on from here.\n" >&2; exit 130' INT
source "$root/scripts/environment.sh"
# Two models at a time, one thread each: models this small gain a tenth by a second thread, and threads
# that wait for each other lose far more as soon as something else runs. Nor do they need a GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=

# train_rows WHAT ROWS [OPTION...]: the options are fairseq-train's, more than those of --updates
train_rows() {
    python "$root/scripts/experiment.py" "quickstart_$1" --rows "$2" \
        --data-bin "$out/data/$1/data-bin" --out "$out/$1" ${train[@]+"${train[@]}"} "${@:3}"
}

# signal NAME: to all that the jobs below consist of
signal() {
    local job
    for job in ${jobs[@]+"${jobs[@]}"}; do
        kill -s "$1" -- "-$job" 2>/dev/null || true
    done
}

# Each job is a group of processes, which ends as one: what comes from the terminal, or from whoever
# ends this script, is handed on to it.
stop() {
    trap - INT TERM HUP
    signal "$1"
    wait || true
    exit "$2"
}
jobs=()
trap 'stop INT 130' INT # they say it themselves
trap 'stop TERM 143' TERM HUP
trap 'signal STOP; kill -s STOP $$; signal CONT' TSTP
for what in translation lm; do
    set -m
    (
        trap 'exit 143' TERM
        # Through cat, since progress is told in lines where it does not go to a terminal: the bars
        # of two models would overwrite each other.
        {
            trap 'exit 143' TERM # in silence
            python "$root/data-prep/demo.py" --only "$what" --out "$out/data" \
                ${archives[@]+"${archives[@]}"} | sed '/^Next: /d'
            if [[ $what == lm && -n $updates ]]; then
                # A third of the updates as softmax, as in configs/rows/quickstart_lm.yaml.
                train_rows lm multimax --scalar-freeze-updates $((updates / 3))
                ((${#rows[@]} == 1)) || train_rows lm softmax
            else
                train_rows "$what" "$(IFS=, && echo "${rows[*]}")"
            fi
        } | (trap '' INT TERM HUP && exec cat)
    ) </dev/null &
    jobs+=($!)
    set +m
done
missing=
for job in "${jobs[@]}"; do
    until wait "$job"; do
        # A signal to this script, Ctrl-Z, ends the waiting too.
        if (($? > 128)) && kill -0 "$job" 2>/dev/null; then continue; fi
        wait "$job" || missing=yes
        break
    done
done
trap - TSTP
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
if ((${#rows[@]} == 1)); then
    printf 'Or compare with softmax: '
    printf '%q ' "$root/scripts/quickstart.sh" --compare --out "$out" ${updates:+--updates "$updates"}
    printf '\n'
fi
