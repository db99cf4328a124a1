"""The process sets of a world: which exist, and the queue of each one that this rank is a member of.

All ranks register and remove sets in the same order, so that numbers and labels agree. Announcements from other hosts may
come before this rank has registered the set they are for; they are kept until it has.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from hora.config import EngineConfig
from hora.engine.agree.agreement import Agreement, HubAgreement, LocalAgreement, ShmAgreement
from hora.engine.peers import Peers
from hora.engine.plan import Planner
from hora.engine.queue import OperationQueue, QueueHost
from hora.engine.stall import StallInspector
from hora.engine.status import WorldStatus
from hora.world import World

__all__ = ["ProcessSets"]

log = logging.getLogger("hora")


class ProcessSets:
    """Number 0 is the world itself. `peers` is set before the first set is registered, in a world of several ranks."""

    def __init__(self, world: World, config: EngineConfig, status: WorldStatus, host: QueueHost) -> None:
        self.peers: Peers | None = None
        self._world = world
        self._config = config
        self._status = status
        self._host = host
        self._sets: dict[int, tuple[int, ...]] = {}
        self._queues: dict[int, OperationQueue] = {}
        self._serials: dict[int, int] = {}
        self._num_registered = 0
        self._early_rounds: dict[int, list[list[tuple[int, bytes]]]] = {}
        self._rounds_lock = threading.Lock()

    def as_dict(self) -> dict[int, list[int]]:
        return {number: list(ranks) for number, ranks in sorted(self._sets.items())}

    def __contains__(self, number: int) -> bool:
        return number in self._sets

    def ranks(self, number: int) -> tuple[int, ...]:
        """The members. ValueError for a set that does not exist."""
        ranks = self._sets.get(number)
        if ranks is None:
            raise ValueError(f"Process set {number} does not exist, or has not been registered")
        return ranks

    def find(self, ranks: tuple[int, ...]) -> int | None:
        """The number of the set with exactly these members."""
        return next((number for number, known in self._sets.items() if known == ranks), None)

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

    def label(self, number: int) -> str:
        """Names a set for good: numbers are used again, and what an earlier set left behind must not be found."""
        return f"set{number}.{self._serials[number]}"

    def register(self, ranks: tuple[int, ...]) -> int:
        """Add a set under the lowest free number (collective)."""
        number = next(candidate for candidate in itertools.count() if candidate not in self._sets)
        self._num_registered += 1  # on every rank, whether a member or not
        self._serials[number] = self._num_registered
        queue = self._make_queue(number, ranks) if self._world.rank in ranks else None
        with self._rounds_lock:  # the hub's thread must neither drop a round now nor deliver one before the early ones
            if queue is not None:
                self._queues[number] = queue
            self._sets[number] = ranks
            for parts in self._early_rounds.pop(number, []):
                self._deliver(number, parts)
        return number

    def remove(self, number: int) -> None:
        """Forget a set (collective)."""
        self._sets.pop(number, None)
        queue = self._queues.pop(number, None)
        if queue is not None:
            queue.close()

    def close(self) -> None:
        """End all queues."""
        for queue in self.queues():
            queue.close()
        self._queues.clear()

    def deliver(self, number: int, parts: list[tuple[int, bytes]]) -> None:
        """Announcements of members on other hosts. On the hub's thread."""
        with self._rounds_lock:
            self._deliver(number, parts)

    def _deliver(self, number: int, parts: list[tuple[int, bytes]]) -> None:
        queue = self._queues.get(number)
        if queue is not None and isinstance(queue.agreement, HubAgreement):
            queue.agreement.deliver(parts)
        elif number not in self._sets:
            self._early_rounds.setdefault(number, []).append(parts)

    def _make_queue(self, number: int, ranks: tuple[int, ...]) -> OperationQueue:
        member = ranks.index(self._world.rank)
        planner = Planner(
            ranks,
            fusion_threshold_bytes=self._setting("fusion_threshold_bytes"),
            group_fusion=not self._setting("disable_group_fusion"),
        )
        return OperationQueue(
            number,
            ranks,
            member,
            agreement=self._make_agreement(number, ranks, member),
            planner=planner,
            stall=self._make_stall_inspector(number, ranks, member),
            status=self._status,
            host=self._host,
            core=self._core(),
        )

    def _make_stall_inspector(self, number: int, ranks: Sequence[int], member: int) -> StallInspector | None:
        """The first member of a set looks out for stalls."""
        config = self._config
        if member != 0 or len(ranks) == 1 or config.stall_check_disable:
            return None
        stall = StallInspector(ranks, warning_s=config.stall_warning_s, shutdown_s=config.stall_shutdown_s)
        if stall.refused_shutdown_s and number == 0:
            log.warning(
                "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=%g is below HOROVOD_STALL_CHECK_TIME_SECONDS=%g: ignored",
                stall.refused_shutdown_s,
                config.stall_warning_s,
            )
        return stall

    def _make_agreement(self, number: int, ranks: tuple[int, ...], member: int) -> Agreement:
        if len(ranks) == 1:
            return LocalAgreement()
        peers, capacity = self.peers, self._config.cache_capacity
        assert peers is not None
        if peers.share_memory(ranks):
            num_bytes = ShmAgreement.num_bytes(len(ranks))
            segment = peers.share(f"{self.label(number)}/control", ranks, num_bytes)
            return ShmAgreement(segment, member, len(ranks), cache_capacity=capacity)
        send = functools.partial(peers.hub.announce, number, member)
        return HubAgreement(send, len(ranks), cache_capacity=capacity)

    def _setting(self, name: str) -> Any:
        """A setting that all ranks must share."""
        return getattr(self._config, name) if self.peers is None else self.peers.setting(name)

    def _core(self) -> int | None:
        cores, local_rank = self._config.thread_affinity, self._world.local_rank
        if not cores:
            return None
        if local_rank >= len(cores) or cores[local_rank] not in os.sched_getaffinity(0):
            raise ValueError(
                f"HOROVOD_THREAD_AFFINITY must name a core of {sorted(os.sched_getaffinity(0))} for every local rank, "
                f"but it is {','.join(map(str, cores))} and this is local rank {local_rank}"
            )
        return cores[local_rank]
