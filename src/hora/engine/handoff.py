"""The handoff of shared memory and streams between ranks, beside the control tree's links."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable

from hora.engine.shm.segment import Segment
from hora.net.server import Peer, Server
from hora.net.sockets import Where
from hora.net.wire import Connection, Stream

_FETCH_SLICE_S = 0.5


class Handoff:
    """Passes descriptors of shared memory and streams for tensors to other ranks, over separate connections.

    Receiving a descriptor proves that two ranks share a host. A stream begins with the same handshake as a link, and
    then belongs to the caller: `connect(rank, where, limit_s)` opens it.
    """

    def __init__(self, server: Server, connect: Callable[[int, Where, float], Connection]) -> None:
        self._server, self._connect = server, connect
        self._segments: dict[str, tuple[int, int]] = {}  # descriptor, readers that have not fetched it yet
        self._waiting_for_segment: list[tuple[str, Peer]] = []
        self._fetching: dict[int, list[Connection]] = {}  # to ranks that offered segments, for the next one
        self._streams: dict[tuple[str, int], Stream | None] = {}  # opened to us, by key and rank; None once taken
        self._closed = False
        self._changed = threading.Condition()

    def offer(self, key: str, num_bytes: int, num_readers: int) -> Segment:
        """Create a segment that `num_readers` other ranks of this host will fetch."""
        segment = Segment.create(num_bytes)
        descriptor, segment.descriptor = segment.descriptor, None
        assert descriptor is not None, "it is of its creator"
        if not num_readers:
            os.close(descriptor)
            return segment
        with self._changed:
            self._segments[key] = (descriptor, num_readers)  # ours until the last reader has it
        self._server.call(self._serve_segments)
        return segment

    def fetch(self, rank: int, name: str, key: str, *, limit_s: float, check_alive: Callable[[], None]) -> Segment:
        """Fetch the segment that this rank, listening at `name`, offers. Raises OSError if it is not on this host.

        `check_alive` raises if waiting has become pointless: any rank may have ended the world.
        """
        deadline = time.monotonic() + limit_s
        with self._changed:
            idle = self._fetching.setdefault(rank, [])
            connection = idle.pop() if idle else None
        connection = connection or self._connect(rank, name, limit_s)
        try:
            connection.send({"want": "segment", "key": key})
            descriptor = None
            while descriptor is None:
                check_alive()
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"waited {limit_s:g} s for shared memory {key!r} from a rank of this host")
                with contextlib.suppress(TimeoutError):
                    descriptor = connection.receive_descriptor(limit_s=_FETCH_SLICE_S)
                    if descriptor is None:
                        raise ConnectionError(f"no descriptor came for shared memory {key!r}")
        except BaseException:
            connection.close()
            raise
        with self._changed:
            idle.append(connection)  # the next segment needs no handshake
        return Segment.attach(descriptor)

    def open_stream(self, rank: int, where: Where, key: str, *, limit_s: float) -> Stream:
        """Open a one-way connection to this rank, listening at `where`; it calls `accept_stream`."""
        connection = self._connect(rank, where, limit_s)
        try:
            connection.send({"want": "stream", "key": key})
            connection.receive(limit_s=limit_s)  # the other control tree has released it: it does not read what follows
        except EOFError:
            connection.close()
            raise ConnectionError(f"rank {rank} at {where} did not take a stream for {key!r}") from None
        except BaseException:
            connection.close()
            raise
        return Stream(connection.sock, connection.sealer.records())

    def accept_stream(self, key: str, rank: int, *, limit_s: float) -> Stream:
        """Return the stream that this rank opened to us."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._streams.get((key, rank)) is not None, limit_s)
            if self._closed:
                raise ConnectionError("Horovod has been shut down")
            stream = self._streams.get((key, rank))
            if stream is None:
                raise TimeoutError(f"waited {limit_s:g} s for a stream of rank {rank} for {key!r}")
            self._streams[key, rank] = None
            return stream

    def close(self) -> None:
        """Close everything that was not taken."""
        with self._changed:
            self._closed = True
            segments, self._segments = self._segments, {}
            streams, self._streams = self._streams, {}
            fetching, self._fetching = self._fetching, {}
            self._changed.notify_all()
        for connection in [one for idle in fetching.values() for one in idle]:
            connection.close()
        for descriptor, _ in segments.values():
            os.close(descriptor)
        for stream in filter(None, streams.values()):
            stream.sock.close()

    # In the server's thread.

    def segment_wanted(self, peer: Peer, key: str) -> None:
        """Handle a request for this segment, which may not have been offered yet."""
        with self._changed:
            descriptor, num_readers = self._segments.get(key, (-1, 0))
            if not num_readers:
                self._waiting_for_segment.append((key, peer))
                return
            with contextlib.suppress(OSError):
                peer.send_descriptor(descriptor)
            if num_readers > 1:
                self._segments[key] = descriptor, num_readers - 1
            else:
                del self._segments[key]
                os.close(descriptor)

    def keep_stream(self, peer: Peer, name: tuple[str, int]) -> None:
        """Handle a stream that a rank has opened."""
        peer.send({"t": "stream"})
        if name in self._streams or not peer.drained:  # no rank opens one twice
            peer.close()
            return
        assert peer.opener is not None, peer.name
        stream = Stream(self._server.release(peer), peer.opener.records())
        with self._changed:
            self._streams[name] = stream
            self._changed.notify_all()

    def _serve_segments(self) -> None:
        waiting, self._waiting_for_segment = self._waiting_for_segment, []
        for key, peer in waiting:
            if peer.open:
                self.segment_wanted(peer, key)
