/* A schedule (src/hora/engine/schedule.py) and the wait protocol under it (src/hora/engine/shm/counters.py): N members go through ITEMS items of
 * which each has two phases, publish and wait; one of them may join or die at any step.
 *
 *     publish: store the counter, then look for sleepers, then wake them       (Counters.publish, publish_to of native.c)
 *     wait:    say that one sleeps, look once more, sleep on the value seen    (Counters._sleep, patiently of native.c)
 *
 * Checked by `make verify`: nobody sleeps for ever (a sleeper is in a valid end state only if the member it waits for has died), nobody
 * reduces an item before all members have published it or are absent for it, and no two members disagree about who is absent.
 * The slice after which a sleeper looks up by itself is left out: the protocol must do without it.
 *
 * MUTANT, each of which must fail: 1 who publishes looks for sleepers first; 2 who is about to sleep does not look once more, nor the
 * kernel.
 */
#ifndef MUTANT
#define MUTANT 0
#endif
#ifndef N
#define N 2
#endif
#ifndef ITEMS
#define ITEMS 2
#endif
#define OPEN 99

byte counter[N];  /* 2 n: has come to item n; 2 n + 1: has done its part; OPEN: has joined */
byte came[N];     /* to how many items, of a member that has joined */
bool asleep[N];   /* says that it sleeps */
bool in_futex[N]; /* does sleep: the kernel has it */
byte watched[N];  /* whose counter it sleeps on */
bool dead[N];
byte decided[ITEMS + 1]; /* 1 + the absent members (bits) as the first one that reduced the item saw them */
bool faults;      /* one member may join or die */

inline wake(owner) { /* FUTEX_WAKE */
    atomic {
        for (w : 0 .. N - 1) {
            if
            :: in_futex[w] && watched[w] == owner -> in_futex[w] = false
            :: else
            fi
        }
        w = 0
    }
}

inline publish(me, value) {
    if
    :: MUTANT != 1 -> counter[me] = value
    :: else
    fi;
    any = false;
    for (p : 0 .. N - 1) {
        if
        :: p != me && asleep[p] -> any = true
        :: else
        fi
    }
    if
    :: MUTANT == 1 -> counter[me] = value
    :: else
    fi;
    if
    :: any -> wake(me)
    :: else
    fi
}

inline wait_for_all(me, value) {
    for (p : 0 .. N - 1) {
        do
        :: counter[p] >= value -> break
        :: else ->
            asleep[me] = true;
            seen = counter[p];
            if
            :: seen < value ->
                atomic { /* FUTEX_WAIT: the kernel compares and sleeps as one */
                    if
                    :: counter[p] == seen || MUTANT == 2 -> in_futex[me] = true; watched[me] = p
                    :: else
                    fi
                }
                if
                :: !in_futex[me]
                :: dead[p] -> in_futex[me] = false; asleep[me] = false; goto broken /* the world's status says so */
                fi
            :: else
            fi;
            asleep[me] = false
        od
    }
}

proctype member(byte me) {
    byte n = 1, p, w, seen, absent;
    bool any;
    do
    :: n > ITEMS -> break
    :: n <= ITEMS && faults -> faults = false; goto joins
    :: n <= ITEMS && faults -> faults = false; dead[me] = true; goto gone
    :: n <= ITEMS ->
        publish(me, 2 * n);
        if
        :: faults -> faults = false; dead[me] = true; goto gone
        :: true
        fi;
        wait_for_all(me, 2 * n);
        atomic {
            absent = 0;
            for (p : 0 .. N - 1) {
                if
                :: counter[p] == OPEN && came[p] < n -> absent = absent | (1 << p)
                :: else -> assert(counter[p] >= 2 * n)
                fi
            }
            assert(decided[n] == 0 || decided[n] == 1 + absent);
            decided[n] = 1 + absent
        }
        publish(me, 2 * n + 1);
        wait_for_all(me, 2 * n + 1);
        n++
    od;
joins: /* at the end, or instead of an item: what was started is done */
    came[me] = n - 1;
    publish(me, OPEN);
    goto gone;
broken:
    dead[me] = true; /* an error on this rank ends its part too, and all hear of it */
gone:
    skip
}

init {
    byte m;
    atomic {
        faults = true;
        for (m : 0 .. N - 1) {
            run member(m)
        }
    }
}
