"""The agents of other nodes, however they were started: ssh, srun, a platform that runs `hora run --join`.

An agent connects, proves that it holds the nodes' secret or a key of its own, and names its node. Its connection is a
session: in an elastic job an agent that was cut off resumes it. A joined agent is an `AgentHandle` of the launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from hora.errors import StartTimeoutError
from hora.launch.agent.protocol import MESSAGES, VERSION, Join, Leaving, MeetAt, Quit, Refused, Welcome
from hora.launch.controller.launcher import BEATS, AgentHandle, wait_or_kill
from hora.launch.limits import CUT_S, END_S, KILLED_S
from hora.launch.slots import HostInfo
from hora.net.messages import pack, unpack
from hora.net.server import Server
from hora.net.session import SessionPeer, Sessions
from hora.net.wire import ANYBODY, Credentials, Header, derived_secret, new_secret
from hora.version import version

Nodes = Mapping[str, tuple[int, int]]  # number and slots by name

_MAX_NAME_CHARS = 255


def credentials(secret: bytes, speaker: int = ANYBODY) -> Credentials:
    """Return the credentials for the handshake of agent and controller: of all nodes, or of a node with its own key."""
    purpose = "hora nodes" if speaker == ANYBODY else f"hora node {speaker}"
    return Credentials(derived_secret(secret, purpose), "nodes", speaker)


def start_agent(
    command: Sequence[str], where: tuple[str, int], key: Credentials, nodes: Nodes, *, limit_s: float, **rest: Any
) -> subprocess.Popen[bytes]:
    """Run a command that starts `agent.session` on a node, and send it the controller's address on its standard input.

    `nodes`: the nodes that the command may start.
    """
    process = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True, **rest)
    order = {"where": where, "key": key.secret.hex(), "speaker": key.speaker, "nodes": nodes, "limit_s": limit_s}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(order).encode() + b"\n")
    return process


def end_starter(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a process that ends with the agents it has started; a SIGTERM makes srun end them."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        wait_or_kill(process, KILLED_S)


class Agents:
    """Accepts agents at `where` (port 0: any) until closed. `num_nodes`: how many to expect, without this machine.

    `own`: this machine's name and slots, if the job may use it too, as its first host. `silence_limit_s`: a node ends
    its workers if the controller is silent this long. `elastic`: an agent that is asked to end lets its ranks commit
    and leave first. `return_s`: how long a disconnected agent may take to reconnect. `nonce`, `term` and `names`: of a
    job whose leader can change, with the names of all nodes that ever joined.

    `brings_environment`: a node's workers inherit the environment and working directory of its agent.
    `starter_ended`: returns a message for `wait` if the process that starts the agents has ended, else "".
    """

    brings_environment = True
    starter_ended: Callable[[], str] = staticmethod(lambda: "")

    def __init__(
        self,
        where: tuple[str, int],
        secret: bytes,
        *,
        num_nodes: int,
        silence_limit_s: float,
        own: HostInfo | None = None,
        elastic: bool = False,
        return_s: float = 0.0,
        nonce: str = "",
        term: int = 0,
        names: Iterable[str] = (),
    ) -> None:
        self.nonce = nonce or new_secret().hex()
        # But for its name, and the port of the rendezvous.
        self._welcome = Welcome("", self.nonce, sys.executable, silence_limit_s, return_s, elastic, term)
        self._secret, self.job_secret = secret, derived_secret(secret, f"hora job {self.nonce}")
        self._num_nodes, self._own = num_nodes, own
        self._first_index = 0 if own is None else 1
        self._nodes: dict[int, AgentHandle] = {}
        self._names = set(names)  # of all nodes that have ever joined
        self._changed = threading.Condition()
        self._refused = ""
        self._listener: Callable[[Sequence[HostInfo]], None] | None = None
        self._own_address = "" if where[0] in ("", "0.0.0.0") else where[0]
        sessions = Sessions(self, limit_s=return_s)
        self._server = Server(sessions, name="hora-agents", silence_limit_s=CUT_S)
        sessions.server = self._server
        try:
            self.port = self._server.listen(where)
        except OSError as error:
            raise OSError(f"cannot listen at {where[0]}:{where[1]} for the nodes: {error.strerror}") from None
        self._server.start(self._credentials)
        self._server.call(self._beat)

    def _credentials(self, speaker: int) -> Credentials:
        return credentials(self._secret)

    @property
    def address(self) -> str:
        """Return the address at which the agents reach this process."""
        return self._own_address or "127.0.0.1"

    def hosts(self) -> list[HostInfo]:
        """Return the nodes that have joined, in order, this machine first."""
        with self._changed:
            nodes = [node for _, node in sorted(self._nodes.items()) if not node.leaving]
        return ([] if self._own is None else [self._own]) + [HostInfo(node.name, node.slots) for node in nodes]

    def is_own(self, hostname: str) -> bool:
        """Return whether this host is the machine where we run, which has no agent."""
        return self._own is not None and hostname == self._own.hostname

    def wait(self, limit_s: float, *, num_slots: int | None = None) -> None:
        """Wait until all nodes have joined, or enough for `num_slots`; StartTimeoutError names the missing ones."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._enough(num_slots):
                problem = self._refused or self.starter_ended()
                if problem:
                    raise RuntimeError(problem)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StartTimeoutError(self._who_is_missing(limit_s))
                self._changed.wait(min(left_s, 1.0))

    def _enough(self, num_slots: int | None) -> bool:
        if num_slots is not None:
            return sum(host.slots for host in self.hosts()) >= num_slots
        return len(self._nodes) >= self._num_nodes

    def _who_is_missing(self, limit_s: float) -> str:
        wanted = range(self._first_index, self._first_index + self._num_nodes)
        missing = ", ".join(str(index) for index in wanted if index not in self._nodes)
        return (
            f"Timed out waiting for the nodes to join. Node {missing} did not come to port {self.port}: start the "
            f"same command there, with the same secret file. Timeout after {limit_s:g} seconds (--start-timeout)."
        )

    def wait_for(self, names: Collection[str], limit_s: float) -> None:
        """Wait until these nodes have joined; nodes that miss the time limit count as lost."""
        with self._changed:
            self._changed.wait_for(lambda: {node.name for node in self._nodes.values()} >= set(names), limit_s)

    def workers_at(self, hostname: str) -> Collection[int]:
        """Return the workers of a node, including those that have ended."""
        return next((node.workers for node in self._all() if node.name == hostname), ())

    def _all(self) -> list[AgentHandle]:
        with self._changed:
            return list(self._nodes.values())

    def meet_at(self, port: int) -> None:
        """Send the port of the rendezvous to all nodes, including those that join later."""
        with self._changed:
            self._welcome = self._welcome._replace(meeting=port)
        for node in self._all():
            node.send(MeetAt(port))

    def abandon(self) -> None:
        """Release the nodes because another process leads the job; their workers keep running."""
        nodes = self._all()
        self._server.close()
        for node in nodes:
            node.lost(255)

    def agent(self, hostname: str) -> AgentHandle:
        """Return the agent of a node; for a lost node, a handle that has ended."""
        with self._changed:
            there = (node for node in self._nodes.values() if node.name == hostname and not node.ended)
            return next(there, None) or self._absent(hostname)

    def _absent(self, hostname: str) -> AgentHandle:
        node = AgentHandle(hostname)
        node.lost(255)
        return node

    def _beat(self) -> None:
        """Send a heartbeat to all agents. Runs in the server's thread."""
        for node in self._all():
            node.beat(self._welcome.silence_s)
        self._server.call_at(time.monotonic() + self._welcome.silence_s / BEATS, self._beat)

    # ---- hosts of an elastic job (`hosts.HostWatch`) --------------------------------------------------

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        with self._changed:
            self._listener = changed
            hosts = self.hosts()
        if hosts != list(known):
            changed(hosts)

    def close(self) -> None:
        """Stop reporting changes. The nodes stay."""
        self._listener = None

    def dismiss(self, status: int) -> None:
        """End the agents with the job's status. Return when they have disconnected, or after a time limit."""
        for node in self._all():
            node.send(Quit(status))
        with self._changed:
            self._changed.wait_for(lambda: not self._nodes, END_S)
        self.abandon()

    # ---- in the server's thread -----------------------------------------------------------------------------------

    def message(self, peer: SessionPeer, header: Header, payload: bytes) -> None:
        if peer.number < 0:
            if header.get("op") == "join":  # as earlier versions of Hora did
                self._refuse(peer, int(header["node"]), str(header["name"]), self._other_version(header.get("version")))
                return
            joining = unpack(MESSAGES, header, payload)
            if not isinstance(joining, Join):
                raise ValueError(f"{type(joining).__name__} before it has joined")
            self._join(peer, joining)
            return
        node = self._nodes[peer.number]
        try:
            message = unpack(MESSAGES, header, payload)
        except (ValueError, RecursionError) as error:
            node.blame(error)
            return
        if isinstance(message, Leaving):
            node.leaving = True
            self._tell()
        else:
            node.enqueue(message)

    def _join(self, peer: SessionPeer, joining: Join) -> None:
        index, name = joining.node, joining.name[:_MAX_NAME_CHARS]
        problem = self._misplaced(peer, index, joining.slots)
        if (joining.version, joining.protocol) != (version(), VERSION):
            problem = self._other_version(joining.version)
        if problem:
            self._refuse(peer, index, name, problem, comes_again=bool(joining.run))
            return
        with self._changed:
            node = self._nodes[index] = self._admitted(index, name, joining)
            peer.number = index
            self._own_address = self._own_address or str(peer.sock.getsockname()[0])
            welcome = self._welcome._replace(name=node.name)
        peer.send(*pack(welcome))
        with self._changed:
            node.join(peer)
            self._changed.notify_all()
        self._tell()

    def _refuse(self, peer: SessionPeer, index: int, name: str, why: str, *, comes_again: bool = False) -> None:
        if not comes_again:
            self._refused = self._refused or f"node {index} ({name[:_MAX_NAME_CHARS]}, {peer.host}): {why}"
        header, payload = pack(Refused(why))
        peer.send({**header, "why": why}, payload)  # where earlier versions look for it
        with self._changed:
            self._changed.notify_all()

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        known = joining.run == self.nonce
        name = name if known else self._new_name(name, index)
        self._names.add(name)
        return AgentHandle(name, joining.slots, joining.workers if known else ())

    def _new_name(self, name: str, index: int) -> str:
        """Return a unique host name: two nodes may share one, and that of a node that rejoins may be barred."""
        choices = itertools.chain([name, f"{name}-{index}"], (f"{name}-{index}-{turn}" for turn in itertools.count(2)))
        return next(choice for choice in choices if choice not in self._names and not self.is_own(choice))

    def _other_version(self, theirs: object) -> str:
        return f"it has Hora {theirs}, but the first node has {version()}; install the same version on every node"

    def _misplaced(self, peer: SessionPeer, index: int, slots: int) -> str:
        last = self._first_index + self._num_nodes - 1
        if not self._first_index <= index <= last:
            return f"the nodes that may join are {self._first_index} to {last}; check --nnodes and --node-rank"
        if index in self._nodes:
            return "another node of that number has joined already; give each its own --node-rank"
        if not 0 < slots < 100_000:
            return f"it offers {slots} slots"
        return ""

    def closed(self, peer: SessionPeer) -> None:
        with self._changed:
            node = self._nodes.get(peer.number)
            if node is None or node.peer is not peer:  # another one has its number now
                return
            del self._nodes[peer.number]
            self._changed.notify_all()
        node.lost(255)
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.hosts())
