#!/bin/sh
# Check the models exhaustively: two members over two items, three members over one.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
for size in "2 2" "3 1"; do
    set -- $size
    spin -a -DN="$1" -DITEMS="$2" "$here/lane.pml"
    cc -O2 -w -DSAFETY -DCOLLAPSE -o pan pan.c
    ./pan -m1000000 > report || true
    grep -E "errors|states, stored" report | sed "s/^/lane, $1 members, $2 items: /"
    grep -q "errors: 0" report && ! grep -q "search depth too small\|out of memory" report
done
