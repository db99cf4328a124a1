/* A stress test of the transport between hosts (hosts.h): threads as members of several hosts, sockets between slice leaders.
 * All members run the same random allreduces: staged or resident, plain or compressed, sealed or not, in one step or two.
 *
 *     hosts HOSTS OPERATIONS
 */
#include "stress.h"

enum { NUM_LOCAL = 3, NUM_LEADERS = 2, MAX_HOSTS = 4, WINDOW = 4, NUM_RESULTS = 2 * WINDOW + 3, SLICE = 256, MOST = 400, TENSORS = 3 };

static int num_hosts;
static int64_t num_operations;

/* A mock cipher for records: it hides little, but it detects changed, missing or repeated data. */
struct test_cipher {
    uint64_t tag, expected, key;
    int opens;
};

static int test_begin(void *it, const void *a, void *b, const unsigned char *c, const unsigned char *number, int d) {
    (void)a, (void)b, (void)c, (void)d;
    ((struct test_cipher *)it)->tag = 0xcbf29ce484222325u;
    test_digest(&((struct test_cipher *)it)->tag, number, 12);
    return 1;
}

static int test_update(void *it, unsigned char *out, int *n, const unsigned char *in, int count) {
    for (int i = 0; i < count; i++) out[i] = in[i] ^ 0x5a;
    test_digest(&((struct test_cipher *)it)->tag, ((struct test_cipher *)it)->opens ? out : in, (size_t)count);
    *n = count;
    return 1;
}

static int test_end(void *it, unsigned char *out, int *n) {
    struct test_cipher *cipher = it;
    (void)out;
    *n = 0;
    return !cipher->opens || cipher->tag == cipher->expected;
}

static int test_control(void *it, int what, int num_bytes, void *tag) {
    struct test_cipher *cipher = it;
    if (num_bytes != TAG_BYTES) return 0;
    if (what == GET_TAG) memset(tag, 0, TAG_BYTES), memcpy(tag, &cipher->tag, 8);
    else memcpy(&cipher->expected, tag, 8);
    return 1;
}

struct member {
    int host, number;
    int64_t first;
    uint64_t digest;
    struct hosts hosts;
    struct stream outgoing[MAX_HOSTS], incoming[MAX_HOSTS];
    struct records sealing[MAX_HOSTS], opening[MAX_HOSTS];
    struct test_cipher ciphers[2 * MAX_HOSTS];
    int out_sockets[MAX_HOSTS], in_sockets[MAX_HOSTS];
    char headers[MAX_HOSTS * HEADER_BYTES];
};

static struct member members[MAX_HOSTS][NUM_LOCAL];
static char *places[MAX_HOSTS][NUM_LOCAL]; /* resident data */
static pthread_barrier_t everybody;

struct operation {
    enum dtype dtype;
    enum finish finish;
    int num_tensors, resident, code, two_steps, sealed, residual;
    int64_t starts[TENSORS + 1], most;
    double stage, factor;
};

static struct operation test_operation(int64_t number) {
    uint64_t r = test_random_of((uint64_t)number * 91u + 7u);
    struct operation it = {.dtype = (enum dtype)(r % 8), .stage = 1.0, .factor = 1.0};
    if (it.dtype == F16 && !hora_has_f16()) it.dtype = BF16;
    it.resident = (r >> 8) % 4 == 0, it.two_steps = num_hosts > 2 && (r >> 10) % 2, it.sealed = (r >> 11) % 2;
    it.num_tensors = it.resident ? 1 : 1 + (int)((r >> 12) % TENSORS);
    for (int t = 0; t < it.num_tensors; t++)
        it.starts[t + 1] = it.starts[t] + 1 + (int64_t)(test_random_of(r + (uint64_t)t) % MOST);
    it.most = 1 + (int64_t)((r >> 16) % (SLICE / item_bytes[it.dtype]));
    if (it.dtype == F32 || it.dtype == F64) {
        it.finish = (enum finish)((r >> 24) % 3), it.stage = (r >> 26) % 2 ? 0.3 : 1.0;
        it.factor = it.finish == NOTHING ? 1.0 : 3.0;
    }
    if (it.dtype == F32 && (r >> 27) % 2) {
        it.code = 1 + (int)((r >> 28) % 3), it.finish = NOTHING, it.factor = 1.0, it.residual = (r >> 30) % 2;
        if (it.code == CODE_F16 && !hora_has_f16()) it.code = CODE_BF16;
    }
    return it;
}

