"""The link of an agent whose job has its state in a store: the agent keeps its workers while the leader changes.

The process of its node (`hora run --join`, `leadership`) starts this agent in its own session and may die: the workers
stay. The link finds the leader in the store, connects, reports running and ended workers, and passes on orders until a
later leader is elected. Between leaders the workers keep training; their output is buffered up to a limit. A `Relay`
connects the workers with the current leader.

The agent and its workers end when the job is over, or when there has been no leader for `leaderless_s`, or for
`orphaned_s` if the process of its node is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hora.errors import AuthenticationError
from hora.launch.agent.agent import Agent, ControllerLink, guarded, on_this_node
from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Join,
    Leaving,
    MeetAt,
    Message,
    Output,
    Quit,
    Start,
    Started,
    Taken,
    Terminate,
    Welcome,
)
from hora.launch.controller.agents import credentials
from hora.launch.environment import variables
from hora.launch.ha.leadership import open_store, own_address
from hora.launch.ha.store import AuthenticatedStore, JobStore, StoreError
from hora.launch.limits import CUT_S, THREAD_END_S
from hora.net import sockets
from hora.net.acceptor import TaskServer
from hora.net.keys import own_processes
from hora.net.messages import pack, unpack
from hora.net.session import MALFORMED, ClientSession
from hora.net.wire import Connection, connect
from hora.version import version

_WAIT_S = 2.0
_COPY_BYTES = 256 * 1024

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_CONNECT_S, _ANSWER_S, _TURN_S = 5.0, 10.0, 0.2
_HELD_BYTES = 4 * 1024 * 1024  # of output between two leaders
_CLEAR_LIMIT_S = 30.0


class Relay:
    """Forwards connections from the abstract local socket `name` to the leader, in its own thread, until closed."""

    def __init__(self) -> None:
        self.name = f"hora-relay-{secrets.token_hex(16)}"
        self._target: tuple[str, int] | None = None
        self._tasks = TaskServer(self._connect, name="hora-relay")
        self._tasks.start([sockets.listen(self.name)])

    def set_target(self, target: tuple[str, int] | None) -> None:
        """Connect to this address from now on (None: to nothing), and close all connections: the workers retry."""
        self._tasks.call(self._set_target, target)

    def close(self) -> None:
        self._tasks.call(self._tasks.loop.stop)
        self._tasks.thread.join(THREAD_END_S)

    # ---- in the relay's thread ----------------------------------------------------------------------------

    def _set_target(self, target: tuple[str, int] | None) -> None:
        if target != self._target:
            self._target = target
            for sock in self._tasks.connections:
                self._tasks.end(sock)

    async def _connect(self, sock: socket.socket) -> None:
        # After an error the worker retries.
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError), contextlib.ExitStack() as stack:
            if self._target is None:
                await asyncio.sleep(_WAIT_S)  # or until there is a leader: that ends this connection
                return
            leader = await asyncio.wait_for(asyncio.open_connection(*self._target, limit=_COPY_BYTES), _WAIT_S)
            stack.callback(leader[1].transport.abort)
            sockets.tune(leader[1].get_extra_info("socket"), silence_limit_s=CUT_S)
            worker = await asyncio.open_connection(sock=sock, limit=_COPY_BYTES)
            stack.callback(worker[1].transport.abort)
            await self._copy_both(worker, leader, sock)

    async def _copy_both(self, worker: _Stream, leader: _Stream, sock: socket.socket) -> None:
        there = asyncio.ensure_future(_copy(worker[0], leader[1], lambda: None))
        back = asyncio.ensure_future(_copy(leader[0], worker[1], lambda: self._tasks.identified(sock)))
        try:
            await asyncio.wait({there, back}, return_when="FIRST_COMPLETED")
        finally:
            for one in (there, back):
                one.cancel()
            await asyncio.gather(there, back, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, copied: Callable[[], None]) -> None:
    target.transport.set_write_buffer_limits(high=0)  # `drain` then returns when everything is sent
    while data := await source.read(_COPY_BYTES):
        target.write(data)
        await target.drain()
        copied()


class LeaderLink(ControllerLink):
    """The link to one leader after another.

    `node`: its number, name and slots. `orphaned`: returns whether the process of the node is gone. `preceded`: returns
    whether an earlier agent of the node, which may have workers, still runs; this one waits for its end. `former`: the
    last run that ended before this one.
    """

    elastic = True

    def __init__(
        self,
        node: Mapping[str, Any],
        secret: bytes,
        store: JobStore,
        *,
        leaderless_s: float,
        orphaned_s: float,
        poll_s: float,
        orphaned: Callable[[], bool],
        preceded: Callable[[], bool] = lambda: False,
        former: str = "",
    ) -> None:
        super().__init__()
        self._node, self._secret, self._store = dict(node), secret, store
        self._leaderless_s, self._orphaned_s, self._poll_s = leaderless_s, orphaned_s, poll_s
        self._orphaned, self._preceded, self._former = orphaned, preceded, former
        self._relay, self._address = Relay(), own_address(store.members)
        self._run = ""  # the job's run whose workers are here
        self._workers: dict[int, Started | Exited] = {}
        self._held: deque[Output] = deque()  # output that no leader has taken
        self._session: ClientSession | None = None
        self._welcome: Welcome | None = None
        self._term = 0
        self._over = threading.Event()
        self._leaving = False
        self._thread = threading.Thread(target=self._follow, name="hora-agent-leaders", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # ---- in the agent's thread ------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Return the bytes that a connected leader has not taken. Without a leader, workers are not blocked."""
        session = self._session
        return self._ahead if session is not None and session.connected else 0

    def send(self, message: Message) -> None:
        with self._lock:
            if isinstance(message, Started | Exited):
                self._workers[message.worker] = message
            self._leaving = self._leaving or isinstance(message, Leaving)
            session = self._session
            if session is not None and (session.connected or session.unsent_bytes < _HELD_BYTES):
                session.send(*pack(message))
                if isinstance(message, Output):
                    self._ahead += len(message.data)
            elif isinstance(message, Output):  # for the next leader; beyond the limit the oldest is dropped
                self._held.append(message)
                while sum(len(one.data) for one in self._held) > _HELD_BYTES:
                    self._held.popleft()

    def close(self) -> None:
        self._over.set()
        session = self._session
        if session is not None:
            session.shutdown()
        if self._thread.is_alive():
            self._thread.join(_ANSWER_S)
        self._relay.close()

    # ---- in the link's thread -------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Follow leaders until the job is over, or until there has been no leader for too long."""
        while not self._over.is_set() and self._preceded():
            if self._orphaned():  # it has no workers and no process to start any for
                self._put(None)
                return
            self._leader()  # the job may be over
            self._over.wait(self._poll_s)
        alone_since = time.monotonic()
        while not self._over.is_set():
            found = self._leader()
            if found is not None and self._serve(*found):
                alone_since = time.monotonic()
            limit_s = self._orphaned_s if self._orphaned() else self._leaderless_s
            if time.monotonic() > alone_since + limit_s:
                name = self._node["name"]
                print(f"hora: node {name}: nobody has led the job for {limit_s:g} s", file=sys.stderr)
                break
            self._over.wait(_TURN_S)
        self._put(None)

    def _leader(self) -> tuple[int, str, int] | None:
        """Return the current leader's term and address; None if there is no leader or the store does not answer."""
        try:
            found = self._store.read()
        except StoreError:
            return None
        where, over = found.values.get("where"), found.values.get("over")
        if over is not None and (over["run"] == self._run if self._run else over["run"] != self._former):
            self._end(int(over["status"]))
            return None
        if not found.term or where is None or where["term"] != found.term or found.term < self._term:
            return None
        return found.term, str(where["host"]), int(where["port"])

    def _end(self, status: int) -> None:
        self._put(Quit(status))
        self._over.set()

    def _serve(self, term: int, host: str, port: int) -> bool:
        """Serve this leader until it is gone or another one leads; return whether it admitted this agent."""

        def reach(limit_s: float) -> Connection:
            return connect((host, port), credentials(self._secret), timeout_s=limit_s)

        try:
            session = ClientSession(reach(_CONNECT_S), reach)
        except (OSError, AuthenticationError):
            return False
        try:
            own = Join(version=version(), run=self._run, workers=sorted(self._workers), gpus=[], **self._node)
            session.send(*pack(own))
            welcome = unpack(MESSAGES, *session.receive(limit_s=_ANSWER_S))
            session.connection.sock.settimeout(None)
            if not isinstance(welcome, Welcome) or welcome.term != term:
                return False
            self._begin(session, welcome, host)
            messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
            threading.Thread(target=_receive, args=(session, messages), name="hora-agent-leader", daemon=True).start()
            self._obey(messages, host)
            return True
        except (EOFError, OSError, ValueError):
            return False
        finally:
            self._relay.set_target(None)
            session.close()  # first: a sender may hold the lock while a stopped leader reads nothing
            with self._lock:
                if self._session is session:
                    unsent = [unpack(MESSAGES, header, payload) for header, payload in session.unsent()]
                    self._held = deque(message for message in unsent if isinstance(message, Output))
                self._session, self._ahead = None, 0

    def _begin(self, session: ClientSession, welcome: Welcome, host: str) -> None:
        """Report the state of the workers to a new leader, and all events from then on."""
        session.limit_s = welcome.return_s
        if self._run != welcome.run:  # not the leader of the workers that are here
            self._clear()
        self._node["name"], self._run = welcome.name, welcome.run
        self._welcome, self._term = welcome, welcome.term
        if welcome.meeting:
            self._relay.set_target((host, welcome.meeting))
        with self._lock:
            ended = [state for state in self._workers.values() if isinstance(state, Exited)]
            known: list[Message] = [Started(number, 0) for number in self._workers]
            for message in [*known, *self._held, *ended]:
                session.send(*pack(message))
            self._held.clear()
            self._session, self._ahead = session, 0
        if self._leaving:
            session.send(*pack(Leaving()))

    def _clear(self) -> None:
        """End the workers of a run that is over."""
        running = [number for number, state in self._workers.items() if isinstance(state, Started)]
        if running:
            self._put(Terminate(running, 0.0))
        deadline = time.monotonic() + _CLEAR_LIMIT_S
        while any(isinstance(self._workers[number], Started) for number in running) and time.monotonic() < deadline:
            self._over.wait(_TURN_S)
        with self._lock:
            self._workers.clear()
            self._held.clear()

    def _obey(self, messages: queue.SimpleQueue[Message | None], host: str) -> None:
        look_at = time.monotonic() + self._poll_s
        while not self._over.is_set():
            with contextlib.suppress(queue.Empty):
                message = messages.get(timeout=self._poll_s)
                if message is None:
                    return  # it has gone
                self._apply(message, host)
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._poll_s
                with contextlib.suppress(StoreError):
                    if self._store.read().term > self._term:
                        return  # another one leads

    def _apply(self, message: Message, host: str) -> None:
        match message:
            case Start():
                assert self._welcome is not None
                meeting = {
                    "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,  # of the interface at which the ranks listen
                    "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
                    "HORA_RELAY": self._relay.name,
                    "HORA_LAUNCHER_TIMEOUT": str(int(self._leaderless_s)),
                }
                self._put(on_this_node(message, meeting, self._welcome.executable))
            case MeetAt(port):
                self._relay.set_target((host, port))
            case Taken(num_bytes):
                self._count(-num_bytes)
            case Quit(status):
                self._end(status)
            case _:
                self._put(message)


