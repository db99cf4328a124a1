"""The elastic controller: carries out a job whose workers come and go. Poll what happened, ask the policy, act.

Decisions are made in `elastic_policy`, ranks are given by `generation`, processes are started by a `Launcher`; what jobs
of a fixed size do as well is in `under_way`. Called by `start` and by the Spark side.
"""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.control import elastic_policy as policy
from hora.launch.control.blacklist import Blacklist
from hora.launch.control.elastic_policy import State, Worker
from hora.launch.control.elastic_spec import ElasticSpec
from hora.launch.control.failure_report import signal_text
from hora.launch.control.generation import assign, provisional
from hora.launch.control.job_run import JobUnderWay, carry_out
from hora.launch.control.members import Roster
from hora.launch.control.output import Output
from hora.launch.control.policy import Failure
from hora.launch.control.rendezvous import ErrorReport
from hora.launch.job import Job, JobResult, Launcher, WorkerExit
from hora.launch.slots import HostInfo, Slot
from hora.net import address
from hora.world import World

__all__ = ["run_elastic_job"]

_PING_S = 1.0
_ANSWER_S = 3.0  # without an answer for so long a worker counts as silent
_LINGER_LIMIT_S = 30.0
_STUCK_GRACE_S = 1.0


def run_elastic_job(job: Job, spec: ElasticSpec, launcher: Launcher) -> JobResult:
    """Run the job to its end and close the launcher. `results`: those of the last generation, by rank.

    Raises JobFailedError when no worker succeeded, StartTimeoutError when there were too few slots for too long.
    """
    return carry_out(job, launcher, functools.partial(_ElasticJob, spec))


