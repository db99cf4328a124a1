"""The memory through which the shared-memory transport moves data: a few slots for each member, reused step by step.

Layout of the segment: a counter and notes for each member, `DEPTH` slots for each member, and `DEPTH` result
slots that all members write parts of. Step numbers run on from one operation to the next; step s uses slot s
modulo DEPTH.

In every step each member fills its slot (or leaves it), publishes the step, waits for all others', and reads.
A member may run AHEAD steps ahead: it fills and publishes s + AHEAD before it waits for s, so that a peer
that is late for a moment stops no other. A member that has published s has then read all of s - AHEAD - 1, and
one that has waited for s - 1 may fill s + AHEAD, because all have read its slot's last use: with DEPTH =
2 AHEAD + 2 slots no second counter is needed to say "I have read it". `steps` keeps that order for all
operations.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import torch

from hora.engine.shm import native
from hora.engine.shm.counters import MEMBER_BYTES, Counters
from hora.engine.shm.futex import LINE_BYTES, SLICE_S
from hora.engine.shm.segment import PAGE_BYTES, Segment, aligned
from hora.engine.transport.base import AliveCheck, Tensors

__all__ = ["AHEAD", "DEPTH", "Ring"]

AHEAD = 1
DEPTH = 2 * AHEAD + 2


class Ring:
    """Slots and counters of one transport in one segment."""

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
        self.step = 0  # the last one that was taken
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
        """The size of segment that a ring needs."""
        return aligned(num_members * MEMBER_BYTES) + (num_members + 1) * DEPTH * slot_bytes

    def slot(self, member: int, step: int, count: int, dtype: torch.dtype, offset_bytes: int = 0) -> torch.Tensor:
        """Return the slot into which `member` writes its data for `step`."""
        turn = member * DEPTH + step % DEPTH
        return self._segment.tensor(self._slots_at + turn * self.slot_bytes + offset_bytes, count, dtype)

    def scratch(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Private memory for what lies between two operations, at most a slot of it; always the same."""
        return self._scratch.view(dtype)[:count]

    def note(self, step: int, value: int) -> None:
        """Leave a number for the others with what is filled in for `step`."""
        self._notes[self._member][step % DEPTH].value = value

    def notes(self, step: int) -> list[int]:
        """All members' numbers of `step`, once it has been waited for."""
        return [row[step % DEPTH].value for row in self._notes]

    def steps(self, num_steps: int, fill: Callable[[int, int], None], drain: Callable[[int, int], None]) -> None:
        """Call `fill(index, step)` for the own slot and `drain(index, step)` for all, `num_steps` times."""
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
        """Say that the own slot of `step` is filled."""
        self._counters.publish(step)

    def wait(self, step: int) -> None:
        """Return when all members have published `step`."""
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
        """Have the native part reduce tensors of `count` elements together, times `stage` on their way into the
        slots.
        """
        sources = native.addresses(inputs)
        results = sources if outputs is inputs else native.addresses(outputs)
        counts = (ctypes.c_int64 * len(inputs))(*[tensor.numel() for tensor in inputs])
        num_pieces = -(-count * inputs[0].itemsize // self.slot_bytes)
        lag = _lag(num_pieces, direct)
        job = native.Allreduce(
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
        while not library.allreduce(job, SLICE_S):
            self._check_alive()
            now = time.monotonic()
            begin = begin or now
            if now - begin > self._limit_s:
                raise TimeoutError(f"waited {self._limit_s:g} s for member {job.late} in shared memory")

    def repeated_spec(
        self, count: int, item_bytes: int, digest: bytes, what: native.Sum, stage: float, direct: bool
    ) -> tuple[native.AllreduceSpec, int]:
        """The common part of repeated allreduces of one kind, and how many steps of the ring each of them takes."""
        num_pieces = -(-count * item_bytes // self.slot_bytes)
        lag = _lag(num_pieces, direct)
        spec = native.AllreduceSpec(
            ring=ctypes.pointer(self.description),
            count=count,
            digest=(ctypes.c_uint8 * 16)(*digest),
            dtype=what.dtype_number,
            finish=what.how,
            direct=direct,
            staged=direct and num_pieces == 1,
            lag=lag,
            stage=stage,
            prescale=what.prescale,
            factor=what.factor,
        )
        return spec, num_pieces + lag

    @functools.cached_property
    def description(self) -> native.RingStruct:
        """The ring as the native part wants it."""
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
        """A step without data: return when all members have come."""
        self.step += 1
        self.publish(self.step)
        self.wait(self.step)

    def close(self) -> None:
        """Let go of the memory; the ring is of no use afterwards."""
        self._notes.clear()
        self._counters.close()
        self._segment.close()


def _lag(num_pieces: int, direct: bool) -> int:
    """A member that has published step s + AHEAD + 1 has reduced its slice of step s."""
    return 0 if direct else AHEAD + 1 if num_pieces > AHEAD else num_pieces
