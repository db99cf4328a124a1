#!/bin/sh
# The native part under sanitizers, under valgrind and on 64-bit ARM: `sanitize.sh [OPERATIONS]` (a million), from anywhere.
# Each of them must end without a report, and find the same digest as the plain program. A tool that is missing is an error.
set -eu
operations=${1:-1000000}
fewer=$((operations / 20 + 1)) # where a program runs fifty times slower
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-g -std=gnu11 -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -pthread -Isrc/hora/engine/shm"
# The loader would choose among the clones of a function before a sanitizer is ready.
clang="clang -O1 -fno-omit-frame-pointer -Dtarget_clones(...)=unused"
export TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
same_layout=
! setarch -R true 2>/dev/null || same_layout="setarch -R" # or ThreadSanitizer may find its own memory taken

build() { # NAME COMPILER [FLAG ...]
    name=$1
    shift
    "$@" $flags -o "$work/$name" tests/native/ranks.c
}

compare() { # NAME MEMBERS OPERATIONS COMMAND ...
    name=$1 members=$2 count=$3
    shift 3
    expected=$("$work/plain" "$members" "$count")
    found=$("$@" "$members" "$count")
    if [ "$found" != "$expected" ]; then
        echo "$name: $found; but plain: $expected"
        exit 1
    fi
    echo "$name: $found"
}

build plain ${CC:-cc} -O3
for kind in thread address undefined; do
    build $kind $clang -fsanitize=$kind -fno-sanitize-recover=all
    for members in 2 3; do
        compare $kind $members "$operations" $same_layout "$work/$kind"
    done
done
compare valgrind 2 $fewer valgrind --quiet --error-exitcode=1 --leak-check=full --fair-sched=yes "$work/plain"
build arm aarch64-linux-gnu-gcc -O3 -static
for members in 2 3 5; do
    compare aarch64 $members $fewer qemu-aarch64-static "$work/arm"
done
