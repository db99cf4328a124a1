"""An allreduce over several hosts of data that lies in each host's shared memory already, where every member of the host sees
all members' data: gradient buckets.

Carrier c has slice c of everything to itself: it combines the members' data there, sends and receives it piece by piece, and
writes the result into all members' data. So no member waits for another one before the end. Called by `HierarchicalTransport`;
the way between hosts is `exchange`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hora.engine.transport.exchange import Exchange
from hora.engine.transport.group import Pending
from hora.engine.transport.packing import Buffers, copy
from hora.engine.transport.relay import Steps
from hora.engine.transport.relay_memory import WINDOW, Place

__all__ = ["reduce_resident"]


class _UnderWay(NamedTuple):
    """A piece between the hosts."""

    turn: int
    operands: list[torch.Tensor]
    ours: torch.Tensor
    theirs: torch.Tensor
    residual: torch.Tensor | None
    pending: Pending


def reduce_resident(
    slices: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    place: Place,
    exchange: Exchange,
    steps: Steps,
    buffers: Buffers,
    *,
    piece_bytes: int,
) -> None:
    """Reduce this carrier's slice of all members of this host, in place. `residual`: see `Code`, for the slice."""
    dtype = slices[0].dtype
    most = piece_bytes // dtype.itemsize
    under_way: deque[_UnderWay] = deque()

    def finish(work: _UnderWay) -> None:
        exchange.finish(work.turn, work.pending, work.theirs, work.residual)
        count, mine = work.operands[0].numel(), work.operands[place.index]
        if place.num_hosts == 2:
            hosts = [work.ours, work.theirs] if place.host == 0 else [work.theirs, work.ours]
            steps.between.reduce(hosts, mine, buffers.take("scratch", count, dtype))
        else:
            copy(work.theirs[:count], mine)
        steps.end.finish_(mine)
        for member, operand in enumerate(work.operands):
            if member != place.index:
                copy(mine, operand)

    for number, begin in enumerate(range(0, slices[0].numel(), most)):
        operands = [each[begin : begin + most] for each in slices]
        count, turn = operands[0].numel(), number % (WINDOW + 1)
        if steps.inside.prescales:
            for operand in operands:
                steps.inside.prepare_(operand)
        room = exchange.room(count)
        ours = operands[place.index] if room == count else buffers.take(f"ours{turn}", room, dtype)
        steps.inside.reduce(operands, ours[:count], buffers.take("scratch", count, dtype))
        ours[count:].zero_()
        theirs = buffers.take(f"theirs{turn}", room, dtype)
        lost = None if residual is None else residual[begin : begin + most]
        pending = exchange.start(turn, ours, theirs, lost)
        under_way.append(_UnderWay(turn, operands, ours, theirs, lost, pending))
        if len(under_way) > WINDOW:
            finish(under_way.popleft())
    while under_way:
        finish(under_way.popleft())
