"""The agent of a node: joins the controller on the first node, and is the way from it to a supervisor here.

Started on every node by the platform (`hora run --join …`), or by `srun` (`python -m hora.launch.agent.node`, which
reads where the controller is, and the nodes' secret, from its standard input). What happens after any death is the
supervisor's business: it ends its workers when this process does, and this process ends when the controller does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hora.errors import AuthenticationError
from hora.launch.agent.agents import PROTOCOL, credentials, job_secret
from hora.launch.agent.place import Place
from hora.launch.control.interrupt import ended_by_signals
from hora.launch.control.leaving import LEFT
from hora.launch.environment import variables
from hora.launch.host.connection import local_supervisor_command, wait_or_kill
from hora.launch.host.processes import Processes, environment_value
from hora.net.connection import Connection, connect
from hora.net.keys import worker_key
from hora.net.session import ClientSession
from hora.version import version

__all__ = ["completed", "end_supervisor", "join"]

_RETRY_S = 0.5
_AGAIN_S = 0.05
_ANSWER_LIMIT_S = 60.0
_READ_BYTES = 64 * 1024
_AHEAD_BYTES = 4 * 1024 * 1024  # output that the controller has not passed on yet
_GRACE_S = 30.0
_LEAVE_LIMIT_S = 600.0  # what asked us to end will not wait longer than it wants to
_BYE_LIMIT_S = 5.0


def join(place: Place, secret: bytes, *, limit_s: float) -> int:
    """Serve the job until it is over; its exit status, as the controller tells it.

    StartTimeoutError's sister TimeoutError when no controller comes in time; RuntimeError when it refuses, or is lost.
    """
    with ended_by_signals() as signals, contextlib.ExitStack() as stack:
        connection, welcome = _enter(place, secret, limit_s)
        stack.callback(connection.close)
        agent = _Agent(connection, welcome, secret)
        if welcome["elastic"]:
            signals.first = agent.leave
        return agent.run()


def _enter(place: Place, secret: bytes, limit_s: float) -> tuple[ClientSession, Mapping[str, Any]]:
    """Connect and introduce this node; what the controller answered."""
    deadline = time.monotonic() + limit_s

    def reopen(left_s: float) -> Connection:
        return connect((place.host, place.port), credentials(secret), timeout_s=left_s)

    while True:
        connection = ClientSession(_reach(place, secret, limit_s, deadline), reopen)
        try:
            welcome = _introduce(connection, place)
            connection.limit_s = float(welcome["return_s"])
            return connection, welcome
        except (EOFError, ConnectionError):
            # A crowd of strangers can push a node out whose proof has not been read yet: come again.
            connection.close()
            if deadline - time.monotonic() <= _RETRY_S:
                raise RuntimeError(f"the first node, {place.host}, hung up before it let this one join") from None
            time.sleep(_AGAIN_S)
        except BaseException:
            connection.close()
            raise


def _reach(place: Place, secret: bytes, limit_s: float, deadline: float) -> Connection:
    """Connect as soon as the controller is there."""
    while True:
        left_s = deadline - time.monotonic()
        try:
            return connect((place.host, place.port), credentials(secret), timeout_s=max(left_s, 0.1))
        except AuthenticationError:
            raise RuntimeError(
                f"the process at {place.host}:{place.port} does not hold this job's secret; give every node the same "
                "file"
            ) from None
        except OSError as error:  # not there yet, or its name is not known yet
            if deadline - time.monotonic() <= _RETRY_S:
                raise TimeoutError(
                    f"the first node did not answer at {place.host}:{place.port} within {limit_s:g} s "
                    f"(--start-timeout): {error}. Is the same command running there, with the same secret file?"
                ) from None
            time.sleep(_RETRY_S)


def _introduce(connection: ClientSession, place: Place) -> Mapping[str, Any]:
    """Return the controller's welcome. RuntimeError when it refuses; EOFError, ConnectionError when it hangs up."""
    connection.send(
        {
            "op": "join",
            "node": place.index,
            "name": place.name or socket.gethostname(),
            "slots": place.slots or 1,
            "version": version(),
            "protocol": PROTOCOL,
        }
    )
    try:
        answer, _ = connection.receive(limit_s=_ANSWER_LIMIT_S)
    except TimeoutError:
        raise RuntimeError(f"the first node, {place.host}, did not answer within {_ANSWER_LIMIT_S:g} s") from None
    connection.connection.sock.settimeout(None)
    if answer["op"] != "welcome":
        raise RuntimeError(f"the first node, {place.host}, refused this one: {answer.get('why')}")
    return answer


