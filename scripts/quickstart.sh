#!/usr/bin/env bash
# Trains and evaluates a small MultiMax translation model and language model, side by side: about
# six minutes on two CPU cores once everything is installed, which it sees to first.
#
#   scripts/quickstart.sh                 both models
#   scripts/quickstart.sh --compare       and their softmax twins: all else equal
#
#   --out DIR       where all of it goes; default quickstart/ in the checkout
#   --updates N     of each model, to try something out; default 3200 and 2600
#   --archive-translation FILE, --archive-lm FILE
#                   the data's archives, got by hand; see data-prep/demo.py
#
# Uses the active Python environment if that has fairseq and this package, else scripts/setup.sh's.
# What is done already is not done again, and an interrupted run goes on where it stopped.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=$root/quickstart
normalizers=(multimax)
updates_translation=3200
updates_lm=2600
archives=()

fail() {
    printf 'quickstart.sh: %s\n' "$1" >&2
    exit 1
}

trap 'printf "\nStopped; the same command goes on from here.\n" >&2; exit 130' INT

while (($#)); do
    case $1 in
    --compare) normalizers=(multimax softmax) ;;
    -h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit ;;
    --out | --updates | --archive-translation | --archive-lm)
        (($# > 1)) || fail "$1 needs a value."
        case $1 in
        --out) mkdir -p "$2" && out=$(cd "$2" && pwd) ;;
        --updates)
            [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "--updates needs a positive number, not '$2'."
            updates_translation=$2 updates_lm=$2
            ;;
        *) archives+=("$1" "$2") ;;
        esac
        shift
        ;;
    *) fail "no option '$1'; see --help." ;;
    esac
    shift
done

source "$root/scripts/environment.sh"
data=$out/data
plugin=(--user-dir "$root/multimax_fairseq")
# With its default of 8, fairseq trains without the last sentences that do not fill a multiple.
plain=(--cpu --num-workers 0 --required-batch-size-multiple 1)
# Two models at a time, a thread each: models this small gain a tenth by a second thread, and threads
# that wait for each other lose far more as soon as something else runs.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

python "$root/data-prep/demo.py" --out "$data" ${archives[@]+"${archives[@]}"} | sed '/^Next: /d'

# The models. Pre-norm and a learning rate that falls to zero: both matter in so short a run.
small=(
    --encoder-layers 2 --encoder-embed-dim 128 --encoder-ffn-embed-dim 512 --encoder-attention-heads 4
    --decoder-layers 1 --decoder-embed-dim 128 --decoder-ffn-embed-dim 512 --decoder-attention-heads 4
)
flags_translation=(
    --source-lang es --target-lang en --arch transformer_multimax "${small[@]}"
    --encoder-normalize-before --decoder-normalize-before --share-all-embeddings --dropout 0.05
    --criterion label_smoothed_multimax_cross_entropy --label-smoothing 0.1
    --max-tokens 1000 --lr 5e-3 --warmup-updates 300
)
flags_lm=(
    --task language_modeling --arch transformer_lm_multimax "${small[@]:8}" --decoder-layers 2
    --decoder-input-dim 128 --decoder-output-dim 128
    --share-decoder-input-output-embed --dropout 0.05
    --criterion multimax_cross_entropy
    --tokens-per-sample 128 --sample-break-mode none --batch-size 8 --lr 3e-3 --warmup-updates 150
    --max-valid-steps 20
)

# progress NAME LOG UPDATES: fairseq's lines, all into LOG, the telling ones in short
progress() {
    local line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$2"
        if [[ $line =~ train_inner.*\ loss=([^,]*),.*\ wps=([0-9]*).*\ num_updates=([0-9]*) ]]; then
            printf '%s: update %s of %s, loss %s, %s tokens a second\n' \
                "$1" "${BASH_REMATCH[3]}" "$3" "${BASH_REMATCH[1]}" "${BASH_REMATCH[2]}"
        elif [[ $line =~ valid\ on.*\|\ loss\ ([^ ]*).*\|\ ppl\ ([^ ]*) ]]; then
            printf '%s: held-out loss %s, perplexity %s\n' "$1" "${BASH_REMATCH[@]:1}"
        fi
    done
}

