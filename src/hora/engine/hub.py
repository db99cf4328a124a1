"""The hub: how the ranks of one world hear of one another, apart from tensors.

Every rank keeps one authenticated connection to rank 0: over a local socket inside rank 0's host, over TCP from other
hosts. It carries who leaves and why, who was lost (the connection ended without a goodbye), and, for process sets that
span hosts, announcements. Ranks of one host also fetch shared-memory descriptors from one another here; that a
descriptor arrives is the proof that two ranks share a host. Ranks of several hosts open the streams here that carry
tensors between them: past the same handshake, and then out of the hub's hands.

Each process has one `Server` for all of it, whose thread sleeps unless something happens. The runtime gives callbacks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence

from hora.engine.shm.segment import Segment
from hora.errors import HorovodInternalError
from hora.net.connection import Connection, Stream, connect
from hora.net.keys import RankKeys
from hora.net.server import Peer, Server
from hora.net.sockets import Where
from hora.net.wire import Header

__all__ = ["Hub", "HubEvents"]

log = logging.getLogger("hora")

_TICK_S = 1.0  # how often to look for stalls
_SILENCE_LIMIT_S = 8
_FETCH_SLICE_S = 0.5
_PART = struct.Struct(">II")  # a rank, and the length of what it announces


class HubEvents:
    """What the hub tells the runtime. All are called on the hub's thread and must not block."""

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


