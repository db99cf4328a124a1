/* Allreduce between hosts: through each host's memory, and over connections between the slice leaders of the hosts. The result
 * has the same bits as hierarchical.py's. Included by native.c alone.
 *
 * Slice leader c of every host handles slice c of each piece. It combines the slice of its host's members and exchanges it with
 * the slice leaders c of the other hosts. In one step: every host sends its slice to all, and each combines them. In two steps,
 * for larger data on more than two hosts: host h receives part h of the slice from all hosts (A), combines it, and sends the
 * result to all (B). Both combine the hosts in the same order, so the bits do not depend on the choice. Staged data goes
 * through the host's memory; resident data is there already, and each slice leader has exclusive access to its slice.
 *
 * A job may be half of an allreduce of resident data, of which every member owns a slice, in rank order, host by host. A slice
 * leader handles a part of the elements that the members of each host own. SCATTER: it receives all members' sum of its part of
 * this host's elements, for the owners. GATHER: it sends that part to all hosts, and copies the received parts to all members
 * of its host.
 *
 * A checked job, which was not negotiated, begins with a header on every stream. If the headers of all hosts are equal, they
 * have the same job; if not, the job is VOID on every host, before any data has changed.
 */
enum { NUM_INPUTS = 4, QUEUE = 64, RECORD_BYTES = 256 * 1024, HEADER_BYTES = 32 };
enum stage { FILL, COMBINE, RECEIVE_A, RECEIVE_B, READ_OUT };
enum outcome { BROKEN = -1, NOT_YET, COMPLETE, VOID };
enum check { NONE, ON_THE_WAY, AT_ONCE }; /* AT_ONCE: wait for the headers first, because combining changes data */
enum kind { ALLREDUCE, SCATTER, GATHER };
enum greeting { TO_SEND, SENT, FOUND_EQUAL };

/* One direction of a connection, whose messages are moved in order, `num_moved` of `num_queued` so far. If encrypted, each
 * record holds up to RECORD_BYTES of one message.
 */
struct stream {
    struct records *records; /* NULL: unencrypted */
    int64_t num_queued, num_moved;
    int64_t at, in_record; /* moved bytes of the message, and of its record */
    int32_t socket, sealed; /* `sealed`: the encrypted record is in the buffer */
    char *queue[QUEUE];
    int64_t lengths[QUEUE]; /* of the queued messages */
};

struct hosts { /* the member's position, and the memory and streams that it uses */
    char *memory; /* of the host: counters, inputs, results */
    char *room; /* private to a slice leader */
    char *headers; /* of a slice leader: one per host */
    struct stream *outgoing, *incoming; /* of a slice leader, one per host (its own is unused); otherwise NULL */
    int64_t counter_bytes, inputs_at, results_at, slice_room, piece_room;
    int32_t member, num_local, num_leaders, host, num_hosts, num_results, num_rooms;
    struct spin_policy patience;
};

struct hosts_job {
    struct hosts *hosts;
    const char *const *inputs; /* per tensor; for resident data per member */
    char *const *outputs, *const *residuals; /* per tensor; `residuals` may be NULL */
    struct row row;
    const float *weights; /* per host, in an average of half precision; otherwise NULL */
    int64_t begin, end; /* `begin`, `end`: this slice leader's elements of resident data; all elements of staged data */
    int64_t most, first, num_pieces; /* `most`: elements of a slice */
    const int64_t *begins, *counts; /* for half an allreduce: this slice leader's part of each host's elements */
    int64_t first_owned, owned; /* the first element that this host owns, and the number per member */
    struct numbers inside, between, last; /* of members, of hosts; of the result, if it is encoded in between */
    double stage; /* factor applied first */
    int32_t resident, code, two_steps, window, kind, check, greeting;
    /* Progress: an interrupted job continues from here. */
    int64_t number;
    int32_t step, asked, late, error; /* `late`: the one that the last wait missed: a member of this host, or -1 - host */
    char header[HEADER_BYTES];
    int64_t sent_a[QUEUE], sent_b[QUEUE]; /* messages of every outgoing stream up to a piece's message */
};

/* Streams. */

static void enqueue(struct stream *stream, char *data, int64_t num_bytes) {
    int64_t at = stream->num_queued++ % QUEUE;
    stream->queue[at] = data, stream->lengths[at] = num_bytes;
}

