/* What the transports do most often, without Python: copy in, wait, reduce, encode. Called through ctypes by
 * `native.py`, which says when; libc only, nothing of Python's. Everything here is also written in Python, and both give
 * the same bits (`sums.h`, `codes.h`, `lone.h`, `records.h`, `hosts.h`).
 * Built with -ffp-contract=off: a multiplication and an addition that became one would give other bits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sums.h"

#include "codes.h"

#define VERSION 8 /* native.py asks for the one that it was written for */

int hora_version(void) { return VERSION; }

void hora_reduce(int dtype, int k, const void *const *operands, void *out, size_t count, double prescale, int how,
                 double factor) {
    sum((enum dtype)dtype, k, operands, out, 0, count, prescale, (enum finish)how, factor);
}

/* Counters, as in futex.py: 64 bits with one writer; waiting looks a few times, then sleeps on the low half. */

static int64_t value_of(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static void wake(const int64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

/* Publish, and wake whoever waits for it, if a member sleeps: `sleeps` is member 0's word, the next one's `stride` bytes on. */
static void publish_to(int64_t *own, int64_t value, const int64_t *sleeps, int64_t stride, int num_members, int member) {
    __atomic_store_n(own, value, __ATOMIC_SEQ_CST);
    for (int m = 0; m < num_members; m++)
        if (m != member && value_of((const int64_t *)(const void *)((const char *)sleeps + m * stride))) {
            wake(own);
            return;
        }
}

static int look(const int64_t *word, int64_t target, int looks) {
    for (int i = 0; i < looks; i++) {
        if (value_of(word) >= target) return 1;
        CPU_RELAX();
    }
    return 0;
}

static void sleep_on(const int64_t *word, int64_t seen, long slice_ns) {
    struct timespec slice = {slice_ns / 1000000000, slice_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)(uint64_t)seen, &slice, NULL, 0);
}

/* How long to look before sleeping is learnt, by the rules of futex.py. `many`: how long where that has been worth while; more
 * where there are cores to spare.
 */
struct patience {
    int32_t looks, patience, tally, many;
};

enum { FEW_LOOKS = 30, MISSES = 3, LEAST_PATIENCE = 4, MOST_PATIENCE = 512 };
static const int64_t SOON_NS_PER_LOOK = 160; /* what is over sooner than in so many times the looks might have been seen */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void begin_patience(struct patience *it) {
    if (!it->looks) it->looks = FEW_LOOKS, it->patience = LEAST_PATIENCE;
}

static void learn(struct patience *it, int64_t slept_ns) {
    if (it->looks == it->many) {
        if (++it->tally >= MISSES) {
            it->looks = FEW_LOOKS, it->tally = 0;
            it->patience = it->patience * 2 < MOST_PATIENCE ? it->patience * 2 : MOST_PATIENCE;
        }
    } else if (slept_ns >= it->many * SOON_NS_PER_LOOK) {
        it->tally = 0;
    } else if (++it->tally >= it->patience) {
        it->looks = it->many, it->tally = 0;
    }
}

/* Whether the value is `target`; if not, a slice has passed. `sleeps` says meanwhile that its owner has to be woken; NULL: the
 * others wake whoever may be there.
 */
static int patiently(const int64_t *word, int64_t target, struct patience *it, long slice_ns, int64_t *sleeps) {
    if (look(word, target, it->looks)) {
        if (it->looks == it->many) it->tally = 0;
        return 1;
    }
    int64_t seen, begin = now_ns(), end = begin;
    if (sleeps) __atomic_store_n(sleeps, 1, __ATOMIC_SEQ_CST); /* either it sees the value, or is seen to sleep */
    while ((seen = value_of(word)) < target && end - begin < slice_ns) {
        sleep_on(word, seen, slice_ns);
        end = now_ns();
    }
    if (sleeps) __atomic_store_n(sleeps, 0, __ATOMIC_SEQ_CST);
    learn(it, end - begin);
    return seen >= target;
}

/* An allreduce through the slots of a ring (ring.py has the rules: steps, depth, how far ahead a member may be).
 * Several tensors are one row of elements; a piece of the row goes through a slot at a time. `direct`: each member reduces
 * all slots into its own output. Else member m reduces slice m into a common result, which all copy out `lag` steps later.
 */
struct ring {
    char *slots, *results; /* of member 0 for step 0; the common results */
    int64_t *counters; /* of member 0; the next member's is `member_bytes` further on */
    int64_t member_bytes, slot_bytes;
    int32_t member, num_members, depth, ahead;
    struct patience patience;
};

struct job {
    struct ring *ring;
    const void *const *inputs; /* of each tensor */
    void *const *outputs;
    const int64_t *counts; /* elements of each tensor */
    int64_t total, first_step, lag;
    int64_t filled, drained; /* how many steps so far: a job that was interrupted goes on from here */
    int32_t dtype, finish, direct, late; /* `late`: the member that was last waited for in vain */
    double stage, prescale, factor; /* `stage`: times this, on the way into a slot */
    int64_t put_part, put_offset, take_part, take_offset; /* how far into the tensors both ends are */
};

static char *slot(const struct ring *ring, int member, int64_t step) {
    return ring->slots + ((int64_t)member * ring->depth + step % ring->depth) * ring->slot_bytes;
}

static int64_t *counter_of(const struct ring *ring, int member) {
    return (int64_t *)(void *)((char *)ring->counters + member * ring->member_bytes);
}

enum { RING_SLEEPS_AT = 120 };

static int64_t *ring_sleeps(const struct ring *ring, int member) {
    return counter_of(ring, member) + RING_SLEEPS_AT / 8;
}

static void publish_step(const struct ring *ring, int64_t step) {
    publish_to(counter_of(ring, ring->member), step, ring_sleeps(ring, 0), ring->member_bytes, ring->num_members,
               ring->member);
}

/* Whether all members have published the step; if not, a slice of time has passed in vain. */
static int all_have(struct ring *ring, int64_t step, int32_t *late, long slice_ns) {
    int64_t *own_sleep = ring_sleeps(ring, ring->member);
    begin_patience(&ring->patience);
    for (int distance = 1; distance < ring->num_members; distance++) {
        int peer = (ring->member + distance) % ring->num_members;
        const int64_t *word = counter_of(ring, peer);
        *late = peer;
        if (value_of(word) < step && !patiently(word, step, &ring->patience, slice_ns, own_sleep)) return 0;
    }
    return 1;
}

static int64_t piece(const struct job *job, int64_t index) {
    int64_t most = job->ring->slot_bytes / (int64_t)item_bytes[job->dtype], left = job->total - index * most;
    return left < most ? left : most;
}

static void put(struct job *job, char *to, int64_t count) {
    int64_t size = (int64_t)item_bytes[job->dtype];
    while (count) {
        int64_t n = job->counts[job->put_part] - job->put_offset;
        if (n > count) n = count;
        stage((enum dtype)job->dtype, (const char *)job->inputs[job->put_part] + job->put_offset * size, to, (size_t)n,
              job->stage);
        to += n * size;
        count -= n;
        job->put_offset += n;
        if (job->put_offset == job->counts[job->put_part]) job->put_part++, job->put_offset = 0;
    }
}

/* Bring what all members have in their slots, or what is in the common result, to the outputs. */
static void take(struct job *job, int64_t step, int64_t count) {
    const struct ring *ring = job->ring;
    int64_t size = (int64_t)item_bytes[job->dtype], done = 0;
    const void *operands[ring->num_members];
    while (done < count) {
        int64_t n = job->counts[job->take_part] - job->take_offset;
        if (n > count - done) n = count - done;
        char *out = (char *)job->outputs[job->take_part] + job->take_offset * size;
        if (job->direct) {
            for (int m = 0; m < ring->num_members; m++) operands[m] = slot(ring, m, step) + done * size;
            sum_with_own((enum dtype)job->dtype, ring->num_members, operands, ring->member,
                         (const char *)job->inputs[job->take_part] + job->take_offset * size, out, (size_t)n, job->stage,
                         job->prescale, (enum finish)job->finish, job->factor);
        } else {
            memcpy(out, ring->results + step % ring->depth * ring->slot_bytes + done * size, (size_t)(n * size));
        }
        done += n;
        job->take_offset += n;
        if (job->take_offset == job->counts[job->take_part]) job->take_part++, job->take_offset = 0;
    }
}

/* As `shared_slice` of reduction.py: two members never write to one cache line. */
static void own_slice(const struct ring *ring, int64_t count, int64_t *begin, int64_t *end) {
    int64_t share = ((count + ring->num_members - 1) / ring->num_members + 63) / 64 * 64;
    *begin = ring->member * share, *end = *begin + share;
    if (*begin > count) *begin = count;
    if (*end > count) *end = count;
}

static void reduce_own_slice(struct job *job, int64_t step, int64_t count) {
    const struct ring *ring = job->ring;
    const void *operands[ring->num_members];
    int64_t begin, end;
    own_slice(ring, count, &begin, &end);
    for (int m = 0; m < ring->num_members; m++) operands[m] = slot(ring, m, step);
    sum((enum dtype)job->dtype, ring->num_members, operands, ring->results + step % ring->depth * ring->slot_bytes,
        (size_t)begin, (size_t)(end - begin), job->prescale, (enum finish)job->finish, job->factor);
}

/* Whether it is done; if not, a slice has passed in vain: look around and call again. */
int hora_allreduce(struct job *job, long slice_ns) {
    struct ring *ring = job->ring;
    int64_t most = ring->slot_bytes / (int64_t)item_bytes[job->dtype], pieces = (job->total + most - 1) / most;
    int64_t lag = job->direct ? 0 : job->lag, steps = pieces + lag;
    int64_t ahead = lag && pieces <= ring->ahead ? 0 : ring->ahead;
    for (; job->drained < steps; job->drained++) {
        for (; job->filled < steps && job->filled <= job->drained + ahead; job->filled++) {
            if (job->filled < pieces)
                put(job, slot(ring, ring->member, job->first_step + job->filled), piece(job, job->filled));
            publish_step(ring, job->first_step + job->filled);
        }
        int64_t step = job->first_step + job->drained;
        if (!all_have(ring, step, &job->late, slice_ns)) return 0;
        if (job->direct)
            take(job, step, piece(job, job->drained));
        else if (job->drained < pieces)
            reduce_own_slice(job, step, piece(job, job->drained));
        if (!job->direct && job->drained >= lag) take(job, step - lag, piece(job, job->drained - lag));
    }
    return 1;
}

/* Data that lies in memory which all members map, at `data[m]` of member m: member m reduces slice m where it is, into all
 * members' data; then all wait for one another, by a step of the ring.
 */
struct in_place {
    struct ring *ring;
    char *const *data;
    int64_t count, step;
    int32_t dtype, finish, reduced, late; /* `reduced`: the own slice is; a job that was interrupted goes on from here */
    double prescale, factor;
};

static void reduce_in_place(const struct in_place *job) {
    const struct ring *ring = job->ring;
    int64_t size = (int64_t)item_bytes[job->dtype], begin, end;
    own_slice(ring, job->count, &begin, &end);
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        sum((enum dtype)job->dtype, ring->num_members, (const void *const *)job->data, job->data[0], (size_t)at,
            (size_t)n, job->prescale, (enum finish)job->finish, job->factor);
        for (int m = 1; m < ring->num_members; m++)
            memcpy(job->data[m] + at * size, job->data[0] + at * size, (size_t)(n * size));
    }
}

