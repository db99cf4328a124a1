"""The controller runs a job: it polls events, asks the policy and acts, until the job is over.

The policy (`policy`) decides for jobs of fixed and of changing size; a `Launcher` starts the processes. The launcher
and the rendezvous report events from their own threads: each event goes to the observer (the live page) at once, and
into a queue that the controller empties in its own thread. SIGTERM and SIGHUP become exceptions, so that every
`finally` runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import re
import secrets
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Protocol

from hora.config import EngineConfig, allowed_ports
from hora.errors import JobFailedError, StartTimeoutError
from hora.launch.agent.agent import LEFT
from hora.launch.agent.protocol import Exited
from hora.launch.controller.output import OutputWriter
from hora.launch.controller.policy import (
    Begin,
    ElasticPolicy,
    End,
    EndJob,
    Facts,
    Fail,
    Failure,
    FixedSize,
    GiveUp,
    HostSlot,
    Notify,
    Publish,
    StartWorkers,
    Wait,
    Worker,
    WorkerState,
    WriteOff,
    assign,
    provisional,
    silent_at_the_end,
)
from hora.launch.job import (
    STOPPED,
    Job,
    JobResult,
    Launcher,
    LeadershipLostError,
    Observation,
    WorkerSpec,
)
from hora.launch.limits import KILLED_S
from hora.launch.preload import modules_to_preload
from hora.launch.processes import ended_by_signals, module_command
from hora.launch.slots import HostInfo, Slot
from hora.net.client import FUNCTION_KEY, PATH_KEY
from hora.net.rendezvous import Rendezvous
from hora.net.requests import Raised
from hora.net.sockets import free_port, is_local
from hora.net.wire import derived_secret, new_secret, worker_key
from hora.platforms.horovod import variables_of
from hora.world import RendezvousEndpoint, World

if TYPE_CHECKING:
    from hora.launch.controller.agents import Agents
    from hora.launch.controller.hosts import ElasticSpec, Hosts  # jobs that never change size start faster without
    from hora.launch.controller.launcher import HostLauncher

_TAIL_LINES = 30
_LOADING_LIMIT_S = 120.0  # torch, from a slow network disk
_PING_S = 1.0
_ANSWER_S = 3.0  # without an answer for so long a worker counts as silent
_STUCK_GRACE_S = 1.0
_INTERRUPTIBLE_S = 3600.0
_PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections
_LEAVE = 4  # the kind of change in the notice to ranks (`hora.torch.elastic.state` has the others)
_ENDED = 128 + signal.SIGTERM

P = ParamSpec("P")


class Leadership(Protocol):
    """A process's time as the leader of a job that may have others. `term`: greater than those of earlier leaders.

    `run`: the job's id; `state`: what the leader before has saved, None for the first one. `leaderless_s`: how long
    workers wait for a leader at the same address. `agents`, `launcher`: of this leader.
    """

    agents: Agents
    launcher: HostLauncher
    term: int
    run: str
    state: dict[str, Any] | None
    leaderless_s: float

    def check(self) -> None:
        """Raise LeadershipLostError if this process no longer leads."""

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from any thread, when this process no longer leads."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Return once the next leader will know this state. Raises LeadershipLostError."""


def signal_text(code: int) -> str:
    """Describe a death by signal; return "" for other exit codes."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    hint = "; if nobody sent it, the machine has probably run out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _message(name: str, failure: Failure, report: Raised | None, tail: list[str]) -> str:
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


def _headline(message: str, failure: str, last_line: str) -> str:
    """Return the message in one line, for a console that has shown the output."""
    text = f"{failure}. Its last line: {last_line}" if last_line else failure
    return f"{message}: {text}" if message else text


def _cause(report: Raised | None) -> BaseException | None:
    """Return the worker's own exception. The caller sent the function and trusts it; commands report no exception."""
    if report is None or not report.data:
        return None
    import cloudpickle

    try:
        found = cloudpickle.loads(report.data)
    except Exception as error:  # the class is the user's: its constructor may do anything
        found = RuntimeError(f"{report.type}: {report.message} (it cannot be rebuilt here: {error})")
    return found if isinstance(found, BaseException) else None


