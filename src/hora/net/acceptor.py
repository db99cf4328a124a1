"""The acceptor: the only place that accepts connections, with one set of limits for all servers.

It runs in its server's event loop and survives shortages. Without file descriptors it drops an unauthenticated
connection, or leaves the next ones in the backlog for a moment; any other error of `accept` is logged.
"""

from __future__ import annotations

import errno
import itertools
import logging
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hora.net import sockets

__all__ = ["Acceptor", "Arrival", "EventLoop", "PendingConnections", "RejectionLog"]


MAX_STRANGERS = 128
HANDSHAKE_LIMIT_S = 10.0
_SHARE_OF_DESCRIPTORS = 8  # one server's strangers hold at most this fraction of the process's descriptors
_REJECTION_LOG_INTERVAL_S = 10.0
_ACCEPT_AT_ONCE = 64
_REST_S = 0.2
_LOG_INTERVAL_S = 60.0
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

_log = logging.getLogger("hora.net")

Stranger = TypeVar("Stranger")


class _Arrived(NamedTuple):
    host: str
    since: float


class PendingConnections(Generic[Stranger]):
    """Unauthenticated connections in order of arrival."""

    def __init__(self) -> None:
        self._strangers: dict[Stranger, _Arrived] = {}

    def __iter__(self) -> Iterator[Stranger]:
        return iter(list(self._strangers))

    def __contains__(self, stranger: object) -> bool:
        return stranger in self._strangers

    def __len__(self) -> int:
        return len(self._strangers)

    @property
    def limit(self) -> int:
        """Maximum number of strangers."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return MAX_STRANGERS if soft < 0 else max(min(MAX_STRANGERS, soft // _SHARE_OF_DESCRIPTORS), 1)

    @property
    def full(self) -> bool:
        return len(self._strangers) >= self.limit

    def add(self, stranger: Stranger, host: str) -> None:
        self._strangers[stranger] = _Arrived(host, time.monotonic())

    def discard(self, stranger: Stranger) -> None:
        self._strangers.pop(stranger, None)

    def next_deadline(self) -> float | None:
        """Return the deadline of the oldest stranger."""
        oldest = next(iter(self._strangers.values()), None)
        return None if oldest is None else oldest.since + HANDSHAKE_LIMIT_S

    def overdue(self, now: float) -> list[Stranger]:
        came = self._strangers.items()
        return [one for one, _ in itertools.takewhile(lambda item: item[1].since + HANDSHAKE_LIMIT_S <= now, came)]

    def oldest_of_the_crowd(self) -> Stranger:
        """Return the connection to drop: the oldest from the host with the most strangers."""
        crowds = Counter(arrived.host for arrived in self._strangers.values())
        [(host, _)] = crowds.most_common(1)
        return next(stranger for stranger, arrived in self._strangers.items() if arrived.host == host)


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


class EventLoop(Protocol):
    """Methods of an asyncio event loop that an acceptor calls, on the loop's thread."""

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> Any: ...

    def remove_reader(self, fd: int) -> Any: ...

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Any: ...


class Acceptor(Generic[Stranger]):
    """Accepts connections in a server's event loop, and limits the number and lifetime of unauthenticated ones.

    A function passed to `watch` takes each arrival and returns a stranger, or None if the connection needs no limit.
    The server calls `identified` once a stranger is authenticated and `gone` if its connection has ended.
    `turn_away(stranger, why)` drops a stranger, which counts as gone. `refused(where, why)` reports other users'
    processes at local sockets, which are disconnected at once.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        turn_away: Callable[[Stranger, str], object],
        refused: Callable[[str, str], None] = lambda where, why: None,
    ) -> None:
        self._loop, self._turn_away, self._refused = loop, turn_away, refused
        self.pending: PendingConnections[Stranger] = PendingConnections()
        self._listeners: dict[socket.socket, Callable[[Arrival], Stranger | None]] = {}
        self._has_timer = False
        self._next_log = 0.0

    def watch(self, listener: socket.socket, arrived: Callable[[Arrival], Stranger | None]) -> None:
        """Accept connections at this listening socket. Call it on the loop's thread, like every method here."""
        listener.setblocking(False)
        self._listeners[listener] = arrived
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def close(self) -> None:
        """Close the listening sockets."""
        for listener in self._listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()

    def identified(self, stranger: Stranger) -> None:
        """Remove a stranger from the pending ones: the server applies its own limits from now on."""
        self.pending.discard(stranger)

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
                    self._drop(self.pending.oldest_of_the_crowd(), "descriptors have run out")
                    continue
                self._rest(listener, error)
                return
            try:
                self._receive(sock, address, arrived)
            except OSError:  # it is gone already
                sock.close()

    def _receive(
        self, sock: socket.socket, address: tuple[str, int], arrived: Callable[[Arrival], Stranger | None]
    ) -> None:
        if self.pending.full:
            crowd = f"{self.pending.limit} connections wait for authentication, the limit"
            self._drop(self.pending.oldest_of_the_crowd(), crowd)
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
        stranger = arrived(Arrival(sock, host, where))
        if stranger is not None:
            self.pending.add(stranger, host)
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
        deadline = self.pending.next_deadline()
        if deadline is not None and not self._has_timer:
            self._has_timer = True
            self._loop.call_later(max(deadline - time.monotonic(), 0.0), self._drop_overdue)

    def _drop_overdue(self) -> None:
        self._has_timer = False
        for stranger in self.pending.overdue(time.monotonic()):
            self._drop(stranger, f"it did not authenticate within {HANDSHAKE_LIMIT_S:g} s")
        self._set_timer()

    def _drop(self, stranger: Stranger, why: str) -> None:
        self.pending.discard(stranger)
        self._turn_away(stranger, why)
