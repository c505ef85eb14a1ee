#!/usr/bin/env bash
# Creates .venv in the checkout with everything that training, evaluation and tests need.
#
#   scripts/setup.sh
#   PYTHON=python3.12 scripts/setup.sh
#   MULTIMAX_TORCH="torch==2.13.0 --index-url URL" scripts/setup.sh
#
# PYTHON          the interpreter, CPython 3.11 or newer; default python3
# MULTIMAX_TORCH  pip's arguments for torch, for example a build for one CUDA version;
#                 default: the line in requirements.txt
#
# Later runs remember both. A run with nothing to do ends at once; an interrupted one continues. If
# pip replaced a pinned package, the next run installs the pinned version again.
set -euo pipefail

root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
source "$root/scripts/locked.sh"
stamp=$venv/setup.stamp
choice=$venv/setup.torch
unset PYTHONPATH # packages there are not installed in .venv
fail() {
    printf 'setup.sh: %s\n' "$1" >&2
    exit 1
}

case ${1:-} in
"") ;;
-h | --help) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p;}' "$0" && exit ;;
*) fail "it takes no arguments, but got '$1'; see --help." ;;
esac

# A second run waits; it would take the unfinished environment for a broken one.
exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    printf 'Another scripts/setup.sh is running here; waiting for it.\n'
    flock 9
fi

work=$(mktemp -d)
log=$work/log
export PIP_LOG=$work/pip # names the host of a failed connection, which pip's output may not
trap 'rm -rf "$work"' EXIT

# quietly WHAT COMMAND...: print one line and a dot every five seconds; all output if it fails
quietly() {
    local what=$1 pid status=0
    shift
    printf '%s ' "$what"
    : >"$PIP_LOG"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true; exit 130' INT TERM
    local ticks=0
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.25
        ticks=$((ticks + 1))
        if ((ticks % 20 == 0)); then printf '.'; fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    if ((status != 0)); then
        printf ' failed\n'
        cat "$log" >&2
        local index again="run scripts/setup.sh again; finished steps are kept."
        index=$(sed -n 's/.*Could not fetch URL \(.*\/\)[^/]*\/: \(connection error\|timed out\).*/\1/p' \
            "$PIP_LOG" | sort -u | paste -sd ' ')
        [[ -z $index ]] ||
            fail "the step above failed, and the package index $index did not answer: check the network or set PIP_INDEX_URL (for PyTorch, MULTIMAX_TORCH) to another one, then $again"
        fail "the step above failed: fix its cause and $again"
    fi
    printf ' done\n'
}

usable() { "$venv/bin/python" -m pip --version >/dev/null 2>&1; }
describe() { "$1" -c 'import sys, platform as p; print(p.python_implementation(), p.python_version(), sys.base_prefix)'; }

# An environment that works keeps its interpreter unless PYTHON asks for another.
if [[ -z ${PYTHON:-} ]] && usable; then
    python=$venv/bin/python
else
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null || fail "no interpreter '$python'; set PYTHON to a CPython 3.11 or newer."
fi
interpreter=$(describe "$python") || fail "'$python' does not run; set PYTHON to a CPython 3.11 or newer."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) or sys.implementation.name != "cpython")' ||
    fail "'$python' is ${interpreter% *}; set PYTHON to a CPython 3.11 or newer."

torch=${MULTIMAX_TORCH:-$(cat "$choice" 2>/dev/null || pinned torch)}
wanted=$(
    cat "$root"/scripts/{requirements.txt,requirements.lock,locked.sh,setup.sh} "$root/pyproject.toml" - \
        <<<"$torch $interpreter $root" |
        "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
)

finish() {
    printf '%s\n' "$1" "Next: source .venv/bin/activate && scripts/quickstart.sh"
}

# The installed versions of the pinned packages; `pip install timm`, for example, replaces torch.
installed() {
    grep '==' "$root/scripts/requirements.txt" | grep -vxF "$(section "Installed by scripts\/test.sh")" |
        "$venv/bin/python" -c '
import sys
from importlib.metadata import version
print(*(version(line.partition("==")[0]) for line in sys.stdin))' 2>/dev/null
}

if [[ $(cat "$stamp" 2>/dev/null) == "$wanted $(installed)" ]] && usable; then
    finish "Nothing to do: $venv is up to date."
    exit 0
fi