/* Move bytes until the kernel blocks; return 0, or -1 if the connection is broken. Received bytes are written to their
 * destination before their record is authenticated: if that fails, the job ends.
 */
static int move(struct stream *stream, int incoming, int flags, int32_t *error) {
    while (stream->num_moved < stream->num_queued) {
        char *data = stream->queue[stream->num_moved % QUEUE] + stream->at;
        int64_t length = stream->lengths[stream->num_moved % QUEUE] - stream->at, at = stream->in_record;
        if (!length) {
            stream->num_moved++, stream->at = 0;
            continue;
        }
        struct records *records = stream->records;
        if (records && length > RECORD_BYTES) length = RECORD_BYTES;
        if (records && !incoming && !stream->sealed && !(stream->sealed = seal(records, data, (int)length)))
            return *error = EPROTO, -1;
        char *from = records && !incoming ? (char *)records->room : data;
        int64_t behind = at > length ? at - length : 0; /* bytes of the tag */
        struct iovec parts[] = {{from + at - behind, (size_t)(length - at + behind)},
                                {records ? records->room + length + behind : NULL, (size_t)(TAG_BYTES - behind)}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = records ? 2 : 1};
        ssize_t n = incoming ? recvmsg(stream->socket, &message, flags)
                             : sendmsg(stream->socket, &message, flags | MSG_NOSIGNAL);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
        if (n <= 0) return *error = n < 0 ? errno : ECONNRESET, -1;
        if (!records) {
            stream->at += n;
        } else if ((stream->in_record += n) == length + TAG_BYTES) {
            if (incoming && !unseal(records, data, (int)length)) return *error = EBADMSG, -1;
            stream->at += length, stream->in_record = stream->sealed = 0;
        }
    }
    return 0;
}

/* Each host begins with the next host, so that they do not all send to the same one first. */
static int push_all(struct hosts_job *job) {
    struct hosts *hosts = job->hosts;
    for (int distance = 1; distance < hosts->num_hosts; distance++) {
        struct stream *out = &hosts->outgoing[(hosts->host + distance) % hosts->num_hosts];
        if (move(out, 0, MSG_DONTWAIT, &job->error) < 0) return -1;
    }
    return 0;
}

/* Wait until this many messages have been sent to every host and all requested ones have arrived. Other queued messages are
 * sent, too: a host may need them before it sends.
 */
static int settle(struct hosts_job *job, int64_t sent, long slice_ns) {
    struct hosts *hosts = job->hosts;
    struct pollfd polled[2 * hosts->num_hosts];
    for (;;) {
        int unsent = 0, waiting = 0, pending = 0, last = -1;
        if (push_all(job) < 0) return BROKEN;
        for (int h = 0; h < hosts->num_hosts; h++) {
            if (h == hosts->host) continue;
            struct stream *out = &hosts->outgoing[h];
            unsent |= out->num_moved < sent;
            pending |= out->num_moved < out->num_queued;
        }
        for (int distance = 1; distance < hosts->num_hosts; distance++) {
            int h = (hosts->host + hosts->num_hosts - distance) % hosts->num_hosts; /* that host sends here first */
            struct stream *in = &hosts->incoming[h], *out = &hosts->outgoing[h];
            /* With nothing to send, one system call waits for a whole message (at most SO_RCVTIMEO). */
            int64_t before = in->num_moved + in->at + in->in_record;
            if (move(in, 1, pending ? MSG_DONTWAIT : MSG_WAITALL, &job->error) < 0) return BROKEN;
            if (in->num_moved < in->num_queued) {
                job->late = -1 - h, last = h;
                if (!pending && in->num_moved + in->at + in->in_record == before) return NOT_YET;
                polled[waiting++] = (struct pollfd){in->socket, POLLIN, 0};
            }
            if (out->num_moved < out->num_queued) polled[waiting++] = (struct pollfd){out->socket, POLLOUT, 0};
        }
        if (last < 0 && !unsent) return COMPLETE;
        if (pending && waiting && !poll(polled, (nfds_t)waiting, (int)(slice_ns / 1000000))) return NOT_YET;
    }
}

/* Addresses of data. */

static int64_t *filled_by(const struct hosts *hosts, int member) {
    return (int64_t *)(void *)(hosts->memory + 2 * hosts->counter_bytes * member);
}