class _ElasticJob(JobUnderWay):
    """A job that goes on with other workers when some fail, come or leave."""

    def __init__(self, spec: ElasticSpec, job: Job, launcher: Launcher, output: Output) -> None:
        super().__init__(job, launcher, output)
        self._spec = spec
        self._limits = spec.limits_for(job.env)
        self._roster = Roster()
        self._places: dict[int, Slot] = {}  # of the current generation
        self._failures: list[Failure] = []
        self._hosts: Sequence[HostInfo] = spec.hosts
        self._blacklist = Blacklist(spec.cooldown_range, random.random)
        self._generation = -1
        self._num_resets = 0
        self._notified = False
        self._last_notice = 0
        self._short_since = time.monotonic()
        self._ping_at = 0.0

    @contextlib.contextmanager
    def _watching_hosts(self) -> Iterator[None]:
        """Have the discovery script asked again and again, if there is one."""
        script = self._spec.script
        if script is None:
            yield
            return
        try:
            script.watch(self._spec.hosts, lambda hosts: self._happened.put(lambda: self._on_hosts_changed(hosts)))
            yield
        finally:
            script.close()

    def to_the_end(self) -> JobResult:
        with self._watching_hosts():
            while True:
                now = time.monotonic()
                decision = policy.decide(self._facts(now), now)
                if not _leaves_it_short(decision):
                    self._short_since = now
                match decision:
                    case policy.Wait(until):
                        self._wait(until)
                    case policy.Finish():
                        return self._finish()
                    case policy.Fail(message):
                        self._fail(message)
                    case policy.GiveUp(message):
                        self._end_all()
                        raise StartTimeoutError(message)
                    case _:
                        self._act(decision, now)

    def _act(self, decision: policy.Decision, now: float) -> None:
        match decision:
            case policy.Begin(places):
                self._begin(places, now)
            case policy.Start(places):
                self._start_newcomers(places, now)
            case policy.Notify(change):
                self._notify(change)
            case policy.Publish(numbers):
                self._publish(numbers, now)
            case policy.End(numbers, why, failed):
                self._end(numbers, why, failed=failed, now=now)

    # ---- facts --------------------------------------------------------------------------------------------

    def _facts(self, now: float) -> policy.Facts:
        return policy.Facts(
            limits=self._limits,
            generation=self._generation,
            workers=tuple(self._with_silence(worker, now) for worker in self._roster),
            hosts=self._blacklist.usable(self._hosts, now),
            barred=frozenset(h.hostname for h in self._hosts if self._blacklist.is_host_barred(h.hostname, now)),
            may_grow=self._spec.script is not None or self._blacklist.next_return(now) is not None,
            num_resets=self._num_resets,
            notified=self._notified,
            short_since=self._short_since,
        )

    def _with_silence(self, worker: Worker, now: float) -> Worker:
        heard = self.rendezvous.heard_at(worker.number)
        if not self._ping_at or heard is None or now - max(heard, self._ping_at) < _ANSWER_S:
            return worker
        return replace(worker, silent_since=max(heard, self._ping_at))

    def _somebody_waits_for_somebody(self) -> bool:
        states = {w.state for w in self._roster if w.generation == self._generation}
        return State.READY in states and State.WORKING in states

    def _wait(self, until: float | None) -> None:
        now = time.monotonic()
        times = [until, self._blacklist.next_return(now)]
        if self._limits.stall_shutdown_s is not None or self._somebody_waits_for_somebody():
            self._ping_at = self._ping_at or now
            self.rendezvous.ping()
            times.append(now + _PING_S)
        else:
            self._ping_at = 0.0
        super()._wait(min((t for t in times if t is not None), default=None))

    # ---- actions ------------------------------------------------------------------------------------------

    def _begin(self, places: Sequence[tuple[str, int]], now: float) -> None:
        self._publish([self._roster.add(host, slot, State.READY, now) for host, slot in places], now)
        self._start((slot, self._world(number, slot, 0)) for number, slot in self._places.items())

    def _start_newcomers(self, places: Sequence[tuple[str, int]], now: float) -> None:
        newcomers: list[tuple[Slot, World]] = []
        for host, number in places:
            num_slots = next((h.slots for h in self._hosts if h.hostname == host), 1)
            slot = provisional(host, number, num_slots)
            worker = self._roster.add(host, number, State.STARTING, now)
            newcomers.append((slot, self._world(worker, slot, -1)))
        self._tell(f"starting {len(newcomers)} more on {', '.join(dict.fromkeys(host for host, _ in places))}")
        self._start(newcomers)

    def _world(self, number: int, slot: Slot, generation: int) -> World:
        return slot.world(self._meeting, worker=number, generation=generation, elastic=True)

    def _publish(self, numbers: Sequence[int], now: float) -> None:
        self._num_resets += self._generation >= 0
        self._generation += 1
        self._notified = False
        self._failures.clear()  # the job has got over them
        self._places = assign([self._roster[number] for number in numbers])
        ranks = {number: slot.rank for number, slot in self._places.items()}
        self._output.set_ranks(ranks)
        if self._generation:
            self._tell(f"generation {self._generation}: {len(ranks)} workers")
        self._roster.begin(self._generation, ranks, now)
        worlds = {number: self._world(number, slot, self._generation) for number, slot in self._places.items()}
        self.rendezvous.publish(self._generation, worlds)

    def _notify(self, change: int) -> None:
        self._notified = True
        # Whole seconds, as Horovod has them, but no two the same: a worker ignores what is not newer.
        self._last_notice = max(int(time.time()), self._last_notice + 1)
        self.rendezvous.notify(
            {
                "notice": "hosts_updated",
                "timestamp": self._last_notice,
                "change": change,
                "generation": self._generation,
            }
        )

    def _end(self, numbers: Sequence[int], why: str, *, failed: bool, now: float) -> None:
        for number in numbers:
            if failed:
                self._note_failure(number, 1, why, consequence=False, now=now)
                self.rendezvous.worker_exited(number, f"was given up: {why}", failed=True)
            else:
                self._roster.set(number, State.LEFT, now)
                self.rendezvous.worker_exited(number, f"is ended: {why}", failed=True)
            self.rendezvous.give_up(number)
        self._tell(f"ending {', '.join(self._name(number) for number in numbers)}: {why}")
        self._launcher.terminate(numbers, grace_s=min(_STUCK_GRACE_S, self._job.grace_s))

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self) -> JobResult:
        current = [w for w in self._roster if w.generation == self._generation]
        limit = time.monotonic() + _LINGER_LIMIT_S
        succeeded = {worker.number for worker in current if worker.state is State.SUCCEEDED}
        while succeeded - set(self._exits) and time.monotonic() < limit:
            self._wait(limit)
        self._end_all()
        by_rank = sorted(self._places, key=lambda number: self._places[number].rank)
        return JobResult(
            job=self._id,
            exits=tuple(self._exits[number] for number in by_rank if number in self._exits),
            results=tuple(self._results.get(number) for number in by_rank),
        )

    def _end_all(self) -> None:
        self._end_workers(worker.number for worker in self._roster)

    def _fail(self, message: str) -> None:
        self._end_all()
        first = next((f for f in self._failures if not f.consequence), next(iter(self._failures), None))
        if first is None:
            raise JobFailedError(message)
        rank = self._places[first.worker].rank if first.worker in self._places else None
        self._raise(first, name=self._name(first.worker), rank=rank, preface=message)

    def _name(self, number: int) -> str:
        worker = self._roster[number]
        return f"{worker.host}[{worker.slot}]"

    # ---- events -------------------------------------------------------------------------------------------

    def _on_hosts_changed(self, hosts: Sequence[HostInfo]) -> None:
        reachable = [host for host in hosts if not self._spec.local_only or address.is_local(host.hostname)]
        for host in hosts:
            if host not in reachable:
                self._tell(
                    f"host {host.hostname} cannot be used: the job began on this machine alone and listens nowhere "
                    "else. Name the network with --network-interfaces, or begin with another host"
                )
        self._tell(f"the hosts are now {','.join(map(str, reachable)) or 'none'}")
        self._hosts = tuple(reachable)

    def _on_start(self, worker: int) -> None:
        """It counts when it asks for a place."""

    def _on_join(self, worker: int) -> None:
        self._roster.connected(worker)

    def _on_wait(self, worker: int, generation: int) -> None:
        self._roster.waits(worker, generation, time.monotonic())

    def _on_loss(self, worker: int) -> None:
        self._roster.lost(worker, time.monotonic())

    def _on_return(self, worker: int, result: bytes) -> None:
        self._results[worker] = result
        if self._roster[worker].alive:
            self._roster.set(worker, State.SUCCEEDED, time.monotonic())

    def _on_raise(self, worker: int, report: ErrorReport) -> None:
        # The function is over on this worker, even if a thread or a child of its keeps the process from ending.
        self._reports[worker] = report
        if self._roster[worker].alive and not self._ending:
            self.rendezvous.worker_exited(worker, f"raised {report.headline}", failed=True)
            self._note_failure(worker, 1, report.headline, consequence=report.consequence, now=time.monotonic())
            self._launcher.terminate([worker], grace_s=self._job.grace_s)

    def _on_exit(self, ended: WorkerExit) -> None:
        number, code, reason = ended.worker, ended.code, ended.reason
        worker, now = self._roster[number], time.monotonic()
        self._exits[number] = ended
        self.rendezvous.give_up(number)
        if not worker.alive or self._ending:
            return
        if code == 0 and worker.generation == self._generation and self._job.function is None:
            self._roster.set(number, State.SUCCEEDED, now)
            self.rendezvous.worker_exited(number, "has ended", failed=False)
            return
        if code == 0:
            early = "before it had a place in the job" if worker.generation < 0 else "but the function did not return"
            code, reason = 1, reason or f"it ended with status 0 {early}: did it call exit?"
        self.rendezvous.worker_exited(number, f"ended with exit code {ended.code}", failed=True)
        blames = self._blames_another(number)
        self._note_failure(number, code, reason or signal_text(code), consequence=blames, now=now)

    def _note_failure(self, number: int, code: int, reason: str, *, consequence: bool, now: float) -> None:
        worker = self._roster[number]
        self._roster.set(number, State.FAILED, now)
        self._failures.append(Failure(worker=number, at=now, code=code, reason=reason, consequence=consequence))
        # With one host, barring it would end the job: bar the slot. A newcomer's failure says nothing of others there.
        whole = len({host.hostname for host in self._hosts}) > 1 and worker.generation >= 0
        self._blacklist.bar((worker.host, None if whole else worker.slot), now)
        said = f" ({reason})" if reason else ""
        self._tell(f"process {self._name(number)} failed with exit code {code}{said}")


def _leaves_it_short(decision: policy.Decision) -> bool:
    """Whether the clock of the wait for enough workers goes on."""
    return isinstance(decision, policy.Start | policy.End) or (isinstance(decision, policy.Wait) and decision.short)
