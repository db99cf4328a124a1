"""Chooses a process set's transport by where its members are, unless the user requests one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from hora.engine.shm.segment import Segment
from hora.engine.transport.base import AliveCheck, LocalTransport, Transport
from hora.engine.transport.cuda import CudaTransport
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.group import connect
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.shm import ShmTransport
from hora.engine.transport.stream import StreamGroup, Streams

# Members have agreed on a batch before it begins, so a wait inside it is short unless a member is stopped, which the
# stall report handles. The liveness check notices a dead member at once.
_COLLECTIVE_LIMIT_S = 24 * 3600.0


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
    member, num_members, limit_s = topology.member, len(topology.ranks), _COLLECTIVE_LIMIT_S
    if device == "cpu" and not topology.native:
        group = _group(topology, "members", range(num_members))
        return DistributedTransport(group, member, num_members, hosts=sorted(map(sorted, groups)))
    if device == "cpu" and len(groups) == 1:
        return _shm_transport(topology, groups[0])
    if device == "cpu":
        (here,) = (group for group in groups if member in group)
        return between_hosts(topology, _shm_transport(topology, here) if len(here) > 1 else LocalTransport())
    store = _store(topology, "flat")
    share = (
        (lambda num_bytes: topology.share(topology.ranks, num_bytes))
        if topology.cuda_ipc and topology.native and len(groups) == 1
        else None
    )
    return CudaTransport(store, member, num_members, topology.check_alive, limit_s, lambda: transport_for("cpu"), share)


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
        limit_s=_COLLECTIVE_LIMIT_S,
    )


def _group(topology: Topology, name: str, members: Sequence[int]) -> StreamGroup:
    """Connect some members, which call this together."""
    me, num_members = list(members).index(topology.member), len(members)
    check_alive, limit_s = topology.check_alive, _COLLECTIVE_LIMIT_S
    ranks = [topology.ranks[member] for member in members]
    what = f"{num_members} members to connect to one another"
    streams = connect(lambda: topology.streams(name, ranks), what=what, check_alive=check_alive, limit_s=limit_s)
    return StreamGroup(streams, me, num_members, check_alive=check_alive, limit_s=limit_s)


def _shm_transport(topology: Topology, members: Sequence[int]) -> ShmTransport:
    """Return the shared-memory transport of members on one host."""
    ranks = [topology.ranks[member] for member in members]
    index = list(members).index(topology.member)
    return ShmTransport(
        lambda num_bytes: topology.share(ranks, num_bytes), index, len(ranks), topology.check_alive, _COLLECTIVE_LIMIT_S
    )


def _store(topology: Topology, name: str) -> Store:
    # Opening it may block for long if its host has just vanished; the liveness check knows sooner.
    what = "a connection to the rendezvous"
    store = connect(
        lambda: topology.store(name), what=what, check_alive=topology.check_alive, limit_s=_COLLECTIVE_LIMIT_S
    )
    assert store is not None, "a set of several members always has a rendezvous"
    return store
