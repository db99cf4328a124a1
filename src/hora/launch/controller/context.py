"""The context of a running job: its secret, rendezvous, output and processes.

The launcher and the rendezvous report events here from their own threads. An event goes to the observer at once and
into a queue. The controller handles the queue, in order, in its own thread. `Job.watching` names an observer, such as
the live page; the job never waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import queue
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hora.errors import JobFailedError
from hora.launch.controller.output import OutputWriter
from hora.launch.controller.rendezvous import ErrorReport, Rendezvous, RendezvousEvents
from hora.launch.environment import module_command
from hora.launch.job import Job, Launcher, LeadershipLostError, WorkerExit, WorkerSpec
from hora.launch.limits import KILLED_S
from hora.launch.slots import Slot
from hora.net.client import FUNCTION_KEY, PATH_KEY
from hora.net.keys import worker_key
from hora.net.sockets import is_local
from hora.net.wire import new_secret
from hora.telemetry.stacks import stack_text
from hora.world import RendezvousEndpoint, World

if TYPE_CHECKING:
    from hora.watch.live import Dashboard

__all__ = ["REPORTING", "STOPPED", "JobContext", "Observation", "StallStacks", "WorkerEvents", "facts_of"]

# Variables for the workers of an observed job: they report once a second.
REPORTING = {"HORA_TELEMETRY_S": "1.0"}
STOPPED = 143  # the exit status of a job that its observer stopped

_INTERRUPTIBLE_S = 3600.0
_STACKS_AGAIN_S = 30.0

_FIRST_PORT, _NUM_PORTS = 20000, 12000

_log = logging.getLogger("hora.launch")


class WorkerEvents(RendezvousEvents):
    """Events of a worker. The controller implements them; they are called in its thread while it waits."""

    def started(self, worker: int) -> None:
        """Its process runs."""

    def exited(self, ended: WorkerExit) -> None:
        """Its process has ended."""


class Observation:
    """The observer of a job, if it has one: it gets events in any thread. One that fails gets no more of them."""

    def __init__(self) -> None:
        self.observer: Dashboard | None = None

    def tell(self, event: str, *arguments: object) -> None:
        """Call this method of the observer."""
        if self.observer is None:
            return
        try:
            getattr(self.observer, event)(*arguments)
        except Exception:  # an observer's error must not end the training
            _log.exception("the job is not observed any more")
            self.observer = None

    def tell_line(self, worker: int, stream: str, text: str) -> None:
        """Report a line that did not come from a worker's output."""
        self.tell("output", worker, stream, text.encode(errors="replace") + b"\n")

    def tell_world(self, generation: int, worlds: Mapping[int, World]) -> None:
        """The job has formed a world."""
        places = [(worker, world.rank, world.hostname) for worker, world in sorted(worlds.items())]
        self.tell("world", generation, places)


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
                if world.rank in ranks and time.monotonic() - self._asked_at.get(number, -1e9) > _STACKS_AGAIN_S:
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


