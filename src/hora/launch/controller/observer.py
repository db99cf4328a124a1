"""An observer of a job: notified of its events, in any thread, while the job goes on; the live page is one.

The job does not know its observers and never waits for them: `Job.watching` names one. A job without one has a
`NullObserver`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hora.world import World

__all__ = ["REPORTING", "STOPPED", "NullObserver", "Observation", "Observer", "facts_of"]

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


class NullObserver:
    """Observes nothing."""

    def world(self, generation: int, places: list[tuple[int, int, str]]) -> None: ...
    def joined(self, worker: int) -> None: ...
    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None: ...
    def raised(self, worker: int, headline: str) -> None: ...
    def exited(self, worker: int, code: int, reason: str) -> None: ...
    def output(self, worker: int, stream: str, data: bytes) -> None: ...
    def ended(self, outcome: str, text: str) -> None: ...


class Observation:
    """The observer of a job. One that fails gets no more events."""

    def __init__(self) -> None:
        self.observer: Observer = NullObserver()

    def tell(self, event: str, *arguments: object) -> None:
        """Call this method of the observer."""
        try:
            getattr(self.observer, event)(*arguments)
        except Exception:  # whatever an observer does wrong, the training goes on
            _log.exception("the job is not observed any more")
            self.observer = NullObserver()

    def tell_line(self, worker: int, stream: str, text: str) -> None:
        """Tell of a line that did not come through a worker's output."""
        self.tell("output", worker, stream, text.encode(errors="replace") + b"\n")

    def tell_world(self, generation: int, worlds: Mapping[int, World]) -> None:
        """The job has formed a world."""
        places = [(worker, world.rank, world.hostname) for worker, world in sorted(worlds.items())]
        self.tell("world", generation, places)


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