/* Members of a host are added in order, then the hosts. Compressed and half-precision results are compared by digest. */
#define EXPECTED(type, name)                                                                                           \
    static int name(const struct operation *it, int64_t number, int64_t at, const void *found, int64_t count) {        \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            type mine[1], whole = 0;                                                                                   \
            for (int h = 0; h < num_hosts; h++) {                                                                      \
                type sum = 0;                                                                                          \
                for (int m = 0; m < NUM_LOCAL; m++) {                                                                  \
                    test_draw(mine, it->dtype, number, h * NUM_LOCAL + m, at + i, 1);                                  \
                    type staged = it->stage == 1.0 ? mine[0] : (type)(mine[0] * (type)it->stage);                      \
                    sum = m ? (type)(sum + staged) : staged;                                                           \
                }                                                                                                      \
                whole = h ? (type)(whole + sum) : sum;                                                                 \
            }                                                                                                          \
            if (it->finish == MULTIPLY) whole = (type)(whole * (type)it->factor);                                      \
            if (it->finish == DIVIDE) whole = (type)(whole / (type)it->factor);                                        \
            if (memcmp(&whole, (const type *)found + i, sizeof whole)) return 0;                                       \
        }                                                                                                              \
        return 1;                                                                                                      \
    }
EXPECTED(float, right_f32)
EXPECTED(double, right_f64)
EXPECTED(uint8_t, right_i8)
EXPECTED(uint16_t, right_i16)
EXPECTED(uint32_t, right_i32)
EXPECTED(uint64_t, right_i64)

static void test_check(struct member *member, const struct operation *it, int64_t number, int64_t at, const void *found,
                       int64_t count) {
    static int (*const right[])(const struct operation *, int64_t, int64_t, const void *, int64_t) = {
        [F32] = right_f32, [F64] = right_f64, [I8] = right_i8, [I16] = right_i16, [I32] = right_i32, [I64] = right_i64};
    if (it->dtype != F16 && it->dtype != BF16 && !it->code && !right[it->dtype](it, number, at, found, count))
        test_fail("a sum is wrong", member->host * NUM_LOCAL + member->number, number);
    test_digest(&member->digest, found, (size_t)count * item_bytes[it->dtype]);
}

static struct hosts_job test_job(struct member *member, const struct operation *it) {
    struct numbers sum = {.prescale = 1.0, .factor = 1.0, .dtype = it->dtype, .finish = NOTHING};
    struct hosts_job job = {.hosts = &member->hosts, .row = {it->starts, it->num_tensors}, .most = it->most,
                            .inside = sum, .between = sum, .last = sum, .stage = it->stage, .resident = it->resident,
                            .code = it->code, .two_steps = it->two_steps, .window = WINDOW};
    job.between.finish = it->finish, job.between.factor = it->factor;
    for (int h = 0; h < num_hosts; h++) {
        member->outgoing[h] = (struct stream){.socket = member->out_sockets[h],
                                              .records = it->sealed ? &member->sealing[h] : NULL};
        member->incoming[h] = (struct stream){.socket = member->in_sockets[h],
                                              .records = it->sealed ? &member->opening[h] : NULL};
    }
    return job;
}

static void test_run(struct member *member, struct hosts_job *job, int64_t number) {
    int outcome;
    while (!(outcome = hora_between_hosts(job, SLICE_NS))) continue;
    if (outcome != COMPLETE) test_fail("the connection is broken", member->host * NUM_LOCAL + member->number, number);
}

static void test_staged(struct member *member, const struct operation *it, int64_t number) {
    size_t size = item_bytes[it->dtype];
    const char *inputs[TENSORS];
    char *outputs[TENSORS], *residuals[TENSORS];
    for (int t = 0; t < it->num_tensors; t++) {
        int64_t count = it->starts[t + 1] - it->starts[t];
        char *input = test_room((size_t)count * size);
        test_draw(input, it->dtype, number, member->host * NUM_LOCAL + member->number, it->starts[t], count);
        inputs[t] = input, outputs[t] = t % 2 ? input : test_room((size_t)count * size);
        residuals[t] = test_room((size_t)count * size);
    }
    struct hosts_job job = test_job(member, it);
    job.inputs = inputs, job.outputs = outputs, job.residuals = it->residual ? residuals : NULL;
    job.end = it->starts[it->num_tensors], job.first = member->first;
    job.num_pieces = (job.end + it->most * NUM_LEADERS - 1) / (it->most * NUM_LEADERS);
    test_run(member, &job, number);
    member->first += job.num_pieces;
    for (int t = 0; t < it->num_tensors; t++) {
        test_check(member, it, number, it->starts[t], outputs[t], it->starts[t + 1] - it->starts[t]);
        if (outputs[t] != inputs[t]) free(outputs[t]);
        free((void *)(uintptr_t)inputs[t]), free(residuals[t]);
    }
}

static void test_resident(struct member *member, const struct operation *it, int64_t number) {
    int64_t count = it->starts[1], half = count / NUM_LEADERS;
    test_draw(places[member->host][member->number], it->dtype, number, member->host * NUM_LOCAL + member->number, 0, count);
    pthread_barrier_wait(&everybody);
    if (member->hosts.outgoing) {
        struct hosts_job job = test_job(member, it);
        char *residual = test_room((size_t)count * item_bytes[it->dtype]);
        job.inputs = (const char *const *)(const void *)places[member->host];
        job.residuals = it->residual ? &residual : NULL;
        job.begin = member->number * half, job.end = member->number + 1 < NUM_LEADERS ? job.begin + half : count;
        job.num_pieces = (job.end - job.begin + it->most - 1) / it->most;
        job.check = number % 3 == 0 ? NONE : it->residual || it->stage != 1.0 ? AT_ONCE : ON_THE_WAY;
        memcpy(job.header, &number, sizeof number);
        if (job.num_pieces) test_run(member, &job, number);
        free(residual);
    }
    pthread_barrier_wait(&everybody);
    test_check(member, it, number, 0, places[member->host][member->number], count);
    pthread_barrier_wait(&everybody);
}

