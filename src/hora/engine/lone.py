"""The steady state: a blocking allreduce of one tensor, on a host whose members do the same one after the other.

Nothing is put in flight and no thread is woken: the data is staged in shared memory, a lone record says so
(`agree.lone`), and when all members' records are there each member reduces. Whatever is not as simple as that (another request
in flight, news of another kind, a rank that has joined, a timeline that is written) goes the ordinary way.

What one signature needs is put together once, in a `LonePlan`; what is done for every operation makes no object and few calls.
Called by the runtime, in the thread that wants the result.

    begun --staged and published--> waiting --all members' records are equal--> settled: reduced
                                    waiting --they differ, or there is other news--> void: goes the ordinary way
                                    waiting --Ctrl-C--> left to whoever drives the queue next (`Alone`)
"""

from __future__ import annotations

import ctypes
import time
from math import prod

import torch

from hora.engine.agree.lone import Record
from hora.engine.agree.shared_memory import SharedMemoryAgreement
from hora.engine.execute import flat
from hora.engine.queue import OperationQueue
from hora.engine.registered import IN_PLACE_BYTES
from hora.engine.request import DTYPES, ITEM_BYTES, Request, Signature
from hora.engine.shm.futex import SLICE_S, Counter
from hora.engine.shm.native import CALL, CALL_AT, SHORT_BYTES, Lone, What, library
from hora.engine.transport.arithmetic import SERIAL_ELEMENTS, arithmetic_of, single_threaded, staged
from hora.engine.transport.native_jobs import lone_what
from hora.engine.transport.packing import copy
from hora.engine.transport.ring import DEPTH
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

__all__ = ["LonePath", "LonePlan"]

_KEPT_PLANS = 4096
_SLICE_NS = int(SLICE_S * 1e9)
_DONE, _WAITING = 1, 0  # enum state of native.c
_pack = CALL.pack_into
_clock = time.perf_counter


class LonePlan:
    """What all requests with one signature have in common."""

    __slots__ = (
        "_operands",
        "_scratch",
        "_what",
        "address",
        "arithmetic",
        "count",
        "digest",
        "num_bytes",
        "num_rings",
        "path",
        "signature",
        "staged",
        "transport",
        "unnamed",
    )

    def __init__(self, path: LonePath, signature: Signature, transport: ShmTransport, num_members: int) -> None:
        (name,), (shape,) = signature.dtypes, signature.shapes
        self.path = path
        self.signature = signature
        self.transport = transport
        self.unnamed = signature.name is None
        self.digest = signature.digest()
        self.count = prod(shape)
        self.num_bytes = ITEM_BYTES[name] * self.count
        dtype = DTYPES[name]
        self.arithmetic = arithmetic_of(staged(signature.reduce, dtype, num_members), dtype, num_members)
        self.prepare()

    def prepare(self) -> None:
        """What depends on the size of the slots."""
        self.num_rings = self.transport.num_rings
        # In memory that all members map it is not staged, whatever its size: see `registered`.
        self.staged = self.transport.stages(self.num_bytes) and not self.signature.extra
        self._what: What | None = None
        self.address = 0  # of what the native part is told; 0 if it cannot do it
        self._operands: list[list[torch.Tensor]] = []  # in Python: all members' slots, for each turn of the ring
        what, stage = self.arithmetic.sum, self.arithmetic.stage
        if library() is not None and self.staged and what is not None and stage is not None:
            self._what = lone_what(self.transport.ring, self.count, self.digest, what, stage)
            self.address = ctypes.addressof(self._what)
        elif self.staged:
            ring, dtype, members = self.transport.ring, self.arithmetic.dtype, range(self.arithmetic.num_members)
            self._scratch = ring.scratch(self.count, dtype)
            for turn in range(DEPTH):
                self._operands.append([ring.slot(member, turn, self.count, dtype) for member in members])

    def stage(self, source: torch.Tensor, member: int) -> None:
        """Put the data where the others find it. It may be put there again, if nothing comes of it."""
        slot = self._operands[(self.transport.ring.step + 1) % DEPTH][member]
        if not self.arithmetic.prescales:
            copy(source, slot)
        elif self.count <= SERIAL_ELEMENTS:
            self.arithmetic.prepare(source, slot)
        else:
            with single_threaded():
                self.arithmetic.prepare(source, slot)

    def reduce_staged(self, source: torch.Tensor, out: torch.Tensor, member: int) -> None:
        """All members have staged theirs: reduce it."""
        operands = self._operands[self.transport.ring.pass_step() % DEPTH]
        if not self.arithmetic.prescales:  # the own data has to come into the cache anyway, to be overwritten
            operands = [*operands[:member], source, *operands[member + 1 :]]
        if self.count <= SERIAL_ELEMENTS:
            self.arithmetic.reduce(operands, out, self._scratch)
        else:
            with single_threaded():
                self.arithmetic.reduce(operands, out, self._scratch)


