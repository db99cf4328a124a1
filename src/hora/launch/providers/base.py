"""The interface of a platform: a `Provider` starts an agent on a host, and does nothing else.

    hosts()            which hosts there are
    start(host, order) run `order.command` there, with `order.invitation` on its standard input
    ended(host, why)   that agent is gone: release what it used
    close()            the job is over: release everything

The agent connects to the controller, which then starts workers, receives their output and ends them: no byte of that
passes through the provider. `Commands` is for providers whose agents are started by a command, such as ssh.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hora.launch.limits import KILLED_S, STARTER_END_S
from hora.launch.slots import HostInfo

_SHOWN_BYTES = 4096
FAILED = "Hora cannot be started on some hosts:\n{hosts}"


@dataclass(frozen=True)
class Order:
    """Starts one agent: run the command on the host."""

    command: tuple[str, ...]  # a Python and its arguments: no secret
    invitation: bytes = field(repr=False)  # one line for its standard input, and nowhere else: it contains a key
    limit_s: float  # for the agent to connect


class StartError(Exception):
    """An agent could not be started. `why`: what the platform said.

    `message`: the error of the job, in which `{hosts}` stands for the hosts with the same message, and why each failed.
    """

    def __init__(self, why: str, message: str = FAILED) -> None:
        super().__init__(why)
        self.message = message


class Provider(Protocol):
    """Starts agents. `hosts` and `close` are called by the controller's thread, the others by any."""

    def hosts(self) -> Sequence[HostInfo]:
        """Return the hosts where agents can be started, and how many processes may run on each."""

    def start(self, host: str, order: Order) -> None:
        """Start an agent on a host, on which none runs.

        Every call has a thread of its own. It may return as soon as the platform has accepted the order, or when the
        agent has ended. Raises StartError if the agent cannot be started; once it has connected, that is ignored.
        """

    def ended(self, host: str, why: str) -> None:
        """Release what the agent of a host still uses: it is gone, or did not come in time, and the job goes on."""

    def close(self) -> None:
        """Release everything. All agents have ended, or were told to. Idempotent."""


class Commands:
    """The commands that start the agents of a provider, one for each host."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}  # by host
        self._closed = False

    def run(
        self, host: str, argv: Sequence[str], order: Order, *, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Run a command that passes its standard input to the agent; return its exit status and what it complained of.

        Raises OSError if there is no such command.
        """
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
        with self._lock:
            self._running[host] = process
            if self._closed:
                process.kill()
        assert process.stdin is not None
        assert process.stderr is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(order.invitation)
        complaints = b""
        with process.stderr:
            while words := os.read(process.stderr.fileno(), _SHOWN_BYTES):
                complaints = (complaints + words)[-_SHOWN_BYTES:]
        return process.wait(), complaints.decode(errors="replace").strip()

    def end(self, host: str) -> None:
        """End the command of a host. Does not wait."""
        with self._lock:
            if host in self._running:
                self._running[host].kill()

    def close(self) -> None:
        """Wait for all commands, which end with their agents; a SIGTERM makes some (srun) end them."""
        with self._lock:
            self._closed, processes = True, list(self._running.values())
        deadline = time.monotonic() + STARTER_END_S
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.terminate()
                try:
                    process.wait(KILLED_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(KILLED_S)
