# shellcheck shell=bash
# To be sourced, with $root set: what pip installs with its hashes checked, so that a file that
# somebody has exchanged is refused. requirements.txt names the versions, requirements.lock has the
# hashes of their files, and is made anew by
#
#   grep -v '^torch==' scripts/requirements.txt | uv pip compile --universal --python-version 3.11 \
#       --no-deps --no-annotate --no-header --generate-hashes - -o scripts/requirements.lock
#
# torch has none: which of its builds is installed depends on the machine.

# pinned PATTERN: the packages of requirements.txt with these names; section NAME: those below it
pinned() { sed -n "s/^\($1\)==.*/&/p" "$root/scripts/requirements.txt"; }
section() { sed -n "/^# $1/,/^$/{/==/p;}" "$root/scripts/requirements.txt"; }

# locked: the lines of requirements.lock for the packages on standard input
locked() {
    awk 'NR == FNR { wanted[$1]; next } /^[a-z]/ { keep = $1 in wanted } keep' - "$root/scripts/requirements.lock"
}
