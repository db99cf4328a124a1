/* The bells of src/hora/engine/point_to_point.py and shm/messages.h: N ranks write OPS + 1 messages each into rings of their own to one rank, which sleeps
 * when there is nothing to read. A writer sleeps while its ring, of two messages, is full; the reader rings for it only if it has
 * taken from a full one. None may sleep while it has something to do, however late the others are: then all end, and nothing blocks.
 *
 * MUTANT breaks one rule: 1 the reader notes the bell after it has looked, 2 a writer rings before it has written, 3 a writer adds
 * to what the bell says in two steps, so that an old number comes back, 4 the reader looks whether the ring is full before it takes.
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
#define READER N
#define full(peer, at) (written[peer] - (at) == 2)

byte written[N], taken[N];
byte bell[N + 1];
bool asleep[N + 1], sleeping[N + 1];

inline ring_bell(whose) {
#if MUTANT == 3
    old = bell[whose];
    bell[whose] = old + 1;
#else
    bell[whose]++; /* in one step: a number that was never there before */
#endif
    if :: asleep[whose] -> sleeping[whose] = false :: else fi /* futex wake */
}

inline sleep(me) {
    atomic { if :: bell[me] == seen -> sleeping[me] = true :: else fi } /* futex wait */
    !sleeping[me]
}

proctype writer(byte me) {
    byte count, old, seen;
    do
    :: count == OPS + 1 -> break
    :: else ->
        seen = bell[me];
        if
        :: !full(me, taken[me]) ->
#if MUTANT == 2
            ring_bell(READER);
            written[me]++;
#else
            written[me]++;
            ring_bell(READER);
#endif
            count++
        :: else ->
            asleep[me] = true;
            if :: full(me, taken[me]) -> sleep(me) :: else fi;
            asleep[me] = false
        fi
    od
}

inline take(peer) {
#if MUTANT == 4
    rings = full(peer, taken[peer]);
    taken[peer]++;
#else
    taken[peer]++;
    rings = full(peer, taken[peer] - 1);
#endif
    if :: rings -> ring_bell(peer) :: else fi;
    total++;
    moved = true
}

inline look() {
    moved = false;
    peer = 0;
    do
    :: peer == N -> break
    :: else ->
        if :: written[peer] > taken[peer] -> take(peer) :: else fi;
        peer++
    od
}

proctype reader() {
    byte total, seen, peer, old;
    bool moved, rings;
    do
    :: total == N * (OPS + 1) -> break
    :: else ->
        seen = bell[READER];
        look();
        if
        :: moved -> skip
        :: else ->
            asleep[READER] = true;
            look();
#if MUTANT == 1
            seen = bell[READER];
#endif
            if :: moved -> skip :: else -> sleep(READER) fi;
            asleep[READER] = false
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
