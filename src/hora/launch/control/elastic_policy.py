"""What to do next in a job whose workers come and go: a pure function of what has happened so far.

No process, no clock, no socket: `elastic` collects the facts and carries out the decision. A worker keeps its number
for life; a generation gives some of them ranks. A worker's states:

    starting --asks for a place--> ready --a generation has one for it--> working --+--> succeeded
                                     ^                                              +--> failed
                                     +----------- the world broke or changed -------+
    left: told to go (no place any more, its host is barred); what becomes of it is nobody's concern

Newcomers boot while the others train on. Only when they are ready are the others told, who then interrupt their
training at the next commit and become ready too. After a failure the next generation begins as soon as nobody works
any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

__all__ = [
    "Begin",
    "Decision",
    "End",
    "Facts",
    "Fail",
    "Finish",
    "GiveUp",
    "HostSlots",
    "Limits",
    "Notify",
    "Publish",
    "Start",
    "State",
    "Wait",
    "Worker",
    "decide",
]

REMOVED, ADDED = 1, 2  # what a notice tells, as flags
# A process whose connection ended normally ends too, at once: longer than that means that it was cut off.
LOST_LIMIT_S = 5.0
# A newcomer that is ready waits so long for others that are still loading.
COMPANY_LIMIT_S = 10.0


class State(Enum):
    STARTING = auto()
    READY = auto()
    WORKING = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    LEFT = auto()


@dataclass(frozen=True, kw_only=True)
class Worker:
    """A process of the job. `generation`: the last one in which it had a place (-1: none so far), `first_generation`:
    the first one.

    `since`: when it entered its state. `lost_at`: when its connection ended without a good-bye. `silent_since`: since
    when it does not answer (None: it does).
    """

    number: int
    host: str
    slot: int
    state: State
    generation: int = -1
    first_generation: int = -1
    since: float = 0.0
    lost_at: float | None = None
    silent_since: float | None = None

    @property
    def alive(self) -> bool:
        return self.state in (State.STARTING, State.READY, State.WORKING)


@dataclass(frozen=True)
class HostSlots:
    """The slots of a host that may be used now."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`stuck_s`: how long a worker may go on alone while another one waits for it in vain; `silent_s`: the same for one
    that does not even answer. `stall_shutdown_s`: how long a worker may be silent in any case (None: for ever)."""

    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    stuck_s: float = 300.0
    silent_s: float = 10.0
    stall_shutdown_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What has happened. `workers` in order of their numbers, `hosts` as discovered.

    `barred`: hosts that are out for a while or for ever. `may_grow`: further slots may turn up by themselves.
    `short_since`: since when there have been too few workers.
    """

    limits: Limits
    generation: int = -1
    workers: Sequence[Worker] = ()
    hosts: Sequence[HostSlots] = ()
    barred: frozenset[str] = frozenset()
    may_grow: bool = False
    num_resets: int = 0
    notified: bool = False
    short_since: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Nothing to do before that time or the next event. `short`: there are too few workers to go on."""

    until: float | None
    short: bool = False


@dataclass(frozen=True)
class Begin:
    """Start workers in these places: the first generation."""

    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Start:
    """Start newcomers in these places."""

    places: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Notify:
    """Tell the workers that the next commit is a good moment to stop. `change`: flags."""

    change: int


@dataclass(frozen=True)
class Publish:
    """The next generation consists of these workers, the one with rank 0 first."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """End these workers. `failed`: their fault, so that their places are barred."""

    workers: tuple[int, ...]
    why: str
    failed: bool


@dataclass(frozen=True)
class Finish:
    """At least one worker has succeeded and none works any more."""


@dataclass(frozen=True)
class Fail:
    """The job cannot go on. Empty: because of what the workers themselves reported."""

    message: str = ""


@dataclass(frozen=True)
class GiveUp:
    """Something did not happen in time."""

    message: str


Decision = Wait | Begin | Start | Notify | Publish | End | Finish | Fail | GiveUp


def decide(facts: Facts, now: float) -> Decision:
    """The next step of the job."""
    if facts.generation < 0:
        return _begin(facts, now)
    ending = _dismiss(facts, now)
    if ending is not None:
        return ending
    current = [worker for worker in facts.workers if worker.generation == facts.generation]
    if any(worker.state is State.WORKING for worker in current):
        return _meanwhile(facts, current, now)
    return _between(facts, current, now)


def _begin(facts: Facts, now: float) -> Decision:
    limits = facts.limits
    places = [(host.name, slot) for host in facts.hosts for slot in host.slots]
    if len(places) >= limits.num_proc:
        return Begin(tuple(places[: limits.max_num_proc]))
    deadline = facts.short_since + limits.elastic_timeout_s
    if now < deadline:
        return Wait(deadline, short=True)
    return GiveUp(
        f"Timed out waiting for {limits.num_proc} slots (-np); there are {len(places)}, on "
        f"{', '.join(f'{host.name}:{len(host.slots)}' for host in facts.hosts) or 'no host'}. Raise --elastic-timeout "
        f"(HOROVOD_ELASTIC_TIMEOUT) if they need longer. Timeout after {limits.elastic_timeout_s:g} seconds."
    )


def _dismiss(facts: Facts, now: float) -> End | None:
    """Workers that have no business here any more."""
    lost = [w for w in facts.workers if w.alive and w.lost_at is not None and now >= w.lost_at + LOST_LIMIT_S]
    if lost:
        return End(_numbers(lost), "its connection to the launcher was lost", failed=True)
    stuck = [w for w in facts.workers if (limit := _stuck_at(facts, w)) is not None and now >= limit]
    if stuck:
        return End(_numbers(stuck), "it does not answer, or went on alone while others waited for it", failed=True)
    usable = _usable(facts)
    idle = [
        w
        for w in facts.workers
        if w.alive and (w.host in facts.barred or (w.generation < 0 and (w.host, w.slot) not in usable))
    ]
    return End(_numbers(idle), "its host is barred or gone", failed=False) if idle else None


def _stuck_at(facts: Facts, worker: Worker) -> float | None:
    """When this worker's silence, or its going on alone, will no longer be tolerated."""
    limits, silent = facts.limits, worker.silent_since
    if not worker.alive:
        return None
    deadlines = []
    if silent is not None and limits.stall_shutdown_s is not None:
        deadlines.append(silent + limits.stall_shutdown_s)
    waiting = [w.since for w in facts.workers if w.generation == facts.generation and w.state is State.READY]
    if waiting and worker.generation == facts.generation and worker.state is State.WORKING:
        deadlines.append(min(waiting) + limits.stuck_s)
        if silent is not None:
            deadlines.append(max(min(waiting), silent) + limits.silent_s)
    return min(deadlines, default=None)


