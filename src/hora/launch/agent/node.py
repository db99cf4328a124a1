"""The agent of a node: joins the controller on the first node, and is the way from it to a supervisor here.

Started on every node by the platform (`hora run --join …`), or by `srun` or `ssh` (`python -m hora.launch.agent.node`,
which reads where the controller is, and a key, from its standard input, and needs neither of them any more once it has
joined). What happens after any death is the supervisor's business: it ends its workers when this process does, and this
process ends when the controller does.
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
from hora.launch.agent.held import HeldSupervisor
from hora.launch.controller.agents import PROTOCOL
from hora.launch.controller.leaving import LEFT
from hora.launch.controller.signals import ended_by_signals
from hora.launch.environment import variables
from hora.launch.providers.platforms import Place
from hora.net.connection import Connection, connect
from hora.net.session import ClientSession
from hora.net.wire import Credentials
from hora.version import version

__all__ = ["join"]

_RETRY_S = 0.5
_AGAIN_S = 0.05
_ANSWER_LIMIT_S = 60.0
_READ_BYTES = 64 * 1024
_GRACE_S = 30.0
_LEAVE_LIMIT_S = 600.0  # what asked us to end will not wait longer than it wants to
_BYE_LIMIT_S = 5.0


def join(place: Place, credentials: Credentials, *, limit_s: float, listening: bool = False) -> int:
    """Serve the job until it is over; its exit status, as the controller tells it. `listening`: it is there already.

    StartTimeoutError's sister TimeoutError when no controller comes in time; RuntimeError when it refuses, or is lost.
    """
    with ended_by_signals() as signals, contextlib.ExitStack() as stack:
        connection, welcome = _enter(place, credentials, limit_s, listening)
        stack.callback(connection.close)
        agent = _Agent(connection, welcome)
        if welcome["elastic"]:
            signals.first = agent.leave
        return agent.run()


def _enter(
    place: Place, credentials: Credentials, limit_s: float, listening: bool
) -> tuple[ClientSession, Mapping[str, Any]]:
    """Connect, as soon as the controller is there, and introduce this node; what the controller answered."""
    deadline, where = time.monotonic() + limit_s, f"{place.host}:{place.port}"

    def reach(left_s: float) -> Connection:
        return connect((place.host, place.port), credentials, timeout_s=max(left_s, 0.1))

    while True:
        connection: ClientSession | None = None
        try:
            connection = ClientSession(reach(deadline - time.monotonic()), reach)
            welcome = _introduce(connection, place)
            connection.limit_s = float(welcome["return_s"])
            return connection, welcome
        except AuthenticationError:
            why = f"the process at {where} does not hold this job's secret; give every node the same file"
            raise RuntimeError(why) from None
        except (EOFError, OSError) as error:  # not there yet, or its name is not known yet
            late = deadline - time.monotonic() <= _RETRY_S
            if connection is not None:
                connection.close()
            if connection is not None and late:
                raise RuntimeError(f"the first node, {place.host}, hung up before it let this one join") from None
            if connection is None and listening and not isinstance(error, ConnectionResetError | BrokenPipeError):
                raise RuntimeError(
                    f"cannot connect to the launcher at {where}: {error}; has it ended, is there a firewall between, "
                    "or does it listen on another network (--network-interfaces)?"
                ) from None
            if late:
                raise TimeoutError(
                    f"the first node did not answer at {where} within {limit_s:g} s (--start-timeout): {error}. Is the "
                    "same command running there, with the same secret file?"
                ) from None
            # A crowd of strangers can push a node out whose proof has not been read yet: come again.
            time.sleep(_RETRY_S if connection is None else _AGAIN_S)


def _introduce(connection: ClientSession, place: Place) -> Mapping[str, Any]:
    """Return the controller's welcome. RuntimeError when it refuses; EOFError, ConnectionError when it hangs up."""
    own = {"node": place.index, "name": place.name or socket.gethostname(), "slots": place.slots or 1}
    connection.send({"op": "join", **own, "version": version(), "protocol": PROTOCOL})
    try:
        answer, _ = connection.receive(limit_s=_ANSWER_LIMIT_S)
    except TimeoutError:
        connection.close()
        raise RuntimeError(f"the first node, {place.host}, did not answer within {_ANSWER_LIMIT_S:g} s") from None
    connection.connection.sock.settimeout(None)
    if answer["op"] != "welcome":
        connection.close()
        raise RuntimeError(f"the first node, {place.host}, refused this one: {answer.get('why')}")
    return answer


