"""The operation queue of a process set: everything that the set negotiates, independent of every other set.

    submit -> in flight, announced -> (negotiation, plan) -> batch -> transport -> request done -> waiters woken

Each member derives the same batches from the agreed rounds. One thread at a time makes progress (`progress`).

A thread that repeats a known call may use the queue exclusively (`repeated`) and puts nothing in flight: it is
the driver, and other submissions are announced afterwards. If the other members do not come at once, or it is
interrupted (Ctrl-C), its call goes in flight like an ordinary blocking request, and the next driver continues with it:

    free --begin_exclusive--> exclusive --end_exclusive--> free
                              exclusive --leave_unfinished--> unfinished --the next driver--> free

Gradient buckets need no negotiation in a step: they use a schedule (`schedule`), not this queue.

A signal may arrive at any line here, and its handler may call `hvd.shutdown()`: nothing on that path (`drain`, `close`)
waits without a limit for a lock that the interrupted thread may hold.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any, NamedTuple

import torch

from hora.engine.execute import deliver, end, execute, execute_on_device
from hora.engine.negotiation.base import Negotiation
from hora.engine.plan import Batch, BatchPlanner, Part
from hora.engine.progress import ProgressEngine
from hora.engine.request import NUM_INSTANCES, GoOn, Key, Kind, Request, Signature, Validator, full_names
from hora.engine.shm.counters import SLICE_NS
from hora.engine.shm.segment import Segment
from hora.engine.status import StallLimits, StallWatch, TimelineRecorder, WorldStatus
from hora.engine.transport.base import Transport
from hora.engine.transport.cuda import CudaTransport
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

log = logging.getLogger("hora")

_DRAIN_LIMIT_S = 1.0
_SETTLE_LIMIT_S = 600.0  # for work that is queued on a GPU


# Executes a persistent reduction that all members have agreed on; the request is None if this rank has joined.
ExecuteBound = Callable[[Part, Request | None, Transport], None]


OBJECTS = "objects"  # the transport of tensors in host memory that may be pickled objects, if they have their own
_MOVES = frozenset((Kind.ALLGATHER, Kind.BROADCAST, Kind.ALLTOALL))


def _may_be_objects(batch: Batch) -> bool:
    """Return whether these are pickled objects or their sizes, as torch.distributed's object collectives send them."""
    return batch.kind in _MOVES and batch.devices == "cpu" and {"uint8", "int64"}.issuperset(batch.signature.dtypes)


class QueueWorld(NamedTuple):
    """The part of a world that all its queues need."""

    rank: int
    status: WorldStatus
    recorder: TimelineRecorder
    # Executes a batch about the process sets themselves; returns the answer for its requests
    change_sets: Callable[[Batch], int | Segment | None]
    on_idle: Callable[[], None]  # called when nothing is in flight any more while the world is closing
    core: int | None  # where background threads run; None: anywhere
    seals_objects: bool = False  # tensors may travel in clear, but not those that may be pickled objects


