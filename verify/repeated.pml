/* Repeated allreduces (src/hora/engine/repeated.py, src/hora/engine/shm/repeated.h) beside announced requests and rounds
 * (src/hora/engine/negotiation/shared_memory.py): N members have OPS requests, in the same order. For each request, each member takes the
 * fast path, announces and waits, or announces without waiting (the handle is waited for at the end).
 *
 *     idle:    no request known to this member waits for another member (BatchPlanner.idle)
 *     quiet:   there is no round that this member has not seen, and no announcement outside the rounds that it has seen
 *     publish: the record of the ticket, then the ticket
 *     agree:   all tickets are published and all records equal -> reduced; otherwise, or on news -> announced
 *
 *     sleep:   the member's sleep word names the member it waits for; check once more for its ticket and for news; then the
 *              kernel compares the word and sleeps atomically (sleep_unless_news)
 *     rouse:   clear the sleep words of members that wait for this member's ticket, or after an announcement of all sleepers, and
 *              wake them (rouse, hora_nudge)
 *
 * Checked by `make verify`: no request is reduced on the fast path by one member and in a round by another, no record is read
 * after it was overwritten, and no member sleeps for ever unless one has died, which may happen at any of the marked steps. The
 * slice after which a sleeper wakes by itself is omitted: the protocol must work without it. Member 0 cuts rounds; negotiation.pml
 * models how members wait for rounds.
 *
 * MUTANT, each of which must fail: 1 the last check precedes the writing of the word; 2 announcements rouse no sleeper; 3 only a
 * member's first news since its last round does; 4 the kernel does not compare; 5 no second check after news.
 *
 * Stands for these functions, whose digests tests/unit/test_verify.py compares:
 *     src/hora/engine/shm/repeated.h record_of 9b8f507318
 *     src/hora/engine/shm/repeated.h quiet 62a4fe0a6d
 *     src/hora/engine/shm/repeated.h rouse 87527700a6
 *     src/hora/engine/shm/repeated.h hora_nudge 1e0b4d6c68
 *     src/hora/engine/shm/repeated.h publish_record 284a24580d
 *     src/hora/engine/shm/repeated.h all_published a56eabdf7d
 *     src/hora/engine/shm/repeated.h sleep_unless_news 0557203f4d
 *     src/hora/engine/shm/repeated.h agree 85aa9cc299
 *     src/hora/engine/shm/repeated.h hora_repeated 2f225083a8
 *     src/hora/engine/shm/native.c wake b4fc767de6
 *     src/hora/engine/shm/native.c sleep_on 75c6b048f3
 *     src/hora/engine/repeated.py RepeatedCalls._settle 3433e65fb2
 *     src/hora/engine/repeated.py CallPlan.is_ready d128ca4e8a
 *     src/hora/engine/shm/repeated.h hora_begin b1e4d29c6f
 *     src/hora/engine/shm/repeated.h hora_settle a58e88a370
 *     src/hora/engine/shm/calls.c is_free 74c8ca453f
 *     src/hora/engine/shm/calls.c advance 763dfc6858
 *     src/hora/engine/shm/calls.c attempt 0dfcb65747
 */
#ifndef MUTANT
#define MUTANT 0
#endif
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
byte of_ticket[N * KEPT];  /* the ticket of the record */
byte announced[N];         /* requests, as bits */
byte round;                /* cut so far */
byte cut[N * (OPS + 1)];   /* the announcements by then, by member and round */
byte way[OPS];             /* 1: fast, 2: in a round */
byte asleep[N];            /* the sleep word: 1 + the member waited for */
bool in_futex[N];          /* sleeps in the kernel */
bool faults = true;        /* one member may die */
bool died;

inline may_die() {
    if
    :: faults -> atomic { faults = false; died = true; goto gone }
    :: true
    fi
}

inline rouse(me, what) {
    for (w : 0 .. N - 1) {
        if
        :: w != me && asleep[w] != 0 && (what == 0 || asleep[w] == what) ->
            asleep[w] = 0;
            may_die();
            in_futex[w] = false
        :: else
        fi
    }
}

inline is_idle(me) { /* private to the member, so one step */
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
    atomic {
        first_news = (announced[me] == fed[me]);
        announced[me] = announced[me] | (1 << op);
        in_flight = in_flight | (1 << op)
    }
    may_die();
    if
    :: MUTANT == 2 || (MUTANT == 3 && !first_news)
    :: else -> rouse(me, 0)
    fi
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
    :: (in_flight & (ops)) != 0 && me == 0 && rounds == round -> /* lead: wait until a request is ready, and cut a round */
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
            :: died -> goto gone
            fi
        fi
    :: (in_flight & (ops)) != 0 && died && rounds == round -> goto gone /* by the world's status */
    od
}

/* Wait until all members have published the ticket, or news makes waiting pointless (agree). */
inline wait_for_records(me) {
    late = (me + 1) % N;
    calm = true;
    do
    :: late == me -> break
    :: late != me && published[late] >= ticket -> late = (late + 1) % N
    :: late != me && published[late] < ticket -> /* sleep_unless_news */
        if
        :: MUTANT == 1 -> is_quiet(me); asleep[me] = 1 + late
        :: else -> asleep[me] = 1 + late; is_quiet(me)
        fi;
        if
        :: calm && (MUTANT == 1 || published[late] < ticket) ->
            atomic { /* FUTEX_WAIT: the kernel compares and sleeps atomically */
                if
                :: asleep[me] == 1 + late || MUTANT == 4 -> in_futex[me] = true
                :: else
                fi
            }
            if
            :: !in_futex[me]
            :: died -> in_futex[me] = false; goto gone
            fi
        :: else
        fi;
        asleep[me] = 0;
        if
        :: !calm -> break
        :: else
        fi
    od;
    atomic { /* the news may have arrived after all have published */
        all = (MUTANT != 5 || calm);
        for (m : 0 .. N - 1) {
            if
            :: published[m] < ticket -> all = false
            :: else
            fi
        }
    }
}

proctype member(byte me) {
    byte i = 0, in_flight = 0, rounds = 0, ticket = 1, voided = 0, m, o, w, late, ready, fed[N];
    bool calm, all, same, first_news;
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
            may_die();
            published[me] = ticket;
            may_die();
            rouse(me, 1 + me);
            wait_for_records(me);
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
    drive(me, 255);
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
