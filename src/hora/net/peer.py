"""One connection of a server, from the handshake to its last message; any thread sends."""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator

from hora.net.wire import ANYBODY, Header, Opener, Sealer, ServerHandshake

__all__ = ["Peer"]


class Peer:
    """States: stranger (until `handshake` is done) -> authenticated (`opener` and `sealer` exist) -> closed (not
    `open`).

    `speaker`: the number of the worker or rank whose key it has proven to hold (-1: a key that all share). `name`, and
    the `number` of the worker, task or rank of which this is the connection, belong to the server's handler. `host`:
    the address from which it comes, or its process where that is local; `where`: the same in more detail, for messages.
    `broken`: nobody answers there any more; the kernel reports the end of a process. `flush` and `drop` are the
    server's; it calls them in its thread.
    """

    def __init__(
        self, sock: socket.socket, *, host: str, where: str, flush: Callable[[Peer], None], drop: Callable[[Peer], None]
    ) -> None:
        self.sock, self.host, self.where = sock, host, where
        self.speaker = ANYBODY
        self.name, self.number = where, -1
        self.handshake: ServerHandshake | None = None
        self.opener: Opener | None = None
        self.sealer: Sealer | None = None
        self.open = True
        self.broken = self.reset = False  # cut off, or ended by somebody on the way, as it seems
        self.drained = True  # nothing waits to be sent
        self._flush, self._drop = flush, drop
        self._lock = threading.Lock()
        self._sender = 0  # the thread that is in `send`
        self._outbox: deque[tuple[Header, bytes]] = deque()
        self._frames: Iterator[bytes] = iter(())
        self._unsent = memoryview(b"")

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a message as fast as the peer reads, without waiting for it. Dropped if the peer is gone."""
        self._outbox.append((header, payload))
        # Whoever holds the lock looks into the outbox again afterwards. It may be this very thread: a signal's handler
        # that says goodbye must not wait for the lines that it has interrupted.
        while self._outbox and self._lock.acquire(blocking=False):
            try:
                self._sender = threading.get_ident()
                if not self.open or not self.drained:  # else the server's thread is at it
                    return
                self.drained = self._send_all()
                left = not self.drained
            finally:
                self._sender = 0
                self._lock.release()
            if left:
                self._flush(self)

    @property
    def interrupted(self) -> bool:
        """Tell whether the calling thread is in the middle of `send`: this is a signal's handler, and what it waits for
        here comes when it has returned.
        """
        return self._sender == threading.get_ident()

    def send_descriptor(self, descriptor: int) -> None:
        """Hand a file descriptor to the process at the other end of a local socket. OSError if it is gone."""
        with self._lock:
            socket.send_fds(self.sock, [b"F"], [descriptor])

    def push(self) -> bool:
        """Send what the socket takes now, in the server's thread; False when something is left."""
        while True:
            with self._lock:
                done = self.drained = self._push()
            if not done or not self._outbox:
                return done

    def close(self) -> None:
        """End the connection, soon."""
        self._drop(self)

    def close_socket(self) -> None:
        """The end, for the server: no other thread is sending now, none will any more."""
        with self._lock:
            self.open = False
            self.sock.close()

    def _send_all(self) -> bool:
        try:
            return self._push()
        except OSError:  # it is broken, which the server's thread will notice
            return False

    def _push(self) -> bool:
        while True:
            if not self._unsent:
                frame = self._next_frame()
                if frame is None:
                    return True
                self._unsent = memoryview(frame)
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return False
            self._unsent = self._unsent[sent:]

    def _next_frame(self) -> bytes | None:
        frame = next(self._frames, None)
        if frame is None and self._outbox:
            assert self.sealer is not None
            self._frames = self.sealer.frames(*self._outbox.popleft())
            frame = next(self._frames)
        return frame
