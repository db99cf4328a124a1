"""Types of launching: a job, its workers, its observer, its outcome, and the launcher's interface.

Nothing here starts a process or opens a socket. `controller.loop` runs a `Job` through a `Launcher`:
`controller.launcher` for all platforms whose agents start the workers, `providers.ray.launcher` for Ray. `slots` places
the workers.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Protocol

from hora.errors import JobFailedError
from hora.launch.agent.protocol import Exited
from hora.launch.limits import GRACE_S
from hora.launch.slots import Slot
from hora.net.rendezvous import Rendezvous, RendezvousEvents
from hora.net.requests import Raised
from hora.telemetry.parsing import Stacks, Stall, parse
from hora.world import World

if TYPE_CHECKING:
    from hora.watch import live
    from hora.watch.kubeflow import Reports
    from hora.watch.tracking import Tracking

# Variables for the workers of an observed job: they report once a second.
# Of ranks whose job is watched. A job that a rank starts has no page or recording of its own at the same place.
REPORTING = {"HORA_TELEMETRY_S": "1.0", "HORA_DASHBOARD": "0", "HORA_RECORD": "", "HORA_VERDICT": "0"}
STOPPED = 143  # the exit status of a job that its observer stopped
_STACKS_AGAIN_S = 30.0

_log = logging.getLogger("hora.launch")


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Destinations of the workers' output."""

    prefix: bool = True
    timestamp: bool = False
    tag: str = ""  # stands before the rank in the prefix
    console: bool = True  # False shows nothing there; files and log tails still get the lines
    directory: str | None = None  # also write `<directory>/rank.<r>/{stdout,stderr}`
    stdout: IO[Any] | None = None  # text or binary; None: this process's own, at the time of the run
    stderr: IO[Any] | None = None  # the same


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Settings of the observation of a job."""

    page: bool = False  # a live page
    listen: str = ""  # its host:port; loopback and a free port unless given
    record: str | None = None  # a file for `hora view`
    verdict: bool = True  # at the end: on the terminal, and in verdict.json beside the record or in this directory
    reports: Reports | None = None  # of the job's progress, to Kubeflow
    tracking: Tracking | None = None  # the job's MLflow run
    progress: bool = False  # a line that changes, where the job was started
    browser: bool = False  # open the page in one
    demo: bool = False  # the page can kill ranks

    @classmethod
    def wanted(
        cls,
        environ: Mapping[str, str],
        *,
        page: bool | None = None,
        listen: str | None = None,
        record: str | None = None,
        verdict: bool | None = None,
    ) -> Watching | None:
        """Read arguments, HORA_DASHBOARD (1, 0, or an address), HORA_RECORD, HORA_VERDICT, HORA_REPORT, Kubeflow's
        variables; an active MLflow run counts as HORA_REPORT=mlflow.

        None: nothing is wanted. A job with a page or a recording has a verdict.
        """
        setting = environ.get("HORA_DASHBOARD", "")
        if page is None:
            page = setting not in ("", "0") or bool(listen)
        listen = listen or ("" if setting in ("0", "1") else setting)
        record = record or environ.get("HORA_RECORD") or None
        reports = None
        if "KUBEFLOW_TRAINER_SERVER_URL" in environ:
            from hora.watch.kubeflow import Reports

            reports = Reports.of(environ)
        if verdict is None:
            verdict = environ.get("HORA_VERDICT", "") not in ("", "0") or page or bool(record)
        tracking = None
        if "mlflow" in sys.modules or environ.get("HORA_REPORT") or environ.get("MLFLOW_RUN_ID"):
            from hora.watch.tracking import Tracking

            tracking = Tracking.wanted(environ)
        if not page and not record and not verdict and reports is None and tracking is None:
            return None
        return cls(page=page, listen=listen, record=record, verdict=verdict, reports=reports, tracking=tracking)

    @classmethod
    def with_progress(cls, watching: Watching | None) -> Watching | None:
        """Add the line of progress, if this process's output is a notebook or a terminal."""
        from hora.watch.progress import has_place

        return replace(watching or cls(verdict=False), progress=True) if has_place() else watching


