#!/bin/sh
# Check the models exhaustively, for two members and for three: MODEL MEMBERS STEPS. Takes some minutes and 2 GB of memory. Then break
# each of their rules in turn (MUTANT, listed in each model): every such model must fail, or passing the check means nothing.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

check() { # MODEL MEMBERS STEPS MUTANT: leaves a report
    spin -a -DN="$2" -DITEMS="$3" -DOPS="$3" -DMUTANT="$4" "$here/$1.pml" > said || { cat said; exit 1; }
    cc -O1 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 -o pan pan.c
    ./pan -m2000000 > report || true
    if grep -q "search depth too small\|out of memory" report; then cat report; exit 1; fi
}

for one in "schedule 2 2" "schedule 3 1" "ring 2 2" "ring 3 1" "repeated 2 3" "repeated 3 1" "negotiation 2 4" "negotiation 3 2" "messages 2 2" "messages 3 1"; do
    check $one 0
    grep -E "errors|states, stored" report | sed "s/^/$one: /"
    grep -q "errors: 0" report
done
for one in "schedule 2" "ring 6" "repeated 5" "negotiation 7" "messages 4"; do
    set -- $one
    for mutant in $(seq "$2"); do
        check "$1" 2 "$([ "$1" = negotiation ] && echo 4 || echo 2)" "$mutant"
        if grep -q "errors: 0" report; then echo "$1: nothing notices mutant $mutant"; exit 1; fi
    done
    echo "$1: each of $2 mutants is noticed"
done
