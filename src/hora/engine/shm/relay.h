/* An allreduce over two hosts through each host's memory and a connection between carriers: relay.py and relay_memory.py in C,
 * piece for piece, so that a member that does it here works with others that do it in Python. What a carrier combines it
 * sends block by block, and what it receives it adds the same way, while a block is in its cache; where the connection is
 * encrypted a whole slice is a record (`records.h`). Included by native.c alone.
 */
enum { BLOCK_BYTES = 128 * 1024, NUM_INPUTS = 4, WINDOW = 2, NUM_RESULTS = WINDOW + 3 };
enum stage { FILL, COMBINE, RECEIVE, READ_OUT };
enum outcome { BROKEN = -1, NOT_YET, COMPLETE };

struct relay {
    char *memory;
    int64_t counter_bytes, inputs_at, ours_at, theirs_at, slice_room, piece_room;
    int32_t member, num_local, num_carriers, host;
    int32_t outgoing, incoming; /* a carrier's sockets; -1 for the others */
    struct records *sealing, *opening; /* of what they carry; NULL where it is plain */
    struct patience patience;
};

struct numbers { /* what is done to them */
    double prescale, factor;
    int32_t dtype, finish;
};

struct relay_job {
    struct relay *relay;
    const char *const *inputs; /* of each tensor */
    char *const *outputs;
    const int64_t *starts; /* elements before each tensor, and of all at the end */
    int64_t num_tensors, most, num_slices, first, num_pieces;
    struct numbers inside, between;
    /* How far it has come: a job that was interrupted goes on from here. */
    int64_t number, combined, sealed, sent, received; /* slices; bytes sent of all, and received of one slice */
    int32_t stage, late, error; /* `late`: the member that was last waited for in vain, -1 for the other host */
};

static int64_t *filled_by(const struct relay *relay, int member) {
    return (int64_t *)(void *)(relay->memory + 2 * relay->counter_bytes * member);
}

static int64_t *received_by(const struct relay *relay, int member) {
    return (int64_t *)(void *)(relay->memory + (2 * member + 1) * relay->counter_bytes);
}

static char *input_of(const struct relay *relay, int64_t piece, int member, int carrier) {
    int64_t at = (int64_t)member * NUM_INPUTS + piece % NUM_INPUTS;
    return relay->memory + relay->inputs_at + at * relay->piece_room + carrier * relay->slice_room;
}

static char *result_of(const struct relay *relay, int64_t at, int64_t piece, int carrier) {
    return relay->memory + at + piece % NUM_RESULTS * relay->piece_room + carrier * relay->slice_room;
}

static int64_t size_of(const struct relay_job *job) { return (int64_t)item_bytes[job->inside.dtype]; }

static int64_t slice_count(const struct relay_job *job, int64_t slice) {
    int64_t left = job->starts[job->num_tensors] - slice * job->most;
    return left < job->most ? left : job->most;
}