static void *test_work(void *which) {
    struct member *member = which;
    for (int64_t number = 0; number < num_operations; number++) {
        struct operation it = test_operation(number);
        (it.resident ? test_resident : test_staged)(member, &it, number);
    }
    return NULL;
}

static void test_connect(int from, int to, int leader) {
    int ends[2];
    struct timeval limit = {0, SLICE_NS / 1000};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) abort();
    setsockopt(ends[1], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    members[from][leader].out_sockets[to] = ends[0], members[to][leader].in_sockets[from] = ends[1];
}

static struct records test_records(struct test_cipher *cipher, int opens) {
    cipher->opens = opens;
    return (struct records){.context = cipher, .begin = test_begin, .update = test_update, .end = test_end,
                            .control = test_control, .room = test_room(SLICE + 16 * MAX_HOSTS + TAG_BYTES)};
}

int main(int argc, char **argv) {
    if (argc != 3 || atoi(argv[1]) < 2 || atoi(argv[1]) > MAX_HOSTS) return fprintf(stderr, "hosts HOSTS OPERATIONS\n"), 2;
    num_hosts = atoi(argv[1]), num_operations = atoll(argv[2]);
    pthread_barrier_init(&everybody, NULL, (unsigned)(num_hosts * NUM_LOCAL));
    int64_t slice_room = (SLICE + num_hosts * 16 + PAIR - 1) / PAIR * PAIR, piece_room = NUM_LEADERS * slice_room;
    int64_t inputs_at = 2 * PAIR * NUM_LOCAL, results_at = inputs_at + NUM_LOCAL * NUM_INPUTS * piece_room;
    char *memories[MAX_HOSTS], *rooms[MAX_HOSTS][NUM_LOCAL] = {{NULL}};
    pthread_t threads[MAX_HOSTS][NUM_LOCAL];
    for (int h = 0; h < num_hosts; h++) {
        memories[h] = test_room((size_t)(results_at + NUM_RESULTS * piece_room));
        for (int m = 0; m < NUM_LOCAL; m++) {
            struct member *member = &members[h][m];
            *member = (struct member){.host = h, .number = m, .digest = 0xcbf29ce484222325u};
            member->hosts = (struct hosts){.memory = memories[h], .counter_bytes = PAIR, .inputs_at = inputs_at,
                                           .results_at = results_at, .slice_room = slice_room, .piece_room = piece_room,
                                           .member = m, .num_local = NUM_LOCAL, .num_leaders = NUM_LEADERS, .host = h,
                                           .num_hosts = num_hosts, .num_results = NUM_RESULTS, .num_rooms = NUM_RESULTS,
                                           .headers = member->headers, .patience = {.many = 600}};
            places[h][m] = test_room(MOST * 8);
            if (m >= NUM_LEADERS) continue;
            rooms[h][m] = test_room((size_t)((NUM_RINGS * NUM_RESULTS + 2 * num_hosts + 1) * slice_room));
            member->hosts.room = rooms[h][m];
            member->hosts.outgoing = member->outgoing, member->hosts.incoming = member->incoming;
            for (int other = 0; other < num_hosts; other++) {
                member->sealing[other] = test_records(&member->ciphers[2 * other], 0);
                member->opening[other] = test_records(&member->ciphers[2 * other + 1], 1);
            }
        }
    }
    for (int h = 0; h < num_hosts; h++)
        for (int other = 0; other < num_hosts; other++)
            for (int c = 0; c < NUM_LEADERS; c++)
                if (h != other) test_connect(h, other, c);
    for (int h = 0; h < num_hosts; h++)
        for (int m = 0; m < NUM_LOCAL; m++)
            if (pthread_create(&threads[h][m], NULL, test_work, &members[h][m])) abort();
    for (int h = 0; h < num_hosts; h++)
        for (int m = 0; m < NUM_LOCAL; m++) {
            pthread_join(threads[h][m], NULL);
            if (members[h][m].digest != members[0][0].digest)
                test_fail("the members have different results", h * NUM_LOCAL + m, num_operations);
        }
    printf("%d hosts, %lld operations: %016llx\n", num_hosts, (long long)num_operations,
           (unsigned long long)members[0][0].digest);
    for (int h = 0; h < num_hosts; h++) {
        free(memories[h]);
        for (int m = 0; m < NUM_LOCAL; m++) {
            free(places[h][m]), free(rooms[h][m]);
            for (int other = 0; m < NUM_LEADERS && other < num_hosts; other++)
                free(members[h][m].sealing[other].room), free(members[h][m].opening[other].room);
        }
    }
    return 0;
}
