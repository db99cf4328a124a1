#!/bin/sh
# Check the models exhaustively, for two members and for three: MODEL MEMBERS STEPS.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for check in "lane 2 2" "lane 3 1" "repeated 2 3" "repeated 3 1"; do
    set -- $check
    spin -a -DN="$2" -DITEMS="$3" -DOPS="$3" "$here/$1.pml"
    cc -O2 -w -DSAFETY -DCOLLAPSE -DVECTORSZ=2048 -o pan pan.c
    ./pan -m2000000 > report || true
    grep -E "errors|states, stored" report | sed "s/^/$1, $2 members, $3 steps: /"
    grep -q "errors: 0" report && ! grep -q "search depth too small\|out of memory" report
done
