"""The steady state: a blocking allreduce of one tensor, on a host whose members do the same one after the other.

Nothing is put in flight and no thread is woken: the data is staged in shared memory, a lone record says so
(`agree.lone`), and when all members' records are there each member reduces. Whatever is not as simple as that (another request
in flight, news of another kind, a rank that has joined, a timeline that is written) goes the ordinary way.

What one signature needs is put together once, in a `_Plan`. Called by the runtime, in the thread that wants the result.
"""

from __future__ import annotations

import time
from math import prod

import torch

from hora.engine.agree.lone import Record
from hora.engine.agree.shared_memory import SharedMemoryAgreement
from hora.engine.execute import flat
from hora.engine.queue import OperationQueue
from hora.engine.request import DTYPES, ITEM_BYTES, ReduceOp, Request, Signature
from hora.engine.shm.futex import Counter
from hora.engine.shm.native import Lone, library
from hora.engine.transport.arithmetic import arithmetic_of
from hora.engine.transport.shm import ShmTransport
from hora.telemetry.meters import meter

__all__ = ["LonePath"]

_KEPT_PLANS = 4096


class _Plan:
    """What all requests with one signature have in common."""

    __slots__ = ("_job", "_num_rings", "arithmetic", "count", "digest", "num_bytes", "signature")

    def __init__(self, signature: Signature, num_members: int) -> None:
        (name,), (shape,) = signature.dtypes, signature.shapes
        self.signature = signature
        self.digest = signature.digest()
        self.count = prod(shape)
        self.num_bytes = ITEM_BYTES[name] * self.count
        self.arithmetic = arithmetic_of(signature.reduce, DTYPES[name], num_members)
        self._job: Lone | None = None
        self._num_rings = 0

    def job(self, transport: ShmTransport) -> Lone | None:
        """What the native part is told; None if it cannot do it."""
        if self._num_rings != transport.num_rings:
            self._num_rings = transport.num_rings
            self._job = transport.lone_job(self.count, self.arithmetic, self.digest)
        return self._job


class LonePath:
    """Of one queue, whose members share a host."""

    def __init__(self, queue: OperationQueue, agreement: SharedMemoryAgreement) -> None:
        self._queue = queue
        self._agreement = agreement
        self._records = agreement.lone
        self._library = library()
        self._plans: dict[int, _Plan] = {}  # by the signature's id, which they keep from being another's

    def allreduce(
        self,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
    ) -> torch.Tensor | None:
        """Reduce a contiguous tensor into another, or with None into itself. None if it has to go the ordinary way.

        The first time it has: then its arguments are checked, all members hear of it, and the transport is made.
        """
        queue = self._queue
        transport = queue.made_transport()
        signature = queue.validator.known_allreduce(tensor, name, op, prescale, postscale)
        if signature is None or op == ReduceOp.ADASUM or not isinstance(transport, ShmTransport):
            return None
        source = flat(tensor)
        result = source if out is None else flat(out)
        if not self._reduce(signature, transport, source, result):
            return None
        if out is not None:
            return out
        torch.autograd.graph.increment_version(tensor)  # bytes were moved behind autograd's back
        return tensor

    def _reduce(self, signature: Signature, transport: ShmTransport, source: torch.Tensor, out: torch.Tensor) -> bool:
        queue = self._queue
        plan = self._plans.get(id(signature)) or self._plan(signature)
        begun = queue.begin_alone(signature, self._agreement.take_ticket)
        if begun is None:
            return False
        record = (begun[0], plan.digest, begun[1])
        try:
            done = queue.unless_broken(lambda: self._run(plan, record, transport, source, out))
        finally:
            queue.end_alone()
        if not done:
            request = Request(signature, [source], [out])
            queue.submit(request, background=False, instance=begun[1])
            queue.result(request)
        return True

    def _plan(self, signature: Signature) -> _Plan:
        if len(self._plans) >= _KEPT_PLANS:
            self._plans.clear()
        plan = self._plans[id(signature)] = _Plan(signature, len(self._queue.ranks))
        return plan

    def _run(
        self, plan: _Plan, record: Record, transport: ShmTransport, source: torch.Tensor, out: torch.Tensor
    ) -> bool:
        staged, began = transport.stages(plan.num_bytes), time.perf_counter()
        job = plan.job(transport) if staged else None
        if job is not None:
            job.source, job.out = source.data_ptr(), out.data_ptr()
            agreed = self._run_natively(job, transport, plan.signature, record)
        else:
            if staged:
                transport.stage(source, plan.arithmetic)
            self._records.publish(record)
            agreed = self._wait(plan.signature, record)
        self._agreement.settle(record[0], agreed)
        met = time.perf_counter()
        meter.wait_s += met - began
        if not agreed:
            return False
        self._queue.settle_lone(plan.signature, record[2])
        if job is not None:
            transport.pass_staged()
        elif staged:
            transport.reduce_staged(source, out, plan.arithmetic)
        else:
            transport.allreduce([source], [out], plan.signature.reduce)
        lasted_s = time.perf_counter() - met
        meter.reduce_s += lasted_s
        meter.transport_s += lasted_s
        meter.num_bytes += plan.num_bytes
        return True

    def _run_natively(self, job: Lone, transport: ShmTransport, signature: Signature, record: Record) -> bool:
        """Stage, publish, look and reduce in one call. Only sleeping is done here."""
        assert self._library is not None
        lone, first = self._library.lone, self._records.first
        job.members, job.published, job.step, job.looks = self._records.address, 0, transport.next_step, first.looks
        job.ticket, job.instance = record[0], record[2]
        state = lone(job)
        if state:
            first.found()
        else:
            self._show(signature, record[2])
            try:
                hopeful = True
                while hopeful and state == 0:
                    hopeful = self._sleep(self._records.counter(job.late), record[0], first)
                    state = lone(job)
            finally:
                meter.blocked = None
        return bool(state == 1)

    def _wait(self, signature: Signature, record: Record) -> bool:
        """Whether all members want the same."""
        records, ticket = self._records, record[0]
        counter = records.missing(ticket)
        if counter is None or counter.look(ticket):
            counter = records.missing(ticket)
        if counter is not None:
            self._show(signature, record[2])
            try:
                while counter is not None and (counter.look(ticket) or self._sleep(counter, ticket, counter)):
                    counter = records.missing(ticket)
            finally:
                meter.blocked = None
        return records.agree(record)

    def _sleep(self, counter: Counter, ticket: int, learner: Counter) -> bool:
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
                learner.learn(time.monotonic() - begin)
            return True
        finally:
            self._records.wake_up()

    def _show(self, signature: Signature, instance: int) -> None:
        """Tell the live page what this rank is blocked in."""
        request = Request(signature)
        request.key = signature.key(instance)
        meter.blocked = request, time.perf_counter(), self._queue.ranks
