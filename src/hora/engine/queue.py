"""The operation queue of a process set: everything the set does, independent of every other set.

It holds the requests in flight, the agreement with the other members, the planner, and the transports. Progress is made
by the thread that holds the progress lock, the driver: a thread that waits for a result drives the queue itself, which
saves two changes of thread; requests that no thread waits for yet are driven by the queue's background thread, which sleeps
when there are none.

    submit -> in flight, announced -> (agreement, plan) -> batch -> transport -> request done -> waiters woken

A thread that has the queue to itself may do without all this (`begin_alone`, for `lone`): meanwhile nothing is announced.

A signal may come at any line here, and its handler may call `hvd.shutdown()`: nothing on that way (`drain`, `close`) waits
without a limit for a lock that the interrupted thread may hold.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from hora.engine.agree.agreement import Agreement
from hora.engine.background import BackgroundThread
from hora.engine.execute import deliver, execute, execute_on_device, write_back
from hora.engine.plan import Batch, Part, Pending, Planner
from hora.engine.recorder import Recorder
from hora.engine.request import NUM_INSTANCES, Key, Kind, Request, Signature, full_names
from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.shm.segment import Segment
from hora.engine.stall import StallInspector
from hora.engine.stall_watch import StallWatch
from hora.engine.status import WorldStatus
from hora.engine.transport.base import Transport
from hora.engine.transport.cuda import CudaTransport
from hora.engine.validation import Validator
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

__all__ = ["ExecuteBound", "OperationQueue"]

log = logging.getLogger("hora")

_WAITER_SLICE_S = 0.5
_DRAIN_LIMIT_S = 1.0
_CLOSE_LIMIT_S = 5.0
_SETTLE_LIMIT_S = 600.0  # of work that is queued on a GPU

# Executes a bound reduction that all members have agreed on; the request is None if this rank has joined.
ExecuteBound = Callable[[Part, Request | None, Transport], None]


class OperationQueue:
    """The progress of one process set on this rank, which is its member number `member`.

    `make_transport(devices)` is called by every member at the same point of the agreed order. `change_sets` executes a batch
    that is about the process sets themselves, and gives the answer to its requests. `on_idle` is called when nothing is in
    flight any more while the world is closing. `core`: where the background thread runs.
    """

    def __init__(
        self,
        process_set_id: int,
        ranks: Sequence[int],
        member: int,
        *,
        agreement: Agreement,
        planner: Planner,
        stall: StallInspector | None,
        status: WorldStatus,
        recorder: Recorder,
        make_transport: Callable[[str], Transport],
        change_sets: Callable[[Batch], int | Segment | None],
        on_idle: Callable[[], None],
        core: int | None = None,
    ) -> None:
        self.process_set_id = process_set_id
        self.ranks = tuple(ranks)
        self.member = member
        self.agreement = agreement
        self.validator = Validator(ranks)
        self.status = status
        self.recorder = recorder
        self.bound: dict[str, ExecuteBound] = {}  # by the name of the reduction
        self.barriers: weakref.WeakSet[SharedMemoryBarrier] = weakref.WeakSet()  # of bound reductions and their owners
        self._planner = planner
        self._stalls = StallWatch(stall, ranks, member, status)
        self._make_transport = make_transport
        self._change_sets = change_sets
        self._on_idle = on_idle
        self._transports: dict[str, Transport] = {}
        self._in_flight: dict[Key, Request] = {}
        self._unnamed: dict[str, int] = {}
        self._lock = threading.Lock()  # submission: in-flight table, numbering, announcements
        self._progress = threading.Lock()  # held by the driver
        self._driver = 0  # the thread that holds it
        self._finished = threading.Condition()  # for threads that wait while another one drives
        self._num_waiters = 0
        self._alone = False  # between `begin_alone` and `end_alone`
        self._lone_seen: dict[Key, float] = {}  # since when members wait for lone requests
        self._kept_back: list[tuple[Signature, int]] = []  # what other threads wanted to announce meanwhile
        self._stopping = False
        self._closed = False
        self._farewell = ""  # why the set ends, when its end has been announced
        self._retired = ""  # the same, when all members have agreed on it
        self._background = BackgroundThread(
            f"hora-set-{process_set_id}", core, has_work=lambda: bool(self._in_flight), work=self._drive_in_background
        )
        self._records = ranks[member] == 0  # rank 0 writes the timeline

    def submit(self, request: Request, *, background: bool, instance: int | None = None) -> None:
        """Put a request in flight. `background`: the background thread has to drive it, because the caller goes on.
        `instance`: its running number, where it has one already."""
        signature = request.signature
        with self._lock:
            self.check_open()
            if instance is None:
                instance = self._next_instance(signature)
            key = signature.key(instance)
            if key in self._in_flight:
                raise ValueError(
                    f"a tensor with the same name as another tensor that is still being processed was submitted: "
                    f"{full_names(*key, 1)[0]}; give it another name or synchronize the first one"
                )
            request.key = key
            request.parts_left = max(len(request.tensors), 1)
            self._in_flight[key] = request
            try:
                if self._alone:
                    self._kept_back.append((signature, instance))
                else:
                    self.agreement.announce(signature, instance)
                if self._stopping:  # a signal's handler has shut down while this was under way
                    raise self._error()
            except BaseException:  # no member will ever hear of it
                self._in_flight.pop(key, None)
                self.check_open()
                raise
        if background:
            self.agreement.wake()
            self._background.wake()

    def _next_instance(self, signature: Signature) -> int:
        """The running number of the next request, used up herewith; 0 for one with a name. Under the lock."""
        if signature.name is not None:
            return 0
        instance = self._unnamed.get(signature.operation, 0)
        self._unnamed[signature.operation] = (instance + 1) % NUM_INSTANCES
        return instance

    # A thread alone.

    def begin_alone(self, signature: Signature, take_ticket: Callable[[], int]) -> tuple[int, int] | None:
        """Become the driver of a queue in which nothing happens: the ticket and the running number of a lone request.

        None where something does happen. Until `end_alone` no request of this rank is announced.
        """
        if self._in_flight or self.recorder.timeline is not None or not self._progress.acquire(blocking=False):
            return None
        self._driver = threading.get_ident()
        with self._lock:
            free = not self._in_flight and not self._stopping and not self._retired and self.status.is_open
            ticket = take_ticket() if free and self._planner.idle else 0
            if ticket:
                self._alone = True
                return ticket, self._next_instance(signature)
        self.end_alone()
        return None

    def end_alone(self) -> None:
        """Announce what other threads have submitted meanwhile, and stop to be the driver."""
        if self._alone:
            with self._lock:
                self._alone = False
                kept_back, self._kept_back = self._kept_back, []
                for signature, instance in kept_back:
                    self.agreement.announce(signature, instance)
        self._driver = 0
        self._stop_driving()
        self._hand_over()
        if self.status.closing and not self._in_flight:
            self._on_idle()

    def look_around_alone(self, closing: bool) -> None:
        """While a lone request waits: raise when that has become pointless, and look for stalls. `closing`: what the status
        said before it turned out that a member has not come."""
        if self._stopping:
            raise self._error()
        self.status.guard()
        if closing:
            raise self.status.error()
        self._planner.now = time.monotonic()
        self._stalls.check_pending(self._planner, self._lone_requests)

    def settle_lone(self, signature: Signature, instance: int) -> None:
        """All members have agreed on a lone request."""
        self._planner.note_lone(signature, instance)

    def made_transport(self) -> Transport | None:
        """The transport for tensors on the CPU, if there is one already."""
        return self._transports.get("cpu")

    def _lone_requests(self) -> list[Pending]:
        """What members wait for without having announced it, as a stall report wants it."""
        now, found = self._planner.now, []
        seen, self._lone_seen = self._lone_seen, {}
        for (signature, instance), signatures in self.agreement.lone_requests().items():
            key = signature.key(instance)
            entry = Pending(key, len(self.ranks), seen.get(key, now))
            entry.signatures = signatures
            self._lone_seen[key] = entry.first_seen
            found.append(entry)
        return found

    def check_open(self) -> None:
        """Raise when nothing new may begin."""
        if self._retired:
            raise HorovodInternalError(self._retired)
        self.status.check_open()

    def result(self, request: Request) -> list[torch.Tensor]:
        """Wait for a request of this queue; its outputs, or its error."""
        if not request.done:
            self.wait(request)
        if request.error is not None:
            raise HorovodInternalError(*request.error.args)
        if request.device_event is not None:
            deliver(request)
        return request.results or request.outputs or []

    def wait(self, request: Request) -> None:
        """Return when the request is done; drive the queue unless another thread does."""
        since, moving_s = time.perf_counter(), meter.transport_s
        meter.blocked = request, since, self.ranks
        try:
            while not request.done:
                self._drive_or_wait(request)
        finally:
            meter.blocked = None
            meter.waited(since, moving_s)

    def _drive_or_wait(self, request: Request) -> None:
        if self._progress.acquire(blocking=False):
            try:
                self._drive(request)
            finally:
                self._stop_driving()
                self._hand_over()
            return
        self.agreement.wake()
        with self._finished:
            self._num_waiters += 1
            if not request.done and self._progress.locked():
                self._finished.wait(_WAITER_SLICE_S)
            self._num_waiters -= 1

    def transport(self, devices: str = "cpu") -> Transport:
        """The transport for these devices (see `Batch`), made when first needed."""
        found = self._transports.get(devices)
        if found is None:
            found = self._transports[devices] = self._make_transport(devices)
        return found

    def inspect(self) -> None:
        """Look for stalls; called once a second, on the hub's thread. Nothing is executed here: other ranks may need
        this thread before they can do their part."""
        if not self._stalls.inspects:
            return
        if self._progress.acquire(blocking=False):
            try:
                self._look_around()
            finally:
                self._progress.release()
            self._hand_over()
        else:
            self._stalls.check_execution()

    def _look_around(self) -> None:
        """While nothing is in flight here, take note of what others wait for. Else the driver does that."""
        if not self._lock.acquire(blocking=False):
            return  # something is being submitted
        try:  # nothing new is submitted meanwhile, so nothing can become ready
            idle = not self._in_flight and not self._stopping and self.status.is_open
            batches = self._poll() if idle else None
        finally:
            self._lock.release()
        assert not batches, batches
        self._stalls.check_pending(self._planner, self._lone_requests)

    def drain(self) -> None:
        """Execute what was agreed before this rank began to leave; what was not agreed fails."""
        if not self.num_in_flight or not self._lock.acquire(timeout=_DRAIN_LIMIT_S):
            return  # a submission was interrupted by the signal that this rank leaves for
        self._lock.release()
        if self._may_drive(_DRAIN_LIMIT_S):
            try:
                self._drive(None)
            finally:
                self._progress.release()

    def settle(self) -> None:
        """Wait until the GPU has done what this rank has its part in: other members may need that part."""
        until = time.monotonic() + _SETTLE_LIMIT_S

        def guard() -> None:
            if self.status.broken or time.monotonic() > until:
                raise self.status.error()

        for transport in self._cuda_transports():
            with suppress(HorovodInternalError):
                transport.settle(guard)

    def wake(self) -> None:
        """The world's status has changed: look at it again. Any thread."""
        self.agreement.wake()
        if self.status.broken:
            for transport in self._cuda_transports():
                transport.give_up()

    def _cuda_transports(self) -> list[CudaTransport]:
        return [transport for transport in [*self._transports.values()] if isinstance(transport, CudaTransport)]

    def retire(self, why: str) -> None:
        """End the set (collective). What its members have agreed on before is executed, the rest fails with `why`."""
        self._farewell = why
        last = Request(Signature(int(Kind.RETIRE), "remove_process_set", None))
        try:
            self.submit(last, background=False)
            self.result(last)
        except HorovodInternalError:
            if self.status.is_open:
                raise
            # A rank that is no member has done its part, the removal, and shut down: the set ends with the world.
        self.close()

    def close(self) -> None:
        """Fail what is in flight, end the background thread, release the transports."""
        self._stopping = True
        self._background.stop(self.agreement.wake)
        self._fail(self._error())
        if self._may_drive(_CLOSE_LIMIT_S):
            self._stop_driving()

    def _may_drive(self, limit_s: float) -> bool:
        """Become the driver. Not while this very thread is, in the lines that a signal has interrupted."""
        return self._driver != threading.get_ident() and self._progress.acquire(timeout=limit_s)

    def _stop_driving(self) -> None:
        """Let another thread be the driver. The last one puts away what the queue holds."""
        if self._stopping and not self._closed:
            self._closed = True
            for transport in self._transports.values():
                transport.close()
            self._transports.clear()
            self.bound.clear()
            self.agreement.close()
        self._progress.release()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(self._retired or self.status.reason)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + self._alone

    # Progress. Everything below runs under the progress lock, unless it says otherwise.

    def _drive(self, until: Request | None) -> None:
        if torch.is_inference_mode_enabled():  # the caller's: tensors of ours that are made on the way outlive it
            with torch.inference_mode(False):
                self._drive(until)
            return
        self._driver = threading.get_ident()
        try:
            while self._in_flight and not (until is not None and until.done) and not self._stopping:
                if not self.unless_broken(self._step):
                    self._stalls.check_pending(self._planner)
                    self.agreement.wait()
            if self._stopping:
                self._fail(self._error())
        except HorovodInternalError as error:
            self._fail(error)
        finally:
            self._driver = 0

    def unless_broken(self, work: Callable[[], bool]) -> bool:
        """Do it. What this rank has agreed to and cannot do breaks the world: the others wait for it."""
        try:
            return work()
        except HorovodInternalError:
            raise
        except Exception as error:
            log.exception("a collective of the ranks %s failed", list(self.ranks))
            self.status.failed(f"{type(error).__name__}: {error}")
            raise self.status.error() from error
        except BaseException as interruption:  # Ctrl-C in mid-collective
            self.status.failed(f"it was interrupted by {type(interruption).__name__}")
            self._fail(self.status.error())
            raise

    def _step(self) -> bool:
        """Execute one round. False when there was none."""
        closing = self.status.closing  # before polling: what was agreed before the goodbye is then seen by poll
        if self.agreement.holds_back:
            with self._lock:
                self.agreement.flush()
        batches = self._poll()
        if batches is None:
            self.status.guard()
            if closing:
                raise self.status.error()
            return False
        if self.recorder.timeline is not None:
            self.recorder.timeline.cycle()
        for batch in batches:
            self._execute(batch)
            if self._retired:
                break  # also on the other members
        return True

    def _poll(self) -> list[Batch] | None:
        """The batches of the next round, None if there is none."""
        self._planner.now = time.monotonic()
        recorder = self.recorder
        self._planner.on_arrival = recorder.arrived if self._records and recorder.timeline is not None else None
        return self.agreement.poll(self._planner)

    def _execute(self, batch: Batch) -> None:
        in_flight = self._in_flight
        requests = {part[0]: in_flight[part[0]] for part in batch.parts if part[0] in in_flight}
        if batch.kind is Kind.JOIN:
            self._end_join(batch)
        elif batch.error is not None:
            self._finish(requests.values(), HorovodInternalError(batch.error))
        elif batch.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET, Kind.SHARED_MEMORY):
            answer = self._change_sets(batch)
            for request in requests.values():
                request.answer = answer
            self._finish(requests.values(), None)
        elif batch.kind is Kind.RETIRE:
            self._finish(requests.values(), None)
            with self._lock:  # nothing is submitted from now on
                self._retired = self._farewell
            self._fail(self._error())
        else:
            self._execute_collective(batch, requests)

    def _execute_collective(self, batch: Batch, requests: Mapping[Key, Request]) -> None:
        transport = self.transport(batch.devices)
        self._stalls.begin(batch.kind.name)
        if self.recorder.timeline is None:
            self._run(batch, requests, transport)
        else:
            with self.recorder.batch(batch, transport.name):
                self._run(batch, requests, transport)
        meter.transport_s += self._stalls.end()
        meter.num_bytes += batch.num_bytes
        done = []  # a group of several dtypes is done with the last of its batches
        for part in batch.parts:
            request = requests.get(part.key)
            if request is not None:
                request.parts_left -= 1
                if request.parts_left == 0:
                    done.append(request)
        self._finish(done, None)

    def _run(self, batch: Batch, requests: Mapping[Key, Request], transport: Transport) -> None:
        if batch.signature.device != "cpu":
            execute_on_device(batch, requests, transport, self.member, self.ranks, self.validator.home_gpu)
        elif batch.signature.bound:
            (part,) = batch.parts
            self.bound[str(part.key[1])](part, requests.get(part.key), transport)
        else:
            execute(batch, requests, transport, self.member, self.ranks)

    def _end_join(self, batch: Batch) -> None:
        with self._lock:
            # A rank that had joined has counted fewer unnamed requests: all go on from the latest number.
            self._unnamed = dict(self._planner.unnamed)
        joined = [request for request in self._in_flight.values() if request.signature.kind == Kind.JOIN]
        for request in joined:
            request.answer = batch.last_joined
        self._finish(joined, None)

    def _finish(self, requests: Iterable[Request], error: HorovodInternalError | None) -> None:
        for request in requests:
            request.error = error
            self._in_flight.pop(request.key, None)
            if error is None and request.device_event is None:  # on a GPU it is done on the caller's stream
                try:
                    write_back(request)
                except RuntimeError as problem:  # must not keep the request from being done
                    request.error = HorovodInternalError(f"the result could not be written back: {problem}")
            request.done = True
        self._notify_waiters()
        if self.status.closing and not self._in_flight:
            self._on_idle()

    def _fail(self, error: HorovodInternalError) -> None:
        """Give every request in flight this error. Any thread."""
        self._finish(self._in_flight.copy().values(), error)
        with self._finished:
            self._finished.notify_all()

    # Threads.

    def _hand_over(self) -> None:
        self._notify_waiters()
        if self._in_flight:
            self._background.wake()

    def _notify_waiters(self) -> None:
        if self._num_waiters:
            with self._finished:
                self._finished.notify_all()

    def _drive_in_background(self) -> None:
        self._progress.acquire()  # a driver lets go of it, or a guard ends its wait
        try:
            self._drive(None)
        finally:
            self._stop_driving()
        self._notify_waiters()
