/* A lone allreduce (agree/lone.py has the rules): stage, publish a record, wait for the others' equal ones, reduce.
 * Each member has four lines: its ticket, whether it sleeps, and four records. Included by native.c alone.
 */
enum { LINE = 64, LONE_BYTES = 4 * LINE, KEPT = 4 };
enum state { DIFFERENT = -1, WAITING, DONE };

struct record {
    int64_t ticket;
    uint8_t digest[16];
    int64_t instance;
};

struct what { /* what all requests with one signature have in common */
    struct ring *ring;
    int64_t count;
    uint8_t digest[16];
    int32_t dtype, finish;
    double stage, prescale, factor;
};

struct lone {
    char *members; /* all members' lines */
    const char *heads; /* of member 0: what it has announced; the next member's is `head_bytes` further on */
    const int64_t *round, *fed; /* the round that was cut last; how far into the announcements the own member has read */
    int64_t head_bytes;
    struct patience patience;
    int32_t late; /* the member that was last waited for */
    /* Of one call. */
    const struct what *what;
    const void *source;
    void *out;
    int64_t rounds, step;
    struct record record; /* native.py leaves the digest to `what` */
    int32_t published, state;
};

static struct record *record_of(const struct lone *lone, int member) {
    char *records = lone->members + member * LONE_BYTES + 2 * LINE;
    return (struct record *)(void *)records + lone->record.ticket % KEPT;
}

static int64_t *ticket_of(const struct lone *lone, int member) {
    return (int64_t *)(void *)(lone->members + member * LONE_BYTES);
}

static int64_t *asleep(const struct lone *lone, int member) { return ticket_of(lone, member) + LINE / 8; }

/* Whether all that any member has announced was agreed on in a round that this one has seen. */
static int quiet(const struct lone *lone) {
    if (value_of(lone->round) != lone->rounds) return 0;
    for (int m = 0; m < lone->what->ring->num_members; m++)
        if (value_of((const int64_t *)(const void *)(lone->heads + m * lone->head_bytes)) != lone->fed[m]) return 0;
    return 1;
}

static void publish(struct lone *lone) {
    const struct what *what = lone->what;
    const struct ring *ring = what->ring;
    stage((enum dtype)what->dtype, lone->source, slot(ring, ring->member, lone->step), (size_t)what->count, what->stage);
    memcpy(lone->record.digest, what->digest, sizeof what->digest);
    *record_of(lone, ring->member) = lone->record;
    lone->published = 1;
    publish_to(ticket_of(lone, ring->member), lone->record.ticket, asleep(lone, 0), LONE_BYTES, ring->num_members,
               ring->member);
}

static int all_published(const struct lone *lone) {
    for (int m = 0; m < lone->what->ring->num_members; m++)
        if (value_of(ticket_of(lone, m)) < lone->record.ticket) return 0;
    return 1;
}

/* Sleep until the late member may have come, or for a slice. Whether it is worth while to go on waiting. */
static int sleep_alone(struct lone *lone, const int64_t *word, long slice_ns) {
    int64_t *own = asleep(lone, lone->what->ring->member), begin = now_ns();
    __atomic_store_n(own, 1, __ATOMIC_SEQ_CST); /* either this member sees what others do, or they see that it sleeps */
    int64_t seen = value_of(word);
    int hopeful = quiet(lone);
    if (hopeful && seen < lone->record.ticket) {
        sleep_on(word, seen, slice_ns);
        learn(&lone->patience, now_ns() - begin);
    }
    __atomic_store_n(own, 0, __ATOMIC_SEQ_CST);
    return hopeful;
}

/* The state: without a slice of time to sleep in, or when one has passed, it may still be WAITING; call again then. */
int hora_lone(struct lone *lone, long slice_ns) {
    const struct what *what = lone->what;
    const struct ring *ring = what->ring;
    const void *operands[ring->num_members];
    if (!lone->published) {
        if (!quiet(lone)) return lone->state = DIFFERENT;
        publish(lone);
    }
    begin_patience(&lone->patience);
    for (int distance = 1; distance < ring->num_members; distance++) {
        int peer = (ring->member + distance) % ring->num_members;
        const int64_t *word = ticket_of(lone, peer);
        lone->late = peer;
        if (look(word, lone->record.ticket, lone->patience.looks)) {
            if (lone->patience.looks == lone->patience.many) lone->patience.tally = 0;
        } else if (!slice_ns) {
            return lone->state = WAITING;
        } else if (!sleep_alone(lone, word, slice_ns)) { /* other news, which may have come after all have published */
            if (!all_published(lone)) return lone->state = DIFFERENT;
            break;
        } else if (value_of(word) < lone->record.ticket) {
            return lone->state = WAITING;
        }
    }
    for (int m = 0; m < ring->num_members; m++) {
        if (memcmp(record_of(lone, m), &lone->record, sizeof(struct record))) return lone->state = DIFFERENT;
        operands[m] = slot(ring, m, lone->step);
    }
    sum_with_own((enum dtype)what->dtype, ring->num_members, operands, ring->member, lone->source, lone->out,
                 (size_t)what->count, what->stage, what->prescale, (enum finish)what->finish, what->factor);
    __atomic_store_n(counter_of(ring, ring->member), lone->step, __ATOMIC_SEQ_CST);
    return lone->state = DONE;
}
