#!/usr/bin/env bash
# Makes .venv at the checkout's root, with everything that training, evaluation and tests need.
#
#   scripts/setup.sh
#   PYTHON=python3.12 scripts/setup.sh
#   MULTIMAX_TORCH="torch==2.13.0 --index-url URL" scripts/setup.sh
#
# PYTHON          the CPython (3.11 or newer) to build with; default python3
# MULTIMAX_TORCH  what pip is given for torch, such as a build for one CUDA version;
#                 default: the line in requirements.txt
#
# Both are remembered, so later runs need not repeat them. A run with nothing to do ends at once,
# and one that was interrupted continues. If pip replaced a pinned package, a run installs it again.
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

# Two at once, of which each would take the other's half-made environment for broken: one waits.
exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null && ! flock --nonblock 9; then
    printf 'Another scripts/setup.sh is at work here; waiting for it.\n'
    flock 9
fi

work=$(mktemp -d)
log=$work/log
trap 'rm -rf "$work"' EXIT

# quietly WHAT COMMAND...: one line and a dot every five seconds; all the output if it fails
quietly() {
    local what=$1 pid status=0
    shift
    printf '%s ' "$what"
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
        fail "the step above failed; nothing is lost: mend its cause and run scripts/setup.sh again."
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

# The versions of the pinned packages. pip may have replaced some: `pip install timm` takes a newer
# torch.
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

# fairseq is compiled after minutes of downloads; check for a compiler and headers before them.
{ read -r compiler && read -r headers && read -r development; } < <("$python" -c '
import sys, sysconfig
print(sysconfig.get_config_var("CXX"), sysconfig.get_path("include"), sep="\n")
print("python%d.%d-dev" % sys.version_info[:2])')
read -ra compiler <<<"${CXX:-$compiler}"
compiles() { "${compiler[@]}" -fsyntax-only -I "$headers" -x c++ - <<<"#include <$1>" >"$log" 2>&1; }
compiles vector || fail "fairseq needs a C++ compiler and '${compiler[*]}' fails: install one (Debian: g++)."
compiles Python.h ||
    fail "fairseq needs Python.h, which $headers lacks: install Python's headers (Debian: $development)."

rm -f "$stamp"
# Its scripts name the path that it was made at, so one that was moved is as broken as one without pip.
if ! usable || [[ $(describe "$venv/bin/python") != "$interpreter" ]] ||
    ! grep -qsF "$venv" "$venv/bin/activate"; then
    [[ $python != "$venv/bin/python" ]] || python=$("$python" -c 'import sys; print(sys._base_executable)')
    rm -rf "$venv"
    quietly "Environment (${interpreter% *})" "$python" -m venv "$venv"
fi

# Python compiles what it imports; pip would compile all there is, for the better part of a minute.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_COMPILE=1
pip=("$venv/bin/python" -m pip install --no-input --no-warn-conflicts)
checked=("${pip[@]}" --no-deps --no-build-isolation --require-hashes)

# What packages are built with goes first; torch comes after what it imports, so that an index that
# holds nothing but torch is enough for it; fairseq compiles against numpy and torch.
{ section "Installed first" && section "Imported by torch"; } | locked >"$work/first"
pinned fairseq-fixed | locked >"$work/fairseq"
{ section "Installed last" && section "Installed by scripts\/test.sh"; } >"$work/elsewhere"
grep '==' "$root/scripts/requirements.txt" | grep -vxFf "$work/elsewhere" | locked >"$work/others"
read -ra torch_words <<<"$torch"
cpus=$("$python" -c 'import os; print(min(4, os.cpu_count() or 1))') # each compiler needs up to 1 GB
printf '[build_ext]\nparallel = %d\n' "$cpus" >"$work/build"
# With ninja, torch would have the extensions that are compiled side by side overwrite one file.
mkdir "$work/bin"
printf '#!/bin/sh\nexit 1\n' >"$work/bin/ninja"
chmod +x "$work/bin/ninja"

compiled() {
    "${pip[@]}" "${torch_words[@]}"
    # Three of fairseq's six extensions include all of torch's headers and take most of the time, but
    # no translation or language model calls them: they are compiled without optimisation. The other
    # three, two of which make the batches, keep the -O3 that fairseq's setup.py puts after these
    # flags. CPPFLAGS are added to the interpreter's own flags; CFLAGS would replace them.
    PATH=$work/bin:$PATH DIST_EXTRA_CONFIG=$work/build CPPFLAGS="${CPPFLAGS:-} -O0 -g0" \
        "${checked[@]}" -r "$work/fairseq"
}

# A download, an archive that is unpacked and a compiler keep different things busy.
side_by_side() {
    local compiling unpacking status=0
    set -m # each a group of processes, which ends as one
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
quietly "multimax-fairseq (editable)" "${pip[@]}" --no-build-isolation --no-deps -e "$root"
# Of all processes in this environment, fairseq's commands alone run with what compat/ mends. The
# processes that a command starts read its script again, which must not start the command again.
# A first line that names the interpreter may be neither long nor have a space, so sh reads three
# lines that are a string to Python, as in the scripts that pip writes.
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
