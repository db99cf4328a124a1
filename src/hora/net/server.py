"""The server: one thread that authenticates the connections of its `acceptor` and moves messages.

The launcher's rendezvous, the driver of Spark tasks, the tree of ranks and the gateway of a session of workers are its
handlers. A handler interprets the messages, always on the server's thread.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from hora.errors import AuthenticationError
from hora.net import acceptor, sockets
from hora.net.acceptor import Acceptor, Arrival
from hora.net.sockets import Where
from hora.net.wire import (
    ANYBODY,
    MAX_PAYLOAD_BYTES,
    RECEIVE_BYTES,
    REFUSAL,
    Connection,
    Credentials,
    CredentialsOf,
    Header,
    Opener,
    Sealer,
    ServerHandshake,
)

_FLUSH_LIMIT_S = 2.0
_LONGEST_WAIT_S = 3600.0  # the selector accepts at most 24 days, and a user's limit may be longer
# Raised by an invalid message.
_MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
_NO_THREAD = "can't start new thread"
_LAST_READS = 64  # of a peer that no longer reads


class Peer:
    """States: unknown (until `handshake` is done) -> authenticated (`opener`, `sealer` exist) -> closed (not `open`).

    `speaker`: the number of the worker or rank whose key it holds (-1: a shared key). `name` and `number` (of the
    worker, task or rank) belong to the server's handler. `host`: the remote address, or the process for a local socket;
    `where`: the same in more detail, for messages. `error`: of the connection, when it has ended.
    """

    def __init__(self, server: Server, sock: socket.socket, *, host: str, where: str) -> None:
        self.sock, self.host, self.where = sock, host, where
        self.speaker = ANYBODY
        self.name, self.number = where, -1
        self.handshake: ServerHandshake | None = None
        self.opener: Opener | None = None
        self.sealer: Sealer | None = None
        self.open = True
        self.error: OSError | None = None
        self.drained = True  # nothing is queued
        self._server = server
        self._lock = threading.Lock()
        self._sender = 0  # the thread that is in `send`
        self._outbox: deque[tuple[Header, bytes]] = deque()
        self._frames: Iterator[bytes] = iter(())
        self._unsent = memoryview(b"")

    def send(self, header: Header, payload: bytes = b"") -> None:
        """Send a message as fast as the peer reads, without waiting. Dropped if the peer is gone."""
        self._outbox.append((header, payload))
        # The thread that holds the lock checks the outbox again afterwards. It may be this very thread: a signal
        # handler that sends a goodbye must not wait for the code that it has interrupted.
        while self._outbox and self._lock.acquire(blocking=False):
            try:
                self._sender = threading.get_ident()
                if not self.open or not self.drained:  # otherwise the server's thread sends
                    return
                self.drained = False
                with contextlib.suppress(OSError):  # broken: the server's thread will notice
                    self.drained = self._push()
                left = not self.drained
            finally:
                self._sender = 0
                self._lock.release()
            if left:
                self._server.call(lambda: self._server.flush(self))

    @property
    def interrupted(self) -> bool:
        """Return whether the calling thread is inside `send`, that is, a signal handler has interrupted it.

        Anything it waits for here happens only after it returns.
        """
        return self._sender == threading.get_ident()

    def send_descriptor(self, descriptor: int) -> None:
        """Pass a file descriptor to the process at the other end of a local socket. Raises OSError if it is gone."""
        with self._lock:
            socket.send_fds(self.sock, [b"F"], [descriptor])

    def push(self) -> bool:
        """Send what the socket accepts now, on the server's thread; returns False if data is left."""
        while True:
            with self._lock:
                done = self.drained = self._push()
            if not done or not self._outbox:
                return done

    def close(self) -> None:
        """End the connection, soon."""
        self._server.call(lambda: self._server.drop(self))

    def close_socket(self) -> None:
        """Close the socket, called by the server: no other thread sends any more."""
        with self._lock:
            self.open = False
            self.sock.close()

    def _push(self) -> bool:
        while True:
            if not self._unsent:
                self._unsent = memoryview(next(self._frames, b""))
            if self._unsent:
                try:
                    self._unsent = self._unsent[self.sock.send(self._unsent) :]
                except BlockingIOError:
                    return False
            elif self._outbox:
                assert self.sealer is not None
                self._frames = self.sealer.frames(*self._outbox.popleft())
            else:
                return True


