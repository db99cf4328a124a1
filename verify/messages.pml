/* The bells of src/hora/engine/point_to_point.py and shm/messages.h: each of N ranks writes OPS + 1 messages into its own ring to one reader,
 * which sleeps when there is nothing to read. A writer sleeps while its ring, of two messages, is full; the reader rings its bell only
 * after taking from a full ring. No rank may sleep while it has work, however late the others are: then all end, without a deadlock.
 *
 * MUTANT breaks one rule: 1 the reader reads the bell after looking, 2 a writer rings before it has written, 3 a writer increments
 * the bell in two steps, so that an old number can return, 4 the reader checks for a full ring before it takes.
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
    bell[whose]++; /* atomically: a number never used before */
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
