"""The peers: the other ranks of this world, how they were met, and what can be shared with whom.

Set up once per runtime, in three steps that all ranks take together: introduce themselves at the meeting, prove by attaching
to one another's memory who shares a host, connect to rank 0's hub. Afterwards it hands out shared memory and what transports
need. Nothing here knows of requests.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace

from hora.config import EngineConfig, accept_risk
from hora.engine.hub import Hub, HubEvents
from hora.engine.meeting import Meeting, open_meeting
from hora.engine.shm import futex
from hora.engine.shm.native import library
from hora.engine.shm.records import usable
from hora.engine.shm.segment import Segment
from hora.engine.transport.factory import Topology
from hora.engine.transport.stream import Streams
from hora.engine.validation import check_ranks_at_init
from hora.errors import HorovodInternalError
from hora.net.address import interface_address, source_address
from hora.net.connection import Stream
from hora.net.keys import RankKeys
from hora.world import World

__all__ = ["Peers"]

log = logging.getLogger("hora")

_PROBE_LIMIT_S = 10.0


@dataclass(frozen=True)
class _CommonSettings:
    """What all ranks must have set to the same value: rank 0's is used by all. Names are those of `EngineConfig`."""

    fusion_threshold_bytes: int
    disable_group_fusion: bool
    transport: str
    encrypt: str
    cuda_ipc: bool
    autotune: bool
    autotune_warmup_samples: int
    autotune_steps_per_sample: int
    autotune_max_samples: int


@dataclass(frozen=True)
class _Introduction:
    """What a rank tells the others when they meet."""

    rank: int
    hub_name: str
    fingerprint: str
    pid: int
    hostname: str
    process_sets: list[list[int]]
    secret: str  # rank 0's for this world, where the launcher gave the ranks none to derive their keys from
    has_native: bool
    encrypts_natively: bool
    settings: _CommonSettings

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Introduction:
        values = json.loads(data)
        return cls(**values | {"settings": _CommonSettings(**values["settings"])})


