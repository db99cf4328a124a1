"""Sessions: connections that outlive their sockets. A client that was cut off comes back, and no message is lost or
repeated.

Both ends number what they send and keep it until the other one has it. The client begins every connection with
`{"session", "received"}`; the server answers the second and later ones of a session with what it has received itself,
and each sends again what the other lacks. `{"_r"}` tells what has been received, `{"_bye"}` that the client will not
come back.

    open --cut--> waiting --the client is back in time--> open
         --bye--> closed  --too late------------------->  closed

`ClientSession` is used as a `Connection` is; `Sessions` stands between a `Server` and its handler, which sees
`SessionPeer`s.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hora.errors import AuthenticationError
from hora.net.connection import Connection
from hora.net.server import Peer, Server
from hora.net.wire import Header

__all__ = ["ClientSession", "SessionHandler", "SessionPeer", "Sessions"]

_TELL_MESSAGES, _TELL_BYTES = 64, 256 * 1024  # after so much that was received the other end hears of it
_PAUSE_S = 0.1
# A process whose connection was closed has died, unless there is a proxy on the way; one whose connection was reset has
# died as a rule. One that has not is back at once.
_CLOSED_S, _RESET_S = 0.5, 2.0


class _Ledger:
    """The numbers of one end: what it has sent and the other one may lack, and what it has received."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of what is kept
        self.received = 0
        self._sent = 0
        self._kept: deque[tuple[int, Header, bytes]] = deque()
        self._untold_messages = self._untold_bytes = 0

    def send(self, header: Header, payload: bytes) -> Header:
        self._sent += 1
        numbered = {**header, "_q": self._sent}
        self._kept.append((self._sent, numbered, payload))
        self.num_bytes += len(payload)
        return numbered

    def missing(self, received: int) -> list[tuple[Header, bytes]]:
        """Return the messages that the other end lacks, having received so many."""
        while self._kept and self._kept[0][0] <= received:
            self.num_bytes -= len(self._kept.popleft()[2])
        return [(header, payload) for _, header, payload in self._kept]

    def take(self, header: Header, payload: bytes) -> tuple[bool, bool]:
        """Return whether a message is new, and whether the other end shall hear now what has been received."""
        number = int(header.pop("_q"))
        if number <= self.received:
            return False, False
        if number != self.received + 1:
            raise ValueError(f"message {number} of a session after message {self.received}")
        self.received = number
        self._untold_messages += 1
        self._untold_bytes += len(payload)
        tell = self._untold_messages >= _TELL_MESSAGES or self._untold_bytes >= _TELL_BYTES
        if tell:
            self._untold_messages = self._untold_bytes = 0
        return True, tell


