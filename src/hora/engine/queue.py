"""The operation queue of a process set: everything the set does, independent of every other set.

It holds the requests in flight (`submission`), the agreement with the other members, the planner, and the transports. Progress
is made by one thread at a time, the driver (`driving`).

    submit -> in flight, announced -> (agreement, plan) -> batch -> transport -> request done -> waiters woken

A thread that has the queue to itself may do without all this (`alone`, for `lone`): meanwhile nothing is announced.

A signal may come at any line here, and its handler may call `hvd.shutdown()`: nothing on that way (`drain`, `close`) waits
without a limit for a lock that the interrupted thread may hold.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident

import torch

from hora.engine.agree.agreement import Agreement
from hora.engine.alone import Alone
from hora.engine.driving import Driving
from hora.engine.execute import deliver, execute, execute_on_device, write_back
from hora.engine.plan import Batch, Part, Planner
from hora.engine.recorder import Recorder
from hora.engine.registered import Registry
from hora.engine.request import Key, Kind, Request, Signature
from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.shm.segment import Segment
from hora.engine.stall import StallInspector
from hora.engine.stall_watch import StallWatch
from hora.engine.status import WorldStatus
from hora.engine.submission import Submission
from hora.engine.transport.base import Transport
from hora.engine.transport.shm import ShmTransport
from hora.engine.transports import Transports
from hora.engine.validation import Validator
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

__all__ = ["ExecuteBound", "OperationQueue"]

log = logging.getLogger("hora")

_DRAIN_LIMIT_S = 1.0
_CLOSE_LIMIT_S = 5.0

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
        self.registry = Registry(member, len(ranks))
        self.validator = Validator(ranks, self.registry.locate)
        self.status = status
        self.recorder = recorder
        self.bound: dict[str, ExecuteBound] = {}  # by the name of the reduction
        self.barriers: weakref.WeakSet[SharedMemoryBarrier] = weakref.WeakSet()  # of bound reductions and their owners
        self.planner = planner
        self._stalls = StallWatch(stall, ranks, member, status)
        self._change_sets = change_sets
        self._on_idle = on_idle
        self._transports = Transports(make_transport, status)
        self.submission = Submission(agreement)
        self._in_flight = self.submission.in_flight
        self.driving = Driving(
            f"hora-set-{process_set_id}",
            core,
            in_flight=self._in_flight,
            drive=self._drive,
            wake_driver=agreement.wake,
            put_away=self._put_away,
        )
        self.alone = Alone(self.submission, self.driving, planner, recorder, status, on_idle)
        self._farewell = ""  # why the set ends, when its end has been announced
        self._retired = ""  # the same, when all members have agreed on it
        self._records = ranks[member] == 0  # rank 0 writes the timeline

    def submit(self, request: Request, *, background: bool, instance: int | None = None) -> None:
        """Put a request in flight. `background`: the background thread has to drive it, because the caller goes on.
        `instance`: its running number, where it has one already."""
        with self.submission.lock:
            if self._retired or not self.status.is_open:
                self.check_open()
            try:
                self.submission.put(request, instance)
                if self.driving.stopping:  # a signal's handler has shut down while this was under way
                    raise self._error()
            except BaseException:
                if self._in_flight.get(request.key) is request:
                    self._in_flight.pop(request.key, None)
                self.check_open()
                raise
        if background:
            self.agreement.wake()
            self.driving.wake_background()

    def look_around_alone(self, closing: bool) -> None:
        """While a lone request waits: raise when that has become pointless, and look for stalls. `closing`: what the status
        said before it turned out that a member has not come."""
        if self.driving.stopping:
            raise self._error()
        self.status.guard()
        if closing:
            raise self.status.error()
        self.planner.now = time.monotonic()
        self._stalls.check_pending(self.planner, self.agreement)

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

    def made_transport(self) -> Transport | None:
        """The transport for tensors on the CPU, if there is one already."""
        return self._transports.made("cpu")

    def wait(self, request: Request) -> None:
        """Return when the request is done; drive the queue unless another thread does."""
        since, moving_s = time.perf_counter(), meter.transport_s
        meter.blocked = request, since, self.ranks
        try:
            while not request.done:
                self.driving.drive_or_wait(request)
        finally:
            meter.blocked = None
            meter.waited(since, moving_s)

    def transport(self, devices: str = "cpu") -> Transport:
        """The transport for these devices (see `Batch`), made when first needed."""
        return self._transports.get(devices)

    def inspect(self) -> None:
        """Look for stalls; called once a second, on the hub's thread. Nothing is executed here: other ranks may need
        this thread before they can do their part."""
        if not self._stalls.inspects:
            return
        if self.driving.lock.acquire(blocking=False):
            try:
                self._look_around()
            finally:
                self.driving.lock.release()
            self.driving.hand_over()
        else:
            self._stalls.check_execution()

    def _look_around(self) -> None:
        """While nothing is in flight here, take note of what others wait for. Else the driver does that."""
        if not self.submission.lock.acquire(blocking=False):
            return  # something is being submitted
        try:  # nothing new is submitted meanwhile, so nothing can become ready
            idle = not self._in_flight and not self.driving.stopping and self.status.is_open
            batches = self._poll() if idle else None
        finally:
            self.submission.lock.release()
        assert not batches, batches
        self._stalls.check_pending(self.planner, self.agreement)

    def drain(self) -> None:
        """Execute what was agreed before this rank began to leave; what was not agreed fails."""
        if not self.num_in_flight or not self.submission.lock.acquire(timeout=_DRAIN_LIMIT_S):
            return  # a submission was interrupted by the signal that this rank leaves for
        self.submission.lock.release()
        if self.driving.may_drive(_DRAIN_LIMIT_S):
            try:
                self._drive(None)
            finally:
                self.driving.lock.release()

    def settle(self) -> None:
        """Wait until the GPU has done what this rank has its part in."""
        self._transports.settle()

    def wake(self) -> None:
        """The world's status has changed: look at it again. Any thread."""
        self.agreement.wake()
        if self.status.broken:
            self._transports.give_up()

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
        self.driving.stop()
        self._fail(self._error())
        if self.driving.may_drive(_CLOSE_LIMIT_S):
            self.driving.release()

    def _put_away(self) -> None:
        """The last driver lets go of what the queue holds."""
        self._transports.close()
        self.bound.clear()
        self.registry.clear()
        self.agreement.close()

    def _error(self) -> HorovodInternalError:
        return HorovodInternalError(self._retired or self.status.reason)

    def keys_in_flight(self) -> list[Key]:
        """Of what this rank has announced and waits for. Any thread."""
        return list(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + self.submission.alone

    # Progress. Everything below runs under the progress lock, unless it says otherwise.

    def _drive(self, until: Request | None) -> None:
        if torch.is_inference_mode_enabled():  # the caller's: tensors of ours that are made on the way outlive it
            with torch.inference_mode(False):
                self._drive(until)
            return
        self.driving.thread = get_ident()
        try:
            if not self.driving.stopping and (left := self.alone.finish()) is not None:
                self._finish([left], None)
            while self._in_flight and not (until is not None and until.done) and not self.driving.stopping:
                if not self.unless_broken(self._step):
                    self._stalls.check_pending(self.planner, self.agreement)
                    self.agreement.wait()
            if self.driving.stopping:
                self._fail(self._error())
        except HorovodInternalError as error:
            self._fail(error)
        finally:
            self.driving.thread = 0

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
            with self.submission.lock:
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
        self.planner.now = time.monotonic()
        recorder = self.recorder
        self.planner.on_arrival = recorder.arrived if self._records and recorder.timeline is not None else None
        return self.agreement.poll(self.planner)

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
            with self.submission.lock:  # nothing is submitted from now on
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
        elif (views := self.registry.in_place(batch)) is not None:
            assert isinstance(transport, ShmTransport), transport
            transport.allreduce_in_place(views, batch.signature.reduce)
        else:
            execute(batch, requests, transport, self.member, self.ranks)

    def _end_join(self, batch: Batch) -> None:
        with self.submission.lock:
            # A rank that had joined has counted fewer unnamed requests: all go on from the latest number.
            self.submission.numbers = dict(self.planner.unnamed)
        joined = [request for request in self._in_flight.values() if request.signature.kind == Kind.JOIN]
        for request in joined:
            request.answer = batch.last_joined
        self._finish(joined, None)

    def _finish(self, requests: Iterable[Request], error: HorovodInternalError | None) -> None:
        requests = list(requests)
        for request in requests:
            request.error = error
        if error is None:
            write_back([request for request in requests if request.device_event is None])  # a GPU's are on its stream
        for request in requests:
            self._in_flight.pop(request.key, None)
            request.done = True
        self.driving.notify_waiters()
        if self.status.closing and not self._in_flight:
            self._on_idle()

    def _fail(self, error: HorovodInternalError) -> None:
        """Give every request in flight this error. Any thread."""
        self._finish(self._in_flight.copy().values(), error)
        self.driving.notify_waiters(all_threads=True)
