"""Policy of an elastic job. Pure, like `policy`, which explains facts and states.

New workers start while the others keep training. When they are ready the others are notified, stop at their next commit
and become ready too. After a failure the next generation begins as soon as no worker is working.

A host that discovery no longer lists is not dead. If no listed host has the training state, the workers of the removed
host keep training, admit new workers, and leave one generation later, at a commit, when the new workers have the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hora.launch.controller.policy import (
    LINGER_LIMIT_S,
    LOST,
    Begin,
    Decision,
    End,
    EndJob,
    Facts,
    Fail,
    GiveUp,
    HostSlot,
    Notify,
    Publish,
    StartWorkers,
    Wait,
    Worker,
    WorkerState,
    WriteOff,
    root_cause,
)

# Horovod's words, which programs look for.
RESET_LIMIT_EXCEEDED_MESSAGE = "Horovod was shutdown because number of resets during elastic job exceeded limit: {}"

REMOVED, ADDED = 1, 2  # what a notice tells, as flags
# How long a new worker that is ready waits for others that are still loading.
NEWCOMER_BATCH_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`stuck_s`: how long a worker may go on alone while another one waits for it in vain, or be silent when a newcomer
    is ready or another one has finished or died; `silent_s`: how long it may be silent while another one waits for it.
    `lost_s`: how long one whose connection broke may take to come back (a process that ends is noticed at once).
    `stall_shutdown_s`: how long it may be silent in any case (None: for ever). `elastic_timeout_s`: how long to wait
    for enough workers, and for one of which nothing was ever heard (of a command: while another is ready; it may load
    its data first).
    """

    num_proc: int
    min_num_proc: int
    max_num_proc: int | None = None
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    stuck_s: float = 300.0
    silent_s: float = 10.0
    lost_s: float = 30.0
    stall_shutdown_s: float | None = None

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
        current = [worker for worker in facts.workers if worker.generation == facts.generation]
        if any(worker.state is WorkerState.WORKING for worker in current):
            return self._meanwhile(facts, current, now)
        return self._between(facts, current, now)

    def _begin(self, facts: Facts, now: float) -> Decision:
        limits = self.limits
        places = _slots(facts)
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
        lost_s = self.limits.lost_s
        lost = [w for w in facts.workers if w.alive and w.lost_at is not None and now >= w.lost_at + lost_s]
        if lost:
            return End(_numbers(lost), LOST, failed=True)
        stuck = [w for w in facts.workers if (limit := self._stuck_at(facts, w)) is not None and now >= limit]
        if stuck:
            return End(_numbers(stuck), "it does not answer, or went on alone while others waited for it", failed=True)
        usable = _slots(facts)
        idle = [
            w
            for w in facts.workers
            if w.alive and (w.host in facts.barred or (w.generation < 0 and (w.host, w.slot) not in usable))
        ]
        return End(_numbers(idle), "its host is barred or gone", failed=False) if idle else None

    def _stuck_at(self, facts: Facts, worker: Worker) -> float | None:
        """Return when this worker times out, because of its silence or because others wait for it."""
        limits, silent = self.limits, worker.silent_since
        if not worker.alive:
            return None
        deadlines = []
        if silent is not None and limits.stall_shutdown_s is not None:
            deadlines.append(silent + limits.stall_shutdown_s)
        if worker.generation != facts.generation or worker.state is not WorkerState.WORKING:
            return min(deadlines, default=None)
        waiting = [w.since for w in facts.workers if w.generation == facts.generation and w.state is WorkerState.READY]
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
        return min(deadlines, default=None)

    def _meanwhile(self, facts: Facts, current: Sequence[Worker], now: float) -> Decision:
        """Decide while workers are working: prepare the next generation if one is due."""
        limits = self.limits
        deadlines = [limit for w in facts.workers if (limit := self._stuck_at(facts, w)) is not None]
        deadlines += [w.lost_at + limits.lost_s for w in facts.workers if w.alive and w.lost_at is not None]
        if any(worker.state is WorkerState.SUCCEEDED for worker in current):
            return Wait(min(deadlines, default=None))
        usable = _slots(facts)
        staying = [w for w in current if w.alive and (w.host, w.slot) in usable]
        newcomers = _newcomers(facts)
        free = _free(facts, limits, len(staying) + len(newcomers))
        if free:
            return StartWorkers(free)
        joining = _joining(newcomers, now)
        if newcomers and not joining:
            deadlines += [w.since + NEWCOMER_BATCH_WAIT_S for w in newcomers if w.state is WorkerState.READY]
        leaving = [w for w in current if w.alive and (w.host, w.slot) not in usable]
        settled = all(w.alive for w in current) and not facts.notified  # after a failure they stop by themselves
        if settled and joining and not staying:
            return Notify(ADDED)
        if settled and (joining or leaving) and staying and len(staying) + len(joining) >= limits.min_num_proc:
            return Notify((REMOVED if leaving else 0) | (ADDED if joining else 0))
        return Wait(min(deadlines, default=None))

    def _between(self, facts: Facts, current: Sequence[Worker], now: float) -> Decision:
        """Decide while no worker is working: begin the next generation, or end the job."""
        limits = self.limits
        succeeded = [worker for worker in current if worker.state is WorkerState.SUCCEEDED]
        if succeeded:
            linger_until = max(worker.since for worker in current) + LINGER_LIMIT_S
            done = now >= linger_until or all(worker.exited for worker in succeeded)
            return EndJob() if done else Wait(linger_until)
        usable = _slots(facts)
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
        survivors, newcomers = [w for w in ready if (w.host, w.slot) in usable], _newcomers(facts)
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


def _newcomers(facts: Facts) -> list[Worker]:
    usable = _slots(facts)
    return [w for w in facts.workers if w.alive and w.generation < 0 and (w.host, w.slot) in usable]


def _joining(newcomers: Sequence[Worker], now: float) -> list[Worker]:
    """Return the new workers to admit now: all together, unless one takes too long."""
    ready = [w for w in newcomers if w.state is WorkerState.READY]
    if len(ready) == len(newcomers) or any(now >= w.since + NEWCOMER_BATCH_WAIT_S for w in ready):
        return ready
    return []


def _slots(facts: Facts) -> list[HostSlot]:
    """Return the usable places, host by host."""
    return [(host, slot) for host, slots in facts.hosts.items() for slot in slots]


def _free(facts: Facts, limits: Limits, num_alive: int) -> tuple[HostSlot, ...]:
    """Return places for new workers, up to the limit."""
    taken = {(worker.host, worker.slot) for worker in facts.workers if worker.alive}
    free = [place for place in _slots(facts) if place not in taken]
    most = limits.max_num_proc
    return tuple(free if most is None else free[: max(most - num_alive, 0)])


def _numbers(workers: Sequence[Worker]) -> tuple[int, ...]:
    return tuple(worker.number for worker in workers)
