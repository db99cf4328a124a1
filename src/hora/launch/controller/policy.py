"""Policies of jobs: the facts, the decisions, and who makes them for jobs of fixed size and for elastic jobs.

Pure: no process, no clock, no socket. The controller collects the facts, asks its policy and acts. A worker keeps its
number for life; a generation gives ranks to some workers. Jobs of fixed size have one generation. A worker's states:

    starting --asks for a place--> ready --a generation has one for it--> working --+--> succeeded
                                     ^                                              +--> failed
                                     +----------- the world broke or changed -------+
    left: dismissed (no place any more, or its host is barred); the job ignores its exit

In an elastic job new workers start while the others keep training. When they are ready the others are notified, stop at
their next commit and become ready too. After a failure the next generation begins as soon as no worker is working.

A host that discovery no longer lists is not dead. If no listed host has the training state, the workers of the removed
host keep training, admit new workers, and leave one generation later, at a commit, when the new workers have the state.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from hora.launch.slots import Slot, place_ranks

# How long a process may take to end after the function has returned on every rank.
LINGER_LIMIT_S = 30.0
# How long to wait for the cause after a rank reports that another rank is lost.
ROOT_CAUSE_WAIT_S = 2.0
# A process that closes its connection exits at once: one that runs on was disconnected.
# It may reconnect within this time.
LOST_LIMIT_S = 10.0
LOST = "its connection to the launcher was lost"

# Horovod's words, which programs look for.
RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"

REMOVED, ADDED = 1, 2  # what a notice tells, as flags
# How long a new worker that is ready waits for others that are still loading.
NEWCOMER_BATCH_WAIT_S = 10.0

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
    """A process of the job."""

    number: int
    host: str
    slot: int
    state: WorkerState
    generation: int = -1  # the last one in which it had a place; -1: none so far
    first_generation: int = -1  # the first one in which it had a place
    since: float = 0.0  # when it entered its state
    started: bool = False  # its process runs
    joined: bool = False  # it has connected
    exited: bool = False  # its process has ended, with this `code`
    code: int = -1
    written_off: bool = False  # it failed, and the job goes on without it
    lost_at: float | None = None  # when its connection ended without a goodbye
    silent_since: float | None = None  # since when it does not answer; None: it does
    term: int = 0  # of the leader that has started it

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
    """Return a new worker's place until a generation includes it: its future device, and the rank after all others."""
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
    """The first sign of a worker's failure."""

    worker: int
    at: float
    code: int
    reason: str = ""
    consequence: bool = False  # it only reports the loss of another worker
    blames: int | None = None  # that worker

    def __str__(self) -> str:
        return f"failed with exit code {self.code}" + (f" ({self.reason})" if self.reason else "")


@dataclass(kw_only=True)
class Facts:
    """State of a job, which its controller keeps. The fields from `hosts` on are for elastic jobs."""

    generation: int = -1
    workers: list[Worker] = field(default_factory=list)  # all that it ever had, by number
    # Of this generation, in the order seen, at most one per worker
    failures: list[Failure] = field(default_factory=list)
    begun_at: float = 0.0  # when the first generation was started
    hosts: Mapping[str, Sequence[int]] = field(default_factory=dict)  # usable slots, by host
    barred: frozenset[str] = frozenset()  # hosts that are unusable, for a while or forever
    may_grow: bool = False  # discovery may find more slots
    num_resets: int = 0
    notified: bool = False  # the workers were told to stop at the next commit
    short_since: float = 0.0  # since when there are too few workers
    term: int = 0  # of the leader of a job that may have others

    @property
    def usable(self) -> list[HostSlot]:
        """Return the usable places, host by host."""
        return [(host, slot) for host, slots in self.hosts.items() for slot in slots]

    @property
    def members(self) -> list[Worker]:
        """Return the workers that have, or had, a place in this generation."""
        return [worker for worker in self.workers if worker.generation == self.generation]

    @property
    def newcomers(self) -> list[Worker]:
        """Return the workers in usable places that have had no place in a generation."""
        usable = self.usable
        return [w for w in self.workers if w.alive and w.generation < 0 and (w.host, w.slot) in usable]

    def add(self, host: str, slot: int, state: WorkerState, now: float) -> int:
        """Add a worker; return its number."""
        number = len(self.workers)
        self.workers.append(Worker(number=number, host=host, slot=slot, state=state, since=now, term=self.term))
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
            [
                *(w.number, w.host, w.slot, w.state.name, w.generation, w.first_generation, w.joined, w.written_off),
                w.term,
            ]
            for w in self.workers
        ]
        return {"generation": self.generation, "num_resets": self.num_resets, "workers": workers}

    def restore(self, saved: Mapping[str, Any], now: float) -> None:
        """Take over the previous leader's workers: those that were connected count as lost until they reconnect."""
        self.generation, self.num_resets = int(saved["generation"]), int(saved["num_resets"])
        self.begun_at = self.short_since = now
        for number, host, slot, name, generation, first, joined, written_off, term in saved["workers"]:
            state = WorkerState[name]
            worker = Worker(number=number, host=host, slot=slot, state=state, since=now, started=True, term=term)
            worker.generation, worker.first_generation = generation, first
            worker.joined, worker.written_off, worker.exited = joined, written_off, not worker.alive
            worker.lost_at = now if worker.alive and joined else None
            self.workers.append(worker)