def _receive(session: ClientSession, messages: queue.SimpleQueue[Message | None]) -> None:
    try:
        while True:
            messages.put(unpack(MESSAGES, *session.receive()))
    except MALFORMED:
        messages.put(None)


def _earlier_process(command: Sequence[str]) -> bool:
    """Return whether this user has a process of this command that started before this process' parent."""

    def started(pid: int) -> tuple[int, int]:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]), pid

    own, ours = started(os.getppid()), "".join(f"{word}\0" for word in command).encode()
    for pid in own_processes():
        with contextlib.suppress(OSError):  # it has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(ours) and started(pid) < own:
                return True
    return False


def main() -> int:
    """`python -m hora.launch.ha.following JOB NODE`: reads a line of JSON, and prints the job's exit status."""
    given = json.loads(sys.stdin.readline())
    parent = os.pidfd_open(given["parent"])
    os.set_inheritable(parent, False)
    guarded()
    secret = bytes.fromhex(given["secret"])
    store = AuthenticatedStore(open_store(given["store"], variables()).below(given["job"]), secret)
    limits = {name: given[name] for name in ("leaderless_s", "orphaned_s", "poll_s", "former")}
    given["node"]["name"] = given["node"]["name"] or socket.gethostname()
    link = LeaderLink(
        given["node"],
        secret,
        store,
        **limits,
        orphaned=lambda: bool(select.select([parent], [], [], 0)[0]),
        preceded=lambda: _earlier_process(["hora.launch.ha.following", *sys.argv[1:]]),
    )
    agent = Agent(link)
    link.start()
    status = agent.run()
    with contextlib.suppress(BrokenPipeError):
        print("" if status is None else status, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
