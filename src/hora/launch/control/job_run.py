"""A job under way: what jobs of a fixed size (`controller`) and elastic ones (`elastic`) have in common.

It owns the job's secret, rendezvous and output. What launcher and rendezvous report, in threads of theirs, is only
queued here; it happens, in order, while the job waits. What to do about it is decided by the two kinds of jobs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NoReturn

from hora.errors import JobFailedError
from hora.launch.control import policy
from hora.launch.control.failure_report import cause, failure_message
from hora.launch.control.interrupt import ended_by_signals
from hora.launch.control.output import Output
from hora.launch.control.rendezvous import ErrorReport, Rendezvous
from hora.launch.job import Job, JobResult, Launcher, WorkerExit, WorkerSpec
from hora.launch.slots import Slot
from hora.net.client import FUNCTION_KEY, PATH_KEY
from hora.net.wire import new_secret
from hora.world import MeetingPoint, World

__all__ = ["JobUnderWay", "carry_out"]

_KILL_SLACK_S = 10.0
_INTERRUPTIBLE_S = 3600.0


def carry_out(job: Job, launcher: Launcher, kind: Callable[[Job, Launcher, Output], JobUnderWay]) -> JobResult:
    """Run the job to its end, end everything that was started however it ends, and close the launcher."""
    with contextlib.ExitStack() as stack:
        stack.callback(launcher.close)
        stack.enter_context(ended_by_signals())
        output = Output(job.output, {slot.rank: slot.rank for slot in job.slots})
        stack.callback(output.close)
        under_way = kind(job, launcher, output)
        stack.callback(under_way.rendezvous.close)
        stack.callback(launcher.close)  # the workers end while there is still somebody to report to
        return under_way.to_the_end()


class JobUnderWay(ABC):
    """Implements LaunchEvents and RendezvousEvents. Workers have numbers for life, which in a job of a fixed size are
    their ranks."""

    def __init__(self, job: Job, launcher: Launcher, output: Output) -> None:
        self._job, self._launcher, self._output = job, launcher, output
        self._id = secrets.token_hex(8)
        self._secret = new_secret()
        self._happened: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._exits: dict[int, WorkerExit] = {}
        self._results: dict[int, bytes] = {}
        self._reports: dict[int, ErrorReport] = {}
        self._ending = False
        self.rendezvous = Rendezvous(launcher.bind_address, secret=self._secret, job=self._id, events=self)
        self._meeting = MeetingPoint(
            kind="hora", address=launcher.advertised_address, port=self.rendezvous.port, job=self._id
        )
        self._argv, self._preload = self._lay_out()

    def _lay_out(self) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
        """Lay out what the workers will fetch; returns their argv and what to load for all of them at once."""
        job = self._job
        if job.function is None:
            return job.command, None
        self.rendezvous.set(FUNCTION_KEY, job.function)
        same = job.executable == sys.executable
        self.rendezvous.set(PATH_KEY, json.dumps(sys.path if same else []).encode())
        return (job.executable, "-m", "hora.launch.worker"), policy.modules_to_preload(job.function)

    @abstractmethod
    def to_the_end(self) -> JobResult:
        """Poll what happened, ask the policy, act, until the job is over."""

    def _start(self, worlds: Iterable[tuple[Slot, World]]) -> None:
        job = self._job
        workers = [
            WorkerSpec(
                worker=world.worker,
                slot=slot,
                argv=self._argv,
                env={**job.env, "PYTHONUNBUFFERED": "1", **world.to_env()},
                cwd=job.cwd,
                private_files={"HORA_SECRET_FILE": self._secret},
                grace_s=job.grace_s,
                preload=self._preload,
            )
            for slot, world in worlds
        ]
        if job.verbose:
            self._tell(f"starting {len(workers)} processes: {' '.join(self._argv)}")
        self._launcher.start(workers, self)

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

    def _end_workers(self, workers: Iterable[int], why: str = "") -> None:
        """SIGTERM, then SIGKILL; returns when all have ended, or when even SIGKILL should have done it."""
        self._ending = True
        left = set(workers) - self._exits.keys()
        self._launcher.terminate(sorted(left), grace_s=self._job.grace_s)
        if why:  # afterwards: a console that nobody reads must not keep the workers alive
            self._tell(why)
        limit = time.monotonic() + self._job.grace_s + _KILL_SLACK_S
        while left - self._exits.keys() and time.monotonic() < limit:
            self._wait(limit)

    def _raise(self, failure: policy.Failure, name: str, rank: int | None, preface: str = "") -> NoReturn:
        """Tell the caller of this failure, the first there was. `name`: what the process is called."""
        report, tail = self._reports.get(failure.worker), self._output.tail(failure.worker)
        told = failure_message(name, failure.code, failure.reason, report, tail)
        raise JobFailedError(
            f"{preface}\n{told}" if preface else told,
            rank=rank,
            exit_code=failure.code,
            remote_traceback=report.traceback if report else None,
            log_tail=tail,
        ) from cause(report)

    def _blames_another(self, worker: int) -> bool:
        """Whether a worker's last words are that another one is lost: of a command we have only the output to tell."""
        return "HorovodInternalError" in self._output.tail(worker).rstrip().rpartition("\n")[2]

    def _tell(self, text: str) -> None:
        self._output.say(f"hora: {text}", stream="stderr")

    # ---- events, from other threads -----------------------------------------------------------------------

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._or_raise_there(lambda: self._output.feed(worker, stream, data))

    def started(self, worker: int) -> None:
        self._happened.put(lambda: self._on_start(worker))

    def exited(self, ended: WorkerExit) -> None:
        self._or_raise_there(lambda: self._output.end(ended.worker))
        self._happened.put(lambda: self._on_exit(ended))

    def joined(self, worker: int) -> None:
        self._happened.put(lambda: self._on_join(worker))

    def returned(self, worker: int, result: bytes) -> None:
        self._happened.put(lambda: self._on_return(worker, result))

    def raised(self, worker: int, report: ErrorReport) -> None:
        self._happened.put(lambda: self._on_raise(worker, report))

    def said(self, worker: int, text: str) -> None:
        self._output.say(text)

    def waiting(self, worker: int, generation: int) -> None:
        self._happened.put(lambda: self._on_wait(worker, generation))

    def lost(self, worker: int) -> None:
        self._happened.put(lambda: self._on_loss(worker))

    def _or_raise_there(self, write: Callable[[], None]) -> None:
        """An error of a stream that the caller gave us is raised where the caller is, not in this thread."""
        try:
            write()
        except Exception as error:
            self._happened.put(functools.partial(_raise, error))

    # ---- events, in order ---------------------------------------------------------------------------------

    @abstractmethod
    def _on_start(self, worker: int) -> None:
        """Its process runs."""

    @abstractmethod
    def _on_join(self, worker: int) -> None:
        """It has connected."""

    @abstractmethod
    def _on_return(self, worker: int, result: bytes) -> None:
        """The function has returned on it."""

    @abstractmethod
    def _on_raise(self, worker: int, report: ErrorReport) -> None:
        """The function has raised on it."""

    @abstractmethod
    def _on_wait(self, worker: int, generation: int) -> None:
        """It waits for a world later than this generation."""

    @abstractmethod
    def _on_loss(self, worker: int) -> None:
        """Its connection ended without a good-bye."""

    @abstractmethod
    def _on_exit(self, ended: WorkerExit) -> None:
        """Its process has ended."""


def _raise(error: Exception) -> None:
    raise error
