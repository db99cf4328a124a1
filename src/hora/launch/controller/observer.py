"""An observer of a job gets its events, in any thread, while the job runs. The live page is one.

The job does not know its observers and never waits for them: `Job.watching` names one. A job without one has a
`NullObserver`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hora.telemetry.stacks import stack_text
from hora.world import World

if TYPE_CHECKING:
    from hora.watch import live
    from hora.watch.kubeflow import Controller

__all__ = ["REPORTING", "STOPPED", "NullObserver", "Observation", "Observer", "StallStacks", "Watching", "facts_of"]

# Variables for the workers of an observed job: they report once a second.
REPORTING = {"HORA_TELEMETRY_S": "1.0"}
_AGAIN_S = 30.0
STOPPED = 143  # the exit status of a job that its observer stopped

_log = logging.getLogger("hora.launch")


class Observer(Protocol):
    """Interface of an observer. Called in any thread: implementations must not block."""

    def world(self, generation: int, places: list[tuple[int, int, str]]) -> None:
        """A world was formed: (worker, rank, host) of its members."""

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
    """The observer of a job. An observer that fails gets no more events."""

    def __init__(self) -> None:
        self.observer: Observer = NullObserver()

    def tell(self, event: str, *arguments: object) -> None:
        """Call this method of the observer."""
        try:
            getattr(self.observer, event)(*arguments)
        except Exception:  # an observer's error must not end the training
            _log.exception("the job is not observed any more")
            self.observer = NullObserver()

    def tell_line(self, worker: int, stream: str, text: str) -> None:
        """Report a line that did not come from a worker's output."""
        self.tell("output", worker, stream, text.encode(errors="replace") + b"\n")

    def tell_world(self, generation: int, worlds: Mapping[int, World]) -> None:
        """The job has formed a world."""
        places = [(worker, world.rank, world.hostname) for worker, world in sorted(worlds.items())]
        self.tell("world", generation, places)


@dataclass(frozen=True, kw_only=True)
class Watching:
    """`page`: live, at `listen` (host:port; loopback and a free port unless given). `record`: a file for `hora view`.

    `controller`: Kubeflow's, which gets the job's progress. `browser`: open the page in a browser. `demo`: the page can
    kill ranks.
    """

    page: bool = False
    listen: str = ""
    record: str | None = None
    controller: Controller | None = None
    browser: bool = False
    demo: bool = False

    @classmethod
    def wanted(
        cls,
        environ: Mapping[str, str],
        *,
        page: bool | None = None,
        listen: str | None = None,
        record: str | None = None,
    ) -> Watching | None:
        """Read the settings from arguments, from HORA_DASHBOARD (1, 0, or the address) and HORA_RECORD, or by
        Kubeflow's variables; None: nothing.
        """
        setting = environ.get("HORA_DASHBOARD", "")
        if page is None:
            page = setting not in ("", "0") or bool(listen)
        if not listen and setting not in ("", "0", "1"):
            listen = setting
        record = record or environ.get("HORA_RECORD") or None
        controller = _controller(environ) if "KUBEFLOW_TRAINER_SERVER_URL" in environ else None
        if not page and not record and controller is None:
            return None
        return cls(page=page, listen=listen or "", record=record, controller=controller)

    def open(self, facts: Mapping[str, Any], job: live.JobControl) -> live.Dashboard:
        """Start observing a job. `facts` describe it; `job` controls it. Raises OSError if the address is taken."""
        from hora.watch.live import Dashboard

        dashboard = Dashboard(
            {**facts, "demo": True} if self.demo else facts,
            job,
            listen=self.listen,
            record=self.record,
            page=self.page,
            controller=self.controller,
        )
        if self.page and self.browser:
            import webbrowser

            webbrowser.open(dashboard.page.full_url)
        return dashboard


def _controller(environ: Mapping[str, str]) -> Controller | None:
    from hora.watch.kubeflow import Controller

    return Controller.of(environ)


class StallStacks:
    """Stacks of late ranks: requested when a rank reports a stall, and shown to the user.

    `ask(question, worker)` queries a worker, `say(text)` tells the user. `worlds`: the present one, by worker.
    """

    def __init__(self, ask: Callable[[dict[str, Any], int], None], say: Callable[[str], None]) -> None:
        self._ask, self._say = ask, say
        self.worlds: Mapping[int, World] = {}
        self._asked_at: dict[int, float] = {}
        self._to_show: set[int] = set()

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """Handle a worker's message: a stall, or an answer to one of our questions. Others are ignored."""
        if kind == "stall":
            ranks = json.loads(data)
            for number, world in self.worlds.items():
                if world.rank in ranks and time.monotonic() - self._asked_at.get(number, -1e9) > _AGAIN_S:
                    self._asked_at[number] = time.monotonic()
                    self._to_show.add(number)
                    self._ask({"question": "stack"}, number)
        elif kind == "stack" and worker in self._to_show and worker in self.worlds:
            self._to_show.discard(worker)
            world = self.worlds[worker]
            where = f"rank {world.rank} on {world.hostname}"
            self._say(f"{where} keeps the others waiting; it is here:\n{stack_text(data)}")


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
