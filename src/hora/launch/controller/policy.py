"""Policy of a job: the facts, the decisions, and the policy of a job that never changes size.

Pure: no process, no clock, no socket. The controller collects the facts, asks its policy and acts. A worker keeps its
number for life; a generation gives ranks to some workers. Jobs of fixed size have one generation; `elastic_policy`
decides for elastic jobs. A worker's states:

    starting --asks for a place--> ready --a generation has one for it--> working --+--> succeeded
                                     ^                                              +--> failed
                                     +----------- the world broke or changed -------+
    left: dismissed (no place any more, or its host is barred); the job ignores its exit
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hora.launch.slots import Slot, place_ranks

_READ_WHILE_LOADING = (b"_NUM_THREADS", b"KMP_", b"GOMP_", b"MKL_", b"OPENBLAS_", b"TORCH_", b"LD_PRELOAD")

# What takes a rank long to import, and the words by which a pickled function shows that it will: torch, what imports
# much of Hora, and what torch imports when an optimizer is made, which takes as long as torch. Not pyarrow: it starts a
# thread.
_LOADED_IN_ADVANCE = {
    "torch": (b"torch",),
    "horovod.torch": (b"horovod.torch",),
    "hora.spark.estimator.training": (b"hora.spark.estimator.training",),
    "torch._dynamo": (b"torch", b"optim"),
}

# How long a process may take to end after the function has returned on every rank.
LINGER_LIMIT_S = 30.0
# How long to wait for the cause after a rank reports that another rank is lost.
ROOT_CAUSE_WAIT_S = 2.0
# A process that closes its connection exits at once: one that lives longer was disconnected.
# It may reconnect within this time.
LOST_LIMIT_S = 10.0
LOST = "its connection to the launcher was lost"

HostSlot = tuple[str, int]  # a host, and the number of one of its slots


class WorkerState(Enum):
    STARTING = auto()
    READY = auto()
    WORKING = auto()
    SUCCEEDED = auto()
    FAILED = auto()
    LEFT = auto()


_ALIVE = (WorkerState.STARTING, WorkerState.READY, WorkerState.WORKING)


@dataclass(kw_only=True)
class Worker:
    """A process of the job. `generation`: the last one in which it had a place (-1: none so far), `first_generation`:
    the first one.

    `since`: when it entered its state. `started`, `joined`, `exited`: its process runs, has connected, has ended
    (with this `code`).
    `written_off`: it failed, and the job goes on without it. `lost_at`: when its connection ended without a good-bye.
    `silent_since`: since when it does not answer (None: it does).
    """

    number: int
    host: str
    slot: int
    state: WorkerState
    generation: int = -1
    first_generation: int = -1
    since: float = 0.0
    started: bool = False
    joined: bool = False
    exited: bool = False
    code: int = -1
    written_off: bool = False
    lost_at: float | None = None
    silent_since: float | None = None

    def needs_the_others(self, generation: int) -> bool:
        """Return whether this worker waits for the working members of its generation, or is dead and stops them."""
        if self.state is WorkerState.FAILED:
            return self.generation == generation
        return self.state in (WorkerState.READY, WorkerState.SUCCEEDED)

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE

    def enter(self, state: WorkerState, now: float) -> None:
        self.state, self.since = state, now


def assign(workers: Sequence[Worker]) -> dict[int, Slot]:
    """Assign ranks in the given order. Local ranks follow the slots, so that a worker keeps its device."""
    slots = place_ranks([worker.host for worker in workers], local_order=[worker.slot for worker in workers])
    return {worker.number: slot for worker, slot in zip(workers, slots, strict=True)}


def provisional(host: str, slot: int, num_slots: int, *, num_ranks: int) -> Slot:
    """Return a new worker's place until a generation includes it: its future device, and the rank after the existing
    ones.
    """
    return Slot(
        hostname=host,
        rank=num_ranks,
        local_rank=slot,
        cross_rank=0,
        size=num_ranks + 1,
        local_size=max(num_slots, slot + 1),
        cross_size=1,
    )


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first sign of a worker's failure. `consequence`: it only reports the loss of the worker `blames`."""

    worker: int
    at: float
    code: int
    reason: str = ""
    consequence: bool = False
    blames: int | None = None


