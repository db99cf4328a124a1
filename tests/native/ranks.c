/* A stress test of the native part: threads as ranks, memory of exactly the required size, for sanitizers and other
 * processors (`sanitize.sh`). Every member runs the same random operations; each result is compared with a sum computed
 * here, and enters a digest, which must be the same on every member and on every kind of machine.
 *
 *     ranks MEMBERS OPERATIONS
 */
#include "stress.h"

#include <sched.h>

enum { SLOT_BYTES = 512, AHEAD = 1, DEPTH = 2 * AHEAD + 2, LAG = AHEAD + 1, MOST = 300, MAX_PARTS = 3, TICKET_BYTES = 256 };

static int num_members;
static int64_t num_operations;

/* Memory shared by the members, each piece from malloc, so that an overrun is detected. */
static char *counters, *slots, *results, *schedule, *tickets, *heads, **places, *pipe_bytes;
static int64_t *pipe_words, *bells;
static int64_t round_cut;

struct member {
    int number;
    int64_t step, item;
    uint64_t digest;
    int64_t *fed;
    struct ring ring;
    struct group schedule;
    struct repeated repeated;
    struct spin_policy patience; /* with messages */
};

struct operation {
    enum dtype dtype;
    enum finish finish;
    int num_parts, direct;
    int64_t counts[MAX_PARTS], starts[MAX_PARTS + 1], total;
    double stage, prescale, factor;
};

static struct operation test_operation_of(int64_t number, int one_slot) {
    uint64_t r = test_random_of((uint64_t)number * 77u + 5u);
    struct operation it = {.dtype = (enum dtype)(r % 8), .stage = 1.0, .prescale = 1.0, .factor = 1.0};
    if (it.dtype == F16 && !hora_has_f16()) it.dtype = BF16;
    it.num_parts = one_slot ? 1 : 1 + (int)((r >> 8) % MAX_PARTS);
    it.direct = (int)((r >> 12) & 1);
    int64_t most = one_slot ? SLOT_BYTES / (int64_t)item_bytes[it.dtype] : MOST;
    for (int p = 0; p < it.num_parts; p++) {
        it.counts[p] = 1 + (int64_t)(test_random_of(r + (uint64_t)p) % (uint64_t)most);
        it.starts[p + 1] = it.total += it.counts[p];
    }
    if (it.dtype == F32 || it.dtype == F64) {
        if ((r >> 16) & 1) it.stage = 0.3;
        it.finish = (enum finish)((r >> 20) % 3);
        if (it.finish != NOTHING) it.factor = 3.0;
    } else if (it.dtype == F16 || it.dtype == BF16) {
        if ((r >> 16) & 1) it.prescale = 0.3;
        it.finish = (r >> 20) & 1 ? DIVIDE : NOTHING;
        if (it.finish != NOTHING) it.factor = 3.0;
    }
    return it;
}

/* The expected sum of floats, doubles and integers, in member order; half-precision results are compared by digest. */
#define EXPECTED(type, name)                                                                                           \
    static int name(const struct operation *it, int64_t number, const void *found) {                                   \
        type mine[1], sum = 0;                                                                                           \
        for (int64_t i = 0; i < it->total; i++) {                                                                      \
            for (int m = 0; m < num_members; m++) {                                                                    \
                test_draw(mine, it->dtype, number, m, i, 1);                                                                \
                type staged = it->stage == 1.0 ? mine[0] : (type)(mine[0] * (type)it->stage);                          \
                sum = m ? (type)(sum + staged) : staged;                                                               \
            }                                                                                                          \
            if (it->finish == MULTIPLY) sum = (type)(sum * (type)it->factor);                                          \
            if (it->finish == DIVIDE) sum = (type)(sum / (type)it->factor);                                            \
            if (memcmp(&sum, (const type *)found + i, sizeof sum)) return 0;                                           \
        }                                                                                                              \
        return 1;                                                                                                      \
    }
EXPECTED(float, right_f32)
EXPECTED(double, right_f64)
EXPECTED(uint8_t, right_i8)
EXPECTED(uint16_t, right_i16)
EXPECTED(uint32_t, right_i32)
EXPECTED(uint64_t, right_i64)

static void test_check(struct member *member, const struct operation *it, int64_t number, const void *found) {
    static int (*const right[])(const struct operation *, int64_t, const void *) = {
        [F32] = right_f32, [F64] = right_f64, [I8] = right_i8, [I16] = right_i16, [I32] = right_i32, [I64] = right_i64};
    if (it->dtype != F16 && it->dtype != BF16 && !right[it->dtype](it, number, found))
        test_fail("a sum is wrong", member->number, number);
    test_digest(&member->digest, found, (size_t)it->total * item_bytes[it->dtype]);
}

