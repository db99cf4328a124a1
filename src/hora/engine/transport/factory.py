"""Chooses a process set's transport by where its members are, unless the user requests one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

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
    """The hosts of a set's members, and how to reach them.

    `hosts` lists ranks that share memory; `share` allocates a segment for several ranks of one host (collective);
    `streams` creates named connections between ranks that call it together. For NCCL, `store` creates a named torch
    store. `cuda_ipc`: ranks on one GPU may share its memory. `native`: all ranks of the world have the native part, so
    that those of a host share memory.
    """

    ranks: Sequence[int]
    member: int
    hosts: Sequence[Sequence[int]]
    share: Callable[[Sequence[int], int], Segment]
    streams: Callable[[str, Sequence[int]], Streams]
    store: Callable[[str], Store | None]
    cuda_ipc: bool
    native: bool
    check_alive: AliveCheck

    def members_by_host(self) -> list[list[int]]:
        """Return member indices grouped by host, in member order."""
        index = {rank: member for member, rank in enumerate(self.ranks)}
        groups = [[index[rank] for rank in host if rank in index] for host in self.hosts]
        return [group for group in groups if group]


def make_transport(topology: Topology, device: str, transport_for: Callable[[str], Transport]) -> Transport:
    """Return the transport for tensors on `device`; `transport_for` returns the set's one for another device type."""
    if len(topology.ranks) == 1:
        return LocalTransport()
    groups = topology.members_by_host()
    if device == "cpu" and not topology.native:
        group = _group(topology, "members", range(len(topology.ranks)))
        return DistributedTransport(group, hosts=sorted(map(sorted, groups)))
    if device == "cpu" and len(groups) == 1:
        return _shm_transport(topology, groups[0])
    if device == "cpu":
        (here,) = (group for group in groups if topology.member in group)
        return between_hosts(topology, _shm_transport(topology, here) if len(here) > 1 else LocalTransport())
    store = _store(topology, "flat")
    share = (
        (lambda num_bytes: topology.share(topology.ranks, num_bytes))
        if topology.cuda_ipc and topology.native and len(groups) == 1
        else None
    )
    return CudaTransport(store, _membership(topology, range(len(topology.ranks))), lambda: transport_for("cpu"), share)


def between_hosts(topology: Topology, local: ShmTransport | LocalTransport) -> HierarchicalTransport:
    """Return the transport of members on several hosts.

    `local` is the transport of the members on this host, for operations other than scheduled reductions.
    """
    groups = topology.members_by_host()
    (here,) = ([topology.ranks[one] for one in group] for group in groups if topology.member in group)
    return HierarchicalTransport(
        local,
        groups,
        topology.member,
        share=lambda num_bytes: topology.share(here, num_bytes),
        connect=lambda name, some: _group(topology, name, some),
        check_alive=topology.check_alive,
    )


def _group(topology: Topology, name: str, members: Sequence[int]) -> StreamGroup:
    """Connect some members, which call this together."""
    membership = _membership(topology, members)
    ranks = [topology.ranks[member] for member in members]
    what = f"{len(ranks)} members to connect to one another"
    return StreamGroup(connect(lambda: topology.streams(name, ranks), what, topology.check_alive), membership)


def _shm_transport(topology: Topology, members: Sequence[int]) -> ShmTransport:
    """Return the shared-memory transport of members on one host."""
    ranks = [topology.ranks[member] for member in members]
    return ShmTransport(lambda num_bytes: topology.share(ranks, num_bytes), _membership(topology, members))


def _membership(topology: Topology, members: Sequence[int]) -> Membership:
    """Return this rank's place among some members."""
    return Membership(list(members).index(topology.member), len(members), topology.check_alive)


def _store(topology: Topology, name: str) -> Store:
    # Opening it may block for long if its host has just vanished; the liveness check knows sooner.
    store = connect(lambda: topology.store(name), "a connection to the rendezvous", topology.check_alive)
    assert store is not None, "a set of several members always has a rendezvous"
    return store