static int64_t *received_by(const struct hosts *hosts, int member) {
    return (int64_t *)(void *)(hosts->memory + (2 * member + 1) * hosts->counter_bytes);
}

static char *input_of(const struct hosts *hosts, int64_t piece, int member, int leader) {
    int64_t at = (int64_t)member * NUM_INPUTS + piece % NUM_INPUTS;
    return hosts->memory + hosts->inputs_at + at * hosts->piece_room + leader * hosts->slice_room;
}

static char *result_of(const struct hosts *hosts, int64_t piece, int leader) {
    return hosts->memory + hosts->results_at + piece % hosts->num_results * hosts->piece_room +
           leader * hosts->slice_room;
}

/* A slice leader's private buffers: for each of some pieces the combined data of the host, the same encoded, and an encoded
 * result; for each host the received data, and the same decoded; and the residual.
 */
enum room { OURS, CODED, RECODED, NUM_RINGS };

static char *ring_room(const struct hosts *hosts, enum room ring, int64_t piece) {
    return hosts->room + (ring * hosts->num_rooms + piece % hosts->num_rooms) * hosts->slice_room;
}

static char *room_of(const struct hosts *hosts, int number, int host) {
    return hosts->room + ((int64_t)NUM_RINGS * hosts->num_rooms + number * hosts->num_hosts + host) * hosts->slice_room;
}

static char *theirs_of(const struct hosts *hosts, int host) { return room_of(hosts, 0, host); }
static char *decoded_of(const struct hosts *hosts, int host) { return room_of(hosts, 1, host); }
static char *lost_room(const struct hosts *hosts) { return room_of(hosts, 2, 0); }

static int64_t size_of(const struct hosts_job *job) { return (int64_t)item_bytes[job->inside.dtype]; }

/* Return the bytes of this many numbers on their way. */
static int64_t way_bytes(const struct hosts_job *job, int64_t count) {
    return job->code ? coded_bytes(job->code, count) : count * size_of(job);
}

static struct span clipped(int64_t begin, int64_t most, int64_t end) {
    begin = least(begin, end);
    return (struct span){begin, least(most, end - begin)};
}

/* Return the slice of a slice leader in a piece of this job; in half an allreduce its parts count from the first element. */
static struct span slice_of(const struct hosts_job *job, int64_t index, int leader) {
    int64_t number = job->resident ? index : index * job->hosts->num_leaders + leader;
    return job->kind ? (struct span){0, 1} : clipped(job->begin + number * job->most, job->most, job->end);
}

/* Return the part of a slice that host h combines; in half an allreduce, of the elements that host h owns. */
static struct span part_of(const struct hosts_job *job, int64_t index, int64_t count, int h) {
    int64_t each = (count + job->hosts->num_hosts - 1) / job->hosts->num_hosts;
    if (job->kind) return clipped(job->begins[h] + index * job->most, job->most, job->begins[h] + job->counts[h]);
    return job->two_steps ? clipped(h * each, each, count) : (struct span){0, count};
}

/* Return the address of these elements if they are in one tensor. */
static char *in_one_place(const struct hosts_job *job, const void *tensors, struct span span) {
    int64_t tensor = tensor_at(&job->row, span.begin);
    char *const *data = tensors;
    if (span.begin + span.count > job->row.starts[tensor + 1]) return NULL;
    return data[tensor] + (span.begin - job->row.starts[tensor]) * size_of(job);
}

static void copy_span(const struct hosts_job *job, const void *tensors, struct span span, char *memory, int out, double factor) {
    copy_elements(&job->row, (enum dtype)job->inside.dtype, tensors, span, memory, out, factor);
}

/* Return where the result of this slice leader's slice is computed. */
static char *result_place(const struct hosts_job *job, int64_t index, struct span span) {
    const struct hosts *hosts = job->hosts;
    char *out = NULL;
    if (job->resident) return (char *)(uintptr_t)job->inputs[hosts->member] + span.begin * size_of(job);
    if (hosts->num_local == 1) out = in_one_place(job, job->outputs, span);
    return out ? out : result_of(hosts, job->first + index, hosts->member);
}

