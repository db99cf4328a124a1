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
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hora.engine.request import Kind, Reduce
from hora.engine.shm import native
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, SLICE_NS, Counters, wait_until
from hora.engine.shm.segment import PAGE_BYTES, Segment, aligned
from hora.engine.transport.arithmetic import arithmetic_of, staged
from hora.engine.transport.base import Membership, Tensors
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import PeerGroup, Work
from hora.engine.transport.packing import move

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
    second counter is needed for "I have read it". `steps` keeps that order for all operations.
    """

    def __init__(self, segment: Segment, membership: Membership, slot_bytes: int) -> None:
        self._member, self._num_members, self._check_alive = member, num_members, _ = membership
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

    def slot(self, member: int, step: int) -> int:
        """Return the address of the slot into which `member` writes its data for `step`."""
        return self._counters.address + self._slots_at + (member * DEPTH + step % DEPTH) * self.slot_bytes

    def note(self, step: int, value: int) -> None:
        """Publish a number for the others together with this member's data for `step`."""
        self._notes[_note_at(self._member, step)] = value

    def notes(self, step: int) -> list[int]:
        """Return all members' numbers of `step`, once it has been waited for."""
        return [self._notes[_note_at(member, step)] for member in range(self._num_members)]

    def steps(self, num_steps: int, fill: Callable[[int, int], None], drain: Callable[[int, int], None]) -> None:
        """Call `fill(index, step)` for this member's slot and `drain(index, step)` for all, `num_steps` times."""
        first = self.step + 1
        self.step += num_steps
        filled = 0
        for index in range(num_steps):
            while filled < num_steps and filled <= index + AHEAD:
                fill(filled, first + filled)
                self._counters.publish(first + filled)
                filled += 1
            self._counters.wait(first + index, self._check_alive, what="shared memory")
            drain(index, first + index)

    def allreduce(
        self,
        library: native.Library,
        inputs: Tensors,
        outputs: Tensors,
        count: int,
        what: native.Sum,
        stage: float,
        direct: bool,
    ) -> None:
        """Reduce tensors of `count` elements together with the native part, scaled by `stage` on the way."""
        sources = native.addresses(inputs)
        results = sources if outputs is inputs else native.addresses(outputs)
        counts = (ctypes.c_int64 * len(inputs))(*[tensor.numel() for tensor in inputs])
        item_bytes = inputs[0].itemsize
        job, num_steps = self.job(Kind.ALLREDUCE, -1, count, what, stage, item_bytes=item_bytes, direct=direct)
        job.inputs, job.outputs = ctypes.addressof(sources), ctypes.addressof(results)
        job.counts = ctypes.addressof(counts)
        job.first_step = self.step + 1
        self.step += num_steps
        job_at = ctypes.addressof(job)
        wait_until(
            lambda: library.collective(job_at, SLICE_NS),
            self._check_alive,
            lambda: f"member {job.late} in shared memory",
        )

    def job(
        self, kind: Kind, root: int, count: int, what: native.Sum, stage: float, *, item_bytes: int, direct: bool
    ) -> tuple[native.Job, int]:
        """Describe collectives of one kind; returns how many steps of the ring each of them takes, too."""
        divided = kind in (Kind.ALLTOALL, Kind.REDUCESCATTER)
        share_bytes = share_of(self.slot_bytes, self._num_members) if divided else self.slot_bytes
        num_pieces = -(-count // (share_bytes // item_bytes))
        # A member that has published step s + AHEAD + 1 has reduced its slice of step s.
        lag = 0 if direct else AHEAD + 1 if num_pieces > AHEAD else num_pieces
        job = native.Job(
            ring=ctypes.pointer(self.description),
            total=count,
            lag=lag,
            dtype=what.dtype_number,
            finish=what.how,
            direct=direct,
            kind=kind,
            root=root,
            stage=stage,
            prescale=what.prescale,
            factor=what.factor,
        )
        return job, num_pieces + lag

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


def share_of(slot_bytes: int, num_members: int) -> int:
    """Return each member's share of a slot that is divided among them: `share_bytes` of native.c."""
    return slot_bytes // num_members // LINE_BYTES * LINE_BYTES


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
        sent, received = ([_Span(each.data_ptr(), each.nbytes) for each in some] for some in (sources, targets))
        move(received[self.member].address, *sent[self.member])
        # No member knows what the others send each other. So the first step carries the beginnings of everything and
        # the size of the largest part, and then all know how many steps are left.
        ring = self.ring
        done = share_of(ring.slot_bytes, self.num_members)
        ring.note(ring.step + 1, max(span.num_bytes for span in sent))
        self._exchange(ring, sent, received, 1)
        left = max(ring.notes(ring.step)) - done
        if left > 0:
            ring = self.ring_for(left * self.num_members)
            num_steps = -(-left // share_of(ring.slot_bytes, self.num_members))
            self._exchange(
                ring, [span.after(done) for span in sent], [span.after(done) for span in received], num_steps
            )

    def _exchange(self, ring: Ring, sent: Sequence[_Span], received: Sequence[_Span], num_steps: int) -> None:
        """Send the first `num_steps` pieces of `sent[m]` to each other member m."""
        share, others = share_of(ring.slot_bytes, self.num_members), {*range(self.num_members)} - {self.member}
        sources = {peer * share: sent[peer] for peer in others}
        results = {(peer, self.member * share): received[peer] for peer in others}
        self._move(ring, sources, results, share, num_steps)

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        (own,), parts = _spans(input, [input.numel()]), _spans(output, counts)
        if own.address != parts[self.member].address:
            move(parts[self.member].address, *own)
        largest = max(part.num_bytes for part in parts)
        ring = self.ring_for(largest)
        results = {(peer, 0): part for peer, part in enumerate(parts) if peer != self.member}
        self._move(ring, {0: own}, results, ring.slot_bytes, -(-largest // ring.slot_bytes))
        return None, "allgather"

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        (whole,) = _spans(tensor, [tensor.numel()])
        ring, is_root = self.ring_for(whole.num_bytes), self.member == root
        sources, results = ({0: whole}, {}) if is_root else ({}, {(root, 0): whole})
        self._move(ring, sources, results, ring.slot_bytes, -(-whole.num_bytes // ring.slot_bytes))
        return None, "broadcast"

    def _move(
        self,
        ring: Ring,
        sources: Mapping[int, _Span],
        results: Mapping[tuple[int, int], _Span],
        most: int,
        num_steps: int,
    ) -> None:
        """Copy pieces of `most` bytes to this member's slots, by offset, and from others', by member and offset."""

        def fill(index: int, step: int) -> None:
            for offset, span in sources.items():
                move(ring.slot(self.member, step) + offset, *span.piece(index, most))

        def drain(index: int, step: int) -> None:
            for (peer, offset), span in results.items():
                address, num_bytes = span.piece(index, most)
                move(address, ring.slot(peer, step) + offset, num_bytes)

        ring.steps(num_steps, fill, drain)

    def _wait(self, work: Any, what: str) -> None:
        """Do nothing: what has started is done."""

    def close(self) -> None:
        self.ring.close()

    discard = close


class _Span(NamedTuple):
    """Contiguous memory."""

    address: int
    num_bytes: int

    def after(self, num_bytes: int) -> _Span:
        return _Span(self.address + num_bytes, max(self.num_bytes - num_bytes, 0))

    def piece(self, index: int, most: int) -> _Span:
        """Return piece number `index` of `most` bytes each; empty beyond the end."""
        return _Span(self.address + index * most, max(min(self.num_bytes - index * most, most), 0))


def _spans(tensor: torch.Tensor, counts: Sequence[int]) -> list[_Span]:
    """Return consecutive parts of a flat tensor with these numbers of elements."""
    begin, size = tensor.data_ptr(), tensor.itemsize
    return [_Span(begin + at * size, n * size) for at, n in zip(accumulate(counts, initial=0), counts, strict=False)]


class ShmTransport(DistributedTransport):
    """`DistributedTransport` over a `ShmGroup`, except that the native part computes sums of all members at once."""

    def __init__(self, segment_provider: Callable[[int], Segment], membership: Membership) -> None:
        library = native.library()
        assert library is not None, "ranks share memory only with the native part"
        self._library = library
        self.slots = ShmGroup(segment_provider, membership)
        super().__init__(self.slots, hosts=[range(membership.num_members)])

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype, num_members = inputs[0].dtype, self._num_members
        arithmetic = arithmetic_of(staged(reduce, dtype, num_members), dtype, num_members)
        count = sum([tensor.numel() for tensor in inputs])
        what, stage = arithmetic.sum, arithmetic.stage
        if what is not None and stage is not None and count:
            num_bytes = count * dtype.itemsize
            ring, direct = self.slots.ring_for(num_bytes), self.is_direct(num_bytes)
            ring.allreduce(self._library, inputs, outputs, count, what, stage, direct)
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