def run_job(
    job: Job, launcher: Launcher, elastic: ElasticSpec | None = None, leadership: Leadership | None = None
) -> JobResult:
    """Run the job to its end, end all its processes whatever the outcome, and close the launcher.

    `elastic`: its workers may come and go; the results are those of the last generation, by rank. `leadership`: other
    processes may take over the job; one that no longer leads releases the workers instead of ending them. Raises
    JobFailedError naming the first failing worker, its traceback as it sent it (or the end of its output) and, where it
    could be pickled, its exception as the cause; StartTimeoutError when too few workers came in time.
    """
    with contextlib.ExitStack() as stack:
        if job.lease is not None:
            stack.callback(job.lease.close)
        stack.callback(launcher.close)
        signals = stack.enter_context(ended_by_signals())
        output = OutputWriter(job.output, {slot.rank: slot.rank for slot in job.slots})
        stack.callback(output.close)

        def hurry(kind: type[BaseException] | None, *_: object) -> None:
            if kind is not None and not issubclass(kind, Exception):  # a signal: the console may have no reader now
                output.hurry()

        stack.push(hurry)
        controller = _Controller(job, launcher, output, elastic, leadership)
        stack.enter_context(controller.observed())
        stack.callback(controller.rendezvous.close)
        if elastic is not None:

            def leave() -> None:
                output.hurry()
                controller.leave(elastic.leave_s)

            signals.first = leave
        if job.lease is not None:
            job.lease.watch(controller.end_host)
        stack.callback(launcher.close)  # the workers end while there is still a rendezvous to report to
        if leadership is not None:
            leadership.watch(lambda: controller.fail_with(LeadershipLostError()))
        if elastic is not None and elastic.script is not None:
            stack.callback(elastic.script.close)
            elastic.script.watch(elastic.hosts, controller.change_hosts)
        stack.push(hurry)  # and before the workers are ended
        return controller.to_the_end()


def _queued(method: Callable[Concatenate[_Controller, P], None]) -> Callable[Concatenate[_Controller, P], None]:
    """Make a method callable from any thread: it runs in the controller's, while that waits."""

    @functools.wraps(method)
    def put(controller: _Controller, /, *args: P.args, **kwargs: P.kwargs) -> None:
        controller.events.put(lambda: method(controller, *args, **kwargs))

    return put