# fairseq is compiled after minutes of downloads, so check for compiler and headers first.
{ read -r compiler && read -r headers && read -r development; } < <("$python" -c '
import sys, sysconfig
print(sysconfig.get_config_var("CXX"), sysconfig.get_path("include"), sep="\n")
print("python%d.%d-dev" % sys.version_info[:2])')
read -ra compiler <<<"${CXX:-$compiler}"
compiles() { "${compiler[@]}" -fsyntax-only -I "$headers" -x c++ - <<<"#include <$1>" >"$log" 2>&1; }
compiles vector || fail "fairseq needs a C++ compiler and '${compiler[*]}' fails: install one (Debian: g++)."
compiles Python.h ||
    fail "fairseq needs Python.h, which $headers lacks: install Python's headers (Debian: $development)."

# The environment's scripts contain its path, so a moved environment is broken. A link to another
# checkout's environment is replaced here, which leaves that one as it is.
if ! usable || [[ $(describe "$venv/bin/python") != "$interpreter" ]] ||
    ! grep -qsF "$venv" "$venv/bin/activate"; then
    [[ $python != "$venv/bin/python" ]] || python=$("$python" -c 'import sys; print(sys._base_executable)')
    rm -rf "$venv"
    quietly "Environment (${interpreter% *})" "$python" -m venv "$venv"
fi
rm -f "$stamp"

# Python compiles what it imports; to have pip compile everything takes most of a minute.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
pip=("$venv/bin/python" -m pip install --no-input --no-warn-conflicts)
checked=("${pip[@]}" --no-deps --no-build-isolation --require-hashes)

# Build tools come first. torch comes after its dependencies, so that an index with only torch is
# enough. fairseq compiles against numpy and torch.
{ section "Installed first" && section "Imported by torch"; } | locked >"$work/first"
pinned fairseq-fixed | locked >"$work/fairseq"
{ section "Installed last" && section "Installed by scripts\/test.sh"; } >"$work/elsewhere"
grep '==' "$root/scripts/requirements.txt" | grep -vxFf "$work/elsewhere" | locked >"$work/others"
read -ra torch_words <<<"$torch"
cpus=$("$python" -c 'import os; print(min(4, os.cpu_count() or 1))') # each compiler needs up to 1 GB
printf '[build_ext]\nparallel = %d\n' "$cpus" >"$work/build"
# With ninja, extensions that torch compiles in parallel would overwrite one file.
mkdir "$work/bin"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/ninja"
chmod +x "$work/bin/ninja"

compiled() {
    "${pip[@]}" "${torch_words[@]}"
    # Three of fairseq's six extensions include all of torch's headers and take most of the time. No
    # translation or language model uses them, so they are compiled without optimisation. The others
    # keep the -O3 that fairseq's setup.py puts after these flags. CPPFLAGS extend the interpreter's
    # own flags; CFLAGS would replace them.
    PATH=$work/bin:$PATH DIST_EXTRA_CONFIG=$work/build CPPFLAGS="${CPPFLAGS:-} -O0 -g0" \
        "${checked[@]}" -r "$work/fairseq"
}

# Download, unpacking and compilation use different resources, so they run in parallel.
side_by_side() {
    local compiling unpacking status=0
    set -m # one process group each, to end it as a whole
    compiled >"$work/compiled" 2>&1 &
    compiling=$!
    "${checked[@]}" -r "$work/others" &
    unpacking=$!
    trap 'kill -- "-$compiling" "-$unpacking" 2>/dev/null; exit 130' TERM
    wait "$unpacking" || status=$?
    wait "$compiling" || { status=$? && cat "$work/compiled"; }
    return "$status"
}

quietly "Build tools" "${checked[@]}" -r "$work/first"
quietly "PyTorch (${torch_words[0]}), fairseq compiled, packages pinned in scripts/requirements.txt" \
    side_by_side
printf '%s\n' "$torch" >"$choice"
quietly "multimax-fairseq (editable), CPU kernels compiled" "${pip[@]}" --no-build-isolation --no-deps -e "$root"
# Only fairseq's commands run with the fixes of compat/. Spawned processes import the script again,
# which must not start the command again. A shebang may be neither long nor contain a space, so sh
# reads three lines that are a string to Python, as in pip's own scripts.
for script in "$venv"/bin/fairseq-*; do
    printf '%s\n' '#!/bin/sh' "'''exec' \"$venv/bin/python\" \"\$0\" \"\$@\"" "' '''" \
        "# Written by scripts/setup.sh." "import sys" "" \
        "from multimax_fairseq.__main__ import run" "" 'if __name__ == "__main__":' \
        "    sys.exit(run('${script##*/}'))" >"$script"
done
check() {
    "$venv/bin/python" -c 'import multimax_fairseq, fairseq.models, fairseq.data.token_block_dataset' &&
        "$venv/bin/fairseq-score" --help
}
quietly "Check" check

printf '%s\n' "$wanted $(installed)" >"$stamp"
finish "Ready: $venv"
