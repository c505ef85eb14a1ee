# shellcheck shell=bash
# Source this file with $root set. It selects what pip installs with checked hashes, so that a
# replaced file is refused. requirements.txt has the versions, requirements.lock the hashes of their
# files. This command writes the lock file:
#
#   grep -v '^torch==' scripts/requirements.txt | uv pip compile --universal --python-version 3.11 \
#       --no-deps --no-annotate --no-header --generate-hashes - -o scripts/requirements.lock
#
# torch has no hashes, since its build depends on the machine.

# pinned PATTERN: the packages of requirements.txt with these names; section NAME: those below it
pinned() { sed -n "s/^\($1\)==.*/&/p" "$root/scripts/requirements.txt"; }
section() { sed -n "/^# $1/,/^$/{/==/p;}" "$root/scripts/requirements.txt"; }

# locked: the lines of requirements.lock for the packages on standard input
locked() {
    awk 'NR == FNR { wanted[$1]; next } /^[a-z]/ { keep = $1 in wanted } keep' - "$root/scripts/requirements.lock"
}
