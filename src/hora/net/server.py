"""The server: one thread that accepts connections, lets in those that prove to hold the secret, and moves messages.

The only place in the house that accepts connections: the launcher's rendezvous, the driver of Spark tasks, the hub of
the ranks and the gateway of a session of workers are handlers of it, so one set of limits holds for all of them
(`strangers`). What messages mean is the handler's business; everything the handler does happens in the server's thread.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from hora.errors import AuthenticationError
from hora.net import sockets, strangers
from hora.net.connection import Connection
from hora.net.peer import Peer
from hora.net.sockets import Where
from hora.net.wire import MAX_PAYLOAD_BYTES, REFUSAL, Credentials, CredentialsOf, Header, ServerHandshake

__all__ = ["Handler", "Peer", "Server", "Timer"]

_FLUSH_LIMIT_S = 2.0
_ACCEPT_AT_ONCE = 64
_REST_S = 0.2
_LONGEST_WAIT_S = 3600.0  # the selector takes no more than 24 days, and a user's limit may be longer
_MALFORMED = (
    ValueError,
    KeyError,
    TypeError,
    ArithmeticError,
    RecursionError,
    struct.error,
)  # what comes of a message that makes no sense
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
_OUT_OF_MEMORY = (errno.ENOBUFS, errno.ENOMEM)
_RECEIVE_BYTES = 256 * 1024
_LAST_READS = 64  # of a peer that no longer listens


class Handler(Protocol):
    """Interface that a server's owner implements. Called in the server's thread only."""

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        """An authenticated peer sent a message. One of `_MALFORMED` is raised: the peer is shown out."""

    def closed(self, peer: Peer) -> None:
        """An authenticated peer's connection has ended, for whatever reason."""


