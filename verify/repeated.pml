/* Repeated allreduces (src/hora/engine/agree/repeated.py, src/hora/engine/shm/repeated.h) beside announced requests and rounds
 * (src/hora/engine/agree/shared_memory.py): N members have OPS requests, in the same order, and each takes for each of them the fast
 * path, the announced way, or the announced way without waiting for it (the handle is waited for at the end).
 *
 *     idle:    nothing that this member knows of waits for another member (Planner.idle)
 *     quiet:   no round that this member has not seen, no announcement that was not agreed on in a round that it has seen
 *     publish: the record of the ticket, then the ticket
 *     agree:   all tickets are published and all records are equal -> reduced; they differ, or there is news -> announced
 *
 * Checked by `make verify`: no request is reduced on the fast path by one member and in a round by another, no record is read after it
 * was overwritten, and nobody is left waiting. The member 0 cuts rounds. Here a sleeper looks up by itself, as it does after its slice: a
 * nudge that comes between its look at the news and its sleep is made good by that alone. Waking is checked by lane.pml.
 */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 2
#endif
#define KEPT 4
#define PER_ROUND (OPS + 1)

byte published[N];         /* tickets */
byte record[N * KEPT];     /* 1 + the request */
byte of_ticket[N * KEPT];  /* whose record it is */
byte announced[N];         /* requests, as bits */
byte round;                /* cut so far */
byte cut[N * (OPS + 1)];   /* what was announced by then, by member and round */
byte way[OPS];             /* 1: fast, 2: in a round */

inline is_idle(me) { /* private to the member: one step */
    atomic {
        ready = 255;
        calm = true;
        for (m : 0 .. N - 1) {
            ready = ready & fed[m]
        }
        for (m : 0 .. N - 1) {
            if
            :: fed[m] != ready -> calm = false
            :: else
            fi
        }
    }
}

inline is_quiet(me) {
    calm = (round == rounds);
    for (m : 0 .. N - 1) {
        if
        :: announced[m] != fed[m] -> calm = false
        :: else
        fi
    }
}

inline announce(me, op) {
    announced[me] = announced[me] | (1 << op);
    in_flight = in_flight | (1 << op)
}

/* Take part in rounds until none of these requests is in flight. */
inline drive(me, ops) {
    do
    :: (in_flight & (ops)) == 0 -> break
    :: (in_flight & (ops)) != 0 && rounds < round -> /* follow */
        rounds++;
        ready = 255;
        for (m : 0 .. N - 1) {
            fed[m] = cut[m * (OPS + 1) + rounds];
            ready = ready & fed[m]
        }
        for (o : 0 .. OPS - 1) {
            if
            :: (ready & in_flight & (1 << o)) != 0 ->
                assert(way[o] != 1);
                way[o] = 2
            :: else
            fi
        }
        in_flight = in_flight & ~ready;
        ticket = rounds * PER_ROUND + 1
    :: (in_flight & (ops)) != 0 && me == 0 && rounds == round -> /* lead: wait until something is ready, and cut a round */
        atomic {
            ready = 255;
            for (m : 0 .. N - 1) {
                ready = ready & announced[m]
            }
        }
        if
        :: (ready & in_flight) != 0 ->
            for (m : 0 .. N - 1) {
                cut[m * (OPS + 1) + round + 1] = announced[m]
            }
            round++
        :: else ->
            if
            :: (announced[0] & announced[N - 1] & announced[N / 2] & in_flight) != 0 /* sleeps until the bell */
            :: rounds < round
            fi
        fi
    od
}

proctype member(byte me) {
    byte i = 0, in_flight = 0, rounds = 0, ticket = 1, voided = 0, m, o, ready, fed[N];
    bool calm, all, same;
    do
    :: i == OPS -> break
    :: i < OPS && in_flight == 0 && ticket != voided -> /* the fast path */
        is_idle(me);
        if
        :: calm -> is_quiet(me)
        :: else
        fi;
        if
        :: !calm -> announce(me, i); drive(me, 1 << i)
        :: else ->
            of_ticket[me * KEPT + ticket % KEPT] = ticket;
            record[me * KEPT + ticket % KEPT] = 1 + i;
            published[me] = ticket;
            do
            :: atomic {
                    all = true;
                    for (m : 0 .. N - 1) {
                        if
                        :: published[m] < ticket -> all = false
                        :: else
                        fi
                    }
                }
                if
                :: all -> break
                :: else
                fi;
                is_quiet(me);
                if
                :: calm -> /* sleeps; something has to change before it is worth to look again */
                    if
                    :: (N < 1 || published[0] >= ticket) && published[N - 1] >= ticket && published[N / 2] >= ticket
                    :: round != rounds || announced[0] != fed[0] || announced[N - 1] != fed[N - 1] || announced[N / 2] != fed[N / 2]
                    fi
                :: else -> /* the news may have come after all have published */
                    atomic {
                        all = true;
                        for (m : 0 .. N - 1) {
                            if
                            :: published[m] < ticket -> all = false
                            :: else
                            fi
                        }
                    }
                    break
                fi
            od;
            same = all;
            if
            :: all ->
                for (m : 0 .. N - 1) {
                    if
                    :: of_ticket[m * KEPT + ticket % KEPT] != ticket || record[m * KEPT + ticket % KEPT] != 1 + i -> same = false
                    :: else
                    fi
                }
            :: else
            fi;
            if
            :: same ->
                assert(way[i] != 2);
                way[i] = 1;
                ticket++
            :: else ->
                voided = ticket;
                announce(me, i);
                drive(me, 1 << i)
            fi
        fi;
        i++
    :: i < OPS -> announce(me, i); drive(me, 1 << i); i++ /* announced, and waited for */
    :: i < OPS -> announce(me, i); i++                    /* announced, and waited for at the end */
    od;
    drive(me, 255)
}

init {
    byte m;
    atomic {
        for (m : 0 .. N - 1) {
            run member(m)
        }
    }
}
