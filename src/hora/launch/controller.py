"""The controller: carries a job out. Poll what happened, ask the policy, act, until the job is over.

It owns the job's secret, rendezvous and output, and ends everything it started however the job ends.
Decisions are made in `policy`, processes are started by a `Launcher`. Called by `start`, `runner.run` and
the Spark side.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import sys
import time
from collections.abc import Callable

from hora.control import FUNCTION_KEY, PATH_KEY
from hora.errors import JobFailedError, StartTimeoutError
from hora.launch import policy
from hora.launch.failure_report import cause, failure_message, signal_text
from hora.launch.interrupt import ended_by_signals
from hora.launch.output import Output
from hora.launch.rendezvous import ErrorReport, Rendezvous
from hora.launch.spec import Job, JobResult, Launcher, WorkerExit, WorkerSpec
from hora.wire import new_secret
from hora.world import Meeting

__all__ = ["prepare", "run_job"]

_KILL_SLACK_S = 10.0
_LOADING_LIMIT_S = 120.0  # torch, from a slow network disk
_INTERRUPTIBLE_S = 3600.0


def run_job(job: Job, launcher: Launcher) -> JobResult:
    """Run the job to its end and close the launcher.

    Raises JobFailedError naming the first failing worker, its traceback as it sent it (or the end of its
    output) and, where it could be pickled, its exception as the cause.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(launcher.close)
        stack.enter_context(ended_by_signals())
        output = Output(job.output, {slot.rank: slot.rank for slot in job.slots})
        stack.callback(output.close)
        run = _Run(job, launcher, output)
        stack.callback(run.rendezvous.close)
        stack.callback(launcher.close)  # the workers end while there is still somebody to report to
        return run.to_the_end()


