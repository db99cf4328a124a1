"""Bootstrap: connects this rank to the other ranks of its world and finds out which of them share memory.

It runs once per runtime, in steps that all ranks take together:

    near          at the rendezvous a rank learns which ranks may share its host
    hosts         each rank proves it by attaching to the memory of the first of them, or is a host of its own
    place         with several hosts, the first rank of each learns where its parent in the tree listens
    introduction  connected along the tree, every rank introduces itself to all

Afterwards it provides shared memory and topologies for transports. It is independent of requests.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hora.config import EngineConfig
from hora.engine.control_tree import ControlEvents, ControlTree
from hora.engine.rank_tree import FANOUT, Tree, by_host
from hora.engine.rendezvous import ControlStore, RendezvousClient, host_fingerprint, open_rendezvous
from hora.engine.shm.native import absence, library
from hora.engine.shm.segment import Segment
from hora.engine.transport.base import AliveCheck
from hora.engine.transport.factory import Topology
from hora.engine.transport.stream import Streams, encrypts_natively
from hora.errors import HorovodInternalError
from hora.net.client import RankGroup
from hora.net.key_value_store import grouped
from hora.net.keys import RankKeys
from hora.net.sockets import Where, interface_address, source_address
from hora.net.wire import Stream
from hora.world import World

log = logging.getLogger("hora")

_PROBE_LIMIT_S = 10.0


# Settings that must be equal on all ranks: all use rank 0's.
_COMMON = (
    *("fusion_threshold_bytes", "disable_group_fusion", "transport", "encrypt", "cuda_ipc", "autotune"),
    *("autotune_warmup_samples", "autotune_steps_per_sample", "autotune_max_samples"),
)


class _Introduction(NamedTuple):
    """A rank's introduction to the others at the rendezvous."""

    leader: int  # the first rank of its host
    place: Sequence[Any]  # address and port of its control tree; empty in worlds that need no network
    pid: int
    hostname: str
    worker: int  # the process's number in its job, which stays when ranks change; its rank under other launchers
    process_sets: list[list[int]]
    encrypt: str
    lacks_native: str  # why it has no native part; empty if it has one
    encrypts_natively: bool
    settings: dict[str, Any]  # rank 0's: the common ones


