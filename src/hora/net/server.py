"""The listener: one thread that accepts connections, lets in whoever proves to hold the secret, and moves
messages.

Strangers cost next to nothing: they get a few dozen bytes of memory, a deadline, a place in a waiting room
of limited size (the oldest is shown out when it is full) and one rate-limited log line. What messages mean
is the handler's business (`rendezvous`); everything the handler does happens in the listener's thread.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Protocol

from hora.errors import AuthenticationError
from hora.net.wire import MAX_FRAME_BYTES, Header, Opener, Sealer, ServerHandshake, tune

__all__ = ["Handler", "Listener", "Peer", "Timer"]

MAX_STRANGERS = 128
HANDSHAKE_LIMIT_S = 10.0
_FLUSH_LIMIT_S = 2.0
_LOG_INTERVAL_S = 10.0

_log = logging.getLogger("hora.launch")


class Handler(Protocol):
    """What a listener's owner implements. Called in the listener's thread only."""

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        """An authenticated peer sent a message. ValueError, KeyError or TypeError: the peer is shown out."""

    def closed(self, peer: Peer) -> None:
        """An authenticated peer's connection has ended, for whatever reason."""


class Peer:
    """One connection: a stranger until `opener` exists. `name` and `worker` belong to the handler."""

    def __init__(
        self, listener: Listener, sock: socket.socket, address: tuple[str, int], handshake: ServerHandshake
    ) -> None:
        self.sock, self.handshake = sock, handshake
        self.host, self.where = address[0], f"{address[0]}:{address[1]}"
        self.since = time.monotonic()
        self.name = self.where
        self.worker = -1
        self.opener: Opener | None = None
        self.sealer: Sealer | None = None
        self.open = True
        self.drained = True
        self._listener = listener
        self._outbox: deque[tuple[Header, bytes]] = deque()
        self._frames: Iterator[bytes] = iter(())
        self._unsent = memoryview(b"")

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Queue a message; it leaves as fast as the peer reads. Dropped if the peer is gone."""
        if self.open:
            self._outbox.append((header, payload))
            self._listener._flush(self)

    def push(self) -> bool:
        """Send what the socket takes now; False when something is left."""
        self.drained = False
        while True:
            if not self._unsent:
                frame = self._next_frame()
                if frame is None:
                    self.drained = True
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


class Timer:
    """A call planned for later, until it is cancelled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None

    def run(self) -> None:
        if self.function is not None:
            self.function()


