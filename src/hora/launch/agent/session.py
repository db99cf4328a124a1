"""The agent of a node other than the controller's: it joins the controller through a session.

The platform starts it on every node (`hora run --join …`), or `srun` or `ssh` runs this module, which reads the
controller's address and a key from standard input and does not need srun or ssh once it has joined. The agent and its
workers end with the controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import sys
import threading
import time
from collections import deque

from hora.errors import AuthenticationError
from hora.launch.agent.agent import Agent, guarded
from hora.launch.agent.protocol import Join, Message, Output, Refused, Start, Taken, Welcome, pack, unpack
from hora.launch.limits import CONNECT_S, THREAD_END_S
from hora.launch.processes import variables
from hora.launch.slots import NodeSpec
from hora.net.session import ClientSession
from hora.net.wire import Connection, Credentials, connect
from hora.version import version

_RETRY_S = 0.5
_AGAIN_S = 0.05
MALFORMED = (EOFError, OSError, AuthenticationError, ValueError, struct.error)


class QueuedLink:
    """A link whose orders arrive in other threads: the agent's loop polls `fileno` and never waits for the network."""

    wants_write = False

    def __init__(self) -> None:
        self.gone = False
        self._inbox: deque[Message | None] = deque()  # None: the link has ended for good
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)

    def fileno(self) -> int:
        return self._wake_in

    def receive(self) -> list[Message]:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_in, 4096)
        found: list[Message] = []
        while self._inbox:
            message = self._inbox.popleft()
            if message is None:
                self.gone = True
            else:
                found.append(message)
        return found

    def flush(self) -> None:
        return None

    def _put(self, message: Message | None) -> None:
        """Pass an order to the agent's loop. From any thread."""
        self._inbox.append(message)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: a wake-up is pending
            os.write(self._wake_out, b"\0")


class SessionLink(QueuedLink):
    """The link of an agent whose controller is reached through a session. See `agent.ControllerLink`."""

    def __init__(self, session: ClientSession, welcome: Welcome) -> None:
        super().__init__()
        self.silence_limit_s: float | None = welcome.silence_s
        self.elastic = welcome.elastic
        self.controller = str(session.connection.sock.getpeername()[0])
        self._session, self._executable = session, welcome.executable
        self._ahead, self._lock = 0, threading.Lock()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, name=f"hora-agent-{name}", daemon=True)
            for name, target in (("receive", self._receive), ("send", self._send))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def backlog(self) -> int:
        return self._ahead

    def send(self, message: Message) -> None:
        if isinstance(message, Output):
            with self._lock:
                self._ahead += len(message.data)
        self._outbox.put(message)

    def close(self) -> None:
        """Send what is left, then close the session for good."""
        self._outbox.put(None)
        self._threads[1].join(THREAD_END_S)
        self._session.shutdown()
        self._threads[0].join(THREAD_END_S)

    # ---- in threads of their own ----------------------------------------------------------------------------

    def _receive(self) -> None:
        meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self.controller}
        try:
            while True:
                message = unpack(*self._session.receive())
                if isinstance(message, Taken):
                    with self._lock:
                        self._ahead -= message.num_bytes
                    self._wake()
                elif isinstance(message, Start):
                    self._put(on_this_node(message, meeting, self._executable))
                else:
                    self._put(message)
        except MALFORMED:
            with self._lock:
                self._ahead = 0
            self._put(None)

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:
            self._session.send(*pack(message))


def on_this_node(order: Start, meeting: dict[str, str], controllers_python: str) -> Start:
    """Adapt an order to this node: the rendezvous address for its workers, and this node's Python."""
    program, *arguments = order.argv
    return order._replace(
        argv=[sys.executable if program == controllers_python else program, *arguments], env=order.env | meeting
    )


