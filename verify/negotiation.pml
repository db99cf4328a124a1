/* Negotiation between the members of a host (src/hora/engine/negotiation/shared_memory.py): N members announce OPS requests in sequence, as
 * many ahead as they like; member 0, the coordinator, cuts rounds.
 *
 *     announce: the announcement into the member's ring, then the head, then the bell; wake the coordinator if it is marked asleep
 *     lead:     the bell, then the heads; once all have announced a request, the cut, then the round number, then wake all members
 *     follow:   the round number, then the cut, then the announcements up to there, then the number of rounds done
 *     wait:     the coordinator marks itself asleep and sleeps on the value of the bell before it read the heads; the others
 *               sleep on the number of the last round that they have seen
 *
 * A ring holds RING announcements and there are CUTS cuts, both reused: all must have read an entry before it is overwritten
 * (rounds_done). The bell counts to BELLS and wraps. Checked by `make verify`: all members execute the same requests in the same
 * rounds, no member reads a cut or an announcement before it is written or after it is overwritten, and none sleeps for ever unless
 * a member has died, which may happen at every store. A member without room, in a ring or for a cut, checks again
 * after its slice of sleep.
 *
 * MUTANT, each of which must fail: 1 the bell is read after the heads; 2 the bell rings before the head is stored; 3 the coordinator
 * does not mark itself asleep; 4 the round number is stored before the cut; 5 a cut is reused at any time;
 * 6 a ring is reused as soon as the member's own rounds are done; 7 the kernel does not compare.
 *
 * Stands for these functions, whose digests tests/unit/test_verify.py compares:
 *     src/hora/engine/shm/native.c wake b4fc767de6
 *     src/hora/engine/shm/native.c sleep_on 75c6b048f3
 *     src/hora/engine/shm/native.c patiently 2510f97021
 *     src/hora/engine/shm/native.c hora_wake bf729afb6e
 *     src/hora/engine/shm/native.c hora_wait_for 0ffd0aecf8
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation.wait 93b5a64483
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation.wake 0b7265bb9d
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation.poll 11bc71b28c
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._lead 0e2b35788b
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._follow 5e2b53b773
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._publish 0e6ad0d375
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._cut_is_free 30a0c5cfd6
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation.flush ae4b85e2c2
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._write e30ee1556b
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._reclaim a83a6c1c3a
 *     src/hora/engine/negotiation/shared_memory.py SharedMemoryNegotiation._ring 822ec6b706
 */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 3
#endif
#ifndef MUTANT
#define MUTANT 0
#endif
#if N == 2
#define RING 3
#else
#define RING 2
#endif
#define CUTS 2
#define BELLS 4
#define ROUNDS (OPS + 1)

byte ring[N * RING];      /* 1 + the position of the stored announcement */
byte head[N];             /* announcements so far */
byte rounds_done[N];
byte cut[CUTS * N];       /* the position in every ring that the round reaches */
byte cut_of[CUTS];        /* the round of the cut */
byte bell;
byte round;
bool asleep;              /* the coordinator is marked asleep */
bool in_futex[N];
bool faults = true;
bool died;

#define NEXT ((me + 1) % N)
#define LAST ((me + N - 1) % N)
#define LEAST(a, b) ((a) < (b) -> (a) : (b))
#define DONE_BY_ALL LEAST(rounds_done[me], LEAST(rounds_done[NEXT], rounds_done[LAST])) /* they only grow, so one step is exact enough */
#define HAS_ROOM (head[me] - my_cuts[(MUTANT == 6 -> rounds : DONE_BY_ALL)] < RING)
#define CUT_IS_FREE (MUTANT == 5 || DONE_BY_ALL + CUTS > rounds + 1)

inline store(where, value) {
    atomic {
        where = value;
        if
        :: faults -> faults = false; died = true; goto gone
        :: true
        fi
    }
}

inline ring_the_bell() {
    atomic { bells = (bells + 1) % BELLS; bell = 1 + me + N * bells };
    if
    :: asleep -> in_futex[0] = false
    :: else
    fi
}

