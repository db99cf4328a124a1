#!/bin/sh
# The native part under sanitizers, under valgrind and on 64-bit ARM: `sanitize.sh [OPERATIONS]` (a million), from anywhere.
# Each run must end without a report and with the digest of the plain program. A missing tool is an error.
set -eu
operations=${1:-1000000}
between=$((operations / 50 + 1)) # between hosts: a dozen threads and their sockets
fewer=$((operations / 20 + 1))   # where a program runs fifty times slower
fewest=$((operations / 1000 + 1))
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
flags="-g -std=gnu11 -ffp-contract=off -Wall -Wextra -Wno-unknown-pragmas -pthread -Isrc/hora/engine/shm"
# Otherwise the loader would choose among a function's clones before the sanitizer is initialized.
clang="clang -O1 -fno-omit-frame-pointer -Dtarget_clones(...)=unused"
export TSAN_OPTIONS=halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
same_layout=
! setarch -R true 2>/dev/null || same_layout="setarch -R" # ThreadSanitizer may otherwise find its memory range occupied

build() { # KIND COMPILER [FLAG ...]
    kind=$1
    shift
    for program in ranks hosts; do
        "$@" $flags -o "$work/$program-$kind" tests/native/$program.c
    done
}

compare() { # KIND PROGRAM NUMBER OPERATIONS [COMMAND ...]: of that kind, with NUMBER ranks or hosts
    kind=$1 program=$2 number=$3 count=$4
    shift 4
    expected=$("$work/$program-plain" "$number" "$count")
    found=$("$@" "$work/$program-$kind" "$number" "$count")
    if [ "$found" != "$expected" ]; then
        echo "$kind: $found; but plain: $expected"
        exit 1
    fi
    echo "$kind: $found"
}

build plain ${CC:-cc} -O3
for sanitizer in thread address undefined; do
    build $sanitizer $clang -fsanitize=$sanitizer -fno-sanitize-recover=all
    for number in 2 3; do
        compare $sanitizer ranks $number "$operations" $same_layout
        compare $sanitizer hosts $number $between $same_layout
    done
done
build valgrind ${CC:-cc} -O1
compare valgrind ranks 2 $fewer valgrind --quiet --error-exitcode=1 --leak-check=full --fair-sched=yes
compare valgrind hosts 3 $fewest valgrind --quiet --error-exitcode=1 --leak-check=full --fair-sched=yes
build aarch64 aarch64-linux-gnu-gcc -O3 -static
for number in 2 3 4; do
    compare aarch64 ranks $number $fewer qemu-aarch64-static
    compare aarch64 hosts $number $fewest qemu-aarch64-static
done
