/* The bell of src/hora/engine/point_to_point.py and shm/messages.h: N ranks write OPS messages each into rings of their own to one rank, which sleeps
 * when there is nothing to read. It must never sleep while there is, however late a writer is: then all end, and nothing blocks.
 *
 * MUTANT breaks one rule: 1 the reader notes the bell after it has looked, 2 a writer rings before it has written, 3 a writer adds
 * to what the bell says in two steps, so that an old number comes back.
 */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef MUTANT
#define MUTANT 0
#endif

byte written[N], taken[N];
byte bell;
bool asleep, sleeping;

inline ring_bell() {
#if MUTANT == 3
    old = bell;
    bell = old + 1;
#else
    bell++ /* in one step: a number that was never there before */
#endif
}

proctype writer(byte me) {
    byte count, old;
    do
    :: count == OPS -> break
    :: else ->
#if MUTANT == 2
        ring_bell();
        if :: asleep -> sleeping = false :: else fi;
        written[me]++;
#else
        written[me]++;
        ring_bell();
        if :: asleep -> sleeping = false :: else fi; /* futex wake */
#endif
        count++
    od
}

inline look() {
    moved = false;
    peer = 0;
    do
    :: peer == N -> break
    :: else ->
        if :: written[peer] > taken[peer] -> taken[peer]++; total++; moved = true :: else fi;
        peer++
    od
}

proctype reader() {
    byte total, seen, peer;
    bool moved;
    do
    :: total == N * OPS -> break
    :: else ->
        seen = bell;
        look();
        if
        :: moved -> skip
        :: else ->
            asleep = true;
            look();
#if MUTANT == 1
            seen = bell;
#endif
            if
            :: moved -> skip
            :: else ->
                atomic { if :: bell == seen -> sleeping = true :: else fi } /* futex wait */
                !sleeping
            fi;
            asleep = false
        fi
    od
}

init {
    byte rank;
    atomic {
        do
        :: rank == N -> break
        :: else -> run writer(rank); rank++
        od;
        run reader()
    }
}