static void test_meet(struct member *member) {
    int32_t late;
    member->item++;
    while (!hora_meet(&member->schedule, member->item, &late, SLICE_NS)) continue;
}

static struct numbers test_numbers(const struct operation *it) {
    return (struct numbers){it->prescale, it->factor, it->dtype, it->finish};
}

static void test_allreduce(struct member *member, int64_t number) {
    struct operation it = test_operation_of(number, 0);
    int64_t size = (int64_t)item_bytes[it.dtype], begin = 0;
    const void *inputs[MAX_PARTS];
    void *outputs[MAX_PARTS];
    char *whole = test_room((size_t)(it.total * size));
    for (int p = 0; p < it.num_parts; begin += it.counts[p++]) {
        void *input = test_room((size_t)(it.counts[p] * size));
        test_draw(input, it.dtype, number, member->number, begin, it.counts[p]);
        inputs[p] = input;
        outputs[p] = p % 2 ? input : test_room((size_t)(it.counts[p] * size)); /* in place, or not */
    }
    int64_t most = SLOT_BYTES / size, pieces = (it.total + most - 1) / most;
    struct job job = {.ring = &member->ring, .inputs = inputs, .outputs = outputs, .row = {it.starts, it.num_parts}, .total = it.total,
                      .first_step = member->step + 1, .lag = it.direct ? 0 : pieces > AHEAD ? LAG : pieces,
                      .what = test_numbers(&it), .direct = it.direct, .stage = it.stage};
    while (!hora_collective(&job, SLICE_NS)) continue;
    member->step += pieces + job.lag;
    begin = 0;
    for (int p = 0; p < it.num_parts; begin += it.counts[p++]) {
        memcpy(whole + begin * size, outputs[p], (size_t)(it.counts[p] * size));
        if (outputs[p] != inputs[p]) free(outputs[p]);
        free((void *)(uintptr_t)inputs[p]);
    }
    test_check(member, &it, number, whole);
    free(whole);
}

static void test_in_place(struct member *member, int64_t number) {
    struct operation it = test_operation_of(number, 0);
    if (it.dtype == F32 || it.dtype == F64) it.stage = 1.0; /* nothing is staged */
    test_draw(places[member->number], it.dtype, number, member->number, 0, it.total);
    test_meet(member);
    int64_t begin, end;
    own_slice(&member->ring, it.total, &begin, &end);
    struct numbers what = test_numbers(&it);
    hora_reduce_everywhere(&what, num_members, places, begin, end - begin);
    test_meet(member);
    test_check(member, &it, number, places[member->number]);
    test_meet(member);
}

static void test_repeated(struct member *member, int64_t number) {
    struct operation it = test_operation_of(number, (number >> 2) & 1);
    it.total = it.counts[0]; /* one tensor, which may or may not fit a slot */
    int64_t size = (int64_t)item_bytes[it.dtype], most = SLOT_BYTES / size, pieces = (it.total + most - 1) / most;
    void *source = test_room((size_t)(it.total * size));
    void *out = (number & 1) ? source : test_room((size_t)(it.total * size));
    test_draw(source, it.dtype, number, member->number, 0, it.total);
    struct spec spec = {.job = {.ring = &member->ring, .total = it.total, .what = test_numbers(&it),
                                .direct = it.direct, .lag = it.direct ? 0 : pieces > AHEAD ? LAG : pieces,
                                .stage = it.stage},
                        .digest = {(uint8_t)it.dtype, (uint8_t)it.finish}, .staged = it.direct && pieces == 1};
    spec.num_steps = pieces + spec.job.lag;
    struct repeated *call = &member->repeated;
    struct turns turns = {.step = member->step};
    hora_begin(call, &(struct call){.spec = &spec, .turns = &turns}, source, out, number);
    int state, sleeps_between = (number >> 1) & 1;
    while ((state = hora_repeated(call, sleeps_between ? SLICE_NS : 0)) == WAITING || state == MOVING)
        if (!sleeps_between) sched_yield();
    if (state != DONE || !hora_settle(call, &turns)) test_fail("equal records differ", member->number, number);
    member->step = turns.step;
    test_check(member, &it, number, out);
    if (out != source) free(out);
    free(source);
}

/* Draw the numbers that a member sends in this place, or that all receive; each pair of members has its own. */
static void test_draw_part(void *to, const struct operation *it, int64_t number, int from, int part) {
    test_draw(to, it->dtype, number, from, part * it->total, it->total);
}

