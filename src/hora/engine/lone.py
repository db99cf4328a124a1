"""The steady state: a blocking allreduce of one tensor, on a host whose members do the same one after the other.

Nothing is put in flight and no thread is woken: the data is staged in shared memory, a lone record says so
(`agree.lone`), and when all members' records are there each member reduces. Whatever is not as simple as that (another request
in flight, news of another kind, a rank that has joined, a timeline that is written) goes the ordinary way.

What one signature needs is put together once, in a `_Plan`. Called by the runtime, in the thread that wants the result.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from hora.engine.agree.lone import Record
from hora.engine.agree.shared_memory import SharedMemoryAgreement
from hora.engine.execute import flat
from hora.engine.queue import OperationQueue
from hora.engine.request import DTYPES, ITEM_BYTES, ReduceOp, Request, Signature
from hora.engine.shm.futex import Counter
from hora.engine.transport.arithmetic import Arithmetic, arithmetic_of
from hora.engine.transport.shm import ShmTransport
from hora.telemetry.meters import meter

__all__ = ["LonePath"]

_KEPT_PLANS = 4096


class _Plan(NamedTuple):
    signature: Signature
    digest: bytes
    num_bytes: int
    arithmetic: Arithmetic


class LonePath:
    """Of one queue, whose members share a host."""

    def __init__(self, queue: OperationQueue, agreement: SharedMemoryAgreement) -> None:
        self._queue = queue
        self._agreement = agreement
        self._records = agreement.lone
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
        (name,), (shape,) = signature.dtypes, signature.shapes
        num_bytes = ITEM_BYTES[name] * int(torch.Size(shape).numel())
        arithmetic = arithmetic_of(signature.reduce, DTYPES[name], len(self._queue.ranks))
        plan = self._plans[id(signature)] = _Plan(signature, signature.digest(), num_bytes, arithmetic)
        return plan

    def _run(
        self, plan: _Plan, record: Record, transport: ShmTransport, source: torch.Tensor, out: torch.Tensor
    ) -> bool:
        staged = transport.stages(plan.num_bytes)
        if staged:
            transport.stage(source, plan.arithmetic)
        began = time.perf_counter()
        self._records.publish(record)
        agreed = self._wait(plan.signature, record)
        self._agreement.settle(record[0], agreed)
        met = time.perf_counter()
        meter.wait_s += met - began
        if not agreed:
            return False
        self._queue.settle_lone(plan.signature, record[2])
        if staged:
            transport.reduce_staged(source, out, plan.arithmetic)
        else:
            transport.allreduce([source], [out], plan.signature.reduce)
        lasted_s = time.perf_counter() - met
        meter.reduce_s += lasted_s
        meter.transport_s += lasted_s
        meter.num_bytes += plan.num_bytes
        return True

    def _wait(self, signature: Signature, record: Record) -> bool:
        """Whether all members want the same."""
        records, ticket = self._records, record[0]
        counter = records.missing(ticket)
        if counter is None or counter.look(ticket):
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
        meter.blocked = request, time.perf_counter(), self._queue.ranks