class LonePath:
    """Of one queue, whose members share a host."""

    def __init__(self, queue: OperationQueue, agreement: SharedMemoryAgreement) -> None:
        self._queue = queue
        self._alone = queue.alone
        self._agreement = agreement
        self._records = agreement.lone
        self._settling = False  # members have agreed, and this one is about to reduce
        self._plans: dict[object, LonePlan] = {}  # by signature, and those of registered memory by plan and place
        self._job = Lone()
        agreement.describe_to(self._job)
        self._job_at = ctypes.addressof(self._job)
        found = library()
        if found is not None:
            self._lone, self._short_lone = found.lone, found.short_lone

    def plan(self, signature: Signature) -> LonePlan | None:
        """The plan for an allreduce of one tensor on the CPU; None while the transport for it has not been made."""
        transport = self._queue.made_transport()
        if not isinstance(transport, ShmTransport):
            return None
        found = self._plans.get(signature)
        if found is None:
            found = self._keep(signature, signature, transport)
        return found

    def _keep(self, key: object, signature: Signature, transport: ShmTransport) -> LonePlan:
        if len(self._plans) >= _KEPT_PLANS:
            self._plans.clear()
        plan = self._plans[key] = LonePlan(self, signature, transport, len(self._queue.ranks))
        return plan

    def allreduce(self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor) -> bool:
        """Reduce a contiguous tensor into another one, or into itself. False if it has to go the ordinary way."""
        queue, agreement = self._queue, self._agreement
        if plan.num_bytes >= IN_PLACE_BYTES and queue.registry and out is tensor:
            plan = self._in_place(plan, tensor)
        if not self._alone.begin():
            return False
        ticket, instance, done = agreement.ticket, 0, False
        try:
            if ticket == agreement.void:
                return False
            if plan.unnamed:
                with queue.submission.lock:
                    instance = queue.submission.next_instance(plan.signature)
            if plan.num_rings != plan.transport.num_rings:
                plan.prepare()
            if plan.address:
                done = self._natively(plan, tensor, out, ticket, instance)
            elif agreement.quiet:
                done = self._in_python(plan, tensor, out, ticket, instance)
        except BaseException as error:
            self._interrupted(error, plan, tensor, out, ticket, instance)
            raise
        finally:
            self._alone.end()
        if not done:
            request = Request(plan.signature, [tensor], [out])
            queue.submit(request, background=False, instance=instance)
            queue.result(request)
        return True

    def _in_place(self, plan: LonePlan, tensor: torch.Tensor) -> LonePlan:
        """The plan for this tensor's place in registered memory, if it lies there."""
        place = self._queue.registry.locate(tensor)
        if not place:
            return plan
        found = self._plans.get((plan, place))
        if found is None:
            found = self._keep((plan, place), plan.signature._replace(extra=place), plan.transport)
        return found

    def _interrupted(
        self,
        error: BaseException,
        plan: LonePlan,
        tensor: torch.Tensor,
        out: torch.Tensor,
        ticket: int,
        instance: int,
    ) -> None:
        """What a signal's handler has raised while this thread waits ends this wait, but not the request: the others may
        have seen it already. Anything else has ended the world."""
        if isinstance(error, HorovodInternalError) or not self._records.has_published(ticket):
            return
        if self._settling or isinstance(error, Exception):
            self._queue.status.failed(f"it was interrupted by {type(error).__name__}: {error}")
            return
        request = Request(plan.signature, [tensor], [out])
        self._alone.leave(request, instance, lambda: self._go_on(plan, tensor, out, ticket, instance))

    def _go_on(self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor, ticket: int, instance: int) -> bool:
        if plan.address:
            return self._finish_natively(plan, ticket, instance, self._job.step, self._job.state, _clock())
        return self._finish_in_python(plan, tensor, out, ticket, instance)

    # With the native part.

    def _natively(self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor, ticket: int, instance: int) -> bool:
        """Stage, publish, look and reduce in one call."""
        began, step = _clock(), plan.transport.ring.step + 1
        rounds = self._agreement.rounds
        _pack(self._job, CALL_AT, plan.address, tensor.data_ptr(), out.data_ptr(), rounds, step, ticket, instance, 0, 0)
        call = self._short_lone if plan.num_bytes <= SHORT_BYTES else self._lone
        state = call(self._job_at, 0)
        return self._finish_natively(plan, ticket, instance, step, state, began)

    def _finish_natively(self, plan: LonePlan, ticket: int, instance: int, step: int, state: int, began: float) -> bool:
        """Wait, if that has not been enough, and take note of how it has ended."""
        waited_s = 0.0
        if state == _WAITING:
            waiting = _clock()
            state = self._sleep_natively(plan, instance)
            waited_s = _clock() - waiting
        if state != _DONE:
            meter.wait_s += _clock() - began
            if self._records.has_published(ticket):
                self._agreement.settle(ticket, False)
            return False
        self._agreement.ticket = ticket + 1
        plan.transport.ring.step = step
        if plan.unnamed:
            self._queue.planner.note_lone(plan.signature, instance)
        lasted_s = _clock() - began - waited_s
        meter.wait_s += waited_s
        meter.reduce_s += lasted_s
        meter.transport_s += lasted_s
        meter.num_bytes += plan.num_bytes
        return True

    def _sleep_natively(self, plan: LonePlan, instance: int) -> int:
        """Call again, with time to sleep, until there is something else to say than that a member has not come."""
        queue, state = self._queue, _WAITING
        self._show(plan.signature, instance)
        try:
            while state == _WAITING:
                closing = queue.status.closing
                state = self._lone(self._job_at, _SLICE_NS)
                if state == _WAITING:
                    queue.look_around_alone(closing)
        finally:
            meter.blocked = None
        return state

    # In Python.

    def _in_python(self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor, ticket: int, instance: int) -> bool:
        if plan.staged:
            plan.stage(flat(tensor), self._queue.member)
        self._records.publish((ticket, plan.digest, instance))
        return self._finish_in_python(plan, tensor, out, ticket, instance)

    def _finish_in_python(
        self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor, ticket: int, instance: int
    ) -> bool:
        began = _clock()
        agreed = self._wait(plan.signature, (ticket, plan.digest, instance))
        self._settling = agreed
        self._agreement.settle(ticket, agreed)
        met = _clock()
        meter.wait_s += met - began
        if not agreed:
            return False
        if plan.unnamed:
            self._queue.planner.note_lone(plan.signature, instance)
        if plan.staged:
            source = flat(tensor)
            plan.reduce_staged(source, source if out is tensor else flat(out), self._queue.member)
        else:
            self._queue.unless_broken(lambda: self._reduce(plan, tensor, out))
        self._settling = False
        lasted_s = _clock() - met
        meter.reduce_s += lasted_s
        meter.transport_s += lasted_s
        meter.num_bytes += plan.num_bytes
        return True

    def _reduce(self, plan: LonePlan, tensor: torch.Tensor, out: torch.Tensor) -> bool:
        """All members have agreed on what is not staged: do it."""
        if plan.signature.extra:
            plan.transport.allreduce_in_place(self._queue.registry.views(plan.signature), plan.signature.reduce)
        else:
            plan.transport.allreduce([flat(tensor)], [flat(out)], plan.signature.reduce)
        return True

    def _wait(self, signature: Signature, record: Record) -> bool:
        """Whether all members want the same."""
        records, ticket = self._records, record[0]
        counter = records.missing(ticket)
        if counter is not None and counter.look(ticket):
            counter = records.missing(ticket)
        if counter is not None:
            self._show(signature, record[2])
            try:
                while counter is not None and (counter.look(ticket) or self._sleep(counter, ticket)):
                    counter = records.missing(ticket)
            finally:
                meter.blocked = None
        return records.agree(record)

    def _sleep(self, counter: Counter, ticket: int) -> bool:
        """Sleep until a member may have come. False when there is other news: it is pointless to go on waiting."""
        closing, begin = self._queue.status.closing, time.monotonic()
        self._records.fall_asleep()
        try:
            seen = counter.value
            if not self._agreement.quiet:
                return False
            if seen < ticket:
                self._queue.look_around_alone(closing)
                counter.sleep(seen)
                counter.learn(time.monotonic() - begin)
            return True
        finally:
            self._records.wake_up()

    def _show(self, signature: Signature, instance: int) -> None:
        """Tell the live page what this rank is blocked in."""
        request = Request(signature)
        request.key = signature.key(instance)
        meter.blocked = request, _clock(), self._queue.ranks
