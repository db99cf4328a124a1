"""A link of the mesh: one authenticated connection between two ranks, from its first byte to its messages."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable

from hora.net import wire

__all__ = ["Link"]

_JOB = "mesh"
_SEND_LIMIT_S = 60.0
_SILENCE_LIMIT_S = 8
_RECEIVE_BYTES = 256 * 1024


class Link:
    """States: handshake (on the accepting side) -> authenticated -> introduced, when the peer has said its `rank`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank: int | None = None
        self._lock = threading.Lock()
        self._handshake: wire.ServerHandshake | None = None
        self._sealer: wire.Sealer | None = None
        self._opener: wire.Opener | None = None

    @classmethod
    def accepted(cls, sock: socket.socket, secret: bytes) -> Link:
        """The accepting side; the peer is a stranger until the handshake is done."""
        link = cls(sock)
        link._handshake = wire.ServerHandshake(secret, _JOB)
        link._tune()
        return link

    @classmethod
    def to(cls, sock: socket.socket, where: str | tuple[str, int], secret: bytes, deadline: float) -> Link:
        """Connect, and prove to each other that both know the secret."""
        sock.settimeout(max(deadline - time.monotonic(), 0.01))
        sock.connect(where)
        try:
            keys = wire.shake_hands(sock, secret, _JOB, deadline)
        except EOFError:
            raise ConnectionError("the peer closed the connection during the handshake") from None
        link = cls(sock)
        link._sealer, link._opener = wire.Sealer(keys.to_server), wire.Opener(keys.to_client)
        link._tune()
        return link

    def _tune(self) -> None:
        self.sock.settimeout(_SEND_LIMIT_S)
        if self.sock.family == socket.AF_INET:
            wire.tune(self.sock, silence_limit_s=_SILENCE_LIMIT_S)

    def send(self, header: wire.Header, payload: bytes = b"") -> None:
        """Send a message, from any thread. A broken link is noticed by whoever reads it."""
        assert self._sealer is not None
        with self._lock, contextlib.suppress(OSError):
            for frame in self._sealer.frames(header, payload):
                self.sock.sendall(frame)

    def receive(self) -> Iterable[tuple[wire.Header, bytes]]:
        """The messages that have come; call when the socket is readable. EOFError when the peer has closed."""
        handshake = self._handshake
        data = self.sock.recv(_RECEIVE_BYTES if handshake is None else handshake.wanted_bytes)
        if not data:
            raise EOFError
        if handshake is None:
            assert self._opener is not None
            return self._opener.feed(data)
        self.sock.sendall(handshake.feed(data))
        if handshake.done and handshake.keys is not None:
            self._handshake = None
            self._sealer, self._opener = wire.Sealer(handshake.keys.to_client), wire.Opener(handshake.keys.to_server)
        return ()
