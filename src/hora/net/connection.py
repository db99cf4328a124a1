"""The client's end of an authenticated connection: connect, authenticate, send and receive.

All clients use `connect`: workers and Spark tasks to their launcher, ranks to rank 0 and to each other for shared
memory, callers to a session of workers. The other end is a `server`.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from hora.net import sockets
from hora.net.sockets import Where
from hora.net.wire import REFUSAL, ClientHandshake, Credentials, Header, Session

if TYPE_CHECKING:
    from hora.net.noise import Records

__all__ = ["Connection", "Stream", "connect"]

_RECEIVE_BYTES = 256 * 1024
_SHORTEST_REST_S, _LONGEST_REST_S = 0.005, 0.2


def connect(where: Where, credentials: Credentials, *, timeout_s: float, silence_limit_s: int = 30) -> Connection:
    """Connect and authenticate both ends within the time limit.

    Raises AuthenticationError if the server does not hold the secret, TimeoutError after the limit, and another OSError
    (refused, unreachable, another user's socket) at once.
    """
    deadline, rest_s, what = time.monotonic() + timeout_s, _SHORTEST_REST_S, "did not answer"
    while True:
        try:
            return _attempt(where, credentials, deadline, silence_limit_s)
        except EOFError:
            # A flood of strangers can displace a handshake on the server: retry.
            what = "closed every connection during the handshake"
            if time.monotonic() + rest_s < deadline:
                time.sleep(rest_s)
                rest_s = min(2 * rest_s, _LONGEST_REST_S)
                continue
        except TimeoutError:
            pass
        name = where if isinstance(where, str) else f"{where[0]}:{where[1]}"
        raise TimeoutError(f"{name} {what} for {timeout_s:g} s")


def _attempt(where: Where, credentials: Credentials, deadline: float, silence_limit_s: int) -> Connection:
    sock = sockets.open_socket(where, limit_s=deadline - time.monotonic())
    try:
        sockets.tune(sock, silence_limit_s=silence_limit_s)
        session = _shake_hands(sock, credentials, deadline)
        sock.settimeout(None)
    except (ConnectionResetError, BrokenPipeError):
        sock.close()
        raise EOFError from None
    except BaseException:
        sock.close()
        raise
    return Connection(sock, session)


def _shake_hands(sock: socket.socket, credentials: Credentials, deadline: float) -> Session:
    """Run the client's part of the handshake. Raises EOFError if the server closes the connection."""
    handshake = ClientHandshake(credentials)
    sock.sendall(handshake.hello)
    session, confirmation = handshake.finish(_receive_answer(sock, handshake.answer_bytes, deadline))
    sock.sendall(confirmation)
    return session


def _receive_answer(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        data = sock.recv(num_bytes - len(received))
        if not data and received == REFUSAL:  # from the server, or from an attacker in between
            break
        if not data:
            raise EOFError
        received += data
    return bytes(received)


@dataclass(frozen=True)
class Stream:
    """A connection that carries raw bytes in one direction instead of messages; unencrypted without `records`."""

    sock: socket.socket
    records: Records | None = None


class Connection:
    """An authenticated connection on a blocking socket. One sender and one receiver at a time."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.sock = sock
        self.sealer, self.opener = session
        self._ready: deque[tuple[Header, bytes]] = deque()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def send(self, header: Header, payload: bytes | memoryview = b"") -> None:
        for frame in self.sealer.frames(header, payload):
            self.sock.sendall(frame)

    def receive(self, *, limit_s: float | None = None) -> tuple[Header, bytes]:
        """Return the next message; raises EOFError if the server has closed the connection, TimeoutError after the
        limit.
        """
        if limit_s is not None:
            self.sock.settimeout(limit_s)
        while not self._ready:
            data = self.sock.recv(_RECEIVE_BYTES)
            if not data:
                raise EOFError("the server closed the connection")
            self._ready.extend(self.opener.feed(data))
        return self._ready.popleft()

    def receive_descriptor(self, *, limit_s: float) -> int | None:
        """Return the file descriptor that the server passes over a local socket; None if it has none."""
        self.sock.settimeout(max(limit_s, 0.001))
        _, descriptors, _, _ = socket.recv_fds(self.sock, 1, 1)
        return descriptors[0] if descriptors else None

    def shutdown(self) -> None:
        """Wake a blocked receiver with EOFError. Harmless on a dead connection."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already disconnected: no receiver to wake
            return

    def close(self) -> None:
        self.sock.close()