class Listener:
    """Listens on one address, on a port of the system's choice, until closed."""

    def __init__(self, bind_address: str, *, secret: bytes, job: str, handler: Handler) -> None:
        self._secret, self._job, self._handler = secret, job, handler
        family = socket.AF_INET6 if ":" in bind_address else socket.AF_INET
        self._server = socket.create_server((bind_address, 0), family=family, backlog=1024)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._strangers: dict[Peer, None] = {}  # in order of arrival
        self._peers: dict[Peer, None] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_timers_kept = 64
        self._ids = itertools.count()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._stopping = False
        self._turned_away = _TurnedAway()
        self._thread = threading.Thread(target=self._run, name="hora-rendezvous", daemon=True)
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wake)

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run the function in the listener's thread, soon. From any thread."""
        self._calls.append(function)
        try:
            self._wake_out.send(b"!")
        except (
            BlockingIOError,
            OSError,
        ):  # full: a wake-up is pending anyway; closed: nobody is left to wake
            return

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        """Run the function at this `time.monotonic()`. In the listener's thread only."""
        timer = Timer(function)
        heapq.heappush(self._timers, (deadline, next(self._ids), timer))
        if len(self._timers) > 2 * self._num_timers_kept:
            # Most time limits are cancelled long before they pass: do not let them pile up.
            self._timers = [entry for entry in self._timers if entry[2].function is not None]
            heapq.heapify(self._timers)
            self._num_timers_kept = max(len(self._timers), 64)
        return timer

    @property
    def peers(self) -> list[Peer]:
        return list(self._peers)

    def close(self) -> None:
        """Send what is queued (for two seconds at most), then close every connection and end the thread."""
        if not self._stopping:
            self.call(self._stop)
            self._thread.join(timeout=_FLUSH_LIMIT_S + 5.0)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(self._wait_s())
            limit = time.monotonic() + _FLUSH_LIMIT_S
            while time.monotonic() < limit and not all(peer.drained for peer in self._peers):
                self._turn(0.05)
        finally:
            self._turned_away.report()
            for peer in [*self._peers, *self._strangers]:
                peer.open = False
                peer.sock.close()
            for closing in (self._server, self._wake_in, self._wake_out, self._selector):
                closing.close()

    def _wait_s(self) -> float | None:
        if self._calls:
            return 0.0
        deadlines = [timer[0] for timer in self._timers[:1]]
        deadlines += [peer.since + HANDSHAKE_LIMIT_S for peer in itertools.islice(self._strangers, 1)]
        return max(min(deadlines) - time.monotonic(), 0.0) if deadlines else None

    def _turn(self, wait_s: float | None) -> None:
        for key, events in self._selector.select(wait_s):
            if isinstance(key.data, Peer):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and key.data.open:
                    self._read(key.data)
            else:
                key.data()
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].run()
        for peer in list(itertools.takewhile(lambda p: p.since + HANDSHAKE_LIMIT_S <= now, self._strangers)):
            self._turn_away(peer, f"it did not identify itself within {HANDSHAKE_LIMIT_S:g} s")

    def _drain_wake(self) -> None:
        self._wake_in.recv(4096)

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, where = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._turn_away(self._oldest_of_the_crowd(), "descriptors have run out")
                    continue
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._rest()
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._turn_away(self._oldest_of_the_crowd(), f"{MAX_STRANGERS} wait to identify themselves, the limit")
            sock.setblocking(False)
            tune(sock)
            peer = Peer(self, sock, where[:2], ServerHandshake(self._secret, self._job))
            self._strangers[peer] = None
            self._selector.register(sock, selectors.EVENT_READ, peer)

    def _oldest_of_the_crowd(self) -> Peer:
        """Whom to show out: the oldest stranger of the host that sent most, so that a crowd harms itself."""
        crowds = Counter(peer.host for peer in self._strangers)
        [(host, _)] = crowds.most_common(1)
        return next(peer for peer in self._strangers if peer.host == host)

    def _rest(self) -> None:
        # No descriptor is free and no stranger holds one: look again later, do not spin on the backlog.
        self._selector.unregister(self._server)
        self.call_at(time.monotonic() + 0.2, self._listen_again)

    def _listen_again(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(peer.handshake.wanted_bytes if peer.opener is None else MAX_FRAME_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if not data and peer.opener is None:
                self._turn_away(peer, "it hung up without identifying itself")
            elif not data:
                self._drop(peer)
            elif peer.opener is None:
                self._greet(peer, data)
            else:
                for header, payload in peer.opener.feed(data):
                    self._handler.message(peer, header, payload)
                    if not peer.open:
                        return
        except (AuthenticationError, ValueError, KeyError, TypeError) as error:
            self._turn_away(peer, str(error) if isinstance(error, AuthenticationError) else repr(error))
        except OSError:
            self._drop(peer)

    def _greet(self, peer: Peer, data: bytes) -> None:
        answer = peer.handshake.feed(data)
        if answer and peer.sock.send(answer) != len(answer):
            self._drop(peer)
        elif peer.handshake.done:
            keys = peer.handshake.keys
            assert keys is not None
            peer.opener, peer.sealer = Opener(keys.to_server), Sealer(keys.to_client)
            del self._strangers[peer]
            self._peers[peer] = None

    def _flush(self, peer: Peer) -> None:
        try:
            events = selectors.EVENT_READ if peer.push() else selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError:
            self.call(
                lambda: self._drop(peer)
            )  # later: the handler, which sends, is not told in the middle of its work
            return
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _turn_away(self, peer: Peer, why: str) -> None:
        self._turned_away.add(peer.where, why)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if not peer.open:
            return
        peer.open = False
        self._selector.unregister(peer.sock)
        peer.sock.close()
        if peer in self._strangers:
            del self._strangers[peer]
        elif peer in self._peers:
            del self._peers[peer]
            self._handler.closed(peer)


class _TurnedAway:
    """Logs refused connections: the first at once, the others as a number now and then."""

    def __init__(self) -> None:
        self._count = 0
        self._next_report = 0.0

    def add(self, where: str, why: str) -> None:
        now = time.monotonic()
        if now >= self._next_report:
            self.report()
            _log.warning("closed a connection from %s: %s", where, why)
            self._next_report = now + _LOG_INTERVAL_S
        else:
            self._count += 1

    def report(self) -> None:
        if self._count:
            _log.warning("closed %d further connections that could not identify themselves", self._count)
            self._count = 0
