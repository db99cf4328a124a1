"""The agent of a node other than the controller's: it joins the controller through a session.

The platform starts it on every node (`hora run --join …`), or a provider (`launch/providers`) runs this module, which
reads its invitation, with the controller's address and a key, from standard input. Once it has joined, it needs nothing
of what has started it. The agent and its workers end with the controller.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hora.errors import AuthenticationError
from hora.launch.agent.agent import Agent, ThreadedLink, guarded, on_this_node
from hora.launch.agent.protocol import MESSAGES, Join, Message, Refused, Start, Welcome
from hora.launch.limits import CONNECT_S, GRACE_S, THREAD_END_S
from hora.net.messages import pack, unpack
from hora.net.session import MALFORMED, ClientSession
from hora.net.wire import Connection, Credentials, connect, derived_secret
from hora.platforms.node import Node
from hora.version import version

if TYPE_CHECKING:
    from hora.launch.agent.leaders import LeaderLink

_RETRY_S = 0.5
_AGAIN_S = 0.05
_held: list[socket.socket] = []  # for the life of this process: its name says that the agent lives


class SessionLink(ThreadedLink):
    """The link of an agent whose controller is reached through a session."""

    def __init__(self, session: ClientSession, welcome: Welcome) -> None:
        self.silence_limit_s, self.elastic = welcome.silence_s, welcome.elastic
        self.controller = str(session.connection.sock.getpeername()[0])
        self._session, self._executable = session, welcome.executable
        super().__init__(self._received(), lambda message: session.send(*pack(message)))

    def close(self) -> None:
        """Send what is left, then close the session for good."""
        super().close()
        self._session.shutdown()
        self._receiver.join(THREAD_END_S)

    def _received(self) -> Iterator[Message]:
        meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self.controller}
        with contextlib.suppress(*MALFORMED):
            while True:
                message = unpack(MESSAGES, *self._session.receive())
                yield on_this_node(message, meeting, self._executable) if isinstance(message, Start) else message


def serve(place: Node, credentials: Credentials, *, limit_s: float, listening: bool = False) -> int:
    """Run the agent of this node until the job is over; return the job's exit status.

    Raises TimeoutError if no controller answers in time, RuntimeError if it refuses or is lost. `listening`: the
    controller is already listening.
    """
    session, welcome = join(place, credentials, limit_s=limit_s, listening=listening)
    link: SessionLink | LeaderLink
    if welcome.leaderless_s:
        from hora.launch.agent.leaders import LeaderLink  # lazy: most agents have one leader

        link = LeaderLink(place, credentials, session, welcome)
    else:
        link = SessionLink(session, welcome)
    status = Agent(link).run()
    if status is None:
        raise RuntimeError(f"the first node, {link.controller}, is gone; the workers here have been ended")
    return status


def join(
    place: Node, credentials: Credentials, *, limit_s: float, listening: bool = False
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
                if late:
                    raise RuntimeError(f"the first node, {place.host}, hung up before it let this one join") from None
            elif listening and not isinstance(error, ConnectionResetError | BrokenPipeError):
                raise RuntimeError(
                    f"cannot connect to the launcher at {where}: {error}; has it ended, is there a firewall between, "
                    "or does it listen on another network (--network-interfaces)?"
                ) from None
            elif late:
                raise TimeoutError(
                    f"the first node did not answer at {where} within {limit_s:g} s (--start-timeout): {error}. Is the "
                    "same command running there, with the same secret file?"
                ) from None
            # Many unauthenticated connections can displace a node before its handshake is read: retry.
            time.sleep(_RETRY_S if session is None else _AGAIN_S)


def _introduce(session: ClientSession, place: Node) -> Welcome:
    """Return the controller's welcome. RuntimeError: it refuses; EOFError or ConnectionError: it disconnects."""
    name = place.name or socket.gethostname()
    session.send(*pack(Join(place.index, name, place.slots or 1, version(), [], [])))
    try:
        answer = unpack(MESSAGES, *session.receive(limit_s=CONNECT_S))
    except TimeoutError:
        session.close()
        raise RuntimeError(f"the first node, {place.host}, did not answer within {CONNECT_S:g} s") from None
    session.connection.sock.settimeout(None)
    if not isinstance(answer, Welcome):
        session.close()
        why = answer.why if isinstance(answer, Refused) else f"it answered {type(answer).__name__}"
        raise RuntimeError(f"the first node, {place.host}, refused this one: {why}")
    return answer


def _only_agent(key: bytes, run: str, node: int) -> bool:
    """Return whether no other agent of this node of the run lives on this machine. One that ends has some seconds."""
    name = derived_secret(key, f"hora agent of {run} at {node}").hex()
    _held.append(socket.socket(socket.AF_UNIX))
    deadline = time.monotonic() + 2 * GRACE_S
    while True:
        try:
            _held[0].bind(f"\0hora-agent-{name}")
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_RETRY_S)


def main() -> int:
    """`python -m hora.launch.agent.session`: the invitation, a line of JSON on standard input, says where to go."""
    invitation = sys.stdin.readline()
    if not invitation:
        print(
            "no order has come on standard input: what starts commands on this host must pass it on (say "
            "`kubectl exec -i`)",
            file=sys.stderr,
        )
        return 1
    given = json.loads(invitation)
    (host, port), number, name = given["where"], given["speaker"], given["name"]
    index = given.get("node", number)
    if "run" in given and not _only_agent(bytes.fromhex(given["key"]), given["run"], index):
        return 0
    guarded()
    place = Node(num_nodes=index + 1, index=index, host=host, port=port, slots=given["slots"], name=name)
    try:
        credentials = Credentials(bytes.fromhex(given["key"]), "nodes", number)
        serve(place, credentials, limit_s=given["limit_s"], listening=True)
        return 0  # the launcher reports how the job ended
    except (RuntimeError, OSError) as error:
        with contextlib.suppress(OSError):  # what has started it is gone
            print(f"hora: node {name}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