@dataclass(frozen=True)
class Begin:
    """Start the first generation's workers in these places."""

    places: tuple[HostSlot, ...]


@dataclass(frozen=True)
class Wait:
    """Wait until that time or the next event."""

    until: float | None
    waits_for_more: bool = False  # there are too few workers, and the time limit runs


@dataclass(frozen=True)
class EndJob:
    """The job has succeeded."""


@dataclass(frozen=True)
class Fail:
    """The job cannot continue: because of this failure (the root cause), the message's reason, or both."""

    failure: Failure | None
    message: str = ""


@dataclass(frozen=True)
class GiveUp:
    """Something did not happen in time."""

    message: str


@dataclass(frozen=True)
class WriteOff:
    """Continue without these failed workers and bar their places."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class StartWorkers:
    """Start newcomers in these places."""

    places: tuple[HostSlot, ...]


@dataclass(frozen=True)
class End:
    """End these workers."""

    workers: tuple[int, ...]
    why: str
    failed: bool  # it was their fault, so their places are barred


@dataclass(frozen=True)
class Notify:
    """Tell the workers that the next commit is a good moment to stop. `change`: flags."""

    change: int


@dataclass(frozen=True)
class Publish:
    """The next generation consists of these workers, the one with rank 0 first."""

    workers: tuple[int, ...]


Decision = Begin | Wait | EndJob | Fail | GiveUp | WriteOff | StartWorkers | End | Notify | Publish


def silent_at_the_end(facts: Facts, now: float, limit_s: float) -> list[int]:
    """Return the workers that have not answered for so long although others have ended: they may be stopped."""
    ends = [worker.since for worker in facts.workers if worker.state is WorkerState.SUCCEEDED]
    if not ends:
        return []
    return [
        worker.number
        for worker in facts.workers
        if worker.alive and worker.silent_since is not None and now >= max(worker.silent_since, min(ends)) + limit_s
    ]


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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of an elastic job: numbers of workers, and how long each wait may take."""

    num_proc: int  # workers to start with
    min_num_proc: int  # with fewer the job waits, and then ends
    max_num_proc: int | None = None  # None: as many as there are slots
    reset_limit: int | None = None  # changes of membership; None: any number
    # The time for enough workers to come, and for a new worker to connect. A command may load its data before it
    # connects, so its time begins when another worker is ready.
    elastic_timeout_s: float = 600.0
    # A worker that trains alone is ended after this long if another one waits for it; so is a silent worker when a
    # newcomer is ready, or when another worker has finished or died.
    stuck_s: float = 300.0
    silent_s: float = 10.0  # a silent worker is ended after this long while another one waits for it
    lost_s: float = 30.0  # a worker whose connection broke may take this long to reconnect
    stall_shutdown_s: float | None = None  # a silent worker is ended after this long in any case; None: never

    def worker_env(self) -> dict[str, str]:
        """Return the limits as variables for the workers, which must not time out before the launcher."""
        return {
            "HOROVOD_ELASTIC_TIMEOUT": str(int(2 * self.elastic_timeout_s + 60)),
            "HORA_LAUNCHER_TIMEOUT": str(int(self.lost_s)),
        }


