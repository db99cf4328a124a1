"""The agents of other nodes: those that a provider starts, and those that come by themselves (`hora run --join`).

An agent connects, proves that it holds a key of its own or the nodes' secret, and names its node. Its connection is a
session: in an elastic job an agent that was cut off resumes it. An agent is an `AgentHandle` of the launcher, from the
moment when the provider was asked for it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from hora.errors import StartTimeoutError
from hora.launch.agent.protocol import (
    MESSAGES,
    VERSION,
    Invitation,
    Join,
    Leaving,
    MeetAt,
    Quit,
    Refused,
    Remember,
    Remembered,
    Welcome,
)
from hora.launch.controller.launcher import BEATS, AgentHandle
from hora.launch.job import LeadershipLostError, exit_status
from hora.launch.limits import CUT_S, END_S, STARTER_END_S
from hora.launch.processes import module_command
from hora.launch.providers.base import FAILED, Order, Provider, StartError
from hora.launch.slots import HostInfo
from hora.net.messages import pack, unpack
from hora.net.server import Server
from hora.net.session import SessionPeer, Sessions
from hora.net.wire import ANYBODY, Credentials, Header, derived_secret, new_secret
from hora.version import version

_MAX_NAME_CHARS = 255


def credentials(secret: bytes, speaker: int = ANYBODY) -> Credentials:
    """Return the credentials for the handshake of agent and controller: of all nodes, or of a node with its own key."""
    purpose = "hora nodes" if speaker == ANYBODY else f"hora node {speaker}"
    return Credentials(derived_secret(secret, purpose), "nodes", speaker)


class RestartedLeaders(Protocol):
    """A run whose leader may be started again (`succession.Succession`). `memory`: what all agents must remember."""

    agents: Agents
    leaderless_s: float

    @property
    def memory(self) -> Remember | None: ...

    def objection(self, joining: Join) -> tuple[str, bool]:
        """Return why an agent may not join, or "", and whether it may without its workers."""


class Agents:
    """Accepts agents at `where` (port 0: any) until closed, and has the `provider` start them.

    `nodes`: its agents are those of one allocation. Their workers inherit the environment and working directory of the
    agent, and the nodes that have joined are the job's hosts. Otherwise the job names its hosts, and passes the
    environment on. `num_nodes`: how many come by themselves, besides this machine. `own`: this machine's name and
    slots, if it is the first of these nodes; `is_own`: whether a host is this machine, which needs no other agent.

    `silence_limit_s`: a node ends its workers if the controller is silent this long. `elastic`: an agent that is asked
    to end lets its ranks commit and leave first. `return_s`: how long a disconnected agent may take to reconnect.
    `start_limit_s`: how long one may take to join. `nonce`, `term` and `names`: of a job whose leader can change, with
    the names of all nodes that ever joined. `succession`: of a run whose leader may be started again.

    `handle`: the class of the agents. `copies`: a further agent of a node waits until the first one is gone, instead of
    being refused. `executable`: what workers are ordered to run where their node's own Python is meant. `least`: how
    many nodes stay hosts if all are leaving. `advertised`: the address for the agents, if it is not that of `where`.
    `named`: returns the host's name in this job for a node's own name and number.
    """

    def __init__(
        self,
        where: tuple[str, int],
        secret: bytes,
        *,
        silence_limit_s: float,
        provider: Provider | None = None,
        nodes: bool = True,
        num_nodes: int = 0,
        own: HostInfo | None = None,
        is_own: Callable[[str], bool] | None = None,
        elastic: bool = False,
        return_s: float = 0.0,
        start_limit_s: float = 60.0,
        nonce: str = "",
        term: int = 0,
        names: Iterable[str] = (),
        succession: RestartedLeaders | None = None,
        handle: type[AgentHandle] = AgentHandle,
        copies: bool = False,
        executable: str = sys.executable,
        least: int = 0,
        advertised: str = "",
        named: Callable[[str, int], str] = lambda name, number: name,
    ) -> None:
        self.full = False  # agents that come now are not needed any more, and end
        self._least, self._named = least, named
        self._handle = handle
        self._copies: dict[int, list[tuple[SessionPeer, Join]]] | None = {} if copies else None
        self.nonce = nonce or new_secret().hex()
        # But for its name, and the port of the rendezvous.
        leaderless_s = 0.0 if succession is None else succession.leaderless_s
        self._welcome = Welcome(
            "", self.nonce, executable, silence_limit_s, return_s, elastic, term, leaderless_s=leaderless_s
        )
        self._succession = succession
        if succession is not None:
            succession.agents = self
        self._secret, self.job_secret = secret, derived_secret(secret, f"hora job {self.nonce}")
        self._provider, self._start_limit_s, self.nodes = provider, start_limit_s, nodes
        self._num_nodes, self._own = num_nodes, own
        self.is_own = is_own or (lambda hostname: own is not None and hostname == own.hostname)
        self._first_index = 0 if own is None else 1
        self._numbers = itertools.count(self._first_index + num_nodes)  # of the agents that the provider starts
        self._expected: dict[int, AgentHandle] = {}
        self._nodes: dict[int, AgentHandle] = {}  # that have joined
        self._names = dict.fromkeys(names, -1)  # of all nodes that have ever joined, with their numbers
        self._changed = threading.Condition()
        self._refused = ""
        self._over = False
        self._listener: Callable[[Sequence[HostInfo]], None] | None = None
        self._own_address = advertised or ("" if where[0] in ("", "0.0.0.0") else where[0])
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
        return credentials(self._secret, speaker)

    @property
    def return_s(self) -> float:
        return self._welcome.return_s

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """At the end of the block, end the agents with the job's status, or release them to the next leader."""
        status = 1
        try:
            yield
            status = 0
        except LeadershipLostError:
            self.abandon()
            raise
        except BaseException as error:
            status = exit_status(error)
            raise
        finally:
            self.dismiss(status)

    @property
    def address(self) -> str:
        """Return the address at which the agents reach this process."""
        return self._own_address or "127.0.0.1"

    def hosts(self) -> list[HostInfo]:
        """Return the nodes that have joined and stay, in order, this machine first."""
        with self._changed:
            nodes = [node for _, node in sorted(self._nodes.items())]
        staying = [node for node in nodes if not node.leaving] or nodes[: self._least]
        return ([] if self._own is None else [self._own]) + [HostInfo(node.name, node.slots) for node in staying]

    def wait(self, limit_s: float, *, num_slots: int | None = None) -> None:
        """Wait until all nodes have joined, or enough for `num_slots`; StartTimeoutError names the missing ones."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self.enough(num_slots):
                if self._refused:
                    raise RuntimeError(self._refused)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self.too_few(limit_s)
                self._changed.wait(min(left_s, 1.0))

    def enough(self, num_slots: int | None) -> bool:
        """Return whether all nodes have joined, or enough for `num_slots`."""
        if num_slots is not None:
            return sum(host.slots for host in self.hosts()) >= num_slots
        return len(self._nodes) >= self._num_nodes

    def too_few(self, limit_s: float) -> StartTimeoutError:
        """Return the error that says which nodes have not joined in time."""
        missing = ", ".join(map(str, self.missing()))
        return StartTimeoutError(
            f"Timed out waiting for the nodes to join. Node {missing} did not come to port {self.port}: start the "
            f"same command there, with the same secret file. Timeout after {limit_s:g} seconds (--start-timeout)."
        )

    def wait_for(self, names: Collection[str], limit_s: float) -> None:
        """Wait until these nodes have joined; nodes that miss the time limit count as lost."""
        with self._changed:
            self._changed.wait_for(lambda: {node.name for node in self._nodes.values()} >= set(names), limit_s)

    @property
    def changed(self) -> threading.Condition:
        """The lock of the nodes; it is notified when one joins, is gone, or remembers something."""
        return self._changed

    def joined(self) -> list[AgentHandle]:
        """Return the agents that have joined and are not gone."""
        return self._all()

    def wait_until(self, happened: Callable[[], bool], limit_s: float | None) -> None:
        """Wait until this holds, which is looked at after every message of an agent that matters."""
        with self._changed:
            self._changed.wait_for(happened, limit_s)

    def notice(self) -> None:
        """Have all waiters look again."""
        with self._changed:
            self._changed.notify_all()

    def expel(self, node: AgentHandle, why: str) -> None:
        """Have an agent end its workers and join again without them."""
        node.send(Refused(why, forget=True))
        with self._changed:
            self._nodes = {index: one for index, one in self._nodes.items() if one is not node}
        node.kill()

    def rename_newcomers(self, taken: Collection[str]) -> None:
        """Give nodes that remember no leader of the run names that no other node of it has had."""
        with self._changed:
            self._names |= dict.fromkeys(taken, -1)
            for index, node in self._nodes.items():
                if node.name in taken and not (node.joining and node.joining.term):
                    node.name = self._new_name(node.name, index)
                    self._names[node.name] = node.number
                    node.send(self._welcome._replace(name=node.name))

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
        """Return the agent of a host, which may still be expected; for an unknown host, a handle that has ended."""
        with self._changed:
            known = [*self._nodes.values(), *self._expected.values()]
            there = next((node for node in known if node.name == hostname and not node.ended), None)
        return there or self._gone(hostname)

    def _gone(self, hostname: str) -> AgentHandle:
        node = self._handle(hostname, number=self._names.get(hostname, -1))
        node.lost(node.lost_exit_code)
        return node

    def connected(self) -> list[AgentHandle]:
        """Return the agents that have joined, in the order of their arrival."""
        with self._changed:
            return [node for node in self._nodes.values() if node.peer is not None]

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have not joined, of those that come by themselves."""
        with self._changed:
            numbers = range(self._first_index, self._first_index + self._num_nodes)
            return [number for number in numbers if number not in self._nodes]

    def wait_for_number(self, number: int, limit_s: float) -> bool:
        """Wait until so many agents have joined; return False after the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.connected()) >= number, limit_s)

    def reach(self, host: HostInfo) -> AgentHandle:
        """Return the agent of a host; have one started if there is none."""
        node = self.agent(host.hostname)
        return self.start(host) if node.ended and self._provider is not None else node

    # ---- agents that the provider starts ------------------------------------------------------------------------

    def start_on(self, hosts: Iterable[HostInfo], *, num_slots: int | None = None) -> None:
        """Have agents started on all these hosts; return when they have joined, or as many as have `num_slots`.

        Raises RuntimeError, which names the hosts without an agent, and why.
        """
        others = {host.hostname: host for host in hosts if not self.is_own(host.hostname)}
        nodes = [self.start(host) for host in others.values()]

        def enough() -> bool:
            return num_slots is not None and sum(node.slots for node in nodes if node.peer) >= num_slots

        with self._changed:
            limit_s = self._start_limit_s + STARTER_END_S
            self._changed.wait_for(lambda: enough() or all(node.peer or node.ended for node in nodes), limit_s)
            failed = [] if enough() else [node for node in nodes if node.peer is None]
        if failed:
            by_message: dict[str, list[str]] = {}
            for node in failed:
                why = node.complaints.text.strip() or "no answer"
                by_message.setdefault(node.failed, []).append(f"  {node.name}: {why}")
            raise RuntimeError("\n".join(text.format(hosts="\n".join(those)) for text, those in by_message.items()))

    def start(self, host: HostInfo) -> AgentHandle:
        """Have the provider start an agent; return the handle, which takes orders at once."""
        number, node = next(self._numbers), self._handle(host.hostname, host.slots)
        with self._changed:
            self._expected[number] = node
        key = credentials(self._secret, number)
        limit_s = self._start_limit_s / 2  # so that its failure is reported in time
        where = [self.address, self.port]
        invitation = Invitation(where, key.secret.hex(), number, number, host.hostname, host.slots, limit_s)
        command = module_command(sys.executable, "hora.launch.agent.session")
        order = Order(command, json.dumps(invitation._asdict()).encode() + b"\n", self._start_limit_s)
        # In a thread: an exception from a signal, in the main thread, must not lose a process just started.
        self._in_thread(f"hora-start {node.name}", self._have_started, number, node, order)
        self._server.call(
            lambda: self._server.call_at(time.monotonic() + self._start_limit_s, lambda: self._late(node))
        )
        return node

    def _have_started(self, number: int, node: AgentHandle, order: Order) -> None:
        assert self._provider is not None
        try:
            self._provider.start(node.name, order)
            return
        except StartError as error:
            why, failed = str(error), error.message
        except Exception as error:  # whatever the platform's library raises
            why, failed = f"{type(error).__name__}: {error}", FAILED
        with self._changed:
            if not bytes(node.complaints):  # such as being late, which has ended the command
                node.complaints.add(why.encode(errors="replace"))
            if node.peer is None:
                self._expected.pop(number, None)
                node.failed = failed
                node.lost(255)
                self._changed.notify_all()

    def _late(self, node: AgentHandle) -> None:
        with self._changed:
            if node.peer is not None or node.ended:
                return
            node.complaints.add(f"no answer within {self._start_limit_s:g} s (--start-timeout)".encode())
        self._release(node)

    def _release(self, node: AgentHandle) -> None:
        """Tell the provider that an agent is gone, or was dropped. Does not wait."""
        if self._provider is not None:
            why = node.complaints.text or "the job is over"
            self._in_thread(f"hora-ended {node.name}", self._provider.ended, node.name, why)

    def _in_thread(self, name: str, function: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=function, args=arguments, name=name, daemon=True).start()

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
        with self._changed:
            self._over, expected = True, list(self._expected.values())
        for node in expected:
            self._release(node)
        for node in self._all():
            node.send(Quit(status))
        with self._changed:
            self._changed.wait_for(lambda: not self._nodes, END_S)
        self.abandon()

    # ---- in the server's thread -----------------------------------------------------------------------------------

    def message(self, peer: SessionPeer, header: Header, payload: bytes) -> None:
        if peer.number < 0:
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
        if isinstance(message, Remembered):
            with self._changed:
                node.remembered = max(node.remembered, (message.term, message.saved))
                self._changed.notify_all()
        elif isinstance(message, Leaving):
            node.leaving = True
            self.tell_hosts()
        else:
            node.enqueue(message)

    def _join(self, peer: SessionPeer, joining: Join) -> None:
        if self._copies is not None and joining.node in self._nodes:
            self._copies.setdefault(joining.node, []).append((peer, joining))
            return
        if self.full:
            peer.send(*pack(Quit(0)))
            return
        index, name = joining.node, joining.name[:_MAX_NAME_CHARS]
        problem, forget = self._misplaced(peer, index, joining.slots), False
        if (joining.version, joining.protocol) != (version(), VERSION):
            problem = self._other_version(joining.version)
        with self._changed:
            if self._succession is not None and not problem:
                problem, forget = self._succession.objection(joining)
            if problem:
                # A node that the provider starts says why itself.
                is_fatal = peer.speaker == ANYBODY and not joining.run
                self._refuse(peer, index, name, problem, is_fatal=is_fatal, forget=forget)
                return
            node = self._nodes[index] = self._admitted(index, name, joining)
            peer.number = index
            self._own_address = self._own_address or str(peer.sock.getsockname()[0])
            welcome = self._welcome._replace(name=node.name)
        peer.send(*pack(welcome))
        with self._changed:
            node.join(peer)
            if self._succession is not None and self._succession.memory is not None:
                node.send(self._succession.memory)
            self._changed.notify_all()
        self.tell_hosts()

    def _refuse(
        self, peer: SessionPeer, index: int, name: str, why: str, *, is_fatal: bool = True, forget: bool = False
    ) -> None:
        if is_fatal:
            self._refused = self._refused or f"node {index} ({name[:_MAX_NAME_CHARS]}, {peer.host}): {why}"
        peer.send(*pack(Refused(why, forget)))
        with self._changed:
            self._changed.notify_all()

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        if index in self._expected:
            return self._expected.pop(index)
        known = joining.run == self.nonce
        # An agent that a leader of the run has admitted, and told nothing, may have another one's place.
        keeps_name = known and (self._succession is None or joining.term)
        name = name if keeps_name else self._new_name(name, index)
        self._names[name] = index
        workers, host = joining.workers if known else (), joining.name[:_MAX_NAME_CHARS]
        node = self._handle(name, joining.slots, workers, number=index, host=host, gpus=joining.gpus)
        node.joining = joining
        return node

    def _new_name(self, name: str, index: int) -> str:
        """Return a unique host name: two nodes may share one, and that of a node that rejoins may be barred."""
        name = self._named(name, index)
        choices = itertools.chain([name, f"{name}-{index}"], (f"{name}-{index}-{turn}" for turn in itertools.count(2)))
        return next(choice for choice in choices if choice not in self._names and not self.is_own(choice))

    def _other_version(self, theirs: object) -> str:
        return f"it has Hora {theirs}, but the first node has {version()}; install the same version on every node"

    def _misplaced(self, peer: SessionPeer, index: int, slots: int) -> str:
        if peer.speaker != ANYBODY:
            expected = index == peer.speaker and index in self._expected
            return "" if expected else "nobody waits for it any more"
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
        if not self._over and not node.dismissed:
            self._release(node)
        self.tell_hosts()
        for copy in (self._copies or {}).pop(peer.number, ()):
            if copy[0].open:
                self._join(*copy)

    def tell_hosts(self) -> None:
        """Report the hosts, which have changed, to the job. From any thread."""
        if self._listener is not None:
            self._listener(self.hosts())
