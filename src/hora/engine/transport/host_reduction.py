"""A persistent reduction over several hosts: the data of each host's members lies in that host's shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.persistent import PersistentReduction
from hora.engine.plan import Part
from hora.engine.queue import OperationQueue
from hora.engine.request import Kind, Reduce, Request
from hora.engine.transport.base import CompressingTransport, Transport

__all__ = ["HostReduction"]


class HostReduction(PersistentReduction):
    """An allreduce in a set whose members are on several hosts: `places` are those of this host's members, of which
    this rank is number `member`. `keeps_losses`: what the code of `reduce` loses in one step is added in the next."""

    def __init__(
        self,
        queue: OperationQueue,
        places: Sequence[torch.Tensor],
        *,
        name: str,
        reduce: Reduce,
        member: int,
        keeps_losses: bool = False,
    ) -> None:
        super().__init__(queue, Kind.ALLREDUCE, places[member], name=name, reduce=reduce)
        self._places, self._reduce = places, reduce
        # For all of it, though a rank touches its slice alone: the system gives memory to what is touched.
        self._residual = torch.zeros_like(places[0]) if keeps_losses else None
        queue.bound[name] = self._execute

    def _execute(self, part: Part, request: Request | None, transport: Transport) -> None:
        """All members have agreed on it; `request` is None if this rank has joined and adds nothing."""
        assert isinstance(transport, CompressingTransport), transport
        if request is None:
            self._mine.zero_()
        if any(announced is None for announced in part.signatures):
            transport.barrier()  # a rank that has joined has cleared its data just now
        transport.allreduce_resident(self._places, self._reduce, self._residual)
