/* The fast path of one host, and sums and codes between hosts: copy in, wait, reduce, encode. `native.py` calls it through
 * ctypes; it uses libc and nothing of Python. Without it ranks use sockets and torch's arithmetic, with the same bits
 * (`sums.h`, `codes.h`, `repeated.h`, `messages.h`, `records.h`, `hosts.h`). Built with -ffp-contract=off: a fused
 * multiplication and addition would give other bits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "sums.h"

#include "codes.h"

#ifndef SOURCE_CHECKSUM
#define SOURCE_CHECKSUM 0 /* hatch_build.py sets it; native.py compares it with the sources beside the library */
#endif

unsigned hora_source_checksum(void) { return SOURCE_CHECKSUM; }

void hora_reduce(const struct numbers *what, int k, const void *const *operands, void *out, size_t count) {
    sum(what, k, operands, out, 0, count);
}

/* Counters (counters.py): 64 bits with one writer. A wait spins on the word for a while, then sleeps on its low half. */

static int64_t value_of(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static void wake(const int64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

static void sleep_on(const int64_t *word, int64_t seen, long slice_ns) {
    struct timespec slice = {slice_ns / 1000000000, slice_ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, (uint32_t)(uint64_t)seen, &slice, NULL, 0);
}

/* The number of spins before sleeping. Waking takes tens of microseconds, so spinning pays off if peers are in step and have
 * their own cores; otherwise it takes time from the late peer. So each waiter adapts: after `patience` short sleeps it spins
 * `many` times; after MISSES unsuccessful spins in a row it spins FEW_LOOKS times again, and doubles its patience. `many` is
 * larger if there are free cores.
 */
struct spin_policy {
    int32_t looks, patience, tally, many;
};

enum { FEW_LOOKS = 30, MISSES = 3, LEAST_PATIENCE = 4, MOST_PATIENCE = 512 };
static const int64_t SOON_NS_PER_LOOK = 160; /* a sleep shorter than this per spin could have been a spin */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void begin_spinning(struct spin_policy *it) {
    if (!it->looks) it->looks = FEW_LOOKS, it->patience = LEAST_PATIENCE;
}

/* Spin this many times; return whether the value has reached the target. */
static int look(struct spin_policy *it, const int64_t *word, int64_t target, int looks) {
    for (int i = 0; i < looks; i++) {
        if (value_of(word) >= target) {
            if (it->looks == it->many) it->tally = 0;
            return 1;
        }
        CPU_RELAX();
    }
    return 0;
}

static void learn(struct spin_policy *it, int64_t slept_ns) {
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

/* Return whether the value is `target`; if not, a slice of time has passed, or this thread was woken to recheck the status.
 * `sleeps` announces meanwhile that its owner must be woken; NULL: the others always wake.
 */
static int patiently(const int64_t *word, int64_t target, struct spin_policy *it, long slice_ns, int64_t *sleeps) {
    if (look(it, word, target, it->looks)) return 1;
    int64_t before, seen, begin = now_ns(), end = begin;
    if (sleeps) __atomic_store_n(sleeps, 1, __ATOMIC_SEQ_CST); /* either it sees the value, or the writer sees that it sleeps */
    do {
        if ((before = value_of(word)) < target) sleep_on(word, before, slice_ns);
        seen = value_of(word);
        end = now_ns();
    } while (seen < target && seen != before && end - begin < slice_ns);
    if (sleeps) __atomic_store_n(sleeps, 0, __ATOMIC_SEQ_CST);
    learn(it, end - begin);
    return seen >= target;
}

/* The members of a group. Each has a counter that only it advances, at `words` + m * `stride`, and beside it a word that says
 * whether the member sleeps. All waits among the members of a host use it.
 */
struct group {
    char *words;
    int64_t stride;
    int32_t member, num_members;
    struct spin_policy patience;
};

enum { SLEEPS_AT = 120 };
static const int64_t OPEN = INT64_MAX; /* the counter of a member that has joined */

static int64_t *counter_of(const struct group *group, int member) {
    return (int64_t *)(void *)(group->words + member * group->stride);
}

static int64_t *sleeps(const struct group *group, int member) { return counter_of(group, member) + SLEEPS_AT / 8; }

/* Publish the value, and wake its waiters if a member sleeps. */
void hora_publish(const struct group *group, int64_t value) {
    int64_t *own = counter_of(group, group->member);
    __atomic_store_n(own, value, __ATOMIC_SEQ_CST);
    for (int m = 0; m < group->num_members; m++)
        if (m != group->member && value_of(sleeps(group, m))) {
            wake(own);
            return;
        }
}

/* Return whether all members have published the value; 0 after a slice of time, 2 if one of them has joined. */
int hora_wait(struct group *group, int64_t value, int32_t *late, long slice_ns) {
    int64_t *own_sleep = sleeps(group, group->member);
    int found = 1;
    begin_spinning(&group->patience);
    for (int distance = 1; distance < group->num_members; distance++) {
        int peer = (group->member + distance) % group->num_members;
        const int64_t *word = counter_of(group, peer);
        *late = peer;
        if (value_of(word) < value && !patiently(word, value, &group->patience, slice_ns, own_sleep)) return 0;
        if (value_of(word) == OPEN) found = 2;
    }
    return found;
}

void hora_wake(const int64_t *word) { wake(word); }

void hora_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* Wait for one word, see `patiently`. */
int hora_wait_for(const int64_t *word, int64_t target, struct spin_policy *policy, long slice_ns) {
    begin_spinning(policy);
    return patiently(word, target, policy, slice_ns, NULL);
}

/* Publish the value, unless an earlier call did, and wait for the others. */
int hora_meet(struct group *group, int64_t value, int32_t *late, long slice_ns) {
    if (value_of(counter_of(group, group->member)) != value) hora_publish(group, value);
    return hora_wait(group, value, late, slice_ns);
}

/* A collective through the slots of a ring (transport/shm.py defines steps, depth, and the lead that a member may have). The
 * tensors of an allreduce form one row of elements, and one piece of the row at a time goes through a slot. `direct`: each
 * member reduces all slots into its own output. Otherwise member m reduces slice m into a common result, which all members copy
 * out `lag` steps later. The other collectives have one tensor and are direct. A reduce-scatter has `total` elements for each
 * member, in a slot that is `divided` among them. A job with parts only moves bytes: member m gets `sent[m]` in a divided slot,
 * or all members get `sent` of this member, and member m sends `received[m]`.
 */
enum { LINE = 64 };

struct row { /* tensors as a row of elements */
    const int64_t *starts; /* elements before each tensor, and the total at the end */
    int64_t num_tensors;
};

struct span { int64_t begin, count; }; /* elements; none: count <= 0 */

struct part { /* of the tensor: bytes */
    int64_t at, num_bytes;
};

struct ring {
    char *slots, *results; /* member 0's slot for step 0; the common results */
    int64_t slot_bytes;
    int32_t depth, ahead;
    struct group group;
};

struct job {
    struct ring *ring;
    const void *const *inputs; /* of each tensor */
    void *const *outputs;
    struct row row;
    const struct part *sent, *received; /* per member; NULL for a reduction */
    int64_t total, first_step, lag;
    int64_t filled, drained; /* steps done so far: an interrupted job continues from here */
    struct numbers what;
    double stage; /* factor applied on the way into a slot */
    int32_t direct, divided, late; /* `late`: the member that the last wait missed */
};

static char *slot(const struct ring *ring, int member, int64_t step) {
    return ring->slots + ((int64_t)member * ring->depth + step % ring->depth) * ring->slot_bytes;
}

static int64_t share_bytes(const struct job *job) {
    const struct ring *ring = job->ring;
    return job->divided ? ring->slot_bytes / ring->group.num_members / LINE * LINE : ring->slot_bytes;
}

/* Return the number of elements of every piece but the last. */
static int64_t most(const struct job *job) { return share_bytes(job) / (int64_t)item_bytes[job->what.dtype]; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t piece(const struct job *job, int64_t index) { return least(most(job), job->total - index * most(job)); }

/* Return the tensor that contains this element. */
static int64_t tensor_at(const struct row *row, int64_t element) {
    int64_t low = 0, high = row->num_tensors;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (row->starts[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Copy elements of the tensors to memory, times `factor`, or back. */
static void copy_elements(const struct row *row, enum dtype dtype, const void *tensors, struct span span, char *memory, int out,
                          double factor) {
    int64_t size = (int64_t)item_bytes[dtype], end = span.begin + span.count;
    char *const *data = tensors;
    for (int64_t at = span.begin, stop, tensor = tensor_at(row, at); at < end; tensor++, at = stop) {
        char *place = data[tensor] + (at - row->starts[tensor]) * size;
        stop = least(row->starts[tensor + 1], end);
        if (out)
            memcpy(place, memory, (size_t)((stop - at) * size));
        else
            stage(dtype, place, memory, (size_t)(stop - at), factor);
        memory += (stop - at) * size;
    }
}

/* Copy the reduction of all members' slots, or the common result, to the outputs. */
static void take(struct job *job, int64_t index) {
    const struct ring *ring = job->ring;
    int64_t step = job->first_step + index, begin = index * most(job), end = begin + piece(job, index);
    int64_t size = (int64_t)item_bytes[job->what.dtype];
    if (!job->direct) {
        char *result = ring->results + step % ring->depth * ring->slot_bytes;
        copy_elements(&job->row, (enum dtype)job->what.dtype, job->outputs, (struct span){begin, end - begin}, result, 1, 1.0);
        return;
    }
    const void *operands[ring->group.num_members];
    for (int64_t at = begin, stop, tensor = tensor_at(&job->row, at); at < end; tensor++, at = stop) {
        int64_t offset = (at - job->row.starts[tensor]) * size;
        stop = least(job->row.starts[tensor + 1], end);
        for (int m = 0; m < ring->group.num_members; m++) operands[m] = slot(ring, m, step) + (at - begin) * size;
        sum_with_own(&job->what, ring->group.num_members, operands, ring->group.member,
                     (const char *)job->inputs[tensor] + offset, (char *)job->outputs[tensor] + offset, (size_t)(stop - at),
                     job->stage);
    }
}

static char *input_at(const struct job *job, int64_t byte) { return (char *)((uintptr_t)job->inputs[0] + (uintptr_t)byte); }

/* Return the number of bytes in a piece of a part. */
static size_t piece_bytes(const struct job *job, const struct part *part, int64_t index) {
    int64_t full = share_bytes(job), left = part->num_bytes - index * full;
    return (size_t)(left < 0 ? 0 : left < full ? left : full);
}

/* Copy the part of a piece that others read into this member's slot. */
static void fill_slot(struct job *job, int64_t index) {
    const struct ring *ring = job->ring;
    int own = ring->group.member, num_members = ring->group.num_members;
    int64_t count = piece(job, index), size = (int64_t)item_bytes[job->what.dtype], share = share_bytes(job);
    char *to = slot(ring, own, job->first_step + index);
    if (!job->sent && !job->divided) {
        copy_elements(&job->row, (enum dtype)job->what.dtype, job->inputs, (struct span){index * most(job), count}, to, 0,
                      job->stage);
        return;
    }
    int staged = job->stage != 1.0 && !sums_staged_source(&job->what, num_members); /* a reduce-scatter reads its own slot */
    for (int m = 0; m < num_members; m++) {
        if (job->sent && (m == own) != job->divided)
            memcpy(to + (job->divided ? m * share : 0), input_at(job, job->sent[m].at + index * share),
                   piece_bytes(job, &job->sent[m], index));
        if (!job->sent && (m != own || staged))
            stage((enum dtype)job->what.dtype, input_at(job, (m * job->total + index * most(job)) * size), to + m * share,
                  (size_t)count, job->stage);
    }
}

/* Copy a piece from all members' slots to the output. */
static void empty_slots(struct job *job, int64_t index) {
    const struct ring *ring = job->ring;
    int own = ring->group.member, num_members = ring->group.num_members;
    int64_t step = job->first_step + index, share = share_bytes(job), size = (int64_t)item_bytes[job->what.dtype];
    const void *from[num_members];
    for (int m = 0; m < num_members; m++) from[m] = slot(ring, m, step) + (job->divided ? own * share : 0);
    if (job->sent) {
        from[own] = input_at(job, job->sent[own].at + index * share);
        for (int m = 0; m < num_members; m++) {
            void *out = (void *)((uintptr_t)job->outputs[0] + (uintptr_t)(job->received[m].at + index * share));
            if (from[m] != out) memcpy(out, from[m], piece_bytes(job, &job->received[m], index));
        }
    } else if (job->divided) {
        int64_t at = index * most(job) * size;
        sum_with_own(&job->what, num_members, from, own, input_at(job, own * job->total * size + at),
                     (char *)job->outputs[0] + at, (size_t)piece(job, index), job->stage);
    } else {
        take(job, index);
    }
}

/* Like `shared_slice` in reduction.py: two members never write to one cache line. */
static void own_slice(const struct ring *ring, int64_t count, int64_t *begin, int64_t *end) {
    int64_t share = ((count + ring->group.num_members - 1) / ring->group.num_members + 63) / 64 * 64;
    *begin = least(count, ring->group.member * share), *end = least(count, *begin + share);
}

static void reduce_own_slice(struct job *job, int64_t step, int64_t count) {
    const struct ring *ring = job->ring;
    const void *operands[ring->group.num_members];
    int64_t begin, end;
    own_slice(ring, count, &begin, &end);
    for (int m = 0; m < ring->group.num_members; m++) operands[m] = slot(ring, m, step);
    sum(&job->what, ring->group.num_members, operands, ring->results + step % ring->depth * ring->slot_bytes, (size_t)begin,
        (size_t)(end - begin));
}

/* Return whether the job is done; 0 after a slice of time: recheck the status and call again. */
int hora_collective(struct job *job, long slice_ns) {
    struct ring *ring = job->ring;
    int64_t pieces = (job->total + most(job) - 1) / most(job);
    int64_t lag = job->direct ? 0 : job->lag, steps = pieces + lag;
    int64_t ahead = lag && pieces <= ring->ahead ? 0 : ring->ahead;
    for (; job->drained < steps; job->drained++) {
        for (; job->filled < steps && job->filled <= job->drained + ahead; job->filled++) {
            if (job->filled < pieces) fill_slot(job, job->filled);
            hora_publish(&ring->group, job->first_step + job->filled);
        }
        int64_t step = job->first_step + job->drained;
        if (!hora_wait(&ring->group, step, &job->late, slice_ns)) return 0;
        if (job->direct)
            empty_slots(job, job->drained);
        else if (job->drained < pieces)
            reduce_own_slice(job, step, piece(job, job->drained));
        if (!job->direct && job->drained >= lag) take(job, job->drained - lag);
    }
    return 1;
}

/* Sum the data at `data[m]` of every member m, from element `begin` on, into all of them. */
void hora_reduce_everywhere(const struct numbers *what, int k, char *const *data, int64_t begin, int64_t count) {
    int64_t size = (int64_t)item_bytes[what->dtype], end = begin + count;
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        sum(what, k, (const void *const *)data, data[0], (size_t)at, (size_t)n);
        for (int m = 1; m < k; m++) memcpy(data[m] + at * size, data[0] + at * size, (size_t)(n * size));
    }
}

#include "repeated.h"

#include "messages.h"

#include "records.h"

#include "hosts.h"