@dataclass(kw_only=True)
class Facts:
    """State of a job, which its controller keeps. `workers`: all that it ever had, by number. `failures`: of this
    generation, in the order seen, at most one per worker. `begun_at`: when the first generation was started.

    The rest is for elastic jobs. `hosts`: usable slots by host; `barred`: hosts that are unusable, for a while or
    forever; `may_grow`: discovery may find more slots; `notified`: the workers were told to stop at the next commit;
    `short_since`: since when there are too few workers.
    """

    generation: int = -1
    workers: list[Worker] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    begun_at: float = 0.0
    hosts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    may_grow: bool = False
    num_resets: int = 0
    notified: bool = False
    short_since: float = 0.0

    def add(self, host: str, slot: int, state: WorkerState, now: float) -> int:
        """Add a worker; return its number."""
        number = len(self.workers)
        self.workers.append(Worker(number=number, host=host, slot=slot, state=state, since=now))
        return number

    def begin(self, members: Collection[int], now: float) -> None:
        """Begin a generation: its members work; earlier members without a place in it leave."""
        self.num_resets += self.generation >= 0
        self.generation += 1
        self.notified = False
        self.failures.clear()  # the job has got over them
        for worker in self.workers:
            if worker.number in members:
                worker.enter(WorkerState.WORKING, now)
                worker.first_generation = self.generation if worker.generation < 0 else worker.first_generation
                worker.generation = self.generation
            elif worker.state is WorkerState.READY and worker.generation >= 0:
                worker.enter(WorkerState.LEFT, now)

    def saved(self) -> dict[str, Any]:
        """Return what the next leader must know."""
        workers = [
            [w.number, w.host, w.slot, w.state.name, w.generation, w.first_generation, w.joined, w.written_off]
            for w in self.workers
        ]
        return {"generation": self.generation, "num_resets": self.num_resets, "workers": workers}

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Take over the previous leader's workers: those that were connected count as lost until they reconnect."""
        self.generation, self.num_resets = int(saved["generation"]), int(saved["num_resets"])
        self.begun_at = self.short_since = now
        for number, host, slot, state, generation, first, joined, written_off in saved["workers"]:
            worker = Worker(number=number, host=host, slot=slot, state=WorkerState[state], since=now, started=True)
            worker.generation, worker.first_generation = generation, first
            worker.joined, worker.written_off, worker.exited = joined, written_off, not worker.alive
            worker.lost_at = now if worker.alive and joined else None
            self.workers.append(worker)


class Decision:
    """Orders for the controller. `waits_for_more`: there are still too few workers, and the time limit keeps
    running.
    """

    waits_for_more = False


@dataclass(frozen=True)
class Begin(Decision):
    """Start the first generation's workers in these places."""

    places: tuple[HostSlot, ...]


@dataclass(frozen=True)
class Wait(Decision):
    """Wait until that time or the next event."""

    until: float | None
    waits_for_more: bool = False


@dataclass(frozen=True)
class EndJob(Decision):
    """The job has succeeded."""


@dataclass(frozen=True)
class Fail(Decision):
    """The job cannot continue: because of this failure (the root cause), the message's reason, or both."""

    failure: Failure | None
    message: str = ""


@dataclass(frozen=True)
class GiveUp(Decision):
    """Something did not happen in time."""

    message: str


class _Interim(Decision):
    """A decision on the way to enough workers."""

    waits_for_more = True