/* Return this member's data of its own slice if it needs no copy. */
static const char *own_data(const struct hosts_job *job, struct span span) {
    if (job->resident) return job->inputs[job->hosts->member] + span.begin * size_of(job);
    return job->stage == 1.0 ? in_one_place(job, job->inputs, span) : NULL;
}

/* Return where the members' data is combined and sent from. The data of a host's only member is sent from its place. */
static char *combined_place(const struct hosts_job *job, int64_t index, struct span span) {
    const struct numbers *inside = &job->inside;
    const char *own = own_data(job, span);
    int as_it_is = !job->kind && job->hosts->num_local == 1 && inside->prescale == 1.0 && inside->finish == NOTHING;
    return own && as_it_is && !job->code ? (char *)(uintptr_t)own : ring_room(job->hosts, OURS, job->first + index);
}

/* Return the residual of these elements, contiguous; `keep_lost` writes it back if it was copied. */
static float *take_lost(const struct hosts_job *job, struct span span) {
    if (!job->residuals) return NULL;
    char *lost = in_one_place(job, job->residuals, span);
    if (!lost) copy_span(job, job->residuals, span, lost = lost_room(job->hosts), 0, 1.0);
    return (float *)(void *)lost;
}

static void keep_lost(const struct hosts_job *job, struct span span, float *lost) {
    if (lost && (char *)lost == lost_room(job->hosts))
        copy_span(job, job->residuals, span, (char *)lost, 1, 1.0);
}

/* The steps of a piece. */

/* Return whether all these members have reached this value; 0 after a slice of time. */
static int all_reached(struct hosts_job *job, int64_t *(*counter)(const struct hosts *, int), int num, int64_t piece,
                       long slice_ns) {
    for (int m = 0; m < num; m++) {
        const int64_t *word = counter(job->hosts, m);
        job->late = m;
        if (value_of(word) <= piece && !patiently(word, piece + 1, &job->hosts->patience, slice_ns, NULL)) return 0;
    }
    return 1;
}

static void tell(const struct hosts *hosts, int64_t *word, int64_t value) {
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    if (hosts->num_local > 1) wake(word);
}

static void fill(const struct hosts_job *job, int64_t index) {
    const struct hosts *hosts = job->hosts;
    for (int c = 0; c < hosts->num_leaders; c++) {
        struct span span = slice_of(job, index, c);
        if (span.count <= 0) return;
        if (c == hosts->member && own_data(job, span)) continue; /* combined in place */
        copy_span(job, job->inputs, span, input_of(hosts, job->first + index, hosts->member, c), 0, job->stage);
    }
}

/* Return the resident data of the members, times `stage`: it is scaled in the cache, just before it is read. */
static void stage_operands(const struct hosts_job *job, struct span span, const void **operands) {
    for (int m = 0; m < job->hosts->num_local; m++) {
        operands[m] = job->inputs[m] + span.begin * size_of(job);
        if (job->stage != 1.0)
            stage((enum dtype)job->inside.dtype, operands[m], (char *)(uintptr_t)operands[m], (size_t)span.count, job->stage);
    }
}

/* Copy elements that this host owns from or to their owners, if these are other members. */
static void copy_owned(const struct hosts_job *job, struct span span, int to_owners) {
    const struct hosts *hosts = job->hosts;
    int64_t size = size_of(job), end = span.begin + span.count;
    for (int m = 0; m < hosts->num_local; m++) {
        int64_t begin = job->first_owned + m * job->owned, stop = begin + job->owned;
        if (begin < span.begin) begin = span.begin;
        if (stop > end) stop = end;
        if (m == hosts->member || begin >= stop) continue;
        char *mine = (char *)(uintptr_t)job->inputs[hosts->member] + begin * size;
        char *theirs = (char *)(uintptr_t)job->inputs[m] + begin * size;
        memcpy(to_owners ? theirs : mine, to_owners ? mine : theirs, (size_t)((stop - begin) * size));
    }
}

/* Send this host's part of the result to all. */
static int send_part(struct hosts_job *job, int64_t index, char *from, int64_t num_bytes) {
    const struct hosts *hosts = job->hosts;
    for (int h = 0; h < hosts->num_hosts; h++) {
        if (h == hosts->host) continue;
        enqueue(&hosts->outgoing[h], from, num_bytes);
        job->sent_b[index % QUEUE] = hosts->outgoing[h].num_queued;
    }
    return push_all(job);
}