def _meanwhile(facts: Facts, current: Sequence[Worker], now: float) -> Decision:
    """Somebody works: prepare the next generation if there is to be one."""
    deadlines = [limit for w in facts.workers if (limit := _stuck_at(facts, w)) is not None]
    deadlines += [w.lost_at + LOST_LIMIT_S for w in facts.workers if w.alive and w.lost_at is not None]
    if any(worker.state is State.SUCCEEDED for worker in current):
        return Wait(min(deadlines, default=None))
    usable = _usable(facts)
    staying = [w for w in current if w.alive and (w.host, w.slot) in usable]
    newcomers = _newcomers(facts)
    free = _free(facts, len(staying) + len(newcomers))
    if free:
        return Start(free)
    joining = _joining(newcomers, now)
    if newcomers and not joining:
        deadlines += [w.since + COMPANY_LIMIT_S for w in newcomers if w.state is State.READY]
    leaving = [w for w in current if w.alive and (w.host, w.slot) not in usable]
    settled = all(w.alive for w in current) and not facts.notified  # after a failure they stop by themselves
    if settled and (joining or leaving) and len(staying) + len(joining) >= facts.limits.min_num_proc:
        if not staying:
            return Fail(_NOBODY_KNOWS)
        return Notify((REMOVED if leaving else 0) | (ADDED if joining else 0))
    return Wait(min(deadlines, default=None))