class Peers:
    """The ranks of a world of several. `epoch` tells one initialisation of this world from another; `guard` raises when
    it has become pointless to wait for one of them."""

    def __init__(
        self, world: World, config: EngineConfig, epoch: str, events: HubEvents, guard: Callable[[], None]
    ) -> None:
        self.hosts: list[list[int]] = []  # ranks that proved to share memory
        self.config = config  # from `meet` on with rank 0's values where all ranks must have the same
        self._world = world
        self._epoch = epoch
        self._guard = guard
        self._keys: RankKeys | None = None  # from `meet` on
        self._introductions: list[_Introduction] = []
        self._places: list[tuple[str, int]] = []  # where each rank's hub listens, in worlds that need a network
        self._num_segments: dict[str, int] = {}
        self._meeting: Meeting = open_meeting(world, limit_s=config.init_timeout_s)
        self.hub = Hub(world.rank, world.size, events)

    # Setting up.

    def meet(self, process_sets: list[list[int]]) -> list[list[int]]:
        """Find the others and connect to them; returns the process sets that all of them asked for."""
        world = self._world
        keys = self._meeting.keys(world, self._epoch, limit_s=self.config.init_timeout_s)
        secret = secrets.token_hex(32) if keys is None and world.rank == 0 else ""
        common = _CommonSettings(*(getattr(self.config, field.name) for field in fields(_CommonSettings)))
        mine = _Introduction(
            world.rank,
            self.hub.name,
            _host_fingerprint(),
            os.getpid(),
            world.hostname,
            process_sets,
            secret,
            (compiled := library()) is not None and compiled.has_float16,
            usable(),
            common,
        )
        self._introductions = [_Introduction.decode(data) for data in self.gather("introduction", mine.encode())]
        self._check_agreement_on_sets()
        self._check_encryption()
        self.config = replace(self.config, **asdict(self._introductions[0].settings))
        self._keys = keys or RankKeys.derived(bytes.fromhex(self._introductions[0].secret), world.rank)
        self.hub.start(self._keys)
        self.hosts = self._prove_hosts()
        if self.config.transport == "gloo" and len(self.hosts) > 1:
            accept_risk(
                "tensors travel between hosts over gloo, neither authenticated nor encrypted", warn=not world.rank
            )
        with self.peers_may_go():
            self._join_hub()
        return self._introductions[0].process_sets

    @property
    def keys(self) -> RankKeys:
        """This rank's in this world. From `meet` on."""
        assert self._keys is not None
        return self._keys

    def gather(self, what: str, value: bytes) -> list[bytes]:
        """Every rank's value, in rank order (collective)."""
        world, limit_s = self._world, self.config.init_timeout_s
        key = f"{self._epoch}/{what}"
        return self._meeting.allgather(key, value, rank=world.rank, size=world.size, limit_s=limit_s)

    @contextlib.contextmanager
    def peers_may_go(self) -> Iterator[None]:
        """What a peer's sudden end does to its connections is a lost rank, not a problem of this one."""
        try:
            yield
        except OSError as error:
            raise HorovodInternalError(f"rank {self._world.rank} could not meet the others: {error}") from error

    def lost(self, rank: int) -> str:
        """What users read when a rank is gone."""
        peer = self._introductions[rank]
        return (
            f"rank {rank} (process {peer.pid} on {peer.hostname}) was lost: its connection ended without a goodbye. "
            "It was killed, crashed, or its host is unreachable. Horovod has been shut down"
        )

    def _check_agreement_on_sets(self) -> None:
        expected = self._introductions[0].process_sets
        for peer in self._introductions:
            if peer.process_sets != expected:
                raise ValueError(
                    "Horovod initialization failed: the ranks disagree on their process sets: rank 0 has "
                    f"{expected}, rank {peer.rank} has {peer.process_sets}"
                )
        # Only now, and before anything else: all ranks refuse the same sets at the same point.
        for ranks in expected:
            check_ranks_at_init(ranks, self._world.size)

    def _check_encryption(self) -> None:
        """Rank 0's wish is that of all, unless one of them wants more (all of them notice)."""
        wish = self._introductions[0].settings.encrypt
        strict = [peer.rank for peer in self._introductions if peer.settings.encrypt == "always"]
        if strict and wish != "always":
            raise ValueError(
                f"HORA_ENCRYPT=always on rank(s) {strict}, but {wish} on rank 0: set it to the same value on all hosts"
            )

    def _prove_hosts(self) -> list[list[int]]:
        """Groups of ranks that really share memory: every other rank fetched the first one's."""
        rank = self._world.rank
        (group,) = [g for g in _same_host_groups([p.fingerprint for p in self._introductions]) if rank in g]
        leader = group[0]
        proven = leader == rank
        if proven:
            self.hub.offer("probe", 1, len(group) - 1)
        else:
            try:
                name, limit_s = self._introductions[leader].hub_name, _PROBE_LIMIT_S
                self.hub.fetch(leader, name, "probe", limit_s=limit_s, guard=self._guard).close()
                proven = True
            except OSError as error:
                log.warning("rank %d cannot share memory with rank %d: %s", rank, leader, error)
        answers = self.gather("hosts", json.dumps([leader if proven else rank]).encode())
        return _same_host_groups([json.loads(answer)[0] for answer in answers])

    def _join_hub(self) -> None:
        hub, world, limit_s = self.hub, self._world, self.config.init_timeout_s
        if len(self.hosts) > 1 or not self._may_share:
            address = self._address()
            mine = [address, hub.listen_tcp(address)]
            self._places = [tuple(json.loads(answer)) for answer in self.gather("hub", json.dumps(mine).encode())]
        if world.rank == 0:
            hub.wait_for_all(limit_s=limit_s)
        elif world.rank in self.hosts[0]:
            hub.join(self._introductions[0].hub_name, limit_s=limit_s)
        else:
            hub.join(self._places[0], limit_s=limit_s)

    def _address(self) -> str:
        """This host's address: of the interface that the user chose, or the one from which the others are reached."""
        interface = self.config.interface
        if not interface:
            return source_address(self._world.meeting.address or "127.0.0.1")
        try:
            return interface_address([interface])
        except ValueError:
            raise ValueError(
                f"network interface {interface!r} has no address on this host; set HOROVOD_GLOO_IFACE to one that has"
            ) from None

    # Sharing.

    def can_share(self, ranks: Sequence[int]) -> bool:
        """Whether all these ranks can map the same memory, and may."""
        return self._may_share and any(set(ranks) <= set(host) for host in self.hosts)

    def near(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that are on this rank's host."""
        (here,) = (host for host in self.hosts if self._world.rank in host)
        return [rank for rank in ranks if rank in here]

    def spans_hosts(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks are on several hosts, and some of them may share one."""
        most = max(len(set(ranks) & set(host)) for host in self.hosts)
        return self._may_share and 1 < most < len(ranks)

    @property
    def _may_share(self) -> bool:
        return self.config.transport == "auto" and futex.supported()

    def share(self, key: str, ranks: Sequence[int], num_bytes: int) -> Segment:
        """The same new memory for all these ranks, which are on one host (collective)."""
        number = self._num_segments[key] = self._num_segments.get(key, 0) + 1
        name = f"{key}/{number}"
        if ranks[0] == self._world.rank:
            return self.hub.offer(name, num_bytes, len(ranks) - 1)
        hub_name, limit_s = self._introductions[ranks[0]].hub_name, self.config.init_timeout_s
        try:
            return self.hub.fetch(ranks[0], hub_name, name, limit_s=limit_s, guard=self._guard)
        except ConnectionError:  # the hub will tell the same, in a moment
            raise HorovodInternalError(self.lost(ranks[0])) from None

    def share_or_none(self, key: str, ranks: Sequence[int], num_bytes: int) -> Segment | None:
        """Like `share`; None on all of them where there is too little memory."""
        try:
            segment = self.share(key, ranks, num_bytes)
        except MemoryError as error:
            log.warning("%s; going on without sharing it", error)
            self._num_segments[key] -= 1
            segment = self.share(key, ranks, 1)  # the others wait for a segment: its size tells them
        return segment if segment.num_bytes >= num_bytes else None

    def _streams(self, key: str, ranks: Sequence[int]) -> Streams:
        """Connections between these ranks, one for each direction of each pair (collective)."""
        me, limit_s = self._world.rank, self.config.init_timeout_s
        outgoing: dict[int, Stream] = {}
        incoming: dict[int, Stream] = {}
        self.keys.fetch(ranks)
        try:
            for rank in ranks:
                if rank != me:
                    outgoing[rank] = self._protected(
                        self.hub.open_stream(rank, self._places[rank], key, limit_s=limit_s), rank
                    )
            for rank in ranks:
                if rank != me:
                    incoming[rank] = self._protected(self.hub.take_stream(key, rank, limit_s=limit_s), rank)
        except BaseException:
            for stream in (*outgoing.values(), *incoming.values()):
                stream.sock.close()
            raise
        index = {rank: member for member, rank in enumerate(ranks)}
        return Streams(
            {index[rank]: stream for rank, stream in outgoing.items()},
            {index[rank]: stream for rank, stream in incoming.items()},
        )

    def _protected(self, stream: Stream, rank: int) -> Stream:
        """The stream to or from this rank, in clear where the user has it so. Both ends come to the same decision."""
        wish, near = self.config.encrypt, bool(self.near([rank]))
        return stream if wish == "always" or (wish == "auto" and not near) else Stream(stream.sock)

    def topology(self, label: str, device: str, ranks: Sequence[int], guard: Callable[[], None]) -> Topology:
        """What a transport of these ranks needs to know. `label` names their set for good."""
        prefix, limit_s = f"{self._epoch}/{label}/{device}", self.config.init_timeout_s
        return Topology(
            ranks=ranks,
            member=list(ranks).index(self._world.rank),
            hosts=self.hosts if self._may_share else [[rank] for rank in ranks],
            share=lambda some, num_bytes: self.share(f"{label}/{device}", some, num_bytes),
            streams=None
            if self.config.transport == "gloo"
            else lambda name, some: self._streams(f"{label}/{device}/{name}", some),
            store=lambda name: self._meeting.store(f"{prefix}/{name}", limit_s=limit_s, guard=guard),
            address=self._address(),
            cuda_ipc=self.config.cuda_ipc,
            native=all(
                peer.has_native and (peer.encrypts_natively or self.config.encrypt == "never")
                for peer in self._introductions
            ),
            guard=guard,
        )


def _host_fingerprint() -> str:
    """Equal for processes that may share a host; attaching to one another's memory then proves it."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def _same_host_groups(fingerprints: Sequence[object]) -> list[list[int]]:
    """Ranks with equal fingerprints, each group in rank order, groups in order of their first rank."""
    groups: dict[object, list[int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        groups.setdefault(fingerprint, []).append(rank)
    return list(groups.values())