class Hub:
    """This rank's part of the hub: rank 0 is in the middle, the others hold a connection to it."""

    def __init__(self, rank: int, size: int, events: HubEvents) -> None:
        self.rank = rank
        self.size = size
        self.name = f"hora-{secrets.token_hex(16)}"
        self.goodbyes: set[int] = set()
        self._events = events
        self._links: dict[int, Peer] = {}  # rank 0's: to every other rank; theirs: to rank 0
        self._segments: dict[str, tuple[int, int]] = {}  # descriptor, readers still to come
        self._waiting_for_segment: list[tuple[str, Peer]] = []
        self._streams: dict[tuple[str, int], Stream] = {}  # opened to us, by key and rank, until taken
        self._streams_known: set[tuple[str, int]] = set()  # those too that were taken
        self._closed = False
        self._changed = threading.Condition()
        self._hopeless = ""
        self._announcements: dict[int, list[tuple[int, bytes]]] = {}  # rank 0's, per set, until the next round
        self._server = Server(self, name="hora-hub", silence_limit_s=_SILENCE_LIMIT_S, failed=self._on_failure)
        self._server.listen(self.name)

    # Setting up, called by the runtime in this order: start, offer and fetch, listen_tcp, join.

    def start(self, keys: RankKeys) -> None:
        """Begin to answer. `keys` are this rank's, in this world: who connects has proven which rank it is."""
        self._keys = keys
        self._server.start(keys.of)
        self._server.call(self._plan_tick)

    def offer(self, key: str, num_bytes: int, num_readers: int) -> Segment:
        """Make a segment that `num_readers` other ranks of this host will fetch."""
        segment = Segment.create(num_bytes)
        descriptor = segment.take_descriptor()
        if not num_readers:
            os.close(descriptor)
            return segment
        with self._changed:
            self._segments[key] = (descriptor, num_readers)  # ours until the last reader has it
        self._server.call(self._serve_segments)
        return segment

    def fetch(self, rank: int, name: str, key: str, *, limit_s: float, guard: Callable[[], None]) -> Segment:
        """Fetch the segment that this rank, listening at `name`, offers. OSError when it is not on this host.

        `guard` raises when waiting has become pointless: some rank, not only that one, may have ended the world.
        """
        deadline = time.monotonic() + limit_s
        with self._connect(rank, name, limit_s) as connection:
            connection.send({"want": "segment", "key": key})
            while time.monotonic() < deadline:
                guard()
                with contextlib.suppress(TimeoutError):
                    descriptor = connection.receive_descriptor(limit_s=_FETCH_SLICE_S)
                    if descriptor is None:
                        raise ConnectionError(f"no descriptor came for shared memory {key!r}")
                    return Segment.attach(descriptor)
        raise TimeoutError(f"waited {limit_s:g} s for shared memory {key!r} from a rank of this host")

    def listen_tcp(self, address: str) -> int:
        """Rank 0 listens at `address` for ranks of other hosts; returns the port."""
        return self._server.listen((address, 0))

    def join(self, where: Where, *, limit_s: float) -> None:
        """Connect to rank 0, at a local socket name or at a TCP address."""
        connection = self._connect(0, where, limit_s)
        connection.send({"want": "hub"})
        link = self._links[0] = self._server.peer_at(connection)
        link.number, link.name = 0, "rank 0"
        self._server.serve(link)

    def open_stream(self, rank: int, where: Where, key: str, *, limit_s: float) -> Stream:
        """A connection to this rank, listening at `where`, for bytes in this direction only, of which the hub knows nothing.

        The other rank finds it by `take_stream`, under the same key.
        """
        connection = self._connect(rank, where, limit_s)
        try:
            connection.send({"want": "stream", "key": key})
            connection.receive(limit_s=limit_s)  # the other's hub has let go of it: what follows is not read there
        except EOFError:
            connection.close()
            raise ConnectionError(f"rank {rank} at {where} did not take a stream for {key!r}") from None
        except BaseException:
            connection.close()
            raise
        return Stream(connection.sock, connection.sealer.records())

    def take_stream(self, key: str, rank: int, *, limit_s: float) -> Stream:
        """The stream that this rank opened to us."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or (key, rank) in self._streams, limit_s):
                raise TimeoutError(f"waited {limit_s:g} s for a stream of rank {rank} for {key!r}")
            if self._closed:
                raise ConnectionError("Horovod has been shut down")
            return self._streams.pop((key, rank))

    def _connect(self, rank: int, where: Where, limit_s: float) -> Connection:
        return connect(where, self._keys.towards(rank), timeout_s=limit_s, silence_limit_s=_SILENCE_LIMIT_S)

    def wait_for_all(self, *, limit_s: float) -> None:
        """Rank 0 waits until every rank has connected."""
        with self._changed:
            complete = self._changed.wait_for(lambda: self._hopeless or self._complete, limit_s)
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
        """Tell every rank that the world is broken, and through which rank."""
        self._broadcast({"t": "fault", "rank": rank, "text": text})

    def announce(self, process_set: int, data: bytes) -> None:
        """Send announcements of a set that spans hosts to every rank, in one order for all."""
        if self.rank == 0:
            self._relay(process_set, 0, data)
        else:
            self._links[0].send({"t": "announce", "set": process_set}, data)

    def wait_for_goodbyes(self, limit_s: float) -> None:
        """Give the others a moment to finish what was agreed. Returns early when all have said goodbye."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.goodbyes) >= self.size, limit_s)

    def close(self) -> None:
        """Stop the thread and close every socket and descriptor."""
        self._server.close()
        with self._changed:
            self._closed = True
            segments, self._segments = self._segments, {}
            streams, self._streams = self._streams, {}
            self._changed.notify_all()
        for descriptor, _ in segments.values():
            os.close(descriptor)
        for stream in streams.values():
            stream.sock.close()

    # In the server's thread.

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        """A rank said something. What goes wrong here is a mistake of ours, not a reason to show that rank out."""
        try:
            self._on_message(peer, header, payload)
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"a message of {peer.name} could not be dealt with: {error!r}") from error

    def closed(self, peer: Peer) -> None:
        rank = peer.number
        if self._links.get(rank) is not peer or rank in self.goodbyes:
            return
        self._goodbye(rank)
        self._broadcast({"t": "lost", "rank": rank})
        self._events.lost(rank)

    def _on_failure(self, error: Exception) -> None:
        text = f"the hub of rank {self.rank} failed: {error!r}; Horovod has been shut down"
        self._events.fault(self.rank, text)

    def _plan_tick(self) -> None:
        self._server.call_at(time.monotonic() + _TICK_S, self._tick)

    def _tick(self) -> None:
        self._plan_tick()
        self._events.tick()

    def _on_message(self, peer: Peer, header: Header, payload: bytes) -> None:
        kind = header.get("t")
        if peer.number < 0:
            self._introduce(peer, header)
        elif kind == "announce" and self.rank == 0:
            self._relay(int(header["set"]), peer.number, payload)
        elif kind == "round" and self.rank != 0:
            self._events.announced(int(header["set"]), _cut(payload, int(header["parts"])))
        else:
            self._on_news(peer, header)

    def _on_news(self, peer: Peer, header: Header) -> None:
        """How a rank fares. Rank 0 passes it on: a rank takes leave for itself only, and who is lost rank 0 sees itself."""
        kind, rank = header.get("t"), int(header.get("rank", -1))
        if self.rank == 0:
            if kind != "fault" and (kind != "leaving" or rank != peer.number):
                log.warning("%s may not say %r of rank %d", peer.name, kind, rank)
                return
            self._broadcast(header, skip=peer.number)
        if kind == "leaving":
            self._goodbye(rank)
            self._events.leaving(rank, str(header["why"]))
        elif kind == "lost":
            self._goodbye(rank)
            self._events.lost(rank)
        elif kind == "fault":
            self._events.fault(rank, str(header["text"]))

    def _introduce(self, peer: Peer, header: Header) -> None:
        if header.get("want") == "segment":
            self._waiting_for_segment.append((str(header["key"]), peer))
            self._serve_segments()
            return
        if header.get("want") == "stream":
            self._keep_stream(peer, (str(header["key"]), peer.speaker))
            return
        rank = peer.speaker
        if self.rank != 0 or not 0 < rank < self.size or rank in self._links:
            log.warning(
                "closed a connection from %s, which wanted to be rank %d: that place is taken", peer.where, rank
            )
            peer.close()
            return
        with self._changed:
            peer.number = rank
            peer.name = f"rank {peer.number}"
            self._links[peer.number] = peer
            self._changed.notify_all()
        self._server.call(self._send_rounds)

    def _keep_stream(self, peer: Peer, name: tuple[str, int]) -> None:
        peer.send({"t": "stream"})
        if name in self._streams_known or not peer.drained:  # no rank opens one twice
            peer.close()
            return
        assert peer.opener is not None, peer.name
        stream = Stream(self._server.release(peer), peer.opener.records())
        with self._changed:
            self._streams_known.add(name)
            self._streams[name] = stream
            self._changed.notify_all()

    def _serve_segments(self) -> None:
        waiting, self._waiting_for_segment = self._waiting_for_segment, []
        for key, peer in waiting:
            if not peer.open:
                continue
            with self._changed:
                found = self._segments.get(key)
                if found is None:
                    self._waiting_for_segment.append((key, peer))
                    continue
                descriptor, num_readers = found
                with contextlib.suppress(OSError):
                    peer.send_descriptor(descriptor)
                if num_readers == 1:
                    del self._segments[key]
                    os.close(descriptor)
                else:
                    self._segments[key] = (descriptor, num_readers - 1)
            peer.close()

    def _relay(self, process_set: int, rank: int, data: bytes) -> None:
        with self._changed:
            planned = bool(self._announcements)
            self._announcements.setdefault(process_set, []).append((rank, data))
        if not planned:
            self._server.call(self._send_rounds)

    @property
    def _complete(self) -> bool:
        """Whether every rank has connected to rank 0."""
        return len(self._links) == self.size - 1

    def _send_rounds(self) -> None:
        # What came in together goes out as one round, so that it can be fused. Only rank 0's server thread sends rounds:
        # all members see them in one order. Not before all have connected: the last one must not miss a round.
        if not self._complete:
            return
        with self._changed:
            rounds, self._announcements = self._announcements, {}
        for process_set, parts in rounds.items():
            header = {"t": "round", "set": process_set, "parts": len(parts)}
            self._broadcast(header, _joined(parts))
            self._events.announced(process_set, parts)

    def _broadcast(self, header: Header, payload: bytes = b"", *, skip: int | None = None) -> None:
        for rank, link in list(self._links.items()):
            if rank != skip:
                link.send(header, payload)

    def _goodbye(self, rank: int) -> None:
        with self._changed:
            self.goodbyes.add(rank)
            self._changed.notify_all()


def _joined(parts: Sequence[tuple[int, bytes]]) -> bytes:
    """What ranks have announced, behind who they are: a header has no room for thousands of them."""
    return b"".join([*(_PART.pack(rank, len(data)) for rank, data in parts), *(data for _, data in parts)])


def _cut(payload: bytes, num_parts: int) -> list[tuple[int, bytes]]:
    at = num_parts * _PART.size
    pieces = []
    for rank, length in _PART.iter_unpack(payload[:at]):
        pieces.append((rank, payload[at : at + length]))
        at += length
    return pieces
