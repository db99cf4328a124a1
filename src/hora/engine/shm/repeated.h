/* A repeated call (see negotiation/shared_memory.py): publish a record, wait for equal records of the others, execute. Data
 * that fits a slot is staged before the record is published; other data goes through the ring when all records have arrived.
 * Each member has four lines: its ticket and its sleep word (`struct group`), and four records. Included by native.c alone.
 *
 * A member waits for two events at once: a record, and news of any member. So it sleeps on its own sleep word, which contains 1
 * + the member whose record it waits for. A member with an event for it clears the word and wakes it (`rouse`). A wake-up
 * between the sleeper's last check and its sleep is not lost, because the kernel then finds a changed word.
 */
enum { KEPT = 4 };
enum state { DIFFERENT = -1, WAITING, DONE, MOVING }; /* MOVING: all members have agreed and use the ring */

struct record {
    int64_t ticket;
    uint8_t digest[16];
    int64_t instance;
};

struct spec { /* the common part of all requests with one signature, for one ring */
    struct job job;
    uint8_t digest[16];
    int64_t num_steps; /* of the ring */
    int32_t staged;
};

struct turns { /* of a group of members, which changes its ring now and then */
    int64_t num_rings; /* so far */
    int64_t step;      /* the last one taken */
};

struct call { /* what a caller keeps of a signature */
    const struct spec *spec; /* NULL: the ordinary path */
    struct repeated *repeated;
    struct turns *turns;
    int64_t num_rings; /* when the spec was made */
    int64_t num_bytes;
    int32_t is_brief, is_unnamed, is_on_gpu;
};

struct repeated {
    struct group group; /* tickets */
    const char *heads; /* member 0's announcements; the next member's are `head_bytes` further on */
    const int64_t *round, *fed; /* the last round; this member's position in the announcements */
    int64_t head_bytes;
    int64_t rounds;             /* that this member has done */
    int64_t next_ticket;        /* of the next call */
    int64_t void_ticket;        /* that was published and not settled: never reused */
    int64_t num_done, num_void; /* calls so far */
    int32_t late;               /* the member that the last wait missed */
    /* Of one call. */
    const struct spec *spec;
    const void *source;
    void *out;
    int64_t step;
    struct record record;
    int32_t published, state;
    int64_t met_ns; /* when this member saw the last of the equal records */
    struct job job;
    int64_t bounds[2]; /* of the tensor */
};

static struct record *record_of(const struct repeated *it, int member) {
    char *records = (char *)counter_of(&it->group, member) + 2 * LINE;
    return (struct record *)(void *)records + it->record.ticket % KEPT;
}

/* Return whether every announcement was agreed on in a round that this member has seen. */
static int quiet(const struct repeated *it) {
    if (value_of(it->round) != it->rounds) return 0;
    for (int m = 0; m < it->group.num_members; m++)
        if (value_of((const int64_t *)(const void *)(it->heads + m * it->head_bytes)) != it->fed[m]) return 0;
    return 1;
}

/* Wake the members that wait for `what`, or for anything (0). A member that sleeps again for another event may be woken, too:
 * it only checks once more than necessary.
 */
static void rouse(const struct group *group, int64_t what) {
    for (int m = 0; m < group->num_members; m++) {
        int64_t *word = sleeps(group, m), found = value_of(word);
        if (m == group->member || !found || (what && found != what)) continue;
        __atomic_store_n(word, 0, __ATOMIC_SEQ_CST);
        wake(word);
    }
}

/* Wake members that wait for a record: this member has announced something else. */
void hora_nudge(const struct group *group) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* after the announcement, which Python code wrote */
    rouse(group, 0);
}

static void publish_record(struct repeated *it) {
    const struct spec *spec = it->spec;
    it->job = spec->job;
    it->bounds[0] = 0, it->bounds[1] = spec->job.total;
    it->job.inputs = &it->source, it->job.outputs = &it->out, it->job.row = (struct row){it->bounds, 1};
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

/* Sleep until the late member may have arrived, or for a slice of time. Return whether to continue waiting. */
static int sleep_unless_news(struct repeated *it, const int64_t *word, long slice_ns) {
    int64_t *own = sleeps(&it->group, it->group.member), begin = now_ns(), what = 1 + it->late;
    __atomic_store_n(own, what, __ATOMIC_SEQ_CST); /* either this member sees the others' updates, or they see that it sleeps */
    int hopeful = quiet(it);
    if (hopeful && value_of(word) < it->record.ticket) {
        sleep_on(own, what, slice_ns);
        learn(&it->group.patience, now_ns() - begin);
    }
    __atomic_store_n(own, 0, __ATOMIC_SEQ_CST);
    return hopeful;
}

/* Return WAITING, DIFFERENT, or MOVING if all members have published an equal record. */
static int agree(struct repeated *it, long slice_ns) {
    struct spin_policy *patience = &it->group.patience;
    begin_spinning(patience);
    for (int distance = 1; distance < it->group.num_members; distance++) {
        int peer = (it->group.member + distance) % it->group.num_members;
        const int64_t *word = counter_of(&it->group, peer);
        it->late = peer;
        if (look(patience, word, it->record.ticket, patience->looks)) continue;
        if (!slice_ns) return WAITING;
        if (!sleep_unless_news(it, word, slice_ns)) { /* the news may have arrived after all have published */
            if (!all_published(it)) return DIFFERENT;
            break;
        }
        if (value_of(word) < it->record.ticket) return WAITING;
    }
    for (int m = 0; m < it->group.num_members; m++)
        if (memcmp(record_of(it, m), &it->record, sizeof(struct record))) return DIFFERENT;
    return MOVING;
}

/* Return the state. Without a slice of time to sleep in, or after it, that may be WAITING or MOVING; then call again. A call that
 * is settled stays so: an interrupted thread may have missed its state.
 */
int hora_repeated(struct repeated *it, long slice_ns) {
    if (it->state == DONE || it->state == DIFFERENT) return it->state;
    if (!it->published) {
        if (!quiet(it)) return it->state = DIFFERENT;
        publish_record(it);
    }
    if (it->state == WAITING) {
        it->state = agree(it, slice_ns);
        if (it->state != MOVING) return it->state;
        it->met_ns = now_ns();
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

/* Describe a call, which takes the next ticket. */
void hora_begin(struct repeated *it, const struct call *call, const void *source, void *out, int64_t instance) {
    it->spec = call->spec, it->source = source, it->out = out, it->step = call->turns->step + 1;
    it->record.ticket = it->next_ticket, it->record.instance = instance;
    it->published = 0, it->state = WAITING;
}

/* Take a call that is done or different into account; return whether it is done. */
int hora_settle(struct repeated *it, struct turns *turns) {
    if (it->state != DONE) {
        if (it->published) it->void_ticket = it->record.ticket;
        return it->num_void++, 0;
    }
    it->next_ticket = it->record.ticket + 1;
    turns->step += it->spec->num_steps;
    return it->num_done++, 1;
}