class ElasticPolicy:
    """The job goes on while enough workers are left. `needs_results`: they have to connect and return a value."""

    elastic = True

    def __init__(self, limits: Limits, *, needs_results: bool = False) -> None:
        self.limits, self._needs_results = limits, needs_results
        self.watches_silence = limits.stall_shutdown_s is not None

    def decide(self, facts: Facts, now: float) -> Decision:
        if facts.generation < 0:
            return self._begin(facts, now)
        failed = [w for w in facts.workers if w.state is WorkerState.FAILED and not w.written_off]
        if failed:
            return WriteOff(_numbers(failed))
        ending = self._dismiss(facts, now)
        if ending is not None:
            return ending
        working = any(worker.state is WorkerState.WORKING for worker in facts.members)
        return self._meanwhile(facts, now) if working else self._between(facts, now)

    def _begin(self, facts: Facts, now: float) -> Decision:
        limits = self.limits
        places = facts.usable
        if len(places) >= limits.num_proc:
            return Begin(tuple(places[: limits.max_num_proc]))
        found = ", ".join(f"{host}:{len(slots)}" for host, slots in facts.hosts.items()) or "no host"
        missing = f"{limits.num_proc} slots (-np); there are {len(places)}, on {found}"
        return self._wait_for_more(facts, now, missing, "they")

    def _wait_for_more(self, facts: Facts, now: float, missing: str, who: str) -> Wait | GiveUp:
        deadline = facts.short_since + self.limits.elastic_timeout_s
        if now < deadline:
            return Wait(deadline, waits_for_more=True)
        return GiveUp(
            f"Timed out waiting for {missing}. Raise --elastic-timeout (HOROVOD_ELASTIC_TIMEOUT) if {who} need longer. "
            f"Timeout after {self.limits.elastic_timeout_s:g} seconds."
        )

    def _dismiss(self, facts: Facts, now: float) -> End | None:
        """Return the decisions for workers that have no place any more."""
        alive, usable = [w for w in facts.workers if w.alive], facts.usable
        if lost := [w for w in alive if now >= self._lost_at(w)]:
            return End(_numbers(lost), LOST, failed=True)
        if stuck := [w for w in alive if now >= self._stuck_at(facts, w)]:
            return End(_numbers(stuck), "it does not answer, or went on alone while others waited for it", failed=True)
        idle = [w for w in alive if w.host in facts.barred or (w.generation < 0 and (w.host, w.slot) not in usable)]
        return End(_numbers(idle), "its host is barred or gone", failed=False) if idle else None

    def _lost_at(self, worker: Worker) -> float:
        """Return when a worker whose connection broke is lost (infinity: never)."""
        return math.inf if worker.lost_at is None else worker.lost_at + self.limits.lost_s

    def _stuck_at(self, facts: Facts, worker: Worker) -> float:
        """Return when a living worker times out, because of its silence or because others wait for it."""
        limits, silent, deadlines = self.limits, worker.silent_since, [math.inf]
        if silent is not None and limits.stall_shutdown_s is not None:
            deadlines.append(silent + limits.stall_shutdown_s)
        if worker.generation != facts.generation or worker.state is not WorkerState.WORKING:
            return min(deadlines)
        waiting = [w.since for w in facts.members if w.state is WorkerState.READY]
        if waiting:
            deadlines.append(min(waiting) + limits.stuck_s)
            if silent is not None:
                deadlines.append(max(min(waiting), silent) + limits.silent_s)
        # Newcomers that are ready, ranks that have finished and those that make up for a dead one wait as long as it
        # answers: it may not commit before the epoch's end, or have a model to write.
        others = [w.since for w in facts.workers if w.needs_the_others(facts.generation)]
        if others and silent is not None:
            deadlines.append(max(min(others), silent) + limits.stuck_s)
        if not worker.joined and (others or self._needs_results):  # it never connected
            deadlines.append(max(min(others, default=0.0), worker.since) + limits.elastic_timeout_s)
        return min(deadlines)

    def _meanwhile(self, facts: Facts, now: float) -> Decision:
        """Decide while workers are working: prepare the next generation if one is due."""
        limits, current = self.limits, facts.members
        deadlines = [min(self._lost_at(w), self._stuck_at(facts, w)) for w in facts.workers if w.alive]
        if any(worker.state is WorkerState.SUCCEEDED for worker in current):
            return _wait(deadlines)
        usable, newcomers = facts.usable, facts.newcomers
        staying = [w for w in current if w.alive and (w.host, w.slot) in usable]
        free = _free(facts, limits, len(staying) + len(newcomers))
        if free:
            return StartWorkers(free)
        joining = [w for w in newcomers if w.state is WorkerState.READY]
        if len(joining) < len(newcomers) and not any(now >= w.since + NEWCOMER_BATCH_WAIT_S for w in joining):
            deadlines += [w.since + NEWCOMER_BATCH_WAIT_S for w in joining]
            joining = []
        leaving = [w for w in current if w.alive and (w.host, w.slot) not in usable]
        settled = all(w.alive for w in current) and not facts.notified  # after a failure they stop by themselves
        if settled and joining and not staying:
            return Notify(ADDED)
        if settled and (joining or leaving) and staying and len(staying) + len(joining) >= limits.min_num_proc:
            return Notify((REMOVED if leaving else 0) | (ADDED if joining else 0))
        return _wait(deadlines)

    def _between(self, facts: Facts, now: float) -> Decision:
        """Decide while no worker is working: begin the next generation, or end the job."""
        limits, current = self.limits, facts.members
        succeeded = [worker for worker in current if worker.state is WorkerState.SUCCEEDED]
        if succeeded:
            linger_until = max(worker.since for worker in current) + LINGER_LIMIT_S
            done = now >= linger_until or all(worker.exited for worker in succeeded)
            return EndJob() if done else Wait(linger_until)
        usable = facts.usable
        ready = [w for w in current if w.state is WorkerState.READY]
        if not ready:
            why = (
                "no worker is left that has the state of the training: "
                "the last ones were on hosts that are barred or gone"
            )
            return Fail(root_cause(facts.failures), "" if facts.failures else why)
        if limits.reset_limit is not None and facts.num_resets >= limits.reset_limit:
            return Fail(
                root_cause(facts.failures), f"{RESET_LIMIT_EXCEEDED_MESSAGE.format(limits.reset_limit)} (--reset-limit)"
            )
        survivors, newcomers = [w for w in ready if (w.host, w.slot) in usable], facts.newcomers
        loaded = [w for w in newcomers if w.state is WorkerState.READY]
        if survivors:
            chosen = [*survivors, *loaded][: limits.max_num_proc]
        else:  # leaving workers hand the state over, which needs a second worker
            oldest, *others = by_age(ready)
            chosen = [oldest, *loaded, *others][: limits.max_num_proc and max(limits.max_num_proc, 2)]
        if len(chosen) >= limits.min_num_proc:
            return Publish(tuple(w.number for w in by_age(chosen)))
        free = _free(facts, limits, len(survivors) + len(newcomers))
        if free:
            return StartWorkers(free)
        have = f"{len(chosen)} workers are left, but --min-np is {limits.min_num_proc}"
        if not facts.may_grow and all(w.state is WorkerState.READY for w in newcomers):
            return Fail(root_cause(facts.failures), f"{have}, and no further slots can be expected")
        return self._wait_for_more(facts, now, f"more workers: {have}", "new ones")


