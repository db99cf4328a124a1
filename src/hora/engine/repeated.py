"""Repeated calls: the fast path for collectives of one tensor that all members of one host call in the same order.

An allreduce of several tensors is one of the flat tensor in which its caller has packed them.

The call is not queued or announced, and wakes no thread. The native part publishes a record
(`negotiation.shared_memory`), and when all members' records are equal, each member does its part. Everything else takes
the ordinary path: another request in flight, other news, a rank that has joined, an active timeline, operations that
the native part lacks.

A blocking call is one function in C (`calls.c`), from its checks to its result and the meter. If the other members do
not make it within a moment, or Ctrl-C interrupts it, it stands in the queue's lane (`CallPlan.go_on`), as an
asynchronous one does from the start (`OperationQueue.start_repeated`): the driver of the queue completes it.

CUDA tensors of members that share a GPU are staged in pinned memory if the device's transport would do the same
(`PinnedStage`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hora.engine.negotiation.shared_memory import SharedMemoryNegotiation
from hora.engine.queue import OperationQueue
from hora.engine.request import DTYPES, ITEM_BYTES, KINDS, GoOn, Kind, Request, Signature
from hora.engine.shm.native import SHORT_BYTES, CallStruct, Spec, Sum, library, native_part
from hora.engine.transport.arithmetic import arithmetic_of, staged
from hora.engine.transport.cuda import CudaTransport
from hora.engine.transport.cuda_staging import PinnedStage, copy_to_gpu
from hora.engine.transport.shm import MOVE, ShmTransport, equal_parts, parts_array
from hora.telemetry.meters import meter

_WAITING, _DONE, _MOVING = 0, 1, 2  # enum state of repeated.h
_UNSETTLED = (_WAITING, _MOVING)
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
        self._digest = (ctypes.c_uint8 * 16)(*signature.digest())
        self.kind = Kind.ALLREDUCE if is_barrier else KINDS[signature.kind]
        count, size, dtype = sum(map(prod, shapes)), len(path.ranks), DTYPES[name]
        num_bytes = ITEM_BYTES[name] * count
        self._stage = None if signature.device == "cpu" else PinnedStage(count, dtype)
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
        self.call = CallStruct(
            repeated=path.calls_at,
            turns=ctypes.addressof(self.slots.turns),
            num_bytes=num_bytes,
            is_brief=num_bytes <= SHORT_BYTES,
            is_unnamed=signature.name is None,
            is_on_gpu=self._stage is not None,
        )
        self.parts = ctypes.addressof(self.call), self, signature.operation, path.parts  # what calls.c knows of it
        self.prepare()

    def prepare(self) -> None:
        """Describe the call to the native part, with the current slots.

        Any thread. If the ring is replaced meanwhile, its number differs from the recorded one, so the next call
        prepares the plan again.
        """
        transport, num_bytes = self._transport, self.call.num_bytes
        num_rings, address = self.slots.num_rings, 0
        if self._what is not None and self._count and self.slots.has_room(num_bytes):
            direct = self.kind is not Kind.ALLREDUCE or transport.is_direct(num_bytes)
            what, stage = self._what
            job, num_steps = self.slots.job(
                self._count, self._item_bytes, what, direct=direct, divided=self._divided, stage=stage
            )
            if self._parts:
                job.sent, job.received = map(ctypes.addressof, self._parts)
            is_staged = direct and num_steps == 1
            spec = Spec(job=job, digest=self._digest, num_steps=num_steps, staged=is_staged)
            self._specs.append(spec)  # the native part may still use the old ring
            address = ctypes.addressof(spec)
        self.call.spec, self.call.num_rings = address or None, num_rings

    @property
    def is_ready(self) -> bool:
        """Return whether the native part can execute the call with the current slots."""
        if self.call.num_rings != self.slots.num_rings:
            self.prepare()
        return bool(self.call.spec)

    @property
    def is_staged(self) -> bool:
        """Return whether all data is in the slots when the record is published."""
        return bool(self._specs and self._specs[-1].staged)

    def request(self, tensor: torch.Tensor, out: torch.Tensor, targets: Sequence[torch.Tensor] | None) -> Request:
        """Return the equivalent request for the ordinary path."""
        if self.signature.kind == Kind.BARRIER:
            return Request(self.signature)
        shapes = self.signature.shapes
        if len(shapes) == 1:
            source = tensor.view(shapes[0])
            request = Request(self.signature, [source], [source if out is tensor else out], [out])
        else:
            parts = [part.view(shape) for part, shape in zip(tensor.split([*map(prod, shapes)]), shapes, strict=True)]
            request = Request(self.signature, parts, parts, [out])
        if self.last is not None:
            request.last, request.targets = self.last, [out] if targets is None else targets
        return request

    # Called by calls.c.

    def stage_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a GPU's tensor in pinned memory."""
        assert self._stage is not None
        return self._stage.fetch(tensor)

    copy_back = staticmethod(copy_to_gpu)

    def go_on(
        self,
        call: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int, Callable[[Request], object] | None, Any],
        interrupted: bool = False,
    ) -> None:
        """Put a call that has begun in the queue's lane and wait for it, unless this thread was interrupted before."""
        tensor, out, piece, ticket, instance, wait, targets = call
        path, source, target = self.path, piece if piece is not None else tensor, piece if piece is not None else out
        request, waits = self.request(tensor, out, targets), False
        try:
            path.queue.leave_unfinished(request, instance, path.in_lane(self, source, target, ticket, out))
            waits = not interrupted
        finally:
            path.queue.end_exclusive(waits)
        if waits:
            (wait or Request.result)(request)


