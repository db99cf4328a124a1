/* The ring of slots (src/hora/engine/transport/shm.py; hora_collective of src/hora/engine/shm/native.c; hora_repeated of
 * src/hora/engine/shm/repeated.h): N members execute ITEMS operations, each of the kind picked by the first member that reaches it.
 *
 *     direct:  fill and publish up to AHEAD steps ahead, wait for the step, read all of its slots
 *     sliced:  the same, but member m reduces slice m into a common result, which all read LAG steps later
 *     staged:  one step that is agreed on by the records of a repeated call (`tickets`): all slots are read once all members have
 *              published the ticket, and the counter follows without waking a member
 *
 *     publish: store the counter, then look for sleepers, then wake them       (hora_publish of native.c)
 *     wait:    mark oneself asleep, check once more, sleep on the value seen   (patiently of native.c)
 *
 * Step s uses slot s modulo DEPTH, so slots are reused, and the kernel compares the low half of a counter, here modulo LOW. Checked
 * by `make verify`: no member reads a slot or a result before it is written or after it is overwritten, and none sleeps for ever
 * unless a member has died, which may happen at any step. repeated.pml models waiting for tickets.
 *
 * MUTANT, each of which must fail: 1 one slot less; 2 a member runs one step further ahead; 3 results are read a step too soon;
 * 4 the counter is published before the slot is filled; 5 a publisher looks for sleepers first; 6 the low half of a counter repeats
 * while a member may still watch it.
 *
 * Stands for these functions, whose digests tests/unit/test_verify.py compares:
 *     src/hora/engine/shm/native.c wake b4fc767de6
 *     src/hora/engine/shm/native.c sleep_on 75c6b048f3
 *     src/hora/engine/shm/native.c patiently 2510f97021
 *     src/hora/engine/shm/native.c hora_publish 38302d81bf
 *     src/hora/engine/shm/native.c hora_wait 8b3b83993c
 *     src/hora/engine/shm/native.c slot 0209d2824a
 *     src/hora/engine/shm/native.c fill_slot 13b4fbe350
 *     src/hora/engine/shm/native.c empty_slots 5659a605c9
 *     src/hora/engine/shm/native.c reduce_own_slice 4b645d616e
 *     src/hora/engine/shm/native.c take 69330fab78
 *     src/hora/engine/shm/native.c hora_collective 99011f48bf
 *     src/hora/engine/shm/repeated.h publish_record 284a24580d
 *     src/hora/engine/shm/repeated.h hora_repeated 2f225083a8
 */
#ifndef N
#define N 2
#endif
#ifndef ITEMS
#define ITEMS 3
#endif
#ifndef MUTANT
#define MUTANT 0
#endif
#if MUTANT == 2
#define AHEAD 2
#else
#define AHEAD 1
#endif
#if MUTANT == 1
#define DEPTH 3
#else
#define DEPTH 4
#endif
#if MUTANT == 3
#define LAG 1
#else
#define LAG 2
#endif
#if MUTANT == 6
#define LOW 4
#else
#define LOW 8
#endif

byte counter[N];
byte ticket[N];
byte slot[N * DEPTH];   /* the step that it was filled for */
byte result[N * DEPTH]; /* the step for which member m has reduced its slice */
byte kind[ITEMS];       /* 0: not picked; 1 direct, three pieces; 2 sliced, one piece; 3 sliced, two pieces; 4 staged */
bool asleep[N];
bool in_futex[N];
byte watched[N];
bool faults = true;
bool died;

/* Store a number; the member may die there. */
inline store(where, value) {
    atomic {
        where = value;
        if
        :: faults -> faults = false; died = true; goto gone
        :: true
        fi
    }
}

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

#define NEXT ((me + 1) % N) /* the other members, in the order in which they are checked */
#define LAST ((me + N - 1) % N)

inline look_for_sleepers(me) {
    any = asleep[NEXT];
    if
    :: N > 2 && !any -> any = asleep[LAST]
    :: else
    fi
}