AnyPeer = TypeVar("AnyPeer", contravariant=True)


class Handler(Protocol[AnyPeer]):
    """Interface that a server's owner implements, or that of sessions. Called on the server's thread only."""

    def message(self, peer: AnyPeer, header: Header, payload: bytes) -> None:
        """Handle a message of an authenticated peer. If it raises one of `_MALFORMED`, the peer is disconnected."""

    def closed(self, peer: AnyPeer) -> None:
        """Handle the end of an authenticated peer's connection."""


class Timer:
    """A scheduled call that can be cancelled."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function: Callable[[], None] | None = function

    def cancel(self) -> None:
        self.function = None

    def run(self) -> None:
        if self.function is not None:
            self.function()


class Server:
    """Serves the addresses passed to `listen` on a thread (`name`); `failed` gets an internal error that ended it."""

    def __init__(
        self,
        handler: Handler[Peer],
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
        self._rejections = acceptor.RejectionLog()
        self._acceptor = Acceptor(
            self,
            turn_away=lambda sock, why: self._turn_away(self._selector.get_key(sock).data, why),
            refused=self._rejections.add,
        )
        self._peers: dict[Peer, None] = {}
        self._calls: deque[Callable[[], object]] = deque()
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
        """Also accept connections at this address, from `start` on; returns its port (0: a local socket)."""
        try:
            listener = sockets.listen(where)
        except OSError:
            if self._credentials is None:  # it does not start
                self.close()
            raise
        self._listeners.append(listener)
        self.call(lambda: self._acceptor.watch(listener, self._receive_stranger))
        return 0 if isinstance(where, str) else int(listener.getsockname()[1])

    def start(self, credentials: Credentials | CredentialsOf) -> None:
        """Start serving clients with these credentials; a function returns the credentials of each speaker."""
        self._credentials = credentials
        self._thread.start()

    def peer_at(self, connection: Connection) -> Peer:
        """Return the other end of a connection that this process has opened as a peer: pass it to `serve`."""
        connection.sock.setblocking(False)
        peer = Peer(self, connection.sock, host="", where="the process that was called")
        peer.opener, peer.sealer = connection.opener, connection.sealer
        return peer

    def serve(self, peer: Peer) -> None:
        """Serve this peer like one that has connected here. Thread-safe."""
        self.call(lambda: self._admit(peer))

    def release(self, peer: Peer) -> socket.socket:
        """Release an authenticated peer's connection to another owner, on the server's thread."""
        self._selector.unregister(peer.sock)
        del self._peers[peer]
        peer.open = False
        peer.sock.setblocking(True)
        return peer.sock

    def call(self, function: Callable[[], object]) -> None:
        """Run the function on the server's thread, soon. Thread-safe."""
        self._calls.append(function)
        if threading.current_thread() is self._thread:  # it runs calls before it waits again
            return
        try:
            self._wake_out.send(b"!")
        except OSError:  # full: a wake-up is pending already; closed: no thread is left to wake
            return

    def call_at(self, deadline: float, function: Callable[[], None]) -> Timer:
        """Run the function at this `time.monotonic()`. On the server's thread only."""
        timer = Timer(function)
        heapq.heappush(self._timers, (deadline, next(self._ids), timer))
        if len(self._timers) > 2 * self._num_timers_kept:
            # Most time limits are cancelled long before they pass: do not let them accumulate.
            self._timers = [entry for entry in self._timers if entry[2].function is not None]
            heapq.heapify(self._timers)
            self._num_timers_kept = max(len(self._timers), 64)
        return timer

    @property
    def peers(self) -> list[Peer]:
        """The authenticated peers."""
        return list(self._peers)

    def close(self) -> None:
        """Send queued messages (for at most two seconds), then close every connection and end the thread."""
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
            self._rejections.report()
            for peer in self._peers:
                peer.close_socket()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._stopping = True
        sockets.forget(self)
        for sock in (*self._acceptor.pending, *self._listeners, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()

    def abandon(self) -> None:
        """Close everything in a forked child, which has no thread of this server and must not keep connections open."""
        for peer in self._peers:
            peer.open = False
            peer.sock.close()
        self._close_sockets()

    # ---- in the server's thread ---------------------------------------------------------------------------

    def add_reader(self, fd: int, callback: Callable[..., Any], *args: Any) -> None:
        """Call this when there is data to read. With the next two methods, this is the acceptor's event loop."""
        self._selector.register(fd, selectors.EVENT_READ, lambda: callback(*args))

    def remove_reader(self, fd: int) -> None:
        self._selector.unregister(fd)

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer:
        return self.call_at(time.monotonic() + delay, lambda: callback(*args))

    def _wait_s(self) -> float | None:
        if self._calls:
            return 0.0
        if not self._timers:
            return None
        return min(max(self._timers[0][0] - time.monotonic(), 0.0), _LONGEST_WAIT_S)

    def _turn(self, wait_s: float | None) -> None:
        for key, events in self._selector.select(wait_s):
            if isinstance(key.data, Peer):
                if events & selectors.EVENT_WRITE:
                    self.flush(key.data)
                if events & selectors.EVENT_READ and key.data.open:
                    self._read(key.data)
            else:
                key.data()
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2].run()

    def _receive_stranger(self, arrival: Arrival) -> None:
        sock = arrival.sock
        sockets.tune(sock, silence_limit_s=self._silence_limit_s)
        assert self._credentials is not None
        peer = Peer(self, sock, host=arrival.host, where=arrival.where)
        peer.handshake = ServerHandshake(self._credentials, max_payload_bytes=self._max_payload_bytes)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> bool:
        """Read from the peer, including its end; returns False if there was nothing."""
        handshake = peer.handshake
        try:
            data = peer.sock.recv(RECEIVE_BYTES if handshake is None else handshake.wanted_bytes)
        except BlockingIOError:
            return False
        except OSError as error:
            data, peer.error = b"", error.with_traceback(None)
        try:
            if not data and handshake is not None and peer.sock.family != socket.AF_UNIX:
                self._turn_away(peer, "it disconnected without authenticating")
            elif not data:  # a local socket: a process of the same user that checked whether the server runs
                self.drop(peer)
            elif handshake is not None:
                self._greet(peer, handshake, data)
            else:
                self._deliver(peer, data)
        except (AuthenticationError, *_MALFORMED) as error:
            self._turn_away(peer, str(error) if isinstance(error, AuthenticationError) else repr(error))
        except OSError:
            self.drop(peer)
        except RuntimeError as error:
            if _NO_THREAD not in str(error):
                raise
            self._turn_away(peer, "this process cannot start another thread for it: raise `ulimit -u`")
        return True

    def _greet(self, peer: Peer, handshake: ServerHandshake, data: bytes) -> None:
        try:
            answer = handshake.feed(data)
        except AuthenticationError:
            if handshake.refuses:
                peer.sock.send(REFUSAL)
            raise
        if answer and peer.sock.send(answer) != len(answer):
            self.drop(peer)
        elif handshake.session is not None:
            peer.sealer, peer.opener = handshake.session
            peer.handshake, peer.speaker = None, handshake.speaker
            self._acceptor.identified(peer.sock)
            self._peers[peer] = None

    def _admit(self, peer: Peer) -> None:
        self._peers[peer] = None
        self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def _deliver(self, peer: Peer, data: bytes) -> None:
        assert peer.opener is not None
        for header, payload in peer.opener.feed(data):
            self._handler.message(peer, header, payload)
            if not peer.open:
                return

    def flush(self, peer: Peer) -> None:
        """Send what the peer's socket accepts now, and watch for room if data is left."""
        if not peer.open:
            return
        try:
            events = selectors.EVENT_READ if peer.push() else selectors.EVENT_READ | selectors.EVENT_WRITE
        except OSError as error:
            peer.error = error.with_traceback(None)
            for _ in range(_LAST_READS):  # its last messages, perhaps a goodbye
                if not peer.open or not self._read(peer):
                    break
            self.drop(peer)
            return
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _turn_away(self, peer: Peer, why: str) -> None:
        self._rejections.add(peer.where, why)
        self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """End the peer's connection now."""
        if not peer.open:
            return
        self._selector.unregister(peer.sock)
        peer.close_socket()
        self._acceptor.gone(peer.sock)
        if peer in self._peers:
            del self._peers[peer]
            self._handler.closed(peer)