def by_age(workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers in rank order: hosts by their oldest worker, then workers by age. Rank 0 is the oldest."""
    oldest: dict[str, tuple[bool, int, int]] = {}
    for worker in workers:
        oldest[worker.host] = min(oldest.get(worker.host, _age(worker)), _age(worker))
    return sorted(workers, key=lambda worker: (oldest[worker.host], _age(worker)))


def _age(worker: Worker) -> tuple[bool, int, int]:
    """Return a sort key, smaller for older workers. Age counts from being ready, not from the start of the process."""
    return worker.first_generation < 0, worker.first_generation, worker.number


def _free(facts: Facts, limits: Limits, num_alive: int) -> tuple[HostSlot, ...]:
    """Return places for new workers, up to the limit."""
    taken = {(worker.host, worker.slot) for worker in facts.workers if worker.alive}
    free = [place for place in facts.usable if place not in taken]
    most = limits.max_num_proc
    return tuple(free if most is None else free[: max(most - num_alive, 0)])


def _wait(deadlines: Sequence[float]) -> Wait:
    """Wait for the first deadline that is not infinite."""
    first = min(deadlines, default=math.inf)
    return Wait(None if first == math.inf else first)


def _numbers(workers: Sequence[Worker]) -> tuple[int, ...]:
    return tuple(worker.number for worker in workers)


def root_cause(failures: Sequence[Failure]) -> Failure | None:
    """Return the first failure that is not the consequence of another, else the first one, else None."""
    return next((failure for failure in failures if not failure.consequence), next(iter(failures), None))