_NOBODY_KNOWS = (
    "no worker on any of the hosts that remain has the state of the training: at least one host must stay when others "
    "are replaced"
)


def _between(facts: Facts, current: Sequence[Worker], now: float) -> Decision:
    """Nobody works: the next generation, or the end."""
    limits = facts.limits
    if any(worker.state is State.SUCCEEDED for worker in current):
        return Finish()
    usable = _usable(facts)
    ready = [w for w in current if w.state is State.READY]
    survivors = [w for w in ready if (w.host, w.slot) in usable]
    if not survivors:
        return Fail(_NOBODY_KNOWS if ready else "")
    if limits.reset_limit is not None and facts.num_resets >= limits.reset_limit:
        return Fail(
            "Horovod was shutdown because number of resets during elastic job exceeded limit: "
            f"{limits.reset_limit} (--reset-limit)"
        )
    newcomers = _newcomers(facts)
    chosen = [*survivors, *(w for w in newcomers if w.state is State.READY)][: limits.max_num_proc]
    if len(chosen) >= limits.min_num_proc:
        return Publish(tuple(w.number for w in by_age(chosen)))
    free = _free(facts, len(survivors) + len(newcomers))
    if free:
        return Start(free)
    have = f"{len(chosen)} workers are left, but --min-np is {limits.min_num_proc}"
    if not facts.may_grow and all(w.state is State.READY for w in newcomers):
        return Fail(f"{have}, and no further slots can be expected")
    deadline = facts.short_since + limits.elastic_timeout_s
    if now < deadline:
        return Wait(deadline, short=True)
    return GiveUp(
        f"Timed out waiting for more workers: {have}. Raise --elastic-timeout (HOROVOD_ELASTIC_TIMEOUT) if new ones "
        f"need longer. Timeout after {limits.elastic_timeout_s:g} seconds."
    )


def by_age(workers: Sequence[Worker]) -> list[Worker]:
    """In order of rank: hosts by their oldest worker, and so the ranks of a host. So rank 0 has seen the most."""
    oldest: dict[str, tuple[bool, int, int]] = {}
    for worker in workers:
        oldest[worker.host] = min(oldest.get(worker.host, _age(worker)), _age(worker))
    return sorted(workers, key=lambda worker: (oldest[worker.host], _age(worker)))


def _age(worker: Worker) -> tuple[bool, int, int]:
    """The smaller, the older: a newcomer that took long to boot is younger than one that was started later."""
    return worker.first_generation < 0, worker.first_generation, worker.number


def _newcomers(facts: Facts) -> list[Worker]:
    usable = _usable(facts)
    return [w for w in facts.workers if w.alive and w.generation < 0 and (w.host, w.slot) in usable]


def _joining(newcomers: Sequence[Worker], now: float) -> list[Worker]:
    """The newcomers to let in now: all of them together, unless one of them takes very long."""
    ready = [w for w in newcomers if w.state is State.READY]
    if len(ready) == len(newcomers) or any(now >= w.since + COMPANY_LIMIT_S for w in ready):
        return ready
    return []


def _usable(facts: Facts) -> set[tuple[str, int]]:
    return {(host.name, slot) for host in facts.hosts for slot in host.slots}


def _free(facts: Facts, num_alive: int) -> tuple[tuple[str, int], ...]:
    """Places for newcomers, as many as the limit allows."""
    taken = {(worker.host, worker.slot) for worker in facts.workers if worker.alive}
    free = [(host.name, slot) for host in facts.hosts for slot in host.slots if (host.name, slot) not in taken]
    most = facts.limits.max_num_proc
    return tuple(free if most is None else free[: max(most - num_alive, 0)])


def _numbers(workers: Sequence[Worker]) -> tuple[int, ...]:
    return tuple(worker.number for worker in workers)
