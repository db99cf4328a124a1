/* What the transports do most often, without Python: copy in, wait, reduce, encode. Called through ctypes by
 * `native.py`, which says when; libc only, nothing of Python's. Everything here is also written in Python, and both give
 * the same bits: members are added in the order 0, 1, 2, ..., half precision in float, rounded once.
 * Built with -ffp-contract=off: a multiplication and an addition that became one would give other bits.
 */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define CPU_RELAX() _mm_pause()
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default"))) /* the loader takes what the processor has */
#else
#define CPU_RELAX() __asm__ volatile("yield")
#define WIDEST /* NEON is part of every 64-bit ARM */
#endif

#define VERSION 3 /* native.py asks for the one that it was written for */
#define BLOCK 2048 /* elements that are summed at a time: they stay in the first-level cache */

enum dtype { F32, F64, F16, BF16, I8, I16, I32, I64 }; /* the numbers are native.py's */
enum finish { NOTHING, MULTIPLY, DIVIDE };

static const size_t item_bytes[] = {4, 8, 2, 2, 1, 2, 4, 8};

int hora_version(void) { return VERSION; }

/* Whether 16-bit floats can be converted here as torch converts them. */
int hora_has_f16(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
#else
    return 1;
#endif
}

/* Sums. `out` may be one of the operands: element i is read before it is written, hence ivdep. */

#define SUMMED(type, name)                                                                                             \
    WIDEST static void name(int k, const void *const *operands, void *to, size_t from, size_t count, enum finish how, \
                            double factor) {                                                                          \
        const type *first = (const type *)operands[0] + from;                                                          \
        type *out = (type *)to + from, by = (type)factor, sums[BLOCK];                                                 \
        for (size_t at = 0; at < count; at += BLOCK) {                                                                 \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                                        \
            memcpy(sums, first + at, n * sizeof(type));                                                                \
            for (int m = 1; m < k; m++) {                                                                              \
                const type *next = (const type *)operands[m] + from + at;                                              \
                for (size_t i = 0; i < n; i++) sums[i] += next[i];                                                     \
            }                                                                                                          \
            if (how == MULTIPLY)                                                                                       \
                for (size_t i = 0; i < n; i++) sums[i] *= by;                                                          \
            else if (how == DIVIDE)                                                                                    \
                for (size_t i = 0; i < n; i++) sums[i] /= by;                                                          \
            memcpy(out + at, sums, n * sizeof(type));                                                                  \
        }                                                                                                              \
    }

SUMMED(float, sum_f32)
SUMMED(double, sum_f64)
SUMMED(uint8_t, sum_i8)
SUMMED(uint16_t, sum_i16)
SUMMED(uint32_t, sum_i32)
SUMMED(uint64_t, sum_i64)

/* Two members are the usual case, and need no room in between. */
#define PAIRED(type, name)                                                                                             \
    WIDEST static void name(const type *a, const type *b, type *out, size_t count, enum finish how, double factor) {  \
        type by = (type)factor;                                                                                        \
        if (how == MULTIPLY) {                                                                                         \
            _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = (a[i] + b[i]) * by;                       \
        } else if (how == DIVIDE) {                                                                                    \
            _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = (a[i] + b[i]) / by;                       \
        } else {                                                                                                       \
            _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = a[i] + b[i];                              \
        }                                                                                                              \
    }

PAIRED(float, pair_f32)
PAIRED(double, pair_f64)

/* Half precision: each operand becomes float, and is multiplied by the prescale; the sum is rounded at the end. */

WIDEST static void widen_bf16(const uint16_t *in, float *out, size_t count) {
    uint32_t *bits = (uint32_t *)(void *)out;
    for (size_t i = 0; i < count; i++) bits[i] = (uint32_t)in[i] << 16;
}

WIDEST static void round_bf16(const float *in, uint16_t *out, size_t count) {
    const uint32_t *bits = (const uint32_t *)(const void *)in;
    for (size_t i = 0; i < count; i++) {
        uint32_t rounded = (bits[i] + (((bits[i] >> 16) & 1) + 0x7fff)) >> 16;
        out[i] = (bits[i] & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (uint16_t)rounded;
    }
}

#if defined(__x86_64__)
__attribute__((target("avx,f16c"))) static void widen_f16(const uint16_t *in, float *out, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(in + i))));
    for (; i < count; i++) out[i] = _cvtsh_ss(in[i]);
}

