"""The group between hosts: CPU tensors over TCP connections that only ranks of this world can open.

Every member has two connections with every other one, one per direction, created by the control tree: the other end has
proven to hold the world's secret, and between hosts the data is encrypted (`Records`) unless the user disables it. A
connection carries only the tensors' bytes. Members start the same exchanges in the same order, so both ends know what
comes next and how long it is.

No thread sends or receives: the one that starts an exchange passes the kernel what it accepts at once, and the one that
waits for it moves the rest of everything in flight, in both directions, directly between the tensors' memory and the
kernel. Meanwhile the kernel buffers received data and continues sending. The engine's factory creates these groups. The
native part moves the same records, encrypted with the libcrypto that Python is linked with.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import select
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hora.engine.shm.native import described
from hora.engine.transport.base import Membership
from hora.engine.transport.group import SLICE, PeerGroup, Work, limited
from hora.engine.transport.packing import copy, spread
from hora.errors import HorovodInternalError
from hora.net import sockets
from hora.net.noise import Records
from hora.net.wire import Stream

# Smaller tensors go from the root directly to all members; larger ones are forwarded in parts.
_DIRECT_BYTES = 64 * 2**10
_TIME = struct.Struct("ll")

_FUNCTIONS = ("EVP_CipherInit_ex", "EVP_CipherUpdate", "EVP_CipherFinal_ex", "EVP_CIPHER_CTX_ctrl")


@described("records")
class RecordsOfOneDirection(ctypes.Structure):
    """The cipher of one direction, and the number of its next record."""


@functools.lru_cache(maxsize=1)
def _libcrypto() -> Any:
    try:
        # A module that is linked with it: symbols are looked up in all its dependencies.
        found = ctypes.CDLL(importlib.import_module("_hashlib").__file__)
        for name in (*_FUNCTIONS, "EVP_aes_128_gcm", "EVP_CIPHER_CTX_new", "EVP_CIPHER_CTX_free"):
            getattr(found, name)
    except (ImportError, OSError, AttributeError):
        return None
    found.EVP_CIPHER_CTX_new.restype = found.EVP_aes_128_gcm.restype = ctypes.c_void_p
    found.EVP_CIPHER_CTX_free.argtypes = (ctypes.c_void_p,)
    found.EVP_CIPHER_CTX_free.restype = None
    found.EVP_CipherInit_ex.argtypes = (*(ctypes.c_void_p,) * 3, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
    return found


def encrypts_natively() -> bool:
    """Return whether this Python has a usable libcrypto."""
    return _libcrypto() is not None


class _NativeRecords:
    """Seals or opens records for the native part; between its jobs either this or `records` may be used."""

    def __init__(self, records: Records, *, seals: bool) -> None:
        self._records, self._seals, self._key = records, seals, b""
        library = _libcrypto()
        context = library.EVP_CIPHER_CTX_new()
        if not context:
            raise MemoryError("no room for a cipher")
        weakref.finalize(self, library.EVP_CIPHER_CTX_free, context)
        self._room = ctypes.create_string_buffer(Records.most_bytes + Records.tag_bytes)
        functions = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in _FUNCTIONS]
        self._description = RecordsOfOneDirection(context, *functions, ctypes.addressof(self._room), 0)

    def lend(self) -> RecordsOfOneDirection:
        """Lend the records to the native part. Both ends of a connection do the same."""
        key, number = self._records.lend()
        if key != self._key:
            library, context = _libcrypto(), self._description.context
            if library.EVP_CipherInit_ex(context, library.EVP_aes_128_gcm(), None, key, None, int(self._seals)) != 1:
                raise RuntimeError("libcrypto does not take a key for AES-GCM")
            self._key = key
        self._description.number = number
        return self._description

    def reclaim(self) -> None:
        """Reclaim the records from the native part."""
        self._records.reclaim(self._description.number)


# A socket, and its records if it is encrypted.
Lent = tuple[int, RecordsOfOneDirection | None]


@dataclass(frozen=True)
class Streams:
    """Connections to and from the other members, by member. Sockets block."""

    outgoing: Mapping[int, Stream]
    incoming: Mapping[int, Stream]


@dataclass
class _Exchange:
    """An exchange in flight: the bytes that each stream must have moved, since it was opened, until it is complete."""

    tensors: Sequence[torch.Tensor]  # the tensors whose memory it uses
    receives: list[tuple[Incoming, int]] = field(default_factory=list)
    sends: list[tuple[Outgoing, int]] = field(default_factory=list)


class StreamGroup(PeerGroup):
    """See `PeerGroup`."""

    backend = "tcp"

    def __init__(self, streams: Streams, membership: Membership) -> None:
        super().__init__(membership)
        member, num_members, _ = membership
        # Each member starts with the member after itself, so that not all of them send to the same one first.
        after = [(member + distance) % num_members for distance in range(1, num_members)]
        self._outgoing = {peer: Outgoing(streams.outgoing[peer]) for peer in after}
        self._incoming = {peer: Incoming(streams.incoming[peer]) for peer in reversed(after)}
        self._open = True
        sockets.abandon_in_children(self)

    def start_alltoall(
        self, output: torch.Tensor, input: torch.Tensor, receive_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Work:
        return self.start_exchange(output.split(list(receive_counts)), input.split(list(send_counts)))

    def start_exchange(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Work:
        """Start an alltoall of separate tensors, by member."""
        copy(sources[self.member], targets[self.member])
        return self._start("alltoall", list(map(_view, sources)), list(map(_view, targets)), *sources, *targets)

    def start_allgather(self, output: torch.Tensor, input: torch.Tensor, counts: Sequence[int]) -> Work:
        parts = output.split(list(counts))
        if parts[self.member].data_ptr() != input.data_ptr():
            copy(input, parts[self.member])
        sources = [_view(input)] * self.num_members
        return self._start("allgather", sources, [_view(part) for part in parts], input, output)

    def start_broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        nothing: list[memoryview] = [memoryview(b"")] * self.num_members
        if self.num_members == 2 or tensor.nbytes <= _DIRECT_BYTES:
            if self.member == root:
                return self._start("broadcast", [_view(tensor)] * self.num_members, nothing, tensor)
            return self._start("broadcast", nothing, _only(root, _view(tensor), nothing), tensor)
        # The root sends every member its part, and all send theirs to all: no member sends everything to each of the
        # others.
        parts = [_view(part) for part in tensor.split(spread(tensor.numel(), self.num_members))]
        mine = parts[self.member]
        if self.member == root:
            self.finish(self._start("broadcast", parts, nothing, tensor))
        else:
            self.finish(self._start("broadcast", nothing, _only(root, mine, nothing), tensor))
        to_all = [mine] * self.num_members
        if self.member == root:
            return self._start("broadcast", to_all, nothing, tensor)
        return self._start("broadcast", _only(root, memoryview(b""), to_all), parts, tensor)

    @contextlib.contextmanager
    def lent(self) -> Iterator[tuple[dict[int, Lent], dict[int, Lent]]]:
        """Yield the outgoing and the incoming streams, by member: raw sockets for a caller that does its own I/O.

        Nothing else is in flight meanwhile. The caller's errors are treated as this group's own.
        """
        if not self._open:
            raise HorovodInternalError(self._lost or f"the {self.backend} group has been shut down")
        try:
            yield (
                {peer: end.lend() for peer, end in self._outgoing.items()},
                {peer: end.lend() for peer, end in self._incoming.items()},
            )
            for end in self._ends():
                end.reclaim()
        except (RuntimeError, OSError) as error:
            self._fail(error, "allreduce")

    def close(self) -> None:
        self._open = False
        sockets.forget(self)
        for end in self._ends():
            end.close()

    def abandon(self) -> None:
        """Close the sockets in a forked child."""
        self._open = False
        for end in self._ends():
            os.close(end.sock.detach())

    def _ends(self) -> list[_End]:
        return [*self._outgoing.values(), *self._incoming.values()]

    def _start(
        self, what: str, sources: Sequence[memoryview], targets: Sequence[memoryview], *tensors: torch.Tensor
    ) -> Work:
        if not self._open:
            raise HorovodInternalError(self._lost or f"the {self.backend} group has been shut down")
        exchange = _Exchange(tensors)
        for peer, incoming in self._incoming.items():
            if targets[peer]:
                exchange.receives.append((incoming, incoming.add(targets[peer])))
        for peer, outgoing in self._outgoing.items():
            if sources[peer]:
                exchange.sends.append((outgoing, outgoing.add(sources[peer])))
        try:
            for outgoing, _ in exchange.sends:
                outgoing.move()
        except OSError as error:
            self._fail(error, what)
        return exchange, what

    def _wait(self, work: Any, what: str) -> None:
        look_around = limited(self._check_alive, f"the peers' part in {what} over {self.backend}")
        while any(stream.num_moved < end for stream, end in work.sends):
            self._move(look_around)
        for incoming, end in work.receives:
            # Unsent data must not wait: the peer may not read before it has received it.
            while incoming.num_moved < end and any(outgoing.queue for outgoing in self._outgoing.values()):
                self._move(look_around)
            incoming.receive(end, look_around)

    def _move(self, look_around: Callable[[], None]) -> None:
        """Wait until some stream can move bytes, and move them."""
        waiting = [end for end in self._ends() if end.queue]
        before = sum(stream.num_moved for stream in waiting)
        for stream in waiting:
            stream.move()
        if sum(stream.num_moved for stream in waiting) == before and not poll(waiting, SLICE.total_seconds() * 1000):
            look_around()


class _End:
    """This member's end of a stream. Memory to be moved must not change until then."""

    event = 0

    def __init__(self, stream: Stream) -> None:
        self.sock, self._records = stream.sock, stream.records
        self.sock.settimeout(None)
        self.queue: deque[memoryview] = deque()
        self.num_moved = 0
        self._num_added = 0
        # Buffer for the record that is being moved.
        self._room = memoryview(bytearray(Records.most_bytes + Records.tag_bytes if self._records is not None else 0))

    def add(self, memory: memoryview) -> int:
        """Queue memory to be moved after everything before; returns the value of `num_moved` at its end."""
        self.queue.append(memory)
        self._num_added += len(memory)
        return self._num_added

    def move(self) -> None:
        """Move what can be moved without waiting."""
        while self.queue:
            memory = self.queue[0]
            try:
                count = self._move_some(memory, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._moved(memory, count)
            if count < len(memory) and (self._records is None or not count):
                return

    def move_bytes(self, address: int, num_bytes: int) -> int:
        """Move what can be moved of these bytes, the only ones queued, without waiting; returns their number."""
        before = self.num_moved
        if not self.queue:
            self.add(view_of(address, num_bytes))
        self.move()
        return self.num_moved - before

    def lend(self) -> Lent:
        assert not self.queue, "something is under way"
        return self.sock.fileno(), None if self._native is None else self._native.lend()

    def reclaim(self) -> None:
        if self._native is not None:
            self._native.reclaim()

    @functools.cached_property
    def _native(self) -> _NativeRecords | None:
        """The records for the native part; None if the stream is not encrypted."""
        return None if self._records is None else _NativeRecords(self._records, seals=self.event == select.POLLOUT)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the peer is gone already
            self.sock.shutdown(socket.SHUT_RDWR)  # wakes waiters at both ends
        self.sock.close()

    def _moved(self, memory: memoryview, count: int) -> None:
        self.num_moved += count
        if count == len(memory):
            self.queue.popleft()
        elif count:
            self.queue[0] = memory[count:]

    def _move_some(self, memory: memoryview, flags: int) -> int:
        """Return how many of its bytes have been moved: only whole records count."""
        raise NotImplementedError


class Outgoing(_End):
    """The sending end of a stream."""

    event = select.POLLOUT

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._unsent = self._room[:0]
        self._length = 0  # of the data in the record

    def _move_some(self, memory: memoryview, flags: int) -> int:
        if self._records is None:
            return self.sock.send(memory, flags)
        if not self._unsent:
            part = memory[: Records.most_bytes]
            self._length = len(part)
            self._unsent = self._room[: self._length + Records.tag_bytes]
            self._records.seal(part, self._unsent)
        self._unsent = self._unsent[self.sock.send(self._unsent, flags) :]
        return 0 if self._unsent else self._length


class Incoming(_End):
    """The receiving end of a stream."""

    event = select.POLLIN

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._num_received = 0  # of the record
        # One system call waits for all bytes, and returns what there is after a while.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(0, SLICE.microseconds))

    def receive(self, end: int, look_around: Callable[[], None]) -> None:
        """Wait until this many bytes have arrived."""
        while self.num_moved < end:
            memory = self.queue[0]
            try:
                self._moved(memory, self._move_some(memory, socket.MSG_WAITALL))
            except BlockingIOError:
                look_around()

    def _move_some(self, memory: memoryview, flags: int) -> int:
        if self._records is None:
            return self._receive(memory, flags)
        part = memory[: Records.most_bytes]
        record = self._room[: len(part) + Records.tag_bytes]
        self._num_received += self._receive(record[self._num_received :], flags)
        if self._num_received < len(record):
            return 0
        self._num_received = 0
        self._records.open(record, part)
        return len(part)

    def _receive(self, memory: memoryview, flags: int) -> int:
        count = self.sock.recv_into(memory, len(memory), flags)
        if not count:
            raise ConnectionResetError("a peer has closed its connection")
        return count


def poll(ends: Sequence[_End], limit_ms: float) -> bool:
    """Wait until one of them can continue, at most for this long."""
    sockets_of_ends = select.poll()
    for end in ends:
        sockets_of_ends.register(end.sock, end.event)
    return bool(sockets_of_ends.poll(limit_ms))


def view_of(address: int, num_bytes: int) -> memoryview:
    """Return memory without a copy and without a reference to its owner."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _view(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's bytes; an exchange keeps its tensors."""
    return view_of(tensor.data_ptr(), tensor.nbytes)


def _only(peer: int, view: memoryview, others: Sequence[memoryview]) -> list[memoryview]:
    """Return `view` for this peer, and the others' own views for the others."""
    return [view if number == peer else other for number, other in enumerate(others)]
