"""The process sets of a world: which exist, and the queue of each one that this rank is a member of.

All ranks register and remove sets in the same order, so that numbers and labels agree. `add`, `remove` and
`shared_memory` are requests like any other: the members agree on them, and `_execute` does what they ask. What members
of other hosts say of a set may come before this rank has registered it; it is kept until then.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hora.config import EngineConfig
from hora.engine.agree.agreement import Agreement, LocalAgreement
from hora.engine.agree.shared_memory import SharedMemoryAgreement
from hora.engine.agree.tree import TreeAgreement
from hora.engine.lane import Lane
from hora.engine.peers import Peers
from hora.engine.plan import Batch, Planner
from hora.engine.queue import OperationQueue, QueueWorld
from hora.engine.repeated import AllreducePlan, RepeatedAllreduce
from hora.engine.request import Key, Kind, Request, Signature
from hora.engine.shm.native import library
from hora.engine.shm.segment import Segment, SharedMemory
from hora.engine.status import Recorder, StallLimits, WorldStatus
from hora.engine.transport.base import AliveCheck, Transport
from hora.engine.transport.factory import between_hosts, make_transport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.host_reduction import HostLink
from hora.engine.transport.local import LocalTransport
from hora.net.wire import Header
from hora.world import World

__all__ = ["ProcessSets", "check_ranks"]

log = logging.getLogger("hora")


class ProcessSets:
    """Number 0 is the world itself. `peers` is set before the first set is registered, in a world of several ranks."""

    def __init__(self, world: World, config: EngineConfig, status: WorldStatus, recorder: Recorder) -> None:
        self.peers: Peers | None = None
        self._world = world
        self._own_config = config
        self._status = status
        self._recorder = recorder
        self._sets: dict[int, tuple[int, ...]] = {}
        self._queues: dict[int, OperationQueue] = {}
        self._repeated: dict[int, RepeatedAllreduce] = {}  # of the queues whose members share a host
        self.known_allreduces: dict[object, Any] = {}  # what fronts keep of allreduces that are repeated, by the call
        self._serials: dict[int, int] = {}
        self._num_registered = 0
        self._num_links: dict[str, int] = {}  # that were made, by label of the set
        self._early: dict[int, list[tuple[int, Header, bytes]]] = {}  # messages for sets to come, by serial number
        self._messages_lock = threading.Lock()

    def as_dict(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in sorted(self._sets.items())}

    def ranks(self, number: int) -> tuple[int, ...]:
        """The members. ValueError for a set that does not exist."""
        ranks = self._sets.get(number)
        if ranks is None:
            raise ValueError(f"Process set {number} does not exist, or has not been registered")
        return ranks

    def queues(self) -> list[OperationQueue]:
        """The queues of the sets that this rank is in, by number."""
        return [queue for _, queue in sorted(self._queues.items())]

    def queue(self, number: int) -> OperationQueue:
        """ValueError for a set that does not exist, or that this rank is not in."""
        queue = self._queues.get(number)
        if queue is None:
            raise ValueError(
                f"Rank {self._world.rank} is not a member of the provided process set {number}, "
                f"which has the ranks {list(self.ranks(number))}"
            )
        return queue

    def repeated_plan(self, queue: OperationQueue, signature: Signature) -> AllreducePlan | None:
        """The fast path for an allreduce of one tensor; None where the members of the set share no host."""
        path = self._repeated.get(queue.process_set_id)
        return None if path is None else path.plan(signature)

    def wake(self) -> None:
        """Wake the threads that wait for other members, so that they look at the world's status again."""
        for queue in self.queues():
            queue.wake()

    # What all ranks do together.

    def add(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks (collective); returns its number."""
        self._check_dynamic("add_process_set")
        wanted = check_ranks(ranks, self._world.size)
        number = next((number for number, known in self._sets.items() if known == wanted), None)
        if number is not None:
            raise ValueError(f"a process set with the ranks {list(wanted)} exists already: number {number}")
        return int(self._request(0, Kind.ADD_PROCESS_SET, *wanted).answer)

    def of_this_host(self) -> int:
        """The number of the set of this host's ranks; sets of hosts that do not exist are registered (collective)."""
        hosts = [(0,)] if self.peers is None else [tuple(host) for host in self.peers.sharing]
        for host in hosts:
            if host not in self._sets.values():
                self._request(0, Kind.ADD_PROCESS_SET, *host)
        (mine,) = (host for host in hosts if self._world.rank in host)
        return next(number for number, ranks in sorted(self._sets.items()) if ranks == mine)

    def remove(self, number: int) -> bool:
        """Remove a set on all ranks (collective). False for the global set and unknown ones."""
        self._check_dynamic("remove_process_set")
        if number == 0 or number not in self._sets:
            return False
        self._request(0, Kind.REMOVE_PROCESS_SET, number)
        return True

    def shared_memory(self, number: int, num_bytes: int) -> SharedMemory | None:
        """The same zeroed memory for all members (collective); None where they share no host, or it is too little."""
        queue, peers = self.queue(number), self.peers
        if peers is None or len(queue.ranks) == 1 or not peers.can_share(queue.ranks):
            return None
        segment = self._request(number, Kind.SHARED_MEMORY, number, num_bytes, False).answer
        return None if segment is None else SharedMemory(segment)

    def host_memory(self, number: int, num_bytes: int) -> tuple[SharedMemory | None, list[int]]:
        """Zeroed memory that the members of each host have in common, so many bytes for each of them, and which members
        those of this host are (collective). None where all share one host, and on hosts with too little memory.
        """
        queue, peers = self.queue(number), self.peers
        if peers is None or not peers.spans_hosts(queue.ranks):
            return None, []
        near = [queue.ranks.index(rank) for rank in peers.beside(queue.ranks)]
        segment = self._request(number, Kind.SHARED_MEMORY, number, num_bytes, True).answer
        return (None if segment is None else SharedMemory(segment)), near

    def host_link(self, lane: Lane) -> HostLink:
        """Connect a lane of this host's members with the other hosts (collective): links are made in one order."""
        queue, peers = lane.queue, self.peers
        assert peers is not None
        number, ranks, agreement = queue.process_set_id, queue.ranks, queue.agreement
        assert isinstance(agreement, TreeAgreement), agreement
        label = self._label(number)
        self._num_links[label] = self._num_links.get(label, 0) + 1
        label = f"{label}/lane{self._num_links[label]}"

        def connect(times: int, check_alive: AliveCheck) -> HierarchicalTransport:
            return between_hosts(peers.topology(f"{label}.{times}", "cpu", ranks, check_alive), LocalTransport())

        def lacking(key: Key, members: Sequence[int]) -> list[int]:
            return [ranks.index(rank) for rank in agreement.lacking(key, [ranks[member] for member in members])]

        return HostLink(lane, connect, lacking)

    def _check_dynamic(self, what: str) -> None:
        if not self._own_config.dynamic_process_sets:
            raise ValueError(
                f"{what} needs dynamic process sets: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), "
                'or call hvd.init(process_sets="dynamic")'
            )
        self._status.check_open()

    def _request(self, number: int, kind: Kind, *values: int) -> Request:
        queue = self.queue(number)
        request = Request(Signature(int(kind), kind.name.lower(), None, extra=values))
        queue.submit(request, background=False)
        queue.result(request)
        return request

    def _execute(self, batch: Batch) -> int | Segment | None:
        """Do what `_request` asked when all have agreed to it, on the thread that drives the queue."""
        values = batch.signature.extra
        if batch.kind is Kind.ADD_PROCESS_SET:
            return self.register(values)
        if batch.kind is Kind.SHARED_MEMORY:
            assert self.peers is not None
            number, num_bytes, for_each = values
            near = self.peers.beside(self.ranks(number))
            return self.peers.share_or_none(
                f"{self._label(number)}/memory", near, num_bytes * (len(near) if for_each else 1)
            )
        self._remove(*values)
        return None

    def _remove(self, number: int) -> None:
        if number not in self._sets:
            return  # two threads have asked for it
        if number in self._queues:
            ranks = list(self._sets[number])
            self._queues[number].retire(f"the process set {number} with the ranks {ranks} has been removed")
        with self._messages_lock:
            del self._sets[number], self._serials[number]
            self._queues.pop(number, None)
            self._repeated.pop(number, None)
            self.known_allreduces.clear()

    def register(self, ranks: tuple[int, ...]) -> int:
        """Add a set under the lowest free number (collective)."""
        number = next(candidate for candidate in itertools.count() if candidate not in self._sets)
        serial = self._serials[number] = self._num_registered + 1  # on every rank, whether a member or not
        queue = self._make_queue(number, ranks) if self._world.rank in ranks else None
        with self._messages_lock:  # the hub's thread must neither drop a message now nor deliver one before early ones
            self._num_registered = serial
            if queue is not None:
                self._queues[number] = queue
                native = library()
                if isinstance(queue.agreement, SharedMemoryAgreement) and native is not None:
                    self._repeated[number] = RepeatedAllreduce(queue, queue.agreement, native)
            self._sets[number] = ranks
            for message in self._early.pop(serial, []):
                self._deliver(serial, *message)
        return number

    def _label(self, number: int) -> str:
        """Names a set for good: numbers are used again, and what an earlier set left behind must not be found."""
        return f"set{number}.{self._serials[number]}"

    # What the hub reports, on its thread.

    def deliver(self, serial: int, rank: int, header: Header, payload: bytes) -> None:
        """A neighbour in the tree of a set says something. Late words of a removed set are for no set."""
        with self._messages_lock:
            self._deliver(serial, rank, header, payload)

    def _deliver(self, serial: int, rank: int, header: Header, payload: bytes) -> None:
        if serial > self._num_registered:
            self._early.setdefault(serial, []).append((rank, header, payload))
        elif (agreement := self._trees().get(serial)) is not None:
            agreement.receive(rank, header, payload)

    def _trees(self) -> dict[int, TreeAgreement]:
        """The agreements of the sets that span hosts, by serial number."""
        queues = list(self._queues.items())
        return {
            self._serials[number]: queue.agreement
            for number, queue in queues
            if isinstance(queue.agreement, TreeAgreement)
        }

    def rounds(self) -> dict[int, int]:
        """Return how many rounds this rank has executed of each set that spans hosts, by serial number."""
        return {serial: agreement.rounds for serial, agreement in self._trees().items()}

    def lacks(self, rounds: Mapping[int, int]) -> bool:
        """Return whether another rank has executed rounds of a set that have not come here."""
        return any(agreement.num_delivered < rounds.get(serial, 0) for serial, agreement in self._trees().items())

    def in_flight(self, serial: int) -> list[Key]:
        """Return the requests of this rank in flight in a set."""
        numbers = [number for number, known in list(self._serials.items()) if known == serial]
        return [key for number in numbers if number in self._queues for key in self._queues[number].keys_in_flight()]

    def inspect(self) -> None:
        """Look for stalls."""
        for agreement in self._trees().values():
            agreement.tick()
        for queue in self.queues():
            queue.inspect()

    # The end.

    def drain(self) -> None:
        """Execute what was agreed before this rank began to leave."""
        for queue in self.queues():
            queue.drain()
            queue.settle()

    def say_goodbye_if_idle(self) -> None:
        """Tell the rank that leaves that nothing more is needed of it."""
        hub = None if self.peers is None else self.peers.hub
        if hub is None or self._world.rank in hub.goodbyes:
            return
        if not any(queue.num_in_flight for queue in self.queues()):
            hub.leave(self._status.reason, self.rounds())

    def close(self) -> None:
        """End all queues."""
        for queue in self.queues():
            queue.close()
        self._queues.clear()
        self._repeated.clear()
        self.known_allreduces.clear()

    # Making a queue.

    def _make_queue(self, number: int, ranks: tuple[int, ...]) -> OperationQueue:
        member, config = ranks.index(self._world.rank), self._config
        status, recorder = self._status, self._recorder
        return OperationQueue(
            number,
            ranks,
            QueueWorld(self._world.rank, status, recorder, self._execute, self.say_goodbye_if_idle, self._core()),
            agreement=self._make_agreement(number, ranks, member),
            planner=Planner(
                ranks,
                fusion_threshold_bytes=config.fusion_threshold_bytes,
                group_fusion=not config.disable_group_fusion,
            ),
            stall=self._stall_limits(number, ranks, member),
            make_transport=functools.partial(self._make_transport, number, ranks),
        )

    @property
    def _config(self) -> EngineConfig:
        """The settings, with rank 0's where all ranks must have the same."""
        return self._own_config if self.peers is None else self.peers.config

    def _make_agreement(self, number: int, ranks: tuple[int, ...], member: int) -> Agreement:
        if len(ranks) == 1:
            return LocalAgreement()
        peers, capacity = self.peers, self._config.cache_capacity
        assert peers is not None
        if peers.can_share(ranks):
            num_bytes = SharedMemoryAgreement.num_bytes(len(ranks))
            segment = peers.share(f"{self._label(number)}/control", ranks, num_bytes)
            return SharedMemoryAgreement(segment, member, len(ranks), cache_capacity=capacity)
        return TreeAgreement(peers.hub, self._serials[number], peers.set_tree(ranks), ranks, cache_capacity=capacity)

    def _make_transport(self, number: int, ranks: tuple[int, ...], device: str) -> Transport:
        if self.peers is None or len(ranks) == 1:
            return LocalTransport()
        topology = self.peers.topology(self._label(number), device, ranks, self._status.check_alive)
        return make_transport(topology, device, lambda other: self._queues[number].transport(other))

    def _stall_limits(self, number: int, ranks: Sequence[int], member: int) -> StallLimits | None:
        """The first member of a set looks out for stalls."""
        config = self._own_config
        if member != 0 or len(ranks) == 1 or config.stall_check_disable:
            return None
        if 0 < config.stall_shutdown_s < config.stall_warning_s and number == 0:
            log.warning(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is below HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                config.stall_shutdown_s,
                config.stall_warning_s,
            )
        return StallLimits.of(config)

    def _core(self) -> int | None:
        cores, local_rank = self._own_config.thread_affinity, self._world.local_rank
        if not cores:
            return None
        if local_rank >= len(cores) or cores[local_rank] not in os.sched_getaffinity(0):
            raise ValueError(
                f"HOROVOD_THREAD_AFFINITY must name a core of {sorted(os.sched_getaffinity(0))} for every local rank, "
                f"but it is {','.join(map(str, cores))} and this is local rank {local_rank}"
            )
        return cores[local_rank]


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set, sorted. ValueError for what is no set of ranks of this world."""
    values = sorted(ranks)
    if not values:
        raise ValueError("a process set needs at least one rank")
    if len(set(values)) != len(values):
        raise ValueError(f"a process set must not name a rank twice: {values}")
    if values[0] < 0 or values[-1] >= size:
        raise ValueError(f"a process set of this world may hold the ranks 0..{size - 1}, but it was given {values}")
    return tuple(values)
