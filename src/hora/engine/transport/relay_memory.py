"""The memory of one host through which its members and carriers pass pieces of a collective over several hosts.

A member works on piece k in this order, always: fill k, combine and send k - 1, receive k - 1 - WINDOW, read out
k - 2 - WINDOW. So one that has filled piece n has combined all up to n - 2 and read all up to n - 3 - WINDOW: with so many
places for pieces no member has to say more than how far it has filled, and a carrier how far it has received. Piece
numbers run on from one collective to the next. `relay` says what is done with the pieces.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hora.engine.shm import native
from hora.engine.shm.futex import LINE_BYTES, SLICE_S, Counter
from hora.engine.shm.segment import Segment, aligned
from hora.engine.transport.base import Guard
from hora.engine.transport.group import Sockets

__all__ = ["WINDOW", "RelayMemory", "Place"]

_SMALL_BYTES = 128 * 2**10
# How many pieces are between the hosts at a time. These numbers are relay.h's too.
WINDOW = 2
# One being filled, one being combined, and what the others may still combine.
_NUM_INPUTS = 4
_NUM_RESULTS = WINDOW + 3
# The parts of a slice for each host are of one size: the last one may reach beyond the slice.
_SPARE_BYTES = 16
# Making a view costs as much as copying 4 KiB; sizes repeat from step to step of a training.
_KEPT_VIEWS = 4096
# Processors fetch lines in pairs.
_COUNTER_BYTES = 2 * LINE_BYTES

Stage = Callable[[int, int], None]  # the index of a piece in the collective, and its running number


@dataclass(frozen=True)
class Place:
    """Where a member is: member `index` of `num_local` on host number `host` of `num_hosts`."""

    index: int
    num_local: int
    num_carriers: int
    host: int
    num_hosts: int

    @property
    def carries(self) -> bool:
        return self.index < self.num_carriers


class RelayMemory:
    """`share` gives all members of this host the same zeroed memory (collective); `piece_bytes`: the most of all
    carriers' slices together."""

    def __init__(
        self, share: Callable[[int], Segment], place: Place, *, piece_bytes: int, guard: Guard, limit_s: float
    ) -> None:
        self.place = place
        self._guard, self._limit_s = guard, limit_s
        # Who waits for large pieces leaves the core to those who work on them.
        self._looks = None if piece_bytes <= _SMALL_BYTES else 0
        slice_bytes = piece_bytes // place.num_carriers // LINE_BYTES * LINE_BYTES
        self.piece_bytes = slice_bytes * place.num_carriers
        self._slice_room = aligned(slice_bytes + place.num_hosts * _SPARE_BYTES, LINE_BYTES)
        piece_room = place.num_carriers * self._slice_room
        self._inputs_at = aligned(2 * _COUNTER_BYTES * place.num_local)
        self._ours_at = self._inputs_at + place.num_local * _NUM_INPUTS * piece_room
        self._theirs_at = self._ours_at + _NUM_RESULTS * piece_room
        self._piece_room = piece_room
        self._segment = share(self._theirs_at + _NUM_RESULTS * piece_room)
        at = [2 * _COUNTER_BYTES * member for member in range(place.num_local)]
        self._filled = [Counter.at(self._segment.memory, offset) for offset in at]
        self._received = [
            Counter.at(self._segment.memory, offset + _COUNTER_BYTES) for offset in at[: place.num_carriers]
        ]
        self._next = 0
        self._views: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def input(self, piece: int, member: int, carrier: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a member puts the slice of a carrier."""
        at = self._inputs_at + (member * _NUM_INPUTS + piece % _NUM_INPUTS) * self._piece_room
        return self._view(at + carrier * self._slice_room, count, dtype)

    def ours(self, piece: int, carrier: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a carrier puts what the members of this host have together."""
        at = self._ours_at + piece % _NUM_RESULTS * self._piece_room
        return self._view(at + carrier * self._slice_room, count, dtype)

    def theirs(self, piece: int, carrier: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Where a carrier puts what comes of the other hosts."""
        at = self._theirs_at + piece % _NUM_RESULTS * self._piece_room
        return self._view(at + carrier * self._slice_room, count, dtype)

    def run(
        self,
        num_pieces: int,
        fill: Stage,
        read_out: Stage,
        combine: Stage | None = None,
        receive: Stage | None = None,
    ) -> None:
        """Take all pieces through all stages; the two in the middle are a carrier's."""
        first, index = self._next, self.place.index
        self._next += num_pieces
        for number in range(num_pieces + WINDOW + 2):
            if number < num_pieces:
                if combine is None and number > 1:
                    self._wait(self._filled, first + number - 2)  # a carrier has done so to combine it
                fill(number, first + number)
                self._filled[index].set(first + number + 1)
            at = number - 1
            if combine is not None and 0 <= at < num_pieces:
                self._wait(self._filled, first + at)
                combine(at, first + at)
            at -= WINDOW
            if receive is not None and 0 <= at < num_pieces:
                receive(at, first + at)
                self._received[index].set(first + at + 1)
            at -= 1
            if at >= 0:
                self._wait(self._received, first + at)
                read_out(at, first + at)

    def run_natively(
        self, library: native.Library, job: native.RelayJob, sockets: Sockets | None, num_records: int
    ) -> None:
        """Have the native part do an allreduce, of which the job says everything but where the memory is. `sockets`: a
        carrier's, to and from the other host, for so many records each way where they have any."""
        description = self._description
        description.outgoing = description.incoming = -1
        if sockets is not None:
            description.outgoing, description.incoming = sockets.outgoing, sockets.incoming
            if sockets.sealing is not None and sockets.opening is not None:
                description.sealing = ctypes.pointer(sockets.sealing.take(num_records))
                description.opening = ctypes.pointer(sockets.opening.take(num_records))
        job.relay, job.first = ctypes.pointer(description), self._next
        self._next += job.num_pieces
        begin = 0.0
        while not library.relay(job, SLICE_S):
            self._guard()
            now = time.monotonic()
            begin = begin or now
            if now - begin > self._limit_s:
                who = f"member {job.late} of this host" if job.late >= 0 else "the other host"
                raise TimeoutError(f"waited {self._limit_s:g} s for {who}")

    @functools.cached_property
    def _description(self) -> native.Relay:
        """Where everything is, for the native part."""
        place = self.place
        return native.Relay(
            memory=self._filled[0].address,  # the counters keep the mapping alive
            counter_bytes=_COUNTER_BYTES,
            inputs_at=self._inputs_at,
            ours_at=self._ours_at,
            theirs_at=self._theirs_at,
            slice_room=self._slice_room,
            piece_room=self._piece_room,
            member=place.index,
            num_local=place.num_local,
            num_carriers=place.num_carriers,
            host=place.host,
            patience=native.new_patience(place.num_local),
        )

    def close(self) -> None:
        """Let go of it; the memory itself goes with the last view."""
        self._views.clear()
        self._filled.clear()
        self._received.clear()
        self._segment.close()

    def _view(self, at: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        key = (at, count, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            view = self._views[key] = self._segment.tensor(at, count, dtype)
        return view

    def _wait(self, counters: Sequence[Counter], piece: int) -> None:
        for member, counter in enumerate(counters):
            if counter.value <= piece:
                what = f"member {member} of this host"
                counter.wait_for(piece + 1, guard=self._guard, limit_s=self._limit_s, what=what, looks=self._looks)
