"""The agent of a node other than the controller's: it joins the controller through a session.

The platform starts it on every node (`hora run --join …`), or a provider (`launch/providers`) runs this module, which
reads its invitation, with the controller's address and a key, from standard input. Once it has joined, it needs nothing
of what has started it. The agent and its workers end with the controller.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hora.errors import AuthenticationError
from hora.launch.agent.agent import Agent, ThreadedLink, guarded, on_this_node
from hora.launch.agent.protocol import MESSAGES, Invitation, Join, Message, Quit, Refused, Start, Welcome
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

    def __init__(self, session: ClientSession, welcome: Welcome, *, lifeline: bool = False) -> None:
        self.silence_limit_s, self.elastic = welcome.silence_s, welcome.elastic
        self.controller = str(session.connection.sock.getpeername()[0])
        self._session, self._executable = session, welcome.executable
        super().__init__(self._received(), lambda message: session.send(*pack(message)))
        if lifeline:
            threading.Thread(target=self._watch_starter, name="hora-agent-lifeline", daemon=True).start()

    def _watch_starter(self) -> None:
        """Hang up when what has started this agent is gone: it holds the other end of standard input."""
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        self._session.shutdown()

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


def serve(
    place: Node,
    credentials: Credentials,
    *,
    limit_s: float,
    listening: bool = False,
    invitation: Invitation | None = None,
    **how: Any,
) -> int:
    """Run the agent of this node until the job is over; return the job's exit status.

    Raises TimeoutError if no controller answers in time, RuntimeError if it refuses or is lost. `listening`: the
    controller is already listening. `how`: see `Agent`.
    """
    more: dict[str, Any] = {}
    if invitation is not None:
        more = {"gpus": invitation.gpus, "answer_s": invitation.answer_s}
    session, welcome = join(place, credentials, limit_s=limit_s, listening=listening, **more)
    link: SessionLink | LeaderLink
    if welcome.leaderless_s:
        from hora.launch.agent.leaders import LeaderLink  # lazy: most agents have one leader

        link = LeaderLink(place, credentials, session, welcome)
    else:
        link = SessionLink(session, welcome, lifeline=invitation is not None and invitation.lifeline)
    status = Agent(link, **how).run()
    if status is None:
        raise RuntimeError(f"the first node, {link.controller}, is gone; the workers here have been ended")
    return status


def join(
    place: Node,
    credentials: Credentials,
    *,
    limit_s: float,
    listening: bool = False,
    gpus: Sequence[str] = (),
    answer_s: float | None = CONNECT_S,
) -> tuple[ClientSession, Welcome]:
    """Connect as soon as the controller listens, introduce this node, and return the controller's answer.

    Raises SystemExit if the job is over and needs no agent.
    """
    deadline, where = time.monotonic() + limit_s, f"{place.host}:{place.port}"

    def reach(left_s: float) -> Connection:
        return connect((place.host, place.port), credentials, timeout_s=max(left_s, 0.1))

    while True:
        session: ClientSession | None = None
        try:
            session = ClientSession(reach(deadline - time.monotonic()), reach)
            welcome = _introduce(session, place, gpus, answer_s)
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


def _introduce(session: ClientSession, place: Node, gpus: Sequence[str], answer_s: float | None) -> Welcome:
    """Return the controller's welcome. RuntimeError: it refuses; EOFError or ConnectionError: it disconnects."""
    name = place.name or socket.gethostname()
    session.send(*pack(Join(place.index, name, place.slots or 1, version(), [], list(gpus))))
    try:
        answer = unpack(MESSAGES, *session.receive(limit_s=answer_s))
    except TimeoutError:
        session.close()
        raise RuntimeError(f"the first node, {place.host}, did not answer within {answer_s:g} s") from None
    session.connection.sock.settimeout(None)
    if isinstance(answer, Quit):
        session.close()
        raise SystemExit(answer.status)
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
    return obey(Invitation(**json.loads(invitation)))


def obey(invitation: Invitation, *, report: int | None = None, **how: Any) -> int:
    """Become an agent: return the job's exit status, or 1 after a message. `how`: see `Agent`; `report`: `guarded`."""
    if invitation.run and not _only_agent(bytes.fromhex(invitation.key), invitation.run, invitation.node):
        return 0
    guarded(os.getppid() if invitation.lifeline else None, report=report)
    (host, port), node, name = invitation.where, invitation.node, invitation.name
    place = Node(num_nodes=node + 1, index=node, host=host, port=port, slots=invitation.slots, name=name)
    credentials = Credentials(bytes.fromhex(invitation.key), "nodes", invitation.speaker)
    how = {"copies": invitation.copies, "streams": invitation.streams, **how}
    try:
        return serve(place, credentials, limit_s=invitation.limit_s, listening=True, invitation=invitation, **how)
    except (RuntimeError, OSError) as error:
        with contextlib.suppress(OSError):  # what has started it is gone
            print(f"hora: node {name}: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
