"""The group between hosts: CPU tensors over TCP connections of our own, which only ranks of this world can open.

Every member has two connections with every other one, one for each direction, made by the hub: whoever is at the other end
has proven to hold the world's secret, and between hosts what passes is encrypted (`net.tls`) unless the user does not want
it. A connection carries the tensors' bytes and nothing else. Members start the same exchanges in the same order, so both
ends know what comes next and how long it is.

There is no thread that receives: the one that waits for an exchange reads its bytes straight into their tensors, and until
then the kernel keeps what has come. What does not leave at once is sent by a thread of its own, one per direction, which
exists from the first large message on. The engine's factory makes groups of this kind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hora.engine.transport.base import Guard
from hora.engine.transport.group import SLICE, Group, Pending
from hora.engine.transport.packing import copy, spread
from hora.errors import HorovodInternalError
from hora.net import sockets

__all__ = ["StreamGroup", "Streams"]

# A TLS record: up to here a message is encrypted and sent by the caller.
_SHORT_BYTES = 16 * 2**10
# What is smaller goes from the root to all members directly; larger ones share the way.
_DIRECT_BYTES = 64 * 2**10
_TIME = struct.Struct("ll")


@dataclass(frozen=True)
class Streams:
    """Connections to and from the other members, by member. Sockets block; those of hosts apart may be encrypted."""

    outgoing: Mapping[int, socket.socket]
    incoming: Mapping[int, socket.socket]


@dataclass
class _Exchange:
    """What is still to be received, and how far each sender must have come until it is over."""

    receives: list[tuple[_Incoming, memoryview]] = field(default_factory=list)
    sends: list[tuple[_Outgoing, int]] = field(default_factory=list)
    received: bool = False


class StreamGroup(Group):
    """See `Group`."""

    backend = "tcp"

    def __init__(self, streams: Streams, member: int, num_members: int, *, guard: Guard, limit_s: float) -> None:
        super().__init__(guard=guard, limit_s=limit_s)
        self._member, self._num_members = member, num_members
        # Each one begins with the member after itself, so that not all of them send to the same one first.
        after = [(member + distance) % num_members for distance in range(1, num_members)]
        self._outgoing = {peer: _Outgoing(streams.outgoing[peer]) for peer in after}
        self._incoming = {peer: _Incoming(streams.incoming[peer]) for peer in reversed(after)}
        self._to_receive: deque[_Exchange] = deque()
        self._open = True
        sockets.abandon_in_children(self)

    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Pending:
        size = input.element_size()
        sources = _views(input, [count * size for count in send_counts])
        targets = _views(output, [count * size for count in receive_counts])
        if send_counts[self._member]:
            own_input, own_output = (
                tensor.split(list(counts))[self._member]
                for tensor, counts in ((input[: sum(send_counts)], send_counts), (output, receive_counts))
            )
            copy(own_input, own_output)
        return self._start("alltoall", sources, targets)

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor) -> Pending:
        parts = output.split(input.numel())
        if parts[self._member].data_ptr() != input.data_ptr():
            copy(input, parts[self._member])
        sources = [_view(input)] * self._num_members
        return self._start("allgather", sources, [_view(part) for part in parts])

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Pending:
        nothing: list[memoryview] = [memoryview(b"")] * self._num_members
        if self._num_members == 2 or tensor.nbytes <= _DIRECT_BYTES:
            if self._member == root:
                return self._start("broadcast", [_view(tensor)] * self._num_members, nothing)
            return self._start("broadcast", nothing, _only(root, _view(tensor), nothing))
        # The root gives every member its part, and all give theirs to all: no member sends the whole to each of the others.
        parts = [_view(part) for part in tensor.split(spread(tensor.numel(), self._num_members))]
        mine = parts[self._member]
        if self._member == root:
            self.finish(self._start("broadcast", parts, nothing))
        else:
            self.finish(self._start("broadcast", nothing, _only(root, mine, nothing)))
        to_all = [mine] * self._num_members
        if self._member == root:
            return self._start("broadcast", to_all, nothing)
        return self._start("broadcast", _only(root, memoryview(b""), to_all), parts)

    def close(self) -> None:
        self._open = False
        sockets.forget(self)
        for outgoing in self._outgoing.values():
            outgoing.close()
        for incoming in self._incoming.values():
            incoming.close()

    def discard(self) -> None:
        self.close()  # the same: the kernel tells the peers, whatever is under way

    def abandon(self) -> None:
        """In a forked child, where no thread sends."""
        self._open = False
        for sock in (*(s.sock for s in self._outgoing.values()), *(s.sock for s in self._incoming.values())):
            os.close(sock.detach())

    def _start(self, what: str, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> Pending:
        if not self._open:
            raise HorovodInternalError(self._lost or f"the {self.backend} group has been shut down")
        exchange = _Exchange()
        try:
            for peer, outgoing in self._outgoing.items():
                if sources[peer]:
                    exchange.sends.append((outgoing, outgoing.send(sources[peer])))
        except OSError as error:
            self._fail(error, what)
        exchange.receives = [(stream, targets[peer]) for peer, stream in self._incoming.items() if targets[peer]]
        self._to_receive.append(exchange)
        return exchange, what

    def _wait(self, work: Any, what: str) -> None:
        deadline = time.monotonic() + self._limit_s

        def look_around() -> None:
            self._guard()
            if time.monotonic() > deadline:
                raise HorovodInternalError(
                    f"waited {self._limit_s:g} s for the peers' part in {what} over {self.backend}"
                )

        # Bytes come in the order in which exchanges were started, so those before this one are received first.
        while not work.received:
            earliest = self._to_receive.popleft()
            for incoming, target in earliest.receives:
                incoming.receive(target, look_around)
            earliest.received = True
        for outgoing, number in work.sends:
            outgoing.wait(number, look_around)


class _Incoming:
    """What comes from one member, read by the thread that waits for it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        if self._encrypted:
            sock.settimeout(SLICE.total_seconds())
        else:
            # Not `settimeout`: one call of the kernel waits for all bytes, and returns what there is after a while.
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, SLICE.microseconds))

    def receive(self, target: memoryview, look_around: Callable[[], None]) -> None:
        flags = 0 if self._encrypted else socket.MSG_WAITALL
        while target:
            try:
                received = self.sock.recv_into(target, len(target), flags)
            except (BlockingIOError, TimeoutError):
                look_around()
                continue
            if not received:
                raise ConnectionResetError("a peer has closed its connection")
            target = target[received:]

    def close(self) -> None:
        _shut_down(self.sock)
        self.sock.close()


