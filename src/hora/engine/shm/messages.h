/* Messages between two ranks of a host (see point_to_point.py): a ring of bytes for each ordered pair of ranks, and a bell, a
 * counter, for each rank. A rank that has written bytes, or has read from a full ring, rings the other's bell. A rank reads its
 * bell, checks the ring, announces that it sleeps, checks again, and sleeps while the bell is unchanged (verify/messages.pml).
 * Included by native.c alone.
 */
struct pipe { /* one end of one direction */
    int64_t *written, *read;
    char *bytes;
    int64_t num_bytes;
    int64_t *bell, *asleep; /* the other end's */
};

struct header {
    int64_t group, tag, num_bytes, kind;
};

struct message {
    const struct pipe *pipe;
    struct header header;
    char *data;
    int64_t moved; /* header and bytes together */
    int64_t *bell, *asleep; /* this rank's */
    struct spin_policy *patience;
    int32_t receives;
};

enum { HEAD_BYTES = sizeof(struct header), MOST_AT_ONCE = 65536 }; /* the other end starts with a part of a long message */

int64_t hora_add(int64_t *word, int64_t by) { return __atomic_add_fetch(word, by, __ATOMIC_SEQ_CST); }

static void ring_bell(const struct pipe *pipe) {
    hora_add(pipe->bell, 1);
    if (value_of(pipe->asleep)) wake(pipe->bell);
}

static int64_t available(const struct pipe *pipe) { return value_of(pipe->written) - value_of(pipe->read); }

static int64_t space(const struct pipe *pipe) { return pipe->num_bytes - available(pipe); }

/* Copy bytes to the ring, or from it to `memory`. */
static void copy_bytes(const struct pipe *pipe, int64_t at, char *memory, int64_t count, int out) {
    int64_t begin = at % pipe->num_bytes, first = least(pipe->num_bytes - begin, count);
    char *here = pipe->bytes + begin;
    memcpy(out ? memory : here, out ? here : memory, (size_t)first);
    memcpy(out ? memory + first : pipe->bytes, out ? pipe->bytes : memory + first, (size_t)(count - first));
}

static void note_given(const struct pipe *pipe, int64_t at, int64_t count) {
    __atomic_store_n(pipe->written, at + count, __ATOMIC_SEQ_CST);
    ring_bell(pipe);
}

/* The writer sleeps only while the ring is full: either it sees this update, or this reader sees the full ring. */
static void note_taken(const struct pipe *pipe, int64_t at, int64_t count) {
    __atomic_store_n(pipe->read, at + count, __ATOMIC_SEQ_CST);
    if (value_of(pipe->written) - at == pipe->num_bytes) ring_bell(pipe);
}

/* Write as many bytes as there is room for, or read the available ones; return their number. */
int64_t hora_pipe_move(const struct pipe *pipe, char *memory, int64_t count, int receives) {
    int64_t done = 0, some;
    while ((some = least(least(count - done, receives ? available(pipe) : space(pipe)), MOST_AT_ONCE)) > 0) {
        int64_t at = receives ? *pipe->read : *pipe->written;
        copy_bytes(pipe, at, memory + done, some, receives);
        if (receives)
            note_taken(pipe, at, some);
        else
            note_given(pipe, at, some);
        done += some;
    }
    return done;
}

/* Send a whole message or none of it; return whether it was sent. */
int hora_try_send(struct message *it) {
    const struct pipe *pipe = it->pipe;
    int64_t at = *pipe->written, num_bytes = it->header.num_bytes;
    if (space(pipe) < HEAD_BYTES + num_bytes) return 0;
    copy_bytes(pipe, at, (char *)&it->header, HEAD_BYTES, 0);
    copy_bytes(pipe, at + HEAD_BYTES, it->data, num_bytes, 0);
    note_given(pipe, at, HEAD_BYTES + num_bytes);
    return 1;
}

/* Return 1 if the next message has arrived and matches, -1 if it is another one, else 0. */
static int comes_next(const struct pipe *pipe, const struct header *header) {
    struct header found;
    if (available(pipe) < HEAD_BYTES) return 0;
    copy_bytes(pipe, *pipe->read, (char *)&found, HEAD_BYTES, 1);
    return memcmp(&found, header, sizeof found) ? -1 : 1;
}

/* Spin until the other end has advanced, for a limited time. The other end's Python takes the same time on every processor, but
 * a spin takes 20 to 60 ns: so the time is measured, with NS_PER_LOOK per spin.
 */
static int spin(struct spin_policy *patience, const int64_t *word, int64_t was) {
    enum { NS_PER_LOOK = 50, LOOKS_PER_CLOCK = 16 };
    begin_spinning(patience);
    for (int64_t end = now_ns() + patience->looks * NS_PER_LOOK; now_ns() < end;)
        if (look(patience, word, was + 1, LOOKS_PER_CLOCK)) return 1;
    return 0;
}

/* Receive a whole message, which may arrive in a moment, or none of it; return whether it was received. */
int hora_try_receive(const struct message *it) {
    const struct pipe *pipe = it->pipe;
    struct spin_policy *patience = it->patience;
    int64_t at = *pipe->read, num_bytes = it->header.num_bytes;
    if (value_of(pipe->written) == at && !spin(patience, pipe->written, at)) {
        if (patience->looks == patience->many) learn(patience, 0);
        return 0;
    }
    if (comes_next(pipe, &it->header) != 1 || available(pipe) < HEAD_BYTES + num_bytes) return 0;
    copy_bytes(pipe, at + HEAD_BYTES, it->data, num_bytes, 1);
    note_taken(pipe, at, HEAD_BYTES + num_bytes);
    return 1;
}

/* Move a part of a message; return the number of bytes, or -1 if another message is first. */
static int64_t move_some(struct message *it) {
    int64_t before = it->moved;
    if (it->moved < HEAD_BYTES) {
        if (it->receives) {
            int next = comes_next(it->pipe, &it->header);
            if (next != 1) return next;
            note_taken(it->pipe, *it->pipe->read, HEAD_BYTES);
            it->moved = HEAD_BYTES;
        } else {
            it->moved += hora_pipe_move(it->pipe, (char *)&it->header + it->moved, HEAD_BYTES - it->moved, 0);
        }
    }
    int64_t done = it->moved - HEAD_BYTES, left = it->header.num_bytes - done;
    if (done >= 0 && left > 0) it->moved += hora_pipe_move(it->pipe, it->data + done, left, it->receives);
    return it->moved - before;
}

/* Return 1 if the message was moved, -1 if another message is first, 0 after a slice of time or a wake-up. */
int hora_message(struct message *it, long slice_ns) {
    const int64_t *word = it->receives ? it->pipe->written : it->pipe->read;
    for (;;) {
        int64_t seen = value_of(it->bell), was = value_of(word), moved = move_some(it);
        if (moved < 0) return -1;
        if (it->moved == HEAD_BYTES + it->header.num_bytes) return 1;
        int looked = it->receives && !it->moved; /* hora_try_receive has spun for its beginning */
        if (moved || (!looked && spin(it->patience, word, was))) continue;
        hora_add(it->asleep, 1);
        if (value_of(word) == was) {
            int64_t begin = now_ns();
            sleep_on(it->bell, seen, slice_ns);
            if (!looked || it->patience->looks != it->patience->many) learn(it->patience, now_ns() - begin);
        }
        hora_add(it->asleep, -1);
        if (value_of(word) == was) return 0;
    }
}