__attribute__((target("avx,f16c"))) static void round_f16(const float *in, uint16_t *out, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    for (; i < count; i++) out[i] = _cvtss_sh(in[i], _MM_FROUND_TO_NEAREST_INT);
}
#else
static void widen_f16(const uint16_t *in, float *out, size_t count) {
    const __fp16 *half = (const __fp16 *)(const void *)in;
    for (size_t i = 0; i < count; i++) out[i] = half[i];
}

static void round_f16(const float *in, uint16_t *out, size_t count) {
    __fp16 *half = (__fp16 *)(void *)out;
    for (size_t i = 0; i < count; i++) half[i] = (__fp16)in[i];
}
#endif

WIDEST static void scale(float *numbers, size_t count, float by) {
    for (size_t i = 0; i < count; i++) numbers[i] *= by;
}

WIDEST static void add(float *sums, const float *next, size_t count) {
    for (size_t i = 0; i < count; i++) sums[i] += next[i];
}

WIDEST static void divide(float *numbers, size_t count, float by) {
    for (size_t i = 0; i < count; i++) numbers[i] /= by;
}

static void sum_halves(enum dtype dtype, int k, const void *const *operands, void *to, size_t from, size_t count,
                       double prescale, enum finish how, double factor) {
    void (*widen)(const uint16_t *, float *, size_t) = dtype == F16 ? widen_f16 : widen_bf16;
    void (*to_half)(const float *, uint16_t *, size_t) = dtype == F16 ? round_f16 : round_bf16;
    float sums[BLOCK], next[BLOCK];
    for (size_t at = from; at < from + count; at += BLOCK) {
        size_t n = from + count - at < BLOCK ? from + count - at : BLOCK;
        for (int m = 0; m < k; m++) {
            float *wide = m ? next : sums;
            widen((const uint16_t *)operands[m] + at, wide, n);
            if (prescale != 1.0) scale(wide, n, (float)prescale);
            if (m) add(sums, next, n);
        }
        if (how == MULTIPLY) scale(sums, n, (float)factor);
        if (how == DIVIDE) divide(sums, n, (float)factor);
        to_half(sums, (uint16_t *)to + at, n);
    }
}

/* Sum elements [from, from + count) of k operands. Integers have no factors. */
static void sum(enum dtype dtype, int k, const void *const *operands, void *out, size_t from, size_t count,
               double prescale, enum finish how, double factor) {
    switch (dtype) {
    case F32:
        if (k == 2)
            pair_f32((const float *)operands[0] + from, (const float *)operands[1] + from, (float *)out + from, count,
                     how, factor);
        else
            sum_f32(k, operands, out, from, count, how, factor);
        return;
    case F64:
        if (k == 2)
            pair_f64((const double *)operands[0] + from, (const double *)operands[1] + from, (double *)out + from,
                     count, how, factor);
        else
            sum_f64(k, operands, out, from, count, how, factor);
        return;
    case F16:
    case BF16: sum_halves(dtype, k, operands, out, from, count, prescale, how, factor); return;
    case I8: sum_i8(k, operands, out, from, count, NOTHING, 1); return;
    case I16: sum_i16(k, operands, out, from, count, NOTHING, 1); return;
    case I32: sum_i32(k, operands, out, from, count, NOTHING, 1); return;
    case I64: sum_i64(k, operands, out, from, count, NOTHING, 1); return;
    }
}

void hora_reduce(int dtype, int k, const void *const *operands, void *out, size_t count, double prescale, int how,
                 double factor) {
    sum((enum dtype)dtype, k, operands, out, 0, count, prescale, (enum finish)how, factor);
}

/* Numbers as bytes, as in codes.py: so many 127ths of the largest of their block, whose scale comes with them. What is not
 * finite makes its whole block NaN.
 */
enum { CODE_BLOCK = 256 };
static const float SMALLEST = 1.17549435e-38f;
static const float TO_WHOLE = 12582912.0f; /* 1.5 * 2^23: adding it leaves no room for a fraction, rounded to even */

WIDEST static uint32_t largest_bits(const float *numbers, size_t count) {
    const uint32_t *bits = (const uint32_t *)(const void *)numbers;
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t size = bits[i] & 0x7fffffff; /* floats without a sign are in the order of their bits, NaN above all */
        largest = size > largest ? size : largest;
    }
    return largest;
}

WIDEST static void to_steps(float *numbers, int8_t *steps, size_t count, float scale) {
    float by = scale > SMALLEST ? scale : SMALLEST;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        float step = (numbers[i] / by + TO_WHOLE) - TO_WHOLE;
        steps[i] = (int8_t)(int32_t)step;
        numbers[i] = step * scale;
    }
}

