"""The nouns of launching: what a job is, how it ended, what a launcher can do.

Nothing here starts a process or opens a socket. `start` and the Spark side build a `Job`; `controller.loop` runs it
through a `Launcher`: `controller.launcher` for hosts, `providers.spark.launcher` and `providers.ray.launcher` for
clusters. Where its workers go is in `slots`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from hora.errors import JobFailedError
from hora.launch.controller.observer import Watching
from hora.launch.slots import Slot

__all__ = [
    "HostLease",
    "Job",
    "JobResult",
    "LaunchEvents",
    "Launcher",
    "LeadershipLostError",
    "OutputOptions",
    "Succession",
    "WorkerExit",
    "WorkerSpec",
    "exit_status",
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Destinations of the workers' output.

    `stdout` / `stderr`: streams (text or binary) that receive the lines; None is this process's own at the
    time of the run. `console=False` shows nothing there (files and log tails still get the lines).
    `directory`: also write `<directory>/rank.<r>/{stdout,stderr}`. `tag` stands before the rank in the prefix.
    """

    prefix: bool = True
    timestamp: bool = False
    tag: str = ""
    console: bool = True
    directory: str | None = None
    stdout: IO[Any] | None = None
    stderr: IO[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Description of a job: a program and its slots. Exactly one of `command` (an argv) and `function` is given.

    `function` is the cloudpickle of `(callable, args, kwargs)`; it reaches the workers over the authenticated
    connection. `env` is what workers get besides their place in the world: local workers get exactly this, remote ones
    get it on top of their login environment. Secrets never belong in it. `mpi_names`: every rank also gets its place
    under the names that Open MPI's mpirun gives it, for scripts that look there. `secret`: the job's, where its nodes
    know it already; otherwise it gets a new one. `id`: its name, if it has one already. `succession`: other processes
    may take the job over from this one. `host_env`: further variables for the ranks on a host, by its name. `lease`: of
    hosts that are the job's for as long as somebody else wants.
    """

    slots: tuple[Slot, ...]
    command: tuple[str, ...] = ()
    function: bytes | None = field(default=None, repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    executable: str = sys.executable
    output: OutputOptions = OutputOptions()
    start_timeout_s: float = 30.0
    grace_s: float = 5.0
    verbose: bool = False
    title: str = ""
    watching: Watching | None = None
    mpi_names: bool = False
    secret: bytes | None = field(default=None, repr=False)
    id: str = ""
    succession: Succession | None = field(default=None, repr=False)
    host_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    lease: HostLease | None = field(default=None, repr=False)

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
    """One process for a launcher to start.

    `worker` identifies the process for the whole job (its rank, in a job that never changes size). `private_files`:
    variables and what the process shall find in the file that each of them names: the worker's own key in
    `HORA_SECRET_FILE`. The launcher makes these files (memfds in /proc, never on a disk) and adds the variables to
    `env`; argv and environment never hold what is in them. `preload`: several workers of one host may be forked from a
    process that has loaded these modules, instead of being executed; None: they may not.
    """

    worker: int
    slot: Slot
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: str | None = None
    private_files: Mapping[str, bytes] = field(repr=False)
    grace_s: float = 5.0
    preload: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """End of a worker process. Death by signal s is code 128 + s. `reason`: why it never ran, if so."""

    worker: int
    code: int
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """A job that succeeded. `results[r]`: the cloudpickle of rank r's return value (None: a command)."""

    job: str
    exits: tuple[WorkerExit, ...]
    results: tuple[bytes | None, ...] = field(repr=False)


class LeadershipLostError(Exception):
    """This process does not lead the job any more. Its workers live on."""


def exit_status(error: BaseException) -> int:
    """Return the exit status of a job that ended with this error."""
    if isinstance(error, JobFailedError):
        return error.exit_code or 1
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1


class Succession(Protocol):
    """The means by which a job outlives the process that controls it.

    `state`: what the leader before this one has saved; None for the first. `term`: this one's number, greater than
    those of all before.
    """

    @property
    def state(self) -> Mapping[str, Any] | None: ...

    @property
    def term(self) -> int: ...

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from any thread, when this process does not lead any more."""

    def check(self) -> None:
        """LeadershipLostError unless this process leads for certain."""

    def save(self, state: Mapping[str, Any]) -> None:
        """Save what the next leader must know. LeadershipLostError if this process does not lead any more."""

    def adopt(self, workers: Mapping[str, Collection[int]], events: LaunchEvents) -> set[int]:
        """Look after these workers, by host; returns those whose hosts know them."""

    def has_host(self, name: str) -> bool:
        """Return whether a host of an earlier leader has come to this one."""

    def meet_at(self, port: int) -> None:
        """The workers' meeting place is open."""

    def abandon(self) -> None:
        """Let go of the workers, which another process looks after."""


class HostLease(Protocol):
    """Hosts that may be taken away from a job while it runs."""

    def watch(self, end_host: Callable[[str, str], Callable[[], bool]]) -> None:
        """Call `end_host(name, reason)`, from any thread, for each host that is taken away; what it returns tells
        whether the job's processes there have ended.
        """

    def close(self) -> None:
        """All processes of the job have ended."""


class LaunchEvents(Protocol):
    """Interface to which a launcher reports, from any thread; the controller implements it."""

    def output(self, worker: int, stream: str, data: bytes) -> None:
        """Some bytes of a worker's `stdout` or `stderr`. Blocks when the reader is slow."""

    def started(self, worker: int) -> None:
        """The worker's process runs."""

    def exited(self, ended: WorkerExit) -> None:
        """The worker's process has ended and all its output was reported. Exactly once for each worker."""


class Launcher(Protocol):
    """Starts processes somewhere, streams their output and ends them. Results do not come through here."""

    @property
    def bind_address(self) -> str:
        """The local address on which the rendezvous listens for the workers (loopback if all are local)."""

    @property
    def advertised_address(self) -> str:
        """The address under which the workers reach it. Usually the same."""

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        """Start these processes; return without waiting for them. May be called again with others."""

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        """End these workers and their descendants: SIGTERM, SIGKILL after the grace time. Does not wait."""

    def close(self) -> None:
        """End whatever is left, wait for it and release everything. Idempotent."""