inline announce() {
    ring[me * RING + head[me] % RING] = 1 + head[me];
    if
    :: me != 0 && MUTANT == 2 -> ring_the_bell(); store(head[me], head[me] + 1)
    :: me != 0 && MUTANT != 2 -> store(head[me], head[me] + 1); ring_the_bell()
    :: me == 0 -> store(head[me], head[me] + 1)
    fi
}

inline read_announcements(m, upto) { /* since the last round or look: none may have been overwritten */
    do
    :: fed[m] < upto -> atomic { assert(ring[(m) * RING + fed[m] % RING] == 1 + fed[m]); fed[m] = fed[m] + 1 }
    :: else -> break
    od
}

inline end_round() {
    my_cuts[rounds] = fed[me];
    executed = LEAST(fed[me], LEAST(fed[NEXT], fed[LAST]));
    assert(executed <= head[me]);
    store(rounds_done[me], rounds)
}

inline lead() {
    if
    :: MUTANT != 1 -> bell_seen = bell
    :: else
    fi;
    read_announcements(0, head[0]);
    read_announcements(1, head[1]);
    if
    :: N > 2 -> read_announcements(N - 1, head[N - 1])
    :: else
    fi;
    if
    :: MUTANT == 1 -> bell_seen = bell
    :: else
    fi;
    ready = (LEAST(fed[0], LEAST(fed[NEXT], fed[LAST])) > executed);
    if
    :: ready && CUT_IS_FREE ->
        rounds++;
        if
        :: MUTANT == 4 -> round = rounds
        :: else
        fi;
        cut[rounds % CUTS * N] = fed[0];
        cut[rounds % CUTS * N + 1] = fed[1];
        if
        :: N > 2 -> cut[rounds % CUTS * N + N - 1] = fed[N - 1]
        :: else
        fi;
        cut_of[rounds % CUTS] = rounds;
        if
        :: MUTANT != 4 -> store(round, rounds)
        :: else
        fi;
        atomic { /* FUTEX_WAKE */
            in_futex[1] = false;
            in_futex[N - 1] = false
        }
        end_round()
    :: else -> /* wait */
        if
        :: MUTANT == 3
        :: else -> asleep = true
        fi;
        atomic {
            if
            :: bell == bell_seen || MUTANT == 7 -> in_futex[0] = true
            :: else
            fi
        }
        if
        :: atomic { !in_futex[0] -> asleep = false }
        :: atomic { in_futex[0] && (ready && CUT_IS_FREE || head[0] < OPS && HAS_ROOM && wants_room) -> in_futex[0] = false; asleep = false }
        :: atomic { died -> in_futex[0] = false; goto gone }
        fi
    fi
}

inline follow() {
    if
    :: round != rounds ->
        rounds++;
        read_announcements(0, cut[rounds % CUTS * N]);
        read_announcements(1, cut[rounds % CUTS * N + 1]);
        if
        :: N > 2 -> read_announcements(N - 1, cut[rounds % CUTS * N + N - 1])
        :: else
        fi;
        assert(cut_of[rounds % CUTS] == rounds);
        end_round()
    :: else -> /* wait */
        atomic {
            if
            :: round == rounds || MUTANT == 7 -> in_futex[me] = true
            :: else
            fi
        }
        if
        :: !in_futex[me]
        :: atomic { in_futex[me] && head[me] < OPS && HAS_ROOM && wants_room -> in_futex[me] = false }
        :: atomic { died -> in_futex[me] = false; goto gone }
        fi
    fi
}

proctype member(byte me) {
    byte rounds, executed, bell_seen, bells, fed[N], my_cuts[ROUNDS];
    bool ready, wants_room;
    do
    :: executed == OPS -> break
    :: executed < OPS && head[me] < OPS && HAS_ROOM -> wants_room = false; announce()
    :: atomic {
            executed < OPS && (head[me] == OPS || !HAS_ROOM || head[me] > executed) -> /* makes progress: a request is in flight */
            wants_room = (head[me] < OPS && !HAS_ROOM)
        }
        if
        :: me == 0 -> lead()
        :: else -> follow()
        fi
    od;
gone:
    skip
}

init {
    byte m;
    atomic {
        for (m : 0 .. N - 1) {
            run member(m)
        }
    }
}
