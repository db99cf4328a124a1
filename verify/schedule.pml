/* A schedule (src/hora/engine/schedule.py) and its wait protocol (src/hora/engine/shm/counters.py): N members execute ITEMS items in two
 * phases each, publish and wait; one of them may join or die at any step.
 *
 *     publish: store the counter, then look for sleepers, then wake them       (Counters.publish, hora_publish of native.c)
 *     wait:    mark oneself asleep, check once more, sleep on the value seen   (Counters.meet, patiently of native.c)
 *
 * Checked by `make verify`: no member sleeps for ever (a sleeper is in a valid end state only if the member it waits for has died), none
 * reduces an item before all members have published it or are absent for it, and all members agree on the absent ones.
 * The slice after which a sleeper wakes by itself is omitted: the protocol must work without it.
 *
 * MUTANT, each of which must fail: 1 a publisher looks for sleepers first; 2 neither the member nor the kernel checks once more before
 * sleeping.
 *
 * Stands for these functions, whose digests tests/unit/test_verify.py compares:
 *     src/hora/engine/shm/native.c wake b4fc767de6
 *     src/hora/engine/shm/native.c sleep_on 75c6b048f3
 *     src/hora/engine/shm/native.c patiently 2510f97021
 *     src/hora/engine/shm/native.c counter_of 82f04d7886
 *     src/hora/engine/shm/native.c sleeps 865abe9c17
 *     src/hora/engine/shm/native.c hora_publish 38302d81bf
 *     src/hora/engine/shm/native.c hora_wait 8b3b83993c
 *     src/hora/engine/shm/native.c hora_meet fd265144a2
 *     src/hora/engine/shm/counters.py Counters.publish e6efb4def1
 *     src/hora/engine/shm/counters.py Counters.meet 450fe4a786
 *     src/hora/engine/schedule.py ReductionSchedule._step d87da164d7
 *     src/hora/engine/schedule.py ReductionSchedule.end_together 6f5066a5ce
 *     src/hora/engine/schedule.py ReductionSchedule.meet 21bf1f2c74
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

byte counter[N];  /* 2 n: has reached item n; 2 n + 1: has done its part; OPEN: has joined */
byte came[N];     /* the number of items that a joined member has reached */
bool asleep[N];   /* is marked asleep */
bool in_futex[N]; /* sleeps in the kernel */
byte watched[N];  /* the member whose counter it sleeps on */
bool dead[N];
byte decided[ITEMS + 1]; /* 1 + the absent members (bits), as seen by the first member that reduced the item */
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
                atomic { /* FUTEX_WAIT: the kernel compares and sleeps atomically */
                    if
                    :: counter[p] == seen || MUTANT == 2 -> in_futex[me] = true; watched[me] = p
                    :: else
                    fi
                }
                if
                :: !in_futex[me]
                :: dead[p] -> in_futex[me] = false; asleep[me] = false; goto broken /* by the world's status */
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
joins: /* at the end, or instead of an item; started items are complete */
    came[me] = n - 1;
    publish(me, OPEN);
    goto gone;
broken:
    dead[me] = true; /* an error on this rank ends its part too, and all ranks notice */
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
