"""A persistent reduction over several hosts: the data of each host's members lies in that host's shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.persistent import PersistentReduction
from hora.engine.queue import OperationQueue
from hora.engine.request import Kind, Reduce
from hora.engine.transport.base import CompressingTransport, Transport

__all__ = ["HostReduction"]


class HostReduction(PersistentReduction):
    """An allreduce in a set whose members are on several hosts: `places` are those of this host's members, of which this
    rank is number `member`. `keeps_losses`: what the code of `reduce` loses in one step is added in the next."""

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
        super().__init__(queue, Kind.ALLREDUCE, [places], name=name, reduce=reduce, member=member)
        # For all of it, though a rank touches its slice alone: the system gives memory to what is touched.
        self._residual = torch.zeros_like(places[0]) if keeps_losses else None

    def _carry_out(self, views: Sequence[torch.Tensor], transport: Transport) -> None:
        assert isinstance(transport, CompressingTransport), transport
        transport.allreduce_resident(views, self._reduce, self._residual)