class Observation(RendezvousEvents):
    """Passes the events of a job's workers on to its observer, in any thread, until that fails. Shows the user the
    workers' lines and, when a rank reports a stall, the stacks of the late ranks.
    """

    rendezvous: Rendezvous

    def __init__(self) -> None:
        self.observer: live.Dashboard | None = None
        self.reporting: Mapping[str, str] = {}  # variables of the ranks, once the job is observed
        self._worlds: Mapping[int, World] = {}  # the present one, by worker
        self._asked_at: dict[int, float] = {}  # worker -> when its stack was requested
        self._stacks_to_show: set[int] = set()
        self._sends_invalid: set[int] = set()  # workers whose telemetry was invalid

    def observe(
        self,
        watching: Watching | None,
        control: live.JobControl,
        job_id: str,
        *,
        title: str,
        command: Sequence[str] = (),
        elastic: bool = False,
        num_ranks: int = 0,
        platform: str = "",
    ) -> None:
        """Begin to observe the job as `watching` says; `control` controls it. OSError: the page's address is taken."""
        if watching is None:
            return
        from hora.watch.live import Dashboard

        programs = [word for word in command if word.endswith((".py", ".sh"))] + [*command[:1], "a function"]
        facts = {
            "id": job_id,
            "title": title or os.path.basename(programs[0]),
            "command": " ".join(command)[:500],
            "began": time.time(),
            "elastic": elastic,
            **({"demo": True} if watching.demo else {}),
        }
        how = {
            name: getattr(watching, name)
            for name in ("listen", "record", "page", "verdict", "reports", "tracking", "progress")
        }
        try:
            self.observer = Dashboard(facts, control, **how)
        except BaseException:
            self.rendezvous.close()
            raise
        self.reporting = REPORTING
        if watching.tracking is not None:
            what = facts["command"] or facts["title"]
            parameters = {"hora.np": num_ranks, "hora.launcher": platform, "hora.command": what}
            watching.tracking.begin(str(facts["title"]), parameters)
            self.reporting = {**REPORTING, **watching.tracking.variables()}
        if watching.browser and self.observer.page is not None:
            from hora.watch.address import show_in_browser

            show_in_browser(self.observer.page)

    def tell(self, event: str, *arguments: object, **news: object) -> None:
        """Call this method of the observer."""
        if self.observer is None:
            return
        try:
            getattr(self.observer, event)(*arguments, **news)
        except Exception:  # an observer's error must not end the training
            _log.exception("the job is not observed any more")
            self.observer = None

    def tell_line(self, worker: int, stream: str, text: str) -> None:
        """Report a line that did not come from a worker's output."""
        self.tell("output", worker, stream, text.encode(errors="replace") + b"\n")

    def tell_world(self, generation: int, worlds: Mapping[int, World]) -> None:
        """The job has formed a world."""
        self._worlds = worlds
        places = [(worker, world.rank, world.hostname) for worker, world in sorted(worlds.items())]
        self.tell("note", "world", -1, generation=generation, places=places)

    def show_line(self, text: str) -> None:
        """Show a line of a worker."""
        print(text, flush=True)

    def show_stack(self, text: str) -> None:
        """Show where a late rank is. Must not block."""
        print(f"hora: {text}", file=sys.stderr, flush=True)

    def joined(self, worker: int) -> None:
        self.tell("note", "joined", worker)

    def raised(self, worker: int, report: Raised) -> None:
        if not report.consequence:
            self.tell("note", "failed", worker, headline=report.headline)

    def on_log_line(self, worker: int, text: str) -> None:
        self.tell_line(worker, "stdout", text)
        self.show_line(text)

    def on_telemetry(self, worker: int, kind: str, data: bytes) -> None:
        try:
            told = parse(kind, data)
        except ValueError as error:
            if worker not in self._sends_invalid:
                self._sends_invalid.add(worker)
                _log.warning("worker %d sends invalid telemetry, which is ignored (logged once): %s", worker, error)
            return
        self.tell("on_telemetry", worker, kind, data)
        if isinstance(told, Stall):
            for number, world in self._worlds.items():
                if world.rank in told.ranks and time.monotonic() - self._asked_at.get(number, -1e9) > _STACKS_AGAIN_S:
                    self._asked_at[number] = time.monotonic()
                    self._stacks_to_show.add(number)
                    self.rendezvous.query({"question": "stack"}, number)
        elif isinstance(told, Stacks) and worker in self._stacks_to_show and worker in self._worlds:
            self._stacks_to_show.discard(worker)
            world = self._worlds[worker]
            where = f"rank {world.rank} on {world.hostname}"
            self.show_stack(f"{where} keeps the others waiting; it is here:\n{told.text}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """Description of a job: a program and its slots. Exactly one of `command` and `function` is given."""

    slots: tuple[Slot, ...]
    command: tuple[str, ...] = ()  # an argv
    # The cloudpickle of `(callable, args, kwargs)`, for the authenticated connection
    function: bytes | None = field(default=None, repr=False)
    # The workers' variables besides their place; local workers get exactly these; never secrets
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    executable: str = sys.executable
    output: OutputOptions = OutputOptions()
    start_timeout_s: float = 30.0
    grace_s: float = GRACE_S
    verbose: bool = False
    title: str = ""
    platform: str = "this machine"  # what starts its processes
    watching: Watching | None = None
    secret: bytes | None = field(default=None, repr=False)  # of a job that has one already
    id: str = ""  # the same
    port: int = 0  # of the rendezvous; 0: any
    preload: tuple[str, ...] | None = None  # of a command whose ranks may be forked; see `WorkerSpec`
    forks_one: bool = False  # a host's only worker is forked, too, if it may be: its successor starts faster
    # More variables for the ranks on a host, by host name
    host_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    lease: HostLease | None = field(default=None, repr=False)  # of hosts that another process may take back

    def __post_init__(self) -> None:
        if bool(self.command) == (self.function is not None):
            raise ValueError("a job needs either a command or a function, and not both")
        ranks = [slot.rank for slot in self.slots]
        if not ranks or ranks != list(range(len(ranks))):
            raise ValueError(f"the slots of a job must have ranks 0, 1, 2, …, but they are {ranks}")
        if self.start_timeout_s <= 0:
            raise ValueError(f"the start timeout must be positive, but it is {self.start_timeout_s} s")

    @property
    def num_proc(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """One process for a launcher to start."""

    worker: int  # its number in the job: its rank, in a job of fixed size
    slot: Slot
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: str | None = None
    # Contents of files, by the variable that will name each (memfds, never on a disk)
    private_files: Mapping[str, bytes] = field(repr=False)
    # It may be forked from a process that has loaded these modules; None: execute it
    preload: tuple[str, ...] | None = None
    forks_one: bool = False  # even if it is the only one there


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job that succeeded. `results[r]`: the cloudpickle of rank r's return value (None: a command)."""

    results: tuple[bytes | None, ...] = field(repr=False)

    def values(self) -> list[Any]:
        """Return the values of the ranks that returned one, in rank order."""
        import cloudpickle  # only jobs of functions need it

        return [cloudpickle.loads(value) for value in self.results if value is not None]


class LeadershipLostError(RuntimeError):
    """This process no longer leads the job. Its workers keep running."""

    def __init__(self) -> None:
        super().__init__("another process leads this job now; its ranks go on")


def exit_status(error: BaseException) -> int:
    """Return the exit status of a job that ended with this error."""
    if isinstance(error, JobFailedError):
        return error.exit_code or 1
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


class HostLease(Protocol):
    """Hosts that may be taken away from a job while it runs."""

    def watch(self, end_host: Callable[[str, str], Callable[[], bool]]) -> None:
        """Call `end_host(name, reason)`, from any thread, for each removed host; it returns a check of whether the
        job's processes there have ended.
        """

    def close(self) -> None:
        """All processes of the job have ended."""


class LaunchEvents(Protocol):
    """Interface to which a launcher reports, from any thread; the controller implements it."""

    def output(self, worker: int, stream: str, data: bytes) -> None:
        """Some bytes of a worker's `stdout` or `stderr`. Blocks when the reader is slow."""

    def started(self, worker: int) -> None:
        """The worker's process runs."""

    def exited(self, ended: Exited) -> None:
        """The worker's process has ended and all its output was reported. Exactly once for each worker."""


class Launcher(Protocol):
    """Starts processes, forwards their output and ends them. Results take another way."""

    bind_address: str  # where the rendezvous listens for the workers: loopback if all are local
    advertised_address: str  # where they reach it, usually the same

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        """Start these processes; return without waiting for them. May be called again with others."""

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        """End these workers and their descendants: SIGTERM, SIGKILL after the grace time. Does not wait."""

    def close(self) -> None:
        """End whatever is left, wait for it and release everything. Idempotent."""
