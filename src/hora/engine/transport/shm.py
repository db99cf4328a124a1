"""Collectives among ranks of one host through shared memory, by the native part or torch operations on views.

Private data goes through the slots of a `Ring` piece by piece, so the memory in use stays in the cache and is bounded
for any tensor size. The native part computes sums: with two members or little data each member reduces all slots
directly into its own output; otherwise member m reduces slice m of each piece, and the result is shared through memory.
torch computes other reductions, in the first way. Members are combined in the order 0, 1, 2, … (`arithmetic`).

Gradient buckets are already in shared memory and are reduced there (`shm.reduction`). After an exception the transport
is unusable and must be closed.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from hora.engine.request import Kind, Reduce
from hora.engine.shm import native
from hora.engine.shm.counters import LINE_BYTES, MEMBER_BYTES, SLICE_NS, Counters
from hora.engine.shm.segment import PAGE_BYTES, Segment, aligned
from hora.engine.transport.arithmetic import Arithmetic, adasum, arithmetic_of, single_threaded, staged
from hora.engine.transport.base import AliveCheck, Tensors
from hora.engine.transport.packing import Piece, copy, cut, put, take, total

__all__ = ["AHEAD", "DEPTH", "Ring", "ShmTransport"]

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

    def __init__(
        self,
        segment: Segment,
        *,
        member: int,
        num_members: int,
        slot_bytes: int,
        check_alive: AliveCheck,
        limit_s: float,
    ) -> None:
        assert slot_bytes % PAGE_BYTES == 0, slot_bytes
        assert segment.num_bytes >= self.num_bytes(num_members, slot_bytes)
        self.slot_bytes = slot_bytes
        self._segment = segment
        self._member = member
        self._num_members = num_members
        self._check_alive = check_alive
        self._limit_s = limit_s
        self.step = 0  # the last one taken
        self._slots_at = aligned(num_members * MEMBER_BYTES)
        self._results_at = self._slots_at + num_members * DEPTH * slot_bytes
        self._counters = Counters(segment.memory, 0, member, num_members)
        self._notes = [
            [
                ctypes.c_int64.from_buffer(segment.memory, peer * MEMBER_BYTES + LINE_BYTES + 8 * turn)
                for turn in range(DEPTH)
            ]
            for peer in range(num_members)
        ]
        self._scratch = torch.empty(slot_bytes, dtype=torch.uint8, device="cpu")

    @staticmethod
    def num_bytes(num_members: int, slot_bytes: int) -> int:
        """Return the size of the segment that a ring needs."""
        return aligned(num_members * MEMBER_BYTES) + (num_members + 1) * DEPTH * slot_bytes

    def slot(self, member: int, step: int, count: int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """Return the slot into which `member` writes its data for `step`."""
        turn = member * DEPTH + step % DEPTH
        return self._segment.tensor(self._slots_at + turn * self.slot_bytes + offset_bytes, count, dtype)

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return private scratch memory between two operations, at most a slot; always the same."""
        return self._scratch.view(dtype)[:count]

    def note(self, step: int, value: int) -> None:
        """Publish a number for the others together with this member's data for `step`."""
        self._notes[self._member][step % DEPTH].value = value

    def notes(self, step: int) -> list[int]:
        """Return all members' numbers of `step`, once it has been waited for."""
        return [row[step % DEPTH].value for row in self._notes]

    def steps(self, num_steps: int, fill: Callable[[int, int], None], drain: Callable[[int, int], None]) -> None:
        """Call `fill(index, step)` for this member's slot and `drain(index, step)` for all, `num_steps` times."""
        first = self.step + 1
        self.step += num_steps
        filled = 0
        for index in range(num_steps):
            while filled < num_steps and filled <= index + AHEAD:
                fill(filled, first + filled)
                self.publish(first + filled)
                filled += 1
            self.wait(first + index)
            drain(index, first + index)

    def publish(self, step: int) -> None:
        """Publish that this member's slot of `step` is filled."""
        self._counters.publish(step)

    def wait(self, step: int) -> None:
        """Wait until all members have published `step`."""
        self._counters.wait(step, self._check_alive, limit_s=self._limit_s, what="shared memory")

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
        num_pieces = -(-count * inputs[0].itemsize // self.slot_bytes)
        lag = _lag(num_pieces, direct)
        job = native.Job(
            ring=ctypes.pointer(self.description),
            first_step=self.step + 1,
            inputs=ctypes.addressof(sources),
            outputs=ctypes.addressof(results),
            counts=ctypes.addressof(counts),
            total=count,
            lag=lag,
            dtype=what.dtype_number,
            finish=what.how,
            direct=direct,
            stage=stage,
            prescale=what.prescale,
            factor=what.factor,
        )
        self.step += num_pieces + lag
        begin = 0.0
        while not library.collective(job, SLICE_NS):
            self._check_alive()
            now = time.monotonic()
            begin = begin or now
            if now - begin > self._limit_s:
                raise TimeoutError(f"waited {self._limit_s:g} s for member {job.late} in shared memory")

    def spec(
        self,
        kind: Kind,
        root: int,
        count: int,
        digest: bytes,
        what: native.Sum,
        stage: float,
        *,
        item_bytes: int,
        direct: bool,
    ) -> tuple[native.Spec, int]:
        """The common part of repeated collectives of one kind, and how many steps of the ring each of them takes."""
        divided = kind in (Kind.ALLTOALL, Kind.REDUCESCATTER)
        share_bytes = share_of(self.slot_bytes, self._num_members) if divided else self.slot_bytes
        num_pieces = -(-count // (share_bytes // item_bytes))
        lag = _lag(num_pieces, direct)
        spec = native.Spec(
            ring=ctypes.pointer(self.description),
            count=count,
            digest=(ctypes.c_uint8 * 16)(*digest),
            dtype=what.dtype_number,
            finish=what.how,
            direct=direct,
            staged=direct and num_pieces == 1,
            kind=kind,
            root=root,
            lag=lag,
            stage=stage,
            prescale=what.prescale,
            factor=what.factor,
        )
        return spec, num_pieces + lag

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
        self.publish(self.step)
        self.wait(self.step)

    def close(self) -> None:
        """Release the memory; the ring is unusable afterwards."""
        self._notes.clear()
        self._counters.close()
        self._segment.close()


def share_of(slot_bytes: int, num_members: int) -> int:
    """Return each member's share of a slot that is divided among them: `share_bytes` of native.c."""
    return slot_bytes // num_members // LINE_BYTES * LINE_BYTES


def _lag(num_pieces: int, direct: bool) -> int:
    """Return the lag in steps: a member that has published step s + AHEAD + 1 has reduced its slice of step s."""
    return 0 if direct else AHEAD + 1 if num_pieces > AHEAD else num_pieces


class ShmTransport:
    """Implements `Transport` on shared memory.

    `segment_provider` is collective: it gives all members the same zeroed memory of the requested size.
    """

    name = "shm"

    def __init__(
        self,
        segment_provider: Callable[[int], Segment],
        member: int,
        num_members: int,
        check_alive: AliveCheck,
        limit_s: float,
    ) -> None:
        self._segment_provider = segment_provider
        self._member = member
        self._num_members = num_members
        self._check_alive = check_alive
        self._limit_s = limit_s
        self._ring = self._make_ring(SMALL_SLOT_BYTES)
        self.num_rings = 1  # so far: state for one is invalid for the next
        library = native.library()
        assert library is not None, "ranks share memory only with the native part"
        self._library = library

    def _make_ring(self, slot_bytes: int) -> Ring:
        return Ring(
            self._segment_provider(Ring.num_bytes(self._num_members, slot_bytes)),
            member=self._member,
            num_members=self._num_members,
            slot_bytes=slot_bytes,
            check_alive=self._check_alive,
            limit_s=self._limit_s,
        )

    def _ring_for(self, num_bytes: int) -> Ring:
        """Return the ring; with large slots once an operation has needed them, which all members see alike."""
        if num_bytes > self._ring.slot_bytes == SMALL_SLOT_BYTES:
            small, self._ring = self._ring, self._make_ring(LARGE_SLOT_BYTES)
            self.num_rings += 1  # after the ring itself: other threads prepare calls for the ring that they see
            small.close()
        return self._ring

    def allreduce(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        num_members = self._num_members
        arithmetic = arithmetic_of(staged(reduce, dtype, num_members), dtype, num_members)
        count = sum([tensor.numel() for tensor in inputs])
        num_bytes = count * dtype.itemsize
        ring = self._ring_for(num_bytes)
        what, stage = arithmetic.sum, arithmetic.stage
        if what is not None and stage is not None and count:
            direct = self.is_direct(num_bytes)
            ring.allreduce(self._library, inputs, outputs, count, what, stage, direct)
        else:
            most = ring.slot_bytes // dtype.itemsize
            self._reduce_through(ring, {0: cut(inputs, most)}, cut(outputs, most), 0, arithmetic)

    @property
    def ring(self) -> Ring:
        """The slots in use."""
        return self._ring

    def is_direct(self, num_bytes: int) -> bool:
        """Return whether each member reduces all of this much data, natively."""
        return self._num_members <= 2 or num_bytes * self._num_members <= DIRECT_BYTES

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the ring is large enough for this much data; otherwise one with larger slots is needed."""
        return num_bytes <= self._ring.slot_bytes or self.num_rings > 1

    def _reduce_through(
        self, ring: Ring, sources: dict[int, list[Piece]], results: list[Piece], at: int, arithmetic: Arithmetic
    ) -> None:
        """Write pieces to this member's slots, by offset, and reduce what all members' slots have at `at`."""
        dtype, scratch = arithmetic.dtype, ring.scratch

        def fill(index: int, step: int) -> None:
            for offset, pieces in sources.items():
                if index < len(pieces):
                    piece = pieces[index]
                    slot = ring.slot(self._member, step, piece.count, dtype, offset)
                    put(piece, slot)
                    arithmetic.prepare_(slot)

        def drain(index: int, step: int) -> None:
            if index < len(results):
                piece = results[index]
                operands = [ring.slot(peer, step, piece.count, dtype, at) for peer in range(self._num_members)]
                out = piece.parts[0] if len(piece.parts) == 1 else scratch(piece.count, dtype)
                arithmetic.reduce(operands, out, scratch(piece.count, dtype))
                if len(piece.parts) > 1:
                    take(out, piece)

        with single_threaded():
            ring.steps(max(map(len, sources.values())), fill, drain)

    def adasum(self, inputs: Tensors, outputs: Tensors, reduce: Reduce) -> None:
        if self._num_members & (self._num_members - 1):
            raise ValueError(f"Adasum needs a power of 2 of ranks, not {self._num_members}; use Average or Sum")
        theirs = [torch.empty_like(out) for out in outputs]
        swap = partial(self._swap, outputs, theirs)
        adasum(inputs, outputs, reduce, self._member, self._num_members, mine=outputs, theirs=theirs, swap=swap)

    def _swap(self, inputs: Tensors, outputs: Tensors, partner: int) -> None:
        """Send `inputs` to the partner and receive its tensors, of the same sizes."""
        dtype = inputs[0].dtype
        ring = self._ring_for(total(inputs) * dtype.itemsize)
        most = ring.slot_bytes // dtype.itemsize
        sources = cut(inputs, most)
        self._move(ring, {0: sources}, {(partner, 0): cut(outputs, most)}, len(sources), dtype)

    def _move(
        self,
        ring: Ring,
        sources: dict[int, list[Piece]],
        results: dict[tuple[int, int], list[Piece]],
        num_steps: int,
        dtype: torch.dtype,
    ) -> None:
        """Write pieces to this member's slots, by offset, and copy other members' pieces, by member and offset."""

        def fill(index: int, step: int) -> None:
            for offset, pieces in sources.items():
                if index < len(pieces):
                    put(pieces[index], ring.slot(self._member, step, pieces[index].count, dtype, offset))

        def drain(index: int, step: int) -> None:
            for (peer, offset), pieces in results.items():
                if index < len(pieces):
                    take(ring.slot(peer, step, pieces[index].count, dtype, offset), pieces[index])

        ring.steps(num_steps, fill, drain)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype, members = inputs[0].dtype, range(self._num_members)
        parts = [out.split(list(row)) for out, row in zip(outputs, counts, strict=True)]
        largest = max(sum(row[peer] for row in counts) for peer in members)
        ring = self._ring_for(largest * dtype.itemsize)
        most = ring.slot_bytes // dtype.itemsize
        results = {(peer, 0): cut([part[peer] for part in parts], most) for peer in members if peer != self._member}
        for source, part in zip(inputs, parts, strict=True):
            copy(source, part[self._member])
        self._move(ring, {0: cut(inputs, most)}, results, -(-largest // most), dtype)

    def broadcast(self, tensors: Tensors, root: int) -> None:
        dtype = tensors[0].dtype
        ring = self._ring_for(total(tensors) * dtype.itemsize)
        pieces = cut(tensors, ring.slot_bytes // dtype.itemsize)
        if self._member == root:
            self._move(ring, {0: pieces}, {}, len(pieces), dtype)
        else:
            self._move(ring, {}, {(root, 0): pieces}, len(pieces), dtype)

    def alltoall(
        self, input: torch.Tensor, output: torch.Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        sent = input[: sum(send_counts)].split(list(send_counts))
        received = output.split(list(receive_counts))
        copy(sent[self._member], received[self._member])
        # No member knows what the others send each other. So the first step carries the beginnings of everything and
        # the size of the largest part, and then all know how many steps are left.
        ring = self._ring
        most = self._share_bytes(ring) // input.itemsize
        ring.note(ring.step + 1, max(send_counts))
        self._exchange(ring, sent, received, 1)
        largest = max(ring.notes(ring.step)) - most
        if largest > 0:
            ring = self._ring_for(largest * input.itemsize * self._num_members)
            sent, received = tuple(part[most:] for part in sent), tuple(part[most:] for part in received)
            num_steps = -(-largest // (self._share_bytes(ring) // input.itemsize))
            self._exchange(ring, sent, received, num_steps)

    def _share_bytes(self, ring: Ring) -> int:
        return share_of(ring.slot_bytes, self._num_members)

    def _exchange(self, ring: Ring, sent: Tensors, received: Tensors, num_steps: int) -> None:
        """Send the first `num_steps` pieces of `sent[m]` to each other member m."""
        dtype, share_bytes = sent[0].dtype, self._share_bytes(ring)
        most, others = share_bytes // dtype.itemsize, [m for m in range(self._num_members) if m != self._member]
        sources = {peer * share_bytes: cut([sent[peer]], most)[:num_steps] for peer in others}
        results = {(peer, self._member * share_bytes): cut([received[peer]], most)[:num_steps] for peer in others}
        self._move(ring, sources, results, num_steps, dtype)

    def reducescatter(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]], reduce: Reduce) -> None:
        dtype = inputs[0].dtype
        arithmetic = arithmetic_of(staged(reduce, dtype, self._num_members), dtype, self._num_members)
        ring = self._ring_for(total(inputs) * dtype.itemsize)
        share_bytes = self._share_bytes(ring)
        most = share_bytes // dtype.itemsize
        parts = [tensor.split(list(row)) for tensor, row in zip(inputs, counts, strict=True)]
        sources = {m * share_bytes: cut([part[m] for part in parts], most) for m in range(self._num_members)}
        self._reduce_through(ring, sources, cut(outputs, most), self._member * share_bytes, arithmetic)

    def barrier(self) -> None:
        self._ring.meet()

    def close(self) -> None:
        self._ring.close()
