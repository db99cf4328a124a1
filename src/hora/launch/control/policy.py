"""What to do next in a job that never changes size: a pure function of what has happened so far.

No process, no clock, no socket: the controller collects the facts and carries out the decision.

    Wait   nothing to do before that time or the next event
    Finish every worker has done its part
    Fail   a worker failed: end the others; `failure` is the root cause
    GiveUp something did not happen in time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Facts", "Fail", "Failure", "Finish", "GiveUp", "Wait", "decide", "modules_to_preload"]

_READ_WHILE_LOADING = (b"_NUM_THREADS", b"KMP_", b"GOMP_", b"MKL_", b"OPENBLAS_", b"TORCH_", b"LD_PRELOAD")

# How long a process may take to end after the function has returned on every rank.
LINGER_LIMIT_S = 30.0
# How long to wait, after a rank complained that another one is lost, for news of the one that was lost.
ROOT_CAUSE_WAIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first sign that a worker failed. `consequence`: it only says that another rank was lost."""

    worker: int
    at: float
    code: int
    reason: str = ""
    consequence: bool = False


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What has happened. `failures` in the order in which they were seen, one for each worker at most.

    `returned_at`: when each worker's result came. `exited`: exit codes by worker. `start_deadline`: until when all
    workers must have started and, where `needs_results`, connected.
    """

    num_workers: int
    needs_results: bool
    start_deadline: float
    start_timeout_s: float
    started: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    returned_at: Mapping[int, float] = field(default_factory=dict)
    exited: Mapping[int, int] = field(default_factory=dict)
    failures: Sequence[Failure] = ()


@dataclass(frozen=True)
class Wait:
    until: float | None


@dataclass(frozen=True)
class Finish:
    pass


@dataclass(frozen=True)
class Fail:
    failure: Failure


@dataclass(frozen=True)
class GiveUp:
    message: str


def decide(facts: Facts, now: float) -> Wait | Finish | Fail | GiveUp:
    """The next step of the job."""
    if facts.failures:
        return _judge(facts, now)
    if len(facts.exited) == facts.num_workers:
        return Finish()
    if len(facts.returned_at) == facts.num_workers:
        # A thread or a child that the function left behind must not keep the caller from the results.
        limit = max(facts.returned_at.values()) + LINGER_LIMIT_S
        return Finish() if now >= limit else Wait(limit)
    missing = _missing(facts)
    if not missing:
        return Wait(None)
    if now < facts.start_deadline:
        return Wait(facts.start_deadline)
    what = "connect to the launcher" if facts.needs_results else "start"
    return GiveUp(
        f"Timed out waiting for {len(missing)} of {facts.num_workers} processes to {what}. "
        f"Missing ranks: {missing}. Raise --start-timeout (HOROVOD_START_TIMEOUT) if they need longer. "
        f"Timeout after {facts.start_timeout_s:g} seconds."
    )


def _judge(facts: Facts, now: float) -> Wait | Fail:
    for failure in facts.failures:
        if not failure.consequence:
            return Fail(failure)
    first = facts.failures[0]
    # A complaint about a lost peer tends to arrive before the news of the peer's end.
    if now < first.at + ROOT_CAUSE_WAIT_S and len(facts.exited) < facts.num_workers:
        return Wait(first.at + ROOT_CAUSE_WAIT_S)
    return Fail(first)


def _missing(facts: Facts) -> list[int]:
    arrived = facts.joined if facts.needs_results else facts.started
    return [worker for worker in range(facts.num_workers) if worker not in arrived and worker not in facts.exited]


def modules_to_preload(function: bytes) -> tuple[str, ...] | None:
    """What to load once for all workers of a host, before they are forked: what the pickled function names, so that it
    will import it anyway. None: they have to be started afresh, because the function sets variables that are read
    while torch is being loaded.
    """
    if any(name in function for name in _READ_WHILE_LOADING):
        return None
    return tuple(name for name in ("torch", "horovod.torch") if name.encode() in function)