def prepare(job: Job, rendezvous: Rendezvous) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Lay out what the workers will fetch; returns their argv and what to load for all of them at once."""
    if job.function is None:
        return job.command, None
    rendezvous.set(FUNCTION_KEY, job.function)
    same = job.executable == sys.executable
    rendezvous.set(PATH_KEY, json.dumps(sys.path if same else []).encode())
    return (job.executable, "-m", "hora.launch.worker"), policy.modules_to_preload(job.function)


class _Run:
    """One job under way. Implements LaunchEvents and RendezvousEvents: those only queue what happened."""

    def __init__(self, job: Job, launcher: Launcher, output: Output) -> None:
        self._job, self._launcher, self._output = job, launcher, output
        self._id = secrets.token_hex(8)
        self._secret = new_secret()
        self._happened: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._started: set[int] = set()
        self._joined: set[int] = set()
        self._exits: dict[int, WorkerExit] = {}
        self._results: dict[int, bytes] = {}
        self._returned_at: dict[int, float] = {}
        self._reports: dict[int, ErrorReport] = {}
        self._failures: dict[int, policy.Failure] = {}
        self._ending = False
        self.rendezvous = Rendezvous(launcher.bind_address, secret=self._secret, job=self._id, events=self)
        self._meeting = Meeting(
            kind="hora", address=launcher.advertised_address, port=self.rendezvous.port, job=self._id
        )

    def to_the_end(self) -> JobResult:
        limit_s = self._start()
        deadline = time.monotonic() + limit_s
        while True:
            now = time.monotonic()
            match policy.decide(self._facts(deadline, limit_s), now):
                case policy.Wait(until):
                    self._wait(until)
                case policy.Finish():
                    return self._finish()
                case policy.Fail(failure):
                    self._fail(failure)
                case policy.GiveUp(message):
                    self._end_workers(message)
                    raise StartTimeoutError(message)

    def _start(self) -> float:
        """Start everything; returns how many seconds the workers have to connect."""
        job = self._job
        self.rendezvous.publish(0, {slot.rank: slot.world(self._meeting) for slot in job.slots})
        argv, preload = prepare(job, self.rendezvous)
        workers = [
            WorkerSpec(
                worker=slot.rank,
                slot=slot,
                argv=argv,
                env={**job.env, "PYTHONUNBUFFERED": "1", **slot.world(self._meeting).to_env()},
                cwd=job.cwd,
                secret=self._secret,
                grace_s=job.grace_s,
                preload=preload,
            )
            for slot in job.slots
        ]
        if job.verbose:
            self._tell(f"starting {len(workers)} processes: {' '.join(argv)}")
        self._launcher.start(workers, self)
        return job.start_timeout_s + (_LOADING_LIMIT_S if preload else 0.0)

    def _facts(self, deadline: float, limit_s: float) -> policy.Facts:
        return policy.Facts(
            num_workers=self._job.num_proc,
            needs_results=self._job.function is not None,
            start_deadline=deadline,
            start_timeout_s=limit_s,
            started=frozenset(self._started),
            joined=frozenset(self._joined),
            returned_at=dict(self._returned_at),
            exited={worker: ended.code for worker, ended in self._exits.items()},
            failures=tuple(self._failures.values()),
        )

    def _wait(self, until: float | None) -> None:
        """Take note of what happens next, and of everything that has happened by then."""
        # A wait without an end could not be interrupted from a notebook or by a signal on every platform.
        limit_s = _INTERRUPTIBLE_S if until is None else max(until - time.monotonic(), 0.0)
        try:
            self._happened.get(timeout=limit_s)()
            while not self._happened.empty():
                self._happened.get_nowait()()
        except queue.Empty:
            return

    # ---- endings ------------------------------------------------------------------------------------------

    def _finish(self) -> JobResult:
        lingering = [slot.rank for slot in self._job.slots if slot.rank not in self._exits]
        if lingering:
            self._end_workers(f"ranks {lingering} have returned but their processes do not end: ending them")
        return JobResult(
            job=self._id,
            exits=tuple(self._exits[worker] for worker in sorted(self._exits)),
            results=tuple(self._results.get(slot.rank) for slot in self._job.slots),
        )

    def _end_workers(self, why: str) -> None:
        """SIGTERM, then SIGKILL; returns when all have ended, or when even SIGKILL should have done it."""
        self._ending = True
        left = [slot.rank for slot in self._job.slots if slot.rank not in self._exits]
        self._launcher.terminate(left, grace_s=self._job.grace_s)
        self._tell(why)  # afterwards: a console that nobody reads must not keep the workers alive
        limit = time.monotonic() + self._job.grace_s + _KILL_SLACK_S
        while len(self._exits) < self._job.num_proc and time.monotonic() < limit:
            self._wait(limit)

    def _fail(self, failure: policy.Failure) -> None:
        slot = self._job.slots[failure.worker]
        self._end_workers(
            f"process {slot.rank} on host {slot.hostname} failed with exit code {failure.code}"
            + (f" ({failure.reason})" if failure.reason else "")
            + ("; ending the others" if self._job.num_proc > 1 else "")
        )
        report = self._reports.get(failure.worker)
        tail = self._output.tail(failure.worker)
        error = JobFailedError(
            failure_message(str(failure.worker), failure.code, failure.reason, report, tail),
            rank=failure.worker,
            exit_code=failure.code,
            remote_traceback=report.traceback if report else None,
            log_tail=tail,
        )
        raise error from cause(report)

    def _tell(self, text: str) -> None:
        self._output.say(f"hora: {text}", stream="stderr")

    # ---- events, from other threads -----------------------------------------------------------------------

    def output(self, worker: int, stream: str, data: bytes) -> None:
        try:
            self._output.feed(worker, stream, data)
        except Exception as error:  # of a stream that the caller gave us: it is raised there, not in this thread
            self._happened.put(functools.partial(_raise, error))

    def started(self, worker: int) -> None:
        self._happened.put(lambda: self._started.add(worker))

    def exited(self, ended: WorkerExit) -> None:
        try:
            self._output.end(ended.worker)
        except Exception as error:  # as above
            self._happened.put(functools.partial(_raise, error))
        self._happened.put(lambda: self._on_exit(ended))

    def joined(self, worker: int) -> None:
        self._happened.put(lambda: self._joined.add(worker))

    def returned(self, worker: int, result: bytes) -> None:
        self._happened.put(lambda: self._on_return(worker, result))

    def raised(self, worker: int, report: ErrorReport) -> None:
        self._happened.put(lambda: self._on_raise(worker, report))

    def said(self, worker: int, text: str) -> None:
        self._output.say(text)

    def waiting(self, worker: int, generation: int) -> None:
        """Only elastic jobs have later generations; a worker of this one waits until its own limit."""

    def lost(self, worker: int) -> None:
        """The launcher tells when the process ends, with its exit code: that is the better news."""

    # ---- events, in order ---------------------------------------------------------------------------------

    def _on_exit(self, ended: WorkerExit) -> None:
        worker, code, reason = ended.worker, ended.code, ended.reason
        self._exits[worker] = ended
        returned = self._job.function is None or worker in self._results
        self.rendezvous.worker_exited(worker, f"ended with exit code {code}", failed=code != 0)
        if code == 0 and not returned and worker not in self._failures:
            code, reason = (
                1,
                reason or "it ended with status 0 but the function did not return: did it call exit?",
            )
        if code > 128 and not reason:
            reason = signal_text(code - 128)
        if code != 0:
            # Of a command we only have the output to tell what it died of.
            last_line = self._output.tail(worker).rstrip().rpartition("\n")[2]
            self._note(worker, code, reason, consequence="HorovodInternalError" in last_line)

    def _on_return(self, worker: int, result: bytes) -> None:
        self._results[worker] = result
        self._returned_at[worker] = time.monotonic()

    def _on_raise(self, worker: int, report: ErrorReport) -> None:
        self._reports[worker] = report
        reason = f"{report.type_name}: {report.message}".partition("\n")[0]
        self._note(worker, 1, reason[:200], consequence=report.consequence)

    def _note(self, worker: int, code: int, reason: str, *, consequence: bool) -> None:
        known = self._failures.get(worker)
        if known is not None:
            # Its exception came first; a different exit code (os._exit, a signal while exiting) adds nothing.
            return
        if not self._ending:
            self._failures[worker] = policy.Failure(
                worker=worker, at=time.monotonic(), code=code, reason=reason, consequence=consequence
            )


def _raise(error: Exception) -> None:
    raise error
