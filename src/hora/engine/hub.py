"""The mesh: how the ranks of one world hear of one another, apart from tensors.

Every rank keeps one authenticated connection to rank 0, the hub: over a local socket inside rank 0's host, over TCP
from other hosts. It carries who leaves and why, who was lost (the connection ended without a goodbye), and, for process
sets that span hosts, announcements. Ranks of one host also fetch shared-memory descriptors from one another here; that
a descriptor arrives is the proof that two ranks share a host. Abstract socket names live in a network namespace and
vanish with their process, so nothing is left in a file system.

One thread per process waits on all sockets; it sleeps unless something happens. The runtime gives it callbacks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from hora.engine.shm.segment import Segment
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net import wire
from hora.net.link import Link

__all__ = ["Mesh", "MeshEvents"]

_MAX_STRANGERS = 128
_TICK_S = 1.0  # how often to look for stalls


class MeshEvents:
    """What the mesh tells the runtime. All are called on the mesh thread and must not block."""

    def __init__(
        self,
        *,
        lost: Callable[[int], None],
        leaving: Callable[[int, str], None],
        fault: Callable[[int, str], None],
        announced: Callable[[int, list[tuple[int, bytes]]], None],
        tick: Callable[[], None],
    ) -> None:
        self.lost = lost
        self.leaving = leaving
        self.fault = fault
        self.announced = announced
        self.tick = tick


class Mesh:
    """This rank's part of the mesh."""

    def __init__(self, rank: int, size: int, events: MeshEvents) -> None:
        self.rank = rank
        self.size = size
        self.name = f"hora-{secrets.token_hex(16)}"
        self.goodbyes: set[int] = set()
        self._events = events
        self._secret = b""
        self._links: dict[int, Link] = {}
        self._strangers: list[Link] = []
        self._segments: dict[str, tuple[int, int]] = {}  # descriptor, readers still to come
        self._waiting_for_segment: list[tuple[str, Link]] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._hopeless = ""
        self._announcements: dict[int, list[tuple[int, bytes]]] = {}  # the hub's, per set, until the next round
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(256)
        self._tcp_listener: socket.socket | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._wake_in, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._run, name="hora-mesh", daemon=True)
        _live.add(self)

    # Setting up, called by the runtime in this order: start, attach, listen_tcp, join_hub.

    def start(self, secret: bytes) -> None:
        """Begin to answer. `secret` is shared by the ranks of this world only."""
        self._secret = secret
        self._thread.start()

    def offer(self, key: str, num_bytes: int, num_readers: int) -> Segment:
        """Make a segment that `num_readers` other ranks of this host will fetch."""
        segment = Segment.create(num_bytes)
        descriptor = segment.take_descriptor()
        with self._changed:
            if num_readers:
                self._segments[key] = (descriptor, num_readers)  # ours until the last reader has it
            else:
                os.close(descriptor)
        self._wake()
        return segment

    def fetch(self, name: str, key: str, *, limit_s: float) -> Segment:
        """Fetch the segment that the rank listening at `name` offers. OSError when it is not on this host."""
        deadline = time.monotonic() + limit_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            link = Link.to(sock, "\0" + name, self._secret, deadline)
            link.send({"want": "segment", "key": key})
            sock.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                _, descriptors, _, _ = socket.recv_fds(sock, 1, 1)
            except TimeoutError:
                raise TimeoutError(f"waited {limit_s:g} s for shared memory {key!r} from a rank of this host") from None
            if not descriptors:
                raise ConnectionError(f"no descriptor came for shared memory {key!r}")
            return Segment.attach(descriptors[0])

    def listen_tcp(self, address: str) -> int:
        """The hub listens at `address` for ranks of other hosts; returns the port."""
        self._tcp_listener = socket.create_server((address, 0), backlog=256)
        self._selector_register(self._tcp_listener, "listener")
        return int(self._tcp_listener.getsockname()[1])

    def join_hub(self, where: str | tuple[str, int], *, limit_s: float) -> None:
        """Connect to rank 0, at a local socket name or at a TCP address."""
        deadline = time.monotonic() + limit_s
        sock = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET, socket.SOCK_STREAM)
        try:
            link = Link.to(sock, "\0" + where if isinstance(where, str) else where, self._secret, deadline)
        except BaseException:
            sock.close()
            raise
        link.rank = 0
        link.send({"want": "mesh", "rank": self.rank})
        self._links[0] = link
        self._selector_register(sock, link)

    def wait_for_all(self, *, limit_s: float) -> None:
        """The hub waits until every rank has connected."""
        with self._changed:
            complete = self._changed.wait_for(lambda: self._hopeless or len(self._links) == self.size - 1, limit_s)
        if self._hopeless:
            raise HorovodInternalError(self._hopeless)
        if not complete:
            missing = sorted(set(range(1, self.size)) - set(self._links))
            raise HorovodInternalError(f"waited {limit_s:g} s for rank(s) {missing} to connect to rank 0")

    def stop_waiting(self, why: str) -> None:
        """Some rank will never connect."""
        with self._changed:
            self._hopeless = why
            self._changed.notify_all()

    # Messages.

    def leave(self, why: str) -> None:
        """Say goodbye: this rank shuts down."""
        self._goodbye(self.rank)
        self._broadcast({"t": "leaving", "rank": self.rank, "why": why})

    def report_fault(self, rank: int, text: str) -> None:
        """Tell every rank that the world is broken, and through whom."""
        self._broadcast({"t": "fault", "rank": rank, "text": text})

    def announce(self, process_set: int, member: int, data: bytes) -> None:
        """Send announcements of a set that spans hosts to every rank, in one order for all."""
        if self.rank == 0:
            self._relay(process_set, member, data)
        else:
            self._links[0].send({"t": "announce", "set": process_set, "member": member}, data)

    def wait_for_goodbyes(self, limit_s: float) -> None:
        """Give the others a moment to finish what was agreed. Returns early when all have said goodbye."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.goodbyes) >= self.size, limit_s)

    def close(self) -> None:
        """Stop the thread and close every socket."""
        _live.discard(self)
        self._stopping = True
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)
        self.abandon()

    def abandon(self) -> None:
        """Close every descriptor, without a word. Used after a fork as well, in the child."""
        for sock in self._sockets():
            sock.close()
        self._selector.close()
        for descriptor, _ in self._segments.values():
            os.close(descriptor)
        self._segments.clear()

    # Inside.

    def _sockets(self) -> Iterable[socket.socket]:
        yield from (self._listener, self._wake_in, self._wake_out)
        if self._tcp_listener is not None:
            yield self._tcp_listener
        yield from (link.sock for link in [*self._links.values(), *self._strangers])
        yield from (link.sock for _, link in self._waiting_for_segment)

    def _selector_register(self, sock: socket.socket, data: Any) -> None:
        self._selector.register(sock, selectors.EVENT_READ, data)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"w")

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:
            if not self._stopping:
                self._events.fault(
                    self.rank, f"the mesh of rank {self.rank} failed: {error!r}; Horovod has been shut down"
                )
                raise

    def _loop(self) -> None:
        tick_at = time.monotonic() + _TICK_S
        while not self._stopping:
            for key, _ in self._selector.select(max(tick_at - time.monotonic(), 0.0)):
                self._on_readable(key.fileobj, key.data)
            self._serve_segments()
            if self._announcements and len(self._links) == self.size - 1:
                # Not before all have connected: a rank that comes last must not miss a round.
                self._send_rounds()
            if time.monotonic() >= tick_at:
                tick_at = time.monotonic() + _TICK_S
                self._events.tick()

    def _on_readable(self, sock: Any, data: Any) -> None:
        if data == "listener":
            self._accept(sock)
        elif data == "wake":
            sock.recv(4096)
        else:
            self._receive(data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._drop(self._strangers[0])
        link = Link.accepted(sock, self._secret)
        self._strangers.append(link)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _receive(self, link: Link) -> None:
        try:
            for header, payload in link.receive():
                self._on_message(link, header, payload)
        except (OSError, EOFError, AuthenticationError):
            self._drop(link)

    def _drop(self, link: Link) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.sock.close()
        if link in self._strangers:
            self._strangers.remove(link)
        if link.rank is None or self._links.get(link.rank) is not link:
            return
        if link.rank not in self.goodbyes:
            self._goodbye(link.rank)
            self._broadcast({"t": "lost", "rank": link.rank})
            self._events.lost(link.rank)

    def _on_message(self, link: Link, header: wire.Header, payload: bytes) -> None:
        if link.rank is None:
            self._strangers.remove(link)
            self._introduce(link, header)
            return
        kind = header.get("t")
        if kind == "announce" and self.rank == 0:
            self._relay(int(header["set"]), int(header["member"]), payload)
            return
        if kind == "round":
            self._events.announced(int(header["set"]), _cut(payload, header["parts"]))
            return
        rank = int(header["rank"])
        if self.rank == 0:
            self._broadcast(header, skip=link.rank)
        if kind == "leaving":
            self._goodbye(rank)
            self._events.leaving(rank, str(header["why"]))
        elif kind == "lost":
            self._goodbye(rank)
            self._events.lost(rank)
        elif kind == "fault":
            self._events.fault(rank, str(header["text"]))

    def _introduce(self, link: Link, header: wire.Header) -> None:
        if header.get("want") == "segment":
            self._waiting_for_segment.append((str(header["key"]), link))
            return
        with self._changed:
            link.rank = int(header["rank"])
            self._links[link.rank] = link
            self._changed.notify_all()

    def _serve_segments(self) -> None:
        waiting, self._waiting_for_segment = self._waiting_for_segment, []
        for key, link in waiting:
            with self._changed:
                found = self._segments.get(key)
                if found is None:
                    self._waiting_for_segment.append((key, link))
                    continue
                descriptor, num_readers = found
                with contextlib.suppress(OSError):
                    socket.send_fds(link.sock, [b"F"], [descriptor])
                if num_readers == 1:
                    del self._segments[key]
                    os.close(descriptor)
                else:
                    self._segments[key] = (descriptor, num_readers - 1)
            self._drop(link)

    def _relay(self, process_set: int, member: int, data: bytes) -> None:
        with self._changed:
            self._announcements.setdefault(process_set, []).append((member, data))
        if threading.current_thread() is not self._thread:
            self._wake()

    def _send_rounds(self) -> None:
        # What came in together goes out as one round, so that it can be fused. Only this thread sends rounds: all
        # members see them in one order.
        with self._changed:
            rounds, self._announcements = self._announcements, {}
        for process_set, parts in rounds.items():
            header = {"t": "round", "set": process_set, "parts": [[member, len(data)] for member, data in parts]}
            self._broadcast(header, b"".join(data for _, data in parts))
            self._events.announced(process_set, parts)

    def _broadcast(self, header: wire.Header, payload: bytes = b"", *, skip: int | None = None) -> None:
        for rank, link in list(self._links.items()):
            if rank != skip:
                link.send(header, payload)

    def _goodbye(self, rank: int) -> None:
        with self._changed:
            self.goodbyes.add(rank)
            self._changed.notify_all()


def _cut(payload: bytes, parts: list[list[int]]) -> list[tuple[int, bytes]]:
    pieces, at = [], 0
    for member, length in parts:
        pieces.append((member, payload[at : at + length]))
        at += length
    return pieces


# A forked child (a DataLoader worker) inherits the sockets: while it keeps them open, the death of its parent would
# not be seen by the peers.
_live: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for mesh in list(_live):
        mesh.abandon()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