def serve(place: NodeSpec, credentials: Credentials, *, limit_s: float, listening: bool = False) -> int:
    """Run the agent of this node until the job is over; return the job's exit status.

    Raises TimeoutError if no controller answers in time, RuntimeError if it refuses or is lost. `listening`: the
    controller is already listening.
    """
    link = SessionLink(*join(place, credentials, limit_s=limit_s, listening=listening))
    status = Agent(link).run()
    if status is None:
        raise RuntimeError(f"the first node, {link.controller}, is gone; the workers here have been ended")
    return status


def join(
    place: NodeSpec, credentials: Credentials, *, limit_s: float, listening: bool = False
) -> tuple[ClientSession, Welcome]:
    """Connect as soon as the controller listens, introduce this node, and return the controller's answer."""
    deadline, where = time.monotonic() + limit_s, f"{place.host}:{place.port}"

    def reach(left_s: float) -> Connection:
        return connect((place.host, place.port), credentials, timeout_s=max(left_s, 0.1))

    while True:
        session: ClientSession | None = None
        try:
            session = ClientSession(reach(deadline - time.monotonic()), reach)
            welcome = _introduce(session, place)
            session.limit_s = welcome.return_s
            return session, welcome
        except AuthenticationError:
            why = f"the process at {where} does not hold this job's secret; give every node the same file"
            raise RuntimeError(why) from None
        except (EOFError, OSError) as error:  # it does not listen yet, or its name does not resolve yet
            late = deadline - time.monotonic() <= _RETRY_S
            if session is not None:
                session.close()
            if session is not None and late:
                raise RuntimeError(f"the first node, {place.host}, hung up before it let this one join") from None
            if session is None and listening and not isinstance(error, ConnectionResetError | BrokenPipeError):
                raise RuntimeError(
                    f"cannot connect to the launcher at {where}: {error}; has it ended, is there a firewall between, "
                    "or does it listen on another network (--network-interfaces)?"
                ) from None
            if late:
                raise TimeoutError(
                    f"the first node did not answer at {where} within {limit_s:g} s (--start-timeout): {error}. Is the "
                    "same command running there, with the same secret file?"
                ) from None
            # Many unauthenticated connections can displace a node before its handshake is read: retry.
            time.sleep(_RETRY_S if session is None else _AGAIN_S)


def _introduce(session: ClientSession, place: NodeSpec) -> Welcome:
    """Return the controller's welcome. Raises RuntimeError if it refuses, EOFError or ConnectionError if it
    disconnects.
    """
    name = place.name or socket.gethostname()
    session.send(*pack(Join(place.index, name, place.slots or 1, version(), [], [])))
    try:
        answer = unpack(*session.receive(limit_s=CONNECT_S))
    except TimeoutError:
        session.close()
        raise RuntimeError(f"the first node, {place.host}, did not answer within {CONNECT_S:g} s") from None
    session.connection.sock.settimeout(None)
    if not isinstance(answer, Welcome):
        session.close()
        why = answer.why if isinstance(answer, Refused) else f"it answered {type(answer).__name__}"
        raise RuntimeError(f"the first node, {place.host}, refused this one: {why}")
    return answer


def main() -> int:
    """`python -m hora.launch.agent.session`, by srun or ssh: a line of JSON on standard input says where to go."""
    order = sys.stdin.readline()
    if not order:
        print(
            "no order has come on standard input: what starts commands on this host must pass it on (say "
            "`kubectl exec -i`)",
            file=sys.stderr,
        )
        return 1
    guarded()
    given = json.loads(order)
    name = next(iter(given["nodes"]))
    if len(given["nodes"]) > 1:
        name = variables().get("SLURMD_NODENAME", socket.gethostname())
    index, slots = given["nodes"][name]
    host, port = given["where"]
    place = NodeSpec(num_nodes=index + 1, index=index, host=host, port=port, slots=slots, name=name)
    try:
        credentials = Credentials(bytes.fromhex(given["key"]), "nodes", given["speaker"])
        serve(place, credentials, limit_s=given["limit_s"], listening=True)
        return 0  # the launcher reports how the job ended
    except (RuntimeError, OSError) as error:
        with contextlib.suppress(OSError):  # ssh has gone
            print(f"hora: node {name}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
