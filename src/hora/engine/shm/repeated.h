/* A repeated call (negotiation/shared_memory.py has the rules): publish a record, wait for the others' equal ones, do it. What fits a
 * slot is staged there before the record is published; anything else goes through the ring when all records are there.
 * Each member has four lines: its ticket and its sleep word (`struct group`), and four records. Included by native.c alone.
 *
 * A member waits here for two things at once: a record, and news of any member. So it sleeps on its own sleep word, which says
 * for whose record (1 + that member), and whoever has something for it clears the word and wakes it (`rouse`): that it does
 * between the sleeper's last look and its sleep is not lost, because the kernel finds another word than the sleeper wrote.
 */
enum { KEPT = 4 };
enum state { DIFFERENT = -1, WAITING, DONE, MOVING }; /* MOVING: all members have agreed, and are in the ring */

struct record {
    int64_t ticket;
    uint8_t digest[16];
    int64_t instance;
};

struct spec { /* what all requests with one signature have in common */
    struct job job;
    uint8_t digest[16];
    int32_t staged;
};

struct repeated {
    struct group group; /* tickets */
    const char *heads; /* of member 0: what it has announced; the next member's is `head_bytes` further on */
    const int64_t *round, *fed; /* the round that was cut last; how far into the announcements the own member has read */
    int64_t head_bytes;
    int32_t late; /* the member that was last waited for */
    /* Of one call. */
    const struct spec *spec;
    const void *source;
    void *out;
    int64_t rounds, step;
    struct record record; /* native.py leaves the digest to `spec` */
    int32_t published, state;
    struct job job;
};

static struct record *record_of(const struct repeated *it, int member) {
    char *records = (char *)counter_of(&it->group, member) + 2 * LINE;
    return (struct record *)(void *)records + it->record.ticket % KEPT;
}

/* Whether all that any member has announced was agreed on in a round that this one has seen. */
static int quiet(const struct repeated *it) {
    if (value_of(it->round) != it->rounds) return 0;
    for (int m = 0; m < it->group.num_members; m++)
        if (value_of((const int64_t *)(const void *)(it->heads + m * it->head_bytes)) != it->fed[m]) return 0;
    return 1;
}

/* Wake the members that wait for `what`, or for whatever it is (0). It may hit one that has looked up meanwhile and sleeps
 * again, for something else: that one looks once more than it had to.
 */
static void rouse(const struct group *group, int64_t what) {
    for (int m = 0; m < group->num_members; m++) {
        int64_t *word = sleeps(group, m), found = value_of(word);
        if (m == group->member || !found || (what && found != what)) continue;
        __atomic_store_n(word, 0, __ATOMIC_SEQ_CST);
        wake(word);
    }
}

/* Tell members that wait for a record that this one has announced something instead. */
void hora_nudge(const struct group *group) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after the announcement, which Python wrote */
    rouse(group, 0);
}

static void publish_record(struct repeated *it) {
    const struct spec *spec = it->spec;
    it->job = spec->job;
    it->job.inputs = &it->source, it->job.outputs = &it->out, it->job.counts = &spec->job.total;
    it->job.first_step = it->step;
    if (spec->staged) fill_slot(&it->job, 0);
    memcpy(it->record.digest, spec->digest, sizeof spec->digest);
    *record_of(it, it->group.member) = it->record;
    it->published = 1;
    __atomic_store_n(counter_of(&it->group, it->group.member), it->record.ticket, __ATOMIC_SEQ_CST);
    rouse(&it->group, 1 + it->group.member);
}

static int all_published(const struct repeated *it) {
    for (int m = 0; m < it->group.num_members; m++)
        if (value_of(counter_of(&it->group, m)) < it->record.ticket) return 0;
    return 1;
}

/* Sleep until the late member may have come, or for a slice. Whether it is worth while to go on waiting. */
static int sleep_unless_news(struct repeated *it, const int64_t *word, long slice_ns) {
    int64_t *own = sleeps(&it->group, it->group.member), begin = now_ns(), what = 1 + it->late;
    __atomic_store_n(own, what, __ATOMIC_SEQ_CST); /* either this member sees what others do, or they see that it sleeps */
    int hopeful = quiet(it);
    if (hopeful && value_of(word) < it->record.ticket) {
        sleep_on(own, what, slice_ns);
        learn(&it->group.patience, now_ns() - begin);
    }
    __atomic_store_n(own, 0, __ATOMIC_SEQ_CST);
    return hopeful;
}

/* WAITING, DIFFERENT, or MOVING when all members have published this very record. */
static int agree(struct repeated *it, long slice_ns) {
    struct spin_policy *patience = &it->group.patience;
    begin_spinning(patience);
    for (int distance = 1; distance < it->group.num_members; distance++) {
        int peer = (it->group.member + distance) % it->group.num_members;
        const int64_t *word = counter_of(&it->group, peer);
        it->late = peer;
        if (look(word, it->record.ticket, patience->looks)) {
            if (patience->looks == patience->many) patience->tally = 0;
        } else if (!slice_ns) {
            return WAITING;
        } else if (!sleep_unless_news(it, word, slice_ns)) { /* the news may have come after all have published */
            if (!all_published(it)) return DIFFERENT;
            break;
        } else if (value_of(word) < it->record.ticket) {
            return WAITING;
        }
    }
    for (int m = 0; m < it->group.num_members; m++)
        if (memcmp(record_of(it, m), &it->record, sizeof(struct record))) return DIFFERENT;
    return MOVING;
}

/* The state: without a slice of time to sleep in, or when one has passed, it may be WAITING or MOVING; call again then. */
int hora_repeated(struct repeated *it, long slice_ns) {
    if (!it->published) {
        if (!quiet(it)) return it->state = DIFFERENT;
        publish_record(it);
    }
    if (it->state == WAITING) {
        it->state = agree(it, slice_ns);
        if (it->state != MOVING) return it->state;
        if (it->spec->staged) {
            const struct group *members = &it->spec->job.ring->group;
            empty_slots(&it->job, 0);
            __atomic_store_n(counter_of(members, members->member), it->step, __ATOMIC_SEQ_CST);
            return it->state = DONE;
        }
    }
    if (!hora_collective(&it->job, slice_ns)) {
        it->late = it->job.late;
        return MOVING;
    }
    return it->state = DONE;
}
