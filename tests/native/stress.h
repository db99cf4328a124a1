/* Shared parts of the stress programs. They include native.c itself, for its structures.
 * Their own names begin with test_.
 */
#include "native.c"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { PAIR = 128 }; /* two cache lines */
static const long SLICE_NS = 20000000;

static void test_fail(const char *what, int member, int64_t operation) {
    fprintf(stderr, "member %d, operation %lld: %s\n", member, (long long)operation, what);
    abort();
}

static void *test_room(size_t num_bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, PAIR, num_bytes ? num_bytes : 1)) abort();
    memset(memory, 0, num_bytes);
    return memory;
}

/* Random numbers that depend only on their purpose (splitmix64). */
static uint64_t test_random_of(uint64_t what) {
    what += 0x9e3779b97f4a7c15u;
    what = (what ^ (what >> 30)) * 0xbf58476d1ce4e5b9u;
    what = (what ^ (what >> 27)) * 0x94d049bb133111ebu;
    return what ^ (what >> 31);
}

static void test_draw(void *to, enum dtype dtype, int64_t operation, int member, int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t bits = test_random_of((uint64_t)operation * 1000003u + (uint64_t)member * 4099u + (uint64_t)(begin + i));
        char *place = (char *)to + (size_t)i * item_bytes[dtype];
        float single = (float)((int64_t)(bits % 2000001) - 1000000) * 1e-3f;
        double twice = (double)((int64_t)(bits >> 8) % 1000003) * 1e-7;
        uint16_t half = (uint16_t)(bits & 0xbfff); /* below two, some subnormal; neither infinite nor NaN */
        if (dtype == F32) memcpy(place, &single, 4);
        else if (dtype == F64) memcpy(place, &twice, 8);
        else if (dtype == F16 || dtype == BF16) memcpy(place, &half, 2);
        else memcpy(place, &bits, item_bytes[dtype]);
    }
}

static void test_digest(uint64_t *digest, const void *data, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i++) *digest = (*digest ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
}