class RepeatedCalls:
    """Repeated calls of one queue, whose members share a host and have the native part."""

    def __init__(self, queue: OperationQueue, negotiation: SharedMemoryNegotiation) -> None:
        self.ranks, self.queue = queue.ranks, queue
        self.calls = negotiation.calls
        self.calls_at = ctypes.addressof(self.calls)
        self._native = native_part()
        self._carry_out = self._native.function("carry_out")
        planner, driving = queue.planner, queue.driving
        self.parts = (  # what calls.c knows of a queue
            *(queue, queue.in_flight, *planner.pending_and_joined, planner, queue.recorder, queue.status, meter),
            *(queue.lock.locked, driving.acquire, driving.release),
        )

    def plan(self, signature: Signature) -> CallPlan | None:
        """Return a plan; None if the transport does not exist yet, or the members' sizes differ."""
        if len(signature.shapes) > 1 and not _can_be_packed(signature):
            return None
        transport = self.queue.transports.get("cpu")
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
        device = self.queue.transports.get(signature.device)
        return isinstance(device, CudaTransport) and device.stages(ITEM_BYTES[name] * prod(shape))

    def carry_out(
        self,
        plan: CallPlan,
        tensor: torch.Tensor,
        out: torch.Tensor,
        wait: Callable[[Request], object] | None = None,
        targets: Sequence[torch.Tensor] | None = None,
    ) -> bool:
        """Execute the call on a contiguous tensor, into another one or in place. Returns False if it must take the
        ordinary path. If another member is late or does something else, `wait` waits for the call. The plan's last step
        writes `targets`; None: it writes `out`, where a repeated call has its result already.
        """
        done: bool | None = self._carry_out(plan.parts, tensor, out, wait, targets)
        if done and targets:
            request = plan.request(tensor, out, targets)
            request.run_last()
            request.raise_error()
        return done is not False

    def start(
        self, plan: CallPlan, tensor: torch.Tensor, out: torch.Tensor, targets: Sequence[torch.Tensor] | None = None
    ) -> Request | None:
        """Start an asynchronous call on CPU tensors; returns None if it must take the ordinary path.

        If the other members can complete their parts without this one, no thread is woken to drive it.
        """
        queue, request = self.queue, plan.request(tensor, out, targets)
        if not plan.is_ready or not queue.start_repeated(request, self.in_lane(plan, tensor, out)):
            return None
        if not request.done and not (plan.is_staged and request in [*queue.lane][:1]):
            queue.wake_background()
        return request

    def in_lane(
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
        calls, queue = self.calls, self.queue

        def go_on(instance: int, slice_ns: int) -> bool | None:
            nonlocal ticket
            if not ticket:
                void = calls.next_ticket == calls.void_ticket or queue.recorder.timeline is not None
                if void or not plan.is_ready or not queue.planner.idle:
                    return False
                ticket, places = calls.next_ticket, (source.data_ptr(), target.data_ptr())
                self._native.begin(self.calls_at, ctypes.addressof(plan.call), *places, instance)
            closing = queue.status.closing
            state = self._native.repeated(self.calls_at, slice_ns)
            if state in _UNSETTLED:
                # A late member that will never arrive is an error. An agreed call is executed while the world closes.
                if state == _MOVING:
                    queue.status.check_alive()
                elif slice_ns:
                    queue.look_around(closing)
                return None
            done = self._settle(plan, instance)
            if done and stream is not None and out is not None:
                with torch.cuda.stream(stream):
                    copy_to_gpu(target, out)
            return done

        return go_on

    def _settle(self, plan: CallPlan, instance: int) -> bool:
        """Record the result of a call; returns whether it is done."""
        if not self._native.settle(self.calls_at, plan.call.turns):
            return False
        if plan.signature.name is None:
            self.queue.planner.note_number(plan.signature.operation, instance)
        meter.transport_s += _clock() - self.calls.met_ns * 1e-9  # one clock
        meter.num_bytes += plan.call.num_bytes
        return True


def _can_be_packed(signature: Signature) -> bool:
    return signature.kind == Kind.ALLREDUCE and signature.device == "cpu" and len(set(signature.dtypes)) == 1


@dataclass(slots=True)
class KnownAllreduce:
    """Shared state of the allreduces of one tensor that repeat a call the engine has validated."""

    queue: OperationQueue
    signature: Signature
    plan: CallPlan | None = None
    parts: tuple[Any, ...] | None = None  # of the plan


class KnownAllreduces:
    """Allreduces of one tensor that the engine has validated, by what they look like to the caller.

    `find(tensor, name, op, prescale_factor, postscale_factor, process_set)` returns what is known of calls like this
    one, the key if nothing is, or None if the ordinary path must look at it. `repeat` does it in place once there is a
    plan: it returns True, or False if this call must take the ordinary path. Before, it returns the same as `find`.
    """

    _MOST = 4096

    def __init__(self) -> None:
        self.table: dict[object, KnownAllreduce] = {}
        native = library()
        self.find: Callable[..., Any] = _nothing
        self.repeat: Callable[..., Any] = _nothing
        if native is not None:
            parts = self.table, torch.Tensor, torch.strided, torch.is_inference_mode_enabled
            self.find, self.repeat = native.function("known", parts), native.function("again", parts)

    def add(self, key: object, found: KnownAllreduce) -> None:
        if len(self.table) >= self._MOST:
            self.table.clear()
        self.table[key] = found


def _nothing(*_: object) -> None:
    """Know of no call: without the native part."""
