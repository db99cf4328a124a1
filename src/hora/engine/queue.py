"""A queue: everything one process set does, independent of every other set.

It holds the requests in flight, the agreement with the other members, the planner, and the transports. Progress is made
by whoever holds the progress lock: a thread that waits for a result drives the queue itself, which saves two changes of
thread; requests that nobody waits for yet are driven by the queue's background thread, which sleeps when there are none.

    submit -> in flight, announced -> (agreement, plan) -> batch -> transport -> request done -> waiters woken
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from hora.engine.agree.agreement import Agreement
from hora.engine.execute import execute, execute_on_device
from hora.engine.plan import Batch, Part, Planner
from hora.engine.recording import operation_name, recorded
from hora.engine.request import Key, Kind, Request, Signature, full_names
from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.stall import StallInspector
from hora.engine.status import WorldStatus
from hora.engine.transport.base import Transport
from hora.engine.validation import Validator
from hora.errors import HorovodInternalError
from hora.events import Timeline

__all__ = ["OperationQueue", "QueueHost"]

log = logging.getLogger("hora")

_WAITER_SLICE_S = 0.5
ExecuteBound = Callable[[Part, "Request | None", Transport], None]  # no request: this rank has joined


class QueueHost(Protocol):
    """What a queue needs of the runtime."""

    timeline: Timeline | None

    def transport(self, queue: OperationQueue, device: str) -> Transport:
        """Make the transport for this device; every member asks at the same point of the agreed order."""

    def control_batch(self, batch: Batch) -> Any:
        """Carry out a batch that changes process sets."""

    def settled(self) -> None:
        """Nothing is in flight any more while the world is closing."""

    def stalled(self, ranks: Sequence[int], text: str) -> None:
        """End the job because of a stall."""

    def failed(self, text: str) -> None:
        """End the job because this rank could not carry out what was agreed."""


class OperationQueue:
    """The progress of one process set on this rank."""

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
        host: QueueHost,
        core: int | None = None,
    ) -> None:
        self.process_set_id = process_set_id
        self.ranks = tuple(ranks)
        self.member = member
        self.agreement = agreement
        self.validator = Validator(ranks)
        self._planner = planner
        self._stall = stall
        self._status = status
        self._host = host
        self._core = core
        self._transports: dict[str, Transport] = {}
        self._in_flight: dict[Key, Request] = {}
        self.bound: dict[str, ExecuteBound] = {}  # by the name of the reduction
        self.barriers: weakref.WeakSet[SharedMemoryBarrier] = weakref.WeakSet()  # of bound reductions and their owners
        self._unnamed: dict[str, int] = {}
        self._lock = threading.Lock()  # submission: in-flight table, numbering, announcements
        self._progress = threading.Lock()  # held by whoever drives
        self._finished = threading.Condition()  # for threads that wait while somebody else drives
        self._num_waiters = 0
        self._work = threading.Condition()  # for the background thread
        self._parked = False
        self._stopping = False
        self._executing_since = 0.0
        self._executing = ""
        self._num_warnings = 0  # about the batch that runs now
        self._background: threading.Thread | None = None
        self._records = ranks[member] == 0  # rank 0 writes the timeline

    def submit(self, request: Request, *, background: bool) -> None:
        """Put a request in flight. `background`: somebody else than the caller must drive it."""
        signature = request.signature
        with self._lock:
            self._status.check_open()
            if signature.name is None:
                instance = self._unnamed.get(signature.operation, 0)
                self._unnamed[signature.operation] = instance + 1
            else:
                instance = 0
            key = signature.key(instance)
            if key in self._in_flight:
                raise ValueError(
                    f"a tensor with the same name as another tensor that is still being processed was submitted: "
                    f"{full_names(*key, 1)[0]}; give it another name or synchronize the first one"
                )
            request.key = key
            request.parts_left = max(len(request.tensors), 1)
            self._in_flight[key] = request
            self.agreement.announce(signature, instance)
        if background:
            self.agreement.wake()
            self._wake_background()

    def wait(self, request: Request) -> None:
        """Return when the request is done; drive the queue if nobody else does."""
        while not request.done:
            if self._progress.acquire(blocking=False):
                try:
                    self._drive(request)
                finally:
                    self._progress.release()
                    self._hand_over()
            else:
                self.agreement.wake()
                with self._finished:
                    self._num_waiters += 1
                    if not request.done and self._progress.locked():
                        self._finished.wait(_WAITER_SLICE_S)
                    self._num_waiters -= 1

    def transport(self, device: str = "cpu") -> Transport:
        """The transport of a device type, made when first needed."""
        found = self._transports.get(device)
        if found is None:
            found = self._transports[device] = self._host.transport(self, device)
        return found

    def inspect(self) -> None:
        """Look for stalls; called once a second, on the hub's thread. Nothing is carried out here: other ranks may need
        this thread before they can do their part."""
        if self._stall is None:
            return
        if self._progress.acquire(blocking=False):
            try:
                self._look_around()
            finally:
                self._progress.release()
            self._hand_over()
        elif since := self._executing_since:
            self._check_execution(self._stall, time.monotonic() - since)

    def _look_around(self) -> None:
        """While nothing is in flight here, take note of what others wait for. Else whoever waits for it sees to that."""
        if not self._lock.acquire(blocking=False):
            return  # something is being submitted
        try:  # nothing new is submitted meanwhile, so nothing can become ready
            batches = self._poll() if not self._in_flight and self._status.is_open else None
        finally:
            self._lock.release()
        assert not batches, batches
        self._check_stall()

    def _check_execution(self, stall: StallInspector, waited_s: float) -> None:
        """A batch has begun and does not end: a member has been stopped inside it. Any thread."""
        if stall.shutdown_s and waited_s > stall.shutdown_s:
            others = [rank for member, rank in enumerate(self.ranks) if member != self.member]
            text = f"(one of them) kept {self._executing} waiting for more than {stall.shutdown_s:g} s"
            self._host.stalled(others, text)
        elif waited_s > stall.warning_s * (self._num_warnings + 1):
            self._num_warnings += 1
            what = f"{list(self.ranks)} have been in {self._executing} for {waited_s:.0f} s"
            log.warning("the ranks %s; one of them is slow or stopped", what)

    def drain(self) -> None:
        """Carry out what was agreed before this rank began to leave; what was not agreed fails."""
        if self._in_flight and self._progress.acquire(timeout=1.0):
            try:
                self._drive(None)
            finally:
                self._progress.release()

    def close(self) -> None:
        """Fail what is in flight, end the background thread, release the transports."""
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self.agreement.wake()
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join(5.0)
        self._fail(self._status.error())
        if self._progress.acquire(timeout=5.0):
            try:
                for transport in self._transports.values():
                    transport.close()
                self._transports.clear()
                self.bound.clear()
                self.agreement.close()
            finally:
                self._progress.release()

    @property
    def timeline(self) -> Timeline | None:
        return self._host.timeline

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # Progress. Everything below runs under the progress lock, unless it says otherwise.

    def _drive(self, until: Request | None) -> None:
        try:
            while self._in_flight and not (until is not None and until.done) and not self._stopping:
                if not self._step_or_break():
                    self._check_stall()
                    self.agreement.wait()
        except HorovodInternalError as error:
            self._fail(error)

    def _step_or_break(self) -> bool:
        """One round. What this rank has agreed to and cannot do breaks the world: the others wait for it."""
        try:
            return self._step()
        except HorovodInternalError:
            raise
        except Exception as error:
            log.exception("a collective of the ranks %s failed", list(self.ranks))
            self._host.failed(f"{type(error).__name__}: {error}")
            raise self._status.error() from error
        except BaseException as interruption:  # Ctrl-C in mid-collective
            self._host.failed(f"it was interrupted by {type(interruption).__name__}")
            self._fail(self._status.error())
            raise

    def _step(self) -> bool:
        """Carry out one round. False when there was none."""
        closing = self._status.closing  # before polling: what was agreed before the goodbye is then seen by poll
        if self.agreement.holds_back:
            with self._lock:
                self.agreement.flush()
        batches = self._poll()
        if batches is None:
            self._status.guard()
            if closing:
                raise self._status.error()
            return False
        if self._host.timeline is not None:
            self._host.timeline.cycle()
        for batch in batches:
            self._execute_batch(batch)
        return True

    def _poll(self) -> list[Batch] | None:
        """The batches of the next round, None if there is none."""
        self._planner.now = time.monotonic()
        self._planner.on_arrival = self._on_arrival if self._records and self._host.timeline is not None else None
        return self.agreement.poll(self._planner)

    def _execute_batch(self, batch: Batch) -> None:
        in_flight = self._in_flight
        requests = {part[0]: in_flight[part[0]] for part in batch.parts if part[0] in in_flight}
        if batch.kind is Kind.JOIN:
            self._end_join(batch)
        elif batch.error is not None:
            self._finish(requests.values(), HorovodInternalError(batch.error))
        elif batch.kind in (Kind.ADD_PROCESS_SET, Kind.REMOVE_PROCESS_SET, Kind.SHARED_MEMORY):
            result = self._host.control_batch(batch)
            for request in requests.values():
                request.result = result
            self._finish(requests.values(), None)
        else:
            self._execute(batch, requests)

    def _execute(self, batch: Batch, requests: Mapping[Key, Request]) -> None:
        timeline = self._host.timeline
        transport = self.transport(batch.signature.device)
        self._executing_since, self._executing, self._num_warnings = time.monotonic(), batch.kind.name, 0
        with contextlib.nullcontext() if timeline is None else recorded(timeline, batch, transport.name):
            self._run(batch, requests, transport)
        self._executing_since = 0.0
        done = []  # a group of several dtypes is done with the last of its batches
        for part in batch.parts:
            request = requests.get(part.key)
            if request is not None:
                request.parts_left -= 1
                if request.parts_left == 0:
                    done.append(request)
        self._finish(done, None)

    def _run(self, batch: Batch, requests: Mapping[Key, Request], transport: Transport) -> None:
        if batch.signature.device == "cuda":
            execute_on_device(batch, requests, transport, self.member, self.ranks)
        elif batch.signature.extra and batch.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            (part,) = batch.parts
            self.bound[str(part.key[1])](part, requests.get(part.key), transport)
        else:
            execute(batch, requests, transport, self.member, self.ranks)

    def _end_join(self, batch: Batch) -> None:
        with self._lock:
            # A rank that had joined has counted fewer unnamed requests: all go on from the highest number.
            self._unnamed = dict(self._planner.unnamed)
        joined = [request for request in self._in_flight.values() if request.signature.kind == Kind.JOIN]
        for request in joined:
            request.result = batch.last_joined
        self._finish(joined, None)

    def _finish(self, requests: Iterable[Request], error: HorovodInternalError | None) -> None:
        for request in requests:
            request.error = error
            self._in_flight.pop(request.key, None)
            if error is None and request.device_event is None:  # on a GPU it is done on the caller's stream
                try:
                    for target, result in request.copy_back:
                        target.detach().copy_(result)
                except RuntimeError as problem:  # must not keep the request from being done
                    request.error = HorovodInternalError(f"the result could not be written back: {problem}")
            request.done = True
        if self._num_waiters:
            with self._finished:
                self._finished.notify_all()
        if self._status.closing and not self._in_flight:
            self._host.settled()

    def _fail(self, error: HorovodInternalError) -> None:
        """Give every request in flight this error. Any thread."""
        with self._lock:
            requests = list(self._in_flight.values())
        self._finish(requests, error)
        with self._finished:
            self._finished.notify_all()

    def _check_stall(self) -> None:
        if self._stall is None or not self._stall.due(self._planner.now):
            return
        report = self._stall.inspect(self._planner.pending(), self._planner.joined, self._planner.now)
        if report is None:
            return
        if not report.shutdown:
            log.warning("%s", report.text)
            return
        log.error("%s", report.text)
        self._host.stalled(report.ranks, f"stalled for more than {self._stall.shutdown_s:g} s")

    def _on_arrival(self, member: int, key: Key, signature: Signature) -> None:
        if self._host.timeline is not None:
            names = full_names(*key, max(len(signature.dtypes), 1))
            self._host.timeline.arrived(names, operation_name(signature), member)

    # Threads.

    def _hand_over(self) -> None:
        if self._num_waiters:
            with self._finished:
                self._finished.notify_all()
        if self._in_flight:
            self._wake_background()

    def _wake_background(self) -> None:
        if self._background is None:
            with self._work:
                if self._background is None and not self._stopping:
                    name = f"hora-set-{self.process_set_id}"
                    self._background = threading.Thread(target=self._run_background, name=name, daemon=True)
                    self._background.start()
        elif self._parked:
            with self._work:
                self._work.notify_all()

    def _run_background(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread only
        while True:
            with self._work:
                self._parked = True
                # Sleeping here is idleness, not a wait for anybody: every submission and `close` notify.
                self._work.wait_for(lambda: self._in_flight or self._stopping)
                self._parked = False
            if self._stopping:
                return
            with self._progress:
                self._drive(None)
            if self._num_waiters:
                with self._finished:
                    self._finished.notify_all()
