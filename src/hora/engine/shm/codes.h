/* Compression of numbers that are sent between hosts. Included by native.c alone, after sums.h. */

/* Numbers as bytes (Compression.int8): multiples of 1/127 of the largest number of their block, whose scale is sent with them. A
 * non-finite number makes its whole block NaN.
 */
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

/* Encode the numbers and replace them by the decoded values. With a `residual`, add it first; it then holds the rounding error.
 */
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