@dataclass(frozen=True)
class WriteOff(_Interim):
    """Continue without these failed workers and bar their places."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class StartWorkers(_Interim):
    """Start newcomers in these places."""

    places: tuple[HostSlot, ...]


@dataclass(frozen=True)
class End(_Interim):
    """End these workers. `failed`: their fault, so that their places are barred."""

    workers: tuple[int, ...]
    why: str
    failed: bool


@dataclass(frozen=True)
class Notify(Decision):
    """Tell the workers that the next commit is a good moment to stop. `change`: flags."""

    change: int


@dataclass(frozen=True)
class Publish(Decision):
    """The next generation consists of these workers, the one with rank 0 first."""

    workers: tuple[int, ...]


class FixedSize:
    """Policy of a job of fixed size: one failure ends it.

    `needs_results`: workers must connect, within `start_timeout_s`, and return a value.
    """

    elastic = False
    watches_silence = False

    def __init__(self, places: Sequence[HostSlot], *, needs_results: bool, start_timeout_s: float) -> None:
        self._places = tuple(places)
        self._needs_results, self._start_timeout_s = needs_results, start_timeout_s

    def decide(self, facts: Facts, now: float) -> Decision:
        if facts.generation < 0:
            return Begin(self._places)
        if facts.failures:
            return self._judge(facts, now)
        if all(worker.exited for worker in facts.workers):
            return EndJob()
        if all(worker.state is WorkerState.SUCCEEDED for worker in facts.workers):
            # A thread or child that the function leaves behind must not delay the results.
            limit = max(worker.since for worker in facts.workers) + LINGER_LIMIT_S
            return EndJob() if now >= limit else Wait(limit)
        lost = [
            (w.lost_at, w.number) for w in facts.workers if w.lost_at is not None and w.alive and self._needs_results
        ]
        if lost and now >= min(lost)[0] + LOST_LIMIT_S:  # it may run forever, but its result can no longer arrive
            lost_at, number = min(lost)
            return Fail(Failure(worker=number, at=lost_at, code=1, reason=LOST))
        missing = [
            w.number for w in facts.workers if not (w.exited or (w.joined if self._needs_results else w.started))
        ]
        deadline = facts.begun_at + self._start_timeout_s
        if not missing or now < deadline:
            deadlines = [deadline] * bool(missing) + [lost_at + LOST_LIMIT_S for lost_at, _ in lost]
            return Wait(min(deadlines, default=None))
        what = "connect to the launcher" if self._needs_results else "start"
        return GiveUp(
            f"Timed out waiting for {len(missing)} of {len(facts.workers)} processes to {what}. "
            f"Missing ranks: {missing}. Raise --start-timeout (HOROVOD_START_TIMEOUT) if they need longer. "
            f"Timeout after {self._start_timeout_s:g} seconds."
        )

    def _judge(self, facts: Facts, now: float) -> Wait | Fail:
        cause = root_cause(facts.failures)
        assert cause is not None
        if cause.consequence:
            for worker in facts.workers:
                if worker.number == cause.blames and worker.state is WorkerState.SUCCEEDED:
                    reason = (
                        f"it was done, with status 0, while rank {cause.worker} still needed it: did it leave early?"
                    )
                    return Fail(Failure(worker=worker.number, at=worker.since, code=1, reason=reason))
            # A report of a lost peer often arrives before the peer's own exit.
            limit = cause.at + ROOT_CAUSE_WAIT_S
            if now < limit and not all(worker.exited for worker in facts.workers):
                return Wait(limit)
            cause = next((failure for failure in facts.failures if failure.worker == cause.blames), cause)
        return Fail(cause)


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure that is not the consequence of another, else the first one, else None."""
    return next((failure for failure in failures if not failure.consequence), next(iter(failures), None))


def modules_to_preload(function: bytes) -> tuple[str, ...] | None:
    """Return the modules to load once per host before workers are forked: those that the pickled function names and
    will import anyway. None: workers must be executed, because the function sets variables that torch reads at import.
    """
    if any(name in function for name in _READ_WHILE_LOADING):
        return None
    return tuple(name for name, words in _LOADED_IN_ADVANCE.items() if all(word in function for word in words))