# train TASK NORMALIZER UPDATES FLAG...: $out/TASK-NORMALIZER/model.pt
train() {
    local what=$1-$2 folder=$out/$1-$2 updates=$3 newest normalizer=()
    [[ $2 == multimax ]] || normalizer=(--attention-normalizer "$2" --output-normalizer "$2")
    local command=(fairseq-train "$data/$1/data-bin" "${plugin[@]}" "${@:4}"
        ${normalizer[@]+"${normalizer[@]}"}
        --optimizer adam --adam-betas '(0.9, 0.98)'
        --lr-scheduler polynomial_decay --total-num-update "$updates" --max-update "$updates"
        --save-interval-updates $(((updates + 3) / 4)) --keep-interval-updates 1
        --validate-interval 99 --no-epoch-checkpoints --save-dir "$folder"
        --log-format simple --log-interval $(((updates + 19) / 20))
        "${plain[@]}" --seed 1)
    local made_from
    made_from=$(printf '%q ' "${command[@]}" && cat "$data/$1/prepared.sha256")
    if [[ $(cat "$folder/made-from" 2>/dev/null) != "$made_from" ]]; then
        rm -rf "$folder"
        mkdir -p "$folder"
        printf '%s\n' "$made_from" >"$folder/made-from"
    elif [[ -f $folder/model.pt ]]; then
        printf 'Nothing to do: %s is trained.\n' "$what"
        return
    fi
    printf '%s: training; full log: %s\n' "$what" "$folder/train.log"
    # fairseq writes these aside and renames them, but makes checkpoint_last.pt by copying onto it.
    rm -f "$folder/checkpoint_last.pt"
    newest=$(cd "$folder" && find . -name 'checkpoint_*_*.pt' | sort -t_ -k3n | tail -n 1)
    if [[ -n $newest ]]; then
        printf '%s: going on from %s\n' "$what" "${newest#./}"
        cp "$folder/$newest" "$folder/checkpoint_last.pt"
    fi
    if ! "${command[@]}" 2>&1 | progress "$what" "$folder/train.log" "$updates"; then
        tail -n 20 "$folder/train.log" >&2
        fail "fairseq-train failed; the end of its log is above, the rest in $folder/train.log."
    fi
    mv "$folder/checkpoint_last.pt" "$folder/model.pt"
    rm -f "$folder"/checkpoint*
}

# evaluate TASK NORMALIZER: $folder/test.en (its translations) or test.perplexity
evaluate() {
    local folder=$out/$1-$2 result command
    local common=("$data/$1/data-bin" "${plugin[@]}" --path "$folder/model.pt" --gen-subset test
        "${plain[@]}")
    if [[ $1 == translation ]]; then
        result=$folder/test.en
        command=(fairseq-generate "${common[@]}" --source-lang es --target-lang en
            --beam 5 --max-len-a 1.2 --max-len-b 10 --max-tokens 4000 --remove-bpe sentencepiece)
    else
        result=$folder/test.perplexity
        command=(fairseq-eval-lm "${common[@]}" --tokens-per-sample 128 --sample-break-mode none
            --batch-size 32)
    fi
    if [[ -f $result ]]; then return; fi
    printf '%s: evaluating\n' "$1-$2"
    if ! "${command[@]}" >"$folder/evaluate.log" 2>&1; then
        tail -n 20 "$folder/evaluate.log" >&2
        fail "${command[0]} failed; the end of its log is above."
    fi
    if [[ $1 == translation ]]; then
        sed -n 's/^D-//p' "$folder/evaluate.log" | sort -n | cut -f 3 >"$result.part"
        [[ $(wc -l <"$result.part") == $(wc -l <"$data/translation/test.en") ]] ||
            fail "fairseq-generate left sentences out; see $folder/evaluate.log."
    else
        grep -o 'Loss (base 2): .*\|Evaluated [0-9,]* tokens' "$folder/evaluate.log" >"$result.part"
    fi
    mv "$result.part" "$result"
}

missing=
for normalizer in "${normalizers[@]}"; do
    jobs=()
    for what in translation lm; do
        updates=updates_$what flags=flags_$what[@]
        (
            trap - INT # a shell's background jobs would not hear Ctrl-C
            train "$what" "$normalizer" "${!updates}" "${!flags}"
            evaluate "$what" "$normalizer"
        ) &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do
        wait "$job" || missing=yes
    done
done
[[ -z $missing ]] || fail "not every model is there, for the reason above; what is there is kept."

python "$root/scripts/quickstart_report.py" "$out" "${normalizers[@]}"

cat <<EOF

Next: translate a sentence of your own:
  echo '¿Dónde está la estación?' | PATH=$(dirname "$(command -v fairseq-train)"):\$PATH fairseq-interactive \\
      $data/translation/data-bin --user-dir $root/multimax_fairseq \\
      --path $out/translation-multimax/model.pt --source-lang es --target-lang en --cpu --beam 5 \\
      --bpe sentencepiece --sentencepiece-model $data/translation/sentencepiece.model
EOF
((${#normalizers[@]} > 1)) || printf 'Or compare with softmax: %s --compare\n' "$root/scripts/quickstart.sh"