class _Agent:
    """Running -> (bye, or the controller is gone, or the supervisor has ended) -> over.

    Asked to end: leaving, until the ranks here have left -> over.
    """

    def __init__(self, connection: ClientSession, welcome: Mapping[str, Any]) -> None:
        self._connection = connection
        self._controllers_python = str(welcome["executable"])
        self._controller = str(connection.connection.sock.getpeername()[0])
        self._status: int | None = None
        self._leaving = False
        self._hung_up_at: float | None = None
        self._supervisor = HeldSupervisor(float(welcome["silence_s"]), stderr=subprocess.PIPE)

    def run(self) -> int:
        listener = threading.Thread(target=self._listen, name="hora-agent", daemon=True)
        listener.start()
        try:
            self._forward()
            self._tell({"op": "ended", "status": self._supervisor.end()})
            listener.join(_BYE_LIMIT_S if self._leaving else _ANSWER_LIMIT_S)  # for the controller's bye, or its end
        finally:
            self._connection.shutdown()
            self._supervisor.hang_up()
            self._supervisor.end()
        if self._status is None and self._leaving:
            return LEFT
        if self._status is None:
            raise RuntimeError(f"the first node, {self._controller}, is gone; the workers here have been ended")
        return self._status

    def _forward(self) -> None:
        """Forward the supervisor's messages to the controller, until it says no more, or should have ended."""
        process = self._supervisor.process
        assert process.stdout is not None
        assert process.stderr is not None
        streams = {process.stdout.fileno(): "out", process.stderr.fileno(): "err"}
        while "out" in streams.values():
            self._supervisor.wait_for_room()
            ready = select.select(list(streams), [], [], 1.0)[0]
            if not ready and self._hung_up_at is not None and time.monotonic() > self._hung_up_at + _GRACE_S:
                return  # it has been stopped, or hangs
            for descriptor in ready:
                data = os.read(descriptor, _READ_BYTES)
                if not data:
                    del streams[descriptor]
                    continue
                self._supervisor.sent(len(data))
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
        self._supervisor.wait_for_workers(_LEAVE_LIMIT_S)
        self._supervisor.hang_up()

    # ---- in the listener's thread -------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                header, payload = self._connection.receive()
                if header["op"] == "in":
                    meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self._controller}
                    self._supervisor.order(payload, meeting, self._controllers_python)
                elif header["op"] == "taken":
                    self._supervisor.taken(int(header["bytes"]))
                elif header["op"] == "bye":
                    self._status = int(header["status"])
                    break
        except (EOFError, OSError, AuthenticationError):
            pass  # the controller is gone
        finally:
            self._supervisor.forget()
            self._supervisor.hang_up()
            self._hung_up_at = time.monotonic()


def main() -> int:
    """`python -m hora.launch.agent.node`, by srun or ssh: a line of JSON on standard input says where to go."""
    order = sys.stdin.readline()
    if not order:
        print(
            "no order has come on standard input: what starts commands on this host must pass it on (say "
            "`kubectl exec -i`)",
            file=sys.stderr,
        )
        return 1
    given = json.loads(order)
    name = next(iter(given["nodes"]))
    if len(given["nodes"]) > 1:
        name = variables().get("SLURMD_NODENAME", socket.gethostname())
    index, slots = given["nodes"][name]
    host, port = given["where"]
    place = Place(num_nodes=index + 1, index=index, host=host, port=port, slots=slots, name=name)
    try:
        credentials = Credentials(bytes.fromhex(given["key"]), "nodes", given["speaker"])
        join(place, credentials, limit_s=given["limit_s"], listening=True)
        return 0  # how the job has ended is the launcher's to say
    except (RuntimeError, OSError) as error:
        with contextlib.suppress(OSError):  # ssh has gone
            print(f"hora: node {name}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
