"""Sessions: connections that outlive their sockets. A disconnected client reconnects, and no message is lost or
repeated.

Both ends number their messages and keep them until the other end has received them. The client begins every connection
with `{"session", "received"}`. The server answers every later connection of a session with what it has received, and
each end resends what the other lacks. `{"_r"}` acknowledges received messages; `{"_bye"}` means that the client will
not reconnect.

    open --cut--> waiting --the client reconnects in time--> open
         --bye--> closed  --too late---------------------->  closed

`ClientSession` is used like a `Connection`; `Sessions` sits between a `Server` and its handler, which sees
`SessionPeer`s.
"""

from __future__ import annotations

import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from hora.errors import AuthenticationError
from hora.net.server import Handler, Peer, Server
from hora.net.wire import RECONNECT_PAUSE_S, Connection, Header

# What `receive` raises, or the reading of what it returns: the other end is gone, or sends what is no message.
MALFORMED = (EOFError, OSError, AuthenticationError, ValueError, struct.error)

_TELL_MESSAGES, _TELL_BYTES = 64, 256 * 1024  # acknowledge after this much
# A closed connection means that the process has died, unless there is a proxy in between; a reset one usually does. A
# live process reconnects at once. Any other error means that the host does not answer.
_CLOSED_S, _RESET_S = 0.5, 2.0


class _SessionEnd:
    """One end: sequence numbers of the sent messages that the other end may lack, and of what was received.

    `connected`: messages can be sent now; otherwise they are kept until the client reconnects.
    """

    def __init__(self) -> None:
        self.unsent_bytes = 0  # that the other end may lack
        self.connected = True
        self._lock = threading.Lock()
        self._received = 0
        self._sent = 0
        self._kept: deque[tuple[Header, bytes]] = deque()
        self._untold_messages = self._untold_bytes = 0

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a message, now or when the client reconnects. Dropped if it never does."""
        with self._lock:
            self._sent += 1
            numbered = {**header, "_q": self._sent}
            self._kept.append((numbered, payload))
            self.unsent_bytes += len(payload)
            self._pass_on(numbered, payload)

    def _pass_on(self, header: Header, payload: bytes = b"") -> None:
        """Send over the present connection, if there is one."""
        raise NotImplementedError

    def _missing(self, received: int) -> list[tuple[Header, bytes]]:
        """Return the messages that the other end lacks after having received `received`. Called with the lock held."""
        while self._kept and self._sent - len(self._kept) < received:
            self.unsent_bytes -= len(self._kept.popleft()[1])
        return list(self._kept)

    def record(self, header: Header, payload: bytes) -> bool:
        """Record a received message; returns whether it is for the owner."""
        with self._lock:
            if "_r" in header:
                self._missing(int(header["_r"]))
                return False
            number = int(header.pop("_q"))
            if number <= self._received:
                return False
            if number != self._received + 1:
                raise ValueError(f"message {number} of a session after message {self._received}")
            self._received = number
            self._untold_messages += 1
            self._untold_bytes += len(payload)
            if self._untold_messages >= _TELL_MESSAGES or self._untold_bytes >= _TELL_BYTES:
                self._untold_messages = self._untold_bytes = 0
                self._pass_on({"_r": self._received})
            return True


class ClientSession(_SessionEnd):
    """The client's end. One receiver; any thread may send without waiting for a broken connection.

    `reopen(limit_s)` reconnects. `limit_s`: how long to try; 0: not at all. If the server's process has ended, it
    refuses, and the client does not wait. `connection`: the current one, if `connected`.
    """

    def __init__(self, connection: Connection, reopen: Callable[[float], Connection], *, limit_s: float = 0.0) -> None:
        super().__init__()
        self.limit_s = limit_s
        self.connection, self._reopen = connection, reopen
        self._name = secrets.token_hex(16)
        self._closing = False
        connection.send({"session": self._name, "received": 0})

    def unsent(self) -> list[tuple[Header, bytes]]:
        """Return the messages that the server may lack."""
        with self._lock:
            return self._missing(0)

    def _pass_on(self, header: Header, payload: bytes = b"") -> None:
        if self.connected:
            try:
                self.connection.send(header, payload)
            except OSError:  # the receiver notices too, and reconnects
                self.connected = False
                self.connection.shutdown()

    def receive(self, *, limit_s: float | None = None) -> tuple[Header, bytes]:
        """Return the next message. Raises EOFError if the server is gone, TimeoutError after that much silence."""
        while True:
            try:
                header, payload = self.connection.receive(limit_s=limit_s)
            except TimeoutError:
                raise
            except (EOFError, OSError) as error:
                if not self._come_back():
                    raise EOFError(str(error)) from None
                continue
            if self.record(header, payload):
                return header, payload

    def _come_back(self) -> bool:
        deadline = time.monotonic() + self.limit_s
        with self._lock:
            self.connected = False
            self.connection.close()
        while not self._closing and (left_s := deadline - time.monotonic()) > 0:
            try:
                connection = self._reopen(left_s)
                connection.send({"session": self._name, "received": self._received})
                answer, _ = connection.receive(limit_s=max(deadline - time.monotonic(), 0.1))
                connection.sock.settimeout(None)
                with self._lock:
                    for header, payload in self._missing(int(answer["received"])):
                        connection.send(header, payload)
                    self.connection, self.connected = connection, not self._closing
                return True
            except (AuthenticationError, ConnectionRefusedError, KeyError):
                return False  # the server is gone, or no longer knows us
            except (OSError, EOFError):
                time.sleep(RECONNECT_PAUSE_S)
        return False

    def shutdown(self) -> None:
        """Announce that this end will not reconnect, and wake a blocked receiver with EOFError."""
        self._closing = True
        if self._lock.acquire(timeout=1.0):
            try:
                self._pass_on({"_bye": True})
            finally:
                self._lock.release()
        self.connection.shutdown()

    def close(self) -> None:
        self.shutdown()
        self.connection.close()


class SessionPeer(_SessionEnd):
    """The server's end of a session for handlers: a `Peer` that outlives its connection."""

    def __init__(self, sessions: Sessions, name: str, peer: Peer) -> None:
        super().__init__()
        self.host, self.where, self.speaker = peer.host, peer.where, peer.speaker
        self.name, self.number, self.open = peer.where, -1, True
        self.session = name
        self._sessions, self._peer = sessions, peer

    @property
    def sock(self) -> socket.socket:
        return self._peer.sock

    def _pass_on(self, header: Header, payload: bytes = b"") -> None:
        if self.connected:
            self._peer.send(header, payload)

    def close(self) -> None:
        """End the session, soon."""
        self._sessions.end(self)

    # ---- in the server's thread -------------------------------------------------------------------------

    def cut(self, peer: Peer) -> bool:
        """Record the end of a connection; returns whether the session is without one since then."""
        with self._lock:
            if peer is self._peer:
                self.connected = False
            return not self.connected and peer is self._peer

    def resume(self, peer: Peer, received: int) -> None:
        with self._lock:
            before, was_connected = self._peer, self.connected
            self._peer, self.connected = peer, True
            peer.send({"received": self._received})
            for header, payload in self._missing(received):
                peer.send(header, payload)
        if was_connected:  # it reconnected before we noticed the cut
            before.close()

    def hang_up(self) -> None:
        self.open = False
        self._peer.close()