class _Controller(Observation):
    """Records the state of the workers and acts for the policy. Implements `LaunchEvents`, and the controls of an
    observer. A worker keeps its number for life; in a job of fixed size it is its rank.
    """

    def __init__(
        self,
        job: Job,
        launcher: Launcher,
        output: OutputWriter,
        elastic: ElasticSpec | None,
        leadership: Leadership | None,
    ) -> None:
        super().__init__()
        self._job, self._launcher, self._out, self._leadership = job, launcher, output, leadership
        self._places: dict[int, Slot] = {}  # of the current generation
        self._results: dict[int, bytes] = {}
        self._reports: dict[int, Raised] = {}
        now = time.monotonic()
        term = 0 if leadership is None else leadership.term
        self._facts = Facts(begun_at=now, short_since=now, term=term)
        self._workers = self._facts.workers
        self._last_notice = 0
        self._ping_at = 0.0
        self._ending = False
        self._said_silent: set[int] = set()
        self._stop_reason = ""
        self._reasons: dict[int, str] = {}  # reasons for exits that the job itself causes
        self._master: dict[str, str] = {}  # where torch's env:// meets
        self.events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._preload = job.preload if job.function is None else modules_to_preload(job.function)
        self._hosts: Hosts | None = None  # only elastic jobs have hosts that come and go
        self._policy = self._choose_policy(elastic)
        self._id, self._secret = job.id or secrets.token_hex(8), job.secret or new_secret()
        self.rendezvous = Rendezvous(
            launcher.bind_address,
            secret=self._secret,
            job=self._id,
            events=self,
            term=term,
            port=job.port,
            key_of=self._key_of,
        )
        self._endpoint = RendezvousEndpoint(
            kind="hora",
            address=launcher.advertised_address,
            port=self.rendezvous.port,
            job=self._id,
            leaderless_s=0.0 if leadership is None else leadership.leaderless_s,
            term=term,
        )
        self._argv = self._lay_out()

    def _choose_policy(self, spec: ElasticSpec | None) -> FixedSize | ElasticPolicy:
        needs_results = self._job.function is not None
        if spec is None:
            return FixedSize(
                [(slot.hostname, slot.local_rank) for slot in self._job.slots],
                needs_results=needs_results,
                start_timeout_s=self._job.start_timeout_s + (_LOADING_LIMIT_S if self._preload else 0.0),
            )
        from hora.launch.controller.hosts import Hosts

        self._hosts = Hosts(spec)
        return ElasticPolicy(spec.limits_for(self._job.env), needs_results=needs_results)

    def _key_of(self, number: int) -> bytes:
        """Return a worker's key. Leaders that do not know of each other may give one number to two workers."""
        term = self._workers[number].term if 0 <= number < len(self._workers) else 0
        return worker_key(derived_secret(self._secret, f"term {term}") if term else self._secret, number)

    def _lay_out(self) -> tuple[str, ...]:
        """Publish what the workers will fetch and return their argv."""
        job = self._job
        if job.function is None:
            return job.command
        self.rendezvous.set(FUNCTION_KEY, job.function)
        # The current directory is where the caller finds modules only if its own path says so (a notebook's does).
        path = [os.path.abspath(entry) for entry in sys.path] if job.executable == sys.executable else []
        self.rendezvous.set(PATH_KEY, json.dumps(path).encode())
        return module_command(job.executable, "hora.launch.worker")

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Report the job's end to its observer, whatever the outcome."""
        job = self._job
        about: dict[str, Any] = {
            "title": job.title,
            "command": job.command,
            "platform": job.platform,
            "num_ranks": job.num_proc,
        }
        self.observe(job.watching, self, self._id, elastic=self._policy.elastic, **about)
        if self.observer is not None and self.observer.progress is not None:
            self._out.aside = self.observer.progress.aside
        try:
            yield
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._stop_reason = "interrupted"
                line = f"KeyboardInterrupt: the job was stopped, and its {job.num_proc} ranks have ended"
                error._render_traceback_ = lambda: [line]  # type: ignore[attr-defined]  # a notebook shows this alone
            elif isinstance(error, LeadershipLostError):
                self._stop_reason = "another process leads the job now"
            self.tell("ended", "stopped" if self._stop_reason else "failed", self._stop_reason or str(error))
            raise
        self.tell("ended", "done", "")

    def to_the_end(self) -> JobResult:
        try:
            if self._leadership is not None:
                self._take_over(self._leadership)
            while True:
                if self._leadership is not None:
                    self._leadership.check()
                now = time.monotonic()
                decision = self._policy.decide(self._look(now), now)
                self._report_silence(now)
                match decision:
                    case Begin(places):
                        self._begin(places, now)
                    case Wait(until, waits_for_more):
                        if not waits_for_more:
                            self._facts.short_since = now
                        self._wait(until)
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
                    case EndJob():
                        return self._finish()
                    case Fail(failure, message):
                        self._fail(failure, message)
                    case GiveUp(message):
                        self._end_all(message if self._places else "")
                        raise StartTimeoutError(message)
        except LeadershipLostError:
            assert self._leadership is not None
            self._leadership.launcher.abandon()
            raise

    # ---- leadership ---------------------------------------------------------------------------------------

    def _save(self, now: float) -> None:
        """Save the state for the next leader before any worker acts on it."""
        if self._leadership is not None:
            assert self._hosts is not None
            more = {"last_notice": self._last_notice, "ranks": list(self._places), "hosts": self._hosts.saved(now)}
            self._leadership.save(self._facts.saved() | more)

    def _take_over(self, leadership: Leadership) -> None:
        """Continue from the state of the previous leader, whose workers never stopped."""
        state, now = leadership.state, time.monotonic()
        if state is not None:
            assert self._hosts is not None
            self._hosts.restore(state["hosts"], now)
            self._facts.restore(state, now)
            self._last_notice = int(state["last_notice"])
            self._places = assign([self._workers[number] for number in state["ranks"]])
            self._save(now)
            self._tell_worlds()
            self._adopt(leadership)
            self._log(f"this process leads the job now (term {leadership.term}), generation {self._facts.generation}")
        leadership.agents.meet_at(self.rendezvous.port)

    def _adopt(self, leadership: Leadership) -> None:
        alive: dict[str, list[int]] = {}
        for worker in self._workers:
            there = alive.setdefault(worker.host, [])
            if worker.alive:
                there.append(worker.number)
            else:
                self.rendezvous.reject(worker.number)
        never_started = leadership.launcher.adopt(alive, self)
        if never_started:  # the previous leader died between its decision and the order
            self._start(never_started)
        # The previous leader may have died before it ended them.
        leadership.launcher.terminate([w.number for w in self._workers if not w.alive], grace_s=self._job.grace_s)

    # ---- facts --------------------------------------------------------------------------------------------

    def _look(self, now: float) -> Facts:
        """Update the facts that others change."""
        facts = self._facts
        for worker in self._workers:
            heard = self.rendezvous.heard_at(worker.number)
            since = self._ping_at if heard is None else max(heard, self._ping_at)
            silent = self._ping_at and heard is not None and now - since >= _ANSWER_S
            worker.silent_since = since if silent else None
        if self._hosts is not None:
            facts.hosts, facts.barred = self._hosts.usable(now), self._hosts.barred(now)
            facts.may_grow = self._hosts.may_grow(now)
        return facts

    def _report_silence(self, now: float) -> None:
        """Log the ranks that do not answer although others have ended: a job of fixed size waits for them forever."""
        if self._policy.elastic or all(worker.silent_since is None for worker in self._workers):
            return
        stall = {name: value for name, value in self._job.env.items() if name.startswith("HOROVOD_STALL_")}
        config = EngineConfig.from_env(stall)
        for number in silent_at_the_end(self._facts, now, config.stall_warning_s):
            if number not in self._said_silent and not config.stall_check_disable:
                self._said_silent.add(number)
                self._log(
                    f"rank {number} has not answered for {config.stall_warning_s:g} s "
                    "(HOROVOD_STALL_CHECK_TIME_SECONDS) while other ranks have ended. Is its process stopped (SIGSTOP, "
                    "a debugger), or busy in one long call? The job waits for it"
                )

    def _one_waits_for_another(self) -> bool:
        """Return whether a member still works while another worker has ended or waits for the next generation."""
        working = any(w.generation == self._facts.generation and w.state is WorkerState.WORKING for w in self._workers)
        return working and any(w.needs_the_others(self._facts.generation) for w in self._workers)

    def _wait(self, until: float | None) -> None:
        now = time.monotonic()
        times = [until, None if self._hosts is None else self._hosts.next_return(now)]
        if self._policy.watches_silence or self._one_waits_for_another():
            self._ping_at = self._ping_at or now
            self.rendezvous.notify({"notice": "ping"})
            times.append(now + _PING_S)
        else:
            self._ping_at = 0.0
        self._wait_for_events(min((t for t in times if t is not None), default=None))
        woken = time.monotonic()
        if self._ping_at and woken > now + 2 * _PING_S:
            self._ping_at = woken  # this process was stopped: silence of workers in that time does not count

    # ---- actions ------------------------------------------------------------------------------------------

    def _begin(self, places: Sequence[HostSlot], now: float) -> None:
        self._publish([self._facts.add(host, slot, WorkerState.READY, now) for host, slot in places], now)
        self._start(list(self._places))
        self._facts.begun_at = time.monotonic()

    def _start_newcomers(self, places: Sequence[HostSlot], now: float) -> None:
        newcomers = [self._facts.add(host, slot, WorkerState.STARTING, now) for host, slot in places]
        self._save(now)
        self._log(f"starting {len(newcomers)} more on {', '.join(dict.fromkeys(host for host, _ in places))}")
        self._start(newcomers)

    def _world(self, number: int, slot: Slot, generation: int) -> World:
        return slot.world(self._endpoint, worker=number, generation=generation, elastic=self._policy.elastic)

    def _publish(self, numbers: Sequence[int], now: float) -> None:
        self._places = assign([self._workers[number] for number in numbers])
        self._facts.begin(self._places, now)
        if self._facts.generation:
            self._log(f"generation {self._facts.generation}: {len(self._places)} workers")
        self._save(now)
        self._tell_worlds()
        if self._hosts is not None and self._hosts.spec.on_places is not None:
            self._hosts.spec.on_places(dict(self._places))

    def _tell_worlds(self) -> None:
        generation = self._facts.generation
        self._out.set_ranks({number: slot.rank for number, slot in self._places.items()})
        worlds = {number: self._world(number, slot, generation) for number, slot in self._places.items()}
        self.tell_world(generation, worlds)
        self.rendezvous.publish(generation, worlds)

    def _notify(self, change: int) -> None:
        self._facts.notified = True
        # Horovod uses whole seconds. Make each one greater than the last: a worker ignores a notice that is not newer.
        self._last_notice = max(int(time.time()), self._last_notice + 1)
        notice = {"timestamp": self._last_notice, "change": change, "generation": self._facts.generation}
        self.rendezvous.notify({"notice": "hosts_updated", **notice})

    def _write_off(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._bar_the_place_of(number)
        self._save(time.monotonic())
        for number in numbers:
            if not self._workers[number].exited:
                # The function has ended on this worker, even if a thread or child keeps the process alive.
                self.rendezvous.reject(number, f"raised {self._reports[number].headline}", failed=True)
                self._launcher.terminate([number], grace_s=self._job.grace_s)

    def _end(self, numbers: Sequence[int], why: str, *, failed: bool, now: float) -> None:
        for number in numbers:
            if failed:
                self._note_failure(number, 1, why)
                self._bar_the_place_of(number)
            else:
                self._workers[number].enter(WorkerState.LEFT, now)
            self.rendezvous.reject(number, f"{'was given up' if failed else 'is ended'}: {why}", failed=True)
        self._save(now)
        self._log(f"ending {', '.join(self._name(number) for number in numbers)}: {why}")
        self._launcher.terminate(numbers, grace_s=min(_STUCK_GRACE_S, self._job.grace_s))

    def _bar_the_place_of(self, number: int) -> None:
        """Bar the place of a failed worker; the job continues elsewhere."""
        assert self._hosts is not None
        self._workers[number].written_off = True
        failure = next(failure for failure in self._facts.failures if failure.worker == number)
        self._hosts.bar(self._workers[number], failure.at)
        self._log(f"process {self._name(number)} {failure}")

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self) -> JobResult:
        members = [self._workers[number] for number in self._places]
        lingering = [r for r, w in enumerate(members) if w.state is WorkerState.SUCCEEDED and not w.exited]
        why = f"ranks {lingering} have returned but their processes do not end: ending them" if lingering else ""
        self._end_all(why)
        return JobResult(results=tuple(self._results.get(number) for number in self._places))

    @_queued
    def leave(self, limit_s: float) -> None:
        """End the job on SIGTERM from a scheduler: the ranks end at their next commit. The exit status is `LEFT`, for
        "resume me", if all of them reach it in time.
        """
        self._ending = True  # from now on the exit of a worker is not a failure
        self._stop_reason = f"end requested: the ranks commit and leave, within {limit_s:g} s (--leave-timeout)"
        self._log(self._stop_reason)
        if all(self.rendezvous.heard_at(worker.number) is None for worker in self._workers):
            raise SystemExit(_ENDED)  # a command that knows nothing of commits
        alive = [worker for worker in self._workers if not worker.exited]
        self._notify(_LEAVE)
        self._wait_for_exits(alive, limit_s)
        if {worker.code for worker in alive} <= {0, LEFT}:
            self._log(f"all ranks have committed and left: start the job again to go on (exit status {LEFT})")
            raise SystemExit(LEFT)
        raise SystemExit(_ENDED)

    def end_host(self, host: str, why: str) -> Callable[[], bool]:
        """End the processes on a removed host; return a check of whether they have ended. Thread-safe."""
        there = [worker for worker in list(self._workers) if worker.host == host and not worker.exited]
        for worker in there:
            self.remove(worker.number, why)
        return lambda: all(worker.exited for worker in there)

    def _fail(self, failure: Failure | None, message: str) -> NoReturn:
        if failure is None:
            self._end_all()
            raise JobFailedError(message)
        worker, slot = self._workers[failure.worker], self._places.get(failure.worker)
        others = "; ending the others" if len(self._workers) > 1 else ""
        line = f"process {self._name(failure.worker)} on host {worker.host} {failure}"
        self._end_all("" if worker.written_off else line + others)
        report, tail = self._reports.get(failure.worker), self._out.tail(failure.worker)
        lines = tail.rstrip().splitlines()
        # The console has the output already: the message repeats its last line alone.
        shown = lines[-1 if self._job.output.console else -_TAIL_LINES :]
        first = _message(self._name(failure.worker), failure, report, shown)
        raise JobFailedError(
            f"{message}\n{first}" if message else first,
            rank=None if slot is None else slot.rank,
            exit_code=failure.code,
            remote_traceback=report.traceback if report else None,
            log_tail=tail,
            headline=_headline(message, line, "" if report is not None or not lines else lines[-1]),
        ) from _cause(report)

    def _name(self, number: int) -> str:
        worker = self._workers[number]
        return f"{worker.host}[{worker.slot}]" if self._policy.elastic else str(number)

    # ---- the processes ------------------------------------------------------------------------------------

    def _start(self, numbers: Sequence[int]) -> None:
        """Start these workers. Newcomers, which the generation does not include, get a provisional place."""
        job = self._job
        self._choose_master()
        specs = []
        for number in numbers:
            slot, generation = self._places.get(number), self._facts.generation
            if slot is None:
                assert self._hosts is not None
                host, place = self._workers[number].host, self._workers[number].slot
                num_slots, generation = self._hosts.num_slots(host), -1
                slot = provisional(host, place, num_slots, num_ranks=len(self._places))
            env = {
                **self._master,
                **job.env,
                "PYTHONUNBUFFERED": "1",
                **self.reporting,
                **job.host_env.get(slot.hostname, {}),
                **variables_of(self._world(number, slot, generation)),
            }
            spec = WorkerSpec(
                worker=number,
                slot=slot,
                argv=self._argv,
                env=env,
                cwd=job.cwd,
                private_files={"HORA_SECRET_FILE": self._key_of(number)},
                preload=self._preload,
                forks_one=job.forks_one,
            )
            specs.append(spec)
        if job.verbose:
            self._log(f"starting {len(specs)} processes: {' '.join(self._argv)}")
        self._launcher.start(specs, self)

    def _choose_master(self) -> None:
        """Choose where rank 0 opens torch's store, should the workers' program ask for one (`env://`)."""
        hosts = [slot.hostname for slot in self._places.values() if slot.rank == 0]
        if not hosts or self._master:
            return
        if all(is_local(slot.hostname) for slot in self._places.values()):
            address, port = "127.0.0.1", free_port("127.0.0.1")
        else:  # a port of another host cannot be probed from here
            # The last one allowed: the ranks listen at the first ones. Otherwise one that follows from the job's id.
            allowed = allowed_ports()[-1:] or _PORTS
            address, port = hosts[0], allowed[zlib.crc32(self._id.encode()) % len(allowed)]
        self._master = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}

    def _end_all(self, why: str = "") -> None:
        """End all workers; return when they have ended, or after the time that SIGKILL needs."""
        self._ending = True
        left = [worker for worker in self._workers if not worker.exited]
        self._launcher.terminate([worker.number for worker in left], grace_s=self._job.grace_s)
        if why:  # last: a blocked console must not keep the workers alive
            self._log(why)
        self._wait_for_exits(left, self._job.grace_s + KILLED_S)

    def _wait_for_exits(self, workers: Sequence[Worker], limit_s: float) -> None:
        limit = time.monotonic() + limit_s
        while time.monotonic() < limit and not all(worker.exited for worker in workers):
            self._wait_for_events(limit)

    def _wait_for_events(self, until: float | None) -> None:
        """Wait for the next event, then handle all queued events."""
        # On some platforms a notebook or a signal cannot interrupt a wait without a limit.
        limit_s = _INTERRUPTIBLE_S if until is None else max(until - time.monotonic(), 0.0)
        try:
            self.events.get(timeout=limit_s)()
            while not self.events.empty():
                self.events.get_nowait()()
        except queue.Empty:
            return

    def _log(self, text: str) -> None:
        """Write one of the launcher's own lines."""
        self._out.say(f"hora: {text}", stream="stderr")
        self.tell_line(-1, "stderr", text)

    # ---- events, from other threads -----------------------------------------------------------------------

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self.tell("output", worker, stream, data)
        self._or_raise_there(lambda: self._out.feed(worker, stream, data))

    def exited(self, ended: Exited) -> None:
        ended = ended._replace(reason=self._reasons.get(ended.worker, ended.reason))
        self.tell("note", "exited", ended.worker, code=ended.code, reason=ended.reason)
        self._or_raise_there(lambda: self._out.end(ended.worker))
        self._on_exit(ended)

    def _runs_a_function(self, worker: int) -> bool:
        """Return whether this worker runs the caller's function: results of other workers are never unpickled."""
        return self._job.function is not None and worker >= 0

    def show_line(self, text: str) -> None:
        self._out.say(text)

    def _or_raise_there(self, write: Callable[[], None]) -> None:
        """Raise an error of the caller's own stream in the controller's thread, not in this one."""
        try:
            write()
        except Exception as error:
            self.fail_with(error)

    # ---- what an observer may do, from other threads --------------------------------------------------------

    def query(self, question: Mapping[str, Any], worker: int | None = None) -> None:
        self.rendezvous.query(dict(question), worker)

    def stop(self, why: str) -> None:
        self._stop_reason = why
        self.fail_with(JobFailedError(f"the job was stopped: {why}", exit_code=STOPPED))

    @_queued
    def remove(self, worker: int, why: str) -> None:
        self._reasons[worker] = why
        self._log(f"ending worker {worker}: {why}")
        self._launcher.terminate([worker], grace_s=self._job.grace_s)

    @_queued
    def fail_with(self, error: Exception) -> None:
        raise error

    # ---- events, in the controller's thread ---------------------------------------------------------------

    @_queued
    def show_stack(self, text: str) -> None:
        self._log(text)

    @_queued
    def change_hosts(self, hosts: Sequence[HostInfo]) -> None:
        assert self._hosts is not None
        for text in self._hosts.change(hosts):
            self._log(text)

    @_queued
    def started(self, worker: int) -> None:
        self._workers[worker].started = True

    def _alive(self, number: int) -> Worker | None:
        """Return a living worker; None for other numbers, which a message from the network may have."""
        known = 0 <= number < len(self._workers) and self._workers[number].alive
        return self._workers[number] if known else None

    @_queued
    def joined(self, number: int) -> None:
        super().joined(number)
        if 0 <= number < len(self._workers):
            worker = self._workers[number]
            is_new, worker.joined, worker.lost_at = not worker.joined, True, None
            if is_new:
                self._save(time.monotonic())

    @_queued
    def waiting(self, number: int, generation: int) -> None:
        worker = self._alive(number)
        if worker is not None and worker.generation == generation:  # otherwise an old request
            worker.enter(WorkerState.READY, time.monotonic())

    @_queued
    def lost(self, number: int) -> None:
        if worker := self._alive(number):
            worker.lost_at = time.monotonic()

    @_queued
    def returned(self, number: int, result: bytes) -> None:
        if self._runs_a_function(number):
            self._results[number] = result
            if worker := self._alive(number):
                worker.enter(WorkerState.SUCCEEDED, time.monotonic())

    @_queued
    def raised(self, number: int, report: Raised) -> None:
        super().raised(number, report)
        if not self._runs_a_function(number):
            return
        self._reports[number] = report
        if self._alive(number) and not self._ending:
            self._note_failure(number, 1, report.headline, report.headline if report.consequence else "")

    @_queued
    def _on_exit(self, ended: Exited) -> None:
        number, worker = ended.worker, self._workers[ended.worker]
        worker.exited, worker.code, succeeded = True, ended.code, worker.state is WorkerState.SUCCEEDED
        failed = not self._ending and self._judge_exit(worker, ended)
        failed = failed or (ended.code != 0 and not succeeded)
        self.rendezvous.reject(number, f"ended with exit code {ended.code}", failed=failed)

    def _judge_exit(self, worker: Worker, ended: Exited) -> bool:
        """Record the exit of a process; return whether it is a failure."""
        code, reason = ended.code, ended.reason
        if worker.state in (WorkerState.FAILED, WorkerState.LEFT):
            return False
        if code == 0 and worker.alive:
            if self._job.function is None and worker.generation == self._facts.generation:
                worker.enter(WorkerState.SUCCEEDED, time.monotonic())
                return False
            early = "before it had a place in the job" if worker.generation < 0 else "but the function did not return"
            code, reason = 1, reason or f"it ended with status 0 {early}: did it call exit?"
        if code == 0:
            return False
        # Only the output of a command shows whether it ended because another worker was lost.
        words = self._out.tail(worker.number).rstrip().rpartition("\n")[2]
        complaint = words if "HorovodInternalError" in words else ""
        was_alive = worker.alive
        self._note_failure(worker.number, code, reason or signal_text(code), complaint)
        return was_alive

    def _note_failure(self, number: int, code: int, reason: str, complaint: str = "") -> None:
        """`complaint`: the worker's error, if that only says that another rank was lost."""
        now = time.monotonic()
        if self._workers[number].alive:
            self._workers[number].enter(WorkerState.FAILED, now)
        named = re.search(r"HorovodInternalError.*?\brank (\d+)", complaint)
        blames = next((n for n, slot in self._places.items() if named and slot.rank == int(named[1])), None)
        self._facts.failures.append(
            Failure(worker=number, at=now, code=code, reason=reason, consequence=bool(complaint), blames=blames)
        )
