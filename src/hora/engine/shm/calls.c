/* The library that Python loads: native.c, and repeated calls as functions of Python, from the caller's tensor to the result.
 *
 *     carry_out(parts, tensor, out, wait, targets)
 *     again(tensor, name, op, prescale_factor, postscale_factor, process_set), known(the same)
 *
 * A brief call keeps Python's lock from its first check to its result, and runs no Python code. So no other thread and no signal
 * handler sees anything of it. A call that is longer, or whose other members do not come within a moment, has the queue for
 * itself (`OperationQueue.begin_exclusive`) before it releases Python's lock, and gives it back. One that is not settled after
 * a slice of time is left to `CallPlan.go_on`.
 *
 * It declares what it uses of Python's stable ABI (PEP 384, as of 3.10), so that one library is for every version, and needs no
 * header of Python where it is built.
 */
#include "native.c"

typedef struct _object PyObject;
typedef ssize_t Py_ssize_t;
struct method {
    const char *name;
    PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t);
    int flags;
    const char *doc;
};
enum { METH_FASTCALL = 0x80 };

extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern PyObject *PyExc_TypeError;
PyObject *PyCFunction_NewEx(struct method *, PyObject *, PyObject *);
PyObject *PyDict_GetItemWithError(PyObject *, PyObject *);
PyObject *PyFloat_FromDouble(double);
PyObject *PyLong_FromLongLong(long long);
PyObject *PyLong_FromUnsignedLong(unsigned long);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyObject_Type(PyObject *);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
PyObject *PyTuple_Pack(Py_ssize_t, ...);
PyObject *PyUnicode_InternFromString(const char *);
Py_ssize_t PyDict_Size(PyObject *);
Py_ssize_t PyList_Size(PyObject *);
Py_ssize_t PySet_Size(PyObject *);
double PyFloat_AsDouble(PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
long long PyLong_AsLongLong(PyObject *);
unsigned long PyThread_get_thread_ident(void);
void *PyEval_SaveThread(void);
void *PyLong_AsVoidPtr(PyObject *);
PyObject *PyErr_Occurred(void);
void PyErr_Clear(void);
void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
void PyErr_Restore(PyObject *, PyObject *, PyObject *);
void PyErr_SetString(PyObject *, const char *);
void PyEval_RestoreThread(void *);
void Py_DecRef(PyObject *);
void Py_IncRef(PyObject *);

static PyObject *const none = &_Py_NoneStruct, *const yes = &_Py_TrueStruct, *const no = &_Py_FalseStruct;

#define NAMES(X) \
    X(_exclusive) X(_kept_back) X(closing) X(copy_back) X(data_ptr) X(device) X(driver) X(dtype) X(end_exclusive) X(go_on)   \
    X(is_contiguous) X(is_cpu) X(is_cuda) X(is_inference) X(is_neg) X(is_open) X(layout) X(num_bytes) X(num_waiters)         \
    X(numbers) X(on_arrival) X(parts) X(plan) X(prepare) X(process_set_id) X(reduce_s) X(requires_grad) X(shape) X(stage_in) \
    X(stopping) X(timeline) X(transport_s) X(unnamed) X(wait_s)
#define DECLARE(name) static PyObject *n_##name;
NAMES(DECLARE)

/* What is known of a signature (`CallPlan.parts`), and of the queue whose calls they are (`RepeatedCalls.parts`). */
enum { CALL, PLAN, OPERATION, PATH };
enum { ITS_QUEUE, ITS_IN_FLIGHT, ITS_PENDING, ITS_JOINED, ITS_PLANNER, ITS_RECORDER, ITS_STATUS, ITS_METER, ITS_IS_SUBMITTING, ITS_ACQUIRE, ITS_RELEASE };

static PyObject *item(PyObject *tuple, Py_ssize_t index) { return PyTuple_GetItem(tuple, index); }

static PyObject *kept(PyObject *object) { return Py_IncRef(object), object; }

/* Return whether an attribute is this object. */
static int is(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(object, name);
    if (!found) return PyErr_Clear(), 0;
    Py_DecRef(found);
    return found == wanted;
}

/* Return whether a function, or a method of this name, returns this object. */
static int answers(PyObject *function, PyObject *wanted) {
    PyObject *found = PyObject_CallFunctionObjArgs(function, NULL);
    if (!found) return PyErr_Clear(), 0;
    Py_DecRef(found);
    return found == wanted;
}

static int method_answers(PyObject *object, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_CallMethodObjArgs(object, name, NULL);
    if (!found) return PyErr_Clear(), 0;
    Py_DecRef(found);
    return found == wanted;
}

static int64_t number_of(PyObject *number, int64_t otherwise) {
    int64_t value = number ? PyLong_AsLongLong(number) : otherwise;
    return value;
}

/* Set an attribute to a new object, or drop that. */
static void set(PyObject *object, PyObject *name, PyObject *value) {
    if (!value || PyObject_SetAttr(object, name, value)) PyErr_Clear();
    if (value) Py_DecRef(value);
}

static void add_to(PyObject *object, PyObject *name, double more) {
    PyObject *before = PyObject_GetAttr(object, name);
    if (!before) return PyErr_Clear();
    set(object, name, PyFloat_FromDouble(PyFloat_AsDouble(before) + more));
    Py_DecRef(before);
}

/* The queue. What these functions call is written in C, so that no other thread runs meanwhile. */

static int is_free(PyObject *path) {
    return !PyDict_Size(item(path, ITS_IN_FLIGHT)) && !PyDict_Size(item(path, ITS_PENDING)) && !PySet_Size(item(path, ITS_JOINED)) &&
           is(item(path, ITS_RECORDER), n_timeline, none) && is(item(path, ITS_PLANNER), n_on_arrival, none) &&
           is(item(path, ITS_STATUS), n_is_open, yes) && is(item(path, ITS_QUEUE), n_stopping, no);
}

/* Become the queue's driver. The lock itself tells: a thread that waits for it may have it before it has Python's lock, too. */
static int acquire(PyObject *path) {
    PyObject *found = PyObject_CallFunctionObjArgs(item(path, ITS_ACQUIRE), no, NULL);
    if (!found) return PyErr_Clear(), 0;
    Py_DecRef(found);
    return found == yes;
}

static void release(PyObject *path) {
    PyObject *found = PyObject_CallFunctionObjArgs(item(path, ITS_RELEASE), NULL);
    if (!found) return PyErr_Clear();
    Py_DecRef(found);
}

/* Let other threads see that this one uses the queue. */
static void begin_exclusive(PyObject *path) {
    set(item(path, ITS_QUEUE), n_driver, PyLong_FromUnsignedLong(PyThread_get_thread_ident()));
    set(item(path, ITS_QUEUE), n__exclusive, kept(yes));
}

static int is_driver(PyObject *path) {
    PyObject *driver = PyObject_GetAttr(item(path, ITS_QUEUE), n_driver);
    int found = driver && (unsigned long)number_of(driver, 0) == PyThread_get_thread_ident();
    if (driver) Py_DecRef(driver);
    return found;
}

/* Return whether the queue has nothing to do after this thread has used it. Otherwise Python's `end_exclusive` does it. */
static int has_rest(PyObject *path) {
    PyObject *queue = item(path, ITS_QUEUE), *kept_back = PyObject_GetAttr(queue, n__kept_back);
    PyObject *waiters = PyObject_GetAttr(queue, n_num_waiters);
    int found = kept_back && waiters && !PyList_Size(kept_back) && !PyLong_AsLongLong(waiters) &&
                !PyDict_Size(item(path, ITS_IN_FLIGHT)) && is(item(path, ITS_STATUS), n_closing, no) && is(queue, n_stopping, no);
    if (kept_back) Py_DecRef(kept_back);
    if (waiters) Py_DecRef(waiters);
    return found;
}

/* Call a method that ends this thread's exclusive use of the queue. A signal handler may raise an exception before the method
 * has begun; then it is called again, with `interrupted`, and the exception remains.
 */
static PyObject *surely(PyObject *path, PyObject *object, PyObject *name, PyObject *details, PyObject *interrupted) {
    PyObject *found = PyObject_CallMethodObjArgs(object, name, details, NULL), *error[3];
    if (found) return found;
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    found = is_driver(path) ? PyObject_CallMethodObjArgs(object, name, details, interrupted, NULL) : NULL;
    if (found) Py_DecRef(found);
    PyErr_Clear();
    PyErr_Restore(error[0], error[1], error[2]);
    return NULL;
}

/* Return whether that raised no exception. */
static int end_exclusive(PyObject *path) {
    PyObject *queue = item(path, ITS_QUEUE);
    if (has_rest(path)) {
        set(queue, n__exclusive, kept(no)), set(queue, n_driver, PyLong_FromLongLong(0));
        return release(path), 1;
    }
    PyObject *found = surely(path, queue, n_end_exclusive, NULL, NULL);
    if (found) Py_DecRef(found);
    return found != NULL;
}

/* Running numbers of unnamed requests, as `OperationQueue.next_instance` and `BatchPlanner.note_number`. */

static const int64_t NUM_INSTANCES = (int64_t)1 << 32;

static int64_t numbered(PyObject *owner, PyObject *name, PyObject *operation, int64_t reached) {
    PyObject *numbers = PyObject_GetAttr(owner, name);
    if (!numbers) return PyErr_Clear(), 0;
    int64_t before = number_of(PyDict_GetItemWithError(numbers, operation), 0);
    int64_t instance = reached < 0 ? before : reached, ahead = (uint32_t)(instance - before);
    PyObject *next = PyLong_FromLongLong((instance + 1) % NUM_INSTANCES);
    if (next && ahead < NUM_INSTANCES / 2) PyDict_SetItem(numbers, operation, next);
    if (next) Py_DecRef(next);
    Py_DecRef(numbers);
    return instance;
}

/* One call. */

static void *address_of(PyObject *tensor) {
    PyObject *found = PyObject_CallMethodObjArgs(tensor, n_data_ptr, NULL);
    void *address = found ? PyLong_AsVoidPtr(found) : NULL;
    if (found) Py_DecRef(found);
    return address;
}

struct attempt {
    PyObject *parts, *path, *plan, *tensor, *out, *wait, *targets;
    PyObject *staged; /* host memory of a call on a GPU, else NULL */
    struct call *call;
    struct repeated *it;
    int64_t instance, began;
    int is_exclusive;
};

static const long SLICE_NS = 50000000; /* as in counters.py */

/* Go on until the other members' records have arrived and data has moved, or for a slice of time. */
static int advance(struct attempt *one) {
    int state = one->is_exclusive ? WAITING : hora_repeated(one->it, 0);
    if (state == DONE) return state;
    if (!one->is_exclusive) {
        begin_exclusive(one->path);
        one->is_exclusive = 1;
    }
    if (state == DIFFERENT) return state;
    void *thread = PyEval_SaveThread();
    state = hora_repeated(one->it, SLICE_NS);
    PyEval_RestoreThread(thread);
    return state;
}

static void count(const struct attempt *one, int is_done) {
    int64_t now = now_ns();
    PyObject *meter = item(one->path, ITS_METER);
    if (!is_done) return add_to(meter, n_wait_s, (double)(now - one->began) * 1e-9);
    double moving_s = (double)(now - one->it->met_ns) * 1e-9;
    add_to(meter, n_transport_s, moving_s), add_to(meter, n_reduce_s, moving_s);
    add_to(meter, n_num_bytes, (double)one->call->num_bytes);
    add_to(meter, n_wait_s, (double)(one->it->met_ns - one->began) * 1e-9);
}

static PyObject *finish(struct attempt *one) {
    hora_settle(one->it, one->call->turns);
    if (one->call->is_unnamed) numbered(item(one->path, ITS_PLANNER), n_unnamed, item(one->parts, OPERATION), one->instance);
    count(one, 1);
    int is_fine = 1;
    if (one->staged) {
        PyObject *copied = PyObject_CallMethodObjArgs(one->plan, n_copy_back, one->staged, one->out, NULL);
        is_fine = copied != NULL;
        if (copied) Py_DecRef(copied);
    }
    if (!one->is_exclusive) return release(one->path), kept(yes);
    PyObject *error[3] = {NULL};
    if (!is_fine) PyErr_Fetch(&error[0], &error[1], &error[2]);
    is_fine &= end_exclusive(one->path);
    if (error[0]) PyErr_Restore(error[0], error[1], error[2]);
    return is_fine ? kept(yes) : NULL;
}

/* Let `CallPlan.go_on` put the call in the queue's lane, and wait for it. */
static PyObject *leave(struct attempt *one) {
    PyObject *ticket = PyLong_FromLongLong(one->it->record.ticket), *instance = PyLong_FromLongLong(one->instance);
    PyObject *details = ticket && instance
                            ? PyTuple_Pack(7, one->tensor, one->out, one->staged ? one->staged : none, ticket, instance,
                                           one->wait, one->targets)
                            : NULL;
    count(one, 0);
    PyObject *found = details ? surely(one->path, one->plan, n_go_on, details, yes) : NULL;
    if (details) Py_DecRef(details);
    if (ticket) Py_DecRef(ticket);
    if (instance) Py_DecRef(instance);
    if (found) Py_DecRef(found);
    return found ? kept(none) : NULL;
}

/* Return True if the call is done, None if this thread has waited for it on the ordinary path, False if it must take that. */
static PyObject *attempt(struct attempt *one) {
    one->call = PyLong_AsVoidPtr(item(one->parts, CALL)), one->it = one->call->repeated;
    one->path = item(one->parts, PATH), one->plan = item(one->parts, PLAN);
    const struct call *call = one->call;
    if (call->num_rings != call->turns->num_rings) {
        PyObject *found = PyObject_CallMethodObjArgs(one->plan, n_prepare, NULL);
        if (!found) return NULL;
        Py_DecRef(found);
    }
    void *source = call->is_on_gpu ? NULL : address_of(one->tensor);
    void *out = one->out == one->tensor || call->is_on_gpu ? source : address_of(one->out);
    PyObject *path = one->path;
    if (PyErr_Occurred()) return NULL;
    if (!call->spec || call->num_rings != call->turns->num_rings || !is_free(path)) return kept(no);
    if (one->it->next_ticket == one->it->void_ticket) return kept(no);
    if (call->is_unnamed && !answers(item(path, ITS_IS_SUBMITTING), no)) return kept(no);
    if (!acquire(path)) return kept(no);
    if (!call->is_brief || call->is_on_gpu) begin_exclusive(path), one->is_exclusive = 1;
    if (call->is_unnamed) one->instance = numbered(item(path, ITS_QUEUE), n_numbers, item(one->parts, OPERATION), -1);
    if (call->is_on_gpu) {
        one->staged = PyObject_CallMethodObjArgs(one->plan, n_stage_in, one->tensor, NULL);
        if (!one->staged) {
            PyObject *error[3];
            PyErr_Fetch(&error[0], &error[1], &error[2]);
            if (!end_exclusive(path)) PyErr_Clear();
            PyErr_Restore(error[0], error[1], error[2]);
            return NULL;
        }
        source = out = address_of(one->staged);
    }
    one->began = now_ns();
    hora_begin(one->it, call, source, out, one->instance);
    return advance(one) == DONE ? finish(one) : leave(one);
}

static PyObject *run(PyObject *parts, PyObject *tensor, PyObject *out, PyObject *wait, PyObject *targets) {
    struct attempt one = {.parts = kept(parts), .tensor = tensor, .out = out, .wait = wait, .targets = targets};
    PyObject *found = attempt(&one);
    if (one.staged) Py_DecRef(one.staged);
    Py_DecRef(parts);
    return found;
}

static PyObject *carry_out(PyObject *self, PyObject *const *given, Py_ssize_t number) {
    (void)self;
    if (number != 5) return PyErr_SetString(PyExc_TypeError, "carry_out() takes 5 arguments"), NULL;
    return run(given[0], given[1], given[2], given[3], given[4]);
}

/* Allreduces that repeat an earlier one (`KnownAllreduces`). */

enum { TABLE, TENSOR_TYPE, STRIDED, IN_INFERENCE_MODE };

/* Return whether the engine can read and write the tensor's memory directly. */
static int is_direct(PyObject *self, PyObject *tensor) {
    PyObject *type = PyObject_Type(tensor);
    if (type) Py_DecRef(type);
    return type == item(self, TENSOR_TYPE) && (is(tensor, n_is_cpu, yes) || is(tensor, n_is_cuda, yes)) &&
           is(tensor, n_layout, item(self, STRIDED)) && is(tensor, n_requires_grad, no) &&
           method_answers(tensor, n_is_contiguous, yes) && method_answers(tensor, n_is_neg, no) &&
           method_answers(tensor, n_is_inference, no) && answers(item(self, IN_INFERENCE_MODE), no);
}

/* Return the key of a call: what its tensor looks like, and its other arguments with the type of `op`. */
static PyObject *key_of(PyObject *const *given) {
    PyObject *tensor = given[0];
    PyObject *found[] = {PyObject_GetAttr(tensor, n_shape), PyObject_GetAttr(tensor, n_dtype), PyObject_GetAttr(tensor, n_device),
                         PyObject_Type(given[2]), PyObject_GetAttr(given[5], n_process_set_id)};
    PyObject *key = NULL;
    if (found[0] && found[1] && found[2] && found[3] && found[4])
        key = PyTuple_Pack(9, found[0], found[1], found[2], given[1], given[2], found[3], given[3], given[4], found[4]);
    for (int i = 0; i < 5; i++)
        if (found[i]) Py_DecRef(found[i]);
    return key;
}

/* Return what is known of calls like this one, its key if nothing is, or None if the general path must look at it. */
static PyObject *known(PyObject *self, PyObject *const *given, Py_ssize_t number) {
    if (number != 6) return kept(none);
    PyObject *key = is_direct(self, given[0]) ? key_of(given) : NULL;
    if (!key) return PyErr_Clear(), kept(none);
    PyObject *found = PyDict_GetItemWithError(item(self, TABLE), key);
    if (found) return Py_IncRef(found), Py_DecRef(key), found;
    if (!PyErr_Occurred()) return key;
    Py_DecRef(key); /* an argument that cannot be hashed */
    return PyErr_Clear(), kept(none);
}

/* Repeat an allreduce in place. Return True if that is done, False if the call must take the ordinary path; before there is
 * a plan the same as `known`.
 */
static PyObject *again(PyObject *self, PyObject *const *given, Py_ssize_t number) {
    PyObject *found = known(self, given, number), *parts = found ? PyObject_GetAttr(found, n_parts) : NULL;
    if (!parts) return PyErr_Clear(), found; /* a key */
    if (parts == none) return Py_DecRef(parts), found;
    Py_DecRef(found);
    PyObject *done = run(parts, given[0], given[0], none, none);
    Py_DecRef(parts);
    if (done != none) return done;
    return Py_DecRef(done), kept(yes);
}

/* Return one of these functions, of which the caller keeps a reference. `self` is a tuple. */
PyObject *hora_function(int which, PyObject *self) {
    static struct method methods[] = {{"carry_out", carry_out, METH_FASTCALL, "Carry out a repeated call."},
                                      {"known", known, METH_FASTCALL, "Return what is known of an allreduce."},
                                      {"again", again, METH_FASTCALL, "Repeat an allreduce in place."}};
#define INTERN(name) n_##name = n_##name ? n_##name : PyUnicode_InternFromString(#name);
    NAMES(INTERN)
    return PyCFunction_NewEx(&methods[which], self, NULL);
}