/* Collectives that move data, or reduce a part for each member, as repeated calls. */
static void test_moves(struct member *member, int64_t number) {
    struct operation it = test_operation_of(number, 0);
    it.total = it.counts[0], it.stage = it.prescale = it.factor = 1.0, it.finish = NOTHING;
    enum { ALL_GATHER = 1, BROADCAST, ALL_TO_ALL, REDUCE_SCATTER };
    int kind = 1 + (int)(test_random_of((uint64_t)number) % 4), own = member->number, root = (int)(number % num_members);
    int divided = kind == ALL_TO_ALL || kind == REDUCE_SCATTER, spread = kind == ALL_TO_ALL || kind == ALL_GATHER;
    size_t part = (size_t)it.total * item_bytes[it.dtype];
    char *source = test_room(part * (size_t)(divided ? num_members : 1)), *wanted = test_room(part);
    char *out = kind == BROADCAST ? source : test_room(part * (size_t)(spread ? num_members : 1));
    for (int m = 0; m < (divided ? num_members : 1); m++) test_draw_part(source + m * part, &it, number, own, m);
    struct part sent[num_members], received[num_members];
    for (int m = 0; m < num_members; m++) {
        int64_t bytes = (int64_t)part;
        sent[m] = (struct part){divided ? m * bytes : 0, kind == BROADCAST && own != root ? 0 : bytes};
        received[m] = (struct part){spread ? m * bytes : 0, kind != BROADCAST || (m == root && own != root) ? bytes : 0};
    }
    struct spec spec = {.job = {.ring = &member->ring, .total = it.total, .what = test_numbers(&it), .direct = 1,
                                .divided = divided, .stage = 1.0},
                        .digest = {(uint8_t)it.dtype, (uint8_t)kind}};
    if (kind != REDUCE_SCATTER) {
        spec.job.sent = sent, spec.job.received = received;
        spec.job.total = (int64_t)part, spec.job.what.dtype = I8;
    }
    int64_t pieces = (spec.job.total + most(&spec.job) - 1) / most(&spec.job);
    spec.staged = pieces == 1, spec.num_steps = pieces;
    struct repeated *call = &member->repeated;
    struct turns turns = {.step = member->step};
    hora_begin(call, &(struct call){.spec = &spec, .turns = &turns}, source, out, number);
    int state;
    while ((state = hora_repeated(call, SLICE_NS)) == WAITING || state == MOVING) continue;
    if (state != DONE || !hora_settle(call, &turns)) test_fail("equal records differ", own, number);
    member->step = turns.step;
    for (int m = 0; m < num_members && kind != REDUCE_SCATTER; m++) {
        test_draw_part(wanted, &it, number, kind == BROADCAST ? root : m, kind == ALL_TO_ALL ? own : 0);
        if (memcmp(wanted, out + (spread ? m : 0) * part, part)) test_fail("a member got other numbers", own, number);
    }
    if (kind == REDUCE_SCATTER && (it.dtype == I32 || it.dtype == F32)) {
        for (int64_t i = 0; i < it.total; i++) {
            float sum = 0, mine;
            uint32_t whole = 0, next;
            for (int m = 0; m < num_members; m++) {
                test_draw(&mine, it.dtype, number, m, own * it.total + i, 1), memcpy(&next, &mine, 4);
                sum = m ? sum + mine : mine, whole += next;
            }
            if (memcmp(out + i * 4, it.dtype == F32 ? (void *)&sum : (void *)&whole, 4)) test_fail("a part is wrong", own, number);
        }
    }
    if (out != source) free(out);
    free(source), free(wanted);
}

/* Send, or receive, the message from a member to the next one. */
static void test_move_message(struct member *member, int64_t number, int from, char *data, int64_t num_bytes, int receives) {
    int other = receives ? from : (from + 1) % num_members;
    int64_t *words = pipe_words + from * 2, *own = bells + member->number * 2, *theirs = bells + other * 2;
    struct pipe pipe = {words, words + 1, pipe_bytes + from * SLOT_BYTES, SLOT_BYTES, theirs, theirs + 1};
    struct message it = {.pipe = &pipe, .header = {1, number, num_bytes, 0}, .data = data, .bell = own, .asleep = own + 1,
                         .patience = &member->patience, .receives = receives};
    if (receives ? hora_try_receive(&it) : hora_try_send(&it)) return;
    int state;
    while (!(state = hora_message(&it, SLICE_NS))) continue;
    if (state != 1) test_fail("another message came first", member->number, number);
}

/* Each member sends to the next one, within a ring's size or beyond; odd ones receive first, to avoid a deadlock. */
static void test_messages(struct member *member, int64_t number) {
    struct operation it = test_operation_of(number, (int)(number & 1));
    int own = member->number, before = (own + num_members - 1) % num_members;
    int64_t num_bytes = it.counts[0] * (int64_t)item_bytes[it.dtype];
    char *sent = test_room((size_t)num_bytes), *found = test_room((size_t)num_bytes);
    test_draw(sent, it.dtype, number, own, 0, it.counts[0]);
    if (own % 2 == 0) test_move_message(member, number, own, sent, num_bytes, 0);
    test_move_message(member, number, before, found, num_bytes, 1);
    if (own % 2) test_move_message(member, number, own, sent, num_bytes, 0);
    test_draw(sent, it.dtype, number, before, 0, it.counts[0]);
    if (memcmp(sent, found, (size_t)num_bytes)) test_fail("a message is another one", own, number);
    free(sent), free(found);
}

