"""The controller runs a job: it polls events, asks the policy and acts, until the job is over.

All jobs use it: the policy (`policy`, `elastic_policy`) handles fixed and changing sizes. A `Launcher` starts the
processes. SIGTERM and SIGHUP become exceptions, so that every `finally` runs.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent.agent import LEFT
from hora.launch.controller.context import JobContext, WorkerEvents
from hora.launch.controller.output import OutputWriter
from hora.launch.controller.policy import (
    Begin,
    Decision,
    EndJob,
    Facts,
    Fail,
    Failure,
    FixedSize,
    GiveUp,
    HostSlot,
    Policy,
    Roster,
    Wait,
    Worker,
    WorkerState,
    assign,
    modules_to_preload,
    provisional,
)
from hora.launch.controller.rendezvous import ErrorReport
from hora.launch.job import Job, JobResult, Launcher, LeadershipLostError, Succession, WorkerExit
from hora.launch.slots import HostInfo, Slot
from hora.world import World

if TYPE_CHECKING:
    from hora.launch.controller.hosts import ElasticSpec, Hosts  # jobs that never change size start faster without

__all__ = ["Signals", "ended_by_signals", "job_failed", "run_job", "signal_text"]


_TAIL_LINES = 30
_LOADING_LIMIT_S = 120.0  # torch, from a slow network disk
_PING_S = 1.0
_ANSWER_S = 3.0  # without an answer for so long a worker counts as silent
_STUCK_GRACE_S = 1.0
_LEAVE = 4  # the kind of change in the notice to ranks (`hora.torch.elastic.state` has the others)
_ENDED = 128 + signal.SIGTERM


def signal_text(code: int) -> str:
    """Describe a death by signal; return "" for other exit codes."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    hint = "; if nobody sent it, the machine has probably run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def job_failed(
    failure: Failure, *, name: str, rank: int | None, preface: str, report: ErrorReport | None, tail: str, shown: bool
) -> JobFailedError:
    """Return the exception for the caller. `name`: the process's; `tail`: the end of its output.

    `shown`: the console has the output already, so that the message repeats its last line alone.
    """
    message = _message(name, failure, report, tail.rstrip().splitlines()[-1 if shown else -_TAIL_LINES :])
    error = JobFailedError(
        f"{preface}\n{message}" if preface else message,
        rank=rank,
        exit_code=failure.code,
        remote_traceback=report.traceback if report else None,
        log_tail=tail,
    )
    error.__cause__ = _cause(report)
    return error


def _message(name: str, failure: Failure, report: ErrorReport | None, tail: list[str]) -> str:
    """Compose the message about the process that failed first."""
    parts = [
        "Horovod detected that one or more processes exited with non-zero status. The first one to fail was:",
        f"Process name: {name}",
        f"Exit code: {failure.code}",
    ]
    if failure.reason and report is None:
        parts.append(f"Reason: {failure.reason}")
    if report is not None:
        parts.append(f"What it raised:\n{report.traceback.rstrip()}")
    elif tail:
        title = "The last line of its output" if len(tail) == 1 else "The end of its output"
        parts.append(f"{title}:\n" + "\n".join(f"  {line}" for line in tail))
    return "\n".join(parts) + "\n"


def _cause(report: ErrorReport | None) -> BaseException | None:
    """Return the worker's own exception. The caller sent the function and trusts it; commands report no exception."""
    if report is None or not report.pickled:
        return None
    import cloudpickle

    try:
        found = cloudpickle.loads(report.pickled)
    except Exception as error:  # the class is the user's: its constructor may do anything
        found = RuntimeError(f"{report.type_name}: {report.message} (it cannot be rebuilt here: {error})")
    return found if isinstance(found, BaseException) else None


