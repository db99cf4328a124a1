"""Collectives among processes of one host that share memory: torch operations on views of it, no native code.

Private data goes through the slots of a `Ring` piece by piece, so the staging area stays in the cache and is bounded
whatever the size of the tensors. Two members, or little data: everybody reads everybody's slot and reduces all of it
straight into its own output, one synchronisation. More of both: member m reduces slice m of each piece and the result goes
round through shared memory (`_allreduce_sliced`). Either way members are combined in the order 0, 1, 2, …

Data that lies in shared memory already (gradient buckets) is reduced where it is: `reduce_shared`, `reduce_shared_slice`.
Called by the engine, from one thread at a time. After an exception the transport is unusable and must be closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from hora.engine.futex import LINE_BYTES
from hora.engine.request import ReduceOp
from hora.engine.segment import Segment, aligned
from hora.engine.transport.arithmetic import SERIAL_ELEMENTS, Reduction, adasum_pair, reduction
from hora.engine.transport.base import Guard, Tensors
from hora.engine.transport.ring import Ring
from hora.engine.transport.stream import Piece, copy, cut, put, take, total

__all__ = ["ShmTransport", "shared_slice"]

# A transport begins with small slots, because most process sets never send much, and gets large ones once.
SMALL_SLOT_BYTES = 65536
LARGE_SLOT_BYTES = 262144
# Pieces of this size stay in the second-level cache together with the other slots that are in use.
PIECE_BYTES = 131072
# Everybody reduces everything up to this many bytes read; beyond, each member reduces its slice.
DIRECT_BYTES = 393216


def shared_slice(count: int, num_members: int, member: int) -> tuple[int, int]:
    """The part of `count` elements that `member` reduces: begin and end.

    Rounded to as many elements as a cache line has bytes, so that two members never write to one line.
    """
    share = aligned(-(-count // num_members), LINE_BYTES)
    return min(count, member * share), min(count, (member + 1) * share)


class ShmTransport:
    """Implements `Transport` on shared memory. `segment_provider` gives all members the same zeroed memory, collectively."""

    name = "shm"

    def __init__(
        self,
        segment_provider: Callable[[int], Segment],
        member: int,
        num_members: int,
        guard: Guard,
        limit_s: float,
    ) -> None:
        self._segment_provider = segment_provider
        self._member = member
        self._num_members = num_members
        self._guard = guard
        self._limit_s = limit_s
        self._scratch_bytes = torch.empty(0, dtype=torch.uint8)
        self._ring = self._make_ring(SMALL_SLOT_BYTES)

    def _make_ring(self, slot_bytes: int) -> Ring:
        num_bytes = Ring.num_bytes(self._num_members, slot_bytes)
        self._scratch_bytes = torch.empty(slot_bytes, dtype=torch.uint8)
        return Ring(
            self._segment_provider(num_bytes),
            member=self._member,
            num_members=self._num_members,
            slot_bytes=slot_bytes,
            guard=self._guard,
            limit_s=self._limit_s,
        )

    def _grown_ring(self, num_bytes: int) -> Ring:
        """The ring, with large slots if an operation on `num_bytes` (the same on all members) wants them."""
        if num_bytes > self._ring.slot_bytes == SMALL_SLOT_BYTES:
            self._ring.close()
            self._ring = self._make_ring(LARGE_SLOT_BYTES)
        return self._ring

    def _scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._scratch_bytes.view(dtype)[:count]

    def allreduce(
        self, inputs: Tensors, outputs: Tensors, *, op: int, prescale: float, postscale: float
    ) -> None:
        dtype = inputs[0].dtype
        num_members = self._num_members
        arithmetic = reduction(op, dtype, prescale, postscale, num_members)
        if num_members == 1:
            for source, out in zip(inputs, outputs, strict=True):
                arithmetic.prepare(source, out)
                arithmetic.finish_(out)
            return
        count = total(inputs)
        num_bytes = count * dtype.itemsize
        ring = self._grown_ring(num_bytes)
        if num_members == 2 or num_bytes * num_members <= DIRECT_BYTES:
            self._allreduce_direct(ring, inputs, outputs, count, arithmetic)
        else:
            self._allreduce_sliced(ring, inputs, outputs, arithmetic)

    def _allreduce_direct(
        self, ring: Ring, inputs: Tensors, outputs: Tensors, count: int, arithmetic: Reduction
    ) -> None:
        """Everybody puts its piece into its slot and reduces all slots into its own output."""
        dtype, member, members = arithmetic.dtype, self._member, range(self._num_members)
        most = min(PIECE_BYTES // dtype.itemsize, SERIAL_ELEMENTS, ring.slot_bytes // dtype.itemsize)
        sources = cut(inputs, most)
        results = sources if outputs is inputs else cut(outputs, most)

        def fill(index: int, step: int) -> None:
            size = min(most, count - index * most)
            slot = ring.slot(member, step, size, dtype)
            put(sources[index], slot)
            arithmetic.prepare_(slot)

        def drain(index: int, step: int) -> None:
            size = min(most, count - index * most)
            operands = [ring.slot(peer, step, size, dtype) for peer in members]
            source, result = sources[index], results[index]
            if len(source) == 1 and not arithmetic.prescales:
                operands[member] = source[0]  # warmer than the slot: it is this core that wrote the slot
            scratch = self._scratch(size, dtype)
            out = result[0] if len(result) == 1 else scratch
            arithmetic.combine(operands, out, scratch)
            arithmetic.finish_(out)
            if out is scratch:
                take(scratch, result)

        ring.steps(len(sources), fill, drain)

    def _allreduce_sliced(self, ring: Ring, inputs: Tensors, outputs: Tensors, arithmetic: Reduction) -> None:
        """Member m reduces slice m of each piece into the common result; everybody copies that out, two steps later."""
        dtype, member, num_members = arithmetic.dtype, self._member, self._num_members
        most = ring.slot_bytes // dtype.itemsize
        sources = cut(inputs, most)
        results = sources if outputs is inputs else cut(outputs, most)
        sizes = [total(piece) for piece in sources]

        def fill(index: int, step: int) -> None:
            if index < len(sources):
                slot = ring.slot(member, step, sizes[index], dtype)
                put(sources[index], slot)
                arithmetic.prepare_(slot)

        def drain(index: int, step: int) -> None:
            if index < len(sources):
                begin, end = shared_slice(sizes[index], num_members, member)
                for low in range(begin, end, SERIAL_ELEMENTS):
                    size = min(SERIAL_ELEMENTS, end - low)
                    at = low * dtype.itemsize
                    out = ring.result(step, size, dtype, at)
                    operands = [ring.slot(peer, step, size, dtype, at) for peer in range(num_members)]
                    arithmetic.combine(operands, out, self._scratch(size, dtype))
                    arithmetic.finish_(out)
            if index >= 2:
                take(ring.result(step - 2, sizes[index - 2], dtype), results[index - 2])

        ring.steps(len(sources) + 2, fill, drain)

    def adasum(self, inputs: Tensors, outputs: Tensors, *, prescale: float, postscale: float) -> None:
        if self._num_members & (self._num_members - 1):
            raise ValueError(
                f"Adasum needs a power of 2 of ranks, not {self._num_members}; use Average or Sum"
            )
        arithmetic = reduction(ReduceOp.SUM, inputs[0].dtype, prescale, postscale, self._num_members)
        for source, out in zip(inputs, outputs, strict=True):
            arithmetic.prepare(source, out)
        distance = 1
        while distance < self._num_members:
            partner = self._member ^ distance
            theirs = [torch.empty_like(out) for out in outputs]
            self._swap(outputs, theirs, partner)
            for own, other in zip(outputs, theirs, strict=True):
                lower, higher = (own, other) if self._member < partner else (other, own)
                adasum_pair(lower, higher, own)
            distance *= 2
        for out in outputs:
            arithmetic.finish_(out)

    def _swap(self, inputs: Tensors, outputs: Tensors, partner: int) -> None:
        """Everybody sends `inputs` and receives those of its partner, of the same sizes."""
        dtype = inputs[0].dtype
        ring = self._grown_ring(total(inputs) * dtype.itemsize)
        most = ring.slot_bytes // dtype.itemsize
        sources, results = cut(inputs, most), cut(outputs, most)
        self._move(ring, sources, {partner: results}, len(sources), dtype)

    def _move(
        self,
        ring: Ring,
        sources: list[Piece],
        results: dict[int, list[Piece]],
        num_steps: int,
        dtype: torch.dtype,
    ) -> None:
        """Publish the `sources` and copy what the members in `results` publish, piece by piece."""

        def fill(index: int, step: int) -> None:
            if index < len(sources):
                piece = sources[index]
                put(piece, ring.slot(self._member, step, total(piece), dtype))

        def drain(index: int, step: int) -> None:
            for peer, pieces in results.items():
                if index < len(pieces):
                    piece = pieces[index]
                    take(ring.slot(peer, step, total(piece), dtype), piece)

        ring.steps(num_steps, fill, drain)

    def allgather(self, inputs: Tensors, outputs: Tensors, counts: Sequence[Sequence[int]]) -> None:
        dtype = inputs[0].dtype
        parts = [out.split(list(row)) for out, row in zip(outputs, counts, strict=True)]
        largest = max(sum(row[peer] for row in counts) for peer in range(self._num_members))
        ring = self._grown_ring(largest * dtype.itemsize)
        most = min(PIECE_BYTES, ring.slot_bytes) // dtype.itemsize
        results = {
            peer: cut([part[peer] for part in parts], most)
            for peer in range(self._num_members)
            if peer != self._member
        }
        self._move(ring, cut(inputs, most), results, -(-largest // most), dtype)
        for source, part in zip(inputs, parts, strict=True):
            copy(source, part[self._member])

    def broadcast(self, tensors: Tensors, root: int) -> None:
        if self._num_members == 1:
            return
        dtype = tensors[0].dtype
        ring = self._grown_ring(total(tensors) * dtype.itemsize)
        pieces = cut(tensors, min(PIECE_BYTES, ring.slot_bytes) // dtype.itemsize)
        if self._member == root:
            self._move(ring, pieces, {}, len(pieces), dtype)
        else:
            self._move(ring, [], {root: pieces}, len(pieces), dtype)

    def alltoall(
        self,
        input: torch.Tensor,
        output: torch.Tensor,
        send_counts: Sequence[int],
        receive_counts: Sequence[int],
    ) -> None:
        sent = input[: sum(send_counts)].split(list(send_counts))
        received = output.split(list(receive_counts))
        copy(sent[self._member], received[self._member])
        # Nobody knows what others send each other. So the first step carries a beginning of everything and the size of
        # the largest part, and all know then how many steps are left.
        ring = self._ring
        most = self._share_bytes(ring) // input.itemsize
        largest = max(self._exchange(ring, sent, received, 1, largest=max(send_counts)))
        if largest > most:
            sent = tuple(part[most:] for part in sent)
            received = tuple(part[most:] for part in received)
            largest -= most
            ring = self._grown_ring(largest * input.itemsize * self._num_members)
            most = self._share_bytes(ring) // input.itemsize
            self._exchange(ring, sent, received, -(-largest // most), largest=0)

    def _share_bytes(self, ring: Ring) -> int:
        """What each of the members gets of a slot that is divided among them."""
        return ring.slot_bytes // self._num_members // LINE_BYTES * LINE_BYTES

    def _exchange(
        self, ring: Ring, sent: Tensors, received: Tensors, num_steps: int, *, largest: int
    ) -> list[int]:
        """Send the first pieces of `sent[m]` to member m, `num_steps` of them. Returns everybody's `largest`."""
        dtype, member, share_bytes = sent[0].dtype, self._member, self._share_bytes(ring)
        most = share_bytes // dtype.itemsize
        sources, results = [cut([part], most) for part in sent], [cut([part], most) for part in received]
        notes: list[int] = []

        def fill(index: int, step: int) -> None:
            ring.note(step, largest)
            for peer, pieces in enumerate(sources):
                if index < len(pieces) and peer != member:
                    part = pieces[index][0]
                    copy(part, ring.slot(member, step, part.numel(), dtype, peer * share_bytes))

        def drain(index: int, step: int) -> None:
            notes[:] = ring.notes(step)
            for peer, pieces in enumerate(results):
                if index < len(pieces) and peer != member:
                    part = pieces[index][0]
                    copy(ring.slot(peer, step, part.numel(), dtype, member * share_bytes), part)

        ring.steps(num_steps, fill, drain)
        return notes

    def reducescatter(
        self,
        inputs: Tensors,
        outputs: Tensors,
        counts: Sequence[Sequence[int]],
        *,
        op: int,
        prescale: float,
        postscale: float,
    ) -> None:
        dtype, member, num_members = inputs[0].dtype, self._member, self._num_members
        arithmetic = reduction(op, dtype, prescale, postscale, num_members)
        ring = self._grown_ring(total(inputs) * dtype.itemsize)
        share_bytes = self._share_bytes(ring)
        most = min(share_bytes // dtype.itemsize, SERIAL_ELEMENTS)
        parts = [tensor.split(list(row)) for tensor, row in zip(inputs, counts, strict=True)]
        sources = [cut([part[peer] for part in parts], most) for peer in range(num_members)]
        results = cut(outputs, most)

        def fill(index: int, step: int) -> None:
            for peer, pieces in enumerate(sources):
                if index < len(pieces):
                    piece = pieces[index]
                    slot = ring.slot(member, step, total(piece), dtype, peer * share_bytes)
                    put(piece, slot)
                    arithmetic.prepare_(slot)

        def drain(index: int, step: int) -> None:
            if index >= len(results):
                return
            piece = results[index]
            size = total(piece)
            operands = [
                ring.slot(peer, step, size, dtype, member * share_bytes) for peer in range(num_members)
            ]
            scratch = self._scratch(size, dtype)
            out = piece[0] if len(piece) == 1 else scratch
            arithmetic.combine(operands, out, scratch)
            arithmetic.finish_(out)
            if out is scratch:
                take(scratch, piece)

        ring.steps(max(len(pieces) for pieces in sources), fill, drain)

    def barrier(self) -> None:
        self._ring.meet()

    def reduce_shared(self, views: Tensors, *, op: int, prescale: float, postscale: float) -> None:
        """Allreduce where it lies: `views[m]` is member m's data in shared memory, and the result goes into all of them."""
        arithmetic = reduction(op, views[0].dtype, prescale, postscale, self._num_members)
        self._ring.meet()
        begin, end = shared_slice(views[0].numel(), self._num_members, self._member)
        for operands, size in self._shared_pieces(views, begin, end, arithmetic):
            scratch = self._scratch(size, arithmetic.dtype)
            first = operands[0]
            arithmetic.combine(operands, first, scratch)
            arithmetic.finish_(first)
            for other in operands[1:]:
                copy(first, other)
        self._ring.meet()

    def reduce_shared_slice(
        self, views: Tensors, out: torch.Tensor, *, op: int, prescale: float, postscale: float
    ) -> None:
        """Like `reduce_shared`, but only the own `shared_slice` of the result is kept, in the private tensor `out`."""
        arithmetic = reduction(op, views[0].dtype, prescale, postscale, self._num_members)
        self._ring.meet()
        begin, end = shared_slice(views[0].numel(), self._num_members, self._member)
        assert out.numel() == end - begin, f"slice of {end - begin} elements into {out.numel()}"
        at = 0
        for operands, size in self._shared_pieces(views, begin, end, arithmetic):
            result = out[at : at + size]
            arithmetic.combine(operands, result, self._scratch(size, arithmetic.dtype))
            arithmetic.finish_(result)
            at += size
        self._ring.meet()

    def _shared_pieces(
        self, views: Tensors, begin: int, end: int, arithmetic: Reduction
    ) -> Iterator[tuple[list[torch.Tensor], int]]:
        """Cache-sized pieces of everybody's data from `begin` to `end`, prescaled in place."""
        most = min(PIECE_BYTES // arithmetic.dtype.itemsize, SERIAL_ELEMENTS)
        for low in range(begin, end, most):
            high = min(end, low + most)
            operands = [view[low:high] for view in views]
            for operand in operands:
                arithmetic.prepare_(operand)
            yield operands, high - low

    def close(self) -> None:
        self._ring.close()
