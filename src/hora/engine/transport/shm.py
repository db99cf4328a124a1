"""Collectives among ranks of one host through shared memory: native sums, and a group for everything else.

Private data goes through the slots of a `Ring` piece by piece, so the memory in use stays in the cache and is bounded
for any tensor size. The native part computes sums: with two members or little data each member reduces all slots
directly into its own output; otherwise member m reduces slice m of each piece, and the result is shared through memory.
Other collectives exchange bytes through the slots (`ShmGroup`), as `DistributedTransport` does over any group.

Gradient buckets are already in shared memory and are reduced there (`shm.reduction`). After an exception the transport
is unusable and must be closed.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm import native
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, SLICE_NS, Counters, wait_until
from hora.engine.shm.segment import PAGE_BYTES, Segment, aligned
from hora.engine.transport.arithmetic import arithmetic_of, staged
from hora.engine.transport.base import Membership, Tensors
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import PeerGroup, Work

# A transport starts with small slots, because most process sets never send much, and gets large ones once. Larger
# pieces mean fewer synchronizations, until the slots in use no longer fit the second-level cache.
SMALL_SLOT_BYTES = 65536
LARGE_SLOT_BYTES = 524288
# Up to this many bytes over all members each member reduces everything; beyond that, each reduces its slice.
DIRECT_BYTES = 393216
AHEAD = 1
DEPTH = 2 * AHEAD + 2


class Ring:
    """The memory of the transport: a few slots per member, reused step by step.

    Layout of the segment: a counter and notes for each member, `DEPTH` slots for each member, and `DEPTH` result slots
    that all members write parts of. Step numbers continue from one operation to the next; step s uses slot s modulo
    DEPTH.

    In every step each member fills its slot (or leaves it), publishes the step, waits for all others', and reads. A
    member may run AHEAD steps ahead: it fills and publishes s + AHEAD before it waits for s, so that a peer that is
    briefly late does not stop the others. A member that has published s has read all of s - AHEAD - 1, and one that has
    waited for s - 1 may fill s + AHEAD, because all have read its slot's last use: with DEPTH = 2 AHEAD + 2 slots no
    second counter is needed for "I have read it". `hora_collective` of native.c keeps that order.
    """

    def __init__(self, segment: Segment, membership: Membership, slot_bytes: int) -> None:
        self._member, self._num_members, self._check_alive = member, num_members, _ = membership
        library = native.library()
        assert library is not None, "ranks share memory only with the native part"
        self._library = library
        assert slot_bytes % PAGE_BYTES == 0, slot_bytes
        assert segment.num_bytes >= self.num_bytes(num_members, slot_bytes)
        self.slot_bytes = slot_bytes
        self._segment = segment
        self.step = 0  # the last one taken
        self._slots_at = aligned(num_members * MEMBER_BYTES)
        self._results_at = self._slots_at + num_members * DEPTH * slot_bytes
        self._counters = Counters(segment.memory, 0, member, num_members)
        self._notes = memoryview(segment.memory).cast("q")

    @staticmethod
    def num_bytes(num_members: int, slot_bytes: int) -> int:
        """Return the size of the segment that a ring needs."""
        return aligned(num_members * MEMBER_BYTES) + (num_members + 1) * DEPTH * slot_bytes

    def note(self, step: int, value: int) -> None:
        """Publish a number for the others together with this member's data for `step`."""
        self._notes[_note_at(self._member, step)] = value

    def notes(self, step: int) -> list[int]:
        """Return all members' numbers of `step`, once it has been waited for."""
        return [self._notes[_note_at(member, step)] for member in range(self._num_members)]

    def allreduce(
        self, inputs: Tensors, outputs: Tensors, count: int, what: native.Sum, stage: float, direct: bool
    ) -> None:
        """Reduce tensors of `count` elements together, scaled by `stage` on the way."""
        sources = native.addresses(inputs)
        results = sources if outputs is inputs else native.addresses(outputs)
        counts = (ctypes.c_int64 * len(inputs))(*[tensor.numel() for tensor in inputs])
        job, num_steps = self.job(count, inputs[0].itemsize, what, direct=direct, stage=stage)
        job.inputs, job.outputs = ctypes.addressof(sources), ctypes.addressof(results)
        job.counts = ctypes.addressof(counts)
        self._run(job, num_steps)

    def move(self, sent: Sequence[Part], received: Sequence[Part], most_bytes: int, *, divided: bool) -> None:
        """Send `sent[m]` to each member m if slots are `divided`, else this member's part to all; receive likewise.

        All members give the same `most_bytes`; what is longer is moved in part.
        """
        nowhere, parts = ctypes.c_void_p(), [parts_array(some) for some in (sent, received)]
        job, num_steps = self.job(most_bytes, 1, MOVE, divided=divided)
        job.inputs = job.outputs = ctypes.addressof(nowhere)  # parts begin at addresses
        job.sent, job.received = map(ctypes.addressof, parts)
        self._run(job, num_steps)

    def _run(self, job: native.Job, num_steps: int) -> None:
        job.first_step = self.step + 1
        self.step += num_steps
        job_at = ctypes.addressof(job)
        wait_until(
            lambda: self._library.collective(job_at, SLICE_NS),
            self._check_alive,
            lambda: f"member {job.late} in shared memory",
        )

    def job(
        self,
        count: int,
        item_bytes: int,
        what: native.Sum,
        *,
        direct: bool = True,
        divided: bool = False,
        stage: float = 1.0,
    ) -> tuple[native.Job, int]:
        """Describe collectives of one kind; returns how many steps of the ring each of them takes, too."""
        num_pieces = -(-count // (self.share_bytes(divided) // item_bytes))
        # A member that has published step s + AHEAD + 1 has reduced its slice of step s.
        lag = 0 if direct else AHEAD + 1 if num_pieces > AHEAD else num_pieces
        job = native.Job(
            ring=ctypes.pointer(self.description),
            total=count,
            lag=lag,
            direct=direct,
            divided=divided,
            what=what,
            stage=stage,
        )
        return job, num_pieces + lag

    def share_bytes(self, divided: bool) -> int:
        """Return each member's share of a slot, which may be divided among them: `share_bytes` of native.c."""
        return self.slot_bytes // self._num_members // LINE_BYTES * LINE_BYTES if divided else self.slot_bytes

    @functools.cached_property
    def description(self) -> native.RingStruct:
        """The ring as the native part's struct."""
        begin = self._counters.address  # the counters keep the mapping alive
        return native.RingStruct(
            slots=begin + self._slots_at,
            results=begin + self._results_at,
            slot_bytes=self.slot_bytes,
            depth=DEPTH,
            ahead=AHEAD,
            group=self._counters.group,
        )

    def meet(self) -> None:
        """Run a step without data: waits until all members have arrived."""
        self.step += 1
        self._counters.meet(self.step, self._check_alive, what="shared memory")

    def close(self) -> None:
        """Release the memory; the ring is unusable afterwards."""
        self._notes.release()
        self._counters.close()
        self._segment.close()


def _note_at(member: int, step: int) -> int:
    """Return the place of a member's number, which lies behind its counter, in words."""
    return (member * MEMBER_BYTES + LINE_BYTES) // 8 + step % DEPTH


Part = tuple[int, int]  # where the bytes of a tensor begin, and their number
NOTHING: Part = (0, 0)
MOVE = native.Sum(1.0, 1.0, native.DTYPE_NUMBERS[torch.uint8], native.NOTHING)  # for bytes that are not reduced


def parts_array(parts: Sequence[Part]) -> ctypes.Array[ctypes.c_int64]:
    """Return parts as `struct part`s of native.c."""
    return (ctypes.c_int64 * (2 * len(parts)))(*itertools.chain(*parts))


def equal_parts(
    kind: Kind, root: int, member: int, num_members: int, num_bytes: int, begin: int = 0
) -> tuple[list[Part], list[Part]]:
    """Return what a member sends and receives if all parts have `num_bytes`; `begin`: those that each member gets."""
    each, whole = [(peer * num_bytes, num_bytes) for peer in range(num_members)], (begin, num_bytes)
    if kind is Kind.ALLTOALL:
        return each, each
    if kind is Kind.ALLGATHER:
        return [whole] * num_members, each
    nothing = [NOTHING] * num_members
    if member == root:
        return [whole] * num_members, nothing
    return nothing, [whole if peer == root else NOTHING for peer in range(num_members)]


class ShmGroup(PeerGroup):
    """Members of one host, which exchange bytes through the slots of a ring, on the calling thread.

    `segment_provider` is collective: it gives all members the same zeroed memory of the requested size.
    """

    backend = "shm"

    def __init__(self, segment_provider: Callable[[int], Segment], membership: Membership) -> None:
        super().__init__(membership)
        self._segment_provider, self._membership = segment_provider, membership
        self.ring = self._make_ring(SMALL_SLOT_BYTES)
        self.num_rings = 1  # so far: state for one is invalid for the next

    def _make_ring(self, slot_bytes: int) -> Ring:
        segment = self._segment_provider(Ring.num_bytes(self.num_members, slot_bytes))
        return Ring(segment, self._membership, slot_bytes)

    def ring_for(self, num_bytes: int) -> Ring:
        """Return the ring; with large slots once an operation has needed them, which all members see alike."""
        if num_bytes > self.ring.slot_bytes == SMALL_SLOT_BYTES:
            small, self.ring = self.ring, self._make_ring(LARGE_SLOT_BYTES)
            self.num_rings += 1  # after the ring itself: other threads prepare calls for the ring that they see
            small.close()
        return self.ring

    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        self.exchange(output.split(list(receive_counts)), input.split(list(send_counts)))
        return None, "alltoall"

    def exchange(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Run an alltoall of separate tensors, by member."""
        sent, received = ([(each.data_ptr(), each.nbytes) for each in some] for some in (sources, targets))
        # No member knows what the others send each other. So the first step carries the beginnings of everything and
        # the size of the largest part, and then all know how many steps are left.
        ring = self.ring
        done = ring.share_bytes(divided=True)
        ring.note(ring.step + 1, max(num_bytes for _, num_bytes in sent))
        ring.move(sent, received, 1, divided=True)
        left = max(ring.notes(ring.step)) - done
        if left > 0:
            rest, gets = ([(at + done, num_bytes - done) for at, num_bytes in some] for some in (sent, received))
            self.ring_for(left * self.num_members).move(rest, gets, left, divided=True)

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        own, most_bytes = (input.data_ptr(), input.nbytes), max(counts) * input.itemsize
        received = [(part.data_ptr(), part.nbytes) for part in output.split(list(counts))]
        self.ring_for(most_bytes).move([own] * self.num_members, received, most_bytes, divided=False)
        return None, "allgather"

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        place, num_bytes = tensor.data_ptr(), tensor.nbytes
        parts = equal_parts(Kind.BROADCAST, root, self.member, self.num_members, num_bytes, place)
        self.ring_for(num_bytes).move(*parts, num_bytes, divided=False)
        return None, "broadcast"

    def _wait(self, work: Any, what: str) -> None:
        """Do nothing: what has started is done."""

    def close(self) -> None:
        self.ring.close()


class ShmTransport(DistributedTransport):
    """`DistributedTransport` over a `ShmGroup`, except that the native part computes sums of all members at once."""

    def __init__(self, segment_provider: Callable[[int], Segment], membership: Membership) -> None:
        self.slots = ShmGroup(segment_provider, membership)
        super().__init__(self.slots, hosts=[range(membership.num_members)])

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        if reduce.op == ReduceOp.ADASUM:
            super().allreduce(inputs, outputs, reduce)
            return
        dtype, num_members = inputs[0].dtype, self._num_members
        arithmetic = arithmetic_of(staged(reduce, dtype, num_members), dtype, num_members)
        count = sum([tensor.numel() for tensor in inputs])
        what, stage = arithmetic.sum, arithmetic.stage
        if what is not None and stage is not None and count:
            num_bytes = count * dtype.itemsize
            ring, direct = self.slots.ring_for(num_bytes), self.is_direct(num_bytes)
            ring.allreduce(inputs, outputs, count, what, stage, direct)
        else:
            super().allreduce(inputs, outputs, reduce)

    def is_direct(self, num_bytes: int) -> bool:
        """Return whether each member reduces all of this much data, natively."""
        return self._num_members <= 2 or num_bytes * self._num_members <= DIRECT_BYTES

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the ring is large enough for this much data; otherwise one with larger slots is needed."""
        return num_bytes <= self.slots.ring.slot_bytes or self.slots.num_rings > 1

    def barrier(self) -> None:
        self.slots.ring.meet()

    def exchange(self, targets: Tensors, sources: Tensors) -> None:
        """Run an alltoall of separate tensors, by member."""
        self.slots.exchange(targets, sources)
