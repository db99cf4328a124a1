"""The acceptor: the only place that accepts connections, with one set of limits for all servers.

It runs in its server's event loop and survives shortages. Without file descriptors it drops an unauthenticated
connection, or leaves the next ones in the backlog for a moment; any other error of `accept` is logged.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hora.net import sockets

if TYPE_CHECKING:
    import asyncio

MAX_STRANGERS = 128
HANDSHAKE_LIMIT_S = 10.0
_SHARE_OF_DESCRIPTORS = 8  # one server's strangers hold at most this fraction of the process's descriptors
_REJECTION_LOG_INTERVAL_S = 10.0
_ACCEPT_AT_ONCE = 64
_REST_S = 0.2
_LOG_INTERVAL_S = 60.0
_END_LIMIT_S = 5.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger("hora.net")


def max_pending() -> int:
    """Return how many unauthenticated connections a server keeps."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_STRANGERS if soft < 0 else max(min(MAX_STRANGERS, soft // _SHARE_OF_DESCRIPTORS), 1)


class RejectionLog:
    """Logs rejected connections: the first at once, the others as a periodic count."""

    def __init__(self) -> None:
        self._count = 0
        self._next_report = 0.0

    def add(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now >= self._next_report:
            self.report()
            _log.warning("closed a connection from %s: %s", where, why)
            self._next_report = now + _REJECTION_LOG_INTERVAL_S
        else:
            self._count += 1

    def report(self) -> None:
        if self._count:
            _log.warning("closed %d further connections that could not authenticate", self._count)
            self._count = 0


class Arrival(NamedTuple):
    """An accepted connection, non-blocking."""

    sock: socket.socket
    host: str  # the remote address, or the process for a local socket
    where: str  # the same in more detail, for messages
    since: float  # by `time.monotonic()`


class EventLoop(Protocol):
    """Methods of an asyncio event loop that an acceptor calls, on the loop's thread."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...

    def remove_reader(self, fd: int) -> Any: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...


class Acceptor:
    """Accepts connections in a server's event loop, and limits the number and lifetime of unauthenticated ones.

    A function passed to `watch` takes each arrival. The server calls `identified` once its connection is authenticated
    and `gone` if it has ended. `turn_away(sock, why)` drops a connection, which counts as gone. `refused(where, why)`
    reports other users' processes at local sockets, which are disconnected at once.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        turn_away: Callable[[socket.socket, str], object],
        refused: Callable[[str, str], None] = lambda where, why: None,
    ) -> None:
        self._loop, self._turn_away, self._refused = loop, turn_away, refused
        self.pending: dict[socket.socket, Arrival] = {}  # unauthenticated connections in order of arrival
        self._listeners: dict[socket.socket, Callable[[Arrival], object]] = {}
        self._has_timer = False
        self._next_log = 0.0

    def watch(self, listener: socket.socket, arrived: Callable[[Arrival], object]) -> None:
        """Accept connections at this listening socket. Call it on the loop's thread, like every method here."""
        listener.setblocking(False)
        self._listeners[listener] = arrived
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def identified(self, sock: socket.socket) -> None:
        """Remove a connection from the pending ones: the server applies its own limits from now on."""
        self.pending.pop(sock, None)

    gone = identified

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            arrived = self._listeners.get(listener)
            if arrived is None:  # closed meanwhile
                return
            try:
                sock, address = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it has left the backlog
                continue
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS and self.pending:
                    self._drop_from_crowd("descriptors have run out")
                    continue
                self._rest(listener, error)
                return
            try:
                self._receive(sock, address, arrived)
            except OSError:  # it is gone already
                sock.close()

    def _receive(self, sock: socket.socket, address: tuple[str, int], arrived: Callable[[Arrival], object]) -> None:
        if len(self.pending) >= max_pending():
            self._drop_from_crowd(f"{max_pending()} connections wait for authentication, the limit")
        if sock.family == socket.AF_UNIX:
            process = sockets.process_at(sock)
            host, where = f"process {process.pid}", str(process)
            if not process.trusted:
                self._refused(where, "it belongs to another user")
                sock.close()
                return
        else:
            host, where = address[0], f"{address[0]}:{address[1]}"
        sock.setblocking(False)
        arrival = Arrival(sock, host, where, time.monotonic())
        arrived(arrival)
        self.pending[sock] = arrival
        self._set_timer()

    def _rest(self, listener: socket.socket, error: OSError) -> None:
        """Retry later instead of spinning; connections wait in the backlog meanwhile."""
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + _LOG_INTERVAL_S
            _log.warning("no connection can be accepted for now (%s): raise `ulimit -n` if it lasts", error.strerror)
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(_REST_S, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _set_timer(self) -> None:
        if self.pending and not self._has_timer:
            self._has_timer = True
            deadline = next(iter(self.pending.values())).since + HANDSHAKE_LIMIT_S
            self._loop.call_later(max(deadline - time.monotonic(), 0.0), self._drop_overdue)

    def _drop_overdue(self) -> None:
        self._has_timer = False
        began = time.monotonic() - HANDSHAKE_LIMIT_S
        for sock in [arrived.sock for arrived in self.pending.values() if arrived.since <= began]:
            self._drop(sock, f"it did not authenticate within {HANDSHAKE_LIMIT_S:g} s")
        self._set_timer()

    def _drop_from_crowd(self, why: str) -> None:
        """Drop the oldest connection from the host with the most strangers."""
        [(host, _)] = Counter(arrived.host for arrived in self.pending.values()).most_common(1)
        self._drop(next(arrived.sock for arrived in self.pending.values() if arrived.host == host), why)

    def _drop(self, sock: socket.socket, why: str) -> None:
        self.pending.pop(sock, None)
        self._turn_away(sock, why)


class TaskServer(Acceptor):
    """A thread with an asyncio event loop: a task handles each connection, which is closed when that ends."""

    def __init__(self, handle: Callable[[socket.socket], Coroutine[Any, Any, None]], *, name: str) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        super().__init__(self.loop, turn_away=lambda sock, _: self.end(sock))
        self.connections: dict[socket.socket, asyncio.Task[None]] = {}
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._handle = handle

    def start(self, listeners: Iterable[socket.socket]) -> None:
        """Handle connections at these listening sockets until the loop is stopped."""
        for listener in listeners:
            self.loop.call_soon(self.watch, listener, self._arrived)
        self.thread.start()

    def call(self, function: Callable[..., object], *args: Any) -> None:
        """Run the function on the thread, soon. Does nothing once that has ended. Thread-safe."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def end(self, sock: socket.socket) -> None:
        """End this connection. Before Python 3.12 `wait_for` may swallow a cancellation, but not an end of file."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self.connections[sock].cancel()

    def _run(self) -> None:
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._shut_down())
            self.loop.close()

    async def _shut_down(self) -> None:
        """Close the listening sockets, and end the connections and every other task of the loop."""
        import asyncio

        self.close()
        for sock in self.connections:
            self.end(sock)
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_END_LIMIT_S)

    def _arrived(self, arrival: Arrival) -> None:
        sock = arrival.sock
        self.connections[sock] = self.loop.create_task(self._handle(sock))
        self.connections[sock].add_done_callback(lambda _: self._ended(sock))

    def _ended(self, sock: socket.socket) -> None:
        del self.connections[sock]
        self.gone(sock)
        sock.close()
