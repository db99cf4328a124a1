"""Gradient buckets over several hosts, executed by a schedule over separate connections between the hosts.

The data of each host's members lies in that host's memory.

    apart --an announced item that all members took part in--> connected
    connected --a void item--> apart

While apart, every item is announced. While connected, none is: the members of a host meet in its memory (`schedule`),
and a host's data for an item begins with a header: the item's number since they were connected, its bucket, and a
digest of all buckets. A host that has something else to do (a member has joined) sends a header that no host expects.
Every host receives every other one's header before it writes a result, so either all find the item void or none does.
Then the item is announced, and the connections, which contain bytes that no member will read, are replaced.

All members are in the same state before the same item: every member that executes an item knows what changes the state.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Sequence

import torch

from hora.engine.plan import Part
from hora.engine.request import Key, Kind, Reduce, Request
from hora.engine.schedule import PersistentReduction, ReductionSchedule
from hora.engine.transport.base import AliveCheck, Transport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.errors import HorovodInternalError

_HEADER = struct.Struct("<qq16s")


class HostLink:
    """The connections of this member of a schedule with other hosts.

    `connect(number, check_alive)` creates the connections for the `number`-th time (collective); `lacking(key,
    members)` returns those members that do not wait for this.
    """

    def __init__(
        self,
        schedule: ReductionSchedule,
        connect: Callable[[int, AliveCheck], HierarchicalTransport],
        lacking: Callable[[Key, Sequence[int]], list[int]],
    ) -> None:
        self.all_took_part = False  # in the item announced last
        self._schedule = schedule
        self._connect, self._lacking = connect, lacking
        self._transport: HierarchicalTransport | None = None
        self._apart = True
        self._num_connected = 0
        self._since = 0  # the item after which they were connected
        self._digest = b""
        schedule.link = self

    def add(self, reduction: HostReduction) -> None:
        """Add the next bucket, before the first step."""
        self._digest = hashlib.blake2b(self._digest + reduction.signature.encode(), digest_size=16).digest()

    @property
    def transport(self) -> HierarchicalTransport | None:
        """The transport while connected."""
        return None if self._apart else self._transport

    def connect(self, item: int) -> None:
        """Connect the hosts after an item that all members have taken part in."""
        self.close()
        self._num_connected += 1
        self._transport = self._connect(self._num_connected, self._look_around)
        self._since, self._apart = item, False

    def header(self, item: int, index: int) -> bytes:
        """Return the header of an item."""
        return _HEADER.pack(item - self._since, index, self._digest)

    def leave(self, *, tell: bool) -> None:
        """Announce items from here on. `tell`: the other hosts do not know yet."""
        if tell and self.transport is not None:
            with contextlib.suppress(HorovodInternalError):  # a host that has released the schedule need not know
                self.transport.refuse()
        self._apart = True

    def close(self) -> None:
        """Close the connections."""
        if self._transport is not None:
            self._transport.close()
        self._transport, self._apart = None, True

    def _look_around(self) -> None:
        """Run the liveness checks while this member waits for another host."""
        late = [] if self._transport is None else self._transport.late_members
        self._schedule.look_beyond(lambda key: self._lacking(key, late))


class HostReduction(PersistentReduction):
    """An allreduce in a set whose members are on several hosts, or half of one.

    `places` are those of this host's members, in the order of the schedule. In half an allreduce each member has a
    slice of its place: `kind` is then a reducescatter into its own slice, or an allgather of all slices.
    """

    def __init__(
        self,
        schedule: ReductionSchedule,
        link: HostLink,
        places: Sequence[torch.Tensor],
        *,
        name: str,
        kind: Kind = Kind.ALLREDUCE,
        reduce: Reduce,
    ) -> None:
        mine, queue = places[schedule.member], schedule.queue
        count = mine.numel() // len(queue.ranks)
        out = mine[queue.member * count : (queue.member + 1) * count] if kind is Kind.REDUCESCATTER else None
        super().__init__(schedule, kind, mine, name=name, reduce=reduce, out=out)
        self._kind, self._link, self._places, self._reduce = kind, link, places, reduce
        # For all of it, although a rank touches only its slice: the system allocates only touched memory.
        self._residual = torch.zeros_like(places[0]) if reduce.code.endswith("+") else None
        link.add(self)
        schedule.queue.bound[name] = self._execute

    def execute_scheduled(self, number: int, absent: Sequence[int]) -> bool:
        link = self._link
        if absent:
            link.leave(tell=True)
        if link.transport is None:
            return False
        header = link.header(number, self._index)
        agreed = link.transport.reduce_resident(self._kind, self._places, self._reduce, self._residual, header)
        if self.schedule.end_together(number, void=not agreed):
            return True
        link.leave(tell=False)
        return False

    def execute_negotiated(self, number: int) -> None:
        super().execute_negotiated(number)
        if self._link.all_took_part:
            self._link.connect(number)

    def _execute(self, part: Part, request: Request | None, transport: Transport) -> None:
        """Execute a reduction that all members have agreed on; `request` is None if this rank has joined."""
        assert isinstance(transport, HierarchicalTransport), transport
        if request is None:
            self._mine.zero_()
        self._link.all_took_part = None not in part.signatures
        if not self._link.all_took_part:
            transport.barrier()  # a joined rank has just cleared its data
        transport.reduce_resident(self._kind, self._places, self._reduce, self._residual)
        transport.barrier()
