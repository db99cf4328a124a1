/* Sums of members' numbers: the part of `native.c` that depends on dtypes and processors. Members are added in the order 0, 1,
 * 2, ..., half precision in float with one rounding: the same bits as `arithmetic.py`. Included by native.c alone.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define CPU_RELAX() _mm_pause()
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default"))) /* the loader chooses by processor */
#else
#define CPU_RELAX() __asm__ volatile("yield")
#define WIDEST /* NEON is part of every 64-bit ARM */
#endif

#define BLOCK 2048 /* elements that are summed at a time, so that they stay in the first-level cache */

enum dtype { F32, F64, F16, BF16, I8, I16, I32, I64 }; /* numbered as in native.py */
enum finish { NOTHING, MULTIPLY, DIVIDE };

static const size_t item_bytes[] = {4, 8, 2, 2, 1, 2, 4, 8};

/* The arithmetic of a sum: `prescale` for half precision only, and the factor by which the sum is finished. Integers have
 * neither.
 */
struct numbers {
    double prescale, factor;
    int32_t dtype, finish;
};

/* Return whether this processor converts 16-bit floats as torch does. */
int hora_has_f16(void) {
#if defined(__x86_64__)
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
#else
    return 1;
#endif
}

/* Sums. `out` may be one of the operands: element i is read before it is written, hence ivdep. */

/* Add seven, three or one more members in one pass, in registers: reading several at the same time hides the latency of other
 * cores' caches. The last pass writes `out`, which may be one of its inputs.
 */
#define NEXT(type, j) ((const type *)operands[m + (j)] + from + at)
#define EACH _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)