class JobContext(WorkerEvents):
    """Implements LaunchEvents and RendezvousEvents. A worker keeps its number for life; in a job of fixed size it is
    its rank. `preload`: modules to load once, before workers are forked.
    """

    def __init__(
        self, job: Job, launcher: Launcher, out: OutputWriter, events: WorkerEvents, *, preload: tuple[str, ...] | None
    ) -> None:
        self.id = job.id or secrets.token_hex(8)
        self.out = out
        self.exits: dict[int, WorkerExit] = {}
        self.ending = False
        self._job, self._launcher, self._events, self._preload = job, launcher, events, preload
        self._secret = job.secret or new_secret()
        self._happened: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop_reason = ""
        self._master: dict[str, str] = {}  # where torch's env:// meets
        self.observation = Observation()
        self._reasons: dict[int, str] = {}  # reasons for exits that the job itself causes
        term = 0 if job.succession is None else job.succession.term
        self.rendezvous = Rendezvous(launcher.bind_address, secret=self._secret, job=self.id, events=self, term=term)
        # A console may block; the thread that receives stacks may not.
        self._stall_stacks = StallStacks(self.rendezvous.ask, lambda text: self.call(lambda: self.log(text)))
        self.endpoint = RendezvousEndpoint(
            kind="hora", address=launcher.advertised_address, port=self.rendezvous.port, job=self.id
        )
        self._argv = self._lay_out()

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
    def observed(self, *, elastic: bool) -> Iterator[None]:
        """Report the job's end to its observer, whatever the outcome."""
        if self._job.watching is not None:
            try:
                facts = facts_of(self.id, title=self._job.title, command=self._job.command, elastic=elastic)
                self.observation.observer = self._job.watching.open(facts, self)
            except BaseException:  # such as an address in use
                self.rendezvous.close()
                raise
        try:
            yield
        except KeyboardInterrupt:
            self.observation.tell("ended", "stopped", "interrupted")
            raise
        except LeadershipLostError:
            self.observation.tell("ended", "stopped", "another process leads the job now")
            raise
        except BaseException as error:
            self.observation.tell(
                "ended", "stopped" if self._stop_reason else "failed", self._stop_reason or str(error)
            )
            raise
        self.observation.tell("ended", "done", "")

    def publish(self, generation: int, worlds: Mapping[int, World]) -> None:
        """Publish the workers' worlds and tell the observer."""
        self._stall_stacks.worlds = worlds
        self.observation.tell_world(generation, worlds)
        self.rendezvous.publish(generation, worlds)

    def start(self, worlds: Iterable[tuple[Slot, World]]) -> None:
        job, worlds = self._job, list(worlds)
        reporting = REPORTING if job.watching is not None else {}
        self._choose_master(worlds)
        workers = [
            WorkerSpec(
                worker=world.worker,
                slot=slot,
                argv=self._argv,
                env={
                    **self._master,
                    **job.env,
                    "PYTHONUNBUFFERED": "1",
                    **reporting,
                    **job.host_env.get(slot.hostname, {}),
                    **world.to_env(mpi_names=job.mpi_names),
                },
                cwd=job.cwd,
                private_files={"HORA_SECRET_FILE": worker_key(self._secret, world.worker)},
                grace_s=job.grace_s,
                preload=self._preload,
            )
            for slot, world in worlds
        ]
        if job.verbose:
            self.log(f"starting {len(workers)} processes: {' '.join(self._argv)}")
        self._launcher.start(workers, self)

    def _choose_master(self, worlds: Sequence[tuple[Slot, World]]) -> None:
        """Choose where rank 0 opens torch's store, should the workers' program ask for one (`env://`)."""
        hosts = [slot.hostname for slot, world in worlds if world.rank == 0]
        if not hosts or self._master:
            return
        if all(is_local(slot.hostname) for slot, _ in worlds):
            self._master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        else:  # a port on another host, below the ephemeral range
            self._master = {
                "MASTER_ADDR": hosts[0],
                "MASTER_PORT": str(_FIRST_PORT + zlib.crc32(self.id.encode()) % _NUM_PORTS),
            }

    def wait(self, until: float | None) -> None:
        """Wait for the next event, then handle all queued events."""
        # On some platforms a notebook or a signal cannot interrupt a wait without a limit.
        limit_s = _INTERRUPTIBLE_S if until is None else max(until - time.monotonic(), 0.0)
        try:
            self._happened.get(timeout=limit_s)()
            while not self._happened.empty():
                self._happened.get_nowait()()
        except queue.Empty:
            return

    def call(self, function: Callable[[], None]) -> None:
        """Run the function in the controller's thread, while it waits. From any thread."""
        self._happened.put(function)

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        """SIGTERM, then SIGKILL. Does not wait."""
        self._launcher.terminate(workers, grace_s=grace_s)

    def end(self, workers: Iterable[int], why: str = "") -> None:
        """End these workers; return when all have ended, or after the time that SIGKILL needs."""
        self.ending = True
        left = set(workers) - self.exits.keys()
        self._launcher.terminate(sorted(left), grace_s=self._job.grace_s)
        if why:  # last: a blocked console must not keep the workers alive
            self.log(why)
        limit = time.monotonic() + self._job.grace_s + KILLED_S
        while left - self.exits.keys() and time.monotonic() < limit:
            self.wait(limit)

    def leaving(self, why: str) -> None:
        """Mark the job as ending: from now on the exit of a worker is not a failure."""
        self.ending, self._stop_reason = True, why
        self.log(why)

    def log(self, text: str) -> None:
        """Write one of the launcher's own lines."""
        self.out.say(f"hora: {text}", stream="stderr")
        self.observation.tell_line(-1, "stderr", text)

    # ---- events, from other threads -----------------------------------------------------------------------

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self.observation.tell("output", worker, stream, data)
        self._or_raise_there(lambda: self.out.feed(worker, stream, data))

    def started(self, worker: int) -> None:
        self.call(lambda: self._events.started(worker))

    def exited(self, ended: WorkerExit) -> None:
        ended = replace(ended, reason=self._reasons.get(ended.worker, ended.reason))
        self.observation.tell("exited", ended.worker, ended.code, ended.reason)
        self._or_raise_there(lambda: self.out.end(ended.worker))
        self.call(lambda: self._on_exit(ended))

    def joined(self, worker: int) -> None:
        self.observation.tell("joined", worker)
        self.call(lambda: self._events.joined(worker))

    def returned(self, worker: int, result: bytes) -> None:
        if self._runs_a_function(worker):
            self.call(lambda: self._events.returned(worker, result))

    def raised(self, worker: int, report: ErrorReport) -> None:
        if not report.consequence:
            self.observation.tell("raised", worker, report.headline)
        if self._runs_a_function(worker):
            self.call(lambda: self._events.raised(worker, report))

    def _runs_a_function(self, worker: int) -> bool:
        """Return whether this worker runs the caller's function: results of other workers are never unpickled."""
        return self._job.function is not None and worker >= 0

    def on_log_line(self, worker: int, text: str) -> None:
        self.observation.tell_line(worker, "stdout", text)
        self.out.say(text)

    def waiting(self, worker: int, generation: int) -> None:
        self.call(lambda: self._events.waiting(worker, generation))

    def lost(self, worker: int) -> None:
        self.call(lambda: self._events.lost(worker))

    def _on_exit(self, ended: WorkerExit) -> None:
        self.exits[ended.worker] = ended
        self._events.exited(ended)

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        """Pass telemetry to the observer. Stalls are also reported to the user, with the stacks of the late ranks."""
        self.observation.tell("on_telemetry", worker, kind, data)
        self._stall_stacks.on_telemetry(worker, kind, data)

    # ---- what an observer may do, from other threads --------------------------------------------------------

    def ask(self, question: Mapping[str, Any], worker: int | None = None) -> None:
        self.rendezvous.ask(dict(question), worker)

    def stop(self, why: str) -> None:
        self._stop_reason = why
        self.call(functools.partial(_raise, JobFailedError(f"the job was stopped: {why}", exit_code=STOPPED)))

    def remove(self, worker: int, why: str) -> None:
        self.call(lambda: self._remove(worker, why))

    def _remove(self, worker: int, why: str) -> None:
        self._reasons[worker] = why
        self.log(f"ending worker {worker}: {why}")
        self.terminate([worker], grace_s=self._job.grace_s)

    def _or_raise_there(self, write: Callable[[], None]) -> None:
        """Raise an error of the caller's own stream in the controller's thread, not in this one."""
        try:
            write()
        except Exception as error:
            self.call(functools.partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