class ClientSession:
    """The client's end. One receiver; any thread sends, and does not wait for a connection that is cut.

    `reopen(limit_s)` connects again. `limit_s`: how long that is tried; 0: not at all. A server whose process has gone
    refuses, and is not waited for.
    """

    def __init__(self, connection: Connection, reopen: Callable[[float], Connection], *, limit_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self._connection, self._reopen = connection, reopen
        self._name = secrets.token_hex(16)
        self._ledger = _Ledger()
        self._lock = threading.Lock()
        self._closing = False
        self._connected = True
        connection.send({"session": self._name, "received": 0})

    @property
    def connection(self) -> Connection:
        """The connection as it is now."""
        return self._connection

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the server may lack."""
        return self._ledger.num_bytes

    def unsent(self) -> list[tuple[Header, bytes]]:
        """The messages that the server may lack."""
        with self._lock:
            return self._ledger.missing(0)

    def send(self, header: Header, payload: bytes = b"") -> None:
        with self._lock:
            self._pass_on(self._ledger.send(header, payload), payload)

    def _pass_on(self, header: Header, payload: bytes = b"") -> None:
        if self._connected:
            try:
                self._connection.send(header, payload)
            except OSError:  # the receiver notices too, and comes back
                self._connected = False
                self._connection.shutdown()

    def receive(self, *, limit_s: float | None = None) -> tuple[Header, bytes]:
        """The next message. EOFError when the server has gone, TimeoutError after so long a silence."""
        while True:
            try:
                header, payload = self._connection.receive(limit_s=limit_s)
            except TimeoutError:
                raise
            except (EOFError, OSError) as error:
                if not self._come_back():
                    raise EOFError(str(error)) from None
                continue
            if "_r" in header:
                with self._lock:
                    self._ledger.missing(int(header["_r"]))
                continue
            with self._lock:
                new, tell = self._ledger.take(header, payload)
                if tell:
                    self._pass_on({"_r": self._ledger.received})
            if new:
                return header, payload

    def _come_back(self) -> bool:
        deadline = time.monotonic() + self.limit_s
        with self._lock:
            self._connected = False
            self._connection.close()
        while not self._closing and (left_s := deadline - time.monotonic()) > 0:
            try:
                connection = self._reopen(left_s)
                connection.send({"session": self._name, "received": self._ledger.received})
                answer, _ = connection.receive(limit_s=max(deadline - time.monotonic(), 0.1))
                connection.sock.settimeout(None)
                with self._lock:
                    for header, payload in self._ledger.missing(int(answer["received"])):
                        connection.send(header, payload)
                    self._connection, self._connected = connection, not self._closing
                return True
            except (AuthenticationError, ConnectionRefusedError, KeyError):
                return False  # the server has gone, or does not know us any more
            except (OSError, EOFError):
                time.sleep(_PAUSE_S)
        return False

    def shutdown(self) -> None:
        """Say that this end will not come back, and wake a blocked receiver with EOFError."""
        self._closing = True
        if self._lock.acquire(timeout=1.0):
            try:
                self._pass_on({"_bye": True})
            finally:
                self._lock.release()
        self._connection.shutdown()

    def close(self) -> None:
        self.shutdown()
        self._connection.close()


class SessionPeer:
    """The server's end of a session as handlers see it: a `Peer` that outlives its connection."""

    def __init__(self, sessions: Sessions, name: str, peer: Peer) -> None:
        self.host, self.where, self.speaker = peer.host, peer.where, peer.speaker
        self.name, self.number, self.open = peer.where, -1, True
        self.session = name
        self._sessions, self._peer = sessions, peer
        self._ledger = _Ledger()
        self._lock = threading.Lock()
        self._connected = True

    @property
    def sock(self) -> socket.socket:
        return self._peer.sock

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a message, now or when the client is back. Dropped if it will not come back."""
        with self._lock:
            numbered = self._ledger.send(header, payload)
            if self._connected:
                self._peer.send(numbered, payload)

    def close(self) -> None:
        """End the session, soon."""
        self._sessions.end(self)

    # ---- in the server's thread -------------------------------------------------------------------------

    def take(self, header: Header, payload: bytes) -> bool:
        """Return whether this is a message for the handler."""
        with self._lock:
            if "_r" in header:
                self._ledger.missing(int(header["_r"]))
                return False
            new, tell = self._ledger.take(header, payload)
            if tell and self._connected:
                self._peer.send({"_r": self._ledger.received})
            return new

    def cut(self, peer: Peer) -> bool:
        """Note the end of a connection; False if the session has another one already."""
        with self._lock:
            if peer is not self._peer or not self._connected:
                return False
            self._connected = False
            return True

    def resume(self, peer: Peer, received: int) -> None:
        with self._lock:
            before, was_connected = self._peer, self._connected
            self._peer, self._connected = peer, True
            peer.send({"received": self._ledger.received})
            for header, payload in self._ledger.missing(received):
                peer.send(header, payload)
        if was_connected:  # it is back before we noticed that it was cut off
            before.close()

    def waits_since(self, peer: Peer) -> bool:
        """Return whether no connection has come since the end of this one."""
        return peer is self._peer and not self._connected

    def hang_up(self) -> None:
        self.open = False
        self._peer.close()


class SessionHandler(Protocol):
    """Interface that the owner of sessions implements. Called in the server's thread only."""

    def message(self, peer: SessionPeer, header: Header, payload: bytes) -> None:
        """An authenticated peer sent a message."""

    def closed(self, peer: SessionPeer) -> None:
        """A session has ended: its client said goodbye, died, or has not come back in time."""


class Sessions:
    """The handler of a server of sessions. `limit_s`: how long a client may stay cut off; 0: not at all."""

    def __init__(self, handler: SessionHandler, *, limit_s: float) -> None:
        self.limit_s = limit_s
        self._handler = handler
        self._server: Server | None = None
        self._sessions: dict[str, SessionPeer] = {}
        self._of: dict[Peer, SessionPeer] = {}

    def serve(self, server: Server) -> None:
        self._server = server

    def end(self, session: SessionPeer) -> None:
        """End a session from any thread."""
        assert self._server is not None
        self._server.call(lambda: self._end(session))

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        session = self._of.get(peer)
        if session is None:
            self._open(peer, str(header["session"]), int(header["received"]))
        elif "_bye" in header:
            self._end(session)
        elif session.take(header, payload):
            self._handler.message(session, header, payload)

    def _open(self, peer: Peer, name: str, received: int) -> None:
        session = self._sessions.get(name)
        if session is not None and session.speaker == peer.speaker:
            self._of[peer] = session
            session.resume(peer, received)
        elif session is None and received == 0:
            self._sessions[name] = self._of[peer] = SessionPeer(self, name, peer)
        else:
            raise ValueError("a session that is over")

    def closed(self, peer: Peer) -> None:
        session = self._of.pop(peer, None)
        if session is not None and session.cut(peer) and session.open:
            limit_s = self.limit_s
            if not peer.broken:
                limit_s = min(limit_s, _RESET_S if peer.reset else _CLOSED_S)
            if limit_s <= 0:
                self._end(session)
                return
            assert self._server is not None
            self._server.call_at(time.monotonic() + limit_s, lambda: self._give_up(session, peer))

    def _give_up(self, session: SessionPeer, peer: Peer) -> None:
        if session.waits_since(peer):
            self._end(session)

    def _end(self, session: SessionPeer) -> None:
        if session.open:
            session.hang_up()
            self._sessions.pop(session.session, None)
            self._handler.closed(session)
