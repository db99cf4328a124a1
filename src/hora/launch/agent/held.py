"""The supervisor of a node's workers, as the node's agent or keeper holds it: orders for it, its end, and how much of
what it says the controller may not have passed on yet.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from hora.launch.agent.processes import Processes, environment_value
from hora.launch.controller.host import local_supervisor_command, wait_or_kill

__all__ = ["AHEAD_BYTES", "HeldSupervisor"]

AHEAD_BYTES = 4 * 1024 * 1024  # of output that the controller has not passed on yet
_GRACE_S = 30.0
_TURN_S = 0.2


class HeldSupervisor:
    """Runs from the start. `silence_s`: of the controller, after which it ends; None: it waits."""

    def __init__(self, silence_s: float | None = None, *, stderr: int | None = None) -> None:
        silence = [] if silence_s is None else [str(silence_s)]
        self.process = subprocess.Popen(
            [*local_supervisor_command(), *silence],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            bufsize=0,
        )
        self._lock = threading.Lock()
        self._ahead = 0
        self._room = threading.Event()
        self._room.set()

    def order(self, lines: bytes, meeting: Mapping[str, str], controllers_python: str) -> None:
        """Pass orders on, with what is so only here: where workers meet the controller, and our Python."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, as its reader knows
            orders = (_completed(line, meeting, controllers_python) for line in lines.splitlines(keepends=True))
            view = memoryview(b"".join(orders))
            while view:
                view = view[self.process.stdin.write(view) or 0 :]

    def wait_for_workers(self, limit_s: float) -> None:
        """Wait until no worker is left."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and any(
            environment_value(pid, "HORA_WORKER") for pid in Processes().descendants(self.process.pid)
        ):
            time.sleep(_TURN_S)

    def hang_up(self) -> None:
        """Close its input, which it takes for the end of its launcher."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def end(self) -> int:
        """Its exit status, once it has ended; one that does not is killed, with everything that it has started."""
        try:
            return self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            processes = Processes()
            processes.kill(processes.descendants(self.process.pid))
            return wait_or_kill(self.process, _GRACE_S)

    # ---- what it says, and how much of it has been passed on --------------------------------------------------------

    def sent(self, num_bytes: int, *, waits: bool = True) -> None:
        """So much has been sent to the controller; too much is ahead of it: read no more (unless nobody `waits`)."""
        with self._lock:
            self._ahead += num_bytes
            if waits and self._ahead > AHEAD_BYTES:
                self._room.clear()

    def taken(self, num_bytes: int) -> None:
        """So much has been passed on."""
        with self._lock:
            self._ahead -= num_bytes
            if self._ahead <= AHEAD_BYTES:
                self._room.set()

    def forget(self) -> None:
        """Whoever was to pass it on has gone."""
        with self._lock:
            self._ahead = 0
            self._room.set()

    def wait_for_room(self) -> None:
        """Wait until more may be read, or it has ended."""
        while not self._room.wait(1.0) and self.process.poll() is None:
            pass


def _completed(line: bytes, meeting: Mapping[str, str], controllers_python: str) -> bytes:
    order = json.loads(line)
    if order["op"] != "start":
        return line
    order["env"] |= meeting
    if order["argv"][0] == controllers_python:
        order["argv"][0] = sys.executable
    return json.dumps(order).encode() + b"\n"
