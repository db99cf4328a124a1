"""Repeated calls: the fast path for collectives of one tensor that all members of one host call in the same order.

An allreduce of several tensors is one of the flat tensor in which its caller has packed them.

The call is not queued or announced, and wakes no thread. The native part publishes a record
(`negotiation.shared_memory`), and when all members' records are equal, each member does its part. Everything else takes
the ordinary path: another request in flight, other news, a rank that has joined, an active timeline, operations that
the native part lacks.

CUDA tensors of members that share a GPU are staged in pinned memory if the device's transport would do the same
(`PinnedStage`).

An asynchronous call stands in the queue's lane (`OperationQueue.start_repeated`), and so does a blocking call that the
other members do not make within a moment, or that Ctrl-C interrupted: the driver of the queue completes it.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from math import prod

import torch

from hora.engine.negotiation.shared_memory import SharedMemoryNegotiation
from hora.engine.queue import OperationQueue
from hora.engine.request import DTYPES, ITEM_BYTES, KINDS, GoOn, Kind, Request, Signature
from hora.engine.shm.counters import SLICE_NS
from hora.engine.shm.native import CALL, CALL_AT, SHORT_BYTES, Repeated, Spec, Sum, native_part
from hora.engine.transport.arithmetic import arithmetic_of, staged
from hora.engine.transport.cuda import CudaTransport
from hora.engine.transport.cuda_staging import PinnedStage, copy_to_gpu
from hora.engine.transport.shm import MOVE, ShmTransport, equal_parts, parts_array
from hora.telemetry.meters import meter

_WAITING, _DONE, _MOVING = 0, 1, 2  # enum state of repeated.h
_UNSETTLED = (_WAITING, _MOVING)
_pack = CALL.pack_into
_clock = time.perf_counter
_TOKEN = ("uint8",), ((1,),)  # dtypes and shapes of the tensors that a barrier reduces


class CallPlan:
    """The common part of all calls with one signature, so that a call allocates no object."""

    last: Callable[[Request], object] | None = None  # the last step of its requests (`Completion`)

    def __init__(self, path: RepeatedCalls, signature: Signature, transport: ShmTransport) -> None:
        is_barrier = signature.kind == Kind.BARRIER
        (name, *_), shapes = _TOKEN if is_barrier else (signature.dtypes, signature.shapes)
        self.path = path
        self.signature = signature
        self._transport, self.slots = transport, transport.slots
        self.unnamed = signature.name is None
        self._digest = (ctypes.c_uint8 * 16)(*signature.digest())
        self.kind = Kind.ALLREDUCE if is_barrier else KINDS[signature.kind]
        count, size, dtype = sum(map(prod, shapes)), len(path.ranks), DTYPES[name]
        self.num_bytes = ITEM_BYTES[name] * count
        # A short call keeps the GIL, so it must not sleep.
        short = self.num_bytes <= SHORT_BYTES
        self.call, self.slice_ns = (path.short_call, 0) if short else (path.call, SLICE_NS)
        self.stage = None if signature.device == "cpu" else PinnedStage(count, dtype)
        self._divided = self.kind in (Kind.ALLTOALL, Kind.REDUCESCATTER)
        self._count, self._item_bytes = count // size if self._divided else count, ITEM_BYTES[name]
        self._what: tuple[Sum, float] | None = None
        self._parts: list[ctypes.Array[ctypes.c_int64]] = []
        if self.kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER) and not is_barrier:
            arithmetic = arithmetic_of(staged(signature.reduce, dtype, size), dtype, size)
            if arithmetic.sum is not None and arithmetic.stage is not None:
                self._what = arithmetic.sum, arithmetic.stage
        else:
            self._what = MOVE, 1.0
            self._count, self._item_bytes = self._count * self._item_bytes, 1
            if not is_barrier:
                root = path.ranks.index(signature.root) if signature.root >= 0 else -1
                parts = equal_parts(self.kind, root, self.slots.member, size, self._count)
                self._parts = [parts_array(some) for some in parts]
        self._specs: list[Spec] = []
        self.prepare()

    def prepare(self) -> None:
        """Describe the call to the native part, with the current slots.

        Any thread. If the ring is replaced meanwhile, its number differs from the recorded one, so the next call
        prepares the plan again.
        """
        transport = self._transport
        num_rings, address, num_steps, is_staged = self.slots.num_rings, 0, 0, False
        if self._what is not None and self._count and self.slots.has_room(self.num_bytes):
            direct = self.kind is not Kind.ALLREDUCE or transport.is_direct(self.num_bytes)
            what, stage = self._what
            job, num_steps = self.slots.job(
                self._count, self._item_bytes, what, direct=direct, divided=self._divided, stage=stage
            )
            if self._parts:
                job.sent, job.received = map(ctypes.addressof, self._parts)
            spec = Spec(job=job, digest=self._digest, staged=direct and num_steps == 1)
            self._specs.append(spec)  # the native part may still use the old ring
            address, is_staged = ctypes.addressof(spec), bool(spec.staged)
        self.address = address  # 0: take the ordinary path
        self.num_steps = num_steps
        self.is_staged = is_staged  # all data is in the slots when the record is published
        self.num_rings = num_rings


class RepeatedCalls:
    """Repeated calls of one queue, whose members share a host and have the native part."""

    def __init__(self, queue: OperationQueue, negotiation: SharedMemoryNegotiation) -> None:
        self.ranks = queue.ranks
        self.call, self.short_call = native_part().repeated, native_part().short_repeated
        self._queue = queue
        self._negotiation = negotiation
        self._job = Repeated()
        negotiation.describe_to(self._job)
        self._job_at = ctypes.addressof(self._job)

    def plan(self, signature: Signature) -> CallPlan | None:
        """Return a plan; None if the transport does not exist yet, or the members' sizes differ."""
        if len(signature.shapes) > 1 and not _can_be_packed(signature):
            return None
        transport = self._queue.transports.get("cpu")
        if not isinstance(transport, ShmTransport) or not self._passes_host_memory(signature):
            return None
        rows, num_members = signature.shapes[0][0] if signature.shapes and signature.shapes[0] else 1, len(self.ranks)
        splits = signature.extra or ((rows // num_members,) if signature.kind == Kind.REDUCESCATTER else ())
        if splits and (len(set(splits)) > 1 or splits[0] * num_members != rows):
            return None
        return CallPlan(self, signature, transport)

    def _passes_host_memory(self, signature: Signature) -> bool:
        if signature.device == "cpu":
            return True
        (name,), (shape,) = signature.dtypes, signature.shapes
        device = self._queue.transports.get(signature.device)
        return isinstance(device, CudaTransport) and device.stages(ITEM_BYTES[name] * prod(shape))

    def carry_out(
        self,
        plan: CallPlan,
        tensor: torch.Tensor,
        out: torch.Tensor,
        wait: Callable[[Request], object] = Request.result,
        targets: Sequence[torch.Tensor] | None = None,
    ) -> bool:
        """Execute the call on a contiguous tensor, into another one or in place. Returns False if it must take the
        ordinary path. If another member is late or does something else, `wait` waits for the call. The plan's last step
        writes `targets`; None: it writes `out`, where a repeated call has its result already.
        """
        queue, negotiation = self._queue, self._negotiation
        if not self._is_ready(plan) or not queue.begin_exclusive():
            return False
        instance, source, target, ticket, waits = 0, tensor, out, negotiation.ticket, False
        try:
            if ticket == negotiation.void:
                return False
            if plan.unnamed:
                with queue.lock:
                    instance = queue.next_instance(plan.signature)
            if plan.stage is not None:
                source = target = plan.stage.fetch(tensor)
            done, began, moved_s = False, _clock(), meter.transport_s
            self._describe(plan, source, target, instance)
            try:
                since, state = began, plan.call(self._job_at, plan.slice_ns)
                if state in _UNSETTLED and not plan.slice_ns:
                    since, state = _clock(), self.call(self._job_at, SLICE_NS)
                done = state == _DONE and self._settle(plan, ticket, instance, state, since)
            finally:
                if not done:  # also if a signal handler raises: other members may have seen the record
                    request = _request(plan, tensor, out, targets)
                    queue.leave_unfinished(request, instance, self._in_lane(plan, source, target, ticket, out))
            waits = not done
            if done:
                meter.wait_s += since - began
                meter.reduce_s += meter.transport_s - moved_s
                if target is not out:
                    copy_to_gpu(target, out)
        finally:
            queue.end_exclusive(waits)
        if waits:
            meter.wait_s += _clock() - began
            wait(request)
        elif targets:
            request = _request(plan, tensor, out, targets)
            request.run_last()
            request.raise_error()
        return True

    def _is_ready(self, plan: CallPlan) -> bool:
        """Return whether the native part can execute the call with the current slots."""
        if plan.num_rings != plan.slots.num_rings:
            plan.prepare()
        return bool(plan.address)

    def _describe(self, plan: CallPlan, source: torch.Tensor, target: torch.Tensor, instance: int) -> None:
        """Describe the call with the next ticket to the native part."""
        negotiation, step = self._negotiation, plan.slots.step + 1
        at, rounds, ticket = (source.data_ptr(), target.data_ptr()), negotiation.rounds, negotiation.ticket
        _pack(self._job, CALL_AT, plan.address, *at, rounds, step, ticket, instance, 0, 0)

    def _settle(self, plan: CallPlan, ticket: int, instance: int, state: int, began: float) -> bool:
        """Record the result of a call that has moved data since `began`; returns whether it is done."""
        negotiation = self._negotiation
        if state != _DONE:
            if self._job.published:
                negotiation.void = ticket
            return False
        negotiation.ticket = ticket + 1
        plan.slots.step += plan.num_steps
        if plan.unnamed:
            self._queue.planner.note_number(plan.signature.operation, instance)
        meter.transport_s += _clock() - began
        meter.num_bytes += plan.num_bytes
        return True

    def start(
        self, plan: CallPlan, tensor: torch.Tensor, out: torch.Tensor, targets: Sequence[torch.Tensor] | None = None
    ) -> Request | None:
        """Start an asynchronous call on CPU tensors; returns None if it must take the ordinary path.

        If the other members can complete their parts without this one, no thread is woken to drive it.
        """
        queue, request = self._queue, _request(plan, tensor, out, targets)
        if not self._is_ready(plan) or not queue.start_repeated(request, self._in_lane(plan, tensor, out)):
            return None
        if not request.done and not (plan.is_staged and request in [*queue.lane][:1]):
            queue.wake_background()
        return request

    def _in_lane(
        self,
        plan: CallPlan,
        source: torch.Tensor,
        target: torch.Tensor,
        ticket: int = 0,
        out: torch.Tensor | None = None,
    ) -> GoOn:
        """Return the function that advances a call in the queue's lane.

        `ticket`: of its record, if it was begun. `out`: the result on a GPU, if `target` is the host's copy of it.
        """
        stream = None if out is None or out is target else torch.cuda.current_stream(out.device)

        def go_on(instance: int, slice_ns: int) -> bool | None:
            nonlocal ticket
            negotiation, queue = self._negotiation, self._queue
            if not ticket:
                void = negotiation.ticket == negotiation.void or queue.recorder.timeline is not None
                if void or not self._is_ready(plan) or not queue.planner.idle:
                    return False
                ticket = negotiation.ticket
                self._describe(plan, source, target, instance)
            closing, began = queue.status.closing, _clock()
            state = self.call(self._job_at, slice_ns)
            if state in _UNSETTLED:
                # A late member that will never arrive is an error. An agreed call is executed while the world closes.
                if state == _MOVING:
                    queue.status.check_alive()
                elif slice_ns:
                    queue.look_around(closing)
                return None
            done = self._settle(plan, ticket, instance, state, began)
            if done and stream is not None and out is not None:
                with torch.cuda.stream(stream):
                    copy_to_gpu(target, out)
            return done

        return go_on


def _can_be_packed(signature: Signature) -> bool:
    return signature.kind == Kind.ALLREDUCE and signature.device == "cpu" and len(set(signature.dtypes)) == 1


def _request(
    plan: CallPlan, tensor: torch.Tensor, out: torch.Tensor, targets: Sequence[torch.Tensor] | None = None
) -> Request:
    """Return the equivalent request for the ordinary path."""
    if plan.signature.kind == Kind.BARRIER:
        return Request(plan.signature)
    shapes = plan.signature.shapes
    if len(shapes) == 1:
        source = tensor.view(shapes[0])
        request = Request(plan.signature, [source], [source if out is tensor else out], [out])
    else:
        parts = [part.view(shape) for part, shape in zip(tensor.split([*map(prod, shapes)]), shapes, strict=True)]
        request = Request(plan.signature, parts, parts, [out])
    if plan.last is not None:
        request.last, request.targets = plan.last, [out] if targets is None else targets
    return request