class Signals:
    """Signal handler. `first`: called instead of ending the job when the first SIGTERM arrives."""

    first: Callable[[], None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        first, self.first = self.first, None
        if number != signal.SIGTERM or first is None:
            raise SystemExit(128 + number)
        first()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Signals]:
    """Within it, SIGTERM and SIGHUP raise SystemExit (128 + signal) in the main thread.

    Handlers of the program itself stay, and nothing changes outside the main thread: there the process dies by default,
    and the agents of its workers notice.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def run_job(job: Job, launcher: Launcher, elastic: ElasticSpec | None = None) -> JobResult:
    """Run the job to its end, end all its processes whatever the outcome, and close the launcher.

    `elastic`: its workers may come and go; the results are those of the last generation, by rank. Raises JobFailedError
    naming the first failing worker, its traceback as it sent it (or the end of its output) and, where it could be
    pickled, its exception as the cause; StartTimeoutError when too few workers came in time.
    """
    with contextlib.ExitStack() as stack:
        if job.lease is not None:
            stack.callback(job.lease.close)
        stack.callback(launcher.close)
        signals = stack.enter_context(ended_by_signals())
        output = OutputWriter(job.output, {slot.rank: slot.rank for slot in job.slots})
        stack.callback(output.close)
        controller = _Controller(job, launcher, output, elastic)
        stack.enter_context(controller.run.observed(elastic=elastic is not None))
        stack.callback(controller.run.rendezvous.close)
        if elastic is not None:
            signals.first = lambda: controller.run.call(lambda: controller.leave(elastic.leave_s))
        if job.lease is not None:
            job.lease.watch(controller.end_host)
        stack.callback(launcher.close)  # the workers end while there is still a rendezvous to report to
        if job.succession is not None:
            stack.enter_context(_letting_go(job.succession))
            job.succession.watch(lambda: controller.run.call(_raise_lost))
        return controller.to_the_end()


@contextlib.contextmanager
def _letting_go(succession: Succession) -> Iterator[None]:
    """Release the workers, instead of ending them, when this process no longer leads."""
    try:
        yield
    except LeadershipLostError:
        succession.abandon()
        raise


def _raise_lost() -> NoReturn:
    raise LeadershipLostError


class _Controller(WorkerEvents):
    """Records the state of the workers."""

    def __init__(self, job: Job, launcher: Launcher, output: OutputWriter, elastic: ElasticSpec | None) -> None:
        self._job = job
        self._roster = Roster()
        self._places: dict[int, Slot] = {}  # of the current generation
        self._failures: list[Failure] = []  # of the current generation
        self._results: dict[int, bytes] = {}
        self._reports: dict[int, ErrorReport] = {}
        self._gone: set[int] = set()  # workers that the others no longer wait for
        self._generation, self._num_resets = -1, 0
        self._notified, self._last_notice = False, 0
        self._begun_at = self._short_since = time.monotonic()
        self._ping_at = 0.0
        self._hosts: Hosts | None = None  # only elastic jobs have hosts that come and go
        preload = None if job.function is None else modules_to_preload(job.function)
        self._policy = self._fixed_size(bool(preload)) if elastic is None else self._elastic(elastic)
        self.run = JobContext(job, launcher, output, self, preload=preload)

    def _fixed_size(self, loads_torch: bool) -> Policy:
        return FixedSize(
            [(slot.hostname, slot.local_rank) for slot in self._job.slots],
            needs_results=self._job.function is not None,
            start_timeout_s=self._job.start_timeout_s + (_LOADING_LIMIT_S if loads_torch else 0.0),
        )

    def _elastic(self, spec: ElasticSpec) -> Policy:
        from hora.launch.controller.elastic_policy import ElasticPolicy
        from hora.launch.controller.hosts import Hosts

        self._hosts = Hosts(spec)
        return ElasticPolicy(spec.limits_for(self._job.env), needs_results=self._job.function is not None)

    def to_the_end(self) -> JobResult:
        with self._watching_hosts():
            if self._job.succession is not None:
                self._take_over(self._job.succession)
            while True:
                if self._job.succession is not None:
                    self._job.succession.check()
                now = time.monotonic()
                decision = self._policy.decide(self._facts(now), now)
                if not decision.waits_for_more:
                    self._short_since = now
                match decision:
                    case Begin(places):
                        self._begin(places, now)
                    case Wait(until):
                        self._wait(until)
                    case EndJob():
                        return self._finish()
                    case Fail(failure, message):
                        self._fail(failure, message)
                    case GiveUp(message):
                        self._give_up(message)
                    case _:
                        self._change(decision, now)

    def _change(self, decision: Decision, now: float) -> None:
        """Carry out decisions of elastic jobs."""
        from hora.launch.controller.elastic_policy import End, Notify, Publish, StartWorkers, WriteOff

        match decision:
            case StartWorkers(places):
                self._start_newcomers(places, now)
            case Notify(change):
                self._notify(change)
            case Publish(numbers):
                self._publish(numbers, now)
            case WriteOff(numbers):
                self._write_off(numbers)
            case End(numbers, why, failed):
                self._end(numbers, why, failed=failed, now=now)

    # ---- succession ---------------------------------------------------------------------------------------

    def _save(self, now: float) -> None:
        """Save the state for the next leader before any worker acts on it."""
        if self._job.succession is not None:
            assert self._hosts is not None
            self._job.succession.save(
                {
                    "generation": self._generation,
                    "num_resets": self._num_resets,
                    "last_notice": self._last_notice,
                    "ranks": sorted(self._places, key=lambda number: self._places[number].rank),
                    "workers": self._roster.saved(),
                    "hosts": self._hosts.saved(now),
                }
            )

    def _take_over(self, succession: Succession) -> None:
        """Continue from the state of the previous leader, whose workers never stopped."""
        state, now = succession.state, time.monotonic()
        if state is not None:
            assert self._hosts is not None
            self._hosts.restore(state["hosts"], now)
            self._roster.restore(state["workers"], now)
            self._generation, self._num_resets = int(state["generation"]), int(state["num_resets"])
            self._last_notice = int(state["last_notice"])
            self._places = assign([self._roster[number] for number in state["ranks"]])
            self._begun_at = self._short_since = now
            self.run.out.set_ranks({number: slot.rank for number, slot in self._places.items()})
            worlds = {number: self._world(number, slot, self._generation) for number, slot in self._places.items()}
            self.run.publish(self._generation, worlds)
            self._adopt(succession)
            self.run.log(f"this process leads the job now (term {succession.term}), generation {self._generation}")
        succession.meet_at(self.run.rendezvous.port)

    def _adopt(self, succession: Succession) -> None:
        alive: dict[str, list[int]] = {}
        for worker in self._roster:
            if worker.alive:
                alive.setdefault(worker.host, []).append(worker.number)
            else:
                self._gone.add(worker.number)
                self.run.rendezvous.give_up(worker.number)
        known = succession.adopt(alive, self.run)
        never_started: list[tuple[Slot, World]] = []
        for worker in self._roster:
            if not worker.alive or worker.number in known:
                continue
            if not succession.has_host(worker.host):
                reason = f"its node, {worker.host}, has not come to the new leader"
                self.run.exited(WorkerExit(worker=worker.number, code=255, reason=reason))
                continue
            # The previous leader died between its decision and the order.
            newcomer = worker.number not in self._places
            slot = self._places.get(worker.number) or provisional(
                worker.host, worker.slot, worker.slot + 1, num_ranks=len(self._places)
            )
            never_started.append((slot, self._world(worker.number, slot, -1 if newcomer else self._generation)))
        if never_started:
            self.run.start(never_started)

    # ---- facts --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _watching_hosts(self) -> Iterator[None]:
        if self._hosts is None:
            yield
            return
        try:
            self._hosts.watch(lambda hosts: self.run.call(lambda: self._on_hosts_changed(hosts)))
            yield
        finally:
            self._hosts.close()

    def _facts(self, now: float) -> Facts:
        facts = Facts(
            generation=self._generation,
            workers=tuple(self._with_silence(worker, now) for worker in self._roster),
            failures=tuple(self._failures),
            begun_at=self._begun_at,
            num_resets=self._num_resets,
            notified=self._notified,
            short_since=self._short_since,
        )
        if self._hosts is None:
            return facts
        hosts = self._hosts
        return replace(facts, hosts=hosts.usable(now), barred=hosts.barred(now), may_grow=hosts.may_grow(now))

    def _with_silence(self, worker: Worker, now: float) -> Worker:
        heard = self.run.rendezvous.heard_at(worker.number)
        if not self._ping_at or heard is None or now - max(heard, self._ping_at) < _ANSWER_S:
            return worker
        return replace(worker, silent_since=max(heard, self._ping_at))

    def _one_waits_for_another(self) -> bool:
        """Return whether a member still works while another worker has ended or waits for the next generation."""
        working = any(w.generation == self._generation and w.state is WorkerState.WORKING for w in self._roster)
        return working and any(w.needs_the_others(self._generation) for w in self._roster)

    def _wait(self, until: float | None) -> None:
        now = time.monotonic()
        times = [until, None if self._hosts is None else self._hosts.next_return(now)]
        if self._policy.watches_silence or self._one_waits_for_another():
            self._ping_at = self._ping_at or now
            self.run.rendezvous.ping()
            times.append(now + _PING_S)
        else:
            self._ping_at = 0.0
        self.run.wait(min((t for t in times if t is not None), default=None))
        woken = time.monotonic()
        if self._ping_at and woken > now + 2 * _PING_S:
            self._ping_at = woken  # this process was stopped: silence of workers in that time does not count

    # ---- actions ------------------------------------------------------------------------------------------

    def _begin(self, places: Sequence[HostSlot], now: float) -> None:
        self._publish([self._roster.add(host, slot, WorkerState.READY, now) for host, slot in places], now)
        self.run.start((slot, self._world(number, slot, 0)) for number, slot in self._places.items())
        self._begun_at = time.monotonic()

    def _start_newcomers(self, places: Sequence[HostSlot], now: float) -> None:
        assert self._hosts is not None
        newcomers: list[tuple[Slot, World]] = []
        for host, number in places:
            slot = provisional(host, number, self._hosts.num_slots(host), num_ranks=len(self._places))
            worker = self._roster.add(host, number, WorkerState.STARTING, now)
            newcomers.append((slot, self._world(worker, slot, -1)))
        self._save(now)
        self.run.log(f"starting {len(newcomers)} more on {', '.join(dict.fromkeys(host for host, _ in places))}")
        self.run.start(newcomers)

    def _world(self, number: int, slot: Slot, generation: int) -> World:
        return slot.world(self.run.endpoint, worker=number, generation=generation, elastic=self._policy.elastic)

    def _publish(self, numbers: Sequence[int], now: float) -> None:
        self._num_resets += self._generation >= 0
        self._generation += 1
        self._notified = False
        self._failures.clear()  # the job has got over them
        self._places = assign([self._roster[number] for number in numbers])
        ranks = {number: slot.rank for number, slot in self._places.items()}
        self.run.out.set_ranks(ranks)
        if self._generation:
            self.run.log(f"generation {self._generation}: {len(ranks)} workers")
        self._roster.begin(self._generation, ranks, now)
        worlds = {number: self._world(number, slot, self._generation) for number, slot in self._places.items()}
        self._save(now)
        self.run.publish(self._generation, worlds)
        if self._hosts is not None:
            self._hosts.tell(self._places)

    def _notify(self, change: int) -> None:
        self._notified = True
        # Horovod uses whole seconds. Make each one greater than the last: a worker ignores a notice that is not newer.
        self._last_notice = max(int(time.time()), self._last_notice + 1)
        self.run.rendezvous.notify(
            {
                "notice": "hosts_updated",
                "timestamp": self._last_notice,
                "change": change,
                "generation": self._generation,
            }
        )

    def _write_off(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._bar_the_place_of(number)
        self._save(time.monotonic())
        for number in numbers:
            if number not in self.run.exits:
                # The function has ended on this worker, even if a thread or child keeps the process alive.
                self._tell_the_others(number, f"raised {self._reports[number].headline}", failed=True)
                self.run.terminate([number], grace_s=self._job.grace_s)

    def _end(self, numbers: Sequence[int], why: str, *, failed: bool, now: float) -> None:
        for number in numbers:
            if failed:
                self._note_failure(number, 1, why)
                self._bar_the_place_of(number)
                self._tell_the_others(number, f"was given up: {why}", failed=True)
            else:
                self._roster.set(number, WorkerState.LEFT, now)
                self._tell_the_others(number, f"is ended: {why}", failed=True)
            self.run.rendezvous.give_up(number)
        self._save(now)
        self.run.log(f"ending {', '.join(self._name(number) for number in numbers)}: {why}")
        self.run.terminate(numbers, grace_s=min(_STUCK_GRACE_S, self._job.grace_s))

    def _bar_the_place_of(self, number: int) -> None:
        """Bar the place of a failed worker; the job continues elsewhere."""
        assert self._hosts is not None
        self._roster.write_off(number)
        failure = next(failure for failure in self._failures if failure.worker == number)
        self._hosts.bar(self._roster[number], failure.at)
        reason = f" ({failure.reason})" if failure.reason else ""
        self.run.log(f"process {self._name(number)} failed with exit code {failure.code}{reason}")

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self) -> JobResult:
        by_rank = sorted(self._places, key=lambda number: self._places[number].rank)
        succeeded = [n for n in by_rank if self._roster[n].state is WorkerState.SUCCEEDED]
        lingering = [self._places[number].rank for number in succeeded if number not in self.run.exits]
        why = f"ranks {lingering} have returned but their processes do not end: ending them" if lingering else ""
        self.run.end([worker.number for worker in self._roster], why)
        return JobResult(
            job=self.run.id,
            exits=tuple(self.run.exits[number] for number in by_rank if number in self.run.exits),
            results=tuple(self._results.get(number) for number in by_rank),
        )

    def leave(self, limit_s: float) -> NoReturn:
        """End the job on SIGTERM from a scheduler: the ranks end at their next commit. The exit status is `LEFT`, for
        "resume me", if all of them reach it in time.
        """
        run, workers = self.run, [worker.number for worker in self._roster]
        run.leaving(f"end requested: the ranks commit and leave, within {limit_s:g} s (--leave-timeout)")
        if all(run.rendezvous.heard_at(worker) is None for worker in workers):
            raise SystemExit(_ENDED)  # a command that knows nothing of commits
        alive = [worker for worker in workers if worker not in run.exits]
        self._notify(_LEAVE)
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and any(worker not in run.exits for worker in alive):
            run.wait(limit)
        if {run.exits[worker].code if worker in run.exits else -1 for worker in alive} <= {0, LEFT}:
            run.log(f"all ranks have committed and left: start the job again to go on (exit status {LEFT})")
            raise SystemExit(LEFT)
        raise SystemExit(_ENDED)

    def end_host(self, host: str, why: str) -> Callable[[], bool]:
        """End the processes on a removed host; return a check of whether they have ended. Thread-safe."""
        found: list[int] | None = None

        def end() -> None:
            nonlocal found
            found = [worker.number for worker in self._roster if worker.host == host]
            for number in found:
                if number not in self.run.exits:
                    self.run.remove(number, why)

        self.run.call(end)
        return lambda: found is not None and self.run.exits.keys() >= set(found)

    def _give_up(self, message: str) -> NoReturn:
        everyone = [worker.number for worker in self._roster]
        self.run.end(everyone, message if everyone else "")
        raise StartTimeoutError(message)

    def _fail(self, failure: Failure | None, message: str) -> NoReturn:
        everyone = [worker.number for worker in self._roster]
        if failure is None:
            self.run.end(everyone)
            raise JobFailedError(message)
        worker, slot = self._roster[failure.worker], self._places.get(failure.worker)
        others = "; ending the others" if len(everyone) > 1 else ""
        reason = f" ({failure.reason})" if failure.reason else ""
        line = (
            f"process {self._name(failure.worker)} on host {worker.host} failed with exit code {failure.code}{reason}"
        )
        self.run.end(everyone, "" if worker.written_off else line + others)
        raise job_failed(
            failure,
            name=self._name(failure.worker),
            rank=None if slot is None else slot.rank,
            preface=message,
            report=self._reports.get(failure.worker),
            tail=self.run.out.tail(failure.worker),
            shown=self._job.output.console,
        )

    def _name(self, number: int) -> str:
        worker = self._roster[number]
        return f"{worker.host}[{worker.slot}]" if self._policy.elastic else str(number)

    # ---- news ---------------------------------------------------------------------------------------------

    def _on_hosts_changed(self, hosts: Sequence[HostInfo]) -> None:
        assert self._hosts is not None
        for text in self._hosts.change(hosts):
            self.run.log(text)

    def started(self, worker: int) -> None:
        self._roster.started(worker)

    def joined(self, worker: int) -> None:
        news = worker in self._roster and not self._roster[worker].joined
        self._roster.joined(worker)
        if news:
            self._save(time.monotonic())

    def waiting(self, worker: int, generation: int) -> None:
        self._roster.waits(worker, generation, time.monotonic())

    def lost(self, worker: int) -> None:
        self._roster.lost(worker, time.monotonic())

    def returned(self, worker: int, result: bytes) -> None:
        self._results[worker] = result
        if worker in self._roster and self._roster[worker].alive:
            self._roster.set(worker, WorkerState.SUCCEEDED, time.monotonic())

    def raised(self, worker: int, report: ErrorReport) -> None:
        self._reports[worker] = report
        if worker in self._roster and self._roster[worker].alive and not self.run.ending:
            self._note_failure(worker, 1, report.headline, report.headline if report.consequence else "")

    def exited(self, ended: WorkerExit) -> None:
        number, before = ended.worker, self._roster[ended.worker]
        self._roster.exited(number)
        failed = not self.run.ending and self._judge_exit(before, ended)
        succeeded = before.state is WorkerState.SUCCEEDED
        how = f"ended with exit code {ended.code}"
        self._tell_the_others(number, how, failed=failed or (ended.code != 0 and not succeeded))
        self.run.rendezvous.give_up(number)

    def _judge_exit(self, worker: Worker, ended: WorkerExit) -> bool:
        """Record the exit of a process; return whether it is a failure."""
        code, reason = ended.code, ended.reason
        if worker.state in (WorkerState.FAILED, WorkerState.LEFT):
            return False
        if code == 0 and worker.alive:
            if self._job.function is None and worker.generation == self._generation:
                self._roster.set(worker.number, WorkerState.SUCCEEDED, time.monotonic())
                return False
            early = "before it had a place in the job" if worker.generation < 0 else "but the function did not return"
            code, reason = 1, reason or f"it ended with status 0 {early}: did it call exit?"
        if code == 0:
            return False
        # Only the output of a command shows whether it ended because another worker was lost.
        words = self.run.out.tail(worker.number).rstrip().rpartition("\n")[2]
        complaint = words if "HorovodInternalError" in words else ""
        self._note_failure(worker.number, code, reason or signal_text(code), complaint)
        return worker.alive

    def _note_failure(self, number: int, code: int, reason: str, complaint: str = "") -> None:
        """`complaint`: the worker's error, if that only says that another rank was lost."""
        now = time.monotonic()
        if self._roster[number].alive:
            self._roster.set(number, WorkerState.FAILED, now)
        named = re.search(r"HorovodInternalError.*?\brank (\d+)", complaint)
        blames = next((n for n, slot in self._places.items() if named and slot.rank == int(named[1])), None)
        self._failures.append(
            Failure(worker=number, at=now, code=code, reason=reason, consequence=bool(complaint), blames=blames)
        )

    def _tell_the_others(self, number: int, how: str, *, failed: bool) -> None:
        """Tell the ranks, once, not to wait for this worker any longer."""
        if number not in self._gone:
            self._gone.add(number)
            self.run.rendezvous.worker_exited(number, how, failed=failed)