class Sessions:
    """The handler of a `server` of sessions. `limit_s`: how long a client may be disconnected; 0: not at all.

    A session is closed when its client said goodbye, died, or did not reconnect in time.
    """

    server: Server

    def __init__(self, handler: Handler[SessionPeer], *, limit_s: float) -> None:
        self.limit_s = limit_s
        self._handler = handler
        self._sessions: dict[str, SessionPeer] = {}
        self._of: dict[Peer, SessionPeer] = {}

    def end(self, session: SessionPeer) -> None:
        """End a session. Thread-safe."""
        self.server.call(lambda: self._end(session))

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        session = self._of.get(peer)
        if session is None:
            self._open(peer, str(header["session"]), int(header["received"]))
        elif "_bye" in header:
            self._end(session)
        elif session.record(header, payload):
            self._handler.message(session, header, payload)

    def _open(self, peer: Peer, name: str, received: int) -> None:
        session = self._sessions.get(name)
        if session is not None and session.speaker == peer.speaker:
            self._of[peer] = session
            session.resume(peer, received)
        elif session is None and received == 0:
            self._sessions[name] = self._of[peer] = SessionPeer(self, name, peer)
        else:
            if session is None:
                peer.send({"ended": name})  # its client does not try any longer
            raise ValueError("a session that has ended")

    def closed(self, peer: Peer) -> None:
        session = self._of.pop(peer, None)
        if session is not None and session.cut(peer) and session.open:
            limit_s = self.limit_s
            if peer.error is None or isinstance(peer.error, ConnectionError):
                limit_s = min(limit_s, _RESET_S if peer.error else _CLOSED_S)
            if limit_s <= 0:
                self._end(session)
                return
            self.server.call_at(time.monotonic() + limit_s, lambda: self._end(session) if session.cut(peer) else None)

    def _end(self, session: SessionPeer) -> None:
        if session.open:
            session.hang_up()
            self._sessions.pop(session.session, None)
            self._handler.closed(session)
