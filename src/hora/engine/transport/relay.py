"""An allreduce over several hosts as a pipeline: pieces of the data go through the host's memory, between the hosts, and
out of the host's memory again, all at the same time.

Every piece is cut into slices, one for each carrier. A member puts those slices that it does not combine itself into its
place in the memory; carrier c combines slice c of all members there (`ours`), sends it from there, and has what comes from
the other hosts (`theirs`) next to it, which it makes the result; all members read the slices of all carriers. Where a host
has one member only, that one computes the result on its way out. The native part can do the same (`relay.h`).

Used by `HierarchicalTransport`. The memory and its rules are in `relay_memory`, the way between hosts in `exchange`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hora.engine.shm.native import Sum, library
from hora.engine.transport.arithmetic import Arithmetic, single_threaded
from hora.engine.transport.base import Tensors
from hora.engine.transport.exchange import Exchange, Swap
from hora.engine.transport.group import Pending
from hora.engine.transport.native_jobs import relay_natively
from hora.engine.transport.packing import Buffers, Piece, cut, put, take, total
from hora.engine.transport.relay_memory import WINDOW, RelayMemory

__all__ = ["Relay", "Steps"]


@dataclass(frozen=True)
class Steps:
    """What is done to the numbers: to those of a host's members, to those of the hosts, and in the end (`finish_`)."""

    inside: Arithmetic
    between: Arithmetic
    end: Arithmetic

    @property
    def native(self) -> tuple[Sum, Sum] | None:
        """The same for the native part, which sums two hosts and finishes that at once; None for what it does not know."""
        inside, between, end = self.inside.sum, self.between.sum, self.end.sum
        if inside is None or between is None or end is None or self.inside.prescales:
            return None
        return inside, between if end.finishes_nothing else between._replace(how=end.how, factor=end.factor)


class _UnderWay(NamedTuple):
    """A slice between the hosts."""

    number: int
    turn: int
    pending: Pending
    ours: torch.Tensor | None  # to be added to theirs
    theirs: torch.Tensor
    residual: torch.Tensor | None


