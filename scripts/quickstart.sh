#!/usr/bin/env bash
# Trains and evaluates a small MultiMax translation model and a language model in parallel: four to
# eight minutes on two CPU cores, plus the installation if it is needed.
#
#   scripts/quickstart.sh                 both models
#   scripts/quickstart.sh --compare       and the same models with softmax
#
#   --out DIR       the output folder; default quickstart/ in the checkout
#   --updates N     for each model; default 1800 and 1600
#   --archive-translation FILE, --archive-lm FILE
#                   archives of the data, downloaded by hand; see data-prep/demo.py
#
# scripts/experiment.py trains the models of configs/quickstart_*.yaml. The script uses the active
# Python environment if it has fairseq and this package, else that of scripts/setup.sh. Finished
# models are skipped, an interrupted run resumes.
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
            # Four checkpoints and twenty lines of progress, as in a full run.
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

trap 'printf "\nStopped; the same command resumes.\n" >&2; exit 130' INT
source "$root/scripts/environment.sh"
# Two models in parallel with one thread each: a second thread speeds up such small models by only a
# tenth, and slows them down on a busy machine. They need no GPU.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_VISIBLE_DEVICES=

# train_rows WHAT ROWS [OPTION...]: OPTION is passed to fairseq-train, after those of --updates
train_rows() {
    python "$root/scripts/experiment.py" "quickstart_$1" --rows "$2" \
        --data-bin "$out/data/$1/data-bin" --out "$out/$1" ${train[@]+"${train[@]}"} "${@:3}"
}

# signal NAME: send the signal to all processes of the jobs below
signal() {
    local job
    for job in ${jobs[@]+"${jobs[@]}"}; do
        kill -s "$1" -- "-$job" 2>/dev/null || true
    done
}

# Each job is a process group of its own, so this script passes signals on to it.
stop() {
    trap - INT TERM HUP
    signal "$1"
    wait || true
    exit "$2"
}
jobs=()
trap 'stop INT 130' INT # the jobs print a message
trap 'stop TERM 143' TERM HUP
trap 'signal STOP; kill -s STOP $$; signal CONT' TSTP
for what in translation lm; do
    set -m
    (
        trap 'exit 143' TERM # without bash's message
        python "$root/data-prep/demo.py" --only "$what" --out "$out/data" \
            ${archives[@]+"${archives[@]}"}
        if [[ $what == lm && -n $updates ]]; then
            # Modulators stay at softmax for a third of the updates: configs/rows/quickstart_lm.yaml
            train_rows lm multimax --scalar-freeze-updates $((updates / 3))
            ((${#rows[@]} == 1)) || train_rows lm softmax
        else
            train_rows "$what" "$(IFS=, && echo "${rows[*]}")"
        fi
    ) </dev/null &
    jobs+=($!)
    set +m
done
missing=
for job in "${jobs[@]}"; do
    until wait "$job"; do
        # A signal to this script, such as Ctrl-Z, also ends wait.
        if (($? > 128)) && kill -0 "$job" 2>/dev/null; then continue; fi
        wait "$job" || missing=yes
        break
    done
done
trap - TSTP
[[ -z $missing ]] || fail "a model is missing, see the error above; finished parts are kept."

python "$root/scripts/quickstart_report.py" "$out" "${rows[@]}"

# Quoted for a shell.
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