WIDEST static void from_steps(const int8_t *steps, float *numbers, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) numbers[i] = (float)steps[i] * scale;
}

WIDEST static void keep_loss(const float *wanted, const float *sent, float *residual, size_t count) {
    for (size_t i = 0; i < count; i++) residual[i] = wanted[i] - sent[i];
}

/* The numbers become what was encoded of them. With a `residual` they are added to it first, and it is what was lost. */
void hora_encode_int8(float *numbers, float *residual, float *scales, int8_t *steps, size_t count) {
    float wanted[CODE_BLOCK];
    for (size_t at = 0; at < count; at += CODE_BLOCK, numbers += CODE_BLOCK, steps += CODE_BLOCK) {
        size_t n = count - at < CODE_BLOCK ? count - at : CODE_BLOCK;
        if (residual) {
            add(numbers, residual + at, n);
            memcpy(wanted, numbers, n * sizeof(float));
        }
        uint32_t bits = largest_bits(numbers, n);
        int finite = bits < 0x7f800000;
        float largest;
        memcpy(&largest, &bits, sizeof bits);
        float scale = *scales++ = largest / 127.0f;
        if (finite) {
            to_steps(numbers, steps, n, scale);
            if (residual) keep_loss(wanted, numbers, residual + at, n);
        } else {
            memset(steps, 0, n);
            from_steps(steps, numbers, n, scale);
            if (residual) memset(residual + at, 0, n * sizeof(float));
        }
    }
}

void hora_decode_int8(const float *scales, const int8_t *steps, float *out, size_t count) {
    for (size_t at = 0; at < count; at += CODE_BLOCK)
        from_steps(steps + at, out + at, count - at < CODE_BLOCK ? count - at : CODE_BLOCK, *scales++);
}

/* Counters, as in futex.py: 64 bits with one writer; waiting looks a few times, then sleeps on the low half. */

static int64_t value_of(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static void wake(const int64_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

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

/* How long to look before sleeping is learnt, by the rules of futex.py. */
struct patience {
    int32_t looks, patience, tally;
};

enum { FEW_LOOKS = 30, MANY_LOOKS = 600, MISSES = 3, LEAST_PATIENCE = 4, MOST_PATIENCE = 512 };
static const int64_t SOON_NS = 100000;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

static void learn(struct patience *it, int64_t slept_ns) {
    if (it->looks == MANY_LOOKS) {
        if (++it->tally >= MISSES) {
            it->looks = FEW_LOOKS, it->tally = 0;
            it->patience = it->patience * 2 < MOST_PATIENCE ? it->patience * 2 : MOST_PATIENCE;
        }
    } else if (slept_ns >= SOON_NS) {
        it->tally = 0;
    } else if (++it->tally >= it->patience) {
        it->looks = MANY_LOOKS, it->tally = 0;
    }
}

/* Whether the value is `target`; if not, a slice has passed. */
static int patiently(const int64_t *word, int64_t target, struct patience *it, long slice_ns) {
    if (look(word, target, it->looks)) {
        if (it->looks == MANY_LOOKS) it->tally = 0;
        return 1;
    }
    int64_t seen, begin = now_ns(), end = begin;
    while ((seen = value_of(word)) < target && end - begin < slice_ns) {
        sleep_on(word, seen, slice_ns);
        end = now_ns();
    }
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
    double prescale, factor;
    int64_t put_part, put_offset, take_part, take_offset; /* how far into the tensors both ends are */
};

static char *slot(const struct ring *ring, int member, int64_t step) {
    return ring->slots + ((int64_t)member * ring->depth + step % ring->depth) * ring->slot_bytes;
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
        memcpy(to, (const char *)job->inputs[job->put_part] + job->put_offset * size, (size_t)(n * size));
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
            /* The own data has to come into the cache anyway, to be overwritten. */
            operands[ring->member] = (const char *)job->inputs[job->take_part] + job->take_offset * size;
            sum((enum dtype)job->dtype, ring->num_members, operands, out, 0, (size_t)n, job->prescale,
                (enum finish)job->finish, job->factor);
        } else {
            memcpy(out, ring->results + step % ring->depth * ring->slot_bytes + done * size, (size_t)(n * size));
        }
        done += n;
        job->take_offset += n;
        if (job->take_offset == job->counts[job->take_part]) job->take_part++, job->take_offset = 0;
    }
}