class _Outgoing:
    """What goes to one member: at once where the network takes it, otherwise from a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(None)
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._changed = threading.Condition()
        self._queue: deque[memoryview] = deque()  # the first one is being sent
        self._num_queued = self._num_sent = 0
        self._error: OSError | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def send(self, source: memoryview) -> int:
        """Begin to send; returns what `wait` takes. The memory must stay as it is until then."""
        with self._changed:
            if self._error is not None:
                raise self._error
            if not self._queue:
                source = source[self._send_now(source) :]
                if not source:
                    return self._num_sent
            self._queue.append(source)
            self._num_queued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hora-send", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return self._num_queued

    def wait(self, number: int, look_around: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if self._num_sent < number:
                    self._changed.wait(SLICE.total_seconds())
                if self._num_sent >= number:
                    return
                if self._error is not None:
                    raise self._error
            look_around()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        _shut_down(self.sock)
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self.sock.close()

    def _send_now(self, source: memoryview) -> int:
        """How much of it could be sent without waiting."""
        try:
            if not self._encrypted:
                return self.sock.send(source, socket.MSG_DONTWAIT)
            if len(source) > _SHORT_BYTES:
                return 0
            self.sock.settimeout(0.0)
            try:
                return self.sock.send(source)
            finally:
                self.sock.settimeout(None)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return 0

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                source = self._queue[0]
            try:
                self.sock.sendall(source)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._queue.popleft()
                self._num_sent += 1
                self._changed.notify_all()


def _shut_down(sock: socket.socket) -> None:
    """Wake who waits at either end."""
    with contextlib.suppress(OSError):  # the peer has gone already
        # Not the method of an encrypted socket, which would first forget that it is encrypted, under a sender's feet.
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def _view(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, without a copy."""
    array: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(array)


def _views(tensor: torch.Tensor, sizes: Sequence[int]) -> list[memoryview]:
    whole, views, at = _view(tensor), [], 0
    for size in sizes:
        views.append(whole[at : at + size])
        at += size
    return views


def _only(peer: int, view: memoryview, others: Sequence[memoryview]) -> list[memoryview]:
    """`view` for this peer, and what the others have for the others."""
    return [view if number == peer else other for number, other in enumerate(others)]
