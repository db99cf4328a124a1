"""The keeper of a node: holds the node's workers while leaders of the job come and go. For jobs whose state is in a
store.

The process of its node (`hora run --join`) starts it, in a session of its own, and may die: the workers stay. It finds
the leader in the store, connects to it, tells it which workers run here and how others have ended, and obeys it until a
later one leads. Between leaders the workers train on; what they print waits here, up to a limit.

It ends, and its workers with it, when a leader says that the job is over, or when nobody has led for too long:
`leaderless_s`, or, when the process of its node is gone, `orphaned_s`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hora.errors import AuthenticationError
from hora.launch.agent import supervisor
from hora.launch.agent.held import AHEAD_BYTES, HeldSupervisor
from hora.launch.controller.agents import PROTOCOL, credentials
from hora.launch.environment import variables
from hora.launch.ha.relay import Relay
from hora.launch.ha.store import Store, StoreError, open_store
from hora.launch.providers.join import own_address
from hora.net.connection import Connection, connect
from hora.net.session import ClientSession
from hora.version import version

__all__ = ["Keeper"]

_READ_BYTES = 64 * 1024
_CONNECT_S, _ANSWER_S, _TURN_S = 5.0, 10.0, 0.2
_BYE_S = 10.0  # a leader that had the supervisor end says goodbye within so long
_OUTPUT = (supervisor.STDOUT, supervisor.STDERR)


class Keeper:
    """`place`: the node's number, name and slots, as the agents' protocol has them.

    Orders of a leader whose term is not the latest that was seen here are refused. `parent`: the process of the node.
    `claim`: a name that one keeper of this machine has at a time. A process that is started again on a node where an
    earlier keeper holds workers has its own wait until that one has gone. `former`: the run that was over before.
    """

    def __init__(
        self,
        place: Mapping[str, Any],
        secret: bytes,
        store: Store,
        *,
        leaderless_s: float,
        orphaned_s: float,
        poll_s: float,
        parent: int,
        claim: str = "",
        former: str = "",
    ) -> None:
        self._place, self._secret, self._store = dict(place), secret, store
        self._leaderless_s, self._orphaned_s, self._poll_s = leaderless_s, orphaned_s, poll_s
        self._parent, self._claim, self._former = parent, claim, former
        self._relay, self._address = Relay(), own_address(store.members)
        self._lock = threading.Lock()
        self._supervisor: HeldSupervisor | None = None
        self._run = ""  # the job's run whose workers are here
        self._workers: dict[int, bytes] = {}  # worker -> the frame that tells its state
        self._held: list[tuple[bytes, bytes]] = []  # kind and frame, of output that nobody has taken
        self._session: ClientSession | None = None
        self._term = 0
        self._claimed: socket.socket | None = None
        self._welcome: Mapping[str, Any] = {}
        self._over: threading.Event = threading.Event()
        self._status: int | None = None  # of the job, once it is over
        self._leaving = False
        self._ended_at: float | None = None  # when the supervisor has ended

    def run(self) -> int | None:
        """Serve leaders until the job is over; its status. None when nobody leads it, or this node has left."""
        signal.signal(signal.SIGTERM, lambda *_: self._leave())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the process of the node decides
        alone_since = time.monotonic()
        try:
            while not self._over.is_set():
                if self._claim and not self._holds_claim():
                    if os.getppid() != self._parent:
                        return None  # it has no workers, and nobody to get any for
                    alone_since = time.monotonic()
                    self._leader()  # the job may be over
                    self._over.wait(self._poll_s)
                    continue
                found = self._leader()
                if found is not None and self._serve(*found):
                    alone_since = time.monotonic()
                orphaned = os.getppid() != self._parent
                limit_s = self._orphaned_s if orphaned else self._leaderless_s
                if time.monotonic() > alone_since + limit_s:
                    name = self._place["name"]
                    print(f"hora: node {name}: nobody has led the job for {limit_s:g} s", file=sys.stderr)
                    return None
                self._over.wait(_TURN_S)
            return self._status
        finally:
            self._relay.close()
            self._end_workers()
            if self._claimed is not None:
                self._claimed.close()

    def _holds_claim(self) -> bool:
        """Take the name, which goes with its process, whatever becomes of it."""
        if self._claimed is None:
            claimed = socket.socket(socket.AF_UNIX)
            try:
                claimed.bind(f"\0hora-keeper-{self._claim}")
            except OSError:
                claimed.close()
                return False
            self._claimed = claimed
        return True

    def _leader(self) -> tuple[int, str, int] | None:
        """The present leader's term, and where it listens; None if there is none, or nobody knows."""
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
        self._status = status
        self._over.set()

    # ---- one leader -----------------------------------------------------------------------------------------

    def _serve(self, term: int, host: str, port: int) -> bool:
        """Obey this leader until it has gone or another one leads; whether it has let us join."""

        def reach(limit_s: float) -> Connection:
            return connect((host, port), credentials(self._secret), timeout_s=limit_s)

        try:
            session = ClientSession(reach(_CONNECT_S), reach)
        except (OSError, AuthenticationError):
            return False
        try:
            session.send({"op": "join", **self._place, "version": version(), "protocol": PROTOCOL, "run": self._run,
                          "workers": sorted(self._workers)})  # fmt: skip
            welcome, _ = session.receive(limit_s=_ANSWER_S)
            session.connection.sock.settimeout(None)
            if welcome["op"] != "welcome" or int(welcome["term"]) != term:
                return False
            self._begin(session, welcome, host)
            messages: queue.SimpleQueue[tuple[Mapping[str, Any], bytes] | None] = queue.SimpleQueue()
            threading.Thread(target=_receive, args=(session, messages), name="hora-keeper", daemon=True).start()
            self._obey(messages, host)
            return True
        except (EOFError, OSError):
            return False
        finally:
            self._relay.lead_to(None)
            session.close()  # first: whoever sends holds the lock, and a leader that is stopped takes nothing
            with self._lock:
                if self._session is session:
                    said = [frame for header, frame in session.unsent() if header["op"] == "out"]
                    self._held = [(frame[:1], frame) for frame in said if frame[:1] in _OUTPUT]
                self._session = None
            if self._supervisor is not None:
                self._supervisor.forget()

    def _begin(self, session: ClientSession, welcome: Mapping[str, Any], host: str) -> None:
        """Tell a leader that has let us join all that it must know, and from then on what happens."""
        session.limit_s = float(welcome["return_s"])
        if self._run != welcome["nonce"]:  # not the leader of the workers that are here
            self._end_workers()
            self._workers, self._held = {}, []
        self._place["name"], self._run = str(welcome["name"]), str(welcome["nonce"])
        self._welcome, self._term = welcome, int(welcome["term"])
        self._start_supervisor()
        if int(welcome["meeting"]):
            self._relay.lead_to((host, int(welcome["meeting"])))
        with self._lock:
            ended = [frame for frame in self._workers.values() if frame[:1] == supervisor.EXITED]
            known = b"".join(supervisor.FRAME.pack(supervisor.STARTED, number, 0) for number in self._workers)
            said = b"".join(frame for _, frame in self._held)
            session.send({"op": "state"}, supervisor.MARK + known + said + b"".join(ended))
            self._held, self._session = [], session
        if self._leaving:
            session.send({"op": "leaving"})

    def _obey(self, messages: queue.SimpleQueue[tuple[Mapping[str, Any], bytes] | None], host: str) -> None:
        look_at = time.monotonic() + self._poll_s
        while self._ended_at is None or time.monotonic() < self._ended_at + _BYE_S:
            with contextlib.suppress(queue.Empty):
                message = messages.get(timeout=self._poll_s)
                if message is None:
                    return  # it has gone
                header, payload = message
                if int(header.get("term", self._term)) < self._term:
                    continue  # an order of the past
                if header["op"] == "in":
                    self._order(payload)
                elif header["op"] == "meeting":
                    self._relay.lead_to((host, int(header["port"])))
                elif header["op"] == "taken":
                    self._held_supervisor.taken(int(header["bytes"]))
                elif header["op"] == "bye":
                    self._end(int(header["status"]))
                    return
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + self._poll_s
                with contextlib.suppress(StoreError):
                    if self._store.read().term > self._term:
                        return  # another one leads

    def _leave(self) -> None:
        """Asked to end: in a signal's handler."""
        if not self._leaving:
            self._leaving = True
            threading.Thread(target=self._wait_for_the_last, name="hora-keeper-leave", daemon=True).start()

    def _wait_for_the_last(self) -> None:
        with self._lock:
            session = self._session
        if session is not None:
            session.send({"op": "leaving"})
        if self._supervisor is not None:
            self._supervisor.wait_for_workers(self._leaderless_s)
        self._over.set()
        if session is not None:
            session.shutdown()

    # ---- the workers ----------------------------------------------------------------------------------------

    @property
    def _held_supervisor(self) -> HeldSupervisor:
        assert self._supervisor is not None
        return self._supervisor

    def _start_supervisor(self) -> None:
        if self._supervisor is not None and self._supervisor.process.poll() is None:
            return
        self._ended_at = None
        self._supervisor = HeldSupervisor()
        reader = threading.Thread(target=self._read, args=(self._supervisor,), name="hora-keeper-read", daemon=True)
        reader.start()

    def _order(self, lines: bytes) -> None:
        meeting = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": self._address,  # of the interface at which the ranks listen
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
            "HORA_RELAY": self._relay.name,
            "HORA_LAUNCHER_TIMEOUT": str(int(self._leaderless_s)),
        }
        self._held_supervisor.order(lines, meeting, str(self._welcome["executable"]))

    def _read(self, held: HeldSupervisor) -> None:
        """Take the supervisor's frames, one by one."""
        buffer, marked = bytearray(), False
        while data := _more(held):
            buffer += data
            marked = marked or supervisor.skip_mark(buffer)
            while marked and (frame := supervisor.take_frame(buffer)):
                self._heard(held, *frame)
        if held is not self._supervisor:
            return
        body = json.dumps({"code": 255, "reason": "the supervisor of its node has ended"}).encode()
        for worker, state in [] if self._over.is_set() else list(self._workers.items()):
            if state[:1] == supervisor.STARTED:  # perhaps it was killed, and its workers with it
                self._heard(held, supervisor.EXITED, worker, body)
        with self._lock:
            if self._session is not None:
                self._session.send({"op": "ended", "status": str(held.end())})
            self._ended_at = time.monotonic()

    def _heard(self, held: HeldSupervisor, kind: bytes, worker: int, body: bytes) -> None:
        frame = supervisor.FRAME.pack(kind, worker, len(body)) + body
        with self._lock:
            if held is not self._supervisor:  # of a run that is over
                return
            if kind in (supervisor.STARTED, supervisor.EXITED):
                self._workers[worker] = frame
            self._pass_on(kind, frame)

    def _pass_on(self, kind: bytes, frame: bytes) -> None:
        """Send it to the leader, or hold it for the next one. Output beyond the limit is lost, oldest first."""
        session = self._session
        if session is not None and (session.connected or session.unsent_bytes < AHEAD_BYTES):
            session.send({"op": "out"}, frame)
            self._held_supervisor.sent(len(frame), waits=session.connected)
        elif kind in _OUTPUT:
            self._held.append((kind, frame))
            while sum(len(held) for _, held in self._held) > AHEAD_BYTES:
                self._held.pop(0)

    def _end_workers(self) -> None:
        held, self._supervisor = self._supervisor, None
        if held is not None:
            held.hang_up()
            held.end()


def _more(held: HeldSupervisor) -> bytes:
    """Read from the supervisor, once the leader has passed on enough of what was read before."""
    assert held.process.stdout is not None
    held.wait_for_room()
    return os.read(held.process.stdout.fileno(), _READ_BYTES)


def _receive(session: ClientSession, messages: queue.SimpleQueue[tuple[Mapping[str, Any], bytes] | None]) -> None:
    try:
        while True:
            messages.put(session.receive())
    except (EOFError, OSError, AuthenticationError, ValueError, struct.error):
        messages.put(None)


def main() -> int:
    """`python -m hora.launch.agent.keeper`: a line of JSON on standard input says what to keep.

    What it prints is the job's status.
    """
    given = json.loads(sys.stdin.readline())
    store = open_store(given["store"], variables()).below(given["job"])
    limits = {name: given[name] for name in ("leaderless_s", "orphaned_s", "poll_s", "parent", "former")}
    given["place"]["name"] = given["place"]["name"] or socket.gethostname()
    claim = f"{given['job']}-{given['place']['node']}"
    status = Keeper(given["place"], bytes.fromhex(given["secret"]), store, **limits, claim=claim).run()
    with contextlib.suppress(BrokenPipeError):
        print("" if status is None else status, end="", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