/* As `shared_slice` of reduction.py: two members never write to one cache line. */
static void reduce_own_slice(struct job *job, int64_t step, int64_t count) {
    const struct ring *ring = job->ring;
    const void *operands[ring->num_members];
    int64_t share = ((count + ring->num_members - 1) / ring->num_members + 63) / 64 * 64;
    int64_t begin = ring->member * share, end = begin + share;
    if (begin > count) begin = count;
    if (end > count) end = count;
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
    if (!ring->patience.looks) ring->patience = (struct patience){FEW_LOOKS, LEAST_PATIENCE, 0};
    char *own = (char *)ring->counters + ring->member * ring->member_bytes;
    for (; job->drained < steps; job->drained++) {
        for (; job->filled < steps && job->filled <= job->drained + ahead; job->filled++) {
            if (job->filled < pieces)
                put(job, slot(ring, ring->member, job->first_step + job->filled), piece(job, job->filled));
            __atomic_store_n((int64_t *)(void *)own, job->first_step + job->filled, __ATOMIC_SEQ_CST);
            wake((int64_t *)(void *)own);
        }
        int64_t step = job->first_step + job->drained;
        for (int distance = 1; distance < ring->num_members; distance++) {
            int peer = (ring->member + distance) % ring->num_members;
            const int64_t *word = (const int64_t *)(const void *)((char *)ring->counters + peer * ring->member_bytes);
            job->late = peer;
            if (value_of(word) < step && !patiently(word, step, &ring->patience, slice_ns)) return 0;
        }
        if (job->direct)
            take(job, step, piece(job, job->drained));
        else if (job->drained < pieces)
            reduce_own_slice(job, step, piece(job, job->drained));
        if (!job->direct && job->drained >= lag) take(job, step - lag, piece(job, job->drained - lag));
    }
    return 1;
}

/* A lone allreduce (agree/lone.py has the rules): stage, publish a record, look for the others' equal ones, reduce.
 * Each member has four lines: its ticket, whether it sleeps, and four records.
 */
enum { LINE = 64, LONE_BYTES = 4 * LINE, KEPT = 4 };

struct record {
    int64_t ticket;
    uint8_t digest[16];
    int64_t instance;
};

struct lone {
    struct ring *ring;
    char *members;
    struct record record;
    const void *source;
    void *out;
    int64_t count, step;
    int32_t dtype, finish, published, looks, late;
    double prescale, factor;
};

static struct record *record_of(const struct lone *lone, int member) {
    char *records = lone->members + member * LONE_BYTES + 2 * LINE;
    return (struct record *)(void *)records + lone->record.ticket % KEPT;
}

static int64_t *ticket_of(const struct lone *lone, int member) {
    return (int64_t *)(void *)(lone->members + member * LONE_BYTES);
}

static void publish(struct lone *lone) {
    struct ring *ring = lone->ring;
    memcpy(slot(ring, ring->member, lone->step), lone->source, (size_t)lone->count * item_bytes[lone->dtype]);
    *record_of(lone, ring->member) = lone->record;
    int64_t *own = ticket_of(lone, ring->member);
    __atomic_store_n(own, lone->record.ticket, __ATOMIC_SEQ_CST);
    for (int m = 0; m < ring->num_members; m++)
        if (m != ring->member && value_of(ticket_of(lone, m) + LINE / 8)) {
            wake(own);
            return;
        }
}

/* 1: done. 0: the member `late` has not come yet. -1: the members want different things. */
int hora_lone(struct lone *lone) {
    struct ring *ring = lone->ring;
    const void *operands[ring->num_members];
    if (!lone->published) publish(lone);
    lone->published = 1;
    for (int distance = 1; distance < ring->num_members; distance++) {
        int peer = (ring->member + distance) % ring->num_members;
        lone->late = peer;
        if (!look(ticket_of(lone, peer), lone->record.ticket, lone->looks)) return 0;
    }
    for (int m = 0; m < ring->num_members; m++) {
        if (memcmp(record_of(lone, m), &lone->record, sizeof(struct record))) return -1;
        operands[m] = slot(ring, m, lone->step);
    }
    operands[ring->member] = lone->source;
    sum((enum dtype)lone->dtype, ring->num_members, operands, lone->out, 0, (size_t)lone->count, lone->prescale,
        (enum finish)lone->finish, lone->factor);
    __atomic_store_n((int64_t *)(void *)((char *)ring->counters + ring->member * ring->member_bytes), lone->step,
                     __ATOMIC_SEQ_CST);
    return 1;
}
