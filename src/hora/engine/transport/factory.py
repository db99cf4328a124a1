"""Chooses a process set's transport by where its members are, unless the user requests one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from hora.engine.rank_tree import by_host
from hora.engine.shm.segment import Segment
from hora.engine.transport.base import AliveCheck, LocalTransport, Membership, Transport
from hora.engine.transport.cuda import CudaTransport
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import connect
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.shm import ShmTransport
from hora.engine.transport.stream import StreamGroup, Streams


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The hosts of a set's members, and how to reach them."""

    ranks: Sequence[int]
    member: int
    hosts: Sequence[Sequence[int]]  # groups of ranks that share memory
    share: Callable[[Sequence[int], int], Segment]  # allocates a segment for several ranks of one host (collective)
    streams: Callable[[str, Sequence[int]], Streams]  # creates named connections between ranks that call it together
    store: Callable[[str], Store | None]  # creates a named torch store, for NCCL
    cuda_ipc: bool  # ranks on one GPU may share its memory
    native: bool  # all ranks of the world have the native part, so that those of a host share memory
    check_alive: AliveCheck

    def members_by_host(self) -> list[list[int]]:
        """Return member indices grouped by host, in member order."""
        index = {rank: member for member, rank in enumerate(self.ranks)}
        return [[index[rank] for rank in host] for host in by_host(self.ranks, self.hosts)]

    def membership(self, members: Sequence[int]) -> Membership:
        """Return this rank's place among some members."""
        return Membership(list(members).index(self.member), len(members), self.check_alive)

    def segments(self, members: Sequence[int]) -> Callable[[int], Segment]:
        """Return the function that allocates memory for members on one host."""
        return lambda num_bytes: self.share([self.ranks[member] for member in members], num_bytes)

    def connect(self, name: str, members: Sequence[int]) -> StreamGroup:
        """Connect some members, which call this together."""
        ranks = [self.ranks[member] for member in members]
        what = f"{len(ranks)} members to connect to one another"
        streams = connect(lambda: self.streams(name, ranks), what, self.check_alive)
        return StreamGroup(streams, self.membership(members))


def make_transport(topology: Topology, device: str, transport_for: Callable[[str], Transport]) -> Transport:
    """Return the transport for tensors on `device`; `transport_for` returns the set's one for another device type."""
    if len(topology.ranks) == 1:
        return LocalTransport()
    groups, everyone = topology.members_by_host(), range(len(topology.ranks))
    if device != "cpu":
        # Opening it may block for long if its host has just vanished; the liveness check knows sooner.
        store = connect(lambda: topology.store("flat"), "a connection to the rendezvous", topology.check_alive)
        assert store is not None, "a set of several members always has a rendezvous"
        share = topology.segments(everyone) if topology.cuda_ipc and topology.native and len(groups) == 1 else None
        return CudaTransport(store, topology.membership(everyone), lambda: transport_for("cpu"), share)
    if not topology.native:
        return DistributedTransport(topology.connect("members", everyone), hosts=sorted(map(sorted, groups)))
    (here,) = (group for group in groups if topology.member in group)
    alone = len(here) == 1
    local = LocalTransport() if alone else ShmTransport(topology.segments(here), topology.membership(here))
    return local if len(groups) == 1 else between_hosts(topology, local)


def between_hosts(topology: Topology, local: ShmTransport | LocalTransport) -> HierarchicalTransport:
    """Return the transport of members on several hosts.

    `local` is the transport of the members on this host, for operations other than scheduled reductions.
    """
    groups = topology.members_by_host()
    (here,) = (group for group in groups if topology.member in group)
    return HierarchicalTransport(
        local,
        groups,
        topology.member,
        share=topology.segments(here),
        connect=topology.connect,
        check_alive=topology.check_alive,
    )