/* The tensor that has this element. */
static int64_t tensor_at(const struct relay_job *job, int64_t element) {
    int64_t low = 0, high = job->num_tensors;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (job->starts[middle] <= element)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* Where a slice lies, if it lies in one tensor. */
static const char *in_one_place(const struct relay_job *job, int64_t slice) {
    int64_t begin = slice * job->most, tensor = tensor_at(job, begin);
    if (begin + slice_count(job, slice) > job->starts[tensor + 1]) return NULL;
    return job->inputs[tensor] + (begin - job->starts[tensor]) * size_of(job);
}

/* Copy a slice from the inputs into memory, or from memory to the outputs. */
static void copy_slice(const struct relay_job *job, int64_t slice, char *memory, int out) {
    int64_t begin = slice * job->most, end = begin + slice_count(job, slice), size = size_of(job);
    for (int64_t tensor = tensor_at(job, begin); begin < end; tensor++) {
        int64_t stop = job->starts[tensor + 1] < end ? job->starts[tensor + 1] : end;
        int64_t at = (begin - job->starts[tensor]) * size, n = (stop - begin) * size;
        if (out)
            memcpy(job->outputs[tensor] + at, memory, (size_t)n);
        else
            memcpy(memory, job->inputs[tensor] + at, (size_t)n);
        memory += n;
        begin = stop;
    }
}

static void add_up(const struct numbers *what, int k, const void *const *operands, void *out, int64_t from,
                   int64_t count) {
    sum((enum dtype)what->dtype, k, operands, out, (size_t)from, (size_t)count, what->prescale,
        (enum finish)what->finish, what->factor);
}

/* Whether all these members have come so far; if not, a slice of time has passed. */
static int all_reached(struct relay_job *job, int64_t *(*counter)(const struct relay *, int), int num, int64_t piece,
                       long slice_ns) {
    for (int m = 0; m < num; m++) {
        const int64_t *word = counter(job->relay, m);
        job->late = m;
        if (value_of(word) <= piece && !patiently(word, piece + 1, &job->relay->patience, slice_ns, NULL)) return 0;
    }
    return 1;
}

static void tell(int64_t *word, int64_t value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    wake(word);
}

static void fill(const struct relay_job *job, int64_t index) {
    const struct relay *relay = job->relay;
    for (int c = 0; c < relay->num_carriers; c++) {
        int64_t slice = index * relay->num_carriers + c;
        if (slice >= job->num_slices) return;
        if (c == relay->member && in_one_place(job, slice)) continue; /* combined where it is */
        copy_slice(job, slice, input_of(relay, job->first + index, relay->member, c), 0);
    }
}

static int64_t own_slice_of(const struct relay_job *job, int64_t index) {
    return index * job->relay->num_carriers + job->relay->member;
}

/* The bytes of a slice on the way. */
static int64_t sent_bytes(const struct relay_job *job, int64_t count) {
    return count * size_of(job) + (job->relay->sealing ? TAG_BYTES : 0);
}

/* What is sent of a slice that is combined: the record, which takes the place of the one before. NULL if there is none. */
static const char *sealed(struct relay_job *job, int64_t index, const char *ours) {
    struct records *records = job->relay->sealing;
    if (index < job->sealed) return (const char *)records->room;
    job->sealed++;
    int64_t num_bytes = slice_count(job, own_slice_of(job, index)) * size_of(job);
    return seal(records, ours, (int)num_bytes) ? (const char *)records->room : NULL;
}

/* Send what the kernel takes, of all that is combined: -1 when the connection is broken. `ready`: bytes that are, of the slice
 * which is being combined; of a record there are none. */
static int push(struct relay_job *job, int64_t ready) {
    const struct relay *relay = job->relay;
    int64_t slice_bytes = sent_bytes(job, job->most); /* only the last one is shorter */
    for (;;) {
        int64_t index = job->sent / slice_bytes, at = job->sent % slice_bytes, end = relay->sealing ? 0 : ready;
        if (index < job->combined) end = sent_bytes(job, slice_count(job, own_slice_of(job, index)));
        if (index > job->combined || at >= end) return 0;
        const char *from = result_of(relay, relay->ours_at, job->first + index, relay->member);
        if (relay->sealing && !(from = sealed(job, index, from))) return job->error = EPROTO, -1;
        ssize_t n = send(relay->outgoing, from + at, (size_t)(end - at), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
        if (n < 0) return job->error = errno, -1;
        job->sent += n;
    }
}

/* Combine the own slice of all members, and send it as far as the kernel takes it. */
static int combine(struct relay_job *job, int64_t index) {
    const struct relay *relay = job->relay;
    int64_t slice = own_slice_of(job, index), piece = job->first + index;
    if (slice >= job->num_slices) return 0;
    const void *operands[relay->num_local];
    for (int m = 0; m < relay->num_local; m++) operands[m] = input_of(relay, piece, m, relay->member);
    const char *own = in_one_place(job, slice);
    if (own) operands[relay->member] = own;
    char *ours = result_of(relay, relay->ours_at, piece, relay->member);
    int64_t count = slice_count(job, slice), size = size_of(job), block = BLOCK_BYTES / size;
    for (int64_t at = 0; at < count; at += block) {
        int64_t n = count - at < block ? count - at : block;
        add_up(&job->inside, relay->num_local, operands, ours, at, n);
        if (push(job, (at + n) * size) < 0) return -1;
    }
    job->combined++;
    return relay->sealing ? push(job, 0) : 0;
}

/* Some bytes from the other host, or none when a slice of time has passed or the kernel takes more of what is `unsent`: the
 * other host may not send before it has got that. -1 when the connection is broken. */
static ssize_t pull(struct relay_job *job, char *to, int64_t num_bytes, int unsent, long slice_ns) {
    int incoming = job->relay->incoming;
    if (unsent) {
        struct pollfd both[] = {{incoming, num_bytes ? POLLIN : 0, 0}, {job->relay->outgoing, POLLOUT, 0}};
        poll(both, 2, (int)(slice_ns / 1000000));
    }
    if (!num_bytes) return 0; /* all of it has come */
    ssize_t n = recv(incoming, to, (size_t)num_bytes, unsent ? MSG_DONTWAIT : MSG_WAITALL); /* at most SO_RCVTIMEO */
    if (n > 0) return n;
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    job->error = n < 0 ? errno : ECONNRESET;
    return -1;
}

/* Receive the other host's part of the own slice, and add it up, block by block; a record is one. */
static int receive(struct relay_job *job, int64_t index, long slice_ns) {
    const struct relay *relay = job->relay;
    int64_t slice = own_slice_of(job, index), piece = job->first + index, size = size_of(job);
    if (slice >= job->num_slices) return COMPLETE;
    char *ours = result_of(relay, relay->ours_at, piece, relay->member);
    char *theirs = result_of(relay, relay->theirs_at, piece, relay->member);
    const void *operands[2] = {relay->host ? theirs : ours, relay->host ? ours : theirs};
    int64_t count = slice_count(job, slice), total = sent_bytes(job, count);
    int64_t end = index * sent_bytes(job, job->most) + total, block = relay->opening ? total : BLOCK_BYTES;
    char *to = relay->opening ? (char *)relay->opening->room : theirs;
    while (job->received < total || job->sent < end) {
        int64_t begin = job->received / block * block, before = job->sent;
        int64_t stop = begin + block < total ? begin + block : total;
        if (push(job, 0) < 0) return BROKEN;
        ssize_t n = pull(job, to + job->received, stop - job->received, job->sent < end, slice_ns);
        if (n < 0 || (!n && push(job, 0) < 0)) return BROKEN;
        if (!n && job->sent == before) return job->late = -1, NOT_YET;
        job->received += n;
        if (!n || job->received < stop) continue;
        if (relay->opening && !unseal(relay->opening, theirs, (int)(count * size))) return job->error = EBADMSG, BROKEN;
        add_up(&job->between, 2, operands, theirs, begin / size, relay->opening ? count : (stop - begin) / size);
    }
    job->received = 0;
    return COMPLETE;
}

static void read_out(const struct relay_job *job, int64_t index) {
    const struct relay *relay = job->relay;
    for (int c = 0; c < relay->num_carriers; c++) {
        int64_t slice = index * relay->num_carriers + c;
        if (slice >= job->num_slices) return;
        copy_slice(job, slice, result_of(relay, relay->theirs_at, job->first + index, c), 1);
    }
}

/* COMPLETE, BROKEN (`error` says how), or NOT_YET: a slice of time has passed in vain, look around and call again. The stages
 * come in the order of relay_memory.py. */
int hora_relay(struct relay_job *job, long slice_ns) {
    const struct relay *relay = job->relay;
    int carries = relay->outgoing >= 0;
    begin_patience(&job->relay->patience);
    for (; job->number < job->num_pieces + WINDOW + 2; job->number++, job->stage = FILL) {
        int64_t number = job->number, at;
        switch (job->stage) {
        case FILL:
            if (number < job->num_pieces) {
                at = job->first + number - 2;
                if (!carries && number > 1 && !all_reached(job, filled_by, relay->num_local, at, slice_ns)) return NOT_YET;
                fill(job, number);
                tell(filled_by(relay, relay->member), job->first + number + 1);
            }
            job->stage = COMBINE; /* fall through */
        case COMBINE:
            at = number - 1;
            if (carries && at >= 0 && at < job->num_pieces) {
                if (!all_reached(job, filled_by, relay->num_local, job->first + at, slice_ns)) return NOT_YET;
                if (combine(job, at) < 0) return BROKEN;
            }
            job->stage = RECEIVE; /* fall through */
        case RECEIVE:
            at = number - 1 - WINDOW;
            if (carries && at >= 0 && at < job->num_pieces) {
                int outcome = receive(job, at, slice_ns);
                if (outcome != COMPLETE) return outcome;
                tell(received_by(relay, relay->member), job->first + at + 1);
            }
            job->stage = READ_OUT; /* fall through */
        case READ_OUT:
            at = number - 2 - WINDOW;
            if (at >= 0) {
                if (!all_reached(job, received_by, relay->num_carriers, job->first + at, slice_ns)) return NOT_YET;
                read_out(job, at);
            }
        }
    }
    return COMPLETE;
}
