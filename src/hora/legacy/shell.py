"""Shell commands for old programs: `safe_shell_exec`, `tiny_shell_exec`, and the queries about `mpirun`.

The safe one runs under an agent, as workers do: whatever the command has started ends with it, and all of it with
this process, however that dies.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.output import Output
from hora.launch.environment import variables
from hora.launch.job import OutputOptions, WorkerExit, WorkerSpec
from hora.launch.slots import place_ranks

__all__ = [
    "is_intel_mpi",
    "is_mpich",
    "is_open_mpi",
    "is_spectrum_mpi",
    "js_run",
    "mpi_available",
    "mpi_run",
    "GRACEFUL_TERMINATION_TIME_S",
    "execute",
    "execute_quietly",
]

GRACEFUL_TERMINATION_TIME_S = 5
_POLL_S = 0.1


def execute(
    command: str,
    env: Mapping[str, str] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
    index: int | None = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run the command in a shell: its exit code, 128 + s after signal s. It is ended as soon as one of `events` is set.

    With an `index` each line of output begins with `[index]<stdout>:`.
    """
    options = OutputOptions(
        prefix=index is not None, timestamp=prefix_output_with_timestamp, stdout=stdout, stderr=stderr
    )
    running = _Running(Output(options, {0: index or 0}))
    launcher = HostLauncher()
    argv = ("/bin/sh", "-c", command)
    worker = WorkerSpec(
        worker=0,
        slot=place_ranks(["localhost"])[0],
        argv=argv,
        env=variables() if env is None else env,
        private_files={},
        grace_s=GRACEFUL_TERMINATION_TIME_S,
    )
    try:
        launcher.start([worker], running)
        ending = False
        while not running.ended.wait(_POLL_S):
            if not ending and any(event.is_set() for event in events or ()):
                ending = True
                launcher.terminate([0], grace_s=GRACEFUL_TERMINATION_TIME_S)
    finally:
        launcher.close()
    return running.code


def execute_quietly(command: str, env: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Run the command in a shell: its output, both streams as one text, and its exit code. None if it cannot be run."""
    try:
        done = subprocess.run(
            command,
            shell=True,  # the caller's own command line
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError:
        return None
    return done.stdout, done.returncode


class _Running:
    """Events of the command, as the launcher reports them. See `job.LaunchEvents`."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self.ended = threading.Event()
        self.code = 1

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self._output.feed(worker, stream, data)

    def started(self, worker: int) -> None:
        return None

    def exited(self, ended: WorkerExit) -> None:
        self._output.end(ended.worker)
        self.code = ended.code
        self.ended.set()


def _version(env: Mapping[str, str] | None) -> str:
    found = execute_quietly("mpirun --version", env)
    return found[0] if found is not None and found[1] == 0 else ""


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Return whether an `mpirun` answers here."""
    return bool(_version(env))


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "Open MPI" in _version(env) or "OpenRTE" in _version(env)


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "IBM Spectrum MPI" in _version(env)


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    return "MPICH" in _version(env) or "HYDRA" in _version(env)


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    return "Intel(R) MPI" in _version(env)


def mpi_run(*args: Any, **kwargs: Any) -> NoReturn:
    """There is no MPI controller: an error that says what to use."""
    raise ValueError(
        "MPI support has not been built; Hora needs none. Use horovod.run(…) or horovodrun, or start the script with "
        "mpirun itself."
    )


js_run = mpi_run