/* Whether it is done; if not, a slice of time has passed in vain: look around and call again. */
int hora_in_place(struct in_place *job, long slice_ns) {
    struct ring *ring = job->ring;
    if (!job->reduced) {
        reduce_in_place(job);
        publish_step(ring, job->step);
        job->reduced = 1;
    }
    return all_have(ring, job->step, &job->late, slice_ns);
}

/* A meeting at a barrier (barrier.py has the rules). Each member has two lines: how often it came; how often it really came,
 * and whether it sleeps.
 */
struct meeting {
    char *members; /* all members' lines */
    int32_t member, num_members;
    struct patience patience;
};

enum { MEETING_BYTES = 128, SLEEPS_AT = 72 };
static const int64_t OPEN = INT64_MAX; /* how often a member came that has joined */

static int64_t *came(const struct meeting *meeting, int member) {
    return (int64_t *)(void *)(meeting->members + member * MEETING_BYTES);
}

static int64_t *sleeps(const struct meeting *meeting, int member) {
    return (int64_t *)(void *)(meeting->members + member * MEETING_BYTES + SLEEPS_AT);
}

static void come(const struct meeting *meeting, int64_t number) {
    int64_t *own = came(meeting, meeting->member);
    if (value_of(own) == number) return; /* called again, to go on waiting */
    publish_to(own, number, sleeps(meeting, 0), MEETING_BYTES, meeting->num_members, meeting->member);
}

/* 1 when all members have come this often, 2 when one of them has joined; 0: a member has not come, and a slice has passed. */
int hora_meet(struct meeting *meeting, int64_t number, long slice_ns) {
    int64_t *own_sleep = sleeps(meeting, meeting->member);
    int met = 1;
    come(meeting, number);
    begin_patience(&meeting->patience);
    for (int distance = 1; distance < meeting->num_members; distance++) {
        const int64_t *word = came(meeting, (meeting->member + distance) % meeting->num_members);
        if (!patiently(word, number, &meeting->patience, slice_ns, own_sleep)) return 0;
        if (value_of(word) == OPEN) met = 2;
    }
    return met;
}

#include "lone.h"

#include "records.h"

#include "hosts.h"
