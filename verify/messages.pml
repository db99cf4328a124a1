/* The bells of src/hora/engine/point_to_point.py and shm/messages.h: each of N ranks writes OPS + 1 messages into its own ring to one reader,
 * which sleeps when there is nothing to read. A writer sleeps while its ring, of two messages, is full; the reader rings its bell only
 * after taking from a full ring. No rank may sleep while it has work, however late the others are: then all end, without a deadlock.
 *
 * MUTANT breaks one rule: 1 the reader reads the bell after looking, 2 a writer rings before it has written, 3 a writer increments
 * the bell in two steps, so that an old number can return, 4 the reader checks for a full ring before it takes.
 *
 * Stands for these functions, whose digests tests/unit/test_verify.py compares:
 *     src/hora/engine/shm/messages.h hora_add 13cece3121
 *     src/hora/engine/shm/messages.h ring_bell fad0ed6218
 *     src/hora/engine/shm/messages.h available 8bacb2b5ab
 *     src/hora/engine/shm/messages.h space 7c4ac7a8c5
 *     src/hora/engine/shm/messages.h note_given bbf3b064b9
 *     src/hora/engine/shm/messages.h note_taken 42b33119ac
 *     src/hora/engine/shm/messages.h hora_pipe_move d895b0970b
 *     src/hora/engine/shm/messages.h hora_try_send 4bb118bb7c
 *     src/hora/engine/shm/messages.h hora_try_receive 7a3c47b7dc
 *     src/hora/engine/shm/messages.h move_some a286aa2584
 *     src/hora/engine/shm/messages.h hora_message 544b83cea3
 *     src/hora/engine/shm/native.c wake b4fc767de6
 *     src/hora/engine/shm/native.c sleep_on 75c6b048f3
 *     src/hora/engine/shm/native.c patiently 2510f97021
 *     src/hora/engine/point_to_point.py Messages._progress 7942f6f797
 *     src/hora/engine/point_to_point.py Messages._turn 38b1a2fadb
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