inline publish(me, step) {
    if
    :: MUTANT == 5 -> look_for_sleepers(me); store(counter[me], step)
    :: else -> store(counter[me], step); look_for_sleepers(me)
    fi;
    if
    :: any -> any = false; wake(me)
    :: else
    fi
}

inline wait_for_one(me, other, step) {
    do
    :: counter[other] >= step -> break
    :: counter[other] < step ->
        asleep[me] = true;
        seen = counter[other];
        if
        :: seen < step ->
            atomic { /* FUTEX_WAIT: the kernel compares and sleeps atomically */
                if
                :: counter[other] % LOW == seen % LOW -> in_futex[me] = true; watched[me] = other
                :: else
                fi
            }
            if
            :: atomic { !in_futex[me] -> asleep[me] = false; seen = 0 }
            :: atomic { died -> in_futex[me] = false; seen = 0; goto gone } /* by the liveness check */
            fi
        :: else -> atomic { asleep[me] = false; seen = 0 }
        fi
    od
}

inline wait(me, step) {
    wait_for_one(me, NEXT, step);
    if
    :: N > 2 -> wait_for_one(me, LAST, step)
    :: else
    fi
}

inline fill(me, step) {
    slot[me * DEPTH + (step) % DEPTH] = step
}

inline read_slots(step) {
    assert(slot[NEXT * DEPTH + (step) % DEPTH] == step);
    if
    :: N > 2 -> assert(slot[LAST * DEPTH + (step) % DEPTH] == step)
    :: else
    fi
}

inline read_results(step) {
    assert(result[NEXT * DEPTH + (step) % DEPTH] == step);
    if
    :: N > 2 -> assert(result[LAST * DEPTH + (step) % DEPTH] == step)
    :: else
    fi
}

inline staged(me) {
    fill(me, base);
    store(ticket[me], ticket[me] + 1);
    if
    :: ticket[NEXT] >= ticket[me] && ticket[LAST] >= ticket[me]
    :: died -> goto gone
    fi;
    read_slots(base);
    atomic {
        counter[me] = base; /* no member sleeps on it */
        base++
    }
}

inline through_the_ring(me, pieces, lag) {
    atomic {
        steps = pieces + lag;
        ahead = (lag > 0 && pieces <= AHEAD -> 0 : AHEAD);
        filled = 0;
        drained = 0
    }
    do
    :: drained == steps -> break
    :: drained < steps && filled < steps && filled <= drained + ahead ->
        if
        :: filled < pieces && MUTANT == 4 -> publish(me, base + filled); fill(me, base + filled)
        :: filled < pieces && MUTANT != 4 -> fill(me, base + filled); publish(me, base + filled)
        :: filled >= pieces -> publish(me, base + filled)
        fi;
        filled++
    :: drained < steps && !(filled < steps && filled <= drained + ahead) ->
        wait(me, base + drained);
        if
        :: drained < pieces ->
            read_slots(base + drained);
            if
            :: lag > 0 -> result[me * DEPTH + (base + drained) % DEPTH] = base + drained
            :: else
            fi
        :: else
        fi;
        if
        :: lag > 0 && drained >= lag && drained - lag < pieces -> read_results(base + drained - lag)
        :: else
        fi;
        drained++
    od;
    base = base + steps
}

proctype member(byte me) {
    byte op, w, seen, base = 1, filled, drained, steps, ahead;
    bool any;
    for (op : 0 .. ITEMS - 1) {
        atomic {
            if
            :: kind[op] == 0 -> select(w : 1 .. 4); kind[op] = w; w = 0
            :: else
            fi
        }
        if
        :: kind[op] == 1 -> through_the_ring(me, 3, 0)
        :: kind[op] == 2 -> through_the_ring(me, 1, 1)
        :: kind[op] == 3 -> through_the_ring(me, 2, LAG)
        :: kind[op] == 4 -> staged(me)
        fi
    }
gone:
    asleep[me] = false
}

init {
    byte m;
    atomic {
        for (m : 0 .. N - 1) {
            run member(m)
        }
    }
}