/* Return where a host's part is among the combined data. */
static int64_t offset_of(const struct hosts_job *job, struct span part, int h) {
    return (job->kind ? h * job->most : part.begin) * size_of(job);
}

/* Combine the data of all members of this host: a slice, or in half an allreduce each host's part. */
static void combine_members(const struct hosts_job *job, int64_t index, struct span span, char *ours) {
    const struct hosts *hosts = job->hosts;
    const void *operands[hosts->num_local];
    for (int h = 0; job->kind && h < hosts->num_hosts; h++) {
        struct span part = part_of(job, index, span.count, h);
        stage_operands(job, part, operands);
        sum(&job->inside, hosts->num_local, operands, ours + offset_of(job, part, h), 0, (size_t)part.count);
    }
    if (job->kind) return;
    const char *own = own_data(job, span);
    if (job->resident) stage_operands(job, span, operands);
    for (int m = 0; m < hosts->num_local && !job->resident; m++)
        operands[m] = input_of(hosts, job->first + index, m, hosts->member);
    if (own) operands[hosts->member] = own;
    if (ours != own) sum(&job->inside, hosts->num_local, operands, ours, 0, (size_t)span.count);
}

/* Combine this slice of all members of this host, and start to send it. */
static int combine(struct hosts_job *job, int64_t index) {
    const struct hosts *hosts = job->hosts;
    struct span span = slice_of(job, index, hosts->member), own_part = part_of(job, index, span.count, hosts->host);
    int64_t size = size_of(job), at = 0;
    if (span.count <= 0) return 0;
    if (job->kind == GATHER) {
        copy_owned(job, own_part, 0); /* all of it will be overwritten in any case */
        return send_part(job, index, result_place(job, index, span) + own_part.begin * size, own_part.count * size);
    }
    char *ours = combined_place(job, index, span), *coded = ring_room(hosts, CODED, job->first + index);
    combine_members(job, index, span, ours);
    if (job->code) {
        float *lost = take_lost(job, span);
        for (int h = 0; h < (job->two_steps ? hosts->num_hosts : 1); h++) {
            struct span part = part_of(job, index, span.count, h);
            hora_encode(job->code, (float *)(void *)ours + part.begin, lost ? lost + part.begin : NULL, coded + at, part.count);
            at += way_bytes(job, part.count);
        }
        keep_lost(job, span, lost);
    }
    at = 0;
    for (int h = 0; h < hosts->num_hosts; h++) {
        struct span part = part_of(job, index, span.count, h);
        char *from = job->code ? coded + at : ours + offset_of(job, part, h);
        if (job->two_steps) at += way_bytes(job, part.count);
        if (h == hosts->host) continue;
        enqueue(&hosts->outgoing[h], from, way_bytes(job, part.count));
        job->sent_a[index % QUEUE] = hosts->outgoing[h].num_queued;
    }
    return push_all(job);
}

/* Publish that these elements are done. */
static void complete_slice(const struct hosts_job *job, int64_t index, struct span span) {
    const struct hosts *hosts = job->hosts;
    int64_t begin = span.begin * size_of(job);
    if (!job->resident) tell(hosts, received_by(hosts, hosts->member), job->first + index + 1);
    for (int m = 0; job->resident && m < hosts->num_local; m++)
        if (m != hosts->member)
            memcpy((char *)(uintptr_t)job->inputs[m] + begin, job->inputs[hosts->member] + begin,
                   (size_t)(span.count * size_of(job)));
}

/* Request a message from every host, once; `two_steps`' first or second step gives bytes and addresses. */
static void ask(struct hosts_job *job, int64_t index, struct span span, char *result, int second) {
    const struct hosts *hosts = job->hosts;
    if (job->asked) return;
    job->asked = 1;
    for (int h = 0; h < hosts->num_hosts; h++) {
        if (h == hosts->host) continue;
        struct span part = part_of(job, index, span.count, second ? h : hosts->host);
        char *to = second && !job->code ? result + part.begin * size_of(job) : theirs_of(hosts, h);
        enqueue(&hosts->incoming[h], to, way_bytes(job, part.count));
    }
}

/* Send this host's part of the result, encoded, and replace it by the decoded values; the rounding error goes to this host's
 * residual.
 */