class Timer:
    """A call planned for later, until it is cancelled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None

    def run(self) -> None:
        if self.function is not None:
            self.function()


class Server:
    """Serves the addresses given to `listen` in a thread (`name`); `failed` gets an error of ours that ended it."""

    def __init__(
        self,
        handler: Handler,
        *,
        name: str,
        silence_limit_s: int = 30,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._handler, self._failed = handler, failed
        self._silence_limit_s, self._max_payload_bytes = silence_limit_s, max_payload_bytes
        self._credentials: Credentials | CredentialsOf | None = None
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._strangers = strangers.WaitingRoom()
        self._turned_away = strangers.TurnedAway()
        self._peers: dict[Peer, None] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_timers_kept = 64
        self._ids = itertools.count()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, lambda: self._wake_in.recv(4096))
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        sockets.abandon_in_children(self)

    def listen(self, where: Where) -> int:
        """Accept connections at this address, too, from `start` on; return its port (0: a local socket)."""
        listener = sockets.listen(where)
        listener.setblocking(False)
        self._listeners.append(listener)
        self.call(lambda: self._watch(listener))
        return 0 if isinstance(where, str) else int(listener.getsockname()[1])

    def start(self, credentials: Credentials | CredentialsOf) -> None:
        """Begin to answer clients with the same credentials; a function returns the credentials of each speaker."""
        self._credentials = credentials
        self._thread.start()

    def peer_at(self, connection: Connection) -> Peer:
        """The other end of a connection that this process has opened, as a peer: to `serve` once it has its number."""
        connection.sock.setblocking(False)
        peer = self._peer(connection.sock, host="", where="the process that was called")
        peer.opener, peer.sealer = connection.opener, connection.sealer
        return peer

    def serve(self, peer: Peer) -> None:
        """Treat this peer as if it had come to us. From any thread."""
        self.call(lambda: self._admit(peer))

    def release(self, peer: Peer) -> socket.socket:
        """Let go of an authenticated peer whose connection has another owner now, in the server's thread."""
        self._selector.unregister(peer.sock)
        del self._peers[peer]
        peer.open = False
        peer.sock.setblocking(True)
        return peer.sock

    def call(self, function: Callable[[], None]) -> None:
        """Run the function in the server's thread, soon. From any thread."""
        self._calls.append(function)
        if threading.current_thread() is self._thread:  # which runs calls before it waits again
            return
        try:
            self._wake_out.send(b"!")
        except OSError:  # full: a wake-up is pending anyway; closed: no thread is left to wake
            return

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        """Run the function at this `time.monotonic()`. In the server's thread only."""
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
        """The authenticated ones."""
        return list(self._peers)

    def close(self) -> None:
        """Send what is queued (for two seconds at most), then close every connection and end the thread."""
        if self._thread.is_alive():
            self.call(self._stop)
            if threading.current_thread() is not self._thread and not any(peer.interrupted for peer in self.peers):
                self._thread.join(timeout=_FLUSH_LIMIT_S + 5.0)
        elif not self._stopping:
            self._close_sockets()

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn(self._wait_s())
            limit = time.monotonic() + _FLUSH_LIMIT_S
            while time.monotonic() < limit and not all(peer.drained for peer in self._peers):
                self._turn(0.05)
        except Exception as error:
            if self._failed is not None and not self._stopping:
                self._failed(error)
            raise
        finally:
            self._turned_away.report()
            for peer in (*self._peers, *self._strangers):
                peer.close_socket()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._stopping = True
        sockets.forget(self)
        for sock in (*self._listeners, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def abandon(self) -> None:
        """In a forked child, which has no thread of this server and must not keep its connections open."""
        for peer in (*self._peers, *self._strangers):
            peer.open = False
            peer.sock.close()
        self._close_sockets()

    # ---- in the server's thread ---------------------------------------------------------------------------

    def _wait_s(self) -> float | None:
        if self._calls:
            return 0.0
        deadline = self._strangers.next_deadline()
        if self._timers and (deadline is None or self._timers[0][0] < deadline):
            deadline = self._timers[0][0]
        return None if deadline is None else min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT_S)

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
        for peer in self._strangers.overdue(now):
            self._turn_away(peer, f"it did not identify itself within {strangers.HANDSHAKE_LIMIT_S:g} s")

    def _watch(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS and len(self._strangers):
                    self._turn_away(self._strangers.oldest_of_the_crowd(), "descriptors have run out")
                    continue
                if error.errno in (*_OUT_OF_DESCRIPTORS, *_OUT_OF_MEMORY):
                    self._rest(listener)
                return
            self._receive_stranger(sock, address)

    def _receive_stranger(self, sock: socket.socket, address: tuple[str, int]) -> None:
        if self._strangers.full:
            crowd = f"{strangers.MAX_STRANGERS} wait to identify themselves, the limit"
            self._turn_away(self._strangers.oldest_of_the_crowd(), crowd)
        if sock.family == socket.AF_UNIX:
            process = sockets.process_at(sock)
            host, where = f"process {process.pid}", f"process {process.pid} of user {process.uid}"
            if not process.trusted:
                self._turned_away.add(where, "it belongs to another user")
                sock.close()
                return
        else:
            host, where = address[0], f"{address[0]}:{address[1]}"
        sock.setblocking(False)
        sockets.tune(sock, silence_limit_s=self._silence_limit_s)
        assert self._credentials is not None
        peer = self._peer(sock, host=host, where=where)
        peer.handshake = ServerHandshake(self._credentials, max_payload_bytes=self._max_payload_bytes)
        self._strangers.add(peer)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _peer(self, sock: socket.socket, *, host: str, where: str) -> Peer:
        return Peer(
            sock,
            host=host,
            where=where,
            flush=lambda peer: self.call(lambda: self._flush(peer)),
            drop=lambda peer: self.call(lambda: self._drop(peer)),
        )

    def _rest(self, listener: socket.socket) -> None:
        # No descriptor is free and no stranger holds one: look again later, do not spin on the backlog.
        self._selector.unregister(listener)
        self.call_at(time.monotonic() + _REST_S, lambda: self._watch(listener))

    def _read(self, peer: Peer) -> bool:
        """Take what has come from the peer, or its end; False: nothing has."""
        handshake = peer.handshake
        try:
            data = peer.sock.recv(_RECEIVE_BYTES if handshake is None else handshake.wanted_bytes)
        except BlockingIOError:
            return False
        except OSError as error:
            data, peer.reset = b"", isinstance(error, ConnectionError)
            peer.broken = not peer.reset
        try:
            if not data and handshake is not None and peer.sock.family != socket.AF_UNIX:
                self._turn_away(peer, "it hung up without identifying itself")
            elif not data:  # from a local socket: the same user's process, which wanted to know whether anybody is here
                self._drop(peer)
            elif handshake is not None:
                self._greet(peer, handshake, data)
            else:
                self._take(peer, data)
        except (AuthenticationError, *_MALFORMED) as error:
            self._turn_away(peer, str(error) if isinstance(error, AuthenticationError) else repr(error))
        except OSError:
            self._drop(peer)
        return True

    def _greet(self, peer: Peer, handshake: ServerHandshake, data: bytes) -> None:
        try:
            answer = handshake.feed(data)
        except AuthenticationError:
            if handshake.refuses:
                peer.sock.send(REFUSAL)
            raise
        if answer and peer.sock.send(answer) != len(answer):
            self._drop(peer)
        elif handshake.session is not None:
            peer.sealer, peer.opener = handshake.session
            peer.handshake, peer.speaker = None, handshake.speaker
            self._strangers.remove(peer)
            self._peers[peer] = None

    def _admit(self, peer: Peer) -> None:
        self._peers[peer] = None
        self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def _take(self, peer: Peer, data: bytes) -> None:
        assert peer.opener is not None
        for header, payload in peer.opener.feed(data):
            self._handler.message(peer, header, payload)
            if not peer.open:
                return

    def _flush(self, peer: Peer) -> None:
        if not peer.open:
            return
        try:
            events = selectors.EVENT_READ if peer.push() else selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError as error:
            peer.reset = isinstance(error, ConnectionError)
            peer.broken = not peer.reset
            for _ in range(_LAST_READS):  # its last words, perhaps a goodbye
                if not peer.open or not self._read(peer):
                    break
            self._drop(peer)
            return
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _turn_away(self, peer: Peer, why: str) -> None:
        self._turned_away.add(peer.where, why)
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if not peer.open:
            return
        self._selector.unregister(peer.sock)
        peer.close_socket()
        if peer in self._strangers:
            self._strangers.remove(peer)
        elif peer in self._peers:
            del self._peers[peer]
            self._handler.closed(peer)
