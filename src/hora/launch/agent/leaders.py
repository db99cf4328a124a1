"""The link of an agent that outlives its leader: the agent keeps its workers until the leader is started again.

All leaders of a run listen at the same name and port. When the session with one has ended, the link connects again and
says `Join` with what is here: the run, the workers, and what the last leader asked the agent to remember. The new
leader needs nothing else. The workers train meanwhile, and their output is kept up to a limit.

    following --the session has ended--> alone --a leader answers `Welcome`--> following
        |                                  |   --it answers `Refused` and `forget`--> its workers end -> alone
        +--Quit--> over <--too late--------+
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import deque

from hora.launch.agent.agent import ControllerLink, on_this_node
from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Join,
    Leaving,
    Message,
    Output,
    Quit,
    Refused,
    Remember,
    Remembered,
    Start,
    Started,
    Taken,
    Terminate,
    Welcome,
)
from hora.net.messages import pack, unpack
from hora.net.session import MALFORMED, ClientSession
from hora.net.wire import Connection, Credentials, connect
from hora.platforms.node import Node
from hora.version import version

_CONNECT_S, _ANSWER_S, _TURN_S = 5.0, 10.0, 0.2
_HELD_BYTES = 4 * 1024 * 1024  # of output between two leaders
_CLEAR_LIMIT_S = 30.0
_NOTHING = Remember(0, 0, "")


class LeaderLink(ControllerLink):
    """The link to one leader after another. `session`, `welcome`: with the first one."""

    def __init__(self, place: Node, credentials: Credentials, session: ClientSession, welcome: Welcome) -> None:
        super().__init__()
        self.elastic = welcome.elastic
        self.controller = place.host
        self._place, self._credentials = place, credentials
        self._name, self._run = welcome.name, welcome.run
        self._leaderless_s = welcome.leaderless_s
        self._memory = _NOTHING
        self._workers: dict[int, Started | Exited] = {}  # all that were ever ordered here
        self._held: deque[Output] = deque()  # output that no leader has taken
        self._session: ClientSession | None = None
        self._over = threading.Event()
        self._leaving = self._has_quit = False
        self._thread = threading.Thread(
            target=self._follow, args=(session, welcome), name="hora-agent-leaders", daemon=True
        )
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
                self._hold(message)

    def _hold(self, output: Output) -> None:
        self._held.append(output)
        while sum(len(one.data) for one in self._held) > _HELD_BYTES:
            self._held.popleft()

    def close(self) -> None:
        self._over.set()
        session = self._session
        if session is not None:
            session.shutdown()
        if self._thread.is_alive():
            self._thread.join(_CONNECT_S)

    # ---- in the link's thread -------------------------------------------------------------------------------

    def _follow(self, session: ClientSession, welcome: Welcome) -> None:
        found: tuple[ClientSession, Welcome] | None = (session, welcome)
        while found is not None:
            self._begin(*found)
            try:
                self._obey(found[0])
            finally:
                self._end(found[0])
            found = self._next_leader()
        self._put(None)

    def _begin(self, session: ClientSession, welcome: Welcome) -> None:
        """Report the state of the workers to a new leader, and all events from then on."""
        session.limit_s = welcome.return_s
        self._name, self._run = welcome.name, welcome.run
        self._leaderless_s = welcome.leaderless_s
        self._executable = welcome.executable
        with self._lock:
            ended = [state for state in self._workers.values() if isinstance(state, Exited)]
            known: list[Message] = [Started(number, 0) for number in self._workers]
            for message in [*known, *self._held, *ended]:
                session.send(*pack(message))
            self._held.clear()
            self._session, self._ahead = session, 0
        if self._leaving:
            session.send(*pack(Leaving()))

    def _obey(self, session: ClientSession) -> None:
        """Obey this leader until it is gone, or has said how the job ended."""
        with contextlib.suppress(*MALFORMED):
            while not self._over.is_set():
                message = unpack(MESSAGES, *session.receive())
                if isinstance(message, Refused):  # it follows a leader that did not know of the workers here
                    self._clear()
                    return
                self._accept(session, message)

    def _accept(self, session: ClientSession, message: Message) -> None:
        match message:
            case Start():
                if message.worker not in self._workers:
                    self._workers[message.worker] = Started(message.worker, 0)  # a next leader must not start it again
                    # By its name: the next leader may have another address.
                    meeting = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": self.controller}
                    self._put(on_this_node(message, meeting, self._executable))
            case Remember():
                self._memory = message
                session.send(*pack(Remembered(message.term, message.saved)))
            case Welcome():
                self._name = message.name
            case Taken(num_bytes):
                self._count(-num_bytes)
            case Quit():
                self._has_quit = True
                self._put(message)
            case _:
                self._put(message)

    def _end(self, session: ClientSession) -> None:
        """Keep what this leader has not taken for the next one."""
        session.close()
        with self._lock:
            unsent = [unpack(MESSAGES, header, payload) for header, payload in session.unsent()]
            self._session, self._ahead = None, 0
            late, self._held = self._held, deque()
            for message in [*unsent, *late]:
                if isinstance(message, Output):
                    self._hold(message)
        self.wake()  # the pipes of the workers may be read again

    def _next_leader(self) -> tuple[ClientSession, Welcome] | None:
        """Return the next leader that admits this node; None if the job is over or nobody leads it for too long."""
        deadline = time.monotonic() + self._leaderless_s
        while not (self._has_quit or self._over.is_set()):
            with contextlib.suppress(*MALFORMED):
                session = self._connect()
                try:
                    answer = self._introduce(session)
                except BaseException:
                    session.close()
                    raise
                if isinstance(answer, Welcome):
                    return session, answer
                session.close()
                if isinstance(answer, Refused) and answer.forget:
                    self._clear()
            if time.monotonic() > deadline:
                limit = f"{self._leaderless_s:g} s (--leader-timeout)"
                with contextlib.suppress(OSError):  # what has started this agent is gone
                    print(f"hora: node {self._name}: nobody has led the job for {limit}", file=sys.stderr)
                return None
            self._over.wait(_TURN_S)
        return None

    def _connect(self) -> ClientSession:
        def reach(limit_s: float) -> Connection:
            return connect((self._place.host, self._place.port), self._credentials, timeout_s=max(limit_s, 0.1))

        return ClientSession(reach(_CONNECT_S), reach)

    def _introduce(self, session: ClientSession) -> Message:
        place, memory = self._place, self._memory
        own = Join(
            node=place.index,
            name=self._name or place.name or socket.gethostname(),
            slots=place.slots or 1,
            version=version(),
            workers=sorted(self._workers),
            gpus=[],
            run=self._run,
            term=memory.term,
            saved=memory.saved,
            memory=memory.memory,
        )
        session.send(*pack(own))
        answer = unpack(MESSAGES, *session.receive(limit_s=_ANSWER_S))
        session.connection.sock.settimeout(None)
        return answer

    def _clear(self) -> None:
        """End the workers of a leader that another one has replaced, and forget them."""
        running = [number for number, state in self._workers.items() if isinstance(state, Started)]
        if running:
            self._put(Terminate(running, 0.0))
        deadline = time.monotonic() + _CLEAR_LIMIT_S
        while any(isinstance(self._workers[number], Started) for number in running) and time.monotonic() < deadline:
            self._over.wait(_TURN_S)
        with self._lock:
            self._workers.clear()
            self._held.clear()
        self._memory, self._run, self._name = _NOTHING, "", self._place.name