class Relay:
    """One allreduce of one member. `exchange` is a carrier's, None for the others."""

    def __init__(self, memory: RelayMemory, exchange: Exchange | None, buffers: Buffers, steps: Steps) -> None:
        self._memory, self._exchange, self._buffers, self._steps = memory, exchange, buffers, steps
        self._place = memory.place
        self._dtype = steps.inside.dtype
        self._sources: list[Piece] = []  # by piece and carrier
        self._results: list[Piece] = []
        self._residuals: list[Piece] = []
        self._under_way: dict[int, _UnderWay] = {}  # by piece

    def run(self, inputs: Tensors, outputs: Tensors, residuals: Tensors = ()) -> None:
        """Reduce several tensors as one. `outputs[i]` may be `inputs[i]`; `residuals`: see `Code`, or none."""
        count, num_carriers = total(inputs), self._place.num_carriers
        num_pieces = -(-count * self._dtype.itemsize // self._memory.piece_bytes)
        if not num_pieces:
            return
        most = -(-count // (num_pieces * num_carriers))
        if not residuals and self._run_natively(inputs, outputs, most, -(-count // most)):
            return
        in_place = all(source is out for source, out in zip(inputs, outputs, strict=True))
        self._sources = cut(inputs, most)
        self._results = self._sources if in_place else cut(outputs, most)
        self._residuals = cut(residuals, most) if residuals else []
        num_pieces = -(-len(self._sources) // num_carriers)
        with single_threaded():
            if self._exchange is not None:
                self._memory.run(num_pieces, self._fill, self._read_out, self._combine, self._receive)
            else:
                self._memory.run(num_pieces, self._fill, self._read_out)

    def _run_natively(self, inputs: Tensors, outputs: Tensors, most: int, num_slices: int) -> bool:
        """Whether the native part has done it: for several members on each of two hosts."""
        compiled, what, sockets, place = library(), self._steps.native, None, self._place
        if compiled is None or what is None or place.num_local == 1 or place.num_hosts != 2:
            return False
        num_own = len(range(place.index, num_slices, place.num_carriers))
        if self._exchange is not None:
            sockets = self._exchange.sockets(num_own, most * self._dtype.itemsize)
            if sockets is None:
                return False
        with contextlib.nullcontext() if self._exchange is None else self._exchange.using_sockets():
            relay_natively(compiled, self._memory, sockets, num_own, inputs, outputs, most, what)
        return True

    def _taken_directly(self, source: Piece) -> bool:
        """Whether the carrier can combine its own data where it is."""
        return len(source.parts) == 1 and not self._steps.inside.prescales

    def _sends_directly(self, source: Piece) -> bool:
        """Whether what the only member of a host has goes to the other host from where it is."""
        exchange = self._exchange
        return self._place.num_local == 1 and isinstance(exchange, Swap) and self._taken_directly(source)

    def _fill(self, index: int, piece: int) -> None:
        place, first = self._place, index * self._place.num_carriers
        for carrier, source in enumerate(self._sources[first : first + place.num_carriers]):
            if carrier == place.index and self._taken_directly(source):
                continue
            room = self._memory.input(piece, place.index, carrier, source.count, self._dtype)
            put(source, room)
            self._steps.inside.prepare_(room)

    def _combine(self, index: int, piece: int) -> None:
        """Combine this carrier's slice of all members, and begin to send it."""
        me, dtype = self._place.index, self._dtype
        number = index * self._place.num_carriers + me
        if number >= len(self._sources):
            return
        assert self._exchange is not None
        source, memory = self._sources[number], self._memory
        count = source.count
        operands = [memory.input(piece, member, me, count, dtype) for member in range(self._place.num_local)]
        if self._taken_directly(source):
            operands[me] = source.parts[0]
        room = self._exchange.room(count)
        theirs = memory.theirs(piece, me, room, dtype)
        ours = operands[me]
        if not self._sends_directly(source):
            ours = memory.ours(piece, me, room, dtype)
            self._steps.inside.reduce(operands, ours if room == count else ours[:count], self._scratch(count))
            if room > count:
                ours[count:].zero_()
        turn = piece % (WINDOW + 1)
        residual = self._residual(number, turn)
        pending = self._exchange.start(turn, ours, theirs, residual)
        adds = self._place.num_hosts == 2 and not self._sends_directly(source)
        self._under_way[piece] = _UnderWay(number, turn, pending, ours if adds else None, theirs, residual)

    def _receive(self, index: int, piece: int) -> None:
        """Have what the other hosts sent for this piece."""
        work = self._under_way.pop(piece, None)
        if work is None:
            return
        assert self._exchange is not None
        self._exchange.finish(work.turn, work.pending, work.theirs, work.residual)
        if work.ours is not None:
            self._sum_up(work.ours, work.theirs, work.theirs)
        elif self._place.num_hosts > 2:
            self._steps.end.finish_(work.theirs)
        if work.residual is not None:
            kept = self._residuals[work.number]
            if work.residual is not kept.parts[0]:
                take(work.residual, kept)

    def _residual(self, number: int, turn: int) -> torch.Tensor | None:
        """What was lost of a slice, in one place."""
        if not self._residuals:
            return None
        kept = self._residuals[number]
        if len(kept.parts) == 1:
            return kept.parts[0]
        residual = self._buffers.take(f"lost{turn}", kept.count, self._dtype)
        put(kept, residual)
        return residual

    def _read_out(self, index: int, piece: int) -> None:
        first, memory, dtype = index * self._place.num_carriers, self._memory, self._dtype
        for carrier, result in enumerate(self._results[first : first + self._place.num_carriers]):
            theirs, source = memory.theirs(piece, carrier, result.count, dtype), self._sources[first + carrier]
            if self._sends_directly(source):
                out = result.parts[0] if len(result.parts) == 1 else theirs
                self._sum_up(source.parts[0], theirs, out)
                if out is not theirs:
                    continue
            take(theirs, result)

    def _sum_up(self, ours: torch.Tensor, theirs: torch.Tensor, out: torch.Tensor) -> None:
        """What two hosts have together, to the end."""
        operands = [ours, theirs] if self._place.host == 0 else [theirs, ours]
        self._steps.between.reduce(operands, out, self._scratch(out.numel()))
        self._steps.end.finish_(out)

    def _scratch(self, count: int) -> torch.Tensor:
        return self._buffers.take("scratch", count, self._dtype)