static void recode(const struct hosts_job *job, int64_t index, struct span span, struct span part, float *mine) {
    float *wanted = (float *)(void *)decoded_of(job->hosts, job->hosts->host), *lost = take_lost(job, span);
    if (lost) memcpy(wanted, mine, (size_t)part.count * sizeof(float));
    hora_encode(job->code, mine, NULL, ring_room(job->hosts, RECODED, job->first + index), part.count);
    if (!lost) return;
    keep_loss(mine, wanted, (size_t)part.count);
    add(lost + part.begin, wanted, (size_t)part.count);
    keep_lost(job, span, lost);
}

/* Send the header, and request the others' headers. */
static int greet(struct hosts_job *job) {
    const struct hosts *hosts = job->hosts;
    for (int h = 0; h < hosts->num_hosts; h++) {
        if (h == hosts->host) continue;
        enqueue(&hosts->outgoing[h], job->header, HEADER_BYTES);
        enqueue(&hosts->incoming[h], hosts->headers + h * HEADER_BYTES, HEADER_BYTES);
    }
    job->greeting = SENT;
    return push_all(job);
}

/* Return COMPLETE if all hosts have sent the same header. */
static int compare(struct hosts_job *job, long slice_ns) {
    const struct hosts *hosts = job->hosts;
    int outcome = settle(job, 0, slice_ns);
    if (outcome != COMPLETE) return outcome;
    for (int h = 0; h < hosts->num_hosts; h++)
        if (h != hosts->host && memcmp(hosts->headers + h * HEADER_BYTES, job->header, HEADER_BYTES)) return VOID;
    job->greeting = FOUND_EQUAL;
    return COMPLETE;
}

/* Combine the hosts' data. */
static void add_up_hosts(const struct hosts_job *job, const void *const *operands, void *out, int64_t count) {
    if (job->weights)
        sum_halves(&job->between, job->weights, job->hosts->num_hosts, operands, out, 0, (size_t)count);
    else
        sum(&job->between, job->hosts->num_hosts, operands, out, 0, (size_t)count);
}

/* Receive the other parts of the result. */
static int receive_rest(struct hosts_job *job, int64_t index, long slice_ns) {
    const struct hosts *hosts = job->hosts;
    struct span span = slice_of(job, index, hosts->member);
    if (span.count > 0) {
        char *result = result_place(job, index, span);
        ask(job, index, span, result, 1);
        int outcome = settle(job, job->sent_b[index % QUEUE], slice_ns);
        if (outcome != COMPLETE) return outcome;
        for (int h = 0; h < hosts->num_hosts; h++) {
            struct span part = part_of(job, index, span.count, h);
            if (job->kind) complete_slice(job, index, part);
            if (!job->code) continue;
            float *numbers = (float *)(void *)result + part.begin;
            if (h != hosts->host) hora_decode(job->code, theirs_of(hosts, h), numbers, part.count);
            const void *same = numbers;
            if (job->last.finish != NOTHING) sum(&job->last, 1, &same, numbers, 0, (size_t)part.count);
        }
    }
    if (!job->kind) complete_slice(job, index, span);
    return COMPLETE;
}

/* Receive and combine the other hosts' data of this host's part. That is the result, or it is sent to all. */
static int receive(struct hosts_job *job, int64_t index, long slice_ns) {
    const struct hosts *hosts = job->hosts;
    struct span span = slice_of(job, index, hosts->member);
    if (span.count <= 0) {
        if (!job->two_steps) complete_slice(job, index, span);
        return COMPLETE;
    }
    int outcome = job->greeting == SENT ? compare(job, slice_ns) : COMPLETE;
    if (outcome != COMPLETE) return outcome;
    if (job->kind == GATHER) return receive_rest(job, index, slice_ns);
    struct span part = part_of(job, index, span.count, hosts->host);
    char *result = result_place(job, index, span) + part.begin * size_of(job);
    ask(job, index, span, result, 0);
    outcome = settle(job, job->sent_a[index % QUEUE], slice_ns);
    if (outcome != COMPLETE) return outcome;
    const void *operands[hosts->num_hosts];
    char *ours = combined_place(job, index, span);
    for (int h = 0; h < hosts->num_hosts; h++) {
        operands[h] = job->code ? decoded_of(hosts, h) : theirs_of(hosts, h);
        if (h == hosts->host)
            operands[h] = ours + offset_of(job, part, h);
        else if (job->code)
            hora_decode(job->code, theirs_of(hosts, h), (float *)(void *)decoded_of(hosts, h), part.count);
    }
    add_up_hosts(job, operands, result, part.count);
    if (job->kind)
        copy_owned(job, part, 1);
    else if (!job->two_steps)
        complete_slice(job, index, span);
    if (!job->two_steps) return COMPLETE;
    if (job->code) recode(job, index, span, part, (float *)(void *)result);
    char *from = job->code ? ring_room(hosts, RECODED, job->first + index) : result;
    return send_part(job, index, from, way_bytes(job, part.count)) < 0 ? BROKEN : COMPLETE;
}