class OperationQueue(ProgressEngine):
    """A process set on this rank. Its members call `make_transport(devices)` at the same point of the agreed order."""

    _exclusive = False  # a thread has it to itself
    _farewell = ""  # why the set ends, once its end is announced
    _retired = ""  # the same, once all members have agreed on it
    waited_for: Key | None = None  # what this rank has waited for until its deadline

    def __init__(
        self,
        process_set_id: int,
        ranks: Sequence[int],
        world: QueueWorld,
        *,
        negotiation: Negotiation,
        planner: BatchPlanner,
        stall: StallLimits | None,
        make_transport: Callable[[str], Transport],
    ) -> None:
        self.in_flight: dict[Key, Request] = {}
        super().__init__(f"hora-set-{process_set_id}", world.core, ranks, self.in_flight)
        self.process_set_id = process_set_id
        self.ranks = tuple(ranks)
        self.member = self.ranks.index(world.rank)
        self.world = world
        self.status, self.recorder = world.status, world.recorder
        self.negotiation = negotiation
        self.planner = planner
        self.validator = Validator(ranks)
        self.bound: dict[str, ExecuteBound] = {}  # by the name of the reduction
        self.schedules: weakref.WeakSet[Any] = weakref.WeakSet()  # work without negotiation (`ReductionSchedule`)
        self.lock = threading.Lock()  # of submission
        self.numbers: dict[str, int] = {}  # the next running number of unnamed requests, by operation
        self.lane: deque[Request] = deque()  # repeated calls that no thread waits in
        self._kept_back: list[Request] = []  # to be announced after a thread has used the queue exclusively
        self._stalls = StallWatch(stall, ranks, self.member, world.status)
        self._make_transport = make_transport
        self.transports: dict[str, Transport] = {}  # by devices

    # Submission.

    def submit(self, request: Request, *, background: bool) -> None:
        """Put a request in flight. `background`: the background thread must drive it, because the caller continues."""
        with self.lock:
            if self._retired or not self.status.is_open:
                self.check_open()
            instance = self.next_instance(request.signature)
            if (key := request.signature.key(instance)) in self.in_flight:
                raise ValueError(same_name(key))
            try:
                self._hold(request, instance)
                if self._exclusive:
                    self._kept_back.append(request)
                else:
                    self.negotiation.announce(request.signature, instance)
                if self.stopping:  # a signal handler has shut down meanwhile
                    raise self._error()
            except BaseException:  # no member will ever see it
                if self.in_flight.get(request.key) is request:
                    self.in_flight.pop(request.key, None)
                self.check_open()
                raise
        if background:
            self.negotiation.wake()
            self.wake_background()

    def next_instance(self, signature: Signature) -> int:
        """Return the running number of the next request; 0 for a named one. Called with the lock held."""
        if signature.name is not None:
            return 0
        instance = self.numbers.get(signature.operation, 0)
        self.numbers[signature.operation] = (instance + 1) % NUM_INSTANCES
        return instance

    def _hold(self, request: Request, instance: int) -> None:
        request.queue, request.instance, request.key = self, instance, request.signature.key(instance)
        if request.signature.device != "cpu":
            request.device_event = torch.cuda.current_stream(request.tensors[0].device).record_event()
        request.parts_left = max(len(request.tensors), 1)
        self.in_flight[request.key] = request

    def check_open(self) -> None:
        """Raise an error if nothing new may begin."""
        if self._retired or not self.status.is_open:
            raise self._error()

    def keys_in_flight(self) -> list[Key]:
        """Return the keys of announced and scheduled work that this rank waits for. Thread-safe."""
        in_schedules = (key for schedule in list(self.schedules) for key in schedule.keys_in_flight())
        return [*filter(None, [self.waited_for]), *self.in_flight, *in_schedules]

    @property
    def is_executing(self) -> bool:
        """Return whether a batch that all members have agreed on has begun. Thread-safe."""
        return self._stalls.has_begun

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight) + self._exclusive + sum(schedule.num_in_flight for schedule in list(self.schedules))

    # Results.

    def result(self, request: Request) -> list[torch.Tensor]:
        """Wait for a request of this queue; returns its outputs or raises its error."""
        if not request.done:
            self.wait(request)
        request.raise_error()
        if request.device_event is not None:
            deliver(request)
        return request.results or request.outputs or []

    # Progress. Everything in this part runs under the progress lock, unless it says otherwise.

    def drive(self, until: Any) -> None:
        if torch.is_inference_mode_enabled():  # the caller's: our own tensors outlive it
            with torch.inference_mode(False):
                super().drive(until)
        else:
            super().drive(until)

    def _step(self) -> None:
        if self.lane:
            self._go_on_with_first(SLICE_NS)
            return
        try:
            worked = self._execute_round()
        except BaseException as error:
            self.broke(error)
            raise
        if not worked:
            self._stalls.check_pending(self.planner, self.negotiation)
            self.negotiation.wait()

    def broke(self, error: BaseException) -> None:
        """Break the world unless it is broken: this rank cannot do what it has agreed to. Thread-safe."""
        if isinstance(error, HorovodInternalError):
            return
        if isinstance(error, Exception):
            log.exception("a collective of the ranks %s failed", list(self.ranks))
            self.status.failed(f"{type(error).__name__}: {error}")
            raise self.status.error() from error
        self.status.interrupted(type(error).__name__)  # Ctrl-C inside a collective
        self._fail(self.status.error())

    def _execute_round(self) -> bool:
        """Execute one round; returns False if there was none."""
        closing = self.status.closing  # before polling: poll then sees what was agreed before the goodbye
        self.negotiation.flush(self.lock)
        batches = self._poll()
        if batches is None:
            self.status.check_alive()
            if closing and not self.negotiation.may_be_late:
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
        """Return the batches of the next round, None if there is none."""
        self.planner.now = time.monotonic()
        recorder = self.recorder
        self.planner.on_arrival = None if recorder.timeline is None else recorder.arrived
        return self.negotiation.poll(self.planner)

    def _execute(self, batch: Batch) -> None:
        in_flight = self.in_flight
        requests = {part[0]: in_flight[part[0]] for part in batch.parts if part[0] in in_flight}
        if batch.kind is Kind.JOIN:
            self._end_join(batch)
        elif batch.error is not None:
            self._finish(requests.values(), HorovodInternalError(batch.error))
        elif batch.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET, Kind.SHARED_MEMORY):
            answer = self.world.change_sets(batch)
            for request in requests.values():
                request.answer = answer
            self._finish(requests.values(), None)
        elif batch.kind is Kind.RETIRE:
            self._finish(requests.values(), None)
            with self.lock:  # nothing is submitted from now on
                self._retired = self._farewell
            self._fail(self._error())
        else:
            self._execute_collective(batch, requests)

    def _execute_collective(self, batch: Batch, requests: Mapping[Key, Request]) -> None:
        sealed = self.world.seals_objects and _may_be_objects(batch)
        transport = self.transport(OBJECTS if sealed else batch.devices)
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
        with self.lock:
            # A joined rank has counted fewer unnamed requests: all continue from the latest number.
            self.numbers = dict(self.planner.unnamed)
        joined = [request for request in self.in_flight.values() if request.signature.kind == Kind.JOIN]
        for request in joined:
            request.answer = batch.last_joined
        self._finish(joined, None)

    def _finish(self, requests: Iterable[Request], error: HorovodInternalError | None) -> None:
        requests = list(requests)
        for request in requests:
            request.error = error
        if error is None:
            end(requests, self.ranks)
        for request in requests:
            self.in_flight.pop(request.key, None)
            request.done = True
        self.notify_waiters()
        for request in requests:
            if request.on_done is not None:
                request.call_back()
        self.idle_if_closing()

    def idle_if_closing(self) -> None:
        """Notify the world that nothing is in flight, if it is closing. Thread-safe."""
        if self.status.closing and not self.in_flight:
            self.world.on_idle()

    def _fail(self, error: HorovodInternalError) -> None:
        """Fail every request in flight with this error. Thread-safe."""
        self.lane.clear()
        self._finish(self.in_flight.copy().values(), error)
        self.notify_waiters(all_threads=True)

    # Exclusive use by one thread. It needs no lock: the thread first declares itself and then checks for requests in
    # flight; a submission first puts its request in flight and then checks for an exclusive thread.

    def begin_exclusive(self) -> bool:
        """Become the driver of an idle queue; returns False if it is not idle."""
        if self.in_flight or self.recorder.timeline is not None or not self.driving.acquire(False):
            return False
        self.driver = get_ident()
        self._exclusive = True
        if self.in_flight or self.stopping or not self.status.is_open or not self.planner.idle:
            self.end_exclusive()
            return False
        return True

    def end_exclusive(self, waiting: bool = False) -> None:
        """Stop being the driver, and announce what other threads have submitted meanwhile.

        `waiting`: this thread has left its call unfinished, and waits for it next.
        """
        self._announce_kept_back()
        self.driver = 0
        self.release()
        if (self.in_flight or self.num_waiters) and not waiting:
            self.hand_over()
        if self.status.closing:
            self.idle_if_closing()

    def leave_unfinished(self, request: Request, instance: int, go_on: GoOn) -> None:
        """Put the call of the thread that uses the queue exclusively in the lane. `end_exclusive` follows."""
        if (same := self.in_flight.get(request.signature.key(instance))) is not None:  # another thread's: not announced
            with self.lock:
                self._kept_back = [each for each in self._kept_back if each is not same]
            self._finish([same], HorovodInternalError(same_name(same.key)))
        self._hold(request, instance)
        request.go_on = go_on
        self.lane.append(request)

    def start_repeated(self, request: Request, go_on: GoOn) -> bool:
        """Put a repeated call in the lane, and advance it without waiting. Returns False if it must be announced.

        The caller ensures that a thread drives it.
        """
        signature = request.signature
        with self.lock:
            self.check_open()
            busy = self._kept_back or len(self.in_flight) != len(self.lane) or self.recorder.timeline is not None
            if busy or self.stopping or signature.name is not None:
                return False
            self._hold(request, self.next_instance(signature))
            if self._exclusive and not self.lane:  # a thread uses the queue alone, or is about to find this request
                del self.in_flight[request.key]
                self.numbers[signature.operation] = request.instance
                return False
            self._exclusive, request.go_on = True, go_on
            self.lane.append(request)
        self.go_on_now()
        return True

    def go_on_now(self) -> None:
        """Go on with the lane as far as that takes no waiting."""
        if self.lane and self.driving.acquire(blocking=False):
            self.driver = get_ident()
            try:
                while self.lane and self._go_on_with_first(0):
                    pass
            except HorovodInternalError as error:
                self._fail(error)
            finally:
                self.driver = 0
                self.release()
                self.notify_waiters()

    def _go_on_with_first(self, slice_ns: int) -> bool:
        """Go on with the first call of the lane; returns whether it is settled."""
        request = self.lane[0]
        assert request.go_on is not None
        done = request.go_on(request.instance, slice_ns)
        if done is None or not self.lane or self.lane[0] is not request:  # failed meanwhile
            return False
        if done:
            self.lane.popleft()
            self._announce_kept_back()
            self._finish([request], None)
            return True
        with self.lock:
            self._kept_back[:0] = self.lane
            self.lane.clear()
        self._announce_kept_back()
        return True

    def _announce_kept_back(self) -> None:
        with self.lock:
            if self.lane:
                return
            self._exclusive = False
            if self._kept_back:
                kept_back, self._kept_back = self._kept_back, []
                for request in kept_back:
                    self.negotiation.announce(request.signature, request.instance)

    def look_around(self, closing: bool) -> None:
        """Raise if waiting has become pointless, and look for stalls.

        `closing` is the status from before a member turned out to be missing.
        """
        if self.stopping:
            raise self._error()
        self.status.check_alive()
        if closing:
            raise self.status.error()
        self.planner.now = time.monotonic()
        self._stalls.check_pending(self.planner, self.negotiation)

    # Transports.

    def transport(self, devices: str = "cpu") -> Transport:
        """Return the transport for these devices (see `Batch`), created on first use."""
        found = self.transports.get(devices)
        if found is None:
            found = self.transports[devices] = self._make_transport(devices)
        return found

    def _on_gpus(self) -> list[CudaTransport]:
        return [transport for transport in [*self.transports.values()] if isinstance(transport, CudaTransport)]

    # Stalls, on the control tree's thread.

    def inspect(self) -> None:
        """Look for stalls, once a second. Executes nothing: other ranks may need this thread."""
        if self._stalls.limits is None:
            return
        if self.driving.acquire(blocking=False):
            try:
                self._note_others()
            finally:
                self.driving.release()
            self.hand_over()
        else:
            self._stalls.check_execution()

    def _note_others(self) -> None:
        """Record what others wait for while nothing is in flight here; otherwise the driver does."""
        if not self.lock.acquire(blocking=False):
            return  # something is being submitted
        try:  # nothing new is submitted meanwhile, so nothing can become ready
            idle = not self.in_flight and not self.stopping and self.status.is_open
            batches = self._poll() if idle else None
        finally:
            self.lock.release()
        assert not batches, batches
        self._stalls.check_pending(self.planner, self.negotiation)

    # The end. Thread-safe.

    def wake(self) -> None:
        self.negotiation.wake()

    def interrupt(self) -> None:
        super().interrupt()
        self.negotiation.wake(interrupt=True)
        if self.status.broken:
            for transport in self._on_gpus():
                transport.abort()  # waits on a GPU need not continue

    def drain(self) -> None:
        """Execute what was agreed before this rank began to leave; the rest fails."""
        if not self.num_in_flight or not self.lock.acquire(timeout=_DRAIN_LIMIT_S):
            return  # the signal that makes this rank leave has interrupted a submission
        self.lock.release()
        if self.may_drive(_DRAIN_LIMIT_S):
            try:
                self.drive(None)
            finally:
                self.driving.release()

    def wait_for_gpu(self) -> None:
        """Wait until the GPU has finished this rank's part: other members may need it."""
        until = time.monotonic() + _SETTLE_LIMIT_S

        def check_alive() -> None:
            if self.status.broken or time.monotonic() > until:
                raise self.status.error()

        for transport in self._on_gpus():
            with suppress(HorovodInternalError):
                transport.wait_for_gpu(check_alive)

    def retire(self, why: str) -> None:
        """End the set (collective). What its members have agreed on is executed, the rest fails with `why`."""
        self._farewell = why
        last = Request(Signature(int(Kind.RETIRE), "remove_process_set", None))
        try:
            self.submit(last, background=False)
            last.result()
        except HorovodInternalError:
            if self.status.is_open:
                raise
            # A rank that is no member has done its part of the removal and shut down: the set ends with the world.
        self.close()

    def abandon(self, why: str) -> None:
        """End the set on this rank only: everything in flight and later fails. Thread-safe."""
        with self.lock:
            self._retired = self._retired or why
        self._fail(HorovodInternalError(self._retired))
        self.interrupt()

    def close(self) -> None:
        """Fail work in flight, end the background threads, and release the transports."""
        for schedule in list(self.schedules):
            schedule.close()
        self._end()

    def _put_away(self) -> None:
        for transport in self.transports.values():
            transport.close()
        self.transports.clear()
        self.bound.clear()
        self.negotiation.close()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(self._retired or self.status.reason)


def same_name(key: Key) -> str:
    return (
        "a tensor with the same name as another tensor that is still being processed was submitted: "
        f"{full_names(*key, 1)[0]}; use another name or synchronize the first one"
    )
