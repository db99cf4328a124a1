/* Compression of numbers that are sent between hosts. Included by native.c alone, after sums.h.
 *
 * Half precision, or bytes (Compression.int8): multiples of 1/127 of the largest number of their block. All blocks' scales come
 * first, then the bytes, filled up to a whole number of floats. A non-finite number makes its whole block NaN.
 */
enum code { PLAIN, CODE_F16, CODE_BF16, CODE_INT8 }; /* numbered as in native_hosts.py */
enum { CODE_BLOCK = 256 };
static const float SMALLEST = 1.17549435e-38f;
static const float TO_WHOLE = 12582912.0f; /* 1.5 * 2^23: adding it leaves no room for a fraction, rounded to even */

WIDEST static uint32_t largest_bits(const float *numbers, size_t count) {
    const uint32_t *bits = (const uint32_t *)(const void *)numbers;
    uint32_t largest = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t size = bits[i] & 0x7fffffff; /* the bits of unsigned floats sort like the floats, with NaN at the top */
        largest = size > largest ? size : largest;
    }
    return largest;
}

WIDEST static void to_steps(const float *wanted, float *numbers, int8_t *steps, size_t count, float scale) {
    float by = scale > SMALLEST ? scale : SMALLEST;
    _Pragma("GCC ivdep") for (size_t i = 0; i < count; i++) {
        float step = (wanted[i] / by + TO_WHOLE) - TO_WHOLE;
        steps[i] = (int8_t)(int32_t)step;
        numbers[i] = step * scale;
    }
}

WIDEST static void from_steps(const int8_t *steps, float *numbers, size_t count, float scale) {
    for (size_t i = 0; i < count; i++) numbers[i] = (float)steps[i] * scale;
}

WIDEST static void keep_loss(const float *sent, float *residual, size_t count) {
    for (size_t i = 0; i < count; i++) {
        float lost = residual[i] - sent[i];
        residual[i] = lost - lost == 0.0f ? lost : 0.0f; /* non-finite values are sent but kept out of the residual */
    }
}

static int64_t scales_bytes(int64_t count) { return (count + CODE_BLOCK - 1) / CODE_BLOCK * 4; }

/* Return the encoded bytes of this many floats. */
static int64_t coded_bytes(int code, int64_t count) {
    return code == CODE_INT8 ? scales_bytes(count) + (count + 3) / 4 * 4 : 2 * count;
}

/* Encode the numbers and replace them by the decoded values. With a `residual`, add it first; it then holds the rounding error.
 */
void hora_encode(int code, float *numbers, float *residual, char *out, int64_t count) {
    int8_t *steps = (int8_t *)out + scales_bytes(count);
    uint16_t *halves = (uint16_t *)(void *)out;
    if (code == CODE_INT8) memset(steps + count, 0, (size_t)((4 - count % 4) % 4));
    for (int64_t at = 0, block = code == CODE_INT8 ? CODE_BLOCK : BLOCK; at < count; at += block) {
        size_t n = (size_t)(count - at < block ? count - at : block);
        float *sent = numbers + at, *wanted = residual ? residual + at : sent;
        if (residual) add(wanted, sent, n);
        if (code == CODE_INT8) {
            uint32_t bits = largest_bits(wanted, n);
            float largest;
            memcpy(&largest, &bits, sizeof bits);
            float scale = ((float *)(void *)out)[at / CODE_BLOCK] = largest / 127.0f;
            if (bits < 0x7f800000)
                to_steps(wanted, sent, steps + at, n, scale);
            else
                memset(steps + at, 0, n), from_steps(steps + at, sent, n, scale);
        } else {
            (code == CODE_F16 ? round_f16 : round_bf16)(wanted, halves + at, n);
            (code == CODE_F16 ? widen_f16 : widen_bf16)(halves + at, sent, n);
        }
        if (residual) keep_loss(sent, wanted, n);
    }
}

void hora_decode(int code, const char *data, float *out, int64_t count) {
    const int8_t *steps = (const int8_t *)data + scales_bytes(count);
    const float *scales = (const float *)(const void *)data;
    if (code != CODE_INT8)
        (code == CODE_F16 ? widen_f16 : widen_bf16)((const uint16_t *)(const void *)data, out, (size_t)count);
    else
        for (int64_t at = 0; at < count; at += CODE_BLOCK)
            from_steps(steps + at, out + at, (size_t)(count - at < CODE_BLOCK ? count - at : CODE_BLOCK), *scales++);
}