static void read_out(const struct hosts_job *job, int64_t index) {
    const struct hosts *hosts = job->hosts;
    for (int c = 0; c < hosts->num_leaders; c++) {
        struct span span = slice_of(job, index, c);
        if (span.count <= 0) return;
        if (hosts->num_local == 1 && in_one_place(job, job->outputs, span)) continue; /* it was computed there */
        copy_span(job, job->outputs, span, result_of(hosts, job->first + index, c), 1, 1.0);
    }
}

/* Return COMPLETE, VOID (see the top), BROKEN (see `error`), or NOT_YET after a slice of time: recheck the status and call
 * again.
 *
 * Every member works on piece k in this order: fill k, combine k - 1, receive k - 1 - window, in two steps the rest of k - 1 -
 * 2 * window, read out the one before that. So both ends of a stream know which message is next. A member that has filled piece
 * n has combined all up to n - 2 and read all up to n - 3 - lag: with NUM_INPUTS places for inputs and lag + 3 for results, a
 * member only publishes its last filled piece, and a slice leader its last received one. Piece numbers continue from one staged
 * job to the next. A piece is sent before one is received, so no two hosts wait for one another.
 */
int hora_between_hosts(struct hosts_job *job, long slice_ns) {
    struct hosts *hosts = job->hosts;
    int carries = hosts->outgoing != NULL, staged = !job->resident, num_local = hosts->num_local;
    int64_t lag = job->two_steps ? 2 * job->window : job->window, at;
    int outcome;
    begin_spinning(&hosts->patience);
    if (carries && job->check && job->greeting == TO_SEND && greet(job) < 0) return BROKEN;
    if (carries && job->check == AT_ONCE && job->greeting == SENT && (outcome = compare(job, slice_ns)) != COMPLETE) return outcome;
    for (; job->number < job->num_pieces + lag + 2; job->number++, job->step = FILL) {
        int64_t number = job->number;
        switch (job->step) {
        case FILL:
            if (staged && number < job->num_pieces) {
                at = job->first + number - 2; /* a slice leader waited for that before it combined it */
                if (!carries && number > 1 && !all_reached(job, filled_by, num_local, at, slice_ns)) return NOT_YET;
                fill(job, number);
                tell(hosts, filled_by(hosts, hosts->member), job->first + number + 1);
            }
            job->step = COMBINE; /* fall through */
        case COMBINE:
            at = number - 1;
            if (carries && at >= 0 && at < job->num_pieces) {
                if (staged && !all_reached(job, filled_by, num_local, job->first + at, slice_ns)) return NOT_YET;
                if (combine(job, at) < 0) return BROKEN;
            }
            job->step = RECEIVE_A; /* fall through */
        case RECEIVE_A:
            at = number - 1 - job->window;
            if (carries && at >= 0 && at < job->num_pieces) {
                if ((outcome = receive(job, at, slice_ns)) != COMPLETE) return outcome;
                job->asked = 0;
            }
            job->step = RECEIVE_B; /* fall through */
        case RECEIVE_B:
            at = number - 1 - lag;
            if (carries && job->two_steps && at >= 0 && at < job->num_pieces) {
                if ((outcome = receive_rest(job, at, slice_ns)) != COMPLETE) return outcome;
                job->asked = 0;
            }
            job->step = READ_OUT; /* fall through */
        case READ_OUT:
            at = number - 2 - lag;
            if (staged && at >= 0) {
                if (!all_reached(job, received_by, hosts->num_leaders, job->first + at, slice_ns)) return NOT_YET;
                read_out(job, at);
            }
        }
    }
    return COMPLETE;
}
