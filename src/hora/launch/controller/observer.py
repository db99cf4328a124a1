"""An observer of a job: notified of its events, in any thread, while the job goes on; the live page is one.

The job does not know its observers and never waits for them: whoever makes the job says who observes it
(`Job.watching`). A job that nobody observes has `Nobody`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from hora.launch.controller.rendezvous import ErrorReport, RendezvousEvents
from hora.launch.job import LaunchEvents, WorkerExit
from hora.world import World

__all__ = ["REPORTING", "STOPPED", "JobEvents", "Nobody", "Observed", "Observer", "facts_of"]

# What the workers of an observed job get: they report once a second.
REPORTING = {"HORA_TELEMETRY_S": "1.0"}
STOPPED = 143  # the exit status of a job that its observer has stopped

_log = logging.getLogger("hora.launch")


class Observer(Protocol):
    """Interface of an observer. Called in any thread: implementations only take note."""

    def world(self, generation: int, places: list[tuple[int, int, str]]) -> None:
        """A world was formed: (worker, rank, host) of everybody in it."""

    def joined(self, worker: int) -> None:
        """A worker has connected."""

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """A worker's telemetry: `report`, `stack`, `profile`."""

    def raised(self, worker: int, headline: str) -> None:
        """The function raised on this worker."""

    def exited(self, worker: int, code: int, reason: str) -> None:
        """A worker's process has ended."""

    def output(self, worker: int, stream: str, data: bytes) -> None:
        """Some bytes of a worker's output; worker -1 is the launcher."""

    def ended(self, outcome: str, text: str) -> None:
        """The job is over: `done`, `failed` or `stopped`. The last call."""


class Nobody:
    """Observes nothing."""

    def world(self, generation: int, places: list[tuple[int, int, str]]) -> None: ...
    def joined(self, worker: int) -> None: ...
    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None: ...
    def raised(self, worker: int, headline: str) -> None: ...
    def exited(self, worker: int, code: int, reason: str) -> None: ...
    def output(self, worker: int, stream: str, data: bytes) -> None: ...
    def ended(self, outcome: str, text: str) -> None: ...


class JobEvents(LaunchEvents, RendezvousEvents, Protocol):
    """Every event of a job."""


class Observed:
    """Forwards a job's events to it and to its observer. An observer that fails gets no more of them."""

    def __init__(self, job: JobEvents) -> None:
        self._job = job
        self.observer: Observer = Nobody()
        self.reasons: dict[int, str] = {}  # why workers will end, of those for which the job knows it before

    def _tell(self, what: str, *arguments: object) -> None:
        try:
            getattr(self.observer, what)(*arguments)
        except Exception:  # whatever an observer does wrong, the training goes on
            _log.exception("the job is not observed any more")
            self.observer = Nobody()

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._tell("output", worker, stream, data)
        self._job.output(worker, stream, data)

    def started(self, worker: int) -> None:
        self._job.started(worker)

    def exited(self, ended: WorkerExit) -> None:
        ended = replace(ended, reason=self.reasons.get(ended.worker, ended.reason))
        self._tell("exited", ended.worker, ended.code, ended.reason)
        self._job.exited(ended)

    def joined(self, worker: int) -> None:
        self._tell("joined", worker)
        self._job.joined(worker)

    def returned(self, worker: int, result: bytes) -> None:
        self._job.returned(worker, result)

    def raised(self, worker: int, report: ErrorReport) -> None:
        if not report.consequence:
            self._tell("raised", worker, report.headline)
        self._job.raised(worker, report)

    def on_log_line(self, worker: int, text: str) -> None:
        self._tell("output", worker, "stdout", text.encode(errors="replace") + b"\n")
        self._job.on_log_line(worker, text)

    def waiting(self, worker: int, generation: int) -> None:
        self._job.waiting(worker, generation)

    def lost(self, worker: int) -> None:
        self._job.lost(worker)

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        self._tell("on_telemetry", worker, kind, data)
        self._job.on_telemetry(worker, kind, data)

    def world(self, generation: int, worlds: Mapping[int, World]) -> None:
        """The job has formed a world."""
        places = [(worker, world.rank, world.hostname) for worker, world in sorted(worlds.items())]
        self._tell("world", generation, places)

    def on_launcher_line(self, text: str) -> None:
        """A line of the launcher's own."""
        self._tell("output", -1, "stderr", text.encode(errors="replace") + b"\n")

    def ended(self, outcome: str, text: str) -> None:
        self._tell("ended", outcome, text)


def facts_of(job_id: str, *, title: str, command: Sequence[str] = (), elastic: bool = False) -> dict[str, Any]:
    """Return the facts that an observer gets when a job begins."""
    return {
        "id": job_id,
        "title": title or _title(command),
        "command": " ".join(command)[:500],
        "began": time.time(),
        "elastic": elastic,
    }


def _title(command: Sequence[str]) -> str:
    """The script's name, for a command that has one."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))]
    return os.path.basename(scripts[0] if scripts else command[0]) if command else "a function"