class Bootstrap:
    """The ranks of a world of several. `epoch`: this initialization; `check_alive` raises if waiting is pointless."""

    keys: RankKeys  # this rank's in this world, set by `meet`

    def __init__(
        self, world: World, config: EngineConfig, epoch: str, events: ControlEvents, check_alive: Callable[[], None]
    ) -> None:
        self.hosts: list[list[int]] = []  # ranks that proved to share memory
        self.config = config  # `meet` replaces the common values with rank 0's
        self._world = world
        self._epoch = epoch
        self._check_alive = check_alive
        self._introductions: list[_Introduction] = []
        self._near: dict[int, str] = {}  # the ranks of this host, and the names of their control trees
        self._num_segments: dict[str, int] = {}
        self._rendezvous: RendezvousClient = open_rendezvous(world, limit_s=config.init_timeout_s)
        self.control_tree = ControlTree(world.rank, world.size, events)

    # Setting up.

    def meet(self, process_sets: list[list[int]]) -> list[list[int]]:
        """Find the other ranks and connect to them; returns the process sets that all of them requested."""
        world = self._world
        self.keys = self._rendezvous.keys(world, self._epoch, limit_s=self.config.init_timeout_s)
        self.control_tree.start(self.keys)
        host = self._prove_host()
        self._near = {rank: name.decode() for rank, name in host.members.items()}
        with self.peers_may_go():
            place = self._join_tree(host)
            mine = _Introduction(
                next(iter(self._near)),
                place,
                os.getpid(),
                world.hostname,
                world.number,
                process_sets,
                self.config.encrypt,
                _lacks_native(),
                encrypts_natively(),
                {} if world.rank else {name: getattr(self.config, name) for name in _COMMON},
            )
            gathered = self.gather("introduction", json.dumps(mine).encode())
            self._introductions = [_Introduction(*json.loads(data)) for data in gathered]
        self.hosts = grouped([peer.leader for peer in self._introductions])
        self.control_tree.know(Tree(self.hosts), self.where)
        self._check_agreement_on_sets()
        self._check_encryption()
        self.config = replace(self.config, **self._introductions[0].settings)
        if lacking := [rank for rank, peer in enumerate(self._introductions) if peer.lacks_native]:
            why = self._introductions[lacking[0]].lacks_native
            log.info("rank(s) %s lack the native part (%s): all data goes over sockets, slowly", lacking, why)
        if len(self.hosts) == 1 and not self.can_share(range(world.size)):  # ranks of one host need a network, too
            places = self.gather("place", json.dumps(self._listen()).encode())
            pairs = zip(self._introductions, places, strict=True)
            self._introductions = [peer._replace(place=json.loads(place)) for peer, place in pairs]
        return self._introductions[0].process_sets

    @property
    def workers(self) -> list[int]:
        """The number of each rank's process in its job."""
        return [peer.worker for peer in self._introductions]

    def gather(self, what: str, value: bytes) -> list[bytes]:
        """Return every rank's value, in rank order (collective)."""
        return self.control_tree.gather(what, value, limit_s=self.config.init_timeout_s)

    def where(self, rank: int) -> Where:
        """Return the address of this rank's control tree."""
        return self._near.get(rank) or self._far(rank)

    def _far(self, rank: int) -> tuple[str, int]:
        """Return the same for ranks of other hosts."""
        address, port = self._introductions[rank].place
        return address, port

    def set_tree(self, ranks: Sequence[int]) -> Tree:
        """Return the tree of a set's members, after linking this rank to its parent there."""
        tree = Tree(by_host(ranks, self.hosts))
        parent = tree.parent(self._world.rank)
        if parent is not None:
            self.control_tree.link(parent, self.where(parent), limit_s=self.config.init_timeout_s)
        return tree

    @contextlib.contextmanager
    def peers_may_go(self) -> Iterator[None]:
        """Treat a connection broken by a peer's sudden end as a lost rank, not as an error of this one."""
        try:
            yield
        except OSError as error:
            raise HorovodInternalError(f"rank {self._world.rank} could not meet the others: {error}") from error

    def lost(self, rank: int) -> str:
        """Return the message for users that a rank is gone."""
        peer = self._introductions[rank] if self._introductions else None
        who = f" (process {peer.pid} on {peer.hostname})" if peer else ""  # it may end before it has introduced itself
        return (
            f"rank {rank}{who} was lost: its connection ended without a goodbye. "
            "It was killed, crashed, or its host is unreachable. Horovod has been shut down"
        )

    def _check_agreement_on_sets(self) -> None:
        expected = self._introductions[0].process_sets
        for rank, peer in enumerate(self._introductions):
            if peer.process_sets != expected:
                raise ValueError(
                    "Horovod initialization failed: the ranks disagree on their process sets: rank 0 has "
                    f"{expected}, rank {rank} has {peer.process_sets}"
                )

    def _check_encryption(self) -> None:
        """Check that no rank requires more encryption than rank 0, whose setting applies to all (all ranks notice)."""
        wish = self._introductions[0].encrypt
        strict = [rank for rank, peer in enumerate(self._introductions) if peer.encrypt == "always"]
        if strict and wish != "always":
            raise ValueError(
                f"HORA_ENCRYPT=always on rank(s) {strict}, but {wish} on rank 0: set it to the same value on all hosts"
            )

    def _prove_host(self) -> RankGroup:
        """Return the ranks that share memory with this one: each other rank has fetched the first one's memory."""
        rank, name = self._world.rank, self.control_tree.name.encode()
        near = self._meet("near", host_fingerprint(), name).members
        leader = next(iter(near))
        proven = leader == rank
        if proven:
            self.control_tree.handoff.offer("probe", 1, len(near) - 1)
        else:
            try:
                where = near[leader].decode()
                self.control_tree.handoff.fetch(
                    leader, where, "probe", limit_s=_PROBE_LIMIT_S, check_alive=self._check_alive
                ).close()
                proven = True
            except OSError as error:
                log.warning("rank %d cannot share memory with rank %d: %s", rank, leader, error)
        return self._meet("hosts", str(leader if proven else rank), name)

    def _meet(self, what: str, group: str, value: bytes) -> RankGroup:
        """Return the values of this group's ranks, once all ranks have arrived (collective)."""
        world, key = self._world, f"{self._epoch}/{what}"
        limit_s = self.config.init_timeout_s
        return self._rendezvous.gather(key, group, value, rank=world.rank, size=world.size, limit_s=limit_s)

    def _join_tree(self, host: RankGroup) -> Sequence[Any]:
        """Take this rank's place in the tree; returns where it listens for ranks of other hosts."""
        rank, limit_s = self._world.rank, self.config.init_timeout_s
        leader, *others = self._near
        parent: tuple[int, Where] | None = None if rank == leader else (leader, self._near[leader])
        place: Sequence[Any] = ()
        if host.num_groups > 1:
            place = self._listen()
            above = self._meet("place", str(leader), json.dumps(place).encode()).above
            if rank == leader and above is not None:
                parent = above[0], tuple(json.loads(above[1]))
        below = range(FANOUT * host.index + 1, min(FANOUT * host.index + FANOUT + 1, host.num_groups))
        self.control_tree.join(parent, len(others) + len(below) if rank == leader else 0, limit_s=limit_s)
        return place

    def _listen(self) -> tuple[str, int]:
        """Listen for ranks of other hosts, on the interface of the user or towards them, and return the address."""
        interface, towards = self.config.interface, self._world.rendezvous.address or "127.0.0.1"
        try:
            address = interface_address([interface]) if interface else source_address(towards)
        except ValueError:
            raise ValueError(
                f"network interface {interface!r} has no address on this host; set HOROVOD_GLOO_IFACE to one that has"
            ) from None
        return address, self.control_tree.listen_tcp(address)

    # Sharing.

    @property
    def sharing(self) -> list[list[int]]:
        """The ranks of each host, which reduce together first; each rank alone if the user disables shared memory."""
        return self.hosts if self.config.transport == "auto" else [[rank] for rank in range(self._world.size)]

    @functools.cached_property
    def _native(self) -> bool:
        """Return whether all ranks have the native part, including encryption if it is needed."""
        encrypt = self.config.encrypt
        encrypts = encrypt == "always" or (encrypt == "auto" and len(self.hosts) > 1)
        return all(not peer.lacks_native and (peer.encrypts_natively or not encrypts) for peer in self._introductions)

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Return whether all these ranks can and may map the same memory."""
        return self._native and any(set(ranks) <= set(host) for host in self.sharing)

    def beside(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks among these that share memory with this one, including itself."""
        if not self._native:
            return [self._world.rank]
        (here,) = (host for host in self.sharing if self._world.rank in host)
        return [rank for rank in ranks if rank in here]

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are on several hosts, between which the native part reduces."""
        return self._native and len(ranks) > 1 and not self.can_share(ranks)

    def in_host_order(self, ranks: Sequence[int]) -> bool:
        """Return whether these ranks are numbered host by host."""
        return [rank for host in by_host(ranks, self.sharing) for rank in host] == list(ranks)

    def share(
        self,
        key: str,
        ranks: Sequence[int],
        num_bytes: int,
        *,
        limit_s: float | None = None,
        check_alive: AliveCheck | None = None,
    ) -> Segment:
        """Allocate memory shared by all these ranks, which are on one host (collective)."""
        number = self._num_segments[key] = self._num_segments.get(key, 0) + 1
        name = f"{key}/{number}"
        if ranks[0] == self._world.rank:
            return self.control_tree.handoff.offer(name, num_bytes, len(ranks) - 1)
        try:
            limit_s = self.config.init_timeout_s if limit_s is None else limit_s
            return self.control_tree.handoff.fetch(
                ranks[0], self._near[ranks[0]], name, limit_s=limit_s, check_alive=check_alive or self._check_alive
            )
        except ConnectionError:  # the control tree will report the same in a moment
            raise HorovodInternalError(self.lost(ranks[0])) from None

    def share_or_none(self, key: str, ranks: Sequence[int], num_bytes: int) -> Segment | None:
        """Do the same as `share`; returns None on all ranks if there is too little memory."""
        try:
            segment = self.share(key, ranks, num_bytes)
        except MemoryError as error:
            log.warning("%s; going on without sharing it", error)
            self._num_segments[key] -= 1
            segment = self.share(key, ranks, 1)  # the others wait for a segment: its size tells them
        return segment if segment.num_bytes >= num_bytes else None

    def _streams(self, key: str, ranks: Sequence[int], *, sealed: bool) -> Streams:
        """Open connections between these ranks, one per direction of each pair (collective)."""
        limit_s = self.config.init_timeout_s
        others = [(member, rank) for member, rank in enumerate(ranks) if rank != self._world.rank]
        outgoing: dict[int, Stream] = {}
        incoming: dict[int, Stream] = {}
        self.keys.fetch(ranks)
        try:
            for member, rank in others:
                outgoing[member] = self.open_stream(rank, key, sealed=sealed)
            for member, rank in others:
                incoming[member] = self.accept_stream(rank, key, limit_s=limit_s, sealed=sealed)
        except BaseException:
            for stream in (*outgoing.values(), *incoming.values()):
                stream.sock.close()
            raise
        return Streams(outgoing, incoming)

    def open_stream(self, rank: int, key: str, *, sealed: bool = False) -> Stream:
        """Open a stream to a rank of another host, or of this one without the native part."""
        limit_s = self.config.init_timeout_s
        stream = self.control_tree.handoff.open_stream(rank, self._far(rank), key, limit_s=limit_s)
        return stream if self._encrypts(rank, sealed=sealed) else Stream(stream.sock)

    def accept_stream(self, rank: int, key: str, *, limit_s: float = 0.0, sealed: bool = False) -> Stream:
        """Return the stream that this rank has opened to this one. Raises TimeoutError if there is none."""
        stream = self.control_tree.handoff.accept_stream(key, rank, limit_s=limit_s)
        return stream if self._encrypts(rank, sealed=sealed) else Stream(stream.sock)

    def open_sealed_stream(self, rank: int, key: str) -> Stream:
        """Open a stream that may carry objects."""
        return self.open_stream(rank, key, sealed=True)

    def accept_sealed_stream(self, rank: int, key: str) -> Stream:
        """Return the stream for objects that this rank has opened to this one. Raises TimeoutError."""
        return self.accept_stream(rank, key, sealed=True)

    def seals_objects(self, ranks: Sequence[int]) -> bool:
        """Return whether objects of these ranks need streams of their own: tensors are sent in clear."""
        return self.config.encrypt == "never" and not self.can_share(ranks)

    def _encrypts(self, rank: int, *, sealed: bool) -> bool:
        """Return whether streams to and from this rank are encrypted. Both ends make the same decision."""
        wish = self.config.encrypt
        return wish == "always" or (wish == "auto" and rank not in self._near) or (wish == "never" and sealed)

    def topology(
        self, label: str, device: str, ranks: Sequence[int], check_alive: Callable[[], None], *, sealed: bool = False
    ) -> Topology:
        """Return the topology of these ranks for a transport. `label` names their set permanently.

        `sealed`: streams are encrypted even if tensors are sent in clear.
        """
        prefix, limit_s = f"{self._epoch}/{label}/{device}", self.config.init_timeout_s
        return Topology(
            ranks=ranks,
            member=list(ranks).index(self._world.rank),
            hosts=self.sharing,
            share=lambda some, num_bytes: self.share(f"{label}/{device}", some, num_bytes, check_alive=check_alive),
            streams=lambda name, some: self._streams(f"{label}/{device}/{name}", some, sealed=sealed),
            store=lambda name: ControlStore(
                self._rendezvous.client, prefix=f"{prefix}/{name}/", timeout_s=limit_s, check_alive=check_alive
            ),
            cuda_ipc=self.config.cuda_ipc,
            native=self._native,
            check_alive=check_alive,
        )


def _lacks_native() -> str:
    """Return why this rank has no native part that supports all dtypes; empty if it has one."""
    compiled = library()
    if compiled is None:
        return absence() or ""
    return "" if compiled.has_float16 else "this processor has no instructions for half precision"
