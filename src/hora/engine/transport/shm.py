"""Collectives among ranks of one host through shared memory: native sums, and a group for everything else.

Private data goes through the slots of a ring piece by piece, so the memory in use stays in the cache and is bounded
for any tensor size. The native part computes sums: with two members or little data each member reduces all slots
directly into its own output; otherwise member m reduces slice m of each piece, and the result is shared through memory.
Other collectives exchange bytes through the slots (`ShmGroup`), as `DistributedTransport` does over any group.

Gradient buckets are already in shared memory and are reduced there (`shm.reduction`). After an exception the transport
is unusable and must be closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm import native
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, SLICE_NS, Counters, wait_until
from hora.engine.shm.segment import Segment, aligned
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


Part = tuple[int, int]  # where the bytes of a tensor begin, and their number
NOTHING: Part = (0, 0)
MOVE = native.Sum(1.0, 1.0, native.DTYPE_NUMBERS[torch.uint8], native.NOTHING)  # for bytes that are not reduced


def parts_array(parts: Sequence[Part]) -> ctypes.Array[ctypes.c_int64]:
    """Return parts as `struct part`s of native.c."""
    return (ctypes.c_int64 * (2 * len(parts)))(*itertools.chain(*parts))


def equal_parts(
    kind: Kind, root: int, member: int, num_members: int, num_bytes: int, begin: int = 0
) -> tuple[list[Part], list[Part]]:
    """Return what a member sends and receives if all parts have `num_bytes`.

    `begin`: the offset of the part that every member receives.
    """
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
    """Members of one host, which exchange bytes through a ring in shared memory, on the calling thread.

    The ring is a few slots per member, reused step by step. Layout of its segment: a counter and notes for each member,
    `DEPTH` slots for each member, and `DEPTH` result slots that all members write parts of. Step numbers continue from
    one operation to the next; step s uses slot s modulo DEPTH.

    In every step each member fills its slot (or leaves it), publishes the step, waits for all others', and reads. A
    member may run AHEAD steps ahead: it fills and publishes s + AHEAD before it waits for s, so that a peer that is
    briefly late does not stop the others. A member that has published s has read all of s - AHEAD - 1, and one that has
    waited for s - 1 may fill s + AHEAD, because all have read its slot's last use: with DEPTH = 2 AHEAD + 2 slots no
    second counter is needed for "I have read it". `hora_collective` of native.c keeps that order.

    `segment_provider` is collective: it gives all members the same zeroed memory of the requested size.
    """

    backend = "shm"

    def __init__(self, segment_provider: Callable[[int], Segment], membership: Membership) -> None:
        super().__init__(membership)
        self._library, self._segment_provider = native.native_part(), segment_provider
        self._memory = contextlib.ExitStack()
        self.turns = native.Turns()
        self._make_ring(SMALL_SLOT_BYTES)

    def _make_ring(self, slot_bytes: int) -> None:
        num_members, slots_at = self.num_members, aligned(self.num_members * MEMBER_BYTES)
        results_at = slots_at + num_members * DEPTH * slot_bytes
        segment = self._segment_provider(results_at + DEPTH * slot_bytes)
        earlier, self._memory = self._memory, contextlib.ExitStack()
        self._memory.callback(segment.close)
        self._counters = counters = Counters(segment.memory, 0, self.member, num_members)
        self._memory.callback(counters.close)
        self._notes = self._memory.enter_context(memoryview(segment.memory).cast("q"))
        self.step = 0
        self.ring = native.RingStruct(
            slots=counters.address + slots_at,
            results=counters.address + results_at,
            slot_bytes=slot_bytes,
            depth=DEPTH,
            ahead=AHEAD,
            group=counters.group,
        )
        self.turns.num_rings += 1  # after the ring itself: other threads prepare calls for the ring that they see
        earlier.close()

    @property
    def num_rings(self) -> int:
        """So many rings so far: state for one is invalid for the next."""
        return int(self.turns.num_rings)

    @property
    def step(self) -> int:
        """The last step taken."""
        return int(self.turns.step)

    @step.setter
    def step(self, step: int) -> None:
        self.turns.step = step

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the ring is large enough for this much data; otherwise one with larger slots is needed."""
        return num_bytes <= SMALL_SLOT_BYTES or self.num_rings > 1

    def make_room(self, num_bytes: int) -> None:
        """Change to large slots once an operation has needed them, which all members see alike."""
        if not self.has_room(num_bytes):
            self._make_ring(LARGE_SLOT_BYTES)

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
        done = self._share_bytes(divided=True)
        self._notes[self._note_at(self.member, self.step + 1)] = max(num_bytes for _, num_bytes in sent)
        self._move(sent, received, 1, divided=True)
        left = max(self._notes[self._note_at(member, self.step)] for member in range(self.num_members)) - done
        if left > 0:
            rest, gets = ([(at + done, num_bytes - done) for at, num_bytes in some] for some in (sent, received))
            self.make_room(left * self.num_members)
            self._move(rest, gets, left, divided=True)

    @staticmethod
    def _note_at(member: int, step: int) -> int:
        """Return the place of a member's number, which lies behind its counter, in words."""
        return (member * MEMBER_BYTES + LINE_BYTES) // 8 + step % DEPTH

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        own, most_bytes = (input.data_ptr(), input.nbytes), max(counts) * input.itemsize
        received = [(part.data_ptr(), part.nbytes) for part in output.split(list(counts))]
        self.make_room(most_bytes)
        self._move([own] * self.num_members, received, most_bytes, divided=False)
        return None, "allgather"

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        place, num_bytes = tensor.data_ptr(), tensor.nbytes
        parts = equal_parts(Kind.BROADCAST, root, self.member, self.num_members, num_bytes, place)
        self.make_room(num_bytes)
        self._move(*parts, num_bytes, divided=False)
        return None, "broadcast"

    def allreduce(
        self, inputs: Tensors, outputs: Tensors, count: int, what: native.Sum, stage: float, direct: bool
    ) -> None:
        """Reduce tensors of `count` elements together, scaled by `stage` on the way."""
        self.make_room(count * inputs[0].itemsize)
        sources = native.addresses(inputs)
        results = sources if outputs is inputs else native.addresses(outputs)
        starts = (ctypes.c_int64 * (len(inputs) + 1))(0, *itertools.accumulate([tensor.numel() for tensor in inputs]))
        job, num_steps = self.job(count, inputs[0].itemsize, what, direct=direct, stage=stage)
        job.inputs, job.outputs = ctypes.addressof(sources), ctypes.addressof(results)
        job.starts, job.num_tensors = ctypes.addressof(starts), len(inputs)
        self._run(job, num_steps)

    def _move(self, sent: Sequence[Part], received: Sequence[Part], most_bytes: int, *, divided: bool) -> None:
        """Send `sent[m]` to each member m if slots are `divided`, else this member's part to all; receive likewise.

        All members give the same `most_bytes`; what is longer is moved in part.
        """
        nowhere, parts = ctypes.c_void_p(), [parts_array(some) for some in (sent, received)]
        job, num_steps = self.job(most_bytes, 1, MOVE, divided=divided)
        job.inputs = job.outputs = ctypes.addressof(nowhere)  # parts begin at addresses
        job.sent, job.received = map(ctypes.addressof, parts)
        self._run(job, num_steps)

    def _run(self, job: native.CollectiveStruct, num_steps: int) -> None:
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
    ) -> tuple[native.CollectiveStruct, int]:
        """Describe collectives of one kind; returns how many steps of the ring each of them takes, too."""
        num_pieces = -(-count // (self._share_bytes(divided) // item_bytes))
        # A member that has published step s + AHEAD + 1 has reduced its slice of step s.
        lag = 0 if direct else AHEAD + 1 if num_pieces > AHEAD else num_pieces
        ring = ctypes.pointer(self.ring)
        job = native.CollectiveStruct(
            ring=ring, total=count, lag=lag, direct=direct, divided=divided, what=what, stage=stage
        )
        return job, num_pieces + lag

    def _share_bytes(self, divided: bool) -> int:
        """Return each member's share of a slot, which may be divided among them: `share_bytes` of native.c."""
        slot_bytes: int = self.ring.slot_bytes
        return slot_bytes // self.num_members // LINE_BYTES * LINE_BYTES if divided else slot_bytes

    def meet(self) -> None:
        """Run a step without data: waits until all members have arrived."""
        self.step += 1
        self._counters.meet(self.step, self._check_alive, what="shared memory")

    def _wait(self, work: Any, what: str) -> None:
        """Do nothing: what has started is done."""

    def close(self) -> None:
        self._memory.close()


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
            self.slots.allreduce(inputs, outputs, count, what, stage, self.is_direct(num_bytes))
        else:
            super().allreduce(inputs, outputs, reduce)

    def is_direct(self, num_bytes: int) -> bool:
        """Return whether each member reduces all of this much data, natively."""
        return self._num_members <= 2 or num_bytes * self._num_members <= DIRECT_BYTES

    def barrier(self) -> None:
        self.slots.meet()

    def exchange(self, targets: Tensors, sources: Tensors) -> None:
        """Run an alltoall of separate tensors, by member."""
        self.slots.exchange(targets, sources)
