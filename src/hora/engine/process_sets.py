"""The process sets of a world: a queue for each.

Set number 0 is the world itself. All ranks register and remove sets in the same order, so that numbers and labels
agree. `add_process_set`, `remove_process_set`, `shared_memory` and `host_memory` are requests like any other: the
members agree on them, and `_execute` executes them. Messages about a set from other hosts may arrive before this rank
has registered it; they are kept until then. A group is a set that only its members register.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hora.config import EngineConfig
from hora.engine.bootstrap import Bootstrap
from hora.engine.control_tree import Whereabouts
from hora.engine.negotiation.base import LocalNegotiation, Negotiation
from hora.engine.negotiation.shared_memory import SharedMemoryNegotiation
from hora.engine.negotiation.tree import TreeNegotiation
from hora.engine.plan import Batch, BatchPlanner
from hora.engine.queue import OBJECTS, OperationQueue, QueueWorld
from hora.engine.repeated import CallPlan, KnownAllreduces, RepeatedCalls
from hora.engine.request import Key, Kind, Request, Signature
from hora.engine.schedule import ReductionSchedule
from hora.engine.shm.segment import Segment, SharedMemory
from hora.engine.status import StallLimits, TimelineRecorder, WorldStatus
from hora.engine.transport.base import AliveCheck, LocalTransport, Transport
from hora.engine.transport.factory import between_hosts, make_transport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.host_reduction import HostLink
from hora.errors import HorovodInternalError
from hora.net.wire import Header
from hora.telemetry.stacks import current_line
from hora.world import World

_FIRST_GROUP = 2**32  # numbers of groups


class SetsRuntime(Protocol):
    """The part of a `Runtime` that its process sets use."""

    world: World
    config: EngineConfig
    status: WorldStatus
    recorder: TimelineRecorder

    @property
    def peers(self) -> Bootstrap: ...

    @property
    def sharing(self) -> list[list[int]]: ...

    def spans_hosts(self, process_set_id: int) -> bool: ...

    def leave_if_idle(self) -> None: ...

    def lines_of(self, ranks: Sequence[int], number: int = 0, key: Key | None = None) -> dict[int, str]: ...


class _Set(NamedTuple):
    """A process set. `serial` counts registrations, equally on every rank; numbers are reused."""

    ranks: tuple[int, ...]
    serial: int
    queue: OperationQueue | None = None  # if this rank is a member
    repeated: RepeatedCalls | None = None  # where the members share a host


class ProcessSets:
    """The sets of a runtime's world."""

    def __init__(self, runtime: SetsRuntime) -> None:
        self.known_allreduces = KnownAllreduces()
        self._runtime, self._world = runtime, runtime.world
        self._sets: dict[int, _Set] = {}
        self._serials: set[int] = set()  # of all sets that were ever registered
        self._num_registered = 0  # by all ranks
        self._num_links: dict[int, int] = {}  # created links, by serial number of the set
        self._early: dict[int, list[tuple[int, Header, bytes]]] = {}  # messages for future sets, by serial number
        self._num_groups: Counter[tuple[str, tuple[int, ...]]] = Counter()  # by name and ranks
        self._lock = threading.RLock()  # of messages

    def close(self) -> None:
        """End all queues. The sets' ranks stay known."""
        for queue in self.queues():
            queue.close()
        self._sets = {number: _Set(one.ranks, one.serial) for number, one in self._sets.items()}
        self.known_allreduces.table.clear()

    def process_sets(self) -> dict[int, list[int]]:
        """Return the ranks of every set, by number."""
        return {number: list(one.ranks) for number, one in sorted(self._sets.items())}

    def ranks(self, number: int) -> tuple[int, ...]:
        """Return the members of a set. Raises ValueError if it does not exist."""
        found = self._sets.get(number)
        if found is None:
            raise ValueError(f"Process set {number} does not exist, or has not been registered")
        return found.ranks

    def queue(self, number: int) -> OperationQueue:
        """Return the queue of a set. Raises ValueError if it does not exist or this rank is not in it."""
        found = self._sets.get(number)
        if found is None or found.queue is None:
            raise ValueError(
                f"Rank {self._world.rank} is not a member of the provided process set {number}, "
                f"which has the ranks {list(self.ranks(number))}"
            )
        return found.queue

    def queues(self) -> list[OperationQueue]:
        """Return the queues of the sets that this rank is in, by number. Thread-safe."""
        return [one.queue for _, one in sorted(self._sets.copy().items()) if one.queue is not None]

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set on all ranks (collective); returns its number."""
        self._check_dynamic("add_process_set")
        wanted = checked_ranks(ranks, self._world.size)
        number = next((number for number, known in self._sets.items() if known.ranks == wanted), None)
        if number is not None:
            raise ValueError(f"a process set with the ranks {list(wanted)} exists already: number {number}")
        return int(self._request(0, Kind.ADD_PROCESS_SET, *wanted).answer)

    def set_of_this_host(self) -> int:
        """Return the number of this host's set, registering the sets of all hosts if needed (collective)."""
        hosts = [tuple(host) for host in self._runtime.sharing]
        for host in hosts:
            if host not in [known.ranks for known in self._sets.values()]:
                self._request(0, Kind.ADD_PROCESS_SET, *host)
        (mine,) = (host for host in hosts if self._world.rank in host)
        return next(number for number, known in sorted(self._sets.items()) if known.ranks == mine)

    def remove_process_set(self, number: int) -> bool:
        """Remove a set on all ranks (collective). Returns False for the global set and unknown ones."""
        self._check_dynamic("remove_process_set")
        if number == 0 or number not in self._sets:
            return False
        self._request(0, Kind.REMOVE_PROCESS_SET, number)
        return True

    def _check_dynamic(self, what: str) -> None:
        if not self._runtime.config.dynamic_process_sets:
            raise ValueError(
                f"{what} needs dynamic process sets: set HOROVOD_DYNAMIC_PROCESS_SETS=1 before hvd.init(), "
                'or call hvd.init(process_sets="dynamic")'
            )
        self._runtime.status.check_open()

    def _request(self, number: int, kind: Kind, *values: int) -> Request:
        request = request_without_tensors(kind, values)
        self.queue(number).submit(request, background=False)
        request.result()
        return request

    def _execute(self, batch: Batch) -> int | Segment | None:
        """Execute a request of `_request` once all have agreed to it, on the thread that drives the queue."""
        values = batch.signature.extra
        if batch.kind is Kind.ADD_PROCESS_SET:
            return self.register(values)
        if batch.kind is Kind.SHARED_MEMORY:
            number, num_bytes, for_each = values
            peers, key = self._runtime.peers, f"set{self.serial(number)}/memory"
            near = peers.beside(self.ranks(number))
            return peers.share_or_none(key, near, num_bytes * (len(near) if for_each else 1))
        self._remove(*values)
        return None

    def register(self, ranks: tuple[int, ...]) -> int:
        """Add a set under the lowest free number (collective)."""
        number = next(candidate for candidate in itertools.count() if candidate not in self._sets)
        self._num_registered += 1  # on every rank, whether a member or not
        self._add(number, ranks, self._num_registered)
        return number

    def _add(
        self,
        number: int,
        ranks: tuple[int, ...],
        serial: int,
        status: WorldStatus | None = None,
        limit_s: float | None = None,
    ) -> None:
        queue = repeated = None
        if self._world.rank in ranks:
            queue = self._make_queue(number, ranks, serial, status or self._runtime.status, limit_s)
            if isinstance(queue.negotiation, SharedMemoryNegotiation):
                repeated = RepeatedCalls(queue, queue.negotiation)
        # The control tree's thread must neither drop a message now nor deliver one before early ones.
        with self._lock:
            self._serials.add(serial)
            self._sets[number] = _Set(ranks, serial, queue, repeated)
            for message in self._early.pop(serial, []):
                self.deliver(serial, *message)

    def add_group(self, ranks: Sequence[int], name: str, *, limit_s: float) -> OperationQueue:
        """Register a set among its members only (collective). They know one another by the name and the ranks."""
        checked_ranks(ranks, self._world.size)
        status = self._runtime.status.of_group(ranks)
        self._num_groups[name, tuple(ranks)] += 1  # equally on all members
        number = _group_number(name, ranks, self._num_groups[name, tuple(ranks)])
        try:
            self._add(number, tuple(ranks), number, status, limit_s)
        except TimeoutError as error:
            raise HorovodInternalError(
                f"waited {limit_s:g} s for rank {ranks[0]} to make the group {name!r} of the ranks {list(ranks)}"
            ) from error
        return self.queue(number)

    def remove_group(self, number: int) -> None:
        """Release a group on this rank; the others may still use theirs."""
        removed = self._sets.get(number)
        if removed is None or removed.queue is None:
            return
        removed.queue.drain()
        removed.queue.status.close("this process group was destroyed")
        removed.queue.close()
        with self._lock:
            self._sets.pop(number, None)

    def _remove(self, number: int) -> None:
        removed = self._sets.get(number)
        if removed is None:
            return  # two threads have requested it
        if removed.queue is not None:
            ranks = list(removed.ranks)
            removed.queue.retire(f"the process set {number} with the ranks {ranks} has been removed")
        with self._lock:
            del self._sets[number]
            self.known_allreduces.table.clear()

    def status(self, number: int) -> WorldStatus:
        """Return the status of a set: of a group its own, otherwise the world's."""
        found = self._sets.get(number)
        return self._runtime.status if found is None or found.queue is None else found.queue.status

    def serial(self, number: int) -> int:
        """Return the serial number of a set, which is never reused: leftovers of an earlier set must not be found."""
        return self._sets[number].serial

    def _make_queue(
        self, number: int, ranks: tuple[int, ...], serial: int, status: WorldStatus, limit_s: float | None
    ) -> OperationQueue:
        runtime, rank = self._runtime, self._world.rank
        return OperationQueue(
            number,
            ranks,
            QueueWorld(
                rank,
                status,
                runtime.recorder,
                self._execute,
                runtime.leave_if_idle,
                self._core(),
                len(ranks) > 1 and runtime.peers.seals_objects(ranks),
            ),
            negotiation=self._make_negotiation(serial, ranks, status, limit_s),
            planner=BatchPlanner(
                ranks,
                fusion_threshold_bytes=runtime.config.fusion_threshold_bytes,
                group_fusion=not runtime.config.disable_group_fusion,
            ),
            # The first member watches for stalls.
            stall=StallLimits.of(runtime.config) if ranks[0] == rank and len(ranks) > 1 else None,
            make_transport=functools.partial(self._make_transport, number, status),
        )

    def _make_negotiation(
        self, serial: int, ranks: tuple[int, ...], status: WorldStatus, limit_s: float | None
    ) -> Negotiation:
        if len(ranks) == 1:
            return LocalNegotiation()
        peers, capacity = self._runtime.peers, self._runtime.config.cache_capacity
        if peers.can_share(ranks):
            num_bytes = SharedMemoryNegotiation.num_bytes(len(ranks))
            segment = peers.share(
                f"set{serial}/control", ranks, num_bytes, limit_s=limit_s, check_alive=status.check_alive
            )
            return SharedMemoryNegotiation(segment, ranks.index(self._world.rank), len(ranks), cache_capacity=capacity)
        return TreeNegotiation(peers.control_tree, serial, peers.set_tree(ranks), ranks, cache_capacity=capacity)

    def _make_transport(self, number: int, status: WorldStatus, device: str) -> Transport:
        ranks, runtime = self.ranks(number), self._runtime
        if len(ranks) == 1:
            return LocalTransport()
        topology = runtime.peers.topology(
            f"set{self.serial(number)}", device, ranks, status.check_alive, sealed=device == OBJECTS
        )
        return make_transport(topology, "cpu" if device == OBJECTS else device, self.queue(number).transport)

    def _core(self) -> int | None:
        cores, local_rank = self._runtime.config.thread_affinity, self._world.local_rank
        if not cores:
            return None
        if local_rank >= len(cores) or cores[local_rank] not in os.sched_getaffinity(0):
            raise ValueError(
                f"HOROVOD_THREAD_AFFINITY must name a core of {sorted(os.sched_getaffinity(0))} for every local rank, "
                f"but it is {','.join(map(str, cores))} and this is local rank {local_rank}"
            )
        return cores[local_rank]

    def repeated_plan(self, queue: OperationQueue, signature: Signature) -> CallPlan | None:
        """The fast path for a collective of one tensor; None where the members of the set share no host."""
        found = self._sets.get(queue.process_set_id)
        return None if found is None or found.repeated is None else found.repeated.plan(signature)

    def shared_memory(self, number: int, num_bytes: int) -> SharedMemory | None:
        """Allocate zeroed memory shared by all members (collective); None if they share no host or memory is short."""
        ranks = self.queue(number).ranks
        if len(ranks) == 1 or not self._runtime.peers.can_share(ranks):
            return None
        return self._request_memory(number, num_bytes, False)

    def host_memory(self, number: int, num_bytes: int) -> tuple[SharedMemory | None, list[int]]:
        """Allocate zeroed memory that the members of each host share, `num_bytes` for each of them (collective).

        Also returns the members on this host. None if all share one host, and on hosts with too little memory.
        """
        ranks = self.queue(number).ranks
        if not self._runtime.spans_hosts(number):
            return None, []
        near = [ranks.index(rank) for rank in self._runtime.peers.beside(ranks)]
        return self._request_memory(number, num_bytes, True), near

    def _request_memory(self, number: int, num_bytes: int, for_each: bool) -> SharedMemory | None:
        segment = self._request(number, Kind.SHARED_MEMORY, number, num_bytes, for_each).answer
        return None if segment is None else SharedMemory(segment)

    def schedule(
        self, memory: SharedMemory, process_set_id: int = 0, near: Sequence[int] | None = None
    ) -> ReductionSchedule:
        """Return a schedule of the members, or of this host's (`near`), in their shared memory (collective)."""
        queue = self.queue(process_set_id)
        offset = memory.reserve(ReductionSchedule.num_bytes(len(queue.ranks if near is None else near)))
        return ReductionSchedule(queue, memory.segment, offset, limits=StallLimits.of(self._runtime.config), near=near)

    def host_link(self, schedule: ReductionSchedule) -> HostLink:
        """Connect a schedule of this host's members with the other hosts (collective, in the same order on all)."""
        peers, ranks, number = self._runtime.peers, schedule.queue.ranks, schedule.queue.process_set_id
        serial = self.serial(number)
        self._num_links[serial] = self._num_links.get(serial, 0) + 1
        label = f"set{serial}/lane{self._num_links[serial]}"

        def connect(times: int, check_alive: AliveCheck) -> HierarchicalTransport:
            return between_hosts(peers.topology(f"{label}.{times}", "cpu", ranks, check_alive), LocalTransport())

        def lacking(key: Key, members: Sequence[int]) -> list[int]:
            late = self._runtime.lines_of([ranks[member] for member in members], number, key)
            return [ranks.index(rank) for rank in late]

        return HostLink(schedule, connect, lacking)

    def deliver(self, serial: int, rank: int, header: Header, payload: bytes) -> None:
        """Handle a message of a neighbour in the tree of a set. Late messages of a removed set are dropped."""
        with self._lock:
            if serial not in self._serials:
                self._early.setdefault(serial, []).append((rank, header, payload))
            elif (negotiation := self.trees().get(serial)) is not None:
                negotiation.receive(rank, header, payload)

    def trees(self) -> dict[int, TreeNegotiation]:
        """Return the negotiations of the sets that span hosts, by serial number."""
        found = [one.queue.negotiation for one in self._sets.copy().values() if one.queue is not None]
        return {tree.serial: tree for tree in found if isinstance(tree, TreeNegotiation)}

    def whereabouts(self, serial: int) -> Whereabouts:
        """Return what this rank waits for in a set."""
        queues = [one.queue for one in self._sets.copy().values() if one.serial == serial and one.queue is not None]
        return Whereabouts([key for queue in queues for key in queue.keys_in_flight()], current_line())

    def queues_by_serial(self) -> dict[int, OperationQueue]:
        """Return the queues of the sets that this rank is in. Thread-safe."""
        return {one.serial: one.queue for one in self._sets.copy().values() if one.queue is not None}


def _group_number(name: str, ranks: Sequence[int], times: int) -> int:
    """Return the number of a group, which each member computes alone: no rank outside the group takes part."""
    digest = hashlib.blake2b(json.dumps([name, list(ranks), times]).encode(), digest_size=7).digest()
    return _FIRST_GROUP + int.from_bytes(digest, "big")


def request_without_tensors(kind: Kind, extra: tuple[int, ...] = ()) -> Request:
    # Unnamed, so that they are numbered: two barriers of two threads are two barriers.
    return Request(Signature(int(kind), kind.name.lower(), None, extra=extra))


def checked_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the ranks of a process set, sorted. Raises ValueError if they are not a set of ranks of this world."""
    values = sorted(ranks)
    if not values:
        raise ValueError("a process set needs at least one rank")
    if len(set(values)) != len(values):
        raise ValueError(f"a process set must not name a rank twice: {values}")
    if values[0] < 0 or values[-1] >= size:
        raise ValueError(f"a process set of this world may contain the ranks 0..{size - 1}, but it has {values}")
    return tuple(values)
