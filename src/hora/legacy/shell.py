"""`safe_shell_exec` and `tiny_shell_exec`: a shell command to its end, with its output.

The safe one runs under a supervisor, as workers do: whatever the command has started ends with it, and all of it with
this process, however that dies.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hora.launch.control.output import Output
from hora.launch.environment import variables
from hora.launch.host.launcher import HostLauncher
from hora.launch.job import OutputOptions, WorkerExit, WorkerSpec
from hora.launch.slots import place_ranks

__all__ = ["GRACEFUL_TERMINATION_TIME_S", "execute", "execute_quietly"]

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