static void test_encode(struct member *member, int64_t number) {
    int64_t count = 1 + (int64_t)(test_random_of((uint64_t)number) % MOST);
    float *numbers = test_room((size_t)count * 4), *residual = test_room((size_t)count * 4), *decoded = test_room((size_t)count * 4);
    char *coded = test_room((size_t)coded_bytes(CODE_INT8, count));
    test_draw(numbers, F32, number, 0, 0, count);
    hora_encode(CODE_INT8, numbers, (number & 1) ? residual : NULL, coded, count);
    hora_decode(CODE_INT8, coded, decoded, count);
    if (memcmp(decoded, numbers, (size_t)count * 4)) test_fail("decoded numbers are others", member->number, number);
    test_digest(&member->digest, decoded, (size_t)count * 4);
    free(numbers), free(residual), free(decoded), free(coded);
}

static void *test_work(void *which) {
    struct member *member = which;
    for (int64_t number = 0; number < num_operations; number++) {
        uint64_t r = test_random_of((uint64_t)number);
        if ((int)(r % 257) == member->number) { /* late enough that the others sleep */
            struct timespec pause = {0, 200000};
            nanosleep(&pause, NULL);
        }
        switch ((r >> 16) % 11) {
        case 0: case 1: case 2: test_allreduce(member, number); break;
        case 3: test_in_place(member, number); break;
        case 4: test_meet(member); break;
        case 5: case 6: test_repeated(member, number); break;
        case 7: case 8: test_moves(member, number); break;
        case 9: if (num_members > 1) test_messages(member, number); break;
        default: test_encode(member, number);
        }
    }
    return NULL;
}

static struct group test_group_of(char *words, int64_t stride, int number) {
    return (struct group){.words = words, .stride = stride, .member = number, .num_members = num_members,
                          .patience = {.many = 600}};
}

static struct member test_new_member(int number) {
    return (struct member){
        .number = number,
        .digest = 0xcbf29ce484222325u,
        .ring = {.slots = slots, .results = results, .slot_bytes = SLOT_BYTES, .depth = DEPTH, .ahead = AHEAD,
                 .group = test_group_of(counters, PAIR, number)},
        .schedule = test_group_of(schedule, PAIR, number),
        .fed = test_room((size_t)num_members * 8),
        .patience = {.many = 600}};
}

static void test_join_tickets(struct member *member) {
    member->repeated = (struct repeated){.group = test_group_of(tickets, TICKET_BYTES, member->number), .heads = heads,
                                         .round = &round_cut, .fed = member->fed, .head_bytes = PAIR, .next_ticket = 1};
}

int main(int argc, char **argv) {
    if (argc != 3) return fprintf(stderr, "ranks MEMBERS OPERATIONS\n"), 2;
    num_members = atoi(argv[1]), num_operations = atoll(argv[2]);
    size_t n = (size_t)num_members;
    counters = test_room(n * PAIR), schedule = test_room(n * PAIR), tickets = test_room(n * TICKET_BYTES), heads = test_room(n * PAIR);
    slots = test_room(n * DEPTH * SLOT_BYTES), results = test_room(DEPTH * SLOT_BYTES), places = test_room(n * sizeof(char *));
    pipe_bytes = test_room(n * SLOT_BYTES), pipe_words = test_room(n * 16), bells = test_room(n * 16);
    struct member *members = test_room(n * sizeof *members);
    pthread_t *threads = test_room(n * sizeof *threads);
    for (int m = 0; m < num_members; m++) {
        places[m] = test_room(MAX_PARTS * MOST * 8);
        members[m] = test_new_member(m);
        test_join_tickets(&members[m]);
    }
    for (int m = 0; m < num_members; m++)
        if (pthread_create(&threads[m], NULL, test_work, &members[m])) abort();
    for (int m = 0; m < num_members; m++) {
        pthread_join(threads[m], NULL);
        if (members[m].digest != members[0].digest) test_fail("the members have different results", m, num_operations);
    }
    printf("%d members, %lld operations: %016llx\n", num_members, (long long)num_operations,
           (unsigned long long)members[0].digest);
    for (int m = 0; m < num_members; m++) free(places[m]), free(members[m].fed);
    free(counters), free(schedule), free(tickets), free(heads), free(slots), free(results), free(places);
    free(members), free(threads), free(pipe_bytes), free(pipe_words), free(bells);
    return 0;
}