class _Agent:
    """Running -> (bye, or the controller is gone, or the supervisor has ended) -> over.

    Asked to end: leaving, until the ranks here have left -> over.
    """

    def __init__(self, connection: ClientSession, welcome: Mapping[str, Any], secret: bytes) -> None:
        self._connection = connection
        self._secret = job_secret(secret, welcome["nonce"])
        self._controllers_python = welcome["executable"]
        self._controller = str(connection.connection.sock.getpeername()[0])
        self._status: int | None = None
        self._lock = threading.Lock()
        self._leaving = False
        self._hung_up_at: float | None = None
        self._ahead = 0
        self._room = threading.Event()
        self._room.set()
        self._process = subprocess.Popen(
            [*local_supervisor_command(), str(float(welcome["silence_s"]))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )

    def run(self) -> int:
        listener = threading.Thread(target=self._listen, name="hora-agent", daemon=True)
        listener.start()
        try:
            self._forward()
            self._tell({"op": "ended", "status": self._end_supervisor()})
            listener.join(_BYE_LIMIT_S if self._leaving else _ANSWER_LIMIT_S)  # for the controller's bye, or its end
        finally:
            self._connection.shutdown()
            self._close_stdin()
            self._end_supervisor()
        if self._status is None and self._leaving:
            return LEFT
        if self._status is None:
            raise RuntimeError(f"the first node, {self._controller}, is gone; the workers here have been ended")
        return self._status

    def _forward(self) -> None:
        """Forward the supervisor's messages to the controller, until it says no more, or should have ended."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        streams = {self._process.stdout.fileno(): "out", self._process.stderr.fileno(): "err"}
        while "out" in streams.values():
            while not self._room.wait(1.0) and self._process.poll() is None:
                pass
            ready = select.select(list(streams), [], [], 1.0)[0]
            if not ready and self._hung_up_at is not None and time.monotonic() > self._hung_up_at + _GRACE_S:
                return  # it has been stopped, or hangs
            for descriptor in ready:
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    del streams[descriptor]
                    continue
                with self._lock:
                    self._ahead += len(data)
                    if self._ahead > _AHEAD_BYTES:
                        self._room.clear()
                self._tell({"op": streams[descriptor]}, data)

    def _tell(self, header: Mapping[str, object], payload: bytes = b"") -> None:
        self._connection.send(dict(header), payload)

    def leave(self) -> None:
        """Asked to end: tell the controller, and end when the ranks here have left.

        In a signal handler: takes no lock.
        """
        self._leaving = True
        threading.Thread(target=self._leave, name="hora-agent-leave", daemon=True).start()

    def _leave(self) -> None:
        self._tell({"op": "leaving"})
        deadline = time.monotonic() + _LEAVE_LIMIT_S
        while time.monotonic() < deadline and self._has_workers():
            time.sleep(_RETRY_S)
        self._close_stdin()

    def _has_workers(self) -> bool:
        return any(environment_value(pid, "HORA_WORKER") for pid in Processes().descendants(self._process.pid))

    # ---- in the listener's thread -------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                header, payload = self._connection.receive()
                if header["op"] == "in":
                    self._order(payload)
                elif header["op"] == "taken":
                    self._taken(int(header["bytes"]))
                elif header["op"] == "bye":
                    self._status = int(header["status"])
                    break
        except (EOFError, OSError, AuthenticationError):
            pass  # the controller is gone
        finally:
            self._room.set()
            self._close_stdin()
            self._hung_up_at = time.monotonic()

    def _taken(self, num_bytes: int) -> None:
        with self._lock:
            self._ahead -= num_bytes
            if self._ahead <= _AHEAD_BYTES:
                self._room.set()

    def _order(self, lines: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            view = memoryview(b"".join(self._completed(line) for line in lines.splitlines(keepends=True)))
            while view:
                view = view[self._process.stdin.write(view) or 0 :]

    def _completed(self, line: bytes) -> bytes:
        meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self._controller}
        return completed(line, self._secret, meeting, self._controllers_python)

    def _end_supervisor(self) -> int:
        return end_supervisor(self._process)

    def _close_stdin(self) -> None:
        """Close the supervisor's input, which it takes for the end of its launcher."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()


def completed(line: bytes, secret: bytes, meeting: Mapping[str, str], controllers_python: str) -> bytes:
    """An order with what did not travel: the worker's key, where it meets the controller from here, our Python."""
    order = json.loads(line)
    if order["op"] != "start":
        return line
    key = worker_key(secret, order["worker"])
    order["private_files"] = {name: data or key.hex() for name, data in order["private_files"].items()}
    order["env"] |= meeting
    if order["argv"][0] == controllers_python:
        order["argv"][0] = sys.executable
    return json.dumps(order).encode() + b"\n"


def end_supervisor(process: subprocess.Popen[bytes]) -> int:
    """Its exit status, once it has ended; one that does not is killed, with everything that it has started."""
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        processes = Processes()
        processes.kill(processes.descendants(process.pid))
        return wait_or_kill(process, _GRACE_S)


def main() -> int:
    """`srun … python -m hora.launch.agent.node`: a line of JSON on standard input says where to go."""
    given = json.loads(sys.stdin.readline())
    environ = variables()
    name = environ.get("SLURMD_NODENAME", socket.gethostname())
    place = Place(
        num_nodes=len(given["nodes"]),
        index=given["nodes"].index(name),
        host=given["host"],
        port=given["port"],
        slots=given["slots"][given["nodes"].index(name)],
        name=name,
        platform="Slurm",
    )
    try:
        join(place, bytes.fromhex(given["secret"]), limit_s=given["limit_s"])
        return 0  # how the job has ended is the launcher's to say
    except (RuntimeError, OSError) as error:
        print(f"hora: node {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