#define SUMMED(type, name)                                                                                             \
    WIDEST static void name(int k, const void *const *operands, void *to, size_t from, size_t count, enum finish how,  \
                            double factor) {                                                                           \
        type *out = (type *)to + from, by = (type)factor, sums[BLOCK];                                                 \
        for (size_t at = 0; at < count; at += BLOCK, out += BLOCK) {                                                   \
            size_t n = count - at < BLOCK ? count - at : BLOCK;                                                        \
            const type *s = (const type *)operands[0] + from + at;                                                     \
            int two = k == 2 && how != NOTHING; /* the usual case: finished in the same pass */                               \
            for (int m = 1, more; m < k; m += more) {                                                                  \
                more = k - m >= 7 ? 7 : k - m >= 3 ? 3 : 1;                                                            \
                type *next = m + more == k ? out : sums;                                                               \
                const type *a = NEXT(type, 0);                                                                         \
                if (more == 7) {                                                                                       \
                    const type *b = NEXT(type, 1), *c = NEXT(type, 2), *d = NEXT(type, 3), *e = NEXT(type, 4);         \
                    const type *f = NEXT(type, 5), *g = NEXT(type, 6);                                                 \
                    EACH next[i] = ((((((s[i] + a[i]) + b[i]) + c[i]) + d[i]) + e[i]) + f[i]) + g[i];                  \
                } else if (more == 3) {                                                                                \
                    const type *b = NEXT(type, 1), *c = NEXT(type, 2);                                                 \
                    EACH next[i] = ((s[i] + a[i]) + b[i]) + c[i];                                                      \
                } else if (two && how == MULTIPLY) {                                                                   \
                    EACH out[i] = (s[i] + a[i]) * by;                                                                  \
                } else if (two) {                                                                                      \
                    EACH out[i] = (s[i] + a[i]) / by;                                                                  \
                } else {                                                                                               \
                    EACH next[i] = s[i] + a[i];                                                                        \
                }                                                                                                      \
                s = next;                                                                                              \
            }                                                                                                          \
            if (two) continue;                                                                                         \
            if (how == MULTIPLY) {                                                                                     \
                EACH out[i] = s[i] * by;                                                                               \
            } else if (how == DIVIDE) {                                                                                \
                EACH out[i] = s[i] / by;                                                                               \
            } else if (s != out) {                                                                                     \
                memcpy(out, s, n * sizeof(type));                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }

SUMMED(float, sum_f32)
SUMMED(double, sum_f64)
SUMMED(uint8_t, sum_i8)
SUMMED(uint16_t, sum_i16)
SUMMED(uint32_t, sum_i32)
SUMMED(uint64_t, sum_i64)

/* Half precision: each operand is converted to float and multiplied by the prescale; the sum is rounded at the end. */

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

/* `weights`: of the operands, in place of the prescale; may be NULL. */
static void sum_halves(const struct numbers *what, const float *weights, int k, const void *const *operands, void *to,
                       size_t from, size_t count) {
    void (*widen)(const uint16_t *, float *, size_t) = what->dtype == F16 ? widen_f16 : widen_bf16;
    void (*to_half)(const float *, uint16_t *, size_t) = what->dtype == F16 ? round_f16 : round_bf16;
    float sums[BLOCK], next[BLOCK];
    for (size_t at = from; at < from + count; at += BLOCK) {
        size_t n = from + count - at < BLOCK ? from + count - at : BLOCK;
        for (int m = 0; m < k; m++) {
            float *wide = m ? next : sums;
            widen((const uint16_t *)operands[m] + at, wide, n);
            float by = weights ? weights[m] : (float)what->prescale;
            if (by != 1.0f) scale(wide, n, by);
            if (m) add(sums, next, n);
        }
        if (what->finish == MULTIPLY) scale(sums, n, (float)what->factor);
        if (what->finish == DIVIDE) divide(sums, n, (float)what->factor);
        to_half(sums, (uint16_t *)to + at, n);
    }
}

/* Numbers are multiplied by a factor, `stage`, on the way into a slot. Integers have none. */

#define SCALED(type, name)                                                                                             \
    WIDEST static void name(const type *in, type *out, size_t count, double factor) {                                  \
        type by = (type)factor;                                                                                        \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = in[i] * by;                                   \
    }

SCALED(float, scaled_f32)
SCALED(double, scaled_f64)

/* Sum two members, where the numbers `a` of one are not in a slot. Their order does not change the sum. */
#define PAIRED_STAGED(type, name)                                                                                      \
    WIDEST static void name(const type *a, const type *b, type *out, size_t count, double factor) {                    \
        type by = (type)factor;                                                                                        \
        _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) out[i] = a[i] * by + b[i];                             \
    }

PAIRED_STAGED(float, pair_staged_f32)
PAIRED_STAGED(double, pair_staged_f64)

static void stage(enum dtype dtype, const void *from, void *to, size_t count, double factor) {
    if (factor == 1.0)
        memcpy(to, from, count * item_bytes[dtype]);
    else if (dtype == F32)
        scaled_f32(from, to, count, factor);
    else if (dtype == F64)
        scaled_f64(from, to, count, factor);
    else
        sum_halves(&(struct numbers){factor, 1.0, dtype, NOTHING}, NULL, 1, &from, to, 0, count);
}

static void (*const summed[])(int, const void *const *, void *, size_t, size_t, enum finish, double) = {
    [F32] = sum_f32, [F64] = sum_f64, [I8] = sum_i8, [I16] = sum_i16, [I32] = sum_i32, [I64] = sum_i64};

/* Sum elements [from, from + count) of k operands. */
static void sum(const struct numbers *what, int k, const void *const *operands, void *out, size_t from, size_t count) {
    if (what->dtype == F16 || what->dtype == BF16)
        sum_halves(what, NULL, k, operands, out, from, count);
    else
        summed[what->dtype](k, operands, out, from, count, (enum finish)what->finish, what->factor);
}

/* Return whether `sum_with_own` reads this member's staged numbers from its source, not from the slot. */
static int sums_staged_source(const struct numbers *what, int k) {
    return k == 2 && what->finish == NOTHING && (what->dtype == F32 || what->dtype == F64);
}

/* Sum all members' slots; this member's slot holds a copy of `source`, times `stage`. A `source` that is overwritten must enter
 * the cache anyway, so it is read instead of the slot where possible.
 */
static void sum_with_own(const struct numbers *what, int k, const void **operands, int own, const void *source, void *out,
                         size_t count, double stage) {
    if (stage == 1.0) operands[own] = source;
    if (stage == 1.0 || !sums_staged_source(what, k))
        sum(what, k, operands, out, 0, count);
    else if (what->dtype == F32)
        pair_staged_f32(source, operands[1 - own], out, count, stage);
    else
        pair_staged_f64(source, operands[1 - own], out, count, stage);
}
